"""Elementwise ops: arithmetic with two tensors, UNARY and GLU, FILL and ARANGE."""

from __future__ import annotations

from collections.abc import Callable

import openvino.opset15 as o
from openvino import Type

from backends.openvino.axes import Axes, AxisContext, Rule, elementwise, others, require, rowwise
from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Constants, Value, broadcastable, cut, reshape, shape_of
from backends.openvino.translating.plan import Emitter
from conformance.ggml.ops.op import optional
from conformance.ggml.tensor import Tensor


def _map(make: Callable[[Value], Value]) -> Emitter:
    return lambda e, node: e.store(node, make(e.number(src(node, 0))))


def _binary(make: Callable[[Value, Value], Value]) -> Emitter:
    """Return an emitter that repeats src[1] to src[0]'s shape: `ggml_can_repeat`."""

    def emit(e: EmitContext, node: Tensor) -> None:
        a, b = e.number(src(node, 0)), e.number(src(node, 1))
        e.store(node, make(a, broadcastable(e.c, b, shape_of(e.c, a))))

    return emit


def _divide(e: EmitContext, node: Tensor) -> None:
    """Scale both sides: the CPU plugin's reciprocal overflows for extreme divisors."""
    c, a, b = e.c, e.number(src(node, 0)), e.number(src(node, 1))
    b = broadcastable(c, b, shape_of(c, a))
    size = o.abs(b)
    inner = o.select(o.greater(size, c.f32(2.0**64)), c.f32(2.0**-64), c.f32(1.0))
    by = o.select(o.less(size, c.f32(2.0**-64)), c.f32(2.0**64), inner)
    e.store(node, o.divide(o.multiply(a, by), o.multiply(b, by)))


def _add_id(e: EmitContext, node: Tensor) -> None:
    """Add row `ids[i1, i2]` of src[1] to row (i1, i2) of src[0]."""
    a, b, ids = (e.number(src(node, i)) for i in range(3))
    table = reshape(e.c, cut(e.c, b, [0, 0], [1, 1], [0, 1]), shape_of(e.c, b)[2:])
    rows = o.gather(table, reshape(e.c, ids, (1, *shape_of(e.c, a)[1:3])), e.c.axis(0))
    e.store(node, o.add(a, rows))


def _scale(e: EmitContext, node: Tensor) -> None:
    x: Value = o.multiply(e.number(src(node, 0)), e.c.f32(node.params.s))
    bias = node.params.b
    e.store(node, o.add(x, e.c.f32(bias)) if bias else x)


def _clamp(e: EmitContext, node: Tensor) -> None:
    low, high = e.c.f32(node.params.min), e.c.f32(node.params.max)
    x = e.number(src(node, 0))
    x = o.select(o.less(x, high), x, high)  # NaN is max in ggml; OpenVINO's minimum depends on its executor
    e.store(node, o.maximum(x, low))


def _leaky_relu(e: EmitContext, node: Tensor) -> None:
    c, x = e.c, e.number(src(node, 0))
    below = o.multiply(o.minimum(x, c.f32(0.0)), c.f32(node.params.negative_slope))
    e.store(node, o.add(o.maximum(x, c.f32(0.0)), below))


def _fill(e: EmitContext, node: Tensor) -> None:
    e.store(node, e.c.shaped(o.broadcast(e.c.f32(node.params.c), e.c.i64(*node.shape)), node.shape))


def _arange(e: EmitContext, node: Tensor) -> None:
    """Compute `start + i * step`, as ggml does, instead of a running sum."""
    c, n = e.c, node.ne[0]
    places = o.convert(o.range(c.axis(0), c.axis(n), c.axis(1), "i64"), Type.f32)
    x = o.add(o.multiply(places, c.f32(node.params.step)), c.f32(node.params.start))
    e.store(node, reshape(c, c.shaped(x, (n,)), node.shape))


# -- UNARY and GLU, by ggml's formulas --------------------------------------------------------------------------------
def _hardsigmoid(c: Constants, x: Value) -> Value:
    y = o.multiply(o.add(x, c.f32(3.0)), c.f32(1.0 / 6.0))
    return o.minimum(o.maximum(y, c.f32(0.0)), c.f32(1.0))


def _round(c: Constants, x: Value) -> Value:
    """Round as `roundf`; OpenVINO's own adds a half first, which carries 0.49999997 to 1."""
    size = o.abs(x)
    whole = o.floor(size)
    up = o.convert(o.greater_equal(o.subtract(size, whole), c.f32(0.5)), Type.f32)
    return o.multiply(o.add(whole, up), o.sign(x))


def softplus(c: Constants, x: Value) -> Value:
    """Compute log(1 + exp(x)) without `log`, which has few correct digits near 1."""
    e = o.exp(o.negative(o.abs(x)))
    return o.add(o.relu(x), o.multiply(c.f32(2.0), o.atanh(o.divide(e, o.add(e, c.f32(2.0))))))


UNARY: dict[str, Callable[[Constants, Value], Value]] = {
    "ABS": lambda _, x: o.abs(x),
    "SGN": lambda _, x: o.sign(x),
    "NEG": lambda _, x: o.negative(x),
    "STEP": lambda c, x: o.convert(o.greater(x, c.f32(0.0)), Type.f32),
    "TANH": lambda _, x: o.tanh(x),
    "ELU": lambda _, x: o.elu(x, 1.0),
    "RELU": lambda _, x: o.relu(x),
    "SIGMOID": lambda _, x: o.sigmoid(x),
    "GELU": lambda _, x: o.gelu(x, "tanh"),
    "GELU_QUICK": lambda c, x: o.multiply(x, o.sigmoid(o.multiply(x, c.f32(1.702)))),
    "SILU": lambda _, x: o.swish(x),
    "HARDSWISH": lambda c, x: o.multiply(x, _hardsigmoid(c, x)),
    "HARDSIGMOID": _hardsigmoid,
    "EXP": lambda _, x: o.exp(x),
    "EXPM1": lambda c, x: o.subtract(o.exp(x), c.f32(1.0)),
    "SOFTPLUS": softplus,
    "GELU_ERF": lambda _, x: o.gelu(x, "erf"),
    "FLOOR": lambda _, x: o.floor(x),
    "CEIL": lambda _, x: o.ceiling(x),
    "ROUND": _round,
    "TRUNC": lambda c, x: o.select(o.less(x, c.f32(0.0)), o.ceiling(x), o.floor(x)),
}
"""Sub-op of UNARY -> its formula; XIELU has parameters and is separate."""


def _xielu(e: EmitContext, node: Tensor) -> None:
    """Emit `op_xielu` with parameters as ggml has already combined them."""
    x, p = e.number(src(node, 0)), node.params
    alpha_n, alpha_p, beta, eps = map(e.c.f32, (p.alpha_n, p.alpha_p, p.beta, p.eps))
    rising = o.multiply(o.multiply(alpha_p, x), x)
    falling = o.multiply(o.subtract(o.subtract(o.exp(o.minimum(x, eps)), e.c.f32(1.0)), x), alpha_n)
    e.store(node, o.add(o.select(o.greater(x, e.c.f32(0.0)), rising, falling), o.multiply(beta, x)))


def _unary(e: EmitContext, node: Tensor) -> None:
    name = node.params.op
    if name == "XIELU":
        _xielu(e, node)
    else:
        e.store(node, UNARY[name](e.c, e.number(src(node, 0))))


def _limited(e: EmitContext, node: Tensor, x: Value, y: Value) -> tuple[Value, Value]:
    limit = node.params.limit
    high = e.c.f32(limit)
    return o.minimum(x, high), o.maximum(o.minimum(y, high), e.c.f32(-limit))


def _swiglu_oai(e: EmitContext, node: Tensor, x: Value, y: Value) -> Value:
    x, y = _limited(e, node, x, y)
    gate = o.multiply(x, o.sigmoid(o.multiply(x, e.c.f32(node.params.alpha))))
    return o.multiply(gate, o.add(y, e.c.f32(1.0)))


def _swiglu_clamp(e: EmitContext, node: Tensor, x: Value, y: Value) -> Value:
    x, y = _limited(e, node, x, y)
    return o.multiply(o.swish(x), y)


def _gated(name: str) -> Callable[[EmitContext, Tensor, Value, Value], Value]:
    return lambda e, _, x, y: o.multiply(UNARY[name](e.c, x), y)


GLU: dict[str, Callable[[EmitContext, Tensor, Value, Value], Value]] = {
    "REGLU": _gated("RELU"),
    "GEGLU": _gated("GELU"),
    "SWIGLU": _gated("SILU"),
    "SWIGLU_OAI": _swiglu_oai,
    "GEGLU_ERF": _gated("GELU_ERF"),
    "GEGLU_QUICK": _gated("GELU_QUICK"),
    "SWIGLU_CLAMP": _swiglu_clamp,
}
"""Sub-op of GLU -> f(gate, up)."""


def _glu(e: EmitContext, node: Tensor) -> None:
    """Emit a gate and a value: two tensors, or the halves of one, possibly swapped."""
    x = e.number(src(node, 0))
    up = optional(node, 1)
    if up is not None:
        y = e.number(up)
    else:
        half = node.ne[0]
        halves = [cut(e.c, x, [i * half], [(i + 1) * half], [3]) for i in (0, 1)]
        x, y = halves[::-1] if node.params.swapped else halves
    e.store(node, GLU[node.params.op](e, node, x, y))


def _glu_axes(w: AxisContext, t: Tensor) -> Axes:
    axes = rowwise(w, t)
    for s in others(t):
        require(w.axes_of(s) == axes, t, "its sources have different axes")
    return axes


EMITTERS: dict[str, Emitter] = {
    "ADD": _binary(o.add),
    "ADD1": lambda e, node: e.store(node, o.add(e.number(src(node, 0)), e.number(src(node, 1)))),
    "ADD_ID": _add_id,
    "ARANGE": _arange,
    "CLAMP": _clamp,
    "COS": _map(o.cos),
    "DIV": _divide,
    "FILL": _fill,
    "GLU": _glu,
    "LEAKY_RELU": _leaky_relu,
    "LOG": _map(o.log),
    "MUL": _binary(o.multiply),
    "SCALE": _scale,
    "SIN": _map(o.sin),
    "SQR": _map(lambda x: o.multiply(x, x)),
    "SQRT": _map(o.sqrt),
    "SUB": _binary(o.subtract),
    "UNARY": _unary,
}
ELEMENTWISE = ("ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP", "SQR", "SQRT", "LOG", "SIN", "COS", "UNARY")
AXES: dict[str, Rule] = {**dict.fromkeys(ELEMENTWISE, elementwise), "GLU": _glu_axes}
