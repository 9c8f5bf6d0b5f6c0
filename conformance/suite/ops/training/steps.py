"""Losses and steps: COUNT_EQUAL, CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32
from conformance.suite.data import integers, normal, uniform
from conformance.suite.ops.bench import Bench, cases


@cases(
    "COUNT_EQUAL",
    keys="ne=SHAPE vne= n=8",
    wide=("COUNT_EQUAL-i32-ne=[500|33x7|1x1000],n=[1|8]", "COUNT_EQUAL-i32-ne=33x7,vne=[pad|rows|p1023]"),
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
    keys="ne=SHAPE vne=",
    wide=("CROSS_ENTROPY_LOSS-f32-ne=[10x5x4x3|2x7|4099]", "CROSS_ENTROPY_LOSS-f32-ne=10x5x4,vne=pad"),
    smoke=("CROSS_ENTROPY_LOSS-f32-ne=33x3",),
    full=("CROSS_ENTROPY_LOSS-f32-ne=32000x64",),
)
def _cross_entropy_loss(bench: Bench) -> Tensor:
    """Labels are a softmax, so that they add up to 1."""
    a = bench.first("logits", "ne", normal(3.0))
    labels = bench.leaf("labels", bench.types[0], bench.v["ne"], normal())
    return bench.b.cross_entropy_loss(a, bench.b.soft_max(labels))


@cases(
    "CROSS_ENTROPY_LOSS_BACK",
    keys="ne=SHAPE",
    wide=("CROSS_ENTROPY_LOSS_BACK-f32-ne=[10x5x4x3|2x7|4099]",),
    smoke=("CROSS_ENTROPY_LOSS_BACK-f32-ne=33x3",),
    full=("CROSS_ENTROPY_LOSS_BACK-f32-ne=32000x64",),
)
def _cross_entropy_loss_back(bench: Bench) -> Tensor:
    grad = bench.leaf("grad", bench.types[0], (1, 1, 1, 1), normal())
    logits, labels = (bench.leaf(name, bench.types[0], bench.v["ne"], normal(3.0)) for name in ("logits", "labels"))
    return bench.b.cross_entropy_loss_back(grad, logits, bench.b.soft_max(labels))


@cases(
    "OPT_STEP_ADAMW OPT_STEP_SGD",
    keys="ne=SHAPE",
    wide=("OPT_STEP_[ADAMW|SGD]-f32-ne=[10x5x4x3|1|33x7]",),
    smoke=("OPT_STEP_[ADAMW|SGD]-f32-ne=33x3",),
    full=("OPT_STEP_[ADAMW|SGD]-f32-ne=4096x1024",),
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
    return (step, b.scale(m, 0.5), b.scale(v, 0.5))
