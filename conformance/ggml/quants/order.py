"""Byte order: a case has little-endian bytes, a library those of its processor."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from conformance.ggml import types
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.ggml.types import GGMLType

from .blocks import BLOCK

_FORMS = BLOCK | {
    types.Q5_0: np.dtype([("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)]),
    types.Q5_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)]),
    types.BF16: np.dtype("<u2"),
}
"""Type -> its fields for the processor.

Those of ggml-common.h, but ggml-quants.c copies the four bytes `qh` of Q5_0 and Q5_1 into a `uint32_t`."""


def swapped(data: Bytes, t: Tensor) -> Bytes:
    """Return bytes of `t` in the other order; its own inverse.

    The fields of a block are swapped one by one. Bytes between rows stay.

    Args:
        data: the first `nbytes(t)` bytes of the tensor, gaps included.
        t: type, `ne` and `nb`.

    Raises:
        GraphError: `data` has another size.
    """
    if data.size != nbytes(t):
        raise GraphError(f"{t}: {nbytes(t)} bytes expected, to change their order, {data.size} found")
    places = _places(t.type)
    if not data.size or places is None:
        return data
    out = data.copy()
    shape = (*reversed(t.ne[1:]), t.ne[0] // t.type.blck_size, t.type.type_size)
    strides = (*reversed(t.nb), 1)
    as_strided(out, shape, strides)[...] = as_strided(data, shape, strides)[..., places]
    return out


@cache
def _places(type_: GGMLType) -> NDArray[np.intp] | None:
    """Return where each byte of an element or block comes from; None if all stay."""
    places = np.array(_reversed(type_.dtype or _FORMS[type_], 0), np.intp)
    return None if (places == np.arange(places.size)).all() else places


def _reversed(form: np.dtype[Any], at: int) -> list[int]:
    if form.fields is not None:
        return [i for name in form.names or () for i in _reversed(form.fields[name][0], at + form.fields[name][1])]
    base, shape = form.subdtype or (form, ())
    size = base.itemsize
    return [at + k * size + i for k in range(int(np.prod(shape))) for i in reversed(range(size))]
