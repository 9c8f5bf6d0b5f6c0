"""Graphs of trajectories whose caches grow: what lifting is tried on."""

from __future__ import annotations

from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F16, F32, I32, I64

B = Builder()


class Decoder:
    """An attention block over a cache that CPY fills through moving views, as llama.cpp's without SET_ROWS."""

    def __init__(self, head: int, heads: int, kv_heads: int, n_ctx: int, *, v_trans: bool, flat: bool) -> None:
        self.head, self.heads, self.kv_heads, self.n_ctx, self.v_trans = head, heads, kv_heads, n_ctx, v_trans
        embd, kv = head * heads, head * kv_heads
        self.wq, self.wk, self.wv = (new_tensor(F32, embd, n) for n in (embd, kv, kv))
        self.k, self.v = (new_tensor(F16, kv * n_ctx) if flat else new_tensor(F16, kv, n_ctx) for _ in "kv")

    def graph(self, n_past: int, n: int = 1, n_kv: int | None = None) -> Graph:
        """`n` tokens after `n_past`."""
        hd, heads, kvh, kv = self.head, self.heads, self.kv_heads, self.head * self.kv_heads
        n_kv = n_kv or min(self.n_ctx, -(-(n_past + n) // 256) * 256)
        x = new_tensor(F32, hd * heads, n, flags=1)
        pos = new_tensor(I32, n, flags=1)
        mask = new_tensor(F32, n_kv, n, flags=1)
        q = B.rope(B.reshape_3d(B.mul_mat(self.wq, x), hd, heads, n), pos, hd, 0)
        k = B.rope(B.reshape_3d(B.mul_mat(self.wk, x), hd, kvh, n), pos, hd, 0)
        v = B.mul_mat(self.wv, x)
        wk = B.cpy(k, B.view_1d(self.k, n * kv, 2 * kv * n_past))
        if self.v_trans:
            to = B.view_2d(self.v, n, kv, 2 * self.n_ctx, 2 * n_past)
            wv = B.cpy(B.transpose(v), to)
            vv = B.view_3d(self.v, n_kv, hd, kvh, 2 * self.n_ctx, 2 * self.n_ctx * hd, 0)
        else:
            wv = B.cpy(v, B.view_1d(self.v, n * kv, 2 * kv * n_past))
            vv = B.cont(B.permute(B.view_3d(self.v, hd, n_kv, kvh, 2 * kv, 2 * hd, 0), 1, 0, 2, 3))
        kk = B.view_3d(self.k, hd, n_kv, kvh, 2 * kv, 2 * hd, 0)
        kq = B.soft_max_ext(B.mul_mat(kk, B.permute(q, 0, 2, 1, 3)), mask, 0.1, 0.0)
        kqv = B.permute(B.mul_mat(vv, kq), 0, 2, 1, 3)
        out = B.cont_2d(kqv, hd * heads, n)
        g = B.build_forward_expand(wk, wv, B.add(out, x))
        g.validate()
        return g


class Streams:
    """Attention over a cache of several streams that SET_ROWS fills, as llama.cpp's without a unified cache."""

    def __init__(self, head: int, heads: int, kv_heads: int, n_ctx: int, n_stream: int) -> None:
        self.head, self.heads, self.kv_heads, self.n_ctx = head, heads, kv_heads, n_ctx
        embd, kv = head * heads, head * kv_heads
        self.wqkv = new_tensor(F32, embd, embd + 2 * kv)
        self.k, self.v = new_tensor(F16, kv, n_ctx, n_stream), new_tensor(F16, kv, n_ctx, n_stream)

    def graph(self, n_kv: int, n: int, first: int, count: int, n_out: int) -> Graph:
        """`n` tokens in each of `count` streams from `first` on; `n_out` of them want logits."""
        hd, heads, kvh, kv, n_all = self.head, self.heads, self.kv_heads, self.head * self.kv_heads, n * count
        x = new_tensor(F32, hd * heads, n_all, flags=1)
        pos, ids = new_tensor(I32, n_all, flags=1), new_tensor(I64, n_all, flags=1)
        mask = new_tensor(F16, n_kv, n, 1, count, flags=1)
        out_ids = new_tensor(I32, n_out, flags=1)
        qkv = B.mul_mat(self.wqkv, x)
        q, k, v = (
            B.view_3d(qkv, hd, h, n_all, 4 * hd, qkv.nb[1], 4 * at)
            for h, at in ((heads, 0), (kvh, hd * heads), (kvh, hd * heads + kv))
        )
        q, k = B.rope(q, pos, hd, 0), B.rope(k, pos, hd, 0)
        stored = [
            B.set_rows(B.reshape_2d(c, kv, c.ne[1] * c.ne[2]), B.view_2d(t, kv, n_all, t.nb[2], 0), ids)
            for c, t in ((self.k, k), (self.v, v))
        ]
        q = B.view_4d(q, hd, heads, n, count, q.nb[1], q.nb[2], q.nb[2] * n, 0)
        kk, vv = (
            B.view_4d(c, hd, kvh, n_kv, count, 2 * hd, 2 * kv, c.nb[2], first * c.nb[2]) for c in (self.k, self.v)
        )
        q, kk, vv = (B.permute(t, 0, 2, 1, 3) for t in (q, kk, vv))
        a = B.flash_attn_ext(q, kk, vv, mask, 0.1, 0.0, 0.0)
        y = B.add(B.reshape_2d(a, hd * heads, n_all), x)
        g = B.build_forward_expand(*stored, B.get_rows(y, out_ids))
        g.validate()
        return g
