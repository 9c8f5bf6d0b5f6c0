"""Generate candidates with fewer steps and fewer nodes, largest reduction first.

Some nodes of some steps remain; values that they read from removed nodes become leaves with recorded values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from conformance.backend.interface import Backend
from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.errors import ConformanceError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import lay_out, set_param, written
from conformance.ggml.partial import below, like
from conformance.ggml.tensor import FIELDS, FLAG_COMPUTE, FLAG_INPUT, VIEW_OPS, Bytes, Tensor, computes, new_tensor
from conformance.judge.verdict import Result
from conformance.run.execute import StepValues, execute

PREFIX = "shrunk/"


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A case and every value of one run of it."""

    case: Case
    steps: list[StepValues]
    """Values of every computed node, view ops included; empty if the case could not run."""

    def start(self, step: int) -> dict[Tensor, Bytes]:
        """Return the bytes of persistent tensors before `step`; the initial ones without a run."""
        held = dict(self.case.persistent)
        if step and self.steps:
            held.update(self.steps[step - 1].caches)
        return held


def record(case: Case, reference: Backend) -> Recorded:
    """Record every value of `case` on `reference`; no values if it cannot run the case."""
    steps = [replace(s, outputs=tuple(n for n in s.graph if n.flags & FLAG_COMPUTE)) for s in case.steps]
    try:
        return Recorded(case, execute(reference, replace(case, steps=steps)).steps)
    except ConformanceError:
        return Recorded(case, [])


def is_legal(case: Case) -> bool:
    """Return True if a generated case may run; an invalid one could access other memory."""
    try:
        case.validate()
    except GraphError:
        return False
    return True


def keep(recorded: Recorded, kept: Mapping[int, Collection[Tensor]], *, own_memory: Collection[str] = ()) -> Case:
    """Return the case with only the nodes `kept` of each step.

    Ops in `own_memory` get a result of their own instead of writing in place.

    A removed node that is read becomes a contiguous leaf with its recorded value, or is replaced by its source if it
    wrote in place or is a view of the whole source. Steps that compute nothing are dropped. Caches start with their
    bytes before the first remaining step. A node that no other reads becomes an output. GraphError if a value is
    missing, or the nodes form no valid graph over their new sources.
    """
    case = recorded.case
    stay = [k for k in sorted(kept) if any(computes(n) for n in kept[k])]
    if not stay:
        raise GraphError("nothing is left that computes")
    held = recorded.start(stay[0])
    persistent: dict[Tensor, Tensor] = {}
    steps = [_Cutting(recorded, k, frozenset(kept[k]), persistent, own_memory).step() for k in stay]
    bytes_of = {persistent[t]: held[t] for t in case.persistent if t in persistent}
    placement = {persistent[t]: p for t, p in case.placement.items() if t in persistent}
    return renamed(replace(case, persistent=bytes_of, steps=steps, placement=placement))


def renamed(case: Case) -> Case:
    """Return `case` under another id, with its origin, because no generator gives this case."""
    of = case.id.removeprefix(PREFIX)
    return replace(case, id=PREFIX + of, family="shrunk", params={"of": of}, tolerance={}, generator=1)


class _Cutting:
    def __init__(
        self,
        recorded: Recorded,
        k: int,
        kept: frozenset[Tensor],
        persistent: dict[Tensor, Tensor],
        own_memory: Collection[str],
    ) -> None:
        self._own_memory = own_memory
        self._old = recorded.case.steps[k]
        self._values = recorded.steps[k].outputs if recorded.steps else {}
        self._weights = recorded.case.persistent
        self._persistent = persistent
        self._kept = kept
        self._new: dict[Tensor, Tensor] = {}
        self._inputs: dict[Tensor, Bytes] = {}

    def step(self) -> Step:
        nodes = [self._node(n) for n in self._old.graph if n in self._kept]
        kept = set(self._persistent.values())
        read = {s for n in nodes for s in n.src if s is not n}
        outputs = {self._new[t] for t in self._old.outputs if t in self._kept}
        sinks = {n for n in nodes if computes(n) and n not in read and n.root not in kept}
        return Step(Graph(nodes), self._inputs, tuple(n for n in nodes if n in outputs or n in sinks))

    def _node(self, t: Tensor) -> Tensor:
        copy = over(t, self._source)
        if t.op in self._own_memory:
            copy = like(t, copy.src, None)
            if "inplace" in FIELDS[t.op]:
                set_param(copy, "inplace", 0)
        lay_out(copy)
        self._new[t] = copy
        return copy

    def _source(self, t: Tensor) -> Tensor:
        if t in self._new:
            return self._new[t]
        if t in self._weights:
            if t not in self._persistent:
                self._persistent[t] = Tensor(t.type, t.ne, t.nb, flags=t.flags, name=t.name)
            return self._persistent[t]
        if t in self._old.inputs:
            leaf, data = Tensor(t.type, t.ne, t.nb, flags=t.flags, name=t.name), self._old.inputs[t]
        elif t.op not in VIEW_OPS and t.view_src is not None:
            under = below(t)
            assert under is not None
            return self._source(under)
        elif t.op in VIEW_OPS and (under := below(t)) is not None and same_place(t, under):
            return self._source(under)
        elif t in self._values:
            leaf, data = new_tensor(t.type, *t.ne, name=t.name, flags=FLAG_INPUT), self._values[t]
        else:
            raise GraphError(f"no recorded value of {t}")
        self._inputs[leaf] = data
        self._new[t] = leaf
        return leaf


def over(t: Tensor, source: Callable[[Tensor], Tensor]) -> Tensor:
    """Copy `t` with its sources and write target mapped by `source`; not laid out yet."""
    src = [None if s is None or s is t else source(s) for s in t.src]
    under = below(t) if writes_in_place(t) else None
    return like(t, src, None if under is None else source(under).root)


def same_place(a: Tensor, b: Tensor) -> bool:
    """Return True if a view has the shape, strides and offset of the tensor it views."""
    return (a.ne, a.nb, a.view_offs) == (b.ne, b.nb, b.view_offs)


Kept = Mapping[int, Collection[Tensor]]


def plain(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases without recorded values, tolerance, demands and notes."""
    case = recorded.case
    bare = [Step(s.graph, s.inputs, s.outputs) for s in case.steps]
    if case.demands:
        yield renamed(replace(case, steps=bare, demands={}, provenance={}))
    if case.tolerance or case.demands or any(s.expected or s.note is not None for s in case.steps):
        yield renamed(replace(case, steps=bare, provenance={}))


def steps(recorded: Recorded, result: Result) -> Iterator[Case]:
    """Yield the divergent step alone, with the previous one, all up to it, then all but a few."""
    case = recorded.case
    n = len(case.steps)
    last = _step(result, n)
    chosen: list[Sequence[int]] = [(last,), (last - 1, last), range(last + 1)] if last else [(last,)]
    for size in _chunks(n):
        chosen += [[k for k in range(n) if not at <= k < at + size] for at in range(0, n, size)]
    for ks in chosen:
        if 0 < len(ks) < n:
            yield from _kept(recorded, {k: _computing(case.steps[k]) for k in ks})


def nodes(recorded: Recorded, result: Result) -> Iterator[Case]:
    """Yield the divergent node, with views, with all inputs, then ever smaller cuts anywhere."""
    case = recorded.case
    everything = {k: _computing(s) for k, s in enumerate(case.steps)}
    places = [(k, t) for k, ts in everything.items() for t in ts]
    chosen: list[Kept] = []
    culprit = _culprit(result, case)
    if culprit is not None:
        k, node = culprit
        chosen += [{k: [node]}, {k: [*views_of(node), node]}]
        chosen.append(_cone(case, k, node))
    for size in _chunks(len(places)):
        for end in range(len(places), 0, -size):
            rest = places[: max(end - size, 0)] + places[end:]
            chosen.append({k: [t for j, t in rest if j == k] for k in everything})
    for kept in [everything, *chosen]:
        if 0 < sum(map(len, kept.values())) < sum(len(s.graph) for s in case.steps):
            yield from _kept(recorded, kept)


def outputs(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases with fewer outputs: without those that a node reads or a cache contains."""
    case = recorded.case
    fewer = {k: replace(s, outputs=o) for k, s in enumerate(case.steps) if len(o := _ends(case, s)) < len(s.outputs)}
    for those in (fewer, *({k: step} for k, step in fewer.items() if len(fewer) > 1)):
        if those:
            yield renamed(replace(case, steps=[those.get(k, s) for k, s in enumerate(case.steps)]))


def _ends(case: Case, step: Step) -> tuple[Tensor, ...]:
    """Return the outputs of a step that no node reads and no cache contains."""
    read = {s for n in step.graph for s in n.src if s is not n}
    return tuple(t for t in step.outputs if t not in read and t.root not in case.persistent)


def _kept(recorded: Recorded, kept: Kept) -> Iterator[Case]:
    with suppress(GraphError):
        yield keep(recorded, kept)


def _chunks(n: int) -> Iterator[int]:
    while n > 1:
        n = (n + 1) // 2
        yield n


def _step(result: Result, n: int) -> int:
    step = None if result.error is not None or result.where is None else result.where.step
    return n - 1 if step is None else min(step, n - 1)


def _culprit(result: Result, case: Case) -> tuple[int, Tensor] | None:
    if result.error is not None or result.where is None:
        return None
    k, i = result.where.step, result.where.node
    if k is None or i is None or k >= len(case.steps):
        return None
    graph = case.steps[k].graph
    return (k, graph.nodes[i]) if i < len(graph) else None


def _computing(step: Step) -> list[Tensor]:
    """Return the nodes that compute and the view ops that they read."""
    needed = {n for n in step.graph if computes(n)} | set(step.outputs)
    for n in reversed(step.graph.nodes):
        if n in needed:
            needed.update(s for s in n.src if s is not None and s.op in VIEW_OPS)
    return [n for n in step.graph if n in needed]


def views_of(node: Tensor) -> list[Tensor]:
    """Return the view ops between `node` and the roots that it reads, in order."""
    found: dict[Tensor, None] = {}

    def visit(t: Tensor | None) -> None:
        if t is not None and t.op in VIEW_OPS and t.op != "NONE" and t not in found:
            visit(t.src[0])
            found[t] = None

    for s in node.src:
        visit(s if s is not node else None)
    return list(found)


def _cone(case: Case, step: int, node: Tensor) -> dict[int, list[Tensor]]:
    """Return the nodes on which `node` depends, in its step and through caches in earlier ones."""
    wanted: set[Tensor] = {node}
    roots: set[Tensor] = set()
    kept: dict[int, list[Tensor]] = {}
    for k in range(step, -1, -1):
        chosen: list[Tensor] = []
        for n in reversed(case.steps[k].graph.nodes):
            if n in wanted or not roots.isdisjoint(written(n)):
                chosen.append(n)
                for s in n.src:
                    if s is not None:
                        wanted.add(s)
                        roots.add(s.root)
        kept[k] = chosen[::-1]
    return kept
