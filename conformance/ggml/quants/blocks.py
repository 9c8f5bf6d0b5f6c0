"""Block types: the C structs of ggml-common.h as NumPy structured types, and random blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.errors import GraphError
from conformance.ggml.types import GGMLType

F32Array = NDArray[np.float32]
Blocks = NDArray[Any]
"""One-dimensional array of a type of `BLOCK`."""

QK_K = 256
"""Elements of a super-block."""

# fmt: off
_FIELDS: dict[GGMLType, list[tuple[str, str, int]]] = {
    types.Q1_0:    [("d", "<f2", 1), ("qs", "u1", 16)],
    types.Q2_0:    [("d", "<f2", 1), ("qs", "u1", 16)],
    types.Q4_0:    [("d", "<f2", 1), ("qs", "u1", 16)],
    types.Q4_1:    [("d", "<f2", 1), ("m", "<f2", 1), ("qs", "u1", 16)],
    types.Q5_0:    [("d", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)],
    types.Q5_1:    [("d", "<f2", 1), ("m", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)],
    types.Q8_0:    [("d", "<f2", 1), ("qs", "i1", 32)],
    types.Q8_1:    [("d", "<f2", 1), ("s", "<f2", 1), ("qs", "i1", 32)],
    types.MXFP4:   [("e", "u1", 1), ("qs", "u1", 16)],
    types.NVFP4:   [("d", "u1", 4), ("qs", "u1", 32)],
    types.Q2_K:    [("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2", 1), ("dmin", "<f2", 1)],
    types.Q3_K:    [("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2", 1)],
    types.Q4_K:    [("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12), ("qs", "u1", 128)],
    types.Q5_K:    [("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
    types.Q6_K:    [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2", 1)],
    types.Q8_K:    [("d", "<f4", 1), ("qs", "i1", 256), ("bsums", "<i2", 16)],
    types.TQ1_0:   [("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2", 1)],
    types.TQ2_0:   [("qs", "u1", 64), ("d", "<f2", 1)],
    types.IQ1_S:   [("d", "<f2", 1), ("qs", "u1", 32), ("qh", "<u2", 8)],
    types.IQ1_M:   [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)],
    types.IQ2_XXS: [("d", "<f2", 1), ("qs", "<u2", 32)],
    types.IQ2_XS:  [("d", "<f2", 1), ("qs", "<u2", 32), ("scales", "u1", 8)],
    types.IQ2_S:   [("d", "<f2", 1), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
    types.IQ3_XXS: [("d", "<f2", 1), ("qs", "u1", 64), ("scales_and_signs", "<u4", 8)],
    types.IQ3_S:   [("d", "<f2", 1), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
    types.IQ4_NL:  [("d", "<f2", 1), ("qs", "u1", 16)],
    types.IQ4_XS:  [("d", "<f2", 1), ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)],
}
# fmt: on
BLOCK: dict[GGMLType, np.dtype[Any]] = {
    t: np.dtype([(name, form, n) if n > 1 else (name, form) for name, form, n in fields])
    for t, fields in _FIELDS.items()
}
"""Fields of ggml, in ggml's order, without padding.

IQ2_S and IQ3_XXS store two things in ggml's one `qs`; here the second has its own name."""

KVALUES_IQ4NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""`kvalues_iq4nl`."""
KVALUES_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""`kvalues_fp4`: twice the E2M1 numbers."""


def as_blocks(type_: GGMLType, raw: NDArray[np.uint8]) -> Blocks:
    """View `raw`, shape (..., type_size), as a flat array of the block's struct.

    GraphError if the last axis is not a block of `type_`.
    """
    if raw.dtype != np.uint8 or raw.ndim < 2 or raw.shape[-1] != type_.type_size:
        raise GraphError(
            f"{type_}: uint8 blocks of shape (..., n, {type_.type_size}) expected, {raw.dtype} {raw.shape} found"
        )
    return np.ascontiguousarray(raw).reshape(-1).view(BLOCK[type_])


def as_bytes(type_: GGMLType, blocks: Blocks) -> NDArray[np.uint8]:
    """Return the bytes of `blocks`, shape (n_blocks, type_size); the inverse of `as_blocks`."""
    return blocks.view(np.uint8).reshape(-1, type_.type_size)


def e8m0_half(e: NDArray[np.uint8]) -> F32Array:
    """Return 2**(e - 128): `ggml_e8m0_to_fp32_half`, denormal below e = 2."""
    e32 = e.astype(np.uint32)
    return np.where(e < 2, np.uint32(0x00200000) << e32, (e32 - np.uint32(1)) << np.uint32(23)).view(np.float32)


def _ue4m3() -> F32Array:
    exp, man = np.arange(256) >> 3 & 15, np.arange(256) & 7
    value = np.where(exp == 0, np.ldexp(man, -9), np.ldexp(1 + man / 8, exp - 7)) / 2
    value[[0x00, 0x7F]] = 0
    halves: F32Array = value.astype(np.float32)
    return halves


UE4M3_HALF = _ue4m3()
"""Half of each UE4M3 number, `ggml_ue4m3_to_fp32`; 0x7f is 0, but 0xff is not."""


def q3_scales(packed: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Unpack the 16 signed 6-bit scales of Q3_K, (n, 12) to (n, 16)."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = packed[:, None, 8:] >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    scales: NDArray[np.int32] = (low | high.reshape(-1, 16) << 4).astype(np.int32)
    return scales - 32


def k4_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Unpack the 8 scales and 8 mins of Q4_K and Q5_K from (n, 12): `get_scale_min_k4`."""
    top = packed[:, :8] >> 6 << 4
    sc = np.concatenate([packed[:, :4] & 63, packed[:, 8:] & 15 | top[:, :4]], axis=1)
    m = np.concatenate([packed[:, 4:8] & 63, packed[:, 8:] >> 4 | top[:, 4:]], axis=1)
    return sc, m


_SCALES = {
    "q1_0 tq1_0 tq2_0": {"d": -1},
    "q2_0": {"d": -2},
    "q4_0 iq1_s": {"d": -4},
    "q4_1": {"d": -4, "m": -1},
    "q5_0": {"d": -5},
    "q5_1": {"d": -5, "m": -1},
    "q2_K": {"d": -6, "dmin": -6},
    "iq2_xxs iq2_xs iq2_s": {"d": -7},
    "q8_0 q8_1 iq4_nl q3_K": {"d": -8},
    "iq3_xxs": {"d": -9},
    "iq3_s": {"d": -10},
    "q4_K": {"d": -11, "dmin": -8},
    "q5_K": {"d": -12, "dmin": -8},
    "q6_K iq4_xs": {"d": -13},
}
SCALES = {types.type_named(name): fields for names, fields in _SCALES.items() for name in names.split()}
"""F16 fields and the exponent e of random ones: scales lie in [2**e, 2**(e + 1)).

So the largest values of a block are about 0.5 to 4."""
_MINS = frozenset({"m", "dmin"})
"""Offset fields.

Their sign centres the values: ggml adds `m`, so it is negative; it subtracts `dmin`."""


def _f16(random: NDArray[np.uint16], exponent: int) -> NDArray[np.float16]:
    """Return `random` with its exponent replaced by 2**exponent."""
    return (random & np.uint16(0x83FF) | np.uint16((15 + exponent) << 10)).view(np.float16)


def _canonical_trits(q: NDArray[np.uint8], trits: int) -> NDArray[np.uint8]:
    """Return bytes that the quantiser can write: ceil(256 t / 243) for a t below 3**trits."""
    number = (q.astype(np.uint16) * np.uint16(3**trits) >> np.uint16(8)) * np.uint16(3 ** (5 - trits))
    return ((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)


def _tq1_0(b: Blocks) -> None:
    b["qs"], b["qh"] = _canonical_trits(b["qs"], 5), _canonical_trits(b["qh"], 4)


def _tq2_0(b: Blocks) -> None:
    both = b["qs"] >> 1 & b["qs"] & 0x55
    b["qs"] ^= both << 1  # 3 is not a trit


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
    types.TQ1_0: _tq1_0,
    types.TQ2_0: _tq2_0,
    types.MXFP4: _mxfp4,
    types.NVFP4: _nvfp4,
    types.IQ1_M: _iq1_m,
    types.Q8_0: _q8_0,
    types.Q8_1: _q8_1,
    types.Q8_K: _q8_k,
}


def random_blocks(
    type_: GGMLType, raw: NDArray[np.uint64] | Callable[[int], NDArray[np.uint64]], n_blocks: int
) -> NDArray[np.uint8]:
    """Return valid blocks with random quants, values up to about 4: (n_blocks, type_size).

    Integer and exact operations only: the same words give the same bytes on every machine. A quantiser could have
    written the blocks (sums of Q8_1 and Q8_K match the quants), and `ggml_validate_row_data` accepts them. `raw` has at
    least `n_blocks * type_size / 8` random 64-bit words, or is a function from a count to that many. GraphError for a
    type without blocks, or too few words.
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
        if field in _MINS:
            bits = bits & np.uint16(0x7FFF) | np.uint16(0x8000 if field == "m" else 0)
        elif len(SCALES[type_]) > 1:
            bits = bits & np.uint16(0x7FFF)
        b[field] = _f16(bits, exponent)
    if type_ in _FIX:
        _FIX[type_](b)
    return as_bytes(type_, b)
