"""Ops over whole rows: sums, norms, softmax, sorting.

ggml accumulates in float32 or double and rounds in between; here everything is float64 until the one rounding at the
end. `eps` is the float32 that stands in op_params.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Kernel
from conformance.ggml.tensor import Tensor

from .values import Values, alibi_slopes, in_float64, repeated

SORT_DESC = 1
"""`GGML_SORT_ORDER_DESC`."""


def _norm(node: Tensor, x: Values) -> Values:
    x -= x.mean(-1, keepdims=True)
    return _rms_norm(node, x)


def _rms_norm(node: Tensor, x: Values) -> Values:
    y: Values = x / np.sqrt((x * x).mean(-1, keepdims=True) + node.param_f32(0))
    return y


def _l2_norm(node: Tensor, x: Values) -> Values:
    """`eps` bounds the length from below, it is not added; fmax drops a NaN length, as C's does."""
    y: Values = x / np.fmax(np.sqrt((x * x).sum(-1, keepdims=True)), node.param_f32(0))
    return y


def _group_norm(node: Tensor, x: Values) -> Values:
    """Channels (ne[2]) in `op_params[0]` groups, the last of which may be smaller."""
    groups, eps = node.param_i32(0), node.param_f32(1)
    size = -(-x.shape[1] // groups)
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size]
        part -= part.mean((1, 2, 3), keepdims=True)
        part /= np.sqrt((part * part).mean((1, 2, 3), keepdims=True) + eps)
    return x


def _soft_max(node: Tensor, x: Values, mask: Values | None = None, sinks: Values | None = None) -> Values:
    """softmax(scale x + slope mask), `sinks` one more logit per head (ne[2]) that gets no output.

    A row of -inf alone is NaN throughout, as in `ggml_compute_forward_soft_max_f32`, unless there is a sink.
    """
    scale, max_bias = node.param_f32(0), node.param_f32(1)
    heads = x.shape[1]
    x *= scale
    if mask is not None:
        rows = repeated(mask[:, :, : x.shape[2]], (*x.shape[:2], *(min(mask.shape[2], x.shape[2]), x.shape[3])))
        x += alibi_slopes(max_bias, heads)[:, None, None] * rows
    top = x.max(-1, keepdims=True)
    sink = None if sinks is None else sinks[0, 0, 0, :heads][:, None, None]
    if sink is not None:
        top = np.maximum(top, sink)
    np.exp(x - top, out=x)
    total = x.sum(-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - top)
    x /= total
    return x


def _argsort(node: Tensor, x: Values) -> NDArray[Any]:
    """Stable: of equals the first comes first. ggml leaves their order open (std::sort)."""
    order: NDArray[Any] = np.argsort(-x if node.param_i32(0) == SORT_DESC else x, axis=-1, kind="stable")
    return order


def _top_k(node: Tensor, x: Values) -> NDArray[Any]:
    """The k largest, largest first, then the first two exchanged.

    ggml promises no order; its CPU exchanges them so that nobody relies on one, and the same bytes are given here.
    """
    top: NDArray[Any] = np.argsort(-x, axis=-1, kind="stable")[..., : node.ne[0]]
    if node.ne[0] > 1:
        top[..., [0, 1]] = top[..., [1, 0]]
    return top


def _argmax(node: Tensor, x: Values) -> NDArray[Any]:
    """Of equals the last, as `ggml_vec_argmax_f32`; dst is `[ne1]`."""
    last: NDArray[Any] = x.shape[-1] - 1 - np.asarray(np.argmax(x[..., ::-1], axis=-1))
    dst: NDArray[Any] = last[0, 0].reshape(node.shape)
    return dst


FORMULAS: dict[str, Callable[..., NDArray[Any]]] = {
    "SUM": lambda _, x: x.sum().reshape(1, 1, 1, 1),
    "SUM_ROWS": lambda _, x: x.sum(-1, keepdims=True),
    "MEAN": lambda _, x: x.mean(-1, keepdims=True),
    "CUMSUM": lambda _, x: np.cumsum(x, axis=-1),
    "NORM": _norm,
    "RMS_NORM": _rms_norm,
    "L2_NORM": _l2_norm,
    "GROUP_NORM": _group_norm,
    "SOFT_MAX": _soft_max,
    "ARGSORT": _argsort,
    "TOP_K": _top_k,
    "ARGMAX": _argmax,
}

KERNELS: dict[str, Kernel] = {op: in_float64(f) for op, f in FORMULAS.items()}
