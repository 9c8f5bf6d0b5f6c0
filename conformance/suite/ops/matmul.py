"""MUL_MAT and MUL_MAT_ID over types, layouts, head groups and experts; triangular ops."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.ops.matmul import OP_HINT, PREC, TRI_TYPE
from conformance.ggml.tensor import Dims, Tensor
from conformance.ggml.types import F32, I32
from conformance.suite.data import hadamard, normal
from conformance.suite.grid import Keys, grid, operands, points, shapes

from .bench import BLOCKS, BLOCKS_32, FLOATS, PLAIN, RARE, RARE_STORED, VIEWS, Bench, Timed, cases

_ANY, _ANY32, _RARE = operands(PLAIN, "f32"), operands(f"{FLOATS} {BLOCKS_32}", "f32"), operands(RARE, "f32")
_FEW = operands("f32 f16 bf16 q4_0 q8_0 q4_K", "f32")
_FIVE = operands("f32 f16 q4_0 q8_0 q4_K", "f32")
_LONG = operands("f16 q4_0 q8_0 q4_K q6_K", "f32")
_GLU = "|REGLU|GEGLU|SWIGLU"
"""Units that backends fuse with the two products before them."""
_HADAMARD: Keys = {"hint": "SRC0_IS_HADAMARD"}


@cases(
    "MUL_MAT",
    keys=f"a=SHAPE b=SHAPE va= vb= prec=|F32|DEFAULT hint=|SRC0_IS_HADAMARD glu={_GLU} "
    "data=|positive|scales|sums|beyond|bytes",
    types="a b",
    standard=(
        grid(_ANY, a="256x16", b="256x1 256x2 256x4 256x7 256x16"),
        grid(_ANY, shape=points("a=256x1,b=256x5 a=256x17,b=256x1")),
        grid(_ANY32, a="32x7", b="32x3"),
        grid(_ANY32, a="96x33", b="96x1 96x6 96x33"),
        grid(_ANY, a="512x8x2x2", b="512x3x2x2"),
        grid(_ANY, shape=points("a=256x5x2,b=256x3x6 a=256x5x1x2,b=256x3x2x4 a=256x6x2,b=256x1x4x3")),
        grid(_ANY, a="256x6x2", b="256x5x4", layout=points("va=pad va=p0213 vb=pad va=p0213,vb=p0213")),
        grid(_FEW, a="256x6x2x2", b="256x3x2x2", layout=points("va=part.p0213,vb=off va=slab,vb=rows vb=p0321")),
        grid(_ANY, a="256x6", b="256x1x4"),
        grid(operands("f32 f16 bf16", "f32"), shape=points("a=1x5,b=1x3 a=3x4,b=3x2 a=7x9,b=7x5 a=31x5,b=31x1")),
        grid(operands("f32 f16 bf16", "f32"), shape=points("a=33x16,b=33x4 a=65x3,b=65x7")),
        grid("f16+f16 bf16+bf16 f32+bf16", a="64x1 64x16 64x33", b="64x1 64x5 64x16"),
        grid("f16+f16 bf16+bf16 f32+bf16", a="64x6x2", b="64x5x4", layout=points("vb=pad va=p0213,vb=p0213")),
        grid(operands("q4_0 q5_0 q8_0 mxfp4", "q8_0"), a="64x9", b="64x1 64x4"),
        grid(_FEW, a="256x16", b="256x5", prec="F32"),
        grid(operands("f32", "f32 f16"), shape=points("a=64x64,b=64x3x2 a=128x128,b=128x5"), **_HADAMARD),
        grid("f32+f32", shape=points("a=64x64x2,b=64x3x4 a=32x32x2x2,b=32x20x2x4 a=128x128x3,b=128x1x3"), **_HADAMARD),
        grid("f32+f32", shape=points("a=1x1,b=1x5 a=2x2,b=2x3"), **_HADAMARD),
        grid("f32+f32", a="64x64x2", b="64x3x4", vb="pad p0213 rows", **_HADAMARD),
        grid(operands("f32 f16", "f32"), a="64x37x2", b="64x1x8", layout=points("va=p0213,vb=p0213 va=pad")),
        grid(operands("f32 f16", "f32"), a="37x64x2", b="37x1x8", layout=points("va=p0213,vb=p0213 va=pad")),
        grid(_LONG, shape=points("a=2048x16,b=2048x2 a=4096x16,b=4096x1 a=5632x16,b=5632x1 a=14336x16,b=14336x1")),
        grid(
            operands("f32 f16 bf16 q4_0 q8_0 q4_K q6_K", "f32"), a="2048x4", b=shapes("2048", "1 3 16 17 64 65 256 300")
        ),
        grid(operands("q4_0 q8_0 f16", "f32"), shape=points("a=4096x4,b=4096x17 a=5632x4,b=5632x3 a=5632x4,b=5632x65")),
        grid(operands("q4_0 q8_0 f16", "f32"), shape=points("a=14336x4,b=14336x1 a=14336x4,b=14336x3")),
    ),
    wide=(
        grid(_RARE, a="256x16", b="256x1 256x4 256x16"),
        grid(operands(f"{BLOCKS} {RARE}", "f32"), a="256x1", b="256x9 256x33"),
        grid(_RARE, shape=points("a=512x8x2x2,b=512x3x2x2 a=256x5x1x2,b=256x3x2x4 a=2048x4,b=2048x3")),
        grid(_RARE, a="256x6x2", b="256x5x4", layout=points("va=pad va=p0213,vb=p0213")),
        "MUL_MAT-iq4_nl+f32-a=96x33,b=96x6",
        grid("nvfp4+f32 q2_0+f32", a="192x33", b="192x6"),
        "MUL_MAT-q1_0+f32-a=384x33,b=384x6",
        grid(operands("iq4_nl nvfp4 q1_0 q2_0", "q8_0"), a="128x9", b="128x1 128x4"),
        grid(operands(f"{BLOCKS} {RARE}", "f32"), a="256x9", b="256x5", data="scales"),
        grid(
            operands(f"{PLAIN} {RARE_STORED}", "f32"),
            shape=points("a=256x9,b=256x5 a=2048x4,b=2048x20"),
            data="positive",
        ),
        grid(_FIVE, shape=points("a=256x513,b=256x3 a=256x3,b=256x513 a=256x257,b=256x512 a=256x511,b=256x255")),
        grid(operands("f32 q4_0", "f32"), shape=points("a=32x65540,b=32x2 a=32x2,b=32x65540 a=65792x2,b=65792x2")),
        "MUL_MAT-q4_0+f32-a=4096x4112,b=4096x1",
        grid(operands(FLOATS, "f32"), a="1024x8", b="1024x1 1024x9 1024x33", data="sums"),
        grid("f16+f16 bf16+bf16", a="1024x8", b="1024x1 1024x33", data="sums"),
        grid(operands(f"f32 bf16 {BLOCKS} {RARE}", "f32"), a="256x9", b="256x1 256x9 256x33", data="beyond"),
        grid(_ANY, a="256x16", b="256x5x3 256x1x4x2"),
        grid(operands(f"{BLOCKS} {RARE}", "f32"), a="256x31 256x129", b="256x1 256x5 256x9 256x33"),
        grid(operands("f32 f16 q4_0 q8_0", "f32"), a="32x128257 32x262145", b="32x1"),
        grid("nvfp4+f32", a="256x9", b="256x1 256x9", data="bytes"),
    ),
    smoke=(
        "MUL_MAT-f32+f32-a=2048x4,b=2048x20,data=positive",
        "MUL_MAT-iq3_s+f32-a=256x16,b=256x4",
        "MUL_MAT-f32+f32-a=32x32x2x2,b=32x20x2x4,hint=SRC0_IS_HADAMARD",
        grid("f16+f32", shape=points("a=2048x16,b=2048x2 a=2048x4,b=2048x1 a=14336x4,b=14336x1")),
        grid("f32+f32", a="2048x4", b="2048x1 2048x17"),
        "MUL_MAT-bf16+f32-a=2048x4,b=2048x3",
        "MUL_MAT-q4_0+f32-a=5632x4,b=5632x16",
        grid("q8_0+f32", shape=points("a=2048x4,b=2048x64 a=4096x4,b=4096x17")),
        "MUL_MAT-q4_K+f32-a=2048x4,b=2048x65",
        grid("q4_0+f32", shape=points("a=256x3,b=256x513 a=256x513,b=256x3 a=4096x4112,b=4096x1")),
        "MUL_MAT-q4_0+f32-a=256x16,b=256x5x3",
        grid("f16+f32", a="1024x8", b="1024x1 1024x33", data="sums"),
        grid(operands("bf16 q4_1 q5_0 q5_1 q8_0 q3_K q4_K q5_K iq4_nl iq4_xs nvfp4", "f32"), a="256x16", b="256x1"),
        grid("q6_K+f32", shape=points("a=256x1,b=256x5 a=256x129,b=256x9")),
        "MUL_MAT-q5_0+f32-a=256x5x1x2,b=256x3x2x4",
        "MUL_MAT-q8_0+f32-a=256x6x2,b=256x5x4,va=p0213,vb=p0213",
        "MUL_MAT-q4_1+f32-a=256x9,b=256x9,data=beyond",
        "MUL_MAT-q4_0+f32-a=256x9,b=256x5,data=scales",
        "MUL_MAT-f16+f32-a=256x6x2x2,b=256x3x2x2,vb=p0321",
    ),
    full=(
        grid(_ANY, a="4096x128", b="4096x1 4096x4 4096x64"),
        grid(_ANY, a="2048x2048", b="2048x1 2048x16"),
        grid(_LONG, shape=points("a=5632x2048,b=5632x3 a=14336x512,b=14336x2 a=4096x4096,b=4096x1")),
        grid(operands("f16 f32", "f32"), a="128x1024x8x2", b="128x1x32x2", va="p0213"),
        grid(operands("f16 f32", "f32"), a="1024x128x8x2", b="1024x1x32x2", va="p0213"),
        grid(_FIVE, a="4096x4352", b="4096x1 4096x3"),
    ),
    timed=(
        Timed("MUL_MAT-q4_0+f32-a=2048x2048,b=2048x1", 1, 8, "smoke"),
        Timed("MUL_MAT-f16+f32-a=2048x2048,b=2048x1", 1, 8, "smoke"),
        Timed("MUL_MAT-q8_0+f32-a=2048x2048,b=2048x1", 1, 8),
        Timed("MUL_MAT-q4_K+f32-a=2048x2048,b=2048x1", 1, 8),
        Timed("MUL_MAT-q6_K+f32-a=2048x2048,b=2048x1", 1, 8),
        Timed("MUL_MAT-q4_0+f32-a=2048x2048,b=2048x64", 64, 1),
        Timed("MUL_MAT-q4_K+f32-a=2048x2048,b=2048x64", 64, 1),
        Timed("MUL_MAT-q4_0+f32-a=4096x4096,b=4096x512", 512, 1, "full"),
        *(
            Timed(f"MUL_MAT-{t}+f32-a=2048x2048,b=2048x1", 1, 8, "full")
            for t in f"bf16 {BLOCKS} {RARE}".split()
            if t not in {"q4_0", "q8_0", "q4_K", "q6_K"}
        ),
        *(
            Timed(f"MUL_MAT-{t}+f32-a=2048x2048,b=2048x{n}", n, 4, "full")
            for t in ("q4_0", "q4_K")
            for n in (2, 4, 8, 9)
        ),
    ),
    pairs=(
        grid(
            _ANY,
            a="256x6 256x6x2 256x6x1x2 256x6x2x2",
            b="256x1x4x4 256x3x4x4 256x17x2x2 256x5x2x4 256x2x4x2",
            va=f"{VIEWS} part.p0213",
            vb=f"{VIEWS} p0321",
            prec="- F32",
        ),
    ),
)
def _mul_mat(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    is_hadamard = v["hint"] == "SRC0_IS_HADAMARD"
    alone = v["a"][1] * v["b"][1] * v["b"][2] * v["b"][3] == 1
    values = normal(mean=2.0) if alone else normal()  # a single cancelling sum has no scale for its error
    if is_hadamard:
        _check_hadamard(bench)
    fill = _hadamard if is_hadamard else values
    a = bench.operand("blk.0.weight", type_a, v["a"], fill, v["va"], keep=True)
    b = bench.operand("b", type_b, v["b"], values, v["vb"])
    out = bench.b.mul_mat(a, b)
    if v["glu"]:
        up = bench.operand("blk.0.up.weight", type_a, v["a"], values, v["va"], keep=True)
        return bench.b.glu_split(out, bench.b.mul_mat(up, b), v["glu"])
    if v["prec"]:
        bench.b.prec_set_acc(out, PREC[v["prec"]])
    if is_hadamard:
        bench.b.mul_mat_set_hint(out, OP_HINT[v["hint"]])
    return out


def _hadamard(_: Stream, ne: Dims) -> NDArray[np.float32]:
    """Return the Walsh-Hadamard matrix of order `ne[0]`, a power of two, in each matrix."""
    return np.broadcast_to(hadamard(ne[0]), (ne[3], ne[2], ne[0], ne[0]))


def _check_hadamard(bench: Bench) -> None:
    """Raise UsageError unless `a` matches the hint: ggml transforms `b` and ignores `a`."""
    n, rows, _, _ = bench.v["a"]
    if n != rows or n & (n - 1) or bench.types[0] is not F32 or bench.v["va"]:
        raise UsageError(
            f"case {bench.id.id!r}: hint=SRC0_IS_HADAMARD needs a contiguous f32 a of square matrices whose order is "
            "a power of two, such as a=64x64x2"
        )


@cases(
    "MUL_MAT_ID",
    keys=f"as=SHAPE n_used=2 n_tokens=1 n_b=0 vas= vb= vids= pick=|last|twice glu={_GLU} data=|scales|beyond|bytes",
    types="as b",
    smoke=(
        "MUL_MAT_ID-f16+f32-as=256x6x8,n_used=6,n_tokens=1,n_b=3,vas=pad,vb=slab,vids=rows",
        "MUL_MAT_ID-q4_0+f32-as=256x6x8,n_used=2,n_tokens=5,vids=pad",
        "MUL_MAT_ID-q4_0+f32-as=32x3x257,n_used=257",
        "MUL_MAT_ID-q8_0+f32-as=256x5x4,n_used=2,n_tokens=9,data=beyond",
        "MUL_MAT_ID-q4_K+f32-as=256x9x129,n_used=3,n_tokens=9,pick=last",
        "MUL_MAT_ID-q6_K+f32-as=256x9x5,n_used=3,n_tokens=9,pick=twice",
        "MUL_MAT_ID-q4_0+f32-as=32x32776x3,n_used=2,n_tokens=3",
    ),
    standard=(
        grid(_ANY, as_="256x5x4", shape=points("n_used=1,n_tokens=7 n_used=2,n_tokens=1 n_used=4,n_tokens=5")),
        grid(_ANY, as_="256x5x8", n_used=2, n_tokens="1 9", n_b=1),
        grid(_ANY, as_="256x6x8", n_used=2, n_tokens=5, variant=points("vids=pad vb=pad vb=p0213,n_b=1 vas=pad")),
        grid(_ANY32, as_="64x33x8", n_used=4, n_tokens="1 33"),
    ),
    wide=(
        grid(_RARE, as_="256x5x8", variant=points("n_used=2,n_tokens=9 n_used=4,n_tokens=5,n_b=1")),
        grid(_RARE, as_="256x5x8", n_used=2, n_tokens=5, vas="pad"),
        grid(operands(f"{BLOCKS} {RARE}", "f32"), as_="256x5x4", n_used=2, n_tokens=3, data="scales"),
        grid(operands(f"f32 bf16 {BLOCKS} {RARE}", "f32"), as_="256x5x4", n_used=2, n_tokens="1 9", data="beyond"),
        grid(_ANY, as_="256x9x5 256x9x129", n_used=3, n_tokens="1 9 33", pick="last twice"),
        grid("nvfp4+f32", as_="256x5x4", n_used=2, n_tokens="1 9", data="bytes"),
        grid(
            operands("f32 q4_0", "f32"),
            shape=points(
                "as=32x5x257,n_used=2,n_tokens=33 as=32x513x4,n_used=2,n_tokens=3 as=32x3x4,n_used=2,n_tokens=513",
                "as=32x3x257,n_used=257 as=32x32776x3,n_used=2,n_tokens=3 as=32x5x4,n_used=2,n_tokens=16393",
            ),
        ),
    ),
    full=(
        grid(_ANY, as_="512x256x32", n_used=4, n_tokens="1 32 129"),
        grid(operands("q4_0 mxfp4 q4_K f16", "f32"), as_="2048x768x16", n_used=8, n_tokens="1 16", n_b=1),
    ),
    timed=(
        Timed("MUL_MAT_ID-q4_0+f32-as=1024x512x8,n_used=2,n_tokens=1", 1, 16),
        Timed("MUL_MAT_ID-q4_0+f32-as=1024x512x8,n_used=2,n_tokens=32", 32, 2, "full"),
        Timed("MUL_MAT_ID-q4_K+f32-as=1024x512x8,n_used=2,n_tokens=1", 1, 16, "full"),
        Timed("MUL_MAT_ID-mxfp4+f32-as=1024x512x8,n_used=2,n_tokens=1", 1, 16, "full"),
    ),
    pairs=(
        grid(
            _ANY,
            as_="256x6x8",
            n_used="1 2 4 6 8",
            n_tokens="1 5 33",
            n_b="- 1 2 3 4",
            vas="- pad off rows slab",
            vb="- pad off slab p0213",
            vids="- pad off rows",
        ),
    ),
)
def _mul_mat_id(bench: Bench) -> Tensor:
    v = bench.v
    k, _, n_expert, _ = v["as"]
    as_ = bench.operand("blk.0.ffn_exps.weight", bench.types[0], v["as"], normal(), v["vas"], keep=True)
    b = bench.operand("b", bench.types[1], (k, v["n_b"] or v["n_used"], v["n_tokens"], 1), normal(), v["vb"])
    ids = bench.lists("ids", I32, (v["n_used"], v["n_tokens"], 1, 1), n_expert, v["vids"], v["pick"])
    out = bench.b.mul_mat_id(as_, b, ids)
    if not v["glu"]:
        return out
    up = bench.operand("blk.0.ffn_up_exps.weight", bench.types[0], v["as"], normal(), v["vas"], keep=True)
    return bench.b.glu_split(out, bench.b.mul_mat_id(up, b, ids), v["glu"])


@cases(
    "OUT_PROD",
    keys="a=SHAPE b=SHAPE va= vb=",
    types="a b",
    standard=(
        grid(operands("f32 f16 q4_0 q8_0 q4_1 q6_K", "f32"), shape=points("a=256x1,b=7x1 a=256x5,b=7x5")),
        grid(operands("f32 f16 q4_0 q8_0 q4_1 q6_K", "f32"), a="256x33", b="7x33"),
        grid("f32+f32", shape=points("a=17x5,b=3x5 a=8x40x2,b=5x40x6 a=8x4x2x1,b=5x4x2x3 a=1x9,b=1x9")),
        grid(operands("f16 q8_0", "f32"), a="64x9x3x2", b="5x9x3x2"),
        grid("f32+f32", a="24x6x3x2", b="7x6x3x2", layout=points("va=pad va=off vb=p1023 vb=p0213 vb=pad")),
    ),
    wide=(
        grid(operands(f"q5_0 q5_1 mxfp4 q2_K q3_K q4_K q5_K {RARE}", "f32"), a="256x5", b="7x5"),
        grid(operands(f"q5_0 q5_1 mxfp4 q2_K q3_K q4_K q5_K {RARE}", "f32"), a="256x9x3x2", b="5x9x3x2"),
    ),
    smoke=("OUT_PROD-f32+f32-a=24x5x1x2,b=7x5x2x4,va=off",),
    full=("OUT_PROD-f32+f32-a=512x256,b=128x256",),
    pairs=(
        grid(
            operands("f16 q4_0 q8_0 q4_1 q6_K", "f32"),
            a="256x5x4x2",
            b="7x5x4x2 1x5x4x2",
            va="- pad off slab p0213",
            vb="- pad off rows p0213 p1023",
        ),
        grid(
            "f32+f32",
            a="24x5 24x5x2 24x5x1x2 24x5x2x2",
            b="7x5x4x4 7x5x2x2 7x5x2x4",
            va="- pad off slab p0213",
            vb="- pad off rows p0213 p1023",
        ),
    ),
)
def _out_prod(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    a = bench.operand("a", type_a, v["a"], normal(mean=1.0), v["va"], keep=True)
    b = bench.operand("b", type_b, v["b"], normal(mean=1.0), v["vb"])
    return bench.b.out_prod(a, b)


@cases(
    "TRI",
    keys=f"ne=SHAPE vne= keep={'|'.join(TRI_TYPE.__members__)}",
    standard=(
        grid("f32", ne="2x2 7x7x3 64x64x2x2", keep="UPPER_DIAG UPPER LOWER_DIAG LOWER"),
        grid("f32", ne="9x9x2", vne="off flat", keep="UPPER LOWER_DIAG"),
    ),
    full=(grid("f32", ne="256x256x32", keep="UPPER_DIAG LOWER"),),
)
def _tri(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal())
    return bench.b.tri(a, TRI_TYPE[bench.v["keep"]])


@cases(
    "DIAG",
    keys="ne=SHAPE vne=",
    standard=(grid("f32", ne="5 64x1x3 17x1x2x3"), grid("f32", ne="12x1x3x2", vne="off pad p0132 slab")),
    full=("DIAG-f32-ne=512x1x16",),
)
def _diag(bench: Bench) -> Tensor:
    return bench.b.diag(bench.first("a", "ne", normal()))


def _lower(s: Stream, ne: Dims) -> NDArray[np.float32]:
    """Return triangles like those of chunked delta rules: diagonal near 1, small below it."""
    n = ne[0]
    x = s.normal(math.prod(ne), 0.3).reshape(-1, n, n)
    x[:, np.arange(n), np.arange(n)] = s.uniform(x.shape[0] * n, 0.8, 1.25).reshape(-1, n)
    return x


@cases(
    "SOLVE_TRI",
    keys="ne=SHAPE vb=",
    standard=(grid("f32", ne="1x3 8x1 11x7x3 16x16x2 32x64x2x2"), grid("f32", ne="12x5x2", vb="off flat")),
    smoke=("SOLVE_TRI-f32-ne=16x16x2",),
    full=("SOLVE_TRI-f32-ne=64x128x32",),
)
def _solve_tri(bench: Bench) -> Tensor:
    v = bench.v
    n, k, n2, n3 = v["ne"]
    a = bench.leaf("a", F32, (n, n, n2, n3), _lower)
    return bench.b.solve_tri(a, bench.operand("b", F32, (k, n, n2, n3), normal(), v["vb"]), True, True, False)
