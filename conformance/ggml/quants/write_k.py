"""float32 to Q2_K to Q6_K, IQ4_NL and IQ4_XS, bit for bit as ggml's `quantize_row_*_ref`.

Work is done on sub-blocks of 16 or 32 elements side by side: arrays are (element, [step of a search,] sub-block), so
that a sum over elements in the order of the C loop adds rows. Every product and sum is one float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.types import GGMLType

from .blocks import KVALUES_IQ4NL, QK_K, Blocks, F32Array, k4_scales, q3_scales
from .write import GROUP_MAX_EPS, ONE, crumbs, empty, extreme, inverse, nearest_int, nibbles, sum_in_order

I32Array = NDArray[np.int32]
U8Array = NDArray[np.uint8]

ZERO = np.float32(0)
_CHUNK = 64
"""Super-blocks worked on at a time, to bound the arrays of a search."""


def sub_blocks(x: F32Array, size: int) -> F32Array:
    """(n, 256) to (size, n * 256 / size): one column per sub-block."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _f16(d: F32Array) -> F32Array:
    return d.astype(np.float16).astype(np.float32)


def _where_positive(top: F32Array, value: F32Array) -> F32Array:
    return np.where(top > 0, value, ZERO)


def _search_affine(
    x: F32Array, w: F32Array, nmax: int, steps: F32Array, *, use_mad: bool
) -> tuple[F32Array, F32Array, F32Array]:
    """`make_qkx2_quants`: scale and minimum that fit weighted sub-blocks best: the first guess or one fit per step.

    Args:
        x: values (elements, sub-blocks).
        w: their weights.
        nmax: the largest quant.
        steps: what stands for `nmax` in the scale of each try.
        use_mad: errors count by magnitude instead of their square.

    Returns:
        Scale, minus the minimum, quants (elements, sub-blocks).
    """
    low, high = np.minimum(x.min(axis=0), ZERO), x.max(axis=0)
    sum_w, sum_x = sum_in_order(w), sum_in_order(w * x)

    def quants(levels: F32Array) -> F32Array:
        q = nearest_int(levels / (high - low) * (x - low)).astype(np.float32)
        return np.clip(q, ZERO, np.float32(nmax), out=q)

    def error(scale: F32Array, q: F32Array, minimum: NDArray[Any]) -> F32Array:
        e = scale * q
        e += minimum
        e -= x
        e = np.abs(e, out=e) if use_mad else np.multiply(e, e, out=e)
        e *= w
        return sum_in_order(e)

    flat = high == low
    scale = ONE / (np.float32(nmax) / (high - low))
    best = quants(np.full(1, nmax, np.float32))
    best_error = error(scale, best, low)
    for levels in steps[:, None]:
        q = quants(levels)
        wl = w * q
        sum_l, sum_xl = sum_in_order(wl), sum_in_order(wl * x)
        wl *= q
        sum_l2 = sum_in_order(wl)
        det = sum_w * sum_l2 - sum_l * sum_l
        fit_low = (sum_l2 * sum_x - sum_l * sum_xl) / det
        fit = np.where(fit_low > 0, sum_xl / sum_l2, (sum_w * sum_xl - sum_x * sum_l) / det)
        fit_low = np.where(fit_low > 0, ZERO, fit_low)
        fit_error = error(fit, q, fit_low)
        # the next try starts from the minimum of the best so far
        wins = (det > 0) & (fit_error < best_error) & ~flat
        np.copyto(best_error, fit_error, where=wins)
        np.copyto(best, q, where=wins)
        np.copyto(scale, fit, where=wins)
        np.copyto(low, fit_low, where=wins)
    best[:, flat] = 0
    scale[flat] = 0
    return scale, -low, best


def _steps(nmax: int, rmin: float, nstep: int) -> F32Array:
    step = np.float32(0.1) * np.arange(nstep + 1, dtype=np.float32)
    return np.float32(rmin) + step + np.float32(nmax)


def _requantize(
    q: NDArray[Any], x: F32Array, d: F32Array, dm: F32Array | np.float32, low: int, high: int
) -> NDArray[Any]:
    """Quants once more with the stored scales, where these are not 0."""
    again = np.clip(nearest_int((x + dm) / d), low, high) - low
    return np.where(d != 0, again, q)


def _back(q: NDArray[Any]) -> U8Array:
    """(size, sub-blocks) to (n, 256)."""
    return np.ascontiguousarray(q.T).astype(np.uint8).reshape(-1, QK_K)


def _q2_k(x: F32Array) -> Blocks:
    y = empty(types.Q2_K, len(x))
    xs = sub_blocks(x, 16)
    scale, minus, q = _search_affine(xs, np.abs(xs), 3, _steps(3, -0.5, 15), use_mad=True)
    scale, minus = scale.reshape(-1, 16), minus.reshape(-1, 16)
    packed = np.zeros((len(x), 16), np.uint8)
    for field, value, shift in (("d", scale, 0), ("dmin", minus, 4)):
        top = np.maximum(value.max(axis=1), ZERO)
        level = nearest_int((np.float32(15) / top)[:, None] * value)
        packed |= np.where((top > 0)[:, None], level << shift, 0).astype(np.uint8)
        y[field] = _where_positive(top, top / np.float32(15))
    y["scales"] = packed
    d = y["d"].astype(np.float32)[:, None] * (packed & 15)
    dm = y["dmin"].astype(np.float32)[:, None] * (packed >> 4)
    y["qs"] = crumbs(_back(_requantize(q, xs, d.reshape(-1), dm.reshape(-1), 0, 3)))
    return y


def _search_3(x: F32Array) -> tuple[F32Array, I32Array]:
    """`make_q3_quants(16, 4, .., do_rmse)`: quants improved one at a time, up to five rounds."""
    amax, top = extreme(x.T)
    w = x * x
    wx = w * x
    q = np.clip(nearest_int((np.float32(-4) / top) * x), -4, 3).astype(np.float32)
    sumlx, suml2 = sum_in_order(wx * q), sum_in_order(w * q * q)
    for _ in range(5):
        changed = False
        for i in range(16):
            slx = sumlx - wx[i] * q[i]
            sl2 = suml2 - w[i] * q[i] * q[i]
            new = np.clip(nearest_int(x[i] * sl2 / slx), -4, 3).astype(np.float32)
            new_slx, new_sl2 = slx + wx[i] * new, sl2 + w[i] * new * new
            take = (slx > 0) & (new != q[i]) & (new_sl2 > 0)
            take &= new_slx * new_slx * suml2 > sumlx * sumlx * new_sl2
            if take.any():
                changed = True
                q[i] = np.where(take, new, q[i])
                sumlx, suml2 = np.where(take, new_slx, sumlx), np.where(take, new_sl2, suml2)
        if not changed:
            break
    something = amax >= GROUP_MAX_EPS
    scale = np.where(something & (suml2 > 0), sumlx / suml2, ZERO)
    return scale, np.where(something, q.astype(np.int32) + 4, 0)


def _q3_k(x: F32Array) -> Blocks:
    y = empty(types.Q3_K, len(x))
    xs = sub_blocks(x, 16)
    scale, q = _search_3(xs)
    scale = scale.reshape(-1, 16)
    _, top = extreme(scale)
    iscale = np.float32(-32) / top
    level = np.clip(nearest_int(iscale[:, None] * scale).astype(np.int8), -32, 31) + 32
    level = np.where((top != 0)[:, None], level, 0).astype(np.uint8)
    y["scales"][:, :8] = level[:, :8] & 15 | level[:, 8:] << 4
    high = (level >> 4).reshape(-1, 4, 4) << np.array([[0], [2], [4], [6]], np.uint8)
    y["scales"][:, 8:] = np.bitwise_or.reduce(high, axis=1)
    y["d"] = np.where(top != 0, ONE / iscale, ZERO)
    d = y["d"].astype(np.float32)[:, None] * q3_scales(y["scales"]).astype(np.float32)
    q8 = _back(_requantize(q, xs, d.reshape(-1), ZERO, -4, 3))
    y["hmask"] = np.packbits((q8 > 3).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    y["qs"] = crumbs(q8)
    return y


def _affine_4(type_: GGMLType, x: F32Array, nmax: int, steps: F32Array) -> tuple[Blocks, U8Array]:
    """Everything but the quants of Q4_K and Q5_K, and the quants."""
    y = empty(type_, len(x))
    xs = sub_blocks(x, 32)
    rms = np.sqrt(sum_in_order(xs * xs) / np.float32(32))
    scale, minus, q = _search_affine(xs, rms + np.abs(xs), nmax, steps, use_mad=False)
    levels = []
    for field, value in (("d", scale.reshape(-1, 8)), ("dmin", minus.reshape(-1, 8))):
        top = np.maximum(value.max(axis=1), ZERO)
        inverse = _where_positive(top, np.float32(63) / top)
        levels.append(np.minimum(nearest_int(inverse[:, None] * value).astype(np.uint8), 63))
        y[field] = top / np.float32(63)
    ls, lm = levels
    y["scales"][:, :4] = ls[:, :4] | ls[:, 4:] >> 4 << 6
    y["scales"][:, 4:8] = lm[:, :4] | lm[:, 4:] >> 4 << 6
    y["scales"][:, 8:] = ls[:, 4:] & 15 | lm[:, 4:] << 4
    sc, m = k4_scales(y["scales"])
    d, dm = y["d"].astype(np.float32)[:, None] * sc, y["dmin"].astype(np.float32)[:, None] * m
    return y, _back(_requantize(q, xs, d.reshape(-1), dm.reshape(-1), 0, nmax))


def _q4_k(x: F32Array) -> Blocks:
    y, q = _affine_4(types.Q4_K, x, 15, _steps(15, -1.0, 20))
    y["qs"] = nibbles(q, 32)
    return y


def _q5_k(x: F32Array) -> Blocks:
    y, q = _affine_4(types.Q5_K, x, 31, _steps(31, -0.5, 15))
    y["qs"] = nibbles(q, 32)
    y["qh"] = np.packbits((q > 15).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    return y


_Q6_STEPS = np.array([0, *range(-9, 0), *range(1, 10)], np.float32)


def _search_6(x: F32Array) -> tuple[F32Array, I32Array]:
    """`make_qx_quants(16, 32, .., rmse_type 1)`: the scale of the best of 19 tries, weighted by x * x."""
    amax, top = extreme(x.T)
    w = x * x
    iscale = -(np.float32(32) + np.float32(0.1) * _Q6_STEPS)[:, None] / top
    q = np.clip(nearest_int(iscale * x[:, None]), -32, 31).astype(np.float32)
    sumlx = sum_in_order((w * x)[:, None] * q)
    suml2 = sum_in_order(w[:, None] * q * q)
    scales = sumlx / suml2
    scale = np.where(suml2[0] != 0, scales[0], ZERO)
    best = scale * sumlx[0]
    k = np.zeros(x.shape[1], np.intp)
    for i in range(1, len(_Q6_STEPS)):
        wins = (suml2[i] > 0) & (sumlx[i] * sumlx[i] > best * suml2[i])
        scale = np.where(wins, scales[i], scale)
        best = np.where(wins, scales[i] * sumlx[i], best)
        k[wins] = i
    something = amax >= GROUP_MAX_EPS
    quants = q[:, k, np.arange(x.shape[1])].astype(np.int32) + 32
    return np.where(something, scale, ZERO), np.where(something, quants, 0)


def _q6_k(x: F32Array) -> Blocks:
    y = empty(types.Q6_K, len(x))
    xs = sub_blocks(x, 16)
    scale, q = _search_6(xs)
    scale = scale.reshape(-1, 16)
    amax, top = extreme(scale)
    iscale = np.float32(-128) / top
    y["d"] = ONE / iscale
    y["scales"] = np.minimum(127, nearest_int(iscale[:, None] * scale))
    d = y["d"].astype(np.float32)[:, None] * y["scales"]
    q8 = _back(_requantize(q, xs, d.reshape(-1), ZERO, -32, 31))
    y["ql"] = nibbles(q8, 64)
    y["qh"] = crumbs(q8 >> np.uint8(4))
    y[amax < GROUP_MAX_EPS] = 0
    return y


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
    y = empty(types.IQ4_NL, len(x))
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
    y = empty(types.IQ4_XS, len(x))
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


def _chunked(write: Callable[[F32Array], Blocks]) -> Callable[[F32Array], Blocks]:
    """`write`, some super-blocks at a time."""

    def chunks(x: F32Array) -> Blocks:
        if len(x) <= _CHUNK:
            return write(x)
        return np.concatenate([write(x[i : i + _CHUNK]) for i in range(0, len(x), _CHUNK)])

    return chunks


WRITE_K: dict[GGMLType, Callable[[F32Array], Blocks]] = {
    types.Q2_K: _chunked(_q2_k),
    types.Q3_K: _chunked(_q3_k),
    types.Q4_K: _chunked(_q4_k),
    types.Q5_K: _chunked(_q5_k),
    types.Q6_K: _chunked(_q6_k),
    types.IQ4_NL: _iq4_nl,
    types.IQ4_XS: _chunked(_iq4_xs),
}
