"""Look closer at an attempt: each node, each step, the first wrong node, stale state.

This runs more on the backend, which may fail in any way. The result then keeps its verdict and gets a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import BackendError, BackendTimeoutError, NotIndependentError
from conformance.ggml.tensor import Tensor
from conformance.judge.evidence import Fault, Place
from conformance.judge.text import diverges
from conformance.judge.verdict import Pair, Result, Verdict

from . import judgement, locate, recorded
from .attempt import Attempt, UnderTest
from .execute import StepValues, execute
from .failed import result_of_error
from .recorded import reason
from .relate import Side
from .scheduler.handover import Scheduler

_UNCHECKED = "stale state was not checked"


def examine(attempt: Attempt, result: Result) -> Result:
    """Judge node by node and step by step, locate the first wrong node; note errors."""
    tested, case, execution = attempt.tested, attempt.case, attempt.execution
    if isinstance(attempt.expectation, recorded.Recording) or recorded.has_nodes(case):
        if execution.opaque:
            result = result.noted("node by node: not judged: its caches cannot be read or set")
        else:
            result = recorded.judge_nodes(result, tested, case)
    if result.verdict is Verdict.PASS and judgement.steps_apply(case) and not execution.opaque:
        try:
            other, arithmetic = tested.referee(case), attempt.expectation.arithmetic
            result = judgement.judge_each_step(result, other, case, execution, arithmetic)
        except Exception as e:  # noqa: BLE001  # an adapter may raise anything; the free run keeps its verdict
            result = result.noted(f"step by step: not judged: {reason(e)}")
    if tested.keeper.locates and result.verdict is Verdict.FAIL and result.unlocated:
        try:
            result = locate.locate(attempt, result)
        except Exception as e:  # noqa: BLE001  # as above
            known, why = (e.result, e.__cause__ or e) if isinstance(e, locate.LocatingError) else (result, e)
            result = known.noted(f"the first wrong node was not found: {reason(why)}")
    if tested.keeper.locates and tested.keeper.checks_stale_state and result.verdict is Verdict.FAIL:
        try:
            result = _find_stale(attempt, result)
        except Exception as e:  # noqa: BLE001  # as above
            result = result.noted(f"{_UNCHECKED}: {reason(e)}")
    return result


def failure(tested: UnderTest, case: Case, error: BackendError) -> Result:
    """Return the result of a case that the backend could not run, with the failing node."""
    result, keeper = result_of_error(tested.pair(case), error), tested.keeper
    if not keeper.locates or result.verdict is Verdict.VACUOUS:
        return result
    if keeper.waivers.expects(tested.spec, case.id, result.verdict):
        return result
    try:
        fresh = partial(tested.fresh, tested.backend.arithmetic_in(case))
        found = locate.place(tested.backend, fresh, tested.referee(case), case, error)
    except Exception as e:  # noqa: BLE001  # as in `examine`
        return result.noted(f"the node was not found: {reason(e)}")
    return result if found is None else replace(result, where=found)


def divergent(tested: UnderTest, case: Case) -> tuple[list[tuple[int, Tensor]], list[StepValues]]:
    """Return step and node of each value that is wrong given its sources, and all values.

    ConformanceError if the backend cannot run `case` in this way.
    """
    reference, every = tested.referee(case), range(len(case.steps))
    ran = execute(tested.backend, case, every_node=every).steps
    return [(j.step, j.tensor) for j in locate.divergent(ran, reference, case, every[-1])], ran


# -- stale state ------------------------------------------------------------------------------------------------------


def _find_stale(attempt: Attempt, result: Result) -> Result:
    """Return `result` with stale state, or a wrong copy between devices, if that is the cause.

    Otherwise note if all nodes are right one by one.
    """
    tested, case, execution = attempt.tested, attempt.case, attempt.execution
    if (found := _handover(tested.backend, case)) is not None:
        return _with_handover(result, found)
    other, arithmetic = tested.referee(case), tested.backend.arithmetic_in(case)
    fresh = partial(tested.fresh, arithmetic)
    if execution.opaque:
        stale = locate.stale(fresh, other, case, execution.steps, locate.replay(other, case), arithmetic)
    else:
        stale = locate.stale_state(fresh, other, case, arithmetic)
    if stale is not None and stale.fault is Fault.EARLIER and _wrong_alone(tested, case, arithmetic):
        stale = None
    if stale is not None:
        return _with_stale(result, stale, case)
    together = result.where is not None and result.where.fault is Fault.GRAPH and not execution.opaque
    return result.noted(locate.TOGETHER if together else "")


def _wrong_alone(tested: UnderTest, case: Case, arithmetic: Arithmetic) -> bool:
    """Return True if a fresh backend computes a node wrongly from right values."""
    if not recorded.is_free_running(case):
        return False
    right = Result(*tested.pair(case), Verdict.PASS)
    with tested.fresh(arithmetic) as fresh:
        return recorded.judge_nodes(right, replace(tested, backend=fresh), case).verdict is Verdict.FAIL


def stale_in_sides(tested: UnderTest, result: Result, sides: Sequence[Side]) -> Result:
    """Return `result` with stale state if it explains one of two runs of a relation that differ."""
    for side in sides:
        try:
            located = _stale_in_side(tested.at(side.spec), result, side)
        except Exception as e:  # noqa: BLE001  # as in `examine`
            result = result.noted(f"{_UNCHECKED} in the run {side.what!r}: {reason(e)}")
        else:
            if located is not None:
                return located
    return result


def _stale_in_side(tested: UnderTest, result: Result, side: Side) -> Result | None:
    case = side.case
    if (found := _handover(tested.backend, case, side.first)) is not None:
        return _with_handover(result, found)
    arithmetic, other = tested.backend.arithmetic_in(case), tested.referee(case)
    right = locate.replay(other, case, side.before(other))
    stale = locate.stale(partial(tested.fresh, arithmetic), other, case, side.ran, right, arithmetic)
    if stale is None:
        return None
    return _with_stale(result, stale, case, side.first).noted(f"wrong in the run {side.what!r}")


def failed_side(tested: UnderTest, pair: Pair, error: BackendError, side: Side) -> Result:
    """Return the result of a relation's failed run, located if a fresh backend can run its step."""
    result = result_of_error(pair, error)
    if error.step is None or isinstance(error, (BackendTimeoutError, NotIndependentError)):
        return result
    try:
        tested, case = tested.at(side.spec), side.case
        arithmetic, other = tested.backend.arithmetic_in(case), tested.referee(case)
        right = locate.replay(other, case, side.before(other))
        found = locate.stale_step(partial(tested.fresh, arithmetic), case, error.step, right)
    except Exception as e:  # noqa: BLE001  # as in `examine`
        return result.noted(f"{_UNCHECKED}: {reason(e)}")
    return result if found is None else replace(result, where=found)


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
