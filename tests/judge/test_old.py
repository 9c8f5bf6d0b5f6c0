"""Records from before evidence was typed are read as what a run gives today: the same place, error and signature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.judge import text
from conformance.judge.evidence import Endpoint, Error, Fault, Numbers, Place
from conformance.judge.old import STALE
from conformance.judge.verdict import Result, Verdict
from conformance.report.matrix import reason
from conformance.report.runs import refusals
from conformance.run.signature import signature_of

INDEX = (3, 5, 0, 0)
SAID = "diverges at [3, 5, 0, 0]: 1 expected, 2 found (NMSE 0.5), budget 1e-07 by v1"
NUMBERS = Numbers(INDEX, 1.0, 2.0, 0.5, 1e-7, profile="v1")
FIRST = {"kind": "node", "step": 1, "node": 0, "op": "ADD", "name": "node_0", "index": list(INDEX), "expected": 1.0,
         "found": 2.0, "nmse": 0.5, "budget": 1e-7}  # fmt: skip
PLACE = {"step": 1, "node": 0, "op": "ADD", "name": "node_0"}
NODE = f"step 1: ADD node_0 f32[64, 4, 1, 1] {SAID}"
TENSOR = "ADD node_0 f32[64, 4, 1, 1] of f32[64, 4, 1, 1], f32[64, 4, 1, 1]"


def _row(verdict: str, detail: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # a record's fields
    return {"case": "ops/ADD-f32@1", "backend": "npu", "verdict": verdict, "steps": 2, "first_divergence": None,
            "place": None, "detail": detail, **more}  # fmt: skip


def _at(fault: Fault, tensor: str = "f32[64, 4, 1, 1]", numbers: Numbers | None = NUMBERS) -> Place:
    return Place(fault, 1, 0, "ADD", "node_0", tensor, numbers)


def _fresh(verdict: Verdict, where: Place | None = None, error: Error | None = None, *notes: str) -> Result:
    return Result("ops/ADD-f32@1", "npu", verdict, steps=2, where=where, error=error, notes=notes)


ENDS = {"source": {"step": 1, "device": "cpu", "split": 0}, "target": {"step": 1, "device": "xdna2", "split": 1}}
LEFT = "ADD left by split 0 on cpu (step 1) reaches split 1 on xdna2 (step 1) with other bytes: the hand-over between"
ASKED = "npu: computing steps[1] of ops/ADD-f32@1: "
ABORTED = f"{ASKED}its process died (SIGABRT): hm / a.cpp:12: GGML_ASSERT(n > 4) failed"
REFUSED = "step 1: ADD node_0: no emitter for f16"
OLD: dict[str, tuple[dict[str, Any], Result]] = {
    "node": (
        _row("FAIL", f"{NODE}; everything before it agrees", first_divergence=FIRST),
        _fresh(Verdict.FAIL, _at(Fault.NODE), None, "everything before it agrees"),
    ),
    "flushed": (
        _row("FAIL", NODE, first_divergence={**FIRST, "expected": 2.0**-130, "found": 0.0}),
        _fresh(Verdict.FAIL, _at(Fault.NODE, numbers=Numbers(INDEX, 2.0**-130, 0.0, 0.5, 1e-7, profile="v1"))),
    ),
    "graph": (
        _row("FAIL", f"{NODE}; each node alone is right", first_divergence={**FIRST, "kind": "graph"}),
        _fresh(Verdict.FAIL, _at(Fault.GRAPH), None, "each node alone is right"),
    ),
    "kept": (
        _row("FAIL", f"{NODE}; {STALE[Fault.STALE]}", first_divergence={**FIRST, "kind": "kept"}),
        _fresh(Verdict.FAIL, _at(Fault.STALE)),
    ),
    "kept from before": (
        _row("FAIL", f"{NODE}; {STALE[Fault.EARLIER]}", first_divergence={**FIRST, "kind": "kept"}),
        _fresh(Verdict.FAIL, _at(Fault.EARLIER)),
    ),
    "output": (
        _row("FAIL", f"{NODE}; the first wrong node was not found: no", first_divergence={**FIRST, "kind": "output"}),
        _fresh(Verdict.FAIL, _at(Fault.OUTPUT), None, "the first wrong node was not found: no"),
    ),
    "handover": (
        _row("FAIL", f"{NODE}; {LEFT} devices is at fault, and no kernel",
             first_divergence={**FIRST, "kind": "handover", "node": None, **ENDS}),
        _fresh(
            Verdict.FAIL,
            Place(Fault.HANDOVER, 1, None, "ADD", "node_0", source=Endpoint(1, "cpu", 0),
                  target=Endpoint(1, "xdna2", 1)),
            None, NODE,
        ),
    ),
    "relation": (
        _row("FAIL", f"both are the same: {NODE}; expected is what a gives",
             first_divergence={**FIRST, "kind": "graph"}),
        _fresh(Verdict.FAIL, _at(Fault.GRAPH), None, "both are the same", "expected is what a gives"),
    ),
    "state": (
        _row("FAIL", f"{NODE}; started from its own caches"),
        _fresh(Verdict.FAIL, Place(Fault.STATE), None, NODE, "started from its own caches"),
    ),
    "died": (
        _row("CRASH", f"{ABORTED}; where: step 1: {TENSOR} fails by itself", place=PLACE),
        _fresh(Verdict.CRASH, _at(Fault.NODE, TENSOR, None),
               Error(ABORTED, "hm\na.cpp:12: GGML_ASSERT(n > 4) failed", "SIGABRT")),
    ),
    "failed alone": (
        _row("OVERCLAIM", f"{ASKED}no kernel; where: step 1: {TENSOR} fails by itself", place=PLACE),
        _fresh(Verdict.OVERCLAIM, _at(Fault.NODE, TENSOR, None), Error(f"{ASKED}no kernel", "no kernel")),
    ),
    "failed behind": (
        _row("OVERCLAIM", f"{ASKED}no kernel; where: step 1: {TENSOR} fails behind the nodes before it",
             place={**PLACE, "alone": False}),
        _fresh(Verdict.OVERCLAIM, _at(Fault.GRAPH, TENSOR, None), Error(f"{ASKED}no kernel", "no kernel")),
    ),
    "failed by what was kept": (
        _row("OVERCLAIM", f"{ASKED}no kernel; where: step 1: {STALE[Fault.STALE]}", place={"step": 1, "kind": "kept"}),
        _fresh(Verdict.OVERCLAIM, Place(Fault.STALE, 1), Error(f"{ASKED}no kernel", "no kernel")),
    ),
    "failed in a relation": (
        _row("OVERCLAIM", f"{ASKED}no kernel; it threw in run two, step 1", place={"step": 1, "side": "run two"}),
        _fresh(Verdict.OVERCLAIM, Place(Fault.UNLOCATED, 1), Error(f"{ASKED}no kernel", "no kernel", side="run two")),
    ),
    "no answer": (
        _row("TIMEOUT", f"{ASKED}no answer within 36 s, its process was ended; where: step 1", place={"step": 1}),
        _fresh(Verdict.TIMEOUT, Place(Fault.UNLOCATED, 1),
               Error(f"{ASKED}no answer within 36 s, its process was ended", "no answer")),
    ),
    "refused": (
        _row("UNSUPPORTED", REFUSED), _fresh(Verdict.UNSUPPORTED, None, Error(REFUSED, "no emitter for f16")),
    ),
    "passed": (_row("PASS", ""), _fresh(Verdict.PASS)),
    "passed with a note": (_row("PASS", "5 caches; b"), _fresh(Verdict.PASS, None, None, "5 caches", "b")),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_an_old_record_is_read_as_a_fresh_result(name: str) -> None:
    """Place, error and notes are those of a run of today, and so are verdict, op at fault, signature and reason."""
    row, fresh = OLD[name]
    read = Result.from_json(row)
    assert (read.where, read.error, read.notes) == (fresh.where, fresh.error, fresh.notes)
    assert read == fresh
    assert read.wrong_op == fresh.wrong_op
    assert signature_of(read) == signature_of(fresh)
    assert reason(read) == reason(fresh)
    assert refusals([read]) == refusals([fresh])


OLD = {
    name: (row, replace(fresh, where=replace(fresh.where, steps=max(fresh.steps, 1))) if fresh.where else fresh)
    for name, (row, fresh) in OLD.items()
}


@pytest.mark.parametrize("name", sorted(OLD.keys() - {"flushed", "handover", "relation"}))
def test_an_old_record_says_what_it_said(name: str) -> None:
    """Its words are made anew from what was read of them, in today's wording, and nothing is lost."""
    row, fresh = OLD[name]
    said = row["detail"]
    for fault, words in STALE.items():
        said = said.replace(words, text.STALE[fault])
    assert fresh.detail == said


def test_an_old_waived_failure_keeps_its_evidence() -> None:
    """XFAIL has the evidence of the verdict that was waived, and the waiver in a note."""
    waiver = "waived until 2026-06-15 (known; https://example.org/1)"
    row, fresh = OLD["failed alone"]
    read = Result.from_json({**row, "verdict": "XFAIL", "waived": "OVERCLAIM", "detail": f"{waiver}; {row['detail']}"})
    assert (read.where, read.error, read.notes) == (fresh.where, fresh.error, (waiver,))
    row, fresh = OLD["node"]
    read = Result.from_json({**row, "verdict": "XFAIL", "waived": "FAIL", "detail": f"{waiver}; {row['detail']}"})
    assert (read.where, read.error, read.notes) == (fresh.where, None, (*fresh.notes, waiver))


def test_a_precision_profile_under_its_former_name_is_read() -> None:
    """`where.numbers.card` of an earlier record is `profile`; nothing else of the row changes."""
    fresh = OLD["node"][1]
    row = fresh.to_json()
    numbers = row["where"]["numbers"]
    assert numbers["profile"] == "v1"
    old = {**row, "where": {**row["where"], "numbers": {**numbers, "card": numbers["profile"]}}}
    del old["where"]["numbers"]["profile"]
    assert Result.from_json(old) == fresh
