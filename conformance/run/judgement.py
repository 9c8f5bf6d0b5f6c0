"""Judge the run of a case: the free run, the demands on its witness, and each step alone.

In a free run errors feed back through the caches, and a value that was once rounded the other way stays there. In the
run step by step, the reference starts each step from the backend's own caches, so only the error of one step remains.
The grammar of demands is in `case.demands`; `witness` judges by it.
"""

from __future__ import annotations

from dataclasses import replace

from conformance.backend.interface import Backend, Witness, describe
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.judge.evidence import Error, Fault
from conformance.judge.judge import how_wrong, judge_step
from conformance.judge.verdict import Result, Verdict

from . import locate, recorded
from .attempt import Attempt
from .execute import Execution, computed_nodes
from .oracle import judge_steps
from .session import select
from .witness import contradiction
from .witness import unmet as unmet_of


def judge(attempt: Attempt) -> Result:
    """Return the result of a free run; VACUOUS if unchecked, or if a demand is not met."""
    spec, case, expectation, execution = attempt.tested.spec, attempt.case, attempt.expectation, attempt.execution
    judged, by_reference = expectation.judge(case, execution)
    unread = f"{len(execution.opaque)} caches cannot be read: only outputs are judged" if execution.opaque else ""
    ran = Result(
        *attempt.pair,
        Verdict.PASS,
        seconds=execution.seconds,
        steps=len(execution.steps),
        witness=describe(execution.witness),
    )
    if not judged:
        what = "no output to check" if execution.opaque else "no output and no cache to check"
        return replace(ran, verdict=Verdict.VACUOUS, error=Error(f"it has {what}"), notes=(unread,) if unread else ())
    exact = None
    if expectation.exact is not None and expectation.exact is not expectation.steps:
        exact = max(j.difference.nmse for j in judge_steps(case, expectation.exact, execution, EXACT))
    ran = replace(
        ran,
        budget_used=max(j.used for j in (*judged, *by_reference)),
        nmse=max(j.difference.nmse for j in judged),
        nmse_exact=exact,
    )
    wrong = next((j for j in (*by_reference, *judged) if j.used > 1), None)
    if wrong is not None:
        alone = sum(len(s.graph) for s in case.steps) == 1 or _is_all(wrong.tensor, case)
        where = locate.describe(wrong, case, Fault.NODE if alone else Fault.UNLOCATED)
        ran = replace(ran, verdict=Verdict.FAIL, wrong=how_wrong((*by_reference, *judged)), where=where)
    elif case.demands and select.stage_of(spec) != select.RUN:
        ran = ran.noted(f"its demands apply to a run, not to stage {select.stage_of(spec)}")
    elif missing := contradiction(execution.witness) or unmet(case, spec, execution.witness):
        ran = replace(ran, verdict=Verdict.VACUOUS, error=Error(missing))
    return ran.noted(unread)


def _is_all(node: Tensor, case: Case) -> bool:
    """Return True if `node` is the only computing node of a case."""
    return [n for s in case.steps for n in computed_nodes(s)] == [node]


# -- demands ----------------------------------------------------------------------------------------------------------


def unmet(case: Case, spec: Spec, witness: Witness) -> str:
    """Return the first unmet demand on `spec` in words, empty if none; GraphError if malformed."""
    names = [t for s in (spec, resolve(spec)) for t in (s.name, str(s))]
    return unmet_of(case.demands, names, witness)


# -- step by step -----------------------------------------------------------------------------------------------------


def steps_apply(case: Case) -> bool:
    """Return True if a step of `case` starts from earlier state, and no recording covers it."""
    return len(case.steps) > 1 and bool(case.caches()) and not recorded.is_free_running(case)


def judge_each_step(
    result: Result, reference: Backend, case: Case, execution: Execution, arithmetic: Arithmetic
) -> Result:
    """Return `result`, a PASS of the free run, with each step judged by its own nodes' budgets.

    The worst step counts. `reference` and the backend under test compute in `arithmetic`; BackendError if `reference`
    fails.
    """
    wanted = locate.expected_steps(reference, case, execution.steps)
    used = result.budget_used or 0.0
    for k, (want, got) in enumerate(zip(wanted, execution.steps, strict=True)):
        for judged in judge_step(case, k, want.all, got.all, arithmetic):
            used = max(used, judged.used)
            if judged.used > 1:
                where = locate.describe(judged, case, Fault.STATE)
                wrong = replace(result, verdict=Verdict.FAIL, wrong=how_wrong([judged]), where=where, budget_used=used)
                return wrong.noted("started from its own caches")
    return replace(result, budget_used=used)
