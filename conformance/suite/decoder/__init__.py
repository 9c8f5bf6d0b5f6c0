"""Decoders laid out as in llama.cpp: a configurable model, its KV cache, and trajectories.

`config` defines a decoder and its context, `weights` a model's weights and their bytes. `decoder` builds a graph from
its `layers` on a `sketch`; `kv` has the caches, `memory` assigns tokens to cells. `trajectory` makes a case of a plan,
`layout` compares our graphs with llama.cpp's.

An id is `family/ARCH-key=value,key=value@seed`; an omitted key has its architecture's default:

| keys | meaning |
|---|---|
| `l embd heads kv head headv ff vocab` | sizes: layers, embedding, heads, KV heads, head of K and V, feed-forward |
| `norm eps tied` | `rms` or `layer`, its epsilon, output tied to the embedding |
| `w`, a role such as `attn_v` | the type of all weights, or of one role |
| `rope freqs base alibi` | `normal`, `neox` or `none`; frequency factors; the base; ALiBi's `max_bias` |
| `qkvbias outbias ffnbias` | biases |
| `qkv` | `split`, or `fused`: one weight, Q, K and V are views |
| `qknorm scaledq softcap sinks` | norm of Q and K, Q scaled by a node, softcap of logits, attention sinks |
| `swa swaperiod` | sliding window in tokens; each `swaperiod`-th layer has none |
| `conv convperiod` | taps of a short convolution; each `convperiod`-th layer has attention |
| `ffn` | `swiglu`, `geglu`, `swiglu_oai` or `gelu` |
| `experts used gating expertnorm expertscale probsbias` | mixture of experts |
| `postnorm residualfirst embdscale logitcap hidden` | other properties of Gemma, LFM2 and gpt-oss |
| `ctx seqs unified fa cache cache_v write ubatch rot mixed swafull` | the context |
| `run` | the plan: `decoder/plan.py` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from conformance.case.case import Case
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.types import TYPES
from conformance.suite.family import Key, keys, read_keys, split_id, text

from .config import FFNS, GATINGS, NORMS, PRESETS, ROLES, ROPES, Cparams, Hparams
from .kv import Cache
from .layers import root
from .trajectory import Trajectory
from .weights import weight_shapes

__all__ = ["Cparams", "Hparams", "Trajectory", "make"]

_TYPES = "|".join(TYPES)
KEYS: dict[str, Key] = {
    **keys("l=2 embd=64 heads=4 kv=2 head=16 headv=0 ff=96 vocab=64"),
    **keys(f"norm={'|'.join(NORMS)} eps=1e-5 tied=0|1 w=f32|{_TYPES}"),
    **keys(" ".join(f"{role}=|{_TYPES}" for role in ROLES)),
    **keys(f"rope={'|'.join(ROPES).lower()} freqs=0|1 base=10000.0 baseswa=0.0 alibi=0.0"),
    **keys("qkvbias=0|1 outbias=0|1 ffnbias=0|1 qkv=split|fused qknorm=0|1 scaledq=0|1 softcap=0.0 sinks=0|1"),
    **keys("swa=0 swaperiod=2 conv=0 convperiod=2"),
    **keys(f"ffn={'|'.join(FFNS)} experts=0 used=2 gating={'|'.join(GATINGS)} expertnorm=1|0 expertscale=0.0"),
    **keys("probsbias=0|1 postnorm=0|1 residualfirst=0|1"),
    "embdscale": text("0", "a number, or sqrt for the root of embd"),
    **keys("logitcap=0.0 hidden=0|1 ctx=512 seqs=1 unified=0|1 fa=1|0"),
    **keys(f"cache=f16|{_TYPES} cache_v=|{_TYPES} write=set_rows|cpy ubatch=512 rot=1|0 mixed=1|0 swafull=0|1"),
    "run": text("p250.d8", "a plan like p250.d8"),
}


_AS_THEY_ARE = {
    "l": "n_layer", "embd": "n_embd", "heads": "n_head", "kv": "n_head_kv", "head": "n_embd_head",
    "headv": "n_embd_head_v", "ff": "n_ff", "vocab": "n_vocab", "norm": "norm", "eps": "eps", "base": "freq_base",
    "baseswa": "freq_base_swa", "alibi": "alibi", "softcap": "attn_softcap", "swa": "n_swa", "swaperiod": "swa_period",
    "conv": "n_shortconv",
    "convperiod": "conv_period", "ffn": "ffn", "experts": "n_expert", "used": "n_expert_used", "gating": "gating",
    "expertscale": "expert_scale", "logitcap": "final_softcap",
}  # fmt: skip
_FLAGS = {
    "tied": "tied", "freqs": "rope_freqs", "qkvbias": "qkv_bias", "outbias": "out_bias", "ffnbias": "ffn_bias",
    "qknorm": "qk_norm", "scaledq": "scaled_q", "sinks": "sinks", "expertnorm": "expert_norm",
    "probsbias": "probs_bias", "postnorm": "post_norm", "residualfirst": "residual_first", "hidden": "keeps_hidden",
}  # fmt: skip
"""Key -> field of `Hparams`: its value, or for flags True if it is 1."""


@cache
def keys_of(arch: str) -> dict[str, Key]:
    """Return the keys of an architecture's ids, with its defaults."""
    own = PRESETS[arch].keys
    return {name: replace(key, default=key.read(own[name])) if name in own else key for name, key in KEYS.items()}


def make(case_id: str) -> Case:
    """Build the case of an id of any decoder family; UsageError if it is invalid."""
    family = case_id.partition("/")[0]
    form = f"{'|'.join(PRESETS)}-key=value,key=value"
    body, seed = split_id(case_id, family, form)
    arch, keys_text = split_arch(body)
    if not arch:
        raise UsageError(f"case {case_id!r}: {family}/{form}@seed expected")
    values, given = read_keys(case_id, keys_text, keys_of(arch))
    try:
        trajectory = trajectory_of(case_id, arch, values)
        trajectory.run(values["run"])
        return trajectory.case(family, {"arch": arch, **given}, seed)
    except (GraphError, UsageError) as e:
        raise UsageError(f"case {case_id!r}: {e}") from None


def split_arch(body: str) -> tuple[str, str]:
    """Split `ARCH-key=value,key=value` into `ARCH`, "" if it is unknown, and the keys' text."""
    arch = body.partition("=")[0].rpartition("-")[0] if "=" in body else body  # names may contain dashes
    return (arch, body[len(arch) + 1 :]) if arch in PRESETS else ("", body)


def trajectory_of(case_id: str, arch: str, values: Mapping[str, Any]) -> Trajectory:
    """Return an empty trajectory of the model and context for an id's values."""
    return Trajectory(case_id, hparams_of(arch, values), cparams_of(values))


def hparams_of(arch: str, v: Mapping[str, Any]) -> Hparams:
    """Return the model for an id's values; UsageError if `embdscale` is not a number."""
    return Hparams(
        **{field: v[key] for key, field in _AS_THEY_ARE.items()},
        **{field: v[key] == "1" for key, field in _FLAGS.items()},
        rope=v["rope"].upper(),
        fused_qkv=v["qkv"] == "fused",
        embd_scale=_embd_scale(v["embdscale"], v["embd"]),
        types={role: TYPES[v[role] or v["w"]] for role in ROLES},
        labels=PRESETS[arch].labels,
        tensors=PRESETS[arch].tensors,
    )


def _embd_scale(scale: str, n_embd: int) -> float:
    if scale == "sqrt":
        return root(n_embd)
    try:
        return float(scale)
    except ValueError:
        raise UsageError(f"embdscale: a number or sqrt expected, {scale!r} found") from None


def cparams_of(v: Mapping[str, Any]) -> Cparams:
    """Return the context for an id's values."""
    return Cparams(
        n_ctx=v["ctx"],
        n_seq_max=v["seqs"],
        kv_unified=v["unified"] == "1",
        flash_attn=v["fa"] == "1",
        type_k=TYPES[v["cache"]],
        type_v=TYPES[v["cache_v"] or v["cache"]],
        write=v["write"],
        n_ubatch=v["ubatch"],
        rotate=v["rot"] == "1",
        mixed=v["mixed"] == "1",
        swa_full=v["swafull"] == "1",
    )


def elements(body: str) -> int:
    """Return the elements of weights and caches together; UsageError as for `make`."""
    arch, keys_text = split_arch(body)
    values, _ = read_keys(body, keys_text, keys_of(arch))
    h, c = hparams_of(arch, values), cparams_of(values)
    return sum(prod(ne) for _, ne in weight_shapes(h).values()) + sum(prod(t.ne) for t in Cache(h, c).tensors())
