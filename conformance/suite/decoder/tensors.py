"""Every weight of a decoder: llama.cpp's name, type and `ne`."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.ggml.tensor import Dims, dims
from conformance.ggml.types import F32, GGMLType

from .config import Hparams

Spec = tuple[GGMLType, Dims]


def weight_shapes(h: Hparams) -> dict[str, Spec]:
    """Every weight by llama.cpp's name -> its type and `ne`."""
    shapes = {"token_embd.weight": (h.type_of("token_embd"), dims(h.n_embd, h.n_vocab))}
    if h.rope_freqs:
        shapes["rope_freqs.weight"] = (F32, dims(h.n_embd_head // 2))
    for il in range(h.n_layer):
        shapes |= {f"blk.{il}.{name}": spec for name, spec in _layer(h, il)}
    shapes |= dict(_norm(h, "output_norm"))
    if not h.tied:
        shapes["output.weight"] = (h.type_of("output"), dims(h.n_embd, h.n_vocab))
    return shapes


def _layer(h: Hparams, il: int) -> Iterator[tuple[str, Spec]]:
    yield from _norm(h, "attn_norm")
    yield from _norm(h, "ffn_norm")
    yield from _shortconv(h) if h.is_recr(il) else _attention(h)
    yield from _experts(h) if h.n_expert else _ffn(h)
    if h.post_norm:
        yield from _norm(h, "post_attention_norm")
        yield from _norm(h, "post_ffw_norm")


def _attention(h: Hparams) -> Iterator[tuple[str, Spec]]:
    sizes = {"attn_q": h.n_head * h.n_embd_head, "attn_k": h.n_embd_gqa, "attn_v": h.n_embd_v_gqa}
    if h.fused_qkv:
        sizes = {"attn_qkv": sum(sizes.values())}
    for role, n in sizes.items():
        yield from _matrix(h, role, dims(h.n_embd, n), bias=h.qkv_bias)
    yield from _matrix(h, "attn_output", dims(h.n_head * h.head_v, h.n_embd), bias=h.out_bias)
    if h.qk_norm:
        yield "attn_q_norm.weight", (F32, dims(h.n_embd_head))
        yield "attn_k_norm.weight", (F32, dims(h.n_embd_head))
    if h.sinks:
        yield "attn_sinks.weight", (F32, dims(h.n_head))


def _shortconv(h: Hparams) -> Iterator[tuple[str, Spec]]:
    yield "shortconv.conv.weight", (F32, dims(h.n_shortconv, h.n_embd))
    yield "shortconv.in_proj.weight", (h.type_of("in_proj"), dims(h.n_embd, 3 * h.n_embd))
    yield "shortconv.out_proj.weight", (h.type_of("out_proj"), dims(h.n_embd, h.n_embd))


def _ffn(h: Hparams) -> Iterator[tuple[str, Spec]]:
    for role in ("ffn_gate", "ffn_up") if h.ffn != "gelu" else ("ffn_up",):
        yield from _matrix(h, role, dims(h.n_embd, h.n_ff), bias=h.ffn_bias)
    yield from _matrix(h, "ffn_down", dims(h.n_ff, h.n_embd), bias=h.ffn_bias)


def _experts(h: Hparams) -> Iterator[tuple[str, Spec]]:
    yield from _matrix(h, "ffn_gate_inp", dims(h.n_embd, h.n_expert), bias=h.ffn_bias)
    if h.probs_bias:
        yield "exp_probs_b.bias", (F32, dims(h.n_expert))
    for role in ("ffn_gate_exps", "ffn_up_exps") if h.ffn != "gelu" else ("ffn_up_exps",):
        yield from _matrix(h, role, dims(h.n_embd, h.n_ff, h.n_expert), bias=h.ffn_bias)
    yield from _matrix(h, "ffn_down_exps", dims(h.n_ff, h.n_embd, h.n_expert), bias=h.ffn_bias)


def _matrix(h: Hparams, role: str, ne: Dims, *, bias: bool) -> Iterator[tuple[str, Spec]]:
    """A matrix, or one per expert, and its bias: one element per row."""
    yield f"{role}.weight", (h.type_of(role), ne)
    if bias:
        yield f"{role}.bias", (F32, dims(*ne[1:]))


def _norm(h: Hparams, role: str) -> Iterator[tuple[str, Spec]]:
    name = h.tensors.get(role, role)
    yield f"{name}.weight", (F32, dims(h.n_embd))
    if h.norm == "layer":
        yield f"{name}.bias", (F32, dims(h.n_embd))
