"""What a decoder is (llama.cpp's `hparams`) and how its context runs it (llama.cpp's `cparams`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.cgraph.errors import UsageError
from conformance.cgraph.tensor import dims
from conformance.cgraph.types import F16, F32, GGMLType

ROLES = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
"""Weights that may be of any type, by the part of their names that says what they do; norms are F32."""


@dataclass(frozen=True, slots=True)
class Hparams:
    """A llama-like decoder: RMS norm, rotated Q and K, grouped heads, SwiGLU."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_embd_head: int = 16
    """Elements of one head, of K and V alike; `n_embd` need not be `n_head` times it."""
    n_ff: int = 128
    n_vocab: int = 64
    rope: str = "NORMAL"
    """Key of `rules_model.ROPE_TYPE`: pairs are neighbours (`NORMAL`) or halves of the head (`NEOX`)."""
    rope_freqs: bool = False
    """Frequency factors `rope_freqs.weight`, as Llama 3 has them."""
    n_ctx_orig: int = 8192
    freq_base: float = 10000.0
    eps: float = 1e-5
    tied: bool = False
    """The output multiplies with `token_embd.weight`."""
    types: Mapping[str, GGMLType] = field(default_factory=dict)
    """Role -> type of the weight; one that is not listed is F32."""

    @property
    def n_embd_gqa(self) -> int:
        """Elements of K, or of V, of one token: a cache row."""
        return self.n_embd_head * self.n_head_kv

    def type_of(self, role: str) -> GGMLType:
        """The type of the weights of a role."""
        return self.types.get(role, F32)

    def check(self) -> None:
        """Refuse what no graph can be built from.

        Raises:
            UsageError: says what does not fit.
        """
        counts = (self.n_layer, self.n_embd, self.n_head, self.n_head_kv, self.n_embd_head, self.n_ff, self.n_vocab)
        if min(counts) < 1:
            raise UsageError(f"decoder: sizes of at least 1 expected, {counts} found")
        if self.n_head % self.n_head_kv:
            raise UsageError(f"decoder: {self.n_head} heads are no multiple of {self.n_head_kv} KV heads")
        if self.n_embd_head % 2:
            raise UsageError(f"decoder: an even head size expected, {self.n_embd_head} found: ROPE turns pairs")
        if unknown := self.types.keys() - set(ROLES):
            raise UsageError(f"decoder: weights {sorted(unknown)} are unknown; known: {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class Cparams:
    """How a context runs: its KV cache, and which of llama.cpp's ways to attend and to store."""

    n_ctx: int = 512
    """Cells of one stream (`kv_size`)."""
    n_seq_max: int = 1
    kv_unified: bool = False
    """All sequences share one stream of cells; otherwise each has its own."""
    flash_attn: bool = True
    """FLASH_ATTN_EXT over rows of V; otherwise SOFT_MAX between two MUL_MAT, and V is kept transposed."""
    type_k: GGMLType = F16
    type_v: GGMLType = F16
    write: str = "set_rows"
    """How K and V reach the cache: `set_rows` as llama.cpp since mid-2025, or `cpy` into a view as before."""
    n_ubatch: int = 512
    """Tokens of one graph at most."""
    rotate: bool = True
    """Rotate heads of a multiple of 64 by a Hadamard matrix before they go into a quantised cache."""
    mixed: bool = True
    """llama.cpp's branch for batches that mix tokens and embeddings, present and not computed."""

    @property
    def n_stream(self) -> int:
        """Streams of cells in the cache."""
        return 1 if self.kv_unified else self.n_seq_max

    @property
    def v_trans(self) -> bool:
        """Whether V is kept with a token's elements a whole cache apart."""
        return not self.flash_attn

    def check(self, hparams: Hparams) -> None:
        """Refuse what llama.cpp refuses.

        Raises:
            UsageError: says what does not fit.
        """
        if min(self.n_ctx, self.n_seq_max, self.n_ubatch) < 1:
            raise UsageError("context: n_ctx, n_seq_max and n_ubatch of at least 1 expected")
        if self.write not in {"set_rows", "cpy"}:
            raise UsageError(f"context: write set_rows or cpy expected, {self.write!r} found")
        if self.v_trans and self.type_v.is_quantized:
            raise UsageError("context: V cache quantization requires flash_attn")
        for type_ in (self.type_k, self.type_v):
            if hparams.n_embd_head % type_.blck_size:
                raise UsageError(f"context: heads of {hparams.n_embd_head} do not fill blocks of {type_}")


def n_rot(hparams: Hparams, cparams: Cparams) -> tuple[int, int]:
    """Sizes of the Hadamard matrices that K (and Q) and V are rotated by, 0 for none (`llama_kv_cache`)."""
    fits = cparams.rotate and hparams.n_embd_head % 64 == 0
    n_k = 64
    while hparams.n_embd_head % (2 * n_k) == 0:
        n_k *= 2
    return (n_k if fits and cparams.type_k.is_quantized else 0, 64 if fits and cparams.type_v.is_quantized else 0)


def weight_shapes(h: Hparams) -> dict[str, tuple[GGMLType, tuple[int, int, int, int]]]:
    """Every weight by llama.cpp's name -> its type and `ne`."""
    shapes = {"token_embd.weight": (h.type_of("token_embd"), dims(h.n_embd, h.n_vocab))}
    if h.rope_freqs:
        shapes["rope_freqs.weight"] = (F32, dims(h.n_embd_head // 2))
    inputs = {"attn_output": h.n_head * h.n_embd_head, "ffn_down": h.n_ff}
    outputs = {
        "attn_q": h.n_head * h.n_embd_head,
        "attn_k": h.n_embd_gqa,
        "attn_v": h.n_embd_gqa,
        "ffn_gate": h.n_ff,
        "ffn_up": h.n_ff,
    }
    for il in range(h.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{il}.{norm}.weight"] = (F32, dims(h.n_embd))
        for role in ROLES[1:-1]:
            ne = dims(inputs.get(role, h.n_embd), outputs.get(role, h.n_embd))
            shapes[f"blk.{il}.{role}.weight"] = (h.type_of(role), ne)
    shapes["output_norm.weight"] = (F32, dims(h.n_embd))
    if not h.tied:
        shapes["output.weight"] = (h.type_of("output"), dims(h.n_embd, h.n_vocab))
    return shapes
