"""A backend that damages its own memory: what fails then is no cause, and shrinking starts where nothing is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from stand_in import Faulty

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.causes.failure import failure_of
from conformance.causes.group import GONE, Nodes
from conformance.causes.search import Search
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.verdict import FAILURES
from conformance.run.runner import Runner

SPEC = Spec("poisoned")
WRONG, RIGHT = "ops/SCALE-f32-ne=18x6x3,s=-1.5,b=0.5@1", "ops/SQR-f32-ne=18x6x3x2@1"


class Poisoned(Faulty):
    """SCALE with a bias is wrong, and after `LASTS` graphs everything is."""

    LASTS = 12

    def __init__(self) -> None:
        super().__init__(self._spoil)
        self.ran = 0

    def _spoil(self, _: Graph, found: dict[Tensor, Bytes]) -> None:
        self.ran += 1
        for t, data in found.items():
            if self.ran > self.LASTS or (t.op == "SCALE" and t.params.b):
                data.view("<f4")[0] += 1


class _Runner(Runner):
    def open(self, spec: Spec, *, own: bool) -> Backend:
        return Poisoned() if spec == SPEC else super().open(spec, own=own)


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
