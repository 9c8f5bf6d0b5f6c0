"""The text of a decoder's id: `family/ARCH-key=value,key=value@seed`; a key left out has its architecture's default.

| keys | say |
|---|---|
| `l embd heads kv head headv ff vocab` | sizes: layers, embedding, heads, KV heads, head of K and V, feed-forward |
| `norm eps tied` | `rms` or `layer`, its epsilon, output tied to the embedding |
| `w`, a role such as `attn_v` | the type of all weights, and of some |
| `rope freqs base alibi` | `normal`, `neox` or `none`; frequency factors; the base; ALiBi's `max_bias` |
| `qkvbias outbias ffnbias` | biases |
| `qkv` | `split`, or `fused`: one weight, Q, K and V are views |
| `qknorm scaledq softcap sinks` | norm of Q and K, Q scaled by a node, softcap of logits, attention sinks |
| `swa swaperiod` | sliding window in tokens, in every layer but each such |
| `conv convperiod` | taps of a short convolution, in every layer but each such |
| `ffn` | `swiglu`, `geglu`, `swiglu_oai` or `gelu` |
| `experts used gating expertnorm expertscale probsbias` | mixture of experts |
| `postnorm residualfirst embdscale logitcap hidden` | the rest of Gemma's, LFM2's and gpt-oss's ways |
| `ctx seqs unified fa cache cache_v write ubatch rot mixed swafull` | the context |
| `run` | the plan: `cases/plan.py` |
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from conformance.case.case import Case
from conformance.ggml.errors import GraphError, UsageError
from conformance.ggml.types import TYPES
from conformance.suite.ops.grammar import Key, count, read_keys, real, text, word

from .config import FFNS, GATINGS, NORMS, ROLES, ROPES, Cparams, Hparams
from .presets import PRESETS
from .sketch import root
from .trajectory import Trajectory

_FLAG = word("0", "1")
_ON = word("1", "0")

KEYS: dict[str, Key] = {
    "l": count(2),
    "embd": count(64),
    "heads": count(4),
    "kv": count(2),
    "head": count(16),
    "headv": count(0),
    "ff": count(96),
    "vocab": count(64),
    "norm": word(*NORMS),
    "eps": real(1e-5),
    "tied": _FLAG,
    "w": word("f32", *TYPES),
    **dict.fromkeys(ROLES, word("", *TYPES)),
    "rope": word(*(r.lower() for r in ROPES)),
    "freqs": _FLAG,
    "base": real(10000.0),
    "alibi": real(0.0),
    "qkvbias": _FLAG,
    "outbias": _FLAG,
    "ffnbias": _FLAG,
    "qkv": word("split", "fused"),
    "qknorm": _FLAG,
    "scaledq": _FLAG,
    "softcap": real(0.0),
    "sinks": _FLAG,
    "swa": count(0),
    "swaperiod": count(2),
    "conv": count(0),
    "convperiod": count(2),
    "ffn": word(*FFNS),
    "experts": count(0),
    "used": count(2),
    "gating": word(*GATINGS),
    "expertnorm": _ON,
    "expertscale": real(0.0),
    "probsbias": _FLAG,
    "postnorm": _FLAG,
    "residualfirst": _FLAG,
    "embdscale": text("0", "a number, or sqrt for the root of embd"),
    "logitcap": real(0.0),
    "hidden": _FLAG,
    "ctx": count(512),
    "seqs": count(1),
    "unified": _FLAG,
    "fa": _ON,
    "cache": word("f16", *TYPES),
    "cache_v": word("", *TYPES),
    "write": word("set_rows", "cpy"),
    "ubatch": count(512),
    "rot": _ON,
    "mixed": _ON,
    "swafull": _FLAG,
    "run": text("p250.d8", "a plan like p250.d8"),
}


_AS_THEY_ARE = {
    "l": "n_layer", "embd": "n_embd", "heads": "n_head", "kv": "n_head_kv", "head": "n_embd_head",
    "headv": "n_embd_head_v", "ff": "n_ff", "vocab": "n_vocab", "norm": "norm", "eps": "eps", "base": "freq_base",
    "alibi": "alibi", "softcap": "attn_softcap", "swa": "n_swa", "swaperiod": "swa_period", "conv": "n_shortconv",
    "convperiod": "conv_period", "ffn": "ffn", "experts": "n_expert", "used": "n_expert_used", "gating": "gating",
    "expertscale": "expert_scale", "logitcap": "final_softcap",
}  # fmt: skip
_FLAGS = {
    "tied": "tied", "freqs": "rope_freqs", "qkvbias": "qkv_bias", "outbias": "out_bias", "ffnbias": "ffn_bias",
    "qknorm": "qk_norm", "scaledq": "scaled_q", "sinks": "sinks", "expertnorm": "expert_norm",
    "probsbias": "probs_bias", "postnorm": "post_norm", "residualfirst": "residual_first", "hidden": "keeps_hidden",
}  # fmt: skip
"""Key -> field of `Hparams`: its value, or whether it is 1."""

_LONGEST_FIRST = sorted(PRESETS, key=len, reverse=True)


@cache
def keys_of(arch: str) -> dict[str, Key]:
    """The keys of an architecture's ids, with its defaults."""
    own = PRESETS[arch].keys
    return {name: replace(key, default=key.read(own[name])) if name in own else key for name, key in KEYS.items()}


def with_seed(family: str, body: str) -> str:
    """The id of a table's row: its seed comes from its text, so that rows added elsewhere change nothing."""
    return f"{family}/{body}@{zlib.crc32(body.encode()) % 1000}"


def make(case_id: str) -> Case:
    """The case behind an id of any family of decoders.

    Raises:
        UsageError: the id cannot be read, or no graph can be built from it.
    """
    head, _, seed = case_id.rpartition("@")
    family, _, body = head.partition("/")
    arch, keys_text = split_arch(body)
    if not arch or not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        raise UsageError(f"case {case_id!r}: {family}/{'|'.join(PRESETS)}-key=value,key=value@seed expected")
    values, given = read_keys(case_id, keys_text, keys_of(arch))
    try:
        trajectory = trajectory_of(case_id, arch, values)
        trajectory.run(values["run"])
        return trajectory.case(family, {"arch": arch, **given}, int(seed))
    except (GraphError, UsageError) as e:
        raise UsageError(f"case {case_id!r}: {e}") from None


def split_arch(body: str) -> tuple[str, str]:
    """`ARCH-key=value,key=value` as `ARCH`, "" if it is unknown, and what comes after it."""
    arch = next((a for a in _LONGEST_FIRST if body == a or body.startswith(f"{a}-")), "")
    return arch, body[len(arch) + 1 :]


def trajectory_of(case_id: str, arch: str, values: Mapping[str, Any]) -> Trajectory:
    """An empty trajectory of the model and context that an id's values say."""
    return Trajectory(case_id, hparams_of(arch, values), cparams_of(values))


def hparams_of(arch: str, v: Mapping[str, Any]) -> Hparams:
    """The model that an id's values say.

    Raises:
        UsageError: `embdscale` is no number.
    """
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
    """The context that an id's values say."""
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
