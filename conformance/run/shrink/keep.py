"""Cutting a case: some nodes of some steps are kept, and what they read of the others becomes a recorded leaf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from conformance.backend.interface import Backend
from conformance.case.case import Case, Step, writes_in_place
from conformance.ggml.errors import ConformanceError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import lay_out
from conformance.ggml.partial import below
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, VIEW_OPS, Bytes, Tensor, computes, new_tensor

PREFIX = "shrunk/"


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A case and every value of a run of it."""

    case: Case
    values: list[dict[Tensor, Bytes]]
    """Per step: node -> its packed value right after it ran, view ops included. Empty where nothing could run it."""
    caches: list[dict[Tensor, Bytes]]
    """Per step: cache -> its bytes after the step."""

    def start(self, step: int) -> dict[Tensor, Bytes]:
        """Persistent tensor -> its bytes before `step`; as the case begins where no run is known."""
        held = dict(self.case.persistent)
        if step and self.caches:
            held.update(self.caches[step - 1])
        return held


def record(case: Case, reference: Backend) -> Recorded:
    """Run `case` on `reference` for every value; without values where it cannot."""
    values: list[dict[Tensor, Bytes]] = []
    caches: list[dict[Tensor, Bytes]] = []
    try:
        with reference.open(case) as session:
            for step in case.steps:
                wanted = [n for n in step.graph if n.flags & FLAG_COMPUTE]
                values.append(dict(session.compute(step.graph, step.inputs, wanted)))
                caches.append({t: session.read(t) for t in case.caches()})
    except ConformanceError:
        return Recorded(case, [], [])
    return Recorded(case, values, caches)


def keep(recorded: Recorded, kept: Mapping[int, Collection[Tensor]]) -> Case:
    """The case of the `kept` nodes alone.

    A node that is not kept is replaced where a kept one reads it: by a contiguous leaf that holds its recorded value,
    or, where it wrote in place or is a view of all of its source, by that. Steps that compute nothing go. Caches start
    with what they held before the first step that stays. What nobody reads any more is checked as an output.

    Args:
        recorded: the case, and a value for each node that is cut off.
        kept: step -> its nodes to keep.

    Raises:
        GraphError: a value is missing, or the nodes make no legal graph over their new sources.
    """
    case = recorded.case
    stay = [k for k in sorted(kept) if any(computes(n) for n in kept[k])]
    if not stay:
        raise GraphError("nothing is left that computes")
    held = recorded.start(stay[0])
    persistent: dict[Tensor, Tensor] = {}
    steps = [_Cutting(recorded, k, frozenset(kept[k]), persistent).step() for k in stay]
    bytes_of = {persistent[t]: held[t] for t in case.persistent if t in persistent}
    placement = {persistent[t]: p for t, p in case.placement.items() if t in persistent}
    return renamed(replace(case, persistent=bytes_of, steps=steps, placement=placement))


def renamed(case: Case) -> Case:
    """`case` as one that no generator makes: under another id, which says where it comes from."""
    of = case.id.removeprefix(PREFIX)
    return replace(case, id=PREFIX + of, family="shrunk", params={"of": of}, tolerance={}, generator=1)


class _Cutting:
    """One step being cut."""

    def __init__(self, recorded: Recorded, k: int, kept: frozenset[Tensor], persistent: dict[Tensor, Tensor]) -> None:
        self._old = recorded.case.steps[k]
        self._values = recorded.values[k] if recorded.values else {}
        self._weights = recorded.case.persistent
        self._persistent = persistent
        self._kept = kept
        self._new: dict[Tensor, Tensor] = {}
        self._inputs: dict[Tensor, Bytes] = {}

    def step(self) -> Step:
        nodes = [self._node(n) for n in self._old.graph if n in self._kept]
        kept = set(self._persistent.values())
        read = {s for n in nodes for s in n.src if s is not n}
        asked = {self._new[t] for t in self._old.outputs if t in self._kept}
        sinks = {n for n in nodes if computes(n) and n not in read and n.root not in kept}
        return Step(Graph(nodes), self._inputs, tuple(n for n in nodes if n in asked or n in sinks))

    def _node(self, t: Tensor) -> Tensor:
        src = [None if s is None or s is t else self._source(s) for s in t.src]
        view_src = None
        if writes_in_place(t):
            under = below(t)
            assert under is not None
            view_src = self._source(under).root
        copy = Tensor(t.type, t.ne, t.nb, t.op, t.op_params, tuple(src), view_src, flags=t.flags, name=t.name)
        if t in t.src:  # as ggml_cast makes it
            copy.src = tuple(copy if s is t else c for s, c in zip(t.src, src, strict=True))
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


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether a view shows all of what it is a view of, as it is."""
    return (a.ne, a.nb, a.view_offs) == (b.ne, b.nb, b.view_offs)
