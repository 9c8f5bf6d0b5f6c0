"""The rate of a random sample, and where that of all it was drawn from lies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trust.rate import Rate


@given(st.integers(0, 500), st.integers(0, 500))
def test_an_interval_holds_its_rate(noticed: int, more: int) -> None:
    """Wilson's interval lies within 0 and 1, around the rate, and narrows with the sample; of nothing there is none."""
    rate, wide = Rate(noticed, noticed + more), Rate(10 * noticed, 10 * (noticed + more))
    if rate.value is None or rate.interval is None or wide.interval is None:
        assert noticed + more == 0
        assert str(rate) == "–"
        return
    low, high = rate.interval
    assert 0 <= low <= rate.value <= high <= 1
    assert wide.interval[1] - wide.interval[0] < high - low


def test_the_interval_of_a_known_rate() -> None:
    """69 of 115, as tables of Wilson's interval have it."""
    assert Rate(69, 115).interval == pytest.approx((0.5085, 0.6849), abs=5e-4)


@pytest.mark.parametrize(
    ("noticed", "of", "shown"),
    [(37, 40, "92 % (80 to 98)"), (999, 1000, "99 % (99 to 100)"), (40, 40, "100 % (91 to 100)"),
     (0, 3, "0 % (0 to 57)"), (29, 100, "29 % (21 to 39)")],
)  # fmt: skip
def test_a_rate_in_words_claims_no_more_than_was_seen(noticed: int, of: int, shown: str) -> None:
    """In whole per cent: the rate rounded down, the interval outwards."""
    assert str(Rate(noticed, of)) == shown


def test_a_rate_of_mutants() -> None:
    """It counts what was noticed among all that changes something; what is equivalent or does not load is no miss."""
    assert Rate.of_mutants(["noticed", "noticed", "survived", "equivalent", "invalid"]) == Rate(2, 3)
