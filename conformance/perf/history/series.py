"""Queries of a history: runs, series of timings and their change points, and how many planted faults were noticed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from conformance.ggml.errors import UnavailableError

from .store import COUNTED, History

FEWEST = 7
"""Points that a series needs: Otava's test needs 3 on each side."""
WINDOW = 50
"""Points that Otava looks at together; its own default."""
MAX_P = 0.001
"""Otava's default threshold of p."""


@dataclass(frozen=True, slots=True)
class Run:
    """One stored run."""

    run: str
    kind: str
    written: str
    machine: str
    system: str
    cpu: str
    nightly: bool
    rows: int
    verdicts: Mapping[str, int]
    """Verdict, answer, or noticed and not -> how many rows."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run's rate of a series."""

    run: str
    written: str
    rate: float
    """Units of work per second, median over the rounds."""
    low: float | None
    """95 % interval of that median (`statistics.median_interval`); None under 6 rounds."""
    high: float | None
    rounds: int
    packages: Mapping[str, str | None]
    """Package -> version."""


@dataclass(frozen=True, slots=True)
class Series:
    """One work unit on one backend and kind of machine, oldest first."""

    unit: str
    model: str
    backend: str
    machine: str
    of: str
    """Unit of work: tokens, cases, bytes or steps."""
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """Identifies the series."""
        return f"{self.unit} {self.model} on {self.backend}, machine {self.machine}"


@dataclass(frozen=True, slots=True)
class Kills:
    """Planted faults of one run in one adapter."""

    run: str
    written: str
    level: str
    of: str
    """The adapter."""
    noticed: int
    faults: int


def runs(history: History) -> list[Run]:
    """Every run, oldest first."""
    counts: dict[int, dict[str, int]] = {}
    with history.snapshot():
        for table, word in COUNTED.items():
            for key, value, n in history.query(_COUNT.format(word=word, table=table)):
                counts.setdefault(key, {})[value] = n
        every = history.query(_RUNS)
    return [
        Run(run, kind, written, machine, system, cpu, bool(nightly), sum(n.values()), n)
        for key, run, kind, written, machine, system, cpu, nightly in every
        for n in [counts.get(key, {})]
    ]


def series(history: History, *, nightly: bool = True) -> list[Series]:
    """The rates of each unit on each backend and kind of machine, of nightly runs only or of all."""
    points: dict[_Key, list[Point]] = {}
    for row in history.query(_RATES, (int(nightly),)):
        run, written, rate, low, high, rounds, packages = row[5:]
        points.setdefault(cast("_Key", row[:5]), []).append(
            Point(run, written, rate, low, high, rounds, json.loads(packages))
        )
    return [Series(*key, tuple(own)) for key, own in points.items()]


def kills(history: History) -> list[Kills]:
    """How many planted faults each run noticed, per adapter; a fault that any family noticed is noticed."""
    return [Kills(*row) for row in history.query(_KILLS)]


@dataclass(frozen=True, slots=True)
class Change:
    """A rate changed from one run to the next."""

    series: Series
    at: Point
    """The first run that has the new rate."""
    since: Point
    """The last run that had the old one."""
    before: float
    """Mean rate since the previous change."""
    after: float
    """Mean rate until the next change."""
    p: float
    """Of the t-test: how likely such a step is if nothing changed."""

    @property
    def ratio(self) -> float:
        """Of the rates; below 1 it became slower."""
        return self.after / self.before


class _Otava(Protocol):
    def compute_change_points(
        self, series: Sequence[float], window_len: int, max_pvalue: float, min_magnitude: float
    ) -> tuple[Sequence[Any], Any]: ...


def changes(every: Iterable[Series], least: float = 0.0) -> list[Change]:
    """Change points (E-divisive with a t-test, by Apache Otava) of each series of at least 7 points, oldest first.

    Args:
        every: of nightly runs.
        least: relative changes up to this are left out: 0.02 is 2 %.

    Raises:
        UnavailableError: there is such a series, and Apache Otava is not installed (it is an extra: it pins NumPy).
    """
    long = [s for s in every if len(s.points) >= FEWEST]
    otava = _otava() if long else None
    all_changes: list[Change] = []
    for one in long:
        assert otava is not None
        points, _ = otava.compute_change_points([p.rate for p in one.points], WINDOW, MAX_P, least)
        for c in points:
            s, at = c.stats, c.index
            means = float(s.mean_1), float(s.mean_2)
            all_changes.append(Change(one, one.points[at], one.points[at - 1], *means, float(s.pvalue)))
    return all_changes


def _otava() -> _Otava:
    try:
        return cast("_Otava", importlib.import_module("otava.analysis"))
    except ImportError as e:
        raise UnavailableError(
            f"change points need Apache Otava, which is not here ({e}): pip install 'ggml-conformance[history]', best "
            "into an environment of its own, since it pins NumPy; the history can be read from there"
        ) from None


_Key = tuple[str, str, str, str, str]
_RUNS = "SELECT id, run, kind, written, machine, system, cpu, nightly FROM runs ORDER BY written, run"
_COUNT = "SELECT run, {word}, count(*) FROM {table} GROUP BY 1, 2"
_RATES = """
    SELECT unit.text, model.text, backend.text, machine, work_of, runs.run, written, rate, low, high, rounds, packages
    FROM timings JOIN runs ON runs.id = timings.run JOIN names AS unit ON unit.id = unit
    JOIN names AS model ON model.id = model JOIN names AS backend ON backend.id = backend
    WHERE rate IS NOT NULL AND runs.nightly >= ? ORDER BY 1, 2, 3, 4, 5, written, runs.run"""
_KILLS = """
    SELECT run, written, level, text, sum(seen), count(*) FROM
        (SELECT runs.run AS run, written, level, adapter, max(noticed) AS seen
         FROM hunts JOIN runs ON runs.id = hunts.run WHERE NOT control GROUP BY runs.id, adapter, fault)
    JOIN names ON names.id = adapter GROUP BY run, adapter ORDER BY written, run, text"""
