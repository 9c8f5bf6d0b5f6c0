"""float32 to block types: `from_float_ref` of ggml's type_traits, bit for bit.

Each function fills n zeroed blocks (`blocks.BLOCK`) from values (n, blck_size). Each step is one float32 operation, in
the order of the C code. Numbers that do not fit an integer give x86's result on any machine: see `to_int`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.types import GGMLType

from .blocks import (
    BLOCK,
    KVALUES_FP4,
    KVALUES_IQ4NL,
    QK_K,
    UE4M3_HALF,
    Blocks,
    F32Array,
    e8m0_half,
    k4_scales,
    q3_scales,
)

U8Array = NDArray[np.uint8]
I32Array = NDArray[np.int32]
Fill = Callable[[Blocks, F32Array], None]
Operand = F32Array | np.float32

_SHIFT2 = np.array([[0], [2], [4], [6]], np.uint8)
ONE = np.float32(1)
GROUP_MAX_EPS = np.float32(1e-15)


def to_int(x: F32Array) -> NDArray[np.int32]:
    """Convert as x86's cvttss2si, C's `(int) x`: toward zero; INT_MIN if out of range or NaN."""
    return np.where(np.abs(x) < np.float32(2**31), x, np.float32(-(2**31))).astype(np.int32)


def roundf(x: F32Array) -> F32Array:
    """Round as C's `roundf`: to nearest, halves away from zero."""
    t: F32Array = np.trunc(x)
    return t + np.copysign(_f32(np.abs(x - t) >= np.float32(0.5)), x)


def nearest_int(x: F32Array) -> NDArray[np.int32]:
    """Round as ggml's `nearest_int`: halves to even, by adding 1.5 * 2**23; wraps beyond 2**22."""
    bits: NDArray[np.int32] = (x + np.float32(12582912)).view(np.int32)
    return (bits & np.int32(0x007FFFFF)) - np.int32(0x00400000)


class Multiply:
    """Products that C code adds to something: each rounded, as x86 compilers do."""

    def add(self, a: Operand, b: Operand, c: Operand) -> F32Array:
        """Return `a * b + c`."""
        out: F32Array = np.asarray(a * b + c, np.float32)
        return out

    def sum(self, a: F32Array, b: F32Array) -> F32Array:
        """Return the sum of `a * b` over the first axis, in the order of a C loop."""
        return sum_in_order(a * b)

    def nearest(self, a: F32Array, b: F32Array) -> I32Array:
        """Return `nearest_int(a * b)`."""
        return nearest_int(a * b)


class _Fused(Multiply):
    """Products in float64, which are exact: a sum is rounded once, as by fused multiply-add.

    Both roundings, of float64 and float32, may differ from one: for one sum in 2**29.
    """

    def add(self, a: Operand, b: Operand, c: Operand) -> F32Array:
        return (np.asarray(a, np.float64) * b + c).astype(np.float32)

    def sum(self, a: F32Array, b: F32Array) -> F32Array:
        products = a.astype(np.float64) * b
        out: F32Array = products[0].astype(np.float32)
        for row in products[1:]:
            out = (row + out).astype(np.float32)
        return out

    def nearest(self, a: F32Array, b: F32Array) -> I32Array:
        bits: I32Array = (a.astype(np.float64) * b + 12582912).astype(np.float32).view(np.int32)
        return (bits & np.int32(0x007FFFFF)) - np.int32(0x00400000)


PLAIN, FUSED = Multiply(), _Fused()


def over(a: F32Array | np.float32, b: F32Array | np.float32) -> F32Array:
    """Divide float32 values; NumPy's stubs since 2.5 take the result of `/` for float64."""
    out: F32Array = np.divide(a, b)
    return out


def inverse(d: F32Array) -> F32Array:
    """Return `d ? 1/d : 0`."""
    return np.where(d != 0, ONE / d, np.float32(0))


def sum_in_order(a: F32Array) -> F32Array:
    """Sum over the first axis in float32, from first to last as a C loop.

    NumPy adds in this order along any axis but the fastest in memory, where it adds pairwise.
    """
    out: F32Array
    if a[0].size > 1:
        out = np.add.reduce(np.ascontiguousarray(a), axis=0)
    else:
        out = a[0].copy()
        for row in a[1:]:
            out += row
    return out


def extreme(x: F32Array) -> tuple[F32Array, F32Array]:
    """Return each row's largest magnitude and its first number, 0 for zeros; skip NaN."""
    a = np.fmax(np.abs(x), np.float32(0))
    i = a.argmax(axis=-1)[..., None]
    amax = np.take_along_axis(a, i, -1)[..., 0]
    return amax, np.where(amax > 0, np.take_along_axis(x, i, -1)[..., 0], np.float32(0))


def _f32(a: NDArray[Any]) -> F32Array:
    return a.astype(np.float32)


def _u8(a: NDArray[Any]) -> U8Array:
    return a.astype(np.uint8)


def _q1_0(y: Blocks, x: F32Array) -> None:
    y["d"] = sum_in_order(np.abs(x).T) / np.float32(128)
    y["qs"] = np.packbits(x >= 0, axis=1, bitorder="little")


def _q2_0(y: Blocks, x: F32Array) -> None:
    y["d"] = d = np.abs(x).max(axis=1)
    q = _u8(np.clip(to_int(roundf(x * inverse(d)[:, None])) + 1, 0, 3)).reshape(-1, 16, 4)
    y["qs"] = np.bitwise_or.reduce(q << np.array([0, 2, 4, 6], np.uint8), axis=2)


def _symmetric(x: F32Array, top: int) -> tuple[F32Array, U8Array]:
    """Compute scale and quants 0..2*top-1 of Q4_0 and Q5_0."""
    d = extreme(x)[1] / np.float32(-top)
    q = to_int(x * inverse(d)[:, None] + np.float32(top + 0.5)).astype(np.int8)
    return d, _u8(np.minimum(q, 2 * top - 1))


def _affine(x: F32Array, top: int) -> tuple[F32Array, F32Array, NDArray[np.int32]]:
    """Compute scale, minimum and quants of Q4_1 and Q5_1."""
    # first of the least: among zeros of either sign, ggml keeps the one it meets first
    low = np.take_along_axis(x, x.argmin(axis=1)[:, None], 1)[:, 0]
    high = np.take_along_axis(x, x.argmax(axis=1)[:, None], 1)[:, 0]
    d = (high - low) / np.float32(top)
    return d, low, to_int((x - low[:, None]) * inverse(d)[:, None] + np.float32(0.5))


def nibbles(q: U8Array, group: int = 16) -> U8Array:
    """Pack 4-bit quants, 2 * `group` to `group` bytes, first half low: (n, m) to (n, m / 2)."""
    pair = q.reshape(len(q), -1, 2, group)
    packed = pair[:, :, 0] & np.uint8(15) | pair[:, :, 1] << np.uint8(4)
    return packed.reshape(len(q), -1)


def _q4_0(y: Blocks, x: F32Array) -> None:
    y["d"], q = _symmetric(x, 8)
    # a negative quant keeps its upper nibble in C, where the low one is stored unmasked
    y["qs"] = q[:, :16] | q[:, 16:] << 4


def _q4_1(y: Blocks, x: F32Array) -> None:
    y["d"], y["m"], q = _affine(x, 15)
    q8 = _u8(np.minimum(q.astype(np.int8), 15))
    y["qs"] = q8[:, :16] | q8[:, 16:] << 4


def _five(y: Blocks, q: U8Array) -> None:
    y["qs"] = nibbles(q)
    y["qh"] = np.packbits(q & 16, axis=1, bitorder="little")


def _q5_0(y: Blocks, x: F32Array) -> None:
    y["d"], q = _symmetric(x, 16)
    _five(y, q)


def _q5_1(y: Blocks, x: F32Array) -> None:
    y["d"], y["m"], q = _affine(x, 31)
    _five(y, _u8(q))


def _eight(x: F32Array) -> tuple[F32Array, NDArray[np.int8]]:
    d = over(np.abs(x).max(axis=1), np.float32(127))
    return d, to_int(roundf(x * inverse(d)[:, None])).astype(np.int8)


def _q8_0(y: Blocks, x: F32Array) -> None:
    y["d"], y["qs"] = _eight(x)


def _q8_1(y: Blocks, x: F32Array) -> None:
    d, q = _eight(x)
    y["d"], y["qs"], y["s"] = d, q, _f32(q.sum(axis=1, dtype=np.int32)) * d


def _eight_simd(x: F32Array) -> tuple[F32Array, NDArray[np.int8], F32Array]:
    amax = np.abs(x).max(axis=1)
    d = over(amax, np.float32(127))
    inv = np.where(amax != 0, np.float32(127) / amax, np.float32(0))
    q = to_int(np.rint(x * inv[:, None]))
    return d, np.clip(q, -128, 127).astype(np.int8), d * _f32(q.sum(axis=1, dtype=np.int32))


def _eight_even(x: F32Array) -> tuple[F32Array, NDArray[np.int8], F32Array]:
    d = over(np.abs(x).max(axis=1), np.float32(127))
    q = to_int(np.rint(x * inverse(d)[:, None]))
    return d, np.clip(q, -128, 127).astype(np.int8), d * _f32(q.sum(axis=1, dtype=np.int32))


def _q8_0_even(y: Blocks, x: F32Array) -> None:
    y["d"], y["qs"], _ = _eight_even(x)


def _q8_1_even(y: Blocks, x: F32Array) -> None:
    y["d"], y["qs"], y["s"] = _eight_even(x)


def _q8_0_simd(y: Blocks, x: F32Array) -> None:
    y["d"], y["qs"], _ = _eight_simd(x)


def _q8_1_simd(y: Blocks, x: F32Array) -> None:
    y["d"], y["qs"], y["s"] = _eight_simd(x)


def _q8_k(y: Blocks, x: F32Array, mul: Multiply = PLAIN) -> None:
    amax, top = extreme(x)
    iscale = np.float32(-127) / top
    q = np.minimum(127, mul.nearest(iscale[:, None], x)).astype(np.int8)
    q[amax == 0] = 0
    y["qs"] = q
    y["bsums"] = q.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
    y["d"] = np.where(amax == 0, np.float32(0), ONE / iscale)


def _trits(x: F32Array, d: F32Array) -> NDArray[np.int32]:
    # lroundf gives LONG_MIN if out of range, whose low 32 bits are 0
    r = roundf(x * inverse(d)[:, None])
    return np.where(np.abs(r) < np.float32(2**31), r, np.float32(0)).astype(np.int32) + 1


def _tq1_0(y: Blocks, x: F32Array) -> None:
    y["d"] = d = np.abs(x).max(axis=1)
    t = _u8(_trits(x, d))
    packed = []
    for part, rows in ((t[:, :160], 5), (t[:, 160:240], 5), (t[:, 240:], 4)):
        q = np.zeros((len(x), part.shape[1] // rows), np.uint8)
        for trit in part.reshape(len(x), rows, -1).swapaxes(0, 1):
            q = q * np.uint8(3) + trit
        q = q if rows == 5 else q * np.uint8(3)
        packed.append(_u8((q.astype(np.uint16) * np.uint16(256) + np.uint16(242)) // np.uint16(243)))
    y["qs"], y["qh"] = np.concatenate(packed[:2], axis=1), packed[2]


def crumbs(q: U8Array) -> U8Array:
    """Pack four runs of 32 2-bit quants into 32 bytes, first lowest: (n, 256) to (n, 64)."""
    packed: U8Array = np.bitwise_or.reduce((q & 3).reshape(-1, 2, 4, 32) << _SHIFT2, axis=2)
    return packed.reshape(-1, 64)


def _tq2_0(y: Blocks, x: F32Array) -> None:
    y["d"] = d = np.abs(x).max(axis=1)
    y["qs"] = crumbs(_u8(_trits(x, d)))


def _best_fp4(x: F32Array, d: F32Array) -> U8Array:
    """Return `best_index_mxfp4`: the first of the 16 numbers at the least distance.

    Only the eight magnitudes are tried: a number of the wrong sign is never nearer than 0, which comes first.
    """
    a = np.abs(x)
    best, index = a, np.zeros(x.shape, np.uint8)
    for i, v in enumerate(KVALUES_FP4[1:8], 1):
        error = np.abs(v * d - a)
        np.copyto(index, i, where=error < best)
        best = np.fmin(best, error)
    np.add(index, 8, out=index, where=(x < 0) & (index > 0))
    return index


def _mxfp4(y: Blocks, x: F32Array) -> None:
    amax = np.abs(x).max(axis=1)
    # log2f rounds to float32 before floor sees it: just below a power of two it is already the next integer
    log2 = np.floor(_f32(np.log2(amax.astype(np.float64))))
    y["e"] = np.where(amax > 0, to_int(log2 + np.float32(125)), 0).astype(np.uint8)
    y["qs"] = nibbles(_best_fp4(x, e8m0_half(y["e"])[:, None]))


def _to_ue4m3(x: F32Array) -> U8Array:
    """Convert as `ggml_fp32_to_ue4m3`: halves up, at most 448; steps of 1/512 if subnormal."""
    x = np.minimum(np.where(x > 0, x, np.float32(0)), np.float32(448))
    bits = x.view(np.int32)
    normal = (bits >> 20) + (bits >> 19 & 1) - (120 << 3)
    subnormal = np.minimum(to_int(x * np.float32(512) + np.float32(0.5)), 7)
    # the whole top binade, from 256 on, becomes 448
    return _u8(np.where((bits >> 23) - 120 <= 0, subnormal, np.where(normal >= 0x78, 0x7E, normal)))


def _nvfp4(y: Blocks, x: F32Array) -> None:
    sub = x.reshape(-1, 16)
    ue = _to_ue4m3(over(np.abs(sub).max(axis=1), np.float32(6)))
    y["d"] = ue.reshape(-1, 4)
    y["qs"] = nibbles(_best_fp4(sub, UE4M3_HALF[ue][:, None]), 8).reshape(-1, 32)


# --- Q2_K to Q6_K, IQ4_NL and IQ4_XS: `quantize_row_*_ref`
#
# Sub-blocks of 16 or 32 elements are processed side by side: arrays are (element, [search step,] sub-block), so a sum
# over elements in the order of the C loop adds rows. Every product and sum is one float32 rounding.

ZERO = np.float32(0)
_CHUNK = 64
"""Super-blocks processed at a time, to bound the arrays of a search."""


def sub_blocks(x: F32Array, size: int) -> F32Array:
    """Reshape (n, 256) to (size, n * 256 / size): one column per sub-block."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _f16(d: F32Array) -> F32Array:
    return d.astype(np.float16).astype(np.float32)


def _where_positive(top: F32Array, value: F32Array) -> F32Array:
    return np.where(top > 0, value, ZERO)


def _search_affine(
    x: F32Array, w: F32Array, nmax: int, steps: F32Array, mul: Multiply, *, use_mad: bool
) -> tuple[F32Array, F32Array, F32Array]:
    """Fit scale and minimum of weighted sub-blocks as `make_qkx2_quants`, once per step.

    `x` are values (elements, sub-blocks) and `w` their weights; each of `steps` replaces `nmax`, the largest quant, in
    the scale of one try. `use_mad` measures errors by magnitude instead of square. Returns scale, minus the minimum,
    quants (elements, sub-blocks).
    """
    low, high = np.minimum(x.min(axis=0), ZERO), x.max(axis=0)
    sum_w, sum_x = sum_in_order(w), mul.sum(w, x)

    def quants(levels: F32Array) -> F32Array:
        q = mul.nearest(levels / (high - low), x - low).astype(np.float32)
        return np.clip(q, ZERO, np.float32(nmax), out=q)

    def error(scale: F32Array, q: F32Array, minimum: NDArray[Any]) -> F32Array:
        e = mul.add(scale, q, minimum)
        e -= x
        e = np.abs(e, out=e) if use_mad else np.multiply(e, e, out=e)
        return mul.sum(w, e)

    flat = high == low
    scale = ONE / (np.float32(nmax) / (high - low))
    best = quants(np.full(1, nmax, np.float32))
    best_error = error(scale, best, low)
    for levels in steps[:, None]:
        q = quants(levels)
        wl = w * q
        sum_l, sum_xl, sum_l2 = sum_in_order(wl), mul.sum(wl, x), mul.sum(wl, q)
        det = mul.add(sum_w, sum_l2, -(sum_l * sum_l))
        fit_low = mul.add(sum_l2, sum_x, -(sum_l * sum_xl)) / det
        fit = np.where(fit_low > 0, sum_xl / sum_l2, mul.add(sum_w, sum_xl, -(sum_x * sum_l)) / det)
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


def _steps(nmax: int, rmin: float, nstep: int, mul: Multiply) -> F32Array:
    return mul.add(np.float32(0.1), np.arange(nstep + 1, dtype=np.float32), np.float32(rmin)) + np.float32(nmax)


def _requantize(
    q: NDArray[Any], x: F32Array, d: F32Array, dm: F32Array | np.float32, low: int, high: int
) -> NDArray[Any]:
    """Quantise again with the stored scales, if these are not 0."""
    again = np.clip(nearest_int((x + dm) / d), low, high) - low
    return np.where(d != 0, again, q)


def _back(q: NDArray[Any]) -> U8Array:
    """Reshape (size, sub-blocks) to (n, 256)."""
    return np.ascontiguousarray(q.T).astype(np.uint8).reshape(-1, QK_K)


def _q2_k(y: Blocks, x: F32Array, mul: Multiply = PLAIN) -> None:
    xs = sub_blocks(x, 16)
    scale, minus, q = _search_affine(xs, np.abs(xs), 3, _steps(3, -0.5, 15, mul), mul, use_mad=True)
    scale, minus = scale.reshape(-1, 16), minus.reshape(-1, 16)
    packed = np.zeros((len(x), 16), np.uint8)
    for field, value, shift in (("d", scale, 0), ("dmin", minus, 4)):
        top = np.maximum(value.max(axis=1), ZERO)
        level = mul.nearest(over(np.float32(15), top)[:, None], value)
        packed |= np.where((top > 0)[:, None], level << shift, 0).astype(np.uint8)
        y[field] = _where_positive(top, over(top, np.float32(15)))
    y["scales"] = packed
    d = y["d"].astype(np.float32)[:, None] * (packed & 15)
    dm = y["dmin"].astype(np.float32)[:, None] * (packed >> 4)
    y["qs"] = crumbs(_back(_requantize(q, xs, d.reshape(-1), dm.reshape(-1), 0, 3)))


def _search_3(x: F32Array) -> tuple[F32Array, I32Array]:
    """Search as `make_q3_quants(16, 4, .., do_rmse)`: up to five rounds over the quants."""
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


def _q3_k(y: Blocks, x: F32Array) -> None:
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


def _affine_4(y: Blocks, x: F32Array, nmax: int, steps: F32Array, mul: Multiply) -> U8Array:
    """Return the quants of Q4_K and Q5_K; the other fields are written to `y`."""
    xs = sub_blocks(x, 32)
    rms = np.sqrt(sum_in_order(xs * xs) / np.float32(32))
    scale, minus, q = _search_affine(xs, rms + np.abs(xs), nmax, steps, mul, use_mad=False)
    levels = []
    for field, value in (("d", scale.reshape(-1, 8)), ("dmin", minus.reshape(-1, 8))):
        top = np.maximum(value.max(axis=1), ZERO)
        inverse = _where_positive(top, over(np.float32(63), top))
        levels.append(np.minimum(mul.nearest(inverse[:, None], value).astype(np.uint8), 63))
        y[field] = top / np.float32(63)
    ls, lm = levels
    y["scales"][:, :4] = ls[:, :4] | ls[:, 4:] >> 4 << 6
    y["scales"][:, 4:8] = lm[:, :4] | lm[:, 4:] >> 4 << 6
    y["scales"][:, 8:] = ls[:, 4:] & 15 | lm[:, 4:] << 4
    sc, m = k4_scales(y["scales"])
    d, dm = y["d"].astype(np.float32)[:, None] * sc, y["dmin"].astype(np.float32)[:, None] * m
    return _back(_requantize(q, xs, d.reshape(-1), dm.reshape(-1), 0, nmax))


def _q4_k(y: Blocks, x: F32Array, mul: Multiply = PLAIN) -> None:
    y["qs"] = nibbles(_affine_4(y, x, 15, _steps(15, -1.0, 20, mul), mul), 32)


def _q5_k(y: Blocks, x: F32Array, mul: Multiply = PLAIN) -> None:
    q = _affine_4(y, x, 31, _steps(31, -0.5, 15, mul), mul)
    y["qs"] = nibbles(q, 32)
    y["qh"] = np.packbits((q > 15).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


_Q6_STEPS = np.array([0, *range(-9, 0), *range(1, 10)], np.float32)


def _search_6(x: F32Array) -> tuple[F32Array, I32Array]:
    """Search as `make_qx_quants(16, 32, .., rmse_type 1)`: 19 tries, weighted by x * x."""
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


def _q6_k(y: Blocks, x: F32Array) -> None:
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


_BORDER = KVALUES_IQ4NL[:-1] + KVALUES_IQ4NL[1:]
_NEAREST_IQ4NL = np.searchsorted(_BORDER, np.arange(-254, 227), side="right").astype(np.uint8)
"""floor(2 x) + 254 -> index of the nearest of `kvalues_iq4nl`; of a tie the upper one."""


def _best_iq4nl(x: F32Array) -> U8Array:
    """Return `best_index_int8` over `kvalues_iq4nl`; NaN counts as beyond the largest."""
    cell = np.floor(np.maximum(np.fmin(x + x, np.float32(226)), np.float32(-254)))
    index: U8Array = _NEAREST_IQ4NL[(cell + np.float32(254)).astype(np.intp)]
    return index


def _fit(x: F32Array, w: F32Array, iscale: F32Array) -> tuple[F32Array, F32Array]:
    """Sum w q x and w q q over the elements, q the nearest number to x * iscale."""
    q = KVALUES_IQ4NL[_best_iq4nl(iscale * x)]
    wq = w * q
    return sum_in_order(wq * x), sum_in_order(wq * q)


def _iq4_nl(y: Blocks, x: F32Array) -> None:
    """Quantise as `quantize_row_iq4_nl_impl` with ntry -1.

    In a block of zeros (below 1e-15) ggml leaves the quants of the previous block; here they are those of 0.
    """
    amax, top = extreme(x)
    iscale = ONE / (top / KVALUES_IQ4NL[0])
    xs = np.ascontiguousarray(x.T)
    sumqx, sumq2 = _fit(xs, xs * xs, iscale)
    something = amax >= GROUP_MAX_EPS
    y["d"] = np.where(something & (sumq2 > 0), sumqx / sumq2, ZERO)
    y["qs"] = nibbles(_best_iq4nl(x * np.where(something, iscale, ZERO)[:, None]))


_TRIES = np.arange(-7, 8, dtype=np.float32)[:, None] + KVALUES_IQ4NL[0]


def _iq4_xs(y: Blocks, x: F32Array) -> None:
    """Quantise super-blocks as `quantize_row_iq4_nl_impl` with ntry 7."""
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


WRITE: dict[GGMLType, Fill] = {
    types.Q1_0: _q1_0,
    types.Q2_0: _q2_0,
    types.Q4_0: _q4_0,
    types.Q4_1: _q4_1,
    types.Q5_0: _q5_0,
    types.Q5_1: _q5_1,
    types.Q8_0: _q8_0,
    types.Q8_1: _q8_1,
    types.Q8_K: _q8_k,
    types.TQ1_0: _tq1_0,
    types.TQ2_0: _tq2_0,
    types.MXFP4: _mxfp4,
    types.NVFP4: _nvfp4,
    types.Q2_K: _q2_k,
    types.Q3_K: _q3_k,
    types.Q4_K: _q4_k,
    types.Q5_K: _q5_k,
    types.Q6_K: _q6_k,
    types.IQ4_NL: _iq4_nl,
    types.IQ4_XS: _iq4_xs,
}
WRITE_SIMD: dict[GGMLType, Fill] = {types.Q8_0: _q8_0_simd, types.Q8_1: _q8_1_simd}
"""Types for which ggml-cpu's AVX2 `quantize_row_*` does not call the reference."""
WRITE_EVEN: dict[GGMLType, Fill] = {types.Q8_0: _q8_0_even, types.Q8_1: _q8_1_even}
"""The same for NEON and RVV."""
WRITE_FUSED: dict[GGMLType, Fill] = {
    **WRITE_EVEN,
    types.Q2_K: partial(_q2_k, mul=FUSED),
    types.Q4_K: partial(_q4_k, mul=FUSED),
    types.Q5_K: partial(_q5_k, mul=FUSED),
    types.Q8_K: partial(_q8_k, mul=FUSED),
}
"""The same, and the reference as GCC compiles it where there is fused multiply-add."""
_SEARCHES = frozenset({types.Q2_K, types.Q3_K, types.Q4_K, types.Q5_K, types.Q6_K, types.IQ4_XS})


def written(type_: GGMLType, x: F32Array, fill: Fill) -> Blocks:
    """Return the blocks of `type_` that `fill` makes of `x`, shape (n, blck_size)."""
    y = np.zeros(len(x), BLOCK[type_])
    step = _CHUNK if type_ in _SEARCHES else len(x)
    for i in range(0, len(x), step):
        fill(y[i : i + step], x[i : i + step])
    return y
