"""Candidates with fewer steps and fewer nodes, the boldest cut first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import VIEW_OPS, Tensor, computes
from conformance.judge.verdict import Result

from .keep import Recorded, keep, renamed

Kept = Mapping[int, Collection[Tensor]]


def plain(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Without recorded values, tolerance, demands and notes: expected values are then the reference's."""
    case = recorded.case
    bare = [Step(s.graph, s.inputs, s.outputs) for s in case.steps]
    if case.demands:
        yield renamed(replace(case, steps=bare, demands={}, provenance={}))
    if case.tolerance or case.demands or any(s.expected or s.note is not None for s in case.steps):
        yield renamed(replace(case, steps=bare, provenance={}))


def steps(recorded: Recorded, result: Result) -> Iterator[Case]:
    """The divergent step alone from recorded caches, it and the one before, the steps up to it, all but some."""
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
    """The divergent node alone, with its views, with all it needs; then all but a half, a quarter, … a node."""
    case = recorded.case
    everything = {k: _computing(s) for k, s in enumerate(case.steps)}
    places = [(k, t) for k, ts in everything.items() for t in ts]
    chosen: list[Kept] = []
    culprit = _culprit(result, case)
    if culprit is not None:
        k, node = culprit
        chosen += [{k: [node]}, {k: [*_views(node), node]}]
        chosen.append(_cone(case, k, node))
    for size in _chunks(len(places)):
        for end in range(len(places), 0, -size):
            rest = places[: max(end - size, 0)] + places[end:]
            chosen.append({k: [t for j, t in rest if j == k] for k in everything})
    for kept in [everything, *chosen]:
        if 0 < sum(map(len, kept.values())) < sum(len(s.graph) for s in case.steps):
            yield from _kept(recorded, kept)


def outputs(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Each output but those that are all there is to see is checked no more."""
    case = recorded.case
    for k, step in enumerate(case.steps):
        read = {s for n in step.graph for s in n.src if s is not n}
        needed = tuple(t for t in step.outputs if t not in read and t.root not in case.persistent)
        if len(needed) < len(step.outputs):
            fewer = [*case.steps]
            fewer[k] = replace(step, outputs=needed)
            yield renamed(replace(case, steps=fewer))


def _kept(recorded: Recorded, kept: Kept) -> Iterator[Case]:
    with suppress(GraphError):
        yield keep(recorded, kept)


def _chunks(n: int) -> Iterator[int]:
    while n > 1:
        n = (n + 1) // 2
        yield n


def _step(result: Result, n: int) -> int:
    return min(int((result.first_divergence or {}).get("step", n - 1)), n - 1)


def _culprit(result: Result, case: Case) -> tuple[int, Tensor] | None:
    first = result.first_divergence
    if first is None or first["node"] is None or first["step"] >= len(case.steps):
        return None
    graph = case.steps[first["step"]].graph
    return (first["step"], graph.nodes[first["node"]]) if first["node"] < len(graph) else None


def _computing(step: Step) -> list[Tensor]:
    """The nodes that compute, and the view ops that they read through: what is not flagged, nobody misses."""
    needed = {n for n in step.graph if computes(n)} | set(step.outputs)
    for n in reversed(step.graph.nodes):
        if n in needed:
            needed.update(s for s in n.src if s is not None and s.op in VIEW_OPS)
    return [n for n in step.graph if n in needed]


def _views(node: Tensor) -> list[Tensor]:
    """View ops between `node` and the tensors that own what it reads, in order."""
    found: dict[Tensor, None] = {}

    def visit(t: Tensor | None) -> None:
        if t is not None and t.op in VIEW_OPS and t.op != "NONE" and t not in found:
            visit(t.src[0])
            found[t] = None

    for s in node.src:
        visit(s if s is not node else None)
    return list(found)


def _cone(case: Case, step: int, node: Tensor) -> dict[int, list[Tensor]]:
    """What `node` is computed from, in its step and, through caches, in those before."""
    wanted: set[Tensor] = {node}
    roots: set[Tensor] = set()
    kept: dict[int, list[Tensor]] = {}
    for k in range(step, -1, -1):
        chosen: list[Tensor] = []
        for n in reversed(case.steps[k].graph.nodes):
            writes = writes_in_place(n) and computes(n) and n.root in roots
            if n in wanted or writes:
                chosen.append(n)
                for s in n.src:
                    if s is not None:
                        wanted.add(s)
                        roots.add(s.root)
        kept[k] = chosen[::-1]
    return kept
