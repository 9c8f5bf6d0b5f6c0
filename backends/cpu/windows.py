"""Ops over windows of neighbours: padding, rolling, pooling, and the windows of convolutions."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from conformance.backend.kernel import Kernel
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16

from .takes import BINARY, ELEMENT, FLOAT, MATRIX, ONLY_F32, Takes
from .values import Formula, Values, in_float64


def _pad(node: Tensor, x: Values) -> Values:
    """`padding` is left and right of each dimension; `circular` wraps around instead of zeros."""
    p = node.params.padding
    widths = [(p[2 * i], p[2 * i + 1]) for i in (3, 2, 1, 0)]
    return np.pad(x, widths, mode="wrap") if node.params.circular else np.pad(x, widths)


def _roll(node: Tensor, x: Values) -> Values:
    return np.roll(x, node.params.shifts[::-1], (0, 1, 2, 3))


def _pool_2d(node: Tensor, x: Values) -> Values:
    """The mean counts padding as zeros; a window of nothing but padding has -FLT_MAX as its largest."""
    p = node.params
    k0, k1, s0, s1, p0, p1 = p.k0, p.k1, p.s0, p.s1, p.p0, p.p1
    largest = p.op == OP_POOL.MAX
    empty = -float(np.finfo(np.float32).max) if largest else 0.0
    n0, n1 = node.ne[:2]
    wide = ((0, 0), (0, 0), (p1, max(p1, (n1 - 1) * s1 + k1)), (p0, max(p0, (n0 - 1) * s0 + k0)))
    x = np.pad(x, wide, constant_values=empty)
    y = np.full(node.shape, empty)
    for j in range(k1):
        for i in range(k0):
            window = x[:, :, j : j + n1 * s1 : s1, i : i + n0 * s0 : s0][:, :, :n1, :n0]
            y = np.maximum(y, window) if largest else y + window
    return y if largest else y / (k0 * k1)


def _im2col(node: Tensor, a: Values, b: Values) -> Values:
    p = node.params
    s0, s1, p0, p1, d0, d1, is_2d = p.s0, p.s1, p.p0, p.p1, p.d0, p.d1, p.is_2D
    x = b if is_2d else b[0][:, :, None]
    kh, kw = (a.shape[2], a.shape[3]) if is_2d else (1, a.shape[3])
    oh, ow = (node.ne[2], node.ne[1]) if is_2d else (1, node.ne[1])
    s1, p1, d1 = (s1, p1, d1) if is_2d else (1, 0, 1)
    reach = (oh - 1) * s1 + (kh - 1) * d1 + 1, (ow - 1) * s0 + (kw - 1) * d0 + 1
    x = np.pad(x, ((0, 0), (0, 0), (p1, max(0, reach[0])), (p0, max(0, reach[1]))))
    y = np.empty((x.shape[0], oh, ow, x.shape[1], kh, kw))
    for j in range(kh):
        for i in range(kw):
            window = x[:, :, j * d1 :, i * d0 :][:, :, : (oh - 1) * s1 + 1 : s1, : (ow - 1) * s0 + 1 : s0]
            y[..., j, i] = window.transpose(0, 2, 3, 1)
    return y.reshape(node.shape)


def _conv_2d_dw(node: Tensor, a: Values, b: Values) -> Values:
    """Each channel's plane, with zeros around it, times the channel's own kernel."""
    p, (h, w) = node.params, node.shape[2:]
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in (
        (h, p.stride1, a.shape[2], p.dilation1), (w, p.stride0, a.shape[3], p.dilation0)
    )]  # fmt: skip
    x = np.pad(b, ((0, 0), (0, 0), (p.pad1, max(0, reach[0])), (p.pad0, max(0, reach[1]))))
    y = np.zeros(node.shape)
    for j in range(a.shape[2]):
        for i in range(a.shape[3]):
            rows = x[:, :, j * p.dilation1 :, i * p.dilation0 :]
            window = rows[:, :, : (h - 1) * p.stride1 + 1 : p.stride1, : (w - 1) * p.stride0 + 1 : p.stride0]
            y += a[:, 0, j, i][:, None, None] * window
    return y


def _ssm_conv(node: Tensor, sx: Values, c: Values) -> Values:
    """`dst[i1, it, is] = sum_k sx[it + k, i1, is] c[k, i1]`: a causal convolution per channel."""
    windows = sliding_window_view(sx, c.shape[-1], axis=-1)[..., : node.ne[1], :]
    y: Values = (windows * c[..., None, :]).sum(-1).swapaxes(-1, -2)
    return y


FORMULAS: dict[str, Formula] = {
    "PAD": _pad,
    "ROLL": _roll,
    "POOL_2D": _pool_2d,
    "IM2COL": _im2col,
    "CONV_2D_DW": _conv_2d_dw,
    "SSM_CONV": _ssm_conv,
}


TAKES = {
    "PAD": ELEMENT,
    "ROLL": MATRIX,
    "POOL_2D": Takes((ONLY_F32 | {F16},), ONLY_F32),
    "IM2COL": Takes((FLOAT, ONLY_F32), ONLY_F32 | {F16}),
    "CONV_2D_DW": Takes((ONLY_F32,) * 2, ONLY_F32),
    "SSM_CONV": BINARY,
}
"""Op -> what it takes."""


def kernels(_: Arithmetic) -> dict[str, Kernel]:
    """Op -> kernel."""
    return {op: in_float64(f) for op, f in FORMULAS.items()}
