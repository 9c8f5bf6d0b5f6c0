"""A backend that damages its own memory: what fails then is no cause, and shrinking starts where nothing is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import pytest

from conformance.backend.interface import YES, Backend, DeviceInfo, Session, Support, Witness
from conformance.backend.registry import Spec, create
from conformance.case.case import Case
from conformance.causes.failure import failure_of
from conformance.causes.group import GONE, Nodes
from conformance.causes.search import Search
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.verdict import FAILURES
from conformance.run.runner import Runner

SPEC = Spec("poisoned")
WRONG, RIGHT = "ops/SCALE-f32-ne=18x6x3,s=-1.5,b=0.5@1", "ops/SQR-f32-ne=18x6x3x2@1"


class Poisoned(Backend):
    """The reference; SCALE with a bias is wrong, and after `LASTS` graphs everything is."""

    LASTS = 12

    def __init__(self) -> None:
        self.inner, self.ran = create(Spec("cpu")), 0

    def info(self) -> DeviceInfo:
        """A made-up device."""
        return DeviceInfo("poisoned", "none", "the reference with a fault")

    def supports_op(self, node: Tensor) -> Support:
        """Everything."""
        del node
        return YES

    def open(self, case: Case) -> Session:
        """The reference's session with the fault."""
        return PoisonedSession(self, self.inner.open(case))


class PoisonedSession(Session):
    """Counts its graphs in the backend."""

    def __init__(self, backend: Poisoned, inner: Session) -> None:
        self.backend, self.inner = backend, inner

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """As the reference."""
        self.inner.write(tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """As the reference."""
        return self.inner.read(tensor)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """As the reference, then the fault."""
        found = {t: data.copy() for t, data in self.inner.compute(graph, inputs, outputs).items()}
        self.backend.ran += 1
        for t, data in found.items():
            if self.backend.ran > self.backend.LASTS or (t.op == "SCALE" and t.params.b):
                data.view("<f4")[0] += 1
        return found

    def witness(self) -> Witness:
        """As the reference."""
        return self.inner.witness()


class _Runner(Runner):
    def _open(self, spec: Spec, *, own: bool) -> Backend:
        return Poisoned() if spec == SPEC else super()._open(spec, own=own)


@pytest.fixture
def runner() -> Iterator[_Runner]:
    """Opens the poisoned backend as often as it is asked to."""
    with closing(_Runner()) as runner:
        yield runner


def test_damage_is_no_cause(runner: _Runner) -> None:
    """A case that fails after damage alone is told apart, and the proof of the fault fails where nothing is damaged."""
    results = [r for i in [WRONG, *[RIGHT] * Poisoned.LASTS] for r in runner.run(SPEC, [runner.case(i)])]
    failures = [f for r in results if r.verdict in FAILURES and (f := failure_of(runner.case(r.case), r))]
    assert {f.case.id for f in failures} == {WRONG, RIGHT}
    groups = Search(runner, SPEC, Nodes(failures, [])).run(failures)
    gone = [g for g in groups if g.kind[1] == GONE]
    (fault,) = (g for g in groups if g not in gone)
    assert {f.case.id for g in gone for f in g.failures} == {RIGHT}
    assert {f.case.id for f in fault.failures} == {WRONG}
    assert "b" in {c.key for c in fault.rule.conditions}
    runner.restart()
    (result,) = runner.run(SPEC, [fault.proof.case])
    assert result.verdict in FAILURES
