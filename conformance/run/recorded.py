"""Cases with recorded values: a free run is held against the recording, then every recorded node by itself."""

from __future__ import annotations

from dataclasses import replace

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, resolve
from conformance.cases.isolated import isolated_nodes
from conformance.cgraph.arithmetic import EXACT, NAMED, Arithmetic
from conformance.cgraph.case import Case
from conformance.cgraph.requant import weight_form
from conformance.check.judge import Judged, judge_node
from conformance.check.verdict import Result, Verdict

from . import divergence
from .execute import StepValues, computed_nodes, execute
from .oracle import REFERENCE, Expectation, Oracle


def is_free_running(case: Case) -> bool:
    """Whether the case is judged by its own recording, within the tolerance it states."""
    return bool(case.tolerance) and all(s.expected for s in case.steps)


def judges(case: Case, arithmetic: Arithmetic) -> bool:
    """Whether the recording is what a free run is held against: not where weights are stored in another form first.

    Requantised weights are other weights; then the reference, with the same weights, says what they give.
    """
    return is_free_running(case) and not any(
        weight_form(n, arithmetic.at(n).weights, arithmetic.at(n).rows) for s in case.steps for n in s.graph
    )


def has_nodes(case: Case) -> bool:
    """Whether some step's recording holds every computed node."""
    return is_free_running(case) and any(_whole(case, k) for k in range(len(case.steps)))


def _whole(case: Case, k: int) -> bool:
    step = case.steps[k]
    return all(n in step.expected for n in computed_nodes(step))


def expectation(case: Case, products: str = EXACT.products) -> Expectation:
    """The recording as what the case should give, on a backend that rounds the operands of products to `products`."""
    caches = case.caches()
    steps = [
        StepValues({t: s.expected[t] for t in s.outputs}, {t: s.expected[t] for t in caches if t in s.expected})
        for s in case.steps
    ]
    arithmetic = replace(arithmetic_of(case) or EXACT, products=products)
    return Expectation(steps, steps, arithmetic, str(case.provenance.get("source", "the recording")))


def arithmetic_of(case: Case) -> Arithmetic | None:
    """The arithmetic that made the recording, where the case says so."""
    said = case.provenance.get("arithmetic")
    return NAMED.get(said) if isinstance(said, str) else None


def tested(oracle: Oracle, spec: Spec, backend: Backend, case: Case) -> Backend:
    """The backend to run: the reference imitates the arithmetic of the recording."""
    arithmetic = arithmetic_of(case)
    if resolve(spec).name == REFERENCE and arithmetic is not None:
        return oracle.reference_in(arithmetic)
    return backend


def judge_nodes(result: Result, backend: Backend, oracle: Oracle, case: Case) -> None:
    """Judge every recorded node by itself and put the worst into `result`.

    Each node is held against the record (within what two arithmetics may differ by), where the record judges this
    arithmetic, and, unless the reference is the one under test, against the reference in the arithmetic that the
    backend declares (within rounding).
    """
    recording = arithmetic_of(case)
    by_record = judges(case, backend.arithmetic_in(case))
    equal = by_record
    for k in (k for k in range(len(case.steps)) if _whole(case, k)):
        alone, original = isolated_nodes(case, k)
        found = execute(backend, alone).steps[0].outputs
        declared = backend.arithmetic_in(alone)
        same = recording is not None and recording == declared
        record = case.steps[k].expected
        judged = []
        if by_record:
            for copy, n in original.items():
                limits = replace(recording or declared.at(copy), products=declared.at(copy).products)
                judged.append(judge_node(n, record[n], found[copy], limits, step=k, same=same))
        equal = equal and not any(j.difference.raw for j in judged)
        if not same:
            right = execute(oracle.reference_in(declared), alone).steps[0].outputs
            for copy, n in original.items():
                judged.append(judge_node(n, right[copy], found[copy], declared.at(copy), step=k))
        _take(result, judged, case)
    if equal and result.nmse == 0:
        note = "equal to the recording to the bit, freely and node by node"
        result.detail = f"{result.detail}; {note}" if result.detail else note


def _take(result: Result, judged: list[Judged], case: Case) -> None:
    worst = max(judged, key=lambda j: j.used, default=None)
    if worst is None:
        return
    result.budget_used = max(result.budget_used or 0.0, worst.used)
    wrong = next((j for j in judged if j.used > 1), None)
    if wrong is not None and result.first_divergence is None:
        result.verdict = Verdict.FAIL
        result.first_divergence = divergence.describe(wrong, case)
        result.detail = divergence.sentence(wrong, case) + "; fed from recorded values"
