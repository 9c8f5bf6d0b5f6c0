"""The family `kv_growth`: decoders whose KV cache grows over 256, 512, … cells, is rewound, emptied and filled again.

Graph-level backends compile a cgraph for the sizes they first see; here those sizes change under them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .decoder import make, with_seed
from .family import LEVELS, Family, Level
from .ops.grammar import expand

NAME = "kv_growth"

_TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
_LONG = "l=1,embd=2048,heads=2,kv=1,head=64,ff=64,vocab=32"
"""Projections of rows that accelerators take (2,048 long), everything else small."""
_CACHES = "{cache=f16|cache=bf16|cache=f32|cache=q8_0,head=32|cache=q4_0,head=32}"
_CACHES_V = "{cache=f16|cache=bf16|cache=f32|cache=q8_0,cache_v=f16,head=32|cache=q4_0,cache_v=f32,head=32}"
"""V kept transposed cannot be quantised."""
_CROSS = "run=at253.d5.back3.d2.reset.p6.d2"
_WINDOW = "ctx=1024,ubatch=64,run=at250.p10.d3.p300.d2.reset.p9.d2"
"""A window of 32 over 256 cells: the prompt goes round them, other layers grow to 768, then a second prompt."""
_SHIFT = "run=at250.d1.shift9.p30.d2.back4.d2"
"""A context that is full forgets its first tokens: K in the cache is rotated to where its tokens moved."""
_ALL = "p250.15(d12.p244).d6"
"""From nothing to 4,096 tokens, over each multiple of 256 token by token."""
_COME_AND_GO = "p5.d3.rm1.d2.back4.d2.add1.p3+9+3+3.d1"
_FOUR = f"{{seqs=4,run=at250.{_COME_AND_GO}|seqs=4,unified=1,run=at60.{_COME_AND_GO}}}"
"""Four sequences with a stream each, and in one stream."""

TABLE: dict[Level, tuple[str, ...]] = {
    "smoke": (
        f"llama-{_TINY},run=p253.d5",
        f"llama-{_TINY},fa=0,run=at254.d4.back3.d2",
        f"llama-{_TINY},write=cpy,fa=0,run=at254.d4.reset.p3.d1",
        f"llama-{_TINY},w=q4_0,cache=q8_0,head=32,run=at254.d4",
        f"llama-{_TINY},seqs=3,run=at254.d4.rm0.d2",
        f"llama-{_TINY},seqs=3,unified=1,run=at84.d4.rm1.d3",
        f"llama-{_TINY},run=at245.d1.shift9.p30.d2",
        f"gemma2-{_TINY.replace('l=1', 'l=2')},ubatch=64,run=at250.d2.p10.d2",
        f"llama-{_LONG},w=q8_0,run=at252.p3.d3",
    ),
    "standard": (
        f"llama-{_CACHES},{{write=set_rows|write=cpy}},{_CROSS}",
        f"llama-{_CACHES_V},fa=0,{{write=set_rows|write=cpy}},{_CROSS}",
        f"llama-{{cache=f16|cache=q8_0,head=32|fa=0}},{_FOUR}",
        "llama-seqs=4,write=cpy,{fa=0|fa=1},run=at253.p2+3+1+4.d3",
        "llama-{fa=0|fa=1},ubatch=64,run=p300.d3",
        "llama-{fa=0|fa=1},run=p100.p100.p52.p1.d4.p60",
        "llama-{fa=0|fa=1},ctx=1024,run=at500.p20.d3.back30.p10",
        "llama-{fa=0|fa=1},ctx=300,run=at250.d8",
        "llama-{rope=neox|freqs=1|tied=1|mixed=0},run=p254.d4",
        "llama-cache={q8_0|q4_0},head=64,{rot=0|rot=1},run=at253.p2.d3",
        "llama-w={f16|bf16|q4_0|q8_0|q5_1},run=at253.p2.d3",
        "llama-w={q4_K|q6_K},embd=256,heads=4,kv=2,head=64,ff=256,run=at253.p2.d3",
        "llama-w=q4_0,attn_k=f16,attn_v=f32,ffn_up=f16,ffn_down=q8_0,output=q6_K,embd=256,heads=8,head=32,run=at253.p2.d3",
        "llama-seqs=2,unified=1,{fa=0|fa=1},run=at20.d2.cp0.d3",
        "llama-{fa=0|fa=1},run=o12.d2.o3",
        "llama-{fa=0|fa=1},run=o12.o7.p9.p5.d1",
        "llama-heads=2,kv=2,seqs=2,fa=0,run=at253.p2.d3",
        f"llama-{{cache=f16|cache=f32|cache=q8_0,head=64|cache=q4_0,head=32|fa=0|seqs=2|seqs=3,unified=1,ctx=1024}},{_SHIFT}",
        f"{{gemma2|gpt-oss}}-{{fa=1|fa=0}},{_WINDOW}",
        "gemma2-seqs=2,{unified=0|unified=1},ctx=1024,ubatch=64,run=at250.p10+3.d3.rm1.d2.add1.p80+40.d2",
        f"gemma2-swafull=1,{_SHIFT}",
        "lfm2-{fa=1|fa=0},run=at253.p2.d3.reset.p6.d2",
        "lfm2-seqs=3,{unified=0|unified=1},run=at20.p2.d2.rm1.d2.add1.p3.d2",
        "qwen3-{fa=1|fa=0},run=at253.p2.d3",
        f"llama-{_LONG},{{w=f16|w=q4_0|w=q8_0,fa=0}},run=at240.p65.d2.back3.d2",
    ),
    "full": (
        f"llama-{_TINY},{{fa=0|fa=1}},{{seqs=1|seqs=4}},ctx=4096,run={_ALL}",
        "llama-w=q4_0,l=4,embd=256,heads=8,kv=2,head=32,ff=512,ctx=1024,{fa=0|fa=1},run=p600.d8.p160.d8",
    ),
}
"""Level -> ids without family and seed that it adds; `{a|b}` stands for both."""


def ids(level: Level) -> Sequence[str]:
    """Case ids of a level and those below it."""
    return _ids(level)


@cache
def _ids(level: Level) -> tuple[str, ...]:
    levels = LEVELS[: LEVELS.index(level) + 1]
    return tuple(with_seed(NAME, body) for name in levels for pattern in TABLE[name] for body in expand(pattern))


FAMILY = Family(NAME, "decoders whose KV cache grows past 256 cells, shrinks and grows again", ids, make)
