"""Mixtures of experts: `build_moe_ffn`."""

from __future__ import annotations

import math

from conformance.ggml.tensor import Tensor

from .ffn import GATED
from .sketch import B, Sketch

_LEAST_SUM = 6.103515625e-5
"""Below this weights are not divided by their sum: the smallest normal F16."""


def experts(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """[n_embd, n] to the same."""
    h, n = g.h, cur.ne[1]
    logits = g.mul_mat(f"blk.{il}.ffn_gate_inp", cur, "ffn_moe_logits", il, "ffn_moe_logits_biased")
    chosen, probs = _choose(g, logits, il)
    weights = _weights(g, B.get_rows(B.reshape_3d(probs, 1, h.n_expert, n), chosen), il)
    g.gf.expand(weights)
    cur = B.reshape_3d(cur, h.n_embd, 1, n)
    up = _mul_mat_id(g, f"blk.{il}.ffn_up_exps", cur, chosen, "ffn_moe_up", il)
    if h.ffn in GATED:
        gate = _mul_mat_id(g, f"blk.{il}.ffn_gate_exps", cur, chosen, "ffn_moe_gate", il)
        cur = g.cb(GATED[h.ffn](gate, up), f"ffn_moe_{h.ffn}", il)
    else:
        cur = g.cb(B.gelu(up), "ffn_moe_gelu", il)
    cur = _mul_mat_id(g, f"blk.{il}.ffn_down_exps", cur, chosen, "ffn_moe_down", il)
    cur = g.cb(B.mul(cur, weights), "ffn_moe_weighted", il)
    g.gf.expand(cur)
    parts = [B.view_2d(cur, h.n_embd, n, cur.nb[2], i * cur.nb[1]) for i in range(h.n_expert_used)]
    for part in parts:
        g.gf.expand(part)
    out = parts[0]
    for part in parts[1:]:
        out = B.add(out, part)
        g.gf.expand(out)
    if len(parts) == 1:
        out = B.cont(out)
    return g.cb(out, "ffn_moe_out", il)


def _choose(g: Sketch, logits: Tensor, il: int) -> tuple[Tensor, Tensor]:
    """The experts of each token, I32 [used, n], largest first; and what their weights come from, F32 [n_expert, n]."""
    probs = logits
    if g.h.gating == "softmax":
        probs = B.soft_max(logits)
    elif g.h.gating == "sigmoid":
        probs = B.sigmoid(logits)
    by = g.cb(probs, "ffn_moe_probs", il)
    bias = g.weights.get(f"blk.{il}.exp_probs_b.bias")
    if bias is not None:
        by = g.cb(B.add(probs, bias), "ffn_moe_probs_biased", il)
    chosen = B.argsort_top_k(by, g.h.n_expert_used)
    if chosen.src[0] is not None:
        g.cb(chosen.src[0], "ffn_moe_argsort", il)
    return g.cb(chosen, "ffn_moe_topk", il), probs


def _weights(g: Sketch, weights: Tensor, il: int) -> Tensor:
    """F32 [1, used, n]."""
    h = g.h
    used, n = weights.ne[1:3]
    g.cb(weights, "ffn_moe_weights", il)
    if h.gating == "softmax_weight":
        weights = B.soft_max(B.reshape_2d(weights, used, n))
        weights = g.cb(B.reshape_3d(weights, 1, used, n), "ffn_moe_weights_softmax", il)
    if h.expert_norm:
        weights = B.reshape_2d(weights, used, n)
        total = g.cb(B.sum_rows(weights), "ffn_moe_weights_sum", il)
        total = g.cb(B.clamp(total, _LEAST_SUM, math.inf), "ffn_moe_weights_sum_clamped", il)
        weights = g.cb(B.div(weights, total), "ffn_moe_weights_norm", il)
        weights = B.reshape_3d(weights, 1, used, n)
    if h.expert_scale not in {0.0, 1.0}:
        weights = g.cb(B.scale(weights, h.expert_scale), "ffn_moe_weights_scaled", il)
    return weights


def _mul_mat_id(g: Sketch, weight: str, cur: Tensor, ids: Tensor, name: str, il: int) -> Tensor:
    cur = g.cb(B.mul_mat_id(g.w(weight), cur, ids), name, il)
    bias = g.b(weight)
    return cur if bias is None else g.cb(B.add_id(cur, bias, ids), f"{name}_biased", il)
