"""Ops that move elements: copies and conversions, rows by index, concatenation, repetition, padding."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Kernel, Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import GGMLType

from .requantised import weight
from .values import Values, checked_index, in_float64, load, operand, repeated, store


def _convert(from_: GGMLType, raw: Raw, to: GGMLType, dst: Raw, quantize: str) -> None:
    """`raw` into `dst` of another type; between equal types the bytes as they are."""
    if from_ is to:
        dst[...] = raw
    else:
        store(to, dst, load(from_, raw), quantize)


def _copy(quantize: str, node: Tensor, dst: Raw, src: Sources) -> None:
    """CPY, CONT and DUP. Other shapes of as many elements are filled in ggml's element order, `ne[0]` fastest."""
    a, raw = operand(node, src, 0)
    if a.type is node.type:
        dst[...] = raw if a.ne == node.ne else np.ascontiguousarray(raw).reshape(dst.shape)
    else:
        store(node.type, dst, load(a.type, raw).reshape(node.shape), quantize)


def _concat(node: Tensor, dst: Raw, src: Sources) -> None:
    """Along dimension `op_params[0]`."""
    (_, a), (_, b) = operand(node, src, 0), operand(node, src, 1)
    axis = 3 - node.param_i32(0)
    middle = a.shape[axis]
    before = (slice(None),) * axis
    dst[(*before, slice(middle))] = a
    dst[(*before, slice(middle, None))] = b


def _repeat(node: Tensor, dst: Raw, src: Sources) -> None:
    dst[...] = repeated(operand(node, src, 0)[1], dst.shape)


def _planes(n3: int, n2: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the two outer axes, to stand beside an index of rows."""
    return np.arange(n3)[:, None, None], np.arange(n2)[None, :, None]


def _get_rows(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """`dst[:, i10, i11, i12] = src0[:, src1[i10, i11, i12], i11, i12]`."""
    (type_, raw), (_, index_raw) = weight(arithmetic, node, src), operand(node, src, 1)
    index = checked_index(index_raw[0], raw.shape[2], "src[1]", "rows, ne[1] of src[0]")
    picked = raw[(*_planes(*index.shape[:2]), index)]
    _convert(type_, picked, node.type, dst, "reference")


def _set_rows(quantize: str, node: Tensor, dst: Raw, src: Sources) -> None:
    """`dst[:, src1[i, i2 % ne11, i3 % ne12], i2, i3] = src0[:, i, i2, i3]`; of equal indices the last one stays."""
    (b, raw), (_, index_raw) = operand(node, src, 0), operand(node, src, 1)
    index = checked_index(index_raw[0], node.ne[1], "src[1]", "rows, ne[1] of dst")
    index = repeated(index, (b.ne[3], b.ne[2], b.ne[1]))
    rows = np.empty((*raw.shape[:3], *dst.shape[3:]), dst.dtype)
    _convert(b.type, raw, node.type, rows, quantize)
    dst[(*_planes(b.ne[3], b.ne[2]), index)] = rows


def _pad(node: Tensor, x: Values) -> Values:
    """`op_params` has left and right padding per dimension, then whether it wraps around instead of being zero."""
    p = node.op_params
    widths = [(p[2 * i], p[2 * i + 1]) for i in (3, 2, 1, 0)]
    return np.pad(x, widths, mode="wrap") if p[8] else np.pad(x, widths)


def kernels(arithmetic: Arithmetic) -> dict[str, Kernel]:
    """Op -> kernel; `arithmetic` says how block types are stored, and weights before they are looked up."""
    quantize = arithmetic.quantize
    return {
        **dict.fromkeys(("CPY", "CONT", "DUP"), partial(_copy, quantize)),
        "SET_ROWS": partial(_set_rows, quantize),
        "GET_ROWS": partial(_get_rows, arithmetic),
        "CONCAT": _concat,
        "REPEAT": _repeat,
        "PAD": in_float64(_pad),
    }
