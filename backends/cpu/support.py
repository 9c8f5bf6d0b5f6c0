"""What the reference takes, and in words why not: types per operand, and the few rules beyond types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.ggml import quants
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import BF16, F16, F32, I32, I64, Q8_1, Q8_K, TYPES, GGMLType

Types = frozenset[GGMLType]

FLOAT: Types = frozenset({F32, F16, BF16})
INDEX: Types = frozenset({I32, I64})
DOTS: Types = frozenset({Q8_1, Q8_K})
"""What ggml only ever rounds activations to: it has no `to_float` and no `vec_dot` for them."""
BLOCK: Types = frozenset(t for t in TYPES.values() if t.is_quantized) - DOTS
VALUES: Types = FLOAT | BLOCK
WEIGHTS: Types = frozenset(quants.VEC_DOT_TYPE) - DOTS
BLOCKS_STORED: Types = frozenset(quants.WRITE)
"""Block types that values can be stored into: ggml's CPU has no `from_float` for the others."""
STORED: Types = FLOAT | BLOCKS_STORED | {I32}
ONLY_F32: Types = frozenset({F32})
ONLY_I32: Types = frozenset({I32})
ANY: Types = frozenset(TYPES.values())


@dataclass(frozen=True, slots=True)
class Takes:
    """The types an op takes, `src` in order (more are refused) and what it stores."""

    src: tuple[Types, ...] = ()
    dst: Types = FLOAT
    also: Callable[[Tensor], str] | None = None
    """A rule beyond types: why not, or empty."""


def _copies(node: Tensor) -> str:
    """CPY, CONT, DUP: equal types as bytes, else what `ggml_compute_forward_dup` converts and a little more."""
    a, to = node.src[0], node.type
    if a is None or a.type is to:
        return ""
    if to not in STORED:
        return f"values cannot be stored in {to}: ggml has no quantiser for it"
    if a.type in VALUES and (to is not I32 or a.type is F32):
        return ""
    if a.type is I32 and to is F32:
        return ""
    return f"no conversion from {a.type} to {to}"


def _same_types(node: Tensor) -> str:
    other = [s.type for s in node.src if s is not None and s.type is not node.type]
    return f"src and dst must be of one type, {other[0]} and {node.type} found" if other else ""


def _get_rows(node: Tensor) -> str:
    a = node.src[0]
    if a is not None and (a.type is I32) != (node.type is I32):
        return f"rows of {a.type} cannot become {node.type}"
    return ""


def _rope(node: Tensor) -> str:
    """The assertions of `ggml_compute_forward_rope_flt`."""
    from .rope import MODES, MROPE, VISION  # noqa: PLC0415  # the table of rules needs no kernels

    n_dims, mode, offset = node.param_i32(1), node.param_i32(2), node.param_i32(15)
    if mode not in MODES:
        return f"op_params[2] (mode) must be one of {MODES}, {mode} found"
    if mode & MROPE and sum(node.op_params[11:15]) <= 0:
        return f"op_params[11:15] (sections) must have a positive sum, {node.op_params[11:15]} found"
    if mode == VISION and 2 * n_dims != node.ne[0]:
        return f"op_params[1] (n_dims) must be ne[0] / 2 in vision mode, {n_dims} of {node.ne[0]} found"
    if n_dims <= 0 or n_dims % 2 or offset < 0 or offset + n_dims > node.ne[0]:
        return f"n_dims {n_dims} from offset {offset} must be even and lie within ne[0] = {node.ne[0]}"
    return ""


_ELEMENT = Takes((FLOAT,))
_BINARY = Takes((FLOAT, FLOAT))
_ADD = Takes((VALUES, FLOAT), FLOAT | BLOCKS_STORED)
_ROWS = Takes((ONLY_F32,), ONLY_F32)
_COPY = Takes((ANY, ANY), ANY, _copies)
_SORT = Takes((ONLY_F32,), ONLY_I32)

TAKES: dict[str, Takes] = {
    **dict.fromkeys(("CPY", "CONT", "DUP"), _COPY),
    "ADD": _ADD,
    "ADD1": _ADD,
    **dict.fromkeys(("SUB", "MUL", "DIV"), _BINARY),
    "ADD_ID": Takes((FLOAT, FLOAT, ONLY_I32)),
    **dict.fromkeys(
        ("SCALE", "SQR", "SQRT", "LOG", "SIN", "COS", "CLAMP", "LEAKY_RELU", "FILL", "DIAG_MASK_INF", "DIAG_MASK_ZERO"),
        _ELEMENT,
    ),
    "ARANGE": Takes(),
    "UNARY": _ELEMENT,
    "GLU": _BINARY,
    "CONCAT": Takes((ANY, ANY), ANY, _same_types),
    "REPEAT": Takes((ANY, ANY), ANY, _same_types),
    "PAD": _ELEMENT,
    **dict.fromkeys(("SUM", "SUM_ROWS", "MEAN", "CUMSUM", "NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM"), _ELEMENT),
    **dict.fromkeys(("ARGSORT", "TOP_K", "ARGMAX"), _SORT),
    "SOFT_MAX": Takes((FLOAT, FLOAT, ONLY_F32)),
    "MUL_MAT": Takes((WEIGHTS, VALUES | DOTS), ONLY_F32),
    "MUL_MAT_ID": Takes((WEIGHTS, VALUES | DOTS, ONLY_I32), ONLY_F32),
    "SSM_CONV": Takes((FLOAT, FLOAT)),
    "GET_ROWS": Takes((VALUES | ONLY_I32, ONLY_I32), FLOAT | ONLY_I32, _get_rows),
    "SET_ROWS": Takes((FLOAT, INDEX, ANY), STORED),
    **dict.fromkeys(("ROPE", "ROPE_BACK"), Takes((FLOAT, ONLY_I32, ONLY_F32), FLOAT, _rope)),
    **dict.fromkeys(("SET", "ACC"), Takes((ONLY_F32 | ONLY_I32,) * 2, ONLY_F32 | ONLY_I32, _same_types)),
    "OUT_PROD": Takes((WEIGHTS, ONLY_F32), ONLY_F32),
    **dict.fromkeys(("TRI", "DIAG", "ROLL"), _ROWS),
    "SOLVE_TRI": Takes((ONLY_F32,) * 2, ONLY_F32),
    "POOL_2D": Takes((ONLY_F32 | {F16},), ONLY_F32),
    "IM2COL": Takes((FLOAT, ONLY_F32), ONLY_F32 | {F16}),
    "LIGHTNING_INDEXER": Takes((ONLY_F32, VALUES, ONLY_F32, frozenset({F16})), ONLY_F32),
    **dict.fromkeys(("DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST"), Takes((ONLY_F32,) * 4, ONLY_F32)),
    "SSM_SCAN": Takes(((ONLY_F32,) * 6) + (ONLY_I32,), ONLY_F32),
    **dict.fromkeys(
        ("RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "GATED_DELTA_NET"), Takes((ONLY_F32,) * 7, ONLY_F32)
    ),
    "FLASH_ATTN_EXT": Takes((FLOAT, VALUES, VALUES, FLOAT, ONLY_F32), ONLY_F32),
}
"""Op -> what it takes: all that ggml's CPU takes and some of what only other devices do."""


def _listed(types: Types) -> str:
    return ", ".join(t for t in TYPES if TYPES[t] in types)


def refusal(node: Tensor) -> str:
    """Why the reference cannot compute `node`; empty where it can."""
    takes = TAKES[node.op]
    for i, s in enumerate(node.src):
        if s is None:
            continue
        if i >= len(takes.src):
            return f"takes {len(takes.src)} src, src[{i}] is {s}"
        if s.type not in takes.src[i]:
            return f"src[{i}] must be one of {_listed(takes.src[i])}; {s.type} found"
    if node.type not in takes.dst:
        return f"dst must be one of {_listed(takes.dst)}; {node.type} found"
    return takes.also(node) if takes.also is not None else ""
