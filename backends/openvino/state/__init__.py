"""`openvino-stateful`: caches in the model, as logs if writes append, or as whole variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from backends.openvino.backend import OpenVinoSession, OpenVinoStateless
from backends.openvino.translating.engine import GraphState
from backends.openvino.translating.plan import Plan
from conformance.backend.interface import Witness
from conformance.backend.snapshot import Snapshot
from conformance.case.case import Case
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor

from .append_log import Logged, appendings, fused, logs, roles_in

if TYPE_CHECKING:
    from backends.openvino.bind import HostMemory, Request
    from backends.openvino.emitted import EmittedGraph

    from .variables import StateMemory


class OpenVinoStateful(OpenVinoStateless):
    """cgraphs as OpenVINO models with caches as variables."""

    name = "openvino-stateful"
    promises: tuple[str, ...] = ("fuses", "resumes", "packs", "layers")

    def memory(self, case: Case) -> StateMemory:
        """Store bytes on the host, with caches partly in requests."""
        from .variables import StateMemory  # noqa: PLC0415  # needs openvino, which may be absent until now

        return StateMemory(case, self.requant)

    def emit(self, plan: Plan, memory: HostMemory) -> EmittedGraph:
        """Emit a plan, with caches as variables."""
        from .variables import StateContext, StateRoots  # noqa: PLC0415  # as above

        return StateContext(plan, StateRoots(plan, memory)).run(self.emitters())

    def compile(self, plan: Plan, emitted: EmittedGraph) -> Request:
        """Compile the model, and make its request."""
        from .variables import StatefulRequest  # noqa: PLC0415  # as above

        return StatefulRequest(*self.compiled(plan, emitted))

    def open(self, case: Case) -> StatefulSession:
        """Open a session whose witness names the form of caches."""
        return StatefulSession(self, case)


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph in the fused form."""

    graph: Graph
    outputs: tuple[Tensor, ...]
    logs: list[Logged]


class StatefulSession(OpenVinoSession):
    """Chooses the form of each step from its graph and its inputs."""

    def __init__(self, backend: OpenVinoStateful, case: Case) -> None:
        self._forms: WeakKeyDictionary[Graph, tuple[tuple[Tensor, ...], Snapshot, Fused | str]] = WeakKeyDictionary()
        self._states: dict[str, None] = {}
        self._whole: dict[str, None] = {}
        super().__init__(backend, case)  # prepares the case's graphs

    def _prepare(self, graph: Graph, outputs: Sequence[Tensor]) -> None:
        form = self._form(graph, tuple(outputs))
        if isinstance(form, str):
            super()._prepare(graph, outputs)
        else:
            super()._prepare(form.graph, form.outputs)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph`, in the fused form if graph and inputs allow it."""
        form = self._form(graph, tuple(outputs))
        steps = form if isinstance(form, str) else appendings(form.logs, inputs)
        self._memory.appending = () if isinstance(steps, str) else steps  # type: ignore[attr-defined]  # a StateMemory
        if isinstance(form, str) or isinstance(steps, str):
            if steps:
                self._states["slots"] = None
                self._whole[str(steps)] = None
            return super().compute(graph, inputs, outputs)
        self._states["fused"] = None
        values = super().compute(form.graph, inputs, form.outputs)
        return {t: values[own] for t, own in zip(outputs, form.outputs, strict=True)}

    def _same(self, state: GraphState) -> bool:
        """Return True, because `_form` has compared the graph and prepares a changed one again."""
        del state
        return True

    def _form(self, graph: Graph, outputs: tuple[Tensor, ...]) -> Fused | str:
        """Return `graph` in the fused form, or why it has none; "" if it has no caches."""
        known = self._forms.get(graph)
        if known is not None and known[0] == outputs and known[1].shows(graph):
            return known[2]
        roles = roles_in(graph, self._roles)
        own_logs = logs(graph, roles, outputs) if "cache" in roles.values() else ""
        form = own_logs if isinstance(own_logs, str) else Fused(*fused(graph, own_logs, outputs), own_logs)
        self._forms[graph] = outputs, Snapshot(graph), form
        self._graphs.pop(graph, None)
        return form

    def witness(self) -> Witness:
        """Return the base's witness with the forms, and why a step was not fused."""
        w = super().witness()
        w.state = ", ".join(sorted(self._states))
        w.notes += [f"whole variables: {r}" for r in self._whole]
        return w
