"""Counts results: support matrix, groups by reason, and llama.cpp's CSV of ops."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from conformance.ggml.text import printable
from conformance.judge.evidence import Fault
from conformance.judge.verdict import FAILURES, Golden, Result, Verdict

from .runs import Row

OPS = "ops"
"""The family whose cases are single ops (`suite/ops/`)."""
_OP_ID = re.compile(r"ops/(?P<op>[A-Z0-9_]+(?:\.[A-Z0-9_]+)?)-(?P<types>[A-Za-z0-9_+]*)(?:-(?P<params>.*))?@[0-9]+")

UNFINISHED = frozenset({Verdict.OVERCLAIM, Verdict.CRASH, Verdict.TIMEOUT})
"""Verdicts of a case that started but gave no answer; also if a waiver makes them XFAIL."""
PASSED = frozenset({Verdict.PASS, Verdict.XPASS})
ORDER: tuple[Verdict, ...] = (
    Verdict.FAIL, Verdict.CRASH, Verdict.TIMEOUT, Verdict.OVERCLAIM, Verdict.VACUOUS, Verdict.XPASS,
    Verdict.XFAIL, Verdict.UNSUPPORTED, Verdict.PASS,
)  # fmt: skip
"""Order of verdicts in reports, most urgent first."""
LONGEST = 300
"""Maximum characters of a reason."""
_READ = 4000
"""Maximum characters of a detail that are used for a reason; details may be long."""
CSV_COLUMNS = ("backend_name", "op_name", "op_params", "test_mode", "supported", "error_message", "backend_reg_name")
"""The columns of llama.cpp's docs/ops (`csv_printer` in tests/test-backend-ops.cpp)."""
_FORMULA = ("=", "+", "-", "@")
"""First characters of cells that spreadsheets evaluate, except escaped ones."""


@dataclass(frozen=True, slots=True, order=True)
class Operation:
    """The subject of a case: a row of the matrix."""

    family: str
    op: str = ""
    """ggml's name, with its sub-op after a dot (`UNARY.GELU`); empty for a case of several ops."""
    types: str = ""
    """The operands' types joined by `+`, as in the id."""
    params: str = field(default="", compare=False)
    """`key=value,key=value` from the id; belongs to the case, not to the row."""

    @property
    def name(self) -> str:
        """Name as in `ggml_op_desc` (`GELU`, `MUL_MAT`); the family for other cases."""
        return self.op.rpartition(".")[2] or self.family


def operation(case_id: str) -> Operation:
    """Return op and types of an id, even of unknown ops; only the family for other cases."""
    match = _OP_ID.fullmatch(case_id)
    if match is None:
        return Operation(case_id.partition("/")[0])
    return Operation(OPS, match["op"], match["types"], match["params"] or "")


def operation_of(result: Result) -> Operation:
    """Return the operation for which a result counts.

    A failure of a single op's case counts for the op of its first wrong node, with the types of the case. Without a
    known wrong node, and for other results, it is the op in the id, or the family.
    """
    tested = operation(result.case)
    wrong = result.wrong_op if result.verdict in FAILURES or result.verdict is Verdict.XFAIL else ""
    if tested.family != OPS or not wrong or wrong == tested.op.partition(".")[0]:
        return tested
    return Operation(OPS, wrong, tested.types)


def counts(result: Result) -> list[str]:
    """Return the counts of a cell that a result increases; the page's script adds them up."""
    verdict = result.verdict
    declared = verdict is not Verdict.UNSUPPORTED
    raises = {
        "declared": declared,  # the backend accepts it through supports_op
        "executed": declared and _finished(result),
        "passed": verdict in PASSED,
        "failed": verdict in FAILURES,  # that of a fresh case too
        "waived": verdict is Verdict.XFAIL,
    }
    return [name for name, raised in raises.items() if raised]


def _finished(result: Result) -> bool:
    waived = Verdict(result.waived) if result.waived else None
    return result.verdict not in UNFINISHED and not (result.verdict is Verdict.XFAIL and waived in UNFINISHED)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows, columns and cells; an operation without a cell on a backend did not run there."""

    rows: tuple[Operation, ...]
    """Single ops first, by name; then a row for each other family."""
    backends: tuple[str, ...]
    cells: Mapping[tuple[Operation, str], Counter[str]]
    """Sum of the `counts` of an operation's results on a backend."""


def matrix(results: Iterable[Row[Result]]) -> Matrix:
    """Return the matrix of `Runs.results`."""
    cells: dict[tuple[Operation, str], Counter[str]] = {}
    backends: dict[str, None] = {}
    for row in results:
        backends[row.value.backend] = None
        what = operation_of(row.value)
        cell = cells.setdefault((Operation(what.family, what.op, what.types), row.value.backend), Counter())
        cell.update(counts(row.value))
    rows = sorted({what for what, _ in cells}, key=lambda o: (o.family != OPS, o.family, o.name, o.op, o.types))
    return Matrix(tuple(rows), tuple(backends), cells)


@dataclass(frozen=True, slots=True)
class Group:
    """Results with one verdict and one reason."""

    verdict: Verdict
    reason: str
    rows: Sequence[Row[Result]]


def groups(rows: Iterable[Row[Result]]) -> list[Group]:
    """Group rows by verdict and reason: verdicts in `ORDER`, the largest groups of each first."""
    members: dict[tuple[Verdict, str], list[Row[Result]]] = {}
    for row in rows:
        members.setdefault((row.value.verdict, reason(row.value)), []).append(row)
    listed = [Group(verdict, why, of) for (verdict, why), of in members.items()]
    return sorted(listed, key=lambda g: (ORDER.index(g.verdict), -len(g.rows)))


def reason(result: Result) -> str:
    """Return the reason of a result without ids, nodes, shapes, steps and numbers.

    The line of a source file (`ops.cpp:3564`) and ggml's op name remain.
    """
    text = " ".join(_said(result)[:_READ].split())
    text = _word(result.backend).sub("…", text.replace(result.case or "\0", "…"))
    text = _BRACKETS.sub("[…]", text)
    text = _NUMBER.sub("#", _HEX.sub("#", _NODE.sub(r"\1_#", text)))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _said(result: Result) -> str:
    where, error = result.where, result.error
    if error is not None:
        died = f"its process died ({error.died})" if error.died else ""
        return ": ".join(filter(None, (died, error.words))) or error.message
    if where is not None:
        what = {Fault.STALE: "by stale state", Fault.EARLIER: "by stale state", Fault.GRAPH: "among others"}
        parts = (where.op, where.tensor.partition("[")[0], what.get(where.fault, ""))
        return f"{' '.join(filter(None, parts))} diverges"
    if result.golden is Golden.DIFFERS:
        return "the stored value differs"
    return _BARE.get(result.verdict, "")


_BARE = {Verdict.FAIL: "wrong numbers, not located", Verdict.XPASS: "it passes, and a waiver says that it fails"}


_BRACKETS = re.compile(r"\[[^\[\]]*\d[^\[\]]*\]")
_NODE = re.compile(r"\b(node|leaf)_\d+")
_HEX = re.compile(r"\b0x[0-9a-fA-F]+\b")
_NUMBER = re.compile(r"(?<![\w.:])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


@lru_cache(maxsize=256)
def _word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w/.?=-]){re.escape(text or chr(0))}(?![\w/.?=-])")


def csv_ops(results: Iterable[Row[Result]]) -> str:
    """Format results like `test-backend-ops support --output csv`, as in llama.cpp's docs/ops.

    llama.cpp's scripts/create_ops_docs.py makes ops.md from them, with a column per backend (its spec). llama.cpp has a
    file per backend: filter `results` for one. Cases of several ops are omitted.
    """
    lines: dict[tuple[str, ...], None] = {}
    for row in results:
        what = operation(row.value.case)
        if what.family != OPS or not what.op:
            continue
        yes = row.value.verdict is not Verdict.UNSUPPORTED  # what supports_op says, as upstream
        params = ",".join(p for p in (f"type={what.types}" if what.types else "", what.params) if p)
        backend = row.value.backend
        words = (backend, what.name, params, "support", "1" if yes else "0", "yes" if yes else "no", backend)
        lines[tuple(map(_csv_cell, words))] = None
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(lines)
    return out.getvalue()


def _csv_cell(text: str) -> str:
    """Return one line, with an apostrophe before text that a spreadsheet would evaluate."""
    text = printable(text)
    return f"'{text}" if text.startswith(_FORMULA) else text
