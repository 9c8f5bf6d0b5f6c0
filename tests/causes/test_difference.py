"""A run compared with a baseline, case by case: no failure and no lost case hides behind a cause that is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.causes.baseline import Baseline, Selection, ran
from conformance.causes.difference import Difference, compare
from conformance.judge.cause import Cause, Condition
from conformance.judge.verdict import FAILURES, Missing, Result, Verdict
from conformance.judge.wrong import Wrong

LEVEL: dict[str, Any] = {
    "levels": {"npu": "smoke"},
    "families": [],
    "cases": [],
    "files": [],
    "seed": None,
    "shard": "1/1",
}
WRONG = Wrong("numbers", 1e-4)
ADD = Cause("ADD-1", "ADD: wrong numbers", "npu", Verdict.FAIL, "ADD", "", (Condition("op", "ADD"),), ("ops/a@1",))
DIED = Cause("CRASH-1", "MUL: died", "npu", Verdict.CRASH, "MUL", "assert x", (Condition("op", "MUL"),), ("ops/b@1",))


def _result(case: str, verdict: Verdict = Verdict.FAIL, cause: str | None = None, wrong: Wrong | None = None) -> Result:
    return Result(case, "npu", verdict, cause=cause, wrong=wrong)


BEFORE = (
    _result("ops/a@1", cause="ADD-1", wrong=WRONG),
    _result("ops/b@1", Verdict.CRASH, "CRASH-1"),
    _result("ops/c@1", Verdict.PASS),
    _result("ops/d@1", Verdict.UNSUPPORTED),
)
KNOWN = Baseline("b.toml").renewed([ADD, DIED], ran(BEFORE, [ADD, DIED], LEVEL))


def _compared(*changed: Result, causes: tuple[Cause, ...] = (ADD, DIED), lacks: str = "") -> Difference:
    rows = {r.case: r for r in (*BEFORE, *changed)}
    rows.pop(lacks, None)
    return compare(KNOWN, causes, rows.values(), selected=LEVEL)


def test_the_run_of_a_baseline_does_not_differ_from_it() -> None:
    """Nothing is said of it."""
    found = _compared()
    assert (found.outcome().lines(), found.outcome().exit_code) == ([], 0)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        pytest.param(_result("ops/c@1", cause="ADD-1", wrong=WRONG), "FAIL where it passed", id="it passed"),
        pytest.param(_result("ops/d@1", cause="ADD-1", wrong=WRONG), "FAIL, not known to fail", id="it was refused"),
        pytest.param(_result("ops/e@1", cause="ADD-1", wrong=WRONG), "FAIL, not known to fail", id="it never ran"),
        pytest.param(_result("ops/e@1"), "FAIL, not known to fail", id="no cause explains it"),
        pytest.param(_result("ops/c@1", Verdict.XPASS), "XPASS where it passed", id="a waiver that is outdated"),
        pytest.param(_result("ops/a@1", Verdict.CRASH, "ADD-1"), "CRASH where it was FAIL", id="another verdict"),
        pytest.param(
            _result("ops/a@1", cause="ADD-1", wrong=Wrong("zeros", 1.0)), "zeros instead of numbers", id="zeros"
        ),
        pytest.param(
            _result("ops/a@1", cause="ADD-1", wrong=Wrong("numbers", 2e-3)), "NMSE 0.002, 0.0001 before", id="much more"
        ),
        pytest.param(_result("ops/b@1", Verdict.CRASH), "", id="the same, though nobody found its cause this time"),
    ],
)
def test_a_failure_that_is_not_known_as_it_is_makes_a_cause_wider(result: Result, why: str) -> None:
    """By its id: whatever the known cause says of its node."""
    found = _compared(result)
    assert [(w.case, w.why) for w in found.wider] == ([(result.case, why)] if why else [])
    assert found.outcome().exit_code == (1 if why else 0)
    assert [*found.new, *found.gone, *found.lost] == []


def test_an_error_in_the_words_of_another_known_cause_is_wider() -> None:
    """A case that died by one assertion and dies by another has another fault, though both are known."""
    other = Cause(
        "CRASH-2", "DIV: died", "npu", Verdict.CRASH, "DIV", "assert y", (Condition("op", "DIV"),), ("ops/e@1",)
    )
    rows = (*BEFORE, _result("ops/e@1", Verdict.CRASH, "CRASH-2"))
    known = Baseline("b.toml").renewed([ADD, DIED, other], ran(rows, [ADD, DIED, other], LEVEL))
    moved = {r.case: r for r in (*rows, _result("ops/b@1", Verdict.CRASH, "CRASH-2"))}
    (wider,) = compare(known, [ADD, DIED, other], moved.values(), selected=LEVEL).wider
    assert (wider.case, wider.why) == ("ops/b@1", "CRASH with another message than before")


def test_what_a_new_cause_shows_is_said_once() -> None:
    """Its cases are no widening of another."""
    new = Cause("SUB-1", "SUB: wrong", "npu", Verdict.FAIL, "SUB", "", (Condition("op", "SUB"),), ("ops/c@1",))
    found = _compared(_result("ops/c@1", cause="SUB-1", wrong=WRONG), causes=(ADD, DIED, new))
    assert ([c.id for c in found.new], found.wider) == (["SUB-1"], ())


@given(st.sampled_from(sorted(set(Verdict) - {Verdict.PASS, Verdict.XFAIL})))
def test_a_case_that_passed_never_stops_passing_in_silence(verdict: Verdict) -> None:
    """Whatever becomes of it: it fails, is refused, or is not there."""
    found = _compared(_result("ops/c@1", verdict))
    assert found.outcome().exit_code == 1
    assert bool(found.wider) is (verdict in FAILURES)
    assert bool(found.lost) is (verdict is Verdict.UNSUPPORTED)
    (lost,) = _compared(lacks="ops/c@1").lost
    assert (lost.case, lost.why) == ("ops/c@1", "passed, not in this run")


def test_a_case_without_a_result_is_a_reason_of_its_own() -> None:
    """`outcome.judge` reports missing pairs; they are not also lost coverage."""
    rows = [r for r in BEFORE if r.case != "ops/c@1"]
    for missing in (Missing("npu", "ops/c@1", "interrupted"), Missing("npu", "ops/*", "interrupted", count=900)):
        assert compare(KNOWN, [ADD, DIED], rows, missing=[missing], selected=LEVEL).lost == ()


@pytest.mark.parametrize(
    "selected",
    [
        pytest.param({**LEVEL, "levels": {"npu": "full"}}, id="another level"),
        pytest.param({**LEVEL, "seed": 7}, id="another seed"),
        pytest.param({**LEVEL, "cases": ["ops/a*"]}, id="fewer cases"),
        pytest.param({**LEVEL, "shard": "1/3"}, id="a shard"),
        pytest.param({**LEVEL, "levels": {"ggml": "smoke"}}, id="another backend"),
    ],
)
def test_a_run_of_another_selection_is_incomplete_and_not_equal(selected: dict[str, object]) -> None:
    """Cases that both have are compared; those it did not ask for are neither lost nor gone, and it is not green."""
    found = compare(KNOWN, [ADD], [BEFORE[0]], selected=selected)
    assert (found.lost, found.gone) == ((), ())
    (unasked,) = found.unasked
    assert (unasked.cases, unasked.of) == (("ops/b@1", "ops/c@1"), 3)
    assert found.outcome().exit_code == 5
    worse = compare(KNOWN, [ADD], [_result("ops/a@1", cause="ADD-1", wrong=Wrong("zeros", 1.0))], selected=selected)
    assert worse.outcome().exit_code == 1


def test_more_cases_than_the_baseline_has_are_compared() -> None:
    """A higher level lists all that a lower one does, and what fails there is not known."""
    selected = {**LEVEL, "levels": {"npu": "standard"}}
    more = _result("ops/z@1", Verdict.PASS)
    assert compare(KNOWN, [ADD, DIED], [*BEFORE, more], selected=selected).outcome().exit_code == 0
    more = _result("ops/z@1", cause="ADD-1", wrong=WRONG)
    assert compare(KNOWN, [ADD, DIED], [*BEFORE, more], selected=selected).outcome().exit_code == 1


def test_a_run_that_does_not_say_what_was_selected_lacks_what_it_has_not() -> None:
    """A record of an older version, or of no run at all."""
    assert len(compare(KNOWN, [], []).lost) == 3
    assert compare(KNOWN, [], []).outcome().exit_code == 1
    assert str(Selection("smoke", 7, ("ops",), shard="1/3")) == "level smoke, seed 7, ops, shard 1/3"


def test_fresh_cases_are_in_no_baseline() -> None:
    """Their ids are of one night."""
    rows = [Result("ops/f@9", "npu", verdict, fresh=True) for verdict in (Verdict.PASS, Verdict.FAIL)]
    assert [r.passed for r in ran(rows, [], LEVEL)] == []
    assert compare(KNOWN, [ADD, DIED], [*BEFORE, *rows], selected=LEVEL).outcome().exit_code == 0
