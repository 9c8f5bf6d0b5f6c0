"""Convolutions, transposed ones, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import openvino.opset15 as o

from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Value, cut, reshape, shape_of, transpose, windows
from backends.openvino.translating.plan import Emitter
from conformance.ggml.tensor import Tensor, is_empty


def _convolution(node: Tensor, x: Value, filters: Value, axes: int) -> Value:
    """Convolve; pad the end up to the last window, as ggml counts one even if none fits."""
    a, b = src(node, 0), src(node, 1)
    strides, pads_begin, dilation = (
        [getattr(node.params, f"{name}{i}") for i in reversed(range(axes))] for name in "spd"
    )
    pads_end = []
    for i, stride, padding, step in zip(reversed(range(axes)), strides, pads_begin, dilation, strict=True):
        pads_end.append(max(padding, (node.ne[i] - 1) * stride + (a.ne[i] - 1) * step + 1 - b.ne[i] - padding))
    return o.convolution(x, filters, strides, pads_begin, pads_end, dilation)


def _zeros(e: EmitContext, node: Tensor) -> None:
    """Store zeros for a kernel without elements, which OpenVINO does not support."""
    e.store(node, e.c.shaped(o.broadcast(e.c.f32(0.0), e.c.i64(*node.shape)), node.shape), exact=True)


def _conv_2d(e: EmitContext, node: Tensor) -> None:
    if is_empty(src(node, 0)):
        _zeros(e, node)
        return
    y = _convolution(node, e.number(src(node, 1)), e.number(src(node, 0)), 2)
    e.store(node, e.c.shaped(y, node.shape))


def _conv_3d(e: EmitContext, node: Tensor) -> None:
    p, c, a, b = node.params, e.c, src(node, 0), src(node, 1)
    if is_empty(a):
        _zeros(e, node)
        return
    x = reshape(c, e.number(b), (p.n, p.c, *b.shape[1:]))
    filters = reshape(c, e.number(a), (p.oc, p.c, *a.shape[1:]))
    y = _convolution(node, x, filters, 3)
    e.store(node, reshape(c, c.shaped(y, (p.n, p.oc, *node.shape[1:])), node.shape))


def _im2col_3d(e: EmitContext, node: Tensor) -> None:
    """Emit a strided slice of the padded volumes for each element of the kernel."""
    p, c, a, b = node.params, e.c, src(node, 0), src(node, 1)
    kernel = (c.fixed(a.ne[2]), c.fixed(a.ne[1]), c.fixed(a.ne[0]))
    n = b.ne[3] // p.IC
    out = (node.ne[3] // n, node.ne[2], node.ne[1])
    pads = c.i64(0, 0, p.p2, p.p1, p.p0)
    x = o.pad(reshape(c, e.number(b), (n, p.IC, *b.shape[1:])), pads, pads, "constant", c.f32(0.0))
    slices = windows(c, x, kernel, out, (p.s2, p.s1, p.s0), (p.d2, p.d1, p.d0))
    columns = [o.unsqueeze(o.transpose(w, c.i64(0, 2, 3, 4, 1)), c.i64(-1)) for w in slices]
    y = columns[0] if len(columns) == 1 else o.concat(columns, -1)
    e.store(node, reshape(c, c.shaped(y, (n, *out, p.IC, len(columns))), node.shape))


def _transposed(e: EmitContext, x: Value, filters: Value, strides: Sequence[int]) -> Value:
    """Convolve pixels (N, IC, H, W), zeros between them, with flipped filters (IC, OC, H, W).

    `Model.evaluate` has no ConvolutionBackpropData.
    """
    c = e.c
    n, channels, *size = shape_of(c, x)
    _, out, *kernel = shape_of(c, filters)
    for axis, stride in zip((2, 3), strides, strict=True):
        if stride > 1 and size[axis - 2] > 1:
            shape = [n, channels, *size]
            spaced = o.pad(
                reshape(c, x, (*shape[: axis + 1], 1, *shape[axis + 1 :])), c.i64(*[0] * 5),
                c.i64(*(stride - 1 if i == axis + 1 else 0 for i in range(5))), "constant", c.f32(0.0),
            )  # fmt: skip
            size[axis - 2] = (size[axis - 2] - 1) * stride + 1
            shape[axis] *= stride
            x = cut(c, c.shaped(o.reshape(spaced, c.i64(*shape), False), shape), [0], [size[axis - 2]], [axis])
    for axis in (2, 3):
        if kernel[axis - 2] > 1:
            filters = o.gather(filters, c.i64(*reversed(range(c.fixed(kernel[axis - 2])))), c.axis(axis))
    pads = [k - 1 for k in kernel]
    y = o.convolution(x, o.transpose(filters, c.i64(1, 0, 2, 3)), [1, 1], pads, pads, [1, 1])
    return c.shaped(y, (n, out, *(a + p for a, p in zip(size, pads, strict=True))))


def _conv_transpose_1d(e: EmitContext, node: Tensor) -> None:
    """Emit in two dimensions, one of which has one element."""
    c, a, b = e.c, src(node, 0), src(node, 1)
    x = reshape(c, e.number(b), (1, b.ne[1], 1, b.ne[0]))
    filters = reshape(c, e.number(a), (a.ne[2], a.ne[1], 1, a.ne[0]))
    e.store(node, reshape(c, _transposed(e, x, filters, (1, node.params.s0)), node.shape))


def _conv_transpose_2d(e: EmitContext, node: Tensor) -> None:
    x, filters = e.number(src(node, 1)), e.number(src(node, 0))
    e.store(node, _transposed(e, x, filters, (node.params.stride,) * 2))


def _col2im_1d(e: EmitContext, node: Tensor) -> None:
    """Split columns into pieces of a stride's length, shift each by its strides, and sum."""
    p, c, a = node.params, e.c, src(node, 0)
    n, k = c.fixed(a.ne[1]), c.fixed(a.ne[0]) // p.oc
    pieces = -(-k // p.s0)
    x = reshape(c, e.number(a), (n, p.oc, k))
    x = o.pad(x, c.i64(0, 0, 0), c.i64(0, 0, pieces * p.s0 - k), "constant", c.f32(0.0))
    x = reshape(c, c.shaped(x, (n, p.oc, pieces * p.s0)), (n, p.oc, pieces, p.s0))
    terms = []
    for i in range(pieces):
        piece = transpose(c, cut(c, x, [i], [i + 1], [2]), (1, 2, 0, 3))
        row = reshape(c, piece, (p.oc, n * p.s0))
        terms.append(o.pad(row, c.i64(0, i * p.s0), c.i64(0, (pieces - 1 - i) * p.s0), "constant", c.f32(0.0)))
    whole = c.shaped(reduce(o.add, terms), (p.oc, (n + pieces - 1) * p.s0))
    e.store(node, reshape(c, cut(c, whole, [p.p0], [p.p0 + node.ne[0]], [1]), node.shape))


EMITTERS: dict[str, Emitter] = {
    "CONV_2D": _conv_2d,
    "CONV_3D": _conv_3d,
    "IM2COL_3D": _im2col_3d,
    "CONV_TRANSPOSE_1D": _conv_transpose_1d,
    "CONV_TRANSPOSE_2D": _conv_transpose_2d,
    "COL2IM_1D": _col2im_1d,
}
