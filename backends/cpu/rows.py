"""Ops over whole rows: sums, norms, sorting, rows by index.

ggml accumulates in float32 or double with roundings in between; here everything is float64 until one rounding at the
end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import I32

from .takes import ANY, ELEMENT, FLOAT, INDEX, ONLY_F32, ONLY_I32, STORED, VALUES, Table, Takes
from .values import Values, checked_index, convert, in_float64, operand, repeated, weight


def _norm(node: Tensor, x: Values) -> Values:
    x -= x.mean(-1, keepdims=True)
    return _rms_norm(node, x)


def _rms_norm(node: Tensor, x: Values) -> Values:
    y: Values = x / np.sqrt((x * x).mean(-1, keepdims=True) + node.params.eps)
    return y


def _l2_norm(node: Tensor, x: Values) -> Values:
    """Divide by the length, at least `eps`; fmax drops a NaN length, as C's does."""
    y: Values = x / np.fmax(np.sqrt((x * x).sum(-1, keepdims=True)), node.params.eps)
    return y


def _group_norm(node: Tensor, x: Values) -> Values:
    """Normalise channels (ne[2]) in `n_groups` groups; the last may be smaller."""
    groups, eps = node.params.n_groups, node.params.eps
    size = -(-x.shape[1] // groups)
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size]
        part -= part.mean((1, 2, 3), keepdims=True)
        part /= np.sqrt((part * part).mean((1, 2, 3), keepdims=True) + eps)
    return x


def _argsort(node: Tensor, x: Values) -> NDArray[Any]:
    """Sort stably, the first of equals first; ggml leaves their order open (std::sort)."""
    order: NDArray[Any] = np.argsort(-x if node.params.order == SORT_ORDER.DESC else x, axis=-1, kind="stable")
    return order


def _top_k(node: Tensor, x: Values) -> NDArray[Any]:
    """Return the k largest in order, then exchange the first two.

    ggml specifies no order. Its CPU kernel swaps the first two so that no caller relies on the order, and so does this
    kernel.
    """
    top: NDArray[Any] = np.argsort(-x, axis=-1, kind="stable")[..., : node.ne[0]]
    if node.ne[0] > 1:
        top[..., [0, 1]] = top[..., [1, 0]]
    return top


def _argmax(node: Tensor, x: Values) -> NDArray[Any]:
    """Return the last of equals, as `ggml_vec_argmax_f32`; dst is `[ne1]`."""
    last: NDArray[Any] = x.shape[-1] - 1 - np.asarray(np.argmax(x[..., ::-1], axis=-1))
    dst: NDArray[Any] = last[0, 0].reshape(node.shape)
    return dst


def _planes(n3: int, n2: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return indices of the two outer axes, to combine with an index of rows."""
    return np.arange(n3)[:, None, None], np.arange(n2)[None, :, None]


def _get_rows(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `dst[:, i10, i11, i12] = src0[:, src1[i10, i11, i12], i11, i12]`."""
    (type_, raw), (_, index_raw) = weight(arithmetic, node, src), operand(node, src, 1)
    index = checked_index(index_raw[0], raw.shape[2], "src[1]", "rows, ne[1] of src[0]")
    picked = raw[(*_planes(*index.shape[:2]), index)]
    convert(type_, picked, node.type, dst, "reference")


def _set_rows(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Set `dst[:, src1[i, i2 % ne11, i3 % ne12], i2, i3] = src0[:, i, i2, i3]`; the last wins."""
    (b, raw), (_, index_raw) = operand(node, src, 0), operand(node, src, 1)
    if not raw.size:
        return
    index = checked_index(index_raw[0], node.ne[1], "src[1]", "rows, ne[1] of dst")
    index = repeated(index, (b.ne[3], b.ne[2], b.ne[1]))
    rows = np.empty((*raw.shape[:3], *dst.shape[3:]), dst.dtype)
    convert(b.type, raw, node.type, rows, arithmetic.quantize)
    dst[(*_planes(b.ne[3], b.ne[2]), index)] = rows


def _one_kind(node: Tensor) -> str:
    a = node.src[0]
    if a is not None and (a.type is I32) != (node.type is I32):
        return f"rows of {a.type} cannot become {node.type}"
    return ""


_INDICES = Takes((ONLY_F32,), ONLY_I32)

TABLE: Table = {
    "SUM": (ELEMENT, in_float64(lambda _, x: x.sum().reshape(1, 1, 1, 1))),
    "SUM_ROWS": (ELEMENT, in_float64(lambda _, x: x.sum(-1, keepdims=True))),
    "MEAN": (ELEMENT, in_float64(lambda _, x: x.mean(-1, keepdims=True))),
    "CUMSUM": (ELEMENT, in_float64(lambda _, x: np.cumsum(x, axis=-1))),
    "NORM": (ELEMENT, in_float64(_norm)),
    "RMS_NORM": (ELEMENT, in_float64(_rms_norm)),
    "L2_NORM": (ELEMENT, in_float64(_l2_norm)),
    "GROUP_NORM": (ELEMENT, in_float64(_group_norm)),
    "ARGSORT": (_INDICES, in_float64(_argsort)),
    "TOP_K": (_INDICES, in_float64(_top_k)),
    "ARGMAX": (_INDICES, in_float64(_argmax)),
    "GET_ROWS": (Takes((VALUES | ONLY_I32, ONLY_I32), FLOAT | ONLY_I32, _one_kind), _get_rows),
    "SET_ROWS": (Takes((FLOAT, INDEX, ANY), STORED), _set_rows),
}
