"""Shapes of a decoder's weights, and the bytes of weights and caches.

Bytes come from seeded streams, scaled like a real model's so that activations stay of order 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from conformance.case.streams import Stream
from conformance.ggml.tensor import Bytes, Dims, Tensor, dims, nelements
from conformance.ggml.types import F32, GGMLType
from conformance.suite.data import random_bytes

from .config import Hparams

Spec = tuple[GGMLType, Dims]


def weight_shapes(h: Hparams) -> dict[str, Spec]:
    """Return llama.cpp's name of every weight -> its type and `ne`."""
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
    """Yield a matrix, or one per expert, and its bias with one element per row."""
    yield f"{role}.weight", (h.type_of(role), ne)
    if bias:
        yield f"{role}.bias", (F32, dims(*ne[1:]))


def _norm(h: Hparams, role: str) -> Iterator[tuple[str, Spec]]:
    name = h.tensors.get(role, role)
    yield f"{name}.weight", (F32, dims(h.n_embd))
    if h.norm == "layer":
        yield f"{name}.bias", (F32, dims(h.n_embd))


_SELECTIVE = 1.5
"""Standard deviation of Q and K elements: logits have 2.25, so few cells get most attention."""
_GAIN = {
    "attn_q": _SELECTIVE, "attn_k": _SELECTIVE, "attn_output": 2.0, "ffn_down": 1.5,
    "attn_qkv": _SELECTIVE, "ffn_down_exps": 1.5, "out_proj": 2.0, "conv": 1.0, "ffn_gate_inp": 2.0,
}  # fmt: skip
"""Role -> standard deviation of the product with normalised activations; 1 for all others."""
_BIAS = 0.5
"""Standard deviation of a bias: significant compared with activations of 1."""
_UNIFORM = {
    "attn_sinks": (1.0, 5.0),  # among the largest logits of a row, for a significant share of attention
    "attn_q_norm": (_SELECTIVE - 0.5, _SELECTIVE + 0.5),
    "attn_k_norm": (_SELECTIVE - 0.5, _SELECTIVE + 0.5),
    "rope_freqs": (1.0, 8.0),
}
"""Role -> range of its elements; 0.5 to 1.5 for other norms."""
_SCALED = 3.0
"""Standard deviation of scaled embeddings, so that tied logits are near their softcap."""
_JUNK = 2.0
"""Ratio of the values in unused cells to K and V."""


def weight(case: str, h: Hparams, t: Tensor) -> Bytes:
    """Return the bytes of weight `t` of a model, from the random stream of its name."""
    role = t.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    # K has Q's stream, so its first head attends to its own token and those just before
    stream = Stream(case, t.name.replace("attn_k.weight", "attn_q.weight"))
    n = nelements(t)
    if t.name.endswith(".bias"):
        return stream.normal(n, _BIAS).astype(np.float32).view(np.uint8)
    if role in _UNIFORM or role.endswith("norm"):
        return stream.uniform(n, *_UNIFORM.get(role, (0.5, 1.5))).view(np.uint8)
    if role == "token_embd":
        return _embeddings(t, stream, _SCALED / h.embd_scale if h.embd_scale else 1.0)
    return random_bytes(t.type, stream, n, _GAIN.get(role, 1.0) / math.sqrt(t.ne[0]))


def _embeddings(t: Tensor, stream: Stream, std: float) -> Bytes:
    """Return rows whose first halves (whole blocks) are the same, so that positions matter."""
    rows = random_bytes(t.type, stream, nelements(t), std).reshape(t.ne[1], -1)
    common = t.ne[0] // t.type.blck_size // 2 * t.type.type_size
    rows[:, :common] = rows[0, :common]
    return rows.reshape(-1)


def cached(case: str, t: Tensor) -> tuple[Bytes, Bytes]:
    """Return bytes for used cells of a cache, and for unused ones, whose values are larger."""
    std = _SELECTIVE if t.name.startswith("cache_k") else 1.0
    used, junk = Stream(case, t.name), Stream(case, f"{t.name} unused")
    return random_bytes(t.type, used, nelements(t), std), random_bytes(t.type, junk, nelements(t), _JUNK * std)
