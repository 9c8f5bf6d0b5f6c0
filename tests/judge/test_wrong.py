"""How wrong an output is, and what counts as much worse."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F32
from conformance.judge.compare import compare
from conformance.judge.wrong import KINDS, MUCH, Kind, Wrong, is_wrong, worse

WRONG = st.builds(Wrong, st.sampled_from(KINDS), st.floats(0, 1e30) | st.just(inf))


@pytest.mark.parametrize(
    ("expected", "found", "kind"),
    [
        pytest.param([1, -2, 3, 4], [1, -2, 3, 5], "numbers", id="a number"),
        pytest.param([1, -2, 3, 4], [0, 0, 0, 0], "zeros", id="zeros"),
        pytest.param([1, -2, inf, 4], [0, 0, 0, 0], "zeros", id="zeros for an infinity, too"),
        pytest.param([1, -2, 3, 4], [2, -4, 6, 8], "numbers", id="numbers as far off as zeros are"),
        pytest.param([0, 0, 0, 0], [0, 0, 0, 1], "numbers", id="a number for zeros"),
        pytest.param([1, -2, 3, 4], [1, nan, 3, 4], "not finite", id="a NaN"),
        pytest.param([1, -2, 3, 4], [0, inf, 0, 0], "not finite", id="an infinity among zeros"),
        pytest.param([1, -2, nan, 4], [1, -2, 3, 4], "numbers", id="a number for a NaN"),
    ],
)
def test_an_output_is_wrong_by_numbers_zeros_or_what_is_not_finite(
    expected: list[float], found: list[float], kind: Kind
) -> None:
    """Zeros are all of an output where something else is expected; one NaN where a number is expected is enough."""
    t = new_tensor(F32, 4)
    difference = compare(t, *(np.array(x, "<f4").view(np.uint8) for x in (expected, found)))
    assert difference.kind == kind


@given(WRONG, WRONG)
def test_a_failure_is_no_worse_than_itself_or_than_the_worse_of_two(a: Wrong, b: Wrong) -> None:
    """Nor is it after it was written and read."""
    assert worse(a, a) == ""
    both = Wrong.worst([a, b])
    assert both is not None
    assert worse(both, a) == worse(both, b) == ""
    assert Wrong.from_json(a.to_json()) == a
    assert is_wrong(a.to_json())


@given(st.floats(1e-30, 1e20))
def test_ten_times_the_error_zeros_and_nan_are_much_worse(nmse: float) -> None:
    """Where numbers are known; what is not finite is worse than zeros."""
    known = Wrong("numbers", nmse)
    assert not worse(known, Wrong("numbers", 0.99 * MUCH * nmse))
    assert worse(known, Wrong("numbers", 1.01 * MUCH * nmse))
    assert worse(known, Wrong("zeros", nmse)) == "zeros instead of numbers"
    assert worse(known, Wrong("not finite", nmse)) == "NaN or Inf instead of numbers"
    assert worse(Wrong("zeros", 1.0), Wrong("not finite", inf)) == "NaN or Inf instead of zeros"


@pytest.mark.parametrize(
    "row",
    [[], {}, {"kind": "numbers"}, {"kind": "odd", "nmse": 1.0}, {"kind": ["zeros"], "nmse": 1.0},
     {"kind": "zeros", "nmse": -1.0}, {"kind": "zeros", "nmse": True}, {"kind": "zeros", "nmse": "1"},
     {"kind": "zeros", "nmse": 1.0, "more": 1}],
)  # fmt: skip
def test_what_a_file_says_of_an_error_is_checked(row: object) -> None:
    """Another kind, a negative number, or something else altogether is none."""
    assert not is_wrong(row)
