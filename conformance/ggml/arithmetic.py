"""How a device rounds: a backend declares it, the reference imitates it, a recording names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .quants import VEC_DOT_TYPE
from .quants.requant import mode_named
from .tensor import Tensor


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a backend rounds operands before it multiplies and values when it stores them.

    The reference can compute the same way, so that only float32 rounding remains between the two and budgets stay
    tight. The default is exact.
    """

    name: str = "exact"
    mul_mat: Mapping[str, str] = field(default_factory=dict)
    """Type of `src[0]` of MUL_MAT and MUL_MAT_ID -> type that activations are rounded to first, as ggml's
    `vec_dot_type`; other types multiply exactly."""
    flash_attn: Mapping[str, str] = field(default_factory=dict)
    """Type of K in FLASH_ATTN_EXT -> type that Q is rounded to first."""
    quantize: str = "reference"
    """How values are stored in block types: `reference` is `from_float_ref`; `simd` is ggml-cpu's x86 code for Q8_0
    and Q8_1, which multiplies by 127 / amax and rounds to nearest even."""
    flash_attn_sum: Mapping[str, str] = field(default_factory=dict)
    """Type of V in FLASH_ATTN_EXT -> type that the sum over KV cells is rounded to after each cell; other types are
    summed exactly."""
    flash_attn_tile: int = 0
    """From this many tokens on, FLASH_ATTN_EXT with K and V both F32 or both F16 rounds neither Q nor its sums; 0: no
    such kernel."""
    flash_attn_step: int = 1
    """The same only where V's `ne[0]` is a multiple of this."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Sub-op of UNARY -> type of the lookup table for F32 and F16 arguments: argument and value are rounded to it. The
    GLU around the same function (GEGLU around GELU) uses the table too."""
    rope: str = "exact"
    """How rotary embedding computes its angles: `exact`, or `float32` as `ggml_rope_cache_init`, which multiplies by
    theta_scale once per pair and rounds each time."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Type of a weight that MUL_MAT or MUL_MAT_ID reads -> form of `requant.FORMS` that it is stored in first."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """The same for weights that GET_ROWS reads."""
    products: str = "float32"
    """Type that a device rounds both operands of every matrix product to: `float32`, or `f16` or `bf16` for speed.
    Devices vary too much to imitate (fused attention rounds in other places): this widens the budget instead."""

    def at(self, node: Tensor) -> Arithmetic:
        """The arithmetic of `node`: that of its device, if several devices share a graph."""
        del node
        return self

    def copied(self, original: Mapping[Tensor, Tensor]) -> Arithmetic:
        """The same arithmetic for copies of nodes: `original` maps each copy to its node."""
        del original
        return self


@dataclass(frozen=True, slots=True)
class Mixed(Arithmetic):
    """Several devices share a graph: each node rounds as its device does, nodes not in `nodes` are exact."""

    nodes: Mapping[Tensor, Arithmetic] = field(default_factory=dict)

    def at(self, node: Tensor) -> Arithmetic:
        """The arithmetic of `node`'s device."""
        return self.nodes.get(node, EXACT)

    def copied(self, original: Mapping[Tensor, Tensor]) -> Mixed:
        """The same arithmetic for the nodes and for copies of them."""
        return replace(self, nodes={**self.nodes, **{copy: self.at(node) for copy, node in original.items()}})


EXACT = Arithmetic()

_VEC_DOT = {t.name: to.name for t, to in VEC_DOT_TYPE.items() if to.name != "f32" and t.name != "q8_1"}

GGML_CPU = Arithmetic(
    "ggml-cpu",
    mul_mat=_VEC_DOT,
    flash_attn=_VEC_DOT,
    quantize="simd",
    flash_attn_sum={"f16": "f16"},
    flash_attn_tile=64,
    tables={"GELU": "f16", "GELU_QUICK": "f16"},
    rope="float32",
)
"""ggml's CPU device on x86, since 0.10: `type_traits_cpu` of ggml-cpu.c; `VKQ16` and `GGML_FA_TILE_Q` of
`ggml_compute_forward_flash_attn_ext_f16`; `ggml_table_gelu_f16` and `ggml_table_gelu_quick_f16`."""


def requantising(mode: str) -> Arithmetic:
    """Exact except for weights, which `mode` of `requant.MODES` requantises; UsageError for an unknown mode."""
    tables = mode_named(mode)
    if mode == "none":
        return EXACT
    return Arithmetic(f"requant-{mode}", weights=tables.weights, rows=tables.rows)


NAMED = {a.name: a for a in (EXACT, GGML_CPU)}
"""The arithmetics that a recording can name."""
