"""Vision, audio and diffusion ops: convolutions and inverses, images, windows, signals."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.ops.media.images import SCALE_FLAG, SCALE_MODE
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.suite.data import normal, uniform
from conformance.suite.grid import grid, operands, points, shapes

from .bench import INPLACE, Bench, cases

_KERNELS = operands("f32 f16", "f32")


def _kernel_and_input(bench: Bench) -> tuple[Tensor, Tensor]:
    v, (type_a, type_b, *_) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    return a, bench.operand("b", type_b, v["b"], normal(), v["vb"])


@cases(
    "CONV_2D",
    keys="a=SHAPE b=SHAPE vb= k=NUMBERS",
    types="a b",
    wide=(
        grid(_KERNELS, a="3x3x5x7", b="17x12x5x2", k="1x1x1x1x1x1 2x3x0x2x1x1 1x2x4x0x2x3"),
        grid(_KERNELS, a="2x5x6x1", b="20x9x6", k="1x1x0x0x1x1 3x1x2x1x1x2", layout=points("vb= vb=pad vb=slab")),
        grid(_KERNELS, a="2x5x6x1", b="20x9x6", k="1x1x0x0x1x1 3x1x2x1x1x2", layout=points("vb=p0213 vb=p1203")),
        grid(_KERNELS, a="1x1x64x33", b="8x8x64", k="1x1x0x0x1x1"),
        grid(_KERNELS, a="14x14x3x48", b="56x42x3", k="14x14x0x0x1x1"),
    ),
    full=(grid(_KERNELS, a="3x3x128x96", b="48x48x128", k="1x1x1x1x1x1"),),
    smoke=(
        "CONV_2D-f32+f32-a=2x3x5x3,b=9x7x5x2,k=1x2x0x1x1x1",
        "CONV_2D-f16+f32-a=14x14x3x48,b=56x42x3,k=14x14x0x0x1x1",
    ),
    pairs=(
        grid(
            _KERNELS,
            a=shapes("1x1 2x3 3x11", "25", "1 12"),
            b=shapes("19 141", "24x25 24x25x2"),
            k=shapes("1 3", "1 5", "0 5", "0 5", "1 2", "1 4"),
            vb="- pad slab p0213",
        ),
    ),
)
def _conv_2d(bench: Bench) -> Tensor:
    return bench.b.conv_2d_direct(*_kernel_and_input(bench), *bench.v["k"])


@cases(
    "CONV_3D",
    keys="a=SHAPE b=SHAPE vb= c=1 k=NUMBERS",
    types="a b",
    wide=(
        grid(_KERNELS, a="3x2x3x12", b="9x7x6x6", c=3, k="1x1x1x1x1x1x1x1x1 2x1x3x0x2x1x1x2x1"),
        grid(_KERNELS, a="1x3x2x5", b="8x9x5x2", c=1, k="1x2x1x0x1x0x1x1x2", vb="pad slab p0213"),
    ),
    full=("CONV_3D-f32+f32-a=3x3x3x512,b=20x20x10x16,c=16,k=1x1x1x1x1x1x1x1x1",),
    smoke=("CONV_3D-f32+f32-a=2x1x2x6,b=5x4x3x4,c=2,k=1x2x1x1x0x0x1x1x1",),
    pairs=(
        grid(
            _KERNELS,
            a=shapes("1 3", "1 2", "1 3", "12"),
            b="10x12x8x6",
            c="1 3",
            k=shapes("1 2", "1 3", "1 2", "0 1", "0 2", "0 1", "1 2", "1 2", "1 2"),
        ),
    ),
)
def _conv_3d(bench: Bench) -> Tensor:
    """Read strides, paddings and dilations from `k`; channels and batch follow from the shapes."""
    (a, b), c = _kernel_and_input(bench), bench.v["c"]
    s0, s1, s2, p0, p1, p2, d0, d1, d2 = bench.v["k"]
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
    smoke=(
        "IM2COL_3D-f32+f32+f32-a=2x1x2x4,b=5x4x3x4,c=2,k=1x2x1x1x0x0x1x1x1",
        "IM2COL_3D-f32+f32+f32-a=2x1x2x4,b=5x4x3x4,c=2,k=1x2x1x1x0x0x1x1x1,src1=p1023",
    ),
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
    s0, s1, s2, p0, p1, p2, d0, d1, d2 = bench.v["k"]
    a, b = _kernel_and_input(bench)
    return bench.b.im2col_3d(a, b, bench.v["c"], s0, s1, s2, p0, p1, p2, d0, d1, d2, bench.types[2])


@cases(
    "CONV_TRANSPOSE_1D",
    keys="a=SHAPE b=SHAPE vb= s0=1",
    types="a b",
    wide=(
        grid(_KERNELS, a="3x2x5 1x7x5 8x4x5", b="1x5 9x5", s0="1 2 5"),
        grid("f32+f32", a="3x2x5", b="9x5", s0=2, vb="pad rows off"),
        grid(_KERNELS, a="16x32x32", b="197x32"),  # beyond the end of its work buffer lies no other memory
        grid(_KERNELS, a="3x2x64", b="1337x64"),
    ),
    full=(grid(_KERNELS, a="16x256x512", b="197x512", s0=8),),
    smoke=("CONV_TRANSPOSE_1D-f32+f32-a=3x2x4,b=5x4,s0=2",),
    pairs=(
        grid(_KERNELS, a=shapes("1 2 3 1337", "1 13", "1 2 7"), b=shapes("3 2 1 13", "1 2 7"), s0="1 2 3", vb="- pad"),
    ),
)
def _conv_transpose_1d(bench: Bench) -> Tensor:
    return bench.b.conv_transpose_1d(*_kernel_and_input(bench), bench.v["s0"], 0, 1)


@cases(
    "CONV_TRANSPOSE_2D",
    keys="a=SHAPE b=SHAPE vb= stride=1",
    types="a b",
    wide=(
        grid(_KERNELS, a="3x2x4x5 2x2x1x5 1x1x3x5", b="7x6x5x2", stride="1 2 3"),
        grid("f32+f32", a="3x2x4x5", b="7x6x5x2", stride=2, vb="pad slab p0213"),
    ),
    full=(grid(_KERNELS, a="3x3x64x128", b="32x32x128", stride=2),),
    smoke=("CONV_TRANSPOSE_2D-f32+f32-a=3x2x2x3,b=4x3x3,stride=2",),
)
def _conv_transpose_2d(bench: Bench) -> Tensor:
    return bench.b.conv_transpose_2d_p0(*_kernel_and_input(bench), bench.v["stride"])


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
    """Read stride, channels and padding from `k`."""
    return bench.b.col2im_1d(bench.leaf("a", bench.types[0], bench.v["ne"], normal()), *bench.v["k"])


@cases(
    "UPSCALE",
    keys=f"ne=SHAPE vne= to=SHAPE mode={'|'.join(SCALE_MODE.__members__)} align=0 antialias=0",
    wide=(
        grid("f32", ne="5x7x2x3", to="10x14x2x3 12x9x2x3 3x4x2x3", mode="NEAREST BILINEAR BICUBIC", align="- 1"),
        grid("f32", ne="5x7x2x3", to="10x14x4x3", mode="NEAREST", vne="pad slab p0213 p1023"),
        grid("f32", ne="5x7x2x3", to="10x14x2x3", mode="BILINEAR BICUBIC", vne="p1023"),
        grid("f32", ne="12x9x3", to="5x4x3 24x18x3 12x3x3", mode="BILINEAR", antialias=1),
        grid("f32", ne="2x5x7x1 1x4x3x2", to="8x5x7x2", mode="NEAREST BILINEAR BICUBIC", align="- 1"),
        grid("f32", ne="4x3x3x2", to="1x1x3x2 1x6x3x2 8x1x3x2", mode="NEAREST BILINEAR BICUBIC", align="- 1"),
    ),
    full=(grid("f32", ne="512x512x3", to="1024x1024x3 211x299x3", mode="NEAREST BILINEAR BICUBIC"),),
    smoke=(
        grid("f32", ne="4x3x2", to="6x6x2", mode="NEAREST BILINEAR BICUBIC"),
        "UPSCALE-f32-ne=4x3x3x2,to=1x6x3x2,mode=BILINEAR,align=1",
    ),
)
def _upscale(bench: Bench) -> Tensor:
    v = bench.v
    mode = SCALE_MODE[v["mode"]] | v["align"] * SCALE_FLAG.ALIGN_CORNERS | v["antialias"] * SCALE_FLAG.ANTIALIAS
    ne0, ne1, ne2, ne3 = v["to"]
    return bench.b.interpolate(bench.first("a", "ne", normal()), ne0, ne1, ne2, ne3, mode)


@cases(
    "WIN_PART",
    keys="ne=SHAPE w=1",
    wide=(grid("f32", ne="12x14x14 12x17x9 12x3x20", w="7 5 1"),),
    smoke=(grid("f32", shape=points("ne=4x5x3,w=2 ne=12x14x14,w=1")),),
    full=("WIN_PART-f32-ne=768x64x64,w=14",),
)
def _win_part(bench: Bench) -> Tensor:
    return bench.b.win_part(bench.leaf("a", bench.types[0], bench.v["ne"], normal()), bench.v["w"])


@cases(
    "WIN_UNPART",
    keys="to=SHAPE w=1",
    wide=(grid("f32", to="12x14x14 12x17x9 12x3x20", w="7 5 1"),),
    smoke=(grid("f32", shape=points("to=4x5x3,w=2 to=12x3x20,w=5")),),
    full=("WIN_UNPART-f32-to=768x64x64,w=14",),
)
def _win_unpart(bench: Bench) -> Tensor:
    """Use `to` as the shape of the result, with as many windows as it needs."""
    v = bench.v
    channels, width, height, _ = v["to"]
    n = -(-width // v["w"]) * -(-height // v["w"])
    a = bench.leaf("a", bench.types[0], (channels, v["w"], v["w"], n), normal())
    return bench.b.win_unpart(a, width, height, v["w"])


@cases(
    "GET_REL_POS",
    keys="ne=SHAPE",
    types="a",
    wide=(grid("f16", ne="16x13 80x27 1x1"),),
    smoke=("GET_REL_POS-f16-ne=8x5",),
    full=("GET_REL_POS-f16-ne=80x127",),
)
def _get_rel_pos(bench: Bench) -> Tensor:
    a = bench.leaf("a", bench.types[0], bench.v["ne"], normal(), keep=True)
    n = (a.ne[1] + 1) // 2
    return bench.b.get_rel_pos(a, n, n)


@cases(
    "ADD_REL_POS",
    keys=f"ne=SHAPE {INPLACE}",
    wide=(grid("f32", ne="7x7x7x3 4x5x2x6 1x3x2"), grid("f32", ne="7x7x7x3", inplace="leaf mid input")),
    smoke=("ADD_REL_POS-f32-ne=3x2x4x2",),
    full=("ADD_REL_POS-f32-ne=14x14x14x300",),
)
def _add_rel_pos(bench: Bench) -> Sequence[Tensor]:
    """Use `ne` as the shape of the positions."""
    n, width, height, heads = bench.v["ne"]
    inplace = bench.v["inplace"]
    a = bench.leaf("a", bench.types[0], (n * n, width * height, heads, 1), normal(), keep=inplace == "leaf")
    a = bench.b.neg(a) if inplace == "mid" else a
    pw, ph = (bench.leaf(name, bench.types[0], bench.v["ne"], normal()) for name in ("pw", "ph"))
    return bench.outputs(a, bench.build("add_rel_pos")(a, pw, ph))


@cases(
    "POOL_1D",
    keys=f"ne=SHAPE vne= op={'|'.join(OP_POOL.__members__)} k=NUMBERS",
    wide=(
        grid("f32 f16", ne="24x5x3x2", op="MAX AVG", k="1x1x0 3x1x1 4x4x0 5x3x2 3x7x1 1x2x0"),
        grid("f32", ne="24x5x3", op="MAX AVG", k="3x2x1", vne="pad off rows"),
    ),
    full=(grid("f32 f16", ne="4096x64", op="MAX AVG", k="8x8x0"),),
    smoke=("POOL_1D-f32-ne=9x3,op=AVG,k=3x2x1",),
    pairs=(
        grid(
            "f32 f16",
            ne=shapes("10 128", "3 5", "1 3"),
            op="MAX AVG",
            k="1x1x0 1x2x0 3x1x0 3x1x1 3x2x0 3x2x1",
            vne="- pad off",
        ),
    ),
)
def _pool_1d(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal())
    return bench.b.pool_1d(a, OP_POOL[bench.v["op"]], *bench.v["k"])


@cases(
    "PAD_REFLECT_1D",
    keys="ne=SHAPE by=NUMBERS",
    wide=(
        grid("f32", ne="10x5x4x3 64x3 2x9", by="0x1 1x0 1x1"),
        grid("f32", ne="64x3", by="10x9 63x63"),
    ),
    smoke=("PAD_REFLECT_1D-f32-ne=7x3,by=2x6",),
    full=("PAD_REFLECT_1D-f32-ne=3000x384x4,by=10x9",),
)
def _pad_reflect_1d(bench: Bench) -> Tensor:
    a = bench.leaf("a", bench.types[0], bench.v["ne"], normal())
    return bench.b.pad_reflect_1d(a, *bench.v["by"])


@cases(
    "TIMESTEP_EMBEDDING",
    keys="n=1 dim=2 max_period=10000 most=999",
    types="timesteps",
    wide=(
        grid("f32", n="1 5", dim="2 3 15 320 321"),
        grid("f32", n=2, dim="31 64", max_period="1 100", most="1 999"),
    ),
    smoke=("TIMESTEP_EMBEDDING-f32-n=3,dim=15",),
    full=("TIMESTEP_EMBEDDING-f32-n=1024,dim=1281",),
)
def _timestep_embedding(bench: Bench) -> Tensor:
    """Use times from 0 to `most`; an odd `dim` ends with a zero, unwritten by old ggml builds."""
    v = bench.v
    timesteps = bench.leaf("timesteps", bench.types[0], (v["n"], 1, 1, 1), uniform(0.0, float(v["most"])))
    return bench.b.timestep_embedding(timesteps, v["dim"], v["max_period"])
