"""Changes to an emitted model before it runs: float32 marks, or interpretation.

`mark_float32` is for `precision=default`: a hint of BF16 or F16 is meant for matrix products, attention, RoPE and RMS.
The CPU plugin (2026.4.1) also applies it to nodes before one: the arithmetic that rounds to F16 or to a block type,
which then gives zeros or other quants; angles that do not feed its own RoPE, in which BF16 loses positions from 257 on;
values that are stored in a variable. OpenVINO marks nodes that must not be converted with an attribute. Python cannot
create it, but can read it from a model's text and attach it to other nodes. Everything is marked except products and
what lies between them:

    weights --- Convert ---+                    mask             V, moved
    constant: folded       |                     |                  |
    Add --- Reshape --- MatMul --- Multiply --- Add --- Softmax --- MatMul --- Add
    marked  moves into  product    between: from products and       product    marked
            a product              inputs, read by these only

    positions --- Multiply --- Cos --- Multiply --- Add             all marked: angles

`Whole` compiles unconnected parts as two models at the same time: a batch of ops is many small graphs, and OpenVINO
compiles a model in one thread, which is most of what a batch costs.

`Interpreted` is for stage `translate`: it runs a model by `Model.evaluate`, OpenVINO's reference of every operation. No
plugin, kernel or fusion is involved, so a wrong value here is the translation's (or the binding's), and one that is
wrong only when compiled is a kernel's or a fusion's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import openvino.opset15 as o
from openvino import Model, Node, PartialShape, Shape, Type
from openvino import Tensor as OvTensor
from openvino.op.util import Variable as ModelVariable
from openvino.op.util import VariableInfo

from conformance.ggml.errors import BackendError

from .nodes import Constants, Value, ancestors, windows

# -- marks that keep float32 ------------------------------------------------------------------------------------------
MARK = "DisablePrecisionConversion_0"
"""Key of the attribute among a node's runtime information."""
PRODUCTS = frozenset({"MatMul", "ScaledDotProductAttention"})
LEAVES = frozenset({"Constant", "Parameter", "Result"})
MOVES = frozenset({
    "Broadcast", "Concat", "Gather", "Reshape", "ScatterUpdate", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    "VariadicSplit",
})  # fmt: skip
"""Types that only move values, so these may be rounded before a product.

This moves half as many bytes."""
BETWEEN = frozenset({
    "Add", "Exp", "Maximum", "Multiply", "Power", "ReduceMax", "ReduceSum", "Softmax", "Swish", "Tanh",
})  # fmt: skip
"""Types that may be between two products, as in a softmax or a gate."""
_TEXT = b"""<?xml version="1.0"?><net name="m" version="11"><layers>
<layer id="0" name="p" type="Parameter" version="opset1"><rt_info>
<attribute name="DisablePrecisionConversion" version="0" value="dynamic:f16"/></rt_info>
<data shape="1" element_type="f32"/><output><port id="0" precision="FP32"><dim>1</dim></port></output></layer>
<layer id="1" name="r" type="Result" version="opset1">
<input><port id="0" precision="FP32"><dim>1</dim></port></input></layer></layers>
<edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/></edges></net>"""
"""A model with one marked node.

The CPU plugin respects this mark for BF16 as well, and no other."""


def mark_float32(core: Any, model: Any) -> bool:  # noqa: ANN401  # an openvino.Core, an openvino.Model
    """Mark float32 nodes of `model` that depend on inputs, except products and nodes between.

    Returns True if it has products. If so, the CPU plugin must fuse elementwise kernels: it replaces marked nodes by
    new ones (`a + -1 * b` becomes Subtract, and that a sum again), which respect the mark only inside a kernel that has
    it.
    """
    stored = _stored(model.get_ordered_ops())
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind in SPLIT and node.get_output_element_type(0) == Type.f32:
            a, b = node.input_values()
            if kind == "Divide" and b.get_node().get_type_name() == "Sqrt":
                if node.get_name() not in stored:
                    continue  # else RMS would no longer be recognised
                b = o.maximum(b, _f32(0.0)).output(0)  # prevents recognition as RMS
            node.output(0).replace(SPLIT[kind](a, b).output(0))
    mark = core.read_model(_TEXT, b"").get_parameters()[0].get_rt_info()[MARK]
    nodes = model.get_ordered_ops()
    constants = _constants(nodes)
    unmarked = constants | _rounded(nodes, _computed_from_products(nodes, constants))
    for node in nodes:
        if node.get_name() not in unmarked and node.get_type_name() not in LEAVES and _floats(node):
            node.set_rt_info(mark, MARK)
    return any(node.get_type_name() in PRODUCTS for node in nodes)


def _constants(nodes: list[Node]) -> set[str]:
    """Return the names of nodes that depend on constants only, which are folded first."""
    names: set[str] = set()
    for node in nodes:
        sources = _sources(node)
        folded = sources and node.get_type_name() != "ReadValue" and sources <= names
        if folded or node.get_type_name() == "Constant":
            names.add(node.get_name())
    return names


def _computed_from_products(nodes: list[Node], constants: set[str]) -> set[str]:
    """Return names of products, and of nodes that depend only on these, constants and inputs.

    One pass in topological order puts a node into one of three classes, by its kind and the classes of its sources:

        inputs      parameter, constant; MOVES or Convert of inputs
        products    PRODUCTS; BETWEEN or MOVES of products and inputs, at least one of them a product
        neither     all others, such as angles, and what depends on them

    A mask is an input that is added to a product, so the sum is of the class of products. An angle is not: Cos is in
    neither table, so the Multiply of an angle keeps float32, even if its other source is a product.
    """
    inputs, products = set(constants), set[str]()
    for node in nodes:
        kind, name, sources = node.get_type_name(), node.get_name(), _sources(node)
        between = kind in BETWEEN | MOVES and bool(sources & products) and sources <= products | inputs
        if kind in PRODUCTS or between:
            products.add(name)
        elif kind == "Parameter" or (kind in MOVES | {"Convert"} and sources <= inputs):
            inputs.add(name)
    return products


def _sources(node: Node) -> set[str]:
    """Return the names of the nodes that `node` reads."""
    return {v.get_node().get_name() for v in node.input_values()}


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read `node`."""
    return [i.get_node() for x in node.outputs() for i in x.get_target_inputs()]


def _stored(nodes: list[Node]) -> set[str]:
    """Return the names of nodes that reach a variable without a product in between.

    An RMS layer has no mark; it returns the hint's type unless a result of the model depends on it. Here none does.
    """
    names: set[str] = set()
    for node in reversed(nodes):
        readers = _readers(node)
        through = {n.get_name() for n in readers if n.get_type_name() not in PRODUCTS}
        if not names.isdisjoint(through) or any(n.get_type_name() == "Assign" for n in readers):
            names.add(node.get_name())
    return names


def _rounded(nodes: list[Node], from_products: set[str]) -> set[str]:
    """Return names of the nodes that may compute in the hint's type.

    In reverse order, a node is one of them if it is

        a product
        or the ReadValue or Assign of a log, which belongs to the attention kernel
        or MOVES, or BETWEEN in `from_products`, and all its readers are ones

    so a value that is also stored, returned or read by an unmarked kind keeps float32.
    """
    logs = {n.input_value(0).get_node() for n in nodes if n.get_type_name() == "Gather"}
    log_variables = {_variable(n) for n in logs if n.get_type_name() == "ReadValue"}
    here = {n.get_name() for n in nodes}  # a value may also have readers that did not become part of the model
    names: set[str] = set()
    for node in reversed(nodes):
        kind, name = node.get_type_name(), node.get_name()
        readers = {n.get_name() for n in _readers(node)} & here
        may = kind in MOVES or (kind in BETWEEN and name in from_products)
        of_log = kind in {"ReadValue", "Assign"} and _variable(node) in log_variables
        if kind in PRODUCTS or of_log or (may and readers and readers <= names):
            names.add(name)
    return names


def _variable(node: Node) -> str:
    return str(node.get_attributes()["variable_id"])


SPLIT: dict[str, Callable[[Value, Value], Node]] = {
    "Subtract": lambda a, b: o.add(a, o.multiply(b, _f32(-1.0))),
    "Divide": lambda a, b: o.multiply(a, o.power(b, _f32(-1.0))),
}
"""Operations that the plugin rewrites, losing the mark: type -> its own form of them."""


def _floats(node: Node) -> bool:
    return any(x.get_element_type() == Type.f32 for x in (*node.inputs(), *node.outputs()))


# -- weights of 16-bit floats ------------------------------------------------------------------------------------------
def language_model() -> Node:
    """Return a sink that makes a model a language model for the CPU plugin (2026.4.1).

    Such a model has attention and a variable. In such a model the plugin's product reads F16 and BF16 weights as they
    are and widens them on the way. In other models it packs a float32 copy of each weight, with twice as many bytes to
    store and to read per token. The attention has constant operands and is folded away; the remaining nodes assign one
    constant.
    """
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = PartialShape([1]), Type.f32, "language model"
    none = o.constant(np.zeros((1, 1, 1, 1), np.float32))
    attention = o.scaled_dot_product_attention(none, none, none, causal=False)
    return o.assign(o.reshape(attention, o.constant(np.array([1])), False), ModelVariable(info))


# -- models whose results share nothing, compiled at the same time ----------------------------------------------------
FEW = 32
"""Minimum number of results; with fewer, splitting saves no time."""


def separate_parts(
    results: Sequence[Node], parameters: Sequence[Node], sinks: Callable[[], Sequence[Node]]
) -> list[Part]:
    """Return two models of similar size with their own sinks; none if connected or too small."""
    if len(results) < FEW:
        return []
    groups = _connected(results)
    if len(groups) == 1:
        return []
    halves: list[list[int]] = [[], []]
    sizes = [0, 0]
    for group, size in groups:
        lighter = int(sizes[1] < sizes[0])
        halves[lighter] += group
        sizes[lighter] += size
    return [Part(results, parameters, sorted(half), sinks()) for half in halves]


def _connected(results: Sequence[Node]) -> list[tuple[list[int], int]]:
    """Group results that share a computed node; return each group's results and node count.

    Union-find: `leads[i]` points to an earlier member of the group of result i, or to i itself, its first. A node
    belongs to the result that reaches it first; another result that reaches it joins the two groups.
    """
    owner: dict[str, int] = {}
    leads = list(range(len(results)))

    def lead(i: int) -> int:
        while leads[i] != i:
            i = leads[i]
        return i

    for i, result in enumerate(results):
        stack = [result]
        while stack:
            node = stack.pop()
            if node.get_type_name() == "Constant":
                continue
            name = node.get_name()
            if name in owner:
                leads[lead(i)] = lead(owner[name])
            else:
                owner[name] = i
                stack += [v.get_node() for v in node.input_values()]
    groups: dict[int, list[int]] = {}
    for i in range(len(results)):
        groups.setdefault(lead(i), []).append(i)
    sizes = Counter(lead(i) for i in owner.values())
    return [(group, sizes[first]) for first, group in groups.items()]


class Part:
    """A model of some of the results, with the parameters that they need."""

    def __init__(
        self, results: Sequence[Node], parameters: Sequence[Node], chosen: Sequence[int], sinks: Sequence[Node]
    ) -> None:
        own = [results[i] for i in chosen]
        used = ancestors(own)
        places = [i for i, p in enumerate(parameters) if p.get_name() in used]
        self.model = Model(own, list(sinks), [parameters[i] for i in places])
        self.inputs = {i: k for k, i in enumerate(places)}
        """Index of a parameter in the whole -> in this model."""
        self.outputs = {i: k for k, i in enumerate(chosen)}


class Whole:
    """Two compiled models as one `openvino.CompiledModel`; also its own infer request."""

    def __init__(self, parts: Sequence[Part], compile_: Callable[[Model], Any]) -> None:
        self._parts = parts
        with ThreadPoolExecutor(1) as other:
            second = other.submit(compile_, parts[1].model)
            self._compiled = [compile_(parts[0].model), second.result()]
        self._requests: list[Any] = []

    def create_infer_request(self) -> Whole:
        """Return itself, with a request of each part; a second one is never needed."""
        self._requests = [c.create_infer_request() for c in self._compiled]
        return self

    def get_property(self, name: str) -> Any:  # noqa: ANN401  # as openvino.CompiledModel
        """Return a property of the first part; the second has the same."""
        return self._compiled[0].get_property(name)

    def get_runtime_model(self) -> Whole:
        """Return itself, which lists the layers of both models."""
        return self

    def get_ordered_ops(self) -> list[Node]:
        """Return the layers of both models."""
        return [node for c in self._compiled for node in c.get_runtime_model().get_ordered_ops()]

    def set_input_tensor(self, i: int, tensor: Any) -> None:  # noqa: ANN401  # an openvino.Tensor
        """Use `tensor` as input `i` of each part that reads it."""
        for part, request in zip(self._parts, self._requests, strict=True):
            if i in part.inputs:
                request.set_input_tensor(part.inputs[i], tensor)

    def set_output_tensor(self, i: int, tensor: Any) -> None:  # noqa: ANN401  # as above
        """Bind an output."""
        part, request = self._part_of_output(i)
        request.set_output_tensor(part.outputs[i], tensor)

    def get_output_tensor(self, i: int) -> Any:  # noqa: ANN401  # as above
        """Return an output."""
        part, request = self._part_of_output(i)
        return request.get_output_tensor(part.outputs[i])

    def query_state(self) -> list[Any]:
        """Return the variables of both parts."""
        return [state for request in self._requests for state in request.query_state()]

    def infer(self) -> None:
        """Run both."""
        for request in self._requests:
            request.infer()

    def _part_of_output(self, i: int) -> tuple[Part, Any]:
        k = 0 if i in self._parts[0].outputs else 1
        return self._parts[k], self._requests[k]


# -- the interpreter --------------------------------------------------------------------------------------------------
DEVICE = "Model.evaluate"
"""Device name in a witness of this stage."""


class Variable:
    """A variable of the model, with the interface of an `openvino.VariableState`."""

    def __init__(self, name: str, read: Node, parameter: Node, assigned: Value) -> None:
        self.name = name
        self.parameter = parameter
        self.initial: Value | None = read.input_value(0) if read.get_input_size() else None
        self.assigned = assigned
        self.held: OvTensor | None = None

    @property
    def state(self) -> OvTensor:
        """The stored value; RuntimeError, as in OpenVINO, if there is none since the last reset."""
        if self.held is None:
            msg = f"variable {self.name} is not initialised"
            raise RuntimeError(msg)
        return self.held

    @state.setter
    def state(self, tensor: OvTensor) -> None:
        self.held = tensor

    def reset(self) -> None:
        """Start the next run with the initial value."""
        self.held = None


class Interpreted:
    """A model in place of an `openvino.CompiledModel`; it is its own infer request.

    It rewires the model: operations that `Model.evaluate` lacks are expanded (BackendError if they cannot be),
    variables become parameters and results.
    """

    def __init__(self, model: Model) -> None:
        parameters, results = list(model.get_parameters()), list(model.get_results())
        self._variables = _variables(model)
        for node in model.get_ordered_ops():
            kind = node.get_type_name()
            if kind in EXPANSIONS:
                expanded = EXPANSIONS[kind](node)
                if expanded is not None:
                    node.output(0).replace(expanded)
            elif kind in LACKING:
                raise BackendError(f"{DEVICE} has no {kind}: {LACKING[kind]}")
        self._inputs: list[OvTensor | None] = [None] * len(parameters)
        self._results = len(results)
        self._first = [v.initial for v in self._variables if v.initial is not None]
        self._initial = Model([o.result(x) for x in self._first], parameters) if self._first else None
        results += [o.result(v.assigned) for v in self._variables]
        self._model = Model(results, [*parameters, *(v.parameter for v in self._variables)])
        self._given: dict[int, OvTensor] = {}
        self._outputs: list[OvTensor] = []

    def create_infer_request(self) -> Interpreted:
        """Return itself: there is nothing to share between requests."""
        return self

    def get_runtime_model(self) -> Model:
        """Return the model, because its operations are executed as they are."""
        return self._model

    def get_property(self, name: str) -> list[str]:
        """Return the executing devices; other properties are unknown."""
        return [DEVICE] if name == "EXECUTION_DEVICES" else []

    def query_state(self) -> list[Variable]:
        """Return the variables."""
        return self._variables

    def set_input_tensor(self, i: int, tensor: OvTensor) -> None:
        """Set the tensor that parameter `i` reads."""
        self._inputs[i] = tensor

    def set_output_tensor(self, i: int, tensor: OvTensor) -> None:
        """Set the destination of result `i`, which may be a tensor that a parameter reads."""
        self._given[i] = tensor

    def get_output_tensor(self, i: int) -> OvTensor:
        """Return the value of result `i` of the last run."""
        return self._given[i] if i in self._given else self._outputs[i]

    def infer(self) -> None:
        """Run once; RuntimeError with OpenVINO's own message."""
        if self._initial is not None and any(v.held is None for v in self._variables):
            values = dict(zip(map(id, self._first), _evaluate(self._initial, self._inputs), strict=True))
            for v in self._variables:
                v.held = values[id(v.initial)] if v.held is None and v.initial is not None else v.held
        # results are written while parameters are still read, so never into the caller's tensors
        results = _evaluate(self._model, [*self._inputs, *(v.state for v in self._variables)])
        self._outputs = results[: self._results]
        for v, tensor in zip(self._variables, results[self._results :], strict=True):
            v.held = tensor
        for i, tensor in self._given.items():
            self._outputs[i].copy_to(tensor)


def _variables(model: Model) -> list[Variable]:
    """Return the variables of `model`, which is rewired to read a parameter for each."""
    reads = {x.get_attributes()["variable_id"]: x for x in model.get_ordered_ops() if x.get_type_name() == "ReadValue"}
    variables = []
    for sink in model.get_sinks():
        name = sink.get_attributes()["variable_id"]
        read = reads[name]
        p = o.parameter(read.output(0).get_partial_shape(), read.output(0).get_element_type())
        variables.append(Variable(name, read, p, sink))
        read.output(0).replace(p.output(0))
    for v, sink in zip(variables, model.get_sinks(), strict=True):
        v.assigned = sink.input_value(0)  # as it is now that every variable is a parameter
    return variables


def _evaluate(model: Model, inputs: list[OvTensor | None]) -> list[OvTensor]:
    outputs = [OvTensor(x.get_element_type(), Shape([])) for x in model.outputs]
    if not model.evaluate(outputs, inputs):
        msg = f"{DEVICE} gave no reason"
        raise RuntimeError(msg)
    return outputs


def _scaled_dot_product_attention(node: Node) -> Value:
    """Expand to `softmax(q k^T * scale + mask) v`, as specified in opset 13."""
    q, k, v, *rest = node.input_values()
    if node.get_attributes().get("causal") or len(rest) > 2:
        raise BackendError(f"{DEVICE} has no ScaledDotProductAttention with causal or sinks: emit both explicitly")
    scale = rest[1] if len(rest) > 1 else _f32(1 / math.sqrt(q.get_partial_shape()[-1].get_length()))
    x = o.matmul(o.multiply(q, scale), k, False, True)
    if rest:
        mask = rest[0]
        if mask.get_element_type() == Type.boolean:
            mask = o.select(mask, _f32(0.0), _f32(-math.inf))
        x = o.add(x, mask)
    return o.matmul(o.softmax(x, -1), v, False, False).output(0)


def _elu(node: Node) -> Value:
    """Expand to `x` where positive, else `alpha * (e^x - 1)` by tanh, exact near zero."""
    x = node.input_value(0)
    t = o.tanh(o.multiply(o.minimum(x, _f32(0.0)), _f32(0.5)))
    below = o.multiply(o.divide(t, o.subtract(_f32(1.0), t)), _f32(2.0 * float(node.get_attributes()["alpha"])))
    return o.select(o.greater(x, _f32(0.0)), x, below).output(0)


def _bucketize(node: Node) -> Value:
    """Count the sorted bounds below `x`, and those equal to it if right bounds are excluded."""
    x, bounds = node.input_values()
    beyond = o.greater if node.get_attributes()["with_right_bound"] else o.greater_equal
    above = beyond(o.unsqueeze(x, o.constant(np.int64(-1))), bounds)
    kind = node.output(0).get_element_type()
    return o.reduce_sum(o.convert(above, kind), o.constant(np.int64(-1)), False).output(0)


def _scatter_update(node: Node) -> Value | None:
    """Drop dimensions of 1 after the axis, which `Model.evaluate` (2026.4.1) gets wrong.

    It reads the wrong updates: row i of shape [8, 1] is read from element i instead of 8 i.
    """
    data, indices, updates, axis = node.input_values()
    shape = data.get_partial_shape()
    ndim = shape.rank.get_length()
    ones = [i - ndim for i in range(int(axis.get_node().data) % ndim + 1, ndim) if shape[i] == 1]
    if not ones:
        return None
    gone = o.constant(np.array(ones, np.int64))
    done = o.scatter_update(o.squeeze(data, gone), indices, o.squeeze(updates, gone), axis)
    return o.unsqueeze(done, gone).output(0)


def _roll(node: Node) -> Value:
    """Gather elements along each axis; shifts and axes are constants."""
    x, shifts, axes = node.input_values()
    for shift, axis in zip(shifts.get_node().data.tolist(), axes.get_node().data.tolist(), strict=True):
        size = x.get_shape()[axis]
        order = (np.arange(size) - shift) % max(size, 1)
        x = o.gather(x, o.constant(order), o.constant(np.int64(axis))).output(0)
    return x


def _avg_pool(node: Node) -> Value:
    """Average strided slices, one for each place of the window; padding counts as zeros."""
    a, c = node.get_attributes(), Constants()
    begin, end = (c.i64(0, 0, *a[key]) for key in ("pads_begin", "pads_end"))
    x = o.pad(node.input_value(0), begin, end, "constant", arg_pad_value=c.f32(0.0))
    slices = windows(c, x, a["kernel"], node.output(0).get_shape()[2:], a["strides"], (1, 1))
    return o.divide(reduce(o.add, slices, c.f32(0.0)), c.f32(math.prod(a["kernel"]))).output(0)


def _convolution(node: Node) -> Value:
    """Multiply the filters by strided slices, one for each place of the window."""
    a, c = node.get_attributes(), Constants()
    x, filters = node.input_values()
    (n, channels), (oc, _, *kernel) = list(x.get_shape())[:2], filters.get_shape()
    out = list(node.output(0).get_shape()[2:])
    begin, end = (c.i64(0, 0, *a[key]) for key in ("pads_begin", "pads_end"))
    x = o.pad(x, begin, end, "constant", arg_pad_value=c.f32(0.0))
    columns = o.concat([*windows(c, x, kernel, out, a["strides"], a["dilations"])], 1)
    columns = o.reshape(columns, c.i64(n, math.prod(kernel) * channels, math.prod(out)), False)
    order = c.i64(0, *range(2, 2 + len(kernel)), 1)
    rows = o.reshape(o.transpose(filters, order), c.i64(oc, math.prod(kernel) * channels), False)
    return o.reshape(o.matmul(rows, columns, False, False), c.i64(n, oc, *out), False).output(0)


def _f32(x: float) -> Node:
    return o.constant(np.float32(x))


EXPANSIONS: dict[str, Callable[[Node], Value | None]] = {
    "AvgPool": _avg_pool,
    "Bucketize": _bucketize,
    "Convolution": _convolution,
    "Elu": _elu,
    "Roll": _roll,
    "ScaledDotProductAttention": _scaled_dot_product_attention,
    "ScatterUpdate": _scatter_update,
}
"""Operation that `Model.evaluate` lacks or gets wrong -> its expansion, or None."""
_CONVOLUTIONS = ("GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData")
LACKING: dict[str, str] = dict.fromkeys(_CONVOLUTIONS, "write it as MatMul over windows")
"""Operation that `Model.evaluate` lacks and that is not expanded -> what to emit instead."""
