"""Runs cases of the suite on a target: on the build, and the same ones on its base."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from conformance.backend.registry import Spec
from conformance.campaign.player import Player
from conformance.case.case import Case
from conformance.causes.analyse import analyse, by_message
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import computes
from conformance.judge.cause import Cause
from conformance.judge.evidence import Fault, Place
from conformance.judge.verdict import FAILURES, MissingCause, Result, Verdict, counted
from conformance.process import Deadline
from conformance.run.isolation.isolate import Isolation
from conformance.run.live import is_live
from conformance.run.runner import Runner
from conformance.run.session.spread import spread, subject
from conformance.suite import ops
from conformance.testrun import TestRun

from .target import Target

LOCATING = 0.5
"""Share of the causes' time for locating the first wrong node of each failure."""
COPIES = ("CONT", "CPY")
"""Ops that only copy; a case has them beside the op that it tests."""
QUICK = 4.0
"""Time limit of a request to a CPU in seconds; causes get more time."""
Then = Callable[[Result, Result, Callable[[Result], Result]], Iterable[str]]
"""Takes the results of build and base, and a function that runs a result's case again."""


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases of the suite."""

    isolation: Isolation
    progress: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    jobs: int | None = None
    """Experiments at a time; None for one per core."""

    def find(self, results: Sequence[Result], seconds: float) -> list[Cause]:
        """Return the causes of failures, after locating the failing node of each.

        Failures that cannot be searched are grouped by message: a backend may no longer open, or no time be left.
        """
        found: list[Cause] = []
        try:
            if seconds > 0:
                found = self._searched(results, seconds)
        except ConformanceError as e:
            self.progress(f"failures are grouped by message: {e}")
        known = {(c.backend, i) for c in found for i in c.cases}
        return [*found, *by_message([r for r in results if (r.backend, r.case) not in known])]

    def _searched(self, results: Sequence[Result], seconds: float) -> list[Cause]:
        deadline = Deadline.after(seconds, self.clock)
        located = self._located(results, deadline.within(seconds * LOCATING))
        specs = {name: Spec.parse(name) for name in {r.backend for r in results}}  # results of this process
        return analyse(
            located, specs, isolation=self.isolation, seconds=max(0.0, deadline.left()), jobs=self.jobs,
            progress=self.progress,
        )  # fmt: skip

    def _located(self, results: Sequence[Result], deadline: Deadline) -> list[Result]:
        """Run each failure again alone to locate it, which a sweep does not, and return the results.

        A case of one node that ended with an error does not run again; after the time limit neither do wrong numbers.
        """
        runner = Runner(isolation=self.isolation)
        located = list(results)
        failures = [i for i, r in enumerate(results) if r.verdict in FAILURES]
        try:
            turns = {i: n for n, i in enumerate(spread(list(dict.fromkeys(results[k].case for k in failures))))}
            for k in sorted(failures, key=lambda k: turns[results[k].case]):
                located[k] = self._at(runner, results[k], late=deadline.is_over())
        finally:
            runner.close()
        return located

    def _at(self, runner: Runner, result: Result, *, late: bool) -> Result:
        if is_live(result.case):
            return result
        case = runner.case(result.case)
        if result.unlocated and result.verdict is Verdict.FAIL and not late:
            (again,) = runner.run(Spec.parse(result.backend), [case])
            result = again if again.verdict is result.verdict else result
        where = _only_node(case) if result.unlocated else None
        return result if where is None else replace(result, where=where)

    def again(self, spec: Spec, case_id: str) -> Result:
        """Run a case alone, on a new runner."""
        runner = Runner(isolation=self.isolation)
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
    left: list[str]
    """Ids that have not run, in order."""
    hung: dict[str, list[str]] = field(default_factory=dict)
    """Op that did not return -> ids of its other cases, which run last."""
    then: Then | None = None
    """Function that returns further ids to run, from the results of build and base."""

    def run(self, player: Player, seconds: float, slow: set[str]) -> None:
        """Run remaining cases for `seconds`; those of `slow` ops, which hung, come last.

        ConformanceError if a backend of the target does not open.
        """
        it = player.run
        deadline = Deadline.after(seconds, it.clock).request(QUICK if self.target.on_cpu else inf)
        self.left.sort(key=lambda i: subject(i) in slow)
        while self.left and not deadline.is_over():
            hung: set[str] = set()
            done: list[Result] = []
            stop = partial(bool, hung)
            played = player.play(self.target.build, list(self.left), deadline=deadline, stop=stop)
            try:
                with closing(played):
                    for result in played:
                        done.append(result)
                        if any(r.verdict is Verdict.TIMEOUT for r in _sides(it, result)):
                            hung.add(subject(result.case))
            finally:  # also on Ctrl-C
                ran = {r.case for r in done}
                self.left = [i for i in self.left if i not in ran]
            more = [i for r in done for i in self._more(it, *_sides(it, r))]
            hung = {s for s in hung if s.startswith(ops.NAME)}
            slow.update(hung)
            for op in hung:
                self.hung.setdefault(op, []).extend(i for i in self.left if subject(i) == op)
            self.left = [i for i in self.left if subject(i) not in hung] + more

    def rest(self, reason: str, cause: MissingCause, *, broken: str = "") -> Iterator[NotRun]:
        """Yield the cases that have not run, for `reason` or because the target is `broken`."""
        lost = (broken, MissingCause.LOST) if broken else (reason, cause)
        yield NotRun(self.target, self.stage, self.left, *lost)
        for op, ids in self.hung.items():
            yield NotRun(self.target, f"{self.stage}: {op}", ids, "its op did not return in another case", cause)

    def _more(self, it: TestRun, result: Result, base: Result | None = None) -> Iterator[str]:
        specs = {str(s): s for s in self.target.specs}
        if self.then is not None and base is not None:
            yield from self.then(result, base, lambda r: it.runner.run(specs[r.backend], [it.runner.case(r.case)])[0])


def _sides(it: TestRun, result: Result) -> list[Result]:
    """Return a result of the build, and the base's of the same case if there is one."""
    before = it.against.before if it.against else {}
    return [result, *filter(None, [before.get((result.backend, result.case))])]


@dataclass(frozen=True, slots=True)
class NotRun:
    """Planned cases of a target that have no result."""

    target: Target
    what: str
    """Their stage, the op in it that hung, or the units."""
    ids: Sequence[str]
    reason: str
    cause: MissingCause

    def sentence(self) -> str:
        """Return how many cases of what did not run, and why."""
        return f"{self.target.name}: {self.what}, {counted(len(self.ids), 'case')}: {self.reason}"


def _only_node(case: Case) -> Place | None:
    """Return the place of the only node that does more than copy; None if there are several.

    A case of an op may copy parts of its result, such as a state, into outputs.
    """
    nodes = [(k, i, n) for k, s in enumerate(case.steps) for i, n in enumerate(s.graph) if computes(n)]
    nodes = [node for node in nodes if node[2].op not in COPIES] or nodes
    if len(nodes) != 1:
        return None
    ((k, i, node),) = nodes
    return Place(Fault.NODE, k, i, node.op, node.name)
