"""TOML from people: what is wrong with a file is one line that names it, the table and the key."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.ggml.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LONGEST = 200
"""Characters of a value in a message."""


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: {e.strerror if isinstance(e, OSError) else e}") from None


def parse(text: str, where: str) -> dict[str, Any]:
    """A TOML document.

    Raises:
        UsageError: it is none.
    """
    try:
        return tomllib.loads(text)
    except ValueError as e:
        raise UsageError(f"{where}: {e}") from None
    except RecursionError:
        raise UsageError(f"{where}: TOML expected, found tables or arrays nested deeper than can be read") from None


def expect(ok: bool, where: str, what: str, value: object) -> None:
    """Refuse `value`, which stands at `where` and should be `what`.

    Raises:
        UsageError: it is not.
    """
    if not ok:
        raise UsageError(f"{where}: {what} expected, {'nothing' if value is None else _short(value)} found")


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints; tables nested too deep
        text = f"another {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def only(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse keys that mean nothing.

    Raises:
        UsageError: names the first of them, and all that are known.
    """
    names = tuple(known)
    unknown = sorted(table.keys() - set(names))
    if unknown:
        raise UsageError(f"{where} {unknown[0]}: is unknown; known: {', '.join(names)}")
