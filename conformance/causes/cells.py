"""Group failing cells of `conform zoo`, which have no case to shrink.

Two cells have one cause if backend, verdict and innermost message are equal, without numbers, shapes and the functions
that passed the error on (`run.signature`). A zoo cell with the message of a cause of cases belongs to that cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.case.case import JSON
from conformance.judge.old import error_of
from conformance.run.signature import innermost
from conformance.suite.zoo.play import PASSES

from .cause import digest

WRONG = "FAIL"
"""Verdict of a zoo cell with wrong numbers; the location in its detail is not deterministic."""


@dataclass(frozen=True, slots=True)
class CellCause:
    """Cells of one backend that fail in the same way."""

    id: str
    backend: str
    verdict: str
    message: str
    cells: tuple[str, ...]
    """`ARCHITECTURE, RUN`."""

    @property
    def sentence(self) -> str:
        """A summary for people."""
        return f"{self.verdict}: {self.message} ({len(self.cells)} cells)"

    def to_json(self) -> dict[str, JSON]:
        """Return the JSON object for the run file."""
        return {
            "id": self.id, "backend": self.backend, "verdict": self.verdict, "message": self.message,
            "sentence": self.sentence, "cells": list(self.cells),
        }  # fmt: skip


def of_zoo(rows: Sequence[dict[str, JSON]]) -> list[CellCause]:
    """Return the causes of zoo cells, most cells first; sets `cause` of failing rows."""
    failing = [r for r in rows if r.get("verdict") not in PASSES]
    named = [f"{r.get('architecture')}, {r.get('run')}" for r in failing]
    causes, ids = _grouped([(str(r.get("backend")), str(r.get("verdict")), zoo_message(r)) for r in failing], named)
    for row, cause_id in zip(failing, ids, strict=True):
        row["cause"] = cause_id
    return causes


def zoo_message(row: Mapping[str, JSON]) -> str:
    """Return the text that identifies the failure of a zoo cell."""
    if row.get("verdict") != WRONG:
        return innermost(error_of(str(row.get("detail", ""))))
    since = "the first batch" if not row.get("batch") else "a later batch"
    return f"numbers are {'not finite' if row.get('nmse') == 'inf' else 'wrong'} from {since} on"


def _grouped(keys: Sequence[tuple[str, str, str]], named: Sequence[str]) -> tuple[list[CellCause], list[str]]:
    """Return the causes, and for each of `keys` the id of its cause."""
    counts = Counter(keys)
    ids = {key: f"{key[1]}-{digest(*key)}" for key in counts}
    causes = [
        CellCause(ids[key], *key, tuple(n for k, n in zip(keys, named, strict=True) if k == key))
        for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return causes, [ids[key] for key in keys]
