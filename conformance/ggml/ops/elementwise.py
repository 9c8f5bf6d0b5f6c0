"""Arithmetic with broadcast (`b` repeats to `a`), unary and gated functions, ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor, bits_f32, can_repeat, f32_bits, is_contiguous_rows, nelements
from conformance.ggml.types import BF16, F16, F32, GLU_OPS, UNARY_OPS, GGMLType

from .fields import enum, f32, flag, flip, plus, swap, times
from .op import (
    EXPS,
    MOVES,
    ROUNDS,
    Constructor,
    Layout,
    Op,
    Work,
    dup_or_inplace,
    failed,
    fresh,
    fresh_like,
    operand,
    optional,
    same_layout,
    violated,
)

TABLES = replace(EXPS, by="tables")
XIELU = UNARY_OPS.index("XIELU")


def _can_add_cast(a: Tensor, b: Tensor) -> None:
    """Check what `ggml_add_cast` asserts."""
    if not (a.ne[0] == b.ne[0] and can_repeat(b, a)):
        raise failed("ggml_can_repeat_rows(b, a)", (a, b))
    if not (a.type.is_quantized or a.type is F16 or a.type is BF16):
        assertion = "ggml_is_quantized(a->type) || a->type == GGML_TYPE_F16 || a->type == GGML_TYPE_BF16"
        raise failed(assertion, (a, b))


def _add(t: Tensor) -> Layout:
    """Add `b`, repeated to `a`, in `a`'s type and shape, or in another by `ggml_add_cast`."""
    a = operand(t)
    if t.view_src is None and t.type is not a.type:
        _can_add_cast(a, operand(t, 1))
        return fresh(t.type, a.ne)
    if not can_repeat(operand(t, 1), a):
        raise violated(t, "ggml_can_repeat(b, a)")
    return dup_or_inplace(t, a)


def _arange(t: Tensor) -> Layout:
    """Lay out `ggml_arange`; the count is computed in float32, as in C."""
    p = t.params
    start, stop, step = np.float32(p.start), np.float32(p.stop), np.float32(p.step)
    if not stop > start:
        raise violated(t, "stop > start", start=start, stop=stop)
    if not (np.isfinite(stop - start) and step > 0):
        raise GraphError(f"arange({start}, {stop}, {step}) has no end; the step must be positive")
    return fresh(F32, (int(np.ceil((stop - start) / step)), 1, 1, 1))


def _unary(t: Tensor) -> Layout:
    """Apply a function to each element; `ggml_xielu` asserts nothing."""
    a = operand(t)
    if t.op_params[0] != XIELU and not is_contiguous_rows(a):
        raise violated(t, "ggml_is_contiguous_rows(a)")
    return dup_or_inplace(t, a)


def _unary_limits(t: Tensor) -> None:
    if t.op_params[0] != XIELU and any(t.op_params[1:]):
        raise GraphError(f"only XIELU has parameters, {list(t.op_params[1:5])} found")


def _glu(t: Tensor) -> Layout:
    """Multiply gate by value: halves of `a`'s rows, [2n, …] -> [n, …], or `a` and `b`."""
    a = operand(t)
    return fresh(a.type, a.ne if optional(t, 1) is not None else (a.ne[0] // 2, *a.ne[1:]))


GLU_PARAMS = {"SWIGLU_OAI": ("alpha", "limit"), "SWIGLU_CLAMP": ("limit",)}
"""GLU -> its parameters beyond `op` and `swapped`."""


def _glu_limits(t: Tensor) -> None:
    p = t.params
    if p.swapped and optional(t, 1) is not None:
        raise GraphError("swapped is 0 with two src, 1 found")
    for name, bits in (("alpha", t.op_params[2]), ("limit", t.op_params[3])):
        if bits and name not in GLU_PARAMS.get(p.op, ()):
            raise GraphError(f"{p.op} has no op_params {name}, {bits} found")


ADD = Op("ADD", src="a b", layout=_add, rounding=replace(ROUNDS, by="quantize"))
REPEATS = "ggml_can_repeat(b, a)"
SUB = Op("SUB", src="a b", layout=same_layout, asserts=REPEATS, rounding=ROUNDS)
MUL = Op("MUL", src="a b", layout=same_layout, asserts=REPEATS, rounding=ROUNDS)
DIV = Op("DIV", src="a b", layout=same_layout, asserts=REPEATS, rounding=ROUNDS)
ADD1 = Op("ADD1", src="a b", layout=same_layout, asserts="ggml_is_scalar(b); ggml_is_padded_1d(a)", rounding=ROUNDS)
ADD_ID = Op(
    "ADD_ID",
    src="a b ids",
    layout=fresh_like,
    asserts="a->ne[0] == b->ne[0]; a->ne[1] == ids->ne[0]; a->ne[2] == ids->ne[1]; ids->type == GGML_TYPE_I32",
    rounding=ROUNDS,
)
SQR = Op("SQR", src="a", layout=same_layout, rounding=ROUNDS)
SQRT = Op("SQRT", src="a", layout=same_layout, rounding=ROUNDS)
LOG = Op("LOG", src="a", layout=same_layout, rounding=EXPS)
SIN = Op("SIN", src="a", layout=same_layout, rounding=EXPS)
COS = Op("COS", src="a", layout=same_layout, rounding=EXPS)
SCALE = Op(
    "SCALE",
    src="a",
    layout=same_layout,
    asserts="ggml_is_padded_1d(a)",
    rounding=ROUNDS,
    params=(f32("s"), f32("b", plus(0.5))),
)
CLAMP = Op("CLAMP", src="a", layout=same_layout, rounding=ROUNDS, params=(f32("min"), f32("max")))
LEAKY_RELU = Op("LEAKY_RELU", src="a", layout=same_layout, rounding=ROUNDS, params=(f32("negative_slope"),))
FILL = Op(
    "FILL",
    src="a",
    layout=same_layout,
    asserts="a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16; ggml_is_contiguous(a)",
    rounding=MOVES,
    params=(f32("c", plus(0.5)),),
)
ARANGE = Op(
    "ARANGE",
    src="",
    layout=_arange,
    rounding=ROUNDS,
    params=(f32("start", plus(0.25)), f32("stop", None), f32("step", times(1.01))),  # stop affects the shape only
)
UNARY = Op(
    "UNARY",
    src="a",
    layout=_unary,
    limits=_unary_limits,
    rounding=TABLES,
    params=(enum("op", UNARY_OPS, swap("TANH", "SILU"), always=True), *map(f32, ("alpha_n", "alpha_p", "beta", "eps"))),
    work=Work(lambda t: 3 * nelements(t)),
)
GLU = Op(
    "GLU",
    src="a b?",
    layout=_glu,
    asserts="ggml_is_contiguous_1(a); ggml_is_contiguous_1(b); ggml_are_same_shape(a, b); a->type == b->type",
    limits=_glu_limits,
    rounding=TABLES,
    params=(
        enum("op", GLU_OPS, swap("SWIGLU", "GEGLU"), always=True),
        flag("swapped", flip),
        f32("alpha"),
        f32("limit", times(0.01)),
    ),
    work=Work(lambda t: 3 * nelements(t)),
)


def _f32(x: float) -> float:
    """Round `x` to float32."""
    return bits_f32(f32_bits(x))


def _softplus(x: float) -> float:
    """Compute `ggml_compute_softplus_f32`, rounded to float32 where C does."""
    x = _f32(x)
    return x if x > 20 else _f32(math.log(_f32(1 + _f32(math.exp(x)))))


def _inverse(y: float, term: float = 0.0) -> float:
    """Return an x with `term + _softplus(x)` equal to the float32 `y`, or close to it."""
    first = y - term if y - term > 20 else math.log(math.expm1(y - term)) if y > term else -math.inf
    return next((x for x in _around(first) if _f32(term + _softplus(x)) == y), first)


def _around(x: float) -> Iterator[float]:
    """Yield float32 values in order of distance from `x`."""
    low = high = np.float32(x)
    for _ in range(64):
        yield float(low)
        yield float(high)
        low, high = np.nextafter(low, np.float32(-np.inf)), np.nextafter(high, np.float32(np.inf))


def _pair(name: str) -> tuple[Constructor[[Tensor]], Constructor[[Tensor]]]:
    return UNARY.of_a(op=name).pair


def _gated(name: str) -> tuple[Constructor[[Tensor]], Constructor[[Tensor]], Constructor[[Tensor, Tensor]]]:
    """Return a gated op's constructors: halves of a row, the halves swapped, two tensors."""
    return GLU.of_a(op=name), GLU.of_a(op=name, swapped=True), GLU.of_a_b(op=name)


class Elementwise:
    """Constructors of the elementwise ops."""

    add, add_inplace = ADD.of_a_b().pair
    sub, sub_inplace = SUB.of_a_b().pair
    mul, mul_inplace = MUL.of_a_b().pair
    div, div_inplace = DIV.of_a_b().pair
    add1, add1_inplace = ADD1.of_a_b().pair
    sqr, sqr_inplace = SQR.of_a().pair
    sqrt, sqrt_inplace = SQRT.of_a().pair
    log, log_inplace = LOG.of_a().pair
    sin, sin_inplace = SIN.of_a().pair
    cos, cos_inplace = COS.of_a().pair

    abs, abs_inplace = _pair("ABS")
    sgn, sgn_inplace = _pair("SGN")
    neg, neg_inplace = _pair("NEG")
    step, step_inplace = _pair("STEP")
    tanh, tanh_inplace = _pair("TANH")
    elu, elu_inplace = _pair("ELU")
    relu, relu_inplace = _pair("RELU")
    sigmoid, sigmoid_inplace = _pair("SIGMOID")
    gelu, gelu_inplace = _pair("GELU")
    gelu_quick, gelu_quick_inplace = _pair("GELU_QUICK")
    gelu_erf, gelu_erf_inplace = _pair("GELU_ERF")
    silu, silu_inplace = _pair("SILU")
    hardswish = UNARY.of_a(op="HARDSWISH")
    hardsigmoid = UNARY.of_a(op="HARDSIGMOID")
    exp, exp_inplace = _pair("EXP")
    expm1, expm1_inplace = _pair("EXPM1")
    softplus, softplus_inplace = _pair("SOFTPLUS")
    floor, floor_inplace = _pair("FLOOR")
    ceil, ceil_inplace = _pair("CEIL")
    round, round_inplace = _pair("ROUND")
    trunc, trunc_inplace = _pair("TRUNC")

    reglu, reglu_swapped, reglu_split = _gated("REGLU")
    geglu, geglu_swapped, geglu_split = _gated("GEGLU")
    swiglu, swiglu_swapped, swiglu_split = _gated("SWIGLU")
    geglu_erf, geglu_erf_swapped, geglu_erf_split = _gated("GEGLU_ERF")
    geglu_quick, geglu_quick_swapped, geglu_quick_split = _gated("GEGLU_QUICK")

    @UNARY.constructor
    def unary(self, a: Tensor, op: str) -> None:
        """Apply `op` of `UNARY_OPS` elementwise."""

    unary_inplace = unary.inplace

    @UNARY.form(
        alpha_n=lambda t: _inverse(t.params.alpha_n, t.params.beta), alpha_p=lambda t: _inverse(t.params.alpha_p)
    )
    def xielu(self, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
        """Apply xIELU; `op_params` are beta + softplus(alpha_n), softplus(alpha_p), beta, eps."""
        n = _f32(_f32(beta) + _softplus(alpha_n))
        return UNARY.node(a, op="XIELU", alpha_n=n, alpha_p=_softplus(alpha_p), beta=beta, eps=eps)

    @GLU.variant(op="SWIGLU_OAI")
    def swiglu_oai(self, a: Tensor, b: Tensor | None, alpha: float, limit: float) -> None:
        """Apply SwiGLU as in gpt-oss."""

    @GLU.variant(op="SWIGLU_CLAMP")
    def swiglu_clamp(self, a: Tensor, b: Tensor | None, limit: float) -> None:
        """Apply SwiGLU to clamped inputs."""

    @GLU.constructor
    def glu(self, a: Tensor, op: str, swapped: bool) -> None:
        """Apply `op` of `GLU_OPS` to the two halves of `a`'s rows: [2n, …] -> [n, …]."""

    @GLU.constructor
    def glu_split(self, a: Tensor, b: Tensor, op: str) -> None:
        """Apply `op` of `GLU_OPS` to gate `a` and value `b`."""

    @ADD.form()
    def add_cast(self, a: Tensor, b: Tensor, type_: GGMLType) -> Tensor:
        """Add `a + b` as `type_`; `a` is quantised, F16 or BF16."""
        _can_add_cast(a, b)
        return ADD.node(a, b, type_=type_)

    @ADD_ID.constructor
    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> None:
        """Add rows by index: `a[:, i, j] + b[:, ids[i, j]]`."""

    @SCALE.constructor
    def scale(self, a: Tensor, s: float) -> None:
        """Scale: `a * s`."""

    scale_inplace = scale.inplace

    @SCALE.constructor
    def scale_bias(self, a: Tensor, s: float, b: float) -> None:
        """Scale and shift: `a * s + b`."""

    scale_bias_inplace = scale_bias.inplace

    @CLAMP.constructor
    def clamp(self, a: Tensor, min_: float, max_: float) -> None:
        """Clamp `a` to `min_` and `max_`."""

    clamp_inplace = clamp.inplace

    @LEAKY_RELU.constructor
    def leaky_relu(self, a: Tensor, negative_slope: float, inplace: bool) -> None:
        """Return `a` where positive, `negative_slope * a` elsewhere."""

    @ARANGE.constructor
    def arange(self, start: float, stop: float, step: float) -> None:
        """Return F32 [n]: `start`, `start + step`, … below `stop`."""

    @FILL.constructor
    def fill(self, a: Tensor, c: float) -> None:
        """Fill `a`'s shape with `c`."""

    fill_inplace = fill.inplace
