"""Quantised weights that stay compressed: integers, scales, zero points, per session.

value = (q - zero) * scale. If ggml has a minimum, `q * d + m`, zero = -m / d is a fractional float32, which loses the
last bit. A sum would be exact, but the CPU plugin folds it into float32 weights. Rows that are looked up are not
operands of a product, so they use the minimum and stay exact. Scales are float32: the CPU plugin stores F16 ones a
second time as float32.

The CPU plugin (2026.4.1) reads `Constant -> Convert -> [Subtract] -> Multiply -> Reshape` in place if the chain ends in
two dimensions and feeds the transposed second input of a MatMul or the first of a Gather. With three dimensions or four
it expands the whole weight to float32 first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray
from openvino import Output, Type
from openvino import Shape as OvShape
from openvino import Tensor as OvTensor

from conformance.ggml.quants import to_float
from conformance.ggml.quants.blocks import Blocks, as_blocks, as_bytes, k4_scales
from conformance.ggml.quants.requant import FORMS, Form, Requant, quantised, requantised, weight_form
from conformance.ggml.tensor import Bytes, Dims, Tensor, nbytes
from conformance.ggml.types import BF16, F16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, GGMLType

from .nodes import Value

F32Array: TypeAlias = NDArray[np.float32]
Scales: TypeAlias = tuple[F32Array, F32Array | None]
"""Scale, and the term subtracted after scaling, if any: (n, groups) each."""
Read: TypeAlias = Callable[[Tensor], Bytes]
"""Function that returns a weight's bytes."""
_CHUNK = 1 << 18
"""Elements converted to float32 at a time: 1 MiB, in addition to the weights."""
_TYPES = {"i4": Type.i4, "u4": Type.u4, "i8": Type.i8, "u8": Type.u8, "f16": Type.f16, "bf16": Type.bf16}
_HALVES = {F16: "f16", BF16: "bf16"}


# -- unpacking blocks, in NumPy ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Packed:
    """Weights of shape (rows, groups, group)."""

    dtype: str
    """OpenVINO's element type of the quants: `i4`, `u4`, `i8` or `u8`."""
    q: NDArray[np.uint8]
    """Bytes of the quants in order, two of 4 bits in a byte, the first in the low half."""
    shape: tuple[int, int, int]
    scale: F32Array
    """(rows, groups, 1)."""
    low: F32Array | None
    """Term subtracted after scaling, ggml's `min`, shaped as `scale`; None for 0."""

    @property
    def zero(self) -> F32Array | None:
        """Term subtracted before scaling."""
        return None if self.low is None else np.asarray(self.low / self.scale, np.float32)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of a block type as integers and scales."""

    dtype: str
    group: int
    unit: Mapping[str, Any]
    """Fields with which a block's values equal its quants: scale 1, minimum 0."""
    scales: Callable[[Blocks], Scales]


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
"""With these `get_scale_min_k4` returns scale 1 and minimum 0 for all eight sub-blocks."""
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
"""Types whose blocks are integers on a grid that OpenVINO supports."""


def _nibbles(dtype: str, q: NDArray[Any]) -> NDArray[np.uint8]:
    """Return quants of any integer type, first axis whole rows, as bytes."""
    bits = q.astype(np.int8).view(np.uint8).reshape(-1)
    if dtype.endswith("8"):
        return bits
    packed: NDArray[np.uint8] = bits[0::2] & np.uint8(15) | bits[1::2] << np.uint8(4)
    return packed


def _quants(type_: GGMLType, e: Encoding, blocks: Blocks) -> NDArray[np.uint8]:
    """Return the quants: the blocks' values if all scales are 1 and minima 0, exact in float32."""
    bare = blocks.copy()
    for field, one in e.unit.items():
        bare[field] = one
    return _nibbles(e.dtype, to_float(type_, as_bytes(type_, bare)))


def packed(type_: GGMLType, data: Bytes, rows: int) -> Packed | None:
    """Pack the blocks of a tensor of `rows` rows; a group of scale 0 gets quants 0, scale 1.

    None if a scale or a minimum is not finite: with NaN or infinity the multiplication cannot be reordered.
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
    """Yield a quantised tensor's values in chunks: slice of rows, values (n, ne0)."""
    blocks = data.reshape(rows, -1, type_.type_size)
    step = max(1, _CHUNK // (blocks.shape[1] * type_.blck_size))
    for i in range(0, rows, step):
        part = slice(i, min(rows, i + step))
        yield part, to_float(type_, blocks[part])


def repacked(form: Form, type_: GGMLType, data: Bytes, rows: int) -> Packed:
    """Convert the values of a quantised tensor to another grid."""
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


# -- stored weights as pieces of graph --------------------------------------------------------------------------------
class Stored(ABC):
    """A weight as OpenVINO tensors that any number of models share."""

    nbytes: int
    half: bool = False
    """True if its numbers are 16-bit floats."""

    @abstractmethod
    def matrix(self) -> Value:
        """Return the whole weight: float32 of shape (rows, ne0)."""

    def rows(self, ids: Value) -> Value:
        """Return the rows `ids`, i32 of any shape: float32 of that shape and ne0."""
        return _pick(self.matrix(), ids)


def _tensor(dtype: Type, shape: tuple[int, ...], data: NDArray[Any]) -> OvTensor:
    """Return a tensor that owns its bytes: one over an array of 4-bit numbers would not."""
    t = OvTensor(dtype, OvShape(shape))
    t.data.reshape(-1).view(np.uint8)[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return t


def _array(x: NDArray[Any]) -> OvTensor:
    return _tensor(Type(x.dtype), x.shape, x)


def _ints(*x: int) -> Value:
    return o.constant(np.array(x, np.int64))


def _pick(x: Value, ids: Value) -> Value:
    return o.gather(x, ids, o.constant(np.array(0, np.int64)))


class Grid(Stored):
    """`(q - zero) * scale`; 16-bit floats have neither."""

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        q: NDArray[Any],
        scale: F32Array | None = None,
        zero: F32Array | None = None,
    ) -> None:
        self._q = _tensor(_TYPES[dtype], shape, q)
        self._scale, self._zero = (None if x is None else _array(x) for x in (scale, zero))
        self._matrix = (shape[0], math.prod(shape[1:]))
        self.half = scale is None
        self.nbytes = sum(t.byte_size for t in (self._q, self._scale, self._zero) if t is not None)

    def matrix(self) -> Value:
        """Return the whole weight; see `Stored.matrix`."""
        x = o.convert(o.constant(self._q), Type.f32)
        if self._scale is None:
            x.get_rt_info()["decompression_0"] = ""  # without this mark the constant is folded to float32
            return x
        if self._zero is not None:
            x = o.subtract(x, o.constant(self._zero))
        return o.reshape(o.multiply(x, o.constant(self._scale)), _ints(*self._matrix), False)


class Table(Stored):
    """`q * scale - low`, exact, for looked-up rows, with byte quants as Gather widens nibbles."""

    def __init__(self, p: Packed) -> None:
        assert p.low is not None  # without a minimum a grid is as exact
        self._rows, self._groups, self._group = p.shape
        self._nibbles = p.dtype.endswith("4")
        self._q = _array(p.q.reshape(*p.shape[:2], -1))
        self._scale, self._low = _array(p.scale), _array(p.low)
        self.nbytes = self._q.byte_size + self._scale.byte_size + self._low.byte_size

    def matrix(self) -> Value:
        """Return the whole weight; see `Stored.matrix`."""
        return self.rows(o.constant(np.arange(self._rows, dtype=np.int32)))

    def rows(self, ids: Value) -> Value:
        """Return rows; see `Stored.rows`."""
        q, scale, low = (_pick(o.constant(t), ids) for t in (self._q, self._scale, self._low))
        q = o.convert(q, Type.f32)
        same = [0] * len((ids if isinstance(ids, Output) else ids.output(0)).get_partial_shape())
        if self._nibbles:
            high = o.floor(o.multiply(q, o.constant(np.float32(1 / 16))))
            first = o.subtract(q, o.multiply(high, o.constant(np.float32(16))))
            pair = [o.unsqueeze(x, _ints(-1)) for x in (first, high)]
            q = o.reshape(o.concat(pair, -1), _ints(*same, self._groups, self._group), True)
        x = o.subtract(o.multiply(q, scale), low)
        return o.reshape(x, _ints(*same, self._groups * self._group), True)


def stored(type_: GGMLType, data: Bytes, ne: Dims, form: str = "", *, lookup: bool = False) -> Stored | None:
    """Store a weight in a form that models share; `ne` are its elements per dimension.

    None if there is no compressed form: other types, no elements, or scales that are not finite. `form` is a key of
    `requant.FORMS`, or "" for the type's own encoding; `lookup`: rows are looked up and must be bit-exact.
    """
    shape = (ne[1] * ne[2] * ne[3], ne[0])
    if 0 in shape:
        return None
    if type_ in _HALVES and not form:
        return Grid(_HALVES[type_], shape, data)
    if form:
        grid = FORMS[form]
        if grid is None:
            return Grid(form, shape, _halves(form, type_, data, shape))
        p: Packed | None = repacked(grid, type_, data, shape[0])
    else:
        p = packed(type_, data, shape[0]) if type_ in ENCODINGS else None
    if p is None:
        return None
    return Table(p) if lookup and p.low is not None else Grid(p.dtype, p.shape, p.q, p.scale, p.zero)


def _halves(form: str, type_: GGMLType, data: Bytes, shape: tuple[int, int]) -> NDArray[np.float16]:
    out = np.empty(shape, np.float16)
    for part, x in floats(type_, data, shape[0]):
        out[part] = requantised(form, x)
    return out


class WeightStore:
    """Weights of a session, each converted once per form in which it is read, after `requant`."""

    def __init__(self, requant: Requant | None = None) -> None:
        self._requant = requant or Requant()
        self._stored: dict[tuple[Tensor, str, bool], Stored | None] = {}

    def get(self, node: Tensor, t: Tensor, read: Read) -> Stored | None:
        """Return the weight `t` that `node` reads whole; None if it cannot be compressed.

        `node`, a MUL_MAT, MUL_MAT_ID or GET_ROWS, may be of any copy of the graph; `t` is its `src[0]` in the session,
        whose bytes `read` returns.
        """
        form = weight_form(node, self._requant.weights, self._requant.rows)
        # quants that count from a minimum are unsigned
        lookup = node.op == "GET_ROWS" and not form and t.type in ENCODINGS and ENCODINGS[t.type].dtype.startswith("u")
        key = (t, form, lookup)
        if key not in self._stored:
            compressible = nbytes(t) > 0 and (bool(form) or t.type in ENCODINGS or t.type in _HALVES)
            self._stored[key] = stored(t.type, read(t), t.ne, form, lookup=lookup) if compressible else None
        return self._stored[key]

    def forget(self, t: Tensor) -> None:
        """Drop `t`, whose bytes change."""
        for key in [k for k in self._stored if k[0] is t]:
            del self._stored[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all constants."""
        return sum(s.nbytes for s in self._stored.values() if s is not None)


def packed_copies(layers: Iterable[tuple[str, Any]]) -> int:
    """Return bytes that matrix kernels pack at their first inference, given `compile.executed`.

    These are the constants of each FullyConnected of the runtime model: quants, scales and zero points. 16-bit floats
    are packed in the precision that the kernel computes in, but as they are in a `rewrite.language_model`.
    """
    known = list(layers)
    products = [node for kind, node in known if kind == "FullyConnected"]
    kept = any(kind == "MemoryOutput" for kind, _ in known)
    total = 0
    for node in products:
        wide = not kept and node.get_rt_info()["primitiveType"].astype(str).endswith("f32")
        total += sum(_bytes(node.input_value(i), wide=wide) for i in range(1, node.get_input_size()))
    return total


def _bytes(source: Value, *, wide: bool) -> int:
    kind, shape = source.get_element_type(), source.get_partial_shape()
    if (
        not kind.is_static()
        or not shape.is_static
        or source.get_node().get_rt_info()["layerType"].astype(str) != "Const"
    ):
        return 0
    bits = 32 if wide and kind.is_real() else int(kind.bitwidth)
    return int(np.prod(list(shape.to_shape()))) * bits // 8
