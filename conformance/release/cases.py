"""Cases of the suite on a target, in lockstep: each on the build and then on its base, so that both have the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.causes.analyse import analyse
from conformance.causes.cause import Cause
from conformance.ggml.tensor import computes
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.suite.batch import groups

from .target import Target
from .work import fails

LOCATING = 0.5
"""Of the time to find causes, to find the first wrong node of each failure."""
FIRST = 8
"""Cases of the first group; a fast one is followed by one twice as large."""
SLOW = 5.0
"""Seconds from which a group of cases is made smaller, so that the time is kept."""


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases of the suite."""

    isolation: Isolation
    progress: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic

    def find(self, results: Sequence[Result], seconds: float) -> list[Cause]:
        """By the form of each fault (`causes.analyse`), once the node at fault of each failure is known."""
        begun = self.clock()
        self._locate([r for r in results if fails(r)], begun + seconds * LOCATING)
        left = max(0.0, begun + seconds - self.clock())
        return analyse(results, isolation=self.isolation, seconds=left, progress=self.progress)

    def _locate(self, failures: Sequence[Result], end: float) -> None:
        """Run failures again, each alone, and take over where they begin; a sweep only asks whether a case fails.

        What ends with an error in a case of one node begins there, and need not run.
        """
        runner = Runner(isolation=replace(self.isolation, isolate=True))
        try:
            for r in failures:
                if r.place is None and r.verdict is not Verdict.FAIL:
                    r.place = _only_node(runner.case(r.case))
                if r.place is not None or self.clock() >= end:
                    continue
                (again,) = runner.run(Spec.parse(r.backend), [runner.case(r.case)])
                if again.verdict is r.verdict:
                    r.detail, r.place, r.first_divergence = again.detail, again.place, again.first_divergence
        finally:
            runner.close()

    def again(self, spec: Spec, case_id: str) -> Result:
        """On a runner of its own."""
        runner = Runner(isolation=replace(self.isolation, isolate=True))
        try:
            (result,) = runner.run(spec, [runner.case(case_id)])
            return result
        finally:
            runner.close()


@dataclass(slots=True)
class Sweep:
    """The cases of one stage on one target."""

    target: Target
    stage: str
    kind: Cases
    left: list[str]
    """Ids that did not run yet, in order."""
    results: dict[Spec, list[Result]] = field(default_factory=dict)

    def run(self, runner: Runner, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Run what is left, for so long; the group of cases that is under way then is brought to its end."""
        end = clock() + seconds
        full, size = max(runner.batch_size(s) for s in self.target.specs), FIRST
        while self.left and clock() < end:
            begun = clock()
            group = next(groups([runner.case(i) for i in self.left[:size]]))
            for spec in self.target.specs:
                self.results.setdefault(spec, []).extend(runner.run(spec, group))
            del self.left[: len(group)]
            slow = clock() - begun > SLOW
            size = max(1, len(group) // 4) if slow else min(full, 2 * size)


def _only_node(case: Case) -> dict[str, JSON] | None:
    """The place of the node that computes, where a case has but one."""
    nodes = [(k, i, n) for k, s in enumerate(case.steps) for i, n in enumerate(s.graph) if computes(n)]
    if len(nodes) != 1:
        return None
    ((k, i, node),) = nodes
    return {"step": k, "node": i, "op": node.op, "name": node.name}
