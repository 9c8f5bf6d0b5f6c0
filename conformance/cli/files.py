"""Files that the user names as cases, and what a file is that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.casefile import ARCHITECTURE
from conformance.ggml.errors import CaseFileError, UsageError

HEAD = 1 << 16
"""Bytes of a file that are looked at to say what it is."""
FIRST = 64
"""Keys of a GGUF file that are looked at, too."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a GGUF value -> its bytes."""
_TEXT = 8
T = TypeVar("T")

CasePath = click.Path(path_type=Path, exists=True)
"""What should be a case file: a folder is taken too, since one line can say more of it than a usage text."""


def read_cases(path: Path) -> list[Case]:
    """Every case of a file.

    Raises:
        CaseFileError: it is broken.
        UsageError: it is something else: says what, and what to do with that.
    """
    return _read(path, lambda: casefile.read(path))


def read_case(path: Path, case_id: str | None) -> Case:
    """The case of a file, or of a bundle the one called `case_id`.

    Raises:
        CaseFileError: it is broken, or holds no such case.
        UsageError: it is something else: says what, and what to do with that.
    """
    return _read(path, lambda: casefile.read_one(path, case_id))


def _read(path: Path, read: Callable[[], T]) -> T:
    if path.is_dir():
        held = sum(1 for _ in path.glob("*.gguf"))
        raise UsageError(f"{path}: a case file expected, this is a folder; it has {held} .gguf files: {path}/*.gguf")
    try:
        return read()
    except CaseFileError:
        if other := _what(path):
            raise UsageError(f"{path}: {other}") from None
        raise


def _what(path: Path) -> str:
    """What a file is that is no case; empty where it may be a broken one."""
    try:
        with path.open("rb") as f:
            head = f.read(HEAD)
    except OSError:
        return ""
    if head[:4] != b"GGUF":
        kind = "a text file" if head and _is_text(head) else "empty" if not head else "another kind of file"
        return f"this is {kind}, not a case: a .gguf that --save-failures or `conform capture` wrote is expected"
    keys = int.from_bytes(head[16:24], "little")
    architecture = _architecture(head)
    if architecture is None or architecture == ARCHITECTURE:
        return ""
    return (
        f"this is a model ({architecture}, {keys} keys), not a case: "
        f"`conform capture {path} -o case.gguf` makes one of it"
    )


def _is_text(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as e:
        return e.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head


def _architecture(head: bytes) -> str | None:
    """`general.architecture`, if it is among the first keys, which are walked no further than `head`."""
    at = 24
    for _ in range(FIRST):
        key, at = _text(head, at)
        kind, at = int.from_bytes(head[at : at + 4], "little"), at + 4
        if at > len(head):
            return None
        if kind == _TEXT:
            value, at = _text(head, at)
            if key == b"general.architecture":
                return "".join(c if c.isprintable() else "?" for c in value[:64].decode("ascii", "replace"))
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            return None
    return None


def _text(head: bytes, at: int) -> tuple[bytes, int]:
    end = at + 8 + int.from_bytes(head[at : at + 8], "little")
    return head[at + 8 : end], end
