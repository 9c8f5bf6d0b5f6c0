"""Losses, accuracy counts and optimiser steps."""

from __future__ import annotations

from dataclasses import replace

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.op import EXPS, LOOP, Layout, Op, Rounding, Work, fresh, operand, view_tensor
from conformance.ggml.tensor import Tensor, nelements
from conformance.ggml.types import F32, I64


def _count_equal(_: Tensor) -> Layout:
    """Count equal elements: one I64."""
    return fresh(I64, (1, 1, 1, 1))


def _loss(t: Tensor) -> Layout:
    """Compute the cross entropy: one number of `a`'s type."""
    return fresh(operand(t).type, (1, 1, 1, 1))


def _loss_back(t: Tensor) -> Layout:
    """Lay out `ggml_cross_entropy_loss_back`: the shape of the logits `b`."""
    b = operand(t, 1)
    return fresh(b.type, b.ne)


def _step(t: Tensor) -> Layout:
    """Return a view of the weights `a`, which must be a parameter."""
    return view_tensor(t, operand(t))


def _step_limits(t: Tensor) -> None:
    weights = [s for s in t.src[:-1] if s is not None]
    if any(s.type is not F32 for s in weights):
        raise GraphError("ggml requires F32 weights, gradient and moments")
    roots = [s.root for s in t.src if s is not None]
    if len(set(roots)) < len(roots):
        raise GraphError("weights, gradient, moments and parameters must not share bytes")


def _elements(t: Tensor) -> int:
    return nelements(operand(t))


COUNT_EQUAL = Op(
    "COUNT_EQUAL",
    src="a b",
    layout=_count_equal,
    asserts="ggml_are_same_shape(a, b)",
    runs="a->type == GGML_TYPE_I32; b->type == GGML_TYPE_I32",
)
CROSS_ENTROPY_LOSS = Op(
    "CROSS_ENTROPY_LOSS",
    src="a b",
    layout=_loss,
    asserts="ggml_are_same_shape(a, b)",
    runs="a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32",
    rounding=Rounding(256, 1, "float32 exp and log, sums of K products", _elements),
    work=Work(lambda t: 4 * _elements(t), lambda t: 8 * _elements(t)),
)
CROSS_ENTROPY_LOSS_BACK = Op(
    "CROSS_ENTROPY_LOSS_BACK",
    src="a b c",
    layout=_loss_back,
    asserts="ggml_is_scalar(a); ggml_are_same_shape(b, c)",
    runs="a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32; c->type == GGML_TYPE_F32",
    rounding=replace(EXPS, per_k=1.0, terms=lambda t: t.ne[0]),
    work=Work(lambda t: 2 * nelements(t)),
)
OPT_STEP_ADAMW = Op(
    "OPT_STEP_ADAMW",
    src="a grad m v adamw_params",
    layout=_step,
    asserts="""
        a->flags & GGML_TENSOR_FLAG_PARAM; ggml_are_same_shape(a, grad); ggml_are_same_shape(a, m);
        ggml_are_same_shape(a, v); adamw_params->type == GGML_TYPE_F32; ggml_nelements(adamw_params) == 7
    """,
    limits=_step_limits,
    suffix="(view)",
    writes="m v",
    rounding=Rounding(256, why="a float32 root and quotient, and sums and products around them"),
    work=Work(lambda t: 6 * nelements(t), lambda t: LOOP + 8 * nelements(t)),
)
OPT_STEP_SGD = Op(
    "OPT_STEP_SGD",
    src="a grad params",
    layout=_step,
    asserts="""
        a->flags & GGML_TENSOR_FLAG_PARAM; ggml_are_same_shape(a, grad); params->type == GGML_TYPE_F32;
        ggml_nelements(params) == 2
    """,
    limits=_step_limits,
    suffix="(view)",
    rounding=Rounding(64, why="float32 sums and products"),
    work=Work(lambda t: 2 * nelements(t)),
)


class Steps:
    """Constructors of losses and optimiser steps."""

    count_equal = COUNT_EQUAL.of_a_b()
    cross_entropy_loss = CROSS_ENTROPY_LOSS.of_a_b()

    @CROSS_ENTROPY_LOSS_BACK.constructor
    def cross_entropy_loss_back(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """Compute the gradient of `cross_entropy_loss(b, c)` by `b`, times the scalar `a`."""

    @OPT_STEP_ADAMW.constructor
    def opt_step_adamw(self, a: Tensor, grad: Tensor, m: Tensor, v: Tensor, adamw_params: Tensor) -> None:
        """Step AdamW in `a`, `m`, `v`; parameters: alpha, beta1, beta2, eps, wd, beta1h, beta2h."""

    @OPT_STEP_SGD.constructor
    def opt_step_sgd(self, a: Tensor, grad: Tensor, params: Tensor) -> None:
        """Step stochastic gradient descent into `a`. `params`: alpha, wd."""
