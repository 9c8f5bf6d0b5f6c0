"""Convolutions, transposed ones, and their columns.

ggml multiplies F16 filters by activations rounded to F16, as in its matrix products.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.cpu.matmul import narrowed
from backends.cpu.takes import FLOAT, ONLY_F32, Table, Takes, same_types
from backends.cpu.values import RoundingKernel, Values, in_float64, load, operand, rounded, store
from backends.cpu.windows import last, windows
from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import EXACT, Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16


def _rounding(formula: Callable[[Tensor, Values, Values], Values]) -> RoundingKernel:
    """Return the kernel of a product of filters and activations, rounded as matrix products."""

    def kernel(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
        (a, a_raw), (b, b_raw) = operand(node, src, 0), operand(node, src, 1)
        to = arithmetic.mul_mat.get(a.type.name, arithmetic.operands)
        x = load(b.type, b_raw)
        x = x if to in (EXACT.operands, b.type.name) else rounded(x, to, arithmetic.quantize)
        store(node.type, dst, formula(node, narrowed(arithmetic, a.type, load(a.type, a_raw)), x))

    return kernel


def _convolved(filters: Values, x: Values, out: tuple[int, ...], node: Tensor) -> Values:
    """Convolve `x` (N, IC, …) with `filters` (OC, IC, …) to (N, OC, *out)."""
    strides, padding, dilation = (
        tuple(getattr(node.params, f"{name}{i}") for i in reversed(range(len(out)))) for name in "spd"
    )
    y = np.zeros((filters.shape[0], x.shape[0], *out))
    for place, window in windows(x, filters.shape[2:], out, strides, padding, dilation):
        y += np.tensordot(filters[last(place)], window, axes=(1, 1))
    return y.swapaxes(0, 1)


def _conv_2d(node: Tensor, a: Values, b: Values) -> Values:
    return _convolved(a, b, node.shape[2:], node)


def _conv_3d(node: Tensor, a: Values, b: Values) -> Values:
    """Split ne[3] of `a` into filters and channels, and of `b` into volumes and channels."""
    p = node.params
    a, b = a.reshape(p.oc, p.c, *a.shape[1:]), b.reshape(p.n, p.c, *b.shape[1:])
    return _convolved(a, b, node.shape[1:], node).reshape(node.shape)


def _im2col_3d(node: Tensor, a: Values, b: Values) -> Values:
    p, channels = node.params, node.params.IC
    x = b.reshape(-1, channels, *b.shape[1:])
    out = (node.ne[3] // x.shape[0], node.ne[2], node.ne[1])
    strides, padding, dilation = (p.s2, p.s1, p.s0), (p.p2, p.p1, p.p0), (p.d2, p.d1, p.d0)
    y = np.empty((x.shape[0], *out, channels, *a.shape[1:]))
    for place, window in windows(x, a.shape[1:], out, strides, padding, dilation):
        y[last(place)] = window.transpose(0, 2, 3, 4, 1)
    return y.reshape(node.shape)


def _transposed(filters: Values, x: Values, stride: tuple[int, ...]) -> Values:
    """Sum `filters` (IC, OC, …) times each of `x` (N, IC, …), `stride` apart: (N, OC, …)."""
    size = tuple((n - 1) * s + k for n, s, k in zip(x.shape[2:], stride, filters.shape[2:], strict=True))
    y = np.zeros((filters.shape[1], x.shape[0], *size))
    for place in np.ndindex(*filters.shape[2:]):
        reached = last(slice(i, i + (n - 1) * s + 1, s) for i, n, s in zip(place, x.shape[2:], stride, strict=True))
        y[reached] += np.tensordot(filters[last(place)], x, axes=(0, 1))
    return y.swapaxes(0, 1)


def _conv_transpose_1d(node: Tensor, a: Values, b: Values) -> Values:
    return _transposed(a[0], b[0, 0][None], (node.params.s0,)).reshape(node.shape)


def _conv_transpose_2d(node: Tensor, a: Values, b: Values) -> Values:
    return _transposed(a, b, (node.params.stride,) * 2)


def _col2im_1d(node: Tensor, x: Values) -> Values:
    """Compute `dst[t, oc] = sum a[oc * K + k, i]` over all `i * s0 + k == t + p0`."""
    p = node.params
    columns = x.reshape(x.shape[2], p.oc, -1)
    n, _, k = columns.shape
    y = np.zeros((p.oc, (n - 1) * p.s0 + k))
    for i in range(k):
        y[:, i : i + (n - 1) * p.s0 + 1 : p.s0] += columns[:, :, i].T
    return y[:, p.p0 : p.p0 + node.ne[0]].reshape(node.shape)


_FILTERS = Takes((ONLY_F32 | {F16}, ONLY_F32), ONLY_F32)

TABLE: Table = {
    "CONV_2D": (_FILTERS, _rounding(_conv_2d)),
    "CONV_3D": (_FILTERS, _rounding(_conv_3d)),
    "IM2COL_3D": (Takes((FLOAT, ONLY_F32), ONLY_F32 | {F16}), in_float64(_im2col_3d)),
    "CONV_TRANSPOSE_1D": (_FILTERS, _rounding(_conv_transpose_1d)),
    "CONV_TRANSPOSE_2D": (_FILTERS, _rounding(_conv_transpose_2d)),
    "COL2IM_1D": (Takes((FLOAT,), FLOAT, same_types), in_float64(_col2im_1d)),
}
