"""Try cases on a backend: ask what it supports, expect, execute, judge, look closer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from conformance.backend.interface import Support
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, ConformanceError
from conformance.ggml.graph import Graph
from conformance.ggml.text import error_text
from conformance.judge.evidence import Error
from conformance.judge.verdict import FAILURES, Golden, Result, Verdict
from conformance.suite.batch import merge
from conformance.suite.relations import relation

from . import examine, judgement, locate, recorded, relate, stored
from .attempt import Attempt, UnderTest
from .execute import ClosingError, Execution, execute
from .failed import result_of_error, uncheckable, unjudged, unsupported
from .oracle import Expectation, NoSecondOpinionError, part
from .session import select
from .session.precision import undeclared
from .signature import error_of


def refusals(tested: UnderTest, cases: Sequence[Case]) -> list[Result | None]:
    """Return UNSUPPORTED, with the reason, for each case with a node that the backend refuses."""
    graphs = [s.graph for c in cases for s in c.steps]
    try:
        answers = iter(tested.backend.supports(Graph([n for g in graphs for n in g])))
    except ConformanceError as e:
        alone = [_refusal(tested, c, None) for c in cases]
        if isinstance(e, (BackendCrashError, BackendTimeoutError)) and not any(
            r is not None and r.verdict in FAILURES for r in alone
        ):
            failed = result_of_error(tested.pair(cases[0]), e)
            alone[0] = failed.noted("`supports` failed for these cases together; each is asked alone")
        return alone
    return [_refusal(tested, c, [[next(answers) for _ in s.graph] for s in c.steps]) for c in cases]


def _refusal(tested: UnderTest, case: Case, answers: Sequence[Sequence[Support]] | None) -> Result | None:
    """Return the refusal of a case from `answers` for each step's nodes; None asks the backend."""
    backend = tested.backend
    try:
        refused = _refused_node(case, answers or [backend.supports(s.graph) for s in case.steps])
        if refused is None:
            said = [backend.supports_case(c) for c in relation.cases_of(case)]
            refused = next((Error(a.reason, a.reason) for a in said if not a), None)
    except ConformanceError as e:
        return result_of_error(tested.pair(case), e)
    return None if refused is None else unsupported(tested.pair(case), refused)


def _refused_node(case: Case, answers: Sequence[Sequence[Support]]) -> Error | None:
    for k, (step, given) in enumerate(zip(case.steps, answers, strict=True)):
        for node, support in zip(step.graph, given, strict=True):
            if not support:
                where = f"step {k}: " if len(case.steps) > 1 else ""
                return Error(f"{where}{node.op} {node.name}: {support.reason}", support.reason)
    return None


def expect(tested: UnderTest, cases: Sequence[Case]) -> tuple[list[Expectation], UnderTest]:
    """Return expected values and what to run, which for the reference imitates another."""
    arithmetic = tested.backend.arithmetic_in(cases[0])
    if undeclared(arithmetic):
        tested.keeper.undeclared[tested.spec] = None
    if all(recorded.judges(c, tested.backend.arithmetic_in(c)) for c in cases):
        tested = recorded.imitating(tested, cases[0])
        return [recorded.expectation(tested, c) for c in cases], tested
    if not tested.is_reference:
        return tested.oracle.expect(cases, arithmetic), tested
    expectations, imitating = tested.oracle.expect_second(cases)
    return expectations, replace(tested, backend=imitating)


def together(tested: UnderTest, cases: Sequence[Case]) -> list[Attempt]:
    """Run one-step cases in one graph and return an attempt for each.

    ConformanceError, or any error of an adapter, if that fails.
    """
    expectations, tested = expect(tested, cases)
    ran = execute(tested.backend, merge(cases))
    return [
        Attempt(tested, c, e, Execution([part(ran.steps[0], c)], ran.witness, ran.seconds / len(cases)))
        for c, e in zip(cases, expectations, strict=True)
    ]


def alone(tested: UnderTest, case: Case, values: stored.Stored | None) -> Result:
    """Run a case and return its result, whatever fails; `values` are its stored values."""
    try:
        return _related(tested, case) if relation.applies(case) else _alone(tested, case, values)
    except ConformanceError as e:
        return result_of_error(tested.pair(case), e)
    except Exception as e:  # noqa: BLE001  # any bug must fail one case, not the run
        return unjudged(tested.pair(case), e)


def _related(tested: UnderTest, case: Case) -> Result:
    if not (tested.keeper.locates and tested.keeper.checks_stale_state):
        return relate.judge(tested, case)
    pair = tested.pair(case)
    return relate.judge(
        tested, case, partial(examine.stale_in_sides, tested), partial(examine.failed_side, tested, pair)
    )


def _alone(tested: UnderTest, case: Case, values: stored.Stored | None) -> Result:
    tested.backend.arithmetic_in(case)
    try:
        (expectation,), tested = expect(tested, [case])
    except NoSecondOpinionError as e:
        return unsupported(tested.pair(case), Error(str(e)))
    except Exception as e:  # noqa: BLE001  # an arithmetic that cannot be computed
        return uncheckable(tested.pair(case), str(e) if isinstance(e, ConformanceError) else error_text(e))
    try:
        attempt, result = _judged(tested, case, expectation)
    except BackendError as e:
        return examine.failure(tested, case, e)
    result = examine.examine(attempt, result)
    if not isinstance(expectation, recorded.Recording):
        return stored.judge(attempt, result, values)
    compared = result.verdict in {Verdict.PASS, Verdict.FAIL}
    return replace(result, golden=Golden.COMPARED) if compared else result


def _judged(tested: UnderTest, case: Case, expectation: Expectation) -> tuple[Attempt, Result]:
    """Run a case and judge its values, a second time if the process of a fragile backend dies.

    Wrong values are a FAIL even if a process died, before or after they were read: what a kernel writes outside its
    result may or may not end the process. BackendError if there are no values, or if right ones follow a death.
    """
    try:
        return _once(tested, case, expectation)
    except BackendCrashError as e:
        if not tested.backend.fragile:
            raise
        died = e
    with suppress(BackendError):
        attempt, result = _once(tested, case, expectation)
        if result.verdict is Verdict.FAIL:
            return attempt, result.noted(str(died))
    raise died


def _once(tested: UnderTest, case: Case, expectation: Expectation) -> tuple[Attempt, Result]:
    died: ClosingError | None = None
    try:
        execution = execute(tested.backend, case)
    except ClosingError as e:
        execution, died = e.execution, e
    attempt = Attempt(tested, case, expectation, execution)
    result = judgement.judge(attempt).noted(expectation.note)
    if died is None:
        return attempt, result
    if result.verdict is not Verdict.FAIL:
        raise died
    return attempt, result.noted(str(died))


def by_stages(tested: UnderTest, case: Case, values: stored.Stored | None, result: Result) -> Result:
    """Return `result`; a failure on a backend with several stages gets a note on which is wrong."""
    if result.golden is Golden.DIFFERS and result.unlocated:
        return result  # the backend agrees with the reference
    if locate.is_stale(result) or not tested.keeper.locates:  # stale state affects the translation too
        return result
    translation = select.translation_of(tested.spec, tested.backend, result.verdict)
    if translation is None:
        return result
    return result.noted(select.stage_hint(result.verdict, _at_stage(tested, translation, case, values)))


def _at_stage(tested: UnderTest, stage: Spec, case: Case, values: stored.Stored | None) -> Result:
    try:
        tested = tested.at(stage)
    except ConformanceError as e:
        return unsupported(tested.pair(case), error_of(e))
    (refusal,) = refusals(tested, [case])
    return refusal or alone(tested, case, values)
