"""The other byte order: a case has little-endian bytes, a library on s390x big-endian ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf.scripts import gguf_convert_endian
from hypothesis import given
from hypothesis import strategies as st

from conformance.ggml.errors import GraphError
from conformance.ggml.quants.order import swapped
from conformance.ggml.tensor import Bytes, Tensor, nbytes, new_tensor
from conformance.ggml.types import F32, TYPES

UPSTREAM: dict[gguf.GGMLQuantizationType, Callable[[SimpleNamespace, int], None]] = gguf_convert_endian.byteswap_tensors


def random_bytes(size: int, seed: int) -> Bytes:
    """`size` bytes of a seed."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@given(st.sampled_from(sorted(TYPES)), st.tuples(*3 * [st.integers(1, 4)]), st.integers(0, 5), st.integers(0, 9))
def test_swapping_twice_changes_nothing(name: str, ne: tuple[int, int, int], gap: int, seed: int) -> None:
    """For each type, also with gaps between rows, whose bytes stay."""
    type_ = TYPES[name]
    rows = new_tensor(type_, ne[0] * type_.blck_size, *ne[1:])
    size, row = type_.type_size, rows.nb[1] + gap
    slab = row * ne[1] * ne[2]
    t = Tensor(type_, rows.ne, (rows.nb[0], row, row * ne[1], slab))
    data = random_bytes(nbytes(t), seed)
    once = swapped(data, t)
    assert np.array_equal(swapped(once, t), data)
    kept = np.ones(slab, np.bool_).reshape(-1, row)
    kept[:, : ne[0] * size] = False
    kept = kept.reshape(-1)[: data.size]
    assert np.array_equal(once[kept], data[kept])


@pytest.mark.parametrize("type_", UPSTREAM, ids=lambda t: t.name)
def test_blocks_are_swapped_as_gguf_does(type_: gguf.GGMLQuantizationType) -> None:
    """The types that upstream's converter of files knows."""
    blck, size = gguf.GGML_QUANT_SIZES[type_]
    data = random_bytes(5 * size, 7)
    expected = SimpleNamespace(data=data.copy())
    for at in range(0, data.size, size):
        UPSTREAM[type_](expected, at)
    own = next(t for t in TYPES.values() if t.id == type_.value)
    assert np.array_equal(swapped(data, new_tensor(own, 5 * blck)), expected.data)


def test_scalars_are_those_of_numpy() -> None:
    """F32 with its axes permuted."""
    t = Tensor(F32, (3, 2, 1, 1), (8, 4, 24, 24))
    data = random_bytes(24, 1)
    assert np.array_equal(swapped(data, t), data.view("<f4").byteswap().view(np.uint8))


def test_another_size_is_refused() -> None:
    """The message says which was expected."""
    with pytest.raises(GraphError, match="8 bytes expected, to change their order, 4 found"):
        swapped(np.zeros(4, np.uint8), new_tensor(F32, 2))
