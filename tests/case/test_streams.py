"""Random streams: the same bytes forever, and numbers that are what they promise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError

CASE = "ops/ADD-f32+f32-a=13x5x3x2@1"

DIGESTS = {
    "words": "889b296b8c5ca768",
    "bytes": "b56da69f704c70ff",
    "words32": "56ce579e5b3861b5",
    "unit": "a919240947e083bf",
    "uniform": "a4aae6bf7e67d4ee",
    "normal": "77237dbd04b59807",
    "normal scaled": "70e425ced170fde9",
    "normal, beyond the table of counters": "5787c61baa975ec3",
    "away_from_zero": "9f8efb5a035c6d33",
    "integers": "6108ae459c77711e",
    "permutations": "257a6d805a199423",
    "distinct": "28ca456c416bc6e9",
    "choice": "ee72ec02f42f94a5",
}


def _digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def test_words_are_splitmix64() -> None:
    """From the state 1234567 come the published first outputs of SplitMix64."""
    s = Stream(CASE)
    s._key = 1234567
    assert s.words(5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda s: s.words(1000), "words"),
        (lambda s: s.bytes(1003), "bytes"),
        (lambda s: s.words32(33), "words32"),
        (lambda s: s.unit(1000), "unit"),
        (lambda s: s.uniform(1000, -3.0, 7.5), "uniform"),
        (lambda s: s.normal(1000), "normal"),
        (lambda s: s.normal(1000, 2.5, -1.0), "normal scaled"),
        (lambda s: s.normal(50_000), "normal, beyond the table of counters"),
        (lambda s: s.away_from_zero(1000, 0.25, 4.0), "away_from_zero"),
        (lambda s: s.integers(1000, -5, 1_000_000), "integers"),
        (lambda s: s.permutations(7, 33), "permutations"),
        (lambda s: s.distinct(7, 33, -8.0, 8.0), "distinct"),
        (lambda s: s.choice(7, 33, 5), "choice"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bytes_are_these_forever(draw: object, expected: str) -> None:
    """Samples of every kind of draw keep the digests they had when the generator was written."""
    assert callable(draw)
    assert _digest(draw(Stream(CASE, "a"))) == DIGESTS[expected]


@given(st.integers(0, 300), st.integers(0, 300))
def test_two_draws_are_one(a: int, b: int) -> None:
    """A stream goes on where the last draw ended."""
    s, whole = Stream(CASE, "a"), Stream(CASE, "a")
    parts = np.concatenate([s.words(a), s.words(b)])
    assert np.array_equal(parts, whole.words(a + b))


@pytest.mark.parametrize("n", [1 << 14, (1 << 14) + 1])
def test_the_counter_table_changes_nothing(n: int) -> None:
    """A draw longer than the table of counters starts as a shorter one does."""
    assert np.array_equal(Stream(CASE).words(n)[:100], Stream(CASE).words(100))


@pytest.mark.parametrize("draw", [Stream.words, Stream.words32, Stream.unit, Stream.normal])
def test_a_long_draw_is_its_parts(draw: Callable[[Stream, int], NDArray[np.generic]]) -> None:
    """What a long draw takes at a time shows in no number, and the stream goes on behind it."""
    s, whole = Stream(CASE), Stream(CASE)
    parts = [draw(s, n) for n in (16_384, 40_000, 4_096)]
    assert np.array_equal(np.concatenate(parts), draw(whole, sum(map(len, parts))))
    assert np.array_equal(s.words(3), whole.words(3))


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_streams_are_apart(case: str, a: str, b: str) -> None:
    """Another tensor, or another case, gives other numbers; the border between the two texts counts."""
    if a != b:
        assert not np.array_equal(Stream(case, a).words(8), Stream(case, b).words(8))
        assert not np.array_equal(Stream(a, case).words(8), Stream(b, case).words(8))
    if a:
        assert not np.array_equal(Stream(case + a, b).words(8), Stream(case, a + b).words(8))


def test_normal_is_bell_shaped() -> None:
    """Mean 0, deviation 1, a third beyond one deviation, nothing beyond 3.5."""
    x = Stream(CASE, "x").normal(200_000)
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1) < 0.01
    assert 0.31 < float((np.abs(x) > 1).mean()) < 0.34
    assert float(np.abs(x).max()) < 3.47


@given(st.integers(1, 500), st.floats(-100, 100, width=32), st.floats(0.125, 100, width=32))
def test_uniform_stays_within(n: int, lo: float, width: float) -> None:
    """Values lie in [lo, hi]; a divisor's magnitude does, on both sides of zero."""
    x = Stream(CASE).uniform(n, lo, lo + width)
    assert x.dtype == np.float32
    assert ((x >= np.float32(lo)) & (x <= np.nextafter(np.float32(lo + width), np.float32(np.inf)))).all()
    d = Stream(CASE).away_from_zero(500, width, 2 * width)
    assert (np.abs(d) >= np.float32(width)).all()
    assert (d < 0).any()
    assert (d > 0).any()


@given(st.integers(1, 400), st.integers(-(2**31), 2**31 - 1), st.integers(1, 2**32))
def test_integers_stay_within(n: int, lo: int, width: int) -> None:
    """Integers lie in [lo, hi)."""
    x = Stream(CASE).integers(n, lo, lo + width)
    assert ((x >= lo) & (x < lo + width)).all()


def test_integers_are_even() -> None:
    """Every integer of a small range comes about equally often."""
    counts = np.bincount(Stream(CASE).integers(70_000, 0, 7), minlength=7)
    assert (abs(counts - 10_000) < 500).all()


@given(st.integers(1, 6), st.integers(1, 80), st.data())
def test_rows_hold_different_values(rows: int, n: int, data: st.DataObject) -> None:
    """A permutation is one, a choice has no repeats, distinct values differ by at least half a step, in every row."""
    k = data.draw(st.integers(1, n))
    assert (np.sort(Stream(CASE).permutations(rows, n), axis=1) == np.arange(n)).all()
    chosen = Stream(CASE).choice(rows, n, k)
    assert all(len(set(row)) == k and min(row) >= 0 and max(row) < n for row in chosen.tolist())
    values = np.sort(Stream(CASE).distinct(rows, n, -8.0, 8.0), axis=1)
    assert values.min() >= -8
    assert values.max() < 8
    assert n == 1 or np.diff(values, axis=1).min() >= 0.49 * 16 / n


@given(st.integers(1, 200), st.lists(st.sampled_from([0.0, np.inf, -np.inf, 5.0]), min_size=1, max_size=9))
def test_sprinkled_values_arrive(n: int, values: list[float]) -> None:
    """As many special values as fit stand in the array, in order, and at most one in eight beyond the first of each."""
    x = np.full(n, 0.5, np.float32)
    Stream(CASE).sprinkle(x, values)
    count = int((x != 0.5).sum())
    assert count == max(min(len(values), n), n // 8)
    assert np.array_equal(x[x != 0.5][: len(values)], np.asarray(values, np.float32)[:count])


def test_wrong_ranges_are_refused() -> None:
    """An empty range, one wider than 32 bits, and more choices than there are: each is said in words."""
    with pytest.raises(UsageError, match="0 < hi - lo"):
        Stream(CASE).integers(3, 5, 5)
    with pytest.raises(UsageError, match="0 < hi - lo"):
        Stream(CASE).integers(3, 0, 2**33)
    with pytest.raises(UsageError, match="5 distinct numbers of 4"):
        Stream(CASE).choice(1, 4, 5)
