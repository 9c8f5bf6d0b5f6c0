"""Block types inside a graph: parts to numbers, and numbers to parts as ggml's `quantize_row_*_ref` does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Type

from conformance.ggml.quants.blocks import KVALUES_FP4
from conformance.ggml.types import MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, GGMLType

from .forms import BLOCKS
from .nodes import Constants, Value, round_f16, shape_of

Parts = dict[str, Value]
"""`d`, `m`: float32 of shape (…, 1) on F16's grid; `e`: uint8 of that shape; `q`: int8 or uint8, (…, blck_size)."""

KVALUES = np.array(KVALUES_FP4, np.float32)
_POWERS = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
"""What an exponent of MXFP4 multiplies with: `GGML_E8M0_TO_FP32_HALF`."""
_INVERSES = np.ldexp(np.float32(1), np.minimum(128 - np.arange(256), 127)).astype(np.float32)
_MIDDLES = (KVALUES[:7] + KVALUES[1:8]) / 2


def _firsts() -> NDArray[np.float32]:
    """The smallest magnitude for each exponent of MXFP4 from 1 on: `floorf(log2f(amax)) - 2 + 127`.

    A little below a power of two the float32 logarithm is already the next integer.
    """
    powers = np.ldexp(np.float32(1), np.arange(1, 250) - 125).astype(np.float32)
    below = (powers.view(np.uint32)[:, None] - np.arange(128, dtype=np.uint32)).view(np.float32)
    same = np.floor(np.log2(below.astype(np.float64)).astype(np.float32)) == np.log2(powers)[:, None]
    return np.asarray(below[np.arange(len(powers)), same.sum(axis=1) - 1], np.float32)


def numbers(c: Constants, type_: GGMLType, parts: Parts) -> Value:
    """float32 of shape (…, blck_size): `dequantize_row_*`."""
    b = BLOCKS[type_]
    if "e" in b.scales:
        kvalue = o.gather(o.constant(KVALUES), o.convert(parts["q"], Type.i32), c.axis(0))
        return o.multiply(kvalue, o.gather(o.constant(_POWERS), o.convert(parts["e"], Type.i32), c.axis(0)))
    q: Value = o.convert(parts["q"], Type.f32)
    if b.zero:
        q = o.subtract(q, c.f32(float(b.zero)))
    x = o.multiply(q, parts["d"])
    return o.add(x, parts["m"]) if "m" in b.scales else x


def quantized(c: Constants, type_: GGMLType, x: Value, *, read_again: bool) -> Parts:
    """Parts of the float32 `x` of shape (…, blck_size): `quantize_row_*_ref`.

    Scales and minima are rounded to F16 where the graph reads them again; where they only leave it, a Convert does.
    """
    found = _QUANTIZE[type_](c, x)
    return {n: round_f16(c, p) if read_again and n in ("d", "m") else p for n, p in found.items()}


def _unfused(c: Constants, x: Value) -> Value:
    """Keep `x` from becoming one fused multiply-add with what follows: ggml rounds the product first."""
    return o.maximum(x, c.f32(-1e30))


def _inverse(c: Constants, d: Value) -> Value:
    """1 / d, and 0 where d is 0."""
    zero = c.f32(0.0)
    return o.select(o.equal(d, zero), zero, o.divide(c.f32(1.0), d))


def _divided(c: Constants, x: Value, n: float) -> Value:
    """Quotient x / n, correctly rounded, for a whole n below 2^12.

    The CPU plugin multiplies by the reciprocal, which is one unit off for every second value, and a scale on the edge
    of two F16 values then differs from ggml's. The remainder, exact because the quotient is split in two, corrects it.
    """
    r = c.f32(float(np.float32(1.0) / np.float32(n)))
    q = o.multiply(x, r)
    t = o.multiply(q, c.f32(4097.0))
    high = o.subtract(t, o.subtract(t, q))
    rest = o.subtract(o.subtract(x, o.multiply(high, c.f32(n))), o.multiply(o.subtract(q, high), c.f32(n)))
    return o.add(q, o.multiply(rest, r))


def _extreme(c: Constants, x: Value) -> Value:
    """The value of largest magnitude, the first of several, with its sign."""
    size = o.abs(x)
    top = o.reduce_max(size, c.i64(-1), True)
    count = int(shape_of(c, x)[-1])
    place = o.constant(np.arange(count, dtype=np.float32))
    first = o.reduce_min(o.select(o.equal(size, top), place, c.f32(float(count))), c.i64(-1), True)
    return o.reduce_sum(o.select(o.equal(place, first), x, c.f32(0.0)), c.i64(-1), True)


def _symmetric(levels: float) -> Callable[[Constants, Value], Parts]:
    """Q4_0 and Q5_0: the value of largest magnitude becomes -levels; halves are rounded up."""

    def quantize(c: Constants, x: Value) -> Parts:
        d = o.multiply(_extreme(c, x), c.f32(-1.0 / levels))  # exact: levels is a power of two
        d = o.select(o.equal(d, c.f32(0.0)), c.f32(-0.0), d)  # 0 / -levels, whose sign OpenVINO loses
        y = o.add(_unfused(c, o.multiply(x, _inverse(c, d))), c.f32(levels + 0.5))
        q = o.minimum(o.floor(y), c.f32(2 * levels - 1))
        return {"d": d, "q": o.convert(q, Type.u8)}

    return quantize


def _affine(levels: float) -> Callable[[Constants, Value], Parts]:
    """Q4_1 and Q5_1: the smallest value becomes 0, the largest `levels`."""

    def quantize(c: Constants, x: Value) -> Parts:
        low = o.reduce_min(x, c.i64(-1), True)
        d = _divided(c, o.subtract(o.reduce_max(x, c.i64(-1), True), low), levels)
        y = o.add(_unfused(c, o.multiply(o.subtract(x, low), _inverse(c, d))), c.f32(0.5))
        q = o.minimum(o.floor(y), c.f32(levels))
        return {"d": d, "m": low, "q": o.convert(q, Type.u8)}

    return quantize


def _q8_0(c: Constants, x: Value) -> Parts:
    d = _divided(c, o.reduce_max(o.abs(x), c.i64(-1), True), 127.0)
    q = o.round(o.multiply(x, _inverse(c, d)), "half_away_from_zero")
    return {"d": d, "q": o.convert(q, Type.i8)}


def _mxfp4(c: Constants, x: Value) -> Parts:
    """The block's power of two from its largest magnitude, then the table's nearest, the smaller of two as near."""
    top = o.reduce_max(o.abs(x), c.i64(-1), True)
    e = o.bucketize(top, o.constant(_firsts()), "i32", False)
    y = o.multiply(x, o.gather(o.constant(_INVERSES), e, c.axis(0)))
    size = o.convert(o.bucketize(o.abs(y), o.constant(_MIDDLES), "i32", True), Type.f32)
    below = o.logical_and(o.less(y, c.f32(0.0)), o.greater(size, c.f32(0.0)))
    q = o.select(below, o.add(size, c.f32(8.0)), size)
    return {"e": o.convert(e, Type.u8), "q": o.convert(q, Type.u8)}


_QUANTIZE: dict[GGMLType, Callable[[Constants, Value], Parts]] = {
    Q4_0: _symmetric(8.0),
    Q4_1: _affine(15.0),
    Q5_0: _symmetric(16.0),
    Q5_1: _affine(31.0),
    Q8_0: _q8_0,
    MXFP4: _mxfp4,
}
