"""The CSV that llama.cpp's scripts/create_ops_docs.py reads."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from run_files import document, result, written_to

from conformance.report.matrix import CSV_COLUMNS, csv_ops
from conformance.report.runs import Row, Runs, read_runs

HEAD = '"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name"'
"""The first line of every file in llama.cpp's docs/ops."""


def _runs(tmp_path: Path, *rows: tuple[str, str, str]) -> Runs:
    return read_runs([written_to(tmp_path / "a.json", document(rows))])


def _column(text: str) -> dict[str, str]:
    """Op -> its cell, by create_ops_docs.py's rules: all rows yes is full, some is partial, none is not supported."""
    support: dict[str, list[bool]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        if row["test_mode"] == "support" and row["op_name"]:
            support.setdefault(row["op_name"], []).append(row["error_message"].lower() == "yes")
    return {op: "full" if all(said) else "partial" if any(said) else "none" for op, said in support.items()}


def test_format(tmp_path: Path) -> None:
    """Header, quotes and line ends are those of docs/ops, and an op is named as there."""
    text = csv_ops(
        _runs(tmp_path, ("ops/UNARY.GELU-f16-ne=32x4,x=1@3", "x", "PASS"), ("gqa/llama@1", "x", "PASS")).results
    )
    assert text == f'{HEAD}\n"x","GELU","type=f16,ne=32x4,x=1","support","1","yes","x"\n'
    assert ",".join(f'"{c}"' for c in CSV_COLUMNS) == HEAD


def test_supported_is_what_the_backend_said(tmp_path: Path) -> None:
    """As in the columns that are there: supports_op's answer, right or wrong."""
    verdicts = {"ADD": ("PASS", "PASS"), "MUL": ("PASS", "UNSUPPORTED"), "SUB": ("UNSUPPORTED", "UNSUPPORTED"),
                "DIV": ("PASS", "FAIL"), "SQR": ("OVERCLAIM", "CRASH"), "SIN": ("XFAIL:FAIL", "XPASS")}  # fmt: skip
    rows = [(f"ops/{op}-f32-ne={i}@1", "x", v) for op, two in verdicts.items() for i, v in enumerate(two)]
    found = _runs(tmp_path, *rows).results
    said = {"ADD": "full", "MUL": "partial", "SUB": "none", "DIV": "full", "SQR": "full", "SIN": "full"}
    assert _column(csv_ops(found)) == said


def test_two_machines_one_row(tmp_path: Path) -> None:
    """What two machines say alike stands once; where they differ, both stand, and the op is partial."""
    a = written_to(tmp_path / "a.json", document([("ops/ADD-f32-a=1@1", "x", "PASS")], machine="a"))
    b = written_to(tmp_path / "b.json", document([("ops/ADD-f32-a=1@1", "x", "FAIL")], machine="b"))
    results: tuple[Row[object], ...] = read_runs([a, b]).results  # type: ignore[assignment]  # rows of results
    assert len(csv_ops(results).splitlines()) == 2  # type: ignore[arg-type]  # as above
    c = written_to(tmp_path / "c.json", document([("ops/ADD-f32-a=1@1", "x", "UNSUPPORTED")], machine="c"))
    assert _column(csv_ops(read_runs([a, c]).results)) == {"ADD": "partial"}


@pytest.mark.parametrize("backend", ['a"b', "a,b", "ggml?lib=/x,y"])
def test_names_are_quoted(tmp_path: Path, backend: str) -> None:
    """A name comes back whole from a CSV reader."""
    path = written_to(tmp_path / "a.json", document([result("ops/ADD-f32-a=1@1", backend, "PASS")]))
    (row,) = csv.DictReader(io.StringIO(csv_ops(read_runs([path]).results)))
    assert row["backend_name"] == row["backend_reg_name"] == backend
