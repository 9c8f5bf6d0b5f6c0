"""Run cases on backends and judge them; locate each failure and save its case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from conformance.backend.interface import Backend, Support
from conformance.backend.registry import REFERENCE, Spec, resolve
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import (
    BackendCrashError,
    BackendError,
    BackendTimeoutError,
    ConformanceError,
    NotIndependentError,
    UnavailableError,
    UsageError,
)
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor
from conformance.ggml.text import error_text
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.text import diverges
from conformance.judge.verdict import FAILURES, Golden, Result, Verdict
from conformance.process import Deadline
from conformance.suite.batch import merge
from conformance.suite.relations import relation

from . import cost, judgement, live, locate, recorded, relate, stored
from .execute import Execution, StepValues, execute
from .isolation.isolate import IsolatedBackend, Isolation, Workers, open_backend
from .oracle import Expectation, NoSecondOpinionError, Oracle, part
from .scheduler.handover import Scheduler
from .session import failures, select
from .session.cache import Cache
from .session.precision import undeclared
from .session.settings import WaiverBook
from .session.writeahead import Ahead
from .signature import error_of


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
        write_ahead: Path | None = None,
        waivers: WaiverBook | None = None,
        oracle: Oracle | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Prepare a runner; no backend is opened.

        `save_failures` is a folder for the case files of failures, `write_ahead` one for running cases, and for failing
        cases that no id generates. `oracle` and `workers`, the processes of backends, are closed with the runner;
        without `workers` there are new ones, within the limits of `isolation`.
        """
        self._workers = workers or Workers(isolation)
        self.problems: list[str] = []
        """Errors in closing backends."""
        self._ahead = Ahead(write_ahead, self._makes) if write_ahead else None
        self.undeclared: dict[Spec, None] = {}
        """Backends judged by upstream's limits in some case, in order."""
        self.oracle = Oracle() if oracle is None else oracle
        self._backends: dict[Spec, Backend] = {}
        self._broken: dict[Spec, ConformanceError] = {}
        """Backends that could not be opened -> the error."""
        self._cases: Cache[str, Case] = Cache()
        self._players: dict[tuple[Spec, str], live.Player | ConformanceError] = {}
        """Player of a live family, or why it could not be opened."""
        self._stored: dict[Case, stored.Stored | None] = {}
        """Stored values of the current cases."""
        self._save = save_failures
        self._waivers = waivers

    def backend(self, spec: Spec) -> Backend:
        """Return the backend of `spec`, opened once; UsageError or UnavailableError if not possible."""
        if spec not in self._backends:
            self._backends[spec] = self._open(spec, own=False)
        return self._backends[spec]

    def _open(self, spec: Spec, *, own: bool) -> Backend:
        """Open another backend, in its own process if `own`; raises as `open_backend`."""
        return open_backend(spec, self._workers, own=own)

    def _opened(self, spec: Spec) -> Backend:
        """Return the backend of `spec`; always the same ConformanceError if it cannot be opened."""
        if spec in self._broken:
            raise self._broken[spec]
        try:
            return self.backend(spec)
        except UsageError:
            raise
        except ConformanceError as e:
            self._broken[spec] = e
            raise

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
        if self._ahead is not None:
            self._ahead.close()
        for spec, backend in self._backends.items():
            self._end(str(spec), backend)
        self._end_players()
        self._workers.close()
        self._end("the oracle", self.oracle)

    def restart(self) -> None:
        """Close the backends; the next case opens fresh ones."""
        for spec, backend in self._backends.items():
            self._end(str(spec), backend)
        self._end_players()
        for held in (self._backends, self._broken):
            held.clear()

    def _end_players(self) -> None:
        for player in self._players.values():
            if not isinstance(player, ConformanceError):
                player.close()
        self._players.clear()

    def _end(self, name: str, it: Backend | Oracle) -> None:
        try:
            it.close()
        except ConformanceError as e:
            self.problems.append(f"{name}: close: {e}")
            sys.stderr.write(f"{self.problems[-1]}; results are not affected\n")

    def batch_size(self, spec: Spec) -> int:
        """Return the number of cases to pass to `run` at a time."""
        try:
            return max(self._opened(spec).batch, 32)
        except UsageError:
            raise
        except ConformanceError:
            return 32

    def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        """Return one result per case, in order, even if a backend or a case fails.

        Raises:
            UsageError: no such backend or option, or golden outputs are missing.
            CaseFileError: golden outputs are damaged, or a case cannot be written.
        """
        if any(live.is_live(c.id) and not c.file for c in cases):  # an id in a file is untrusted
            return [self._finished(spec, c, self._played(spec, c.id)) for c in cases]
        self._stored = {c: self._stored_of(c) for c in cases}
        try:
            backend = self._opened(spec)
        except UsageError:
            raise
        except ConformanceError as e:
            return [self._finished(spec, c, result_of_error(e)) for c in cases]
        with self._ahead.batch(spec, cases) if self._ahead else nullcontext():
            results = self._results(spec, backend, cases)
            return [self._finished(spec, c, results[c]) for c in cases]

    def _played(self, spec: Spec, case_id: str) -> Result:
        """Return the result of a case of a live family."""
        try:
            player = self._player(spec, case_id.partition("/")[0])
            result = player.play(case_id)
            repeats = result.verdict is Verdict.TIMEOUT and not self.is_over()
            return player.play(case_id) if repeats else result
        except UsageError:
            raise
        except UnavailableError as e:
            return Result("", "", Verdict.UNSUPPORTED, error=Error(str(e), str(e)))
        except ConformanceError as e:
            return result_of_error(e)
        except Exception as e:  # noqa: BLE001  # a bug of a player must fail one case, not the run
            return _unjudged(e)

    def _player(self, spec: Spec, family: str) -> live.Player:
        """Return the player of a live family; always the same ConformanceError if not possible."""
        if (spec, family) not in self._players:
            try:
                self._players[spec, family] = live.LIVE[family].player(spec, self._workers.isolation, self._save)
            except UsageError:
                raise
            except ConformanceError as e:
                self._players[spec, family] = e
        found = self._players[spec, family]
        if isinstance(found, ConformanceError):
            raise found
        return found

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

    def _results(self, spec: Spec, backend: Backend, cases: Sequence[Case]) -> dict[Case, Result]:
        results: dict[Case, Result] = {}
        able: list[Case] = []
        for case, refusal in zip(cases, self._refusals(backend, cases), strict=True):
            if refusal is not None:
                results[case] = refusal
            elif why := self.too_costly([case]):
                results[case] = _uncheckable(why)
            else:
                able.append(case)
        with suppress(ConformanceError):  # the case itself reports the error
            stored.prepare(self.oracle, {c: self._stored[c] for c in able}, self._declared(spec, backend))
        for group in _groups(able, backend.batch, partial(self._runs_alone, spec)):
            results.update(zip(group, self._run_batch(spec, backend, group), strict=True))
        return results

    def _finished(self, spec: Spec, case: Case, result: Result) -> Result:
        result = replace(result, case=case.id, backend=str(spec))
        if self._waivers is not None:
            result = self._waivers.apply(spec, result)
        if result.verdict in _HARMLESS or not case.steps:
            return result
        folder = self._save
        if folder is None and self._ahead is not None and not self._ahead.by_id(case):
            folder = self._ahead.folder
        if folder is None:
            return result
        values = self._stored.get(case) if result.golden is Golden.DIFFERS else None
        if values is not None:
            values = values.with_weights_of(case, self._declared(spec, self.backend(spec)))
        whole = case if values is None else stored.with_values(case, values)
        return replace(result, saved=failures.save(folder, whole, result))

    def _refusals(self, backend: Backend, cases: Sequence[Case]) -> list[Result | None]:
        """Return UNSUPPORTED, with the reason, for each case with a node that `backend` refuses."""
        graphs = [s.graph for c in cases for s in c.steps]
        try:
            answers = iter(backend.supports(Graph([n for g in graphs for n in g])))
        except ConformanceError as e:
            alone = [self._refusal(backend, c, None) for c in cases]
            if isinstance(e, (BackendCrashError, BackendTimeoutError)) and not any(
                r is not None and r.verdict in FAILURES for r in alone
            ):
                alone[0] = result_of_error(e).noted("`supports` failed for these cases together; each is asked alone")
            return alone
        return [self._refusal(backend, c, [[next(answers) for _ in s.graph] for s in c.steps]) for c in cases]

    def _refusal(self, backend: Backend, case: Case, answers: Sequence[Sequence[Support]] | None) -> Result | None:
        """Return the refusal of a case from `answers` for each step's nodes; None asks the backend."""
        try:
            refused = _unsupported(case, answers or [backend.supports(s.graph) for s in case.steps])
            if refused is None:
                said = [backend.supports_case(c) for c in relation.cases_of(case)]
                refused = next((Error(a.reason, a.reason) for a in said if not a), None)
        except ConformanceError as e:
            return result_of_error(e)
        return None if refused is None else Result("", "", Verdict.UNSUPPORTED, error=refused)

    def expectation(self, spec: Spec, case: Case) -> Expectation:
        """Return the expected values of `case` on `spec`; ConformanceError if not computable."""
        backend = self._opened(spec)
        backend.arithmetic_in(case)
        return self._expect(spec, backend, [case])[0][0]

    def divergent(self, spec: Spec, case: Case) -> tuple[list[tuple[int, Tensor]], list[StepValues]]:
        """Return step and node of each value that is wrong given its sources, and all values.

        ConformanceError if `spec` cannot run `case` in this way.
        """
        backend = self._opened(spec)
        reference = self._referee(spec, backend, case)
        every = range(len(case.steps))
        ran = execute(backend, case, every_node=every).steps
        return [(j.step, j.tensor) for j in locate.divergent(ran, reference, case, every[-1])], ran

    def too_costly(self, cases: Sequence[Case]) -> str:
        """Return why `cases` together exceed the limits of a process; empty if they do not."""
        limits = self._workers.isolation
        return cost.refusal(cases, memory_limit=limits.memory_limit, time_limit=limits.time_limit)

    def _runs_alone(self, spec: Spec, case: Case) -> bool:
        """Return True if a case is expected to fail, which would affect others in its graph."""
        doubted = resolve(spec).name == REFERENCE and self.oracle.doubt(case.id)
        return bool(doubted) or (self._waivers is not None and bool(self._waivers.verdicts(spec, case.id)))

    def _run_batch(self, spec: Spec, backend: Backend, group: Sequence[Case]) -> list[Result]:
        if len(group) == 1 or self.too_costly(group):
            return [self._run_alone(spec, backend, c) for c in group]
        try:
            expectations, tested = self._expect(spec, backend, group)
            merged = execute(tested, merge(group))
        except Exception:  # noqa: BLE001  # each case alone reports its error
            return [self._run_alone(spec, backend, c) for c in group]
        results = []
        for case, expectation in zip(group, expectations, strict=True):
            share = Execution([part(merged.steps[0], case)], merged.witness, merged.seconds / len(group))
            result = judgement.judge(spec, case, expectation, share)
            if result.verdict is not Verdict.PASS:
                alone = self._run_alone(spec, backend, case)
                if alone.verdict is Verdict.PASS:
                    note = f"wrong only in a graph with {len(group) - 1} other cases, right alone"
                    result = replace(result, golden=alone.golden).noted(note)
                else:
                    result = alone
            else:
                result = self._compare_stored(spec, case, expectation, share, result)
            results.append(result)
        return results

    def _run_alone(self, spec: Spec, backend: Backend, case: Case) -> Result:
        with self._ahead.one(spec, case) if self._ahead else nullcontext():
            is_doubtful = isinstance(backend, IsolatedBackend) and backend.is_doubtful(case)
            result = self._execute_and_judge(spec, backend, case)
            if why := self._again(spec, case, result, is_doubtful=is_doubtful):
                again = self._execute_and_judge(spec, backend, case)
                result = again if again.verdict is result.verdict else again.noted(why)
            self._replace_damaged(spec, case, result)
            if result.golden is Golden.DIFFERS and result.unlocated:
                return result  # the backend agrees with the reference
            stale = locate.is_stale(result)  # stale state affects the translation too
            translation = None if stale or not self.locates else select.translation_of(spec, backend, result.verdict)
            if translation is None:
                return result
            return result.noted(select.stage_hint(result.verdict, self._run_at_stage(translation, case)))

    def _again(self, spec: Spec, case: Case, result: Result, *, is_doubtful: bool) -> str:
        """Return why a case runs again before its result counts; empty if it does not.

        `is_doubtful`: its process may have died of an earlier case.
        """
        died = "" if result.error is None else result.error.died
        if is_doubtful and result.verdict is Verdict.CRASH and died.startswith("SIG"):
            return f"a process that earlier cases had used died ({died}), a new one did not"
        late = (
            result.verdict is Verdict.TIMEOUT and not self.is_over() and not self._is_known(spec, case, result.verdict)
        )
        return "no answer in time in the first run, but in the second" if late else ""

    def _is_known(self, spec: Spec, case: Case, verdict: Verdict) -> bool:
        """Return True if a waiver expects this verdict of the case."""
        return self._waivers is not None and verdict in self._waivers.verdicts(spec, case.id)

    def _replace_damaged(self, spec: Spec, case: Case, result: Result) -> None:
        """End a process that survived a case which usually kills it: its heap may be damaged."""
        if result.verdict is not Verdict.CRASH and self._is_known(spec, case, Verdict.CRASH):
            self.backend(spec).renew()

    def _run_at_stage(self, spec: Spec, case: Case) -> Result:
        try:
            backend = self._opened(spec)
        except ConformanceError as e:
            return Result(case.id, str(spec), Verdict.UNSUPPORTED, error=error_of(e))
        (refusal,) = self._refusals(backend, [case])
        return refusal or self._execute_and_judge(spec, backend, case)

    def _execute_and_judge(self, spec: Spec, backend: Backend, case: Case) -> Result:
        try:
            if relation.applies(case):
                checks = (
                    (self._find_stale_in_sides, self._locate_side) if self.locates and self.checks_stale_state else ()
                )
                return relate.judge(spec, backend, case, self._open, *checks)
            return self._judge(spec, backend, case)
        except ConformanceError as e:
            return result_of_error(e)
        except Exception as e:  # noqa: BLE001  # any bug must fail one case, not the run
            return _unjudged(e)

    def _judge(self, spec: Spec, backend: Backend, case: Case) -> Result:
        backend.arithmetic_in(case)
        try:
            (expectation,), tested = self._expect(spec, backend, [case])
        except NoSecondOpinionError as e:
            return Result("", "", Verdict.UNSUPPORTED, error=Error(str(e)))
        except Exception as e:  # noqa: BLE001  # an arithmetic that cannot be computed
            why = str(e) if isinstance(e, ConformanceError) else error_text(e)
            return _uncheckable(why)
        try:
            execution = execute(tested, case)
        except BackendError as e:
            return self._locate_error(spec, tested, case, e)
        result = judgement.judge(spec, case, expectation, execution)
        result = self._look_closer(spec, tested, case, expectation, execution, result.noted(expectation.note))
        if not isinstance(expectation, recorded.Recording):
            return self._compare_stored(spec, case, expectation, execution, result)
        compared = result.verdict in {Verdict.PASS, Verdict.FAIL}
        return replace(result, golden=Golden.COMPARED) if compared else result

    def _compare_stored(
        self, spec: Spec, case: Case, expectation: Expectation, execution: Execution, result: Result
    ) -> Result:
        """Return `result` with the comparison of the run with stored values."""
        if (values := self._stored.get(case)) is not None:
            return stored.judge(result, spec, self.oracle, case, values, expectation, execution)
        return replace(result, golden=Golden.NOT_COMPARABLE) if recorded.is_free_running(case) else result

    def _stored_of(self, case: Case) -> stored.Stored | None:
        return stored.stored_of(case, generated=self._makes(case))

    def _look_closer(
        self, spec: Spec, backend: Backend, case: Case, expectation: Expectation, execution: Execution, result: Result
    ) -> Result:
        """Judge node by node and step by step, locate the first wrong node; note errors."""
        if isinstance(expectation, recorded.Recording) or recorded.has_nodes(case):
            if execution.opaque:
                result = result.noted("node by node: not judged: its caches cannot be read or set")
            else:
                result = recorded.judge_nodes(result, spec, backend, self.oracle, case)
        if result.verdict is Verdict.PASS and judgement.steps_apply(case) and not execution.opaque:
            try:
                other = self._referee(spec, backend, case)
                result = judgement.judge_each_step(result, other, case, execution, expectation.arithmetic)
            except Exception as e:  # noqa: BLE001  # an adapter may raise anything; the free run keeps its verdict
                result = result.noted(f"step by step: not judged: {recorded.reason(e)}")
        if self.locates and result.verdict is Verdict.FAIL and result.unlocated:
            try:
                reference = self.oracle.reference_in(backend.arithmetic_in(case))
                result = locate.locate(result, backend, reference, case, expectation, execution)
            except Exception as e:  # noqa: BLE001  # as above
                known, why = (e.result, e.__cause__ or e) if isinstance(e, locate.LocatingError) else (result, e)
                result = known.noted(f"the first wrong node was not found: {recorded.reason(why)}")
        if self.locates and self.checks_stale_state and result.verdict is Verdict.FAIL:
            try:
                result = self._find_stale(spec, backend, case, execution, result)
            except Exception as e:  # noqa: BLE001  # as above
                result = result.noted(f"{_UNCHECKED}: {recorded.reason(e)}")
        return result

    def _find_stale(self, spec: Spec, backend: Backend, case: Case, execution: Execution, result: Result) -> Result:
        """Return `result` with stale state, or a wrong copy between devices, if that is the cause.

        Otherwise note if all nodes are right one by one.
        """
        if (found := _handover(backend, case)) is not None:
            return _with_handover(result, found)
        other, arithmetic = self._referee(spec, backend, case), backend.arithmetic_in(case)
        fresh_backend = partial(self._fresh_backend, spec, arithmetic)
        if execution.opaque:
            stale = locate.stale(fresh_backend, other, case, execution.steps, locate.replay(other, case), arithmetic)
        else:
            stale = locate.stale_state(fresh_backend, other, case, arithmetic)
        if stale is not None and stale.fault is Fault.EARLIER and self._wrong_alone(spec, case, arithmetic):
            stale = None
        if stale is not None:
            return _with_stale(result, stale, case)
        together = result.where is not None and result.where.fault is Fault.GRAPH and not execution.opaque
        return result.noted(locate.TOGETHER if together else "")

    def _find_stale_in_sides(self, result: Result, sides: Sequence[relate.Side]) -> Result:
        """Return `result` with stale state if it explains one of two runs of a relation that differ."""
        for side in sides:
            try:
                located = self._find_stale_in_side(result, side)
            except Exception as e:  # noqa: BLE001  # as in `_look_closer`
                result = result.noted(f"{_UNCHECKED} in the run {side.what!r}: {recorded.reason(e)}")
            else:
                if located is not None:
                    return located
        return result

    def _locate_side(self, error: BackendError, side: relate.Side) -> Result:
        """Return the result of a relation's failed run, located if a fresh backend can run its step."""
        result = result_of_error(error)
        if error.step is None or isinstance(error, (BackendTimeoutError, NotIndependentError)):
            return result
        try:
            backend, case = self._opened(side.spec), side.case
            arithmetic, other = backend.arithmetic_in(case), self._referee(side.spec, backend, case)
            right = locate.replay(other, case, side.before(other))
            found = locate.stale_step(partial(self._fresh_backend, side.spec, arithmetic), case, error.step, right)
        except Exception as e:  # noqa: BLE001  # as in `_look_closer`
            return result.noted(f"{_UNCHECKED}: {recorded.reason(e)}")
        return result if found is None else replace(result, where=found)

    def _find_stale_in_side(self, result: Result, side: relate.Side) -> Result | None:
        backend, case = self._opened(side.spec), side.case
        if (found := _handover(backend, case, side.first)) is not None:
            return _with_handover(result, found)
        arithmetic, other = backend.arithmetic_in(case), self._referee(side.spec, backend, case)
        right = locate.replay(other, case, side.before(other))
        stale = locate.stale(
            partial(self._fresh_backend, side.spec, arithmetic), other, case, side.ran, right, arithmetic
        )
        if stale is None:
            return None
        return _with_stale(result, stale, case, side.first).noted(f"wrong in the run {side.what!r}")

    def _wrong_alone(self, spec: Spec, case: Case, arithmetic: Arithmetic) -> bool:
        """Return True if a fresh backend computes a node wrongly from right values."""
        if not recorded.is_free_running(case):
            return False
        right = Result(case.id, str(spec), Verdict.PASS)
        with self._fresh_backend(spec, arithmetic) as fresh:
            return recorded.judge_nodes(right, spec, fresh, self.oracle, case).verdict is Verdict.FAIL

    def _locate_error(self, spec: Spec, backend: Backend, case: Case, error: BackendError) -> Result:
        """Return the result of a case that `backend` could not run, with the failing node."""
        result = result_of_error(error)
        if self.locates and result.verdict is not Verdict.VACUOUS and not self._is_known(spec, case, result.verdict):
            try:
                fresh_backend = partial(self._fresh_backend, spec, backend.arithmetic_in(case))
                found = locate.place(backend, fresh_backend, self._referee(spec, backend, case), case, error)
            except Exception as e:  # noqa: BLE001  # as in `_look_closer`
                return result.noted(f"the node was not found: {recorded.reason(e)}")
            return result if found is None else replace(result, where=found)
        return result

    @contextmanager
    def _fresh_backend(self, spec: Spec, arithmetic: Arithmetic) -> Iterator[Backend]:
        """Open another backend of `spec` (the reference: in `arithmetic`); close it at the end."""
        backend = self._open(spec, own=False)
        try:
            yield backend.computing_in(arithmetic) if resolve(spec).name == REFERENCE else backend
        finally:
            self._end(str(spec), backend)

    def _expect(self, spec: Spec, backend: Backend, cases: Sequence[Case]) -> tuple[list[Expectation], Backend]:
        """Return expected values and the backend to test, which for the reference imitates another."""
        if undeclared(backend.arithmetic_in(cases[0])):
            self.undeclared[spec] = None
        if all(recorded.judges(c, backend.arithmetic_in(c)) for c in cases):
            tested = recorded.tested(self.oracle, spec, backend, cases[0])
            return [recorded.expectation(self.oracle, spec, tested, c) for c in cases], tested
        if resolve(spec).name != REFERENCE:
            return self.oracle.expect(cases, backend.arithmetic_in(cases[0])), backend
        return self.oracle.expect_second(cases)

    def _declared(self, spec: Spec, backend: Backend) -> Arithmetic:
        """Return the arithmetic in which a backend is tested, apart from changes by a case."""
        return (self.oracle.second_opinion() if resolve(spec).name == REFERENCE else backend).arithmetic()

    def _referee(self, spec: Spec, backend: Backend, case: Case) -> Backend:
        """Return the other side of the comparison: the reference, or for it the real ggml."""
        if resolve(spec).name == REFERENCE:
            return self.oracle.second_opinion()
        return self.oracle.reference_in(backend.arithmetic_in(case))


_UNCHECKED = "stale state was not checked"


def _with_stale(result: Result, stale: locate.Stale, case: Case, first: int = 0) -> Result:
    """Return `result` caused by stale state; `case` begins at step `first` of the result."""
    if stale.wrong is None:
        return replace(result, where=replace(result.where or Place(stale.fault), fault=stale.fault))
    where = locate.describe(stale.wrong, case, stale.fault)
    return replace(result, where=replace(where, step=first + stale.wrong.step))


def _with_handover(result: Result, found: Place) -> Result:
    """Return `result` located at a wrong copy; the wrong tensor becomes a note."""
    wrong = result.where
    note = "" if wrong is None or wrong.numbers is None else diverges(wrong, wrong.numbers)
    return replace(result, where=found).noted(note)


def _handover(backend: Backend, case: Case, first: int = 0) -> Place | None:
    """Return where a scheduler copies a value wrongly, if it does; `first` as above."""
    found = backend.handover(case) if isinstance(backend, Scheduler) else None
    return None if found is None else found.place(first)


_HARMLESS = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.XFAIL, Verdict.XPASS})
"""Verdicts whose cases are not saved."""


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


def _unsupported(case: Case, answers: Sequence[Sequence[Support]]) -> Error | None:
    for k, (step, given) in enumerate(zip(case.steps, answers, strict=True)):
        for node, support in zip(step.graph, given, strict=True):
            if not support:
                where = f"step {k}: " if len(case.steps) > 1 else ""
                return Error(f"{where}{node.op} {node.name}: {support.reason}", support.reason)
    return None


_VERDICT_OF: tuple[tuple[type[ConformanceError], Verdict], ...] = (
    (NotIndependentError, Verdict.VACUOUS),
    (BackendTimeoutError, Verdict.TIMEOUT),
    (BackendCrashError, Verdict.CRASH),
)
"""Other errors are an OVERCLAIM."""


def result_of_error(error: ConformanceError) -> Result:
    """Return the result of a case whose backend failed, without case and backend."""
    verdict = next((v for kind, v in _VERDICT_OF if isinstance(error, kind)), Verdict.OVERCLAIM)
    where = None
    if isinstance(error, BackendError) and error.step is not None:
        where = Place(Fault.UNLOCATED, error.step)
    return Result("", "", verdict, where=where, error=error_of(error))


def _uncheckable(why: str) -> Result:
    return Result("", "", Verdict.VACUOUS, error=Error(f"no reference: {why}"))


def _unjudged(error: Exception) -> Result:
    """Return VACUOUS for a bug of the suite; errors of adapters are a `ConformanceError`."""
    return Result("", "", Verdict.VACUOUS, error=Error(f"the suite itself could not judge it: {error_text(error)}"))
