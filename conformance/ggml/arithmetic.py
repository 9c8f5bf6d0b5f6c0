"""How a device rounds on the way: declared by a backend, imitated by the reference, named by a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .quants.quants import VEC_DOT_TYPE
from .quants.requant import mode_named
from .tensor import Tensor


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a backend rounds before it multiplies and when it stores; the reference can compute the same way.

    What then remains between the two is rounding, so the budget stays tight. The empty one is exact.
    """

    name: str = "exact"
    mul_mat: Mapping[str, str] = field(default_factory=dict)
    """Type of `src[0]` of MUL_MAT and MUL_MAT_ID -> type that the activations are rounded to first, as
    ggml's `vec_dot_type`. A type that is not listed multiplies exactly."""
    flash_attn: Mapping[str, str] = field(default_factory=dict)
    """Type of K in FLASH_ATTN_EXT -> type that Q is rounded to first."""
    quantize: str = "reference"
    """How values are stored in block types: `reference` is `from_float_ref`; `simd` is ggml-cpu's x86 code for Q8_0
    and Q8_1, which rounds to nearest even after multiplying with 127 / amax."""
    flash_attn_sum: Mapping[str, str] = field(default_factory=dict)
    """Type of V in FLASH_ATTN_EXT -> type that the sum over KV cells is rounded to after each cell; a type that is not
    listed is summed exactly."""
    flash_attn_tile: int = 0
    """From this many tokens on, FLASH_ATTN_EXT with K and V both F32 or both F16 rounds neither Q nor its sums; 0 if
    there is no such kernel."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Sub-op of UNARY -> type of the table that F32 and F16 arguments are looked up in: argument and value are rounded
    to it. The GLU around the same function (GEGLU around GELU) looks up too."""
    rope: str = "exact"
    """How rotary embedding finds its angles: `exact`, or `float32` as `ggml_rope_cache_init`, which multiplies by
    theta_scale once per pair and rounds each time."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Type of a weight that MUL_MAT or MUL_MAT_ID reads -> form of `requant.FORMS` it is stored in first."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Type of a weight that GET_ROWS reads -> form, likewise."""
    products: str = "float32"
    """Type that a device rounds both operands of every matrix product to: `float32`, or `f16` or `bf16` where it likes
    speed better. Too varied to imitate (fused attention rounds in places of its own): a wider budget instead."""

    def at(self, node: Tensor) -> Arithmetic:
        """How `node` is computed; where several devices share a graph, as the one it runs on."""
        del node
        return self

    def copied(self, original: Mapping[Tensor, Tensor]) -> Arithmetic:
        """The same for copies of nodes: `original` gives the node that each stands for."""
        del original
        return self


@dataclass(frozen=True, slots=True)
class Mixed(Arithmetic):
    """Several devices share a graph: each node rounds as the device it runs on, one that is not listed exactly."""

    nodes: Mapping[Tensor, Arithmetic] = field(default_factory=dict)

    def at(self, node: Tensor) -> Arithmetic:
        """How the device of `node` rounds."""
        return self.nodes.get(node, EXACT)

    def copied(self, original: Mapping[Tensor, Tensor]) -> Mixed:
        """The same for copies of nodes, beside the nodes themselves."""
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
    """Exact but for the weights, which are requantised as `mode` of `requant.MODES` says.

    Raises:
        UsageError: there is no such mode.
    """
    tables = mode_named(mode)
    if mode == "none":
        return EXACT
    return Arithmetic(f"requant-{mode}", weights=tables.weights, rows=tables.rows)


NAMED = {a.name: a for a in (EXACT, GGML_CPU)}
"""What a recording can say of itself, by name."""
