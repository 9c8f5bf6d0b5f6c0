"""Quantised weights as OpenVINO's plugins can multiply them: integers, scales and zero points apart. NumPy only.

value = (q - zero) * scale. Where ggml has a minimum, `q * d + m`, zero = -m / d is a fractional float32, which costs
the last bit: a sum would be exact, but the CPU plugin folds it into float32 weights. Rows that are looked up are no
operand of a product, so they keep the minimum and stay exact. Scales are float32: the CPU plugin holds F16 ones a
second time as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.quants import to_float
from conformance.ggml.quants.blocks import Blocks, as_blocks, as_bytes, k4_scales
from conformance.ggml.quants.requant import Form, quantised
from conformance.ggml.tensor import Bytes
from conformance.ggml.types import Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, GGMLType

F32Array = NDArray[np.float32]
Scales = tuple[F32Array, F32Array | None]
"""Scale, and what is subtracted after scaling if anything is: (n, groups) each."""

_CHUNK = 1 << 22
"""Elements that are float32 on the way at a time: 16 MiB."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights of shape (rows, groups, group)."""

    dtype: str
    """OpenVINO's element type of the quants: `i4`, `u4`, `i8` or `u8`."""
    q: NDArray[np.uint8]
    """Their bytes in order, two quants of 4 bits in a byte, the first in the low half."""
    shape: tuple[int, int, int]
    scale: F32Array
    """(rows, groups, 1)."""
    low: F32Array | None
    """What is subtracted after scaling, ggml's `min`, as `scale`; None for 0."""

    @property
    def zero(self) -> F32Array | None:
        """What is subtracted before scaling."""
        return None if self.low is None else np.asarray(self.low / self.scale, np.float32)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a block type is taken apart."""

    dtype: str
    group: int
    unit: Mapping[str, Any]
    """Fields of a block that make its values its quants: scale 1, minimum 0."""
    scales: Callable[[Blocks], Scales]

    @property
    def has_minimum(self) -> bool:
        """Whether quants count from a minimum, which makes them unsigned."""
        return self.dtype.startswith("u")


def _f32(b: Blocks, field: str) -> F32Array:
    return np.asarray(b[field].astype(np.float32))[:, None]


def _d(b: Blocks) -> Scales:
    return _f32(b, "d"), None


def _d_m(b: Blocks) -> Scales:
    return _f32(b, "d"), -_f32(b, "m")


def _k4(b: Blocks) -> Scales:
    sc, m = k4_scales(b["scales"])
    return _f32(b, "d") * sc, _f32(b, "dmin") * m


def _k6(b: Blocks) -> Scales:
    return _f32(b, "d") * b["scales"], None


_ONE = {"d": 1}
_K4_ONE = {"d": 1, "dmin": 0, "scales": np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)}
"""`get_scale_min_k4` gives 1 and 0 for each of the eight."""

ENCODINGS: dict[GGMLType, Encoding] = {
    Q4_0: Encoding("i4", 32, _ONE, _d),
    Q4_1: Encoding("u4", 32, {"d": 1, "m": 0}, _d_m),
    Q5_0: Encoding("i8", 32, _ONE, _d),
    Q5_1: Encoding("u8", 32, {"d": 1, "m": 0}, _d_m),
    Q8_0: Encoding("i8", 32, _ONE, _d),
    Q4_K: Encoding("u4", 32, _K4_ONE, _k4),
    Q5_K: Encoding("u8", 32, _K4_ONE, _k4),
    Q6_K: Encoding("i8", 16, {"d": 1, "scales": 1}, _k6),
}
"""Types whose blocks are integers on a grid that OpenVINO has."""


def _nibbles(dtype: str, q: NDArray[Any]) -> NDArray[np.uint8]:
    """Quants of any integer type, first axis whole rows, as bytes."""
    bits = q.astype(np.int8).view(np.uint8).reshape(-1)
    if dtype.endswith("8"):
        return bits
    packed: NDArray[np.uint8] = bits[0::2] & np.uint8(15) | bits[1::2] << np.uint8(4)
    return packed


def _quants(type_: GGMLType, e: Encoding, blocks: Blocks) -> NDArray[np.uint8]:
    """The quants: the values of the same blocks with all scales 1 and minima 0, exact in float32."""
    bare = blocks.copy()
    for field, one in e.unit.items():
        bare[field] = one
    return _nibbles(e.dtype, to_float(type_, as_bytes(type_, bare)))


def packed(type_: GGMLType, data: Bytes, rows: int) -> Packed | None:
    """The blocks of a tensor taken apart.

    A group of scale 0 gets quants 0 and scale 1: its values are all its minimum.

    Args:
        type_: a key of `ENCODINGS`.
        data: the tensor's bytes.
        rows: ne1 * ne2 * ne3.

    Returns:
        None where a scale or a minimum is not finite: what is no number cannot be multiplied out of order.
    """
    e = ENCODINGS[type_]
    blocks = as_blocks(type_, data.reshape(-1, type_.type_size))
    groups = type_.blck_size // e.group
    scale, low = e.scales(blocks)
    if not np.isfinite(scale).all() or not (low is None or np.isfinite(low).all()):
        return None
    q = np.empty(len(blocks) * type_.blck_size * int(e.dtype[1]) // 8, np.uint8)
    step = _CHUNK // type_.blck_size
    for i in range(0, len(blocks), step):
        part = _quants(type_, e, blocks[i : i + step])
        at = i * len(q) // len(blocks)
        q[at : at + len(part)] = part
    none = scale == 0
    if low is not None and none.any():
        scale = np.where(none, np.float32(1), scale)
        q.reshape(len(blocks), groups, -1)[none] = 0
    shape = (rows, len(blocks) * groups // rows, e.group)
    per_group = (*shape[:2], 1)
    scale = np.ascontiguousarray(scale).reshape(per_group)
    return Packed(e.dtype, q, shape, scale, None if low is None else low.reshape(per_group))


def floats(type_: GGMLType, data: Bytes, rows: int) -> Iterator[tuple[slice, F32Array]]:
    """A quantised tensor's values, some rows at a time: which rows, and their (n, ne0)."""
    blocks = data.reshape(rows, -1, type_.type_size)
    step = max(1, _CHUNK // (blocks.shape[1] * type_.blck_size))
    for i in range(0, rows, step):
        part = slice(i, min(rows, i + step))
        yield part, to_float(type_, blocks[part])


def repacked(form: Form, type_: GGMLType, data: Bytes, rows: int) -> Packed:
    """The values of a quantised tensor stored on another grid."""
    ne0 = len(data) // rows // type_.type_size * type_.blck_size
    group = form.group or ne0
    shape = (rows, ne0 // group, group)
    dtype = f"i{form.bits}"
    q = np.empty((rows, ne0 * form.bits // 8), np.uint8)
    scale = np.empty((*shape[:2], 1), np.float32)
    for part, x in floats(type_, data, rows):
        quants, scale[part] = quantised(form, x)
        q[part] = _nibbles(dtype, quants).reshape(len(x), -1)
    return Packed(dtype, q.reshape(-1), shape, scale, None)
