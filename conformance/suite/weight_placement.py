"""The family `weight_placement`: weights in every buffer type, and quantised non-weights.

`weight_placement/llama-w=q4_0,run=p5.d1,buffer=1,usage=any,weights=attn_q+ffn_up@7`: a decoder's id, or that of a small
graph (`rows-w=q4_0@7`), and the placement: `weights` of these roles (the last part of their names, `all` of them if
omitted) in the `buffer`-th buffer type that the backend offers, as `usage`. The bytes do not depend on these three: an
id without them is the same model.

A small graph (`KIND-w=TYPE,d=ROW,n=TOKENS`) reads a tensor in an unusual way. A backend that repacks weights must
detect tensors that are read through a view, read twice, computed by the graph, or new in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from conformance.case.case import JSON, MAX_BUFFER, USAGES, Case, Placement, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.quants import vec_dot_type
from conformance.ggml.tensor import FLAG_INPUT, Bytes, Tensor, nbytes, nelements, new_tensor
from conformance.ggml.types import F32, I32, I64, TYPES, GGMLType

from .data import chosen, encode, random_bytes
from .decoder import elements, make
from .decoder.costs import ONE_ROW, launches
from .family import Family, Table, ids_of, keys, read_keys, split_id, text, with_seed, without
from .grid import Keys, grid, points

NAME = "weight_placement"
GENERATOR = 1
"""Increment when the bytes of any small graph change."""

KEYS = {**keys(f"buffer=0 usage={'|'.join(USAGES)}"), "weights": text("all", "roles like attn_q joined by +")}
"""Keys of the placement."""
_GRAPH_KEYS = {
    **keys(f"w=q4_0|{'|'.join(TYPES)} d=64 n=3 m=48 then=0"),
    "k": text("64+128", "lengths of rows joined by +"),
}

_DECODER: Keys = {"l": 1, "embd": 64, "heads": 2, "kv": 1, "head": 32, "ff": 64, "vocab": 64}
_RUN: Keys = {"run": "p5.d1", "buffer": 1}
_EACH_OTHER: Keys = {
    "attn_q": "q4_0", "attn_k": "q8_0", "attn_v": "f16", "ffn_up": "q4_1", "ffn_down": "q5_0", "output": "bf16"
}  # fmt: skip
_EACH = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down output token_embd attn_norm"
_GRAPHS = "rows parts both input computed cache experts"
_SLOTS: Keys = {"k": "2048+14336+4096+5632"}
"""Row lengths for which XDNA2 has kernels, neither ascending nor descending."""
_K_QUANTS: Keys = _DECODER | {"embd": 256, "heads": 8, "kv": 2, "ff": 256}

TABLE: Table = {
    "smoke": (
        grid("rows parts input computed cache", w="q4_0", buffer=1),
        grid("parts", w="q4_1 q5_0 mxfp4", buffer=1),
        grid("parts", w="q4_K q6_K", d=256, buffer=1),
        grid("llama", **_DECODER, w="q4_0", tied=1, **_RUN),
        grid("llama", **_DECODER, w="q8_0", cache="q8_0", **_RUN, usage="any"),
        "product-w=q4_0,d=2048,buffer=1",
        "shared-w=f32,d=2048",
        "shared-w=q4_K,d=256",
        "sizes-w=q8_0",
        grid("lengths", w="q8_0", **_SLOTS, n=1, then=65),
    ),
    "standard": (
        grid(_GRAPHS, w="f32 f16 bf16 q4_0 q4_1 q5_0 q8_0", buffer=1),
        grid("rows parts both input experts", w="q4_K q6_K mxfp4", d=256, buffer=1),
        grid("activations", w="f16 bf16 q4_0 q8_0", buffer=1),
        "added-w=f32,buffer=1",
        grid("rows both experts", w="q4_0 q8_0", usage="any", buffer="0 1"),
        grid("llama", **_DECODER, w="q4_0 q8_0", **_RUN, weights=_EACH),
        grid("llama", **_DECODER, w="f32 f16 q4_0 q8_0", **_RUN, usage="weights any"),
        grid("llama", **_DECODER, w="f16 q4_0 q8_0", tied=1, run="p5.d1", buffer="0 1 2"),
        grid("llama", **_K_QUANTS, w="q4_K q6_K", tied=1, **_RUN),
        grid("llama", **_DECODER, w="q4_0", qkv="fused", qkvbias=1, **_RUN),
        grid("llama", **_DECODER, w="q4_0", cache=points("cache=q8_0 cache=q4_0 cache=q8_0,cache_v=q4_0"), **_RUN),
        grid("llama", **_DECODER, w="q4_0", fa=0, cache="q8_0 q4_0", cache_v="f16", **_RUN),
        grid("llama", **_DECODER, **_EACH_OTHER, **_RUN),
        grid("gpt-oss", **_DECODER, w="f16 q4_0 mxfp4", **_RUN),
        grid("qwen3 gemma2 lfm2", **_DECODER | {"l": 2}, w="q4_0", **_RUN),
        grid("product", w="f32 f16 q8_0 q6_K", d=2048, n="1 17 65", buffer="0 1"),
        grid("product", w="bf16", d="4096 5632 14336", buffer="1 2"),
        grid("shared", w="f16 bf16 q8_0", d=2048),
        grid("shared", w="q4_K q6_K", d=256),
        grid("sizes", w="f32 q4_0", n="1 70"),
        grid("lengths", w="q4_0 bf16", **_SLOTS, n=8, then=300),
        grid("lengths", w="f16", **_SLOTS, n=15, then=17),
    ),
    "full": (
        grid("llama", **_DECODER | {"l": 2}, w="q4_0 q8_0 f16", run="at250.p5.d3", buffer="1 2", weights=_EACH),
        grid("llama", **_K_QUANTS, w="q4_K q6_K", **_RUN, weights=_EACH),
        grid("large", w="f16", d=8192, buffer="0 1"),
    ),
}

_LARGE_ROWS = 2**15
"""Rows of each weight that fills a large buffer."""
_EXPERTS = 4
_STEPS = 2
MOST_LENGTH = 1 << 20
_ARRAY: dict[str, JSON] = {"counters": {"columns": "<=16", "least_rows": ">=16"}}
"""Requirement of `lengths` for the witness of a device that declares `tiles`."""
_LENGTHS = 5
_B = Builder()


@dataclass(slots=True)
class _Bench:
    """Builds a case step by step."""

    id: str
    w: GGMLType
    d: int
    n: int
    m: int
    """Rows of the weight."""
    then: int
    """Tokens of the second step of `lengths`; 0 for as many as in the first."""
    lengths: Sequence[int]
    k: int = 0
    """Index of the step."""
    persistent: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[Tensor, Bytes] = field(default_factory=dict)
    gf: Expansion = field(default_factory=Expansion)

    def weight(self, name: str, type_: GGMLType, *ne: int) -> Tensor:
        """Return a persistent tensor, the same in every step."""
        if name not in self.persistent:
            self.persistent[name] = new_tensor(type_, *ne, name=name)
        return self.persistent[name]

    def w0(self) -> Tensor:
        """Return the weight under test."""
        return self.weight("w.weight", self.w, self.d, self.m)

    def input(self, name: str, type_: GGMLType, *ne: int) -> Tensor:
        """Add a leaf with values of order 1, filled per step."""
        t = new_tensor(type_, *ne, name=name, flags=FLAG_INPUT)
        self.inputs[t] = random_bytes(type_, self.stream(name), nelements(t), 1.0)
        return t

    def rows(self, name: str, type_: GGMLType, below: int, *ne: int) -> Tensor:
        """Add a leaf whose rows contain distinct row numbers."""
        t = new_tensor(type_, *ne, name=name, flags=FLAG_INPUT)
        self.inputs[t] = encode(type_, self.stream(name), t.ne, chosen(below))
        return t

    def stream(self, name: str) -> Stream:
        """Return the random stream of an input of this step."""
        return Stream(self.id, f"{name} {self.k}")

    def x(self) -> Tensor:
        """Return activations."""
        return self.input("x", F32, self.d, self.n)


def _rows(b: _Bench) -> Tensor:
    """Read a weight through a view that starts at its 17th row."""
    w = b.w0()
    return _B.mul_mat(_B.view_2d(w, b.d, b.m - 16, w.nb[1], 16 * w.nb[1]), b.x())


def _parts(b: _Bench) -> Tensor:
    """Read a weight whole, and reshaped to three matrices."""
    x = b.x()
    whole = _B.mul_mat(b.w0(), x)
    split = _B.mul_mat(_B.reshape_3d(b.w0(), b.d, b.m // 3, 3), _B.repeat_4d(x, b.d, b.n, 3, 1))
    return _B.concat(whole, _B.cont_2d(_B.permute(split, 0, 2, 1, 3), b.m, b.n), 0)


def _both(b: _Bench) -> Tensor:
    """Read a weight by GET_ROWS and by MUL_MAT, like a tied embedding."""
    rows = _B.get_rows(b.w0(), b.rows("ids", I32, b.m, b.n))
    return _B.mul_mat(b.w0(), _B.add(rows, b.x()))


def _input(b: _Bench) -> Tensor:
    """Read an input of each step that looks like a weight."""
    return _B.mul_mat(b.input("w", b.w, b.d, b.m), b.x())


def _computed(b: _Bench) -> Tensor:
    """Read a computed tensor that looks like a weight."""
    weight_values = _B.cast(b.input("made", F32, b.d, b.m), b.w)
    return _B.mul_mat(weight_values, b.x())


def _activations(b: _Bench) -> Tensor:
    """Use activations of the weight's `vec_dot_type`."""
    return _B.mul_mat(b.w0(), _B.cast(b.x(), vec_dot_type(b.w)))


def _cache(b: _Bench) -> Tensor:
    """Read a persistent quantised tensor that is written, so it is no weight."""
    cache = b.weight("cache_k_l0", b.w, b.d, b.m)
    b.gf.expand(_B.set_rows(cache, b.input("new", F32, b.d, b.n), b.rows("idxs", I64, b.m, b.n)))
    return _B.mul_mat(_B.view_2d(cache, b.d, 32, cache.nb[1], 0), b.x())


def _product(b: _Bench) -> Tensor:
    """Multiply by a whole weight, the common case."""
    return _B.mul_mat(b.w0(), b.x())


def _sizes(b: _Bench) -> Tensor:
    """Multiply by weights with five row lengths, then by two again, so that kernels are evicted."""
    lengths = [b.d << i for i in range(_LENGTHS)]
    products = [
        _B.mul_mat(b.weight(f"w{k}.weight", b.w, k, b.m), b.input(f"x{i}", F32, k, b.n))
        for i, k in enumerate((*lengths, *lengths[:2]))
    ]
    return reduce(_B.add, products)


def _lengths(b: _Bench) -> tuple[Tensor, ...]:
    """Build only products, of several row lengths, that a multiply-only device can run alone."""
    n = b.then if b.then and b.k else b.n
    return tuple(
        _B.mul_mat(b.weight(f"w{i}.weight", b.w, k, b.m), b.input(f"x{i}", F32, k, n)) for i, k in enumerate(b.lengths)
    )


def _shared(b: _Bench) -> Tensor:
    """Read two caches before writing them: one of the type, and one of F32 that is cast to it.

    If devices share the graph, and one of them only multiplies or lacks the type, a device reads data that another
    device wrote in the previous step.
    """
    typed, plain = b.weight("cache_k_l0", b.w, b.d, b.m), b.weight("cache_v_l0", F32, b.d, b.m)
    idxs = b.rows("idxs", I64, b.m, b.n)
    made = _B.get_rows(_B.cast(plain, b.w), b.rows("ids", I32, b.m, b.n))
    out = _B.concat(_B.mul_mat(typed, b.x()), made, 0)
    b.gf.expand(out)
    for cache in (typed, plain):
        b.gf.expand(_B.set_rows(cache, b.input(f"new {cache.name}", F32, b.d, b.n), idxs))
    return out


def _experts(b: _Bench) -> Tensor:
    """Use a weight with a matrix per expert."""
    w = b.weight("w_exps.weight", b.w, b.d, 32, _EXPERTS)
    return _B.mul_mat_id(w, _B.reshape_3d(b.x(), b.d, 1, b.n), b.rows("ids", I32, _EXPERTS, 2, b.n))


def _large(b: _Bench) -> Tensor:
    """Get rows from so many tensors that the last starts more than 2 GiB into the buffer."""
    one = nbytes(new_tensor(b.w, b.d, _LARGE_ROWS))
    ids = b.rows("ids", I32, _LARGE_ROWS, b.n)
    return reduce(
        _B.add,
        (_B.get_rows(b.weight(f"w{i}.weight", b.w, b.d, _LARGE_ROWS), ids) for i in range(-(-(2**31) // one) + 1)),
    )


def _added(b: _Bench) -> Tensor:
    """Use weights that no matrix product reads: a norm's and a bias."""
    cur = _B.mul(_B.rms_norm(b.x(), 1e-5), b.weight("w_norm.weight", b.w, b.d))
    return _B.add(cur, b.weight("w.bias", b.w, b.d))


_MAKERS = (
    _rows,
    _parts,
    _both,
    _input,
    _computed,
    _activations,
    _cache,
    _experts,
    _added,
    _product,
    _sizes,
    _lengths,
    _shared,
    _large,
)
KINDS: dict[str, Callable[[_Bench], Tensor | tuple[Tensor, ...]]] = {
    make.__name__.removeprefix("_"): make for make in _MAKERS
}
"""First word of an id -> builder of the graph's results."""


def build(case_id: str) -> Case:
    """Build the case of an id; UsageError if it is invalid or no weight has such a role."""
    body, _ = split_id(case_id, NAME, "WHAT-key=value,key=value")
    bare, placed = without(body, KEYS)
    values, given = read_keys(case_id, placed, KEYS)
    if not 0 <= values["buffer"] <= MAX_BUFFER:
        raise UsageError(f"case {case_id!r}: buffer: 0 to {MAX_BUFFER} expected, {values['buffer']} found")
    bare_id = f"{NAME}/{bare}@{case_id.rpartition('@')[2]}"
    case = _graph(bare_id) if _is_graph(bare) else make(bare_id)
    caches = frozenset(case.caches())
    roles = {t: t.name.removesuffix(".weight").rpartition(".")[2] for t in case.persistent if t not in caches}
    wanted = values["weights"].split("+")
    if unknown := set(wanted) - {*roles.values(), "all"}:
        known = ", ".join(sorted(set(roles.values())))
        raise UsageError(f"case {case_id!r}: weights: {known} or all expected, {', '.join(sorted(unknown))} found")
    place = Placement(values["buffer"], values["usage"])
    placement = {t: place for t, role in roles.items() if "all" in wanted or role in wanted}
    demands = case.demands
    if place != Placement():  # a backend need not repack weights that the caller can write
        demands = {promise: what for promise, what in demands.items() if promise != "packs"}
    return replace(case, id=case_id, params={**case.params, **given}, placement=placement, demands=demands)


def _is_graph(body: str) -> bool:
    return body.partition("-")[0] in KINDS


def _numbers(case_id: str, lengths: str) -> Sequence[int]:
    """Parse lengths such as `2048+4096`."""
    if not all(k.isdecimal() and 0 < int(k) <= MOST_LENGTH for k in lengths.split("+")):
        raise UsageError(f"case {case_id!r}: k: lengths up to {MOST_LENGTH} joined by + expected, {lengths!r} found")
    return [int(k) for k in lengths.split("+")]


def _drawn(case_id: str) -> tuple[_Bench, list[Step]]:
    """Return tensors and steps of a small graph's id; the weights have no values yet."""
    body, _ = split_id(case_id, NAME, f"{'|'.join(KINDS)}-key=value,key=value")
    kind, _, keys_text = body.partition("-")
    values, _ = read_keys(case_id, keys_text, _GRAPH_KEYS)
    lengths = _numbers(case_id, values["k"])
    b = _Bench(case_id, TYPES[values["w"]], values["d"], values["n"], values["m"], values["then"], lengths)
    graph_steps: list[Step] = []
    try:
        for b.k in range(_STEPS):
            b.inputs, b.gf = {}, Expansion()
            made = KINDS[kind](b)
            outputs = made if isinstance(made, tuple) else (made,)
            for out in outputs:
                b.gf.expand(out)
            graph_steps.append(Step(b.gf.graph(), b.inputs, outputs))
    except (GraphError, UsageError) as e:
        raise UsageError(f"case {case_id!r}: {e}") from None
    return b, graph_steps


def _graph(case_id: str) -> Case:
    """Return the case of a small graph's id, without placement."""
    b, graph_steps = _drawn(case_id)
    try:
        persistent = {
            t: random_bytes(t.type, Stream(case_id, t.name), nelements(t), _std(t)) for t in b.persistent.values()
        }
    except UsageError as e:
        raise UsageError(f"case {case_id!r}: {e}") from None
    body, seed = split_id(case_id, NAME, f"{'|'.join(KINDS)}-key=value,key=value")
    kind, _, keys_text = body.partition("-")
    _, given = read_keys(case_id, keys_text, _GRAPH_KEYS)
    params = {"kind": kind, **given}
    made = Case(case_id, persistent, graph_steps, family=NAME, params=params, seed=seed, generator=GENERATOR)
    nodes = [n for step in graph_steps for n in step.graph]
    more = _launched(nodes, persistent) if kind == "lengths" else {}
    return replace(made, demands=launches(nodes, persistent) | more)


def _launched(nodes: Sequence[Tensor], persistent: Collection[Tensor]) -> dict[str, JSON]:
    """Return exact demands on kernel runs, for backends in which one device runs all products."""
    exact = launches(nodes, persistent, "==")
    runs, one_row = {"kernels": exact["kernels"]}, exact[ONE_ROW[0]]
    return {
        "tiles": {**_ARRAY, **runs},
        "sched*[?]devices=xdna2,cpu": runs,
        "sched*[?]devices=xdna2:max_n=1,cpu": one_row,
    }


def _std(t: Tensor) -> float:
    return float(t.ne[0] ** -0.5) if t.ne[1] > 1 else 1.0


def _size(body: str) -> int:
    bare, _ = without(body, KEYS)
    return sum(map(nelements, _drawn(f"{NAME}/{bare}@0")[0].persistent.values())) if _is_graph(bare) else elements(bare)


def _with_seed(body: str) -> str:
    """Return the id of a row; placements of one model have one seed."""
    return with_seed(NAME, body, without(body, KEYS)[0])


FAMILY = Family(
    NAME,
    "weights in each buffer type and usage, tied, through views; quantised tensors that are no weights",
    ids_of(TABLE, _with_seed, _size),
    build,
)
