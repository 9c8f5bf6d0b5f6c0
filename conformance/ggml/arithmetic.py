"""Rounding of a device: declared by a backend, reproduced by the reference, stored by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from .errors import UsageError
from .ops.op import DECLARATIONS
from .quants import QUANTIZERS, VEC_DOT_TYPE
from .quants.requant import FORMS, MODES, mode_named
from .tensor import Tensor, is_contiguous, nelements
from .types import F32, TYPES


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a backend rounds operands before it multiplies them and values when it stores them.

    The reference can compute the same way, so that only float32 rounding remains between the two and tolerances stay
    tight. The default is exact. Raises UsageError for a rounding that no known device has, or a bound above upstream's
    limit for the op (`faults`).
    """

    name: str = "exact"
    mul_mat: Mapping[str, str] = field(default_factory=dict)
    """Type of `src[0]` of MUL_MAT and MUL_MAT_ID -> type to which activations are rounded.

    This is ggml's `vec_dot_type`; other types multiply exactly."""
    flash_attn: Mapping[str, str] = field(default_factory=dict)
    """Type of K in FLASH_ATTN_EXT -> type that Q is rounded to first."""
    quantize: str = "reference"
    """How values are stored in block types: `reference`, `simd`, `even` or `fused`.

    `reference` is `from_float_ref`; `simd` is ggml-cpu's x86 code for Q8_0 and Q8_1, which multiplies by 127 / amax
    and rounds to nearest even; `even`, on ARM and RISC-V, multiplies by 1 / (amax / 127) and rounds to nearest even;
    `fused` is `even` where GCC uses fused multiply-add to store Q2_K, Q4_K, Q5_K and Q8_K."""
    mul_mat_sum: Mapping[str, str] = field(default_factory=dict)
    """Type of weights, or of K -> type in which their products are summed: wider tolerance.

    ARM's kernels for F16 sum in F16 where it has F16 arithmetic. How many terms a sum adds depends on the kernel."""
    flash_attn_sum: Mapping[str, str] = field(default_factory=dict)
    """Type of V in FLASH_ATTN_EXT -> type to which the sum over cells is rounded each time.

    Sums over other types are exact."""
    flash_attn_weights: str = "float32"
    """Type, `float32` or `f16`, of what FLASH_ATTN_EXT multiplies V and such a sum by.

    `f16` is `ggml_vec_mad_f16` on ARM with F16 arithmetic and on RISC-V with Zvfh."""
    flash_attn_tile: int = 0
    """Tokens from which FLASH_ATTN_EXT with K and V both F32 or both F16 is exact.

    It then rounds neither Q nor its sums; 0 if the device has no such kernel."""
    flash_attn_step: int = 1
    """The tiled kernel applies only if V's `ne[0]` is a multiple of this."""
    flash_attn_parts: int = 1
    """Parts of a token's cells that FLASH_ATTN_EXT sums by themselves, as ggml's threads do.

    K and V are both F32 or both F16 with at least 512 cells. The sums of the parts add up in float32."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Sub-op of UNARY -> type of the lookup table for F32 and F16 arguments.

    Argument and value are rounded to it. The GLU with the same function (GEGLU for GELU) uses the table, too."""
    rope: str = "exact"
    """How rotary embedding computes its angles: `exact` or `float32`.

    `float32` is `ggml_rope_cache_init`, which multiplies by theta_scale once per pair and rounds each time."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Type of a weight of MUL_MAT or MUL_MAT_ID -> form of `requant.FORMS` that it gets."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Type of a weight of GET_ROWS -> form of `requant.FORMS` that it gets."""
    products: str = "float32"
    """Type to which a device rounds operands of every matrix product: wider tolerance.

    `float32`, or `f16` or `bf16` for speed. Devices differ too much to reproduce this: fused attention rounds at
    other places."""

    operands: str = "float32"
    """Type to which operands of MUL_MAT, MUL_MAT_ID and FLASH_ATTN_EXT are rounded.

    `float32`, `f16` or `bf16`; quantised weights are rounded after unpacking."""
    sums: str = "float32"
    """How MUL_MAT and MUL_MAT_ID sum: `float32`, or a key of `SUMS` for F16 sums."""
    roundings: Mapping[str, str] = field(default_factory=dict)
    """Key of a node (`key_of`) -> name in `ROUNDINGS` of the rounding measured on the device."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Key of a node -> NMSE allowed beyond that rounding."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Key of a node -> terms of the longest sum measured; the bound grows with longer sums."""

    measured: bool = True
    """True if a key without a rounding is exact; else upstream's limit of the op applies."""

    def __post_init__(self) -> None:
        """Raise UsageError if the arithmetic allows more error than upstream does."""
        for fault in faults(self):
            raise UsageError(f"arithmetic {self.name:.80}: {fault}")

    @property
    def by_node(self) -> bool:
        """True if the rounding differs between nodes; `at` then returns it."""
        return bool(self.roundings) or not self.measured

    def at(self, node: Tensor) -> Arithmetic:
        """Return the arithmetic of `node`: that of its device in a shared graph, or of its key."""
        return ROUNDINGS[self.roundings.get(key_of(node), EXACT.name)] if self.by_node else self

    def bound(self, node: Tensor, terms: int = 1) -> float:
        """Return the NMSE allowed for `node`, a sum of `terms`; at most upstream's limit."""
        key = key_of(node) if self.bounds or not self.measured else ""
        if not self.measured and key not in self.roundings:
            return 0.0 if _moves(node) else limit_at(node)
        bound = self.bounds.get(key, 0.0)
        if not bound:
            return 0.0
        longest = self.lengths.get(key, terms)
        return min(bound * max(1.0, terms / max(1, longest)), limit_at(node))

    def copied(self, original: Mapping[Tensor, Tensor]) -> Arithmetic:
        """Return the arithmetic for copies of nodes; `original` maps each copy to its node."""
        del original
        return self


@dataclass(frozen=True, slots=True)
class Mixed(Arithmetic):
    """Arithmetic of several devices that share a graph; nodes not in `nodes` are exact."""

    nodes: Mapping[Tensor, Arithmetic] = field(default_factory=dict)

    @property
    def by_node(self) -> bool:
        """True: each node rounds as its device does."""
        return True

    def at(self, node: Tensor) -> Arithmetic:
        """Return the arithmetic of `node`'s device."""
        return self.nodes.get(node, EXACT).at(node)

    def bound(self, node: Tensor, terms: int = 1) -> float:
        """Return the bound of `node`'s device."""
        return self.nodes.get(node, EXACT).bound(node, terms)

    def copied(self, original: Mapping[Tensor, Tensor]) -> Mixed:
        """Return the arithmetic for the nodes and for copies of them."""
        return replace(
            self, nodes={**self.nodes, **{copy: self.nodes.get(node, EXACT) for copy, node in original.items()}}
        )


LIMIT = 1e-7
LIMITS = {
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "FLASH_ATTN_EXT", "CPY", "SET_ROWS", "COL2IM_1D"), 5e-4),
    **dict.fromkeys(("CONV_2D", "CONV_3D", "CONV_TRANSPOSE_2D"), 5e-4),
    **dict.fromkeys(("SOFT_MAX", "LIGHTNING_INDEXER"), 1e-6),
    "SSM_SCAN": 2e-7,
}
"""Op -> `max_nmse_err` of upstream's test-backend-ops, if it is not `LIMIT`.

The largest of the op's cases (llama.cpp, tests/test-backend-ops.cpp, ggml 0.25.3). `limit_at` refines it by types
and sizes."""
_QUANT_STEP = {"q4_0": 1.0, "q4_1": 1.0, "iq4_nl": 1.0, "q5_0": 0.5, "q5_1": 0.5, "q8_0": 0.125}
"""Block type -> quantisation step relative to 4 bits, as in upstream's CPY test.

`test_cpy` and `test_set_rows` of test-backend-ops use the same estimate."""


def _moves(node: Tensor) -> bool:
    """Return True if `node` copies values without a type change; no device rounds these."""
    row = DECLARATIONS[node.op].rounding
    return not row.base and not row.per_k and all(s is None or s.type is node.type for s in node.src[:1])


def limit_of(op: str) -> float:
    """Return the NMSE that upstream's own test of an op allows."""
    return LIMITS.get(op, LIMIT)


def limit_at(node: Tensor) -> float:
    """Return the NMSE that upstream's own test allows for `node`; one quant step for a store."""
    src = node.src[0] if node.src else None
    if node.op == "COL2IM_1D":
        return LIMIT if node.type is F32 else limit_of(node.op)
    if node.op not in {"CPY", "SET_ROWS"} or src is None:
        return limit_of(node.op)
    if node.op == "CPY" and src.type is node.type:
        return 0.0
    step = _QUANT_STEP.get(node.type.name)
    if step is None:
        return 1e-6 if node.op == "CPY" else LIMIT
    step *= 2.0 if node.op == "CPY" and node.type.name == "iq4_nl" else 1.0
    return min(limit_of(node.op), step * step / (16 * max(1, nelements(src))))


BUCKETS = (9, 2, 1)
"""Token counts from which devices commonly use another matrix kernel, in descending order."""
SUMS = {"f16": 1, "f16x2": 2, "f16x4": 4}
"""Name of an F16 sum -> number of neighbours that are added together, from last to first."""


def op_of(key: str) -> str:
    """Return the op of a key such as `GLU.SWIGLU-f16+f16`."""
    return key.partition("-")[0].partition(".")[0]


def excess(key: str, bound: float) -> str:
    """Return the allowed range if `bound` is too large for the nodes of `key`; else ""."""
    op = op_of(key)
    if 0 <= bound <= limit_of(op):
        return ""
    return f"an NMSE from 0 to {limit_of(op):g}, upstream's limit for {op} (max_nmse_err of test-backend-ops)"


MOST_PARTS = 512
"""Maximum `flash_attn_parts`: ggml's maximum number of threads."""
_WIDTHS = frozenset({"float32", "f16", "bf16"})
_ROUNDED = frozenset({"f16", "bf16", "q8_0", "q8_1", "q8_K", "int8xrow"})
"""Types to which devices round activations; the coarsest, int8 by row, costs 1e-4."""
_TABLES = frozenset({"GELU", "GELU_QUICK"})
"""Sub-ops of UNARY for which ggml has a lookup table."""


def faults(a: Arithmetic) -> Iterator[str]:
    """Yield a sentence for each declaration that an arithmetic may not make.

    The reference reproduces each allowed rounding exactly, or the suite knows its error. So only roundings of known
    devices are accepted, and a bound must be below upstream's limit.
    """
    for key, bound in a.bounds.items():
        if why := excess(key, bound):
            yield f"bounds[{key!r:.80}]: {why} expected, {bound:g} found"
    if not 1 <= a.flash_attn_parts <= MOST_PARTS:
        yield f"flash_attn_parts: 1 to {MOST_PARTS} expected, {a.flash_attn_parts} found"
    for key, terms in a.lengths.items():
        if terms < 1:
            yield f"lengths[{key!r:.80}]: 1 or more expected, {terms} found"
    one = {
        "quantize": (a.quantize, tuple(QUANTIZERS)),
        "rope": (a.rope, ("exact", "float32")),
        "products": (a.products, _WIDTHS),
        "operands": (a.operands, _WIDTHS),
        "sums": (a.sums, ("float32", *SUMS)),
        "flash_attn_weights": (a.flash_attn_weights, ("float32", "f16")),
        **{f"mul_mat[{k!r:.80}]": (v, _ROUNDED) for k, v in a.mul_mat.items()},
        **{f"flash_attn[{k!r:.80}]": (v, _ROUNDED) for k, v in a.flash_attn.items()},
        **{f"mul_mat_sum[{k!r:.80}]": (v, ("f16",)) for k, v in a.mul_mat_sum.items()},
        **{f"flash_attn_sum[{k!r:.80}]": (v, ("f16",)) for k, v in a.flash_attn_sum.items()},
        **{f"tables[{k!r:.80}]": (v, ("f16",)) for k, v in a.tables.items()},
        **{f"weights[{k!r:.80}]": (v, _forms(k)) for k, v in a.weights.items()},
        **{f"rows[{k!r:.80}]": (v, _forms(k)) for k, v in a.rows.items()},
        **{f"roundings[{k!r:.80}]": (v, ROUNDINGS) for k, v in a.roundings.items()},
    }
    for where, (value, known) in one.items():
        if value not in known:
            yield f"{where}: one of {', '.join(sorted(known))} expected, {value!r:.80} found"
    for sub in a.tables:
        if sub not in _TABLES:
            yield f"tables: a table of {' or '.join(sorted(_TABLES))} expected, {sub!r:.80} found"


def _forms(type_name: str) -> list[str]:
    """Return the forms in which devices store weights of a type; 4-bit only if quantised."""
    quantised = type_name in TYPES and TYPES[type_name].is_quantized
    return [name for name, form in FORMS.items() if quantised or form is None or form.bits >= 8]


def key_of(node: Tensor) -> str:
    """Return the properties that may affect a device's rounding: `MUL_MAT-q4_0+f32@9`.

    The key has op and sub-op; the types of the required sources, and of a result that is neither F32 nor the first
    type; for a product the lower bound of its token bucket, `batch` if it has several matrices, `view` with the
    operands that have gaps or are permuted; and `prec` if set.
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


ROUNDINGS: dict[str, Arithmetic] = {}
"""Roundings that devices are known to have, simplest first."""
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
"""Arithmetic of ggml's CPU device on x86, since 0.10.

`type_traits_cpu` of ggml-cpu.c; `VKQ16` and `GGML_FA_TILE_Q` of `ggml_compute_forward_flash_attn_ext_f16`;
`ggml_table_gelu_f16` and `ggml_table_gelu_quick_f16`."""


def requantising(mode: str) -> Arithmetic:
    """Return an arithmetic that requantises weights by `mode`; UsageError if unknown."""
    tables = mode_named(mode)
    if mode == "none":
        return EXACT
    return Arithmetic(f"requant-{mode}", weights=tables.weights, rows=tables.rows)


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
ROUNDINGS.update({a.name: a for a in (EXACT, *_LEARNT)})

_INT8 = Arithmetic("requant-int8xrow", weights=dict.fromkeys((*_BLOCKS, "f32", "f16", "bf16"), "int8xrow"))
REQUANTISING = {a.name: a for a in (*(requantising(m) for m in MODES if m != "none"), _INT8)}
"""Arithmetics that are exact but for their requantised weights; golden outputs name them."""
NAMED = {a.name: a for a in (EXACT, GGML_CPU, *REQUANTISING.values())}
"""Arithmetics that a recording can name."""

UNDECLARED = Arithmetic("undeclared", measured=False)
"""Arithmetic of a device that declares nothing: the limits of upstream's own tests apply."""
