"""MUL_MAT and MUL_MAT_ID: the second operand times the transposed first."""

from __future__ import annotations

import numpy as np
import openvino.opset15 as o

from backends.openvino.nodes import Constants, Value, reshape, shape_of, tile
from backends.openvino.sources import src
from backends.openvino.walk import Walk
from conformance.backend.translating.plan import Emitter
from conformance.backend.translating.sym import same
from conformance.ggml.tensor import Tensor


def grouped(c: Constants, a: Value, b: Value, *, transposed: bool) -> Value:
    """`b @ a` where each matrix of `a` serves a group of neighbours of `b` in dimensions 2 and 3 (`i02 = i12 / r2`).

    Args:
        c: the model's constants.
        a: shape (ne03, ne02, M, K), or (ne03, ne02, K, M) when not `transposed`.
        b: shape (ne13, ne12, N, K); ne12 and ne13 are multiples of ne02 and ne03.
        transposed: whether `a` is transposed before the product.

    Returns:
        Shape (ne13, ne12, N, M); nothing is repeated in memory: groups of dimension 2 become rows.
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


def _mul_mat(e: Walk, node: Tensor) -> None:
    """A weight of two dimensions stays compressed and meets `x` as a matrix, which the device packs once."""
    a, x, w = src(node, 0), e.number(src(node, 1)), e.weight(node)
    if a.ne[2] * a.ne[3] == 1 and (w is not None or e.baked(a)):
        matrix = reshape(e.c, e.number(a), (a.ne[1], a.ne[0])) if w is None else w.matrix()
        e.store(node, e.c.shaped(o.matmul(x, matrix, False, True), (*shape_of(e.c, x)[:3], a.ne[1])))
        return
    full = e.number(a) if w is None else reshape(e.c, w.matrix(), a.shape)
    e.store(node, grouped(e.c, full, x, transposed=True))


def _picked(e: Walk, node: Tensor, ids: Value) -> Value:
    """The experts `ids`, of shape (tokens, used): (tokens, used, M, K)."""
    experts, w = src(node, 0), e.weight(node)
    if w is None:
        return o.gather(reshape(e.c, e.number(experts), experts.shape[1:]), ids, e.c.axis(0))
    k, m, *_ = experts.ne
    first = o.multiply(o.unsqueeze(ids, e.c.i64(-1)), o.constant(np.int32(m)))
    rows = o.add(first, o.constant(np.arange(m, dtype=np.int32)))
    return e.c.shaped(w.rows(rows), (*shape_of(e.c, ids), m, k))


def _mul_mat_id(e: Walk, node: Tensor) -> None:
    """Row (i1, i2) of the result is row (i1 modulo, i2) of src[1] times the expert `ids[i1, i2]`."""
    x, ids = e.number(src(node, 1)), e.number(src(node, 2))
    m, used, tokens, _ = node.ne
    picked = _picked(e, node, reshape(e.c, ids, (tokens, used)))
    rows = reshape(e.c, x, (tokens, shape_of(e.c, x)[2], 1, shape_of(e.c, x)[3]))
    if shape_of(e.c, rows)[1] != 1:
        rows = tile(e.c, rows, (tokens, used, 1, shape_of(e.c, x)[3]))
    e.store(node, reshape(e.c, o.matmul(rows, picked, False, True), (1, tokens, used, m)))


EMITTERS: dict[str, Emitter] = {"MUL_MAT": _mul_mat, "MUL_MAT_ID": _mul_mat_id}
