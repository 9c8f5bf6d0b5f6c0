"""Run a case on a backend and return its values: freely, in reused memory, or node by node."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from conformance.backend.interface import Backend, Session, Witness
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendCrashError, BackendError, ConformanceError
from conformance.ggml.graph import Graph
from conformance.ggml.partial import Part, partial
from conformance.ggml.tensor import Bytes, Tensor, computes, nbytes, pack
from conformance.ggml.types import F32


@dataclass(slots=True)
class StepValues:
    """Packed values after a step."""

    outputs: dict[Tensor, Bytes] = field(default_factory=dict)
    caches: dict[Tensor, Bytes] = field(default_factory=dict)

    @property
    def all(self) -> dict[Tensor, Bytes]:
        """Outputs and caches."""
        return {**self.outputs, **self.caches}


@dataclass(slots=True)
class Execution:
    """The run of a whole case."""

    steps: list[StepValues]
    witness: Witness
    seconds: float
    opaque: frozenset[Tensor] = frozenset()
    """Caches that the backend cannot read; they have no values."""

    def comparable(self, values: Iterable[StepValues]) -> list[dict[Tensor, Bytes]]:
        """Return the expected `values` per step with which this run can be compared."""
        return [{t: x for t, x in v.all.items() if t not in self.opaque} for v in values]


class ClosingError(BackendCrashError):
    """Death of a process when it closed a case, all values of which had been read."""

    def __init__(self, error: BackendCrashError, execution: Execution) -> None:
        super().__init__(str(error), words=error.words, died=error.died)
        self.execution = execution


def with_values(case: Case, values: Sequence[StepValues]) -> Case:
    """Return the first steps of `case` with `values` as their recorded values."""
    pairs = zip(case.steps, values, strict=False)
    return replace(case, steps=[Step(s.graph, s.inputs, s.outputs, v.all) for s, v in pairs])


def computed_nodes(step: Step) -> list[Tensor]:
    """Return the nodes of a step that compute: flagged COMPUTE, no view op, not empty."""
    return [n for n in step.graph if computes(n)]


def nothing(_session: Session, _step: int) -> None:
    """Do nothing between steps."""


def execute(
    backend: Backend,
    case: Case,
    *,
    every_node: Sequence[int] = (),
    memory: Memory | None = None,
    unread: bool = False,
    before: Callable[[Session, int], None] = nothing,
) -> Execution:
    """Run all steps of `case` freely: each step starts from the caches of the previous one.

    Steps in `every_node` return all computed nodes instead of the outputs. `memory` computes each step in reused
    memory; not with `every_node`. If `unread`, caches are read after the last step only, and other steps have no values
    for them. `before` gets the session and the index of each step before it runs. BackendError, which has the step, if
    the backend failed, died or did not answer; ClosingError, which has all values, if it died after that.
    """
    caches = case.caches()
    wanted = frozenset(every_node)
    steps: list[StepValues] = []
    start = time.perf_counter()
    ran: list[Execution] = []
    try:
        with backend.open(case) as session:
            opaque = session.opaque().intersection(caches)
            caches = [t for t in caches if t not in opaque]
            for k, step in enumerate(case.steps):
                before(session, k)
                outputs = computed_nodes(step) if k in wanted else step.outputs
                for data in step.inputs.values():
                    data.flags.writeable = False  # a backend that writes there would change the inputs of others
                try:
                    if memory is None:
                        found = session.compute(step.graph, step.inputs, outputs)
                    else:
                        found = memory.compute(session, step)
                except BackendError as e:
                    e.step = k
                    raise
                read = () if unread and k + 1 < len(case.steps) else caches
                steps.append(StepValues(dict(found), {t: pack(session.read(t), t, 0) for t in read}))
            ran.append(Execution(steps, session.witness(), time.perf_counter() - start, opaque))
    except BackendCrashError as e:
        if not ran:
            raise
        raise ClosingError(e, ran[0]) from None
    if any(p.buffer for p in case.placement.values()) and len(backend.buffer_types()) == 1:
        ran[0].witness.notes.append("the backend has only one buffer type for weights")
    return ran[0]


class PartError(ConformanceError):
    """A backend supports the case, but not a part of it."""


def execute_by_node(backend: Backend, case: Case) -> Execution:
    """Run each computing node in its own graph and session, from earlier nodes' values.

    No backend can then compute two nodes together. Raises as `execute`, and PartError.
    """
    held = dict(case.persistent)
    runs: list[Execution] = []
    steps: list[StepValues] = []
    for k, step in enumerate(case.steps):
        values = dict(step.inputs)
        outputs: dict[Tensor, Bytes] = {}
        for first, last in _singly(step.graph):
            part = partial(step.graph, first, last, persistent=held, outputs=step.outputs)
            alone = _alone(case, part, held, values)
            answer = backend.supports_case(alone)
            if not answer:
                raise PartError(f"it supports the case, but no node of it alone: {answer.reason}")
            try:
                runs.append(execute(backend, alone))
            except BackendError as e:
                e.step = k
                raise
            found = runs[-1].steps[0]
            values.update((root, found.outputs[node]) for node, root in part.passed.items())
            outputs.update((node, found.outputs[copy]) for copy, node in part.wanted.items())
            held.update(found.caches)
        steps.append(StepValues({t: outputs[t] for t in step.outputs}, {t: held[t] for t in case.caches()}))
    opaque = frozenset(t for r in runs for t in r.opaque)
    return Execution(steps, runs[-1].witness, sum(r.seconds for r in runs), opaque)


def _singly(graph: Graph) -> list[tuple[int, int]]:
    """Return first and last node of each part: one computing node and the view ops before it."""
    ends = [i + 1 for i, n in enumerate(graph) if computes(n)]
    return list(zip([0, *ends[:-1]], [*ends[:-1], len(graph)], strict=True))


def _alone(case: Case, part: Part, held: Mapping[Tensor, Bytes], values: Mapping[Tensor, Bytes]) -> Case:
    """Return a part as a case; leaves that nothing computed are 0, as no node reads them."""
    own = {t for t in part.graph.tensors() if t in held}
    inputs = {t: values[root] if root in values else np.zeros(nbytes(t), np.uint8) for t, root in part.inputs.items()}
    return Case(
        f"{case.id}#{part.graph.nodes[-1].name}",
        {t: data for t, data in held.items() if t in own},
        [Step(part.graph, inputs, part.outputs)],
        placement={t: p for t, p in case.placement.items() if t in own},
    )


@runtime_checkable
class _Rebuilding(Protocol):
    """A session in another process, which rebuilds graphs in the memory that its library uses."""

    def compute_rebuilt(self, step: Step) -> Mapping[Tensor, Bytes]:
        """Compute `step` as `Memory` does."""


class Memory:
    """One set of tensors and one graph, overwritten for every step; persistent tensors stay.

    llama.cpp rebuilds each step's graph in the memory of the previous one. A backend that identifies a graph or a
    tensor by its address then finds other contents there.
    """

    def __init__(self, case: Case) -> None:
        self._graph = Graph([])
        self._persistent = frozenset(case.persistent)
        self._tensors: list[Tensor] = []

    def compute(self, session: Session, step: Step) -> Mapping[Tensor, Bytes]:
        """Compute `step` in this memory and return its outputs."""
        return session.compute_rebuilt(step) if isinstance(session, _Rebuilding) else self._compute(session, step)

    def _compute(self, session: Session, step: Step) -> Mapping[Tensor, Bytes]:
        graph, now = self.place(step.graph)
        inputs = {now[t]: data for t, data in step.inputs.items()}
        found = session.compute(graph, inputs, [now[t] for t in step.outputs])
        return {t: found[now[t]] for t in step.outputs}

    def place(self, graph: Graph) -> tuple[Graph, Mapping[Tensor, Tensor]]:
        """Overwrite the memory with `graph`; return its graph and each tensor -> its replacement."""
        now = {t: t for t in self._persistent}
        made = [t for t in graph.tensors() if t not in self._persistent]
        while len(self._tensors) < len(made):
            self._tensors.append(Tensor(F32, (0, 1, 1, 1), (4, 0, 0, 0)))
        now.update(zip(made, self._tensors, strict=False))
        for t in made:
            into = now[t]
            into.type, into.ne, into.nb = t.type, t.ne, t.nb
            into.op, into.op_params, into.flags, into.name = t.op, t.op_params, t.flags, t.name
            into.src = tuple([None if s is None else now[s] for s in t.src])
            into.view_src = None if t.view_src is None else now[t.view_src]
            into.view_offs = t.view_offs
        self._graph.nodes[:] = [now[n] for n in graph]
        return self._graph, now


class Reuse(Memory):
    """Memory that computes the first of several equal graphs again, as llama.cpp does."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._first: dict[Hashable, Graph] = {}

    def compute(self, session: Session, step: Step) -> Mapping[Tensor, Bytes]:
        """Compute the first graph that equals that of `step`; return the outputs of `step`."""
        return self._compute(session, step)

    def place(self, graph: Graph) -> tuple[Graph, Mapping[Tensor, Tensor]]:
        """Return the first graph that equals `graph`."""
        first = self._first.setdefault(graph.key(self._persistent), graph)
        return first, dict(zip(graph.tensors(), first.tensors(), strict=True))
