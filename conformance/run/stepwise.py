"""A trajectory judged step by step: each step from the caches that the tested backend itself had before it.

Run freely, errors feed back through the caches and a rounding that once went the other way stays there. Here the
reference starts each step from the backend's own state, so what is left is the error of one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import pack
from conformance.judge.judge import judge_step
from conformance.judge.verdict import Result, Verdict

from . import divergence
from .execute import Execution, StepValues


def applies(case: Case) -> bool:
    """Whether a step of `case` starts from state that an earlier one left, and no recording says more."""
    return len(case.steps) > 1 and bool(case.caches()) and not any(s.expected for s in case.steps)


def expected(reference: Backend, case: Case, found: Sequence[StepValues]) -> Iterator[StepValues]:
    """What each step should give, started from the caches that `found` holds after the step before.

    Args:
        reference: runs the steps.
        case: not judged by a recording.
        found: what the tested backend left behind, step by step.

    Raises:
        BackendError: the reference failed.
    """
    caches = case.caches()
    with reference.open(case) as session:
        for k, step in enumerate(case.steps):
            for t in caches if k else ():
                session.write(t, found[k - 1].caches[t])
            outputs = session.compute(step.graph, step.inputs, step.outputs)
            yield StepValues(dict(outputs), {t: pack(session.read(t), t, 0) for t in caches})


def judge(result: Result, reference: Backend, case: Case, execution: Execution, arithmetic: Arithmetic) -> None:
    """Judge each step within what its own nodes may err by, and put the worst into `result`.

    Args:
        result: a PASS of the free run; becomes FAIL where a step is wrong.
        reference: not the backend under test.
        case: one that `applies`.
        execution: the free run of the backend under test.
        arithmetic: in which both compute.

    Raises:
        BackendError: the reference failed.
    """
    wanted = expected(reference, case, execution.steps)
    for k, (want, got) in enumerate(zip(wanted, execution.steps, strict=True)):
        right, have = ({**v.outputs, **v.caches} for v in (want, got))
        for judged in judge_step(case, k, right, have, arithmetic):
            result.budget_used = max(result.budget_used or 0.0, judged.used)
            if judged.used > 1:
                result.verdict = Verdict.FAIL
                result.detail = divergence.sentence(judged, case) + "; started from its own caches"
                return
