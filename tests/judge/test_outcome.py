"""The reasons of a command give one exit code, and each says itself in a line."""

from __future__ import annotations

import pytest
from msgspec import convert

from conformance.judge.outcome import Exit, Lost, Outcome, Why, coverage, judge, lost_coverage
from conformance.judge.verdict import FAILURES, Missing, Result, Verdict

RIGHT = Result("a@1", "x", Verdict.PASS)


def test_the_worst_reason_decides() -> None:
    """Failures, then what is incomplete, then nothing; without a reason it is a success."""
    failed, stopped, nothing = (Outcome.of(why, [why.value]) for why in (Why.FAILED, Why.TIME_LIMIT, Why.UNPROVEN))
    assert Outcome().exit_code is Exit.OK
    assert (nothing + stopped + failed).exit_code is Exit.FAILURES
    assert (nothing + stopped).exit_code is Exit.INCOMPLETE
    assert nothing.exit_code is Exit.NOTHING
    assert (nothing + stopped + failed).lines() == ["failed", "time limit", "unproven"]
    assert (failed + stopped).without(Why.FAILED) == stopped


@pytest.mark.parametrize("why", Why)
def test_every_reason_is_no_success(why: Why) -> None:
    """None of them leaves a command green, and none takes a code that is no outcome's."""
    assert Outcome.of(why, ["x"]).exit_code in {Exit.FAILURES, Exit.INCOMPLETE, Exit.NOTHING}


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_code(verdict: Verdict) -> None:
    """Beside a PASS 1 for what fails a run, unless the case is fresh; UNSUPPORTED alone executes nothing."""
    result = Result("b@1", "x", verdict)
    assert judge([RIGHT, result]).exit_code == (1 if verdict in FAILURES else 0)
    assert judge([RIGHT, Result("b@1", "x", verdict, fresh=True)]).exit_code == 0
    assert judge([result]).exit_code == (3 if verdict is Verdict.UNSUPPORTED else 1 if verdict in FAILURES else 0)


def test_nothing_executed_is_no_success() -> None:
    """No results, and refusals only."""
    assert judge([]).lines() == ["no cases ran"]
    assert judge([Result("a@1", "x", Verdict.UNSUPPORTED)]).lines() == ["no cases ran (1 case UNSUPPORTED)"]


def test_coverage_is_lost_where_a_pass_is_no_longer_executed() -> None:
    """Refused or absent; not what fails, what another backend passes, or what is missing, which is said by itself."""
    passed = {"x": ["a@1", "b@1", "c@1", "d@1", "e@1"], "y": ["a@1"]}
    now = [RIGHT, Result("b@1", "x", Verdict.UNSUPPORTED), Result("c@1", "x", Verdict.FAIL)]
    lost = lost_coverage(passed, now, [Missing("x", "d@1", "died")])
    assert lost == [Lost("x", "b@1", Verdict.UNSUPPORTED), Lost("x", "e@1", None), Lost("y", "a@1", None)]
    assert coverage(lost, passed).lines() == [
        "coverage lost on x: 2 of 5 cases that passed (1 UNSUPPORTED, 1 absent): b@1, e@1",
        "coverage lost on y: 1 of 1 case that passed (1 absent): a@1",
    ]
    assert coverage(lost, passed).exit_code is Exit.FAILURES
    twice = [Result("a@1", "x", Verdict.UNSUPPORTED), RIGHT]  # on two machines
    assert not lost_coverage({"x": ["a@1"]}, twice)
    assert not lost_coverage({"x": ["a@1"]}, twice[::-1])


def test_a_case_under_another_seed_is_covered() -> None:
    """One for one; what is refused is lost whatever else runs."""
    passed = {"x": {"a@1": None, "a@2": None, "b@1": None}}
    now = [Result("a@7", "x", Verdict.PASS), Result("b@1", "x", Verdict.UNSUPPORTED), Result("b@7", "x", Verdict.PASS)]
    assert lost_coverage(passed, now) == [Lost("x", "a@2", None), Lost("x", "b@1", Verdict.UNSUPPORTED)]
    assert lost_coverage(passed, [*now, Result("a@8", "x", Verdict.FAIL)]) == [Lost("x", "b@1", Verdict.UNSUPPORTED)]


def test_a_record_of_before_reads_as_lost() -> None:
    """A missing pair without a cause."""
    row = {"backend": "x", "case": "a@1", "reason": "interrupted"}
    assert judge([RIGHT], [convert(row, Missing)]).exit_code == 1
    assert judge([RIGHT], [convert({**row, "cause": "interrupted"}, Missing)]).exit_code == 5
    kept = convert({**row, "cause": "time limit"}, Missing)
    assert convert(kept.to_json(), Missing) == kept
