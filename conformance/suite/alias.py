"""The family `alias`: two graphs with equal tensor names and one difference, run in turn.

`alias/differs=eps,tokens=3@7` runs A, B, A, B: a sublayer of a decoder, where A and B have separate weights, caches and
inputs under the same names. A backend whose cache key for a compiled graph lacks a part of the graph (and has only
names and shapes) runs A instead of B. With `shared=1` A and B have the same weights and caches, as two graphs of one
model do, so that only the difference itself distinguishes them. With `of=decoder` they are whole decoders with the
weights and cache of one model, and run a prompt and decodes in turn: graphs that a backend fuses, or runs at other
sizes. `alias/differs=all` runs A, B, A, C, A, D and so on through every difference: this compiles half as many graphs
as one case for each difference; these cases then show which difference fails.

`alias/differs=uses,of=tbo,NAME@7` runs a graph of test-backend-ops that a device may fuse, then graphs that it may not,
as one of the intermediate values is an output, or is read again at the end, then one whose nodes are not adjacent, and
the first again. `of=decoder,llama-run=p9` does so with a decoder's single step.

`alias/differs=places,of=tbo,NAME@7` runs a graph of test-backend-ops whose leaves are views of tensors twice their
size, at the first half, at the second and at the first again: graphs that differ only in where they read and write.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from conformance.case.case import Case, Step, writes_in_place
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder, Expansion, build_forward_expand
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import (
    FLAG_INPUT,
    FLAG_PARAM,
    VIEW_OPS,
    Bytes,
    Tensor,
    computes,
    nbytes,
    nelements,
    new_tensor,
)
from conformance.ggml.types import F16, F32, I32, I64, Q4_0, Q8_0, GGMLType

from . import tbo
from .data import Fill, chosen, encode, integers, normal, random_bytes
from .decoder import make
from .decoder.costs import demands
from .family import Family, Level, Table, ids_of, keys, read_keys, split_id, with_seed
from .grid import grid
from .ops.dispatch import LARGEST

NAME = "alias"
GENERATOR = 1
"""Increment when the bytes of any id change."""

_B = Builder()
_named = _B.set_name
_EMBD, _HEAD, _HEADS, _CELLS = 64, 16, 4, 32
_ORDERS = frozenset({"ARGSORT", "TOP_K"})
"""Ops whose result is no output: rounding may exchange two nearly equal numbers."""
_DECODER = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d2"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties in which two graphs of this family may differ."""

    eps: float = 1e-5
    scale: float = 0.25
    freq_base: float = 10000.0
    mode: str = "NORMAL"
    sub_op: str = "silu"
    middle: str = "mul"
    """Op in the middle of the graph."""
    edge: str = "gate"
    """Selects which of two similar values a node reads."""
    swapped: bool = False
    """True to swap SUB's operands."""
    axes: tuple[int, int, int, int] = (0, 2, 1, 3)
    offset: int = 0
    """Rows of the cache before the first that is read."""
    stride: int = 1
    """Every `stride`-th row of the cache is read."""
    n_kv: int = 8
    tokens: int = 0
    """Tokens in addition to the id's."""
    type_: GGMLType = Q8_0
    """Type of one weight."""
    branch: int = 0
    """Selects which of two branches is computed; only FLAG_COMPUTE differs."""
    weight: int = 0
    """1: one byte of one weight differs."""
    norm: int = 0
    """1: one byte of the norm's weight differs."""
    cache: int = 0
    """1: the initial rows of the cache differ."""
    sinks: bool = False
    """Add a source."""
    row: int = 0
    """Elements of a weight's row for a graph of three products only; 0 for the sublayer."""
    outputs: int = 0
    """1: other outputs are requested."""


DIFFERS: dict[str, Traits] = {
    "eps": Traits(eps=0.5),
    "scale": Traits(scale=0.75),
    "freq_base": Traits(freq_base=100.0),
    "mode": Traits(mode="NEOX"),
    "sub_op": Traits(sub_op="tanh"),
    "middle": Traits(middle="add"),
    "edge": Traits(edge="up"),
    "order": Traits(swapped=True),
    "axes": Traits(axes=(1, 2, 0, 3)),
    "offset": Traits(offset=5),
    "stride": Traits(stride=2),
    "n_kv": Traits(n_kv=12),
    "tokens": Traits(tokens=2),
    "type": Traits(type_=Q4_0),
    "float": Traits(type_=F16),
    "branch": Traits(branch=1),
    "weight": Traits(weight=1),
    "norm": Traits(norm=1),
    "cache": Traits(cache=1),
    "src": Traits(sinks=True),
    "outputs": Traits(outputs=1),
}
"""Difference between A and B -> B's traits."""
_OWN = frozenset({"type", "float", "weight", "norm", "cache", "src"})
"""Differences in weights and caches; with one of these A and B cannot share them."""
SHARED = tuple([what for what in DIFFERS if what not in _OWN])

PRODUCTS = ("edge", "tokens", "type", "float", "branch", "weight")
"""Differences for graphs of three products."""
DECODERS = {"eps": "eps=0.5", "freq_base": "base=100.0", "mode": "rope=neox", "sub_op": "ffn=geglu"}
"""Difference for decoders -> the key of graph B."""

USES = "differs=uses"
PLACES = "differs=places"
_BLOCKS = 256
"""Multiple of the blocks of a place, so that each begins at a multiple of 256 bytes."""
APART = 3
"""Distance of values with further uses in one step: one value of a chain of four nodes."""

KEYS = keys(f"differs={'|'.join(DIFFERS)}|all tokens=3 order=abab|ab|ba|aab k=0 shared=0|1 of=sublayer|decoder")


def read(case_id: str) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return an id's values, its given keys as text, and its seed; UsageError lists valid ones."""
    body, seed = split_id(case_id, NAME, "differs=WHAT,key=value")
    values, given = read_keys(case_id, body, KEYS)
    if not 1 <= values["tokens"] <= 16:
        raise UsageError(f"case {case_id!r}: tokens: 1 to 16 expected, {values['tokens']} found")
    if values["k"] and (values["differs"] not in PRODUCTS or not 0 < values["k"] <= 1 << 14 or values["k"] % 32):
        raise UsageError(
            f"case {case_id!r}: k: a multiple of 32 up to 16384 expected, with differs={'|'.join(PRODUCTS)}; "
            f"{values['k']} found, with {values['differs']}"
        )
    if values["shared"] == "1" and values["differs"] in _OWN:
        raise UsageError(f"case {case_id!r}: shared=1 requires differs={'|'.join(SHARED)}")
    if values["of"] == "decoder" and not (values["differs"] in DECODERS and given.keys() <= {"differs", "of"}):
        raise UsageError(f"case {case_id!r}: of=decoder goes with differs={'|'.join(DECODERS)} and no other key")
    if values["differs"] == "all" and not given.keys() <= {"differs", "tokens"}:
        raise UsageError(f"case {case_id!r}: differs=all goes with tokens=N and no other key")
    return values, given, seed


def build(case_id: str) -> Case:
    """Build the case of an id; UsageError if it is invalid."""
    made = {f"{NAME}/{USES}": _uses, f"{NAME}/{PLACES}": _places}.get(case_id.partition("@")[0].partition(",")[0])
    if made is not None:
        return made(case_id)
    v, params, seed = read(case_id)
    if v["of"] == "decoder":
        return _decoders(case_id, DECODERS[v["differs"]], params, seed)
    a = Side(case_id, Traits(row=v["k"]), v["tokens"])
    if v["differs"] == "all":
        sides = [side for traits in DIFFERS.values() for side in (a, Side(case_id, traits, v["tokens"]))]
        steps = [side.step(k) for k, side in enumerate(sides)]
        persistent = {t: data for side in sides for t, data in side.persistent.items()}
        return Case(case_id, persistent, steps, family=NAME, params=params, seed=seed, generator=GENERATOR)
    b = Side(case_id, replace(DIFFERS[v["differs"]], row=v["k"]), v["tokens"])
    if v["shared"] == "1":
        b.persistent, b.w = a.persistent, a.w
    steps = [(a if which == "a" else b).step(k) for k, which in enumerate(v["order"])]
    persistent = a.persistent | b.persistent
    return Case(case_id, persistent, steps, family=NAME, params=params, seed=seed, generator=GENERATOR)


def _decoders(case_id: str, difference: str, params: dict[str, str], seed: int) -> Case:
    a, b = (make(f"{NAME}/llama-{_DECODER}{more}@{seed}") for more in ("", f",{difference}"))
    shared: dict[Tensor | None, Tensor] = dict(zip(b.persistent, a.persistent, strict=True))
    for t in dict.fromkeys(t for step in b.steps for t in step.graph.tensors()):
        t.src = tuple([shared.get(s, s) for s in t.src])
        t.view_src = shared.get(t.view_src, t.view_src)
    steps = [step for both in zip(a.steps, b.steps, strict=True) for step in both]
    return replace(
        a, id=case_id, steps=steps, params=dict(params), seed=seed, generator=GENERATOR,
        demands=demands(steps, a.persistent),
    )  # fmt: skip


def _graph(case_id: str, what: str, kinds: Sequence[str]) -> tuple[str, str, int]:
    """Return the kind of an id's graph, the graph and its seed; UsageError for another kind."""
    body, seed = split_id(case_id, NAME, f"{what},of={'|'.join(kinds)},GRAPH")
    kind, _, graph = body.removeprefix(what).removeprefix(",").partition(",")
    named = {f"of={name}": name for name in kinds}
    if kind not in named:
        raise UsageError(f"case {case_id!r}: {what}: {' or '.join(named)} expected, {kind!r} found")
    return named[kind], graph, seed


def _uses(case_id: str) -> Case:
    name, graph, seed = _graph(case_id, USES, (tbo.NAME, "decoder"))
    base = tbo.build(f"{tbo.NAME}/{graph}@{seed}") if name == tbo.NAME else make(f"{NAME}/{graph}@{seed}")
    if len(base.steps) != 1:
        raise UsageError(f"case {case_id!r}: {USES}: one step expected, {len(base.steps)} found")
    steps = [_copied(step, base.persistent) for step in _unfused(base.steps[0])]
    if len(steps) == 2:
        raise UsageError(f"case {case_id!r}: {USES}: the graph has no intermediate value")
    return replace(
        base, id=case_id, steps=steps, family=NAME, params={"differs": "uses", "of": name, "graph": graph}, seed=seed,
        generator=GENERATOR, demands={},
    )  # fmt: skip


def _places(case_id: str) -> Case:
    _, graph, seed = _graph(case_id, PLACES, (tbo.NAME,))
    bases = [tbo.build(f"{tbo.NAME}/{graph}@{seed + i}") for i in range(2)]
    leaves, others = ({**c.persistent, **c.steps[0].inputs} for c in bases)
    if not _can_be_views([t.flags for t in leaves]):
        raise UsageError(f"case {case_id!r}: {PLACES}: a graph with leaves, none of them a parameter, expected")
    persistent: dict[Tensor, Bytes] = {}
    homes: dict[Tensor | None, Tensor] = {}
    for (t, first), second in zip(leaves.items(), others.values(), strict=True):
        blocks = -(-nbytes(t) // t.type.type_size // _BLOCKS) * _BLOCKS
        homes[t] = home = new_tensor(t.type, 2 * blocks * t.type.blck_size, name=f"places of {t.name}")
        persistent[home] = np.zeros(nbytes(home), np.uint8)
        for data, at in ((first, 0), (second, nbytes(home) // 2)):
            persistent[home][at : at + data.nbytes] = data
    steps = [_at_place(bases[0].steps[0], homes, place) for place in (0, 1, 0)]
    params = {"differs": "places", "of": tbo.NAME, "graph": graph}
    return Case(case_id, persistent, steps, family=NAME, params=params, seed=seed, generator=GENERATOR)


def _can_be_views(flags: Sequence[int]) -> bool:
    """Return True if there are leaves and none is a parameter, which no view can be."""
    return bool(flags) and not any(f & FLAG_PARAM for f in flags)


def _at_place(step: Step, homes: Mapping[Tensor | None, Tensor], place: int) -> Step:
    """Return the step with new tensors, each leaf a view of either half of its home."""
    begins = {t: place * nbytes(home) // 2 for t, home in homes.items()}
    new: dict[Tensor | None, Tensor] = {t: replace(t) for t in step.graph.tensors()}
    for t, home in homes.items():
        if t is not None:
            new[t] = _named(_B.view_4d(home, *t.ne, *t.nb[1:], begins[t]), t.name)
    for t, own in new.items():
        if t is None or t in homes:
            continue
        own.src = tuple([new.get(s) for s in t.src])
        own.view_offs += begins.get(t.view_src, 0)
        own.view_src = homes.get(t.view_src, new.get(t.view_src))
    outputs = tuple([new[t] for t in step.outputs])
    return Step(build_forward_expand(*outputs), {}, outputs)


def _unfused(step: Step) -> Iterator[Step]:
    """Yield `step`, those with further uses of its intermediate values, and `step` again.

    Each value that no node overwrites has a step in which it is an output, if it is no view, and one in which a CONT at
    the end reads it; values that are `APART` share these steps. In one more step a CONT follows each.
    """
    nodes = step.graph.nodes
    computed = {n.root for n in nodes if computes(n)}
    later = {t: nodes[i + 1 :] for i, t in enumerate(nodes) if t.root in computed and t not in step.outputs}
    between = [t for t, others in later.items() if t.root.op not in _ORDERS and any(t in n.src for n in others)]
    kept = [t for t in between if not any(writes_in_place(n) and n.root is t.root for n in later[t])]
    yield step
    for i in range(min(APART, len(kept))):
        shared = kept[i::APART]
        if outputs := tuple([t for t in shared if t.op not in VIEW_OPS]):
            yield replace(step, outputs=step.outputs + outputs)
        yield _read_again(step, shared, at_end=True)
    if between:
        yield _read_again(step, between, at_end=False)
    yield step


def _read_again(step: Step, values: Sequence[Tensor], *, at_end: bool) -> Step:
    readers = {t: _named(_B.cont(t), f"{t.name} (again)") for t in values}
    build_forward_expand(*readers.values())  # sets FLAG_COMPUTE
    nodes = step.graph.nodes
    graph = [*nodes, *readers.values()] if at_end else [t for n in nodes for t in (n, readers.get(n)) if t is not None]
    return replace(step, graph=Graph(graph), outputs=(*step.outputs, *readers.values()))


def _copied(step: Step, persistent: Container[Tensor]) -> Step:
    """Return the step with new tensors of the same names, except persistent ones."""
    tensors = step.graph.tensors()
    new = {t: t if t in persistent else replace(t) for t in tensors}
    for t in new.values():
        t.src = tuple([None if s is None else new.get(s, s) for s in t.src])
        t.view_src = None if t.view_src is None else new.get(t.view_src, t.view_src)
    graph = Graph([new[n] for n in step.graph])
    return replace(
        step, graph=graph, inputs={new[t]: data for t, data in step.inputs.items()},
        outputs=tuple([new[t] for t in step.outputs]),
    )  # fmt: skip


def alone(case_id: str, traits: Traits, tokens: int) -> Case:
    """Return a case that runs one of the two graphs twice."""
    side = Side(case_id, traits, tokens)
    return Case(case_id, side.persistent, [side.step(0), side.step(1)], family=NAME, generator=GENERATOR)


class Side:
    """Graph A or B: its weights and cache have the same names as those of the other."""

    def __init__(self, case_id: str, traits: Traits, tokens: int) -> None:
        self.id, self.t, self.n = case_id, traits, tokens + traits.tokens
        product = (traits.row or _EMBD, _EMBD)
        shapes: dict[str, tuple[GGMLType, tuple[int, ...], float]] = {
            "attn_norm.weight": (F32, (_EMBD,), 1.0),
            "attn_q.weight": (traits.type_, product, 0.125),
            "ffn_gate.weight": (F32, product, 0.125),
            "ffn_up.weight": (F16, product, 0.125),
            "attn_sinks.weight": (F32, (_HEADS,), 1.0),
            "cache_k_l0": (F16, (_EMBD, _CELLS), 1.0),
        }
        self.persistent: dict[Tensor, Bytes] = {}
        self.w: dict[str, Tensor] = {}
        for name, (type_, ne, std) in shapes.items():
            if (name == "attn_sinks.weight" and not traits.sinks) or (traits.row and ne is not product):
                continue
            t = new_tensor(type_, *ne, name=name)
            stream = Stream(case_id, f"{name} b" if name == "cache_k_l0" and traits.cache else name)
            self.persistent[t] = random_bytes(type_, stream, nelements(t), std)
            self.w[name] = t
        for name, differs in (("ffn_gate.weight", traits.weight), ("attn_norm.weight", traits.norm)):
            if differs and name in self.w:
                data = self.persistent[self.w[name]].copy()
                data[len(data) // 8 * 4 + 3] ^= np.uint8(0x81)  # the sign and half the exponent of one element
                self.persistent[self.w[name]] = data

    def step(self, k: int) -> Step:
        """Build the graph again, from new tensors with the same names and other inputs."""
        inputs: dict[Tensor, Bytes] = {}

        def leaf(name: str, type_: GGMLType, fill: Fill, *ne: int) -> Tensor:
            t = new_tensor(type_, *ne, name=name, flags=FLAG_INPUT)
            inputs[t] = encode(type_, Stream(self.id, f"{name} {k}"), t.ne, fill)
            return t

        tr, n, w = self.t, self.n, self.w
        if tr.row:
            x, y = (leaf(name, F32, normal(), tr.row, n) for name in ("inp_embd", "inp_pos_embd"))
            read = x, x if tr.edge == "gate" else y, y
            q, gate, up = (_named(_B.mul_mat(*pair), pair[0].name) for pair in zip(w.values(), read, strict=True))
            gf = Expansion()
            gf.expand(gate)
            taken = gf.select((q, up), tr.branch)
            return Step(gf.graph(), inputs, (gate, taken))
        x = leaf("inp_embd", F32, normal(), _EMBD, n)
        pos = leaf("inp_pos", I32, integers(0, 50), n)
        ids = leaf("attn_inp_k_idxs", I64, chosen(_CELLS), n)
        mask = leaf("attn_inp_kq_mask", F32, normal(), tr.n_kv, n)
        gf = Expansion()
        cur = _named(_B.rms_norm(x, tr.eps), "norm-0")
        cur = _named(_B.mul(cur, w["attn_norm.weight"]), "attn_norm-0")
        q = _named(_B.mul_mat(w["attn_q.weight"], cur), "Qcur-0")
        q = _B.reshape_3d(q, _HEAD, _HEADS, n)
        q = _B.rope_ext(q, pos, None, _HEAD, ROPE_TYPE[tr.mode], 0, tr.freq_base, 1.0, 0.0, 1.0, 32.0, 1.0)
        q = _named(q, "Qcur_rope-0")
        cache = w["cache_k_l0"]
        gf.expand(_B.set_rows(cache, _named(_B.scale(cur, 0.5), "Kcur-0"), ids))
        nb1, head = cache.nb[1], _HEAD * 2
        keys = _B.view_3d(cache, _HEAD, tr.n_kv, _HEADS, nb1 * tr.stride, head, tr.offset * nb1)
        kq = _named(_B.mul_mat(keys, _B.permute(q, 0, 2, 1, 3)), "kq-0")
        kq = _B.soft_max_ext(kq, mask, tr.scale, 0.0)
        if tr.sinks:
            _B.soft_max_add_sinks(kq, w["attn_sinks.weight"])
        kq = _named(kq, "kq_soft_max-0")
        values = _B.cont(_B.transpose(_B.view_2d(cache, _EMBD, tr.n_kv, nb1, 0)))
        out = _named(_B.mul_mat(_B.reshape_3d(values, tr.n_kv, _HEAD, _HEADS), kq), "kqv-0")
        out = _B.cont_2d(_B.permute(out, *tr.axes), _EMBD, n)
        out = _named(out, "kqv_out-0")
        gate = _named(_B.mul_mat(w["ffn_gate.weight"], cur), "ffn_gate-0")
        up = _named(_B.mul_mat(w["ffn_up.weight"], cur), "ffn_up-0")
        gate = _named(getattr(_B, tr.sub_op)(gate), "ffn_act-0")
        ffn = _named(getattr(_B, tr.middle)(gate, up), "ffn_par-0")
        res = gate if tr.edge == "gate" else up
        ffn = _named(_B.add(ffn, res), "ffn_out-0")
        both = (out, ffn) if not tr.swapped else (ffn, out)
        diff = _named(_B.sub(*both), "l_out-0")
        branches = _named(_B.scale(diff, 0.5), "branch-0"), _named(_B.sqr(diff), "branch-1")
        gf.select(branches, tr.branch)
        graph = gf.graph()
        return Step(graph, inputs, (gate, out, up) if tr.outputs else (kq, ffn, branches[tr.branch]))


_EACH = " ".join(DIFFERS)
_TINY = f"{USES},of=decoder,llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
TABLE: Table = {
    "smoke": ("differs=all", grid(differs="weight edge", k=2048), "differs=eps,of=decoder"),
    "standard": (
        grid(differs=_EACH),
        grid(differs=" ".join(DECODERS), of="decoder"),
        grid(differs=_EACH, tokens="1 5", order="abab aab"),
        grid(differs=" ".join(PRODUCTS), k="2048 4096"),
        grid(differs=" ".join(SHARED), tokens="1 5", shared=1),
        grid(differs=" ".join(SHARED), order="aab", shared=1),
        f"{_TINY},run=p9",
        f"{_TINY},qkvbias=1,outbias=1,ffnbias=1,fa=0,run=p9",
    ),
    "full": (
        grid(differs=_EACH, tokens="2 7", order="ab ba"),
        *(f"{USES},of=decoder,{arch}-run=p5" for arch in ("qwen3", "gemma2", "gpt-oss", "lfm2")),
    ),
}
_ids = ids_of(TABLE, lambda body: with_seed(NAME, body))


@cache
def ids(level: Level) -> Sequence[str]:
    """Return the ids of the table and, from `standard` on, of graphs of test-backend-ops."""
    if level == "smoke":
        return _ids(level)
    fusions = (row for row in tbo.fusions("standard") if level == "full" or tbo.largest(row) <= LARGEST)
    movable = (row for row in tbo.smallest() if tbo.largest(row) <= LARGEST and _can_be_views(tbo.leaf_flags(row)))
    named = ((what, row.name) for what, rows in ((USES, fusions), (PLACES, movable)) for row in rows)
    return (*_ids(level), *(f"{NAME}/{what},of=tbo,{name}@0" for what, name in named))


FAMILY = Family(
    NAME,
    "graphs A, B, A, B in one session, with the same names; chains that may and may not be fused",
    ids,
    build,
)
