"""Softmax and attention: FLASH_ATTN_EXT, SOFT_MAX, masks, indexer, hyper-connections.

FLASH_ATTN_EXT is softmax(scale Q K^T + slope mask) V in one op, for any layout of K and V. A KV cell whose mask is -inf
has no effect, whatever K and V contain there; a row without any cell is zero, as in ggml. (ggml's kernel for 64 tokens
and more lets NaN in such a cell through if other tokens of the tile see the cell's tile.) `prec` and `n_kv_max` (a
bound on the finite mask entries of a row that lets a backend skip work) do not change the exact value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, F32

from .matmul import Activations, narrowed
from .takes import ELEMENT, FLOAT, ONLY_F32, VALUES, Table, Takes
from .values import Values, alibi_slopes, blocks, in_float64, load, operand, optional, repeated, store

_SPLIT = 512
"""Cells from which `Arithmetic.flash_attn_parts` applies."""
_FEW = 1 << 11
"""Elements below which a cast to F16 is faster than `_in_f16`."""
_EXPONENT, _SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)
_NORMAL, _LARGE = (np.float32(2.0**e).view(np.uint32) for e in (-14, 15))
"""Bits of the smallest normal F16 and of its largest power of 2."""
_SHIFT = np.float32(1.5 * 2**13)


def _scores(node: Tensor, kq: Values, mask: Values | None) -> tuple[Values, NDArray[np.bool_] | None]:
    """Return scaled, capped, masked KQ, `(ne3, heads, n_tokens, n_kv)`, and where it is hidden."""
    scale, max_bias, softcap = node.params.scale, node.params.max_bias, node.params.logit_softcap
    batch, heads, tokens, n_kv = kq.shape
    if softcap:
        kq = softcap * np.tanh(kq * (scale / softcap))
    else:
        kq *= scale
    if mask is None:
        return kq, None
    bias = repeated(mask[:, :, :tokens, :n_kv], (batch, heads, tokens, n_kv))
    hidden = np.isneginf(bias)
    kq += alibi_slopes(max_bias, heads)[:, None, None] * bias
    if np.isnan(kq).any():
        kq = np.where(hidden, -np.inf, kq)
    return kq, hidden


def _weighted(p: Values, v: Values, hidden: NDArray[np.bool_] | None) -> Values:
    """Compute P V per head of V; an infinite or NaN cell of V counts only in rows that see it."""
    batch, heads, tokens, n_kv = p.shape
    if v.shape[0] != batch:
        v = np.repeat(v, batch // v.shape[0], axis=0)
    flat = p.reshape(batch, v.shape[1], -1, n_kv)
    broken = ~np.isfinite(v)
    if hidden is None or not broken.any():
        return (flat @ v).reshape(batch, heads, tokens, -1)
    visible = np.broadcast_to(~hidden, p.shape).reshape(flat.shape)
    up, down = (_meet(visible & (flat > 0), v == infinity) for infinity in (np.inf, -np.inf))
    nan = _meet(visible, np.isnan(v)) | _meet(visible & (flat == 0), np.isinf(v)) | (up & down)
    exact = flat @ np.where(broken, 0.0, v)
    result = np.select([nan, up, down], [np.nan, np.inf, -np.inf], exact)
    return result.reshape(batch, heads, tokens, -1)


def _meet(rows: NDArray[np.bool_], cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return True where a row of `rows` and a column of `cells` share a cell."""
    return rows.astype(np.float64) @ cells.astype(np.float64) > 0


def _added_up(kq: Values, v: Values, hidden: NDArray[np.bool_] | None, width: DTypeLike) -> Values:
    """Compute exp(kq - max) V by cell, rounding the sum to F16: ggml-cpu's online softmax.

    As in `ggml_compute_forward_flash_attn_ext_f16_one_chunk`, a new maximum first scales the sum so far, and that is
    rounded too. Intermediate values are float32, as in ggml; weights and scales are of type `width`.
    """
    batch, heads, tokens, n_kv = kq.shape
    top = np.maximum.accumulate(kq, axis=-1)
    before = np.concatenate([np.full_like(top[..., :1], -np.inf), top[..., :-1]], axis=-1)
    weight = np.exp(kq - top)
    scale = np.exp(before - top)
    if hidden is not None:
        weight, scale = np.where(hidden, 0.0, weight), np.where(hidden, 1.0, scale)
    v = np.repeat(v, batch // v.shape[0], axis=0).reshape(-1, n_kv, v.shape[-1])
    groups = len(v)
    weights, scales = (_by_cell(a.astype(np.float32).astype(width).astype(np.float64), groups) for a in (weight, scale))
    seen = None if hidden is None else _by_cell(np.broadcast_to(~hidden, kq.shape), groups)
    total = np.zeros((groups, weights.shape[2], v.shape[-1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for at in blocks(total.shape):
            own = (slice(None), *at)
            _add_up(total[at], weights[own], scales[own], v[at[0]], None if seen is None else seen[own])
    return total.reshape(batch, heads, tokens, -1)


def _add_up(total: Values, weights: Values, scales: Values, v: Values, seen: NDArray[np.bool_] | None) -> None:
    """Add `weights` (n_kv, groups, rows) times V to `total` (groups, rows, ne0 of V), in place."""
    more = np.empty_like(total)
    changing = ((weights != 0) | (scales != 1)).reshape(len(weights), -1)
    for cell in np.flatnonzero(changing.any(-1)):
        rows = scales[cell] != 1
        if rows.any():
            total[rows] = _in_f16(total[rows] * scales[cell][rows][:, None])
        if weights[cell].any():
            np.multiply(v[:, cell, None], weights[cell][..., None], out=more)
            more += total
            np.copyto(total, _in_f16(more), where=True if seen is None else seen[cell][..., None])


def _by_cell(a: NDArray[Any], groups: int) -> NDArray[Any]:
    """Return scores `(batch, heads, tokens, n_kv)` as `(n_kv, groups, rows)`, contiguous."""
    return np.ascontiguousarray(np.moveaxis(a.reshape(groups, -1, a.shape[-1]), -1, 0))


def _in_f16(x: Values) -> NDArray[np.float32]:
    """Round to float32, then to F16, faster than a cast.

    2^13 times the power of 2 in a value, added and subtracted, rounds it to the bits that F16 holds.
    """
    y = x.astype(np.float32)
    power = y.view(np.uint32) & _EXPONENT
    if y.size < _FEW or power.max() >= _LARGE:
        return y.astype(np.float16).astype(np.float32)
    sign = y.view(np.uint32) & _SIGN
    shift = np.maximum(power, _NORMAL, out=power).view(np.float32)
    shift *= _SHIFT
    y += shift
    y -= shift
    y.view(np.uint32)[...] |= sign  # a zero loses its own
    return y


def attend(
    node: Tensor, kq: Values, v: Values, mask: Values | None, sinks: Values | None, *, f16_parts: int = 0,
    weights: DTypeLike = np.float32,
) -> Values:  # fmt: skip
    """Compute FLASH_ATTN_EXT from `kq`, its Q K^T: shape `(ne3, n_tokens, heads, ne0 of V)`.

    Heads of Q share heads of V in runs (`iq2 / rv2`); the mask repeats over heads and batch by modulo. `f16_parts`:
    round the sum of each of so many parts of the cells to F16 after each cell; 0: of none. `weights` is the type of
    what such a sum multiplies V by.
    """
    heads = kq.shape[1]
    kq, hidden = _scores(node, kq, mask)
    top = kq.max(-1, keepdims=True, initial=-np.inf)
    sink = None if sinks is None else sinks.reshape(-1)[:heads, None, None]
    if sink is not None:
        top = np.maximum(top, sink)
    p = np.exp(kq - np.where(np.isneginf(top), 0.0, top))
    total = p.sum(-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - top)
    if f16_parts:
        out = np.zeros((*kq.shape[:3], v.shape[-1]))
        size = -(-kq.shape[-1] // f16_parts)
        for cells in (slice(i, i + size) for i in range(0, kq.shape[-1], size)):
            own, seen = kq[..., cells], None if hidden is None else hidden[..., cells]
            last = own.max(-1, keepdims=True)
            out += _added_up(own, v[:, :, cells], seen, weights) * np.where(np.isneginf(last), 0.0, np.exp(last - top))
    else:
        out = _weighted(p, v, hidden)
    return np.where(total == 0, 0.0, out / total).swapaxes(1, 2)


def _flash_attn_ext(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    (q, q_raw), (k, k_raw), (v, v_raw) = (operand(node, src, i) for i in range(3))
    to, parts = arithmetic.flash_attn, int(arithmetic.flash_attn_sum.get(v.type.name) == F16.name)
    tiled = 0 < arithmetic.flash_attn_tile <= q.ne[1] and v.ne[0] % arithmetic.flash_attn_step == 0
    floats = k.type is v.type and k.type in (F32, F16)
    if tiled and floats:
        to, parts = {}, 0
    elif floats and q.ne[1] == q.ne[3] == 1 and k.ne[1] >= _SPLIT:
        parts *= arithmetic.flash_attn_parts
    kq = Activations(arithmetic, to, k.type, q.type, q_raw).times(k.type, k_raw)
    mask, sinks = optional(node, src, 3), optional(node, src, 4)
    values = narrowed(arithmetic, v.type, load(v.type, v_raw))
    weights = np.float16 if arithmetic.flash_attn_weights == F16.name else np.float32
    store(node.type, dst, attend(node, kq, values, mask, sinks, f16_parts=parts, weights=weights))


def _soft_max(node: Tensor, x: Values, mask: Values | None = None, sinks: Values | None = None) -> Values:
    """Compute softmax(scale x + slope mask); `sinks` adds a logit per head without output.

    A row of only -inf is NaN, as in `ggml_compute_forward_soft_max_f32`, unless there is a sink.
    """
    scale, max_bias, heads = node.params.scale, node.params.max_bias, x.shape[1]
    slopes = np.broadcast_to(alibi_slopes(max_bias, heads)[:, None, None], (len(x), heads, x.shape[2], 1))
    if mask is not None:
        shape = (*x.shape[:2], min(mask.shape[2], x.shape[2]), x.shape[3])
        mask = np.broadcast_to(repeated(mask[:, :, : x.shape[2]], shape), x.shape)
    if sinks is not None:
        sinks = np.broadcast_to(sinks[0, 0, 0, :heads, None, None], slopes.shape)
    for at in blocks(x.shape):
        rows = x[at]
        rows *= scale
        if mask is not None:
            rows += slopes[at] * mask[at]
        top = rows.max(-1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[at])
        rows -= top
        np.exp(rows, out=rows)
        total = rows.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[at] - top)
        rows /= total
    return x


def _diag_mask(value: float, node: Tensor, x: Values) -> NDArray[Any]:
    """Set `value` right of the diagonal that is shifted by `n_past`."""
    above = np.arange(node.ne[0]) > node.params.n_past + np.arange(node.ne[1])[:, None]
    return np.where(above, value, x)


def _lightning_indexer(node: Tensor, q: Values, k: Values, weights: Values, mask: Values) -> Values:
    """Compute `dst[j, t] = sum_h max(q_ht k_j, 0) weights_ht + mask[j, t]`."""
    keys = k[:, :, 0]  # s, n_kv, n
    scores = np.maximum(q @ keys.swapaxes(-1, -2)[:, None], 0)  # s, n_t, heads, n_kv
    y: Values = (scores * weights[:, 0][..., None]).sum(-2)[:, None] + np.tile(mask, (node.ne[3] // len(mask), 1, 1, 1))
    return y


def _hc_comb(node: Tensor, mixes: Values, scale: Values, base: Values) -> Values:
    eps, n_iter, hc = node.params.eps, node.params.n_iter, node.ne[0]
    x: Values = (mixes * scale[0, 0, 0, 2] + base)[0, 0, :, 2 * hc :].reshape(-1, hc, hc)
    x = np.exp(x - x.max(-1, keepdims=True))
    x = x / x.sum(-1, keepdims=True) + eps
    x = x / (x.sum(-2, keepdims=True) + eps)
    for _ in range(n_iter - 1):
        x = x / (x.sum(-1, keepdims=True) + eps)
        x = x / (x.sum(-2, keepdims=True) + eps)
    return x[None]


def _hc_pre(node: Tensor, x: Values, weights: Values) -> Values:
    share: Values = 1 / (1 + np.exp(-weights[0])) if node.params.gated else weights[0, 0][..., None]
    y: Values = (x[0] * share).sum(-2) * node.params.scale
    return y[None, None]


def _hc_post(_: Tensor, x: Values, residual: Values, post: Values, comb: Values | None = None) -> Values:
    """Compute `dst[:, d, t] = x[:, t] post[d, t] + sum_s residual[:, s, t] comb[d, s, t]`."""
    update = x[0, 0][:, None, :] * post[0, 0][..., None]
    mixed = residual[0] if comb is None else comb[0].swapaxes(-1, -2) @ residual[0]
    y: Values = (update + mixed)[None]
    return y


_STREAMS = Takes((ONLY_F32,) * 4, ONLY_F32)

TABLE: Table = {
    "SOFT_MAX": (Takes((FLOAT, FLOAT, ONLY_F32)), in_float64(_soft_max)),
    "FLASH_ATTN_EXT": (Takes((FLOAT, VALUES, VALUES, FLOAT, ONLY_F32), ONLY_F32), _flash_attn_ext),
    "DIAG_MASK_INF": (ELEMENT, in_float64(partial(_diag_mask, -np.inf))),
    "DIAG_MASK_ZERO": (ELEMENT, in_float64(partial(_diag_mask, 0.0))),
    "LIGHTNING_INDEXER": (
        Takes((ONLY_F32, VALUES, ONLY_F32, frozenset({F16})), ONLY_F32),
        in_float64(_lightning_indexer),
    ),
    "DSV4_HC_COMB": (_STREAMS, in_float64(_hc_comb)),
    "DSV4_HC_PRE": (_STREAMS, in_float64(_hc_pre)),
    "DSV4_HC_POST": (_STREAMS, in_float64(_hc_post)),
}
