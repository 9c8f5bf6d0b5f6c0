"""Ops that move rows and elements: GET_ROWS, SET_ROWS, CPY, CONT, DUP of every type and layout."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, dims
from conformance.ggml.types import F32, I32

from .bench import Bench
from .data import integers, normal, values
from .grammar import BLOCKS, FLOATS, OpCases, count, numbers, opt_shape, shape, text, word

_WIDE = normal(300.0)


def _get_rows(bench: Bench) -> Tensor:
    v = bench.v
    _, n, n2, n3 = v["a"]
    a = bench.operand("token_embd.weight", bench.types[0], v["a"], values(bench.types[0]), v["va"], keep=True)
    ids = bench.operand("ids", bench.types[1], (v["n"], n2, n3, 1), integers(0, n), v["vids"])
    return bench.b.get_rows(a, ids)


GET_ROWS = OpCases(
    ops=("GET_ROWS",),
    types=("a", "ids"),
    keys={"a": shape(), "n": count(1), "va": text(), "vids": text()},
    make=_get_rows,
    standard=(
        f"GET_ROWS-{{{FLOATS}|i32|{BLOCKS}}}+i32-a=256x5,n={{1|9}}",
        f"GET_ROWS-{{{FLOATS}|i32|{BLOCKS}}}+i32-a=256x6x3x2,n=4",
        f"GET_ROWS-{{{FLOATS}|i32|{BLOCKS}}}+i32-a=256x6x3x2,n=4,{{va=pad|va=p0213,vids=p1023|va=slab,vids=pad}}",
        f"GET_ROWS-{{{FLOATS}|i32}}+i32-a={{1x9|33x7}},n={{1|12}}",
    ),
    full=(f"GET_ROWS-{{{FLOATS}|i32|{BLOCKS}}}+i32-a=4096x1000,n=64",),
)


def _set_rows(bench: Bench) -> Tensor:
    v, (type_a, type_b, type_ids) = bench.v, bench.types
    n0, n1, n2, n3 = v["a"]
    n = v["n"]
    ids_ne = dims(n, *v["ids"])
    a = bench.operand("cache_k_l0", type_a, v["a"], values(type_a), v["va"], keep=True)
    b = bench.operand("b", type_b, (n0, n, n2, n3), _WIDE if type_a is I32 else normal(), v["vb"])
    ids = bench.lists("ids", type_ids, ids_ne, n1, v["vids"])
    return bench.b.set_rows(a, b, ids)


_DESTINATIONS = f"{{{FLOATS}|{BLOCKS}}}"

SET_ROWS = OpCases(
    ops=("SET_ROWS",),
    types=("a", "b", "ids"),
    keys={"a": shape(), "n": count(1), "ids": numbers(), "va": text(), "vb": text(), "vids": text()},
    make=_set_rows,
    standard=(
        f"SET_ROWS-{_DESTINATIONS}+{{f32+i64|f32+i32|f16+i64|f16+i32}}-a=256x7,n=4",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x7,n=1",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x7,n=7",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x5x2x2,n=3,{{ids=2x2|ids=1}}",
        f"SET_ROWS-{_DESTINATIONS}+f32+i32-a=256x5x4x2,n=2,ids=2",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x9x2,n=4,{{vb=pad|va=off,vb=p0213|va=slab}}",
        f"SET_ROWS-{_DESTINATIONS}+f16+i64-a=256x9x2,n=4,va=slab,vb=pad",
        "SET_ROWS-{f32|f16|q8_0}+f32+i64-a=256x9x2,n=4,va=p0213,ids=2,vids={pad|off}",
        "SET_ROWS-{f32|f16|bf16}+{f32|f16}+i64-a={1x33|31x6},n=5",
        "SET_ROWS-i32+f32+i64-a=33x6,n=4",
    ),
    full=(f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=1024x4096,n=512",),
)


def _cpy(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    fill = _WIDE if type_a is F32 and type_b is I32 else values(type_a)
    a = bench.operand("a", type_a, v["a"], fill, v["va"])
    if v["form"] == "cast":
        return bench.b.cast(a, type_b)
    b = bench.operand("cache_v_l0", type_b, v["b"] or v["a"], values(type_b), v["vb"], keep=True)
    return bench.b.cpy(a, b)


_PAIRS = (
    "{f32+f32|f32+f16|f32+bf16|f32+i32|f16+f32|f16+f16|f16+bf16|bf16+f32|bf16+f16|bf16+bf16|i32+f32|i32+i32|i64+i64}"
)
_ALL_BLOCKS = f"{{{BLOCKS}}}"
_SAME_BLOCKS = "{" + "|".join(f"{t}+{t}" for t in BLOCKS.split("|")) + "}"

CPY = OpCases(
    ops=("CPY",),
    types=("a", "b"),
    keys={"a": shape(), "b": opt_shape(), "va": text(), "vb": text(), "form": word("", "cast")},
    make=_cpy,
    standard=(
        f"CPY-{_PAIRS}-a=12x5x3x2{{|,form=cast}}",
        f"CPY-{_PAIRS}-a=12x5x4x2,va={{pad|p0213|p1023|p3210}}",
        f"CPY-{_PAIRS}-a=12x5x4x2,vb={{pad|off|p0213|p1023}}",
        f"CPY-{_PAIRS}-a=12x5x4x2,va=p1023,vb=rows",
        f"CPY-{_PAIRS}-a=12x6x4,b={{24x12|288|6x2x24}}",
        f"CPY-{_PAIRS}-a=12x6x4,b=6x48,va=p2013",
        f"CPY-f32+{_ALL_BLOCKS}-a=256x3x2{{|,va=pad|,va=p0213|,vb=off|,form=cast}}",
        f"CPY-{{f16|bf16}}+{_ALL_BLOCKS}-a=256x3x2{{|,va=pad}}",
        f"CPY-{_ALL_BLOCKS}+f32-a=256x3x2{{|,va=p0213|,vb=pad|,b=256x6|,form=cast}}",
        f"CPY-{_SAME_BLOCKS}-a=256x4x3{{|,va=p0213|,vb=slab}}",
    ),
    full=(f"CPY-{_PAIRS}-a=1024x64x9,va=p1023", f"CPY-f32+{_ALL_BLOCKS}-a=1024x512"),
)


def _cont(bench: Bench) -> Tensor:
    v, (type_,) = bench.v, bench.types
    a = bench.operand("a", type_, v["ne"], values(type_), v["vne"], keep=v["form"] == "inplace")
    if bench.id.op == "DUP":
        return bench.b.dup_inplace(a) if v["form"] == "inplace" else bench.b.dup(a)
    return bench.b.cont(a) if v["to"] is None else bench.b.cont_4d(a, *v["to"])


EVERY = f"{{{FLOATS}|i32|i64|{BLOCKS}}}"
ELEMENTS = f"{{{FLOATS}|i32|i64}}"

CONT = OpCases(
    ops=("CONT", "DUP"),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "to": opt_shape(), "form": word("", "inplace")},
    make=_cont,
    standard=(
        f"CONT-{EVERY}-ne=256x3x2{{|,vne=pad|,vne=p0213|,vne=rows}}",
        f"CONT-{ELEMENTS}-ne=10x6x4x2,vne={{p1023|p3210|pad.p2103|off|slab.p1203|p0321}}",
        f"DUP-{EVERY}-ne=256x3x2{{|,vne=p0213}}",
        f"DUP-{ELEMENTS}-ne=10x6x4x2,vne={{p1023|pad|off}}",
        f"CONT-{ELEMENTS}-ne=10x6x4x2,to={{60x8|480|10x2x3x8}},vne={{p1023|pad}}",
        "DUP-{f32|f16|q8_0}-ne=256x3,form=inplace",
    ),
    full=(f"CONT-{ELEMENTS}-ne=256x64x9,vne=p1023",),
)


CASES = (GET_ROWS, SET_ROWS, CPY, CONT)
