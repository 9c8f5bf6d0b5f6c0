"""Ops over rows: sums, norms, sorting, and rows by index."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import Tensor, dims
from conformance.ggml.types import I32
from conformance.suite.data import distinct, integers, normal, values

from .bench import BLOCKS, FLOATS, INPLACE, Bench, Timed, cases


@cases(
    "SUM_ROWS MEAN",
    keys="ne=SHAPE vne=",
    standard=(
        "[SUM_ROWS|MEAN]-f32-ne=[1x7|2x5x3x2|33x5x3x2|67x4|256x5|1025x3|4096x2]",
        "[SUM_ROWS|MEAN]-f32-ne=35x6x3x2,vne=[pad|rows|off|slab|p0213|p0321|pad.p0213|flat]",
    ),
    full=("[SUM_ROWS|MEAN]-f32-ne=[65536x3|4096x129|65537x2|4096x4100]",),
    sizes=("[SUM_ROWS|MEAN]-f32-ne=[255x3|257x3|511x3|512x3|513x3|3x65537]",),
    pairs=(
        "[SUM_ROWS|MEAN]-f32-ne=[35x6x3x2|2x5|1x7|130x1x4][|,vne=pad|,vne=rows|,vne=off|,vne=slab|,vne=part|,vne=p0213|,vne=p0321|,vne=flat]",
    ),
)
def _sum(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal(1.0, 0.25))
    return bench.b.sum_rows(a) if bench.id.op == "SUM_ROWS" else bench.b.mean(a)


_NORMAL = normal(1.5, 0.5)


@cases(
    "NORM RMS_NORM L2_NORM",
    keys=f"ne=SHAPE vne= {INPLACE} eps=1e-5",
    standard=(
        "[NORM|RMS_NORM|L2_NORM]-f32-ne=[7x5x3x2|64x6|67x4|257x3x2|2048x2]",
        "[NORM|RMS_NORM|L2_NORM]-f32-ne=[64x5x2|33x4],eps=[0.0|1e-6|0.1|10.0]",
        "[NORM|RMS_NORM|L2_NORM]-f32-ne=35x6x3x2,vne=[pad|rows|off|slab|p0213|p0321|pad.p0213]",
        "[NORM|L2_NORM]-f32-ne=18x6x3x2,vne=[p1023|p2013|pad.p1023]",
        "[NORM|RMS_NORM|L2_NORM]-f32-ne=64x5x2,inplace=[leaf|mid]",
        "[NORM|RMS_NORM|L2_NORM]-f32-ne=40x5x2,vne=pad,inplace=leaf",
        "RMS_NORM-f32-ne=40x5x2[|,vne=pad],inplace=input",
    ),
    full=("[NORM|RMS_NORM|L2_NORM]-f32-ne=[4096x65|16384x3|65537x2]", "RMS_NORM-f32-ne=4096x4100"),
    sizes=("[NORM|RMS_NORM|L2_NORM]-f32-ne=[255x3|256x3|511x3|512x3|513x3|7x65537]",),
    pairs=(
        "[NORM|RMS_NORM|L2_NORM]-f32-ne=[35x6x3x2|64x5x2|1x7|130x1x4][|,vne=pad|,vne=rows|,vne=off|,vne=slab|,vne=part|,vne=p0213|,vne=p0321][|,inplace=leaf|,inplace=mid|,inplace=input],eps=[1e-5|0.1]",
    ),
    timed=(Timed("RMS_NORM-f32-ne=2048x64", 64, 16, "smoke"),),
)
def _norm(bench: Bench) -> Sequence[Tensor]:
    a = bench.first("a", "ne", _NORMAL)
    return bench.outputs(a, bench.build(bench.id.op.lower())(a, bench.v["eps"]))


@cases(
    "GROUP_NORM",
    keys=f"ne=SHAPE vne= {INPLACE} groups=1 eps=1e-5",
    standard=(
        "GROUP_NORM-f32-ne=9x5x12x2,groups=[1|3|5|12]",
        "GROUP_NORM-f32-ne=64x1x32,groups=4,eps=[0.1|1e-6]",
        "GROUP_NORM-f32-ne=9x5x12x2,groups=4,[vne=pad|vne=off|inplace=leaf|inplace=mid]",
    ),
    full=("GROUP_NORM-f32-ne=64x33x320,groups=32",),
    pairs=(
        "GROUP_NORM-f32-ne=[9x5x12x2|16x1x12],groups=[1|3|5|12][|,vne=pad|,vne=off|,vne=rows|,vne=slab|,vne=part][|,inplace=leaf|,inplace=mid],eps=[1e-5|0.1]",
    ),
)
def _group_norm(bench: Bench) -> Sequence[Tensor]:
    a = bench.first("a", "ne", _NORMAL)
    return bench.outputs(a, bench.build("group_norm")(a, bench.v["groups"], bench.v["eps"]))


_SORTED = "[3x3|2x3|16x10|60x10|7x5x3x2|128x4x2|513x3|1024x2]"


@cases(
    "ARGSORT",
    keys="ne=SHAPE vne= order=ASC|DESC",
    standard=(
        f"ARGSORT-f32-ne={_SORTED},order=[ASC|DESC]",
        "ARGSORT-f32-ne=24x6x3,vne=[pad|off|flat],order=[ASC|DESC]",
        "ARGSORT-f32-ne=24x6,vne=rows,order=[ASC|DESC]",
    ),
    full=("ARGSORT-f32-ne=[8192x17|2x4097|2048x2x1x3],order=[ASC|DESC]",),
    pairs=("ARGSORT-f32-ne=[24x6x3x2|1x7|130x4][|,vne=pad|,vne=rows|,vne=off|,vne=flat],order=[ASC|DESC]",),
)
@cases(
    "TOP_K",
    keys="ne=SHAPE vne= k=1",
    standard=(
        "TOP_K-f32-ne=[16x10|60x5x3|128x4x2|513x3|1024x2],k=[1|2|3|8|15]",
        "TOP_K-f32-ne=8x5,k=[1|2|7]",
        "TOP_K-f32-ne=24x6x3,vne=[pad|off],k=[4|23]",
    ),
    full=("TOP_K-f32-ne=[8192x17|151936x2],k=[1|40|100]",),
    pairs=("TOP_K-f32-ne=[24x6x3x2|24x1|130x4][|,vne=pad|,vne=rows|,vne=off|,vne=flat],k=[1|2|5|24]",),
)
def _sort(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.first("a", "ne", distinct(-8.0, 8.0))
    if bench.id.op == "TOP_K":
        return bench.b.top_k(a, v["k"])
    return bench.b.argsort(a, SORT_ORDER[v["order"]])


@cases(
    "ARGMAX",
    keys="ne=SHAPE vne=",
    standard=("ARGMAX-f32-ne=[9x6|17x5|1025x3]", "ARGMAX-f32-ne=33x6,vne=[pad|rows|off]"),
    sizes=("ARGMAX-f32-ne=[257x3|3x65537]",),
    full=("ARGMAX-f32-ne=151936x2",),
)
def _argmax(bench: Bench) -> Tensor:
    return bench.b.argmax(bench.first("a", "ne", distinct(-8.0, 8.0)))


_DESTINATIONS = f"[{FLOATS}|{BLOCKS}]"


@cases(
    "SET_ROWS",
    keys="a=SHAPE n=1 ids=NUMBERS va= vb= vids=",
    types="a b ids",
    standard=(
        f"SET_ROWS-{_DESTINATIONS}+[f32+i64|f32+i32|f16+i64|f16+i32]-a=256x7,n=4",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x7,n=1",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x7,n=7",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x5x2x2,n=3,[ids=2x2|ids=1]",
        f"SET_ROWS-{_DESTINATIONS}+f32+i32-a=256x5x4x2,n=2,ids=2",
        f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=256x9x2,n=4,[vb=pad|va=off,vb=p0213|va=slab]",
        f"SET_ROWS-{_DESTINATIONS}+f16+i64-a=256x9x2,n=4,va=slab,vb=pad",
        "SET_ROWS-[f32|f16|q8_0]+f32+i64-a=256x9x2,n=4,va=p0213,ids=2,vids=[pad|off]",
        "SET_ROWS-[f32|f16|bf16]+[f32|f16]+i64-a=[1x33|31x6],n=5",
        "SET_ROWS-i32+f32+i64-a=33x6,n=4",
    ),
    full=(f"SET_ROWS-{_DESTINATIONS}+f32+i64-a=1024x4096,n=512",),
    sizes=("SET_ROWS-[f32+f32+i32|f32+f32+i64|f16+f32+i64|q8_0+f32+i64]-a=32x131080,n=40",),
    pairs=(
        f"SET_ROWS-{_DESTINATIONS}+[f32+i64|f32+i32|f16+i64|f16+i32]-a=256x9x4x4,n=[1|4|9],ids=[1|4|2|1x4|4x2|2x2][|,va=pad|,va=off|,va=rows|,va=slab|,va=part|,va=p0213][|,vb=pad|,vb=off|,vb=rows|,vb=slab|,vb=part|,vb=p0213][|,vids=pad|,vids=off|,vids=rows|,vids=part]",
    ),
    timed=(
        Timed("SET_ROWS-f16+f32+i64-a=512x4096,n=64", 64, 32),
        Timed("SET_ROWS-q8_0+f32+i64-a=512x4096,n=64", 64, 32),
    ),
)
def _set_rows(bench: Bench) -> Tensor:
    v, (type_a, type_b, type_ids) = bench.v, bench.types
    n0, n1, n2, n3 = v["a"]
    n = v["n"]
    ids_ne = dims(n, *v["ids"])
    a = bench.operand("cache_k_l0", type_a, v["a"], values(type_a), v["va"], keep=True)
    b = bench.operand("b", type_b, (n0, n, n2, n3), normal(300.0) if type_a is I32 else normal(), v["vb"])
    ids = bench.lists("ids", type_ids, ids_ne, n1, v["vids"])
    return bench.b.set_rows(a, b, ids)


@cases(
    "GET_ROWS",
    keys="a=SHAPE n=1 va= vids=",
    types="a ids",
    standard=(
        f"GET_ROWS-[{FLOATS}|i32|{BLOCKS}]+i32-a=256x5,n=[1|9]",
        f"GET_ROWS-[{FLOATS}|i32|{BLOCKS}]+i32-a=256x6x3x2,n=4",
        f"GET_ROWS-[{FLOATS}|i32|{BLOCKS}]+i32-a=256x6x3x2,n=4,[va=pad|va=p0213,vids=p1023|va=slab,vids=pad]",
        f"GET_ROWS-[{FLOATS}|i32]+i32-a=[1x9|33x7],n=[1|12]",
    ),
    full=(
        f"GET_ROWS-[{FLOATS}|i32|{BLOCKS}]+i32-a=4096x1000,n=64",
        "GET_ROWS-[f32|f16]+i32-[a=1x33554500|a=256x131100],n=64",
        "GET_ROWS-[q4_0|q8_0|q4_K]+i32-a=256x131100,n=64",
    ),
    sizes=("GET_ROWS-[f32|f16|q4_0|q8_0]+i32-[a=32x131080,n=40|a=32x9,n=65540]",),
    pairs=(
        f"GET_ROWS-[{FLOATS}|i32|{BLOCKS}]+i32-a=256x6[|x3|x1x2|x3x2],n=[1|4|9][|,va=pad|,va=off|,va=rows|,va=slab|,va=part|,va=p0213][|,vids=pad|,vids=off|,vids=rows|,vids=slab|,vids=p1023]",
    ),
    timed=(Timed("GET_ROWS-q4_0+i32-a=2048x4096,n=64", 64, 16),),
)
def _get_rows(bench: Bench) -> Tensor:
    v = bench.v
    _, n, n2, n3 = v["a"]
    a = bench.operand("token_embd.weight", bench.types[0], v["a"], values(bench.types[0]), v["va"], keep=True)
    ids = bench.operand("ids", bench.types[1], (v["n"], n2, n3, 1), integers(0, n), v["vids"])
    return bench.b.get_rows(a, ids)
