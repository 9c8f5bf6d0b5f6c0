"""The bytes of one block of every block type: the C structs of ggml-common.h as NumPy structured types."""

from __future__ import annotations

from typing import Any

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

F32Array = NDArray[np.float32]
Blocks = NDArray[Any]
"""One-dimensional array of a type of `BLOCK`."""

QK_K = 256
"""Elements in a super-block."""

# fmt: off
_FIELDS: dict[GGMLType, list[tuple[str, str, int]]] = {
    Q1_0:    [("d", "<f2", 1), ("qs", "u1", 16)],
    Q2_0:    [("d", "<f2", 1), ("qs", "u1", 16)],
    Q4_0:    [("d", "<f2", 1), ("qs", "u1", 16)],
    Q4_1:    [("d", "<f2", 1), ("m", "<f2", 1), ("qs", "u1", 16)],
    Q5_0:    [("d", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)],
    Q5_1:    [("d", "<f2", 1), ("m", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)],
    Q8_0:    [("d", "<f2", 1), ("qs", "i1", 32)],
    Q8_1:    [("d", "<f2", 1), ("s", "<f2", 1), ("qs", "i1", 32)],
    MXFP4:   [("e", "u1", 1), ("qs", "u1", 16)],
    NVFP4:   [("d", "u1", 4), ("qs", "u1", 32)],
    Q2_K:    [("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2", 1), ("dmin", "<f2", 1)],
    Q3_K:    [("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2", 1)],
    Q4_K:    [("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12), ("qs", "u1", 128)],
    Q5_K:    [("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
    Q6_K:    [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2", 1)],
    Q8_K:    [("d", "<f4", 1), ("qs", "i1", 256), ("bsums", "<i2", 16)],
    TQ1_0:   [("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2", 1)],
    TQ2_0:   [("qs", "u1", 64), ("d", "<f2", 1)],
    IQ1_S:   [("d", "<f2", 1), ("qs", "u1", 32), ("qh", "<u2", 8)],
    IQ1_M:   [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)],
    IQ2_XXS: [("d", "<f2", 1), ("qs", "<u2", 32)],
    IQ2_XS:  [("d", "<f2", 1), ("qs", "<u2", 32), ("scales", "u1", 8)],
    IQ2_S:   [("d", "<f2", 1), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
    IQ3_XXS: [("d", "<f2", 1), ("qs", "u1", 64), ("scales_and_signs", "<u4", 8)],
    IQ3_S:   [("d", "<f2", 1), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
    IQ4_NL:  [("d", "<f2", 1), ("qs", "u1", 16)],
    IQ4_XS:  [("d", "<f2", 1), ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)],
}
# fmt: on
BLOCK: dict[GGMLType, np.dtype[Any]] = {
    t: np.dtype([(name, form, n) if n > 1 else (name, form) for name, form, n in fields])
    for t, fields in _FIELDS.items()
}
"""Fields are ggml's, in ggml's order, without padding. IQ2_S and IQ3_XXS keep two things in ggml's one `qs`; here the
second has a name of its own."""

KVALUES_IQ4NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""`kvalues_iq4nl`."""
KVALUES_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""`kvalues_fp4`: twice the E2M1 numbers."""


def as_blocks(type_: GGMLType, raw: NDArray[np.uint8]) -> Blocks:
    """`raw`, shape (..., type_size), as one flat array of the block's struct; no copy where it is contiguous.

    Raises:
        GraphError: the last axis is no block of `type_`.
    """
    if raw.dtype != np.uint8 or raw.ndim < 2 or raw.shape[-1] != type_.type_size:
        raise GraphError(
            f"{type_}: uint8 blocks of shape (..., n, {type_.type_size}) expected, {raw.dtype} {raw.shape} found"
        )
    return np.ascontiguousarray(raw).reshape(-1).view(BLOCK[type_])


def as_bytes(type_: GGMLType, blocks: Blocks) -> NDArray[np.uint8]:
    """The inverse of `as_blocks`: shape (n_blocks, type_size)."""
    return blocks.view(np.uint8).reshape(-1, type_.type_size)


def e8m0_half(e: NDArray[np.uint8]) -> F32Array:
    """2**(e - 128): `ggml_e8m0_to_fp32_half`, denormal below e = 2."""
    e32 = e.astype(np.uint32)
    return np.where(e < 2, np.uint32(0x00200000) << e32, (e32 - np.uint32(1)) << np.uint32(23)).view(np.float32)


def _ue4m3() -> F32Array:
    exp, man = np.arange(256) >> 3 & 15, np.arange(256) & 7
    value = np.where(exp == 0, np.ldexp(man, -9), np.ldexp(1 + man / 8, exp - 7)) / 2
    value[[0x00, 0x7F]] = 0
    halves: F32Array = value.astype(np.float32)
    return halves


UE4M3_HALF = _ue4m3()
"""Half of each UE4M3 number: `ggml_ue4m3_to_fp32`; bit 7 is not looked at, 0x7f is 0 (but 0xff is not)."""


def q3_scales(packed: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The 16 signed 6-bit scales of Q3_K, (n, 12) to (n, 16): as `dequantize_row_q3_K` unpacks them."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = packed[:, None, 8:] >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    scales: NDArray[np.int32] = (low | high.reshape(-1, 16) << 4).astype(np.int32)
    return scales - 32


def k4_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The 8 scales and 8 mins of 6 bits of Q4_K and Q5_K, from (n, 12): `get_scale_min_k4`."""
    top = packed[:, :8] >> 6 << 4
    sc = np.concatenate([packed[:, :4] & 63, packed[:, 8:] & 15 | top[:, :4]], axis=1)
    m = np.concatenate([packed[:, 4:8] & 63, packed[:, 8:] >> 4 | top[:, 4:]], axis=1)
    return sc, m
