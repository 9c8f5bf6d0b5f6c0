"""Bytes of weights and caches: seeded streams, scaled as a real model's so that activations stay of order 1."""

from __future__ import annotations

import math

import numpy as np

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.quants import from_float, random_blocks
from conformance.ggml.quants.blocks import BLOCK, SCALES
from conformance.ggml.tensor import Bytes, Tensor, nelements
from conformance.ggml.types import MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, GGMLType

from .config import Hparams

# fmt: off
_STD: dict[GGMLType, float] = {
    Q4_0: 0.44, Q4_1: 0.48, Q5_0: 0.44, Q5_1: 0.49, Q8_0: 0.44, MXFP4: 0.84, Q2_K: 0.32, Q3_K: 0.26, Q4_K: 0.20,
    Q5_K: 0.20, Q6_K: 0.25,
}
# fmt: on
"""Block type -> root mean square of what `random_blocks` gives, measured."""

_SELECTIVE = 1.5
"""Standard deviation of the elements of Q and K: logits then have 2.25, so that few cells get most of the attention."""
_GAIN = {
    "attn_q": _SELECTIVE, "attn_k": _SELECTIVE, "attn_output": 2.0, "ffn_down": 1.5,
    "attn_qkv": _SELECTIVE, "ffn_down_exps": 1.5, "out_proj": 2.0, "conv": 1.0, "ffn_gate_inp": 2.0,
}  # fmt: skip
"""Role -> standard deviation of what the weight makes of normalised activations; 1 for all others."""
_BIAS = 0.5
"""Standard deviation of a bias: enough to show, beside activations of 1."""
_SINKS = (1.0, 5.0)
"""Where sinks lie: among the largest logits of a row, so that they take a good part of its attention."""
_SCALED = 3.0
"""Standard deviation of embeddings that the model scales: tied logits then come near their softcap, and not over it."""
_JUNK = 2.0
"""How much larger than K and V is what an unused cell holds."""


def weight(case: str, h: Hparams, t: Tensor) -> Bytes:
    """The bytes of weight `t` of a model, from the stream of its name."""
    role = t.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    # the first head of K turns alike into alike: a head that looks at its own token and those just before
    stream = Stream(case, t.name.replace("attn_k.weight", "attn_q.weight"))
    n = nelements(t)
    if t.name.endswith(".bias"):
        return stream.normal(n, _BIAS).astype(np.float32).view(np.uint8)
    if role == "attn_sinks":
        return stream.uniform(n, *_SINKS).view(np.uint8)
    if role in {"attn_q_norm", "attn_k_norm"}:
        return stream.uniform(n, _SELECTIVE - 0.5, _SELECTIVE + 0.5).view(np.uint8)
    if role.endswith("norm"):
        return stream.uniform(n, 0.5, 1.5).view(np.uint8)
    if role == "rope_freqs":
        return stream.uniform(n, 1.0, 8.0).view(np.uint8)
    if role == "token_embd":
        return _embeddings(t, stream, _SCALED / h.embd_scale if h.embd_scale else 1.0)
    return random_bytes(t.type, stream, n, _GAIN.get(role, 1.0) / math.sqrt(t.ne[0]))


def _embeddings(t: Tensor, stream: Stream, std: float) -> Bytes:
    """Rows of that order whose first halves (whole blocks) are the same for all tokens, so that positions matter."""
    rows = random_bytes(t.type, stream, nelements(t), std).reshape(t.ne[1], -1)
    common = t.ne[0] // t.type.blck_size // 2 * t.type.type_size
    rows[:, :common] = rows[0, :common]
    return rows.reshape(-1)


def cached(case: str, t: Tensor) -> tuple[Bytes, Bytes]:
    """Bytes for a whole cache tensor: such as K, or V, leaves there, and what cells out of use may hold."""
    std = _SELECTIVE if t.name.startswith("cache_k") else 1.0
    used, junk = Stream(case, t.name), Stream(case, f"{t.name} unused")
    return random_bytes(t.type, used, nelements(t), std), random_bytes(t.type, junk, nelements(t), _JUNK * std)


def random_bytes(type_: GGMLType, stream: Stream, n: int, std: float) -> Bytes:
    """`n` values of about that standard deviation; of a block type random blocks, their scales shifted by a power of 2.

    Raises:
        UsageError: a block type whose scale is no F16 field.
    """
    if not type_.is_quantized:
        return from_float(type_, stream.normal(n, std)).view(np.uint8).reshape(-1)
    if type_ not in _STD:
        raise UsageError(f"weights of {type_} are not generated; known: {', '.join(t.name for t in _STD)}")
    blocks = random_blocks(type_, stream.words, n // type_.blck_size).view(BLOCK[type_])
    shift = round(math.log2(std / _STD[type_]))
    if type_ is MXFP4:
        blocks["e"] += np.uint8(shift % 256)
    for name in SCALES.get(type_, {}):
        blocks[name] = np.ldexp(blocks[name], shift)
    return blocks.view(np.uint8).reshape(-1)
