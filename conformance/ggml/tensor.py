"""`struct ggml_tensor` and ggml's functions of its layout. No data lives here."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import GraphError
from .types import GGMLType

Dims = tuple[int, int, int, int]
Bytes = NDArray[np.uint8]
"""Raw bytes of one tensor: one-dimensional uint8."""

MAX_DIMS = 4
MAX_SRC = 10
MAX_NAME = 64
MAX_OP_PARAMS = 16
ZERO_PARAMS = (0,) * MAX_OP_PARAMS

FLAG_INPUT = 1
FLAG_OUTPUT = 2
FLAG_PARAM = 4
FLAG_LOSS = 8
FLAG_COMPUTE = 16
"""`enum ggml_tensor_flag`."""

VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Ops that compute nothing: `ggml_op_is_empty`."""


FIELDS: dict[str, Mapping[str, Callable[[tuple[int, ...]], Any]]] = {}
"""Op -> name of a parameter -> its reader; filled by the declarations in `ops`."""


class Params:
    """The `op_params` of a node under ggml's names: `node.params.freq_base`.

    A value is a float, int, enum member, bool or tuple, as the op declares it. An enum value unknown to ggml stays an
    int.
    """

    __slots__ = ("_op", "_words")

    def __init__(self, op: str, words: tuple[int, ...]) -> None:
        self._op = op
        self._words = words

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as many types as there are parameters
        fields = FIELDS.get(self._op, {})
        if name not in fields:
            names = f"its parameters are {', '.join(fields)}" if fields else "it has no parameters"
            raise AttributeError(f"{self._op} has no parameter {name!r}; {names}")
        return fields[name](self._words)

    def __dir__(self) -> list[str]:
        return list(FIELDS.get(self._op, ()))


@dataclass(eq=False, slots=True)
class Tensor:
    """A `ggml_tensor`, compared by identity, as names in a llama.cpp graph may repeat."""

    type: GGMLType
    ne: Dims
    """Elements per dimension, `ne[0]` fastest; the NumPy shape is `ne[::-1]`."""
    nb: Dims
    """Stride in bytes per dimension; `nb[0]` is the type size except in transposed views."""
    op: str = "NONE"
    op_params: tuple[int, ...] = ZERO_PARAMS
    """16 int32; floats are stored as their bits, as in ggml."""
    src: tuple[Tensor | None, ...] = ()
    view_src: Tensor | None = None
    """Root that owns the bytes; never itself a view."""
    view_offs: int = 0
    """Bytes from the start of `view_src`."""
    flags: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.name or '(unnamed)'} {self.type}{list(self.ne)}"

    def __repr__(self) -> str:
        return f"<{self}>"

    @property
    def root(self) -> Tensor:
        """Tensor whose buffer has these bytes: `view_src`, or itself."""
        return self if self.view_src is None else self.view_src

    @property
    def shape(self) -> tuple[int, ...]:
        """NumPy shape: `ne` reversed."""
        return self.ne[::-1]

    @property
    def params(self) -> Params:
        """The `op_params` by name."""
        return Params(self.op, self.op_params)


def bits_f32(bits: int) -> float:
    """Return the float32 with the bits of the int32 `bits`."""
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def f32_bits(x: float) -> int:
    """Return float32 `x` as int32 bits, as `ggml_set_op_params_f32`; overflow is infinity."""
    try:
        packed = struct.pack("<f", x)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, x))
    return int(struct.unpack("<i", packed)[0])


def dims(*ne: int) -> Dims:
    """Pad `ne` with ones to four dimensions."""
    return (*ne, *(1,) * (MAX_DIMS - len(ne)))  # type: ignore[return-value]  # the length is four by arithmetic


def row_size(type_: GGMLType, ne0: int) -> int:
    """Return bytes of a row of `ne0` elements: `ggml_row_size`.

    GraphError if `ne0` is not a multiple of the block size.
    """
    if ne0 % type_.blck_size:
        raise GraphError(f"GGML_ASSERT(ne % ggml_blck_size(type) == 0): ne[0]={ne0}, {type_} has {type_.blck_size}")
    return ne0 // type_.blck_size * type_.type_size


def contiguous_nb(type_: GGMLType, ne: Dims) -> Dims:
    """Return the strides of `ggml_new_tensor`, in bytes."""
    nb1 = row_size(type_, ne[0])
    return (type_.type_size, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2])


def new_tensor(type_: GGMLType, *ne: int, name: str = "", flags: int = 0) -> Tensor:
    """Make a contiguous leaf of 1 to 4 dimensions: `ggml_new_tensor`."""
    if not 1 <= len(ne) <= MAX_DIMS:
        raise GraphError(f"GGML_ASSERT(n_dims >= 1 && n_dims <= GGML_MAX_DIMS): {len(ne)} dimensions given")
    full = dims(*ne)
    return Tensor(type_, full, contiguous_nb(type_, full), name=name, flags=flags)


def nelements(t: Tensor) -> int:
    """Return the number of elements: `ggml_nelements`."""
    return t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]


def nrows(t: Tensor) -> int:
    """Return the number of rows: `ggml_nrows`."""
    return t.ne[1] * t.ne[2] * t.ne[3]


def nbytes(t: Tensor) -> int:
    """Return bytes from the first to the last element of `t`, including gaps: `ggml_nbytes`."""
    if 0 in t.ne:
        return 0
    blck = t.type.blck_size
    first = t.type.type_size + (t.ne[0] - 1) * t.nb[0] if blck == 1 else t.ne[0] * t.nb[0] // blck
    return first + sum((t.ne[i] - 1) * t.nb[i] for i in (1, 2, 3))


def packed_nbytes(t: Tensor) -> int:
    """Return bytes of all elements of `t` without gaps: the size of its packed form."""
    return nelements(t) // t.type.blck_size * t.type.type_size


def is_empty(t: Tensor) -> bool:
    """Return True if `t` has no elements: `ggml_is_empty`."""
    return 0 in t.ne


def computes(t: Tensor) -> bool:
    """Return True if `t` writes bytes when run: not a view op, flagged COMPUTE, not empty."""
    return t.op not in VIEW_OPS and bool(t.flags & FLAG_COMPUTE) and not is_empty(t)


def is_contiguous(t: Tensor, n: int = 0) -> bool:
    """Return True if dimensions `n` and above have no gaps: `ggml_is_contiguous_n`."""
    next_nb = t.type.type_size
    if t.ne[0] != t.type.blck_size and t.nb[0] != next_nb:
        return False
    next_nb *= t.ne[0] // t.type.blck_size
    for i in (1, 2, 3):
        if i > n:
            if t.ne[i] != 1 and t.nb[i] != next_nb:
                return False
            next_nb *= t.ne[i]
        else:
            next_nb = t.ne[i] * t.nb[i]
    return True


def is_contiguous_rows(t: Tensor) -> bool:
    """Return True if each row's elements are adjacent: `ggml_is_contiguous_rows`."""
    return t.ne[0] == t.type.blck_size or t.nb[0] == t.type.type_size


def is_transposed(t: Tensor) -> bool:
    """Return True if `t` is transposed: `ggml_is_transposed`."""
    return t.nb[0] > t.nb[1]


def is_permuted(t: Tensor) -> bool:
    """Return True if strides are not in ascending order: `ggml_is_permuted`."""
    return t.nb[0] > t.nb[1] or t.nb[1] > t.nb[2] or t.nb[2] > t.nb[3]


def layout(t: Tensor) -> str:
    """Return how the elements of `t` lie, in words."""
    if is_contiguous(t):
        return "reshaped" if nelements(t) == nelements(t.root) and t.ne != t.root.ne else "contiguous"
    if is_transposed(t):
        return "transposed"
    if is_permuted(t):
        return "permuted"
    return "strided rows" if is_contiguous_rows(t) else "gaps in rows"


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Return True if `ne` are equal: `ggml_are_same_shape`."""
    return a.ne == b.ne


def can_repeat(a: Tensor, b: Tensor) -> bool:
    """Return True if a whole number of `a` fits `b` in each dimension: `ggml_can_repeat`."""
    if is_empty(a):
        return is_empty(b)
    return all(nb % na == 0 for na, nb in zip(a.ne, b.ne, strict=True))


def strided(buffer: Bytes, t: Tensor, offset: int | None = None) -> NDArray[Any]:
    """Return a view of `t`'s elements in `buffer`, its root's bytes; writable if `buffer` is.

    It starts `offset` bytes into `buffer`, `view_offs` by default. Scalar types: shape `ne[::-1]` of the type's dtype
    (BF16: its bits as uint16). Block types: uint8 of shape `(ne3, ne2, ne1, ne0 / blck_size, type_size)`. GraphError if
    the view does not fit the buffer.
    """
    start = t.view_offs if offset is None else offset
    if start < 0 or start + nbytes(t) > buffer.nbytes:
        raise GraphError(f"{t}: bytes {start} to {start + nbytes(t)} lie outside its buffer of {buffer.nbytes}")
    if t.type.blck_size == 1:
        dtype = t.type.dtype if t.type.dtype is not None else np.dtype("<u2")
        return np.ndarray(t.shape, dtype, buffer=buffer, offset=start, strides=t.nb[::-1])
    shape = (*t.ne[:0:-1], t.ne[0] // t.type.blck_size, t.type.type_size)
    return np.ndarray(shape, np.uint8, buffer=buffer, offset=start, strides=(*t.nb[::-1], 1))


def pack(buffer: Bytes, t: Tensor, offset: int | None = None) -> Bytes:
    """Pack `t`'s elements from its root's bytes: without gaps, `ne[0]` fastest."""
    return np.ascontiguousarray(strided(buffer, t, offset)).reshape(-1).view(np.uint8)
