"""float32 to the IQ types that ggml has a reference for, bit for bit.

Arrays are (element, [step of a search,] sub-block), as in `quants_k`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.ggml.types import IQ4_NL, IQ4_XS, GGMLType

from .blocks import KVALUES_IQ4NL, Blocks, F32Array
from .k import U8Array, chunked, sub_blocks
from .write import GROUP_MAX_EPS, ONE, empty, extreme, inverse, nearest_int, nibbles, sum_in_order

ZERO = np.float32(0)


def _nearest_iq4nl() -> U8Array:
    """By floor(2 x) + 254 the index of the nearest of `kvalues_iq4nl`, the upper one of a tie: borders are halves."""
    twice = np.arange(-254, 227)
    border = KVALUES_IQ4NL[:-1] + KVALUES_IQ4NL[1:]
    return np.searchsorted(border, twice, side="right").astype(np.uint8)


_NEAREST_IQ4NL = _nearest_iq4nl()


def _best_iq4nl(x: F32Array) -> U8Array:
    """`best_index_int8` over `kvalues_iq4nl`; NaN is beyond the largest, as its comparisons make it."""
    cell = np.floor(np.maximum(np.fmin(x + x, np.float32(226)), np.float32(-254)))
    index: U8Array = _NEAREST_IQ4NL[(cell + np.float32(254)).astype(np.intp)]
    return index


def _fit(x: F32Array, w: F32Array, iscale: F32Array) -> tuple[F32Array, F32Array]:
    """Sums w q x and w q q over the elements, q the nearest number to x * iscale."""
    q = KVALUES_IQ4NL[_best_iq4nl(iscale * x)]
    wq = w * q
    return sum_in_order(wq * x), sum_in_order(wq * q)


def _iq4_nl(x: F32Array) -> Blocks:
    """`quantize_row_iq4_nl_impl` with ntry -1.

    In a block of zeros (below 1e-15) ggml leaves whatever quants the block before it had; here they are those of 0.
    """
    y = empty(IQ4_NL, len(x))
    amax, top = extreme(x)
    iscale = ONE / (top / KVALUES_IQ4NL[0])
    xs = np.ascontiguousarray(x.T)
    sumqx, sumq2 = _fit(xs, xs * xs, iscale)
    something = amax >= GROUP_MAX_EPS
    y["d"] = np.where(something & (sumq2 > 0), sumqx / sumq2, ZERO)
    y["qs"] = nibbles(_best_iq4nl(x * np.where(something, iscale, ZERO)[:, None]))
    return y


_TRIES = np.arange(-7, 8, dtype=np.float32)[:, None] + KVALUES_IQ4NL[0]


def _iq4_xs(x: F32Array) -> Blocks:
    """`quantize_row_iq4_nl_impl` with ntry 7 over super-blocks."""
    y = empty(IQ4_XS, len(x))
    xs = sub_blocks(x, 32)
    w = xs * xs
    amax, top = extreme(xs.T)
    sumqx, sumq2 = _fit(xs, w, ONE / (-top / KVALUES_IQ4NL[0]))
    d = np.where(sumq2 > 0, sumqx / sumq2, ZERO)
    best = d * sumqx
    for sx, s2 in zip(*_fit(xs[:, None], w[:, None], _TRIES / top), strict=True):
        wins = (s2 > 0) & (sx * sx > best * s2)
        d = np.where(wins, sx / s2, d)
        best = np.where(wins, d * sx, best)
    scale = np.where(amax >= GROUP_MAX_EPS, d, ZERO).reshape(-1, 8)
    _, top_scale = extreme(scale)
    d = -top_scale / np.float32(32)
    y["d"] = d
    level = np.clip(nearest_int(inverse(d)[:, None] * scale), -32, 31)
    dl = d[:, None] * level.astype(np.float32)
    q = _best_iq4nl(x.reshape(-1, 8, 32) * inverse(dl)[:, :, None])
    y["qs"] = nibbles(q.reshape(-1, 256))
    level += 32
    low = (level & 15).astype(np.uint8).reshape(-1, 4, 2)
    y["scales_l"] = low[:, :, 0] | low[:, :, 1] << 4
    y["scales_h"] = np.bitwise_or.reduce((level >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    return y


WRITE_IQ: dict[GGMLType, Callable[[F32Array], Blocks]] = {IQ4_NL: _iq4_nl, IQ4_XS: chunked(_iq4_xs)}
