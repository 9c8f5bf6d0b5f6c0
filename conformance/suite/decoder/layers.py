"""Sublayers of a decoder: cached attention, feed-forwards, experts and short convolutions.

Each maps [n_embd, n_tokens] to the same shape. Names in backquotes are llama.cpp's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.ops.matmul import OP_HINT, PREC
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor, is_contiguous, nelements, row_size
from conformance.ggml.types import F16, F32, GGMLType

from .config import Cparams, Hparams
from .kv import Cache, Writer
from .memory import Place, Range, Ubatch

B = Builder()


@dataclass(slots=True)
class Sketch:
    """A graph under construction: its model, context, ubatch, weights and caches."""

    h: Hparams
    c: Cparams
    weights: Mapping[str, Tensor]
    cache: Cache
    ubatch: Ubatch
    place: Place
    gf: Expansion = field(default_factory=Expansion)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Leaves that a trajectory fills, by llama.cpp's name; with `_swa` for sliding windows."""

    def w(self, name: str) -> Tensor:
        """Return a weight by Llama's name, without suffix."""
        head, dot, role = name.rpartition(".")
        return self.weights[f"{head}{dot}{self.h.tensors.get(role, role)}.weight"]

    def b(self, name: str) -> Tensor | None:
        """Return a bias, or None."""
        head, dot, role = name.rpartition(".")
        return self.weights.get(f"{head}{dot}{self.h.tensors.get(role, role)}.bias")

    def input(self, name: str, type_: GGMLType, *ne: int, key: str = "") -> Tensor:
        """Add a leaf with new bytes in each graph."""
        ne0, ne1, ne2, ne3 = (*ne, *(1,) * (4 - len(ne)))
        t = B.set_name(B.new_tensor_4d(type_, ne0, ne1, ne2, ne3), name)
        B.set_input(t)
        self.inputs[key or name] = t
        return t

    def cb(self, t: Tensor, name: str, il: int) -> Tensor:
        """Give a node the architecture's name."""
        label = self.h.labels.get(name, name)
        if label is None:
            return t
        return B.set_name(t, label if il < 0 else f"{label}-{il}")

    def norm(self, cur: Tensor, weight: str, name: str, il: int, *, rms: bool = False) -> Tensor:
        """Build a norm like `build_norm`."""
        rms = rms or self.h.norm == "rms"
        cur = B.rms_norm(cur, self.h.eps) if rms else B.norm(cur, self.h.eps)
        cur = B.mul(B.set_name(cur, "norm" if il < 0 else f"norm-{il}"), self.w(weight))
        bias = self.b(weight)
        if bias is not None:
            cur = B.add(self.cb(cur, "norm_w", il), bias)
        return self.cb(cur, name, il)

    def mul_mat(self, weight: str, cur: Tensor, name: str, il: int, biased: str = "") -> Tensor:
        """Build a product and bias like `build_lora_mm`; `name` and `biased` are the node names."""
        cur = self.cb(B.mul_mat(self.w(weight), cur), name, il)
        bias = self.b(weight)
        return cur if bias is None else self.cb(B.add(cur, bias), biased or name, il)


def rope(
    h: Hparams, weights: Mapping[str, Tensor], cur: Tensor, pos: Tensor, il: int, *, inplace: bool = False
) -> Tensor:
    """Apply `ggml_rope_ext`, or `ggml_rope_ext_inplace`, with the parameters of layer `il`."""
    turn = B.rope_ext_inplace if inplace else B.rope_ext
    freqs = weights.get("rope_freqs.weight")
    mode = ROPE_TYPE[h.rope]
    return turn(cur, pos, freqs, h.n_embd_head, mode, h.n_ctx_orig, h.base_of(il), 1.0, 0.0, 1.0, 32.0, 1.0)


def inverse(x: float) -> float:
    """Return `1.0f / x` in C's float."""
    return float(np.float32(1) / np.float32(x))


def root(x: float) -> float:
    """Return `sqrtf(x)`."""
    return float(np.sqrt(np.float32(x)))


def keyed(name: str, *, swa: bool) -> str:
    """Return the `Sketch.inputs` key of an input of full or sliding-window attention."""
    return f"{name}_swa" if swa else name


def attention(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """Build cached attention like `build_attn`."""
    h, swa = g.h, g.h.is_swa(il)
    q, k, v = _qkv(g, cur, il)
    if h.qk_norm:
        q = g.norm(q, f"blk.{il}.attn_q_norm", "Qcur_normed", il, rms=True)
        k = g.norm(k, f"blk.{il}.attn_k_norm", "Kcur_normed", il, rms=True)
    if h.rope != "NONE":
        pos = g.inputs["inp_pos"]
        q = g.cb(rope(h, g.weights, q, pos, il), "Qcur_rope", il)
        k = g.cb(rope(h, g.weights, k, pos, il), "Kcur_rope", il)
    if h.scaled_q:
        q = B.scale(q, inverse(root(h.n_embd_head)))
    rot_k, rot_v = (g.inputs.get(keyed(f"attn_inp_{x}_rot", swa=swa)) for x in "kv")
    if rot_k is not None:
        q, k = hadamard(q, rot_k), hadamard(k, rot_k)
    if rot_v is not None:
        v = hadamard(v, rot_v)
    k_idxs, v_idxs = (g.inputs.get(keyed(f"attn_inp_{x}_idxs", swa=swa)) for x in "kv")
    part = g.place.part(swa=swa)
    writer = Writer(g.cache, part.slots, k_idxs, v_idxs)
    for t in (q, k, v) if h.n_swa else (q, v, k):
        g.gf.expand(t)
    for t in (*writer.write_k(k, il), *writer.write_v(v, il)):
        g.gf.expand(t)
    cur = _mha(g, q, g.cache.get_k(il, part.n_kv, part.slots), g.cache.get_v(il, part.n_kv, part.slots), il)
    g.gf.expand(cur)
    g.cb(cur, "kqv_out", il)
    if rot_v is not None:
        cur = hadamard(cur, rot_v)
    cur = B.mul_mat(g.w(f"blk.{il}.attn_output"), cur)
    bias = g.b(f"blk.{il}.attn_output")
    return g.cb(cur if bias is None else B.add(cur, bias), "attn_out", il)


def _qkv(g: Sketch, cur: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
    """Build Q, K and V like `build_qkv`: [head, heads, n_tokens] each."""
    h = g.h
    shapes = {"Q": (h.n_embd_head, h.n_head), "K": (h.n_embd_head, h.n_head_kv), "V": (h.head_v, h.n_head_kv)}
    heads = []
    if h.fused_qkv:
        qkv = g.mul_mat(f"blk.{il}.attn_qkv", cur, "wqkv", il, "wqkv_b")
        first = 0
        for x, (head, n) in shapes.items():
            nb1, offset = row_size(qkv.type, head), row_size(qkv.type, first)
            heads.append(g.cb(B.view_3d(qkv, head, n, g.ubatch.n_tokens, nb1, qkv.nb[1], offset), f"{x}cur", il))
            first += head * n
    else:
        products = [g.mul_mat(f"blk.{il}.attn_{x.lower()}", cur, f"{x}cur", il) for x in shapes]
        for (x, (head, n)), product in zip(shapes.items(), products, strict=True):
            heads.append(g.cb(B.reshape_3d(product, head, n, g.ubatch.n_tokens), f"{x}cur", il))
    return heads[0], heads[1], heads[2]


def _mha(g: Sketch, q: Tensor, k: Tensor, v: Tensor, il: int) -> Tensor:
    """Build `build_attn_mha`: q [head, heads, n_tokens], K, V views -> [heads * head, n_tokens]."""
    h = g.h
    n_stream = k.ne[3]
    n = q.ne[2] // n_stream
    q = B.view_4d(q, q.ne[0], q.ne[1], n, n_stream, q.nb[1], q.nb[2], q.nb[2] * n, 0)
    q, k, v = (B.permute(x, 0, 2, 1, 3) for x in (q, k, v))
    mask = g.inputs[keyed("attn_inp_kq_mask", swa=h.is_swa(il))]
    scale = 1.0 if h.scaled_q else inverse(root(h.n_embd_head))
    sinks = g.w(f"blk.{il}.attn_sinks") if h.sinks else None
    if g.c.flash_attn:
        k, v = (B.cast(x, F16) if x.type is F32 else x for x in (k, v))
        cur = B.flash_attn_ext(q, k, v, mask, scale, h.alibi, h.attn_softcap)
        B.flash_attn_ext_add_sinks(cur, sinks)
        B.prec_set_acc(cur, PREC["F32"])
        return B.reshape_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
    kq = g.cb(B.mul_mat(k, q), "kq", il)
    B.prec_set_acc(kq, PREC["F32"])
    if h.attn_softcap:
        kq = g.cb(B.scale(kq, inverse(h.attn_softcap)), "kq_scaled_1", il)
        kq = g.cb(B.tanh(kq), "kq_tanh", il)
        kq = g.cb(B.scale(kq, h.attn_softcap), "kq_scaled_2", il)
    kq = g.cb(B.soft_max_ext(kq, mask, scale, h.alibi), "kq_soft_max", il)
    B.soft_max_add_sinks(kq, sinks)
    kqv = g.cb(B.mul_mat(v, kq), "kqv", il)
    cur = B.permute(kqv, 0, 2, 1, 3)
    return B.cont_2d(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])


def hadamard(cur: Tensor, rot: Tensor) -> Tensor:
    """Multiply like `llama_mul_mat_hadamard`."""
    n = rot.ne[0]
    flat = B.reshape_2d if is_contiguous(cur) else B.cont_2d
    product = B.mul_mat(rot, flat(cur, n, nelements(cur) // n))
    B.mul_mat_set_hint(product, OP_HINT["SRC0_IS_HADAMARD"])
    return B.reshape_4d(product, *cur.ne)


OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
"""Constants of gpt-oss's SwiGLU."""

GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": B.swiglu_split,
    "geglu": B.geglu_split,
    "swiglu_oai": lambda gate, up: B.swiglu_oai(gate, up, OAI_ALPHA, OAI_LIMIT),
}
"""Name of a feed-forward -> its function of gate and up."""


def ffn(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """Build a feed-forward like `build_ffn`."""
    up = g.mul_mat(f"blk.{il}.ffn_up", cur, "ffn_up", il, "ffn_up_b")
    if g.h.ffn in GATED:
        gate = g.mul_mat(f"blk.{il}.ffn_gate", cur, "ffn_gate", il, "ffn_gate_b")
        cur = g.cb(GATED[g.h.ffn](gate, up), f"ffn_{g.h.ffn}", il)
    else:
        cur = g.cb(B.gelu(up), "ffn_gelu", il)
    cur = B.mul_mat(g.w(f"blk.{il}.ffn_down"), cur)
    bias = g.b(f"blk.{il}.ffn_down")
    if bias is not None:
        cur = B.add(g.cb(cur, "ffn_down", il), bias)
    return g.cb(cur, "ffn_out", il)


_LEAST_SUM = 6.103515625e-5
"""Minimum sum by which weights are divided: the smallest normal F16."""


def experts(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """Build a mixture of experts like `build_moe_ffn`."""
    h, n = g.h, cur.ne[1]
    logits = g.mul_mat(f"blk.{il}.ffn_gate_inp", cur, "ffn_moe_logits", il, "ffn_moe_logits_biased")
    chosen, probs = _choose(g, logits, il)
    weights = _expert_weights(g, B.get_rows(B.reshape_3d(probs, 1, h.n_expert, n), chosen), il)
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
    """Return each token's experts, I32 [used, n], largest first, and scores, F32 [n_expert, n]."""
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


def _expert_weights(g: Sketch, weights: Tensor, il: int) -> Tensor:
    """Return the weights of the chosen experts, F32 [1, used, n]."""
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


_LABEL = "model.layers.{{}}.conv.{}"
"""llama.cpp leaves the braces unformatted."""


def shortconv(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """Build LFM2's short convolution (`build_rs`) over B * x; `in_proj` gives B, C and x."""
    h, rows = g.h, g.place.recr
    if rows is None:
        raise UsageError("decoder: a short convolution needs recurrent states")
    n_seqs = len(g.ubatch.seq_ids)
    n = g.ubatch.n_tokens // n_seqs
    d_conv, n_embd = h.n_shortconv - 1, h.n_embd
    cur = B.reshape_3d(cur, n_embd, n, n_seqs)
    bcx = g.cb(B.mul_mat(g.w(f"blk.{il}.shortconv.in_proj"), cur), _LABEL.format("in_proj"), il)
    b, c, x = (B.view_3d(bcx, n_embd, n, n_seqs, *bcx.nb[1:3], i * n_embd * bcx.nb[0]) for i in range(3))
    bx = B.transpose(B.mul(b, x))
    state = g.cache.r[il]
    before = B.reshape_3d(_states(g, state, rows, n_seqs), d_conv, n_embd, n_seqs)
    bx = B.concat(before, bx, 0)
    last = B.view_3d(bx, d_conv, *bx.ne[1:3], *bx.nb[1:3], (bx.ne[0] - d_conv) * bx.nb[0])
    g.gf.expand(B.cpy(last, B.view_2d(state, d_conv * n_embd, n_seqs, state.nb[1], rows.head * state.nb[1])))
    conv = g.cb(B.ssm_conv(bx, g.w(f"blk.{il}.shortconv.conv")), _LABEL.format("conv"), il)
    out = B.mul_mat(g.w(f"blk.{il}.shortconv.out_proj"), B.mul(c, conv))
    return B.reshape_2d(g.cb(out, _LABEL.format("out_proj"), il), n_embd, n * n_seqs)


def _states(g: Sketch, state: Tensor, rows: Range, n_seqs: int) -> Tensor:
    """Return states [n_embd_r, n_seqs]: zeroes one row, gathers the ubatch's, copies the rest."""
    size = g.h.n_embd_r
    states = B.reshape_2d(state, size, state.ne[1])
    clears = rows.zero >= 0
    zero = B.view_1d(states, size * clears, rows.zero * states.nb[1] * clears)
    g.gf.expand(B.scale_inplace(zero, 0.0))
    gathered = B.get_rows(states, g.inputs["rs_s_copy"])
    output = B.view_2d(gathered, size, n_seqs, gathered.nb[1], 0)
    g.gf.expand(output)
    n_rs = len(rows.s_copy)
    extra = B.view_2d(gathered, size, n_rs - n_seqs, gathered.nb[1], n_seqs * gathered.nb[1])
    rest = B.view_2d(state, size, n_rs - n_seqs, state.nb[1], (rows.head + n_seqs) * state.nb[1])
    g.gf.expand(B.cpy(extra, rest))
    return output
