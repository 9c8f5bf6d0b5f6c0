"""Runs cases on backends and judges them; a failing case gets its first wrong node and is saved as a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from conformance.backend.interface import Backend, Support
from conformance.backend.registry import REFERENCE, Spec, resolve
from conformance.backend.strict import error_text
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
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.text import diverges
from conformance.judge.verdict import FAILURES, Golden, Result, Verdict
from conformance.suite.batch import merge
from conformance.suite.relations import claim

from . import cost, judgement, live, locate, recorded, relate, stored
from .execute import Execution, StepValues, execute
from .isolation.isolate import Isolation, Workers, open_backend
from .oracle import Expectation, NoSecondOpinionError, Oracle, part
from .scheduler.handover import Scheduler
from .session import failures, select
from .session.kept import Kept
from .session.precision import undeclared
from .session.settings import Waiving
from .session.writeahead import Ahead
from .signature import error_of


class Runner:
    """Holds the backends of a run and the oracle they share."""

    locates = True
    """Whether a failing case runs again to find its first wrong node and its stage."""
    checks_stale_state = True
    """Whether it also runs on the backend opened anew, to tell a kernel's fault from what the backend kept."""

    def __init__(
        self,
        *,
        save_failures: Path | None = None,
        isolation: Isolation | None = None,
        write_ahead: Path | None = None,
        waiving: Waiving | None = None,
        oracle: Oracle | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Open no backend yet.

        `save_failures` is a folder for the case files of failures, `write_ahead` one for the running cases, and for
        failing ones that no id makes again. `oracle` computes expected values, and is closed with the runner. `workers`
        has the processes of its backends, and is closed with it; None: new ones, within the limits of `isolation`.
        """
        self._workers = workers or Workers(isolation)
        self.problems: list[str] = []
        """Errors beside the cases: backends that could not be closed."""
        self._ahead = Ahead(write_ahead, self._makes) if write_ahead else None
        self.undeclared: dict[Spec, None] = {}
        """Backends of which a case was judged by upstream's limits, in order."""
        self.oracle = Oracle() if oracle is None else oracle
        self._backends: dict[Spec, Backend] = {}
        self._broken: dict[Spec, ConformanceError] = {}
        """Backends that could not be opened."""
        self._cases: Kept[str, Case] = Kept()
        self._players: dict[tuple[Spec, str], live.Player | ConformanceError] = {}
        """Players of live families, or why there is none."""
        self._stored: dict[Case, stored.Stored | None] = {}
        """What is stored of the cases at work."""
        self._save = save_failures
        self._waiving = waiving

    def backend(self, spec: Spec) -> Backend:
        """The backend behind `spec`, opened once; UsageError if its name or an option is unknown, UnavailableError if
        this machine lacks it.
        """
        if spec not in self._backends:
            self._backends[spec] = self._open(spec, own=False)
        return self._backends[spec]

    def _open(self, spec: Spec, *, own: bool) -> Backend:
        """Open a backend once more, if `own` in a process of its own whatever it is; errors as `open_backend`."""
        return open_backend(spec, self._workers, own=own)

    def _opened(self, spec: Spec) -> Backend:
        """The backend behind `spec`; ConformanceError if it cannot be opened, then always the same."""
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
        """The case behind an id, cached for the next backend; UsageError if no family knows the id."""
        if case_id not in self._cases:
            case = select.build(case_id)
            self._cases.add(case_id, case, case.nbytes)
            self._cases.trim()
        return self._cases[case_id]

    def _makes(self, case: Case) -> bool:
        """Whether the id of `case` makes it again."""
        return self._cases.get(case.id) is case

    def close(self) -> None:
        """Close every backend; one that fails to close is reported in `problems`, and the others are closed."""
        if self._ahead is not None:
            self._ahead.close()
        for spec, backend in self._backends.items():
            self._end(str(spec), backend)
        self._end_players()
        self._workers.close()
        self._end("the oracle", self.oracle)

    def restart(self) -> None:
        """Close the backends; the next case opens them anew, where isolated in fresh processes."""
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
            sys.stderr.write(f"{self.problems[-1]}; nothing is lost by it\n")

    def batch_size(self, spec: Spec) -> int:
        """How many cases to hand to `run` at a time."""
        try:
            return max(self._opened(spec).batch, 32)
        except UsageError:
            raise
        except ConformanceError:
            return 32

    def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        """One result per case, in order, whatever a backend or a case does. UsageError if nothing is installed by that
        name, it does not take an option, or golden outputs are missing; CaseFileError if they are damaged, or a case
        cannot be written.
        """
        if any(live.is_live(c.id) and not c.file for c in cases):  # an id in a file may be a stranger's
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
        """The result of a case of a live family."""
        try:
            return self._player(spec, case_id.partition("/")[0]).play(case_id)
        except UsageError:
            raise
        except UnavailableError as e:
            return Result("", "", Verdict.UNSUPPORTED, error=Error(str(e), str(e)))
        except ConformanceError as e:
            return result_of_error(e)
        except Exception as e:  # noqa: BLE001  # a fault of a player must cost one case, not the run
            return _unjudged(e)

    def _player(self, spec: Spec, family: str) -> live.Player:
        """The player of a live family on a backend; ConformanceError if it cannot be opened, then always the same."""
        if (spec, family) not in self._players:
            try:
                self._players[spec, family] = live.live_family(family).player(spec, self._workers.isolation, self._save)
            except UsageError:
                raise
            except ConformanceError as e:
                self._players[spec, family] = e
        found = self._players[spec, family]
        if isinstance(found, ConformanceError):
            raise found
        return found

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """While this lasts, no request to a backend may take longer; a shorter limit of its own holds."""
        self._workers.bound = seconds
        try:
            yield
        finally:
            self._workers.bound = inf

    @contextmanager
    def quick(self, *, locates: bool, checks_stale_state: bool) -> Iterator[None]:
        """While this lasts, look no closer at failures than this; opening a backend anew may take a second."""
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
        with suppress(ConformanceError):  # who cannot compute a case is found with that case
            stored.prepare(self.oracle, {c: self._stored[c] for c in able}, self._declared(spec, backend))
        for group in _groups(able, backend.batch, partial(self._by_itself, spec)):
            results.update(zip(group, self._run_batch(spec, backend, group), strict=True))
        return results

    def _finished(self, spec: Spec, case: Case, result: Result) -> Result:
        result = replace(result, case=case.id, backend=str(spec))
        if self._waiving is not None:
            result = self._waiving.apply(spec, result)
        if result.verdict in _HARMLESS or not case.steps:
            return result
        folder = self._save
        if folder is None and self._ahead is not None and not self._ahead.by_id(case):
            folder = self._ahead.folder
        if folder is None:
            return result
        values = self._stored.get(case) if result.golden is Golden.DIFFERS else None
        whole = case if values is None else stored.with_values(case, values)
        return replace(result, saved=failures.save(folder, whole, result))

    def _refusals(self, backend: Backend, cases: Sequence[Case]) -> list[Result | None]:
        """UNSUPPORTED, with the reason, for each case that has a node which `backend` does not take."""
        graphs = [s.graph for c in cases for s in c.steps]
        try:
            answers = iter(backend.supports(Graph([n for g in graphs for n in g])))
        except ConformanceError as e:
            alone = [self._refusal(backend, c, None) for c in cases]
            if isinstance(e, (BackendCrashError, BackendTimeoutError)) and not any(
                r is not None and r.verdict in FAILURES for r in alone
            ):
                alone[0] = result_of_error(e).noted(
                    "asked what it supports of these cases, and each by itself is answered"
                )
            return alone
        return [self._refusal(backend, c, [[next(answers) for _ in s.graph] for s in c.steps]) for c in cases]

    def _refusal(self, backend: Backend, case: Case, answers: Sequence[Sequence[Support]] | None) -> Result | None:
        """By the `answers` for the nodes of each step, which are asked for where they are None, then by the case."""
        try:
            refused = _unsupported(case, answers or [backend.supports(s.graph) for s in case.steps])
            if refused is None:
                said = [backend.supports_case(c) for c in claim.cases_of(case)]
                refused = next((Error(a.reason, a.reason) for a in said if not a), None)
        except ConformanceError as e:
            return result_of_error(e)
        return None if refused is None else Result("", "", Verdict.UNSUPPORTED, error=refused)

    def expectation(self, spec: Spec, case: Case) -> Expectation:
        """What `case` should give on the backend behind `spec`; ConformanceError if nothing can compute it."""
        backend = self._opened(spec)
        backend.arithmetic_in(case)
        return self._expect(spec, backend, [case])[0][0]

    def divergent(self, spec: Spec, case: Case) -> tuple[list[tuple[int, Tensor]], list[StepValues]]:
        """Step and node of all that the backend behind `spec` computes wrongly from its own sources, and what it gave
        for each node of `case`; ConformanceError if it cannot run that.
        """
        backend = self._opened(spec)
        reference = self._referee(spec, backend, case)
        every = range(len(case.steps))
        ran = execute(backend, case, every_node=every).steps
        return [(j.step, j.tensor) for j in locate.divergent(ran, reference, case, every[-1])], ran

    def too_costly(self, cases: Sequence[Case]) -> str:
        """Why `cases` are not computed together within the limits of a process, in words; empty where they are."""
        limits = self._workers.isolation
        return cost.refusal(cases, memory_limit=limits.memory_limit, time_limit=limits.time_limit)

    def _by_itself(self, spec: Spec, case: Case) -> bool:
        """True if a case is known to fail: it would spoil the results of those that share its graph."""
        doubted = resolve(spec).name == REFERENCE and self.oracle.doubt(case.id)
        return bool(doubted) or (self._waiving is not None and bool(self._waiving.verdicts(spec, case.id)))

    def _run_batch(self, spec: Spec, backend: Backend, group: Sequence[Case]) -> list[Result]:
        if len(group) == 1 or self.too_costly(group):
            return [self._run_alone(spec, backend, c) for c in group]
        try:
            expectations, tested = self._expect(spec, backend, group)
            merged = execute(tested, merge(group))
        except Exception:  # noqa: BLE001  # whatever it is, it is found with the case that it is of
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
            result = self._execute_and_judge(spec, backend, case)
            self._replace_damaged(spec, case, result)
            if result.golden is Golden.DIFFERS and result.unlocated:
                return result  # by the reference, the backend is right
            stale = locate.is_stale(result)  # then the translation has it too
            translation = None if stale or not self.locates else select.translation_of(spec, backend, result.verdict)
            if translation is None:
                return result
            return result.noted(select.stage_hint(result.verdict, self._run_at_stage(translation, case)))

    def _is_known(self, spec: Spec, case: Case, verdict: Verdict) -> bool:
        """True if a waiver expects this verdict of the case."""
        return self._waiving is not None and verdict in self._waiving.verdicts(spec, case.id)

    def _replace_damaged(self, spec: Spec, case: Case, result: Result) -> None:
        """End the process of a backend that survived a case that it is known to die of: its heap may be damaged."""
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
            if claim.applies(case):
                tells = (self._tell_sides, self._side_failed) if self.locates and self.checks_stale_state else ()
                return relate.judge(spec, backend, case, self._open, *tells)
            return self._judge(spec, backend, case)
        except ConformanceError as e:
            return result_of_error(e)
        except Exception as e:  # noqa: BLE001  # a fault, whosever it is, must cost one case, not the run
            return _unjudged(e)

    def _judge(self, spec: Spec, backend: Backend, case: Case) -> Result:
        backend.arithmetic_in(case)
        try:
            (expectation,), tested = self._expect(spec, backend, [case])
        except NoSecondOpinionError as e:
            return Result("", "", Verdict.UNSUPPORTED, error=Error(str(e)))
        except Exception as e:  # noqa: BLE001  # an arithmetic that nobody can compute in
            why = str(e) if isinstance(e, ConformanceError) else error_text(e)
            return _uncheckable(why)
        try:
            execution = execute(tested, case)
        except BackendError as e:
            return self._placed(spec, tested, case, e)
        result = judgement.judge(spec, case, expectation, execution)
        result = self._look_closer(spec, tested, case, expectation, execution, result.noted(expectation.note))
        if not isinstance(expectation, recorded.Recording):
            return self._compare_stored(spec, case, expectation, execution, result)
        compared = result.verdict in {Verdict.PASS, Verdict.FAIL}
        return replace(result, golden=Golden.COMPARED) if compared else result

    def _compare_stored(
        self, spec: Spec, case: Case, expectation: Expectation, execution: Execution, result: Result
    ) -> Result:
        """`result` with the comparison of what was given and what is stored of the case."""
        if (values := self._stored.get(case)) is not None:
            return stored.judge(result, spec, self.oracle, case, values, expectation, execution)
        return replace(result, golden=Golden.NOT_COMPARABLE) if recorded.is_free_running(case) else result

    def _stored_of(self, case: Case) -> stored.Stored | None:
        return stored.stored_of(case, generated=self._makes(case))

    def _look_closer(
        self, spec: Spec, backend: Backend, case: Case, expectation: Expectation, execution: Execution, result: Result
    ) -> Result:
        """Judge node by node and step by step, and name the first wrong node: nothing here may cost the verdict."""
        if isinstance(expectation, recorded.Recording) or recorded.has_nodes(case):
            if execution.opaque:
                result = result.noted("node by node: not judged: its caches cannot be read or set")
            else:
                result = recorded.judge_nodes(result, spec, backend, self.oracle, case)
        if result.verdict is Verdict.PASS and judgement.steps_apply(case) and not execution.opaque:
            try:
                other = self._referee(spec, backend, case)
                result = judgement.judge_each_step(result, other, case, execution, expectation.arithmetic)
            except Exception as e:  # noqa: BLE001  # whatever an adapter raises: the free run has its verdict
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
                result = self._tell_kept(spec, backend, case, execution, result)
            except Exception as e:  # noqa: BLE001  # as above
                result = result.noted(f"{_UNTOLD}: {recorded.reason(e)}")
        return result

    def _tell_kept(self, spec: Spec, backend: Backend, case: Case, execution: Execution, result: Result) -> Result:
        """`result`, if something that the backend kept, or a scheduler's copy between devices, is at fault, with that;
        or that nodes are right one by one.
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

    def _tell_sides(self, result: Result, sides: Sequence[relate.Side]) -> Result:
        """The same of the two runs of a relation that differ: the first that is wrong by what was kept says so."""
        for side in sides:
            try:
                told = self._tell_side(result, side)
            except Exception as e:  # noqa: BLE001  # as in `_look_closer`
                result = result.noted(f"{_UNTOLD} in the run {side.what!r}: {recorded.reason(e)}")
            else:
                if told is not None:
                    return told
        return result

    def _side_failed(self, error: BackendError, side: relate.Side) -> Result:
        """The result of a relation of which a run failed: its step may run on a backend opened anew."""
        result = result_of_error(error)
        if error.step is None or isinstance(error, (BackendTimeoutError, NotIndependentError)):
            return result
        try:
            backend, case = self._opened(side.spec), side.case
            arithmetic, other = backend.arithmetic_in(case), self._referee(side.spec, backend, case)
            right = locate.replay(other, case, side.before(other))
            found = locate.stale_step(partial(self._fresh_backend, side.spec, arithmetic), case, error.step, right)
        except Exception as e:  # noqa: BLE001  # as in `_look_closer`
            return result.noted(f"{_UNTOLD}: {recorded.reason(e)}")
        return result if found is None else replace(result, where=found)

    def _tell_side(self, result: Result, side: relate.Side) -> Result | None:
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
        """Whether a node by itself, fed with right values, is wrong on the backend opened anew, too."""
        if not recorded.is_free_running(case):
            return False
        right = Result(case.id, str(spec), Verdict.PASS)
        with self._fresh_backend(spec, arithmetic) as fresh:
            return recorded.judge_nodes(right, spec, fresh, self.oracle, case).verdict is Verdict.FAIL

    def _placed(self, spec: Spec, backend: Backend, case: Case, error: BackendError) -> Result:
        """The result of a case that `backend` could not run, with the node that it failed at."""
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
        """The backend behind `spec`, opened once more; the reference in `arithmetic`."""
        backend = self._open(spec, own=False)
        try:
            yield backend.computing_in(arithmetic) if resolve(spec).name == REFERENCE else backend
        finally:
            self._end(str(spec), backend)

    def _expect(self, spec: Spec, backend: Backend, cases: Sequence[Case]) -> tuple[list[Expectation], Backend]:
        """Expected values, and the backend to judge by them: the reference is tested in another's arithmetic."""
        if undeclared(backend.arithmetic_in(cases[0])):
            self.undeclared[spec] = None
        if all(recorded.judges(c, backend.arithmetic_in(c)) for c in cases):
            tested = recorded.tested(self.oracle, spec, backend, cases[0])
            return [recorded.expectation(self.oracle, spec, tested, c) for c in cases], tested
        if resolve(spec).name != REFERENCE:
            return self.oracle.expect(cases, backend.arithmetic_in(cases[0])), backend
        return self.oracle.expect_second(cases)

    def _declared(self, spec: Spec, backend: Backend) -> Arithmetic:
        """The arithmetic that a backend is tested in, whatever the case."""
        return (self.oracle.second_opinion() if resolve(spec).name == REFERENCE else backend).arithmetic()

    def _referee(self, spec: Spec, backend: Backend, case: Case) -> Backend:
        """Who the backend is held against: the reference in its arithmetic, or for the reference the real ggml."""
        if resolve(spec).name == REFERENCE:
            return self.oracle.second_opinion()
        return self.oracle.reference_in(backend.arithmetic_in(case))


_UNTOLD = "whether something kept is at fault was not found"


def _with_stale(result: Result, stale: locate.Stale, case: Case, first: int = 0) -> Result:
    """`result` with what is at fault; `first`: where the steps of `case` begin in those of the result."""
    if stale.wrong is None:
        return replace(result, where=replace(result.where or Place(stale.fault), fault=stale.fault))
    where = locate.describe(stale.wrong, case, stale.fault)
    return replace(result, where=replace(where, step=first + stale.wrong.step))


def _with_handover(result: Result, found: Place) -> Result:
    """`result` with where a value is lost; which tensor is wrong by it stays a note."""
    wrong = result.where
    note = "" if wrong is None or wrong.numbers is None else diverges(wrong, wrong.numbers)
    return replace(result, where=found).noted(note)


def _handover(backend: Backend, case: Case, first: int = 0) -> Place | None:
    """Where a value goes wrong between two devices of a scheduler, if one does. `first` as above."""
    found = backend.handover(case) if isinstance(backend, Scheduler) else None
    return None if found is None else found.place(first)


_HARMLESS = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.XFAIL, Verdict.XPASS})
"""Verdicts of which no case is saved."""


def _groups(cases: Sequence[Case], size: int, by_itself: Callable[[Case], bool]) -> Iterable[list[Case]]:
    """Cases that may share a graph, `size` at a time; every other one by itself."""
    group: list[Case] = []
    for case in cases:
        single = len(case.steps) == 1 and not recorded.is_free_running(case)
        if not single or case.demands or claim.applies(case) or size == 1 or by_itself(case):
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
"""Any other error is an OVERCLAIM."""


def result_of_error(error: ConformanceError) -> Result:
    """Return the result of a case whose backend failed; its case and backend are empty."""
    verdict = next((v for kind, v in _VERDICT_OF if isinstance(error, kind)), Verdict.OVERCLAIM)
    where = None
    if isinstance(error, BackendError) and error.step is not None:
        where = Place(Fault.UNLOCATED, error.step)
    return Result("", "", verdict, where=where, error=error_of(error))


def _uncheckable(why: str) -> Result:
    return Result("", "", Verdict.VACUOUS, error=Error(f"nothing to check it against: {why}"))


def _unjudged(error: Exception) -> Result:
    """What an adapter raises comes as a `ConformanceError`, so this is the suite's own."""
    return Result("", "", Verdict.VACUOUS, error=Error(f"the suite itself could not judge it: {error_text(error)}"))
