"""Causes of cells: those that fail alike have one, and what fails otherwise has another."""

from __future__ import annotations

from typing import Any

from conformance.causes.cells import of_audit, of_zoo
from conformance.run.audit import Cell, Finding

RESHAPE = (
    "GGML OpenVINO backend ov::Exception: Exception from src/inference/src/cpp/infer_request.cpp:224: [CPU] Reshape "
    "node with name '{name}-{n} (view)#n{n}' Check 'minusOneCount <= 1' failed at src/plugins/cpu/reshape.cpp:{n}: "
    "the shape of input data (1.1.{n}.32) conflicts with the reshape pattern (1.4.16.8)"
)


def zoo(arch: str, verdict: str, detail: str = "", backend: str = "npu", **more: object) -> dict[str, Any]:
    """A row of `conform zoo --json`."""
    row = {"architecture": arch, "backend": backend, "run": "1", "verdict": verdict, "detail": detail}
    return {**row, "nmse": None, "batch": None, **more}


def test_cells_that_fail_alike_have_one_cause() -> None:
    """The same message of other layers, nodes and sizes is one cause; at another tensor, or on another backend, not."""
    rows = [
        zoo("llama", "ERROR", RESHAPE.format(name="Qcur", n=0)),
        zoo("qwen3", "ERROR", RESHAPE.format(name="Qcur", n=17)),
        zoo("arcee", "ERROR", RESHAPE.format(name="Kcur", n=1)),
        zoo("llama", "ERROR", RESHAPE.format(name="Qcur", n=0), backend="other"),
        zoo("phi3", "PASS"),
        zoo("falcon", "NO REFERENCE", "on the CPU: CRASH"),
    ]
    causes = of_zoo(rows)
    assert [c.cells for c in causes] == [("llama, 1", "qwen3, 1"), ("arcee, 1",), ("llama, 1",)]
    assert rows[0]["cause"] == rows[1]["cause"] == causes[0].id
    assert len({c.id for c in causes}) == 3
    assert all("cause" not in r for r in rows[4:])


def test_wrong_numbers_are_told_by_when_they_begin() -> None:
    """How wrong they are goes by the model; whether the first batch is wrong, or a value is not finite, does not."""
    rows = [
        zoo("a", "FAIL", "batch 0 of 5: NMSE 0.14", nmse=0.14, batch=0),
        zoo("b", "FAIL", "batch 0 of 5: NMSE 0.3", nmse=0.3, batch=0),
        zoo("c", "FAIL", "batch 2 of 5: NMSE 0.3", nmse=0.3, batch=2),
        zoo("d", "FAIL", "batch 2 of 5: NMSE inf", nmse="inf", batch=2),
    ]
    assert [len(c.cells) for c in of_zoo(rows)] == [2, 1, 1]


def audited(name: str, type_: str, finding: Finding, fault: str) -> Cell:
    """A cell of an audit."""
    return Cell("case", "weight", name, type_, [32, 32, 1, 1], "CPU", 2, 2, 2, finding, "step 0: x", fault=fault)


def test_an_audits_findings_have_causes_by_type() -> None:
    """Weights of one type that fail alike are one cause; what agreed has none."""
    cells = [
        audited("ffn_up", "q4_1", Finding.OVERCLAIM, "FAIL, MUL_MAT, node"),
        audited("ffn_gate", "q4_1", Finding.OVERCLAIM, "FAIL, MUL_MAT, node"),
        audited("attn_q", "q4_K", Finding.OVERCLAIM, "FAIL, MUL_MAT, node"),
        audited("attn_k", "q4_0", Finding.AGREED, ""),
    ]
    causes = of_audit("npu", cells)
    assert [len(c.cells) for c in causes] == [2, 1]
    assert cells[0].cause == cells[1].cause == causes[0].id != cells[2].cause == causes[1].id
    assert cells[3].cause == ""
    assert "q4_1 in CPU" in causes[0].message
