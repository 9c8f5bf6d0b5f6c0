"""op_params in words: which of the 16 mean what, by op, as the constructors in ggml.c set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.tensor import Tensor

_ROPE_MODES = {0: "normal", 2: "neox", 8: "mrope", 24: "vision", 40: "imrope"}
_PRECISIONS = {10: "f32", 15: "bf16", 16: "bf16", 20: "f16", 30: "q8"}
_ORDERS = {0: "asc", 1: "desc"}


def _float(bits: int, t: Tensor, i: int) -> str:
    del bits
    return f"{t.param_f32(i):.7g}"


def _int(bits: int, _t: Tensor, _i: int) -> str:
    return str(bits)


def _word(words: Mapping[int, str]) -> Callable[[int, Tensor, int], str]:
    return lambda bits, _t, _i: words.get(bits, str(bits))


_UNARY = _word(dict(enumerate(UNARY_OPS)))
_GLU = _word(dict(enumerate(GLU_OPS)))
_PREC, _MODE, _ORDER = _word(_PRECISIONS), _word(_ROPE_MODES), _word(_ORDERS)

Param = tuple[int, str, Callable[[int, Tensor, int], str]]
_EPS: tuple[Param, ...] = ((0, "eps", _float),)
_MUL_MAT: tuple[Param, ...] = ((0, "prec", _PREC), (1, "hint", _int), (3, "prec_src1", _PREC))

_PART: tuple[Param, ...] = tuple((i, name, _int) for i, name in enumerate(("nb1", "nb2", "nb3", "offset", "inplace")))
_ROPE: tuple[Param, ...] = (
    (1, "n_dims", _int),
    (2, "mode", _MODE),
    (4, "n_ctx_orig", _int),
    (5, "freq_base", _float),
    (6, "freq_scale", _float),
    (7, "ext_factor", _float),
    (8, "attn_factor", _float),
    (9, "beta_fast", _float),
    (10, "beta_slow", _float),
    *((11 + i, f"section{i}", _int) for i in range(4)),
    (15, "n_offs", _int),
)

PARAMS: dict[str, tuple[Param, ...]] = {
    "UNARY": ((0, "", _UNARY), (1, "alpha_n", _float), (2, "alpha_p", _float), (3, "beta", _float), (4, "eps", _float)),
    "GLU": ((0, "", _GLU), (1, "swapped", _int), (2, "alpha", _float), (3, "limit", _float)),
    "NORM": _EPS,
    "RMS_NORM": _EPS,
    "L2_NORM": _EPS,
    "GROUP_NORM": ((0, "n_groups", _int), (1, "eps", _float)),
    "SCALE": ((0, "s", _float), (1, "b", _float)),
    "CLAMP": ((0, "min", _float), (1, "max", _float)),
    "LEAKY_RELU": ((0, "negative_slope", _float),),
    "DIAG_MASK_INF": ((0, "n_past", _int),),
    "DIAG_MASK_ZERO": ((0, "n_past", _int),),
    "FILL": ((0, "c", _float),),
    "ARANGE": ((0, "start", _float), (1, "stop", _float), (2, "step", _float)),
    "CONCAT": ((0, "dim", _int),),
    "PERMUTE": tuple((i, f"axis{i}", _int) for i in range(4)),
    "VIEW": (),  # the offset stands in view_offs
    "MUL_MAT": _MUL_MAT,
    "MUL_MAT_ID": _MUL_MAT,
    "SOFT_MAX": ((0, "scale", _float), (1, "max_bias", _float)),
    "ROPE": _ROPE,
    "ROPE_BACK": _ROPE,
    "FLASH_ATTN_EXT": (
        (0, "scale", _float),
        (1, "max_bias", _float),
        (2, "logit_softcap", _float),
        (3, "prec", _PREC),
        (4, "n_kv_max", _int),
    ),
    "ARGSORT": ((0, "order", _ORDER),),
    "SSM_SCAN": ((0, "K", _int),),
    "GATED_DELTA_NET": ((0, "K", _int),),
    "GATED_LINEAR_ATTN": ((0, "scale", _float),),
    "SET": _PART,
    "ACC": _PART,
    "TRI": ((0, "type", _int),),
    "ROLL": tuple((i, f"shift{i}", _int) for i in range(4)),
    "POOL_2D": tuple((i, name, _int) for i, name in enumerate(("op", "k0", "k1", "s0", "s1", "p0", "p1"))),
    "IM2COL": tuple((i, name, _int) for i, name in enumerate(("s0", "s1", "p0", "p1", "d0", "d1", "is_2D"))),
    "DSV4_HC_COMB": ((0, "eps", _float), (1, "n_iter", _int)),
    "DSV4_HC_PRE": ((0, "scale", _float), (1, "gated", _int)),
}
"""Op -> the op_params that its constructor sets: position, ggml's name of the argument, how to show it."""

_ALWAYS = frozenset({"UNARY", "GLU", "PERMUTE", "ARGSORT", "CONCAT"})  # where 0 says something, too


def params_text(t: Tensor) -> str:
    """`t`'s op_params as `name=value`, without zeros that say nothing; those of an op not listed by position."""
    known = PARAMS.get(t.op)
    if known is None:
        return " ".join(f"[{i}]={p}" for i, p in enumerate(t.op_params) if p)
    if t.op == "PERMUTE":
        return "axes=" + ",".join(map(str, t.op_params[:4]))
    words = [
        f"{name}={show(t.op_params[i], t, i)}" if name else show(t.op_params[i], t, i)
        for i, name, show in known
        if t.op_params[i] or (t.op in _ALWAYS and i == 0)
    ]
    return " ".join(words)
