"""FLASH_ATTN_EXT: softmax(scale Q K^T + slope mask) V in one op, any layout of K and V.

A KV cell whose mask is -inf takes no part, whatever K and V hold there; a row without any cell is zero, as in ggml.
(ggml's kernel for 64 tokens and more lets a NaN there through where other tokens of the tile see the cell's tile.)
`op_params[3]` (precision) and `op_params[4]` (`n_kv_max`, a bound on the finite mask entries of a row that lets a
backend skip work) change nothing in the exact value.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Kernel, Raw, Sources
from conformance.ggml import quants
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, F32, GGMLType, type_named

from .matmul import Activations
from .values import Values, alibi_slopes, load, operand, optional, repeated, store


def _scores(node: Tensor, kq: Values, mask: Values | None) -> tuple[Values, NDArray[np.bool_] | None]:
    """KQ with scale, softcap, ALiBi and mask, `(ne3, heads, n_tokens, n_kv)`, and where the mask is -inf."""
    scale, max_bias, softcap = (node.param_f32(i) for i in range(3))
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
    """P V per head of V, where an infinite or NaN cell of V counts only in the rows that see it."""
    batch, heads, tokens, n_kv = p.shape
    if v.shape[0] != batch:
        v = np.repeat(v, batch // v.shape[0], axis=0)
    flat = p.reshape(batch, v.shape[1], -1, n_kv)
    broken = ~np.isfinite(v)
    if hidden is None or not broken.any():
        return (flat @ v).reshape(batch, heads, tokens, -1)
    seen = np.broadcast_to(~hidden, p.shape).reshape(flat.shape)
    up, down = (_meet(seen & (flat > 0), v == infinity) for infinity in (np.inf, -np.inf))
    lost = _meet(seen, np.isnan(v)) | _meet(seen & (flat == 0), np.isinf(v)) | (up & down)
    exact = flat @ np.where(broken, 0.0, v)
    told = np.select([lost, up, down], [np.nan, np.inf, -np.inf], exact)
    return told.reshape(batch, heads, tokens, -1)


def _meet(rows: NDArray[np.bool_], cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether a row of `rows` and a column of `cells` have a cell in common."""
    return rows.astype(np.float64) @ cells.astype(np.float64) > 0


def _added_up(kq: Values, v: Values, hidden: NDArray[np.bool_] | None, keep: GGMLType) -> Values:
    """exp(kq - max) V, cell by cell, the sum rounded to `keep` after each: the online softmax of ggml's CPU.

    As in `ggml_compute_forward_flash_attn_ext_f16_one_chunk`, a new maximum first scales the sum so far, and that is
    rounded too. Steps between go through float32, as there.
    """
    batch, heads, tokens, n_kv = kq.shape
    groups = v.shape[1]
    top = np.maximum.accumulate(kq, axis=-1)
    before = np.concatenate([np.full_like(top[..., :1], -np.inf), top[..., :-1]], axis=-1)
    weight = np.exp(kq - top)
    scale = np.exp(before - top)
    if hidden is not None:
        weight, scale = np.where(hidden, 0.0, weight), np.where(hidden, 1.0, scale)
    shape = (batch, groups, heads // groups, tokens, 1)
    total = np.zeros((*shape[:-1], v.shape[-1]))
    seen = np.ones(kq.shape, bool) if hidden is None else np.broadcast_to(~hidden, kq.shape)
    for cell in range(n_kv):
        ms, vs = (a[..., cell].astype(np.float32).astype(np.float64).reshape(shape) for a in (scale, weight))
        if (ms != 1).any():
            total = _kept(total * ms, keep)
        if vs.any():
            added = _kept(total + v[:, :, None, None, cell] * vs, keep)
            total = np.where(seen[..., cell].reshape(shape), added, total)
    return total.reshape(batch, heads, tokens, -1)


def _kept(x: Values, keep: GGMLType) -> Values:
    return quants.roundtrip(keep, x).astype(np.float64)


def attend(
    node: Tensor, kq: Values, v: Values, mask: Values | None, sinks: Values | None, keep: GGMLType | None = None
) -> Values:
    """The value of a FLASH_ATTN_EXT node from `kq`, its Q K^T: shape `(ne3, n_tokens, heads, ne0 of V)`.

    Heads of Q share heads of V in runs (`iq2 / rv2`); the mask repeats over heads and batch by modulo. `keep` is the
    type that the sum is rounded to cell by cell, none for an exact one.
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
    if keep is None:
        out = _weighted(p, v, hidden)
    else:
        last = kq.max(-1, keepdims=True)
        out = _added_up(kq, v, hidden, keep) * np.where(np.isneginf(last), 0.0, np.exp(last - top))
    return np.where(total == 0, 0.0, out / total).swapaxes(1, 2)


def _flash_attn_ext(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    (q, q_raw), (k, k_raw), (v, v_raw) = (operand(node, src, i) for i in range(3))
    to, keep = arithmetic.flash_attn.get(k.type.name), arithmetic.flash_attn_sum.get(v.type.name)
    if 0 < arithmetic.flash_attn_tile <= q.ne[1] and k.type is v.type and k.type in (F32, F16):
        to, keep = None, None
    kq = Activations(to, arithmetic.quantize, k.type, q.type, q_raw).times(k.type, k_raw)
    mask, sinks = optional(node, src, 3), optional(node, src, 4)
    store(
        node.type, dst, attend(node, kq, load(v.type, v_raw), mask, sinks, None if keep is None else type_named(keep))
    )


def kernels(arithmetic: Arithmetic) -> dict[str, Kernel]:
    """Op -> kernel; Q is rounded first, and sums on the way, where `arithmetic` says so."""
    return {"FLASH_ATTN_EXT": partial(_flash_attn_ext, arithmetic)}
