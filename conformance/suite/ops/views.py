"""Ops that rename, copy or move bytes; views are tested through an op that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import Tensor, contiguous_nb, dims
from conformance.ggml.types import F32, I32
from conformance.suite.data import normal, values
from conformance.suite.grid import grid, operands, points

from .bench import BLOCKS, BLOCKS_32, BLOCKS_256, FLOATS, INPLACE, RARE, RARE_STORED, VIEWS, Bench, cases, same

_EVERY = f"{FLOATS} i32 i64 {BLOCKS}"
_ELEMENTS = f"{FLOATS} i32 i64"
_WINDOWS = (
    "ne=7x3x2x2,at=9x2x1x0 ne=20x1x4x1,at=0x5x0x1 ne=7x3x2,rank=3,at=9x2x1x1 ne=7x3,rank=2,at=13x3x3x1 "
    "ne=20,rank=1,at=0x5x3x1"
)
_PARTS = "b=4x2x2x2,at=3x1x1x0 b=10x6x4x2,at=0x0x0x1 b=10x3x1x1,at=0x2x3x2"


def _read_through(bench: Bench, t: Tensor) -> Tensor:
    """Return an op that reads the view `t`, chosen by `use`."""
    use = bench.v["use"]
    if use == "cont":
        return bench.b.cont(t)
    other = bench.leaf("other", bench.types[0], t.ne, normal())
    return bench.b.add(other, t) if use == "add" else bench.b.mul(t, other)


@cases(
    "NONE VIEW RESHAPE PERMUTE TRANSPOSE",
    keys="a=SHAPE ne=SHAPE? at=NUMBERS rank=4|3|2|1 axes=NUMBERS va= use=cont|add|mul",
    standard=(
        grid("NONE", _EVERY, a="256x3x2"),
        grid("NONE", FLOATS, a="17x3x2", use="add mul"),
        grid("VIEW", _EVERY, a="512x5x4x2", ne="256x3x2x1", at="256x1x2x1"),
        grid("VIEW", _EVERY, a="256x6x3", shape=points("ne=256x2x3,at=0x3x0,rank=3 ne=256x4,at=0x1x1,rank=2")),
        grid("VIEW", _EVERY, a="256x6x3", ne=512, at="0x2x1", rank=1),
        grid("VIEW", FLOATS, a="20x6x4x2", ne="7x3x2x2", at="9x2x1x0", use="add mul"),
        grid("VIEW", _ELEMENTS, a="20x6x4x2", ne="7x3x2x2", at="9x2x1x0", va="p0213 pad p0321"),
        grid("RESHAPE", _EVERY, a="256x6x4", ne="512x3x4 256x2x3x4 6144"),
        grid("RESHAPE", FLOATS, a="18x6x4", ne="6x9x8 432", use="add mul"),
        grid("RESHAPE", _EVERY, a="256x6x4", ne="768x8", va="off"),
        grid("PERMUTE", _EVERY, a="256x3x4x2", axes="0x2x1x3 0x3x1x2"),
        grid("PERMUTE", _ELEMENTS, a="10x3x4x2", axes="1x0x2x3 2x0x1x3 3x2x1x0 1x2x3x0 2x3x0x1 0x1x2x3"),
        grid("PERMUTE", _ELEMENTS, a="10x3x4x2", axes="1x0x2x3 2x0x3x1", va="pad slab p0213"),
        grid("PERMUTE", FLOATS, a="10x3x4x2", axes="0x2x1x3", use="add mul"),
        grid("TRANSPOSE", _ELEMENTS, a="10x3 1x7 9x4x3 5x4x3x2"),
        grid("TRANSPOSE", _ELEMENTS, a="9x4x3", va="pad rows off p0213"),
        grid("TRANSPOSE", FLOATS, a="9x4x3", use="add"),
    ),
    wide=(
        grid("NONE", RARE, a="256x3x2"),
        grid("VIEW", RARE, a="512x5x4x2", ne="256x3x2x1", at="256x1x2x1"),
        grid("RESHAPE", RARE, a="256x6x4", ne="512x3x4"),
        grid("PERMUTE", RARE, a="256x3x4x2", axes="0x2x1x3"),
    ),
    full=(grid("TRANSPOSE", _ELEMENTS, a="512x129x3"), grid("PERMUTE", _EVERY, a="256x64x32", axes="0x2x1x3")),
    pairs=(
        grid("NONE TRANSPOSE", FLOATS, a="20x6x4x2 1x7 9x1x4", va=f"{VIEWS} p1023", use="cont add"),
        grid(
            "PERMUTE",
            FLOATS,
            a="10x3x4x2 1x7 9x1x4",
            axes="0x1x2x3 0x2x1x3 1x0x2x3 2x0x1x3 1x2x3x0 3x2x1x0 0x3x1x2 2x3x0x1",
            va=f"{VIEWS} p1023",
            use="cont add",
        ),
        grid("VIEW", FLOATS, a="20x6x4x2", shape=points(_WINDOWS), va=f"{VIEWS} p0321", use="cont add mul"),
        grid(
            "RESHAPE",
            FLOATS,
            a="18x6x4x2",
            ne="6x9x8x2 864 36x3x8 18x6x4x2 2x3x4x36",
            va="- off flat",
            use="cont add mul",
        ),
    ),
)
def _view(bench: Bench) -> Sequence[Tensor]:
    v, b, (type_,) = bench.v, bench.b, bench.types
    a = bench.first("a", "a", values(type_))
    out = _read_through(bench, _VIEWS[bench.id.op](b, a, v))
    # ggml's allocator must also see the viewed tensor as a src, which a NONE view does not have
    return (b.cont(a), out) if bench.id.op == "NONE" else (out,)


def _window(b: Builder, a: Tensor, v: Mapping[str, Any]) -> Tensor:
    ne, at = v["ne"] or a.ne, (*v["at"], 0, 0, 0, 0)
    offset = at[0] // a.type.blck_size * a.nb[0] + sum(i * nb for i, nb in zip(at[1:4], a.nb[1:], strict=True))
    (n0, n1, n2, n3), (_, nb1, nb2, nb3) = ne, a.nb
    return {
        1: lambda: b.view_1d(a, n0, offset),
        2: lambda: b.view_2d(a, n0, n1, nb1, offset),
        3: lambda: b.view_3d(a, n0, n1, n2, nb1, nb2, offset),
        4: lambda: b.view_4d(a, n0, n1, n2, n3, nb1, nb2, nb3, offset),
    }[int(v["rank"])]()


def _permute(b: Builder, a: Tensor, v: Mapping[str, Any]) -> Tensor:
    if sorted(v["axes"]) != [0, 1, 2, 3]:
        raise UsageError(f"axes: 0 to 3 in any order, joined by x, expected, {v['axes']} found")
    return b.permute(a, *v["axes"])


_VIEWS: dict[str, Callable[[Builder, Tensor, Mapping[str, Any]], Tensor]] = {
    "NONE": lambda b, a, _v: b.view_tensor(a),
    "VIEW": _window,
    "RESHAPE": lambda b, a, v: b.reshape_4d(a, *(v["ne"] or a.ne)),
    "PERMUTE": _permute,
    "TRANSPOSE": lambda b, a, _v: b.transpose(a),
}
_PAIRS = "f32+f32 f32+f16 f32+bf16 f32+i32 f16+f32 f16+f16 f16+bf16 bf16+f32 bf16+f16 bf16+bf16 i32+f32 i32+i32 i64+i64"
_FEW_BLOCKS = "q4_0 q5_1 q8_0 mxfp4 q4_K q6_K"


@cases(
    "CPY",
    keys="a=SHAPE b=SHAPE? va= vb= form=|cast|back data=|casts|borders|scales",
    types="a b",
    standard=(
        grid(_PAIRS, a="12x5x3x2", form="- cast"),
        grid(_PAIRS, a="12x5x4x2", va="pad p0213 p1023 p3210"),
        grid(_PAIRS, a="12x5x4x2", vb="pad off p0213 p1023"),
        grid(_PAIRS, a="12x5x4x2", va="p1023", vb="rows"),
        grid(_PAIRS, a="12x6x4", b="24x12 288 6x2x24"),
        grid(_PAIRS, a="12x6x4", b="6x48", va="p2013"),
        grid(operands("f32", BLOCKS), a="256x3x2", variant=points("- va=pad va=p0213 vb=off form=cast")),
        grid(operands("f16 bf16", BLOCKS), a="256x3x2", va="- pad"),
        grid(operands(BLOCKS, "f32"), a="256x3x2", variant=points("- va=p0213 vb=pad b=256x6 form=cast")),
        grid(same(BLOCKS), a="256x4x3", layout=points("- va=p0213 vb=slab")),
    ),
    wide=(
        grid(operands("f32 f16 bf16", RARE_STORED), a="256x3x2"),
        grid(operands("f32", RARE_STORED), a="256x3x2", variant=points("va=pad va=p0213 vb=off form=cast")),
        grid(operands(RARE, "f32"), a="256x3x2", variant=points("- va=p0213 vb=pad b=256x6 form=cast")),
        grid(same(RARE_STORED), a="256x4x3", layout=points("- va=p0213 vb=slab")),
        grid(operands("f32", f"{BLOCKS} {RARE_STORED}"), a="256x32", form="- back", data="borders"),
        grid(operands(f"{BLOCKS} {RARE}", "f32"), a="256x9", data="scales"),
        grid(operands("f32 f16 bf16", "f32 f16 bf16"), a="67x12", form="- cast back", data="casts"),
    ),
    smoke=(
        "CPY-f32+f16-a=67x12,form=back,data=casts",
        "CPY-f32+q4_0-a=256x32,data=borders",
        "CPY-f32+mxfp4-a=256x32,data=borders",
        grid(operands("f16", RARE_STORED), a="256x3x2"),
        "CPY-f32+q3_K-a=256x32,data=borders",
        "CPY-bf16+f16-a=67x12,form=back,data=casts",
        "CPY-nvfp4+f32-a=256x9,data=scales",
    ),
    full=(
        grid(_PAIRS, a="1024x64x9", va="p1023"),
        grid(operands("f32", BLOCKS), a="1024x512"),
        grid("f32+f32 f32+f16 f16+f32 q8_0+f32", a="4096x4100"),
    ),
    pairs=(
        grid(_PAIRS, a="12x5x4x2", b="- 24x10x2 480 6x2x10x4", va=f"{VIEWS} p1023 p3210", vb=f"{VIEWS} p1023"),
        grid(operands("f32", _FEW_BLOCKS), a="256x3x2x2", va=VIEWS, variant=points("- vb=off form=cast")),
        grid(
            operands(_FEW_BLOCKS, "f32"),
            a="256x3x2x2",
            va=VIEWS,
            variant=points("- vb=pad vb=off vb=slab b=256x12 b=512x6 form=cast"),
        ),
        grid(same(_FEW_BLOCKS), a="256x3x2x2", va=VIEWS, vb="- pad off rows slab part"),
    ),
)
def _cpy(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    fill = normal(300.0) if type_a is F32 and type_b is I32 else values(type_a)
    a = bench.operand("a", type_a, v["a"], fill, v["va"])
    if v["form"]:
        cast = bench.b.cast(a, type_b)
        return bench.b.cast(cast, type_a) if v["form"] == "back" else cast
    b = bench.operand("cache_v_l0", type_b, v["b"] or v["a"], values(type_b), v["vb"], keep=True)
    return bench.b.cpy(a, b)


@cases(
    "CONT DUP",
    keys="ne=SHAPE vne= to=SHAPE? form=|inplace",
    standard=(
        grid("CONT", _EVERY, ne="256x3x2", vne="- pad p0213 rows"),
        grid("CONT", _ELEMENTS, ne="10x6x4x2", vne="p1023 p3210 pad.p2103 off slab.p1203 p0321"),
        grid("DUP", _EVERY, ne="256x3x2", vne="- p0213"),
        grid("DUP", _ELEMENTS, ne="10x6x4x2", vne="p1023 pad off"),
        grid("CONT", _ELEMENTS, ne="10x6x4x2", to="60x8 480 10x2x3x8", vne="p1023 pad"),
        grid("DUP", "f32 f16 q8_0", ne="256x3", form="inplace"),
    ),
    wide=(
        grid("CONT", RARE, ne="256x3x2", vne="- pad p0213 rows"),
        grid("DUP", RARE, ne="256x3x2", vne="- p0213"),
        grid("CONT", "f32 f16", ne="3x65537 65537x3 257x513", vne="p1023 pad"),
    ),
    full=(grid("CONT", _ELEMENTS, ne="256x64x9", vne="p1023"), grid("CONT", "f32 f16", ne="4096x4100", vne="p1023")),
    pairs=(
        grid(_ELEMENTS, ne="10x6x4x2 1x7 9x1x4", vne=f"{VIEWS} p1023 p3210 p0321"),
        grid(_FEW_BLOCKS, ne="256x3x2x2", vne=f"{VIEWS} p0321"),
    ),
)
def _cont(bench: Bench) -> Tensor:
    v, (type_,) = bench.v, bench.types
    a = bench.operand("a", type_, v["ne"], values(type_), v["vne"], keep=v["form"] == "inplace")
    if bench.id.op == "DUP":
        return bench.b.dup_inplace(a) if v["form"] == "inplace" else bench.b.dup(a)
    return bench.b.cont(a) if v["to"] is None else bench.b.cont_4d(a, *v["to"])


@cases(
    "SET ACC",
    keys=f"a=SHAPE b=SHAPE at=NUMBERS every=1 va= vb= {INPLACE}",
    standard=(
        grid("f32", a="10x6x4x3", shape=points(_PARTS, "b=10x6x4x3")),
        grid("f32", a="10x6x4x3", b="5x3x2x2", at="1x0x1x1", every=2),
        grid("f32", a=96, b=17, at=40),
        grid("f32", a="10x6x4x2", b="10x2x4x2", at="0x3", vb="pad p0213 rows off"),
        grid("f32", a="10x6x4x2", b="10x2x4x2", at="0x3", va="off flat"),
        grid("f32", a="10x6x4x2", b="4x6x4x2", at=5, inplace="leaf mid"),
        grid("f32", a="10x6x4x2", b="10x1x4x2", at="0x4", inplace="leaf", va="off"),
        "SET-i32-a=10x6x4x2,b=4x2x3,at=3x1x1x1",
        "SET-i32-a=10x6x4x2,b=10x2x3,at=0x1,inplace=leaf",
    ),
    full=(grid("f32", a="128x64x32x2", b="128x64x1x2", at="0x0x7", inplace="leaf"),),
    pairs=(
        grid(
            "f32",
            a="10x6x4x3",
            shape=points(_PARTS, "b=10x6x4x3,at=0 b=5x3x2x2,at=1x0x1x1,every=2 b=1,at=9x5x3x2"),
            va="- off flat",
            vb=f"{VIEWS} p1023",
            inplace="- leaf mid",
        ),
        grid(
            "SET",
            "i32",
            a="10x6x4x3",
            shape=points(_PARTS, "b=10x6x4x3,at=0 b=5x3x2x2,at=1x0x1x1,every=2 b=1,at=9x5x3x2"),
            va="- off flat",
            vb=f"{VIEWS} p1023",
            inplace="- leaf",
        ),
    ),
)
def _part(bench: Bench) -> Sequence[Tensor]:
    """Write or add `b` into the part of `a` from element `at`, with the result's strides."""
    v, (type_,) = bench.v, bench.types
    a = bench.first("a", "a", values(type_))
    other = bench.operand("b", type_, v["b"], values(type_), v["vb"])
    at = (*v["at"], 0, 0, 0, 0)
    strides = a.nb if v["inplace"] else contiguous_nb(a.type, a.ne)  # of the result
    offset = sum(i * nb for i, nb in zip(at[:4], strides, strict=True))
    nb1, nb2, nb3 = strides[1:]
    out = bench.build(bench.id.op.lower())(a, other, nb1 * v["every"], nb2, nb3, offset)
    return bench.outputs(a, out)


@cases(
    "REPEAT",
    keys="a=SHAPE to=SHAPE va=",
    standard=(
        grid(f"{FLOATS} i32", a="9x5x3x2", to="9x5x3x2 18x5x3x2 9x15x3x2 9x5x6x2 9x5x3x8 27x10x6x4"),
        grid(f"{FLOATS} i32", a="1 17 1x5 1x1x3", to="17x5x3x2"),
        grid(f"{FLOATS} i32", a="8x6x3x2", to="16x6x6x4", va="pad rows off slab p0213 p0321"),
    ),
    full=(grid(f"{FLOATS} i32", a="128x1x8x3", to="128x4x8x96"),),
    pairs=(
        grid(
            f"{FLOATS} i32",
            a="8x6x3x2 1 8 1x6 1x1x3 1x1x1x2 8x1x3 1x6x1x2",
            to="8x6x3x2 16x6x3x4 8x12x6x2",
            va=f"{VIEWS} p0321",
        ),
    ),
)
def _repeat(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.first("a", "a", values(bench.types[0]))
    return bench.b.repeat_4d(a, *v["to"])


@cases(
    "CONCAT",
    keys="a=SHAPE n=1 dim=0 va= vb=",
    standard=(
        grid("f32 f16 bf16 i32 i64", a="11x5x3x2", shape=points("n=11,dim=0 n=4,dim=1 n=5,dim=2 n=1,dim=3")),
        grid(f"{FLOATS} i32", a="12x6x4x2", dim="0 1 2 3", n=7, layout=points("va=p1023 vb=p2103 va=pad,vb=p0213")),
        grid(f"{FLOATS} i32", a="12x6x4x2", dim="0 1 2 3", n=7, va="rows", vb="off"),
        grid("i64", a="12x6x4x2", dim="0 2", n=7, layout=points("va=pad,vb=p0213 va=rows,vb=off")),
        grid(BLOCKS_32, a="64x5x3x2", shape=points("n=32,dim=0 n=4,dim=1 n=2,dim=2 n=1,dim=3")),
        grid(BLOCKS_256, a="256x3x2", shape=points("n=512,dim=0 n=4,dim=1 n=1,dim=2")),
        grid("q4_0 q8_0 q4_K", a="256x4x3", dim="0 1", n=256, va="pad", vb="rows"),
    ),
    wide=(grid(RARE, a="256x3x2", shape=points("n=512,dim=0 n=4,dim=1 n=1,dim=2")),),
    full=(grid("f32 f16", a="128x256x8x2", n=128, dim=0),),
    pairs=(
        grid(f"{FLOATS} i32", a="12x6x4x2", dim="0 1 2 3", n="1 7", va=f"{VIEWS} p1023", vb=f"{VIEWS} p1023"),
        grid("i64 q4_0 q5_1 q8_0 mxfp4 q4_K q6_K", a="256x6x4x2", dim="0 1 2 3", n=256, va=VIEWS, vb=VIEWS),
    ),
)
def _concat(bench: Bench) -> Tensor:
    v, dim, (type_,) = bench.v, bench.v["dim"], bench.types
    ne_b = list(v["a"])
    ne_b[dim] = v["n"]
    a = bench.first("a", "a", values(bench.types[0]))
    b = bench.operand("b", type_, dims(*ne_b), values(bench.types[0]), v["vb"])
    return bench.b.concat(a, b, dim)
