"""UNARY and GLU: every sub-op of `ops.UNARY_OPS` and `ops.GLU_OPS`, by the formula that ggml's CPU approximates.

ggml reads GELU and GELU_QUICK of F32 from a table of 65,536 F16 values (and so do GEGLU and GEGLU_QUICK): input and
result are rounded to F16 on the way. Its F16 GLUs round the activation to F16 before they multiply. None of that is
done here; the values are those of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Kernel
from conformance.cgraph.ops import GLU_OPS, UNARY_OPS
from conformance.cgraph.tensor import Tensor

from .values import Values, in_float64

Function = Callable[[Values], NDArray[Any]]

_erfc = np.frompyfunc(math.erfc, 1, 1)


def sigmoid(x: Values) -> Values:
    """1 / (1 + exp(-x))."""
    y: Values = 1 / (1 + np.exp(-x))
    return y


def silu(x: Values) -> Values:
    """`x` times its sigmoid."""
    return x * sigmoid(x)


def gelu(x: Values) -> Values:
    """The tanh form, `ggml_gelu_f32`; written with exp because 1 + tanh cancels for negative x."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))


def gelu_erf(x: Values) -> Values:
    """The exact form, 0.5 x (1 + erf(x / sqrt 2)); written with erfc because 1 + erf cancels for negative x."""
    return 0.5 * x * np.asarray(_erfc(-x / math.sqrt(2)), np.float64)


def gelu_quick(x: Values) -> Values:
    """`x` times the sigmoid of 1.702 `x`."""
    return x * sigmoid(1.702 * x)


def relu(x: Values) -> Values:
    """Zero for NaN, as ggml's comparison."""
    return np.where(x > 0, x, 0.0)


def _hardsigmoid(x: Values) -> Values:
    """C's fmin and fmax drop a NaN: zero comes of it."""
    return np.fmin(1.0, np.fmax(0.0, (x + 3) / 6))


def _sgn(x: Values) -> Values:
    return np.where(x > 0, 1.0, np.where(x < 0, -1.0, 0.0))


UNARY: dict[str, Function] = {
    "ABS": np.abs,
    "SGN": _sgn,
    "NEG": np.negative,
    "STEP": lambda x: np.where(x > 0, 1.0, 0.0),
    "TANH": np.tanh,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "RELU": relu,
    "SIGMOID": sigmoid,
    "GELU": gelu,
    "GELU_QUICK": gelu_quick,
    "SILU": silu,
    "HARDSWISH": lambda x: x * _hardsigmoid(x),
    "HARDSIGMOID": _hardsigmoid,
    "EXP": np.exp,
    "EXPM1": np.expm1,
    "SOFTPLUS": lambda x: np.logaddexp(0.0, x),
    "GELU_ERF": gelu_erf,
    "FLOOR": np.floor,
    "CEIL": np.ceil,
    "ROUND": lambda x: np.trunc(x + np.copysign(0.5, x)),  # half away from zero, as C's roundf
    "TRUNC": np.trunc,
}
"""All of `UNARY_OPS` but XIELU, which has parameters."""

GATES: dict[str, Function] = {
    "REGLU": relu,
    "GEGLU": gelu,
    "SWIGLU": silu,
    "GEGLU_ERF": gelu_erf,
    "GEGLU_QUICK": gelu_quick,
}
"""The activations of `GLU_OPS`; the two with parameters are `_swiglu_oai` and `_swiglu_clamp`."""


def _xielu(node: Tensor, x: Values) -> Values:
    """`op_xielu`; `ggml_xielu` has already put alpha_n and alpha_p through softplus and added beta."""
    alpha_n, alpha_p, beta, eps = (node.param_f32(i) for i in (1, 2, 3, 4))
    negative = (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x
    return np.where(x > 0, alpha_p * x * x + beta * x, negative)


def _swiglu_oai(node: Tensor, x: Values, g: Values) -> Values:
    """`x sigmoid(alpha x) (g + 1)`, x below limit and g within it."""
    alpha, limit = node.param_f32(2), node.param_f32(3)
    x = np.minimum(x, limit)
    return x * sigmoid(alpha * x) * (np.clip(g, -limit, limit) + 1)


def _swiglu_clamp(node: Tensor, x: Values, g: Values) -> Values:
    """`silu(x) g`, x below limit and g within it."""
    limit = node.param_f32(3)
    return silu(np.minimum(x, limit)) * np.clip(g, -limit, limit)


def unary(node: Tensor, x: Values) -> NDArray[Any]:
    """`op_params[0]` names the function."""
    op = UNARY_OPS[node.param_i32(0)]
    return _xielu(node, x) if op == "XIELU" else UNARY[op](x)


def glu(node: Tensor, a: Values, b: Values | None = None) -> NDArray[Any]:
    """A gate times the activation of the other half; both halves of one tensor's rows where `b` is absent.

    `op_params[1]` swaps the halves of the single-tensor form: the second is then the activated one.
    """
    op = GLU_OPS[node.param_i32(0)]
    if b is None:
        half = a.shape[-1] // 2
        first, second = a[..., :half], a[..., half:]
        a, b = (second, first) if node.param_i32(1) else (first, second)
    if op == "SWIGLU_OAI":
        return _swiglu_oai(node, a, b)
    if op == "SWIGLU_CLAMP":
        return _swiglu_clamp(node, a, b)
    gated: Values = GATES[op](a) * b
    return np.where(a > 0, gated, 0.0) if op == "REGLU" else gated


KERNELS: dict[str, Kernel] = {"UNARY": in_float64(unary), "GLU": in_float64(glu)}
