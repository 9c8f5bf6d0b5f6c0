"""A switch of a library's environment: with it a backend gives what it gives without it, or declines.

No reference takes part. Each side may err by what a right backend may err by. The library reads its environment once,
so each side is a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from conformance.backend.interface import Backend
from conformance.backend.registry import Named, Spec, define, defined, environment, resolve
from conformance.case.case import Case
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, ConformanceError, UsageError
from conformance.judge.verdict import Verdict
from conformance.run import divergence
from conformance.run.execute import Execution, execute
from conformance.run.relate import held_against
from conformance.suite.relations import claim

NO_REFERENCE = "NO REFERENCE"
"""Without the switch it fails, so nothing can be said of it."""
PASSES = (Verdict.PASS.value, Verdict.UNSUPPORTED.value, NO_REFERENCE)
"""Verdicts that are not the switch's fault."""


@dataclass(frozen=True, slots=True)
class Switched:
    """One case with a switch, held against the same without it."""

    case: str
    verdict: str
    detail: str = ""
    nmse: float | None = None
    equal: bool = False
    """To the bit, in every output and cache."""


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


def switched(off: Backend, on: Backend, case: Case) -> Switched:
    """Run `case` without a switch and with it, and compare."""
    if claim.applies(case):
        return Switched(case.id, Verdict.UNSUPPORTED.value, "a relation compares runs of its own")
    try:
        expected = _again(off, case)
    except ConformanceError as e:
        return Switched(case.id, NO_REFERENCE, str(e))
    if isinstance(expected, str):
        return Switched(case.id, Verdict.UNSUPPORTED.value, f"without it: {expected}")
    try:
        found = _again(on, case)
    except ConformanceError as e:
        return Switched(case.id, _verdict(e).value, str(e))
    if isinstance(found, str):
        return Switched(case.id, Verdict.UNSUPPORTED.value, f"only with it: {found}")
    return _compared(off, case, expected, found)


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


def _compared(off: Backend, case: Case, expected: Execution, found: Execution) -> Switched:
    judged = list(held_against(case, off.arithmetic_in(case), expected, found))
    equal = all(
        np.array_equal(data, b.all[t]) for a, b in zip(expected.steps, found.steps, strict=True)
        for t, data in a.all.items() if t in b.all
    )  # fmt: skip
    worst = max((j.difference.nmse for j in judged), default=0.0)
    wrong = next((j for j in judged if j.used > 1), None)
    if wrong is None:
        return Switched(case.id, Verdict.PASS.value, nmse=worst, equal=equal)
    said = f"{divergence.sentence(wrong, case)}; expected is what it gives without the switch"
    return Switched(case.id, Verdict.FAIL.value, said, inf if wrong.difference.special else worst)


def changes_nothing(rows: Sequence[Switched]) -> bool:
    """Whether every result is equal to the bit: nothing shows that the library reads the switch at all."""
    ran = [r for r in rows if r.verdict in (Verdict.PASS.value, Verdict.FAIL.value)]
    return bool(ran) and all(r.equal for r in ran)
