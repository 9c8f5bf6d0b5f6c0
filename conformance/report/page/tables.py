"""The tables of the page, column by column, out of merged runs. Each row knows the run and the place it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.perf.history.rows import interval
from conformance.report import told
from conformance.report.causes import cause
from conformance.report.matrix import OPS, Cell, operation
from conformance.report.runfile import Document
from conformance.report.runs import Row, Runs

from .columns import numbers, objects, words

T = TypeVar("T")
Fields = Mapping[str, JSON]

TAKEN = ("refused", "begun, not finished", "finished")
"""What a backend did with a case: said no; said yes and gave no answer; said yes and answered, right or wrong."""
LOST = "missing"
"""Where a verdict stands, of a case that a backend was asked for and that has no result; and what was done with it."""


def subject(case_id: str) -> tuple[str, str, str]:
    """Family, op and types of a case: of `ops/GLU.SWIGLU-f16-ne=4@1` these are `ops`, `GLU.SWIGLU` and `f16`.

    A case of another family has the family's name as its op, and as its type what its id says before the first `key=`:
    `llama` of `gqa/llama-heads=4@1`, empty where it says nothing.
    """
    what = operation(case_id)
    if what.family == OPS and what.op:
        return OPS, what.op, what.types
    parts = case_id.partition("/")[2].partition("@")[0].split("-")
    first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    return what.family, what.family, "-".join(parts[:first])


def _lost(pair: Mapping[str, JSON]) -> Result:
    return Result(pair["case"], pair["backend"], Verdict.FAIL, detail=pair["reason"])


def results(runs: Runs) -> JSON:
    """One row per case, backend and kind of machine: the newest; then those that were asked for and have no result."""
    lost = [Row(_lost(m.value), m.document, m.place) for m in runs.missing]
    every = [*runs.results, *lost]
    rows = [r.value for r in every]
    none = [None] * len(lost)
    subjects = {r.case: subject(r.case) for r in rows}
    texts: dict[str, Callable[[Result], str | None]] = {
        "case": lambda r: r.case,
        "family": lambda r: subjects[r.case][0],
        "op": lambda r: subjects[r.case][1],
        "type": lambda r: subjects[r.case][2],
        "backend": lambda r: r.backend,
        "waived": lambda r: None if r.waived is None else str(r.waived),
        "fresh": lambda r: "fresh" if r.fresh else None,
        "detail": lambda r: r.detail,
        "saved": lambda r: r.saved,
    }
    amounts: dict[str, Callable[[Result], float | None]] = {
        "budget_used": lambda r: r.budget_used,
        "nmse": lambda r: r.nmse,
        "nmse_exact": lambda r: r.nmse_exact,
        "seconds": lambda r: r.seconds,
        "steps": lambda r: r.steps,
    }
    ran = [r.value for r in runs.results]
    return _table(
        every,
        runs.documents,
        {
            **{k: words(map(get, rows)) for k, get in texts.items()},
            **{k: numbers([*map(get, ran), *none]) for k, get in amounts.items()},
            "verdict": words([*(str(r.verdict) for r in ran), *(LOST for _ in lost)]),
            "taken": words([*map(_taken, runs.results), *(LOST for _ in lost)]),
            "cause": words(
                [*(cause(r) if r.verdict in FAILURES else None for r in ran), *(r.value.detail for r in lost)]
            ),
            "witness": objects(r.witness for r in rows),
            "first_divergence": objects(r.first_divergence for r in rows),
        },
    )


def _taken(row: Row[Result]) -> str:
    cell = Cell()
    cell.add(row)
    return TAKEN[cell.declared + cell.executed]


def faults(runs: Runs) -> JSON:
    """One row per planted fault: whether any of its families noticed it."""
    rows = [r.value for r in runs.faults]
    seen: dict[str, list[str]] = {}
    hunted = {h.value["fault"] for h in runs.hunts}
    for h in runs.hunts:
        if h.value["noticed"]:
            seen.setdefault(h.value["fault"], []).append(h.value["family"])

    def said(name: str) -> str:
        return "noticed" if name in seen else "not noticed" if name in hunted else "not hunted"

    return _table(
        runs.faults,
        runs.documents,
        {
            "noticed": words(said(f["name"]) for f in rows),
            "by": words(", ".join(seen.get(f["name"], ())) for f in rows),
            **{k: words(_text(f, k) for f in rows) for k in ("name", "of", "says", "file", "old", "new")},
        },
    )


def hunts(runs: Runs) -> JSON:
    """One row per family that hunted a fault, or an adapter as it is."""
    rows = [r.value for r in runs.hunts]
    planted = {f.value["name"]: f.value for f in runs.faults}
    return _table(
        runs.hunts,
        runs.documents,
        {
            **{k: words(h[k] for h in rows) for k in ("fault", "family", "case", "verdict", "detail")},
            "planted": words("a fault" if h["fault"] in planted else "nothing" for h in rows),
            "noticed": words("noticed" if h["noticed"] else "not noticed" for h in rows),
            **{k: words(_text(planted.get(h["fault"], {}), k) for h in rows) for k in ("of", "says")},
        },
    )


def audit(runs: Runs) -> JSON:
    """One row per answer of a backend that was held against a run: the newest audit of each backend and machine."""
    newest: dict[tuple[str, str], list[Row[Fields]]] = {}
    for d in runs.of("audit"):
        backends = d.body.get("backends")
        for name, cells in backends.items() if isinstance(backends, dict) else ():
            newest[d.machine, name] = [
                Row({**c, "backend": name}, d, f"backends[{name!r}][{i}]")
                for i, c in enumerate(cells if isinstance(cells, list) else ())
                if isinstance(c, dict)
            ]
    rows = [r for cells in newest.values() for r in cells]
    texts = ("backend", "case", "subject", "name", "type", "buffer", "finding", "detail", "saved")
    return _table(
        rows,
        runs.documents,
        {
            **{k: words(_text(r.value, k) for r in rows) for k in texts},
            "ne": words(_shape(r.value.get("ne")) for r in rows),
            **{k: numbers(_number(r.value, k) for r in rows) for k in ("uses", "taken", "ran")},
        },
    )


def units(rows: Sequence[Row[Fields]], documents: Sequence[Document]) -> JSON:
    """One row per unit, backend and run: of all runs, for a series is made of them.

    `low` and `high` are the rates between which the true median lies with 95 %, None under 6 rounds.
    """
    texts = ("unit", "model", "case", "backend", "verdict", "of", "reason")
    rates = [_rates(r.value) for r in rows]
    return _table(
        rows,
        documents,
        {
            **{k: words(_text(r.value, k) for r in rows) for k in texts},
            "timed": words("not timed" if r.value.get("rate") is None else "timed" for r in rows),
            **{k: numbers(_number(r.value, k) for r in rows) for k in ("work", "rounds", "rate")},
            "low": numbers(low for low, _ in rates),
            "high": numbers(high for _, high in rates),
            **{k: objects(r.value.get(k) for r in rows) for k in ("seconds", "counters", "memory")},
        },
    )


def _rates(unit: Fields) -> tuple[float | None, float | None]:
    if "low" in unit:  # a history keeps the interval
        return _number(unit, "low"), _number(unit, "high")
    short, long = interval(unit["seconds"])
    return unit["work"] / long if long else None, unit["work"] / short if short else None


def gates(runs: Runs) -> JSON:
    """One row per gate, unit and backend."""
    rows = [r.value for r in runs.gates]
    texts = ("gate", "kind", "unit", "backend", "against", "answer", "reason")
    amounts = ("limit", "estimate", "low", "high", "rounds", "detectable", "seconds")
    return _table(
        runs.gates,
        runs.documents,
        {
            **{k: words(_text(g, k) for g in rows) for k in texts},
            **{k: numbers(_number(g, k) for g in rows) for k in amounts},
        },
    )


def zoo(runs: Runs) -> JSON:
    """One row per architecture, device and run of llama.cpp."""
    rows = told.zoo(runs)
    texts = ("architecture", "backend", "run", "verdict", "detail")
    return _table(
        rows,
        runs.documents,
        {
            **{k: words(_text(r.value, k) or "" for r in rows) for k in texts},
            **{k: numbers(_number(r.value, k) for r in rows) for k in ("nmse", "batch", "nodes", "splits")},
        },
    )


def phases(runs: Runs) -> JSON:
    """One row per phase of a decoder on a backend; without a rate where it could not be had, and why."""
    rows = told.phases(runs)
    texts = ("backend", "model", "name", "reason")
    return _table(
        rows,
        runs.documents,
        {
            **{k: words(_text(r.value, k) for r in rows) for k in texts},
            "timed": words("timed" if _number(r.value, "tokens_per_second") else "not timed" for r in rows),
            **{k: numbers(_number(r.value, k) for r in rows)
               for k in ("tokens", "tokens_per_second", "seconds", "watts", "joules_per_token", "splits")},
            "shares": objects(v if isinstance(v := r.value.get("shares"), dict) else None for r in rows),
        },
    )  # fmt: skip


def _table(rows: Sequence[Row[T]], documents: Sequence[Document], columns: Mapping[str, JSON]) -> JSON:
    """`count`, `columns`, and per row the index of its document and its place there: `results` and 17."""
    index = {d.digest: i for i, d in enumerate(documents)}
    places = [_place(r.place) for r in rows]
    return {
        "count": len(rows),
        "columns": {
            **columns,
            "document": numbers(index[r.document.digest] for r in rows),
            "list": words(name for name, _ in places),
            "row": numbers(row for _, row in places),
        },
    }


def _place(place: str) -> tuple[str, int | None]:
    """`results[17]` taken apart; a place without a number, as a history has it, is a name only."""
    name, bracket, row = place.removesuffix("]").rpartition("[")
    return (name, int(row)) if bracket and row.isdecimal() else (place, None)


def _text(row: Fields, key: str) -> str | None:
    value = row.get(key)
    return None if value is None else str(value)


def _number(row: Fields, key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _shape(ne: JSON) -> str:
    return "×".join(map(str, ne)) if isinstance(ne, list) else ""
