"""`cpu`: the reference. float64 inside, one rounding at the end, on NumPy."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import Kernel, KernelBackend, Raw, Sources
from conformance.ggml import quants
from conformance.ggml.arithmetic import EXACT, Arithmetic, Mixed
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import BF16, F16, F32, I32, I64, Q8_1, Q8_K, TYPES, GGMLType

from . import attention, elementwise, matmul, recurrent, rope, rows, views, windows

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
    p, modes = node.params, list(ROPE_TYPE)
    if p.mode not in modes:
        return f"mode must be one of {', '.join(f'{m.value} ({m.name.lower()})' for m in modes)}; {p.mode} found"
    if p.mode & ROPE_TYPE.MROPE and sum(p.sections) <= 0:
        return f"sections must have a positive sum, {p.sections} found"
    if p.mode == ROPE_TYPE.VISION and 2 * p.n_dims != node.ne[0]:
        return f"n_dims must be ne[0] / 2 in vision mode, {p.n_dims} of {node.ne[0]} found"
    if p.n_dims <= 0 or p.n_dims % 2 or p.n_offs < 0 or p.n_offs + p.n_dims > node.ne[0]:
        return f"n_dims {p.n_dims} from offset {p.n_offs} must be even and lie within ne[0] = {node.ne[0]}"
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


def _names(types: Types) -> str:
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
            return f"src[{i}] must be one of {_names(takes.src[i])}; {s.type} found"
    if node.type not in takes.dst:
        return f"dst must be one of {_names(takes.dst)}; {node.type} found"
    return takes.also(node) if takes.also is not None else ""


_TOPICS = (elementwise, rows, views, matmul, attention, rope, windows, recurrent)


def _table(arithmetic: Arithmetic) -> dict[str, Kernel]:
    return {op: kernel for topic in _TOPICS for op, kernel in topic.kernels(arithmetic).items()}


def _by_node(arithmetic: Mixed) -> dict[str, Kernel]:
    """Kernels that look up, node by node, in which arithmetic they compute."""
    distinct = {id(a): a for a in (EXACT, *arithmetic.nodes.values())}
    tables = {i: _table(a) for i, a in distinct.items()}

    def kernel(node: Tensor, dst: Raw, src: Sources) -> None:
        tables[id(arithmetic.at(node))][node.op](node, dst, src)

    return dict.fromkeys(tables[id(EXACT)], kernel)


class CpuBackend(KernelBackend):
    """Exact values of every op; by `computing_in`, exact values after the rounding that another backend declares."""

    name = "cpu"

    def __init__(self) -> None:
        self._use(EXACT)

    def _use(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self._kernels = _by_node(arithmetic) if isinstance(arithmetic, Mixed) else _table(arithmetic)

    def computing_in(self, arithmetic: Arithmetic) -> CpuBackend:
        """A reference that rounds activations and stores blocks as `arithmetic` says, and is exact in all else."""
        other = CpuBackend()
        other._use(arithmetic)
        return other

    def arithmetic(self) -> Arithmetic:
        """Exact, or what `computing_in` was given."""
        return self._arithmetic

    def kernels(self) -> Mapping[str, Kernel]:
        """Op -> kernel."""
        return self._kernels

    def refuses(self, node: Tensor) -> str:
        """Types and parameters that the kernel of `node.op` has no meaning for."""
        return refusal(node)

    def info(self) -> DeviceInfo:
        """NumPy on this machine's processor."""
        return DeviceInfo(
            backend="cpu",
            device=platform.machine(),
            description=f"reference in float64, arithmetic {self._arithmetic.name}",
            versions={"numpy": np.__version__, "python": platform.python_version()},
        )
