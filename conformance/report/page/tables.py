"""Makes the tables of the page, column by column, from merged runs.

A column contains each string once, because most strings of 20,000 results are repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from msgspec import to_builtins

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.files import WHEEL
from conformance.judge.evidence import to_json
from conformance.judge.verdict import FAILURES, Missing, Result
from conformance.perf.units import FAMILY as PERF
from conformance.report.compare import LOST, Sides
from conformance.report.matrix import OPS, counts, operation, operation_of, reason
from conformance.report.runfile import Document, Explained
from conformance.report.runs import Fields, Row, Runs, command, pace
from conformance.report.trend import Change, Series, Trend

T = TypeVar("T")

COLUMNS: dict[str, tuple[str, str, str]] = {
    "results": (
        "case family op type backend verdict taken cause reason waived fresh golden detail saved command",
        "budget_used nmse nmse_exact seconds steps",
        "counts witness where error wrong notes",
    ),
    "causes": (
        "id state sentence backend verdict op message smallest seen folder command note at emulated",
        "architectures counted of failed passed first",
        "conditions cases history",
    ),
    "units": ("unit model case backend of", "rate low high rounds", ""),
}  # fmt: skip
"""Table -> its columns of strings, numbers and objects; missing fields are empty."""
TAKEN = ("refused", "begun, not finished", "finished")
"""Stages of a case on a backend: refused; accepted, no answer; answered."""
RANK = ("architectures", "counted", "of", "failed", "passed")
"""Fields of a cause's `rank`: architectures, failing cases, matching passes."""
LOST_COUNT = "lost"
"""The count that a pair without a result increases."""
NOTHING = -1
"""An index in `at` without a value."""
MEMORY = "memory"
"""The live family whose metrics are figures of a model."""
SUBJECTS = 3
"""Maximum number of builds and backends in the page's title."""
COUNTED = ("instructions", "cycles")
"""Metrics of a counted unit."""
_RESULT = ("case", "backend", "detail", "saved", "budget_used", "nmse", "nmse_exact", "seconds", "steps", "witness",
           "cause")  # fmt: skip


def tables(runs: Runs, timed: Sequence[Row[Fields]], documents: Sequence[Document], past: Trend) -> dict[str, JSON]:
    """Return all tables of the page; `past` has the history of the causes."""
    index = {d.digest: i for i, d in enumerate(documents)}
    rows: dict[str, Sequence[Row[Fields]]] = {
        "results": _results(runs),
        "causes": _causes(runs, index, past),
        "units": timed,
    }
    return {name: _table(name, own, index) for name, own in rows.items()}


def subject(case_id: str) -> tuple[str, str, str]:
    """Return family, op and types of a case, such as `ops`, `GLU.SWIGLU` and `f16`.

    A case of another family has the family's name as its op. Its type is the part of the id before the first `key=`:
    `llama` of `gqa/llama-heads=4@1`; it may be empty.
    """
    what = operation(case_id)
    if what.family == OPS and what.op:
        return OPS, what.op, what.types
    parts = case_id.partition("/")[2].partition("@")[0].split("-")
    first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    return what.family, what.family, "-".join(parts[:first])


def subject_of(result: Result) -> tuple[str, str, str]:
    """Return the `subject` of a result; a failing op's case counts for its wrong node."""
    what = operation_of(result)
    return (OPS, what.op, what.types) if what.family == OPS and what.op else subject(result.case)


def setups(runs: Runs) -> dict[str, tuple[str, str]]:
    """Return backend -> its build and device, for both builds of `conform build test`."""
    found: dict[str, tuple[str, str]] = {}
    for of in (d.record.builds for d in runs.documents):
        for t in of.devices if of else ():
            if of and of.against and t.against:
                found.setdefault(t.against, (of.against.name, t.name))
            if of:
                found[t.backend] = of.build.name, t.name
    return found


def bases(runs: Runs) -> dict[str, str]:
    """Return backend of a base -> the backend that is compared with it."""
    tested = {t.backend for t in runs.setups()}
    return {t.against: t.backend for t in runs.setups() if t.against and t.against not in tested}


def named(runs: Runs) -> str:
    """Return builds and devices for the page's title: `xllamacpp 2026.10.11549 on CPU`.

    A build that ran in several setups is named with its devices only.
    """
    known, old = setups(runs), bases(runs)
    newest = {r.value.backend: r.document for r in runs.missing}
    newest |= {r.value.backend: r.document for r in runs.results}
    devices: dict[str, dict[str, None]] = {}
    for backend, document in newest.items():
        if backend not in old:
            build, device = known.get(backend) or _named_by(backend, document)
            devices.setdefault(build, {})[device] = None
    shown = [f"{build} on {_devices(on)}" if any(on) else build for build, on in devices.items()]
    more = [f"{len(shown) - SUBJECTS} more"] if len(shown) > SUBJECTS else []
    against = dict.fromkeys(known[b][0] for b in old if b in known)
    return "; ".join([*shown[:SUBJECTS], *more]) + (f" against {', '.join(against)}" if against else "")


def _devices(setups: Iterable[str]) -> str:
    """Return the setup, or the devices of several setups."""
    listed = list(setups)
    return listed[0] if len(listed) == 1 else ", ".join(dict.fromkeys(s.partition(" ")[0] for s in listed))


def _named_by(backend: str, document: Document) -> tuple[str, str]:
    """Return build and device from ggml's options; other backends keep their name.

    Without `lib` the build is the installed wheel; of an absolute path the last two parts are shown.
    """
    try:
        spec = Spec.parse(backend)
    except UsageError:
        return backend, ""
    if spec.name != "ggml":
        return backend, ""
    options = dict(spec.options)
    version = (document.environment.packages or {}).get(WHEEL)
    lib = options.pop("lib", "")
    shown = "/".join(Path(lib).parts[-2:]) if lib.startswith("/") else lib
    build = shown or (f"{WHEEL} {version}" if version else backend)
    return build, " ".join([options.pop("device", "CPU"), *(f"{k}={v}" for k, v in options.items())])


def _fields(row: Row[Missing]) -> Row[Fields]:
    return Row(to_builtins(row.value), row.document, row.place)


def _with(row: Row[Fields], **more: JSON) -> Row[Fields]:
    return Row({**row.value, **more}, row.document, row.place)


def _results(runs: Runs) -> list[Row[Fields]]:
    """Return the newest row per case, backend and kind of machine, then missing pairs.

    Results of one cause are adjacent.
    """
    order: dict[tuple[str | None, str], int] = {(c.value.id, c.value.backend): k for k, c in enumerate(runs.causes)}

    def named(about: tuple[str, str, str]) -> Fields:
        return dict(zip(("family", "op", "type"), about, strict=True))

    rows: list[Row[Fields]] = [
        Row({**_result(r.value), **named(subject_of(r.value))}, r.document, r.place)
        for r in sorted(runs.results, key=lambda r: order.get((r.value.cause, r.value.backend), len(order)))
    ]
    for m in (_fields(m) for m in runs.missing if m.value.count == 1):
        why = m.value["reason"]
        lost = {"verdict": LOST, "cause": None, "taken": LOST, "counts": [LOST_COUNT], "detail": why, "reason": why}
        rows.append(_with(m, **named(subject(m.value["case"])), **lost))
    return rows


def _causes(runs: Runs, index: Mapping[str, int], past: Trend) -> list[Row[Fields]]:
    """Return one row per cause; `first` is the index of the first document that has it.

    `history` has each run that decided one of its cases, oldest first, with their numbers.
    """
    told = {(d.digest, e.id, e.state): e for d in runs.documents if d.record.builds for e in d.record.builds.causes}
    return [
        Row(
            {
                **c.value.to_json(),
                **{k: c.value.rank.get(k) for k in RANK},
                "first": index[d.digest],
                "command": command(proof.value),
                "emulated": c.value.emulated or None,
                "history": [_past(*run) for run in past.history(c.value)],
                **_explained(told.get((c.document.digest, c.value.id, c.value.state))),
            },
            c.document,
            c.place,
        )
        for c, d, proof in zip(runs.causes, runs.first_seen(), runs.proofs(), strict=True)
    ]


def _explained(e: Explained | None) -> dict[str, JSON]:
    return {"note": e.note or None, "at": e.at or None} if e else {}


def _past(d: Document, failed: int, passed: int) -> dict[str, JSON]:
    where = {k: getattr(d.environment, k) for k in ("commit", "branch", "ci")}
    return {"file": d.path.name, "run": d.run, "written": d.written, **where, "failed": failed, "passed": passed}


def _result(r: Result) -> dict[str, JSON]:
    raised = counts(r)
    return {
        **{k: getattr(r, k) for k in _RESULT},
        **{k: v and to_json(v) for k, v in (("where", r.where), ("error", r.error))},
        "notes": list(r.notes),
        "verdict": str(r.verdict),
        "waived": None if r.waived is None else str(r.waived),
        "fresh": "fresh" if r.fresh else None,
        "golden": None if r.golden is None else str(r.golden),
        "wrong": None if r.wrong is None else r.wrong.to_json(),
        "counts": raised,
        "taken": TAKEN[("declared" in raised) + ("executed" in raised)],
        "reason": reason(r) if r.verdict in FAILURES else None,
        "command": command(r) if r.verdict in FAILURES else None,
    }


def compared(pairs: Sequence[Sides]) -> JSON:
    """Return the table of a comparison: a row per pair. No row names a run: a pair has two."""
    columns: dict[str, list[str | None]] = {
        "state": [str(p.state) for p in pairs],
        "case": [p.case for p in pairs],
        "backend": [p.backend for p in pairs],
        "before": [p.before.verdict for p in pairs],
        "after": [p.after.verdict for p in pairs],
        "cause": [p.cause for p in pairs],
        "was": [p.before.cause for p in pairs],
        "detail": [p.after.detail or p.before.detail or None for p in pairs],
        "machine": [p.after.machine or p.before.machine for p in pairs],
    }
    about = [subject(p.case) for p in pairs]
    columns |= {name: [a[k] for a in about] for k, name in enumerate(("family", "op", "type"))}
    return {"count": len(pairs), "columns": {name: words(values) for name, values in columns.items()}}


def builds(runs: Runs) -> list[JSON]:
    """Return the builds of `conform build test`, from old to new.

    `figures` are rows of device, model or unit, metric, and value.
    """
    found = [(d.record.builds, d.written) for d in runs.documents if d.record.builds]
    newest = {of.build.name: (of, written) for of, written in found}  # documents are in order
    figures: dict[str, list[tuple[str, str, float]]] = {}
    for r in (r.value for r in runs.results):
        figures.setdefault(r.backend, []).extend(_figures(r))
    return [
        {
            **to_builtins(of.build),
            "devices": {t.name: t.backend for t in of.devices},
            "figures": [[t.name, *row] for t in of.devices for row in figures.get(t.backend, ())],
        }
        for of, written in sorted(newest.values(), key=lambda x: x[0].build.released or x[1])
    ]


def changed_code(runs: Runs) -> list[JSON]:
    """Return the changes of each `conform build test --against`, the newest first."""
    return [
        {
            "name": of.build.name,
            "against": of.against.name,
            "numbers": [of.build.number, of.against.number],
            **to_builtins(of.changes),
        }
        for of in (d.record.builds for d in reversed(runs.documents))
        if of is not None and of.against is not None and of.changes is not None
    ]


def _figures(r: Result) -> list[tuple[str, str, float]]:
    """Return model or unit, metric and value of a measurement."""
    family, _, name = subject(r.case)
    if family == PERF:
        return [(str(unit_named(r.case)["unit"]), k, v) for k, v in r.metrics.items() if k in COUNTED]
    return [(name, k, v) for k, v in r.metrics.items()] if family == MEMORY and ",of=" not in r.case else []


def units(documents: Sequence[Document]) -> list[Row[Fields]]:
    """Return one row per result with a rate, from every document; each is a point of a series."""
    return [
        Row({**unit_named(r.case), "case": r.case, "backend": r.backend, **asdict(p)}, d, f"results[{i}]")
        for d in documents
        for i, r in enumerate(d.record.results)
        if (p := pace(r)) is not None
    ]


def unit_named(case_id: str) -> dict[str, JSON]:
    """Return name and model of a unit, such as `decode@past=512` and `llama-l=2`."""
    name, _, model = case_id.partition("/")[2].rpartition("@")[0].rpartition("/")
    return {"unit": name or case_id, "model": model}


def _table(name: str, rows: Sequence[Row[Fields]], index: Mapping[str, int]) -> JSON:
    """Return `count`, `columns`, and per row the index of its document and its place there."""
    texts, amounts, others = (names.split() for names in COLUMNS[name])
    places = [_place(r.place) for r in rows]
    return {
        "count": len(rows),
        "columns": {
            **{k: words(_text(r.value, k) for r in rows) for k in texts},
            **{k: numbers(_number(r.value, k) for r in rows) for k in amounts},
            **{k: objects(_object(r.value, k) for r in rows) for k in others},
            "document": numbers(index[r.document.digest] for r in rows),
            "list": words(place for place, _ in places),
            "row": numbers(row for _, row in places),
        },
    }


def _place(place: str) -> tuple[str, int | None]:
    """Split `results[17]` into (`results`, 17); a trend's place is only a name."""
    name, bracket, row = place.removesuffix("]").rpartition("[")
    return (name, int(row)) if bracket and row.isdecimal() else (place, None)


def _text(row: Fields, key: str) -> str | None:
    value = row.get(key)
    return None if value is None else str(value)


def _number(row: Fields, key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _object(row: Fields, key: str) -> JSON:
    value = row.get(key)
    return value if isinstance(value, (dict, list)) else None


def words(values: Iterable[str | None]) -> dict[str, JSON]:
    """Return a column of texts: `{"words": [each once], "at": [index or NOTHING per row]}`."""
    known: dict[str, int] = {}
    at = [NOTHING if v is None else known.setdefault(v, len(known)) for v in values]
    return {"words": list(known), "at": at}


def numbers(values: Iterable[float | None]) -> dict[str, JSON]:
    """Return a column of numbers, unrounded: `{"numbers": [number or null per row]}`."""
    return {"numbers": list(values)}


def objects(values: Iterable[JSON]) -> dict[str, JSON]:
    """Return a column of JSON values: `{"objects": [each once], "at": [index or NOTHING]}`."""
    rows = list(values)
    unique: dict[str | None, JSON] = {}
    texts = [None if v is None else json.dumps(v, sort_keys=True) for v in rows]
    for text, v in zip(texts, rows, strict=True):
        unique.setdefault(text, v)
    column = words(texts)
    return {"objects": [unique[text] for text in column["words"]], "at": column["at"]}


def embedded(document: JSON) -> str:
    """Format JSON for a `<script>`: ASCII, without a `<` that could end it."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def trended(every: Sequence[Series]) -> list[Row[Fields]]:
    """Return a row per point: `unit`, `model`, `backend`, `of`, `rate`, `low`, `high`, `rounds`."""
    return [Row({**_named(s), **asdict(p.pace)}, p.document, "trend") for s in every for p in s.points]


def changed(found: Iterable[Change]) -> list[JSON]:
    """Return the changes of rates: series, first run of the new rate, rates before and after."""
    return [
        {
            **_named(c.series),
            "run": c.at.document.run,
            "written": c.at.document.written,
            "since": c.since.document.run,
            "before": c.before,
            "after": c.after,
            "change": c.after / c.before - 1,
            "p": c.p,
        }
        for c in found
    ]


def _named(one: Series) -> dict[str, JSON]:
    return {**unit_named(one.case), "case": one.case, "backend": one.backend, "machine": one.machine, "of": one.of}
