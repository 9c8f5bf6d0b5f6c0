"""Experiments on the failures of one backend: variants run, and their results are evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import Tensor
from conformance.judge.cause import Condition
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Result, Verdict
from conformance.process import Deadline
from conformance.run.examine import divergent
from conformance.run.execute import StepValues
from conformance.run.runner import Runner
from conformance.run.shrink import cuts, shrink
from conformance.run.shrink.workers import Runners

from . import ablate
from .ablate import Needs
from .failure import Failure, Shape, failure_of
from .features import BLOCK, OP, TAIL, YES, features, nodes_of
from .group import Nodes
from .rule import Rule, rule_of

EACH = 10.0
"""Minimum seconds to shrink one case."""
SHARE = 1 / 30
"""Share of the remaining time to shrink one case."""
AGAIN = 3
"""Attempts to reproduce a crash."""
NEEDED = 12
"""Maximum number of cases that run to find the necessary conditions of a failure."""


class Experiments:
    """Runs variants of failing cases on `spec` before a deadline; evidence goes to `nodes`."""

    def __init__(
        self, runner: Runner, spec: Spec, nodes: Nodes, deadline: Deadline, workers: Runners | None = None
    ) -> None:
        """Run nothing yet; `workers` shrink in parallel, if given."""
        self._runner, self._spec, self._nodes, self._workers = runner, spec, nodes, workers
        self.deadline = deadline
        """Deadline of the current phase of a search."""
        self._needs_of: dict[Shape, Needs] = {}

    def late(self) -> bool:
        """Return True after the deadline."""
        return self.deadline.is_over()

    def run(self, case: Case, *, locates: bool = False) -> Result:
        """Return the result of one case in the current process."""
        with self._runner.quick(locates=locates, checks_stale_state=False):
            return self._runner.run(self._spec, [case])[0]

    def recorded(self, case: Case) -> cuts.Recorded:
        """Return a case with the reference's values."""
        reference = self._runner.oracle.reference_in(self._runner.backend(self._spec).arithmetic_in(case))
        return cuts.record(case, reference)

    def alone(self, failure: Failure) -> Failure | None:
        """Return how the case fails in a fresh process, a crash after some tries; None if it passes."""
        self._runner.restart()
        for _ in range(AGAIN if failure.result.verdict is Verdict.CRASH else 1):
            try:
                found = failure_of(failure.case, self._seen_alone(failure.case))
            except ConformanceError:  # the run proves nothing, so the failure stands
                return failure
            if found is not None:
                return found
        return None

    def _afresh(self, case: Case) -> Result:
        """Return the result of a case in a fresh process."""
        self._runner.restart()
        return self._seen_alone(case)

    def _seen_alone(self, case: Case) -> Result:
        with self._runner.quick(locates=True, checks_stale_state=len(case.steps) > 1):
            return self._runner.run(self._spec, [case])[0]

    def cures(self, failure: Failure, rule: Rule) -> bool:
        """Return True if the case passes once no node meets `rule`."""
        if self.late():
            return False
        with suppress(ConformanceError):
            node = None if failure.at is None else failure.node
            made = ablate.drop(rule, self.recorded(failure.case), failure.result, node)
            return any(self.run(case).verdict is Verdict.PASS for case in made)
        return False

    def smallest(self, failure: Failure, outside: Callable[[Case, Result], bool]) -> tuple[Failure, bool]:
        """Shrink `failure`; return a smallest case that fails alike when fresh, True if finished.

        Wrong numbers and memory corruption depend on what ran before, so a smallest case that passes alone is no proof.
        """
        if failure.is_flaky:
            self._runner.restart()
            if self._workers is not None:
                self._workers.restart()
        deadline = self.deadline.within(max(EACH, SHARE * self.deadline.left()))
        with self._runner.quick(locates=True, checks_stale_state=len(failure.case.steps) > 1 or not failure.is_flaky):
            small = shrink(
                self._runner, self._spec, failure.case, deadline=deadline, accept=outside, workers=self._workers
            )
        self._learn(small.passed)
        result = small.result if not failure.is_flaky and failure.at is not None else self._afresh(small.case)
        found = failure_of(small.case, result)
        if found is None or not (failure.signature.covers(found.signature) or (found.is_flaky and failure.is_flaky)):
            return failure, False
        return found, small.finished

    def needs(self, failure: Failure) -> Needs:
        """Find the conditions that a failure needs, once per shape; passing variants are evidence."""
        if failure.at is None or failure.signature.kind == Fault.OUTPUT:
            return Needs()
        if failure.shape in self._needs_of or self.late():
            return self._needs_of.get(failure.shape, Needs())
        left = NEEDED

        def passes(case: Case) -> bool | None:
            nonlocal left
            left -= 1
            if left < 0 or self.late():
                return None
            if (result := self.run(case)).verdict is Verdict.PASS:
                return True if self._learn([case]) else None
            likewise = result.verdict is failure.result.verdict
            return False if likewise and (not failure.may_hide or self._fails_likewise(case, failure)) else None

        found = Needs()
        with suppress(ConformanceError):
            own = rule_of(failure.case, failure.at[0], failure.node)
            tails = [
                Condition(f"src[{i}].{TAIL}", YES)
                for i, s in enumerate(failure.node.src[:1])
                if s is not None and s.ne[0] > BLOCK and s.ne[0] % BLOCK and len(failure.all) == 1
            ]
            rule = Rule.of(own.ops, [*own.rest, *tails])
            found = ablate.needs(rule, self.recorded(failure.case), failure.result, failure.node, passes)
            self._nodes.add_passed(found.right)
        self._needs_of[failure.shape] = found
        return found

    def _learn(self, passed: Sequence[Case]) -> bool:
        """Add the nodes of passing experiments that tell something; return True if there are any.

        Those whose expected values are all zero do not: a backend that writes nothing also gives zeros.
        """
        telling = [case for case in passed if not self.late() and self._tells(case)]
        self._nodes.add_near(features(case, k, n) for case in telling for k, _, n in nodes_of(case))
        return bool(telling)

    def _tells(self, case: Case) -> bool:
        with suppress(ConformanceError):
            arithmetic = self._runner.backend(self._spec).arithmetic_in(case)
            (expected,) = self._runner.oracle.expect([case], arithmetic)
            return any(x.any() for step in expected.steps for x in (*step.outputs.values(), *step.caches.values()))
        return False

    def _fails_likewise(self, case: Case, failure: Failure) -> bool:
        """Return True if `case` fails at the op of `failure` with the same error."""
        found = failure_of(case, self.run(case, locates=True))
        if found is None or found.at is None:
            return False
        return found.kind == failure.kind and found.features[OP] == failure.features[OP]

    def result(self, case: Case) -> Result:
        """Return the result of a case in the current process, located in every way."""
        return self._runner.run(self._spec, [case])[0]

    def wrong_alone(self, case: Case) -> tuple[list[tuple[int, Tensor]], list[StepValues]]:
        """Return step and node of each node that is wrong alone on the run's values, and these."""
        return divergent(self._runner.tested(self._spec), case)
