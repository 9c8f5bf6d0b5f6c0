"""Ops that pad, shift or slide a window: PAD, ROLL, POOL_2D, IM2COL, SSM_CONV."""

from __future__ import annotations

from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32
from conformance.suite.data import normal, values
from conformance.suite.grid import grid, operands, points

from .bench import VIEWS, Bench, cases


@cases(
    "PAD",
    keys="ne=SHAPE vne= by=NUMBERS circular=0",
    standard=(
        grid("f32", ne="10x5x4x3", by="0x3 0x0x0x2 3x0 1x2x3x4x0x1x2x0 0x0x0x0x0x0x0x1"),
        grid("f32", ne="10x5x4x3", by="0x3x1x0", vne="pad off p0213"),
    ),
    wide=(
        grid("f32", ne="10x5x4x3", by="0x3 3x0 1x2x3x4x0x1x2x0", circular=1),
        grid("f32", ne="10x5x4x3", by="1x2x3x4", circular=1, vne="pad p0213 p1023"),
    ),
    full=("PAD-f32-ne=1000x65x16,by=0x24x0x63",),
    pairs=(grid("f32", ne="10x5x4x3 1x7 9x1x4", by="0x3 0x0x0x2 3x0 1x2x3x4x0x1x2x0 0x0x0x0x0x0x0x1", vne=VIEWS),),
)
def _pad(bench: Bench) -> Tensor:
    v, b = bench.v, bench.b
    a = bench.first("a", "ne", values(bench.types[0]))
    widths = (*v["by"], *(0,) * 8)[:8]
    return b.pad_ext_circular(a, *widths) if v["circular"] else b.pad_ext(a, *widths)


@cases(
    "ROLL",
    keys="ne=SHAPE vne= by=NUMBERS",
    standard=(
        grid("f32", ne="10x5x4x3", by="3 0x2 1x-2x3x1 -9x4x0x-1"),
        grid("f32", ne="10x5x4x3", by="2x1", vne="pad p0213"),
    ),
    pairs=(grid("f32", ne="10x5x4x3 11x6x5x4", by="3 0x2 0x0x1 0x0x0x-1 1x-2x3x1 -9x4x0x-1", vne=VIEWS),),
)
def _roll(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.first("a", "ne", normal())
    return bench.b.roll(a, *(*v["by"], 0, 0, 0, 0)[:4])


@cases(
    "POOL_2D",
    keys=f"ne=SHAPE vne= op={'|'.join(OP_POOL.__members__)} k=NUMBERS",
    standard=(
        grid("f32 f16", ne="24x9x3x2", op="MAX AVG", k="4x1x4x1x0x0 3x3x2x2x1x1 2x3x1x2x0x1 5x9x1x1x0x0"),
        grid("f32", ne="24x9x3", op="MAX AVG", k="4x1x4x1x0x0", vne="pad off slab"),
    ),
    full=("POOL_2D-f32-ne=4096x33x8,op=MAX,k=128x1x128x1x0x0",),
    pairs=(
        grid(
            "f32 f16",
            ne="24x9x3 24x9x3x2",
            op="MAX AVG",
            k="4x1x4x1x0x0 3x3x2x2x1x1 2x3x1x2x0x1 5x9x1x1x0x0",
            vne="- pad off slab",
        ),
    ),
)
def _pool_2d(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.first("a", "ne", normal())
    k0, k1, s0, s1, p0, p1 = v["k"]
    return bench.b.pool_2d(a, OP_POOL[v["op"]], k0, k1, s0, s1, p0, p1)


@cases(
    "IM2COL",
    keys="a=SHAPE b=SHAPE vb= k=NUMBERS is_2D=0",
    types="a b to",
    standard=(
        grid(operands("f16", "f32", "f16 f32"), a="3x5x4", b="20x5x1 20x5x2", k="1x0x1x0x1x0 2x0x0x0x1x0 1x0x3x0x2x0"),
        grid(operands("f16", "f32", "f16 f32"), a="3x2x5x4", b="12x7x5x2", is_2D=1, k="1x1x1x1x1x1 2x3x0x1x1x2"),
        "IM2COL-f16+f32+f16-a=7x1x6,b=20x1x6,k=1x0x3x0x1x0",
    ),
    full=(
        "IM2COL-f16+f32+f16-a=7x512x16,b=60x512,k=1x0x3x0x1x0",
        "IM2COL-f16+f32+f16-a=33x33x1x1,b=36x34,is_2D=1,k=1x1x0x0x1x1",
    ),
    smoke=("IM2COL-f32+f32+f32-a=3x5x4,b=20x5,k=1x0x1x0x1x0",),
    pairs=(
        grid(
            "f16+f32+f16 f16+f32+f32 f32+f32+f32",
            a="3x5x4",
            b="20x5x1 20x5x2",
            k="1x0x1x0x1x0 2x0x0x0x1x0 1x0x3x0x2x0",
            vb="- pad off slab",
        ),
        grid(
            "f16+f32+f16 f16+f32+f32 f32+f32+f32",
            a="3x2x5x4",
            b="12x7x5x1 12x7x5x2",
            is_2D=1,
            k="1x1x1x1x1x1 2x3x0x1x1x2 1x1x0x0x2x1",
            vb="- off slab part",
        ),
    ),
)
def _im2col(bench: Bench) -> Tensor:
    v, (type_a, type_b, to) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.operand("b", type_b, v["b"], normal(), v["vb"])
    s0, s1, p0, p1, d0, d1 = v["k"]
    return bench.b.im2col(a, b, s0, s1, p0, p1, d0, d1, bool(v["is_2D"]), to)


@cases(
    "CONV_2D_DW",
    keys="a=SHAPE b=SHAPE k=NUMBERS",
    types="a b",
    standard=(
        grid("f32+f32", a="3x3x1x9", b="17x34x9x1", k="1x1x0x0x1x1 2x2x1x1x1x1 1x1x2x2x2x2"),
        grid("f32+f32", a="1x1x1x6 5x2x1x6 2x7x1x6", b="20x15x6x3", k="1x2x1x0x2x1 3x1x0x4x1x3"),
        "CONV_2D_DW-f32+f32-a=3x3x1x64,b=32x8x64x2,k=2x1x1x1x1x1",
    ),
    wide=(
        grid("f16+f32", a="1x1x1x6 5x2x1x6 3x3x1x6", b="20x15x6x3", k="1x2x1x0x2x1 3x1x0x4x1x3"),
        grid(
            "f32+f32",
            shape=points("a=3x3x1x9,b=17x34x9x1 a=5x2x1x6,b=20x15x6x3 a=3x3x1x64,b=16x8x64x2"),
            k="1x1x1x1x1x1 2x2x1x1x1x1 1x2x1x0x2x1",
            src0="p3201",
            src1="p2013",
        ),
    ),
    smoke=("CONV_2D_DW-f16+f32-a=3x3x1x6,b=20x15x6x3,k=1x2x1x0x2x1",),
    full=("CONV_2D_DW-f32+f32-a=7x7x1x128,b=64x64x128,k=1x1x3x3x1x1",),
)
def _conv_2d_dw(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.leaf("b", type_b, v["b"], normal())
    s0, s1, p0, p1, d0, d1 = v["k"]
    return bench.b.conv_2d_dw_direct(a, b, s0, s1, p0, p1, d0, d1)


@cases(
    "SSM_CONV",
    keys="out=SHAPE d_conv=4 vsx=",
    types="sx c",
    standard=(
        grid("f32+f32", out="16x1 16x7 33x5x3 64x1x4 128x12x2", d_conv="3 4 9"),
        grid("f32+f32", out="32x5x3", d_conv="2 4", vsx="off slab flat"),
    ),
    pairs=(grid("f32+f32", out="16x1 16x7 33x5x3 64x1x4", d_conv="2 3 4 9", vsx="- off slab part flat"),),
    full=(grid("f32+f32", out="1536x33x4 2048x1x16", d_conv="3 4"),),
)
def _ssm_conv(bench: Bench) -> Tensor:
    v = bench.v
    d_inner, n_t, n_s, _ = v["out"]
    sx = bench.operand("sx", bench.types[0], (v["d_conv"] - 1 + n_t, d_inner, n_s, 1), normal(), v["vsx"])
    c = bench.leaf("ssm_conv1d.weight", F32, (v["d_conv"], d_inner, 1, 1), normal(), keep=True)
    return bench.b.ssm_conv(sx, c)
