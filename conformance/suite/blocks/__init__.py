"""The family `blocks`: each architecture's sublayers alone: attention, feed-forward, recurrence, norm and residual.

`blocks/llama-fa=0,run=p5.d1,layer=0,block=attention@7`: the id of a decoder, and which block. For an architecture that
the builder does not know it is the id of a recording (family `zoo`; only where llama.cpp is installed). Weights and
caches are the whole model's; what the layers before would give is drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance.case.case import Case
from conformance.suite.decoder import make, split_arch
from conformance.suite.family import (
    LEVELS,
    Family,
    Level,
    Table,
    ids_of,
    keys,
    read_keys,
    split_id,
    text,
    with_seed,
    without,
)
from conformance.suite.zoo import family as zoo
from conformance.suite.zoo import metadata

from .cut import Block, alone

NAME = "blocks"
KEYS = {**keys("layer=0"), "block": text("attention", "a block's name")}
"""Which block."""

_TINY = "l=2,embd=32,heads=4,kv=2,head=16,ff=32,vocab=32,seqs=2,ctx=256"
_LONG = "l=1,embd=2048,heads=4,kv=2,head=16,ff=32,vocab=32,ctx=256,w=f16"
"""Rows as long as accelerators take them, everything else small."""
_RUN = "run=at20.p3.d1"
_TWO = "seqs=2,nodes=2,run=p3.d1"
"""What a block reads and no stream can stand for, such as a mask, is recorded in both steps."""

TABLE: Table = {
    "smoke": (
        f"llama-{_TINY},{_RUN},block=[ffn_norm|feedforward|attention|head]",
        f"llama-{_TINY},fa=0,freqs=1,base=500000,{_RUN},block=attention",
        f"llama-{_TINY},norm=layer,{_RUN},block=ffn_norm",
        f"llama-{_TINY},softcap=3,{_RUN},block=attention",
        f"gpt-oss-{_TINY},{_RUN},block=[attention|feedforward]",
        f"lfm2-{_TINY},run=p3.d1,block=recurrent",
        f"llama-{_LONG},{_RUN},block=[attention|feedforward]",
    ),
    "standard": (
        f"gemma2-{_TINY},[fa=1|fa=0],{_RUN},block=attention",
        f"llama-{_TINY},[ffn=geglu|ffn=gelu|ffnbias=1],{_RUN},block=feedforward",
        f"llama-{_TINY},[freqs=1|base=500000|rope=neox|rope=none,alibi=8|qkv=fused|outbias=1],{_RUN},block=attention",
        f"llama-{_TINY.replace('head=16', 'head=64')},cache=q8_0,[rot=0|rot=1],{_RUN},block=attention",
        f"llama-{_TINY},experts=4,gating=[softmax|sigmoid],{_RUN},block=feedforward",
        f"qwen3-{_TINY},[fa=1|fa=0],{_RUN},block=attention",
        f"gemma2-{_TINY},layer=[0|1],{_RUN},block=[post_attention_norm|attention|feedforward]",
        f"gemma2-{_TINY},{_RUN},block=head",
        f"gpt-oss-{_TINY},fa=0,layer=[0|1],{_RUN},block=attention",
        f"lfm2-{_TINY},run=p3.d1,layer=1,block=[attn_norm|attention|feedforward]",
    ),
    "full": (f"llama-{_TINY},w=[q4_0|q8_0|f16],{_RUN},block=[feedforward|attention|head]",),
}
"""Architectures that the builder knows."""


def _recorded(blocks: str) -> tuple[str, ...]:
    """Patterns from `ARCH:BLOCK|BLOCK`, or `ARCH/LAYER:BLOCK|BLOCK` where the layer is not the first."""
    patterns = []
    for item in blocks.split():
        where, _, names = item.partition(":")
        arch, slash, layer = where.partition("/")
        patterns.append(f"{arch}-{_TWO}{f',layer={layer}' if slash else ''},block=[{names}]")
    return tuple(patterns)


RECORDED: Table = {
    "smoke": (*_recorded("mamba:recurrent"), f"gptneox-{_TWO},set=rope.dimension_count:64,block=attention"),
    "standard": _recorded(
        "modern-bert:attention|feedforward bert:attention|feedforward bloom:attention dbrx:attention|feedforward "
        "mpt:attention|feedforward qwen2moe:feedforward t5:attention|feedforward gptneox:attention "
        "hunyuan-moe:feedforward bitnet:attention|feedforward falcon:attention granite:attention|feedforward "
        "llama4:attention phi2:attention|feedforward jina-bert-v2:attention|feedforward olmo2:attention "
        "stablelm:attention command-r:attention gemma3:attention minicpm3:attention|feedforward "
        "olmo:attention|feedforward deepseek2:attention grok:attention|feedforward cohere2:attention mamba:recurrent "
        "mamba2:recurrent plamo2:attention plamo2/1:recurrent qwen3next:attention kimi-linear:attention "
        "kimi-linear/1:attention falcon-h1:attention|feedforward rwkv7:feedforward|recurrent rwkv7/1:recurrent "
        "rwkv6:recurrent rwkv6/1:recurrent"
    ),
    "full": _recorded(
        "chatglm:feedforward exaone4:post_attention_norm qwen2:head wavtokenizer-dec:head jais2:feedforward "
        "neo-bert/1:feedforward phimoe:ffn_norm|head deci:feedforward llama-embed:feedforward "
        "nomic-bert-moe/1:feedforward bailingmoe:feedforward cogvlm:attention bert:attn_output_norm bloom:head "
        "dbrx:head dream:attention mimo2:attention|feedforward qwen:attention t5:attn_norm|ffn_norm t5/1:feedforward "
        "t5encoder:attention t5encoder/1:feedforward jina-bert-v3:attention ernie4_5-moe/1:feedforward lfm2moe:head "
        "lfm2moe/1:feedforward|recurrent plamo3:attention bailingmoe2:attention bailingmoe2/1:feedforward "
        "openelm:attention baichuan:attention llada-moe:attention|feedforward gemma-embedding:attention "
        "nemotron_h:attention nemotron_h/2:feedforward arcee:attention|feedforward codeshell:attention|attn_norm "
        "gemma:attention|feedforward gemma4:attention|feedforward|post_ffw_norm gemma4/1:post_ffw_norm granite:head "
        "llama4/1:feedforward llama4/3:attention phi2:head qwen3moe:feedforward dots1:attention exaone-moe:attention "
        "exaone-moe/1:attention hunyuan-dense:attention minimax-m2:attention apertus:attention|feedforward "
        "minicpm3:head nemotron_h_moe/2:feedforward olmo:head plamo:attention chameleon:attention|head "
        "qwen35moe:feedforward afmoe:attention|attn_norm|feedforward|ffn_norm|head afmoe/1:feedforward "
        "deepseek2/1:feedforward cohere2:attn_norm|head cohere2/1:attention|attn_norm step35:attention "
        "grovemoe:feedforward mamba:attn_norm mamba/1:attn_norm "
        "gemma3n:attention|attn_norm|feedforward|head|post_attention_norm|post_ffw_norm gemma3n/1:post_ffw_norm "
        "granitehybrid/1:recurrent smallthinker:attention smallthinker/1:attention jamba/1:attn_norm|recurrent "
        "arctic:attention qwen3next/1:attention qwen35:attention|head|post_attention_norm qwen35/1:attention "
        "glm-dsa:attention|feedforward glm-dsa/1:feedforward kimi-linear/1:attn_norm|feedforward "
        "falcon-h1/1:attention arwkv7:attn_norm|feedforward|ffn_norm|recurrent arwkv7/1:recurrent rwkv7:attn_norm "
        "rwkv7/1:feedforward rwkv6/1:feedforward rwkv6qwen2:recurrent"
    ),
}
"""Recordings, smallest first: one architecture per distinct op sequence."""


def _with_seed(body: str) -> str:
    """The id of a table's row; blocks of one model have one seed, and so one model."""
    return with_seed(NAME, body, without(body, KEYS)[0])


_ids = ids_of(TABLE, _with_seed)
_ids_with_recordings = ids_of({level: (*TABLE[level], *RECORDED[level]) for level in LEVELS}, _with_seed)


def ids(level: Level) -> Sequence[str]:
    """Case ids of a level and those below it; those of recordings where llama.cpp is there to make them."""
    return _ids(level) if zoo.available() else _ids_with_recordings(level)


def build(case_id: str) -> Case:
    """The case behind an id.

    Raises:
        UsageError: the id cannot be read, no graph can be built from it, or it has no such block.
        UnavailableError: the architecture is one that only llama.cpp knows, and there is none here.
    """
    body, _ = split_id(case_id, NAME, "ARCH-key=value,layer=N,block=NAME")
    bare, which = without(body, KEYS)
    values, given = read_keys(case_id, which, KEYS)
    source = f"{bare}@{case_id.rpartition('@')[2]}"
    whole = make(f"{NAME}/{source}") if split_arch(bare)[0] else zoo.build(f"{zoo.NAME}/{source}")
    case = alone(case_id, whole, Block(values["layer"], values["block"]))
    return replace(case, family=NAME, params={**case.params, **given})


FAMILY = Family(NAME, "each architecture's sublayers alone", ids, build, lacks=metadata.lacks)
