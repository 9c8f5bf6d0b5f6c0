"""Typed evidence is written as strict JSON and read as what it was; a field that there is none of is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite, isnan, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert
from run_files import document, result, written_to

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError
from conformance.judge.evidence import (
    Endpoint,
    Error,
    Fault,
    Numbers,
    Place,
    readable,
    to_json,
)
from conformance.judge.verdict import Result, Verdict
from conformance.report.runs import read_runs

FINITE = st.floats(allow_nan=False, allow_infinity=False)
STEP = st.integers(0, 9)
INDICES = st.tuples(*[st.integers(0, 99)] * 4)
ENDPOINTS = st.builds(Endpoint, STEP, st.text(max_size=5), st.none() | STEP)
NUMBERS = st.builds(
    Numbers, INDICES, FINITE | st.just(nan), FINITE | st.just(nan), st.floats(0, inf, allow_nan=False), st.floats(0, 1),
    STEP, st.text(max_size=5),
)  # fmt: skip
PLACES = st.builds(
    Place, st.sampled_from(Fault), st.none() | STEP, st.none() | STEP, st.text(max_size=5), st.text(max_size=5),
    st.text(max_size=5), st.none() | NUMBERS, st.none() | ENDPOINTS, st.none() | ENDPOINTS,
)  # fmt: skip
ERRORS = st.builds(Error, *[st.text(max_size=9)] * 4)


def _through(row: Mapping[str, JSON]) -> dict[str, JSON]:
    read = json.loads(json.dumps(row, allow_nan=False))
    assert isinstance(read, dict)
    return read


def _without_nan(place: Place) -> Place:
    """NaN is not equal to itself."""
    if place.numbers is None:
        return place
    expected, found = (-1e300 if isnan(x) else x for x in (place.numbers.expected, place.numbers.found))
    return replace(place, numbers=replace(place.numbers, expected=expected, found=found))


@given(PLACES)
def test_a_place_is_read_as_it_was_written(place: Place) -> None:
    """Each field comes back, NaN as NaN and an infinite NMSE as such; what is as it would be anyway is not written."""
    row = _through(to_json(place))
    assert _without_nan(_place(row)) == _without_nan(place)
    assert set(row) >= {"fault"}
    assert all(v is not None for v in row.values())


def _place(row: dict[str, JSON]) -> Place:
    return convert(readable({"where": row})["where"], Place)


def _error(row: dict[str, JSON]) -> Error:
    return convert(readable({"error": row})["error"], Error)


@given(ERRORS)
def test_an_error_is_read_as_it_was_written(error: Error) -> None:
    """Whatever a library said, with line ends."""
    assert _error(_through(to_json(error))) == error


@given(PLACES, ERRORS, st.lists(st.text(max_size=9), max_size=3))
def test_a_result_keeps_its_evidence(place: Place, error: Error, notes: list[str]) -> None:
    """A whole record, with the words that stand for it."""
    made = Result("ops/A@1", "b", Verdict.FAIL, where=_without_nan(place), error=error, notes=tuple(notes))
    row = _through(made.to_json())
    assert Result.from_json(row) == made
    assert row["detail"] == made.detail


@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_a_number_that_is_none_is_null(number: float) -> None:
    """JSON has no NaN and no infinity: both are null, and come back as a number that is none."""
    place = Place(Fault.NODE, 0, 0, "ADD", numbers=Numbers((0, 0, 0, 0), number, number, inf, 1e-6))
    row = _through(to_json(place))
    assert [row["numbers"][k] for k in ("expected", "found", "nmse")] == [None, None, None]
    read = _place(row).numbers
    assert read is not None
    assert not isfinite(read.expected)
    assert not isfinite(read.found)
    assert read.nmse == inf


@pytest.mark.parametrize(
    "row",
    [
        {"fault": "node", "guess": 1},
        {"fault": "node", "numbers": {"index": [0, 0, 0, 0], "budget": 1.0, "guess": 1}},
        {"fault": "handover", "source": {"step": 0, "guess": 1}},
    ],
)
def test_a_field_of_no_place_is_refused(tmp_path: Path, row: dict[str, JSON]) -> None:
    """It is no field that is left out in silence; a run file that has it is refused with its place."""
    with pytest.raises(ValidationError, match="guess"):
        _place(row)
    path = written_to(tmp_path / "run.json", document([result("ops/ADD-f32+f32-a=3@1", "cpu", "FAIL", where=row)]))
    with pytest.raises(UsageError, match=r"results\[0\]\.where.*guess"):
        _ = [r.value for r in read_runs([path]).results]


def test_a_field_of_no_error_is_refused() -> None:
    """As of a place; and so is a fault that there is not."""
    with pytest.raises(ValidationError, match="guess"):
        _error({"message": "x", "guess": 1})
    with pytest.raises(ValidationError, match="none of ours"):
        _place({"fault": "none of ours"})
