"""Run cases on backends and judge them; locate each failure and save its case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import (
    ConformanceError,
    UsageError,
)
from conformance.judge.verdict import Golden, Pair, Result, Verdict
from conformance.process import Deadline
from conformance.suite.relations import relation

from . import cost, judgement, recorded, stored, trial
from .attempt import UnderTest
from .failed import result_of_error, uncheckable
from .isolation.isolate import IsolatedBackend, Isolation, Workers, open_backend
from .live import Players, is_live
from .oracle import Expectation, Oracle
from .session import failures, select
from .session.cache import Cache
from .session.journal import Journal
from .session.settings import NO_WAIVERS, WaiverBook


class Runner:
    """Backends of a run and the oracle that they share."""

    locates = True
    """Run a failing case again to find its first wrong node and stage."""
    checks_stale_state = True
    """True to run it also on a fresh backend, to separate kernel bugs from stale state."""

    def __init__(
        self,
        *,
        save_failures: Path | None = None,
        isolation: Isolation | None = None,
        journal: Journal | None = None,
        waivers: WaiverBook | None = None,
        oracle: Oracle | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Prepare a runner; no backend is opened.

        `save_failures` is a folder for the case files of failures; without it failing cases that no id generates go
        into that of `journal`, which has the running cases. `oracle` and `workers`, the processes of backends, are
        closed with the runner; without `workers` there are new ones, within the limits of `isolation`.
        """
        self.problems: list[str] = []
        """Errors in closing backends."""
        self.undeclared: dict[Spec, None] = {}
        """Backends judged by upstream's limits in some case, in order."""
        self.oracle = Oracle() if oracle is None else oracle
        self.waivers = waivers or NO_WAIVERS
        self._workers = workers or Workers(isolation)
        self._players = Players(self._workers, save_failures)
        self._backends: dict[Spec, Backend] = {}
        self._broken: dict[Spec, ConformanceError] = {}
        """Backends that could not be opened -> the error."""
        self._cases: Cache[str, Case] = Cache()
        self._stored: dict[Case, stored.Stored | None] = {}
        """Stored values of the current cases."""
        self._save = save_failures
        self._journal = journal

    def backend(self, spec: Spec) -> Backend:
        """Return the backend of `spec`, opened once.

        UsageError or UnavailableError if not possible; always the same error if it cannot be opened.
        """
        if spec in self._broken:
            raise self._broken[spec]
        if spec not in self._backends:
            try:
                self._backends[spec] = self.open(spec, own=False)
            except UsageError:
                raise
            except ConformanceError as e:
                self._broken[spec] = e
                raise
        return self._backends[spec]

    def open(self, spec: Spec, *, own: bool) -> Backend:
        """Open another backend, in its own process if `own`; raises as `open_backend`."""
        return open_backend(spec, self._workers, own=own)

    def end(self, name: str, it: Backend | Oracle) -> None:
        """Close a backend; an error goes to `problems`."""
        try:
            it.close()
        except ConformanceError as e:
            self.problems.append(f"{name}: close: {e}")
            sys.stderr.write(f"{self.problems[-1]}; results are not affected\n")

    def tested(self, spec: Spec) -> UnderTest:
        """Return the backend of `spec` with what judges it; raises as `backend`."""
        return UnderTest(self, spec, self.backend(spec))

    def case(self, case_id: str) -> Case:
        """Return the case of an id, cached for the next backend; UsageError for an unknown id."""
        if case_id not in self._cases:
            case = select.build(case_id)
            self._cases.add(case_id, case, case.nbytes)
            self._cases.trim()
        return self._cases[case_id]

    def _makes(self, case: Case) -> bool:
        """Return True if `case` was generated from its id."""
        return self._cases.get(case.id) is case

    def close(self) -> None:
        """Close every backend; errors go to `problems`."""
        for spec, backend in self._backends.items():
            self.end(str(spec), backend)
        self._players.close()
        self._workers.close()
        self.end("the oracle", self.oracle)

    def restart(self) -> None:
        """Close the backends; the next case opens fresh ones."""
        for spec, backend in self._backends.items():
            self.end(str(spec), backend)
        self._players.close()
        for held in (self._backends, self._broken):
            held.clear()

    def batch_size(self, spec: Spec) -> int:
        """Return the number of cases to pass to `run` at a time."""
        try:
            return max(self.backend(spec).batch, 32)
        except UsageError:
            raise
        except ConformanceError:
            return 32

    def is_over(self) -> bool:
        """Return True if the time of the run is over; every request has timed out since."""
        return self._workers.isolation.until.is_over()

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Limit each request in this context; after its end none starts, and no process does."""
        return self._workers.within(deadline)

    @contextmanager
    def quick(self, *, locates: bool, checks_stale_state: bool) -> Iterator[None]:
        """Limit how failures are located within this context; a fresh backend may take a second."""
        before = self.locates, self.checks_stale_state
        self.locates, self.checks_stale_state = locates and before[0], checks_stale_state and before[1]
        try:
            yield
        finally:
            self.locates, self.checks_stale_state = before

    def expectation(self, spec: Spec, case: Case) -> Expectation:
        """Return the expected values of `case` on `spec`; ConformanceError if not computable."""
        return trial.expect(self.tested(spec), [case])[0][0]

    def too_costly(self, cases: Sequence[Case]) -> str:
        """Return why `cases` together exceed the limits of a process; empty if they do not."""
        limits = self._workers.isolation
        return cost.refusal(cases, memory_limit=limits.memory_limit, time_limit=limits.time_limit)

    def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        """Return one result per case, in order, even if a backend or a case fails.

        Raises:
            UsageError: no such backend or option, or golden outputs are missing.
            CaseFileError: golden outputs are damaged, or a case cannot be written.
        """
        # an id in a file is untrusted; graphs that a live family recorded have its name, and steps
        if any(is_live(c.id) and not c.file and not c.steps for c in cases):
            return [self._finished(spec, c, self._players.play(spec, c.id)) for c in cases]
        self._stored = {c: stored.stored_of(c, generated=self._makes(c)) for c in cases}
        try:
            tested = self.tested(spec)
        except UsageError:
            raise
        except ConformanceError as e:
            return [self._finished(spec, c, result_of_error(Pair(c.id, str(spec)), e)) for c in cases]
        made = [c for c in cases if self._makes(c)]
        with self._journal.running(spec, made) if self._journal and made else nullcontext():
            results = self._results(tested, cases)
            return [self._finished(spec, c, results[c]) for c in cases]

    def _results(self, tested: UnderTest, cases: Sequence[Case]) -> dict[Case, Result]:
        """Return the results of cases: refused, too costly, or run in graphs of several."""
        results: dict[Case, Result] = {}
        able: list[Case] = []
        notes: dict[Case, str] = {}
        is_doubtful = _is_doubtful(tested, cases[0])
        for case, first in zip(cases, trial.refusals(tested, cases), strict=True):
            refusal = first
            if first is not None and (why := _again(first, is_doubtful=is_doubtful, is_late=False)):
                (refusal,) = trial.refusals(tested, [case])
                notes[case] = why
            if refusal is not None:
                results[case] = refusal
            elif why := self.too_costly([case]):
                results[case] = uncheckable(tested.pair(case), why)
            else:
                able.append(case)
        with suppress(ConformanceError):  # the case itself reports the error
            stored.prepare(self.oracle, {c: self._stored[c] for c in able}, tested.declared())

        def runs_alone(case: Case) -> bool:  # it is expected to fail, which would affect others in its graph
            doubted = tested.is_reference and self.oracle.doubt(case.id)
            return bool(doubted or self.waivers.verdicts(tested.spec, case.id))

        for group in _groups(able, tested.backend.batch, runs_alone):
            results.update(zip(group, self._run_batch(tested, group), strict=True))
        for case, why in notes.items():
            if results[case].verdict is not Verdict.CRASH:
                results[case] = results[case].noted(why)
        return results

    def _run_batch(self, tested: UnderTest, group: Sequence[Case]) -> list[Result]:
        """Run cases in one graph; one that does not pass there runs again alone."""
        if len(group) == 1 or self.too_costly(group):
            return [self._run_alone(tested, c) for c in group]
        try:
            attempts = trial.together(tested, group)
        except Exception:  # noqa: BLE001  # each case alone reports its error
            return [self._run_alone(tested, c) for c in group]
        results = []
        for attempt in attempts:
            result = judgement.judge(attempt)
            if result.verdict is Verdict.PASS:
                results.append(stored.judge(attempt, result, self._stored.get(attempt.case)))
                continue
            alone = self._run_alone(tested, attempt.case)
            if alone.verdict is Verdict.PASS:
                note = f"wrong only in a graph with {len(group) - 1} other cases, right alone"
                alone = replace(result, golden=alone.golden).noted(note)
            results.append(alone)
        return results

    def _run_alone(self, tested: UnderTest, case: Case) -> Result:
        """Run a case in its own graph, and again if its first result may not count."""
        values = self._stored.get(case)
        whole = not _by_id(case, made=self._makes(case))
        with self._journal.running(tested.spec, [case], whole=whole) if self._journal else nullcontext():
            is_doubtful = _is_doubtful(tested, case)
            result = trial.alone(tested, case, values)
            late = result.verdict is Verdict.TIMEOUT and not self.is_over()
            is_late = late and not self.waivers.expects(tested.spec, case.id, result.verdict)
            if why := _again(result, is_doubtful=is_doubtful, is_late=is_late):
                again = trial.alone(tested, case, values)
                result = again if again.verdict is result.verdict else again.noted(why)
            usual = self.waivers.expects(tested.spec, case.id, Verdict.CRASH)
            if _damages(result, usual=usual, matters=self.checks_stale_state or tested.backend.fragile):
                tested.backend.renew()
            return trial.by_stages(tested, case, values, result)

    def _finished(self, spec: Spec, case: Case, result: Result) -> Result:
        """Return `result` with its waiver applied, and its case saved if it failed."""
        result = self.waivers.apply(spec, result)
        if result.verdict in _HARMLESS or not case.steps:
            return result
        folder = self._save
        if folder is None and self._journal is not None and not _by_id(case, made=self._makes(case)):
            folder = self._journal.folder
        if folder is None:
            return result
        values = self._stored.get(case) if result.golden is Golden.DIFFERS else None
        if values is not None:
            values = values.with_weights_of(case, self.tested(spec).declared())
        whole = case if values is None else stored.with_values(case, values)
        return replace(result, saved=failures.save(folder, whole, result))


_HARMLESS = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.XFAIL, Verdict.XPASS})
"""Verdicts whose cases are not saved."""


def _by_id(case: Case, *, made: bool) -> bool:
    """Return True if an id is enough to recover a case; `made`: it was generated from its id."""
    return made and len(case.steps) == 1


def _is_doubtful(tested: UnderTest, case: Case) -> bool:
    backend = tested.backend
    return isinstance(backend, IsolatedBackend) and backend.is_doubtful(case)


def _again(result: Result, *, is_doubtful: bool, is_late: bool) -> str:
    """Return why a case runs again before its result counts; empty if it does not.

    `is_doubtful`: its process may have died of an earlier case. `is_late`: the time-out is not known, and there is time
    to repeat it.
    """
    died = "" if result.error is None else result.error.died
    if is_doubtful and result.verdict is Verdict.CRASH and died.startswith("SIG"):
        return f"a process that earlier cases had used died ({died}), a new one did not"
    return "no answer in time in the first run, but in the second" if is_late else ""


def _damages(result: Result, *, usual: bool, matters: bool) -> bool:
    """Return True if a process must end with a case, which may have written outside its result.

    `usual`: the case usually kills its process. `matters`: wrong values are a reason, too.
    """
    return (usual and result.verdict is not Verdict.CRASH) or (matters and result.verdict is Verdict.FAIL)


def _groups(cases: Sequence[Case], size: int, alone: Callable[[Case], bool]) -> Iterable[list[Case]]:
    """Yield groups of up to `size` cases that may share a graph, every other case alone."""
    group: list[Case] = []
    for case in cases:
        single = len(case.steps) == 1 and not recorded.is_free_running(case)
        if not single or case.demands or relation.applies(case) or size == 1 or alone(case):
            yield [case]
            continue
        group.append(case)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
