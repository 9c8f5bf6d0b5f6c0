"""A switch of a library's environment: with it a backend is right, as any run is, and gives what it gives without it.

Both runs are judged by the float64 reference, and held against each other. The library reads its environment once, so
each side is a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from conformance.backend.interface import Backend
from conformance.backend.registry import Named, Spec, define, defined, environment, resolve
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, ConformanceError, UsageError
from conformance.judge.verdict import Verdict
from conformance.run import divergence
from conformance.run.execute import Execution, execute
from conformance.run.oracle import Oracle, judge_steps
from conformance.run.relate import held_against
from conformance.suite.relations import claim

PASSES = frozenset({Verdict.PASS, Verdict.UNSUPPORTED})
"""Verdicts of a switched run that do not fail."""


@dataclass(frozen=True, slots=True)
class Switched:
    """One case with a switch, judged by the reference, and held against the same without it."""

    case: str
    verdict: Verdict
    """With the switch."""
    without: Verdict
    """Without it."""
    detail: str = ""
    nmse: float | None = None
    """The largest of any output or cache, of the run without the switch as expected; None where not both ran."""
    equal: bool = False
    """To the bit, in every output and cache."""
    batch: bool = False
    """Whether some node has `ne[3]` over 1, as attention over several streams."""

    @property
    def compared(self) -> bool:
        """Whether both runs gave values."""
        return self.nmse is not None


def sides(spec: Spec, switch: str) -> tuple[Spec, Spec]:
    """`spec` without and with a switch `NAME=VALUE`, as names of their own; UsageError for another form."""
    name, equals, value = switch.partition("=")
    if not name.isidentifier() or not equals:
        raise UsageError(f"switch {switch!r}: NAME=VALUE expected, such as GGML_OPENVINO_MANUAL_GQA_ATTN=1")
    whole, variables = resolve(spec), dict(environment(spec))
    names = dict(defined())
    made = []
    for label, setting in ((f"{spec.name} without {name}", None), (f"{spec.name} with {switch}", value)):
        made.append(Spec(label))
        names[label] = Named(whole.name, whole.options, tuple({**variables, name: setting}.items()), "--switch")
    define(names)
    return made[0], made[1]


def switched(off: Backend, on: Backend, oracle: Oracle, case: Case) -> Switched:
    """Run `case` without a switch and with it, and judge both."""
    batch = any(n.ne[3] > 1 for s in case.steps for n in s.graph)
    if claim.applies(case):
        why = "a relation compares runs of its own"
        return Switched(case.id, Verdict.UNSUPPORTED, Verdict.UNSUPPORTED, why, batch=batch)
    (without, before, words), (verdict, after, detail) = (_judged(b, oracle, case) for b in (off, on))
    if without not in PASSES:
        detail = "; ".join(filter(None, (detail, f"without it {without}: {words}")))
    if before is None or after is None:
        return Switched(case.id, verdict, without, detail, batch=batch)
    apart = [j.difference for j in held_against(case, off.arithmetic_in(case), before, after)]
    return Switched(
        case.id,
        verdict,
        without,
        detail,
        max((inf if d.special else d.nmse for d in apart), default=0.0),
        not any(d.raw for d in apart),
        batch,
    )


def _judged(backend: Backend, oracle: Oracle, case: Case) -> tuple[Verdict, Execution | None, str]:
    """The verdict about a run, by the reference in the backend's arithmetic; what it gave, and a detail."""
    try:
        execution = _again(backend, case)
        if isinstance(execution, str):
            return Verdict.UNSUPPORTED, None, execution
    except ConformanceError as e:
        return _verdict(e), None, str(e)
    try:
        (expectation,) = oracle.expect([case], backend.arithmetic_in(case))
    except ConformanceError as e:
        return Verdict.VACUOUS, execution, f"nothing can compute what is expected: {e}"
    judged = list(judge_steps(case, expectation.steps, execution, expectation.arithmetic))
    wrong = next((j for j in judged if j.used > 1), None)
    if wrong is not None:
        return Verdict.FAIL, execution, divergence.sentence(wrong, case)
    return (Verdict.PASS, execution, "") if judged else (Verdict.VACUOUS, execution, "it has no output to check")


def _again(backend: Backend, case: Case) -> Execution | str:
    """The run of a case, or why `backend` does not take it.

    Where its process dies a new one has another try: an earlier case may have damaged its memory.
    """
    try:
        return _run(backend, case)
    except BackendCrashError:
        return _run(backend, case)


def _run(backend: Backend, case: Case) -> Execution | str:
    for step in case.steps:
        for node, answer in zip(step.graph, backend.supports(step.graph), strict=True):
            if not answer:
                return f"{node.op}: {answer.reason}"
    whole = backend.supports_case(case)
    return execute(backend, case) if whole else whole.reason


def _verdict(error: ConformanceError) -> Verdict:
    kinds = ((BackendCrashError, Verdict.CRASH), (BackendTimeoutError, Verdict.TIMEOUT))
    return next((v for kind, v in kinds if isinstance(error, kind)), Verdict.OVERCLAIM)


def changes_nothing(rows: Sequence[Switched]) -> bool:
    """Whether every result is equal to the bit: nothing shows that the library reads the switch at all."""
    ran = [r for r in rows if r.compared]
    return bool(ran) and all(r.equal for r in ran)


def coverage(rows: Sequence[Switched]) -> str:
    """How many cases were compared with and without the switch, how many of them batches, and why others were not."""
    compared = [r for r in rows if r.compared]
    batches = [r for r in rows if r.batch]
    said = f"compared with and without it: {len(compared)} of {len(rows)} cases"
    if batches:
        n = sum(r.batch for r in compared)
        said += f"; of {len(batches)} with several streams (ne[3] > 1): {n or 'none'}"
    why = Counter(f"{r.without} without it" if r.without is not Verdict.PASS else f"{r.verdict} with it" for r in rows
                  if not r.compared)  # fmt: skip
    lost = ", ".join(f"{n} {reason}" for reason, n in sorted(why.items()))
    return f"{said}; not compared: {lost}" if lost else said
