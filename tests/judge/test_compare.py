"""Comparing and judging: what counts as a difference, and how large it is."""

from __future__ import annotations

from math import inf, isnan
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conformance.ggml import quants
from conformance.ggml.ops.recurrent import SSM_SCAN
from conformance.ggml.tensor import Bytes, Tensor, new_tensor
from conformance.ggml.types import BF16, F16, F32, I32, Q4_0, Q8_0
from conformance.judge.budget import RAW, Budget
from conformance.judge.compare import compare, in_order, values


def _packed(a: object) -> Bytes:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def _f32(*values: float) -> tuple[Tensor, Bytes]:
    return new_tensor(F32, len(values)), _packed(np.array(values, np.float32))


finite = hnp.arrays(np.float32, (3, 5), elements=st.floats(-1e4, 1e4, width=32))


@given(finite)
def test_equal_bytes_are_no_difference(a: np.ndarray) -> None:
    """A tensor compared with itself takes nothing of any budget, not even of one that allows nothing."""
    d = compare(new_tensor(F32, 5, 3), _packed(a), _packed(a.copy()))
    assert (d.nmse, d.element, d.raw) == (0.0, 0.0, 0)
    assert RAW.used(d) == 0.0


@given(finite, finite)
def test_nmse_divides_by_the_expected_energy(want: np.ndarray, got: np.ndarray) -> None:
    """NMSE is the error's energy over the expected one's: a large wrong output cannot make its own error small."""
    d = compare(new_tensor(F32, 5, 3), _packed(want), _packed(got))
    w, g = want.astype(np.float64), got.astype(np.float64)
    error, energy = float(((g - w) ** 2).sum()), float((w**2).sum())
    assert d.nmse == pytest.approx(error / energy if energy else (inf if error else 0.0))


@given(finite, st.integers(0, 14), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_one_special_value_out_of_place_fails_every_budget(a: np.ndarray, i: int, special: float) -> None:
    """NaN or Inf where a number is expected, or the other way round, is wrong whatever the budget."""
    b = a.copy()
    b.flat[i] = special
    t = new_tensor(F32, 5, 3)
    for want, got in ((a, b), (b, a)):
        d = compare(t, _packed(want), _packed(got))
        assert d.special == 1
        assert Budget(1e9, 1e9).used(d) == inf
        assert d.index[:2] == (i % 5, i // 5)


def test_nan_in_its_place_is_no_difference() -> None:
    """A NaN matches a NaN of another payload, an Inf an Inf of the same sign only."""
    t = new_tensor(F32, 2)
    a = np.array([0x7FC00000, 0x3F800000], "<u4")
    b = np.array([0x7FC00001, 0x3F800000], "<u4")
    d = compare(t, _packed(a), _packed(b))
    assert (d.special, d.nmse, d.raw) == (0, 0.0, 1)
    t, plus = _f32(np.inf, 1.0)
    _, minus = _f32(-np.inf, 1.0)
    assert compare(t, plus, minus).special == 1


def test_a_signalling_nan_is_no_warning() -> None:
    """A NaN with the quiet bit clear, as a device's unwritten memory may hold, is a NaN as any other."""
    t, expected = _f32(1.0)
    found = _packed(np.array([0x7F800001], "<u4"))
    assert np.isnan(values(t, found)).all()
    assert compare(t, expected, found).special == 1


@given(st.integers(0, 200))
def test_empty_cells_change_nothing(empty: int) -> None:
    """What a value may be off by does not depend on how many zeros stand beside it, expected and found."""
    want, got = np.array([3.0, -1.0, 0.5], np.float32), np.array([3.0, -1.25, 0.5], np.float32)
    zeros = np.zeros(empty, np.float32)
    few = compare(new_tensor(F32, 3), _packed(want), _packed(got))
    many = compare(new_tensor(F32, 3 + empty), _packed(np.append(want, zeros)), _packed(np.append(got, zeros)))
    assert (many.nmse, many.element) == pytest.approx((few.nmse, few.element))


def test_worst_element_is_named_in_ne_order() -> None:
    """The index of the worst element counts the fastest dimension first, and both values stand beside it."""
    want = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 1
    got = want.copy()
    got[1, 2, 3] = -7
    d = compare(new_tensor(F32, 4, 3, 2), _packed(want), _packed(got))
    assert (d.index, d.expected, d.found) == ((3, 2, 1, 0), 24.0, -7.0)
    assert "at [3, 2, 1, 0]: 24 expected, -7 found" in str(d)


def test_a_zero_of_another_sign_is_named() -> None:
    """Where all numbers are equal, the element is the first whose bytes differ."""
    t, want = _f32(2.0, 0.0, 0.0)
    _, got = _f32(2.0, 0.0, -0.0)
    assert str(compare(t, want, got)) == "at [2, 0, 0, 0]: 0 expected, -0 found (NMSE 0)"


def test_zeros_expected_allow_no_error() -> None:
    """Where all expected values are 0 any error is infinitely large."""
    t, zero = _f32(0.0, 0.0)
    _, tiny = _f32(0.0, 1e-30)
    assert compare(t, zero, tiny).nmse == inf


@pytest.mark.parametrize("type_", [Q4_0, Q8_0])
def test_block_types_count_blocks(type_: object) -> None:
    """A block type's raw difference counts blocks, its error is measured on the dequantised values."""
    t = new_tensor(Q8_0 if type_ is Q8_0 else Q4_0, 64, 2)
    x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(1, 1, 2, 64)
    want = _packed(quants.from_float(t.type, x))
    got = want.copy()
    got[5] ^= 0x11
    d = compare(t, want, got)
    assert d.raw == 1
    assert 0 < d.nmse < 1


@pytest.mark.parametrize("type_", [F16, BF16])
def test_narrow_floats_are_compared_by_value(type_: object) -> None:
    """One unit in the last place of F16 and BF16 is a small difference, not a wrong one."""
    t = new_tensor(F16 if type_ is F16 else BF16, 4)
    want = _packed(np.array([0x3C00, 0x4000, 0x4100, 0x4200], "<u2"))
    got = want.copy()
    got[0] ^= 1
    d = compare(t, want, got)
    assert d.raw == 1
    assert 0 < d.element < 2**-7


def test_integers_are_raw() -> None:
    """An index that is off by one is a difference in raw bytes."""
    t = new_tensor(I32, 3)
    d = compare(t, _packed(np.array([3, 1, 2], "<i4")), _packed(np.array([3, 2, 1], "<i4")))
    assert d.raw == 2
    assert RAW.used(d) == inf
    unordered = compare(t, _packed(np.array([3, 1, 2], "<i4")), _packed(np.array([3, 2, 1], "<i4")), unordered=True)
    assert unordered.raw == 0


def test_another_size_is_wholly_wrong() -> None:
    """Bytes of another size are wrong in every element."""
    t, a = _f32(1.0, 2.0)
    d = compare(t, a, a[:4])
    assert d.raw == d.special == d.count == 2
    assert isnan(d.found)


@given(
    st.lists(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.0]), min_size=6, max_size=6), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_equal_keys_may_come_in_any_order(rows: list[list[float]], random: Random) -> None:
    """Any ARGSORT that gives the keys in order is the same to the judge; one that swaps unequal keys is not."""
    keys = np.array(rows, "<f4")
    right = np.argsort(keys, axis=-1, kind="stable").astype("<i4")
    other = right.copy()
    for k, row in zip(keys, other, strict=True):
        row[:] = np.lexsort(([random.random() for _ in k], k))
    want, got = (in_order(x.reshape(-1).view(np.uint8), keys) for x in (right, other))
    assert want.tobytes() == got.tobytes() == right.tobytes()
    wrong = right[:, ::-1].copy()
    same = in_order(wrong.reshape(-1).view(np.uint8), keys).tobytes() == right.tobytes()
    assert same == all(len(set(row)) == 1 for row in rows)


def test_indices_outside_the_row_are_left_alone() -> None:
    """Indices out of range are returned unchanged and so fail the comparison."""
    bad = np.array([0, 9], "<i4").view(np.uint8)
    assert in_order(bad, np.zeros((1, 2), "<f4")) is bad


def _scan(small: float, where: str) -> tuple[Tensor, Bytes]:
    """Return an SSM_SCAN of 4 outputs and 32 states, and its values; those of `where` have the size `small`."""
    f = [new_tensor(F32, *ne) for ne in ((8, 1, 4, 1), (1, 4, 1, 1), (4, 1, 1), (8, 4), (8, 1, 1, 1), (8, 1, 1, 1))]
    node = SSM_SCAN.node(*f, new_tensor(I32, 1), K=1)
    values = np.linspace(1, 2, 36, dtype=np.float32)
    values[slice(4) if where == "outputs" else slice(4, None)] *= small
    return node, _packed(values)


@pytest.mark.parametrize(("where", "at"), [("outputs", 3), ("states", 20)])
def test_outputs_and_states_are_measured_apart(where: str, at: int) -> None:
    """A wrong small part of a result is seen beside a large one, with its own NMSE and the right index."""
    node, want = _scan(1e-6, where)
    got = want.copy()
    got.view(np.float32)[at] *= 2
    d = compare(node, want, got)
    assert d.index == (at, 0, 0, 0)
    assert d.nmse > 0.01
    assert d.element > 0.1
    assert (d.raw, d.count) == (1, 36)


def test_states_do_not_lower_the_limit_of_outputs() -> None:
    """A rounding of outputs that are a million times larger than states is relative to outputs."""
    node, want = _scan(1e-6, "states")
    got = want.copy()
    got.view(np.float32)[:4] *= 1 + 1e-6
    assert compare(node, want, got).element < 1e-6
