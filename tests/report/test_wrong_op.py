"""A failure counts for the op of its first wrong node, not for every op of its graph or the one that names the case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import conform
from planted_adapter import planted_adapter

from conformance.judge.evidence import Fault, Place
from conformance.judge.verdict import Result, Verdict
from conformance.report.matrix import Operation, operation_of

ADAPTER = """
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend
from conformance.ggml.tensor import is_transposed

def _cont(node, dst, src):
    dst[...] = src[0].reshape(dst.shape)
    if is_transposed(node.src[0]):
        dst += 1

def _add(node, dst, src):
    dst[...] = src[0] + src[1]

class Wrong(KernelBackend):
    def info(self):
        return DeviceInfo("wrong", "none", "adds 1 where it makes a transposed tensor contiguous")

    def kernels(self):
        return {"CONT": _cont, "ADD": _add}
"""


def test_a_wrong_cont_is_no_failure_of_transpose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of TRANSPOSE cases, of which those seen through CONT fail: CONT fails, TRANSPOSE has what passed."""
    (tmp_path / "lib").mkdir()
    with planted_adapter(tmp_path / "lib", monkeypatch, "wrong", ADAPTER, "Wrong"):
        ran = conform("run", "--backend", "wrong", "--case", "ops/TRANSPOSE-f32-a=9x*", "--level", "standard", "--json",
                      tmp_path / "run.json")  # fmt: skip
    results = json.loads((tmp_path / "run.json").read_text())["results"]
    failed = [r for r in results if r["verdict"] == "FAIL"]
    passed = [r for r in results if r["verdict"] == "PASS"]
    assert failed, ran.stdout + ran.stderr
    assert passed
    assert {r["where"]["op"] for r in failed} == {"CONT"}
    assert conform("report", tmp_path / "run.json", "-o", tmp_path / "out").returncode in {0, 1}
    lines = (tmp_path / "out" / "summary.md").read_text().splitlines()
    row = {op: next(line for line in lines if line.startswith(f"| {op} |")) for op in ("TRANSPOSE", "CONT")}
    assert f"{len(passed)} of {len(passed)}" in row["TRANSPOSE"]
    assert f"0 of {len(failed)}" in row["CONT"]


FIRST = Place(Fault.NODE, 0, 1, "CONT", "node_1")


@pytest.mark.parametrize(
    ("case", "where", "counts_for"),
    [
        ("ops/TRANSPOSE-f32-a=9x4@1", FIRST, ("ops", "CONT", "f32")),
        ("ops/TRANSPOSE-f32-a=9x4@1", replace(FIRST, fault=Fault.STALE), ("ops", "TRANSPOSE", "f32")),
        ("ops/TRANSPOSE-f32-a=9x4@1", replace(FIRST, fault=Fault.GRAPH), ("ops", "TRANSPOSE", "f32")),
        ("ops/TRANSPOSE-f32-a=9x4@1", None, ("ops", "TRANSPOSE", "f32")),
        ("ops/UNARY.GELU-f32-a=9@1", replace(FIRST, op="UNARY"), ("ops", "UNARY.GELU", "f32")),
        ("ops/PERMUTE-f16-a=9x4@1", Place(Fault.NODE, 0, op="ADD"), ("ops", "ADD", "f16")),
        ("ops/PERMUTE-f16-a=9x4@1", Place(Fault.UNLOCATED, 0), ("ops", "PERMUTE", "f16")),
        ("gqa/llama-heads=4@1", FIRST, ("gqa", "", "")),
    ],
)
def test_what_a_failure_counts_for(case: str, where: Place | None, counts_for: tuple[str, str, str]) -> None:
    """The first wrong node's op; the op in the id where no node is known to be wrong, and a family as ever."""
    for verdict in (Verdict.FAIL, Verdict.OVERCLAIM, Verdict.XFAIL):
        assert operation_of(Result(case, "mine", verdict, where=where)) == Operation(*counts_for)
    whole = ("ops", *case.split("/")[1].split("-")[:2]) if case.startswith("ops/") else counts_for
    assert operation_of(Result(case, "mine", Verdict.PASS)) == Operation(*whole)
