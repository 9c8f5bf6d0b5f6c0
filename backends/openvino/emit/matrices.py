"""Parts, triangles and windows of matrices, the indexer of sparse attention, and hyper-connections."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray

from backends.openvino.nodes import Constants, Value, cut, reshape, shape_of, tile
from backends.openvino.sources import optional, src
from backends.openvino.views import Region, read, write
from backends.openvino.walk import Walk
from conformance.backend.translating.plan import Emitter
from conformance.ggml.ops.matmul import TRI_TYPE
from conformance.ggml.ops.views import part
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor

from .matmul import grouped
from .scan import scan


def _part(*, add: bool) -> Emitter:
    """In place only the part is written, through a view of it; else `src[0]` with the part replaced is a new value."""

    def emit(e: Walk, node: Tensor) -> None:
        a, b = src(node, 0), src(node, 1)
        ne, nb, offset = part(node)
        new = e.number(b)
        if node.view_src is not None:
            window = Tensor(node.type, ne, nb, "VIEW", view_src=node.root, view_offs=node.view_offs + offset)
            e.store(window, o.add(e.number(window), new) if add else new, exact=True)
            return
        size, whole = a.type.type_size, e.number(a)
        region = Region(_count(a), ne[::-1], tuple(n // size for n in nb[::-1]), offset // size)
        if add:
            new = o.add(read(e.c, whole, region)[0], new)
        e.store(node, write(e.c, whole, region, e.c.shaped(new, ne[::-1]))[0], exact=True)

    return emit


def _count(t: Tensor) -> int:
    return t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]


def _out_prod(e: Walk, node: Tensor) -> None:
    """`sum_k a[i0, k] b[i1, k]`: the first operand is a matrix that is not transposed before its product."""
    a, b = e.number(src(node, 0)), e.number(src(node, 1))
    n3, n2, k, n = shape_of(e.c, b)
    b = e.c.shaped(o.transpose(b, e.c.i64(0, 1, 3, 2)), (n3, n2, n, k))
    e.store(node, grouped(e.c, a, b, transposed=False))


_TRIANGLES: dict[int, Callable[[NDArray[np.bool_]], NDArray[np.bool_]]] = {
    TRI_TYPE["UPPER_DIAG"]: np.triu,
    TRI_TYPE["UPPER"]: lambda x: np.triu(x, 1),
    TRI_TYPE["LOWER_DIAG"]: np.tril,
    TRI_TYPE["LOWER"]: lambda x: np.tril(x, -1),
}


def _only(c: Constants, where: NDArray[np.bool_], x: Value) -> Value:
    """`x` there, zero elsewhere, even where `x` is no number."""
    return o.select(o.constant(where), x, c.f32(0.0))


def _tri(e: Walk, node: Tensor) -> None:
    n = e.c.fixed(node.ne[0])
    keep = _TRIANGLES[node.param_i32(0)](np.ones((n, n), np.bool_))
    e.store(node, _only(e.c, keep, e.number(src(node, 0))))


def _diag(e: Walk, node: Tensor) -> None:
    n = e.c.fixed(node.ne[0])
    e.store(node, e.c.shaped(_only(e.c, np.eye(n, dtype=np.bool_), e.number(src(node, 0))), node.shape))


def _solve_row(c: Constants, x: Value, rows: list[Value], whole: list[Value]) -> tuple[Value, Value]:
    """One more row of x, (n3, n2, n, k), whose rows from this one on are still zero: forward substitution."""
    a, b, at = rows
    del whole
    axis = c.i64(-2)
    known = o.squeeze(o.matmul(o.unsqueeze(a, axis), x, False, False), axis)
    y = o.divide(o.subtract(b, known), o.reduce_sum(o.multiply(a, at), c.i64(-1), True))
    return y, o.add(x, o.multiply(o.unsqueeze(at, c.i64(-1)), o.unsqueeze(y, axis)))


def _solve_tri(e: Walk, node: Tensor) -> None:
    c, b = e.c, e.number(src(node, 1))
    n = c.fixed(node.ne[1])
    a = c.shaped(_only(c, np.tril(np.ones((n, n), np.bool_)), e.number(src(node, 0))), src(node, 0).shape)
    places = o.constant(np.eye(n, dtype=np.float32).reshape(1, 1, n, n))
    nothing = c.shaped(o.multiply(b, c.f32(0.0)), node.shape)
    x, _ = scan(c, _solve_row, nothing, [a, b, places], [], n, axis=2)
    e.store(node, c.shaped(x, node.shape))


def _roll(e: Walk, node: Tensor) -> None:
    x = o.roll(e.number(src(node, 0)), e.c.i64(*node.op_params[3::-1]), e.c.i64(0, 1, 2, 3))
    e.store(node, e.c.shaped(x, node.shape), exact=True)


def _pool_2d(e: Walk, node: Tensor) -> None:
    """Padding counts as zeros in a mean, and never is the largest."""
    op, k0, k1, s0, s1, p0, p1 = node.op_params[:7]
    x, strides, pads, kernel = e.number(src(node, 0)), [s1, s0], [p1, p0], [k1, k0]
    if op == OP_POOL["AVG"]:
        y: Value = o.avg_pool(x, strides, pads, pads, kernel, False, "floor")
    else:
        y = o.max_pool(x, strides, [1, 1], pads, pads, kernel, "floor").output(0)
    e.store(node, e.c.shaped(y, node.shape))


def _im2col(e: Walk, node: Tensor) -> None:
    """One strided slice of the padded input for each element of the kernel."""
    s0, s1, p0, p1, d0, d1, is_2d = node.op_params[:7]
    c, a, b = e.c, src(node, 0), src(node, 1)
    x = e.number(b)
    if is_2d:
        kh, kw, oh, ow = c.fixed(a.ne[1]), c.fixed(a.ne[0]), node.ne[2], node.ne[1]
        n, channels = b.ne[3], b.ne[2]
    else:
        kh, kw, oh, ow, s1, p1, d1 = 1, c.fixed(a.ne[0]), 1, node.ne[1], 1, 0, 1
        n, channels = b.ne[2], b.ne[1]
        x = reshape(c, x, (n, channels, 1, b.ne[0]))
    x = o.pad(x, c.i64(0, 0, p1, p0), c.i64(0, 0, p1, p0), "constant", c.f32(0.0))
    windows = []
    for j in range(kh):
        for i in range(kw):
            first = c.i64(j * d1, i * d0)
            last = c.i64(j * d1 + (oh - 1) * s1 + 1, i * d0 + (ow - 1) * s0 + 1)
            window = o.slice(x, first, last, c.i64(s1, s0), c.i64(2, 3))
            windows.append(o.unsqueeze(o.transpose(window, c.i64(0, 2, 3, 1)), c.i64(-1)))
    y = windows[0] if len(windows) == 1 else o.concat(windows, -1)
    e.store(node, reshape(c, c.shaped(y, (n, oh, ow, channels, kh * kw)), node.shape))


def _lightning_indexer(e: Walk, node: Tensor) -> None:
    c, (q, k, w, mask) = e.c, (src(node, i) for i in range(4))
    n, heads, n_t, n_s = q.ne
    n_kv = k.ne[2]
    keys = reshape(c, e.number(k), (n_s, 1, n_kv, n))
    found = o.relu(o.matmul(e.number(q), keys, False, True))
    share = reshape(c, e.number(w), (n_s, n_t, 1, heads))
    y = reshape(c, c.shaped(o.matmul(share, found, False, False), (n_s, n_t, 1, n_kv)), node.shape)
    e.store(node, o.add(y, tile(c, e.number(mask), (n_s, *mask.ne[2::-1]))))


def _hc_comb(e: Walk, node: Tensor) -> None:
    c, hc, n = e.c, e.c.fixed(node.ne[0]), node.ne[2]
    eps, mixes = c.f32(node.param_f32(0)), src(node, 0)
    scale = cut(c, e.number(src(node, 1)), [2], [3], [3])
    x = o.add(o.multiply(e.number(mixes), scale), e.number(src(node, 2)))
    x = reshape(c, cut(c, c.shaped(x, mixes.shape), [2 * hc], [2 * hc + hc * hc], [3]), (1, n, hc, hc))

    def even(x: Value, axis: int) -> Value:
        return o.divide(x, o.add(o.reduce_sum(x, c.i64(axis), True), eps))

    x = even(o.add(o.softmax(x, 3), eps), 2)
    for _ in range(node.param_i32(1) - 1):
        x = even(even(x, 3), 2)
    e.store(node, c.shaped(x, node.shape))


def _hc_pre(e: Walk, node: Tensor) -> None:
    c, x, w, scale = e.c, src(node, 0), src(node, 1), node.param_f32(0)
    n_embd, hc, n, _ = x.ne
    share = o.sigmoid(e.number(w)) if node.param_i32(1) else reshape(c, e.number(w), (1, n, hc, 1))
    y = c.shaped(o.reduce_sum(o.multiply(e.number(x), share), c.i64(2), False), (1, n, n_embd))
    e.store(node, o.multiply(y, c.f32(scale)) if scale != 1.0 else y)


def _hc_post(e: Walk, node: Tensor) -> None:
    c, (n_embd, hc, n, _), comb = e.c, node.ne, optional(node, 3)
    x = reshape(c, e.number(src(node, 0)), (1, n, 1, n_embd))
    given = o.multiply(x, reshape(c, e.number(src(node, 2)), (1, n, hc, 1)))
    kept = e.number(src(node, 1))
    if comb is not None:
        kept = o.matmul(e.number(comb), kept, True, False)
    e.store(node, c.shaped(o.add(given, kept), node.shape))


EMITTERS: dict[str, Emitter] = {
    "SET": _part(add=False),
    "ACC": _part(add=True),
    "OUT_PROD": _out_prod,
    "TRI": _tri,
    "DIAG": _diag,
    "SOLVE_TRI": _solve_tri,
    "ROLL": _roll,
    "POOL_2D": _pool_2d,
    "IM2COL": _im2col,
    "LIGHTNING_INDEXER": _lightning_indexer,
    "DSV4_HC_COMB": _hc_comb,
    "DSV4_HC_PRE": _hc_pre,
    "DSV4_HC_POST": _hc_post,
}
