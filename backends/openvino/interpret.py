"""The stage before compiling: a translated model run by `Model.evaluate`, OpenVINO's own reference of every operation.

No plugin, no kernel and no fusion takes part, so what is wrong here is the translation (or what was bound to it), and
what is wrong only when compiled is a kernel or a fusion. An `Interpreted` model stands where a compiled one would: it
is bound, run and asked in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import openvino.opset15 as o
from openvino import Model, Node, Shape, Type
from openvino import Tensor as OvTensor

from conformance.ggml.errors import BackendError

from .nodes import Value

DEVICE = "Model.evaluate"
"""What a witness of this stage names as the device."""


class Variable:
    """A variable of the model, asked and set as an `openvino.VariableState`."""

    def __init__(self, name: str, read: Node, parameter: Node, assigned: Value) -> None:
        self.name = name
        self.parameter = parameter
        self.initial: Value | None = read.input_value(0) if read.get_input_size() else None
        self.assigned = assigned
        self.held: OvTensor | None = None

    @property
    def state(self) -> OvTensor:
        """What it holds.

        Raises:
            RuntimeError: nothing since it was made or reset.
        """
        if self.held is None:
            msg = f"variable {self.name} holds nothing yet"
            raise RuntimeError(msg)
        return self.held

    @state.setter
    def state(self, tensor: OvTensor) -> None:
        self.held = tensor

    def reset(self) -> None:
        """The next run begins with its initial value."""
        self.held = None


class Interpreted:
    """A model in place of an `openvino.CompiledModel`; it is its own infer request.

    Args:
        model: what the walk emitted. Its nodes are rewired (operations that `Model.evaluate` lacks are expanded,
            variables become parameters and results), so it serves for nothing else afterwards.

    Raises:
        BackendError: it holds an operation that can neither be evaluated nor expanded.
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
        """Itself: there is nothing to share between requests."""
        return self

    def get_runtime_model(self) -> Model:
        """The model: its operations are what is executed."""
        return self._model

    def get_property(self, name: str) -> list[str]:
        """The devices that execute; nothing else is known here."""
        return [DEVICE] if name == "EXECUTION_DEVICES" else []

    def query_state(self) -> list[Variable]:
        """The variables."""
        return self._variables

    def set_input_tensor(self, i: int, tensor: OvTensor) -> None:
        """What parameter `i` reads."""
        self._inputs[i] = tensor

    def set_output_tensor(self, i: int, tensor: OvTensor) -> None:
        """Where result `i` goes; it may be a tensor that a parameter reads."""
        self._given[i] = tensor

    def get_output_tensor(self, i: int) -> OvTensor:
        """The value of result `i` of the last run."""
        return self._given[i] if i in self._given else self._outputs[i]

    def infer(self) -> None:
        """Run once.

        Raises:
            RuntimeError: OpenVINO's own words.
        """
        if self._initial is not None and any(v.held is None for v in self._variables):
            values = dict(zip(map(id, self._first), _evaluate(self._initial, self._inputs), strict=True))
            for v in self._variables:
                v.held = values[id(v.initial)] if v.held is None and v.initial is not None else v.held
        # results are written while parameters are still read, so never into the caller's tensors
        found = _evaluate(self._model, [*self._inputs, *(v.state for v in self._variables)])
        self._outputs = found[: self._results]
        for v, tensor in zip(self._variables, found[self._results :], strict=True):
            v.held = tensor
        for i, tensor in self._given.items():
            self._outputs[i].copy_to(tensor)


def _variables(model: Model) -> list[Variable]:
    """The variables of `model`, which is rewired to read a parameter for each."""
    reads = {x.get_attributes()["variable_id"]: x for x in model.get_ordered_ops() if x.get_type_name() == "ReadValue"}
    found = []
    for sink in model.get_sinks():
        name = sink.get_attributes()["variable_id"]
        read = reads[name]
        p = o.parameter(read.output(0).get_partial_shape(), read.output(0).get_element_type())
        found.append(Variable(name, read, p, sink))
        read.output(0).replace(p.output(0))
    for v, sink in zip(found, model.get_sinks(), strict=True):
        v.assigned = sink.input_value(0)  # as it is now that every variable is a parameter
    return found


def _evaluate(model: Model, inputs: list[OvTensor | None]) -> list[OvTensor]:
    outputs = [OvTensor(x.get_element_type(), Shape([])) for x in model.outputs]
    if not model.evaluate(outputs, inputs):
        msg = f"{DEVICE} gave no reason"
        raise RuntimeError(msg)
    return outputs


def _scaled_dot_product_attention(node: Node) -> Value:
    """`softmax(q k^T * scale + mask) v`, as the specification of opset 13 says it."""
    q, k, v, *rest = node.input_values()
    if node.get_attributes().get("causal") or len(rest) > 2:
        raise BackendError(f"{DEVICE} has no ScaledDotProductAttention with causal or sinks: say both by hand")
    scale = rest[1] if len(rest) > 1 else _f32(1 / math.sqrt(q.get_partial_shape()[-1].get_length()))
    x = o.matmul(o.multiply(q, scale), k, False, True)
    if rest:
        mask = rest[0]
        if mask.get_element_type() == Type.boolean:
            mask = o.select(mask, _f32(0.0), _f32(-math.inf))
        x = o.add(x, mask)
    return o.matmul(o.softmax(x, -1), v, False, False).output(0)


def _elu(node: Node) -> Value:
    """`x` where positive, else `alpha * (e^x - 1)`; by tanh, which loses nothing near zero."""
    x = node.input_value(0)
    t = o.tanh(o.multiply(o.minimum(x, _f32(0.0)), _f32(0.5)))
    below = o.multiply(o.divide(t, o.subtract(_f32(1.0), t)), _f32(2.0 * float(node.get_attributes()["alpha"])))
    return o.select(o.greater(x, _f32(0.0)), x, below).output(0)


def _bucketize(node: Node) -> Value:
    """How many of the sorted bounds lie below `x`, or at it where an interval does not hold its right bound."""
    x, bounds = node.input_values()
    beyond = o.greater if node.get_attributes()["with_right_bound"] else o.greater_equal
    found = beyond(o.unsqueeze(x, o.constant(np.int64(-1))), bounds)
    kind = node.output(0).get_element_type()
    return o.reduce_sum(o.convert(found, kind), o.constant(np.int64(-1)), False).output(0)


def _scatter_update(node: Node) -> Value | None:
    """The same without dimensions of 1 behind the axis, with which `Model.evaluate` (2026.4.1) takes the wrong updates:
    row i of shape [8, 1] is read from element i, not 8 i.
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
    """Elements picked along each axis; shifts and axes are constants."""
    x, shifts, axes = node.input_values()
    for shift, axis in zip(shifts.get_node().data.tolist(), axes.get_node().data.tolist(), strict=True):
        size = x.get_shape()[axis]
        order = (np.arange(size) - shift) % max(size, 1)
        x = o.gather(x, o.constant(order), o.constant(np.int64(axis))).output(0)
    return x


def _avg_pool(node: Node) -> Value:
    """The mean of strided slices, one for each place of the window; padding counts as zeros."""
    a = node.get_attributes()
    steps, size = np.array([1, 1, *a["strides"]]), node.output(0).get_shape()
    before, after = (o.constant(np.array([0, 0, *a[key]], np.int64)) for key in ("pads_begin", "pads_end"))
    x = o.pad(node.input_value(0), before, after, "constant", arg_pad_value=_f32(0.0))
    total: Node = _f32(0.0)
    for place in np.ndindex(*a["kernel"]):
        first = np.array([0, 0, *place])
        stop = first + (np.array(size) - 1) * steps + 1
        total = o.add(total, o.slice(x, *(o.constant(np.int64(v)) for v in (first, stop, steps)), np.arange(4)))
    return o.divide(total, _f32(float(np.prod(a["kernel"])))).output(0)


def _f32(x: float) -> Node:
    return o.constant(np.float32(x))


EXPANSIONS: dict[str, Callable[[Node], Value | None]] = {
    "AvgPool": _avg_pool,
    "Bucketize": _bucketize,
    "Elu": _elu,
    "Roll": _roll,
    "ScaledDotProductAttention": _scaled_dot_product_attention,
    "ScatterUpdate": _scatter_update,
}
"""Operation that `Model.evaluate` lacks or has wrong -> the same in those that it has right; None where it is right."""

_CONVOLUTIONS = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData")
LACKING: dict[str, str] = dict.fromkeys(_CONVOLUTIONS, "write it as MatMul over windows")
"""Operation that `Model.evaluate` lacks and that is not expanded -> what a translation can do instead."""
