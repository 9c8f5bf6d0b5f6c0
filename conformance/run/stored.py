"""Compare a backend also with stored values, computed once and saved in a file.

The recomputed reference cannot detect its own changes; stored values can. `golden/ops.gguf` has values of single ops,
found by the id of a case; a case file may have those of its own cases. They are in float64 up to the last store, or in
the arithmetic that the file names. A backend may differ from them by its own tolerance and by the distance of both
arithmetics on this graph, which the reference computes.

A backend that requantises weights is compared with `golden/requant.json`: outputs of some of these cases, computed with
requantised weights by another program (tests/helpers/graphs/independent_requant.py). Backend and reference share one
implementation of requantisation, so only these values can show that it has changed.

A recording with a tolerance is judged by `recorded` instead.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from conformance import shipped
from conformance.case.case import Case, Step
from conformance.case.casefile import Recorded
from conformance.ggml.arithmetic import EXACT, REQUANTISING, Arithmetic
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.judge.budget import Budget, touches
from conformance.judge.compare import compare
from conformance.judge.judge import Judged, how_wrong, judge_trajectory
from conformance.judge.verdict import Golden, Result, Verdict

from . import locate
from .attempt import Attempt
from .oracle import Oracle
from .recorded import arithmetic_of, is_free_running, same_weights

OPS = "ops.gguf"
REQUANT = "requant.json"
FAMILY = "ops"
"""Family of the cases in `OPS`."""
MARGIN = 2.0
"""Multiple of the distance of two arithmetics, whose NMSE refers to another energy."""

Values = Sequence[Mapping[Tensor, Bytes]]
"""Values per step."""


@cache
def label(file: str) -> str:
    """Return the name of a file: `golden/ops.gguf` for a shipped one, else its path."""
    path, own = Path(file), shipped.own_golden().parent
    return path.relative_to(own).as_posix() if path.is_relative_to(own) else file


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored values of one case."""

    file: str
    values: Values
    arithmetic: Arithmetic = EXACT
    """Arithmetic of the values."""
    problem: str = ""
    """Reason why the values do not fit the case; empty if they do."""
    others: tuple[Stored, ...] = ()
    """Values of the same case with requantised weights."""

    def with_weights_of(self, case: Case, declared: Arithmetic) -> Stored | None:
        """Return the values computed with the weights of `declared`; None if there are none."""
        return next((s for s in (self, *self.others) if same_weights(case, s.arithmetic, declared)), None)


def corpus() -> Recorded:
    """Return the golden values of ops; UsageError if missing, CaseFileError if damaged."""
    return _read(shipped.golden())


@cache
def _read(folder: Path) -> Recorded:
    path = folder / OPS
    if not path.is_file():
        raise UsageError(f"{path}: no golden outputs here; {shipped.AGAIN}")
    return Recorded(path)


class _Outputs(msgspec.Struct, frozen=True):
    """The file `REQUANT`."""

    schema: Literal[1]
    outputs: dict[str, dict[str, str]]
    """Arithmetic -> id of a case in `OPS` -> the only output of its only step, in base64."""


@cache
def requantised(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return arithmetic -> id -> output with requantised weights, of a corpus; it may have none.

    Raises:
        UsageError: the file is missing in the package's own corpus.
        CaseFileError: it is damaged, or names an arithmetic that does not requantise.
    """
    path = folder / REQUANT
    if not path.is_file():
        if folder == shipped.own_golden():
            raise UsageError(f"{path}: no golden outputs here; {shipped.AGAIN}")
        return {}
    try:
        read = msgspec.json.decode(path.read_bytes(), type=_Outputs).outputs
        values = {a: {i: base64.b64decode(text, validate=True) for i, text in of.items()} for a, of in read.items()}
    except (OSError, ValueError) as e:  # msgspec's errors are ValueErrors
        raise CaseFileError("file", f"{path} is damaged: {e}") from e
    for name in values.keys() - REQUANTISING.keys():
        raise CaseFileError("file", f"{path}: one of {', '.join(REQUANTISING)} expected, {name!r:.80} found")
    return values


def requantised_of(case: Case, folder: Path) -> tuple[Stored, ...]:
    """Return the values of a golden case with requantised weights, one per arithmetic."""
    found = []
    for name, outputs in requantised(folder).items():
        if case.id in outputs:
            (*outs,) = (t for s in case.steps for t in s.outputs)
            fits = len(outs) == 1 and nbytes(outs[0]) == len(outputs[case.id])
            values = [{outs[0]: np.frombuffer(outputs[case.id], np.uint8)}] if fits else []
            problem = "" if fits else "its output has another size"
            found.append(Stored(str(folder / REQUANT), values, REQUANTISING[name], problem))
    return tuple(found)


def stored_of(case: Case, *, generated: bool) -> Stored | None:
    """Return the stored values of `case`: its own expected ones, or if `generated` the corpus's.

    None if there are none, or if a tolerance makes them a recording. Raises as `corpus` and `requantised`.
    """
    if any(s.expected for s in case.steps):
        values, file = [s.expected for s in case.steps], Path(case.file)
        others = requantised_of(case, file.parent) if file.name == OPS else ()
        return None if is_free_running(case) else Stored(case.file, values, arithmetic_of(case) or EXACT, "", others)
    if not generated or case.family != FAMILY or case.id not in corpus():
        return None
    others = requantised_of(case, shipped.golden())
    try:
        return Stored(corpus().path, corpus().values(case), others=others)
    except CaseFileError as e:
        return Stored(corpus().path, [], problem=e.message, others=others)


def with_values(case: Case, stored: Stored) -> Case:
    """Return the case with the stored values as its own, for a file."""
    if not stored.values:
        return case
    steps = [Step(s.graph, s.inputs, s.outputs, dict(v)) for s, v in zip(case.steps, stored.values, strict=True)]
    named = {} if stored.arithmetic == EXACT else {"arithmetic": stored.arithmetic.name}
    return replace(case, steps=steps, provenance={**case.provenance, **named})


def prepare(oracle: Oracle, cases: Mapping[Case, Stored | None], declared: Arithmetic) -> None:
    """Compute the values that `judge` needs for cases that the `declared` arithmetic changes."""
    changed: dict[str, tuple[Arithmetic, list[Case]]] = {}
    for case, every in cases.items():
        stored = None if every is None else every.with_weights_of(case, declared)
        if stored is not None and _differ(case, stored, declared):
            changed.setdefault(stored.arithmetic.name, (stored.arithmetic, []))[1].append(case)
    for theirs, group in changed.values():
        oracle.expect(group, theirs)


def judge(attempt: Attempt, result: Result, stored: Stored | None) -> Result:
    """Compare a free run with stored values, and these values with the recomputed reference.

    `result` is that of the comparison with the recomputed reference, which for the reference itself is the run.
    """
    if stored is not None:
        return _compare(attempt, result, stored)
    return replace(result, golden=Golden.NOT_COMPARABLE) if is_free_running(attempt.case) else result


def _compare(attempt: Attempt, result: Result, stored: Stored) -> Result:
    case, expectation, execution = attempt.case, attempt.expectation, attempt.execution
    declared = expectation.arithmetic
    fitting = stored.with_weights_of(case, declared)
    if fitting is None:
        return replace(result, golden=Golden.NOT_COMPARABLE)
    stored, differ = fitting, _differ(case, fitting, declared)
    if stored.problem:
        return _disagree(result, f"{label(stored.file)}: {case.id}: {stored.problem}")
    again = execution.steps if attempt.tested.is_reference else expectation.steps
    distances: list[dict[Tensor, Budget]] | None = None
    if differ:
        again = attempt.tested.oracle.expect([case], stored.arithmetic)[0].steps
        distances = [_distance(a.all, b.all) for a, b in zip(again, expectation.steps, strict=True)]
    found = [v.all for v in execution.steps]
    values = [{t: x for t, x in want.items() if t in got} for want, got in zip(stored.values, found, strict=True)]
    comparable = values if distances is None else [
        {t: x for t, x in want.items() if t in near} for want, near in zip(values, distances, strict=True)
    ]  # fmt: skip
    if not any(comparable):
        return replace(result, golden=Golden.NOT_COMPARABLE)
    result = replace(result, golden=Golden.COMPARED)
    recomputed = [v.all for v in again]
    same = all(_equal(want, got) for want, got in zip(values, recomputed, strict=True))
    if same and distances is None:
        return result  # the run was compared with equal values already
    pinned = None if same else _first_wrong(case, values, recomputed, stored.arithmetic)
    as_declared = same and all(_equal(want, v.all) for want, v in zip(found, expectation.steps, strict=True))
    wrong = None if as_declared else _first_wrong(case, comparable, found, declared, distances)
    first, passed = pinned or wrong, result.verdict is Verdict.PASS
    if first is None or not (passed or pinned):
        return result
    whose = f"what {attempt.tested.spec} gives" if pinned is None else "the recomputed reference"
    side = "both" if passed and not wrong else "the reference" if passed else "neither" if wrong else "the stored value"
    agrees = "the reference agrees with both" if pinned is None else f"{attempt.tested.spec} agrees with {side}"
    text = f"stored value differs from {whose}: {locate.sentence(first, case)}; {agrees}"
    wrong_by = result.wrong or how_wrong([first])
    return _disagree(replace(result, wrong=wrong_by), f"{label(stored.file)}: {case.id}: {text}")


def _disagree(result: Result, text: str) -> Result:
    verdict = Verdict.FAIL if result.verdict is Verdict.PASS else result.verdict
    return replace(result, golden=Golden.DIFFERS, verdict=verdict).noted(text)


def _differ(case: Case, stored: Stored, declared: Arithmetic) -> bool:
    """Return True if the stored values' arithmetic and the declared one differ on this case."""
    return stored.arithmetic != declared and (touches(case, stored.arithmetic) or touches(case, declared))


def _distance(theirs: Mapping[Tensor, Bytes], declared: Mapping[Tensor, Bytes]) -> dict[Tensor, Budget]:
    """Return the distance of two arithmetics per tensor that both can represent."""
    found = {}
    for t, value in theirs.items():
        d = compare(t, value, declared[t], unordered=t.op == "TOP_K")
        if isfinite(d.nmse) and isfinite(d.element):
            found[t] = Budget(MARGIN * d.nmse, MARGIN * d.element, "the difference between the two arithmetics")
    return found


def _equal(want: Mapping[Tensor, Bytes], got: Mapping[Tensor, Bytes]) -> bool:
    return all(x is got[t] or x.tobytes() == got[t].tobytes() for t, x in want.items())


def _first_wrong(
    case: Case,
    want: Values,
    got: Values,
    arithmetic: Arithmetic,
    distances: Sequence[Mapping[Tensor, Budget]] | None = None,
) -> Judged | None:
    return next((j for j in judge_trajectory(case, want, got, arithmetic, distances) if j.used > 1), None)
