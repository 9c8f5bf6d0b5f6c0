"""The family `gqa`: attention with fewer KV heads than heads, in every shape, with all that changes its logits.

Ratios to 16:1, odd ones among them, head sizes from 32 to 256, V of another size than K, ALiBi, softcap and sinks;
prefill and decode, cells that are masked between others, as many cells as there are (300) and a multiple of 256.
"""

from __future__ import annotations

from .decoder import make
from .decoder.listed import ids_by_size
from .family import Family, Level

NAME = "gqa"

_TINY = "llama-l=1,embd=32,ff=32,vocab=32"
_RATIOS = "{heads=1,kv=1|heads=2,kv=1|heads=3,kv=1|heads=5,kv=1|heads=7,kv=1|heads=8,kv=1|heads=16,kv=1}"
"""Multi-query."""
_GROUPS = "{heads=4,kv=4|heads=6,kv=2|heads=10,kv=2|heads=14,kv=2|heads=12,kv=3|heads=15,kv=5|heads=16,kv=4}"
_SIZES = "{head=40|head=64|head=80|head=96|head=112|head=128|head=192|head=256}"
_K_AND_V = "{head=64,headv=32|head=32,headv=64|head=96,headv=64|head=192,headv=128|head=256,headv=40}"
_BOTH = "{fa=1|fa=0}"
_CAPPED = "softcap=3"
"""Of the order of the logits, so that it bends them."""
_SLOPED = "rope=none,alibi=8"
_EXACT = "ctx=300,run=at290.p3.d2"
"""As many cells as there are, and not a multiple of 256."""

TABLE: dict[Level, tuple[str, ...]] = {
    "smoke": (
        f"{_TINY},heads=6,kv=2,head=32,{_BOTH},run=at250.p5.d2",
        f"{_TINY},heads=3,kv=1,head=64,headv=32,{_SLOPED},{_CAPPED},{_BOTH},run=p7.d1",
        f"{_TINY},heads=4,kv=2,head=32,sinks=1,ctx=300,{_BOTH},run=at290.p3.d1",
        f"{_TINY},heads=10,kv=2,head=32,cache=q8_0,run=at250.p3.d1",
        "llama-l=1,embd=2048,ff=32,vocab=32,heads=4,kv=2,head=32,w=q4_0,run=at250.p3.d1",
    ),
    "standard": (
        f"{_TINY},{_RATIOS},head=32,{_BOTH},run=at250.p5.d2",
        f"{_TINY},{_GROUPS},head=32,{_BOTH},run=at250.p5.d2",
        f"{_TINY},heads=3,kv=1,{_SIZES},{_BOTH},run=p9.d1",
        f"{_TINY},heads=6,kv=2,{_K_AND_V},{_BOTH},run=p9.d1",
        f"{_TINY},heads=6,kv=2,head=32,qkv=fused,{_BOTH},run=p9.d1",
        f"{_TINY},{{heads=3,kv=1|heads=6,kv=2|heads=8,kv=2|heads=12,kv=4}},head=32,{_SLOPED},{_BOTH},run=at40.p5.d1",
        f"{_TINY},{{heads=6,kv=2|heads=4,kv=1}},head=32,{{{_CAPPED}|sinks=1|{_CAPPED},sinks=1}},{_BOTH},run=at40.p5.d1",
        f"{_TINY},heads=6,kv=2,head=32,{_SLOPED},{{{_CAPPED}|sinks=1|{_CAPPED},sinks=1}},{_BOTH},run=at40.p5.d1",
        f"{_TINY},{{heads=6,kv=2|heads=7,kv=1}},head=32,{{cache=f32|cache=q8_0,cache_v=f16}},{_BOTH},run=at250.p5.d2",
        f"{_TINY},heads=6,kv=2,{{head=32|head=64}},cache=q8_0,run=at250.p5.d2",
        f"{_TINY},{{heads=6,kv=2|heads=5,kv=1}},head=32,{_EXACT},{{cache=f16|cache=f32|{_SLOPED}|sinks=1|{_CAPPED}}},{_BOTH}",
        f"{_TINY},heads=6,kv=2,head=32,seqs=3,unified=1,{{cache=f16|{_SLOPED}|sinks=1}},{_BOTH},run=at40.p3.d1.rm1.d2",
        f"{_TINY},heads=6,kv=2,head=32,seqs=3,{{cache=f16|{_SLOPED}|sinks=1}},{_BOTH},run=at40.p3+1+6.d1",
        f"{_TINY},heads=6,kv=2,head=32,{{cache=f16|{_SLOPED}}},{_BOTH},run=p70.p1.p2.p33",
        f"{{gemma2|gpt-oss}}-l=2,embd=32,ff=32,vocab=32,{{heads=6,kv=2|heads=5,kv=1}},head=32,{_BOTH},run=at250.p5.d2",
        f"qwen3-l=1,embd=32,ff=32,vocab=32,{{heads=6,kv=2|heads=5,kv=1}},head=32,{_BOTH},run=at250.p5.d2",
        "llama-l=2,embd=64,ff=64,vocab=32,heads=6,kv=2,head=32,w={f16|q8_0|q4_0},run=at250.p5.d2",
    ),
    "full": (
        f"{_TINY},{_RATIOS},{_SIZES},{_BOTH},run=at250.p5.d2",
        f"{_TINY},{_GROUPS},{_K_AND_V},{_BOTH},run=at250.p5.d2",
        f"{_TINY},{_GROUPS},head=32,{_SLOPED},{_CAPPED},sinks=1,{_BOTH},run=at250.p5.d2",
    ),
}
"""Level -> ids without family and seed that it adds."""

FAMILY = Family(NAME, "attention with fewer KV heads than heads, in every shape", ids_by_size(NAME, TABLE), make)
