"""Reads case files and models for commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from conformance.case import casefile
from conformance.case.case import Case
from conformance.case.casefile import ARCHITECTURE
from conformance.ggml.errors import CaseFileError, UsageError
from conformance.ggml.text import shell
from conformance.run.session.settings import exists

HEAD = 1 << 16
"""Bytes of a file that are read to recognise its type."""
_ARCHITECTURE = re.compile(rb"\x14\0{7}general\.architecture\x08\0{3}(.)\0{7}", re.DOTALL)
"""GGUF key of the architecture, after its length in 8 bytes; 8 is the type of a string."""
T = TypeVar("T")


class _CasePath(click.Path):
    """A file that exists; the error for an id of the suite says how to run it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401  # as click has it
        if isinstance(value, str) and "/" in value and not os.path.lexists(value) and exists(value):
            again = shell(["conform", "run", "--backend", "NAME", "--case", value])
            self.fail(f"a file expected, this is the id of a case: `{again}` runs it", param, ctx)
        return super().convert(value, param, ctx)


CasePath = _CasePath(path_type=Path, exists=True)
"""A case file; folders are accepted, since `read_cases` has a better message for them."""


def read_cases(path: Path) -> list[Case]:
    """Read every case of a file; CaseFileError if it is broken, UsageError for other files."""
    return read_with(path, lambda: casefile.read(path))


def read_with(path: Path, read: Callable[[], T]) -> T:
    """Return the result of `read` for a case file; errors as `read_cases`."""
    if path.is_dir():
        raise UsageError(f"{path}: a case file expected, this is a folder{_files_in(path)}")
    try:
        return read()
    except CaseFileError:
        if other := _other(path):
            raise UsageError(f"{path}: {other}") from None
        raise


def _files_in(folder: Path) -> str:
    return f"; name a file in it: {folder}/*.gguf" if any(folder.glob("*.gguf")) else " without .gguf files"


def _other(path: Path) -> str:
    """Describe a file that is not a case; empty if it may be a broken case."""
    try:
        with path.open("rb") as f:
            head = f.read(HEAD)
    except OSError:
        return ""
    if head[:4] != b"GGUF":
        return f"this is {_kind(head)}, not a case: a .gguf that --save-failures or `conform capture` wrote is expected"
    name = _architecture(head) or ARCHITECTURE
    if name == ARCHITECTURE:
        return ""
    keys = int.from_bytes(head[16:24], "little")
    return (
        f"this is a model ({name}, {keys} keys), not a case: `conform check-model {path} --backend NAME` judges a "
        f"backend on it, `conform perf run --model {path}` times it, and `conform capture {path} -o case.gguf` makes a "
        "case of it"
    )


def architecture_of(model: Path) -> str:
    """Return the architecture of a model file, "" if its first bytes do not have it.

    UsageError for another kind of file; the message names the kind and the command for it.
    """
    if model.is_dir():
        raise UsageError(f"{model}: a model file expected, this is a folder{_files_in(model)}")
    if not model.exists():
        raise UsageError(f"{model}: there is no such file; a model in GGUF expected")
    with model.open("rb") as f:
        head = f.read(HEAD)
    if head[:4] != b"GGUF":
        raise UsageError(
            f"{model}: this is {_kind(head)}, not a model in GGUF: llama.cpp's convert_hf_to_gguf.py makes one, and "
            "`conform capture llama --model -o tiny.gguf` a tiny one"
        )
    name = _architecture(head)
    if name == ARCHITECTURE:
        raise UsageError(f"{model}: this is a case, not a model: conform run {model} --backend NAME")
    return name


def _architecture(head: bytes) -> str:
    """Return `general.architecture` from the first bytes of a GGUF file; "" if it is missing."""
    key = _ARCHITECTURE.search(head)
    return head[key.end() : key.end() + key[1][0]].decode("ascii", "replace") if key else ""


def _kind(head: bytes) -> str:
    return "a text file" if head and _is_text(head) else "empty" if not head else "another kind of file"


def _is_text(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as e:
        return e.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head
