"""SOFT_MAX, FLASH_ATTN_EXT, DIAG_MASK_*, LIGHTNING_INDEXER, DSV4_HC_*, stateful attention."""

from __future__ import annotations

import math

import numpy as np
import openvino.opset15 as o
from openvino import Node, PartialShape, Type
from openvino.op.util import Variable, VariableInfo

from backends.openvino.axes import Axes, AxisContext, FixedError, Rule, at, require
from backends.openvino.emit_context import EmitContext, src
from backends.openvino.nodes import Constants, Shape, Value, broadcastable, cut, reshape, shape_of, tile, transpose
from backends.openvino.translating.plan import Emitter
from backends.openvino.translating.template import Sym, same
from conformance.ggml.ops.op import optional
from conformance.ggml.tensor import Tensor

from .matmul import grouped

LOWEST = float(np.finfo(np.float32).min) / 2
"""Half the lowest float, in place of minus infinity: a difference of infinities is NaN."""


def slopes(n_head: int, max_bias: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return ALiBi slopes, (n_head,), as `ggml_compute_forward_soft_max_f32`."""
    split = 1 << math.floor(math.log2(n_head))
    m0, m1 = np.float32(2.0 ** (-max_bias / split)), np.float32(2.0 ** (-max_bias / 2.0 / split))
    rows = [float(m0) ** (h + 1) if h < split else float(m1) ** (2 * (h - split) + 1) for h in range(n_head)]
    return np.array(rows, np.float32)


def _mask(e: EmitContext, mask: Tensor | None, scores: Shape, max_bias: float) -> Value | None:
    """Return slope * mask, cut to scores (ne3, heads, rows, n); ne3 and heads may be 1."""
    if mask is None:
        return None
    _, heads, rows, n = scores
    m = cut(e.c, cut(e.c, e.number(mask), [0], [rows], [2]), [0], [n], [3])
    m = broadcastable(e.c, m, scores)
    return o.multiply(m, o.constant(slopes(e.c.fixed(heads), max_bias).reshape(1, -1, 1, 1))) if max_bias > 0 else m


def _flash_mask(e: EmitContext, node: Tensor) -> Value | None:
    q, k, mask = src(node, 0), src(node, 1), optional(node, 3)
    return mask and _mask(e, mask, (q.ne[3], q.ne[2], q.ne[1], k.ne[1]), node.params.max_bias)


def _sinks(e: EmitContext, sinks: Tensor | None, heads: int) -> Value | None:
    return None if sinks is None else reshape(e.c, e.number(sinks), (1, heads, 1, 1))


def _soft_max(e: EmitContext, node: Tensor) -> None:
    x = e.number(src(node, 0))
    scale, max_bias = node.params.scale, node.params.max_bias
    if scale != 1.0:
        x = o.multiply(x, e.c.f32(scale))
    mask = _mask(e, optional(node, 1), shape_of(e.c, x), max_bias)
    if mask is not None:
        x = o.add(x, mask)
    sink = _sinks(e, optional(node, 2), node.ne[2])
    if sink is None:
        e.store(node, o.softmax(x, 3))
        return
    top = o.maximum(o.reduce_max(x, e.c.i64(3), True), sink)
    w = o.exp(o.subtract(x, top))
    total = o.add(o.reduce_sum(w, e.c.i64(3), True), o.exp(o.subtract(sink, top)))
    e.store(node, o.divide(w, total))


def _flash_attn_ext(e: EmitContext, node: Tensor) -> None:
    """Emit products and a softmax, K and V at their own head counts; zeros if all is hidden.

    ggml never reads hidden cells, so they may be NaN: hidden scores are replaced, and V where no row sees it.
    """
    q, k, v = (e.number(src(node, i)) for i in range(3))
    scale, softcap = node.params.scale, node.params.logit_softcap
    heads = shape_of(e.c, q)[1]
    x = grouped(e.c, k, o.multiply(q, e.c.f32(scale / softcap if softcap else scale)), transposed=True)
    if softcap:
        x = o.multiply(o.tanh(x), e.c.f32(softcap))
    mask, sink = _flash_mask(e, node), _sinks(e, optional(node, 4), heads)
    if mask is not None:
        hidden = o.less(mask, e.c.f32(LOWEST))
        least = LOWEST if sink is None else -math.inf
        x = e.c.shaped(o.select(hidden, e.c.f32(least), o.add(x, mask)), shape_of(e.c, x))
        v = _seen(e, v, mask)
    w = o.softmax(x, 3) if sink is None else _sunk(e.c, x, sink)
    if sink is None and mask is not None and not _is_one_row(e.c, x):
        # not after the product: without caches, the CPU plugin (2026.4.1) then leaves rows of another size unwritten
        seen = o.greater(o.reduce_max(mask, e.c.i64(3), True), e.c.f32(LOWEST))
        w = o.multiply(w, o.convert(seen, Type.f32))
    y = grouped(e.c, v, e.c.shaped(w, shape_of(e.c, x)), transposed=False)
    e.store(node, transpose(e.c, y, (0, 2, 1, 3)))


def _sunk(c: Constants, x: Value, sink: Value) -> Value:
    """Compute the softmax of scores with a sink, which gets a share but has no output."""
    top = o.maximum(o.reduce_max(x, c.i64(3), True), sink)
    w = o.exp(o.subtract(x, top))
    total = o.add(o.reduce_sum(w, c.i64(3), True), o.exp(o.subtract(sink, top)))
    return o.divide(w, o.maximum(total, c.f32(1e-30)))


def _is_one_row(c: Constants, x: Value) -> bool:
    """Return True if scores are of one query: if it sees nothing, V is zero throughout."""
    n3, _, rows, _ = shape_of(c, x)
    return all(not isinstance(n, Sym) and n == 1 for n in (n3, rows))


def _seen(e: EmitContext, v: Value, mask: Value) -> Value:
    """Zero cells of K or V that `mask`, (ne3 or 1, heads or 1, rows, n), hides in every row."""
    c, shape, own = e.c, shape_of(e.c, v), shape_of(e.c, mask)
    per_stream = same(own[0], shape[0])
    cells = o.greater(o.reduce_max(mask, c.i64(1, 2) if per_stream else c.i64(0, 1, 2), True), c.f32(LOWEST))
    n3 = own[0] if per_stream else 1
    cells = reshape(c, c.shaped(cells, (n3, 1, 1, own[3])), (n3, 1, own[3], 1))
    return c.shaped(o.select(cells, v, c.f32(0.0)), shape)


def _operator(e: EmitContext, node: Tensor, *, wide: bool) -> None:
    """Emit the SDPA operator, or `_flash_attn_ext` for softcap and sinks, which it lacks.

    `wide`: K and V are repeated to all heads; else the heads of one group have a dimension of their own.
    """
    if node.params.logit_softcap or optional(node, 4) is not None:
        e.note("attention by hand: SDPA has no softcap and no sinks here")
        _flash_attn_ext(e, node)
        return
    c = e.c
    q, k, v = (e.number(src(node, i)) for i in range(3))
    n3, heads, rows, size = shape_of(c, q)
    _, kv, length, _ = shape_of(c, k)
    group = heads // kv
    mask = _flash_mask(e, node)
    if mask is not None:
        k, v = (_seen(e, x, mask) for x in (k, v))
    rank5 = (n3, kv, group, rows)
    if wide:
        shapes = [(n3, kv, group, length, shape_of(c, x)[3]) for x in (k, v)]
        k, v = (
            reshape(c, tile(c, reshape(c, x, (n3, kv, 1, *to[3:])), to), (n3, heads, *to[3:]))
            for x, to in zip((k, v), shapes, strict=True)
        )
    else:
        q = reshape(c, q, (*rank5, size))
        k, v = (reshape(c, x, (n3, kv, 1, length, shape_of(c, x)[3])) for x in (k, v))
        if mask is not None:
            own = shape_of(c, mask)
            across = (kv, group) if own[1] != 1 else (1, 1)
            mask = reshape(c, mask, (own[0], *across, *own[2:]))
    width = shape_of(c, v)[-1]
    y: Value = o.scaled_dot_product_attention(q, k, v, *(() if mask is None else (o.maximum(mask, c.f32(LOWEST)),)),
                                              scale=c.f32(node.params.scale), causal=False)  # fmt: skip
    if mask is not None:  # a fully masked row gives zeros in ggml
        seen = o.greater(o.reduce_max(mask, c.i64(-1), True), c.f32(LOWEST))
        y = o.multiply(y, o.convert(seen, Type.f32))
    y = reshape(c, c.shaped(y, (n3, heads, rows, width) if wide else (*rank5, width)), (n3, heads, rows, width))
    e.store(node, transpose(c, y, (0, 2, 1, 3)))


def _diag_mask(value: float) -> Emitter:
    def emit(e: EmitContext, node: Tensor) -> None:
        c, (n0, n1) = e.c, node.ne[:2]
        column = o.range(c.axis(0), c.axis(n0), c.axis(1), "i64")
        row = o.unsqueeze(o.range(c.axis(0), c.axis(n1), c.axis(1), "i64"), c.i64(1))
        above = o.greater(column, o.add(row, c.i64(node.params.n_past)))
        x = o.select(above, c.f32(value), e.number(src(node, 0)))
        e.store(node, c.shaped(x, node.shape), exact=True)

    return emit


def _lightning_indexer(e: EmitContext, node: Tensor) -> None:
    c, (q, k, w, mask) = e.c, (src(node, i) for i in range(4))
    n, heads, n_t, n_s = q.ne
    n_kv = k.ne[2]
    keys = reshape(c, e.number(k), (n_s, 1, n_kv, n))
    scores = o.relu(o.matmul(e.number(q), keys, False, True))
    share = reshape(c, e.number(w), (n_s, n_t, 1, heads))
    y = reshape(c, c.shaped(o.matmul(share, scores, False, False), (n_s, n_t, 1, n_kv)), node.shape)
    e.store(node, o.add(y, tile(c, e.number(mask), (n_s, *mask.ne[2::-1]))))


def _hc_comb(e: EmitContext, node: Tensor) -> None:
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


def _hc_pre(e: EmitContext, node: Tensor) -> None:
    c, x, w, scale = e.c, src(node, 0), src(node, 1), node.params.scale
    n_embd, hc, n, _ = x.ne
    share = o.sigmoid(e.number(w)) if node.params.gated else reshape(c, e.number(w), (1, n, hc, 1))
    y = c.shaped(o.reduce_sum(o.multiply(e.number(x), share), c.i64(2), False), (1, n, n_embd))
    e.store(node, o.multiply(y, c.f32(scale)) if scale != 1.0 else y)


def _hc_post(e: EmitContext, node: Tensor) -> None:
    c, (n_embd, hc, n, _), comb = e.c, node.ne, optional(node, 3)
    x = reshape(c, e.number(src(node, 0)), (1, n, 1, n_embd))
    new = o.multiply(x, reshape(c, e.number(src(node, 2)), (1, n, hc, 1)))
    old = e.number(src(node, 1))
    if comb is not None:
        old = o.matmul(e.number(comb), old, True, False)
    e.store(node, c.shaped(o.add(new, old), node.shape))


# -- axes -------------------------------------------------------------------------------------------------------------
def _mask_axes(w: AxisContext, mask: Tensor) -> Axes:
    axes = w.axes_of(mask, w.mask_axes(mask.ne[0]))
    leaf = mask.root if mask.op == "NONE" else src(mask, 0) if mask.op == "CPY" else mask
    require(leaf.op == "NONE" and leaf not in w.persistent, mask, "a mask must be an input, or an input cast")
    w.masks[leaf] = w.cells[mask.ne[0]]
    return axes


def _soft_max_axes(w: AxisContext, t: Tensor) -> Axes:
    axes, mask = w.axes_of(src(t, 0)), optional(t, 1)
    if mask is None:
        require(axes[0] is None, t, "a row of cells without a mask")
        return axes
    require(_mask_axes(w, mask)[:2] == axes[:2], t, "its rows and its mask's rows are different axes")
    w.zeroed.add(t)
    return axes


def _flash_attn_ext_axes(w: AxisContext, t: Tensor) -> Axes:
    q, k, v = (src(t, i) for i in range(3))
    mask = optional(t, 3)
    if mask is None:
        raise FixedError(f"{t}: attention without a mask")
    cells, queries, *_ = _mask_axes(w, mask)
    require(w.axes_of(q) == at(1, queries), t, "q and its mask's rows are different axes")
    require(w.axes_of(k) == w.axes_of(v) == at(1, cells), t, "k or v and the mask's columns are different axes")
    return at(2, queries)


# -- the form that the CPU plugin fuses to one kernel with its own cache (docs/openvino.md) ----------------------
def remembered(c: Constants, new: Value, beam: Value, name: str, heads: int, size: int) -> tuple[Value, Node]:
    """Return a cache as the model's variable `name`, grown by `new` each run, and its Assign.

    `new` is (batch, heads, tokens, size). `beam`, an i32 Parameter (batch), gives the sequence whose past each one
    continues: normally 0, 1, 2, … To fuse with `sdpa` the cache needs the Gather by `beam`, the initial value and this
    layout, and must not be an output.

    The cache is float32 (batch, heads, past + tokens, size); the Assign belongs to the model's sinks.
    """
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = PartialShape([-1, heads, -1, size]), Type.f32, name
    variable = Variable(info)
    shape = o.concat([o.shape_of(beam), c.i64(heads, 0, size)], 0)
    past = o.read_value(o.broadcast(c.f32(0.0), shape), variable)
    whole = o.concat([o.gather(past, beam, c.axis(0)), new], 2)
    return whole, o.assign(whole, variable)


def sdpa(c: Constants, q: Value, k: Value, v: Value, added: Value, heads: int, kv_heads: int, scale: float) -> Value:
    """Emit ScaledDotProductAttention: one stateful kernel if K and V are `remembered`.

    q (batch, heads, tokens, size), k (batch, kv_heads, kv, size), v (batch, kv_heads, kv, size_v); `added`, (batch or
    1, heads or 1, tokens, kv), is a mask without a fully hidden row. Returns (batch, heads, tokens, size_v).
    """
    k, v = (repeated(c, x, heads, kv_heads) for x in (k, v))
    return o.scaled_dot_product_attention(q, k, v, added, c.f32(scale), causal=False)


def repeated(c: Constants, x: Value, heads: int, kv_heads: int) -> Value:
    """Repeat K or V to every query head by Unsqueeze, Broadcast, Reshape, the plugin's pattern."""
    if heads == kv_heads:
        return x
    times = c.i64(1, 1, heads // kv_heads, 1, 1)
    wide = o.broadcast(o.unsqueeze(x, c.i64(2)), times, broadcast_spec="BIDIRECTIONAL")
    partial = x.get_output_partial_shape(0) if isinstance(x, Node) else x.get_partial_shape()
    return o.reshape(wide, c.i64(0, heads, -1, int(partial[3].get_length())), True)


EMITTERS: dict[str, Emitter] = {
    "DIAG_MASK_INF": _diag_mask(-math.inf),
    "DIAG_MASK_ZERO": _diag_mask(0.0),
    "DSV4_HC_COMB": _hc_comb,
    "DSV4_HC_POST": _hc_post,
    "DSV4_HC_PRE": _hc_pre,
    "FLASH_ATTN_EXT": _flash_attn_ext,
    "LIGHTNING_INDEXER": _lightning_indexer,
    "SOFT_MAX": _soft_max,
}
AXES: dict[str, Rule] = {"FLASH_ATTN_EXT": _flash_attn_ext_axes, "SOFT_MAX": _soft_max_axes}
FORMS: dict[str, Emitter] = {
    "manual": _flash_attn_ext,
    "sdpa": lambda e, node: _operator(e, node, wide=True),
    "sdpa5d": lambda e, node: _operator(e, node, wide=False),
}
"""Value of the option `attention` -> emitter of FLASH_ATTN_EXT."""
