"""Records of earlier versions, whose measurements, audits and runs of llama.cpp were kinds of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_files import head, written_to

from conformance.ggml.errors import UsageError
from conformance.report.runs import pace, read_runs

UNIT = {"unit": "decode@past=0", "model": "m", "case": "c@1", "backend": "x", "verdict": "PASS", "work": 64,
        "of": "tokens", "seconds": [1.0, 2.0, 4.0, 1.6, 1.9, 2.1, 2.2], "rounds": 7, "rate": 32.0,
        "counters": {"compiles": 2, "kernels": {"RMS": 3}}, "memory": {"weights": 1000, "peak": None},
        "reason": ""}  # fmt: skip
GATE = {"gate": "g", "kind": "ratio", "unit": "u", "backend": "x", "answer": "fine", "reason": "why", "limit": 0.7}
OLD: list[tuple[dict[str, Any], list[str]]] = [
    (
        {**head("perf"), "units": [UNIT, {**UNIT, "unit": "load", "verdict": "FAIL", "seconds": [], "rate": None}],
         "gates": [{**GATE, "gate": a, "answer": a} for a in ("fine", "regressed", "undecided", "not run")]},
        ["PASS perf/decode@past=0/m@1", "FAIL perf/load/m@1", "PASS gate/fine", "FAIL gate/regressed",
         "UNSUPPORTED gate/not run", "missing gate/undecided"],
    ),
    (
        {**head("audit"), "backends": {"x": [
            {"case": "c@1", "finding": f, "name": "w", "buffer": "CPU", "detail": "d"}
            for f in ("agreed", "UNSOUND", "OVERCLAIM", "XPASS")
        ]}},
        [f"{v} audit/c,1/w/CPU@1" for v in ("PASS", "FAIL", "OVERCLAIM", "XPASS")],
    ),
    (
        {**head("zoo"), "results": [
            {"architecture": "bert", "backend": "x", "run": "2 streams", "verdict": v, "detail": "d", "nmse": 0.1}
            for v in ("PASS", "CRASH", "NO REFERENCE", "ERROR")
        ]},
        [f"{v} arch/bert-2-streams@1" for v in ("PASS", "CRASH", "UNSUPPORTED", "FAIL")],
    ),
    (
        {**head("phases"), "model": "m", "backends": {
            "x": {"phases": [{"name": "pp512", "tokens_per_second": 812.5}]}, "y": {"available": False}}},
        ["PASS phases/pp512/m@1"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("made", "told"), OLD, ids=[d["kind"] for d, _ in OLD])
def test_a_kind_of_before_is_results(tmp_path: Path, made: dict[str, Any], told: list[str]) -> None:
    """Each row is a result with its verdict; what was undecided has none."""
    runs = read_runs([written_to(tmp_path / "old.json", made)])
    found = [f"{r.value.verdict} {r.value.case}" for r in runs.results]
    assert found + [f"missing {m.value.case}" for m in runs.missing] == told
    assert {r.value.backend for r in runs.results} == {"x"}


def test_rates_and_counters_are_metrics(tmp_path: Path) -> None:
    """A unit keeps its rate with the interval of the median, and its counters by name."""
    runs = read_runs([written_to(tmp_path / "old.json", OLD[0][0])])
    unit = runs.results[0].value
    found = pace(unit)
    assert found is not None
    assert (found.rate, found.of, found.rounds) == (32.0, "tokens", 7)
    assert (found.low, found.high) == (32.0 * 2.0 / 4.0, 32.0 * 2.0 / 1.0)
    assert (unit.metrics["kernels.RMS"], unit.metrics["memory.weights"]) == (3, 1000)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({**head("perf"), "units": [{k: v for k, v in UNIT.items() if k != "rate"}]}, r"units\[0\]: .*`rate`"),
        ({**head("perf"), "units": 5}, "units: Expected `array`"),
        ({**head("zoo"), "results": [5]}, r"results\[0\]: Expected `object`"),
        ({**head("audit"), "backends": {"x": 5}}, r"old\.json: .*Expected `array`"),
        ({**head("phases"), "backends": []}, "Expected `object`"),
    ],
)
def test_a_wrong_field_is_one_error(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    """It names the file, and the place as far as it is known."""
    with pytest.raises(UsageError, match=says):
        read_runs([written_to(tmp_path / "old.json", made)])
