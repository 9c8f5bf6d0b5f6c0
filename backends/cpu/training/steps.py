"""Losses, accuracy counts and optimiser steps."""

from __future__ import annotations

import numpy as np

from backends.cpu.takes import ONLY_F32, ONLY_I32, Table, Takes
from backends.cpu.values import Values, in_float64, load, operand, store
from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import I64


def _log_soft_max(x: Values) -> Values:
    x = x - x.max(-1, keepdims=True)
    y: Values = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return y


def _count_equal(node: Tensor, a: Values, b: Values) -> Values:
    return np.full(node.shape, float((a == b).sum()))


def _cross_entropy_loss(node: Tensor, a: Values, b: Values) -> Values:
    """Compute the mean cross entropy over rows of the logits `a` and labels `b`."""
    rows = a.size // a.shape[-1]
    return np.full(node.shape, -(_log_soft_max(a) * b).sum() / rows)


def _cross_entropy_loss_back(_: Tensor, a: Values, b: Values, c: Values) -> Values:
    """Compute the gradient; ggml assumes that the labels of a row sum to 1."""
    y: Values = (np.exp(_log_soft_max(b)) - c) * (a.item() * b.shape[-1] / b.size)
    return y


def _opt_step_adamw(_: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Store both moments in their own tensors, rounded, before using them for the weights."""
    (m, m_raw), (v, v_raw) = operand(node, src, 2), operand(node, src, 3)
    w, g, parameters = (operand(node, src, i)[1] for i in (0, 1, 4))
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = parameters.astype(np.float64).reshape(-1)
    g64 = g.astype(np.float64)
    store(m.type, m_raw, m_raw.astype(np.float64) * beta1 + g64 * (1.0 - beta1))
    store(v.type, v_raw, v_raw.astype(np.float64) * beta2 + g64 * g64 * (1.0 - beta2))
    step = load(m.type, m_raw) * beta1h / (np.sqrt(load(v.type, v_raw) * beta2h) + eps)
    store(node.type, dst, w.astype(np.float64) * (1.0 - alpha * decay) - alpha * step)


def _opt_step_sgd(_: Tensor, w: Values, g: Values, parameters: Values) -> Values:
    alpha, decay = parameters.reshape(-1)
    y: Values = w * (1.0 - alpha * decay) - alpha * g
    return y


TABLE: Table = {
    "COUNT_EQUAL": (Takes((ONLY_I32, ONLY_I32), frozenset({I64})), in_float64(_count_equal)),
    "CROSS_ENTROPY_LOSS": (Takes((ONLY_F32,) * 2, ONLY_F32), in_float64(_cross_entropy_loss)),
    "CROSS_ENTROPY_LOSS_BACK": (Takes((ONLY_F32,) * 3, ONLY_F32), in_float64(_cross_entropy_loss_back)),
    "OPT_STEP_ADAMW": (Takes((ONLY_F32,) * 5, ONLY_F32), _opt_step_adamw),
    "OPT_STEP_SGD": (Takes((ONLY_F32,) * 3, ONLY_F32), in_float64(_opt_step_sgd)),
}
