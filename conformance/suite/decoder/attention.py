"""Attention over the cache: `build_qkv`, `build_attn`, `build_attn_mha`."""

from __future__ import annotations

from conformance.ggml.ops.matmul import OP_HINT, PREC
from conformance.ggml.tensor import Tensor, is_contiguous, nelements, row_size
from conformance.ggml.types import F16, F32

from .inputs import keyed
from .kv import Writer
from .sketch import B, Sketch, inverse, root


def attention(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """One layer's attention: [n_embd, n_tokens] to the same."""
    h, swa = g.h, g.h.is_swa(il)
    q, k, v = _qkv(g, cur, il)
    if h.qk_norm:
        q = g.norm(q, f"blk.{il}.attn_q_norm", "Qcur_normed", il, rms=True)
        k = g.norm(k, f"blk.{il}.attn_k_norm", "Kcur_normed", il, rms=True)
    if h.rope != "NONE":
        pos = g.inputs["inp_pos"]
        q, k = g.cb(g.rope(q, pos), "Qcur_rope", il), g.cb(g.rope(k, pos), "Kcur_rope", il)
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
    """`build_qkv`: [head, heads, n_tokens] each."""
    h = g.h
    shapes = {"Q": (h.n_embd_head, h.n_head), "K": (h.n_embd_head, h.n_head_kv), "V": (h.head_v, h.n_head_kv)}
    heads = []
    if h.fused_qkv:
        qkv = g.mul_mat(f"blk.{il}.attn_qkv", cur, "wqkv", il, "wqkv_b")
        first = 0
        for x, (head, n) in shapes.items():
            nb1, offset = row_size(qkv.type, head), row_size(qkv.type, first)
            heads.append(g.cb(B.view_3d(qkv, head, n, g.n_tokens, nb1, qkv.nb[1], offset), f"{x}cur", il))
            first += head * n
    else:
        products = [g.mul_mat(f"blk.{il}.attn_{x.lower()}", cur, f"{x}cur", il) for x in shapes]
        for (x, (head, n)), product in zip(shapes.items(), products, strict=True):
            heads.append(g.cb(B.reshape_3d(product, head, n, g.n_tokens), f"{x}cur", il))
    return heads[0], heads[1], heads[2]


def _mha(g: Sketch, q: Tensor, k: Tensor, v: Tensor, il: int) -> Tensor:
    """`build_attn_mha`: q [head, heads, n_tokens], k and v views of the cache; to [heads * head, n_tokens]."""
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
    """`llama_mul_mat_hadamard`."""
    n = rot.ne[0]
    flat = B.reshape_2d if is_contiguous(cur) else B.cont_2d
    turned = B.mul_mat(rot, flat(cur, n, nelements(cur) // n))
    B.mul_mat_set_hint(turned, OP_HINT["SRC0_IS_HADAMARD"])
    return B.reshape_4d(turned, *cur.ne)
