"""What stays in float32 where a device's hint says otherwise: everything but matrix products, attention, RoPE and RMS.

A hint of BF16 or F16 is meant for products. The CPU plugin (2026.4.1) also applies it to whatever stands before one:
the arithmetic that rounds to F16 or to a block type, which then gives zeros or other quants; angles, in which BF16
loses the position from 257 on, where they do not feed its own RoPE; values on their way into a variable. OpenVINO marks
what may not be converted with an attribute that Python cannot make, but can read from a model's text and hand on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino.opset15 as o
from openvino import Node, Type

from .nodes import Value

MARK = "DisablePrecisionConversion_0"
"""Key of the attribute among a node's runtime information."""
PRODUCTS = frozenset({"MatMul", "ScaledDotProductAttention"})
LEAVES = frozenset({"Constant", "Parameter", "Result"})
MOVES = frozenset({
    "Broadcast", "Concat", "Gather", "Reshape", "ScatterUpdate", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    "VariadicSplit",
})  # fmt: skip
"""What only moves values: those that a product rounds anyway may be rounded before, and move as half as many bytes."""
BETWEEN = frozenset({
    "Add", "Exp", "Maximum", "Multiply", "Power", "ReduceMax", "ReduceSum", "Softmax", "Swish", "Tanh",
})  # fmt: skip
"""What may stand between two products, as a softmax or a gate: it takes rounded values, and its own are rounded."""

_TEXT = b"""<?xml version="1.0"?><net name="m" version="11"><layers>
<layer id="0" name="p" type="Parameter" version="opset1"><rt_info>
<attribute name="DisablePrecisionConversion" version="0" value="dynamic:f16"/></rt_info>
<data shape="1" element_type="f32"/><output><port id="0" precision="FP32"><dim>1</dim></port></output></layer>
<layer id="1" name="r" type="Result" version="opset1">
<input><port id="0" precision="FP32"><dim>1</dim></port></input></layer></layers>
<edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/></edges></net>"""
"""A model of one marked node. The CPU plugin heeds this mark for BF16 as well, and no other."""


def keep(core: Any, model: Any) -> bool:  # noqa: ANN401  # an openvino.Core, an openvino.Model
    """Mark what `model` computes in float32 from its inputs; what it makes of constants alone belongs to a product.

    Returns:
        Whether it has products. Then the CPU plugin must fuse elementwise kernels: it makes new nodes of marked ones
        (`a + -1 * b` becomes Subtract, and that a sum again), which keep to the mark only inside a kernel that has it.
    """
    stored = _stored(model.get_ordered_ops())
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind in SPLIT and node.get_output_element_type(0) == Type.f32:
            a, b = node.input_values()
            if kind == "Divide" and b.get_node().get_type_name() == "Sqrt":
                if node.get_name() not in stored:
                    continue  # or RMS would no longer be recognised
                b = o.maximum(b, o.constant(np.float32(0.0))).output(0)  # nor is it to be
            node.output(0).replace(SPLIT[kind](a, b).output(0))
    mark = core.read_model(_TEXT, b"").get_parameters()[0].get_rt_info()[MARK]
    nodes = model.get_ordered_ops()
    constant = _constant(nodes)
    spared = constant | _rounded(nodes, _after(nodes, constant))
    for node in nodes:
        if node.get_name() not in spared and node.get_type_name() not in LEAVES and _floats(node):
            node.set_rt_info(mark, MARK)
    return any(node.get_type_name() in PRODUCTS for node in nodes)


def _constant(nodes: list[Node]) -> set[str]:
    """Names of what depends on constants alone."""
    found: set[str] = set()
    for node in nodes:
        given = node.input_values()
        own = given and node.get_type_name() != "ReadValue" and all(v.get_node().get_name() in found for v in given)
        if own or node.get_type_name() == "Constant":
            found.add(node.get_name())
    return found


def _after(nodes: list[Node], constant: set[str]) -> set[str]:
    """Names of products, and of what depends on their values, constants and masks as they came."""
    given, found = set(constant), set[str]()
    for node in nodes:
        kind, name = node.get_type_name(), node.get_name()
        of = {v.get_node().get_name() for v in node.input_values()}
        if kind in PRODUCTS or (kind in BETWEEN | MOVES and of & found and of <= found | given):
            found.add(name)
        elif kind == "Parameter" or (kind in MOVES | {"Convert"} and of <= given):
            given.add(name)
    return found


def _stored(nodes: list[Node]) -> set[str]:
    """Names of what goes into a variable without a product between.

    An RMS layer has no mark, and gives the hint's type unless a result of the model is made of it: here there is none.
    """
    found: set[str] = set()
    for node in reversed(nodes):
        to = [i.get_node() for x in node.outputs() for i in x.get_target_inputs()]
        on = {n.get_name() for n in to if n.get_type_name() not in PRODUCTS}
        if not found.isdisjoint(on) or any(n.get_type_name() == "Assign" for n in to):
            found.add(node.get_name())
    return found


def _rounded(nodes: list[Node], after: set[str]) -> set[str]:
    """Names of products and of what feeds nothing else: moves, and what stands between two of them (`after`).

    Also of the variables inside a stateful kernel.
    """
    logs = {n.input_value(0).get_node() for n in nodes if n.get_type_name() == "Gather"}
    own = {_variable(n) for n in logs if n.get_type_name() == "ReadValue"}
    found: set[str] = set()
    for node in reversed(nodes):
        kind = node.get_type_name()
        to = [i.get_node().get_name() for x in node.outputs() for i in x.get_target_inputs()]
        may = kind in MOVES or (kind in BETWEEN and node.get_name() in after)
        kept = kind in {"ReadValue", "Assign"} and _variable(node) in own
        if kind in PRODUCTS or kept or (may and to and found.issuperset(to)):
            found.add(node.get_name())
    return found


def _variable(node: Node) -> str:
    return str(node.get_attributes()["variable_id"])


def _subtract(a: Value, b: Value) -> Node:
    return o.add(a, o.multiply(b, o.constant(np.float32(-1.0))))


def _divide(a: Value, b: Value) -> Node:
    return o.multiply(a, o.power(b, o.constant(np.float32(-1.0))))


SPLIT: dict[str, Callable[[Value, Value], Node]] = {"Subtract": _subtract, "Divide": _divide}
"""What the plugin would write in these operations by itself, and forget the mark: type -> the same with them."""


def _floats(node: Node) -> bool:
    return any(x.get_element_type() == Type.f32 for x in (*node.inputs(), *node.outputs()))
