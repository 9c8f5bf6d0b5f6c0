"""Three families of decoders: growing KV caches, grouped heads, changing sequences.

`kv_growth`: the KV cache grows over 256, 512, … cells, is rewound, cleared and refilled. Graph-level backends compile a
cgraph for the sizes they first see; here those sizes change.

`gqa`: attention with fewer KV heads than heads. Ratios up to 16:1, including odd ones, head sizes from 32 to 256, V of
another size than K, ALiBi, softcap and sinks; prefill and decode, masked cells among others, n_kv equal to the number
of cells (300) and a multiple of 256.

`multi_sequence`: up to eight sequences of different lengths in one graph; they start, end and share cells. With a
stream per sequence, a graph reads the streams from the first to the last of its sequences, and a batch of non-adjacent
sequences becomes two graphs; in one stream the cells of all sequences are interleaved.
"""

from __future__ import annotations

from functools import partial

from .decoder import elements, make
from .family import Family, Table, ids_of, with_seed
from .grid import Keys, grid, points
from .ops.bench import BLOCKS_32, BLOCKS_256, FLOATS


def _family(name: str, summary: str, table: Table, *, by_size: bool = True) -> Family:
    ids = ids_of(table, lambda body: with_seed(name, body), elements if by_size else lambda _: 0)
    return Family(name, summary, ids, make)


_GROWING: Keys = {"l": 1, "embd": 32, "heads": 2, "kv": 1, "ff": 32, "vocab": 32}
_growing = partial(grid, "llama", **_GROWING)
_long = partial(grid, "llama", l=1, embd=2048, heads=2, kv=1, head=64, ff=64, vocab=32)
"""Projections with rows long enough for accelerators (2,048), everything else small."""
_SUPERBLOCKS = f"{BLOCKS_256} q1_0 q2_0 tq1_0 tq2_0 iq4_xs iq1_s iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s"
_CACHES = "cache=f16 cache=bf16 cache=f32 cache=q8_0,head=32 cache=q4_0,head=32"
_CACHES_V = "cache=f16 cache=bf16 cache=f32 cache=q8_0,cache_v=f16,head=32 cache=q4_0,cache_v=f32,head=32"
"""Key values without a quantised V, because a transposed V cannot be quantised."""
_CROSS: Keys = {"run": "at253.d5.back3.d2.reset.p6.d2"}
_WINDOW: Keys = {"ctx": 1024, "ubatch": 64, "run": "at250.p10.d3.p300.d2.reset.p9.d2"}
"""A window of 32 over 256 cells: a prompt wraps, other layers grow to 768, then another."""
_SHIFT: Keys = {"run": "at250.d1.shift9.p30.d2.back4.d2"}
"""A full context removes its first tokens: K in the cache is rotated to the new positions."""
_BLOCKS: Keys = {"ctx": 768, "run": "at200.p9.p20.d1.p250.d1.p240.d1"}
"""Prompts of four sizes, and tokens in three blocks; recompiles without a cache."""
_AGAIN: Keys = {"run": "at250.p3.d2.p33.d1.p5"}
"""Prompt, token, prompt: weights repacked for one token are used for many."""
_EXPERTS_AGAIN: Keys = {"run": "at252.o3.d1.o5"}
"""The same for experts: the last layer gives them only the tokens whose output is requested."""
_ALL = "p250.15(d12.p244).d6"
"""Zero to 4,096 tokens, over each multiple of 256 token by token."""
_COME_AND_GO = "p5.d3.rm1.d2.back4.d2.add1.p3+9+3+3.d1"
_FOUR = f"seqs=4,run=at250.{_COME_AND_GO} seqs=4,unified=1,run=at60.{_COME_AND_GO}"
"""Four sequences with a stream each, and in one stream."""

_AT_ONCE = "p257.d1 p512.d1 p513.d1 o257 at253.o259.d1 at255.p257.d1 p256.p256.p257"
"""Prompts in one graph around 256 and 512, where static models start another chunk."""
_BORDERS = "ctx=255,run=at252.p2.d1 ctx=256,run=at253.p2.d1 ctx=257,run=at253.p2.d2"
"""n_kv of exactly 255, 256 and 257."""

_KV_GROWTH: Table = {
    "smoke": (
        _growing(run="p253.d5"),
        _growing(fa=0, run="at254.d4.back3.d2"),
        _growing(write="cpy", fa=0, run="at254.d4.reset.p3.d1"),
        _growing(w="q4_0", cache="q8_0", head=32, run="at254.d4"),
        _growing(seqs=3, run="at254.d4.rm0.d2"),
        _growing(seqs=3, unified=1, run="at84.d4.rm1.d3"),
        _growing(run="at245.d1.shift9.p30.d2"),
        grid("gemma2", **_GROWING | {"l": 2}, base=1000000, baseswa=10000, ubatch=64, run="at250.d2.p10.d2"),
        _long(w="q8_0", run="at252.p3.d3"),
        _growing(fa=1, **_BLOCKS),
        _growing(cache="f16", ctx=1024, ubatch=1024, run="at255.p257.d1 p512.d1"),
        _growing(write="cpy", fa=1, **_CROSS),
        _growing(seqs=4, write="cpy", fa=0, run="at253.p2+3+1+4.d3"),
        _growing(fa=1, ctx=257, run="at253.p2.d2"),
        _growing(head=64, cache="q4_0", rot=1, run="at253.p2.d3"),
        _growing(w="q8_0", run="at253.p3.d2.p5"),
        grid("gpt-oss", **_GROWING, w="q4_0", **_EXPERTS_AGAIN),
        _growing(cache="f16", ctx=1024, ubatch=1024, run="at253.o259.d1"),
    ),
    "standard": (
        grid("gemma2", **_GROWING | {"l": 2}, ubatch=64, run="at250.d2.p10.d2"),
        grid("gemma2", **_GROWING | {"l": 2}, base=1000000, baseswa=10000, run="at253.p3.d1"),
        _growing(fa=0, **_BLOCKS),
        grid("llama", cache=points(_CACHES), write="set_rows cpy", **_CROSS),
        grid("llama", cache=points(_CACHES_V), fa=0, write="set_rows cpy", **_CROSS),
        grid("llama", cache=points("cache=f16 cache=q8_0,head=32 fa=0"), sequences=points(_FOUR)),
        grid("llama", seqs=4, write="cpy", fa="0 1", run="at253.p2+3+1+4.d3"),
        grid("llama", fa="0 1", ubatch=64, run="p300.d3"),
        grid("llama", fa="0 1", run="p100.p100.p52.p1.d4.p60"),
        grid("llama", fa="0 1", ctx=1024, run="at500.p20.d3.back30.p10"),
        grid("llama", fa="0 1", ctx=300, run="at250.d8"),
        grid("llama", variant=points("rope=neox freqs=1 tied=1 mixed=0"), run="p254.d4"),
        grid("llama", cache="q8_0 q4_0", head=64, rot="0 1", run="at253.p2.d3"),
        grid("llama", w="f16 bf16 q4_0 q8_0 q5_1", run="at253.p2.d3"),
        grid("llama", w="q4_K q6_K", embd=256, heads=4, kv=2, head=64, ff=256, run="at253.p2.d3"),
        "llama-w=q4_0,attn_k=f16,attn_v=f32,ffn_up=f16,ffn_down=q8_0,output=q6_K,embd=256,heads=8,head=32,run=at253.p2.d3",
        grid("llama", seqs=2, unified=1, fa="0 1", run="at20.d2.cp0.d3"),
        grid("llama", fa="0 1", run="o12.d2.o3"),
        grid("llama", fa="0 1", run="o12.o7.p9.p5.d1"),
        "llama-heads=2,kv=2,seqs=2,fa=0,run=at253.p2.d3",
        grid("llama", cache=points("cache=f16 cache=f32 cache=q8_0,head=64 cache=q4_0,head=32"), **_SHIFT),
        grid("llama", variant=points("fa=0 seqs=2 seqs=3,unified=1,ctx=1024"), **_SHIFT),
        grid("gemma2 gpt-oss", fa="1 0", **_WINDOW),
        grid("gemma2", seqs=2, unified="0 1", ctx=1024, ubatch=64, run="at250.p10+3.d3.rm1.d2.add1.p80+40.d2"),
        grid("gemma2", swafull=1, **_SHIFT),
        grid("lfm2", fa="1 0", run="at253.p2.d3.reset.p6.d2"),
        grid("lfm2", seqs=3, unified="0 1", run="at20.p2.d2.rm1.d2.add1.p3.d2"),
        grid("qwen3", fa="1 0", run="at253.p2.d3"),
        _long(variant=points("w=f16 w=q4_0 w=q8_0,fa=0"), run="at240.p65.d2.back3.d2"),
        grid("llama", cache=points("cache=q8_0,head=32 write=cpy seqs=2"), **_BLOCKS),
        grid("qwen3 gemma2 lfm2 gpt-oss", **_BLOCKS),
        _growing(cache=points("cache=f16 cache=q8_0,head=32 fa=0"), ctx=1024, ubatch=1024, run=_AT_ONCE),
        _growing(fa="1 0", write="cpy", ctx=1024, ubatch=1024, run="p257.d1.p512.d1"),
        grid("gemma2", **_GROWING | {"l": 2}, fa="1 0", ctx=1024, ubatch=1024, run="p513.d1"),
        _growing(fa="1 0", borders=points(_BORDERS)),
        _growing(w=f"{FLOATS} {BLOCKS_32} iq4_nl", **_AGAIN),
        grid("llama", l=1, embd=256, heads=4, kv=2, head=64, ff=256, vocab=256, w=_SUPERBLOCKS, **_AGAIN),
        grid("gpt-oss", **_GROWING, w=f"f16 bf16 {BLOCKS_32}", run="at250.o3.d2.o33.d1.o5"),
        grid("gpt-oss", l=1, embd=256, heads=4, kv=2, head=64, ff=256, vocab=256, w=_SUPERBLOCKS, **_EXPERTS_AGAIN),
        grid("gemma2", base=1000000, baseswa=10000, fa="1 0", run="at240.p3.d1.p40.d2"),
        grid("gemma2", base=1000000, baseswa=10000, **_SHIFT),
    ),
    "full": (
        _growing(fa="0 1", seqs="1 4", ctx=4096, run=_ALL),
        grid(
            "llama", w="q4_0", l=4, embd=256, heads=8, kv=2, head=32, ff=512, ctx=1024, fa="0 1", run="p600.d8.p160.d8"
        ),
    ),
}

KV_GROWTH = _family(
    "kv_growth", "decoders whose KV cache grows past 256 cells, shrinks and grows again", _KV_GROWTH, by_size=False
)

_TINY: Keys = {"embd": 32, "ff": 32, "vocab": 32}
_grouped = partial(grid, "llama", l=1, **_TINY)
_six = partial(_grouped, heads=6, kv=2, head=32)
_RATIOS = "heads=1,kv=1 heads=2,kv=1 heads=3,kv=1 heads=5,kv=1 heads=7,kv=1 heads=8,kv=1 heads=16,kv=1"
"""Multi-query attention."""
_GROUPS = "heads=4,kv=4 heads=6,kv=2 heads=10,kv=2 heads=14,kv=2 heads=12,kv=3 heads=15,kv=5 heads=16,kv=4"
_SIZES = "40 64 80 96 112 128 192 256"
_K_AND_V = "head=64,headv=32 head=32,headv=64 head=96,headv=64 head=192,headv=128 head=256,headv=40"
_ODD = "heads=6,kv=2 heads=5,kv=1"
_SCORES = "softcap=3 sinks=1 softcap=3,sinks=1"
"""A softcap of the same order as the logits, so that it has an effect."""
_SLOPED = "rope=none,alibi=8"
_EXACT: Keys = {"ctx": 300, "run": "at290.p3.d2"}
"""A context that is filled, and whose size is not a multiple of 256."""

_GQA: Table = {
    "smoke": (
        _six(fa="1 0", run="at250.p5.d2"),
        _grouped(heads=3, kv=1, head=64, headv=32, rope="none", alibi=8, softcap=3, fa=1, run="p7.d1"),
        _grouped(heads=4, kv=2, head=32, sinks=1, ctx=300, fa=1, run="at290.p3.d1"),
        _grouped(heads=10, kv=2, head=32, cache="q8_0", run="at250.p3.d1"),
        "llama-l=1,embd=2048,ff=32,vocab=32,heads=4,kv=2,head=32,w=q4_0,run=at250.p3.d1",
    ),
    "standard": (
        _grouped(heads=3, kv=1, head=64, headv=32, rope="none", alibi=8, softcap=3, fa=0, run="p7.d1"),
        _grouped(heads=4, kv=2, head=32, sinks=1, ctx=300, fa=0, run="at290.p3.d1"),
        _grouped(groups=points(_RATIOS), head=32, fa="1 0", run="at250.p5.d2"),
        _grouped(groups=points(_GROUPS), head=32, fa="1 0", run="at250.p5.d2"),
        _grouped(heads=3, kv=1, head=_SIZES, fa="1 0", run="p9.d1"),
        _grouped(heads=6, kv=2, sizes=points(_K_AND_V), fa="1 0", run="p9.d1"),
        _six(qkv="fused", fa="1 0", run="p9.d1"),
        _grouped(
            groups=points("heads=3,kv=1 heads=6,kv=2 heads=8,kv=2 heads=12,kv=4"),
            head=32,
            rope="none",
            alibi=8,
            fa="1 0",
            run="at40.p5.d1",
        ),
        _grouped(
            groups=points("heads=6,kv=2 heads=4,kv=1"), head=32, scores=points(_SCORES), fa="1 0", run="at40.p5.d1"
        ),
        _six(rope="none", alibi=8, scores=points(_SCORES), fa="1 0", run="at40.p5.d1"),
        _grouped(
            groups=points("heads=6,kv=2 heads=7,kv=1"),
            head=32,
            cache=points("cache=f32 cache=q8_0,cache_v=f16"),
            fa="1 0",
            run="at250.p5.d2",
        ),
        _grouped(heads=6, kv=2, head="32 64", cache="q8_0", run="at250.p5.d2"),
        _grouped(
            groups=points(_ODD),
            head=32,
            **_EXACT,
            scores=points(f"cache=f16 cache=f32 {_SLOPED} sinks=1 softcap=3"),
            fa="1 0",
        ),
        _six(seqs=3, unified=1, scores=points(f"cache=f16 {_SLOPED} sinks=1"), fa="1 0", run="at40.p3.d1.rm1.d2"),
        _six(seqs=3, scores=points(f"cache=f16 {_SLOPED} sinks=1"), fa="1 0", run="at40.p3+1+6.d1"),
        _six(scores=points(f"cache=f16 {_SLOPED}"), fa="1 0", run="p70.p1.p2.p33"),
        grid("gemma2 gpt-oss", l=2, **_TINY, groups=points(_ODD), head=32, fa="1 0", run="at250.p5.d2"),
        grid("qwen3", l=1, **_TINY, groups=points(_ODD), head=32, fa="1 0", run="at250.p5.d2"),
        grid("llama", l=2, embd=64, ff=64, vocab=32, heads=6, kv=2, head=32, w="f16 q8_0 q4_0", run="at250.p5.d2"),
        _six(fa="1 0", scores=points(f"cache=f16 {_SLOPED} sinks=1"), borders=points(_BORDERS)),
        _six(fa="1 0", ctx=1024, ubatch=1024, run=_AT_ONCE),
    ),
    "full": (
        _grouped(groups=points(_RATIOS), head=_SIZES, fa="1 0", run="at250.p5.d2"),
        _grouped(groups=points(_GROUPS), sizes=points(_K_AND_V), fa="1 0", run="at250.p5.d2"),
        _grouped(
            groups=points(_GROUPS), head=32, rope="none", alibi=8, softcap=3, sinks=1, fa="1 0", run="at250.p5.d2"
        ),
    ),
}

GQA = _family("gqa", "attention over few KV heads: ratios, head sizes, ALiBi, softcap, sinks, masked rows", _GQA)

_several = partial(grid, "llama", l=1, embd=32, heads=4, kv=2, head=16, ff=32, vocab=32)
_WAYS: Keys = {"unified": "0 1", "fa": "1 0"}
_JOIN_AND_LEAVE = "p5+9+1+3.d1.rm1.d1.back2.d1.add1.p2+4+1+1.d1"
_APART = "p3+5+2+4.p1+0+2+0.p0+3+0+0.p2+0+0+1"
"""Subsets of non-adjacent sequences."""
_LATE = "p0+0+4+0.p3+0+0+0.p0+0+1+5.p2+6+1+1.d1"
"""The last sequence comes first, so cells are in another order than sequences."""
_AS_MANY = "p2+2+0.p3+3+3.p5+5+0"
"""Token count per sequence equal to the number of sequences, twice; then different."""
_EIGHT = "p1+2+3+4+5+6+7+8.d1.rm0.rm5.d1.add5.p2+1+1+1+3+1+1.d1"

_MULTI_SEQUENCE: Table = {
    "smoke": (
        _several(seqs=4, ctx=256, fa=1, run=_JOIN_AND_LEAVE),
        _several(seqs=3, ctx=256, unified=1, fa=0, run="p5+9+1.d1.cp0.d1.rm1.d1"),
        _several(seqs=4, ctx=256, unified=1, fa=1, run=f"at20.{_LATE}.cp0.d1"),
        _several(heads=2, seqs=4, ctx=256, fa=0, run=_APART),
        _several(seqs=3, ctx=300, run="at280.p2+9+1.d1"),
        _several(seqs=3, ctx=256, run=_AS_MANY),
        _several(seqs=2, ctx=512, run="at254.d8"),  # long enough that loading the caches each step costs too much
    ),
    "standard": (
        _several(seqs=4, ctx=256, fa=0, run=_JOIN_AND_LEAVE),
        _several(seqs="1 2 3 5 8", ctx=256, **_WAYS, run="p4.d2"),
        _several(seqs=4, ctx=256, **_WAYS, run=f"{_JOIN_AND_LEAVE} {_APART} {_LATE}"),
        _several(seqs=4, ctx=256, **_WAYS, run=f"at20.{_JOIN_AND_LEAVE} at20.{_APART} at20.{_LATE}"),
        _several(seqs=8, ctx=256, **_WAYS, run=_EIGHT),
        _several(seqs="2 5", ctx=256, unified=1, fa="1 0", run="p9.cp0.d2.rm0.d1 p9.cp1.d2.rm0.d1"),
        _several(seqs=3, ctx=512, unified=1, fa="1 0", run="at84.p2+5+1.d1.rm1.d1.add1.p3+4+2"),
        _several(seqs=3, ctx=300, **_WAYS, run="at90.p2+5+1.d1.rm1.d1"),
        _several(seqs=3, ctx=300, fa="1 0", run="at290.p2+5+1.d1.rm1.d1"),
        _several(seqs=3, ctx=256, cache="f32 bf16", **_WAYS, run="p5+9+1.d1"),
        _several(head=32, seqs=3, ctx=256, cache="q8_0 q4_0", unified="0 1", run="p5+9+1.d1"),
        _several(seqs=3, ctx=256, write="cpy", fa="1 0", run="p5+9+1.d1"),
        _several(seqs=3, ctx=256, ubatch=8, **_WAYS, run="p20+3+7.d1"),
        _several(seqs=3, ctx=256, **_WAYS, run="o3+5+1.o2"),
        _several(seqs=3, ctx=256, **_WAYS, run=_AS_MANY),
        _several(seqs=3, ctx=256, unified="0 1", run="p9+20+5.shift3.p2+1+1.d1"),
        grid("qwen3 gpt-oss", l=1, **_TINY, seqs=3, ctx=256, unified="0 1", run="p5+9+1.d1.rm1.d1"),
        grid("gemma2 lfm2", l=2, **_TINY, seqs=3, ctx=256, unified="0 1", run="p5+9+1.d1.rm1.d1"),
        grid("gemma2", l=2, **_TINY, seqs=3, ctx=512, ubatch=32, unified="0 1", fa=0, run="p90+3+40.d1"),
        grid("gpt-oss", l=1, **_TINY, seqs=3, ctx=512, ubatch=32, unified="0 1", fa=0, run="p90+3+40.d1"),
        _several(rope="none", alibi=8, seqs=3, ctx=256, **_WAYS, run="p5+9+1.d1.rm1.d1"),
        _several(seqs=3, ctx=1024, ubatch=1024, **_WAYS, run="p257+1+255.d1 p171+171+171.d1"),
        _several(seqs=3, ctx=512, run="at254.d8"),
    ),
    "full": (
        _several(seqs="6 7 8", **_WAYS, cache="f16 f32", run="at40.p3.d3.rm2.d2.add2.p4.d2"),
        _several(l=3, seqs=8, ctx=1024, **_WAYS, run="10(d3.rm1.d2.add1.p5)"),
    ),
}

MULTI_SEQUENCE = _family(
    "multi_sequence", "1 to 8 sequences that start, end and share cells, in a stream each or in one", _MULTI_SEQUENCE
)
