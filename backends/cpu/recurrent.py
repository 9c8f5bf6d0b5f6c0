"""Ops with a state, computed token by token.

The result is the outputs and then the new states. A state that an op leaves unwritten (GATED_DELTA_NET and SSM_SCAN
with more states requested than tokens) is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor

from .takes import ONLY_F32, ONLY_I32, Table, Takes
from .values import Values, checked_index, load, operand, store


def _values(node: Tensor, src: Sources, n: int) -> Iterator[Values]:
    for i in range(n):
        t, raw = operand(node, src, i)
        yield load(t.type, raw)


def _finish(node: Tensor, dst: Raw, y: Values, states: list[Values]) -> None:
    """Store `y` and then each of `states` in `dst`, which is contiguous."""
    flat, at = dst.reshape(-1), 0
    for part in (y, *states):
        store(node.type, flat[at : at + part.size], part.reshape(-1))
        at += part.size


def _softplus(x: Values) -> Values:
    """Compute `ggml_compute_softplus_f32`: x itself beyond 20."""
    y: Values = np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))
    return y


def _ssm_scan(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `s = exp(dt A) s + B x dt`, `y = s C`; head h in group `h / (n_head / n_group)`."""
    s, x, dt, a, b, c = _values(node, src, 6)
    ids = checked_index(operand(node, src, 6)[1].reshape(-1), s.shape[0], "src[6]", "states, ne[3] of src[0]")
    n_t, n_head = x.shape[1:3]
    step = _softplus(dt[0])  # n_s, n_t, n_head
    per_group = n_head // b.shape[2]
    b, c = (np.repeat(v, per_group, axis=2)[:, :, :, None, :] for v in (b, c))
    state, y, states = s[ids], np.empty_like(x), []
    for t in range(n_t):
        decay = np.exp(step[:, t, :, None] * a[0, 0])
        state = state * decay[:, :, None] + b[:, t] * (x[:, t] * step[:, t, :, None])[..., None]
        y[:, t] = (state * c[:, t]).sum(-1)
        states.append(state)
    _finish(node, dst, y, _last(states, node.params.K))


def _last(states: list[Values], n: int) -> list[Values]:
    """Return the last `n` states, latest first."""
    return states[::-1][:n]


def _sequences(node: Tensor, src: Sources, which: tuple[int, ...], last: int) -> tuple[Values, ...]:
    """Return src `which` as (n_seqs, tokens, H, S) and state src `last` as (n_seqs, H, S, S)."""
    shape_of, _ = operand(node, src, which[0])
    size, heads, tokens, _ = shape_of.ne
    n_seqs = operand(node, src, last)[0].ne[1]
    out = []
    for i in (*which, last):
        t, raw = operand(node, src, i)
        shape = (n_seqs, heads, size, size) if i == last else (n_seqs, tokens // n_seqs, heads, size)
        out.append(load(t.type, raw).reshape(shape))
    return tuple(out)


def _wkv6(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `y_j = sum_i r_i (tf_i k_i v_j + s_ij)`, then `s_ij = td_i s_ij + k_i v_j`."""
    k, v, r, td, state = _sequences(node, src, (0, 1, 2, 4), 5)
    t_, raw = operand(node, src, 3)
    tf = load(t_.type, raw).reshape(k.shape[2:])
    y = np.empty_like(v)
    for t in range(k.shape[1]):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        y[:, t] = (r[:, t, :, :, None] * (tf[:, :, None] * kv + state)).sum(-2)
        state = td[:, t, :, :, None] * state + kv
    _finish(node, dst, y, [state])


def _wkv7(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `s_ij = w_j s_ij + v_i k_j + b_j sum_l s_il a_l`, then `y_i = sum_j s_ij r_j`."""
    r, w, k, v, a, b, state = _sequences(node, src, (0, 1, 2, 3, 4, 5), 6)
    y = np.empty_like(v)
    for t in range(k.shape[1]):
        removed = (state * a[:, t, :, None, :]).sum(-1, keepdims=True)
        state = w[:, t, :, None, :] * state + v[:, t, :, :, None] * k[:, t, :, None, :] + removed * b[:, t, :, None, :]
        y[:, t] = (state * r[:, t, :, None, :]).sum(-1)
    _finish(node, dst, y, [state])


def _gated_linear_attn(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `s_ij = g_i s_ij + k_i v_j`, then `y_j = scale sum_i q_i s_ij`."""
    k, v, q, g, state = _sequences(node, src, (0, 1, 2, 3), 4)
    y = np.empty_like(v)
    for t in range(k.shape[1]):
        state = g[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        y[:, t] = (q[:, t, :, :, None] * state).sum(-2) * node.params.scale
    _finish(node, dst, y, [state])


def _gated_delta_net(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute the gated delta rule token by token.

    `s_ji = exp(g_i) s_ji`, `d_j = beta (v_j - sum_i s_ji k_i)`, `s_ji += d_j k_i`, `y_j = sum_i s_ji q_i / sqrt(S)`.
    Head h reads head `h % heads` of q and k, sequence s their sequence `s / (n_seqs / seqs)`.
    """
    q, k, v, g, beta, state = _values(node, src, 6)
    n_s, n_t, heads, size = v.shape
    q, k = (np.tile(np.repeat(x, n_s // x.shape[0], 0), (1, 1, heads // x.shape[2], 1)) for x in (q, k))
    y, states = np.empty_like(v), []
    for t in range(n_t):
        state = state * np.exp(g[:, t])[:, :, None, :]
        delta = (v[:, t] - (state * k[:, t, :, None, :]).sum(-1)) * beta[:, t]
        state = state + delta[..., None] * k[:, t, :, None, :]
        y[:, t] = (state * q[:, t, :, None, :]).sum(-1) / np.sqrt(size)
        states.append(state)
    _finish(node, dst, y, _last(states, node.params.K))


_LINEAR = Takes((ONLY_F32,) * 7, ONLY_F32)

TABLE: Table = {
    "SSM_SCAN": (Takes((*(ONLY_F32,) * 6, ONLY_I32), ONLY_F32), _ssm_scan),
    "RWKV_WKV6": (_LINEAR, _wkv6),
    "RWKV_WKV7": (_LINEAR, _wkv7),
    "GATED_LINEAR_ATTN": (_LINEAR, _gated_linear_attn),
    "GATED_DELTA_NET": (_LINEAR, _gated_delta_net),
}
