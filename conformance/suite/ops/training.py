"""Training ops: gradients, losses and optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Dims, Tensor, new_tensor
from conformance.ggml.types import F32, I32
from conformance.suite.data import Fill, integers, normal, uniform
from conformance.suite.grid import grid, operands

from .bench import Bench, cases

_COMPUTED = "computed=|a|b|ab"
"""Key: sources from a node with no other reader, whose memory ggml may reuse for the result."""


def _computed(bench: Bench, source: Tensor) -> Tensor:
    """Return the source, or a node that negates it."""
    return bench.b.neg(source) if source.name in bench.v["computed"] else source


@cases(
    "REPEAT_BACK",
    keys="ne=SHAPE vne= to=SHAPE",
    wide=(
        grid("f32", ne="8x6x4x2", to="8x6x4x2 4x6x4x2 8x2x4x1 2x3x2x2 1x1x1x1"),
        grid("f32", ne="8x6x4x2", to="4x3x4x2", vne="pad slab part p0213"),
    ),
    smoke=("REPEAT_BACK-f32-ne=6x4x2x3,to=3x2x2",),
    full=("REPEAT_BACK-f32-ne=4096x64x8,to=4096",),
)
def _repeat_back(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal(mean=1.0))
    return bench.b.repeat_back(a, bench.b.new_tensor_4d(F32, *bench.v["to"]))


@cases(
    "SILU_BACK",
    keys=f"ne=SHAPE {_COMPUTED}",
    wide=(grid("f32 f16", ne="64x5x4x3 7x3 1"), grid("f32", ne="17x3", computed="a b ab")),
    smoke=("SILU_BACK-f32-ne=17x3",),
    full=(grid("f32 f16", ne="14336x64"),),
)
def _silu_back(bench: Bench) -> Tensor:
    a, b = (_computed(bench, bench.leaf(name, bench.types[0], bench.v["ne"], normal(3.0))) for name in "ab")
    return bench.b.silu_back(a, b)


@cases(
    "RMS_NORM_BACK",
    keys=f"ne=SHAPE vne= eps=1e-6 {_COMPUTED}",
    wide=(
        grid("f32", ne="64x5x4x3 1025x5x4x3 7x3", eps="0.0 1e-6 0.1 10.0"),
        grid("f32", ne="64x5x4x3", vne="pad slab p0213"),
        grid("f32", ne="33x5", computed="a b ab"),
    ),
    smoke=("RMS_NORM_BACK-f32-ne=33x3", "RMS_NORM_BACK-f32-ne=33x5,computed=a"),
    full=("RMS_NORM_BACK-f32-ne=8192x64",),
)
def _rms_norm_back(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal())
    b = bench.operand("b", bench.types[0], bench.v["ne"], normal(2.0), bench.v["vne"])
    return bench.b.rms_norm_back(_computed(bench, a), _computed(bench, b), bench.v["eps"])


@cases(
    "GET_ROWS_BACK",
    keys="ne=SHAPE n=1",
    wide=(grid("f32 f16", ne="256x5 1x8 33x300", n="1 4 64"),),
    smoke=("GET_ROWS_BACK-f32-ne=33x3,n=7", "GET_ROWS_BACK-f32-ne=1x131080,n=64"),
    full=("GET_ROWS_BACK-f32-ne=4096x1000,n=512",),
)
def _get_rows_back(bench: Bench) -> Tensor:
    """Build the gradient for `n` rows, some of them repeated, taken from a tensor of shape `ne`."""
    n, (m, rows, _, _) = bench.v["n"], bench.v["ne"]
    a = bench.leaf("a", bench.types[0], (m, n, 1, 1), normal())
    b = bench.leaf("b", I32, (n, 1, 1, 1), integers(0, rows))
    return bench.b.get_rows_back(a, b, bench.b.new_tensor_4d(F32, *bench.v["ne"]))


@cases(
    "SOFT_MAX_BACK",
    keys=f"ne=SHAPE scale=1.0 max_bias=0.0 inplace=0 {_COMPUTED}",
    wide=(
        grid("f32", ne="16x16 15x15x2x3 1x7 1024x9x2", scale="1.0 0.1"),
        "SOFT_MAX_BACK-f32-ne=16x16,max_bias=8.0",
        "SOFT_MAX_BACK-f32-ne=33x5,inplace=1",
        grid("f32", ne="33x5", computed="a b ab"),
    ),
    smoke=("SOFT_MAX_BACK-f32-ne=33x3,scale=0.5", "SOFT_MAX_BACK-f32-ne=33x5,computed=b"),
    full=("SOFT_MAX_BACK-f32-ne=4096x64x8,scale=0.1",),
)
def _soft_max_back(bench: Bench) -> Tensor:
    """Use values of a softmax's magnitude for `b`; ggml does not require that rows add up to 1."""
    v, ne = bench.v, bench.v["ne"]
    a = bench.leaf("a", bench.types[0], ne, normal())
    b = bench.leaf("b", bench.types[0], ne, uniform(0.0, 2.0 / ne[0]))
    make = bench.b.soft_max_ext_back_inplace if v["inplace"] else bench.b.soft_max_ext_back
    return make(_computed(bench, a), _computed(bench, b), v["scale"], v["max_bias"])


@cases(
    "POOL_2D_BACK",
    keys=f"ne=SHAPE op={'|'.join(OP_POOL.__members__)} k=NUMBERS",
    wide=(grid("f32", ne="24x9x3x2", op="MAX AVG", k="4x1x4x1x0x0 3x3x2x2x1x1 2x3x1x2x0x1 5x9x1x1x0x0"),),
    smoke=(grid("f32", ne="9x7x2", op="MAX AVG", k="3x2x2x1x1x0"),),
    full=("POOL_2D_BACK-f32-ne=512x64x8,op=MAX,k=3x3x2x2x1x1",),
)
def _pool_2d_back(bench: Bench) -> Tensor:
    k0, k1, s0, s1, p0, p1 = bench.v["k"]
    ne: Dims = bench.v["ne"]
    af = bench.leaf("af", bench.types[0], ne, normal())
    pooled = ((ne[0] + 2 * p0 - k0) // s0 + 1, (ne[1] + 2 * p1 - k1) // s1 + 1, ne[2], ne[3])
    a = bench.leaf("a", bench.types[0], pooled, normal())
    return bench.b.pool_2d_back(a, af, OP_POOL[bench.v["op"]], k0, k1, s0, s1, p0, p1)


@cases(
    "IM2COL_BACK",
    keys="ne=SHAPE kernel=SHAPE k=NUMBERS is_2D=1",
    types="a b",
    wide=(
        grid(
            operands("f32", "f32 f16"),
            ne="17x9x3x2",
            kernel="3x2x3",
            k="1x1x0x0x1x1 2x1x1x2x1x1 3x2x2x1x2x3 1x4x1x1x1x1",
        ),
        grid("f32+f32", ne="16x16x4", kernel="1x1x4 5x5x4", k="1x1x2x2x1x1 2x2x0x0x1x1"),
        grid(
            operands("f32", "f32 f16"),
            ne="33x5x2",
            kernel="3x5 1x5 8x5",
            k="1x0x0x0x1x0 2x0x1x0x1x0 3x0x2x0x2x0",
            is_2D=0,
        ),
    ),
    smoke=(
        "IM2COL_BACK-f32+f32-ne=9x7x2,kernel=3x2x2,k=2x1x1x0x1x2",
        "IM2COL_BACK-f32+f16-ne=11x3,kernel=3x3,k=2x0x1x0x1x0,is_2D=0",
    ),
    full=("IM2COL_BACK-f32+f16-ne=224x224x16x2,kernel=3x3x16,k=1x1x1x1x1x1",),
)
def _im2col_back(bench: Bench) -> Tensor:
    """Read strides, padding and dilation from `k`, each for dimensions 0 and 1."""
    ne, is_2d = bench.v["ne"], bool(bench.v["is_2D"])
    s0, s1, p0, p1, d0, d1 = bench.v["k"]
    b = bench.leaf("b", bench.types[1], bench.v["kernel"], normal(), keep=True)
    unfolded = Builder().im2col(b, new_tensor(F32, *ne), s0, s1, p0, p1, d0, d1, is_2d, F32)
    a = bench.leaf("a", bench.types[0], unfolded.ne, normal())
    return bench.b.im2col_back(a, b, ne, s0, s1, p0, p1, d0, d1, is_2d)


@cases(
    "COUNT_EQUAL",
    keys="ne=SHAPE vne= n=8",
    wide=(grid("i32", ne="500 33x7 1x1000", n="1 8"), grid("i32", ne="33x7", vne="pad rows p1023")),
    smoke=("COUNT_EQUAL-i32-ne=33x3,n=4",),
    full=("COUNT_EQUAL-i32-ne=5000x64",),
)
def _count_equal(bench: Bench) -> Tensor:
    """Compare numbers below `n`."""
    a, b = (
        bench.operand(name, bench.types[0], bench.v["ne"], integers(0, bench.v["n"]), bench.v["vne"]) for name in "ab"
    )
    return bench.b.count_equal(a, b)


@cases(
    "CROSS_ENTROPY_LOSS",
    keys="ne=SHAPE vne= labels=computed|given",
    wide=(
        grid("f32", ne="10x5x4x3 2x7 4099"),
        "CROSS_ENTROPY_LOSS-f32-ne=10x5x4,vne=pad",
        "CROSS_ENTROPY_LOSS-f32-ne=10x5x4x3,labels=given",
    ),
    smoke=("CROSS_ENTROPY_LOSS-f32-ne=33x3",),
    full=("CROSS_ENTROPY_LOSS-f32-ne=32000x64",),
)
def _cross_entropy_loss(bench: Bench) -> Tensor:
    """Use a softmax as labels, so that they add up to 1."""
    a = bench.first("logits", "ne", normal(3.0))
    return bench.b.cross_entropy_loss(a, _labels(bench, normal()))


def _labels(bench: Bench, fill: Fill) -> Tensor:
    """Return labels that add up to 1 per row: a softmax of `fill`, or a leaf."""
    v = bench.v
    if v["labels"] == "given":
        return bench.leaf("labels", bench.types[0], v["ne"], _shares)
    return bench.b.soft_max(bench.leaf("labels", bench.types[0], v["ne"], fill))


def _shares(s: Stream, ne: Dims) -> NDArray[Any]:
    x = s.uniform(math.prod(ne), 0.1, 1.0).reshape(-1, ne[0])
    return np.asarray(x / x.sum(axis=1, keepdims=True), np.float32)


@cases(
    "CROSS_ENTROPY_LOSS_BACK",
    keys="ne=SHAPE labels=computed|given",
    wide=(
        grid("f32", ne="10x5x4x3 2x7 4099"),
        "CROSS_ENTROPY_LOSS_BACK-f32-ne=10x5x4x3,labels=given",
    ),
    smoke=("CROSS_ENTROPY_LOSS_BACK-f32-ne=33x3",),
    full=("CROSS_ENTROPY_LOSS_BACK-f32-ne=32000x64",),
)
def _cross_entropy_loss_back(bench: Bench) -> Tensor:
    grad = bench.leaf("grad", bench.types[0], (1, 1, 1, 1), normal())
    logits = bench.leaf("logits", bench.types[0], bench.v["ne"], normal(3.0))
    return bench.b.cross_entropy_loss_back(grad, logits, _labels(bench, normal(3.0)))


@cases(
    "OPT_STEP_ADAMW OPT_STEP_SGD",
    keys="ne=SHAPE",
    wide=(grid("f32", ne="10x5x4x3 1 33x7"),),
    smoke=(
        "OPT_STEP_ADAMW-f32-ne=33x3",
        "OPT_STEP_SGD-f32-ne=33x3",
    ),
    full=(
        "OPT_STEP_ADAMW-f32-ne=4096x1024",
        "OPT_STEP_SGD-f32-ne=4096x1024",
    ),
)
def _opt_step(bench: Bench) -> Sequence[Tensor]:
    """Return the step, and a node per moment that reads it after the step."""
    b, ne, type_ = bench.b, bench.v["ne"], bench.types[0]
    a = bench.leaf("a", type_, ne, normal(), keep=True)
    b.set_param(a)
    grad = bench.leaf("grad", type_, ne, normal())
    if bench.id.op == "OPT_STEP_SGD":
        return (b.opt_step_sgd(a, grad, bench.leaf("sgd_params", F32, (2, 1, 1, 1), uniform(0.01, 0.5))),)
    m = bench.leaf("m", type_, ne, normal(), keep=True)
    v = bench.leaf("v", type_, ne, uniform(0.1, 2.0), keep=True)
    step = b.opt_step_adamw(a, grad, m, v, bench.leaf("adamw_params", F32, (7, 1, 1, 1), uniform(0.05, 0.95)))
    return (step, *(b.scale(b.cont(t) if t in bench.laid else t, 0.5) for t in (m, v)))
