"""Timings of a history, as rows of run files, and the change points of their series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from conformance.case.case import JSON
from conformance.ggml.errors import UnavailableError
from conformance.perf.history.series import Series, changes, series
from conformance.perf.history.store import History
from conformance.report.runfile import Document
from conformance.report.runs import Fields, Row


@dataclass(frozen=True, slots=True)
class Stored:
    """The part of a page that comes from a history."""

    units: Sequence[Row[Fields]] = ()
    """One per point of each series: `unit`, `model`, `backend`, `of`, `rate`, `low`, `high`, `rounds`."""
    changes: Sequence[Mapping[str, JSON]] = ()
    """Change points of nightly series: series, first run of the new rate, rates before and after."""
    unasked: str = ""
    """Why no change points were sought; empty where they were."""


def read_history(path: Path) -> Stored:
    """The timings of a history, and its change points if Apache Otava is installed.

    Raises:
        UsageError: no history, or one that cannot be read.
    """
    with closing(History(path)) as history:
        every, nightly = series(history, nightly=False), series(history)
    units = _units(path, every)
    try:
        found = changes(nightly)
    except UnavailableError as e:
        return Stored(units, unasked=str(e))
    points = [
        {
            **_named(c.series),
            "run": c.at.run,
            "written": c.at.written,
            "since": c.since.run,
            "before": c.before,
            "after": c.after,
            "change": c.ratio - 1,
            "p": c.p,
        }
        for c in found
    ]
    return Stored(units, points)


def _units(path: Path, every: Sequence[Series]) -> list[Row[Fields]]:
    documents: dict[str, Document] = {}
    rows: list[Row[Fields]] = []
    for one in every:
        for p in one.points:
            if p.run not in documents:
                environment = {"machine": one.machine, "packages": dict(p.packages)}
                documents[p.run] = Document(path, "perf", p.run, p.written, environment, {}, f"history {p.run}")
            value = {**_named(one), "rate": p.rate, "low": p.low, "high": p.high, "rounds": p.rounds, "verdict": "PASS"}
            rows.append(Row(value, documents[p.run], "timings"))
    return rows


def _named(one: Series) -> dict[str, JSON]:
    return {"unit": one.unit, "model": one.model, "backend": one.backend, "machine": one.machine, "of": one.of}
