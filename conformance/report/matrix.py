"""The support matrix, op × types × backend: what the backend declared, what ran, what passed, how old that is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from conformance.judge.verdict import FAILURES, Result, Verdict

from .runs import Row
from .schema import WRITTEN

OPS = "ops"
"""The family whose cases are single ops (`cases/ops/grammar.py`)."""
_OP_ID = re.compile(r"ops/(?P<op>[A-Z0-9_]+(?:\.[A-Z0-9_]+)?)-(?P<types>[A-Za-z0-9_+]*)(?:-(?P<params>.*))?@[0-9]+")

UNFINISHED = frozenset({Verdict.OVERCLAIM, Verdict.CRASH, Verdict.TIMEOUT})
"""Verdicts of what was begun and gave no answer; also those that a waiver made XFAIL."""
PASSED = frozenset({Verdict.PASS, Verdict.XPASS})


@dataclass(frozen=True, slots=True, order=True)
class Operation:
    """What a case is a case of: a row of the matrix."""

    family: str
    op: str = ""
    """ggml's name, with its sub-op after a dot (`UNARY.GELU`); empty for a case that is no single op."""
    types: str = ""
    """The operands' types joined by `+`, as in the id."""
    params: str = field(default="", compare=False)
    """`key=value,key=value` as in the id: of the case, not of the row."""

    @property
    def name(self) -> str:
        """As `ggml_op_desc` says it, and llama.cpp's ops.md: `GELU`, `MUL_MAT`; the family where it is no single op."""
        return self.op.rpartition(".")[2] or self.family


def operation(case_id: str) -> Operation:
    """Op and types from an id's text, whether or not this version knows the op; the family alone for other cases."""
    found = _OP_ID.fullmatch(case_id)
    if found is None:
        return Operation(case_id.partition("/")[0])
    return Operation(OPS, found["op"], found["types"], found["params"] or "")


@dataclass(slots=True)
class Cell:
    """What became of one operation's cases on one backend. Every count is a number of `rows`."""

    rows: list[Row[Result]] = field(default_factory=list)
    declared: int = 0
    """The backend said through supports_op that it takes them."""
    executed: int = 0
    """They ran to the end: `declared` less OVERCLAIM, CRASH and TIMEOUT."""
    passed: int = 0
    failed: int = 0
    """Verdicts that fail a run (`FAILURES`), those of fresh cases too."""
    waived: int = 0
    """XFAIL: they failed as a waiver says."""
    last: str | None = None
    """When the newest of those that ran was written; None where none ran."""

    @property
    def cases(self) -> int:
        """All of them, those included that the backend does not take."""
        return len(self.rows)

    def add(self, row: Row[Result]) -> None:
        """Count one result."""
        verdict = row.value.verdict
        self.rows.append(row)
        self.failed += verdict in FAILURES
        self.waived += verdict is Verdict.XFAIL
        self.passed += verdict in PASSED
        if verdict is Verdict.UNSUPPORTED:
            return
        self.declared += 1
        self.executed += _finished(row.value)
        self.last = max(self.last or "", row.document.written)


def _finished(result: Result) -> bool:
    waived = Verdict(result.waived) if result.waived else None
    return result.verdict not in UNFINISHED and not (result.verdict is Verdict.XFAIL and waived in UNFINISHED)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows, columns and cells. A row and a backend without a cell: no case of it was given to that backend: not run."""

    rows: tuple[Operation, ...]
    """Single ops first, by name; then a row for each other family."""
    backends: tuple[str, ...]
    cells: Mapping[tuple[Operation, str], Cell]


def matrix(results: Iterable[Row[Result]]) -> Matrix:
    """The matrix of results, as `Runs.results` has them."""
    cells: dict[tuple[Operation, str], Cell] = {}
    backends: dict[str, None] = {}
    for row in results:
        backends[row.value.backend] = None
        what = operation(row.value.case)
        cells.setdefault((Operation(what.family, what.op, what.types), row.value.backend), Cell()).add(row)
    rows = sorted({what for what, _ in cells}, key=lambda o: (o.family != OPS, o.family, o.name, o.op, o.types))
    return Matrix(tuple(rows), tuple(backends), cells)


def age(written: str, now: datetime) -> float:
    """Days from `written` (a document's) to `now` (aware); never below 0."""
    then = datetime.strptime(written, WRITTEN).replace(tzinfo=timezone.utc)
    return max(0.0, (now - then).total_seconds() / 86400)
