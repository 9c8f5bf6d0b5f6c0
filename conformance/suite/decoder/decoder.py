"""The graph of one ubatch, node for node as llama.cpp builds it (`models/*.cpp`, `llama-graph.cpp`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import I32

from .attention import attention
from .cells import Ubatch
from .config import Cparams, Hparams
from .experts import experts
from .ffn import ffn
from .inputs import inp_attn, inp_embd, inp_rs
from .kv import Cache
from .memory import Place
from .shortconv import shortconv
from .sketch import B, Sketch, inverse


@dataclass(frozen=True, slots=True)
class Decode:
    """A graph, and the leaves that a trajectory fills, by llama.cpp's names."""

    graph: Graph
    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    """The logits, last."""


def build(
    hparams: Hparams,
    cparams: Cparams,
    weights: Mapping[str, Tensor],
    cache: Cache,
    ubatch: Ubatch,
    place: Place,
) -> Decode:
    """The graph that decodes `ubatch`.

    Args:
        hparams: the model.
        cparams: the context.
        weights: the model's weights by name.
        cache: K and V, or the convolution's state, of each layer.
        ubatch: gives the numbers of tokens, sequences and outputs.
        place: gives the cells that are read, the streams, and for `write=cpy` the cells that are filled.
    """
    h = hparams
    g = Sketch(h, cparams, weights, cache, ubatch, place)
    cur = inp_embd(g)
    inp_rs(g)
    if h.rope != "NONE":
        g.input("inp_pos", I32, g.n_tokens)
    inp_attn(g)
    out_ids = g.input("out_ids", I32, int(ubatch.outputs.sum()))
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
    read = frozenset(graph.leafs())  # without attention nobody asks for positions
    return Decode(graph, {k: t for k, t in g.inputs.items() if t in read}, (logits,))


def _sum(h: Hparams, block: Tensor, residual: Tensor) -> Tensor:
    return B.add(residual, block) if h.residual_first else B.add(block, residual)


def _head(g: Sketch, cur: Tensor) -> Tensor:
    """`lm_head` and the softcap of its logits."""
    logits = B.mul_mat(g.w("token_embd" if g.h.tied else "output"), cur)
    if g.h.final_softcap:
        logits = B.scale(B.tanh(B.scale(logits, inverse(g.h.final_softcap))), g.h.final_softcap)
    g.cb(logits, "result_output", -1)
    B.set_output(logits)
    return logits
