"""The tables of the page, column by column, from merged runs. Each row names its run and its place there.

A column holds each word once: most of what 20,000 results take in a page is words that come again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.perf.statistics import median_interval
from conformance.report.matrix import OPS, cause, counts, operation
from conformance.report.runfile import Document
from conformance.report.runs import Row, Runs

T = TypeVar("T")
Fields = Mapping[str, JSON]

TAKEN = ("refused", "begun, not finished", "finished")
"""What a backend did with a case: refused it; accepted it and gave no answer; answered, right or wrong."""
LOST = "missing"
"""In place of verdict and `taken`: the case was requested of the backend and has no result."""
LOST_COUNT = "lost"
"""The count that such a row raises; those of results are `report.matrix.counts`."""
NOTHING = -1
"""In `at`: no value."""


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


def _taken(names: Sequence[str]) -> str:
    return LOST if LOST_COUNT in names else TAKEN[("declared" in names) + ("executed" in names)]


def _lost(pair: Mapping[str, JSON]) -> Result:
    return Result(pair["case"], pair["backend"], Verdict.FAIL, detail=pair["reason"])


def results(runs: Runs) -> JSON:
    """One row per case, backend and kind of machine: the newest; then requested pairs without a result."""
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
    raised = [*map(counts, ran), *([LOST_COUNT] for _ in lost)]
    return _table(
        every,
        runs.documents,
        {
            **{k: words(map(get, rows)) for k, get in texts.items()},
            **{k: numbers([*map(get, ran), *none]) for k, get in amounts.items()},
            "verdict": words([*(str(r.verdict) for r in ran), *(LOST for _ in lost)]),
            "counts": objects(raised),
            "taken": words(_taken(names) for names in raised),
            "cause": words(
                [*(cause(r) if r.verdict in FAILURES else None for r in ran), *(r.value.detail for r in lost)]
            ),
            "witness": objects(r.witness for r in rows),
            "first_divergence": objects(r.first_divergence for r in rows),
        },
    )


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
    newest = {(d.machine, backend): (backend, findings) for d, backend, findings in runs.audits()}
    rows = [Row({**r.value, "backend": name}, r.document, r.place) for name, cells in newest.values() for r in cells]
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
    short, long = median_interval(unit["seconds"])
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
    rows = runs.zoo()
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
    rows = runs.phases()
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


def words(values: Iterable[str | None]) -> dict[str, JSON]:
    """A column of texts: `{"words": [each once, in order of appearance], "at": [index or NOTHING per row]}`."""
    known: dict[str, int] = {}
    at = [NOTHING if v is None else known.setdefault(v, len(known)) for v in values]
    return {"words": list(known), "at": at}


def numbers(values: Iterable[float | None]) -> dict[str, JSON]:
    """A column of numbers, exactly as they came: `{"numbers": [number or null per row]}`."""
    return {"numbers": list(values)}


def objects(values: Iterable[Mapping[str, JSON] | Sequence[JSON] | None]) -> dict[str, JSON]:
    """A column of JSON objects or lists: `{"objects": [each once], "at": [index or NOTHING per row]}`."""
    known: dict[str, int] = {}
    kept: list[JSON] = []
    at: list[int] = []
    for v in values:
        if v is None:
            at.append(NOTHING)
            continue
        text = json.dumps(v, sort_keys=True)
        if text not in known:
            known[text] = len(kept)
            kept.append(v)
        at.append(known[text])
    return {"objects": kept, "at": at}


def embedded(document: JSON) -> str:
    """JSON that can stand in a `<script type="application/json">`: ASCII, and without a `<` that could end it."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
