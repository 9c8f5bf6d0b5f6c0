"""Ops that move elements: CPY CONT DUP CONCAT REPEAT GET_ROWS SET_ROWS."""

from __future__ import annotations

import numpy as np
import openvino.opset15 as o
from openvino import Type

from backends.openvino.blocks import quantized
from backends.openvino.forms import NUMBER, NUMBERS, parts
from backends.openvino.nodes import Value, reshape, shape_of, tile
from backends.openvino.sources import src
from backends.openvino.views import Rows, scatter
from backends.openvino.walk import ROUND, Walk
from conformance.backend.translating.plan import Emitter
from conformance.ggml.tensor import Tensor, is_empty
from conformance.ggml.types import I32


def _copy(e: Walk, node: Tensor) -> None:
    """`ggml_compute_forward_dup`: elements in order, whatever the two shapes; equal types keep their bytes."""
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


def _concat(e: Walk, node: Tensor) -> None:
    axis = 3 - node.param_i32(0)
    full = [s for s in (src(node, 0), src(node, 1)) if not is_empty(s)]
    if node.type in NUMBERS:
        xs = [e.number(s) for s in full]
        e.store(node, o.concat(xs, axis) if len(xs) > 1 else xs[0], exact=True)
        return
    found = [e.parts(s) for s in full]
    e.store_parts(node, {p.name: o.concat([f[p.name] for f in found], axis) for p in parts(node.type)})


def _repeat(e: Walk, node: Tensor) -> None:
    a = src(node, 0)
    if node.type in NUMBERS:
        e.store(node, tile(e.c, e.number(a), node.shape), exact=True)
        return
    shape = (*node.ne[:0:-1], node.ne[0] // node.type.blck_size)
    e.store_parts(node, {n: tile(e.c, x, (*shape, shape_of(e.c, x)[-1])) for n, x in e.parts(a).items()})


def _get_rows(e: Walk, node: Tensor) -> None:
    """Row `ids[i1, i2, i3]` of the matrix (i2, i3) of src[0]."""
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


def _row_ids(e: Walk, node: Tensor) -> Value:
    """Rows of the whole destination, flat: `ids` repeated over dimensions 2 and 3, plus where each matrix starts."""
    rows, (_, ne1, ne2, ne3) = src(node, 0), node.ne
    ids = tile(e.c, reshape(e.c, e.number(src(node, 1)), src(node, 1).shape[1:]), (ne3, ne2, rows.ne[1]))
    if ne2 * ne3 > 1:
        n = e.c.fixed(ne2) * e.c.fixed(ne3)
        starts = np.arange(n, dtype=np.int32).reshape(int(ne3), int(ne2), 1) * e.c.fixed(ne1)
        ids = e.c.shaped(o.add(ids, o.constant(starts)), (ne3, ne2, rows.ne[1]))
    return reshape(e.c, ids, (rows.ne[1] * ne2 * ne3,))


def _set_rows(e: Walk, node: Tensor) -> None:
    """Rows of src[0] replace rows `ids` of the destination, which `node` is a view of; the rest stays as it is."""
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


EMITTERS: dict[str, Emitter] = {
    "CPY": _copy,
    "CONT": _copy,
    "DUP": _copy,
    "CONCAT": _concat,
    "REPEAT": _repeat,
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
}
