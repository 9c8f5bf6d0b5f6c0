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
"""Level -> ids without family and seed that it adds, of architectures that the builder knows."""

ZOO_TABLE: Table = {
    "smoke": (
        f"mamba-{_TWO},block=recurrent",
        f"gptneox-{_TWO},set=rope.dimension_count:64,block=attention",
    ),
    "standard": (
        f"modern-bert-{_TWO},block=[attention|feedforward]",
        f"bert-{_TWO},block=[attention|feedforward]",
        f"bloom-{_TWO},block=attention",
        f"dbrx-{_TWO},block=[attention|feedforward]",
        f"mpt-{_TWO},block=[attention|feedforward]",
        f"qwen2moe-{_TWO},block=feedforward",
        f"t5-{_TWO},block=[attention|feedforward]",
        f"gptneox-{_TWO},block=attention",
        f"hunyuan-moe-{_TWO},block=feedforward",
        f"bitnet-{_TWO},block=[attention|feedforward]",
        f"falcon-{_TWO},block=attention",
        f"granite-{_TWO},block=[attention|feedforward]",
        f"llama4-{_TWO},block=attention",
        f"phi2-{_TWO},block=[attention|feedforward]",
        f"jina-bert-v2-{_TWO},block=[attention|feedforward]",
        f"olmo2-{_TWO},block=attention",
        f"stablelm-{_TWO},block=attention",
        f"command-r-{_TWO},block=attention",
        f"gemma3-{_TWO},block=attention",
        f"minicpm3-{_TWO},block=[attention|feedforward]",
        f"olmo-{_TWO},block=[attention|feedforward]",
        f"deepseek2-{_TWO},block=attention",
        f"grok-{_TWO},block=[attention|feedforward]",
        f"cohere2-{_TWO},block=attention",
        f"mamba-{_TWO},block=recurrent",
        f"mamba2-{_TWO},block=recurrent",
        f"plamo2-{_TWO},block=attention",
        f"plamo2-{_TWO},layer=1,block=recurrent",
        f"qwen3next-{_TWO},block=attention",
        f"kimi-linear-{_TWO},block=attention",
        f"kimi-linear-{_TWO},layer=1,block=attention",
        f"falcon-h1-{_TWO},block=[attention|feedforward]",
        f"rwkv7-{_TWO},block=[feedforward|recurrent]",
        f"rwkv7-{_TWO},layer=1,block=recurrent",
        f"rwkv6-{_TWO},block=recurrent",
        f"rwkv6-{_TWO},layer=1,block=recurrent",
    ),
    "full": (
        f"chatglm-{_TWO},block=feedforward",
        f"exaone4-{_TWO},block=post_attention_norm",
        f"qwen2-{_TWO},block=head",
        f"wavtokenizer-dec-{_TWO},block=head",
        f"jais2-{_TWO},block=feedforward",
        f"neo-bert-{_TWO},layer=1,block=feedforward",
        f"phimoe-{_TWO},block=[ffn_norm|head]",
        f"deci-{_TWO},block=feedforward",
        f"llama-embed-{_TWO},block=feedforward",
        f"nomic-bert-moe-{_TWO},layer=1,block=feedforward",
        f"bailingmoe-{_TWO},block=feedforward",
        f"cogvlm-{_TWO},block=attention",
        f"bert-{_TWO},block=attn_output_norm",
        f"bloom-{_TWO},block=head",
        f"dbrx-{_TWO},block=head",
        f"dream-{_TWO},block=attention",
        f"mimo2-{_TWO},block=[attention|feedforward]",
        f"qwen-{_TWO},block=attention",
        f"t5-{_TWO},block=[attn_norm|ffn_norm]",
        f"t5-{_TWO},layer=1,block=feedforward",
        f"t5encoder-{_TWO},block=attention",
        f"t5encoder-{_TWO},layer=1,block=feedforward",
        f"jina-bert-v3-{_TWO},block=attention",
        f"ernie4_5-moe-{_TWO},layer=1,block=feedforward",
        f"lfm2moe-{_TWO},block=head",
        f"lfm2moe-{_TWO},layer=1,block=[feedforward|recurrent]",
        f"plamo3-{_TWO},block=attention",
        f"bailingmoe2-{_TWO},block=attention",
        f"bailingmoe2-{_TWO},layer=1,block=feedforward",
        f"openelm-{_TWO},block=attention",
        f"baichuan-{_TWO},block=attention",
        f"llada-moe-{_TWO},block=[attention|feedforward]",
        f"gemma-embedding-{_TWO},block=attention",
        f"nemotron_h-{_TWO},block=attention",
        f"nemotron_h-{_TWO},layer=2,block=feedforward",
        f"arcee-{_TWO},block=[attention|feedforward]",
        f"codeshell-{_TWO},block=[attention|attn_norm]",
        f"gemma-{_TWO},block=[attention|feedforward]",
        f"gemma4-{_TWO},block=[attention|feedforward|post_ffw_norm]",
        f"gemma4-{_TWO},layer=1,block=post_ffw_norm",
        f"granite-{_TWO},block=head",
        f"llama4-{_TWO},layer=1,block=feedforward",
        f"llama4-{_TWO},layer=3,block=attention",
        f"phi2-{_TWO},block=head",
        f"qwen3moe-{_TWO},block=feedforward",
        f"dots1-{_TWO},block=attention",
        f"exaone-moe-{_TWO},block=attention",
        f"exaone-moe-{_TWO},layer=1,block=attention",
        f"hunyuan-dense-{_TWO},block=attention",
        f"minimax-m2-{_TWO},block=attention",
        f"apertus-{_TWO},block=[attention|feedforward]",
        f"minicpm3-{_TWO},block=head",
        f"nemotron_h_moe-{_TWO},layer=2,block=feedforward",
        f"olmo-{_TWO},block=head",
        f"plamo-{_TWO},block=attention",
        f"chameleon-{_TWO},block=[attention|head]",
        f"qwen35moe-{_TWO},block=feedforward",
        f"afmoe-{_TWO},block=[attention|attn_norm|feedforward|ffn_norm|head]",
        f"afmoe-{_TWO},layer=1,block=feedforward",
        f"deepseek2-{_TWO},layer=1,block=feedforward",
        f"cohere2-{_TWO},block=[attn_norm|head]",
        f"cohere2-{_TWO},layer=1,block=[attention|attn_norm]",
        f"step35-{_TWO},block=attention",
        f"grovemoe-{_TWO},block=feedforward",
        f"mamba-{_TWO},block=attn_norm",
        f"mamba-{_TWO},layer=1,block=attn_norm",
        f"gemma3n-{_TWO},block=[attention|attn_norm|feedforward|head|post_attention_norm|post_ffw_norm]",
        f"gemma3n-{_TWO},layer=1,block=post_ffw_norm",
        f"granitehybrid-{_TWO},layer=1,block=recurrent",
        f"smallthinker-{_TWO},block=attention",
        f"smallthinker-{_TWO},layer=1,block=attention",
        f"jamba-{_TWO},layer=1,block=[attn_norm|recurrent]",
        f"arctic-{_TWO},block=attention",
        f"qwen3next-{_TWO},layer=1,block=attention",
        f"qwen35-{_TWO},block=[attention|head|post_attention_norm]",
        f"qwen35-{_TWO},layer=1,block=attention",
        f"glm-dsa-{_TWO},block=[attention|feedforward]",
        f"glm-dsa-{_TWO},layer=1,block=feedforward",
        f"kimi-linear-{_TWO},layer=1,block=[attn_norm|feedforward]",
        f"falcon-h1-{_TWO},layer=1,block=attention",
        f"arwkv7-{_TWO},block=[attn_norm|feedforward|ffn_norm|recurrent]",
        f"arwkv7-{_TWO},layer=1,block=recurrent",
        f"rwkv7-{_TWO},block=attn_norm",
        f"rwkv7-{_TWO},layer=1,block=feedforward",
        f"rwkv6-{_TWO},layer=1,block=feedforward",
        f"rwkv6qwen2-{_TWO},block=recurrent",
    ),
}
"""The same, of architectures that llama.cpp records; smallest first."""


def _with_seed(body: str) -> str:
    """The id of a table's row; blocks of one model have one seed, and so one model."""
    return with_seed(NAME, body, without(body, KEYS)[0])


_ids = ids_of(TABLE, _with_seed)
_ids_with_recordings = ids_of({level: (*TABLE[level], *ZOO_TABLE[level]) for level in LEVELS}, _with_seed)


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
