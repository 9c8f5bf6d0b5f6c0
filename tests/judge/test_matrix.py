"""The support matrix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from run_files import document, written_to

from conformance.report.matrix import Operation, matrix, operation
from conformance.report.runs import read_runs
from conformance.suite import FAMILIES
from conformance.suite.ops import KNOWN
from conformance.suite.ops.bench import parse


def test_operation_of_every_op_case_is_what_the_family_reads() -> None:
    """Op and types taken from an id's text are those that the family's own parser finds, for each listed case."""
    for case_id in FAMILIES["ops"].ids("full"):
        read = parse(case_id, KNOWN)
        what = operation(case_id)
        assert (what.op, what.types) == (read.op, "+".join(t.name for t in read.types)), case_id
        assert what.params == ",".join(f"{k}={v}" for k, v in read.given.items()), case_id


def test_operation_of_other_families_is_the_family() -> None:
    """A case that is no single op has a row by its family."""
    for family in FAMILIES.values():
        for case_id in family.ids("smoke")[:20]:
            assert operation(case_id).family == family.name
            assert bool(operation(case_id).op) == (family.name == "ops")


@given(st.text())
def test_operation_takes_any_text(text: str) -> None:
    """An id from a stranger's file is no error."""
    assert isinstance(operation(text).name, str)


def test_name_is_that_of_ops_md() -> None:
    """llama.cpp's table names a unary op by its sub-op."""
    assert operation("ops/UNARY.GELU-f32-ne=3@1").name == "GELU"
    assert operation("ops/MUL_MAT-q4_0+f32-m=3@1").name == "MUL_MAT"


def test_counts(tmp_path: Path) -> None:
    """Declared, executed and passed are three counts: an overclaim is declared only, a waived crash too."""
    verdicts = ["PASS", "FAIL", "UNSUPPORTED", "OVERCLAIM", "CRASH", "TIMEOUT", "VACUOUS", "XPASS"]
    rows = [(f"ops/ADD-f32+f32-a=3x{i}@1", "x", v) for i, v in enumerate(verdicts)]
    rows += [("ops/ADD-f32+f32-a=9@1", "x", "XFAIL:CRASH"), ("ops/ADD-f32+f32-a=8@1", "x", "XFAIL:FAIL")]
    rows += [("ops/ADD-f16+f32-a=9@1", "y", "UNSUPPORTED"), ("gqa/llama@1", "y", "PASS")]
    m = matrix(read_runs([written_to(tmp_path / "a.json", document(rows))]).results)
    add = m.cells[Operation("ops", "ADD", "f32+f32"), "x"]
    assert add == Counter(declared=9, executed=5, passed=2, failed=6, waived=2)
    assert [(o.name, o.types) for o in m.rows] == [("ADD", "f16+f32"), ("ADD", "f32+f32"), ("gqa", "")]
    assert m.backends == ("x", "y")
    no = m.cells[Operation("ops", "ADD", "f16+f32"), "y"]
    assert no == Counter()
    assert (Operation("ops", "ADD", "f32+f32"), "y") not in m.cells
