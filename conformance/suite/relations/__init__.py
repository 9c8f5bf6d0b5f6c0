"""The family `relations`: pairs of runs that must give the same, whatever the right numbers are.

`relations/chunked-run=p40.d2,to=p7.p33.d2,fa=0@5`: name of the relation, then what its two runs are made of. A decoder
(`arch`, and keys of a decoder), or for those that any graph can be in, such as `renamed` and `memory`, with
`graph=random` or `graph=alias` a graph of that family (its keys), with `graph=tbo` one by its name there, with
`graph=product` a matrix product (keys of `weight_placement`); `after` takes the keys of the family `alias`. What each
claims: docs/suite/relations.md.
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

from . import pairs, sessions
from .claim import applies, read

__all__ = ["FAMILY", "applies", "build", "read"]

NAME = "relations"

_OWN: dict[str, dict[str, Key]] = {
    "chunked": {"to": text("p1", "a plan like p7.p33")},
    "reset": {"before": text("p9.d2", "a plan like p9.d2")},
    "rewound": keys("back=3"),
    "renamed": keys("how=other|none|one|swapped"),
    "restored": keys("at=0"),
}
"""Relation -> keys of its own."""
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
    """The relation behind an id; UsageError if it cannot be read, or no graph can be built from it."""
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
    """The values of `own` keys, and the text of all others."""
    parts = rest.split(",") if rest else []
    values, _ = read_keys(case_id, ",".join(p for p in parts if p.partition("=")[0] in own), own)
    return values, ",".join(p for p in parts if p.partition("=")[0] not in own)


_TINY = "l=1,embd=32,heads=2,kv=1,ff=32,vocab=32"
_RANDOM = "graph=random,nodes=[18|40],steps=3,d=32,w=[f32|q8_0]"

TABLE: Table = {
    "smoke": (
        f"chunked-{_TINY},run=o24.d1,to=o7.o1.o16.d1",
        f"batch-{_TINY},seqs=3,run=p5+9+2.d2",
        f"permuted-{_TINY},seqs=3,unified=1,run=p5+9+2.d2",
        f"reset-{_TINY},fa=0,run=p9.d2,before=p20.d1",
        f"rewound-{_TINY},run=p20.d4,back=3",
        f"exact_n_kv-{_TINY},run=p20.d2",
        f"renamed-{_TINY},run=p9.d2,how=swapped",
        f"memory-{_TINY},run=p9.d3",
        f"warm-{_TINY},run=p9.d2",
        "buffers-l=1,embd=64,ff=64,w=q4_0,run=p9.d2",
        "after-differs=[eps|edge|weight|type]",
        f"restored-{_TINY},run=p9.d2",
        "after-differs=weight,k=2048",
        "[memory|warm|weights]-graph=product,w=q8_0,d=2048",
        f"unread-{_TINY},run=p9.d3",
        f"weights-{_TINY},w=q8_0,run=p9.d2",
        f"reused-{_TINY},run=p9.d4",
        "memory-graph=alias,differs=eps,shared=1",
        f"threads-{_TINY},[run=p9.d2|ctx=1024,run=at700.d2]",
        f"apart-{_TINY},run=p9.d1",
    ),
    "standard": (
        "reused-graph=alias,differs=[eps|edge|outputs],shared=1,order=[abab|aab]",
        f"memory-graph=alias,differs=[{'|'.join(alias.SHARED)}],shared=1",
        "chunked-[fa=0|fa=1],[cache=f16|cache=f32|cache=bf16],run=o40.d2,to=o7.o32.o1.d2",
        "chunked-[cache=q8_0,head=32|cache=q4_0,head=32],run=o40.d2,to=o7.o32.o1.d2",
        "chunked-[fa=0|fa=1],ctx=768,run=p300.o4,to=p100.p156.p44.o3.o1",
        "chunked-w=[q4_0|q8_0],write=cpy,run=o33.d2,to=o32.o1.d2",
        "batch-seqs=[2|4],[unified=0|unified=1],[fa=0|fa=1],run=p7.d2",
        "batch-seqs=3,[unified=0|unified=1],[fa=0|fa=1],run=p5+9+2.d2.rm1.d2.add1.p3+6+1.d1",
        "batch-seqs=3,unified=0,cache=q8_0,head=32,run=p6.d3",
        "permuted-seqs=[2|4],[unified=0|unified=1],[fa=0|fa=1],run=p6.d3",
        "permuted-seqs=3,[unified=0|unified=1],run=p5+9+2.d2",
        "reset-[fa=0|fa=1],[cache=f16|cache=f32],[run=p9.d3|run=o17.p250],before=p250.d8",
        "rewound-[fa=0|fa=1],[write=set_rows|write=cpy],run=p254.d4,back=[3|9]",
        "exact_n_kv-[fa=0|fa=1],[run=p30.d3|run=p254.d5|run=p37.d1],ctx=768",
        "[chunked-to=o7.o9.d2|exact_n_kv-ctx=512|rewound-back=2],arch=[qwen3|gemma2|gpt-oss],run=o16.d2",
        "batch-seqs=3,[unified=0|unified=1],arch=[gemma2|lfm2],run=p5.d2",
        "exact_n_kv-seqs=2,[unified=0|unified=1],[fa=0|fa=1],run=p30.d3",
        "renamed-[fa=0|fa=1],seqs=2,run=p9.d2,how=[other|none|one|swapped]",
        f"renamed-{_RANDOM},how=[none|swapped]",
        "memory-[fa=0|fa=1],[write=set_rows|write=cpy],run=p254.d4.back2.p3.d1",
        "memory-seqs=3,run=p5+9+2.d2.rm1.d2",
        f"memory-{_TINY},run=p9.d3",
        f"memory-{_RANDOM}",
        "warm-[fa=0|fa=1],run=p250.d8",
        "warm-graph=random,nodes=[18|40],steps=3,d=32,w=[f32|q8_0]",
        "buffers-w=[f32|f16|q4_0|q8_0],run=p30.d3",
        "buffers-w=[q4_K|q6_K],embd=256,heads=4,kv=2,head=64,ff=256,run=p9.d2",
        "buffers-w=q4_0,tied=1,run=p30.d3",
        f"after-differs=[{'|'.join(alias.DIFFERS)}]",
        "restored-[fa=0|fa=1],[write=set_rows|write=cpy],run=p30.d2",
        "restored-[cache=f32|cache=bf16|cache=q8_0,head=32],run=p9.p4.d2",
        "restored-seqs=3,[unified=0|unified=1],run=p5+9+2.d2.rm1.d2",
        "restored-arch=[gemma2|gpt-oss|lfm2],run=p9.d2",
        f"after-differs=[{'|'.join(alias.PRODUCTS)}],k=2048",
        "[renamed|memory|warm|buffers|weights]-graph=product,w=[f16|q4_0],d=2048,n=17",
        "restored-[fa=0|fa=1],[write=set_rows|write=cpy],run=p30.d4,at=2",
        "restored-[cache=f32|cache=bf16|cache=q8_0,head=32],run=p254.d4,at=[1|2]",
        "restored-[seqs=3,unified=0|seqs=3,unified=1|arch=gemma2|arch=lfm2],run=p9.d4,at=2",
        "weights-[fa=0|fa=1],w=[f32|f16|q4_0|q8_0],run=p30.d2",
        "weights-w=[q4_K|q6_K],embd=256,heads=4,kv=2,head=64,ff=256,run=p9.d2",
        "weights-[tied=1,w=q8_0|qkv=fused|qkvbias=1|freqs=1|arch=gemma2|arch=gpt-oss|arch=lfm2],run=p9.d2",
        f"weights-{_RANDOM}",
        "unread-[fa=0|fa=1],[write=set_rows|write=cpy],[run=p30.d4|run=p254.d4.back2.p3.d1]",
        "unread-[cache=f32|cache=bf16|cache=q8_0,head=32],run=p9.p4.d3",
        "unread-[seqs=3,unified=0|seqs=3,unified=1],run=p5+9+2.d3.rm1.d2",
        "unread-arch=[gemma2|gpt-oss|lfm2],run=p9.d3",
        "unread-graph=alias,differs=[eps|offset|cache]",
        "reused-[fa=0|fa=1|cache=q8_0,head=32|seqs=3,unified=0|seqs=3,unified=1],run=p9.d4",
        "reused-arch=[gemma2|gpt-oss|lfm2],run=p9.d4",
        "threads-[fa=0|fa=1],[heads=4|heads=7,kv=7],run=p33.d2",
        "threads-seqs=3,[cache=f16|cache=q8_0,head=32],run=p5+9+2.d2",
        "threads-[fa=0|fa=1,cache=f32|cache=q8_0,head=32],ctx=1024,run=at700.d2",
        "threads-w=[f16|q8_0|q4_0],embd=256,ff=256,run=p33.d1",
        "threads-w=q4_K,embd=256,heads=4,head=64,ff=256,run=p9.d1",
        "threads-arch=[gemma2|gpt-oss|lfm2],run=p9.d1",
        "apart-[fa=0|fa=1],[write=set_rows|write=cpy],run=p9.d1",
        "apart-arch=[gemma2|gpt-oss|lfm2],run=p9.d1",
        f"apart-{_RANDOM}",
        "threads-graph=random,nodes=[18|40],steps=1,d=32,w=[f32|q8_0]",
    ),
    "full": (
        "chunked-[fa=0|fa=1],ctx=2048,run=p510.o4,to=p255.p200.p55.o4",
        "batch-seqs=8,[unified=0|unified=1],run=p250.d8",
        "renamed-graph=random,nodes=[7|30|55],steps=4,how=swapped",
        "memory-graph=random,nodes=[7|30|55],steps=8",
    ),
}


_ids = ids_of(TABLE, lambda body: with_seed(NAME, body))


@cache
def ids(level: Level) -> Sequence[str]:
    """Those of the table, and `apart` of test-backend-ops' fusions: at `full` of all."""
    return (*_ids(level), *(f"{NAME}/apart-graph=tbo,{row.name}@0" for row in tbo.fusions(level)))


FAMILY = Family(NAME, "two runs that must give the same: a backend against itself", ids, build)
