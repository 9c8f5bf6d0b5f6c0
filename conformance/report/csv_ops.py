"""Results as `test-backend-ops support --output csv` prints them: llama.cpp's docs/ops/*.csv, from which its
scripts/create_ops_docs.py makes ops.md.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from conformance.ggml.text import printable
from conformance.judge.verdict import Result, Verdict

from .matrix import OPS, PASSED, operation
from .runs import Row

COLUMNS = ("backend_name", "op_name", "op_params", "test_mode", "supported", "error_message", "backend_reg_name")
"""As they stand in docs/ops, in their order (`csv_printer` in tests/test-backend-ops.cpp)."""

FORMULA = ("=", "+", "-", "@")
"""A cell that begins so is computed by spreadsheets; a tab or a carriage return in front is spelled out anyway."""


def csv_ops(results: Iterable[Row[Result]], *, passed: bool = False) -> str:
    """One row per single-op case, backend and answer. The script makes a column of each backend, by its spec; llama.cpp
    keeps a file per backend, so filter `results` for one.

    Args:
        results: `Runs.results`; cases that are no single op are left out.
        passed: count as supported only what ran and passed. Otherwise it is what the backend said through supports_op,
            right or wrong, as in the columns that are there.
    """
    made: dict[tuple[str, ...], None] = {}
    for row in results:
        what = operation(row.value.case)
        if what.family != OPS or not what.op:
            continue
        yes = row.value.verdict in PASSED if passed else row.value.verdict is not Verdict.UNSUPPORTED
        params = ",".join(p for p in (f"type={what.types}" if what.types else "", what.params) if p)
        backend = row.value.backend
        words = (backend, what.name, params, "support", "1" if yes else "0", "yes" if yes else "no", backend)
        made[tuple(map(_cell, words))] = None
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(made)
    return out.getvalue()


def _cell(text: str) -> str:
    """One line of text to a spreadsheet, too: an apostrophe before what it would take for a formula."""
    text = printable(text)
    return f"'{text}" if text.startswith(FORMULA) else text
