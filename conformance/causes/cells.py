"""The causes of what has no case to shrink: cells of `conform zoo` and of `conform audit` that fail alike.

Two cells have one cause where the backend, the verdict and the innermost message are the same, without numbers, shapes
and who passed it on (`run.signature`). A zoo cell whose message is that of a cause of cases fails by that cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.case.case import JSON
from conformance.judge.old import error_of
from conformance.run.audit import FOUND, Cell
from conformance.run.signature import innermost
from conformance.suite.zoo.play import PASSES

from .cause import digest

WRONG = "FAIL"
"""The verdict of a zoo cell whose numbers are wrong: its detail says where, which goes by chance."""


@dataclass(frozen=True, slots=True)
class CellCause:
    """Cells of one backend that fail alike."""

    id: str
    backend: str
    verdict: str
    message: str
    cells: tuple[str, ...]
    """`ARCHITECTURE, RUN` of the zoo; `CASE: WEIGHT in BUFFER` of an audit."""

    @property
    def sentence(self) -> str:
        """For a person."""
        return f"{self.verdict}: {self.message} ({len(self.cells)} cells)"

    def to_json(self) -> dict[str, JSON]:
        """As the document has it."""
        return {
            "id": self.id, "backend": self.backend, "verdict": self.verdict, "message": self.message,
            "sentence": self.sentence, "cells": list(self.cells),
        }  # fmt: skip


def of_zoo(rows: Sequence[dict[str, JSON]]) -> list[CellCause]:
    """The causes of the zoo's cells, those of most cells first; each failing row gets the id of its own as `cause`."""
    failing = [r for r in rows if r.get("verdict") not in PASSES]
    named = [f"{r.get('architecture')}, {r.get('run')}" for r in failing]
    causes, ids = _grouped([(str(r.get("backend")), str(r.get("verdict")), zoo_message(r)) for r in failing], named)
    for row, cause_id in zip(failing, ids, strict=True):
        row["cause"] = cause_id
    return causes


def zoo_message(row: Mapping[str, JSON]) -> str:
    """What tells a zoo cell's failure from others."""
    if row.get("verdict") != WRONG:
        return innermost(error_of(str(row.get("detail", ""))))
    since = "the first batch" if not row.get("batch") else "a later batch"
    return f"numbers are {'not finite' if row.get('nmse') == 'inf' else 'wrong'} from {since} on"


def of_audit(backend: str, cells: Sequence[Cell]) -> list[CellCause]:
    """The causes of an audit's findings on `backend`, those of most cells first; each of these cells gets the id of its
    own.
    """
    found = [c for c in cells if c.finding in FOUND]
    named = [f"{c.case}: {c.name or 'the trajectory'} in {c.buffer}" for c in found]
    causes, ids = _grouped([(backend, str(c.finding), audit_message(c)) for c in found], named)
    for cell, cause_id in zip(found, ids, strict=True):
        cell.cause = cause_id
    return causes


def audit_message(cell: Cell) -> str:
    """What tells a cell's finding from others: with the type of a weight, or the op_param, which an audit varies."""
    what = {"weight": f"{cell.type} in {cell.buffer}", "op_param": cell.name}.get(cell.subject, "")
    return ": ".join(filter(None, (what, cell.fault or innermost(error_of(cell.detail)))))


def _grouped(keys: Sequence[tuple[str, str, str]], named: Sequence[str]) -> tuple[list[CellCause], list[str]]:
    """The causes, and of each of `keys` the id of its own."""
    counts = Counter(keys)
    ids = {key: f"{key[1]}-{digest(*key)}" for key in counts}
    causes = [
        CellCause(ids[key], *key, tuple(n for k, n in zip(keys, named, strict=True) if k == key))
        for key, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return causes, [ids[key] for key in keys]
