"""Ops that look at one element at a time, and the ones that repeat one operand over the other.

ggml computes in float32 and then rounds to F16 or BF16; the two roundings can meet at a tie that the one rounding here
does not see, and the results then differ by a step of the type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Kernel
from conformance.ggml.tensor import Tensor

from .values import Values, checked_index, in_float64, repeated


def _binary(f: Callable[[Values, Values], Values], node: Tensor, a: Values, b: Values) -> Values:
    del node
    return f(a, repeated(b, a.shape))


def _add_id(node: Tensor, a: Values, b: Values, ids: Values) -> Values:
    """`dst[:, i1, i2] = a[:, i1, i2] + b[:, ids[i1, i2]]`: a bias per expert."""
    del node
    rows = checked_index(ids[0, 0], b.shape[2], "ids", "ne[1] of src[1]")
    y: Values = a + b[0, 0][rows[: a.shape[1], : a.shape[2]]]
    return y


def _clamp(node: Tensor, x: Values) -> Values:
    """`MAX(MIN(x, max), min)` with C's macros, so a NaN becomes max."""
    low, high = node.param_f32(0), node.param_f32(1)
    x = np.where(x < high, x, high)
    return np.where(x > low, x, low)


def _leaky_relu(node: Tensor, x: Values) -> Values:
    """Zero for NaN: both of ggml's comparisons are false."""
    return np.where(x > 0, x, 0) + node.param_f32(0) * np.where(x < 0, x, 0)


def _arange(node: Tensor) -> Values:
    start, step = node.param_f32(0), node.param_f32(2)
    return start + step * np.arange(node.ne[0], dtype=np.float64).reshape(node.shape)


def _diag_mask(value: float, node: Tensor, x: Values) -> NDArray[Any]:
    """`value` right of the diagonal that is shifted by `n_past`."""
    above = np.arange(node.ne[0]) > node.param_i32(0) + np.arange(node.ne[1])[:, None]
    return np.where(above, value, x)


FORMULAS: dict[str, Callable[..., NDArray[Any]]] = {
    "ADD": partial(_binary, np.add),
    "ADD1": partial(_binary, np.add),
    "SUB": partial(_binary, np.subtract),
    "MUL": partial(_binary, np.multiply),
    "DIV": partial(_binary, np.divide),
    "ADD_ID": _add_id,
    "SCALE": lambda node, x: x * node.param_f32(0) + node.param_f32(1),
    "SQR": lambda _, x: x * x,
    "SQRT": lambda _, x: np.sqrt(x),
    "LOG": lambda _, x: np.log(x),
    "SIN": lambda _, x: np.sin(x),
    "COS": lambda _, x: np.cos(x),
    "CLAMP": _clamp,
    "LEAKY_RELU": _leaky_relu,
    "FILL": lambda node, x: np.full_like(x, node.param_f32(0)),
    "ARANGE": _arange,
    "DIAG_MASK_INF": partial(_diag_mask, -np.inf),
    "DIAG_MASK_ZERO": partial(_diag_mask, 0.0),
}


def kernels(quantize: str) -> Mapping[str, Kernel]:
    """Op -> kernel; `quantize` is how ADD stores into block types."""
    return {op: in_float64(f, quantize) for op, f in FORMULAS.items()}
