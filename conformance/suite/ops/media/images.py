"""Images: UPSCALE, WIN_PART, WIN_UNPART, GET_REL_POS, ADD_REL_POS."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.ops.media.images import SCALE_FLAG, SCALE_MODE
from conformance.ggml.tensor import Tensor
from conformance.suite.data import normal
from conformance.suite.grid import grid, points
from conformance.suite.ops.bench import INPLACE, Bench, cases


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
    smoke=(grid("f32", ne="4x3x2", to="6x6x2", mode="NEAREST BILINEAR BICUBIC"),),
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
    """`to` is the shape of the whole; the windows are as many as it takes."""
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
    """`ne` is that of the positions."""
    n, width, height, heads = bench.v["ne"]
    inplace = bench.v["inplace"]
    a = bench.leaf("a", bench.types[0], (n * n, width * height, heads, 1), normal(), keep=inplace == "leaf")
    a = bench.b.neg(a) if inplace == "mid" else a
    pw, ph = (bench.leaf(name, bench.types[0], bench.v["ne"], normal()) for name in ("pw", "ph"))
    return bench.outputs(a, bench.build("add_rel_pos")(a, pw, ph))
