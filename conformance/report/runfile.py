"""One run file, read and checked: it may come from another machine or from a stranger.

Every field that anything reads is held against a rule, and the one error names the file, the field and what was found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.case import strict
from conformance.case.case import JSON
from conformance.case.strict import Memory
from conformance.ggml.errors import CaseFileError, UsageError

from .journal import partial_body
from .schema import BODY, ENVIRONMENT, HEADER, KINDS, LIST, OPTIONAL, OPTIONAL_LISTS, ROWS, check, shown

MAX_BYTES = 256 << 20
"""Of one file; 20,000 results with their witnesses take a tenth of it."""
MAX_MEMORY = 4 << 30
"""What reading one may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One run file."""

    path: Path
    kind: str
    run: str
    """32 hex digits: the same run in two files is one run."""
    written: str
    """UTC, like `2026-01-31T12:00:00Z`: sorts as text."""
    environment: Mapping[str, JSON]
    body: Mapping[str, JSON]
    """All of it."""
    digest: str
    """Of its bytes: two copies of a file are one document."""

    @property
    def machine(self) -> str:
        """A name of its kind of machine."""
        return str(self.environment["machine"])


def read_document(path: Path, *, named: bool = True) -> Document | None:
    """The run file at `path`; None where it is JSON of no kind of run and nobody `named` it.

    Raises:
        UsageError: it cannot be read or trusted; says which field is wrong, what was expected and what came.
    """
    raw = _bytes(path)
    body = _parse(path, raw)
    if not named and not (isinstance(body, dict) and body.get("kind") in KINDS):
        return None
    return _document(path, body, hashlib.sha256(raw).hexdigest())


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{path}: a run file expected, cannot be read: {e.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path}: a run file of at most {MAX_BYTES} bytes expected, a larger one found")
    return raw


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
    """Refuse half of a surrogate pair: no file, page or store could hold it."""
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
    check(path, "", body, HEADER)
    check(path, "", body, BODY)
    check(path, "environment", body["environment"], ENVIRONMENT)
    if body["kind"] == "conformance":
        check(path, "", body, OPTIONAL)
    for name, rules in ROWS.get(body["kind"], {}).items():
        if name in OPTIONAL_LISTS and name not in body:
            continue
        check(path, "", body, {name: LIST})
        for i, row in enumerate(body[name]):
            if not isinstance(row, dict):
                raise UsageError(f"{path}: {name}[{i}]: an object expected, {shown(row)} found")
            check(path, f"{name}[{i}]", row, rules)
    return Document(path, body["kind"], body["run"], body["written"], body["environment"], body, digest)
