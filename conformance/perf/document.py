"""The document of a perf run, and the table a person reads of it.

    {…header("perf")…, "level": "smoke", "units": [{
        "unit": "decode@past=512", "model": "llama-l=2,…", "case": "kv_growth/…@1", "backend": "ggml",
        "verdict": "PASS", "work": 8, "of": "tokens", "seconds": [one per round], "elapsed": [likewise], "rounds": 10,
        "rate": 512.0,
        "counters": {
            "compiles": 2, "hits": 6, "splits": 0, "copies": 0, "nodes": 568, "bytes": {…}, "kernels": {…},
            "timed": {"compiles": 0, "hits": 8, "splits": 0, "copies": 0, "nodes": 568}, "changed": 0},
        "memory": {"weights": 1234, "peak": null}, "reason": ""}], "gates": []}

A unit that was not timed stands there with `seconds: []`, `rate: null` and the reason, and its counters are those of
memory's unit or `{}`; it is never left out. `elapsed` is what passed outside (`perf.measure` says what a session's own
clock leaves out). `rate` is `work` by the median of `seconds`. `verdict` is of the unit's case. Counters are exact
and the same for any number of rounds: at the top what the first playing of the case counted (`perf.measure.Measured`),
under `timed` what one measurement does. One series is one `unit`, `model` and `backend`: levels differ in models.

The yardstick, pytest-benchmark's own judgement of the same seconds, is `perf.yardstick`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES, Totals
from conformance.run.session.environment import header

from .bench import Row

COLUMNS = (
    "unit",
    "backend",
    "rounds",
    "rate",
    "of",
    "spread",
    "not charged",
    "compiles",
    "hits",
    "MiB",
    "why not timed",
)
_MIB = 2**20


def entry(row: Row) -> dict[str, JSON]:
    """What the document has of a row."""
    u = row.unit
    return {
        "unit": u.name,
        "model": u.model,
        "case": u.case_id,
        "backend": str(row.backend),
        "verdict": row.result.verdict.value,
        "work": u.work,
        "of": u.of,
        "seconds": list(row.seconds),
        "elapsed": list(row.elapsed),
        "rounds": len(row.seconds),
        "rate": row.rate,
        "counters": dict(row.counters),
        "memory": {"weights": row.weights, "peak": row.peak},
        "reason": row.reason,
    }


def document(
    rows: Sequence[Row], level: str, unavailable: Mapping[str, str] | None = None, gates: Sequence[JSON] = ()
) -> dict[str, JSON]:
    """The whole document.

    Args:
        rows: in the order measured.
        level: of the units.
        unavailable: backend that is not here -> why.
        gates: entries that judge the rows.
    """
    begun = header("perf")
    return {
        **begun,
        "environment": {**begun["environment"], "unavailable": dict(unavailable or {})},
        "level": level,
        "units": [entry(r) for r in rows],
        "gates": list(gates),
    }


def exit_code(rows: Sequence[Row]) -> int:
    """As `conform run`: 1 where a case failed or measuring one that had passed did, 3 where nothing was executed."""
    totals = Totals()
    for r in rows:
        totals.add(r.result)
    if any(r.broke or r.result.verdict in FAILURES for r in rows):
        return 1
    return totals.exit_code()


def spread(seconds: Sequence[float]) -> float | None:
    """The middle half of the rounds as a fraction of their median; None for fewer than four."""
    if len(seconds) < 4:
        return None
    ordered = sorted(seconds)
    n = len(ordered)
    return (ordered[(3 * (n - 1) + 2) // 4] - ordered[(n - 1) // 4]) / median(ordered)


def table(rows: Sequence[Row]) -> list[Sequence[str]]:
    """Rows under `COLUMNS`; a number that is not there is a dash, never a 0."""
    return [_line(r) for r in rows]


def _line(row: Row) -> Sequence[str]:
    wide = spread(row.seconds)
    apart = [1 - s / e for s, e in zip(row.seconds, row.elapsed, strict=True)]
    return (
        row.unit.name,
        str(row.backend),
        str(len(row.seconds)),
        "–" if row.rate is None else f"{row.rate:.4g}",
        f"{row.unit.of}/s" if row.unit.timed else "",
        "–" if wide is None else f"{100 * wide:.1f} %",
        f"{100 * median(apart):.0f} %" if apart and any(apart) else "",
        _counter(row.counters, "compiles"),
        _counter(row.counters, "hits"),
        "" if row.unit.timed else f"{_mib(row.weights)}, at most {_mib(row.peak)}",
        row.reason,
    )


def _mib(n: int | None) -> str:
    return "–" if n is None else f"{n / _MIB:.1f}"


def _counter(counters: Mapping[str, JSON], name: str) -> str:
    """The first playing's, and what a measurement adds."""
    if name not in counters:
        return "–"
    timed = counters.get("timed", {}).get(name)
    return f"{counters[name]}" if timed is None else f"{counters[name]} (+{timed})"
