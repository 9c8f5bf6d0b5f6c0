"""Values of a leaf, drawn from its random stream, and their encoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.quants import from_float
from conformance.ggml.quants.blocks import BLOCK, SCALES, random_blocks
from conformance.ggml.tensor import Bytes, Dims
from conformance.ggml.types import F32, I32, I64, MXFP4, GGMLType

Fill = Callable[[Stream, Dims], NDArray[Any]]
"""Values of a leaf of shape `ne`, `ne[0]` fastest: float32 for floats, int64 for integers."""


def encode(type_: GGMLType, stream: Stream, ne: Dims, fill: Fill) -> Bytes:
    """Return the bytes of a leaf; block types get random blocks of valid bits instead of `fill`."""
    if type_.blck_size > 1:
        return random_blocks(type_, stream.words, math.prod(ne) // type_.blck_size).reshape(-1)
    values = fill(stream, ne).reshape(-1)
    if type_ is F32:
        return values.astype("<f4", copy=False).view(np.uint8)
    if type_.dtype is not None and type_.dtype.kind == "i":
        return values.astype(type_.dtype).view(np.uint8)
    if values.dtype.kind == "i":
        values = values.astype(np.float32)
    return from_float(type_, values).view(np.uint8)


def normal(scale: float = 1.0, mean: float = 0.0) -> Fill:
    """Return normally distributed values."""
    return lambda s, ne: s.normal(math.prod(ne), scale, mean)


def uniform(lo: float, hi: float) -> Fill:
    """Return uniformly distributed values in [lo, hi]."""
    return lambda s, ne: s.uniform(math.prod(ne), lo, hi)


def away_from_zero(lo: float, hi: float) -> Fill:
    """Return values of either sign, none near zero."""
    return lambda s, ne: s.away_from_zero(math.prod(ne), lo, hi)


def distinct(lo: float, hi: float) -> Fill:
    """Return values that are distinct within each row."""
    return lambda s, ne: s.distinct(ne[1] * ne[2] * ne[3], ne[0], lo, hi)


def integers(lo: int, hi: int) -> Fill:
    """Return integers in [lo, hi)."""
    return lambda s, ne: s.integers(math.prod(ne), lo, hi)


def whole(lo: int, hi: int) -> Fill:
    """Return integers in [lo, hi) as float32, whose products and sums are exact."""
    return lambda s, ne: s.integers(math.prod(ne), lo, hi).astype(np.float32)


def values(type_: GGMLType) -> Fill:
    """Return integers of the full range for integer types, else normally distributed values."""
    if type_ is I64:
        return lambda s, ne: s.words(math.prod(ne)).view("<i8")
    return integers(-(2**31), 2**31) if type_ is I32 else normal()


def chosen(n: int) -> Fill:
    """Return rows of distinct numbers from 0..n-1 in random order."""
    return lambda s, ne: s.choice(ne[1] * ne[2] * ne[3], n, ne[0])


def with_last(n: int) -> Fill:
    """Return rows as `chosen`, which begin with n - 1."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = chosen(n)(s, ne)
        x = np.where(x == n - 1, x[:, :1], x)
        x[:, 0] = n - 1
        return x

    return filled


def with_repeat(n: int) -> Fill:
    """Return rows as `chosen`, whose last number is the first again."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = chosen(n)(s, ne)
        x[:, -1] = x[:, 0]
        return x

    return filled


_INF, _TINY = math.inf, 1e-40
"""Subnormal in F32, zero in F16."""
EDGES: dict[str, tuple[float, ...]] = {
    "": (),
    "edge": (0.0, -0.0, _INF, -_INF, _TINY, -_TINY, 0.5, -0.5, 1.0, -1.0, 2.5, -2.5),
    "nan": (0.0, -0.0, _INF, -_INF, math.nan),
    "half": (0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.49999997, -0.49999997),
}
"""Kind of special values -> the values."""


def with_edges(fill: Fill, kind: str) -> Fill:
    """Return `fill` with one in eight elements replaced by `EDGES[kind]` in turn."""
    if not kind:
        return fill

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = fill(s, ne)
        s.sprinkle(x, EDGES[kind])
        return x

    return filled


def causal(n_past: int, *, dead: float = 0.0) -> Fill:
    """Return an attention mask [n_kv, n_q, ...]: query i sees keys 0..n_past + i.

    A share `dead` of these keys is hidden, too. Visible entries are 0, hidden ones -inf; a query's own key is always
    visible. A query before the first key sees no key, or one if `dead` is set.
    """

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        n_kv, n_q, n2, n3 = ne
        last = np.clip(np.arange(n_q) + n_past, -n_kv, n_kv - 1)
        keys = np.arange(n_kv)
        hidden = np.broadcast_to(keys > last[:, None], (n3 * n2, n_q, n_kv)).copy()
        if dead > 0.0:
            hidden |= s.unit(hidden.size).reshape(hidden.shape) < np.float32(dead)
            hidden[:, np.arange(n_q), last] = False
        return np.where(hidden, np.float32(-np.inf), np.float32(0.0))

    return filled


def biased(mask: Fill, scale: float) -> Fill:
    """Return `mask` with normally distributed values instead of zeros."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        return mask(s, ne).reshape(-1) + s.normal(math.prod(ne), scale)

    return filled


def blind(mask: Fill) -> Fill:
    """Return `mask` with each matrix's second row entirely hidden."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = mask(s, ne).reshape(-1, ne[1], ne[0]).copy()
        x[:, min(1, ne[1] - 1)] = -np.inf
        return x

    return filled


def hadamard(n: int) -> NDArray[np.float32]:
    """Return the orthonormal Walsh-Hadamard matrix [n, n], n a power of 2: `ggml_gen_hadamard`."""
    h = np.array([[np.float32(1.0) / np.sqrt(np.float32(n))]], np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


_STD = {
    "q4_0": 0.44, "q4_1": 0.48, "q5_0": 0.44, "q5_1": 0.49, "q8_0": 0.44, "mxfp4": 0.84, "q2_K": 0.32, "q3_K": 0.26,
    "q4_K": 0.20, "q5_K": 0.20, "q6_K": 0.25, "iq4_nl": 0.40, "q1_0": 0.76, "q2_0": 0.47, "tq1_0": 0.63, "tq2_0": 0.54,
    "iq4_xs": 0.23, "iq1_s": 0.69, "iq2_xxs": 0.64, "iq2_xs": 0.67, "iq2_s": 0.67, "iq3_xxs": 0.42, "iq3_s": 0.21,
}  # fmt: skip
"""Block type -> measured root mean square of `random_blocks`."""


def random_bytes(type_: GGMLType, stream: Stream, n: int, std: float) -> Bytes:
    """Return `n` values of about that standard deviation; scaled random blocks for block types.

    UsageError for a block type whose scale is not an F16 field.
    """
    if not type_.is_quantized:
        return from_float(type_, stream.normal(n, std)).view(np.uint8).reshape(-1)
    if type_.name not in _STD:
        raise UsageError(f"weights of {type_} are not generated; known: {', '.join(_STD)}")
    blocks = random_blocks(type_, stream.words, n // type_.blck_size).view(BLOCK[type_])
    shift = round(math.log2(std / _STD[type_.name]))
    if type_ is MXFP4:
        blocks["e"] += np.uint8(shift % 256)
    for name in SCALES.get(type_, {}):
        blocks[name] = np.ldexp(blocks[name], shift)
    return blocks.view(np.uint8).reshape(-1)
