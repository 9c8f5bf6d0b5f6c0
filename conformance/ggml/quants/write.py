"""float32 to the types without super-blocks: `from_float_ref` of ggml's type_traits, bit for bit.

Each function maps values (n, blck_size) to n blocks (`blocks.BLOCK`). Each step is one float32 operation, in the order
of the C code. Numbers that no integer holds become what x86 makes of them, on any machine: see `to_int`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.types import GGMLType

from .blocks import BLOCK, KVALUES_FP4, UE4M3_HALF, Blocks, F32Array, e8m0_half

U8Array = NDArray[np.uint8]

_SHIFT2 = np.array([[0], [2], [4], [6]], np.uint8)
ONE = np.float32(1)
GROUP_MAX_EPS = np.float32(1e-15)


def empty(type_: GGMLType, n: int) -> Blocks:
    """`n` blocks of zeros."""
    return np.zeros(n, BLOCK[type_])


def to_int(x: F32Array) -> NDArray[np.int32]:
    """C's `(int) x` as x86's cvttss2si does it: toward zero; INT_MIN where it does not fit or is NaN."""
    return np.where(np.abs(x) < np.float32(2**31), x, np.float32(-(2**31))).astype(np.int32)


def roundf(x: F32Array) -> F32Array:
    """C's `roundf`: to nearest, halves away from zero."""
    t: F32Array = np.trunc(x)
    return t + np.copysign(_f32(np.abs(x - t) >= np.float32(0.5)), x)


def nearest_int(x: F32Array) -> NDArray[np.int32]:
    """`nearest_int` of ggml: halves to even, by adding 1.5 * 2**23; wraps beyond 2**22 as it does."""
    bits: NDArray[np.int32] = (x + np.float32(12582912)).view(np.int32)
    return (bits & np.int32(0x007FFFFF)) - np.int32(0x00400000)


def inverse(d: F32Array) -> F32Array:
    """`d ? 1/d : 0`."""
    return np.where(d != 0, ONE / d, np.float32(0))


def sum_in_order(a: F32Array) -> F32Array:
    """The sum over the first axis in float32, from the first to the last as a C loop.

    NumPy adds in this order along any axis but the fastest in memory; along that one it adds pairwise.
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
    """Largest magnitude of each row, and the first number that has it; 0 for a row of zeros. NaN is passed over."""
    a = np.fmax(np.abs(x), np.float32(0))
    i = a.argmax(axis=-1)[..., None]
    amax = np.take_along_axis(a, i, -1)[..., 0]
    return amax, np.where(amax > 0, np.take_along_axis(x, i, -1)[..., 0], np.float32(0))


def _f32(a: NDArray[Any]) -> F32Array:
    return a.astype(np.float32)


def _u8(a: NDArray[Any]) -> U8Array:
    return a.astype(np.uint8)


def _q1_0(x: F32Array) -> Blocks:
    y = empty(types.Q1_0, len(x))
    y["d"] = sum_in_order(np.abs(x).T) / np.float32(128)
    y["qs"] = np.packbits(x >= 0, axis=1, bitorder="little")
    return y


def _q2_0(x: F32Array) -> Blocks:
    y = empty(types.Q2_0, len(x))
    y["d"] = d = np.abs(x).max(axis=1)
    q = _u8(np.clip(to_int(roundf(x * inverse(d)[:, None])) + 1, 0, 3)).reshape(-1, 16, 4)
    y["qs"] = np.bitwise_or.reduce(q << np.array([0, 2, 4, 6], np.uint8), axis=2)
    return y


def _symmetric(x: F32Array, top: int) -> tuple[F32Array, U8Array]:
    """Scale and quants 0..2*top-1 of Q4_0 and Q5_0."""
    d = extreme(x)[1] / np.float32(-top)
    q = to_int(x * inverse(d)[:, None] + np.float32(top + 0.5)).astype(np.int8)
    return d, _u8(np.minimum(q, 2 * top - 1))


def _affine(x: F32Array, top: int) -> tuple[F32Array, F32Array, NDArray[np.int32]]:
    """Scale, minimum and quants of Q4_1 and Q5_1."""
    # the first of the least: among zeros of either sign, ggml keeps the one it meets first
    low = np.take_along_axis(x, x.argmin(axis=1)[:, None], 1)[:, 0]
    high = np.take_along_axis(x, x.argmax(axis=1)[:, None], 1)[:, 0]
    d = (high - low) / np.float32(top)
    return d, low, to_int((x - low[:, None]) * inverse(d)[:, None] + np.float32(0.5))


def nibbles(q: U8Array, group: int = 16) -> U8Array:
    """Pack the low 4 bits of 2 * `group` quants into `group` bytes, the first half low: (n, m) to (n, m / 2)."""
    pair = q.reshape(len(q), -1, 2, group)
    packed = pair[:, :, 0] & np.uint8(15) | pair[:, :, 1] << np.uint8(4)
    return packed.reshape(len(q), -1)


def _q4_0(x: F32Array) -> Blocks:
    y = empty(types.Q4_0, len(x))
    y["d"], q = _symmetric(x, 8)
    # a negative quant keeps its upper nibble in C, where the low one is stored unmasked
    y["qs"] = q[:, :16] | q[:, 16:] << 4
    return y


def _q4_1(x: F32Array) -> Blocks:
    y = empty(types.Q4_1, len(x))
    y["d"], y["m"], q = _affine(x, 15)
    q8 = _u8(np.minimum(q.astype(np.int8), 15))
    y["qs"] = q8[:, :16] | q8[:, 16:] << 4
    return y


def _five(y: Blocks, q: U8Array) -> Blocks:
    y["qs"] = nibbles(q)
    y["qh"] = np.packbits(q & 16, axis=1, bitorder="little")
    return y


def _q5_0(x: F32Array) -> Blocks:
    y = empty(types.Q5_0, len(x))
    y["d"], q = _symmetric(x, 16)
    return _five(y, q)


def _q5_1(x: F32Array) -> Blocks:
    y = empty(types.Q5_1, len(x))
    y["d"], y["m"], q = _affine(x, 31)
    return _five(y, _u8(q))


def _eight(x: F32Array) -> tuple[F32Array, NDArray[np.int8]]:
    d = np.abs(x).max(axis=1) / np.float32(127)
    return d, to_int(roundf(x * inverse(d)[:, None])).astype(np.int8)


def _q8_0(x: F32Array) -> Blocks:
    y = empty(types.Q8_0, len(x))
    y["d"], y["qs"] = _eight(x)
    return y


def _q8_1(x: F32Array) -> Blocks:
    y = empty(types.Q8_1, len(x))
    d, q = _eight(x)
    y["d"], y["qs"], y["s"] = d, q, _f32(q.sum(axis=1, dtype=np.int32)) * d
    return y


def _eight_simd(x: F32Array) -> tuple[F32Array, NDArray[np.int8], F32Array]:
    amax = np.abs(x).max(axis=1)
    d = amax / np.float32(127)
    inv = np.where(amax != 0, np.float32(127) / amax, np.float32(0))
    q = to_int(np.rint(x * inv[:, None]))
    return d, np.clip(q, -128, 127).astype(np.int8), d * _f32(q.sum(axis=1, dtype=np.int32))


def _q8_0_simd(x: F32Array) -> Blocks:
    y = empty(types.Q8_0, len(x))
    y["d"], y["qs"], _ = _eight_simd(x)
    return y


def _q8_1_simd(x: F32Array) -> Blocks:
    y = empty(types.Q8_1, len(x))
    y["d"], y["qs"], y["s"] = _eight_simd(x)
    return y


def _q8_k(x: F32Array) -> Blocks:
    y = empty(types.Q8_K, len(x))
    amax, top = extreme(x)
    iscale = np.float32(-127) / top
    q = np.minimum(127, nearest_int(iscale[:, None] * x)).astype(np.int8)
    q[amax == 0] = 0
    y["qs"] = q
    y["bsums"] = q.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
    y["d"] = np.where(amax == 0, np.float32(0), ONE / iscale)
    return y


def _trits(x: F32Array, d: F32Array) -> NDArray[np.int32]:
    # lroundf of what no long holds is LONG_MIN, whose low 32 bits are 0
    r = roundf(x * inverse(d)[:, None])
    return np.where(np.abs(r) < np.float32(2**31), r, np.float32(0)).astype(np.int32) + 1


def _tq1_0(x: F32Array) -> Blocks:
    y = empty(types.TQ1_0, len(x))
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
    return y


def crumbs(q: U8Array) -> U8Array:
    """Pack the low 2 bits of four runs of 32 quants into 32 bytes, the first lowest: (n, 256) to (n, 64)."""
    packed: U8Array = np.bitwise_or.reduce((q & 3).reshape(-1, 2, 4, 32) << _SHIFT2, axis=2)
    return packed.reshape(-1, 64)


def _tq2_0(x: F32Array) -> Blocks:
    y = empty(types.TQ2_0, len(x))
    y["d"] = d = np.abs(x).max(axis=1)
    y["qs"] = crumbs(_u8(_trits(x, d)))
    return y


def _best_fp4(x: F32Array, d: F32Array) -> U8Array:
    """`best_index_mxfp4`: the first of the 16 numbers at the least distance.

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


def _mxfp4(x: F32Array) -> Blocks:
    y = empty(types.MXFP4, len(x))
    amax = np.abs(x).max(axis=1)
    # log2f rounds to float32 before floor sees it: just below a power of two it is already the next integer
    log2 = np.floor(_f32(np.log2(amax.astype(np.float64))))
    y["e"] = np.where(amax > 0, to_int(log2 + np.float32(125)), 0).astype(np.uint8)
    y["qs"] = nibbles(_best_fp4(x, e8m0_half(y["e"])[:, None]))
    return y


def _to_ue4m3(x: F32Array) -> U8Array:
    """`ggml_fp32_to_ue4m3`: halves up, at most 448; below the normal range rounded to 1/512."""
    x = np.minimum(np.where(x > 0, x, np.float32(0)), np.float32(448))
    bits = x.view(np.int32)
    normal = (bits >> 20) + (bits >> 19 & 1) - (120 << 3)
    subnormal = np.minimum(to_int(x * np.float32(512) + np.float32(0.5)), 7)
    # the whole top binade, from 256 on, becomes 448
    return _u8(np.where((bits >> 23) - 120 <= 0, subnormal, np.where(normal >= 0x78, 0x7E, normal)))


def _nvfp4(x: F32Array) -> Blocks:
    y = empty(types.NVFP4, len(x))
    sub = x.reshape(-1, 16)
    ue = _to_ue4m3(np.abs(sub).max(axis=1) / np.float32(6))
    y["d"] = ue.reshape(-1, 4)
    y["qs"] = nibbles(_best_fp4(sub, UE4M3_HALF[ue][:, None]), 8).reshape(-1, 32)
    return y


WRITE_32: dict[GGMLType, Callable[[F32Array], Blocks]] = {
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
}
WRITE_SIMD: dict[GGMLType, Callable[[F32Array], Blocks]] = {types.Q8_0: _q8_0_simd, types.Q8_1: _q8_1_simd}
"""Where `quantize_row_*` of ggml-cpu's AVX2 code is no call of the reference."""
