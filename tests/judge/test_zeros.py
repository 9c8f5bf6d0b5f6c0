"""The sign of a zero: free where a block of a quantised type becomes numbers, and wherever these go; else it counts."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.ggml.arithmetic import EXACT
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Bytes, Tensor, new_tensor, packed_nbytes
from conformance.ggml.types import BF16, F32, I32, Q8_0, GGMLType
from conformance.judge.compare import compare
from conformance.judge.judge import Chain

B = Builder()
CACHE = new_tensor(BF16, 64, 8)


def _rows(from_: GGMLType) -> tuple[Tensor, Graph]:
    """Three rows of a matrix of `from_`, copied into the cache."""
    rows = B.get_rows(new_tensor(from_, 64, 16), new_tensor(I32, 3, flags=1))
    copy = B.cpy(rows, B.view_2d(CACHE, 64, 3, CACHE.nb[1], 0))
    return rows, B.build_forward_expand(copy)


def _again() -> Graph:
    """Rows of the cache, in a step that writes nothing."""
    return B.build_forward_expand(B.get_rows(CACHE, new_tensor(I32, 2, flags=1)))


def _turned(t: Tensor) -> tuple[Bytes, Bytes]:
    """Numbers of which the first is 0, and the same with -0."""
    want = np.zeros(packed_nbytes(t), np.uint8)
    want[t.type.type_size + 1 :: t.type.type_size] = 63
    got = want.copy()
    got[t.type.type_size - 1] = 0x80
    return want, got


@pytest.mark.parametrize("from_", [F32, Q8_0])
def test_a_zero_of_a_block_has_no_sign_wherever_it_goes(from_: GGMLType) -> None:
    """In the node itself, in the cache that it is copied into, and in what a later step reads there."""
    chain = Chain(EXACT)
    rows, graph = _rows(from_)
    later = _again()
    chain.enter(graph)
    used = [chain.budget(t).used(compare(t, *_turned(t))) for t in (rows, CACHE)]
    chain.enter(later)
    used += [chain.budget(t).used(compare(t, *_turned(t))) for t in (later.nodes[-1], CACHE)]
    assert used == [0.0 if from_ is Q8_0 else np.inf] * 4


def test_any_other_number_counts_beside_a_zero() -> None:
    """One wrong bit elsewhere, or a NaN, is as wrong as ever."""
    chain = Chain(EXACT)
    rows, graph = _rows(Q8_0)
    chain.enter(graph)
    for t in (rows, CACHE):
        want, got = _turned(t)
        for byte, bits in ((t.type.type_size * 5 - 1, 0x01), (t.type.type_size * 5 - 1, 0xFF)):
            wrong = got.copy()
            wrong[byte] ^= bits
            wrong[byte - 1] ^= bits & 0x80
            assert chain.budget(t).used(compare(t, want, wrong)) == np.inf
