"""Judges results of llama.cpp: of two scenarios that must agree, or of a device and a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.judge.wrong import Wrong

F32 = NDArray[np.float32]
TOLERANCE = 5e-4
"""Maximum NMSE of a step's logits, as for a free run against a recording."""
CLOSE = 1e-5
"""Maximum NMSE of two runs on a CPU: same kernels, sums in another order.

`Comparison.allowance` is added to it."""
SPREADS = 4.0
"""Allowed ratio of a difference to the spread that roundings cause."""
NUDGES = 32
"""Maximum number of models, different by roundings, that measure a spread."""
SILENT = "every result is 0"
MASKED = -1e30
"""Logits up to this are of tokens that are never emitted; they would hide all others."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of two runs, `[rows, n]` each."""

    what: str
    """The compared part of a scenario."""
    actual: F32
    expected: F32
    exact: bool = False
    """The same kernels ran on the same values: bit-identical on a CPU with one thread."""
    differs: bool = False
    """True if the two must differ by more than equal ones may.

    Otherwise a scenario would pass if llama.cpp did nothing.
    """
    allowance: float = 0.0
    """NMSE added to the limit, because one of the two runs rounded its keys more often."""
    spread: float = 0.0
    """Measured NMSE between results of models that differ by a rounding; 0 if not measured."""

    def record(self) -> dict[str, Any]:
        """Return all fields except the values and what is measured later."""
        return {"what": self.what, "exact": self.exact, "differs": self.differs, "allowance": self.allowance}


def nmse(actual: F32, expected: F32) -> float:
    """Return error energy / expected energy; inf if shapes differ or a value is not finite."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return inf
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    energy = float(np.sum(e * e))
    return float(np.sum((a - e) ** 2)) / energy if energy else (0.0 if not a.any() else inf)


def judge_runs(pair: Pair, results: Sequence[F32], expected: Sequence[F32]) -> Result:
    """Return PASS, or FAIL with the first batch that is out of tolerance."""
    if len(results) != len(expected):
        return Result(*pair, Verdict.FAIL, notes=(f"{len(expected)} batches expected, {len(results)} found",))
    errors = [nmse(ours, theirs) for ours, theirs in zip(results, expected, strict=True)]
    worst = max(errors, default=0.0)
    result = Result(*pair, Verdict.PASS, worst / TOLERANCE, worst, steps=len(errors))
    step = next((k for k, error in enumerate(errors) if not error <= TOLERANCE), None)
    if step is None:
        return result
    what = f"batch {step} of {len(errors)}: NMSE {errors[step]:.2g}, at most {TOLERANCE:g} expected"
    return _failed(result, step, what, results[step])


def _failed(result: Result, step: int, what: str, actual: F32, name: str = "") -> Result:
    error = inf if result.nmse is None else result.nmse
    wrong = Wrong("not finite" if error == inf else "numbers" if actual.any() else "zeros", error)
    where = Place(Fault.OUTPUT, step, name=name)
    return replace(result, verdict=Verdict.FAIL, where=where, wrong=wrong).noted(what)


def saved(said: Sequence[Mapping[str, Any]], file: Path) -> list[Comparison]:
    """Load the comparisons of a reply, with their values from `file`."""
    with np.load(file) as arrays:
        return [
            Comparison(**p, actual=arrays[f"actual{i}"], expected=arrays[f"expected{i}"]) for i, p in enumerate(said)
        ]


def judge_all(pair: Pair, name: str, comparisons: Sequence[Comparison], *, on_cpu: bool) -> Result:
    """Return PASS if all comparisons agree, else FAIL with the first that does not.

    VACUOUS if nothing was compared, expected values are all 0, or two results that must differ are equal.

    `on_cpu`: the limit is `CLOSE`, or bit equality if `exact`; else it is `TOLERANCE`. `allowance` is added to either.
    A difference of up to `SPREADS` times the `spread` passes, too, unless it is `exact`.
    """
    if all(each.differs for each in comparisons):
        return vacuous(pair, "nothing was compared")
    worst = used = 0.0
    for i, each in enumerate(comparisons):
        if not each.expected.any() and not (each.differs and each.actual.any()):
            return vacuous(pair, f"{each.what}: {SILENT}")
        error, exact = _error(each), on_cpu and each.exact
        tolerance = 0.0 if exact else max((CLOSE if on_cpu else TOLERANCE) + each.allowance, SPREADS * each.spread)
        if each.differs:
            if error <= tolerance:
                return vacuous(pair, f"{each.what}: the two runs must differ, NMSE {error:.2g} found")
            continue
        worst, used = max(worst, error), max(used, error / tolerance if tolerance else (inf if error else 0.0))
        if error > tolerance:
            must = "a bit-exact result" if exact else f"at most {tolerance:.2g}"
            what = f"NMSE {error:.2g}, {must} expected" if error < inf else _why_infinite(each)
            return _failed(Result(*pair, Verdict.FAIL, used, error), i, f"{each.what}: {what}", each.actual, name)
    return Result(*pair, Verdict.PASS, used, worst, steps=len(comparisons))


def spread(base: Sequence[Comparison], nudged: Sequence[Comparison]) -> float:
    """Return the largest NMSE between the expected values of two runs; inf if not comparable."""
    if len(base) != len(nudged):
        return inf
    return max((nmse(new.expected, old.expected) for new, old in zip(nudged, base, strict=True)), default=inf)


def judge_by_spread(
    result: Result,
    found: Sequence[Comparison],
    again: Callable[[int], Sequence[Comparison]],
    judge: Callable[[Sequence[Comparison]], Result],
    changed: str,
) -> Result:
    """Judge a failure again, by how far roundings of the model's weights move its results.

    `again` runs the comparisons on a copy of the model whose weights differ by draw N of the roundings, by none for
    draw 0: the spread counts only if that gives the same bits. `changed` says what differs. Raises as `again`.
    """
    if spread(found, again(0)):
        return result.noted("the same model gives other results, so roundings cannot be told from faults")
    most, judged = 0.0, result
    for draw in range(1, NUDGES + 1):
        moved = spread(found, again(draw))
        most = max(most, moved if isfinite(moved) else 0.0)
        judged = judge([replace(c, spread=most) for c in found])
        if judged.verdict is not Verdict.FAIL:
            break
    return replace(judged, metrics={"spread": most}).noted(f"{changed} change the results by NMSE {most:.2g}")


def vacuous(pair: Pair, why: str) -> Result:
    """Return VACUOUS: nothing was compared."""
    return Result(*pair, Verdict.VACUOUS, error=Error(why, why))


def _error(it: Comparison) -> float:
    """Return the NMSE of the unmasked values; inf if the masks differ."""
    masked = it.expected <= MASKED
    if it.actual.shape != masked.shape or not np.array_equal(it.actual <= MASKED, masked):
        return inf
    return nmse(it.actual[~masked], it.expected[~masked])


def _why_infinite(it: Comparison) -> str:
    if it.actual.shape != it.expected.shape:
        return f"results of shape {list(it.expected.shape)} expected, {list(it.actual.shape)} found"
    if not np.isfinite(it.expected).all():
        return "NaN or infinity in the reference"
    return "NaN or infinity" if not np.isfinite(it.actual).all() else "other tokens are masked"
