"""What a decoder is (llama.cpp's `hparams`), how its context runs it (`cparams`), and the architectures there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.ggml.errors import UsageError
from conformance.ggml.types import F16, F32, GGMLType

ROLES = (
    "token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output",
    "attn_qkv", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "in_proj", "out_proj",
)  # fmt: skip
"""Weights that may be of any type, by the last part of their names; norms, biases, routers and sinks are F32."""

ROPES = ("NORMAL", "NEOX", "NONE")
NORMS = ("rms", "layer")
FFNS = ("swiglu", "geglu", "swiglu_oai", "gelu")
"""Feed-forwards: three with a gate beside `up`, one without."""
GATINGS = ("softmax", "sigmoid", "softmax_weight")
"""How a router's logits become weights: before the choice of experts, or (the last) after it."""


LLAMA_LABELS: Mapping[str, str | None] = {"Qcur_rope": "Qcur", "Kcur_rope": "Kcur"}
"""Our name of a node -> Llama's, where it is another."""


@dataclass(frozen=True, slots=True)
class Hparams:
    """A decoder. The defaults are Llama's: RMS norm, rotated Q and K, grouped heads, SwiGLU."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_embd_head: int = 16
    """Elements of one head of Q and K; `n_embd` need not be `n_head` times it."""
    n_embd_head_v: int = 0
    """Elements of one head of V, 0 for as many as K's."""
    n_ff: int = 128
    """Elements between the feed-forward's matrices; of each expert, where there are experts."""
    n_vocab: int = 64
    eps: float = 1e-5
    norm: str = "rms"
    """One of `NORMS`; layer norms have biases."""
    tied: bool = False
    """The output multiplies with `token_embd.weight`."""
    types: Mapping[str, GGMLType] = field(default_factory=dict)
    """Role -> type of the weight; one that is not listed is F32."""

    rope: str = "NORMAL"
    """One of `ROPES`: pairs are neighbours (`NORMAL`) or halves of the head (`NEOX`); `NONE` has no positions."""
    rope_freqs: bool = False
    """Frequency factors `rope_freqs.weight`, as Llama 3 has them."""
    n_ctx_orig: int = 8192
    freq_base: float = 10000.0
    alibi: float = 0.0
    """`max_bias` of the slopes that attention logits get by distance; 0 for none."""

    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    """One weight `attn_qkv`; Q, K and V are views of its product."""
    qk_norm: bool = False
    """RMS norm of each head of Q and K, before they are rotated."""
    scaled_q: bool = False
    """Q is scaled by a node of its own; attention then has scale 1."""
    attn_softcap: float = 0.0
    sinks: bool = False
    """One more logit per head that takes attention from all cells."""
    n_swa: int = 0
    """Tokens that sliding-window layers see, their own among them; 0: there are none."""
    swa_period: int = 2
    """Every layer but each `swa_period`-th has the window (`set_swa_pattern`); 0: all have."""

    n_shortconv: int = 0
    """Taps of the short convolution that stands in attention's place; 0: there is none."""
    conv_period: int = 2
    """Every layer but each `conv_period`-th is a short convolution."""

    ffn: str = "swiglu"
    """One of `FFNS`."""
    ffn_bias: bool = False
    """Biases of the feed-forward, of router and experts where there are any."""
    n_expert: int = 0
    n_expert_used: int = 2
    gating: str = "softmax"
    """One of `GATINGS`."""
    expert_norm: bool = True
    """The chosen experts' weights are made to sum to 1."""
    expert_scale: float = 0.0
    """Factor of those weights; 0 for none."""
    probs_bias: bool = False
    """`exp_probs_b`: added for the choice of experts, not for their weights."""

    post_norm: bool = False
    """Attention and feed-forward are normed once more before they are added."""
    residual_first: bool = False
    """`residual + block` instead of `block + residual`."""
    embd_scale: float = 0.0
    """Factor of the embeddings; 0 for none."""
    final_softcap: float = 0.0
    keeps_hidden: bool = False
    """The last layer's result is an output too (`t_h_nextn`)."""
    labels: Mapping[str, str | None] = field(default_factory=lambda: LLAMA_LABELS)
    """Our name of a node -> the architecture's; None: it has none."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Llama's name of a weight (without layer and suffix) -> the architecture's."""

    @property
    def head_v(self) -> int:
        """Elements of one head of V."""
        return self.n_embd_head_v or self.n_embd_head

    @property
    def n_embd_gqa(self) -> int:
        """Elements of K of one token: a cache row."""
        return self.n_embd_head * self.n_head_kv

    @property
    def n_embd_v_gqa(self) -> int:
        """Elements of V of one token."""
        return self.head_v * self.n_head_kv

    @property
    def n_embd_r(self) -> int:
        """Elements of a sequence's convolution state."""
        return self.n_embd * (self.n_shortconv - 1)

    def is_recr(self, il: int) -> bool:
        """Whether layer `il` is a short convolution."""
        return self.n_shortconv > 0 and _but_each(self.conv_period, il)

    def is_swa(self, il: int) -> bool:
        """Whether layer `il` attends through the sliding window."""
        return self.n_swa > 0 and not self.is_recr(il) and _but_each(self.swa_period, il)

    def type_of(self, role: str) -> GGMLType:
        """The type of the weights of a role."""
        return self.types.get(role, F32)

    def check(self) -> None:
        """Refuse what no graph can be built from; UsageError says what does not fit."""
        counts = (self.n_layer, self.n_embd, self.n_head, self.n_head_kv, self.n_embd_head, self.n_ff, self.n_vocab)
        if min(counts) < 1:
            raise UsageError(f"decoder: sizes of at least 1 expected, {counts} found")
        if self.n_head % self.n_head_kv:
            raise UsageError(f"decoder: {self.n_head} heads are no multiple of {self.n_head_kv} KV heads")
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
    """How a context runs: its caches, and how it attends and stores."""

    n_ctx: int = 512
    """Cells of one stream (`kv_size`)."""
    n_seq_max: int = 1
    kv_unified: bool = False
    """All sequences share one stream of cells; otherwise each has its own."""
    flash_attn: bool = True
    """FLASH_ATTN_EXT over rows of V; otherwise a softmax between two MUL_MAT, and V is kept transposed."""
    type_k: GGMLType = F16
    type_v: GGMLType = F16
    write: str = "set_rows"
    """How K and V reach the cache: `set_rows` as llama.cpp since mid-2025, or `cpy` into a view as before."""
    n_ubatch: int = 512
    """Tokens of one graph at most."""
    rotate: bool = True
    """Rotate heads of a multiple of 64 by a Hadamard matrix before they go into a quantised cache."""
    mixed: bool = True
    """Has llama.cpp's branch for batches that mix tokens and embeddings, which is not computed."""
    swa_full: bool = False
    """Sliding-window layers keep every token, as the others do."""

    @property
    def n_stream(self) -> int:
        """Streams of cells in the cache."""
        return 1 if self.kv_unified else self.n_seq_max

    @property
    def v_trans(self) -> bool:
        """Whether V is stored transposed: a token's elements are a whole cache apart."""
        return not self.flash_attn

    def n_ctx_swa(self, hparams: Hparams) -> int:
        """Cells of one stream of the sliding-window layers: `llama_kv_cache_iswa`."""
        if self.swa_full:
            return self.n_ctx
        n = hparams.n_swa * (self.n_seq_max if self.kv_unified else 1) + self.n_ubatch
        return -(-min(self.n_ctx, n) // 256) * 256

    def check(self, hparams: Hparams) -> None:
        """Refuse what llama.cpp refuses; UsageError says what does not fit."""
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
    """Sizes of the Hadamard matrices that K (and Q) and V are rotated by, 0 for none (`llama_kv_cache`)."""
    n_k = 64
    while hparams.n_embd_head % (2 * n_k) == 0:
        n_k *= 2
    rotate_k = cparams.rotate and hparams.n_embd_head % 64 == 0 and cparams.type_k.is_quantized
    rotate_v = cparams.rotate and hparams.head_v % 64 == 0 and cparams.type_v.is_quantized
    return (n_k if rotate_k else 0, 64 if rotate_v else 0)


def _but_each(period: int, il: int) -> bool:
    return period == 0 or il % period < period - 1


_LFM2 = "model.layers.{}."
"""llama.cpp does not fill in the braces."""


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
"""Name in an id -> preset. Sizes are small; `llama-3.2-1b` has the real ones."""
