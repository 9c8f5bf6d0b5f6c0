"""Rows of JSON, one per line, that survive a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows; what a kill left of a last line is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def appending(path: Path) -> Iterator[Callable[[DataclassInstance], None]]:
    """Yield a function that appends a row, in the file when it returns."""
    with path.open("a", encoding="utf-8") as file:

        def add(row: DataclassInstance) -> None:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()

        yield add
