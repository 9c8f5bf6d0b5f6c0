"""Valid random blocks of any block type, those without a quantiser included, out of given random bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import GraphError
from conformance.ggml.types import (
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Q8_1,
    Q8_K,
    TQ1_0,
    TQ2_0,
    GGMLType,
)

from .blocks import BLOCK, Blocks, as_bytes

# fmt: off
SCALES: dict[GGMLType, dict[str, int]] = {
    Q1_0: {"d": -1}, Q2_0: {"d": -2}, Q4_0: {"d": -4}, Q4_1: {"d": -4, "m": -1}, Q5_0: {"d": -5},
    Q5_1: {"d": -5, "m": -1}, Q8_0: {"d": -8}, Q8_1: {"d": -8}, TQ1_0: {"d": -1}, TQ2_0: {"d": -1},
    IQ4_NL: {"d": -8}, IQ4_XS: {"d": -13},
    Q2_K: {"d": -6, "dmin": -6}, Q3_K: {"d": -8}, Q4_K: {"d": -11, "dmin": -8}, Q5_K: {"d": -12, "dmin": -8},
    Q6_K: {"d": -13}, IQ1_S: {"d": -4}, IQ2_XXS: {"d": -7}, IQ2_XS: {"d": -7}, IQ2_S: {"d": -7}, IQ3_XXS: {"d": -9},
    IQ3_S: {"d": -10},
}
# fmt: on
"""F16 scales: they lie in [2**e, 2**(e + 1)), so that the largest values of a block are about 0.5 to 4."""
MINS = frozenset({"m", "dmin"})
"""Offsets, kept at the sign that centres the values: `m` is added and so negative, `dmin` is taken away."""


def _f16(random: NDArray[np.uint16], exponent: int) -> NDArray[np.float16]:
    """The same 10 mantissa bits and sign, 2**exponent as the exponent."""
    return (random & np.uint16(0x83FF) | np.uint16((15 + exponent) << 10)).view(np.float16)


def _canonical_trits(q: NDArray[np.uint8], trits: int) -> NDArray[np.uint8]:
    """Bytes that the quantiser can make: a number below 3**trits, as a fraction of 243 in 256ths, rounded up."""
    number = (q.astype(np.uint16) * np.uint16(3**trits) >> np.uint16(8)) * np.uint16(3 ** (5 - trits))
    return ((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)


def _tq1_0(b: Blocks) -> None:
    b["qs"], b["qh"] = _canonical_trits(b["qs"], 5), _canonical_trits(b["qh"], 4)


def _tq2_0(b: Blocks) -> None:
    both = b["qs"] >> 1 & b["qs"] & 0x55
    b["qs"] ^= both << 1  # 3 is no trit


def _mxfp4(b: Blocks) -> None:
    b["e"] = 123 + (b["e"] & 3)


def _nvfp4(b: Blocks) -> None:
    b["d"] = 32 + (b["d"] & 31)  # exponents 4 to 7: scales from 1/16 to 1


def _iq1_m(b: Blocks) -> None:
    # the F16 scale is spread over the top nibbles: 2**-4, 8 mantissa bits random
    b["scales"][:, 3] = b["scales"][:, 3] & 0x8FFF | 0x2000
    b["scales"][:, 2] = b["scales"][:, 2] & 0x3FFF | 0xC000


def _q8_0(b: Blocks) -> None:
    # no quantiser writes -128, and vec_dot on x86 negates quants in 8 bits
    b["qs"] = np.maximum(b["qs"], -127)


def _q8_1(b: Blocks) -> None:
    # 11 bits times 13 bits are exact in float32
    b["s"] = (b["d"].astype(np.float32) * b["qs"].sum(axis=1, dtype=np.int32).astype(np.float32)).astype(np.float16)


def _q8_k(b: Blocks) -> None:
    bits = b["d"].view(np.uint32) if b["d"].flags.c_contiguous else b["d"].copy().view(np.uint32)
    b["d"] = (bits & np.uint32(0x807FFFFF) | np.uint32((127 - 8) << 23)).view(np.float32)
    b["bsums"] = b["qs"].reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)


_FIX: dict[GGMLType, Callable[[Blocks], None]] = {
    TQ1_0: _tq1_0,
    TQ2_0: _tq2_0,
    MXFP4: _mxfp4,
    NVFP4: _nvfp4,
    IQ1_M: _iq1_m,
    Q8_0: _q8_0,
    Q8_1: _q8_1,
    Q8_K: _q8_k,
}


def random_blocks(
    type_: GGMLType, raw: NDArray[np.uint64] | Callable[[int], NDArray[np.uint64]], n_blocks: int
) -> NDArray[np.uint8]:
    """Blocks whose quants are random bits and whose scales are finite and moderate (values up to about 4).

    Integer and exact arithmetic only: the same words give the same bytes on every machine. Blocks hold what a quantiser
    could have written (sums of Q8_1 and Q8_K agree with the quants, trits are trits), and `ggml_validate_row_data`
    accepts them.

    Args:
        type_: any block type.
        raw: random 64-bit words, at least `n_blocks * type_size / 8`; or a function that gives as many as it is asked.
        n_blocks: how many.

    Returns:
        uint8 of shape (n_blocks, type_size).

    Raises:
        GraphError: a type without blocks, or too few words.
    """
    if type_ not in BLOCK:
        raise GraphError(f"random_blocks: a block type expected, {type_} found: it has no blocks")
    need = -(-n_blocks * type_.type_size // 8)
    words = raw(need) if callable(raw) else raw
    if words.dtype != np.uint64 or words.size < need:
        raise GraphError(
            f"random_blocks: {need} words of uint64 expected for {n_blocks} blocks of {type_},"
            f" {words.size} of {words.dtype} found"
        )
    data = np.ascontiguousarray(words).reshape(-1).astype("<u8").view(np.uint8)[: n_blocks * type_.type_size]
    b = data.copy().view(BLOCK[type_])
    for field, exponent in SCALES.get(type_, {}).items():
        bits = np.ascontiguousarray(b[field]).view(np.uint16)
        if field in MINS:
            bits = bits & np.uint16(0x7FFF) | np.uint16(0x8000 if field == "m" else 0)
        elif len(SCALES[type_]) > 1:
            bits = bits & np.uint16(0x7FFF)
        b[field] = _f16(bits, exponent)
    if type_ in _FIX:
        _FIX[type_](b)
    return as_bytes(type_, b)
