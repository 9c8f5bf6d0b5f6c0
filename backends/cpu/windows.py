"""Ops over windows: padding, rolling, pooling, and the windows of convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16

from .takes import BINARY, ELEMENT, FLOAT, MATRIX, ONLY_F32, Table, Takes
from .values import Values, in_float64

Size = tuple[int, ...]


def _pad(node: Tensor, x: Values) -> Values:
    """Pad each dimension left and right by `padding`, with zeros or, if `circular`, wrapped."""
    p = node.params.padding
    widths = [(p[2 * i], p[2 * i + 1]) for i in (3, 2, 1, 0)]
    return np.pad(x, widths, mode="wrap") if node.params.circular else np.pad(x, widths)


def _roll(node: Tensor, x: Values) -> Values:
    return np.roll(x, node.params.shifts[::-1], (0, 1, 2, 3))


def last(index: Iterable[Any]) -> tuple[Any, ...]:
    """Return the index that selects these of the last axes."""
    return (..., *index)


def windows(
    x: Values, kernel: Size, out: Size, strides: Size, padding: Size, dilation: Size = (), fill: float = 0.0
) -> Iterator[tuple[Size, Values]]:
    """Yield the index of each kernel element and the slice of the padded `x` that it multiplies."""
    dilation = dilation or (1,) * len(kernel)
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(out, strides, kernel, dilation, strict=True)]
    sides = [(p, max(0, r)) for p, r in zip(padding, reach, strict=True)]
    x = np.pad(x, [(0, 0)] * (x.ndim - len(kernel)) + sides, constant_values=fill)
    steps = list(zip(out, strides, dilation, strict=True))
    for place in np.ndindex(*kernel):
        first = last(slice(i * d, None) for i, (_, _, d) in zip(place, steps, strict=True))
        yield place, x[first][last(slice(None, max(0, (n - 1) * s + 1), s) for n, s, _ in steps)]


def _pool_2d(node: Tensor, x: Values) -> Values:
    """Pool; padding counts as zero in the mean, as -FLT_MAX in the maximum."""
    p = node.params
    largest = p.op == OP_POOL.MAX
    empty = -float(np.finfo(np.float32).max) if largest else 0.0
    y = np.full(node.shape, empty)
    for _, window in windows(x, (p.k1, p.k0), node.shape[2:], (p.s1, p.s0), (p.p1, p.p0), fill=empty):
        y = np.maximum(y, window) if largest else y + window
    return y if largest else y / (p.k0 * p.k1)


def _im2col(node: Tensor, a: Values, b: Values) -> Values:
    p = node.params
    s0, s1, p0, p1, d0, d1, is_2d = p.s0, p.s1, p.p0, p.p1, p.d0, p.d1, p.is_2D
    x = b if is_2d else b[0][:, :, None]
    kh, kw = (a.shape[2], a.shape[3]) if is_2d else (1, a.shape[3])
    oh, ow = (node.ne[2], node.ne[1]) if is_2d else (1, node.ne[1])
    s1, p1, d1 = (s1, p1, d1) if is_2d else (1, 0, 1)
    y = np.empty((x.shape[0], oh, ow, x.shape[1], kh, kw))
    for (j, i), window in windows(x, (kh, kw), (oh, ow), (s1, s0), (p1, p0), (d1, d0)):
        y[..., j, i] = window.transpose(0, 2, 3, 1)
    return y.reshape(node.shape)


def _conv_2d_dw(node: Tensor, a: Values, b: Values) -> Values:
    """Multiply each channel's zero-padded plane by the channel's own kernel."""
    p = node.params
    strides, padding, dilation = (p.stride1, p.stride0), (p.pad1, p.pad0), (p.dilation1, p.dilation0)
    y = np.zeros(node.shape)
    for (j, i), window in windows(b, a.shape[2:], node.shape[2:], strides, padding, dilation):
        y += a[:, 0, j, i][:, None, None] * window
    return y


def _ssm_conv(node: Tensor, sx: Values, c: Values) -> Values:
    """Compute `dst[i1, it, is] = sum_k sx[it + k, i1, is] c[k, i1]`: causal, per channel."""
    windows = sliding_window_view(sx, c.shape[-1], axis=-1)[..., : node.ne[1], :]
    y: Values = (windows * c[..., None, :]).sum(-1).swapaxes(-1, -2)
    return y


TABLE: Table = {
    "PAD": (ELEMENT, in_float64(_pad)),
    "ROLL": (MATRIX, in_float64(_roll)),
    "POOL_2D": (Takes((ONLY_F32 | {F16},), ONLY_F32), in_float64(_pool_2d)),
    "IM2COL": (Takes((FLOAT, ONLY_F32), ONLY_F32 | {F16}), in_float64(_im2col)),
    "CONV_2D_DW": (Takes((ONLY_F32 | {F16}, ONLY_F32), ONLY_F32), in_float64(_conv_2d_dw)),
    "SSM_CONV": (BINARY, in_float64(_ssm_conv)),
}
