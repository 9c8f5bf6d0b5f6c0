"""Convolutions: CONV_2D, CONV_3D, IM2COL_3D, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D, COL2IM_1D."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor
from conformance.suite.data import normal
from conformance.suite.grid import grid, operands, points, shapes
from conformance.suite.ops.bench import Bench, cases


@cases(
    "CONV_2D",
    keys="a=SHAPE b=SHAPE vb= k=NUMBERS",
    types="a b",
    wide=(
        grid(operands("f32 f16", "f32"), a="3x3x5x7", b="17x12x5x2", k="1x1x1x1x1x1 2x3x0x2x1x1 1x2x4x0x2x3"),
        grid(
            operands("f32 f16", "f32"),
            a="2x5x6x1",
            b="20x9x6",
            k="1x1x0x0x1x1 3x1x2x1x1x2",
            layout=points("vb= vb=pad vb=slab vb=p0213 vb=p1203"),
        ),
        grid(operands("f32 f16", "f32"), a="1x1x64x33", b="8x8x64", k="1x1x0x0x1x1"),
        grid(operands("f32 f16", "f32"), a="14x14x3x48", b="56x42x3", k="14x14x0x0x1x1"),
    ),
    full=(grid(operands("f32 f16", "f32"), a="3x3x128x96", b="48x48x128", k="1x1x1x1x1x1"),),
    smoke=(
        "CONV_2D-f32+f32-a=2x3x5x3,b=9x7x5x2,k=1x2x0x1x1x1",
        "CONV_2D-f16+f32-a=14x14x3x48,b=56x42x3,k=14x14x0x0x1x1",
    ),
    pairs=(
        grid(
            operands("f32 f16", "f32"),
            a=shapes("1x1 2x3 3x11", "25", "1 12"),
            b=shapes("19 141", "24x25 24x25x2"),
            k=shapes("1 3", "1 5", "0 5", "0 5", "1 2", "1 4"),
            vb="- pad slab p0213",
        ),
    ),
)
def _conv_2d(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    return bench.b.conv_2d_direct(a, bench.operand("b", type_b, v["b"], normal(), v["vb"]), *v["k"])


@cases(
    "CONV_3D",
    keys="a=SHAPE b=SHAPE vb= c=1 k=NUMBERS",
    types="a b",
    wide=(
        grid(operands("f32 f16", "f32"), a="3x2x3x12", b="9x7x6x6", c=3, k="1x1x1x1x1x1x1x1x1 2x1x3x0x2x1x1x2x1"),
        grid(operands("f32 f16", "f32"), a="1x3x2x5", b="8x9x5x2", c=1, k="1x2x1x0x1x0x1x1x2", vb="pad slab p0213"),
    ),
    full=("CONV_3D-f32+f32-a=3x3x3x512,b=20x20x10x16,c=16,k=1x1x1x1x1x1x1x1x1",),
    smoke=("CONV_3D-f32+f32-a=2x1x2x6,b=5x4x3x4,c=2,k=1x2x1x1x0x0x1x1x1",),
    pairs=(
        grid(
            operands("f32 f16", "f32"),
            a=shapes("1 3", "1 2", "1 3", "12"),
            b="10x12x8x6",
            c="1 3",
            k=shapes("1 2", "1 3", "1 2", "0 1", "0 2", "0 1", "1 2", "1 2", "1 2"),
        ),
    ),
)
def _conv_3d(bench: Bench) -> Tensor:
    """`k` are strides, paddings and dilations; filters and volumes follow from the shapes."""
    v, (type_a, type_b) = bench.v, bench.types
    c = v["c"]
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.operand("b", type_b, v["b"], normal(), v["vb"])
    s0, s1, s2, p0, p1, p2, d0, d1, d2 = v["k"]
    return bench.b.conv_3d_direct(a, b, s0, s1, s2, p0, p1, p2, d0, d1, d2, c, b.ne[3] // c, a.ne[3] // c)


@cases(
    "IM2COL_3D",
    keys="a=SHAPE b=SHAPE vb= c=1 k=NUMBERS",
    types="a b to",
    wide=(
        grid("f16+f32+f16 f32+f32+f32", a="3x2x3x6", b="8x7x6x6", c=3, k="1x1x1x1x1x1x1x1x1 2x1x3x0x2x1x1x2x1"),
        grid("f16+f32+f32", a="3x3x3x6", b="7x6x5x3", c=3, k="1x1x1x0x0x0x1x1x1", vb="pad off slab part"),
    ),
    full=("IM2COL_3D-f16+f32+f16-a=3x3x3x64,b=20x20x10x32,c=32,k=1x1x1x1x1x1x1x1x1",),
    smoke=("IM2COL_3D-f32+f32+f32-a=2x1x2x4,b=5x4x3x4,c=2,k=1x2x1x1x0x0x1x1x1",),
    pairs=(
        grid(
            "f16+f32+f16 f16+f32+f32 f32+f32+f32",
            a="3x3x3x9",
            b="20x20x10x3",
            c=3,
            k=shapes("1 3", "1 3", "1 3", "0 3", "0 3", "0 3", "1 3", "1 3", "1 3"),
            vb="- pad part",
        ),
    ),
)
def _im2col_3d(bench: Bench) -> Tensor:
    v, (type_a, type_b, to) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.operand("b", type_b, v["b"], normal(), v["vb"])
    s0, s1, s2, p0, p1, p2, d0, d1, d2 = v["k"]
    return bench.b.im2col_3d(a, b, v["c"], s0, s1, s2, p0, p1, p2, d0, d1, d2, to)


@cases(
    "CONV_TRANSPOSE_1D",
    keys="a=SHAPE b=SHAPE vb= s0=1",
    types="a b",
    wide=(
        grid(operands("f32 f16", "f32"), a="3x2x5 1x7x5 8x4x5", b="1x5 9x5", s0="1 2 5"),
        grid("f32+f32", a="3x2x5", b="9x5", s0=2, vb="pad rows off"),
    ),
    full=(grid(operands("f32 f16", "f32"), a="16x256x512", b="197x512", s0=8),),
    smoke=("CONV_TRANSPOSE_1D-f32+f32-a=3x2x4,b=5x4,s0=2",),
    pairs=(
        grid(
            operands("f32 f16", "f32"),
            a=shapes("1 2 3 1337", "1 13", "1 2 7"),
            b=shapes("3 2 1 13", "1 2 7"),
            s0="1 2 3",
            vb="- pad",
        ),
    ),
)
def _conv_transpose_1d(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.operand("b", type_b, v["b"], normal(), v["vb"])
    return bench.b.conv_transpose_1d(a, b, v["s0"], 0, 1)


@cases(
    "CONV_TRANSPOSE_2D",
    keys="a=SHAPE b=SHAPE vb= stride=1",
    types="a b",
    wide=(
        grid(operands("f32 f16", "f32"), a="3x2x4x5 2x2x1x5 1x1x3x5", b="7x6x5x2", stride="1 2 3"),
        grid("f32+f32", a="3x2x4x5", b="7x6x5x2", stride=2, vb="pad slab p0213"),
    ),
    full=(grid(operands("f32 f16", "f32"), a="3x3x64x128", b="32x32x128", stride=2),),
    smoke=("CONV_TRANSPOSE_2D-f32+f32-a=3x2x2x3,b=4x3x3,stride=2",),
)
def _conv_transpose_2d(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    return bench.b.conv_transpose_2d_p0(a, bench.operand("b", type_b, v["b"], normal(), v["vb"]), v["stride"])


@cases(
    "COL2IM_1D",
    keys="ne=SHAPE k=NUMBERS",
    wide=(
        grid("f32 f16 bf16", ne="12x9", k="1x1x0 2x3x1 5x2x0 4x3x4"),
        grid("f32", ne="48x1 48x33", k="1x1x0 8x3x2"),
    ),
    full=(grid("f32 f16 bf16", ne="1024x197", k="8x64x4"),),
    smoke=(grid("f32", ne="12x4", k="2x3x1 5x2x0"),),
)
def _col2im_1d(bench: Bench) -> Tensor:
    """`k` is stride, channels and what is cut off."""
    return bench.b.col2im_1d(bench.leaf("a", bench.types[0], bench.v["ne"], normal()), *bench.v["k"])
