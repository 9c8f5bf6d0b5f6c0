"""Values of a leaf, drawn from its stream, and the bytes they become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.quants import from_float, random_blocks
from conformance.ggml.tensor import Bytes, Dims
from conformance.ggml.types import F32, I32, I64, GGMLType

Fill = Callable[[Stream, Dims], NDArray[Any]]
"""Values of a leaf of shape `ne`, `ne[0]` fastest: float32 for float types, int64 for integers."""


def encode(type_: GGMLType, stream: Stream, ne: Dims, fill: Fill) -> Bytes:
    """The bytes of a leaf. Block types hold random blocks whatever the fill: any bits that a quantiser could write."""
    if type_.blck_size > 1:
        return random_blocks(type_, stream.words, math.prod(ne) // type_.blck_size).reshape(-1)
    values = fill(stream, ne).reshape(-1)
    if type_ is F32:
        return values.astype("<f4", copy=False).view(np.uint8)
    if values.dtype.kind == "i":
        if type_.dtype is not None and type_.dtype.kind == "i":
            return values.astype(type_.dtype).view(np.uint8)
        values = values.astype(np.float32)
    if type_.dtype is not None and type_.dtype.kind == "i":
        return values.astype(type_.dtype).view(np.uint8)
    return from_float(type_, values).view(np.uint8)


def normal(scale: float = 1.0, mean: float = 0.0) -> Fill:
    """Bell-shaped values."""
    return lambda s, ne: s.normal(math.prod(ne), scale, mean)


def uniform(lo: float, hi: float) -> Fill:
    """Values spread evenly in [lo, hi]."""
    return lambda s, ne: s.uniform(math.prod(ne), lo, hi)


def away_from_zero(lo: float, hi: float) -> Fill:
    """Values of either sign, none near zero."""
    return lambda s, ne: s.away_from_zero(math.prod(ne), lo, hi)


def distinct(lo: float, hi: float) -> Fill:
    """Values no two of which are equal in a row of the leaf."""
    return lambda s, ne: s.distinct(ne[1] * ne[2] * ne[3], ne[0], lo, hi)


def integers(lo: int, hi: int) -> Fill:
    """Integers in [lo, hi)."""
    return lambda s, ne: s.integers(math.prod(ne), lo, hi)


def values(type_: GGMLType) -> Fill:
    """Whole numbers of the full range for integer types, bell-shaped values for the rest."""
    if type_ is I64:
        return lambda s, ne: s.words(math.prod(ne)).view("<i8")
    return integers(-(2**31), 2**31) if type_ is I32 else normal()


def chosen(n: int) -> Fill:
    """Each row holds different numbers of 0..n-1 in random order."""
    return lambda s, ne: s.choice(ne[1] * ne[2] * ne[3], n, ne[0])


def fixed(values: NDArray[Any]) -> Fill:
    """These values, the same for every seed."""
    return lambda _s, _ne: values


def with_edges(fill: Fill, edges: Sequence[float]) -> Fill:
    """As `fill`, with one in eight elements replaced by each of `edges` in turn."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = fill(s, ne)
        s.sprinkle(x, edges)
        return x

    return filled


def causal(n_past: int, *, dead: float = 0.0) -> Fill:
    """An attention mask [n_kv, n_q, ...]: query i sees keys 0..n_past + i, of which a share `dead` is hidden as well.

    Seen entries are 0, hidden ones -inf; a query's own key is always seen.
    """

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        n_kv, n_q, n2, n3 = ne
        last = np.minimum(np.arange(n_q) + n_past, n_kv - 1)
        keys = np.arange(n_kv)
        hidden = np.broadcast_to(keys > last[:, None], (n3 * n2, n_q, n_kv)).copy()
        if dead > 0.0:
            hidden |= s.unit(hidden.size).reshape(hidden.shape) < np.float32(dead)
            hidden[:, np.arange(n_q), last] = False
        return np.where(hidden, np.float32(-np.inf), np.float32(0.0))

    return filled


def biased(mask: Fill, scale: float) -> Fill:
    """`mask` with bell-shaped values where it was zero."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        return mask(s, ne).reshape(-1) + s.normal(math.prod(ne), scale)

    return filled


def blind(mask: Fill) -> Fill:
    """`mask` with each matrix's second row hidden altogether."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = mask(s, ne).reshape(-1, ne[1], ne[0]).copy()
        x[:, min(1, ne[1] - 1)] = -np.inf
        return x

    return filled
