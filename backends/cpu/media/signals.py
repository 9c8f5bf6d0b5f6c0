"""Signals: pooling, reflection, timestep embedding."""

from __future__ import annotations

import math

import numpy as np

from backends.cpu.takes import MATRIX, ONLY_F32, Table, Takes
from backends.cpu.values import Values, in_float64
from backends.cpu.windows import windows
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16


def _pool_1d(node: Tensor, x: Values) -> Values:
    """Ignore padding: a window of only padding has the mean 0 and the maximum -FLT_MAX."""
    p = node.params
    largest = p.op == OP_POOL.MAX
    empty = -float(np.finfo(np.float32).max) if largest else 0.0
    y = np.full(node.shape, empty)
    for _, window in windows(x, (p.k0,), node.shape[3:], (p.s0,), (p.p0,), fill=empty):
        y = np.maximum(y, window) if largest else y + window
    if largest:
        return y
    first = np.arange(node.ne[0]) * p.s0 - p.p0
    count = np.minimum(first + p.k0, x.shape[-1]) - np.maximum(first, 0)
    mean: Values = y / np.maximum(count, 1)
    return mean


def _pad_reflect_1d(node: Tensor, x: Values) -> Values:
    return np.pad(x, ((0, 0), (0, 0), (0, 0), (node.params.p0, node.params.p1)), mode="reflect")


def _timestep_embedding(node: Tensor, x: Values) -> Values:
    dim, half = node.ne[0], node.ne[0] // 2
    angles = x.reshape(-1, 1) * np.exp(-math.log(node.params.max_period) * np.arange(half) / half)
    y = np.zeros((len(angles), dim))
    y[:, :half], y[:, half : 2 * half] = np.cos(angles), np.sin(angles)
    return y.reshape(node.shape)


TABLE: Table = {
    "POOL_1D": (Takes((ONLY_F32 | {F16},), ONLY_F32), in_float64(_pool_1d)),
    "PAD_REFLECT_1D": (MATRIX, in_float64(_pad_reflect_1d)),
    "TIMESTEP_EMBEDDING": (MATRIX, in_float64(_timestep_embedding)),
}
