"""What a history tells: its runs, the series of its timings, how many planted faults were noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from .schema import COUNTED
from .store import History


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the store."""

    run: str
    kind: str
    written: str
    machine: str
    system: str
    cpu: str
    nightly: bool
    rows: int
    verdicts: Mapping[str, int]
    """How many results, timings, gates or faults of each verdict, answer, noticed or not."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run's rate of a series."""

    run: str
    written: str
    rate: float
    """Units of work per second, median over the rounds."""
    low: float | None
    """The 95 % interval of that median (order statistics: no shape is assumed); None under 6 rounds."""
    high: float | None
    rounds: int
    packages: Mapping[str, str | None]
    """Versions it ran with: what changed where the rate did."""


@dataclass(frozen=True, slots=True)
class Series:
    """One work unit on one backend and kind of machine, oldest first."""

    unit: str
    model: str
    backend: str
    machine: str
    of: str
    """What the work is counted in: tokens, cases, bytes or steps."""
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """All by which it differs from another."""
        return f"{self.unit} {self.model} on {self.backend}, machine {self.machine}"


@dataclass(frozen=True, slots=True)
class Kills:
    """What one run's planted faults came to, per adapter."""

    run: str
    written: str
    level: str
    of: str
    """The adapter that was changed."""
    noticed: int
    faults: int


def runs(history: History) -> list[Run]:
    """Every run, oldest first."""
    counts: dict[int, dict[str, int]] = {}
    with history.snapshot():
        for table, word in COUNTED.items():
            for key, value, n in history.query(_COUNT.format(word=word, table=table)):
                counts.setdefault(key, {})[value] = n
        found = history.query(_RUNS)
    return [
        Run(
            run,
            kind,
            written,
            machine,
            system,
            cpu,
            bool(nightly),
            sum(counts.get(key, {}).values()),
            counts.get(key, {}),
        )
        for key, run, kind, written, machine, system, cpu, nightly in found
    ]


def series(history: History, *, nightly: bool = True) -> list[Series]:
    """The rates of each unit on each backend and kind of machine; of nightly runs only, or of all."""
    points: dict[_Key, list[Point]] = {}
    for row in history.query(_RATES, (int(nightly),)):
        run, written, rate, low, high, rounds, packages = row[5:]
        points.setdefault(cast("_Key", row[:5]), []).append(
            Point(run, written, rate, low, high, rounds, json.loads(packages))
        )
    return [Series(*key, tuple(found)) for key, found in points.items()]


def kills(history: History) -> list[Kills]:
    """How many planted faults each run noticed, per adapter; a fault that any family noticed is noticed."""
    return [Kills(*row) for row in history.query(_KILLS)]


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
