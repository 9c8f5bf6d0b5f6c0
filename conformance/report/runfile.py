"""Run files, the JSON that `--json` writes: written whole, and read with every field checked.

A file may come from another machine, from a newer version or from a stranger. What is wrong with it is one error that
names the file, the field, what was expected and what came.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from math import isfinite
from pathlib import Path

from conformance.case import strict
from conformance.case.case import JSON
from conformance.case.leftover import write_whole
from conformance.case.strict import Memory
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.judge.evidence import Fault
from conformance.judge.old import renewed
from conformance.judge.verdict import FAILURES, Golden, Missing, MissingCause, Request, Result, Totals, Verdict
from conformance.judge.wrong import is_wrong
from conformance.run.session.environment import SCHEMA, header
from conformance.run.session.shard import LARGEST

KINDS = ("conformance", "perf", "audit", "phases", "zoo")
JOURNAL = "journal"
"""Kind of the first line of a journal (`report.journal`), which holds one JSON document a line."""
JOURNAL_BEGINS = f'{{"schema": {SCHEMA}, "kind": "{JOURNAL}", '.encode()
KILLED = "the run ended before it"
WRITTEN = "%Y-%m-%dT%H:%M:%SZ"
MAX_BYTES = 256 << 20
"""Of one file; 20,000 results with their witnesses take a tenth of it."""
MAX_MEMORY = 4 << 30
"""Bytes that reading one file may take."""
_COUNT = 2**53
"""Beyond, JSON readers disagree on integers."""


def record(
    results: Sequence[Result],
    unavailable: dict[str, str] | None = None,
    waivers: Sequence[str] = (),
    *,
    asked: Request | None = None,
    missing: Sequence[Missing] = (),
    settings: JSON = None,
    gating: bool = False,
) -> dict[str, JSON]:
    """The document of a conformance run: `header`, `asked`, `missing`, `results` and `totals`.

    `gating`: whether the run fails where nothing passed on one of its backends.
    """
    begun = header("conformance")
    begun["environment"] |= {"unavailable": unavailable or {}, **({} if settings is None else {"settings": settings})}
    return {
        **begun,
        "asked": dict(Counter(r.backend for r in results)) if asked is None else asked.to_json(),
        "missing": [m.to_json() for m in missing],
        "results": [r.to_json() for r in results],
        "totals": Totals.of(results).to_json(),
        **({"waivers": list(waivers)} if waivers else {}),
        **({"gating": True} if gating else {}),
    }


def check_writable(path: Path) -> None:
    """Before the run starts: UsageError if the path's folder does not exist or takes no files."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--json {path}: a file in a folder that exists and can be written expected")


def write_json(path: Path, document: JSON) -> None:
    """Write `document` whole, which Ctrl-C waits for, or not at all: UsageError if the file cannot be written."""
    encoded = json.JSONEncoder(indent=1, allow_nan=False, default=str).iterencode(document)
    with interrupts_wait():
        write_text(path, chain(encoded, ["\n"]))


def write_text(path: Path, text: str | Iterable[str], option: str = "--json") -> None:
    """`case.leftover.write_whole`; UsageError, with the command-line `option`, if the file cannot be written."""
    try:
        write_whole(path, text)
    except OSError as e:
        raise UsageError(f"{option} {path}: cannot be written: {e.strerror or e}") from e


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold back SIGINT inside the block, and raise it at the end."""
    pending: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    except ValueError:  # not the main thread, where no signal arrives
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending and before is not signal.SIG_IGN:
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field may hold, in words and as a test."""

    what: str
    ok: Callable[[JSON], bool]
    required: bool = True

    def optional(self, *, required: bool = False) -> Rule:
        """The same, or null; or left out, unless `required`."""
        return Rule(f"{self.what} or null", lambda v: v is None or self.ok(v), required)


def _number(v: JSON) -> bool:
    if isinstance(v, int):
        return not isinstance(v, bool) and abs(v) < _COUNT
    return isinstance(v, float) and isfinite(v)


def _whole(v: JSON) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < _COUNT


def _countable(v: JSON) -> bool:
    if isinstance(v, dict):
        return all(map(_countable, v.values()))
    return v is None or isinstance(v, (str, bool)) or _number(v)


def one_of(*words: str) -> Rule:
    """One of these words."""
    return Rule(f"one of {', '.join(words)}", lambda v: isinstance(v, str) and v in words)


def _time(v: JSON) -> bool:
    try:
        return bool(datetime.strptime(v, WRITTEN))  # noqa: DTZ007  # Z is part of the format
    except (TypeError, ValueError):
        return False


def _list_of(what: str, ok: Callable[[JSON], bool]) -> Rule:
    return Rule(f"a list of {what}", lambda v: isinstance(v, list) and all(map(ok, v)))


def _object_of(what: str, ok: Callable[[JSON], bool]) -> Rule:
    return Rule(f"an object of {what}", lambda v: isinstance(v, dict) and all(map(ok, v.values())))


TEXT = Rule("text", lambda v: isinstance(v, str))
FLAG = Rule("true or false", lambda v: isinstance(v, bool))
NUMBER = Rule("a finite number", _number)
AMOUNT = Rule("a finite number from 0", lambda v: _number(v) and v >= 0)
COUNT = Rule("a whole number from 0", _whole)
OBJECT = Rule("an object", lambda v: isinstance(v, dict))
COUNTERS = _object_of("numbers", _countable)
LIST = Rule("a list", lambda v: isinstance(v, list))
TEXTS = _object_of("texts", TEXT.ok)
AMOUNTS = _list_of("finite numbers from 0", AMOUNT.ok)
MEMORY = _object_of("whole numbers or null", lambda v: v is None or _whole(v))
VERDICT = one_of(*map(str, Verdict))
FAILURE = one_of(*(str(v) for v in Verdict if v in FAILURES))


def _fields(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


HEADER: dict[str, Rule] = {
    "schema": Rule(f"{SCHEMA} (a newer version of this program wrote a newer one)", lambda v: v == SCHEMA),
    "kind": one_of(*KINDS),
    "run": Rule("32 hex digits", lambda v: isinstance(v, str) and bool(re.fullmatch("[0-9a-f]{32}", v, re.ASCII))),
    "written": Rule("a time like 2026-01-31T12:00:00Z", _time),
    "environment": OBJECT,
}


def _is_shard(v: JSON) -> bool:
    if not isinstance(v, dict) or not isinstance(v.get("whole"), str):
        return False
    index, of = v.get("index", 0), v.get("of", 0)
    return _whole(index) and _whole(of) and 1 <= index <= of <= LARGEST


BODY: dict[str, Rule] = {
    "totals": OBJECT.optional(),
    "waivers": _list_of("texts", TEXT.ok).optional(),
    "gating": FLAG.optional(),
    "selection": OBJECT.optional(),
    "shard": Rule(f"a shard: index, of (at most {LARGEST}) and whole", _is_shard).optional(),
}
"""What any document may hold beside its rows."""
ENVIRONMENT: dict[str, Rule] = {
    "machine": TEXT,
    **_fields(TEXT.optional(), "system", "cpu", "python", "commit", "branch", "ci"),
    "cores": COUNT.optional(),
    **_fields(OBJECT.optional(), "packages", "settings"),
    "unavailable": TEXTS.optional(),
}
RESULT: dict[str, Rule] = {
    **_fields(TEXT, "case", "backend", "detail"),
    "notes": replace(_list_of("texts", TEXT.ok), required=False),
    "verdict": VERDICT,
    **_fields(AMOUNT.optional(), "budget_used", "nmse", "nmse_exact"),
    "seconds": AMOUNT,
    "steps": COUNT,
    **_fields(OBJECT.optional(), "witness", "where", "error", "first_divergence", "place"),
    "wrong": Rule("an object of kind and nmse", is_wrong).optional(),
    "saved": TEXT.optional(),
    "fresh": FLAG,
    "waived": VERDICT.optional(),
    "cause": TEXT.optional(),
    "golden": one_of(*map(str, Golden)).optional(),
}
PLACE: dict[str, Rule] = {
    "fault": one_of(*map(str, Fault)),
    "step": COUNT.optional(),
    "node": COUNT.optional(),
    **_fields(replace(TEXT, required=False), "op", "name", "tensor"),
    **_fields(OBJECT.optional(), "numbers", "source", "target"),
    "steps": replace(COUNT, required=False),
}
NUMBERS: dict[str, Rule] = {
    "index": _list_of("whole numbers", _whole),
    **_fields(NUMBER.optional(), "expected", "found"),
    "nmse": AMOUNT.optional(),
    "budget": AMOUNT,
    "special": replace(COUNT, required=False),
    "card": replace(TEXT, required=False),
}
ENDPOINT: dict[str, Rule] = {"step": COUNT, "device": replace(TEXT, required=False), "split": COUNT.optional()}
ERROR: dict[str, Rule] = {"message": TEXT, **_fields(replace(TEXT, required=False), "words", "died", "side")}
NODE: dict[str, Rule] = {
    **_fields(replace(TEXT, required=False), "kind", "op", "name", "side"),
    "step": replace(COUNT, required=False),
    "node": COUNT.optional(),
    "alone": replace(FLAG, required=False),
    "index": _list_of("whole numbers", _whole).optional(),
    **_fields(NUMBER.optional(), "expected", "found"),
    **_fields(AMOUNT.optional(), "nmse", "budget"),
}
"""`first_divergence` and `place` of a result of an older record; other fields are kept as they are."""
CAUSE: dict[str, Rule] = {
    "id": Rule("a text that is not empty", lambda v: isinstance(v, str) and bool(v.strip())),
    **_fields(TEXT, "sentence", "backend", "op", "message", "smallest", "seen"),
    "verdict": FAILURE,
    "conditions": _list_of("pairs of texts", lambda v: _list_of("texts", TEXT.ok).ok(v) and len(v) == 2),
    "cases": Rule("a list of texts, one at least", lambda v: _list_of("texts", TEXT.ok).ok(v) and bool(v)),
    "rank": _object_of("whole numbers", _whole),
    "folder": TEXT.optional(required=True),
}
UNIT: dict[str, Rule] = {
    **_fields(TEXT, "unit", "model", "case", "backend", "of", "reason"),
    "verdict": VERDICT,
    "work": AMOUNT,
    "seconds": AMOUNTS,
    "rounds": COUNT,
    "rate": AMOUNT.optional(required=True),
    "counters": COUNTERS,
    "memory": MEMORY,
}
GATE: dict[str, Rule] = {
    **_fields(TEXT, "gate", "unit", "backend"),
    "kind": one_of("counter", "ratio", "absolute"),
    "answer": one_of("fine", "regressed", "undecided", "not run"),
    **_fields(TEXT.optional(), "against", "reason"),
    **_fields(NUMBER.optional(), "limit", "estimate", "low", "high", "detectable"),
    "rounds": COUNT.optional(),
    "seconds": AMOUNT.optional(),
}
MISSING: dict[str, Rule] = {
    **_fields(TEXT, "backend", "case", "reason"),
    "cause": one_of(*map(str, MissingCause)).optional(),
}
ROWS: dict[str, dict[str, dict[str, Rule]]] = {
    "conformance": {"results": RESULT, "missing": MISSING, "causes": CAUSE},
    "perf": {"units": UNIT, "gates": GATE},
}
"""Kind -> list in its document -> the fields of each row. Other fields are kept as they are."""
OPTIONAL_LISTS = frozenset({"gates", "missing", "causes"})
ASKED: dict[str, Rule] = {"asked": replace(_object_of("whole numbers", _whole), required=False)}
"""Of conformance runs: how many cases were requested of each backend."""


SELECTION: dict[str, Rule] = {
    "levels": TEXTS,
    **_fields(_list_of("texts", TEXT.ok), "families", "cases", "files"),
    "seed": COUNT.optional(required=True),
    "shard": TEXT,
}
"""Of conformance runs that say what was selected."""


def check(path: Path, place: str, fields: Mapping[str, JSON], rules: Mapping[str, Rule]) -> None:
    """UsageError if a field of an object breaks its rule: file, place and field, what was expected and what came."""
    for name, rule in rules.items():
        where = f"{path}: {place}{place and '.'}{name}"
        if name not in fields:
            if rule.required:
                raise UsageError(f"{where}: {rule.what} expected, the field is missing")
        elif not rule.ok(fields[name]):
            raise UsageError(f"{where}: {rule.what} expected, {_short(fields[name])} found")


def _short(value: JSON) -> str:
    text = ascii(value) if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_result(path: Path, place: str, row: Mapping[str, JSON]) -> None:
    """UsageError if a field of a result breaks its rule, or one of the node where it fails."""
    check(path, place, row, RESULT)
    for name in ("first_divergence", "place"):
        check(path, f"{place}.{name}", row.get(name) or {}, NODE)
    row = renewed(row)
    _check_part(path, f"{place}.error", row.get("error"), ERROR)
    if (where := row.get("where")) is not None:
        _check_part(path, f"{place}.where", where, PLACE)
        for name, rules in (("numbers", NUMBERS), ("source", ENDPOINT), ("target", ENDPOINT)):
            _check_part(path, f"{place}.where.{name}", where.get(name), rules)


def _check_part(path: Path, place: str, fields: Mapping[str, JSON] | None, rules: Mapping[str, Rule]) -> None:
    """UsageError if a field of evidence breaks its rule, or is none of those there are."""
    if fields is None:
        return
    check(path, place, fields, rules)
    if extra := [k for k in fields if k not in rules]:
        raise UsageError(f"{path}: {place}: the fields {', '.join(rules)} expected, {_short(extra[0])} found")


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One run file."""

    path: Path
    kind: str
    run: str
    """32 hex digits; two files with the same name hold the same run."""
    written: str
    """UTC, like `2026-01-31T12:00:00Z`: sorts as text."""
    environment: Mapping[str, JSON]
    body: Mapping[str, JSON]
    """The whole document."""
    digest: str
    """Of its bytes: two copies of a file are one document."""

    @property
    def machine(self) -> str:
        """A name of its kind of machine."""
        return str(self.environment["machine"])


def read_document(path: Path, *, named: bool = True) -> Document | None:
    """The run file at `path`; None for JSON of no kind of run that the user did not name.

    Raises:
        UsageError: it cannot be read or a field is wrong; names the field, what was expected and what came.
    """
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path}: a run file expected, cannot be read: {e.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path}: a run file of at most {MAX_BYTES} bytes expected, a larger one found")
    body = _parse(path, raw)
    if not named and not (isinstance(body, dict) and body.get("kind") in KINDS):
        return None
    return _document(path, body, hashlib.sha256(raw).hexdigest())


def _parse(path: Path, raw: bytes) -> JSON:
    try:
        body = partial_body(raw, Memory(MAX_MEMORY, 0))
        if body is None:
            body = strict.parse_json(memoryview(raw), Memory(MAX_MEMORY, 0), "the file")
        strict.weigh(body, "the file")  # no deeper than any reader can follow
    except CaseFileError as e:
        raise UsageError(f"{path}: a run file (written with --json) expected: {e}") from None
    if b"\\ud" in raw.lower():
        _check_unicode(path, body, "")
    return body


def _check_unicode(path: Path, value: JSON, place: str) -> None:
    """Refuse half of a surrogate pair: no file, page or store can hold it."""
    if isinstance(value, dict):
        for k, v in value.items():
            _check_unicode(path, k, f"a key of {place or 'the file'}")
            _check_unicode(path, v, f"{place}.{ascii(k)[1:-1]}".removeprefix("."))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            _check_unicode(path, v, f"{place}[{i}]")
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise UsageError(f"{path}: {place}: text expected, half of a surrogate pair found")


def _document(path: Path, body: JSON, digest: str) -> Document:
    if not isinstance(body, dict):
        raise UsageError(f"{path}: a run file (written with --json) expected, JSON of another kind found")
    check(path, "", body, {**HEADER, **BODY})
    check(path, "environment", body["environment"], ENVIRONMENT)
    if body["kind"] == "conformance":
        check(path, "", body, ASKED)
        check(path, "selection", body.get("selection") or {}, SELECTION if body.get("selection") else {})
    for name, rules in ROWS.get(body["kind"], {}).items():
        if name in OPTIONAL_LISTS and name not in body:
            continue
        check(path, "", body, {name: LIST})
        for i, row in enumerate(body[name]):
            if not isinstance(row, dict):
                raise UsageError(f"{path}: {name}[{i}]: an object expected, {_short(row)} found")
            if rules is RESULT:
                check_result(path, f"{name}[{i}]", row)
            else:
                check(path, f"{name}[{i}]", row, rules)
    if body["kind"] == "conformance":
        _check_causes(path, body)
    return Document(path, body["kind"], body["run"], body["written"], body["environment"], body, digest)


def _check_causes(path: Path, body: Mapping[str, JSON]) -> None:
    """Refuse two causes with one id on one backend, one whose smallest case is not the first of its cases, and a result
    with a cause that its file does not have.
    """
    known: set[tuple[str, str]] = set()
    for i, c in enumerate(body.get("causes", ())):
        if (c["id"], c["backend"]) in known:
            raise UsageError(
                f"{path}: causes[{i}].id: one that no other cause of its backend has expected, {_short(c['id'])} found"
            )
        if c["smallest"] != c["cases"][0]:
            what = f"the first of its cases expected, {_short(c['smallest'])} found"
            raise UsageError(f"{path}: causes[{i}].smallest: {what}")
        known.add((c["id"], c["backend"]))
    for i, r in enumerate(body["results"]):
        if r.get("cause") is not None and (r["cause"], r["backend"]) not in known:
            raise UsageError(
                f"{path}: results[{i}].cause: the id of a cause of this file and backend, or null expected, "
                f"{_short(r['cause'])} found"
            )


def partial_body(raw: bytes, memory: Memory) -> dict[str, JSON] | None:
    """The journal that a killed run left (`journal.Partial`), as the document that it would have written.

    Args:
        raw: the whole file; a last line without its newline is ignored.
        memory: what reading it may take.

    Returns:
        None where `raw` is no such journal.

    Raises:
        CaseFileError: it is damaged; names the line.
    """
    if not raw.startswith(JOURNAL_BEGINS):
        return None
    lines = raw.split(b"\n")[:-1]
    rows = [strict.parse_json(memoryview(line), memory, f"line {n}") for n, line in enumerate(lines, 1)]
    head = rows[0] if rows and isinstance(rows[0], dict) else {}
    asked = _requested_cases(head)
    results = [Result(r["case"], r["backend"], Verdict.PASS) for r in rows[1:] if _names_pair(r)]
    return {
        **{k: v for k, v in head.items() if k not in {"asked", "seed"}},
        "kind": "conformance",
        "asked": asked.to_json(),
        "missing": [m.to_json() for m in asked.missing(results, KILLED)],
        "results": rows[1:],
    }


def _requested_cases(head: Mapping[str, JSON]) -> Request:
    asked = head.get("asked")
    cases = asked.get("cases") if isinstance(asked, dict) else None
    if not isinstance(cases, dict) or not all(map(_list_of("texts", TEXT.ok).ok, cases.values())):
        raise CaseFileError(
            "line 1", "what a run with --json was asked for expected (a journal of --journal is for the same "
            "`conform run` again, which goes on from there and writes --json)"
        )  # fmt: skip
    return Request(cases)


def _names_pair(row: JSON) -> bool:
    return isinstance(row, dict) and isinstance(row.get("case"), str) and isinstance(row.get("backend"), str)
