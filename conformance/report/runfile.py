"""Run files, the JSON of `--json`: written atomically, every field checked when read.

A file may come from another machine, a newer version or a stranger. An error names the file, the field, what was
expected and what was found.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

from conformance.builds.changes import Changes
from conformance.case import strict
from conformance.case.case import JSON
from conformance.case.leftover import write_whole
from conformance.case.strict import Memory, checked
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.judge.cause import Cause
from conformance.judge.evidence import Count
from conformance.judge.verdict import (
    FAILURES,
    Missing,
    MissingCause,
    Request,
    Result,
    Totals,
    grouped,
    readable_result,
    remaining,
)
from conformance.run.session.environment import MAX_BYTES, MAX_MEMORY, SCHEMA, WRITTEN, Environment, Time, header
from conformance.run.session.journal import BEGINS, Contents
from conformance.run.session.shard import LARGEST

KIND = "conformance"
"""Kind of a record."""

T = TypeVar("T")


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
    """Return a run's document: `header`, `asked`, `missing`, `results` and `totals`.

    `gating`: True if the run fails when no case passed on one of its backends.
    """
    begun = header(KIND)
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
    """Raise UsageError before the run if the path's folder does not exist or cannot be written."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--json {path}: a file in an existing, writable folder expected")


def write_json(path: Path, document: JSON) -> None:
    """Write `document` atomically; UsageError if the file cannot be written."""
    encoded = json.JSONEncoder(indent=1, allow_nan=False, default=str).iterencode(document)
    with interrupts_wait():
        write_text(path, chain(encoded, ["\n"]))


def write_text(path: Path, text: str | Iterable[str], option: str = "--json") -> None:
    """Write a file as `case.leftover.write_whole`; UsageError with `option` if that fails."""
    try:
        write_whole(path, text)
    except OSError as e:
        raise UsageError(f"{option} {path}: cannot be written: {e.strerror or e}") from e


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay SIGINT and SIGTERM inside the block until its end."""
    pending: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            before[number] = signal.signal(number, lambda n, _: pending.append(n))
    except ValueError:  # not the main thread, where no signal arrives
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in dict.fromkeys(pending):
        if before[number] is not signal.SIG_IGN:
            signal.raise_signal(number)


class ShardOf(Struct, frozen=True):
    """`Shard.to_json`."""

    whole: str
    index: Annotated[int, Meta(ge=1, le=LARGEST)]
    of: Annotated[int, Meta(ge=1, le=LARGEST)]

    def __post_init__(self) -> None:
        if self.index > self.of:
            raise ValueError(f"Expected `index` <= `of`, got {self.index} of {self.of}")


class Selection(Struct, frozen=True):
    """The selection of a run (`select.record_of`)."""

    levels: dict[str, str]
    families: list[str]
    cases: list[str]
    files: list[str]
    seed: Count | None
    shard: str


class Header(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of every record beside its rows."""

    schema: Literal[1]
    run: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    """Id of the run; two files with the same id are of the same run."""
    written: Time
    """Time in UTC, in a format that sorts as text."""
    environment: Environment
    totals: dict[str, JSON] | None = None
    waivers: list[str] | None = None
    """Sentences about waivers that need attention."""
    gating: bool | None = None
    """True if a backend without a PASS fails the run."""
    selection: Selection | None = None
    shard: ShardOf | None = None
    interrupted: bool | None = None
    """True if its run was killed, so that this comes from its journal."""

    def __post_init__(self) -> None:
        datetime.strptime(self.written, WRITTEN)  # noqa: DTZ007  # Z is part of the format


class Setup(Struct, frozen=True):
    """A device of a build in one setup, and the same of the build that it is compared with."""

    name: str
    backend: str
    against: str | None = None


class Named(Struct, frozen=True):
    """A build, as the user names it."""

    name: str
    ggml: str = ""
    number: str = ""
    released: str = ""


class Explained(Struct, frozen=True):
    """A cause of `conform build test`."""

    id: str
    state: str = ""
    note: str = ""
    """Why it is not called new or fixed, if that is not obvious."""
    at: str = ""
    """Possible location of the bug."""


class Builds(Struct, frozen=True):
    """The builds of `conform build test`."""

    build: Named
    against: Named | None = None
    devices: list[Setup] = []
    changes: Changes | None = None
    """Differences between the builds, with the cases that ran of them."""
    causes: list[Explained] = []


class Conformance(Header, frozen=True, kw_only=True, tag="conformance"):
    """Cases on backends."""

    results: list[Result]
    asked: dict[str, Count] = {}
    """Backend -> number of cases."""
    missing: list[Missing] = []
    causes: list[Cause] = []
    builds: Builds | None = None


Record = Conformance
"""One run, as `--json` writes it. Fields of newer versions are ignored."""


def _short(value: JSON) -> str:
    text = ascii(value) if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One run file."""

    path: Path
    record: Record
    body: Mapping[str, JSON]
    """The whole document, in the present format."""
    digest: str
    """Hash of the file's bytes; copies of a file count once."""

    @property
    def run(self) -> str:
        """Id of the run, 32 hex digits."""
        return self.record.run

    @property
    def written(self) -> str:
        """Time in UTC, like `2026-01-31T12:00:00Z`."""
        return self.record.written

    @property
    def environment(self) -> Environment:
        """Machine and software of the run."""
        return self.record.environment

    @property
    def machine(self) -> str:
        """Name of its kind of machine."""
        return self.record.environment.machine


def read_document(path: Path, *, named: bool = True) -> Document | None:
    """Read the run file at `path`; None for other JSON that the user did not name.

    Raises:
        UsageError: it cannot be read or a field is wrong; names the field, what was expected and what was found.
    """
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path}: a run file expected, cannot be read: {e.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path}: a run file of at most {MAX_BYTES} bytes expected, a larger one found")
    if not named and path.suffix == ".jsonl" and b"\n" not in raw:  # killed while it wrote its first line
        return None
    body = _parse(path, raw)
    if not named and not (isinstance(body, dict) and body.get("kind") == KIND):
        return None
    return _document(path, body, hashlib.sha256(raw).hexdigest())


def _parse(path: Path, raw: bytes) -> JSON:
    try:
        if raw.startswith(BEGINS):
            body = _body_so_far(raw)
        else:
            body = strict.parse_json(memoryview(raw), Memory(MAX_MEMORY, 0), "the file")
        strict.weigh(body, "the file")  # no deeper than any reader can follow
    except CaseFileError as e:
        raise UsageError(f"{path}: a run file (written with --json) expected: {e.message}") from None
    if b"\\ud" in raw.lower():
        _check_unicode(path, body, "")
    return body


def _check_unicode(path: Path, value: JSON, place: str) -> None:
    """Reject unpaired surrogates, which no file, page or database can contain."""
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
    if (schema := body.get("schema")) != SCHEMA:
        raise UsageError(f"{path}: schema: {SCHEMA} expected (newer versions write others), {_short(schema)} found")
    if (kind := body.get("kind")) != KIND:
        what = f"{KIND!r} expected, {_short(kind)} found; older versions wrote other kinds: repeat the run with --json"
        raise UsageError(f"{path}: kind: {what}")
    if isinstance(rows := body.get("results"), list):
        readable = [checked(path, f"results[{i}]", partial(readable_result, r)) for i, r in enumerate(rows)]
        body = {**body, "results": readable}
    found: Record = checked(path, "", partial(convert, body, Record))
    _check_causes(path, found, body.get("causes", ()))
    return Document(path, found, body, digest)


def _check_causes(path: Path, record: Conformance, rows: Sequence[Mapping[str, JSON]]) -> None:
    """Check the causes of a record.

    UsageError if two causes of one backend have the same id, if `smallest` is not the first case of its cause, or if
    the cause of a result is not in the file.
    """
    known: set[tuple[str, str]] = set()
    for i, (c, row) in enumerate(zip(record.causes, rows, strict=True)):
        if (c.id, c.backend) in known:
            raise UsageError(f"{path}: causes[{i}].id: a unique id within its backend expected, {_short(c.id)} found")
        if c.verdict not in FAILURES:
            raise UsageError(f"{path}: causes[{i}].verdict: the verdict of a failure expected, {c.verdict} found")
        if row.get("smallest") != c.smallest:
            what = f"the first of its cases expected, {_short(row.get('smallest'))} found"
            raise UsageError(f"{path}: causes[{i}].smallest: {what}")
        known.add((c.id, c.backend))
    for i, r in enumerate(record.results):
        if r.cause is not None and (r.cause, r.backend) not in known:
            raise UsageError(
                f"{path}: results[{i}].cause: null or the id of a cause of this file and backend expected, "
                f"{_short(r.cause)} found"
            )


CUT = "when the run was killed"
"""End of the reason why a case that had started has no result."""


def _body_so_far(raw: bytes) -> dict[str, JSON]:
    """Convert the journal of a run to the document that it would have written by now.

    Args:
        raw: the whole file; a last line without its newline is ignored.

    Raises:
        CaseFileError: it is damaged; names the line.
    """
    found = Contents.parse(raw)
    requested = _requested(found.head)
    asked = Counter[str]()
    for m in requested:
        asked[m.backend] += m.count
    rows = [row for _, row in found.results]
    done = [(r["backend"], r["case"]) for r in rows if _names_pair(r)]
    cut = [(it.backend, case) for it in found.innermost for case, _ in it.cases]
    among = "it was running" if len(cut) == 1 else f"{len(cut)} cases, this one among them, were running"
    missing = [*remaining(requested, [*done, *cut]), *grouped((*at, f"{among} {CUT}", MissingCause.LOST) for at in cut)]
    return {
        **{k: v for k, v in found.head.items() if k not in {"asked", "options", "seed"}},
        "kind": KIND,
        **({} if found.ended else {"interrupted": True}),
        "asked": dict(asked),
        "missing": [m.to_json() for m in missing],
        "results": rows,
    }


def _requested(head: Mapping[str, JSON]) -> list[Missing]:
    try:
        return convert(head["asked"], list[Missing])
    except (KeyError, ValidationError):
        raise CaseFileError("line 1", "the requested cases expected") from None


def _names_pair(row: dict[str, JSON]) -> bool:
    return isinstance(row.get("case"), str) and isinstance(row.get("backend"), str)
