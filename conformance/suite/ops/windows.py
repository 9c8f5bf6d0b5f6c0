"""Ops that slide a window over a matrix: POOL_2D, IM2COL."""

from __future__ import annotations

from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Tensor
from conformance.suite.data import normal

from .bench import Bench, cases


@cases(
    "POOL_2D",
    keys=f"ne=SHAPE vne= op={'|'.join(OP_POOL.__members__)} k=NUMBERS",
    standard=(
        "POOL_2D-[f32|f16]-ne=24x9x3x2,op=[MAX|AVG],k=[4x1x4x1x0x0|3x3x2x2x1x1|2x3x1x2x0x1|5x9x1x1x0x0]",
        "POOL_2D-f32-ne=24x9x3,op=[MAX|AVG],k=4x1x4x1x0x0,vne=[pad|off|slab]",
    ),
    full=("POOL_2D-f32-ne=4096x33x8,op=MAX,k=128x1x128x1x0x0",),
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
        "IM2COL-f16+f32+[f16|f32]-a=3x5x4,b=20x5x[1|2],k=[1x0x1x0x1x0|2x0x0x0x1x0|1x0x3x0x2x0]",
        "IM2COL-f16+f32+[f16|f32]-a=3x2x5x4,b=12x7x5x2,is_2D=1,k=[1x1x1x1x1x1|2x3x0x1x1x2]",
        "IM2COL-f16+f32+f16-a=7x1x6,b=20x1x6,k=1x0x3x0x1x0",
    ),
    full=("IM2COL-f16+f32+f16-a=7x512x16,b=60x512,k=1x0x3x0x1x0",),
)
def _im2col(bench: Bench) -> Tensor:
    v, (type_a, type_b, to) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.operand("b", type_b, v["b"], normal(), v["vb"])
    s0, s1, p0, p1, d0, d1 = v["k"]
    return bench.b.im2col(a, b, s0, s1, p0, p1, d0, d1, bool(v["is_2D"]), to)
