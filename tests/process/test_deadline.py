"""A deadline that is passed on only gets stricter, by whichever clock."""

from __future__ import annotations

from itertools import count
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from conformance.process import FOREVER, OVER, Deadline

SECONDS = st.floats(0, 1e9)


def _still(at: float) -> Deadline:
    return Deadline(at, clock=lambda: 0.0)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_what_is_derived_is_stricter(end: float, within: float, each: float, request: float) -> None:
    """No step of `within`, `request` and `both` leaves more time than there was."""
    first = _still(end).request(each)
    for other in (first.within(within), first.request(request), first.both(_still(within).request(request))):
        assert other.left() <= first.left()
        assert other.each <= first.each
    assert first.both(_still(within)).left() == min(end, within)
    assert first.both(FOREVER) == first


def test_a_deadline_is_over_at_its_end() -> None:
    """Its clock decides; without an end it never is."""
    ticks = count()
    deadline = Deadline.after(2.0, lambda: float(next(ticks)))
    assert [deadline.is_over() for _ in range(3)] == [False, True, True]
    assert not FOREVER.is_over()
    assert OVER.is_over()
    assert FOREVER.wall == inf
    assert FOREVER.within(60).request(3).wall == 3
