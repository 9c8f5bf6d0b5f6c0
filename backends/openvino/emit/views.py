"""Moves (CPY CONT DUP CONCAT REPEAT SET ACC PAD ROLL), windows (SSM_CONV, IM2COL, POOL_2D)."""

from __future__ import annotations

from functools import reduce
from math import prod

import openvino.opset15 as o
from openvino import Type

from backends.openvino.axes import NONE, Axes, Axis, AxisContext, FixedError, Rule, at, elementwise, require
from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Value, cut, reshape, shape_of, tile, transpose, windows
from backends.openvino.storage import NUMBERS, parts
from backends.openvino.translating.plan import Emitter
from backends.openvino.views import Region, read, write
from conformance.ggml.ops.views import part
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor, is_empty, nelements
from conformance.ggml.types import I32


def _copy(e: EmitContext, node: Tensor) -> None:
    """Copy elements in order to any shape, as `ggml_compute_forward_dup`; equal types as bytes."""
    a = src(node, 0)
    if a.type is node.type:
        if a.type in NUMBERS:
            e.store(node, e.number(a), exact=True)
        else:
            e.store_parts(node, e.parts(a))
        return
    x = e.number(a)
    if node.type is I32:
        x = o.convert(x, Type.i32)
    elif a.type is I32:
        x = o.convert(x, Type.f32)
    e.store(node, x)


def _concat(e: EmitContext, node: Tensor) -> None:
    axis = 3 - node.params.dim
    full = [s for s in (src(node, 0), src(node, 1)) if not is_empty(s)]
    if node.type in NUMBERS:
        xs = [e.number(s) for s in full]
        e.store(node, o.concat(xs, axis) if len(xs) > 1 else xs[0], exact=True)
        return
    sources = [e.parts(s) for s in full]
    e.store_parts(node, {p.name: o.concat([f[p.name] for f in sources], axis) for p in parts(node.type)})


def _repeat(e: EmitContext, node: Tensor) -> None:
    a = src(node, 0)
    if node.type in NUMBERS:
        e.store(node, tile(e.c, e.number(a), node.shape), exact=True)
        return
    shape = (*node.ne[:0:-1], node.ne[0] // node.type.blck_size)
    e.store_parts(node, {n: tile(e.c, x, (*shape, shape_of(e.c, x)[-1])) for n, x in e.parts(a).items()})


def _part(*, add: bool) -> Emitter:
    """Write only the part through a view, if in place; else `src[0]` with the part replaced."""

    def emit(e: EmitContext, node: Tensor) -> None:
        a, b = src(node, 0), src(node, 1)
        ne, nb, offset = part(node)
        new = e.number(b)
        if node.view_src is not None:
            window = Tensor(node.type, ne, nb, "VIEW", view_src=node.root, view_offs=node.view_offs + offset)
            e.store(window, o.add(e.number(window), new) if add else new, exact=True)
            return
        size, whole = a.type.type_size, e.number(a)
        region = Region(nelements(a), ne[::-1], tuple(n // size for n in nb[::-1]), offset // size)
        if add:
            new = o.add(read(e.c, whole, region)[0], new)
        e.store(node, write(e.c, whole, region, e.c.shaped(new, ne[::-1]))[0], exact=True)

    return emit


# -- windows along an axis ---------------------------------------------------------------------------------------------
def _ssm_conv(e: EmitContext, node: Tensor) -> None:
    """Multiply each channel's window of d_conv inputs by the channel's own weights, per token."""
    x, w = e.number(src(node, 0)), e.number(src(node, 1))
    n_t, n_s, inner = node.ne[1], node.ne[2], node.ne[0]
    w = reshape(e.c, w, shape_of(e.c, w)[2:])
    x = reshape(e.c, x, shape_of(e.c, x)[1:])
    terms = (
        o.multiply(cut(e.c, x, [i], [i + n_t], [2]), cut(e.c, w, [i], [i + 1], [1]))
        for i in range(e.c.fixed(src(node, 1).ne[0]))
    )
    e.store(node, transpose(e.c, e.c.shaped(reduce(o.add, terms), (n_s, inner, n_t)), (0, 2, 1)))


def _pool_2d(e: EmitContext, node: Tensor) -> None:
    """Pool; padding counts as zeros in a mean, and is never the maximum."""
    p = node.params
    x, strides, pads, kernel = e.number(src(node, 0)), [p.s1, p.s0], [p.p1, p.p0], [p.k1, p.k0]
    if p.op == OP_POOL.AVG:
        y: Value = o.avg_pool(x, strides, pads, pads, kernel, False, "floor")
    else:
        y = o.max_pool(x, strides, [1, 1], pads, pads, kernel, "floor").output(0)
    e.store(node, e.c.shaped(y, node.shape))


def _im2col(e: EmitContext, node: Tensor) -> None:
    """Emit a strided slice of the padded input for each element of the kernel."""
    p, c, a, b = node.params, e.c, src(node, 0), src(node, 1)
    s0, s1, p0, p1, d0, d1 = p.s0, p.s1, p.p0, p.p1, p.d0, p.d1
    x = e.number(b)
    if p.is_2D:
        kh, kw, oh, ow = c.fixed(a.ne[1]), c.fixed(a.ne[0]), node.ne[2], node.ne[1]
        n, channels = b.ne[3], b.ne[2]
    else:
        kh, kw, oh, ow, s1, p1, d1 = 1, c.fixed(a.ne[0]), 1, node.ne[1], 1, 0, 1
        n, channels = b.ne[2], b.ne[1]
        x = reshape(c, x, (n, channels, 1, b.ne[0]))
    x = o.pad(x, c.i64(0, 0, p1, p0), c.i64(0, 0, p1, p0), "constant", c.f32(0.0))
    slices = windows(c, x, (kh, kw), (oh, ow), (s1, s0), (d1, d0))
    columns = [o.unsqueeze(o.transpose(w, c.i64(0, 2, 3, 1)), c.i64(-1)) for w in slices]
    y = columns[0] if len(columns) == 1 else o.concat(columns, -1)
    e.store(node, reshape(c, c.shaped(y, (n, oh, ow, channels, kh * kw)), node.shape))


def _conv_2d_dw(e: EmitContext, node: Tensor) -> None:
    """Multiply slices of the padded input: `Model.evaluate` has no GroupConvolution."""
    p, c, a = node.params, e.c, src(node, 0)
    kh, kw, channels = c.fixed(a.ne[1]), c.fixed(a.ne[0]), c.fixed(a.ne[3])
    x = o.pad(e.number(src(node, 1)), c.i64(0, 0, p.pad1, p.pad0), c.i64(0, 0, p.pad1, p.pad0), "constant", c.f32(0.0))
    kernel = reshape(c, e.number(a), (channels, kh * kw, 1, 1))
    slices = windows(c, x, (kh, kw), node.ne[1::-1], (p.stride1, p.stride0), (p.dilation1, p.dilation0))
    terms = (
        o.multiply(window, reshape(c, cut(c, kernel, [i], [i + 1], [1]), (channels, 1, 1)))
        for i, window in enumerate(slices)
    )
    e.store(node, c.shaped(reduce(o.add, terms), node.shape))


def _pad(e: EmitContext, node: Tensor) -> None:
    c, padding = e.c, node.params.padding
    x = e.number(src(node, 0))
    pads_begin, pads_end = c.i64(*padding[6::-2]), c.i64(*padding[7::-2])
    if not node.params.circular:
        e.store(node, c.shaped(o.pad(x, pads_begin, pads_end, "constant", c.f32(0.0)), node.shape), exact=True)
        return
    for axis, (left, right) in enumerate(zip(padding[6::-2], padding[7::-2], strict=True)):
        n = shape_of(c, x)[axis]
        sides = [cut(c, x, [n - left], [n], [axis])] if left else []
        sides += [x, *([cut(c, x, [0], [right], [axis])] if right else [])]
        shape = [*shape_of(c, x)]
        shape[axis] = n + left + right
        x = c.shaped(o.concat(sides, axis), shape) if len(sides) > 1 else x
    e.store(node, x, exact=True)


def _roll(e: EmitContext, node: Tensor) -> None:
    x = o.roll(e.number(src(node, 0)), e.c.i64(*node.params.shifts[::-1]), e.c.i64(0, 1, 2, 3))
    e.store(node, e.c.shaped(x, node.shape), exact=True)


# -- axes, also of the ops that only view -----------------------------------------------------------------------------
def _alias_axes(w: AxisContext, t: Tensor) -> Axes:
    require(t.view_src in w.persistent and t.view_src not in w.transposed, t, "a view of a tensor without an op")
    return NONE


def _unknown_size(_: AxisContext, t: Tensor) -> Axes:
    raise FixedError(f"{t}: its size differs from its sources'")


def _cpy_axes(w: AxisContext, t: Tensor) -> Axes:
    a, b = src(t, 0), t.src[1]
    casts_mask = a.op == "NONE" and a not in w.persistent and a.ne[0] in w.cells and a.ne[1] >= w.tokens.size
    axes = w.axes_of(a, w.mask_axes(a.ne[0]) if casts_mask else NONE)
    if b is not None and b is not t:
        require(
            w.axes_of(b) == axes == NONE or (w.axes_of(b) == axes and a.ne == b.ne), t, "copies into another layout"
        )
    return axes


def _permute_axes(w: AxisContext, t: Tensor) -> Axes:
    own = w.axes_of(src(t, 0))
    order = t.params.axes if t.op == "PERMUTE" else (1, 0, 2, 3)
    return tuple(own[order.index(i)] for i in range(4))


def _reshape_axes(w: AxisContext, t: Tensor) -> Axes:
    """Map tokens, the outermost of the reshaped dimensions, to the outermost of the result."""
    a = src(t, 0)
    own = w.axes_of(a)
    if own == NONE or a.ne == t.ne:
        return own
    i, axis = _only(own, t, "reshapes tokens and cells together")
    require(prod(a.ne[i + 1 :]) == 1, t, "reshapes across tokens")
    step = prod(a.ne[:i]) * axis.times
    j = max(k for k in range(4) if t.ne[k] != 1)
    inner = prod(t.ne[:j])
    require(step % inner == 0 and axis.span.kind != "cells", t, "reshapes across tokens")
    return at(j, Axis(axis.span, step // inner))


def _view_axes(w: AxisContext, t: Tensor) -> Axes:
    a = src(t, 0)
    own = w.axes_of(a)
    if t.view_src in w.transposed:
        require(a.op == "NONE" or own == NONE, t, "a view of a view of a cache")
        i, capacity = w.cells_of(t)
        span = w.cells.get(t.ne[i])
        require(span is not None and span.slots == capacity, t, "a view with a number of cells that no mask has")
        return at(i, Axis(span)) if span is not None else NONE
    if own == NONE:
        return NONE
    j, axis = _only(own, t, "a view of some tokens and cells")
    same = [k for k in range(4) if t.ne[k] > 1 and t.nb[k] == a.nb[j] and t.ne[k] == a.ne[j]]
    last = t.view_offs - a.view_offs + sum((t.ne[k] - 1) * t.nb[k] for k in range(4) if k not in same)
    require(len(same) == 1 and last < a.nb[j], t, "a view of some tokens")
    return at(same[0], axis)


def _only(own: Axes, t: Tensor, what: str) -> tuple[int, Axis]:
    """Return the only dimension with an axis; FixedError about `t` and `what` if several."""
    have = [(i, axis) for i, axis in enumerate(own) if axis is not None]
    require(len(have) == 1, t, what)
    return have[0]


EMITTERS: dict[str, Emitter] = {
    "ACC": _part(add=True),
    "CONCAT": _concat,
    "CONT": _copy,
    "CPY": _copy,
    "DUP": _copy,
    "CONV_2D_DW": _conv_2d_dw,
    "IM2COL": _im2col,
    "PAD": _pad,
    "POOL_2D": _pool_2d,
    "REPEAT": _repeat,
    "ROLL": _roll,
    "SET": _part(add=False),
    "SSM_CONV": _ssm_conv,
}
AXES: dict[str, Rule] = {
    "CONT": _reshape_axes,
    "CPY": _cpy_axes,
    "DUP": elementwise,
    "NONE": _alias_axes,
    "PERMUTE": _permute_axes,
    "REPEAT": _unknown_size,
    "RESHAPE": _reshape_axes,
    "TRANSPOSE": _permute_axes,
    "VIEW": _view_axes,
}
