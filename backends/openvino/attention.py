"""SOFT_MAX and FLASH_ATTN_EXT: scale, softcap, mask with ALiBi slopes, sinks."""

from __future__ import annotations

import math

import numpy as np
import openvino.opset15 as o

from conformance.backend.translating import Emitter
from conformance.cgraph.tensor import Tensor

from .matmul import grouped
from .nodes import Value, broadcastable, cut, reshape, shape_of, transpose
from .sources import optional, src
from .walk import Walk

LOWEST = float(np.finfo(np.float32).min)


def slopes(n_head: int, max_bias: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """ALiBi's slope per head, shape (n_head,): as `ggml_compute_forward_soft_max_f32`."""
    split = 1 << math.floor(math.log2(n_head))
    m0, m1 = np.float32(2.0 ** (-max_bias / split)), np.float32(2.0 ** (-max_bias / 2.0 / split))
    rows = [float(m0) ** (h + 1) if h < split else float(m1) ** (2 * (h - split) + 1) for h in range(n_head)]
    return np.array(rows, np.float32)


def _masked(e: Walk, x: Value, mask: Tensor | None, max_bias: float) -> Value:
    """`x` of shape (…, heads, rows, n) plus slope times mask; a mask may have more rows than are used."""
    if mask is None:
        return x
    _, heads, rows, _ = shape_of(x)
    m: Value = broadcastable(e.c, cut(e.c, e.number(mask), [0], [rows], [2]), shape_of(x))
    if max_bias > 0:
        m = o.multiply(m, o.constant(slopes(heads, max_bias).reshape(1, heads, 1, 1)))
    return o.add(x, m)


def _sinks(e: Walk, sinks: Tensor | None, heads: int) -> Value | None:
    return None if sinks is None else reshape(e.c, e.number(sinks), (1, heads, 1, 1))


def _soft_max(e: Walk, node: Tensor) -> None:
    x = e.number(src(node, 0))
    scale, max_bias = node.param_f32(0), node.param_f32(1)
    if scale != 1.0:
        x = o.multiply(x, e.c.f32(scale))
    x = _masked(e, x, optional(node, 1), max_bias)
    sink = _sinks(e, optional(node, 2), node.ne[2])
    if sink is None:
        e.store(node, o.softmax(x, 3))
        return
    top = o.maximum(o.reduce_max(x, e.c.i64(3), True), sink)
    w = o.exp(o.subtract(x, top))
    total = o.add(o.reduce_sum(w, e.c.i64(3), True), o.exp(o.subtract(sink, top)))
    e.store(node, o.divide(w, total))


def _flash_attn_ext(e: Walk, node: Tensor) -> None:
    """Written by hand so that K and V stay at their own head counts; a row whose mask hides everything gives zeros."""
    q, k, v = (e.number(src(node, i)) for i in range(3))
    scale, max_bias, softcap = (node.param_f32(i) for i in range(3))
    heads = shape_of(q)[1]
    x = grouped(e.c, k, o.multiply(q, e.c.f32(scale / softcap if softcap else scale)), transposed=True)
    if softcap:
        x = o.multiply(o.tanh(x), e.c.f32(softcap))
    x = _masked(e, x, optional(node, 3), max_bias)
    sink = _sinks(e, optional(node, 4), heads)
    top = o.maximum(o.reduce_max(x, e.c.i64(3), True), e.c.f32(LOWEST) if sink is None else sink)
    w = o.exp(o.subtract(x, top))
    total = o.reduce_sum(w, e.c.i64(3), True)
    if sink is not None:
        total = o.add(total, o.exp(o.subtract(sink, top)))
    y = grouped(e.c, v, o.divide(w, o.maximum(total, e.c.f32(1e-30))), transposed=False)
    e.store(node, transpose(e.c, y, (0, 2, 1, 3)))


EMITTERS: dict[str, Emitter] = {"SOFT_MAX": _soft_max, "FLASH_ATTN_EXT": _flash_attn_ext}
