"""Gradients, checked by finite differences in `tests/adapters/test_gradients.py`."""

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
    """Split each dimension into repetitions and the repeated size, and sum the repetitions."""
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
    """Give a window's gradient to its first maximum in row order; share it for a mean."""
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


def _im2col_back(node: Tensor, dy: Values, kernel: Values) -> Values:
    """Add each element of a row to where IM2COL read it."""
    p = node.params
    n, channels, ih, iw = node.shape if p.is_2D else (node.shape[1], node.shape[2], 1, node.shape[3])
    kh, kw = kernel.shape[2:] if p.is_2D else (1, kernel.shape[3])
    oh, ow = dy.shape[1:3] if p.is_2D else (1, dy.shape[2])
    s, pad, d = ((p.s1, p.s0), (p.p1, p.p0), (p.d1, p.d0)) if p.is_2D else ((1, p.s0), (0, p.p0), (1, p.d0))
    size = [
        max(m + padding, (o - 1) * step + (k - 1) * dilation + 1)
        for m, padding, o, step, k, dilation in zip((ih, iw), pad, (oh, ow), s, (kh, kw), d, strict=True)
    ]
    y = np.zeros((n, channels, *size))
    columns = dy.reshape(n, oh, ow, channels, kh, kw).transpose(4, 5, 0, 3, 1, 2)
    for j, i in np.ndindex(kh, kw):
        at = [slice(k * dilation, k * dilation + (o - 1) * step + 1, step)
              for k, dilation, o, step in zip((j, i), d, (oh, ow), s, strict=True)]  # fmt: skip
        y[:, :, at[0], at[1]] += columns[j, i]
    return y[:, :, pad[0] : pad[0] + ih, pad[1] : pad[1] + iw].reshape(node.shape)


_TWO = Takes((ONLY_F32, ONLY_F32), ONLY_F32)
_NARROW = ONLY_F32 | {F16}

TABLE: Table = {
    "REPEAT_BACK": (Takes((ONLY_F32,), ONLY_F32), in_float64(_repeat_back)),
    "SILU_BACK": (Takes((_NARROW, _NARROW), _NARROW, same_types), in_float64(_silu_back)),
    "RMS_NORM_BACK": (_TWO, in_float64(_rms_norm_back)),
    "GET_ROWS_BACK": (Takes((_NARROW, ONLY_I32), ONLY_F32), in_float64(_get_rows_back)),
    "SOFT_MAX_BACK": (_TWO, in_float64(_soft_max_back)),
    "IM2COL_BACK": (Takes((ONLY_F32, _NARROW), ONLY_F32), in_float64(_im2col_back)),
    "POOL_2D_BACK": (_TWO, in_float64(_pool_2d_back)),
}
