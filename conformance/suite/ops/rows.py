"""Ops over rows: sums, norms, sorting, and those that lay rows side by side or slide along them."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import Tensor, dims
from conformance.ggml.types import F32

from .bench import INPLACE, Bench
from .data import distinct, normal, values
from .grammar import BLOCKS_32, BLOCKS_256, OpCases, count, real, shape, text, word


def _sum(bench: Bench) -> Tensor:
    a = bench.operand("a", bench.types[0], bench.v["ne"], normal(1.0, 0.25), bench.v["vne"])
    return bench.b.sum_rows(a) if bench.id.op == "SUM_ROWS" else bench.b.mean(a)


SUMS = OpCases(
    ops=("SUM_ROWS", "MEAN"),
    types=("a",),
    keys={"ne": shape(), "vne": text()},
    make=_sum,
    standard=(
        "{SUM_ROWS|MEAN}-f32-ne={1x7|2x5x3x2|33x5x3x2|67x4|256x5|1025x3|4096x2}",
        "{SUM_ROWS|MEAN}-f32-ne=35x6x3x2,vne={pad|rows|off|slab|p0213|p0321|pad.p0213|flat}",
    ),
    full=("{SUM_ROWS|MEAN}-f32-ne={65536x3|4096x129}",),
)

_NORMAL = normal(1.5, 0.5)


def _norm(bench: Bench) -> Sequence[Tensor]:
    a = bench.destination("a", "ne", _NORMAL)
    make = getattr(bench.b, bench.id.op.lower() + ("_inplace" if bench.v["inplace"] else ""))
    return bench.outputs(a, make(a, bench.v["eps"]))


NORMS = OpCases(
    ops=("NORM", "RMS_NORM", "L2_NORM"),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "inplace": INPLACE, "eps": real(1e-5)},
    make=_norm,
    standard=(
        "{NORM|RMS_NORM|L2_NORM}-f32-ne={7x5x3x2|64x6|67x4|257x3x2|2048x2}",
        "{NORM|RMS_NORM|L2_NORM}-f32-ne={64x5x2|33x4},eps={0.0|1e-6|0.1|10.0}",
        "{NORM|RMS_NORM|L2_NORM}-f32-ne=35x6x3x2,vne={pad|rows|off|slab|p0213|p0321|pad.p0213}",
        "{NORM|L2_NORM}-f32-ne=18x6x3x2,vne={p1023|p2013|pad.p1023}",
        "{NORM|RMS_NORM|L2_NORM}-f32-ne=64x5x2,inplace={leaf|mid}",
        "{NORM|RMS_NORM|L2_NORM}-f32-ne=40x5x2,vne=pad,inplace=leaf",
        "RMS_NORM-f32-ne=40x5x2{|,vne=pad},inplace=input",
    ),
    full=("{NORM|RMS_NORM|L2_NORM}-f32-ne={4096x65|16384x3}",),
)


def _repeat(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.operand("a", bench.types[0], v["a"], values(bench.types[0]), v["va"])
    return bench.b.repeat_4d(a, *v["to"])


REPEAT = OpCases(
    ops=("REPEAT",),
    types=("a",),
    keys={"a": shape(), "to": shape(), "va": text()},
    make=_repeat,
    standard=(
        "REPEAT-{f32|f16|bf16|i32}-a=9x5x3x2,to={9x5x3x2|18x5x3x2|9x15x3x2|9x5x6x2|9x5x3x8|27x10x6x4}",
        "REPEAT-{f32|f16|bf16|i32}-a={1|17|1x5|1x1x3},to=17x5x3x2",
        "REPEAT-{f32|f16|bf16|i32}-a=8x6x3x2,to=16x6x6x4,va={pad|rows|off|slab|p0213|p0321}",
    ),
    full=("REPEAT-{f32|f16|bf16|i32}-a=128x1x8x3,to=128x4x8x96",),
)


def _concat(bench: Bench) -> Tensor:
    v, dim, (type_,) = bench.v, bench.v["dim"], bench.types
    ne_b = list(v["a"])
    ne_b[dim] = v["n"]
    a = bench.operand("a", type_, v["a"], values(bench.types[0]), v["va"])
    b = bench.operand("b", type_, dims(*ne_b), values(bench.types[0]), v["vb"])
    return bench.b.concat(a, b, dim)


CONCAT = OpCases(
    ops=("CONCAT",),
    types=("a",),
    keys={"a": shape(), "n": count(1), "dim": count(0), "va": text(), "vb": text()},
    make=_concat,
    standard=(
        "CONCAT-{f32|f16|bf16|i32|i64}-a=11x5x3x2,{n=11,dim=0|n=4,dim=1|n=5,dim=2|n=1,dim=3}",
        "CONCAT-{f32|f16|bf16|i32}-a=12x6x4x2,dim={0|1|2|3},n=7,{va=p1023|vb=p2103|va=pad,vb=p0213|va=rows,vb=off}",
        "CONCAT-i64-a=12x6x4x2,dim={0|2},n=7,{va=pad,vb=p0213|va=rows,vb=off}",
        f"CONCAT-{{{BLOCKS_32}}}-a=64x5x3x2,{{n=32,dim=0|n=4,dim=1|n=2,dim=2|n=1,dim=3}}",
        f"CONCAT-{{{BLOCKS_256}}}-a=256x3x2,{{n=512,dim=0|n=4,dim=1|n=1,dim=2}}",
        "CONCAT-{q4_0|q8_0|q4_K}-a=256x4x3,dim={0|1},n=256,va=pad,vb=rows",
    ),
    full=("CONCAT-{f32|f16}-a=128x256x8x2,n=128,dim=0",),
)


def _sort(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.operand("a", bench.types[0], v["ne"], distinct(-8.0, 8.0), v["vne"])
    if bench.id.op == "TOP_K":
        return bench.b.top_k(a, v["k"])
    return bench.b.argsort(a, SORT_ORDER[v["order"]])


_SORTED = "{3x3|2x3|16x10|60x10|7x5x3x2|128x4x2|513x3|1024x2}"

ARGSORT = OpCases(
    ops=("ARGSORT",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "order": word("ASC", "DESC")},
    make=_sort,
    standard=(
        f"ARGSORT-f32-ne={_SORTED},order={{ASC|DESC}}",
        "ARGSORT-f32-ne=24x6x3,vne={pad|off|flat},order={ASC|DESC}",
        "ARGSORT-f32-ne=24x6,vne=rows,order={ASC|DESC}",
    ),
    full=("ARGSORT-f32-ne={8192x17|2x4097|2048x2x1x3},order={ASC|DESC}",),
)

TOP_K = OpCases(
    ops=("TOP_K",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "k": count(1)},
    make=_sort,
    standard=(
        "TOP_K-f32-ne={16x10|60x5x3|128x4x2|513x3|1024x2},k={1|2|3|8|15}",
        "TOP_K-f32-ne=8x5,k={1|2|7}",
        "TOP_K-f32-ne=24x6x3,vne={pad|off},k={4|23}",
    ),
    full=("TOP_K-f32-ne={8192x17|151936x2},k={1|40|100}",),
)


def _ssm_conv(bench: Bench) -> Tensor:
    v = bench.v
    d_inner, n_t, n_s, _ = v["out"]
    sx = bench.operand("sx", bench.types[0], (v["d_conv"] - 1 + n_t, d_inner, n_s, 1), normal(), v["vsx"])
    c = bench.leaf("ssm_conv1d.weight", F32, (v["d_conv"], d_inner, 1, 1), normal(), keep=True)
    return bench.b.ssm_conv(sx, c)


SSM_CONV = OpCases(
    ops=("SSM_CONV",),
    types=("sx", "c"),
    keys={"out": shape(), "d_conv": count(4), "vsx": text()},
    make=_ssm_conv,
    standard=(
        "SSM_CONV-f32+f32-out={16x1|16x7|33x5x3|64x1x4|128x12x2},d_conv={3|4|9}",
        "SSM_CONV-f32+f32-out=32x5x3,d_conv={2|4},vsx={off|slab|flat}",
    ),
    full=("SSM_CONV-f32+f32-out={1536x33x4|2048x1x16},d_conv={3|4}",),
)

CASES = (SUMS, NORMS, REPEAT, CONCAT, ARGSORT, TOP_K, SSM_CONV)
