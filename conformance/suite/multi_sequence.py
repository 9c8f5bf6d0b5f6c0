"""The family `multi_sequence`: up to eight sequences in one graph that come, go, share and are of different lengths.

With a stream each a graph reads the streams from the first to the last of its sequences, and a batch of sequences that
are no neighbours becomes two graphs; in one stream all sequences' cells lie mixed.
"""

from __future__ import annotations

from .decoder import make
from .decoder.listed import ids_by_size
from .family import Family, Level

NAME = "multi_sequence"

_TINY = "llama-l=1,embd=32,heads=4,kv=2,head=16,ff=32,vocab=32"
_BOTH = "{fa=1|fa=0}"
_WAYS = "{unified=0|unified=1}"
_COME_AND_GO = "p5+9+1+3.d1.rm1.d1.back2.d1.add1.p2+4+1+1.d1"
_APART = "p3+5+2+4.p1+0+2+0.p0+3+0+0.p2+0+0+1"
"""Subsets whose sequences are no neighbours."""
_LATE = "p0+0+4+0.p3+0+0+0.p0+0+1+5.p2+6+1+1.d1"
"""The last comes first: cells of the sequences lie in another order than the sequences."""
_AS_MANY = "p2+2+0.p3+3+3.p5+5+0"
"""As many tokens of each sequence as there are sequences, twice; then not."""
_EIGHT = "p1+2+3+4+5+6+7+8.d1.rm0.rm5.d1.add5.p2+1+1+1+3+1+1.d1"

TABLE: dict[Level, tuple[str, ...]] = {
    "smoke": (
        f"{_TINY},seqs=4,ctx=256,{_BOTH},run={_COME_AND_GO}",
        f"{_TINY},seqs=3,ctx=256,unified=1,fa=0,run=p5+9+1.d1.cp0.d1.rm1.d1",
        f"{_TINY},seqs=4,ctx=256,unified=1,fa=1,run=at20.{_LATE}.cp0.d1",
        f"{_TINY.replace('heads=4', 'heads=2')},seqs=4,ctx=256,fa=0,run={_APART}",
        f"{_TINY},seqs=3,ctx=300,run=at280.p2+9+1.d1",
        f"{_TINY},seqs=3,ctx=256,run={_AS_MANY}",
    ),
    "standard": (
        f"{_TINY},{{seqs=1|seqs=2|seqs=3|seqs=5|seqs=8}},ctx=256,{_WAYS},{_BOTH},run=p4.d2",
        f"{_TINY},seqs=4,ctx=256,{_WAYS},{_BOTH},run={{{_COME_AND_GO}|{_APART}|{_LATE}}}",
        f"{_TINY},seqs=4,ctx=256,{_WAYS},{_BOTH},run=at20.{{{_COME_AND_GO}|{_APART}|{_LATE}}}",
        f"{_TINY},seqs=8,ctx=256,{_WAYS},{_BOTH},run={_EIGHT}",
        f"{_TINY},{{seqs=2|seqs=5}},ctx=256,unified=1,{_BOTH},run=p9.{{cp0|cp1}}.d2.rm0.d1",
        f"{_TINY},seqs=3,ctx=512,unified=1,{_BOTH},run=at84.p2+5+1.d1.rm1.d1.add1.p3+4+2",
        f"{_TINY},seqs=3,ctx=300,{_WAYS},{_BOTH},run=at90.p2+5+1.d1.rm1.d1",
        f"{_TINY},seqs=3,ctx=300,{_BOTH},run=at290.p2+5+1.d1.rm1.d1",
        f"{_TINY},seqs=3,ctx=256,{{cache=f32|cache=bf16}},{_WAYS},{_BOTH},run=p5+9+1.d1",
        f"{_TINY.replace('head=16', 'head=32')},seqs=3,ctx=256,{{cache=q8_0|cache=q4_0}},{_WAYS},run=p5+9+1.d1",
        f"{_TINY},seqs=3,ctx=256,write=cpy,{_BOTH},run=p5+9+1.d1",
        f"{_TINY},seqs=3,ctx=256,ubatch=8,{_WAYS},{_BOTH},run=p20+3+7.d1",
        f"{_TINY},seqs=3,ctx=256,{_WAYS},{_BOTH},run=o3+5+1.o2",
        f"{_TINY},seqs=3,ctx=256,{_WAYS},{_BOTH},run={_AS_MANY}",
        f"{_TINY},seqs=3,ctx=256,{_WAYS},run=p9+20+5.shift3.p2+1+1.d1",
        f"{{qwen3-l=1|gpt-oss-l=1|gemma2-l=2|lfm2-l=2}},embd=32,ff=32,vocab=32,seqs=3,ctx=256,{_WAYS},run=p5+9+1.d1.rm1.d1",
        f"{{gemma2-l=2|gpt-oss-l=1}},embd=32,ff=32,vocab=32,seqs=3,ctx=512,ubatch=32,{_WAYS},fa=0,run=p90+3+40.d1",
        f"{_TINY},rope=none,alibi=8,seqs=3,ctx=256,{_WAYS},{_BOTH},run=p5+9+1.d1.rm1.d1",
    ),
    "full": (
        f"{_TINY},{{seqs=6|seqs=7|seqs=8}},{_WAYS},{_BOTH},{{cache=f16|cache=f32}},run=at40.p3.d3.rm2.d2.add2.p4.d2",
        f"{_TINY.replace('l=1', 'l=3')},seqs=8,ctx=1024,{_WAYS},{_BOTH},run=10(d3.rm1.d2.add1.p5)",
    ),
}
"""Level -> ids without family and seed that it adds."""

FAMILY = Family(
    NAME, "sequences of different lengths that come, go and share their cells", ids_by_size(NAME, TABLE), make
)
