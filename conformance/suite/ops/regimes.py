"""The key `data`: operands over a type's whole range, where other data is normal around 0.

An NMSE hides small values beside large ones. So for an op that rounds, each *regime* (subnormal, huge, all positive) is
a separate node in the graph of the case, with its own leaves, and is judged separately. Bit-exact ops have every regime
in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.quants import from_float
from conformance.ggml.quants.blocks import BLOCK, SCALES, random_blocks
from conformance.ggml.quants.write import WRITE
from conformance.ggml.tensor import Bytes, Dims
from conformance.ggml.types import BF16, F16, IQ1_M, IQ4_NL, MXFP4, NVFP4, GGMLType
from conformance.suite.data import Fill, encode, normal, uniform, whole

Make = Callable[[GGMLType, Stream, Dims], Bytes]
"""Generates the bytes of a leaf."""
Regime = Mapping[str, Make]
"""Leaf name -> its generator; other leaves are filled as usual."""

_WEIGHTS = ("blk.0.weight", "blk.0.ffn_exps.weight", "token_embd.weight")


def _filled(fill: Fill) -> Make:
    return lambda type_, s, ne: encode(type_, s, ne, fill)


def _span(low: int, high: int, sign: float = 0.0) -> Fill:
    """Return magnitudes from 2**low to below 2**high, uniform in exponent; random or given sign."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        n = math.prod(ne)
        words = s.words32(n)
        mantissa = (words & np.uint32(0x007FFFFF) | np.uint32(0x3F800000)).view(np.float32)
        x = np.ldexp(mantissa, s.integers(n, low, high).astype(np.int32))
        return np.copysign(x, sign or (words >> np.uint32(31)).astype(np.float32) - np.float32(0.5))

    return filled


def _ranges(type_: GGMLType) -> dict[str, Fill]:
    """Return regime -> values of a float type, from subnormals to half its maximum (all of F16)."""
    first, last = (-14, 16) if type_ is F16 else (-126, 127)
    return {
        "subnormal": _span(first - 7, first),
        "least": _span(first, first + 3),
        "positive": uniform(0.5, 1.5),
        "curve": _around(_span(4, 7)),
        "falling": _around(_span(4, 7, -1.0)),
        "large": _span(8, 12),
        "huge": _span(last - 3, last),
        "mixed": _mixed(first, last),
    }


def _mixed(first: int, last: int) -> Fill:
    """Return values with every exponent, ±0 and ±1."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = _around(_span(first - 7, last))(s, ne)
        s.sprinkle(x, (0.0, -0.0, 1.0, -1.0))
        return x

    return filled


def _around(fill: Fill) -> Fill:
    """Return `fill` without the last unit before exp overflows at 88.72, where kernels differ."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = fill(s, ne)
        return np.where((np.abs(x) >= 87) & (np.abs(x) < 89), x / 2, x)

    return filled


_LARGEST = {F16: 65504.0, BF16: 255 * 2.0**120}
"""Type -> its largest number, if it is not that of F32."""


def _last(op: str, type_: GGMLType) -> Regime:
    """Return the last 64th of the arguments for which EXP or SQR is finite.

    The largest argument itself is left out: its result may round to infinity.
    """
    inverse = math.sqrt if op == "SQR" else math.log
    largest = inverse(_LARGEST.get(type_, float(np.finfo(np.float32).max)))
    step = 1e-5 if type_ not in _LARGEST else 2.0 ** math.floor(math.log2(largest)) / (2048 if type_ is F16 else 256)
    return {"a": _filled(uniform(largest * 63 / 64, largest - step))}


_LEFT_OUT = {
    "UNARY.EXPM1 UNARY.ELU UNARY.XIELU": "subnormal least",
    "UNARY.SOFTPLUS UNARY.GELU_QUICK GLU.GEGLU_QUICK GLU.SWIGLU_OAI": "falling",
    "GLU.GEGLU_ERF": "huge mixed",
    "SUM SUM_ROWS MEAN CUMSUM": "subnormal least curve large huge mixed",
    "NORM RMS_NORM L2_NORM": "subnormal least huge mixed",
}
"""Ops -> regimes in which their formula is imprecise or overflows float32.

Imprecise: `expf(x) - 1`, `logf(1 + expf(x))`, exp of a rounded product, sums that cancel. Overflow: squares, and
factors in unspecified order."""


def _range(op: str, type_: GGMLType, *leaves: str) -> dict[str, Regime]:
    left_out = next((names.split() for ops, names in _LEFT_OUT.items() if op in ops.split()), [])
    fills = {name: _filled(fill) for name, fill in _ranges(type_).items() if name not in left_out}
    return {name: dict.fromkeys(leaves, fill) for name, fill in fills.items()}


def _casts(s: Stream, ne: Dims) -> NDArray[Any]:
    """Return rows at the limits of F16 and BF16: largest F16, subnormals, ties, specials."""
    n0 = ne[0]
    like = (n0, 1, 1, 1)
    rows = [
        s.uniform(n0, 65472.0, 65519.0),
        np.resize(np.array([65504, 65519, 65519.996, -65519.996, 65520, -65536, math.inf, math.nan], np.float32), n0),
        _span(-24, -13)(s, like),
        np.ldexp(s.integers(n0, 1, 64).astype(np.float32), -25),
        np.ldexp(s.integers(n0, 1, 64).astype(np.float32), -27),
        s.integers(n0, -511, 512).astype(np.float32),
        _span(-24, 128)(s, like),
    ]
    return _cycle(rows, ne)


def _cycle(rows: list[NDArray[Any]], ne: Dims) -> NDArray[Any]:
    return np.stack([rows[i % len(rows)] for i in range(math.prod(ne[1:]))]).astype(np.float32)


def _borders(s: Stream, ne: Dims, *, zeros: bool = True) -> NDArray[Any]:
    """Return rows at the limits of quantisers, per 16 elements: ties, scale limits, zeros."""
    n0 = ne[0]
    like = (n0, 1, 1, 1)
    signs = np.copysign(np.float32(1), s.normal(n0))
    first = np.arange(n0) % 16 == s.integers(1, 0, 16)[0]
    inside = s.uniform(n0, -0.7, 0.7)
    below = np.nextafter(np.float32(1), np.float32(0))
    steps = s.integers(n0, -14, 15).astype(np.float32) / np.float32(2)
    rows = [
        signs * np.float32(1.5),
        np.where(first, below * 4, inside),
        np.where(first, -below / 8, inside / 8),
        np.where(first, np.float32(2), inside),
        np.where(first, np.float32(-8), steps),
        np.where(first, np.float32(127), steps),
        np.full(n0, 0.3, np.float32),
        np.full(n0, -0.3, np.float32),
        uniform(1.0, 2.0)(s, like),
        uniform(-2.0, -1.0)(s, like),
        np.where(first, signs * np.float32(700), inside / 1000),
        _span(-18, -12)(s, like),
        _span(10, 14)(s, like),
    ]
    if zeros:
        rows += [np.zeros(n0, np.float32), np.where(first, signs, 0), np.where(np.arange(n0) < n0 // 2, 0, signs)]
    return _cycle(rows, ne)


def _scaled(most: bool, type_: GGMLType, s: Stream, ne: Dims) -> Bytes:
    """Return random blocks with the smallest (some subnormal) or largest scales of their type."""
    if not type_.is_quantized:
        return encode(type_, s, ne, normal())
    b = random_blocks(type_, s.words, math.prod(ne) // type_.blck_size).reshape(-1).view(BLOCK[type_])
    for field in SCALES.get(type_, {}):
        bits = np.ascontiguousarray(b[field]).view(np.uint16)
        b[field] = (bits & 0x83FF | (0x7800 if most else 0)).view(np.float16)
    if type_ is MXFP4:
        b["e"] = b["e"] % 2 + (250 if most else 0)
        b["qs"] |= 0x44  # at least 4: with exponent 0 that is float32's smallest normal number
    elif type_ is NVFP4:
        b["d"] = b["d"] % 7 + (0x78 if most else 0)
    elif type_ is IQ1_M:  # the top nibbles form an F16
        b["scales"][:, 3] = b["scales"][:, 3] & 0x8FFF | (0x7000 if most else 0)
        b["scales"][:, 2] = b["scales"][:, 2] & 0x3FFF | (0x8000 if most else 0)
    return b.view(np.uint8)


def _bytes(type_: GGMLType, s: Stream, ne: Dims) -> Bytes:
    """Return random blocks with every byte as a scale.

    None of E8M0 is NaN or subnormal, which devices flush.
    """
    b = random_blocks(type_, s.words, math.prod(ne) // type_.blck_size).reshape(-1).view(BLOCK[type_])
    name, scales = ("e", np.arange(2, 255)) if type_ is MXFP4 else ("d", np.arange(256))
    b[name] = np.resize(scales, b[name].shape)
    return b.view(np.uint8)


def _positive(type_: GGMLType, s: Stream, ne: Dims) -> Bytes:
    values = uniform(0.5, 1.5)
    if type_ not in WRITE:
        return encode(type_, s, ne, values)
    return from_float(type_, values(s, ne).reshape(-1, type_.blck_size)).reshape(-1)


def _scales(*, most: bool) -> Regime:
    other = _span(-14, -8) if most else _span(12, 16)
    return {**dict.fromkeys((*_WEIGHTS, "a"), partial(_scaled, most)), "b": _filled(other)}


def _by_cell(s: Stream, ne: Dims) -> NDArray[Any]:
    """Return K of shape (size, n_kv, …) whose elements grow from -12 to 13 by cell."""
    steps = np.rint(np.linspace(-12, 12, ne[1]))[:, None] + s.integers(ne[1] * ne[0], 0, 2).reshape(-1, ne[0])
    return np.broadcast_to(steps, ne[::-1]).astype(np.float32)


def _along_row(s: Stream, ne: Dims) -> NDArray[Any]:
    x = np.linspace(-100, 100, ne[0], dtype=np.float32) + s.uniform(math.prod(ne), 0.0, 2.0).reshape(-1, ne[0])
    return x.astype(np.float32)


_LARGE: Regime = {
    "Qcur-0": _filled(whole(-2048, 2049)),
    "cache_k_l0": _filled(whole(-32, 33)),
    "cache_v_l0": _filled(uniform(2.0**13, 2.0**14)),
}
_RISING: Regime = {"Qcur-0": _filled(whole(1, 3)), "cache_k_l0": _filled(_by_cell), "a": _filled(_along_row)}

_Words = dict[str, Callable[[str, tuple[GGMLType, ...]], Mapping[str, Regime]]]
_WORDS: _Words = {
    "": lambda _op, _types: {"": {}},
    "range": lambda op, types: _range(op, types[0], "a"),
    "both": lambda op, types: _range(op, types[0], "a", "b"),
    "positive": lambda _op, _types: {"": dict.fromkeys((*_WEIGHTS, "a", "b"), _positive)},
    "sums": lambda _op, _types: {"": dict.fromkeys((*_WEIGHTS, "a", "b"), _filled(uniform(7.0, 14.0)))},
    "far": lambda _op, _types: {"": {"a": _filled(normal(1.0, 12.0))}},
    "casts": lambda _op, _types: {"": dict.fromkeys("ab", _filled(_casts))},
    # ggml does not write the quants of IQ4_NL for a block of zeros
    "borders": lambda _op, types: {"": dict.fromkeys("ab", _filled(partial(_borders, zeros=IQ4_NL not in types)))},
    "scales": lambda _op, _types: {"least": _scales(most=False), "most": _scales(most=True)},
    "bytes": lambda _op, _types: {"": dict.fromkeys(_WEIGHTS, _bytes)},
    "last": lambda op, types: {"": _last(op, types[0])},
    "beyond": lambda _op, _types: {"": {"b": _filled(_span(14, 19))}},
    "large": lambda _op, _types: {"": _LARGE},
    "rising": lambda _op, _types: {"": _RISING},
}
"""Value of the key `data` -> its regimes, from the op and its types.

`range`: the first operand over its range; `both`: two of them alike. `positive`: no cancellation. `casts`: limits of
F16 and BF16. `sums`: sums of 1,024 products exceed the largest F16. `far`: a mean of twelve deviations. `borders`:
limits of the quantisers. `scales`: blocks with the smallest and with the largest scales. `beyond`: activations up to
eight times the largest F16. `bytes`: every byte as a block's scale. `last`: arguments before the result overflows.
`large`: attention whose scores before the scale, and sums of V, exceed it. `rising`:
scores that grow by 200 along a row, so that the largest come last.
"""


def regimes(data: str, op: str, types: tuple[GGMLType, ...]) -> Mapping[str, Regime]:
    """Return suffix of leaf names -> regime; each is a separate node."""
    return _WORDS.get(data, _WORDS[""])(op, types)
