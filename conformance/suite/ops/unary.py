"""Functions of one value: UNARY, SQR, SQRT, LOG, SIN, COS, the gated units GLU; SUM and CUMSUM."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.tensor import Tensor
from conformance.suite.data import Fill, normal, uniform, with_edges

from .bench import FLOATS, INPLACE, Bench, cases

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
"""Op -> where its curve bends; the rest bends within a few units of zero."""
_FLOATS = f"[{FLOATS}]"
_UNARY = [f"UNARY.{op}" for op in UNARY_OPS if op != "XIELU"]
_SMOOTH = f"[{'|'.join(_UNARY)}]"
_DEFINED = "[UNARY.ABS|UNARY.NEG|UNARY.SGN|UNARY.STEP|UNARY.RELU|UNARY.FLOOR|UNARY.CEIL|UNARY.TRUNC|UNARY.TANH|SQR]"
_ROUNDING = "[UNARY.FLOOR|UNARY.CEIL|UNARY.ROUND|UNARY.TRUNC]"
_KEYS = f"ne=SHAPE vne= {INPLACE} special=|edge|nan|half"


@cases(
    " ".join(("SQR", "SQRT", *_UNARY)),
    keys=_KEYS,
    standard=(
        f"{_SMOOTH}-{_FLOATS}-ne=[7x5x3x2|67x4]",
        f"{_SMOOTH}-f32-ne=256x5x2",
        f"{_SMOOTH}-[f32|f16]-ne=18x6x3x2,vne=[pad|p0213]",
        f"{_SMOOTH}-[f32-ne=18x6x3x2,vne=off|bf16-ne=18x6x3x2,vne=rows]",
        f"{_SMOOTH}-{_FLOATS}-ne=40x5,inplace=leaf",
        f"{_SMOOTH}-f32-ne=40x5,inplace=mid",
        f"[SQR|SQRT]-{_FLOATS}-ne=[7x5x3x2|67x4|256x5x2]",
        f"[SQR|SQRT]-{_FLOATS}-ne=18x6x3x2,vne=[pad|rows|p0213|off]",
        f"[SQR|SQRT]-{_FLOATS}-ne=40x5,inplace=leaf",
        f"{_DEFINED}-{_FLOATS}-ne=32x5,special=edge",
        f"{_ROUNDING}-f32-ne=32x5,special=half",
        f"[UNARY.ABS|UNARY.NEG|SQR]-{_FLOATS}-ne=32x5,special=nan",
    ),
    full=(f"{_SMOOTH}-{_FLOATS}-ne=[4096x9|1023x31x3]", f"[SQR|SQRT]-{_FLOATS}-ne=4096x9"),
)
@cases(
    "UNARY.XIELU",
    keys=f"{_KEYS} alpha_n=0.8 alpha_p=0.8 beta=0.5 eps=-1e-6",
    standard=(
        f"UNARY.XIELU-{_FLOATS}-ne=[7x5x3x2|67x4|256x5x2]",
        f"UNARY.XIELU-{_FLOATS}-ne=18x6x3x2,vne=[pad|off]",
        f"UNARY.XIELU-{_FLOATS}-ne=33x4,[alpha_n=4.0,alpha_p=20.5|alpha_n=-3.0|beta=1.5,alpha_p=0.1|eps=-0.5]",
    ),
    full=(f"UNARY.XIELU-{_FLOATS}-ne=4096x9",),
)
def _unary(bench: Bench) -> Sequence[Tensor]:
    v, op = bench.v, bench.id.op.removeprefix("UNARY.")
    a = bench.first("a", "ne", with_edges(_PROBES.get(op, normal(2.0)), v["special"]))
    if op == "XIELU":
        return bench.outputs(a, bench.b.xielu(a, v["alpha_n"], v["alpha_p"], v["beta"], v["eps"]))
    return bench.outputs(a, bench.build("unary")(a, op) if op in UNARY_OPS else bench.build(op.lower())(a))


_GATED = "[GLU.REGLU|GLU.GEGLU|GLU.SWIGLU|GLU.GEGLU_ERF|GLU.GEGLU_QUICK]"
_LIMITED = "[GLU.SWIGLU_OAI-f32|GLU.SWIGLU_CLAMP-f32|GLU.SWIGLU_CLAMP-f16]"


@cases(
    " ".join(f"GLU.{op}" for op in GLU_OPS),
    keys="ne=SHAPE va= vb= form=|swapped|split alpha=1.702 limit=7.0",
    standard=(
        f"{_GATED}-{_FLOATS}-ne=[14x5x3x2|134x4][|,form=swapped|,form=split]",
        f"{_GATED}-{_FLOATS}-ne=36x6x3,[va=pad|va=off,form=swapped]",
        f"{_GATED}-{_FLOATS}-ne=18x6x3,va=pad,vb=rows,form=split",
        f"{_LIMITED}-ne=[14x5x3x2|67x4],form=split",
        f"{_LIMITED}-ne=33x4,form=split,[limit=0.5|limit=3.0,alpha=1.0|limit=2.0,alpha=0.5]",
        f"{_LIMITED}-ne=18x6x3,va=pad,vb=rows,form=split",
        f"{_GATED}-{_FLOATS}-ne=[15x5x3x2|135x4][|,form=swapped]",
        f"{_GATED}-f32-ne=37x6x3,[va=pad|va=off,form=swapped]",
        f"{_LIMITED}-ne=[14x5x3x2|135x4],limit=2.0",
    ),
    full=(f"{_GATED}-{_FLOATS}-ne=2816x9[|,form=split]",),
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
    keys=f"ne=SHAPE vne= {INPLACE}",
    standard=(
        "[LOG|SIN|COS]-[f32|f16]-ne=[17x5x3x2|256x3]",
        "[LOG|SIN|COS]-f32-ne=18x6x3x2,[vne=pad|vne=off|vne=p0213|inplace=leaf]",
        "[SIN|COS]-f32-ne=18x6x3x2,inplace=mid",
        "[SUM|CUMSUM]-f32-ne=[1x7|33x5x3x2|1025x3]",
        "[SUM|CUMSUM]-f32-ne=18x6x3x2,vne=[pad|rows|p0213|off]",
    ),
    full=("[LOG|SIN|COS|SUM|CUMSUM]-f32-ne=4096x129",),
)
def _map(bench: Bench) -> Sequence[Tensor]:
    """`CUMSUM` and `SUM` have no form in place."""
    op = bench.id.op
    a = bench.first("a", "ne", _DOMAIN.get(op, normal(1.0, 0.25)))
    return bench.outputs(a, bench.build(op.lower())(a))
