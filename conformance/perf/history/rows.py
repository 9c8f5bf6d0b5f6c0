"""A run file's content as rows of the history's tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES

Cells = dict[str, JSON]
Document = Mapping[str, JSON]

SURE = 0.95
_RESULT = ("backend", "verdict", "budget_used", "nmse", "nmse_exact", "seconds", "steps", "fresh", "waived", "detail")
_TIMING = ("unit", "model", "backend", "verdict", "work", "rounds", "rate", "reason")
_GATE = ("gate", "unit", "backend", "kind", "answer", "estimate", "low", "high", "rounds", "detectable", "seconds",
         "reason")  # fmt: skip
_HUNT = ("fault", "family", "noticed", "verdict")


def _pick(row: Mapping[str, JSON], columns: Sequence[str]) -> Cells:
    return {c: row.get(c) for c in columns}


def _results(document: Document) -> Iterator[Cells]:
    # a case that ran twice in a run, from a file too, is one row: that of the failure
    found = {(r["case"], r["backend"]): r for r in sorted(document["results"], key=lambda r: r["verdict"] in FAILURES)}
    for r in found.values():
        yield {**_pick(r, _RESULT), "case_id": r["case"]}


def _timings(document: Document) -> Iterator[Cells]:
    for u in document["units"]:
        low, high = interval(u["seconds"])
        yield {
            **_pick(u, _TIMING),
            "case_id": u["case"],
            "work_of": u["of"],
            "seconds": json.dumps(u["seconds"]),
            "low": u["work"] / high if high else None,
            "high": u["work"] / low if low else None,
            "weights": u["memory"].get("weights"),
            "peak": u["memory"].get("peak"),
        }


def _counters(document: Document) -> Iterator[Cells]:
    for u in document["units"]:
        for name, value in _numbers(u["counters"], ""):
            yield {**_pick(u, ("unit", "model", "backend")), "case_id": u["case"], "counter": name, "value": value}


def _gates(document: Document) -> Iterator[Cells]:
    for g in document.get("gates", ()):
        yield {**_pick(g, _GATE), "against": g.get("against") or "", "bound": g.get("limit")}


def _hunts(document: Document) -> Iterator[Cells]:
    of = {f["name"]: f["of"] for f in document["faults"]}
    for h in document["hunts"]:
        fault = h["fault"]
        control = fault not in of
        adapter = of.get(fault) or fault.partition("-")[2]  # a control is called control-ADAPTER
        more = {"adapter": adapter, "control": control, "level": str(document.get("level", "")), "case_id": h["case"]}
        yield {**_pick(h, _HUNT), **more}


TABLES: dict[str, dict[str, Callable[[Document], Iterator[Cells]]]] = {
    "conformance": {"results": _results},
    "perf": {"timings": _timings, "counters": _counters, "gates": _gates},
    "planted": {"hunts": _hunts},
}
"""Kind of document -> the tables it fills. Of other kinds (audit, phases, zoo) only the run itself is kept."""


def rows(document: Document) -> dict[str, list[Cells]]:
    """Table -> its rows, each a mapping of columns; `run` is the store's."""
    return {table: list(make(document)) for table, make in TABLES.get(document["kind"], {}).items()}


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Between which of the `values` the median of what they were drawn from lies with 95 % (order statistics, exact).

    It assumes nothing of the shape of their distribution, but that they are independent; None where they are fewer than
    6, which cannot be that sure of anything.
    """
    n, ordered = len(values), sorted(values)
    tail, k, ways = 0.0, 0, 1  # comb(n, k) from the one before it: a stranger's list may be long
    while k < n // 2 and 2 * (tail + ways / 2**n) <= 1 - SURE:
        tail += ways / 2**n
        ways = ways * (n - k) // (k + 1)
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else (None, None)


def _numbers(value: JSON, name: str) -> Iterator[tuple[str, float]]:
    """Every number of nested objects: `kernels.RMS`."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _numbers(v, f"{name}.{k}" if name else k)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
