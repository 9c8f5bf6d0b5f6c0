"""Build the graphs of a context node for node like llama.cpp: a ubatch, or a position shift.

Follows `models/*.cpp`, `llama-graph.cpp` and, for the shift, `llama_kv_cache::build_graph_shift`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Expansion
from conformance.ggml.tensor import Tensor, new_tensor, row_size
from conformance.ggml.types import F16, F32, I32, I64

from .config import Cparams, Hparams, n_rot
from .layers import B, Sketch, attention, experts, ffn, hadamard, inverse, keyed, rope, shortconv


@dataclass(frozen=True, slots=True)
class Decode:
    """A graph, and the leaves that a trajectory fills, by llama.cpp's names."""

    graph: Graph
    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    """Logits last."""


def build(g: Sketch) -> Decode:
    """Build the graph that decodes the sketch's ubatch over the cells of its place."""
    h = g.h
    cur = _inp_embd(g)
    _inp_rs(g)
    if h.rope != "NONE":
        g.input("inp_pos", I32, g.ubatch.n_tokens)
    _inp_attn(g)
    out_ids = g.input("out_ids", I32, int(g.ubatch.outputs.sum()))
    for il in range(h.n_layer):
        residual = cur
        cur = g.norm(cur, f"blk.{il}.attn_norm", "attn_norm", il)
        cur = shortconv(g, cur, il) if h.is_recr(il) else attention(g, cur, il)
        if il == h.n_layer - 1:
            cur, residual = B.get_rows(cur, out_ids), B.get_rows(residual, out_ids)
        if h.post_norm:
            cur = g.norm(cur, f"blk.{il}.post_attention_norm", "attn_post_norm", il)
        ffn_inp = g.cb(_sum(h, cur, residual), "ffn_inp", il)
        cur = g.norm(ffn_inp, f"blk.{il}.ffn_norm", "ffn_norm", il)
        cur = experts(g, cur, il) if h.n_expert else ffn(g, cur, il)
        if h.post_norm:
            cur = g.norm(cur, f"blk.{il}.post_ffw_norm", "ffn_post_norm", -1)
        cur = g.cb(_sum(h, cur, ffn_inp), "l_out", il)
    if h.keeps_hidden:
        B.set_output(cur)
    cur = g.norm(cur, "output_norm", "result_norm", -1)
    B.set_output(cur)
    logits = _head(g, cur)
    g.gf.expand(logits)
    graph = g.gf.graph()
    read = frozenset(graph.leafs())  # without attention no node reads the positions
    return Decode(graph, {k: t for k, t in g.inputs.items() if t in read}, (logits,))


def _sum(h: Hparams, block: Tensor, residual: Tensor) -> Tensor:
    return B.add(residual, block) if h.residual_first else B.add(block, residual)


def _head(g: Sketch, cur: Tensor) -> Tensor:
    """Build `lm_head` and the softcap of its logits."""
    logits = B.mul_mat(g.w("token_embd" if g.h.tied else "output"), cur)
    if g.h.final_softcap:
        logits = B.scale(B.tanh(B.scale(logits, inverse(g.h.final_softcap))), g.h.final_softcap)
    g.cb(logits, "result_output", -1)
    B.set_output(logits)
    return logits


def _inp_embd(g: Sketch) -> Tensor:
    """Build `build_inp_embd`: embedding rows, and the uncomputed branch of a mixed batch."""
    tok_embd = g.w("token_embd")
    n = g.ubatch.n_tokens
    embd = B.get_rows(tok_embd, g.input("inp_tokens", I32, n))
    g.gf.expand(embd, compute=False)
    branches: tuple[Tensor, ...] = (embd,)
    if g.c.mixed:
        rows = B.get_rows(tok_embd, g.input("inp_mixed_tokens", I32, n))
        g.gf.expand(rows, compute=False)
        copy = B.dup(g.input("inp_mixed_embd", F32, g.h.n_embd, n))
        branches += (B.set_rows(copy, rows, g.input("inp_mixed_slots", I64, n)),)
    cur = g.cb(g.gf.select(branches, 0), "embd", -1)
    if g.h.embd_scale:
        cur = g.cb(B.scale(cur, g.h.embd_scale), "inp_scaled", -1)
    return cur


def _inp_attn(g: Sketch) -> None:
    """Add inputs like `build_attn_inp_kv(_iswa)`, per kind of layer in the model."""
    kinds = {g.h.is_swa(il) for il in range(g.h.n_layer) if not g.h.is_recr(il)}
    for swa in sorted(kinds):
        _inp_cells(g, swa=swa)
    for swa in sorted(kinds):
        for name, size in zip(("attn_inp_k_rot", "attn_inp_v_rot"), n_rot(g.h, g.c), strict=True):
            if size:
                g.input(name, F32, size, size, key=keyed(name, swa=swa))


def _inp_cells(g: Sketch, *, swa: bool) -> None:
    part, n = g.place.part(swa=swa), g.ubatch.n_tokens
    if g.c.write == "set_rows":
        g.input("attn_inp_k_idxs", I64, n, key=keyed("attn_inp_k_idxs", swa=swa))
        n_v = n * g.h.n_embd_v_gqa if g.c.v_trans else n
        g.input("attn_inp_v_idxs", I64, n_v, key=keyed("attn_inp_v_idxs", swa=swa))
    n_stream = 1 if g.c.kv_unified else len(part.slots.streams)
    type_ = F16 if g.c.flash_attn else F32
    key = keyed("attn_inp_kq_mask", swa=swa)
    g.input("attn_inp_kq_mask", type_, part.n_kv, n // n_stream, 1, n_stream, key=key)


def _inp_rs(g: Sketch) -> None:
    """Add the input of `build_rs_inp`: the source row of each state."""
    if g.place.recr is not None:
        g.input("rs_s_copy", I32, len(g.place.recr.s_copy))


def build_shift(h: Hparams, c: Cparams, weights: Mapping[str, Tensor], caches: Mapping[int, Tensor]) -> Decode:
    """Build the graph that rotates the K caches of layers, all with the same number of cells.

    Inputs: `k_shift`, the shift of each cell of all streams; `attn_inp_k_rot`, if K is rotated by a Hadamard matrix.
    """
    first = next(iter(caches.values()))
    inputs = {"k_shift": new_tensor(I32, first.ne[1] * first.ne[2])}
    size = n_rot(h, c)[0]
    if size:
        inputs["attn_inp_k_rot"] = new_tensor(F32, size, size, name="attn_inp_k_rot")
    for t in inputs.values():
        B.set_input(t)
    gf, results = Expansion(), []
    for il, cache in caches.items():
        results.append(_shift(h, weights, cache, il, inputs["k_shift"], inputs.get("attn_inp_k_rot")))
        gf.expand(results[-1])
    return Decode(gf.graph(), inputs, tuple(results))


def _shift(
    h: Hparams, weights: Mapping[str, Tensor], cache: Tensor, il: int, k_shift: Tensor, rot: Tensor | None
) -> Tensor:
    """Build `build_rope_shift`; llama.cpp has none for quantised caches without Hadamard matrix."""
    nb1, nb2 = row_size(cache.type, h.n_embd_head), row_size(cache.type, h.n_embd_gqa)
    k = B.view_3d(cache, h.n_embd_head, h.n_head_kv, cache.ne[1] * cache.ne[2], nb1, nb2, 0)
    if not cache.type.is_quantized:
        return rope(h, weights, k, k_shift, il, inplace=True)
    k_f32 = B.cast(k, F32)
    if rot is not None:
        k_f32 = hadamard(k_f32, rot)
    k_f32 = rope(h, weights, k_f32, k_shift, il)
    if rot is not None:
        k_f32 = hadamard(k_f32, rot)
    return B.cpy(k_f32, k)
