"""The family `relations`: pairs of runs that must give the same result.

`relations/chunked-run=p40.d2,to=p7.p33.d2,fa=0@5`: the relation, then the parameters of its two runs. These
describe a decoder (`arch`, and keys of a decoder). Relations of any graph, such as `renamed` and `memory`, also take
`graph=random` or `graph=alias` with keys of that family, `graph=tbo` with a name of that family, and `graph=product`
(a matrix product) with keys of `weight_placement`. `after` takes the keys of the family `alias`. docs/suite.md
describes each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from conformance.case.case import Case
from conformance.ggml.errors import GraphError, UsageError
from conformance.suite import alias, random_graphs, tbo, weight_placement
from conformance.suite.decoder import keys_of, make
from conformance.suite.decoder.config import PRESETS
from conformance.suite.family import Family, Key, Level, Table, ids_of, keys, read_keys, split_id, text, with_seed, word
from conformance.suite.grid import Keys, grid, points

from . import pairs, sessions
from .relation import applies, read

__all__ = ["FAMILY", "applies", "build", "read"]

NAME = "relations"

_OWN: dict[str, dict[str, Key]] = {
    "chunked": {"to": text("p1", "a plan like p7.p33")},
    "reset": {"before": text("p9.d2", "a plan like p9.d2")},
    "rewound": keys("back=3"),
    "renamed": keys("how=other|none|one|swapped"),
    "restored": keys("at=0"),
}
"""Relation -> keys that only it has."""
_SAME: dict[str, Callable[[str, Case, int], Case]] = {
    relation.__name__: relation
    for relation in (
        pairs.memory,
        pairs.warm,
        pairs.buffers,
        pairs.threads,
        sessions.apart,
        sessions.weights,
        sessions.unread,
        sessions.reused,
    )
}
NAMES = (*pairs.DECODERS, "renamed", "restored", *_SAME, "after")
_ARCH = {"arch": word(*PRESETS)}
_GRAPH = keys("graph=decoder|random|alias|product|tbo")


def build(case_id: str) -> Case:
    """Build the relation of an id; UsageError if it is invalid or no graph can be built from it."""
    form = f"{'|'.join(NAMES)}-key=value,key=value"
    body, seed = split_id(case_id, NAME, form)
    name, _, rest = body.partition("-")
    if name not in NAMES:
        raise UsageError(f"case {case_id!r}: {NAME}/{form}@seed expected")
    if name == "after":
        return pairs.after(case_id, *alias.read(f"{alias.NAME}/{rest}@{seed}"))
    try:
        if name in pairs.DECODERS:
            arch = _split(case_id, rest, _ARCH)[0]["arch"]
            values, given = read_keys(case_id, rest, {**_ARCH, **keys_of(arch), **_OWN.get(name, {})})
            return pairs.relate(pairs.Request(case_id, name, arch, values, given, seed))
        return _of_itself(case_id, name, rest, seed)
    except (GraphError, UsageError) as e:
        raise UsageError(f"case {case_id!r}: {e}") from None


def _of_itself(case_id: str, name: str, rest: str, seed: int) -> Case:
    values, others = _split(case_id, rest, {**_GRAPH, **_ARCH, **_OWN.get(name, {})})
    if values["graph"] == "random":
        base = random_graphs.build(f"{random_graphs.NAME}/{others}@{seed}")
    elif values["graph"] == "product":
        base = weight_placement.build(f"{weight_placement.NAME}/product-{others}@{seed}")
    elif values["graph"] == tbo.NAME:
        base = tbo.build(f"{tbo.NAME}/{others}@{seed}")
    elif values["graph"] == alias.NAME:
        base = alias.build(f"{alias.NAME}/{others}@{seed}")
    else:
        base = make(f"{NAME}/{values['arch']}{'-' if others else ''}{others}@{seed}")
    base = replace(base, params={"graph": values["graph"], **base.params})
    if name == "renamed":
        return pairs.renamed(case_id, base, values["how"], seed)
    if name == "restored":
        return sessions.restored(case_id, base, values["at"], seed)
    return _SAME[name](case_id, base, seed)


def _split(case_id: str, rest: str, own: Mapping[str, Key]) -> tuple[dict[str, Any], str]:
    """Split text into the values of `own` keys and the text of all others."""
    parts = rest.split(",") if rest else []
    values, _ = read_keys(case_id, ",".join(p for p in parts if p.partition("=")[0] in own), own)
    return values, ",".join(p for p in parts if p.partition("=")[0] not in own)


_TINY: Keys = {"l": 1, "embd": 32, "heads": 2, "kv": 1, "ff": 32, "vocab": 32}
_RANDOM: Keys = {"graph": "random", "nodes": "18 40", "steps": 3, "d": 32, "w": "f32 q8_0"}

TABLE: Table = {
    "smoke": (
        grid("chunked", **_TINY, run="o24.d1", to="o7.o1.o16.d1"),
        grid("permuted", **_TINY, seqs=3, unified=1, run="p5+9+2.d2"),
        grid("rewound", **_TINY, run="p20.d4", back=3),
        grid("exact_n_kv", **_TINY, run="p20.d2"),
        grid("renamed", **_TINY, run="p9.d2", how="swapped"),
        "buffers-l=1,embd=64,ff=64,w=q4_0,run=p9.d2",
        grid("after", differs="eps weight"),
        grid("restored", **_TINY, run="p9.d2"),
        grid("memory warm weights", graph="product", w="q8_0", d=2048),
        grid("unread", **_TINY, run="p9.d3"),
        grid("reused", **_TINY, run="p9.d4"),
        "memory-graph=alias,differs=eps,shared=1",
        grid("threads", **_TINY, borders=points("w=f16,run=p9.d2 ctx=1024,run=at700.d2")),
        grid("weights", **_TINY, w="q8_0", run="p9.d2"),
    ),
    "standard": (
        grid("batch", **_TINY, seqs=3, run="p5+9+2.d2"),
        grid("reset", **_TINY, fa=0, run="p9.d2", before="p20.d1"),
        grid("memory", **_TINY, run="p9.d3"),
        grid("warm", **_TINY, run="p9.d2"),
        grid("after", differs="edge type"),
        "after-differs=weight,k=2048",
        grid("apart", **_TINY, run="p9.d1"),
        grid("reused", graph="alias", differs="eps edge outputs", shared=1, order="abab aab"),
        grid("memory", graph="alias", differs=" ".join(alias.SHARED), shared=1),
        grid("chunked", fa="0 1", cache="f16 f32 bf16", run="o40.d2", to="o7.o32.o1.d2"),
        grid("chunked", cache=points("cache=q8_0,head=32 cache=q4_0,head=32"), run="o40.d2", to="o7.o32.o1.d2"),
        grid("chunked", fa="0 1", ctx=768, run="p300.o4", to="p100.p156.p44.o3.o1"),
        grid("chunked", w="q4_0 q8_0", write="cpy", run="o33.d2", to="o32.o1.d2"),
        grid("batch", seqs="2 4", unified="0 1", fa="0 1", run="p7.d2"),
        grid("batch", seqs=3, unified="0 1", fa="0 1", run="p5+9+2.d2.rm1.d2.add1.p3+6+1.d1"),
        "batch-seqs=3,unified=0,cache=q8_0,head=32,run=p6.d3",
        grid("permuted", seqs="2 4", unified="0 1", fa="0 1", run="p6.d3"),
        grid("permuted", seqs=3, unified="0 1", run="p5+9+2.d2"),
        grid("reset", fa="0 1", cache="f16 f32", run="p9.d3 o17.p250", before="p250.d8"),
        grid("rewound", fa="0 1", write="set_rows cpy", run="p254.d4", back="3 9"),
        grid("exact_n_kv", fa="0 1", run="p30.d3 p254.d5 p37.d1", ctx=768),
        grid("chunked", to="o7.o9.d2", arch="qwen3 gemma2 gpt-oss", run="o16.d2"),
        grid("exact_n_kv", ctx=512, arch="qwen3 gemma2 gpt-oss", run="o16.d2"),
        grid("rewound", back=2, arch="qwen3 gemma2 gpt-oss", run="o16.d2"),
        grid("batch", seqs=3, unified="0 1", arch="gemma2 lfm2", run="p5.d2"),
        grid("exact_n_kv", seqs=2, unified="0 1", fa="0 1", run="p30.d3"),
        grid("renamed", fa="0 1", seqs=2, run="p9.d2", how="other none one swapped"),
        grid("renamed", **_RANDOM, how="none swapped"),
        grid("memory", fa="0 1", write="set_rows cpy", run="p254.d4.back2.p3.d1"),
        "memory-seqs=3,run=p5+9+2.d2.rm1.d2",
        grid("memory", **_TINY, run="p9.d3"),
        grid("memory", **_RANDOM),
        grid("warm", fa="0 1", run="p250.d8"),
        grid("warm", **_RANDOM),
        grid("buffers", w="f32 f16 q4_0 q8_0", run="p30.d3"),
        grid("buffers", w="q4_K q6_K", embd=256, heads=4, kv=2, head=64, ff=256, run="p9.d2"),
        "buffers-w=q4_0,tied=1,run=p30.d3",
        grid("after", differs=" ".join(alias.DIFFERS)),
        grid("restored", fa="0 1", write="set_rows cpy", run="p30.d2"),
        grid("restored", cache=points("cache=f32 cache=bf16 cache=q8_0,head=32"), run="p9.p4.d2"),
        grid("restored", seqs=3, unified="0 1", run="p5+9+2.d2.rm1.d2"),
        grid("restored", arch="gemma2 gpt-oss lfm2", run="p9.d2"),
        grid("after", differs=" ".join(alias.PRODUCTS), k=2048),
        grid("renamed memory warm buffers weights", graph="product", w="f16 q4_0", d=2048, n=17),
        grid("restored", fa="0 1", write="set_rows cpy", run="p30.d4", at=2),
        grid("restored", cache=points("cache=f32 cache=bf16 cache=q8_0,head=32"), run="p254.d4", at="1 2"),
        grid("restored", seqs=3, unified="0 1", run="p9.d4", at=2),
        grid("restored", arch="gemma2 lfm2", run="p9.d4", at=2),
        grid("weights", fa="0 1", w="f32 f16 q4_0 q8_0", run="p30.d2"),
        grid("weights", w="q4_K q6_K", embd=256, heads=4, kv=2, head=64, ff=256, run="p9.d2"),
        grid("weights", variant=points("tied=1,w=q8_0 qkv=fused qkvbias=1 freqs=1"), run="p9.d2"),
        grid("weights", arch="gemma2 gpt-oss lfm2", run="p9.d2"),
        grid("weights", **_RANDOM),
        grid("unread", fa="0 1", write="set_rows cpy", run="p30.d4 p254.d4.back2.p3.d1"),
        grid("unread", cache=points("cache=f32 cache=bf16 cache=q8_0,head=32"), run="p9.p4.d3"),
        grid("unread", seqs=3, unified="0 1", run="p5+9+2.d3.rm1.d2"),
        grid("unread", arch="gemma2 gpt-oss lfm2", run="p9.d3"),
        grid("unread", graph="alias", differs="eps offset cache"),
        grid("reused", variant=points("fa=0 fa=1 cache=q8_0,head=32 seqs=3,unified=0 seqs=3,unified=1"), run="p9.d4"),
        grid("reused", arch="gemma2 gpt-oss lfm2", run="p9.d4"),
        grid("threads", **_TINY, run="p9.d2"),
        grid("threads", fa="0 1", groups=points("heads=4 heads=7,kv=7"), run="p33.d2"),
        grid("threads", seqs=3, cache=points("cache=f16 cache=q8_0,head=32"), run="p5+9+2.d2"),
        grid("threads", variant=points("fa=0 fa=1,cache=f32 cache=q8_0,head=32"), ctx=1024, run="at700.d2"),
        grid("threads", w="f16 q8_0 q4_0", embd=256, ff=256, run="p33.d1"),
        "threads-w=q4_K,embd=256,heads=4,head=64,ff=256,run=p9.d1",
        grid("threads", arch="gemma2 gpt-oss lfm2", run="p9.d1"),
        grid("apart", fa="0 1", write="set_rows cpy", run="p9.d1"),
        grid("apart", arch="gemma2 gpt-oss lfm2", run="p9.d1"),
        grid("apart", **_RANDOM),
        grid("threads", graph="random", nodes="18 40", steps=1, d=32, w="f32 q8_0"),
    ),
    "full": (
        grid("chunked", fa="0 1", ctx=2048, run="p510.o4", to="p255.p200.p55.o4"),
        grid("batch", seqs=8, variant=points("unified=0 unified=1,ctx=4096"), run="p250.d8"),
        grid("renamed", graph="random", nodes="7 30 55", steps=4, how="swapped"),
        grid("memory", graph="random", nodes="7 30 55", steps=8),
    ),
}


_ids = ids_of(TABLE, lambda body: with_seed(NAME, body))


@cache
def ids(level: Level) -> Sequence[str]:
    """Return the ids of the table, and `apart` of fusions of test-backend-ops (`full`: of all)."""
    return (*_ids(level), *(f"{NAME}/apart-graph=tbo,{row.name}@0" for row in tbo.fusions(level)))


FAMILY = Family(NAME, "two runs of one backend that must give the same result", ids, build)
