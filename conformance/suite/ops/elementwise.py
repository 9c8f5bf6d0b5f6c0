"""Elementwise ops: broadcast arithmetic, SCALE, CLAMP, FILL, masks, ARANGE, UNARY and GLU."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32, GLU_OPS, I32, UNARY_OPS, type_named
from conformance.suite.data import Fill, away_from_zero, integers, normal, uniform, with_edges
from conformance.suite.grid import Axis, Grid, grid, operands, points

from .bench import BLOCKS, FLOATS, INPLACE, ONE_ROW, RARE, RARE_STORED, VIEWS, Bench, Timed, cases

_DIVISOR = away_from_zero(0.25, 4.0)
_FLOATS2 = "f32+f32 f16+f16 bf16+bf16 f16+f32 bf16+f32"
_ARITHMETIC = "ADD SUB MUL DIV"


@cases(
    "ADD SUB MUL DIV",
    keys=f"a=SHAPE b=SHAPE? va= vb= {INPLACE} cast=|f32 chain=1 special=|edge|nan data=|range|both",
    types="a b",
    standard=(
        grid(_FLOATS2, a="13x5x3x2"),
        grid(_FLOATS2, a="13x5x3x2", b="1 13 13x5 1x5x3x2 13x1x3 1x5x1x2"),
        grid(_FLOATS2, a="16x10x4x2", b="8x5x2x1"),
        grid(_FLOATS2, a="16x6x4x2", va="pad off slab.p0213"),
        grid(_FLOATS2, a="16x6x4x2", vb="rows p0213 p1023 pad.p2013"),
        grid(_FLOATS2, a="16x6x4x2", b="16x1x4", va="p0213", vb="pad"),
        grid(_FLOATS2, a="24x5x2", inplace="leaf mid"),
        grid(_FLOATS2, a="24x6x2", b=24, va="slab", inplace="leaf"),
        grid("ADD MUL", "f32+f32", a="24x5x2", inplace="input"),
        grid("f32+f32 f16+f16 bf16+bf16", a="32x4", special="edge nan"),
        grid("f32+f32", shape=points("a=1 a=1x17 a=2049 a=257x3,b=257")),
        grid("ADD", operands(BLOCKS, "f32"), a="256x3x2"),
        grid("ADD", operands(BLOCKS, "f32"), a="256x3", cast="f32"),
        grid("ADD", operands("q4_0 q8_0 q6_K", "f32"), a="256x3x2", va="pad", vb="rows"),
        grid("ADD", operands("f16 bf16", "f32"), a="33x3x2", cast="f32"),
        grid("ADD", operands("f16 bf16", "f32"), a="33x3x2", b=33, cast="f32"),
    ),
    wide=(
        grid("f32+f32 f16+f16 bf16+bf16 f16+f32", a="67x3", data="range both"),
        grid("ADD", operands(RARE_STORED, "f32"), a="256x3x2"),
        grid("f32+f32 f16+f16", a="16x6x4x2", vb="p0132 p0321 p2310 p3012"),
        grid("ADD", operands(RARE, "f32"), a="256x3", cast="f32"),
        grid("f32+f32", a="255x3 256x3 511x3 512x3 65537"),
        grid("f32+f32", a="4x32x2", b=1, va="rows pad"),
        grid("f32+f32", shape=points("a=513x3,b=513 a=3x65537,b=3 a=3x65537,b=1x65537")),
    ),
    smoke=(
        grid("ADD MUL", "f32+f32", shape=points("a=16x10x4x2,b=8x5x2x1 a=13x5x3x2,b=1x5x1x2")),  # whole parts and ones
        *("DIV-f32+f32-a=67x3,data=range", "ADD-f32+f32-a=16392x2", "ADD-f32+f32-a=16x6x4x2,vb=p0132"),
    ),
    full=(
        grid(_FLOATS2, variant=points("a=4096x33,b=4096 a=511x65x4 a=128x64x8x3,b=128x1x8x3,va=pad.p0213")),
        grid("ADD MUL", "f32+f32", a="4096x4100", b="4096x1 4096x4100"),
        grid("f32+f32 f16+f16", a="64x1x3", va=ONE_ROW, vb=f"- {ONE_ROW}"),
    ),
    pairs=(
        grid(
            _FLOATS2,
            a="24x6x4x2",
            b="24x6x4x2 1 24 1x6 1x1x4 1x1x1x2 24x1x4 1x6x1x2 24x6 8x3x2x1 24x6x2x2",
            va=VIEWS,
            vb=f"{VIEWS} p1023",
            inplace="- leaf mid input",
        ),
    ),
)
def _binary(bench: Bench) -> Sequence[Tensor]:
    v, op = bench.v, bench.id.op.lower()
    a = bench.first("a", "a", with_edges(normal(), v["special"]))
    fill_b = _DIVISOR if op == "div" else normal(1.5)
    b = bench.operand("b", bench.types[1], v["b"] or v["a"], with_edges(fill_b, v["special"]), v["vb"])
    if v["cast"]:
        return (bench.b.add_cast(a, b, type_named(v["cast"])),)
    out = bench.build(op)(a, b)
    for i in range(1, v["chain"]):  # backends fuse up to eight
        out = bench.build(op)(out, bench.operand(f"b{i}", bench.types[1], b.ne, fill_b, v["vb"]))
    return bench.outputs(a, out)


@cases(
    "SCALE",
    keys=f"ne=SHAPE vne= {INPLACE} s=1.0 b=0.0 data=|range",
    wide=(grid("f32 bf16", ne="67x4", s="0.5 -3.0", data="range"),),
    standard=(
        grid("f32 bf16", ne="7x5x3x2 67x4 256x5", line=points("s=2.0 s=-0.3 s=0.125,b=-1.5 s=1.0,b=0.75 s=0.2,b=2.0")),
        grid("f32 bf16", ne="18x6x3", vne="off flat", line=points("s=-1.5 s=0.5,b=0.25")),
        grid("f32 bf16", ne="40x5", inplace="leaf", line=points("s=0.7 s=3.0,b=-0.5")),
        grid("f32", ne="40x5", inplace="mid", line=points("s=0.7 s=3.0,b=-0.5")),
        "SCALE-f32-ne=24x6x2,vne=off,inplace=leaf,s=1.25",
    ),
    smoke=("SCALE-f32-ne=16392x2,s=0.5",),
    pairs=(grid("f32 bf16", ne="18x6x3x2 67x4", vne="- off flat", inplace="- leaf mid", s="-1.5 0.5", b="- 0.25"),),
    full=(grid("f32 bf16", ne="4096x9", s="0.0883883"),),
)
def _scale(bench: Bench) -> Sequence[Tensor]:
    v = bench.v
    a = bench.first("a", "ne", normal())
    out = bench.build("scale_bias")(a, v["s"], v["b"]) if v["b"] else bench.build("scale")(a, v["s"])
    return bench.outputs(a, out)


_BOUNDS = "min=-0.5,max=0.5 min=0.0,max=6.0 min=-inf,max=1.25 min=-2.0,max=inf"


@cases(
    "CLAMP",
    keys=f"ne=SHAPE vne= {INPLACE} min=-1.0 max=1.0 special=|edge|nan",
    wide=(
        grid("f32 f16", ne="32x5", special="edge", bounds=points("min=-0.5,max=0.5 min=-inf,max=inf")),
        grid("f32 f16", ne="32x5", special="nan", min="0.75", max="0.75"),
    ),
    smoke=("CLAMP-f32-ne=32x5,special=nan,min=0.75,max=0.75",),
    standard=(
        grid("f32 f16", ne="7x5x3x2 67x4 256x5", bounds=points(_BOUNDS)),
        grid("f32 f16", ne="18x6x3x2", vne="pad rows p0213 off", min="-1.5", max="0.25"),
        grid("f32 f16", ne="40x5", inplace="leaf mid input", min="-0.75", max="1.5"),
    ),
    pairs=(grid("f32 f16", ne="18x6x3x2 67x4", vne=VIEWS, inplace="- leaf mid input", bounds=points(_BOUNDS)),),
    full=(grid("f32 f16", ne="4096x9", min="-1.0", max="1.0"),),
)
def _clamp(bench: Bench) -> Sequence[Tensor]:
    """Clamp NaN only with min = max: ggml's CPU returns max, its CUDA min."""
    v = bench.v
    a = bench.first("a", "ne", with_edges(normal(2.0), v["special"]))
    return bench.outputs(a, bench.build("clamp")(a, v["min"], v["max"]))


@cases(
    "ADD_ID",
    keys="a=SHAPE n_expert=4 va= vb= vids=",
    types="a b",
    standard=(
        grid("f32+f32", a="33x2x5 64x4x1 130x1x7 256x4x9", n_expert="4 8 32"),
        grid("f32+f32", a="33x3x5", n_expert=8, va="pad rows"),
        grid("f32+f32", a="33x3x5", n_expert=8, vids="rows pad p1023"),
        grid("f32+f32", a="33x3x5", n_expert=8, va="p0213", vids="off"),
    ),
    full=("ADD_ID-f32+f32-a=2880x4x33,n_expert=128",),
    smoke=("ADD_ID-f32+f32-a=33x3x5,n_expert=8,vb=pad",),
    pairs=(
        grid(
            "f32+f32",
            a="33x3x5",
            n_expert="2 8",
            va="- pad off rows slab p0213",
            vb="- pad off rows",
            vids="- pad off rows p1023",
        ),
    ),
)
def _add_id(bench: Bench) -> Tensor:
    v = bench.v
    n, n_used, n_tokens, _ = v["a"]
    a = bench.first("a", "a", normal())
    b = bench.operand("b", bench.types[1], (n, v["n_expert"], 1, 1), normal(2.0), v["vb"], keep=True)
    ids = bench.operand("ids", I32, (n_used, n_tokens, 1, 1), integers(0, v["n_expert"]), v["vids"])
    return bench.b.add_id(a, b, ids)


def _by_seed(bench: Bench) -> float:
    """Return a number in 64ths from the case's stream, so that ops without leaves use the seed."""
    return float(Stream(bench.id.id, "shift").integers(1, 1, 640)[0]) / 64


@cases(
    "ADD1 LEAKY_RELU FILL DIAG_MASK_INF DIAG_MASK_ZERO",
    keys=f"ne=SHAPE vne= {INPLACE} c=0.0",
    standard=(
        grid("ADD1 LEAKY_RELU FILL", "f32", ne="17x5x3x2 256x3", c="0.1 -2.5"),
        grid("ADD1 LEAKY_RELU FILL", "f32", ne="18x6x3", inplace="leaf mid", c="0.3"),
        "FILL-f16-ne=17x5x3,c=0.1",
        "FILL-f32-ne=17x5x3,vne=off,c=-9.5",
        grid("DIAG_MASK_INF DIAG_MASK_ZERO", "f32", ne="9x9 20x6x3x2", c="0 3"),
        grid("DIAG_MASK_INF DIAG_MASK_ZERO", "f32", ne="20x6x3", inplace="leaf mid", c=2),
    ),
    pairs=(grid("f32", ne="17x5x3x2 6x20", vne="- off flat", inplace="- leaf mid input", c="0.0 2.0"),),
    full=("FILL-f32-ne=4096x129,c=1.5", "FILL-f16-ne=33685504,c=0.5"),
)
def _scalars(bench: Bench) -> Sequence[Tensor]:
    v, op = bench.v, bench.id.op
    a = bench.first("a", "ne", normal())
    if op == "LEAKY_RELU":
        return bench.outputs(a, bench.b.leaky_relu(a, v["c"], bool(v["inplace"])))
    other: Tensor | float = int(v["c"])
    if op == "ADD1":
        other = bench.leaf("one", F32, (1, 1, 1, 1), normal(mean=2.0))
    elif op == "FILL":
        other = v["c"] + _by_seed(bench)
    return bench.outputs(a, bench.build(op.lower())(a, other))


@cases(
    "ARANGE",
    keys="start=0.0 stop=8.0 step=1.0",
    types="out",
    standard=(grid("f32", stop="1.0 16.0 4096.0"), grid("f32", start="0.5 -3.0", stop="20.0", step="0.75 0.1 3.0")),
)
def _arange(bench: Bench) -> Tensor:
    """Add a leaf to the range, because a graph without a leaf has no device to run on."""
    v, b, shift = bench.v, bench.b, _by_seed(bench)
    x = b.arange(v["start"] + shift, v["stop"] + shift, v["step"])
    return b.add(x, bench.leaf("zero", F32, (1, 1, 1, 1), uniform(0.0, 0.0)))


_POSITIVE = uniform(0.01, 20.0)
_PROBES: dict[str, Fill] = {
    "SQRT": _POSITIVE,
    "EXP": normal(2.0),
    "EXPM1": normal(1.5),
    "SOFTPLUS": normal(9.0),
    "HARDSWISH": normal(2.5),
    "HARDSIGMOID": normal(2.5),
    "FLOOR": normal(9.0),
    "CEIL": normal(9.0),
    "ROUND": normal(9.0),
    "TRUNC": normal(9.0),
}
"""Op -> inputs around the bends of its curve, if these are not within a few units of zero."""
_UNARY = [f"UNARY.{op}" for op in UNARY_OPS if op != "XIELU"]
_SMOOTH = " ".join(_UNARY)
_DEFINED = "UNARY.ABS UNARY.NEG UNARY.SGN UNARY.STEP UNARY.RELU UNARY.FLOOR UNARY.CEIL UNARY.TRUNC UNARY.TANH SQR"
_ROUNDING = "UNARY.FLOOR UNARY.CEIL UNARY.ROUND UNARY.TRUNC"
_KEYS = f"ne=SHAPE vne= {INPLACE} special=|edge|nan|half data=|range|last"


@cases(
    " ".join(("SQR", "SQRT", *_UNARY)),
    keys=_KEYS,
    standard=(
        grid(FLOATS, ne="7x5x3x2 67x4"),
        grid("f32", ne="256x5x2"),
        grid(_SMOOTH, "f32 f16", ne="18x6x3x2", vne="pad p0213"),
        grid(_SMOOTH, "f32", ne="18x6x3x2", vne="off"),
        grid(_SMOOTH, "bf16", ne="18x6x3x2", vne="rows"),
        grid(FLOATS, ne="40x5", inplace="leaf"),
        grid(_SMOOTH, "f32", ne="40x5", inplace="mid"),
        grid("SQR SQRT", "f16 bf16", ne="256x5x2"),
        grid("SQR SQRT", FLOATS, ne="18x6x3x2", vne="pad rows p0213 off"),
        grid(_DEFINED, FLOATS, ne="32x5", special="edge"),
        grid(_ROUNDING, "f32", ne="32x5", special="half"),
        grid("UNARY.ABS UNARY.NEG SQR", FLOATS, ne="32x5", special="nan"),
    ),
    wide=(
        grid(FLOATS, ne="67x4", data="range"),
        grid("UNARY.EXP SQR", FLOATS, ne="67x4", data="last"),
        grid("UNARY.SILU UNARY.GELU UNARY.NEG SQR", "f32", ne="255x3 257x3 511x3 512x3 513x3 65537 3x65537"),
    ),
    smoke=("UNARY.SILU-f32-ne=67x4,data=range",),
    full=(
        grid(FLOATS, ne="4096x9"),
        grid(_SMOOTH, FLOATS, ne="1023x31x3"),
        grid("f32 f16", ne="64x1x3", vne=ONE_ROW),
        "UNARY.SILU-f32-ne=4096x4100",
    ),
    pairs=(grid(_SMOOTH, FLOATS, ne="18x6x3x2 67x4", vne=VIEWS, inplace="- leaf mid input"),),
)
@cases(
    "UNARY.XIELU",
    keys=f"{_KEYS} alpha_n=0.8 alpha_p=0.8 beta=0.5 eps=-1e-6",
    standard=(
        grid(FLOATS, ne="7x5x3x2 67x4 256x5x2"),
        grid(FLOATS, ne="18x6x3x2", vne="pad off"),
        grid(FLOATS, ne="33x4", variant=points("alpha_n=4.0,alpha_p=20.5 alpha_n=-3.0 beta=1.5,alpha_p=0.1 eps=-0.5")),
    ),
    wide=(grid(FLOATS, ne="67x4", data="range"),),
    full=(grid(FLOATS, ne="4096x9"),),
)
def _unary(bench: Bench) -> Sequence[Tensor]:
    v, op = bench.v, bench.id.op.removeprefix("UNARY.")
    a = bench.first("a", "ne", with_edges(_PROBES.get(op, normal(2.0)), v["special"]))
    if op == "XIELU":
        return bench.outputs(a, bench.b.xielu(a, v["alpha_n"], v["alpha_p"], v["beta"], v["eps"]))
    return bench.outputs(a, bench.build("unary")(a, op) if op in UNARY_OPS else bench.build(op.lower())(a))


_FORMS = "- form=swapped form=split form=split,vb=pad form=split,vb=off form=split,vb=slab form=split,vb=part"
_GATED = "GLU.REGLU GLU.GEGLU GLU.SWIGLU GLU.GEGLU_ERF GLU.GEGLU_QUICK"


def _limited(**axes: str | Axis) -> tuple[Grid, Grid]:
    """Return grids of the two units with a limit; only SWIGLU_CLAMP supports F16."""
    return grid("GLU.SWIGLU_OAI", "f32", **axes), grid("GLU.SWIGLU_CLAMP", "f32 f16", **axes)


@cases(
    " ".join(f"GLU.{op}" for op in GLU_OPS),
    keys="ne=SHAPE va= vb= form=|swapped|split alpha=1.702 limit=7.0 data=|range",
    standard=(
        grid(_GATED, FLOATS, ne="14x5x3x2 134x4", form="- swapped split"),
        grid(_GATED, FLOATS, ne="36x6x3", variant=points("va=pad va=off,form=swapped")),
        grid(_GATED, FLOATS, ne="18x6x3", va="pad", vb="rows", form="split"),
        *_limited(ne="14x5x3x2 67x4", form="split"),
        *_limited(ne="33x4", form="split", variant=points("limit=0.5 limit=3.0,alpha=1.0 limit=2.0,alpha=0.5")),
        *_limited(ne="18x6x3", va="pad", vb="rows", form="split"),
        grid(_GATED, FLOATS, ne="15x5x3x2 135x4", form="- swapped"),
        grid(_GATED, "f32", ne="37x6x3", variant=points("va=pad va=off,form=swapped")),
        *_limited(ne="14x5x3x2 135x4", limit="2.0"),
    ),
    wide=(
        grid(_GATED, FLOATS, ne="67x4", form="split", data="range"),
        grid(_GATED, "f32", ne="64x1x3", va="pad rows"),
        *_limited(ne="67x4", form="split", data="range"),
    ),
    smoke=("GLU.SWIGLU-f32-ne=16392x2,va=pad,form=swapped",),
    full=(
        grid(_GATED, FLOATS, ne="2816x9", form="- split"),
        grid(_GATED, "f32", ne="64x1x3", va=ONE_ROW, vb=ONE_ROW, form="split"),
        *_limited(ne="64x1x3", va=ONE_ROW, vb=ONE_ROW, form="split"),
    ),
    pairs=(grid(_GATED, FLOATS, ne="18x6x3x2 134x4", va="- pad off rows slab part", form=points(_FORMS)),),
    timed=(Timed("GLU.SWIGLU-f32-ne=5632x64", 64, 4),),
)
def _glu(bench: Bench) -> Tensor:
    v, op = bench.v, bench.id.op.removeprefix("GLU.")
    a = bench.operand("a", bench.types[0], v["ne"], normal(2.0), v["va"])
    b = bench.operand("b", bench.types[0], v["ne"], normal(2.0), v["vb"]) if v["form"] == "split" else None
    if v["form"] == "swapped":
        return bench.b.glu(a, op, True)
    if op == "SWIGLU_OAI":
        return bench.b.swiglu_oai(a, b, v["alpha"], v["limit"])
    if op == "SWIGLU_CLAMP":
        return bench.b.swiglu_clamp(a, b, v["limit"])
    return bench.b.glu(a, op, False) if b is None else bench.b.glu_split(a, b, op)


_DOMAIN = {"LOG": uniform(0.05, 20.0), "SIN": uniform(-7.0, 7.0), "COS": uniform(-7.0, 7.0)}


@cases(
    "LOG SIN COS SUM CUMSUM",
    keys=f"ne=SHAPE vne= {INPLACE} form=|snake data=|range",
    wide=(grid("LOG", "f32 f16", ne="67x4", data="range"), grid("SUM CUMSUM", "f32", ne="67x4", data="range")),
    standard=(
        grid("LOG SIN COS", "f32 f16", ne="17x5x3x2 256x3"),
        grid("LOG SIN COS", "f32", ne="18x6x3x2", layout=points("vne=pad vne=off vne=p0213 inplace=leaf")),
        grid("SIN COS", "f32", ne="18x6x3x2", inplace="mid"),
        grid("SUM CUMSUM", "f32", ne="1x7 33x5x3x2 1025x3"),
        grid("SUM CUMSUM", "f32", ne="18x6x3x2", vne="pad rows p0213 off"),
    ),
    smoke=("CUMSUM-f32-ne=1025x3",),
    full=(grid("f32", ne="4096x129"),),
    pairs=(
        grid("LOG SIN COS", "f32", ne="18x6x3x2 67x4", vne=VIEWS, inplace="- leaf mid input"),
        grid("SUM CUMSUM", "f32", ne="18x6x3x2 67x4 1x7", vne=VIEWS),
    ),
)
def _map(bench: Bench) -> Sequence[Tensor]:
    """Build the op; `CUMSUM` and `SUM` have no in-place variant."""
    op = bench.id.op
    fill = _DOMAIN.get(op, normal(1.0, 2.0))  # a single cancelling sum has no scale for its error
    if op == "LOG" and bench.v["inplace"] == "mid":
        fill = uniform(-20.0, -0.05)  # the previous node negates it
    a = bench.first("a", "ne", fill)
    if bench.v["form"]:
        return (_snake(bench, a),)
    return bench.outputs(a, bench.build(op.lower())(a))


def _snake(bench: Bench, x: Tensor) -> Tensor:
    """Build `x + op(a x)² / b` of audio decoders, which backends fuse; `a` and `b` are per row."""
    b, op = bench.b, bench.id.op
    if op not in {"SIN", "COS"}:
        raise UsageError(f"case {bench.id.id!r}: form=snake applies only to SIN and COS")
    a, scale = (bench.leaf(name, F32, (1, x.ne[1], 1, 1), uniform(0.2, 2.0), keep=True) for name in ("a", "inv_b"))
    wave = bench.build(op.lower())(b.mul(x, a))
    return b.add(x, b.mul(b.sqr(wave), scale))
