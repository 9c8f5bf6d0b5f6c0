"""Ops along a row: sums, norms, sorting, and GET_ROWS and SET_ROWS."""

from __future__ import annotations

import numpy as np
import openvino.opset15 as o
from openvino import Type

from backends.openvino.axes import NONE, Axes, Axis, AxisContext, Rule, Span, at, require, rowwise
from backends.openvino.emit_context import ROUND, EmitContext, src
from backends.openvino.nodes import Constants, Value, cut, quantized, reshape, shape_of, tile
from backends.openvino.storage import NUMBER, NUMBERS, parts
from backends.openvino.translating.plan import Emitter
from backends.openvino.views import Rows, scatter
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import Tensor, is_empty
from conformance.ggml.types import I32


def _sum(*axes: int) -> Emitter:
    return lambda e, node: e.store(node, o.reduce_sum(e.number(src(node, 0)), e.c.i64(*axes), True))


def rms(c: Constants, x: Value, eps: float) -> Value:
    """Compute `x / sqrt(mean(x * x) + eps)` along the last of 4 axes, fused to one RMS layer.

    A following multiplication by a weight of one row fuses too.
    """
    power = o.reduce_mean(o.multiply(x, x), c.i64(3), True)
    return o.multiply(x, o.divide(c.f32(1.0), o.sqrt(o.add(power, c.f32(eps)))))


def _norm(e: EmitContext, node: Tensor) -> None:
    x = e.number(src(node, 0))
    e.store(node, rms(e.c, o.subtract(x, o.reduce_mean(x, e.c.i64(3), True)), node.params.eps))


def _l2_norm(e: EmitContext, node: Tensor) -> None:
    x = e.number(src(node, 0))
    length = o.sqrt(o.reduce_sum(o.multiply(x, x), e.c.i64(3), True))
    e.store(node, o.divide(x, o.maximum(length, e.c.f32(node.params.eps))))


def _group_norm(e: EmitContext, node: Tensor) -> None:
    c, groups, eps = e.c, node.params.n_groups, node.params.eps
    n3, n2, n1, n0 = node.shape
    if n2 % groups:
        each = -(-n2 // groups)
        parts = [(i, min(i + each, n2)) for i in range(0, n2, each)]
        x = e.number(src(node, 0))
        normed = [_normed(c, cut(c, x, [a], [b], [1]), (1, 2, 3), eps) for a, b in parts]
        e.store(node, c.shaped(o.concat(normed, 1), node.shape))
        return
    x = reshape(c, e.number(src(node, 0)), (n3, groups, n2 // groups * n1 * n0))
    e.store(node, c.shaped(_normed(c, x, (2,), eps), shape_of(c, x)))


def _normed(c: Constants, x: Value, axes: tuple[int, ...], eps: float) -> Value:
    x = o.subtract(x, o.reduce_mean(x, c.i64(*axes), True))
    return o.divide(x, o.sqrt(o.add(o.reduce_mean(o.multiply(x, x), c.i64(*axes), True), c.f32(eps))))


STABLE = 1024
"""Longest row that ARGSORT sorts stably.

The CPU plugin's stable sort (2026.4.1) exchanges neighbours: 0.6 s for a row of 16,385 elements, the other 2 ms."""


def _argsort(e: EmitContext, node: Tensor) -> None:
    """Sort; equal elements of short rows, as in a router, stay in order, which ggml leaves open."""
    mode = "max" if node.params.order == SORT_ORDER.DESC else "min"
    n = node.ne[0]
    order = o.topk(e.number(src(node, 0)), e.c.axis(n), 3, mode, "value", stable=n <= STABLE)
    e.store(node, order.output(1))


def _top_k(e: EmitContext, node: Tensor) -> None:
    """Return the k largest, the first two swapped as in ggml, which defines no order."""
    k = e.c.fixed(node.ne[0])
    x: Value = o.topk(e.number(src(node, 0)), e.c.axis(k), 3, "max", "value", stable=True).output(1)
    if k > 1:
        x = o.gather(x, e.c.i64(1, 0, *range(2, k)), e.c.axis(3))
    e.store(node, x)


def _argmax(e: EmitContext, node: Tensor) -> None:
    """Return the last of equals as the first of the reversed row."""
    c, n, rows = e.c, src(node, 0).ne[0], node.ne[0]
    backwards = o.slice(e.number(src(node, 0)), c.i64(-1), c.i64(-(2**31)), c.i64(-1), c.i64(3))
    at = o.topk(backwards, c.axis(1), 3, "max", "value", index_element_type="i32", stable=True).output(1)
    last = o.convert(c.i64(n - 1), Type.i32)
    e.store(node, reshape(c, c.shaped(o.subtract(last, at), (1, 1, rows, 1)), node.shape))


# -- rows picked and replaced -----------------------------------------------------------------------------------------
def _get_rows(e: EmitContext, node: Tensor) -> None:
    """Read row `ids[i1, i2, i3]` of the matrix (i2, i3) of src[0]."""
    w, ids = e.weight(node), e.number(src(node, 1))
    if w is not None:
        n0, n1, n2, n3 = src(node, 0).ne
        places = reshape(e.c, ids, (n3 * n2, node.ne[1]))
        if n3 * n2 > 1:
            places = o.add(places, o.constant(np.arange(n3 * n2, dtype=np.int32)[:, None] * np.int32(n1)))
        e.store(node, e.c.shaped(w.rows(places), (n3 * n2, node.ne[1], n0)))
        return
    a = e.number(src(node, 0))
    n3, n2, n1, n0 = shape_of(e.c, a)
    if n3 * n2 == 1:
        x = o.gather(reshape(e.c, a, (n1, n0)), reshape(e.c, ids, (node.ne[1],)), e.c.axis(0))
    else:
        rows = reshape(e.c, ids, (n3 * n2, node.ne[1]))
        x = o.gather(reshape(e.c, a, (n3 * n2, n1, n0)), rows, e.c.axis(1), 1)
    e.store(node, x)


def _row_ids(e: EmitContext, node: Tensor) -> Value:
    """Return flat rows of the destination: `ids` repeated, plus the start of each matrix."""
    rows, (_, ne1, ne2, ne3) = src(node, 0), node.ne
    ids = tile(e.c, reshape(e.c, e.number(src(node, 1)), src(node, 1).shape[1:]), (ne3, ne2, rows.ne[1]))
    if ne2 * ne3 > 1:
        n = e.c.fixed(ne2) * e.c.fixed(ne3)
        starts = np.arange(n, dtype=np.int32).reshape(int(ne3), int(ne2), 1) * e.c.fixed(ne1)
        ids = e.c.shaped(o.add(ids, o.constant(starts)), (ne3, ne2, rows.ne[1]))
    return reshape(e.c, ids, (rows.ne[1] * ne2 * ne3,))


def _set_rows(e: EmitContext, node: Tensor) -> None:
    """Replace rows `ids` of the destination, of which `node` is a view, by rows of src[0]."""
    if is_empty(src(node, 0)):
        return
    rows, ids = e.number(src(node, 0)), _row_ids(e, node)
    count, exact = shape_of(e.c, ids)[0], src(node, 0).type is node.type
    where = e.rows(node, ids)
    if node.type in NUMBERS:
        if node.type is I32:
            rows = o.convert(rows, Type.i32)
        if where is not None:
            e.store_rows(node, where, {NUMBER: reshape(e.c, rows, (count, node.ne[0]))}, exact=exact)
            return
        if node.type in ROUND and not exact and e.read_again(node):
            rows, exact = ROUND[node.type](e.c, rows), True  # these rows, not the whole table
        table = Rows((node.ne[1] * node.ne[2] * node.ne[3], node.ne[0]), 0, ids)
        new = scatter(e.c, e.number(node), table, reshape(e.c, rows, (count, node.ne[0])))
        e.store(node, new, exact=exact)
        return
    blck = node.type.blck_size
    blocks = reshape(e.c, rows, (count, node.ne[0] // blck, blck))
    new = quantized(e.c, node.type, blocks, read_again=e.read_again(node))
    if where is not None:
        e.store_rows(node, where, new)
        return
    table = Rows((node.ne[1] * node.ne[2] * node.ne[3], node.ne[0] // blck), 0, ids)
    old = e.parts(node)
    e.store_parts(node, {p.name: scatter(e.c, old[p.name], table, new[p.name], p.width) for p in parts(node.type)})


# -- axes -------------------------------------------------------------------------------------------------------------
def _sum_axes(w: AxisContext, t: Tensor) -> Axes:
    axes = w.axes_of(src(t, 0))
    require(axes[0] is None, t, "sums over tokens or cells")
    return axes


def _get_rows_axes(w: AxisContext, t: Tensor) -> Axes:
    axes, ids = w.axes_of(src(t, 0)), src(t, 1)
    require(axes[0] is None, t, "rows over tokens or cells")
    if axes[1] is None:
        own = w.axes_of(ids, w.tokens_where(ids, 0))
    else:
        require(axes[1] == Axis(w.tokens) and ids.op == "NONE", t, "picks cells, or tokens by computed indices")
        own = w.axes_of(ids, at(0, Axis(Span("outputs", ids.ne[0], 1 if ids.ne[0] == 1 else w.tokens.slots))))
    require(axes[2] == own[1] and axes[3] == own[2], t, "rows and indices have different axes")
    return None, own[0], own[1], own[2]


def _set_rows_axes(w: AxisContext, t: Tensor) -> Axes:
    b, ids, a = (src(t, i) for i in range(3))
    axes = w.axes_of(b)
    require(axes == at(1, axes[1]), t, "tokens or cells are not the rows it stores")
    require(ids.op == "NONE" and ids not in w.persistent, t, "stores at computed indices")
    require(
        w.axes_of(ids, at(0, axes[1])) == at(0, axes[1]) and w.axes_of(a) == NONE,
        t,
        "rows and indices have different axes",
    )
    if t.view_src in w.transposed:
        require(axes[1] is not None or w.tokens.size == 1, t, "stores values that do not depend on the tokens")
        if not w.transposed[t.root] and ids not in w.rows:
            w.rows.append(ids)
    return NONE


EMITTERS: dict[str, Emitter] = {
    "ARGMAX": _argmax,
    "ARGSORT": _argsort,
    "CUMSUM": lambda e, node: e.store(node, e.c.shaped(o.cum_sum(e.number(src(node, 0)), e.c.axis(3)), node.shape)),
    "GET_ROWS": _get_rows,
    "GROUP_NORM": _group_norm,
    "L2_NORM": _l2_norm,
    "MEAN": lambda e, node: e.store(node, o.reduce_mean(e.number(src(node, 0)), e.c.i64(3), True)),
    "NORM": _norm,
    "RMS_NORM": lambda e, node: e.store(node, rms(e.c, e.number(src(node, 0)), node.params.eps)),
    "SET_ROWS": _set_rows,
    "SUM": _sum(0, 1, 2, 3),
    "SUM_ROWS": _sum(3),
    "TOP_K": _top_k,
}
AXES: dict[str, Rule] = {
    **dict.fromkeys(("NORM", "RMS_NORM", "L2_NORM", "ARGSORT", "TOP_K"), rowwise),
    "GET_ROWS": _get_rows_axes,
    "SET_ROWS": _set_rows_axes,
    "SUM_ROWS": _sum_axes,
}
