"""The indexer of sparse attention (LIGHTNING_INDEXER) and hyper-connections (DSV4_HC_*)."""

from __future__ import annotations

import openvino.opset15 as o

from backends.openvino.nodes import Value, cut, reshape, tile
from backends.openvino.walk import Walk, optional, src
from conformance.backend.translating.plan import Emitter
from conformance.ggml.tensor import Tensor


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
    eps, mixes = c.f32(node.params.eps), src(node, 0)
    scale = cut(c, e.number(src(node, 1)), [2], [3], [3])
    x = o.add(o.multiply(e.number(mixes), scale), e.number(src(node, 2)))
    x = reshape(c, cut(c, c.shaped(x, mixes.shape), [2 * hc], [2 * hc + hc * hc], [3]), (1, n, hc, hc))

    def even(x: Value, axis: int) -> Value:
        return o.divide(x, o.add(o.reduce_sum(x, c.i64(axis), True), eps))

    x = even(o.add(o.softmax(x, 3), eps), 2)
    for _ in range(node.params.n_iter - 1):
        x = even(even(x, 3), 2)
    e.store(node, c.shaped(x, node.shape))


def _hc_pre(e: Walk, node: Tensor) -> None:
    c, x, w, scale = e.c, src(node, 0), src(node, 1), node.params.scale
    n_embd, hc, n, _ = x.ne
    share = o.sigmoid(e.number(w)) if node.params.gated else reshape(c, e.number(w), (1, n, hc, 1))
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
    "DSV4_HC_COMB": _hc_comb,
    "DSV4_HC_POST": _hc_post,
    "DSV4_HC_PRE": _hc_pre,
    "LIGHTNING_INDEXER": _lightning_indexer,
}
