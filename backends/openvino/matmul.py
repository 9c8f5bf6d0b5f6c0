"""MUL_MAT and MUL_MAT_ID: the second operand times the transposed first."""

from __future__ import annotations

import openvino.opset15 as o

from conformance.backend.translating import Emitter
from conformance.cgraph.tensor import Tensor

from .nodes import Constants, Value, reshape, shape_of, tile
from .sources import src
from .walk import Walk


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
    n03, n02, *_ = shape_of(a)
    n13, n12, n, k = shape_of(b)
    m = shape_of(a)[2 if transposed else 3]
    if n02 in (1, n12) and n03 in (1, n13):
        return o.matmul(b, a, False, transposed)
    rows = n12 // n02 * n
    if n03 in (1, n13):
        x = o.matmul(reshape(c, b, (n13, n02, rows, k)), a, False, transposed)
    else:
        wide = reshape(c, b, (n03, n13 // n03, n02, rows, k))
        x = o.matmul(wide, reshape(c, a, (n03, 1, *shape_of(a)[1:])), False, transposed)
    return reshape(c, x, (n13, n12, n, m))


def _mul_mat(e: Walk, node: Tensor) -> None:
    e.store(node, grouped(e.c, e.number(src(node, 0)), e.number(src(node, 1)), transposed=True))


def _mul_mat_id(e: Walk, node: Tensor) -> None:
    """Row (i1, i2) of the result is row (i1 modulo, i2) of src[1] times the expert `ids[i1, i2]`."""
    experts, x, ids = (e.number(src(node, i)) for i in range(3))
    m, used, tokens, _ = node.ne
    picked = o.gather(reshape(e.c, experts, shape_of(experts)[1:]), reshape(e.c, ids, (tokens, used)), e.c.axis(0))
    rows = reshape(e.c, x, (tokens, shape_of(x)[2], 1, shape_of(x)[3]))
    if shape_of(rows)[1] != 1:
        rows = tile(e.c, rows, (tokens, used, 1, shape_of(x)[3]))
    e.store(node, reshape(e.c, o.matmul(rows, picked, False, True), (1, tokens, used, m)))


EMITTERS: dict[str, Emitter] = {"MUL_MAT": _mul_mat, "MUL_MAT_ID": _mul_mat_id}
