"""Intervals of ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.perf import statistics
from conformance.perf.statistics import FEWEST, Interval, life_values, of_logs, trimmed

times = st.lists(st.tuples(st.floats(1e-6, 10), st.floats(1e-6, 10)), min_size=4 * FEWEST, max_size=200)


def ratio(seconds: Sequence[float], against: Sequence[float], lives: Sequence[int], error: float) -> Interval:
    """The interval of paired rounds, as a gate computes it."""
    return of_logs(np.log(np.asarray(seconds) / np.asarray(against)), lives, error)


def lives(rounds: int, length: int = 4) -> list[int]:
    """Where lives of `length` rounds begin."""
    return list(range(0, rounds, length))


@given(times)
@settings(max_examples=50)
def test_swapped_sides_give_the_reciprocal(pairs: list[tuple[float, float]]) -> None:
    """The interval of b/a is the reciprocal of that of a/b, and as much is detectable."""
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    one, other = ratio(a, b, lives(len(a)), 0.005), ratio(b, a, lives(len(a)), 0.005)
    assert one.estimate == pytest.approx(1 / other.estimate)
    assert one.low == pytest.approx(1 / other.high if math.isfinite(other.high) else 0.0)
    assert one.detectable == pytest.approx(other.detectable)


@given(times, st.floats(0.01, 100))
@settings(max_examples=50)
def test_units_of_time_do_not_matter(pairs: list[tuple[float, float]], factor: float) -> None:
    """Times in other units give the same interval, and a faster side moves it by just that factor."""
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    plain = ratio(a, b, lives(len(a)), 0.01)
    scaled = ratio([x * factor for x in a], [x * factor for x in b], lives(len(a)), 0.01)
    faster = ratio([x * factor for x in a], b, lives(len(a)), 0.01)
    assert plain.estimate == pytest.approx(scaled.estimate)
    assert plain.low == pytest.approx(scaled.low)
    assert faster.estimate == pytest.approx(plain.estimate * factor)
    assert faster.low == pytest.approx(plain.low * factor)


@given(times)
@settings(max_examples=50)
def test_a_smaller_error_is_a_wider_interval(pairs: list[tuple[float, float]]) -> None:
    """Whoever may err less often says less; the estimate lies within, and does not depend on it."""
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    wide, narrow = (ratio(a, b, lives(len(a)), error) for error in (0.001, 0.05))
    assert wide.low <= narrow.low <= narrow.estimate == wide.estimate <= narrow.high <= wide.high
    assert wide.detectable >= narrow.detectable


def test_equal_rounds_leave_no_doubt() -> None:
    """Where every life says the same, the interval is that ratio."""
    i = ratio([2.0] * 80, [1.0] * 80, lives(80), 0.005)
    assert [i.estimate, i.low, i.high] == pytest.approx([2.0] * 3)


def test_few_lives_say_nothing() -> None:
    """Below `FEWEST` lives the interval is everything, however many rounds they have."""
    i = ratio([2.0] * 700, [1.0] * 700, lives(700, 100), 0.005)
    assert i == Interval(2.0, 0.0, math.inf, math.inf)


def test_being_first_costs_nobody() -> None:
    """What is first in a round may be 40 % slower, in swapped order: the estimate does not move."""
    first = [1.4 if r % 2 == 0 else 1.0 for r in range(80)]
    second = [1.0 if r % 2 == 0 else 1.4 for r in range(80)]
    assert ratio(first, second, lives(80), 0.01).estimate == pytest.approx(1.0)


def test_a_life_is_one_witness() -> None:
    """Rounds of one life are told as one number, and lives without a round of each order as none."""
    logs = np.array([1.0, 3.0, 1.0, 3.0, 7.0, 0.0, 0.0])
    assert life_values(logs, [0, 4, 5]).tolist() == [2.0, 0.0]


def test_a_spoilt_life_moves_little() -> None:
    """One life in ten may be off by a factor of 100: the estimate stays within 2 %."""
    rng = np.random.default_rng(1)
    a = np.exp(rng.normal(0, 0.01, 160))
    spoilt = a.copy()
    spoilt[:16] *= 100
    calm, rough = (ratio(x, np.ones(160).tolist(), lives(160, 8), 0.01).estimate for x in (a.tolist(), spoilt.tolist()))
    assert rough == pytest.approx(calm, rel=0.02)


def yuen(values: NDArray[np.float64]) -> tuple[float, float]:
    """The trimmed mean and its standard error by the book, one value at a time."""
    ordered, n = sorted(values.tolist()), len(values)
    cut = int(statistics.TRIM * n)
    kept = ordered[cut : n - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    mean = sum(winsorised) / n
    variance = sum((x - mean) ** 2 for x in winsorised) / (n - 1)
    return sum(kept) / len(kept), math.sqrt(variance / n) / (1 - 2 * cut / n)


@given(st.lists(st.floats(-5, 5), min_size=5, max_size=40))
def test_trimmed_mean_by_the_book(values: list[float]) -> None:
    """The vectorised trimmed mean and standard error are those of the definition."""
    row = np.array(values)
    mean, error = (float(x[0]) for x in trimmed(row[None]))
    assert [mean, error] == pytest.approx(list(yuen(row)), abs=1e-12)


@pytest.mark.parametrize(("n", "heavy"), [(FEWEST, False), (FEWEST, True), (30, False)])
def test_coverage(n: int, *, heavy: bool) -> None:
    """Over 600 samples of lives, the truth lies above the interval about as often as it may, and below it as well."""
    rng, above, below = np.random.default_rng(n), 0, 0
    for _ in range(600):
        values = rng.standard_t(2, n) if heavy else rng.normal(0, 1, n)
        i = statistics.of_logs(0.01 * np.repeat(values, 2), lives(2 * n, 2), 0.01)
        above += i.high < 1
        below += i.low > 1
    # 6 of 600 are expected; more than 15 come up in one of 2,000 such tests
    assert max(above, below) <= 15
    assert above + below > 0 or heavy


def test_a_single_time() -> None:
    """The time of one subject has an interval too, in seconds."""
    rng = np.random.default_rng(3)
    i = statistics.of_logs(rng.normal(math.log(0.02), 0.1, 400), lives(400), 0.005)
    assert i.low < 0.02 < i.high
    assert i.high / i.low < 1.1
