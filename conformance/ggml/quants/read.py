"""Block types to float32: `to_float` of ggml's type_traits, bit for bit.

Each function takes n blocks (`blocks.BLOCK`) and returns (n, blck_size). Products and sums follow the order of the C
code, with one float32 rounding each. The `gguf` package reads the IQ1, IQ2 and IQ3 types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.types import GGMLType

from .blocks import (
    KVALUES_FP4,
    KVALUES_IQ4NL,
    UE4M3_HALF,
    Blocks,
    F32Array,
    as_blocks,
    as_bytes,
    e8m0_half,
    k4_scales,
    q3_scales,
)

Bits = NDArray[np.uint8]

_SHIFT2 = np.array([[0], [2], [4], [6]], np.uint8)
_BIT8 = np.arange(8, dtype=np.uint8)[:, None]
_POW3 = np.array([[1], [3], [9], [27], [81]], np.uint8)


def _f32(a: NDArray[Any]) -> F32Array:
    return a.astype(np.float32)


def _nibbles(qs: Bits, group: int) -> Bits:
    """Unpack each `group` bytes to low, then high nibbles: (n, bytes) to (n, 2 * bytes)."""
    n, nbytes = qs.shape
    qs = qs.reshape(n, nbytes // group, group)
    q = np.empty((n, nbytes // group, 2, group), np.uint8)
    np.bitwise_and(qs, 15, out=q[:, :, 0])
    np.right_shift(qs, 4, out=q[:, :, 1])
    return q.reshape(n, 2 * nbytes)


def _crumbs(qs: Bits, group: int = 32) -> Bits:
    """Unpack each `group` bytes to four runs of 2-bit numbers: (n, bytes) to (n, 4 * bytes)."""
    n, nbytes = qs.shape
    q = qs.reshape(n, nbytes // group, 1, group) >> _SHIFT2
    q &= 3
    return q.reshape(n, 4 * nbytes)


def _bits(qh: Bits) -> Bits:
    """Unpack bits: bit j of 32 bytes belongs to group j of 32 elements; (n, 32) to (n, 256)."""
    q = qh[:, None, :] >> _BIT8
    q &= 1
    return q.reshape(len(qh), 256)


def _scaled(q: F32Array, scale: F32Array, minus: F32Array | None = None) -> F32Array:
    """Compute `q * scale - minus` in place; each scale applies to an equal run of neighbours."""
    n, groups = scale.shape
    v = q.reshape(n, groups, -1)
    v *= scale[:, :, None]
    if minus is not None:
        v -= minus[:, :, None]
    return q


def _q1_0(b: Blocks) -> F32Array:
    d = _f32(b["d"])[:, None]
    return np.where(np.unpackbits(b["qs"], axis=1, bitorder="little").view(np.bool_), d, -d)


def _q2_0(b: Blocks) -> F32Array:
    q = (b["qs"][:, :, None] >> _SHIFT2[:, 0] & 3).reshape(len(b), 64)
    return (_f32(q) - np.float32(1)) * _f32(b["d"])[:, None]


def _q4_0(b: Blocks) -> F32Array:
    q = _f32(_nibbles(b["qs"], 16))
    q -= 8
    q *= _f32(b["d"])[:, None]
    return q


def _q4_1(b: Blocks) -> F32Array:
    q = _f32(_nibbles(b["qs"], 16))
    q *= _f32(b["d"])[:, None]
    q += _f32(b["m"])[:, None]
    return q


def _five(b: Blocks) -> F32Array:
    high = np.unpackbits(b["qh"], axis=1, bitorder="little")
    high <<= 4
    high |= _nibbles(b["qs"], 16)
    return _f32(high)


def _q5_0(b: Blocks) -> F32Array:
    q = _five(b)
    q -= 16
    q *= _f32(b["d"])[:, None]
    return q


def _q5_1(b: Blocks) -> F32Array:
    q = _five(b)
    q *= _f32(b["d"])[:, None]
    q += _f32(b["m"])[:, None]
    return q


def _q8(b: Blocks) -> F32Array:
    q = _f32(b["qs"])
    q *= _f32(b["d"])[:, None]
    return q


def _q2_k(b: Blocks) -> F32Array:
    scale = _f32(b["d"])[:, None] * (b["scales"] & 15)
    return _scaled(_f32(_crumbs(b["qs"])), scale, _f32(b["dmin"])[:, None] * (b["scales"] >> 4))


def _q3_k(b: Blocks) -> F32Array:
    q = _bits(b["hmask"])
    q <<= 2
    q |= _crumbs(b["qs"])
    v = _f32(q)
    v -= 4
    return _scaled(v, _f32(b["d"])[:, None] * _f32(q3_scales(b["scales"])))


def _q4_k(b: Blocks) -> F32Array:
    sc, m = k4_scales(b["scales"])
    return _scaled(_f32(_nibbles(b["qs"], 32)), _f32(b["d"])[:, None] * sc, _f32(b["dmin"])[:, None] * m)


def _q5_k(b: Blocks) -> F32Array:
    sc, m = k4_scales(b["scales"])
    q = _bits(b["qh"])
    q <<= 4
    q |= _nibbles(b["qs"], 32)
    return _scaled(_f32(q), _f32(b["d"])[:, None] * sc, _f32(b["dmin"])[:, None] * m)


def _q6_k(b: Blocks) -> F32Array:
    q = _crumbs(b["qh"])
    q <<= 4
    q |= _nibbles(b["ql"], 64)
    v = _f32(q)
    v -= 32
    return _scaled(v, _f32(b["d"])[:, None] * b["scales"])


def _tq1_0(b: Blocks) -> F32Array:
    n = len(b)
    q = np.concatenate([(part[:, None, :] * _POW3[:k]).reshape(n, -1) for part, k in (
        (b["qs"][:, :32], 5), (b["qs"][:, 32:], 5), (b["qh"], 4))], axis=1)  # fmt: skip
    q = q.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return (_f32(q) - np.float32(1)) * _f32(b["d"])[:, None]


def _tq2_0(b: Blocks) -> F32Array:
    q = _f32(_crumbs(b["qs"]))
    q -= 1
    q *= _f32(b["d"])[:, None]
    return q


def _mxfp4(b: Blocks) -> F32Array:
    v = KVALUES_FP4[_nibbles(b["qs"], 16)]
    v *= e8m0_half(b["e"])[:, None]
    return v


def _nvfp4(b: Blocks) -> F32Array:
    return _scaled(KVALUES_FP4[_nibbles(b["qs"], 8)], UE4M3_HALF[b["d"]])


def _iq4_nl(b: Blocks) -> F32Array:
    v = KVALUES_IQ4NL[_nibbles(b["qs"], 16)]
    v *= _f32(b["d"])[:, None]
    return v


def _iq4_xs(b: Blocks) -> F32Array:
    low = np.stack([b["scales_l"] & 15, b["scales_l"] >> 4], axis=2).reshape(-1, 8)
    high = b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    ls = (low | high << 4).astype(np.int32) - 32
    return _scaled(KVALUES_IQ4NL[_nibbles(b["qs"], 16)], _f32(b["d"])[:, None] * _f32(ls))


def _by_gguf(type_: GGMLType) -> Callable[[Blocks], F32Array]:
    def read(b: Blocks) -> F32Array:
        import gguf.quants  # noqa: PLC0415  # takes a tenth of a start, and most never need it

        quant = getattr(gguf.quants, type_.name.upper())
        quant.init_grid()
        out: F32Array = quant.dequantize_blocks(as_bytes(type_, b))
        return out

    return read


READ: dict[GGMLType, Callable[[Blocks], F32Array]] = {
    types.Q1_0: _q1_0,
    types.Q2_0: _q2_0,
    types.Q4_0: _q4_0,
    types.Q4_1: _q4_1,
    types.Q5_0: _q5_0,
    types.Q5_1: _q5_1,
    types.Q8_0: _q8,
    types.Q8_1: _q8,
    types.Q8_K: _q8,
    types.MXFP4: _mxfp4,
    types.NVFP4: _nvfp4,
    types.Q2_K: _q2_k,
    types.Q3_K: _q3_k,
    types.Q4_K: _q4_k,
    types.Q5_K: _q5_k,
    types.Q6_K: _q6_k,
    types.TQ1_0: _tq1_0,
    types.TQ2_0: _tq2_0,
    types.IQ4_NL: _iq4_nl,
    types.IQ4_XS: _iq4_xs,
    **{
        t: _by_gguf(t)
        for t in (types.IQ1_S, types.IQ1_M, types.IQ2_XXS, types.IQ2_XS, types.IQ2_S, types.IQ3_XXS, types.IQ3_S)
    },
}
"""Type -> reader; for Q8_1 and Q8_K, which lack `to_float`, quants times `d`."""

_OFFSETS: dict[GGMLType, tuple[int, Callable[[Blocks], F32Array]]] = {
    **dict.fromkeys((types.Q4_1, types.Q5_1), (32, lambda b: _f32(b["m"])[:, None])),
    **dict.fromkeys((types.Q4_K, types.Q5_K), (32, lambda b: -_f32(b["dmin"])[:, None] * k4_scales(b["scales"])[1])),
    types.Q2_K: (16, lambda b: -_f32(b["dmin"])[:, None] * (b["scales"] >> 4)),
}
"""Type with `scale * quant + offset` -> elements per offset, offsets of its blocks."""


def offsets(type_: GGMLType, raw: NDArray[Any]) -> F32Array | None:
    """Return the offset of each group of elements, (..., n, type_size) to (..., groups).

    None for a type without minima. Elements are `scale * quant + offset`: a Q4_1 block has one offset `m`, a Q4_K block
    eight `-dmin * min`.
    """
    if type_ not in _OFFSETS:
        return None
    size, of = _OFFSETS[type_]
    groups = raw.shape[-2] * type_.blck_size // size
    return np.ascontiguousarray(of(as_blocks(type_, raw)), np.float32).reshape(*raw.shape[:-2], groups)
