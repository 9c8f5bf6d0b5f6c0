"""Every number goes into every type and comes out of it with the bits that the real ggml gives it."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from conformance.ggml import quants
from conformance.ggml.errors import GraphError
from conformance.ggml.quants import write
from conformance.ggml.quants.blocks import BLOCK, as_blocks, random_blocks
from conformance.ggml.quants.write import WRITE, sum_in_order
from conformance.ggml.types import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    IQ1_S,
    IQ2_XXS,
    IQ4_NL,
    MXFP4,
    Q4_0,
    Q4_K,
    Q8_0,
    Q8_1,
    Q8_K,
    TYPES,
    GGMLType,
)

Array = NDArray[Any]
F32Array = NDArray[np.float32]

needs_ggml = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or importlib.util.find_spec("xllamacpp") is None,
    reason="the oracle is the x86-64 Linux build of ggml in the xllamacpp wheel; others may fuse a multiply and an add",
)

GRID = {"iq2_s", "iq3_xxs", "iq3_s"}
"""Types that ggml can quantise and this project only reads."""


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


class _TraitsCpu(ctypes.Structure):
    """`struct ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


_CONVERT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@cache
def _ggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    lib = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    lib.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_TraitsCpu)
    lib.ggml_validate_row_data.restype = ctypes.c_bool
    lib.ggml_validate_row_data.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    lib.ggml_cpu_init()
    return lib


def _function(t: GGMLType, which: str) -> Callable[..., None] | None:
    """`to_float`, `from_float_ref` or ggml-cpu's `from_float` of a type."""
    lib = _ggml()
    if t is Q8_K and which != "from_float":  # not in the table, though it exists
        name = {"to_float": "dequantize_row_q8_K", "from_float_ref": "quantize_row_q8_K_ref"}[which]
        return _CONVERT(ctypes.cast(getattr(lib, name), ctypes.c_void_p).value or 0)
    traits = lib.ggml_get_type_traits_cpu if which == "from_float" else lib.ggml_get_type_traits
    pointer = getattr(traits(t.id)[0], which)
    return _CONVERT(pointer) if pointer else None


def _ggml_to_float(t: GGMLType, raw: Array) -> F32Array:
    convert = _function(t, "to_float")
    assert convert is not None
    raw = np.ascontiguousarray(raw)
    out = np.empty(raw.nbytes // t.type_size * t.blck_size, np.float32)
    convert(raw.ctypes.data, out.ctypes.data, out.size)
    return out


def _ggml_from_float(t: GGMLType, x: F32Array, which: str) -> NDArray[np.uint8]:
    convert = _function(t, which)
    assert convert is not None
    # zeros: what ggml leaves unwritten is then as here, but for IQ4_NL
    out = np.zeros((x.size // t.blck_size, t.type_size), np.uint8)
    convert(np.ascontiguousarray(x).ctypes.data, out.ctypes.data, x.size)
    return out


def _words(seed: int, n: int) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 1 << 64, n, np.uint64)


def _rows(seed: int, n: int = 512) -> dict[str, F32Array]:
    """Rows of values of many kinds, by name."""
    rng = np.random.default_rng(seed)

    def normal(rows: int) -> Array:
        return rng.standard_normal((rows, n))

    outlier = normal(40) * 1e-3
    outlier[np.arange(40), rng.integers(0, n, 40)] = rng.standard_normal(40) * 100
    sparse = np.where(rng.random((60, n)) < 0.7, 0, normal(60))
    groups = normal(60).reshape(60, -1, 16) * np.exp2(rng.integers(-30, 10, (60, n // 16, 1)))
    groups[rng.random((60, n // 16)) < 0.3] = 0
    below = np.nextafter(np.float32(1), np.float32(0)) * np.exp2(rng.integers(-100, 100, (60, 1)))
    ties = rng.integers(-254, 255, (100, n)) / 2
    ties[:, ::32] = 127
    kinds = {
        "normal": normal(200),
        "scaled": normal(200) * np.exp2(rng.integers(-40, 40, (200, 1))),
        "tiny": normal(40) * 1e-30,
        "denormal": normal(40) * 1e-41,
        "huge": normal(40) * 1e36,
        "all equal": np.repeat(rng.standard_normal((40, 1)), n, 1),
        "zeros": np.zeros((4, n)),
        "zeros of either sign": np.where(rng.random((8, n)) < 0.5, -0.0, 0.0),
        "one outlier": outlier,
        "halves": rng.integers(-16, 17, (60, n)) / 2,
        "halves of the 127th part": ties
        * np.concatenate([np.exp2(rng.integers(-9, 9, 50)), normal(1)[0, :50]])[:, None],
        "small integers": rng.integers(-3, 4, (60, n)),
        "positive": np.abs(normal(40)) + 1,
        "negative": -np.abs(normal(40)) - 1,
        "mostly zero": sparse,
        "groups of 16 apart": groups.reshape(60, n),
        "many magnitudes": np.exp(normal(60) * 6) * np.sign(normal(60)),
        "uniform": rng.uniform(-1, 1, (100, n)),
        "just below a power of two": below * rng.choice([1, -1, 0.5, 0], (60, n)),
    }
    return {name: x.astype(np.float32) for name, x in kinds.items()}


KINDS = _rows(0)
BLOCK_TYPES = [t for t in TYPES.values() if t.is_quantized]
STORED = [t for t in TYPES.values() if t in WRITE or t in (F16, BF16)]


def _comparable(t: GGMLType, x: F32Array, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`blocks` without what ggml leaves to chance: quants of IQ4_NL blocks of zeros."""
    if t is not IQ4_NL:
        return blocks
    zero = np.abs(x.reshape(-1, 32)).max(axis=1) < np.float32(1e-15)
    return np.where(zero[:, None] & (np.arange(18) >= 2), np.uint8(0), blocks)


def _assert_stored(t: GGMLType, x: F32Array, what: str) -> None:
    for which, store in (("from_float_ref", quants.from_float), ("from_float", quants.from_float_cpu)):
        if _function(t, which) is None:
            continue
        expected = _comparable(t, x, _ggml_from_float(t, x, which))
        found = _comparable(t, x, np.ascontiguousarray(store(t, x)).view(np.uint8).reshape(expected.shape))
        wrong = np.flatnonzero((expected != found).any(axis=1))
        assert wrong.size == 0, f"{t} {which}, {what}: {wrong.size} of {len(found)} blocks differ, first {wrong[0]}"


def test_every_block_has_ggml_s_size() -> None:
    """The structured type of each block type is as large as the block, without padding."""
    assert {t: d.itemsize for t, d in BLOCK.items()} == {t: t.type_size for t in BLOCK_TYPES}


@needs_ggml
@pytest.mark.parametrize("t", BLOCK_TYPES, ids=str)
def test_to_float_is_ggml_s(t: GGMLType) -> None:
    """Blocks of random bytes become the very floats that ggml reads, wild scales included; NaN is NaN."""
    raw = _words(t.id, 1000 * t.type_size // 8).view(np.uint8).reshape(1000, t.type_size)
    if t is Q8_1:
        assert _function(t, "to_float") is None
        return
    expected, found = _ggml_to_float(t, raw), quants.to_float(t, raw)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(nan, np.isnan(found))
    np.testing.assert_array_equal(expected.view(np.uint32)[~nan], found.view(np.uint32)[~nan])


@needs_ggml
@pytest.mark.parametrize("t", [F16, BF16], ids=str)
def test_every_half_is_read_as_ggml_reads_it(t: GGMLType) -> None:
    """All 65536 patterns of F16 and BF16, NaN payloads included."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    raw = bits.view(np.float16) if t is F16 else bits
    np.testing.assert_array_equal(_ggml_to_float(t, bits).view(np.uint32), quants.to_float(t, raw).view(np.uint32))


@needs_ggml
@pytest.mark.parametrize("t", STORED, ids=str)
def test_from_float_is_ggml_s(t: GGMLType) -> None:
    """Rows of all kinds are stored in the very bytes that ggml's reference and ggml-cpu store."""
    for kind, x in KINDS.items():
        _assert_stored(t, x, kind)


@needs_ggml
@pytest.mark.parametrize("t", STORED, ids=str)
@settings(max_examples=25, deadline=None)
@given(x=hnp.arrays(np.float32, 256, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_from_float_of_any_row_is_ggml_s(t: GGMLType, x: F32Array) -> None:
    """Any finite row is stored in ggml's bytes."""
    _assert_stored(t, x, f"{x!r}")


@needs_ggml
@given(bits=hnp.arrays(np.uint32, st.integers(1, 64)))
def test_any_float_becomes_ggml_s_half(bits: NDArray[np.uint32]) -> None:
    """Any pattern of a float, NaN included, becomes the reference's F16 and BF16."""
    x = bits.view(np.float32)
    for t in (F16, BF16):
        found = np.ascontiguousarray(quants.from_float(t, x)).view(np.uint8).reshape(-1, 2)
        np.testing.assert_array_equal(_ggml_from_float(t, x, "from_float_ref"), found)


@needs_ggml
@pytest.mark.parametrize("t", [F16, BF16], ids=str)
def test_borders_between_halves_are_ggml_s(t: GGMLType) -> None:
    """Each half, each middle of two, and the floats on both sides round as the reference and ggml-cpu round."""
    half = quants.to_float(t, np.arange(1 << 16, dtype=np.uint16).view(np.float16 if t is F16 else np.uint16))
    bits = half[np.isfinite(half)].view(np.uint32)
    step = 1 << 16 if t is BF16 else 1 << 13
    x = np.concatenate(
        [bits + np.uint32(offset % (1 << 32)) for offset in (-1, 0, 1, step // 2 - 1, step // 2, step // 2 + 1)]
    )
    values = x.view(np.float32)
    _assert_stored(t, values[~np.isnan(values)], "borders")


@needs_ggml
def test_mxfp4_exponent_near_powers_of_two_is_ggml_s() -> None:
    """The exponent comes from log2f, which rounds up just below a power of two: the same floats do so here."""
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32).view(np.int32)
    bits = np.maximum(powers[:, None] + np.arange(-200, 20, dtype=np.int32), 0)
    x = np.zeros((bits.size, 32), np.float32)
    x[:, 3] = bits.reshape(-1).view(np.float32)
    assert len(np.unique(quants.from_float(MXFP4, x)[:, 0, 0])) == 256
    _assert_stored(MXFP4, x, "near powers of two")


@needs_ggml
@pytest.mark.parametrize("t", STORED, ids=str)
def test_infinity_is_stored_as_ggml_stores_it(t: GGMLType) -> None:
    """An infinite value gives ggml's bytes, though C leaves the conversion open."""
    for value in (np.inf, -np.inf):
        x = KINDS["normal"][:20].copy()
        x[np.arange(20), np.arange(20) * 25] = value
        _assert_stored(t, x, str(value))


@needs_ggml
def test_quantize_chunk_agrees() -> None:
    """`ggml_quantize_chunk` without an importance matrix stores as the reference does, row after row."""
    lib, x = _ggml(), KINDS["normal"][:4]
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    )  # fmt: skip
    for t in (Q4_0, Q8_0, Q4_K):
        out = np.zeros((x.size // t.blck_size, t.type_size), np.uint8)
        size = lib.ggml_quantize_chunk(t.id, x.ctypes.data, out.ctypes.data, 0, len(x), x.shape[1], None)
        assert size == out.nbytes
        np.testing.assert_array_equal(out, quants.from_float(t, x).reshape(out.shape))


@needs_ggml
def test_what_ggml_can_store_is_what_from_float_takes() -> None:
    """A type has a quantiser where ggml has one, except `GRID`; ggml-cpu's `from_float` adds F32 and I32."""
    for t in TYPES.values():
        ggml_can = t.name not in GRID and any(
            _function(t, which) is not None for which in ("from_float_ref", "from_float")
        )
        x = np.zeros((1, 256), np.float32)
        if ggml_can:
            quants.from_float(t, x)
        else:
            with pytest.raises(GraphError, match="no quantiser"):
                quants.from_float(t, x)


@needs_ggml
def test_only_q8_0_and_q8_1_differ_between_reference_and_simd() -> None:
    """ggml-cpu's x86 code stores normal values other than the reference in Q8_0 and Q8_1, and in no other type."""
    x = KINDS["halves of the 127th part"]
    differ = {
        t for t in STORED
        if (_comparable(t, x, _ggml_from_float(t, x, "from_float_ref"))
             != _comparable(t, x, _ggml_from_float(t, x, "from_float"))).any()
    }  # fmt: skip
    assert differ == {Q8_0, Q8_1}


@needs_ggml
def test_vec_dot_type_is_ggml_s() -> None:
    """The table of activation types is type_traits_cpu's, for every type that ggml-cpu can multiply."""
    for t in TYPES.values():
        traits = _ggml().ggml_get_type_traits_cpu(t.id)[0]
        if traits.vec_dot or t is Q8_1:
            assert quants.vec_dot_type(t).id == traits.vec_dot_type
        else:
            with pytest.raises(GraphError, match="has no product for"):
                quants.vec_dot_type(t)


@needs_ggml
@pytest.mark.parametrize("t", BLOCK_TYPES, ids=str)
def test_random_blocks_are_valid(t: GGMLType) -> None:
    """Random blocks pass `ggml_validate_row_data` (which knows no Q8_1) and hold moderate, varied values."""
    raw = random_blocks(t, _words(7, 20_000), 500)
    assert raw.shape == (500, t.type_size)
    if t is not Q8_1:
        assert _ggml().ggml_validate_row_data(t.id, raw.ctypes.data, raw.nbytes)
    values = quants.to_float(t, raw)
    assert np.isfinite(values).all()
    assert 0.1 < np.abs(values).max() < 20
    assert len(np.unique(values)) > 20


def test_random_blocks_are_these_forever() -> None:
    """The same words give the same bytes on any machine; a function is asked for the words needed."""
    words = np.arange(1, 200, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert random_blocks(Q4_0, words, 1).tobytes().hex() == "152c4a7fb979379e2af894fe72f36e3c3f74"
    assert random_blocks(Q4_0, lambda n: words[:n], 9).tobytes() == random_blocks(Q4_0, words, 9).tobytes()


def test_sums_in_random_blocks_agree_with_their_quants() -> None:
    """Q8_1's `s` and Q8_K's `bsums` are what a quantiser would have written."""
    b = as_blocks(Q8_1, random_blocks(Q8_1, _words(1, 500), 100))
    np.testing.assert_array_equal(b["s"], (b["d"].astype(np.float64) * b["qs"].sum(axis=1)).astype(np.float16))
    k = as_blocks(Q8_K, random_blocks(Q8_K, _words(2, 500), 13))
    np.testing.assert_array_equal(k["bsums"], k["qs"].reshape(-1, 16, 16).sum(axis=2))


@pytest.mark.parametrize("t", BLOCK_TYPES, ids=str)
def test_layout_does_not_matter(t: GGMLType) -> None:
    """Any strides and leading axes are read alike, and an empty tensor is an empty tensor."""
    raw = random_blocks(t, _words(3, 2000), 24).reshape(2, 3, 4, t.type_size)
    flat = quants.to_float(t, raw.reshape(-1, t.type_size)).reshape(2, 3, 4 * t.blck_size)
    np.testing.assert_array_equal(flat, quants.to_float(t, raw))
    np.testing.assert_array_equal(flat.swapaxes(0, 1), quants.to_float(t, raw.swapaxes(0, 1)))
    assert quants.to_float(t, raw[:0]).shape == (0, 3, 4 * t.blck_size)
    if t in WRITE:
        back = quants.from_float(t, flat.swapaxes(0, 1))
        np.testing.assert_array_equal(quants.from_float(t, flat).swapaxes(0, 1), back)
        assert quants.from_float(t, flat[:0]).shape == (0, 3, 4, t.type_size)


@pytest.mark.parametrize("t", WRITE, ids=str)
def test_many_rows_are_stored_as_each_alone(t: GGMLType) -> None:
    """A block's bytes depend on its own values only, however many blocks are stored at once."""
    x = np.ascontiguousarray(KINDS["normal"][:70, :256])
    alone = np.concatenate([quants.from_float(t, row[None]) for row in x])
    np.testing.assert_array_equal(alone, quants.from_float(t, x))


def test_float64_is_rounded_once_to_float32() -> None:
    """A double between two halves is rounded to float32 before the type sees it, as a float buffer would."""
    x = np.array([1 + 2**-11 + 2**-40])
    assert quants.from_float(F16, x) == np.float16(1)
    assert quants.from_float(F32, x).dtype == np.float32


def test_integers_and_doubles_are_read() -> None:
    """Integers become the nearest float32, doubles stay doubles."""
    for t in (I8, I16, I32, I64):
        found = quants.to_float(t, np.array([-3, 0, 100], t.dtype))
        assert found.dtype == np.float32
        assert found.tolist() == [-3, 0, 100]
    assert quants.to_float(I32, np.array([(1 << 24) + 1], np.int32)) == np.float32(1 << 24)
    assert quants.to_float(F64, np.array([0.1])).tolist() == [0.1]


def test_to_float_is_a_copy() -> None:
    """Writing into what was read never changes the tensor."""
    for t in (F32, F16, BF16, I8, F64):
        raw = np.zeros(4, t.dtype or np.uint16)
        quants.to_float(t, raw)[:] = 1
        assert not raw.any()
    x = np.zeros(4, np.float32)
    quants.from_float(F32, x)[:] = 1
    assert not x.any()


@given(x=hnp.arrays(np.float32, (3, 64), elements=st.floats(-1e6, 1e6, width=32)))
def test_roundtrip_is_store_and_read(x: F32Array) -> None:
    """`roundtrip` gives what storing and reading gives, in either arithmetic, within half a step of Q8_0."""
    for simd, store in ((False, quants.from_float), (True, quants.from_float_cpu)):
        found = quants.roundtrip(Q8_0, x, "simd" if simd else "reference")
        np.testing.assert_array_equal(quants.to_float(Q8_0, store(Q8_0, x)), found)
        top = np.abs(x.reshape(3, 2, 32)).max(axis=2).repeat(32, axis=1)
        normal = (top > 1e-2) & (top < 1e6)
        assert (np.abs(found - x)[normal] <= (0.56 * top / 127)[normal]).all()


@given(
    a=hnp.arrays(np.float32, st.tuples(st.integers(1, 33), st.integers(1, 3)), elements=st.floats(-1e9, 1e9, width=32))
)
def test_sums_are_in_order(a: F32Array) -> None:
    """The sum over the first axis is the C loop's, for one column and for many: NumPy's pairwise sum would not do."""
    expected = np.zeros(a.shape[1], np.float32)
    for row in a:
        expected = expected + row
    np.testing.assert_array_equal(expected, sum_in_order(a))


def test_mistakes_are_named() -> None:
    """A wrong layout, a broken row, a type without quantiser and an unknown arithmetic raise GraphError and say why."""
    with pytest.raises(GraphError, match=r"q4_0: uint8 blocks of shape \(..., n, 18\) expected, uint8 \(2, 17\) found"):
        quants.to_float(Q4_0, np.zeros((2, 17), np.uint8))
    with pytest.raises(GraphError, match="f16: an array of float16 expected, float32 found"):
        quants.to_float(F16, np.zeros(2, np.float32))
    with pytest.raises(GraphError, match=r"q4_0 has 32, shape \(3, 40\) came"):
        quants.from_float(Q4_0, np.zeros((3, 40), np.float32))
    with pytest.raises(GraphError, match="no quantiser for iq2_xxs"):
        quants.from_float(IQ2_XXS, np.zeros(256, np.float32))
    with pytest.raises(GraphError, match="'fast' found"):
        quants.quantizer("fast")
    with pytest.raises(GraphError, match="a block type expected, f16 found"):
        random_blocks(F16, _words(0, 1), 1)
    with pytest.raises(GraphError, match="words of uint64 expected for 2 blocks of iq1_s"):
        random_blocks(IQ1_S, _words(0, 3), 2)


def test_quantizer_names_are_those_of_arithmetic() -> None:
    """`reference` and `simd` name the two quantisers of x86."""
    assert quants.quantizer("reference") is quants.from_float
    assert quants.quantizer("simd") is quants.from_float_cpu


def test_even_multiplies_by_one_over_the_scale_and_rounds_halves_to_even() -> None:
    """`even` multiplies by another factor than `simd`, and rounds halves unlike `reference`, as NEON and RVV do."""
    x = np.array([29.0, *(29 * (2 * k + 1) / 254 for k in range(31))], np.float32)
    want = np.rint(x * (np.float32(1) / (np.float32(29) / np.float32(127)))).astype(np.int8)
    found = {name: quants.quantizer(name)(Q8_0, x).reshape(-1)[2:].view(np.int8) for name in quants.QUANTIZERS}
    assert (found["even"] == want).all()
    assert (found["fused"] == want).all()
    assert (found["even"] != found["simd"]).any()
    assert (found["even"] != found["reference"]).any()


def test_fused_sums_are_rounded_once() -> None:
    """Against exact fractions; the plain ones round the product, too."""
    rng = np.random.Generator(np.random.PCG64(7))
    a, b, c = rng.standard_normal((3, 500)).astype(np.float32)
    c = (c * np.float32(1e-3) - a * b).astype(np.float32)
    terms = zip(*(map(Fraction, each.tolist()) for each in (a, b, c)), strict=True)
    exact = np.array([float(p * q + r) for p, q, r in terms])
    assert (write.FUSED.add(a, b, c) == exact.astype(np.float32)).all()
    assert (write.PLAIN.add(a, b, c) != exact.astype(np.float32)).any()
    ones = np.ones((1, 500), np.float32)
    pair = np.stack([c, a]), np.concatenate([ones, b[None]])
    assert (write.FUSED.sum(*pair) == exact.astype(np.float32)).all()
    assert (write.FUSED.nearest(a, b) == np.rint(a.astype(np.float64) * b)).all()


@pytest.mark.parametrize("name", ["q2_K", "q4_K", "q5_K", "q8_K"])
def test_fused_stores_differ_in_few_values(name: str) -> None:
    """Rounding decides among scales that are about as good: the values stay as close as those of the reference."""
    x = np.random.Generator(np.random.PCG64(5)).standard_normal((40, 256)).astype(np.float32)
    plain, fused = (quants.roundtrip(TYPES[name], x, how) for how in ("even", "fused"))
    assert 0 < (plain != fused).mean() < 0.2 or name == "q8_K"
    assert np.square(fused - x).mean() == pytest.approx(np.square(plain - x).mean(), rel=0.02)
