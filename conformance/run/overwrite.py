"""Running a case as llama.cpp does: each step's graph is rebuilt in the memory of the one before.

Here memory is objects: one set of tensors and one graph, filled anew for every step. A backend that knows a graph or a
tensor again by its address finds the same one with other contents.
"""

from __future__ import annotations

import time

from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor, pack
from conformance.ggml.types import F32

from .execute import Execution, StepValues


class Memory:
    """Tensors that are filled again and again; persistent ones stay what they are."""

    def __init__(self, case: Case) -> None:
        self.graph = Graph([])
        self._persistent = frozenset(case.persistent)
        self._tensors: list[Tensor] = []

    def rebuild(self, graph: Graph) -> dict[Tensor, Tensor]:
        """Fill the memory with `graph`; every tensor of it -> the one that stands for it now."""
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
        self.graph.nodes[:] = [now[n] for n in graph]
        return now


def execute_overwritten(backend: Backend, case: Case) -> Execution:
    """As `execute`, every step in the memory of the one before.

    Args:
        backend: in this process.
        case: validated.

    Raises:
        BackendError: the backend failed.
    """
    memory, caches = Memory(case), case.caches()
    steps: list[StepValues] = []
    start = time.perf_counter()
    with backend.open(case) as session:
        for step in case.steps:
            now = memory.rebuild(step.graph)
            inputs = {now[t]: data for t, data in step.inputs.items()}
            found = session.compute(memory.graph, inputs, [now[t] for t in step.outputs])
            outputs = {t: found[now[t]] for t in step.outputs}
            steps.append(StepValues(outputs, {t: pack(session.read(t), t, 0) for t in caches}))
        witness = session.witness()
    return Execution(steps, witness, time.perf_counter() - start)
