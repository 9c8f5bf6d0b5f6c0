"""Ops that copy elements: copies, conversions, concatenation, repetition, parts."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.ops.views import part
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32, I32

from .takes import ANY, ONLY_F32, ONLY_I32, STORED, VALUES, Table, Takes, same_types
from .values import load, operand, repeated, store


def _copy(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Copy for CPY, CONT and DUP; another shape is filled in ggml's order, `ne[0]` fastest."""
    a, raw = operand(node, src, 0)
    if a.type is node.type:
        dst[...] = raw if a.ne == node.ne else np.ascontiguousarray(raw).reshape(dst.shape)
    else:
        store(node.type, dst, load(a.type, raw).reshape(node.shape), arithmetic.quantize)


def _concat(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    a, b = operand(node, src, 0)[1], operand(node, src, 1)[1]
    axis = 3 - node.params.dim
    middle = a.shape[axis]
    before = (slice(None),) * axis
    dst[(*before, slice(middle))] = a
    dst[(*before, slice(middle, None))] = b


def _repeat(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    dst[...] = repeated(operand(node, src, 0)[1], dst.shape)


def _region(node: Tensor, dst: Raw) -> Raw:
    """Return the part of `dst` that a SET or ACC changes; `part`'s check bounds it."""
    ne, nb, offset = part(node)
    first = as_strided(dst, (1,), (dst.itemsize,)).view(np.uint8)
    at = as_strided(first, (offset + dst.itemsize,), (1,))[offset:].view(dst.dtype)
    return as_strided(at, ne[::-1], nb[::-1])


def _part(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Copy `src[1]` into the part of `src[0]` given by the parameters (SET), or add it (ACC)."""
    a, b = operand(node, src, 0)[1], operand(node, src, 1)[1]
    if node.view_src is None:
        dst[...] = a
    to = _region(node, dst)
    to[...] = to.astype(np.float64) + b if node.op == "ACC" else b


def _converts(node: Tensor) -> str:
    """Return why CPY, CONT or DUP cannot convert, as `ggml_compute_forward_dup`, or ""."""
    a, to = node.src[0], node.type
    if a is None or a.type is to:
        return ""
    if to not in STORED:
        return f"values cannot be stored in {to}: ggml has no quantiser for it"
    if a.type in VALUES and (to is not I32 or a.type is F32):
        return ""
    if a.type is I32 and to is F32:
        return ""
    return f"no conversion from {a.type} to {to}"


_WHOLE = Takes((ANY, ANY), ANY, same_types)
_PARTS = Takes((ONLY_F32 | ONLY_I32,) * 2, ONLY_F32 | ONLY_I32, same_types)

TABLE: Table = {
    **dict.fromkeys(("CPY", "CONT", "DUP"), (Takes((ANY, ANY), ANY, _converts), _copy)),
    "CONCAT": (_WHOLE, _concat),
    "REPEAT": (_WHOLE, _repeat),
    **dict.fromkeys(("SET", "ACC"), (_PARTS, _part)),
}
