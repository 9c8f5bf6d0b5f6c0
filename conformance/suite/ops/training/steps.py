"""Losses and steps: COUNT_EQUAL, CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.tensor import Dims, Tensor
from conformance.ggml.types import F32
from conformance.suite.data import Fill, integers, normal, uniform
from conformance.suite.grid import grid
from conformance.suite.ops.bench import Bench, cases


@cases(
    "COUNT_EQUAL",
    keys="ne=SHAPE vne= n=8",
    wide=(grid("i32", ne="500 33x7 1x1000", n="1 8"), grid("i32", ne="33x7", vne="pad rows p1023")),
    smoke=("COUNT_EQUAL-i32-ne=33x3,n=4",),
    full=("COUNT_EQUAL-i32-ne=5000x64",),
)
def _count_equal(bench: Bench) -> Tensor:
    """Numbers below `n`."""
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
    """Labels are a softmax, so that they add up to 1."""
    a = bench.first("logits", "ne", normal(3.0))
    return bench.b.cross_entropy_loss(a, _labels(bench, normal()))


def _labels(bench: Bench, fill: Fill) -> Tensor:
    """Shares of 1 in each row: a softmax of `fill`, or a leaf of such."""
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
    """The moments are seen through a node each, as they stand after the step."""
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
