"""Constructors of the elementwise ops, norms and reductions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor, f32_bits
from conformance.ggml.types import F32, GGMLType

from .build_base import lay_out, node, pad_params
from .names import GLU_OPS, UNARY_OPS
from .rules import RULES
from .rules_math import XIELU, can_add_cast

One = Callable[[object, Tensor], Tensor]
Two = Callable[[object, Tensor, Tensor], Tensor]


def _map1(op: str, *params: int, inplace: bool = False) -> One:
    def constructor(_: object, a: Tensor) -> Tensor:
        return node(op, (a,), params, inplace=inplace)

    constructor.__doc__ = RULES[op].layout.__doc__
    return constructor


def _map2(op: str, *params: int, inplace: bool = False) -> Two:
    def constructor(_: object, a: Tensor, b: Tensor) -> Tensor:
        return node(op, (a, b), params, inplace=inplace)

    constructor.__doc__ = RULES[op].layout.__doc__
    return constructor


def _unary(name: str, *, inplace: bool = False) -> One:
    return _map1("UNARY", UNARY_OPS.index(name), inplace=inplace)


def _glu(name: str, *, swapped: bool = False) -> One:
    return _map1("GLU", GLU_OPS.index(name), int(swapped))


def _glu_split(name: str) -> Two:
    return _map2("GLU", GLU_OPS.index(name))


class MathOps:
    """Arithmetic with broadcast (`b` repeats to `a`), unary and glu by name, norms over rows, reductions."""

    add = _map2("ADD")
    add_inplace = _map2("ADD", inplace=True)
    sub = _map2("SUB")
    sub_inplace = _map2("SUB", inplace=True)
    mul = _map2("MUL")
    mul_inplace = _map2("MUL", inplace=True)
    div = _map2("DIV")
    div_inplace = _map2("DIV", inplace=True)
    add1 = _map2("ADD1")
    add1_inplace = _map2("ADD1", inplace=True)
    sqr = _map1("SQR")
    sqr_inplace = _map1("SQR", inplace=True)
    sqrt = _map1("SQRT")
    sqrt_inplace = _map1("SQRT", inplace=True)
    log = _map1("LOG")
    log_inplace = _map1("LOG", inplace=True)
    sin = _map1("SIN")
    sin_inplace = _map1("SIN", inplace=True)
    cos = _map1("COS")
    cos_inplace = _map1("COS", inplace=True)
    sum = _map1("SUM")
    sum_rows = _map1("SUM_ROWS")
    mean = _map1("MEAN")
    cumsum = _map1("CUMSUM")
    argmax = _map1("ARGMAX")

    abs = _unary("ABS")
    abs_inplace = _unary("ABS", inplace=True)
    sgn = _unary("SGN")
    sgn_inplace = _unary("SGN", inplace=True)
    neg = _unary("NEG")
    neg_inplace = _unary("NEG", inplace=True)
    step = _unary("STEP")
    step_inplace = _unary("STEP", inplace=True)
    tanh = _unary("TANH")
    tanh_inplace = _unary("TANH", inplace=True)
    elu = _unary("ELU")
    elu_inplace = _unary("ELU", inplace=True)
    relu = _unary("RELU")
    relu_inplace = _unary("RELU", inplace=True)
    sigmoid = _unary("SIGMOID")
    sigmoid_inplace = _unary("SIGMOID", inplace=True)
    gelu = _unary("GELU")
    gelu_inplace = _unary("GELU", inplace=True)
    gelu_quick = _unary("GELU_QUICK")
    gelu_quick_inplace = _unary("GELU_QUICK", inplace=True)
    gelu_erf = _unary("GELU_ERF")
    gelu_erf_inplace = _unary("GELU_ERF", inplace=True)
    silu = _unary("SILU")
    silu_inplace = _unary("SILU", inplace=True)
    hardswish = _unary("HARDSWISH")
    hardsigmoid = _unary("HARDSIGMOID")
    exp = _unary("EXP")
    exp_inplace = _unary("EXP", inplace=True)
    expm1 = _unary("EXPM1")
    expm1_inplace = _unary("EXPM1", inplace=True)
    softplus = _unary("SOFTPLUS")
    softplus_inplace = _unary("SOFTPLUS", inplace=True)
    floor = _unary("FLOOR")
    floor_inplace = _unary("FLOOR", inplace=True)
    ceil = _unary("CEIL")
    ceil_inplace = _unary("CEIL", inplace=True)
    round = _unary("ROUND")
    round_inplace = _unary("ROUND", inplace=True)
    trunc = _unary("TRUNC")
    trunc_inplace = _unary("TRUNC", inplace=True)

    reglu = _glu("REGLU")
    reglu_swapped = _glu("REGLU", swapped=True)
    reglu_split = _glu_split("REGLU")
    geglu = _glu("GEGLU")
    geglu_swapped = _glu("GEGLU", swapped=True)
    geglu_split = _glu_split("GEGLU")
    swiglu = _glu("SWIGLU")
    swiglu_swapped = _glu("SWIGLU", swapped=True)
    swiglu_split = _glu_split("SWIGLU")
    geglu_erf = _glu("GEGLU_ERF")
    geglu_erf_swapped = _glu("GEGLU_ERF", swapped=True)
    geglu_erf_split = _glu_split("GEGLU_ERF")
    geglu_quick = _glu("GEGLU_QUICK")
    geglu_quick_swapped = _glu("GEGLU_QUICK", swapped=True)
    geglu_quick_split = _glu_split("GEGLU_QUICK")

    def unary(self, a: Tensor, op: str) -> Tensor:
        """`op` of `ops.UNARY_OPS`, elementwise."""
        return node("UNARY", (a,), (_index(UNARY_OPS, op),))

    def unary_inplace(self, a: Tensor, op: str) -> Tensor:
        """`unary` into `a`'s bytes."""
        return node("UNARY", (a,), (_index(UNARY_OPS, op),), inplace=True)

    def xielu(self, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
        """xIELU; `op_params` hold beta + softplus(alpha_n), softplus(alpha_p), beta, eps."""
        n, p = _f32(_f32(beta) + _softplus(alpha_n)), _softplus(alpha_p)
        return node("UNARY", (a,), (XIELU, f32_bits(n), f32_bits(p), f32_bits(beta), f32_bits(eps)))

    def glu(self, a: Tensor, op: str, swapped: bool) -> Tensor:
        """`op` of `ops.GLU_OPS` over the two halves of `a`'s rows: [2n, …] -> [n, …]."""
        return node("GLU", (a,), (_index(GLU_OPS, op), int(swapped)))

    def glu_split(self, a: Tensor, b: Tensor, op: str) -> Tensor:
        """`op` of `ops.GLU_OPS` of gate `a` and value `b`."""
        return node("GLU", (a, b), (_index(GLU_OPS, op),))

    def swiglu_oai(self, a: Tensor, b: Tensor | None, alpha: float, limit: float) -> Tensor:
        """SwiGLU as in gpt-oss."""
        return node("GLU", (a, b), (GLU_OPS.index("SWIGLU_OAI"), 0, f32_bits(alpha), f32_bits(limit)))

    def swiglu_clamp(self, a: Tensor, b: Tensor | None, limit: float) -> Tensor:
        """SwiGLU of clamped inputs."""
        return node("GLU", (a, b), (GLU_OPS.index("SWIGLU_CLAMP"), 0, 0, f32_bits(limit)))

    def add_cast(self, a: Tensor, b: Tensor, type_: GGMLType) -> Tensor:
        """`a + b` as `type_`; `a` is quantised, F16 or BF16."""
        can_add_cast(a, b)
        return node("ADD", (a, b), type_=type_)

    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """`a[:, i, j] + b[:, ids[i, j]]`."""
        return node("ADD_ID", (a, b, ids))

    def scale(self, a: Tensor, s: float) -> Tensor:
        """`a * s`."""
        return self.scale_bias(a, s, 0.0)

    def scale_inplace(self, a: Tensor, s: float) -> Tensor:
        """`scale` into `a`'s bytes."""
        return self.scale_bias_inplace(a, s, 0.0)

    def scale_bias(self, a: Tensor, s: float, b: float) -> Tensor:
        """`a * s + b`."""
        return node("SCALE", (a,), (f32_bits(s), f32_bits(b)))

    def scale_bias_inplace(self, a: Tensor, s: float, b: float) -> Tensor:
        """`scale_bias` into `a`'s bytes."""
        return node("SCALE", (a,), (f32_bits(s), f32_bits(b)), inplace=True)

    def clamp(self, a: Tensor, min_: float, max_: float) -> Tensor:
        """`a` held between `min_` and `max_`."""
        return node("CLAMP", (a,), (f32_bits(min_), f32_bits(max_)))

    def clamp_inplace(self, a: Tensor, min_: float, max_: float) -> Tensor:
        """`clamp` into `a`'s bytes."""
        return node("CLAMP", (a,), (f32_bits(min_), f32_bits(max_)), inplace=True)

    def leaky_relu(self, a: Tensor, negative_slope: float, inplace: bool) -> Tensor:
        """`a` where positive, `negative_slope * a` elsewhere."""
        return node("LEAKY_RELU", (a,), (f32_bits(negative_slope),), inplace=inplace)

    def norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row with mean 0 and variance 1."""
        return node("NORM", (a,), (f32_bits(eps),))

    def norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """`norm` into `a`'s bytes."""
        return node("NORM", (a,), (f32_bits(eps),), inplace=True)

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row by its root mean square."""
        return node("RMS_NORM", (a,), (f32_bits(eps),))

    def rms_norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """`rms_norm` into `a`'s bytes."""
        return node("RMS_NORM", (a,), (f32_bits(eps),), inplace=True)

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row by its length, which is at least `eps`."""
        return node("L2_NORM", (a,), (f32_bits(eps),))

    def l2_norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """`l2_norm` into `a`'s bytes."""
        return node("L2_NORM", (a,), (f32_bits(eps),), inplace=True)

    def group_norm(self, a: Tensor, n_groups: int, eps: float) -> Tensor:
        """`norm` over groups of `ne[2] / n_groups` channels."""
        return node("GROUP_NORM", (a,), (n_groups, f32_bits(eps)))

    def group_norm_inplace(self, a: Tensor, n_groups: int, eps: float) -> Tensor:
        """`group_norm` into `a`'s bytes."""
        return node("GROUP_NORM", (a,), (n_groups, f32_bits(eps)), inplace=True)

    def arange(self, start: float, stop: float, step: float) -> Tensor:
        """F32 [n]: `start`, `start + step`, … below `stop`."""
        params = pad_params((f32_bits(start), f32_bits(stop), f32_bits(step)))
        t = Tensor(F32, (0, 1, 1, 1), (4, 0, 0, 0), "ARANGE", params)
        lay_out(t)
        return t

    def fill(self, a: Tensor, c: float) -> Tensor:
        """`c` everywhere, in `a`'s shape."""
        return node("FILL", (a,), (f32_bits(c),))

    def fill_inplace(self, a: Tensor, c: float) -> Tensor:
        """`fill` into `a`'s bytes."""
        return node("FILL", (a,), (f32_bits(c),), inplace=True)


def _index(names: tuple[str, ...], op: str) -> int:
    try:
        return names.index(op)
    except ValueError:
        raise GraphError(f"op: one of {', '.join(names)} expected, {op!r} found") from None


def _f32(x: float) -> float:
    """`x` rounded to float32."""
    return float(struct.unpack("<f", struct.pack("<i", f32_bits(x)))[0])


def _softplus(x: float) -> float:
    """`ggml_compute_softplus_f32`, rounded to float32 where C does."""
    x = _f32(x)
    return x if x > 20 else _f32(math.log(_f32(1 + _f32(math.exp(x)))))
