"""Ops of elements, rows and shapes that few models use: PAD, FILL, ARANGE, sums, masks, logarithms and angles."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.case.streams import Stream
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32

from .bench import INPLACE, Bench
from .data import distinct, normal, uniform, values
from .grammar import OpCases, count, numbers, real, shape, text


def _by_seed(bench: Bench) -> float:
    """A number of the case's own, whole sixty-fourths: what depends on no leaf would be the same for every seed."""
    return float(Stream(bench.id.id, "shift").integers(1, 1, 640)[0]) / 64


_DOMAIN = {"LOG": uniform(0.05, 20.0), "SIN": uniform(-7.0, 7.0), "COS": uniform(-7.0, 7.0)}


def _map(bench: Bench) -> Sequence[Tensor]:
    """`CUMSUM` and `SUM` have no form in place."""
    v, b, op = bench.v, bench.b, bench.id.op
    a = bench.destination("a", "ne", _DOMAIN.get(op, normal(1.0, 0.25)))
    make = getattr(b, op.lower() + ("_inplace" if v["inplace"] else ""))
    return bench.outputs(a, make(a))


MAPS = OpCases(
    ops=("LOG", "SIN", "COS", "SUM", "CUMSUM"),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "inplace": INPLACE},
    make=_map,
    standard=(
        "{LOG|SIN|COS}-{f32|f16}-ne={17x5x3x2|256x3}",
        "{LOG|SIN|COS}-f32-ne=18x6x3x2,{vne=pad|vne=off|vne=p0213|inplace=leaf}",
        "{SIN|COS}-f32-ne=18x6x3x2,inplace=mid",
        "{SUM|CUMSUM}-f32-ne={1x7|33x5x3x2|1025x3}",
        "{SUM|CUMSUM}-f32-ne=18x6x3x2,vne={pad|rows|p0213|off}",
    ),
    full=("{LOG|SIN|COS|SUM|CUMSUM}-f32-ne=4096x129",),
)


def _scalars(bench: Bench) -> Sequence[Tensor]:
    v, b, op = bench.v, bench.b, bench.id.op
    a = bench.destination("a", "ne", normal())
    suffix = "_inplace" if v["inplace"] else ""
    if op == "ADD1":
        return bench.outputs(a, getattr(b, "add1" + suffix)(a, bench.leaf("one", F32, (1, 1, 1, 1), normal(mean=2.0))))
    if op == "LEAKY_RELU":
        return bench.outputs(a, b.leaky_relu(a, v["c"], bool(suffix)))
    if op == "FILL":
        return bench.outputs(a, getattr(b, "fill" + suffix)(a, v["c"] + _by_seed(bench)))
    return bench.outputs(a, getattr(b, op.lower() + suffix)(a, int(v["c"])))


SCALARS = OpCases(
    ops=("ADD1", "LEAKY_RELU", "FILL", "DIAG_MASK_INF", "DIAG_MASK_ZERO"),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "inplace": INPLACE, "c": real()},
    make=_scalars,
    standard=(
        "{ADD1|LEAKY_RELU|FILL}-f32-ne={17x5x3x2|256x3},c={0.1|-2.5}",
        "{ADD1|LEAKY_RELU|FILL}-f32-ne=18x6x3,inplace={leaf|mid},c=0.3",
        "FILL-f16-ne=17x5x3,c=0.1",
        "FILL-f32-ne=17x5x3,vne=off,c=-9.5",
        "{DIAG_MASK_INF|DIAG_MASK_ZERO}-f32-ne={9x9|20x6x3x2},c={0|3}",
        "{DIAG_MASK_INF|DIAG_MASK_ZERO}-f32-ne=20x6x3,inplace={leaf|mid},c=2",
    ),
    full=("FILL-f32-ne=4096x129,c=1.5",),
)


def _arange(bench: Bench) -> Tensor:
    """A sum with a leaf, because a graph without a leaf has no place to run."""
    v, b, shift = bench.v, bench.b, _by_seed(bench)
    x = b.arange(v["start"] + shift, v["stop"] + shift, v["step"])
    return b.add(x, bench.leaf("zero", F32, (1, 1, 1, 1), uniform(0.0, 0.0)))


ARANGE = OpCases(
    ops=("ARANGE",),
    types=("out",),
    keys={"start": real(), "stop": real(8.0), "step": real(1.0)},
    make=_arange,
    standard=("ARANGE-f32-stop={1.0|16.0|4096.0}", "ARANGE-f32-start={0.5|-3.0},stop=20.0,step={0.75|0.1|3.0}"),
)


def _pad(bench: Bench) -> Tensor:
    v, b = bench.v, bench.b
    a = bench.operand("a", bench.types[0], v["ne"], values(bench.types[0]), v["vne"])
    widths = (*v["by"], *(0,) * 8)[:8]
    return b.pad_ext(a, *widths)


PAD = OpCases(
    ops=("PAD",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "by": numbers()},
    make=_pad,
    standard=(
        "PAD-f32-ne=10x5x4x3,by={0x3|0x0x0x2|3x0|1x2x3x4x0x1x2x0|0x0x0x0x0x0x0x1}",
        "PAD-f32-ne=10x5x4x3,by=0x3x1x0,vne={pad|off|p0213}",
    ),
    full=("PAD-f32-ne=1000x65x16,by=0x24x0x63",),
)


def _argmax(bench: Bench) -> Tensor:
    return bench.b.argmax(bench.operand("a", bench.types[0], bench.v["ne"], distinct(-8.0, 8.0), bench.v["vne"]))


ARGMAX = OpCases(
    ops=("ARGMAX",),
    types=("a",),
    keys={"ne": shape(), "vne": text()},
    make=_argmax,
    standard=("ARGMAX-f32-ne={9x6|17x5|1025x3}", "ARGMAX-f32-ne=33x6,vne={pad|rows|off}"),
    full=("ARGMAX-f32-ne=151936x2",),
)


def _group_norm(bench: Bench) -> Sequence[Tensor]:
    v, b = bench.v, bench.b
    a = bench.destination("a", "ne", normal(1.5, 0.5))
    make = b.group_norm_inplace if v["inplace"] else b.group_norm
    return bench.outputs(a, make(a, v["groups"], v["eps"]))


GROUP_NORM = OpCases(
    ops=("GROUP_NORM",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "inplace": INPLACE, "groups": count(1), "eps": real(1e-5)},
    make=_group_norm,
    standard=(
        "GROUP_NORM-f32-ne=9x5x12x2,groups={1|3|5|12}",
        "GROUP_NORM-f32-ne=64x1x32,groups=4,eps={0.1|1e-6}",
        "GROUP_NORM-f32-ne=9x5x12x2,groups=4,{vne=pad|vne=off|inplace=leaf|inplace=mid}",
    ),
    full=("GROUP_NORM-f32-ne=64x33x320,groups=32",),
)

CASES = (MAPS, SCALARS, ARANGE, PAD, ARGMAX, GROUP_NORM)
