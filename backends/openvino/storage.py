"""Storage of a tensor's bytes in an OpenVINO model, and back: NumPy only, exact both ways.

Types that OpenVINO computes with are one array of numbers. Block types that a graph can write are stored as their parts
(scales, minima and quants), because OpenVINO cannot cast bits. Everything else is moved as raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.quants import to_float
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import Bytes, Tensor, nelements, strided
from conformance.ggml.types import BF16, F16, F32, I32, I64, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, GGMLType

Arrays = Mapping[str, NDArray[Any]]
"""Name of a part -> its array: `number`, `d`, `m`, `e`, `q` or `raw`.

`number` has shape `ne[::-1]`, `raw` blocks x width."""
NUMBER = "number"
VALUE = "value"
"""Form of a leaf that a graph only reads: numbers that the host dequantised."""
RAW = "raw"
NUMBERS: dict[GGMLType, str] = {F32: "<f4", F16: "<f2", BF16: "<f4", I32: "<i4"}
"""Types stored as one array of numbers -> its dtype.

BF16 is stored as float32, which represents it exactly."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block type with parts: value = (q - zero) * d + m, or table[q] times 2^(e - 128)."""

    bits: int
    """Bits of one quant."""
    zero: int
    scales: tuple[str, ...]
    """Scale `d`, minimum `m` and exponent `e`, as far as a block has them."""
    qdtype: str = "|u1"


SCALES = {"d": "<f2", "m": "<f2", "e": "|u1"}
"""Name of a scale -> its dtype."""
BLOCKS: dict[GGMLType, Blocks] = {
    Q4_0: Blocks(4, 8, scales=("d",)),
    Q4_1: Blocks(4, 0, scales=("d", "m")),
    Q5_0: Blocks(5, 16, scales=("d",)),
    Q5_1: Blocks(5, 0, scales=("d", "m")),
    MXFP4: Blocks(4, 0, scales=("e",)),
    Q8_0: Blocks(8, 0, scales=("d",), qdtype="|i1"),
}
"""Block types whose parts OpenVINO can read and write (`block_q4_0` … of ggml-common.h)."""


@dataclass(frozen=True, slots=True)
class Part:
    """An array of a stored tensor."""

    name: str
    dtype: str
    width: int
    """Entries per block; 0 for numbers, which have the tensor's own shape."""


def parts(type_: GGMLType) -> tuple[Part, ...]:
    """Return the arrays of a tensor of `type_`."""
    if type_ in NUMBERS:
        return (Part(NUMBER, NUMBERS[type_], 0),)
    if type_ in BLOCKS:
        b = BLOCKS[type_]
        return (*(Part(n, SCALES[n], 1) for n in b.scales), Part("q", b.qdtype, type_.blck_size))
    return (Part(RAW, "|u1", type_.type_size),)


def part_shape(t: Tensor, p: Part) -> tuple[int, ...]:
    """Return the shape of the part `p` of the whole of `t`."""
    return (nelements(t) // t.type.blck_size, p.width) if p.width else t.shape


def held_dtype(p: Part) -> str:
    """Return the dtype of a cache's part between steps: float32 for F16, to save widening it."""
    return "<f4" if p.dtype == "<f2" else p.dtype


def narrow(type_: GGMLType, form: str) -> bool:
    """Return True if a cache's part is wider than its type, so that new values must be rounded."""
    return (form == NUMBER and type_ is F16) or form in {"d", "m"}


def held(t: Tensor, data: Bytes) -> dict[str, NDArray[Any]]:
    """Encode the cache `t` as parts between steps; `decode` returns the bytes."""
    coded = encode(t, data)
    return {p.name: np.ascontiguousarray(coded[p.name], held_dtype(p)) for p in parts(t.type)}


def encode(t: Tensor, data: Bytes) -> dict[str, NDArray[Any]]:
    """Encode the bytes of contiguous `t` as parts."""
    if t.type is BF16:
        return {NUMBER: to_float(BF16, data.view("<u2")).reshape(t.shape)}
    if t.type in NUMBERS:
        return {NUMBER: data.view(NUMBERS[t.type]).reshape(t.shape)}
    if t.type not in BLOCKS:
        return {RAW: data.reshape(-1, t.type.type_size)}
    b = BLOCKS[t.type]
    block = data.view(BLOCK[t.type])
    out = {n: block[n].reshape(-1, 1) for n in b.scales}
    qs = block["qs"]
    if b.bits < 8:
        qs = np.concatenate([qs & 15, qs >> 4], axis=1)
    if b.bits == 5:
        qs |= np.unpackbits(block["qh"], axis=1, bitorder="little") << np.uint8(4)
    return {**out, "q": qs}


def decode(type_: GGMLType, arrays: Arrays) -> Bytes:
    """Decode the parts of a tensor of `type_`, in order of its elements, to bytes."""
    if type_ is BF16:
        return _bf16(np.ascontiguousarray(arrays[NUMBER], "<f4")).reshape(-1).view(np.uint8)
    if type_ in NUMBERS:
        with np.errstate(over="ignore"):  # F16 leaves a graph as float32; too large values become infinite
            return np.ascontiguousarray(arrays[NUMBER], NUMBERS[type_]).reshape(-1).view(np.uint8)
    if type_ not in BLOCKS:
        return np.ascontiguousarray(arrays[RAW]).reshape(-1)
    b = BLOCKS[type_]
    q = arrays["q"].reshape(-1, type_.blck_size)
    block = np.empty(len(q), BLOCK[type_])
    for n in b.scales:
        block[n] = arrays[n].reshape(-1)
    half = type_.blck_size // 2
    block["qs"] = q if b.bits == 8 else (q[:, :half] & 15) | ((q[:, half:] & 15) << np.uint8(4))
    if b.bits == 5:
        block["qh"] = np.packbits(q >> np.uint8(4), axis=1, bitorder="little")
    return block.view(np.uint8)


def value(t: Tensor, data: Bytes) -> NDArray[Any]:
    """Return the numbers of contiguous `t` for reading: int32 for integers, else float32."""
    if t.type in NUMBERS:
        return encode(t, data)[NUMBER].astype("<i4" if t.type is I32 else "<f4", copy=False)
    elements = strided(data, t)
    if t.type is I64:
        return elements.astype(np.int32)
    return np.asarray(to_float(t.type, elements), np.float32).reshape(t.shape)


def _bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round as `ggml_compute_fp32_to_bf16`: to nearest even, NaN made quiet."""
    u = x.view(np.uint32)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    rounded = (u + (0x7FFF + ((u >> 16) & 1))) >> 16
    return np.where(nan, (u >> 16) | 64, rounded).astype(np.uint16)
