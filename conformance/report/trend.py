"""Trends of a folder of records: changes of rates, causes, and last good runs.

The records are read one at a time, and only what trends need of each is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from conformance.judge.cause import Cause
from conformance.judge.verdict import FAILURES, Verdict

from .runfile import Document, read_document
from .runs import Pace, files, pace

FEWEST = 11
"""Minimum number of runs of a series; 5 and 6 runs can be told apart at `MAX_P`."""
SIDE = 3
"""Minimum number of runs before and after a change."""
LAST = 100
"""Number of runs of a series, the newest, in which changes are searched."""
MAX_P = 0.005
"""Maximum p of a change."""
ORDERS = 1999
"""Number of random orders of a series that a change is compared with."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run's rate of a series."""

    document: Document
    """Its record, without rows."""
    pace: Pace


@dataclass(frozen=True, slots=True)
class Series:
    """The rates of one case on one backend and kind of machine, oldest first."""

    case: str
    backend: str
    machine: str
    of: str
    """Unit of work: tokens, cases, bytes or steps."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A rate changed from one run to the next."""

    series: Series
    at: Point
    """The first run with the new rate."""
    since: Point
    """The last run with the old rate."""
    before: float
    """Geometric mean of the rate since the previous change."""
    after: float
    """Geometric mean of the rate until the next change."""
    p: float
    """Probability of such a step if the order of the runs were random."""


@dataclass(frozen=True, slots=True)
class Known:
    """A cause on a backend, as the newest run that has it describes it."""

    cause: Cause
    first: str
    """Time of the first run that has it."""
    last: str
    runs: int
    """Number of runs that have it."""
    passed: str | None = None
    """Time of the newest run after `last` in which its smallest case passed."""


Pair = tuple[str, str]
"""Case and backend."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The verdicts of watched pairs in one run."""

    document: Document
    """Its record, without rows."""
    verdicts: Mapping[Pair, Verdict]


def pairs_of(causes: Iterable[Cause]) -> frozenset[Pair]:
    """Return the pairs that the causes explain."""
    return frozenset((case, c.backend) for c in causes for case in c.cases)


@dataclass(slots=True)
class Trend:
    """Trends of the records of a folder."""

    watched: frozenset[Pair] = frozenset()
    sights: dict[str, Sight] = field(default_factory=dict)
    """Id of a run -> the verdicts of `watched` in it; runs without any are left out."""
    points: dict[tuple[str, str, str, str], dict[str, Point]] = field(default_factory=dict)
    """Case, backend, machine and unit of work -> id of a run -> its rate."""
    good: dict[str, str | None] = field(default_factory=dict)
    """Backend -> time of its newest run with passes and no failures, or None."""
    _causes: dict[tuple[str, str], Known] = field(default_factory=dict)
    _passed: dict[tuple[str, str], str] = field(default_factory=dict)
    """Case and backend -> time of the newest run in which it passed."""

    def add(self, document: Document) -> None:
        """Add what trends need of a record; the order of records does not matter."""
        record, light = document.record, _light(document)
        self.watch(document)
        seen: dict[str, set[Verdict]] = {}
        for r in record.results:
            seen.setdefault(r.backend, set()).add(r.verdict)
            if r.verdict is Verdict.PASS:
                pair = r.case, r.backend
                self._passed[pair] = max(self._passed.get(pair, ""), record.written)
            if (found := pace(r)) is not None:
                key = r.case, r.backend, document.machine, found.of
                self.points.setdefault(key, {})[record.run] = Point(light, found)
        for backend, verdicts in seen.items():
            is_good = Verdict.PASS in verdicts and not verdicts & FAILURES
            known = self.good.setdefault(backend, None)
            self.good[backend] = max(known or "", record.written) if is_good else known
        for c in record.causes:
            now = Known(c, record.written, record.written, 1)
            was = self._causes.setdefault((c.id, c.backend), replace(now, runs=0))
            newest = c if now.last >= was.last else was.cause
            first, last = min(was.first, now.first), max(was.last, now.last)
            self._causes[c.id, c.backend] = Known(newest, first, last, was.runs + 1)

    def watch(self, document: Document) -> None:
        """Add the verdicts of `watched` only; shards of one run count together."""
        record = document.record
        found = {pair: r.verdict for r in record.results if (pair := (r.case, r.backend)) in self.watched}
        if found:
            known = self.sights.get(record.run, Sight(_light(document), {}))
            self.sights[record.run] = replace(known, verdicts={**known.verdicts, **found})

    def history(self, cause: Cause) -> list[tuple[Document, int, int]]:
        """Return the runs that decided a cause's cases, oldest first: failed and passed cases."""
        told, pairs = [], pairs_of([cause])
        for s in sorted(self.sights.values(), key=lambda s: (s.document.written, s.document.run)):
            own = [s.verdicts[pair] for pair in pairs if pair in s.verdicts]
            failed, passed = sum(v in FAILURES for v in own), own.count(Verdict.PASS)
            if failed or passed:
                told.append((s.document, failed, passed))
        return told

    def series(self) -> list[Series]:
        """Return the series, by case, backend, kind of machine and unit of work."""
        return [
            Series(*key, tuple(sorted(own.values(), key=lambda p: (p.document.written, p.document.run))))
            for key, own in sorted(self.points.items())
        ]

    def causes(self) -> list[Known]:
        """Return each cause, the newest first; those whose smallest case passed since come last."""
        found = []
        for known in self._causes.values():
            passed = self._passed.get((known.cause.smallest, known.cause.backend), "")
            found.append(replace(known, passed=passed if passed > known.last else None))
        found.sort(key=lambda k: (k.cause.backend, k.cause.id))
        found.sort(key=lambda k: k.last, reverse=True)
        return sorted(found, key=lambda k: k.passed is not None)


def _light(document: Document) -> Document:
    return replace(document, body={}, record=structs.replace(document.record, results=[], missing=[], causes=[]))


def read_trend(paths: Sequence[Path], watched: frozenset[Pair] = frozenset()) -> Trend:
    """Read record files, and the records of folders, with the verdicts of `watched` in them.

    Other JSON files of a folder are ignored, and equal files count once. UsageError if a record cannot be read.
    """
    trend, known = Trend(watched), set[str]()
    for path, named in files(paths):
        document = read_document(path, named=named)
        if document is not None and document.digest not in known:
            known.add(document.digest)
            trend.add(document)
    return trend


def changes(every: Iterable[Series]) -> list[Change]:
    """Return the changes of series with at least `FEWEST` runs, by time within a series.

    A series is split where the mean logarithms of its two parts differ most, then each part likewise. A split is a
    change if at most `MAX_P` of random orders of the part have one as great.
    """
    return [c for s in every if len(s.points) >= FEWEST for c in _changes(s)]


def _changes(series: Series) -> list[Change]:
    points = series.points[-LAST:]
    logs = np.log([p.pace.rate for p in points])
    found = dict(_splits(logs, 0))
    ends = [0, *sorted(found), len(points)]
    means = [float(np.exp(logs[a:b].mean())) for a, b in pairwise(ends)]
    return [
        Change(series, points[at], points[at - 1], means[k], means[k + 1], found[at])
        for k, at in enumerate(sorted(found))
    ]


def _splits(logs: NDArray[np.float64], offset: int) -> list[tuple[int, float]]:
    """Return the first index and p of each part of `logs` but the first one."""
    n = len(logs)
    if n < 2 * SIDE or np.all(logs == logs[0]):
        return []
    orders = np.random.default_rng(n).permuted(np.tile(logs, (ORDERS, 1)), axis=1)
    steps = _steps(np.vstack([logs, orders]))
    at = int(steps[0].argmax()) + SIDE
    p = float(np.mean(steps.max(axis=1) >= steps[0].max() * (1 - 1e-9)))
    if p > MAX_P:
        return []
    return [(offset + at, p), *_splits(logs[:at], offset), *_splits(logs[at:], offset + at)]


def _steps(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of the means before and from each index, weighted by the sizes."""
    n = rows.shape[1]
    sums = np.cumsum(rows, axis=1)
    k = np.arange(SIDE, n - SIDE + 1)
    before = sums[:, k - 1]
    after = sums[:, -1:] - before
    return np.asarray(np.abs(before / k - after / (n - k)) * np.sqrt(k * (n - k) / n))
