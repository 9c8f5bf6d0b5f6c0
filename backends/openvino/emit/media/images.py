"""Images and signals: resizing, windows, relative positions, pooling, timestep embedding."""

from __future__ import annotations

import math

import numpy as np
import openvino.opset15 as o

from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Value, cut, reshape, transpose
from backends.openvino.translating.plan import Emitter
from conformance.ggml.ops.media.images import taps
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor


def _upscale(e: EmitContext, node: Tensor) -> None:
    """Gather along dimensions of mode nearest, multiply by weights along others.

    OpenVINO's Interpolate has neither ggml's rounding of positions nor its antialiasing.
    """
    c, x, exact = e.c, e.number(src(node, 0)), True
    shape = list(src(node, 0).shape)
    for dim in range(4):
        shares, axis = taps(node, dim), 3 - dim
        shape[axis] = node.ne[dim]
        if (shares.max(1) == 1.0).all():
            x = o.gather(x, c.i64(*shares.argmax(1).tolist()), c.axis(axis))
        else:
            exact = False
            matrix = o.constant(shares.astype(np.float32))
            x = o.matmul(x, matrix, False, True) if dim == 0 else o.matmul(matrix, x, False, False)
        x = c.shaped(x, shape)
    e.store(node, x, exact=exact)


def _win_part(e: EmitContext, node: Tensor) -> None:
    p, c, a = node.params, e.c, src(node, 0)
    channels, width, height = a.ne[:3]
    x = reshape(c, e.number(a), (height, width, channels))
    x = o.pad(x, c.i64(0, 0, 0), c.i64(p.npy * p.w - height, p.npx * p.w - width, 0), "constant", c.f32(0.0))
    x = reshape(c, c.shaped(x, (p.npy * p.w, p.npx * p.w, channels)), (p.npy, p.w, p.npx, p.w, channels))
    e.store(node, reshape(c, transpose(c, x, (0, 2, 1, 3, 4)), node.shape), exact=True)


def _win_unpart(e: EmitContext, node: Tensor) -> None:
    c, w, (channels, width, height) = e.c, node.params.w, node.ne[:3]
    nx, ny = -(-width // w), -(-height // w)
    x = reshape(c, e.number(src(node, 0)), (ny, nx, w, w, channels))
    x = reshape(c, transpose(c, x, (0, 2, 1, 3, 4)), (1, ny * w, nx * w, channels))
    e.store(node, cut(c, x, [0, 0], [height, width], [1, 2]), exact=True)


def _get_rel_pos(e: EmitContext, node: Tensor) -> None:
    c, n = e.c, e.c.fixed(node.ne[1])
    rows = [n - 1 - key + query for query in range(n) for key in range(n)]
    x = o.gather(e.number(src(node, 0)), c.i64(*rows), c.axis(2))
    e.store(node, reshape(c, c.shaped(x, (1, 1, n * n, node.ne[0])), node.shape), exact=True)


def _add_rel_pos(e: EmitContext, node: Tensor) -> None:
    c, pw = e.c, src(node, 1)
    n, width, height, heads = pw.ne
    columns = reshape(c, e.number(pw), (heads, height * width, 1, n))
    rows = reshape(c, e.number(src(node, 2)), (heads, height * width, n, 1))
    square = reshape(c, e.number(src(node, 0)), (heads, height * width, n, n))
    y = c.shaped(o.add(o.add(square, rows), columns), (heads, height * width, n, n))
    e.store(node, reshape(c, y, node.shape))


def _pool_1d(e: EmitContext, node: Tensor) -> None:
    """Scale a mean by the unpadded share of its window: AvgPool has no window of padding only."""
    p, a, x = node.params, src(node, 0), e.number(src(node, 0))
    kernel, strides, pads = [1, p.k0], [1, p.s0], [0, p.p0]
    if p.op == OP_POOL.AVG:
        first = np.arange(e.c.fixed(node.ne[0])) * p.s0 - p.p0
        count = np.minimum(first + p.k0, a.ne[0]) - np.maximum(first, 0)
        y: Value = o.avg_pool(x, strides, pads, pads, kernel, False, "floor")
        y = o.multiply(y, o.constant((p.k0 / np.maximum(count, 1)).astype(np.float32)))
    else:
        y = o.max_pool(x, strides, [1, 1], pads, pads, kernel, "floor").output(0)
    e.store(node, e.c.shaped(y, node.shape))


def _pad_reflect_1d(e: EmitContext, node: Tensor) -> None:
    p, c = node.params, e.c
    x = o.pad(e.number(src(node, 0)), c.i64(0, 0, 0, p.p0), c.i64(0, 0, 0, p.p1), "reflect")
    e.store(node, c.shaped(x, node.shape), exact=True)


def _timestep_embedding(e: EmitContext, node: Tensor) -> None:
    c, times = e.c, src(node, 0)
    dim, n = c.fixed(node.params.dim), times.ne[0]
    half = dim // 2
    frequencies = np.exp(-math.log(node.params.max_period) * np.arange(half) / half).astype(np.float32)
    angles = o.multiply(reshape(c, e.number(times), (1, 1, n, 1)), o.constant(frequencies))
    x = o.concat([o.cos(angles), o.sin(angles)], -1)
    if dim % 2:
        x = o.pad(x, c.i64(0, 0, 0, 0), c.i64(0, 0, 0, 1), "constant", c.f32(0.0))
    e.store(node, c.shaped(x, node.shape))


EMITTERS: dict[str, Emitter] = {
    "ADD_REL_POS": _add_rel_pos,
    "GET_REL_POS": _get_rel_pos,
    "PAD_REFLECT_1D": _pad_reflect_1d,
    "POOL_1D": _pool_1d,
    "TIMESTEP_EMBEDDING": _timestep_embedding,
    "UPSCALE": _upscale,
    "WIN_PART": _win_part,
    "WIN_UNPART": _win_unpart,
}
