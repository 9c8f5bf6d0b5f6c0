"""Parse untrusted JSON within a memory limit, and users' TOML with one-line errors."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from msgspec import ValidationError

from conformance.ggml.errors import CaseFileError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

JSON = Any
"""JSON values: str, int, float, bool, None, lists and string-keyed dicts of them."""

MAX_DEPTH = 64
"""Maximum nesting of lists and objects; a case needs six, a recorder's note may need more."""
MAX_TEXT = 64 << 20
"""Maximum bytes of a user's text file; the largest, the cases of a baseline, takes a few."""
LONGEST = 200
"""Maximum characters of a value in a message."""


@dataclass(slots=True)
class Memory:
    """Memory limit for reading one file, charged before each allocation at CPython's cost."""

    limit: int
    taken: int

    def check(self, more: int, field: str) -> None:
        """Raise CaseFileError if `more` bytes would exceed the limit."""
        if self.taken + more > self.limit:
            raise CaseFileError(
                field, f"reading it would take over {self.limit} bytes of memory, the limit for a file of this size"
            )

    def keep(self, more: int, field: str) -> None:
        """Charge `more` bytes for as long as the file's content is in use."""
        self.check(more, field)
        self.taken += more


def parse_json(raw: memoryview, memory: Memory, field: str) -> JSON:
    """Parse JSON in UTF-8 without NaN, infinite numbers or duplicate keys; else CaseFileError."""
    memory.check(5 * len(raw), field)
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as e:
        raise CaseFileError(field, f"JSON in UTF-8 expected, other bytes found at byte {e.start}") from None
    memory.check(_cost(text), field)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except CaseFileError as e:
        raise CaseFileError(field, e.message) from None
    except json.JSONDecodeError as e:
        raise CaseFileError(field, f"invalid JSON at character {e.pos}: {e.msg}") from None
    except RecursionError:
        raise CaseFileError(field, f"lists and objects nested deeper than {MAX_DEPTH}") from None
    except ValueError as e:  # an integer of thousands of digits
        raise CaseFileError(field, f"invalid JSON: {e}") from None


def weigh(value: JSON, field: str) -> int:
    """Estimate the memory of parsed JSON in bytes; CaseFileError if deeper than `MAX_DEPTH`."""
    total = 0
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[JSON] = []
        for v in level:
            if isinstance(v, dict):
                total += 64 + 160 * len(v) + sum(map(len, v))
                below.extend(v.values())
            elif isinstance(v, list):
                total += 88 + 8 * len(v)
                below.extend(v)
            else:
                total += 64 + len(v) if isinstance(v, str) else 32
        if not below:
            return total
        level = below
    raise CaseFileError(field, f"lists and objects nested deeper than {MAX_DEPTH}")


def _cost(text: str) -> int:
    """Return an upper bound of the memory that parsing takes, including the text."""
    lists, objects, entries = text.count("["), text.count("{"), text.count(":")
    values = text.count(",") + lists + objects
    texts = max(0, text.count('"') // 2 - entries)
    width = 1 if text.isascii() and "\\u" not in text else 4  # one astral character makes a str four bytes wide
    return (1 + width) * len(text) + 88 * lists + 240 * objects + 160 * entries + 40 * values + 64 * texts


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CaseFileError("", f"key {key[:40]!a} occurs twice in an object")
            seen.add(key)
    return out


def _constant(name: str) -> NoReturn:
    raise CaseFileError("", f"a finite number expected, {name} found")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CaseFileError("", f"a number that float64 can hold expected, {text[:40]} found")
    return value


def shown(value: JSON) -> str:
    """Format an untrusted value for a message: short, on one line, printable."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return ascii(value[:40]) + ("…" if len(value) > 40 else "")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return repr(value)


def read_text(path: Path) -> str:
    """Read a regular file of at most `MAX_TEXT` bytes as UTF-8; UsageError if it cannot be read."""
    try:
        return read_bytes(path, MAX_TEXT).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except ValueError as e:
        raise UsageError(f"{path}: {e}") from None


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes, a multiple of 1 MiB; UsageError on failure.

    Settings of a stranger may name any path: a device never ends, and a pipe waits for its writer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UsageError(f"{path}: a regular file expected")
        with os.fdopen(descriptor, "rb") as f:
            raw = f.read(most + 1)
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: {e.strerror if isinstance(e, OSError) else e}") from None
    if len(raw) > most:
        raise UsageError(f"{path}: a file of at most {most >> 20} MiB expected")
    return raw


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML document; UsageError if it is malformed."""
    try:
        return tomllib.loads(text)
    except ValueError as e:
        raise UsageError(f"{where}: TOML expected: {e}") from None
    except RecursionError:
        raise UsageError(f"{where}: TOML expected, found tables or arrays nested deeper than can be read") from None


def expect(ok: bool, where: str, what: str, value: object) -> None:
    """Raise UsageError unless `ok`: `value`, at `where`, should be `what`."""
    if not ok:
        raise UsageError(f"{where}: {what} expected, {'nothing' if value is None else _short(value)} found")


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints; tables nested too deep
        text = f"another {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def only(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise UsageError for the first key of `table` that is not `known`."""
    names = tuple(known)
    unknown = sorted(table.keys() - set(names))
    if unknown:
        raise UsageError(f"{where} {unknown[0]}: is unknown; known: {', '.join(names)}")


def checked(path: Path, place: str, read: Callable[[], T]) -> T:
    """Return the result of `read` for the value at `place` of a file.

    Raises:
        UsageError: a field is wrong; names file and field, what was expected and what was found.
    """
    try:
        return read()
    except (ValidationError, OverflowError) as e:
        what, _, at = str(e).partition(" - at `$")
        where = f"{place}{at.removesuffix('`')}".lstrip(".")
        raise UsageError(f"{path}: {where}{where and ': '}{what}") from None
