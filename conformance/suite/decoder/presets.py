"""Architectures as llama.cpp has them: which switches they are, and what they call their nodes and weights.

A preset's sizes are small; `llama-3.2-1b` has the real ones. Every key of an id may be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .config import LLAMA_LABELS

_LFM2 = "model.layers.{}."
"""llama.cpp leaves the braces in."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An architecture: values of keys that are not Llama's, and its own names."""

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
"""Name in an id -> what it stands for."""
