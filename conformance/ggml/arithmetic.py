"""How a device rounds: a backend declares it, the reference imitates it, a recording names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .ops.op import DECLARATIONS
from .quants import VEC_DOT_TYPE
from .quants.requant import mode_named
from .tensor import Tensor, is_contiguous
from .types import F32, TYPES


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

    operands: str = "float32"
    """Type that both operands of MUL_MAT, MUL_MAT_ID and FLASH_ATTN_EXT are rounded to, weights in blocks once they are
    unpacked: `float32`, `f16` or `bf16`."""
    sums: str = "float32"
    """How MUL_MAT and MUL_MAT_ID add up: `float32`, or a key of `SUMS`: products in F16, added up in F16."""
    roundings: Mapping[str, str] = field(default_factory=dict)
    """Of a device that was measured: key of a node (`key_of`) -> the rounding in `ROUNDINGS` that it has."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Key of a node -> NMSE that its result may be off beyond that."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Key of a node -> terms of the longest sum measured; the bound of a longer one grows with it."""

    measured: bool = True
    """Whether a key without rounding is exact; else it may be off as far as upstream's own test of the op allows."""

    @property
    def by_node(self) -> bool:
        """Whether nodes differ in it: `at` then says how."""
        return bool(self.roundings) or not self.measured

    def at(self, node: Tensor) -> Arithmetic:
        """The arithmetic of `node`: that of its device, if several devices share a graph, or that of its key."""
        return ROUNDINGS[self.roundings.get(key_of(node), EXACT.name)] if self.by_node else self

    def bound(self, node: Tensor, terms: int = 1) -> float:
        """NMSE that `node`, a sum of `terms`, may be off beyond its rounding; 0 unless measured."""
        key = key_of(node) if self.bounds or not self.measured else ""
        if not self.measured and key not in self.roundings:
            return limit_of(node.op)
        longest = self.lengths.get(key, terms)
        return self.bounds.get(key, 0.0) * max(1.0, terms / max(1, longest))

    def copied(self, original: Mapping[Tensor, Tensor]) -> Arithmetic:
        """The same arithmetic for copies of nodes: `original` maps each copy to its node."""
        del original
        return self


@dataclass(frozen=True, slots=True)
class Mixed(Arithmetic):
    """Several devices share a graph: each node rounds as its device does, nodes not in `nodes` are exact."""

    nodes: Mapping[Tensor, Arithmetic] = field(default_factory=dict)

    @property
    def by_node(self) -> bool:
        """Always."""
        return True

    def at(self, node: Tensor) -> Arithmetic:
        """The arithmetic of `node`'s device."""
        return self.nodes.get(node, EXACT).at(node)

    def bound(self, node: Tensor, terms: int = 1) -> float:
        """That of `node`'s device."""
        return self.nodes.get(node, EXACT).bound(node, terms)

    def copied(self, original: Mapping[Tensor, Tensor]) -> Mixed:
        """The same arithmetic for the nodes and for copies of them."""
        return replace(
            self, nodes={**self.nodes, **{copy: self.nodes.get(node, EXACT) for copy, node in original.items()}}
        )


EXACT = Arithmetic()

LIMIT = 1e-7
LIMITS = {
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "FLASH_ATTN_EXT", "CPY", "SET_ROWS"), 5e-4),
    **dict.fromkeys(("SOFT_MAX", "LIGHTNING_INDEXER"), 1e-6),
    "SSM_SCAN": 2e-7,
}
"""Op -> `max_nmse_err` of upstream's test-backend-ops, where it is another than its default `LIMIT`."""


def limit_of(op: str) -> float:
    """NMSE that upstream's own test of an op allows."""
    return LIMITS.get(op, LIMIT)


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


BUCKETS = (9, 2, 1)
"""Tokens from which devices commonly take another kernel for a product, the most first."""
SUMS = {"f16": 1, "f16x2": 2, "f16x4": 4}
"""Name of a sum in F16 -> how many neighbours are added together, the last of them first."""


def key_of(node: Tensor) -> str:
    """What a device's rounding may depend on: `MUL_MAT-q4_0+f32@9`, `GLU.SWIGLU-f16+f16`, `CPY-f32+q8_0`.

    Op and sub-op; types of the required sources, and of a result that is neither F32 nor as the first; of a product the
    least tokens of its bucket, `batch` where it is several, `view` with the operands that have gaps or are permuted,
    and a `prec` that was set.
    """
    declared = DECLARATIONS[node.op]
    types = [s.type.name for s in node.src[: declared.n_src] if s is not None]
    if node.type.name not in {F32.name, *types[:1]}:
        types.append(node.type.name)
    sub = f".{node.params.op}" if node.op in {"UNARY", "GLU"} else ""
    return f"{node.op}{sub}-{'+'.join(types)}" + _form(node)


def _form(node: Tensor) -> str:
    places = {"MUL_MAT": (1, 1), "MUL_MAT_ID": (1, 2), "FLASH_ATTN_EXT": (0, 1)}
    if node.op not in places:
        return ""
    i, dim = places[node.op]
    operands = [s for s in node.src[:2] if s is not None]
    tokens = max(1, operands[i].ne[dim])
    views = (
        ""
        if node.op == "FLASH_ATTN_EXT"
        else "".join(name for name, s in zip("ab", operands, strict=False) if not is_contiguous(s))
    )
    several = node.op == "MUL_MAT" and node.ne[2] * node.ne[3] > 1
    form = ",batch" * several + (f",view={views}" if views else "")
    prec = f",prec={node.params.prec.name}" if node.params.prec else ""
    return f"@{next(n for n in BUCKETS if n <= tokens)}{form}{prec}"


_BLOCKS = [name for name, t in TYPES.items() if t.is_quantized]
_LEARNT = (
    Arithmetic("table of f16", tables={"GELU": "f16", "GELU_QUICK": "f16"}),
    Arithmetic("angles in float32", rope="float32"),
    Arithmetic("stored by simd", quantize="simd"),
    Arithmetic("operands f16", operands="f16"),
    Arithmetic("operands bf16", operands="bf16"),
    *(Arithmetic(f"operands f16, sums {name}", operands="f16", sums=name) for name in SUMS),
    *(
        Arithmetic(f"activations {to}", mul_mat=dict.fromkeys(_BLOCKS, to), flash_attn=dict.fromkeys(_BLOCKS, to))
        for to in ("q8_0", "q8_1", "q8_K")
    ),
    Arithmetic("q f16, sums f16", flash_attn={"f16": "f16"}, flash_attn_sum={"f16": "f16"}),
)
ROUNDINGS = {a.name: a for a in (EXACT, *_LEARNT)}
"""The roundings that devices are known to have, the plainest first."""

NAMED = {a.name: a for a in (EXACT, GGML_CPU)}
"""The arithmetics that a recording can name."""
