"""Hyperparameters of a decoder (`hparams`), its context (`cparams`) and the architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.ggml.errors import UsageError
from conformance.ggml.types import F16, F32, GGMLType

ROLES = (
    "token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output",
    "attn_qkv", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "in_proj", "out_proj",
)  # fmt: skip
"""Weights of configurable type, by the last part of their name; others are F32."""

ROPES = ("NORMAL", "NEOX", "NONE")
NORMS = ("rms", "layer")
FFNS = ("swiglu", "geglu", "swiglu_oai", "gelu")
"""Feed-forwards: three with a gate beside `up`, one without."""
GATINGS = ("softmax", "sigmoid", "softmax_weight")
"""Functions from router logits to weights; the last one applies after the choice."""


LLAMA_LABELS: Mapping[str, str | None] = {"Qcur_rope": "Qcur", "Kcur_rope": "Kcur"}
"""Our name of a node -> Llama's, if different."""


@dataclass(frozen=True, slots=True)
class Hparams:
    """A decoder; the defaults are Llama's: RMS norm, rotated Q and K, grouped heads, SwiGLU."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_embd_head: int = 16
    """Elements per head of Q and K; `n_embd` need not be `n_head` times it."""
    n_embd_head_v: int = 0
    """Elements per head of V; 0 for the same as K."""
    n_ff: int = 128
    """Hidden elements of the feed-forward, or of each expert."""
    n_vocab: int = 64
    eps: float = 1e-5
    norm: str = "rms"
    """One of `NORMS`; layer norms have biases."""
    tied: bool = False
    """The output uses `token_embd.weight`."""
    types: Mapping[str, GGMLType] = field(default_factory=dict)
    """Role -> type of the weight; F32 if not listed."""

    rope: str = "NORMAL"
    """One of `ROPES`: adjacent pairs (`NORMAL`), halves of the head (`NEOX`), or no positions."""
    rope_freqs: bool = False
    """Frequency factors `rope_freqs.weight`, as in Llama 3."""
    n_ctx_orig: int = 8192
    freq_base: float = 10000.0
    freq_base_swa: float = 0.0
    """Frequency base of layers with a sliding window; 0: the same."""
    alibi: float = 0.0
    """`max_bias` of the ALiBi slopes; 0 for none."""

    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    """True for one weight `attn_qkv`; Q, K and V are views of its product."""
    qk_norm: bool = False
    """RMS norm of each head of Q and K before rotation."""
    scaled_q: bool = False
    """Q is scaled by a separate node; attention then has scale 1."""
    attn_softcap: float = 0.0
    sinks: bool = False
    """An additional logit per head that takes attention from all cells."""
    n_swa: int = 0
    """Tokens in the sliding window, including the current one; 0 for no window."""
    swa_period: int = 2
    """All layers except each `swa_period`-th have the window (`set_swa_pattern`); 0: all."""

    n_shortconv: int = 0
    """Taps of the short convolution that replaces attention; 0 for none."""
    conv_period: int = 2
    """All layers except each `conv_period`-th are short convolutions."""

    ffn: str = "swiglu"
    """One of `FFNS`."""
    ffn_bias: bool = False
    """Biases of the feed-forward, and of router and experts if present."""
    n_expert: int = 0
    n_expert_used: int = 2
    gating: str = "softmax"
    """One of `GATINGS`."""
    expert_norm: bool = True
    """Normalise the weights of the chosen experts to sum 1."""
    expert_scale: float = 0.0
    """Factor of those weights; 0 for none."""
    probs_bias: bool = False
    """`exp_probs_b`: added to choose experts, but not to their weights."""

    post_norm: bool = False
    """Attention and feed-forward results are normed again before they are added."""
    residual_first: bool = False
    """`residual + block` instead of `block + residual`."""
    embd_scale: float = 0.0
    """Factor of the embeddings; 0 for none."""
    final_softcap: float = 0.0
    keeps_hidden: bool = False
    """The last layer's result is an output too (`t_h_nextn`)."""
    labels: Mapping[str, str | None] = field(default_factory=lambda: LLAMA_LABELS)
    """Our name of a node -> the architecture's; None if it has no name."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Llama's name of a weight (without layer and suffix) -> the architecture's."""

    @property
    def head_v(self) -> int:
        """Elements per head of V."""
        return self.n_embd_head_v or self.n_embd_head

    @property
    def n_embd_gqa(self) -> int:
        """Elements of K per token: a cache row."""
        return self.n_embd_head * self.n_head_kv

    @property
    def n_embd_v_gqa(self) -> int:
        """Elements of V per token."""
        return self.head_v * self.n_head_kv

    @property
    def n_embd_r(self) -> int:
        """Elements of a sequence's convolution state."""
        return self.n_embd * (self.n_shortconv - 1)

    def is_recr(self, il: int) -> bool:
        """Return True if layer `il` is a short convolution."""
        return self.n_shortconv > 0 and _but_each(self.conv_period, il)

    def base_of(self, il: int) -> float:
        """Return the frequency base of layer `il`."""
        return self.freq_base_swa if self.freq_base_swa and self.is_swa(il) else self.freq_base

    def is_swa(self, il: int) -> bool:
        """Return True if layer `il` attends through the sliding window."""
        return self.n_swa > 0 and not self.is_recr(il) and _but_each(self.swa_period, il)

    def type_of(self, role: str) -> GGMLType:
        """Return the type of the weights of a role."""
        return self.types.get(role, F32)

    def check(self) -> None:
        """Raise UsageError if no graph can be built from these parameters."""
        counts = (self.n_layer, self.n_embd, self.n_head, self.n_head_kv, self.n_embd_head, self.n_ff, self.n_vocab)
        if min(counts) < 1:
            raise UsageError(f"decoder: sizes of at least 1 expected, {counts} found")
        if self.n_head % self.n_head_kv:
            raise UsageError(f"decoder: {self.n_head} heads are not a multiple of {self.n_head_kv} KV heads")
        if self.n_embd_head % 2:
            raise UsageError(f"decoder: an even head size expected, {self.n_embd_head} found: pairs are rotated")
        if self.n_shortconv and self.n_shortconv < 2:
            raise UsageError("decoder: a short convolution has at least 2 taps")
        if self.n_expert and not 1 <= self.n_expert_used <= self.n_expert:
            raise UsageError(f"decoder: 1 to {self.n_expert} experts in use expected, {self.n_expert_used} found")
        if self.alibi and self.rope != "NONE":
            raise UsageError("decoder: alibi takes the place of rotation; rope=none expected with it")
        if unknown := self.types.keys() - set(ROLES):
            raise UsageError(f"decoder: weights {sorted(unknown)} are unknown; known: {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class Cparams:
    """Context parameters: its caches, and how it attends and stores."""

    n_ctx: int = 512
    """Cells per stream (`kv_size`)."""
    n_seq_max: int = 1
    kv_unified: bool = False
    """All sequences share one stream of cells; otherwise each has its own."""
    flash_attn: bool = True
    """FLASH_ATTN_EXT over rows of V; otherwise MUL_MAT, softmax, MUL_MAT with a transposed V."""
    type_k: GGMLType = F16
    type_v: GGMLType = F16
    write: str = "set_rows"
    """How K and V are stored: `set_rows` as in llama.cpp since mid-2025, or `cpy` into a view."""
    n_ubatch: int = 512
    """Maximum tokens per graph."""
    rotate: bool = True
    """Rotate heads of a multiple of 64 by a Hadamard matrix before storing them quantised."""
    mixed: bool = True
    """Include llama.cpp's uncomputed branch for batches that mix tokens and embeddings."""
    swa_full: bool = False
    """Sliding-window layers store every token, as the others do."""

    @property
    def n_stream(self) -> int:
        """Streams of cells in the cache."""
        return 1 if self.kv_unified else self.n_seq_max

    @property
    def v_trans(self) -> bool:
        """True if V is stored transposed, so that a token's elements are `n_ctx` elements apart."""
        return not self.flash_attn

    def n_ctx_swa(self, hparams: Hparams) -> int:
        """Return the cells per stream of sliding-window layers: `llama_kv_cache_iswa`."""
        if self.swa_full:
            return self.n_ctx
        n = hparams.n_swa * (self.n_seq_max if self.kv_unified else 1) + self.n_ubatch
        return -(-min(self.n_ctx, n) // 256) * 256

    def check(self, hparams: Hparams) -> None:
        """Raise UsageError for parameters that llama.cpp rejects."""
        if min(self.n_ctx, self.n_seq_max, self.n_ubatch) < 1:
            raise UsageError("context: n_ctx, n_seq_max and n_ubatch of at least 1 expected")
        if self.write not in {"set_rows", "cpy"}:
            raise UsageError(f"context: write set_rows or cpy expected, {self.write!r} found")
        if self.v_trans and self.type_v.is_quantized:
            raise UsageError("context: V cache quantization requires flash_attn")
        for type_, head in ((self.type_k, hparams.n_embd_head), (self.type_v, hparams.head_v)):
            if head % type_.blck_size:
                raise UsageError(f"context: heads of {head} do not fill blocks of {type_}")


def n_rot(hparams: Hparams, cparams: Cparams) -> tuple[int, int]:
    """Return the Hadamard sizes for K (and Q) and V, 0 for none (`llama_kv_cache`)."""
    n_k = 64
    while hparams.n_embd_head % (2 * n_k) == 0:
        n_k *= 2
    rotate_k = cparams.rotate and hparams.n_embd_head % 64 == 0 and cparams.type_k.is_quantized
    rotate_v = cparams.rotate and hparams.head_v % 64 == 0 and cparams.type_v.is_quantized
    return (n_k if rotate_k else 0, 64 if rotate_v else 0)


def _but_each(period: int, il: int) -> bool:
    return period == 0 or il % period < period - 1


_LFM2 = "model.layers.{}."
"""Prefix of LFM2's node names; llama.cpp itself leaves the braces in them."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An architecture: keys that differ from Llama's, and its names of nodes and weights."""

    keys: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=lambda: LLAMA_LABELS)
    tensors: Mapping[str, str] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "llama": Preset(),
    "qwen3": Preset({"rope": "neox", "qknorm": "1"}, {**LLAMA_LABELS, "attn_out": None}),
    "gemma2": Preset(
        {
            "rope": "neox", "ffn": "geglu", "tied": "1", "postnorm": "1", "scaledq": "1", "embdscale": "sqrt",
            "softcap": "10", "logitcap": "20", "swa": "32",
        },
        {**LLAMA_LABELS, "attn_out": None, "ffn_inp": "sa_out"},
    ),
    "gpt-oss": Preset(
        {
            "rope": "neox", "qkvbias": "1", "outbias": "1", "ffnbias": "1", "sinks": "1", "swa": "32", "experts": "4",
            "used": "2", "gating": "softmax_weight", "expertnorm": "0", "ffn": "swiglu_oai", "hidden": "1",
        },
        {**LLAMA_LABELS, "ffn_norm": "attn_post_norm"},
        {"ffn_norm": "post_attention_norm"},
    ),
    "lfm2": Preset(
        {"rope": "neox", "qknorm": "1", "conv": "3", "tied": "1", "residualfirst": "1", "swaperiod": "0"},
        {
            "embd": "model.embed_tokens", "attn_norm": f"{_LFM2}operator_norm", "Qcur_rope": None, "Kcur_rope": None,
            "Qcur_normed": f"{_LFM2}self_attn.q_layernorm", "Kcur_normed": f"{_LFM2}self_attn.k_layernorm",
            "attn_out": f"{_LFM2}self_attn.out_proj", "ffn_inp": None, "ffn_norm": f"{_LFM2}ffn_out", "ffn_out": None,
        },
        {"output_norm": "token_embd_norm"},
    ),
    "llama-3.2-1b": Preset(
        {
            "l": "16", "embd": "2048", "heads": "32", "kv": "8", "head": "64", "ff": "8192", "vocab": "128256",
            "freqs": "1", "base": "500000", "tied": "1",
        },
    ),
}  # fmt: skip
"""Name in an id -> preset. Sizes are small, except in `llama-3.2-1b`."""
