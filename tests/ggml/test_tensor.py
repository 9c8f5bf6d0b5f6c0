"""Sizes, layout questions and zero-copy views against the real ggml and against index arithmetic by hand."""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from ggml_ctypes import load
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.ggml import tensor as tn
from conformance.ggml.errors import GraphError
from conformance.ggml.lib.layout import CTensor
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Dims, Tensor
from conformance.ggml.types import BF16, F16, F32, I8, I64, Q4_0, Q8_0, TYPES, GGMLType

B = Builder()
QUICK = settings(max_examples=300, deadline=None)
TYPE = st.sampled_from((F32, F16, BF16, I8, I64, Q4_0, Q8_0, TYPES["q6_K"]))


@cache
def lib() -> ctypes.CDLL:
    """The real ggml, with the questions it answers of a tensor."""
    found = load()
    for name in (
        "is_transposed",
        "is_permuted",
        "is_empty",
        "is_contiguous_rows",
        *(f"is_contiguous_{n}" for n in range(3)),
    ):
        f = getattr(found, f"ggml_{name}")
        f.argtypes, f.restype = (ctypes.c_void_p,), ctypes.c_bool
    found.ggml_nbytes.restype = ctypes.c_size_t
    found.ggml_can_repeat.argtypes = found.ggml_are_same_shape.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    found.ggml_can_repeat.restype = found.ggml_are_same_shape.restype = ctypes.c_bool
    return found


def c(t: Tensor) -> CTensor:
    """`t` as the library sees it; only type, ne and nb matter to these questions."""
    made = CTensor(type=t.type.id)
    made.ne[:], made.nb[:] = t.ne, t.nb
    return made


@st.composite
def any_strides(draw: st.DrawFn) -> Tensor:
    """Any type, small dimensions, strides that are sometimes contiguous, sometimes permuted, sometimes arbitrary."""
    t = draw(TYPE)
    ne = _draw_ne(draw, t)
    nb = tn.contiguous_nb(t, ne)
    kind = draw(st.sampled_from(("contiguous", "permuted", "gaps", "any")))
    if kind == "permuted":
        axes = draw(st.permutations(range(4)))
        ne, nb = _take(ne, axes), _take(nb, axes)
    elif kind == "gaps":
        gap = draw(st.tuples(*(st.integers(0, 2),) * 3))
        nb = (nb[0], *(n + g * t.type_size for n, g in zip(nb[1:], gap, strict=True)))  # type: ignore[assignment]
    elif kind == "any":
        nb = _take([draw(st.integers(0, 8)) * t.type_size for _ in range(4)], range(4))
    return Tensor(t, ne, nb)


def _draw_ne(draw: st.DrawFn, t: GGMLType) -> Dims:
    n0, n1, n2, n3 = (draw(st.integers(0, 3)) for _ in range(4))
    return (n0 * t.blck_size, n1, n2, n3)


def _take(values: list[int] | Dims, axes: list[int] | range) -> Dims:
    a, b, c_, d = (values[x] for x in axes)
    return (a, b, c_, d)


@QUICK
@given(any_strides())
def test_layout_questions_have_ggmls_answers(t: Tensor) -> None:
    """nbytes, nelements, nrows, is_contiguous(n), is_permuted, is_transposed … on any strides."""
    p = ctypes.byref(c(t))
    assert tn.nbytes(t) == lib().ggml_nbytes(p)
    assert tn.nelements(t) == lib().ggml_nelements(p)
    assert tn.nrows(t) == lib().ggml_nrows(p)
    for n in range(3):
        assert tn.is_contiguous(t, n) == getattr(lib(), f"ggml_is_contiguous_{n}")(p)
    for name in ("is_transposed", "is_permuted", "is_empty", "is_contiguous_rows"):
        assert getattr(tn, name)(t) == getattr(lib(), f"ggml_{name}")(p), name


@QUICK
@given(any_strides(), any_strides())
def test_shape_questions_have_ggmls_answers(a: Tensor, b: Tensor) -> None:
    """can_repeat and same_shape, empty tensors included."""
    pa, pb = ctypes.byref(c(a)), ctypes.byref(c(b))
    assert tn.same_shape(a, b) == lib().ggml_are_same_shape(pa, pb)
    assert tn.can_repeat(a, b) == lib().ggml_can_repeat(pa, pb)


@st.composite
def view_in_buffer(draw: st.DrawFn) -> tuple[Tensor, Bytes]:
    """A view with any strides, inside a buffer of random bytes."""
    t = draw(TYPE)
    ne = _draw_ne(draw, t)
    steps = [1 if t.blck_size > 1 else draw(st.integers(0, 5)), *(draw(st.integers(0, 7)) for _ in range(3))]
    v = Tensor(t, ne, _take([s * t.type_size for s in steps], range(4)), op="VIEW")
    v.view_offs = draw(st.integers(0, 5))
    size = v.view_offs + tn.nbytes(v) + draw(st.integers(0, 3))
    return v, np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, size, np.uint8)


def _element(t: Tensor, buffer: Bytes, i: tuple[int, int, int, int], size: int) -> bytes:
    """Bytes of the element (scalar types) or block (block types) `i`, by ggml's own arithmetic."""
    start = t.view_offs + sum(x * n for x, n in zip(i, t.nb, strict=True))
    return buffer[start : start + size].tobytes()


@QUICK
@given(view_in_buffer())
def test_strided_shows_every_element_where_ggml_puts_it(made: tuple[Tensor, Bytes]) -> None:
    """Element [i3, i2, i1, i0] is at view_offs + sum(i * nb), and pack lays them out in that order."""
    t, buffer = made
    n0 = t.ne[0] // t.type.blck_size
    expected = [
        _element(t, buffer, (i0, i1, i2, i3), t.type.type_size)
        for i3, i2, i1, i0 in product(range(t.ne[3]), range(t.ne[2]), range(t.ne[1]), range(n0))
    ]
    assert tn.pack(buffer, t).tobytes() == b"".join(expected)
    assert tn.pack(buffer, t).nbytes == tn.packed_nbytes(t)
    seen = tn.strided(buffer, t)
    assert seen.shape == (t.ne[::-1] if t.type.blck_size == 1 else (*t.ne[:0:-1], n0, t.type.type_size))


@QUICK
@given(view_in_buffer())
def test_strided_shares_memory_and_writes_through(made: tuple[Tensor, Bytes]) -> None:
    """No copy: what is written into the view stands in the buffer, and nothing beside it changes."""
    t, buffer = made
    seen = tn.strided(buffer, t)
    if seen.size == 0:
        return
    assert np.shares_memory(seen, buffer)
    touched = np.zeros_like(buffer)
    tn.strided(touched, t)[...] = _all_bytes(seen.dtype, 1)
    before = buffer.copy()
    seen[...] = _all_bytes(seen.dtype, 77)
    assert (buffer[touched == 1] == 77).all()
    assert (buffer[touched == 0] == before[touched == 0]).all()


def _all_bytes(dtype: np.dtype[Any], byte: int) -> NDArray[Any]:
    """One element whose bytes are all `byte`."""
    return np.full(dtype.itemsize, byte, np.uint8).view(dtype)


def test_strided_is_as_writable_as_its_buffer() -> None:
    """A read-only buffer gives a read-only view."""
    buffer = np.zeros(16, np.uint8)
    buffer.flags.writeable = False
    assert not tn.strided(buffer, tn.new_tensor(F32, 4)).flags.writeable


@QUICK
@given(view_in_buffer(), st.integers(1, 4))
def test_strided_refuses_to_leave_the_buffer(made: tuple[Tensor, Bytes], short: int) -> None:
    """One byte too few, or a start before the buffer, is a GraphError."""
    t, buffer = made
    end = t.view_offs + tn.nbytes(t)
    if end >= short:
        with pytest.raises(GraphError, match="lie outside its buffer"):
            tn.strided(buffer[: end - short], t)
    with pytest.raises(GraphError, match="lie outside its buffer"):
        tn.strided(buffer, t, -1)


@pytest.mark.parametrize("t", TYPES.values(), ids=str)
def test_new_tensor_is_contiguous(t: GGMLType) -> None:
    """Every type: strides without gaps, and bytes that are blocks times the type size."""
    made = tn.new_tensor(t, 2 * t.blck_size, 3)
    assert tn.is_contiguous(made)
    assert tn.nbytes(made) == tn.packed_nbytes(made) == 6 * t.type_size
    assert made.shape == (1, 1, 3, 2 * t.blck_size)


@pytest.mark.parametrize("ne", [(), (1, 2, 3, 4, 5)])
def test_new_tensor_refuses_other_than_one_to_four_dimensions(ne: tuple[int, ...]) -> None:
    """The limit is ggml's, in its words."""
    with pytest.raises(GraphError, match="n_dims >= 1"):
        tn.new_tensor(F32, *ne)


def test_broken_blocks_are_refused() -> None:
    """A row of a block type is whole blocks."""
    with pytest.raises(GraphError, match=r"ne % ggml_blck_size\(type\) == 0.*33.*q4_0"):
        tn.new_tensor(Q4_0, 33)


@QUICK
@given(st.floats(width=32))
def test_float_params_keep_their_bits(x: float) -> None:
    """f32_bits and bits_f32 are inverse, NaN included."""
    t = Tensor(F32, (1, 1, 1, 1), (4, 4, 4, 4), op_params=(tn.f32_bits(x), *(0,) * 15))
    np.testing.assert_equal(tn.bits_f32(t.op_params[0]), x)
    assert -(2**31) <= t.op_params[0] < 2**31


def test_float_params_round_and_overflow_as_c_does() -> None:
    """A double is rounded to float32; too large is infinite."""
    assert tn.f32_bits(0.1) == 0x3DCCCCCD
    assert tn.f32_bits(1e39) == 0x7F800000
    assert tn.f32_bits(-1e39) == 0xFF800000 - 2**32
