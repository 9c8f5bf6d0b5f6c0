"""Matrices: MUL_MAT, MUL_MAT_ID, OUT_PROD, TRI, DIAG and SOLVE_TRI."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray

from backends.openvino.axes import NONE, Axes, AxisContext, Rule, require
from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Constants, Value, reshape, shape_of, tile
from backends.openvino.translating.plan import Emitter
from backends.openvino.translating.template import same
from conformance.ggml.ops.matmul import TRI_TYPE
from conformance.ggml.tensor import Tensor

from .recurrent import scan


def grouped(c: Constants, a: Value, b: Value, *, transposed: bool) -> Value:
    """Compute `b @ a`; adjacent matrices of `b` share a matrix of `a` (`i02 = i12 / r2`).

    `a` is (ne03, ne02, M, K), or (ne03, ne02, K, M) if not `transposed`; `b` is (ne13, ne12, N, K). Returns (ne13,
    ne12, N, M). Nothing is repeated in memory: groups of dimension 2 become rows.
    """
    n03, n02, *_ = shape_of(c, a)
    n13, n12, n, k = shape_of(c, b)
    m = shape_of(c, a)[2 if transposed else 3]
    neighbours = n03 == 1 or same(n03, n13)
    if neighbours and (n02 == 1 or same(n02, n12)):
        return c.shaped(o.matmul(b, a, False, transposed), (n13, n12, n, m))
    rows = n12 // n02 * n
    if neighbours:
        x = o.matmul(reshape(c, b, (n13, n02, rows, k)), a, False, transposed)
    else:
        wide = reshape(c, b, (n03, n13 // n03, n02, rows, k))
        x = o.matmul(wide, reshape(c, a, (n03, 1, *shape_of(c, a)[1:])), False, transposed)
    return reshape(c, x, (n13, n12, n, m))


def _mul_mat(e: EmitContext, node: Tensor) -> None:
    """Emit a product; a 2D weight stays compressed, as a matrix that the device packs once."""
    a, x, w = src(node, 0), e.number(src(node, 1)), e.weight(node)
    if a.ne[2] * a.ne[3] == 1 and (w is not None or e.baked(a)):
        matrix = reshape(e.c, e.number(a), (a.ne[1], a.ne[0])) if w is None else w.matrix()
        e.store(node, e.c.shaped(o.matmul(x, matrix, False, True), (*shape_of(e.c, x)[:3], a.ne[1])))
        return
    full = e.number(a) if w is None else reshape(e.c, w.matrix(), a.shape)
    e.store(node, grouped(e.c, full, x, transposed=True))


def _picked(e: EmitContext, node: Tensor, ids: Value) -> Value:
    """Select the experts `ids`, of shape (tokens, used): (tokens, used, M, K)."""
    experts, w = src(node, 0), e.weight(node)
    if w is None:
        return o.gather(reshape(e.c, e.number(experts), experts.shape[1:]), ids, e.c.axis(0))
    k, m, *_ = experts.ne
    first = o.multiply(o.unsqueeze(ids, e.c.i64(-1)), o.constant(np.int32(m)))
    rows = o.add(first, o.constant(np.arange(m, dtype=np.int32)))
    return e.c.shaped(w.rows(rows), (*shape_of(e.c, ids), m, k))


def _mul_mat_id(e: EmitContext, node: Tensor) -> None:
    """Multiply row (i1 modulo, i2) of src[1] by the expert `ids[i1, i2]`."""
    x, ids = e.number(src(node, 1)), e.number(src(node, 2))
    m, used, tokens, _ = node.ne
    picked = _picked(e, node, reshape(e.c, ids, (tokens, used)))
    rows = reshape(e.c, x, (tokens, shape_of(e.c, x)[2], 1, shape_of(e.c, x)[3]))
    if shape_of(e.c, rows)[1] != 1:
        rows = tile(e.c, rows, (tokens, used, 1, shape_of(e.c, x)[3]))
    e.store(node, reshape(e.c, o.matmul(rows, picked, False, True), (1, tokens, used, m)))


def _out_prod(e: EmitContext, node: Tensor) -> None:
    """Compute `sum_k a[i0, k] b[i1, k]`; the first operand is not transposed."""
    a, b = e.number(src(node, 0)), e.number(src(node, 1))
    n3, n2, k, n = shape_of(e.c, b)
    b = e.c.shaped(o.transpose(b, e.c.i64(0, 1, 3, 2)), (n3, n2, n, k))
    e.store(node, grouped(e.c, a, b, transposed=False))


_TRIANGLES: dict[int, Callable[[NDArray[np.bool_]], NDArray[np.bool_]]] = {
    TRI_TYPE.UPPER_DIAG: np.triu,
    TRI_TYPE.UPPER: lambda x: np.triu(x, 1),
    TRI_TYPE.LOWER_DIAG: np.tril,
    TRI_TYPE.LOWER: lambda x: np.tril(x, -1),
}


def _masked(c: Constants, where: NDArray[np.bool_], x: Value) -> Value:
    """Return `x` where `where` is true and 0 elsewhere, even for NaN."""
    return o.select(o.constant(where), x, c.f32(0.0))


def _tri(e: EmitContext, node: Tensor) -> None:
    n = e.c.fixed(node.ne[0])
    keep = _TRIANGLES[node.params.type](np.ones((n, n), np.bool_))
    e.store(node, _masked(e.c, keep, e.number(src(node, 0))))


def _diag(e: EmitContext, node: Tensor) -> None:
    n = e.c.fixed(node.ne[0])
    e.store(node, e.c.shaped(_masked(e.c, np.eye(n, dtype=np.bool_), e.number(src(node, 0))), node.shape))


def _solve_row(c: Constants, x: Value, rows: list[Value], whole: list[Value]) -> tuple[Value, Value]:
    """Solve one more row of x, (n3, n2, n, k), whose remaining rows are zero: substitution."""
    a, b, at = rows
    del whole
    axis = c.i64(-2)
    known = o.squeeze(o.matmul(o.unsqueeze(a, axis), x, False, False), axis)
    y = o.divide(o.subtract(b, known), o.reduce_sum(o.multiply(a, at), c.i64(-1), True))
    return y, o.add(x, o.multiply(o.unsqueeze(at, c.i64(-1)), o.unsqueeze(y, axis)))


def _solve_tri(e: EmitContext, node: Tensor) -> None:
    c, b = e.c, e.number(src(node, 1))
    n = c.fixed(node.ne[1])
    a = c.shaped(_masked(c, np.tril(np.ones((n, n), np.bool_)), e.number(src(node, 0))), src(node, 0).shape)
    places = o.constant(np.eye(n, dtype=np.float32).reshape(1, 1, n, n))
    nothing = c.shaped(o.multiply(b, c.f32(0.0)), node.shape)
    x, _ = scan(c, _solve_row, nothing, [a, b, places], [], n, axis=2)
    e.store(node, c.shaped(x, node.shape))


def _mul_mat_axes(w: AxisContext, t: Tensor) -> Axes:
    a, b = src(t, 0), src(t, 1)
    x, y = w.axes_of(a), w.axes_of(b, w.tokens_where(b, 1))
    require(x[2] is None and x[3] is None, t, "src[0] has tokens or cells in its outer dimensions")
    if x[0] is not None or y[0] is not None:
        cells = x[0] is not None and x[0].span.kind == "cells"
        require(x[0] == y[0] and cells and b in w.zeroed, t, "sums over tokens, or over unmasked cells")
    return x[1], y[1], y[2], y[3]


def _mul_mat_id_axes(w: AxisContext, t: Tensor) -> Axes:
    a, x, y = (w.axes_of(src(t, i)) for i in range(3))
    require(a == NONE and x[0] is None, t, "sums over tokens or cells")
    require(y[0] is None and y[1] == x[2], t, "ids and src[1] have different axes")
    return x


EMITTERS: dict[str, Emitter] = {
    "DIAG": _diag,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
    "OUT_PROD": _out_prod,
    "SOLVE_TRI": _solve_tri,
    "TRI": _tri,
}
AXES: dict[str, Rule] = {"MUL_MAT": _mul_mat_axes, "MUL_MAT_ID": _mul_mat_id_axes}
