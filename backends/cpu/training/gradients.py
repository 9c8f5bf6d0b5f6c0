"""Gradients. Each is held against finite differences of its forward op in `tests/adapters/test_gradients.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.cpu.takes import ONLY_F32, ONLY_I32, Table, Takes, same_types
from backends.cpu.values import Values, checked_index, in_float64
from backends.cpu.windows import windows
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16


def _repeat_back(node: Tensor, a: Values) -> Values:
    """Each dimension as repetitions and what they repeat."""
    shape = [n for have, want in zip(a.shape, node.shape, strict=True) for n in (have // max(1, want), want)]
    y: Values = a.reshape(shape).sum((0, 2, 4, 6))
    return y


def _silu_back(_: Tensor, dy: Values, x: Values) -> Values:
    s = 0.5 * (1.0 + np.tanh(0.5 * x))
    y: Values = dy * s * (1.0 + x * (1.0 - s))
    return y


def _rms_norm_back(node: Tensor, dy: Values, x: Values) -> Values:
    n = x.shape[-1]
    mean = (x * x).mean(-1, keepdims=True) + node.params.eps
    y: Values = (dy - x * (x * dy).sum(-1, keepdims=True) / (n * mean)) / np.sqrt(mean)
    return y


def _get_rows_back(node: Tensor, a: Values, b: NDArray[Any]) -> Values:
    y = np.zeros(node.shape)
    rows = checked_index(b[0, 0, 0], node.ne[1], "b", "rows, ne[1] of the result")
    np.add.at(y[0, 0], rows, a[0, 0, : len(rows)])
    return y


def _soft_max_back(node: Tensor, dy: Values, y: Values) -> Values:
    x: Values = node.params.scale * y * (dy - (y * dy).sum(-1, keepdims=True))
    return x


def _pool_2d_back(node: Tensor, dy: Values, x: Values) -> Values:
    """The first largest of a window has its gradient, row by row; a mean shares it."""
    p = node.params
    kernel, out, strides, padding = (p.k1, p.k0), dy.shape[2:], (p.s1, p.s0), (p.p1, p.p0)
    sides = zip(x.shape[2:], padding, out, strides, kernel, strict=True)
    size = [max(n + 2 * before, (m - 1) * s + k) for n, before, m, s, k in sides]
    y = np.zeros((*x.shape[:2], *size))
    low = -float(np.finfo(np.float32).max)
    slots = list(windows(x, kernel, out, strides, padding, fill=low))
    first = np.stack([window for _, window in slots]).argmax(0)
    for i, ((r, c), window) in enumerate(slots):
        share = np.where((first == i) & (window > low), dy, 0.0) if p.op == OP_POOL.MAX else dy / len(slots)
        y[:, :, r : r + (out[0] - 1) * p.s1 + 1 : p.s1, c : c + (out[1] - 1) * p.s0 + 1 : p.s0] += share
    return y[:, :, p.p1 : p.p1 + x.shape[2], p.p0 : p.p0 + x.shape[3]]


_TWO = Takes((ONLY_F32, ONLY_F32), ONLY_F32)
_NARROW = ONLY_F32 | {F16}

TABLE: Table = {
    "REPEAT_BACK": (Takes((ONLY_F32,), ONLY_F32), in_float64(_repeat_back)),
    "SILU_BACK": (Takes((_NARROW, _NARROW), _NARROW, same_types), in_float64(_silu_back)),
    "RMS_NORM_BACK": (_TWO, in_float64(_rms_norm_back)),
    "GET_ROWS_BACK": (Takes((_NARROW, ONLY_I32), ONLY_F32), in_float64(_get_rows_back)),
    "SOFT_MAX_BACK": (_TWO, in_float64(_soft_max_back)),
    "POOL_2D_BACK": (_TWO, in_float64(_pool_2d_back)),
}
