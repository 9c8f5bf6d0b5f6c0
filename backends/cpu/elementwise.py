"""Elementwise ops, and ops that repeat one operand over the other.

ggml computes in float32 and then rounds to F16 or BF16; the two roundings can meet at a tie that the single rounding
here does not have, and the results then differ by a step of the type.

UNARY and GLU follow the formulas that ggml's CPU approximates. It reads GELU and GELU_QUICK of F32 and F16 from a table
of 65,536 F16 values, also in GEGLU and GEGLU_QUICK: a GELU_QUICK beyond F16's range is infinite or NaN. The values here
are those of the formula, unless an `Arithmetic` lists the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Raw, Sources
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, F32, GGMLType

from .takes import BINARY, BLOCKS_STORED, ELEMENT, FLOAT, ONLY_I32, VALUES, Table, Takes
from .values import Values, checked_index, in_float64, repeated, rounded

Function = Callable[[Values], NDArray[Any]]


def _binary(f: Callable[[Values, Values], Values], node: Tensor, a: Values, b: Values) -> Values:
    del node
    return f(a, repeated(b, a.shape))


def _add_id(node: Tensor, a: Values, b: Values, ids: Values) -> Values:
    """Compute `dst[:, i1, i2] = a[:, i1, i2] + b[:, ids[i1, i2]]`: a bias per expert."""
    del node
    rows = checked_index(ids[0, 0], b.shape[2], "ids", "ne[1] of src[1]")
    y: Values = a + b[0, 0][rows[: a.shape[1], : a.shape[2]]]
    return y


def _clamp(node: Tensor, x: Values) -> Values:
    """Compute `MAX(MIN(x, max), min)` as C's macros do, so a NaN becomes max."""
    low, high = node.params.min, node.params.max
    x = np.where(x < high, x, high)
    return np.where(x > low, x, low)


def _leaky_relu(node: Tensor, x: Values) -> Values:
    """Return zero for NaN: both of ggml's comparisons are false."""
    slope: float = node.params.negative_slope
    return np.where(x > 0, x, 0) + slope * np.where(x < 0, x, 0)


def _arange(node: Tensor) -> Values:
    start: float = node.params.start
    steps: Values = node.params.step * np.arange(node.ne[0], dtype=np.float64).reshape(node.shape)
    return start + steps


_erfc = np.frompyfunc(math.erfc, 1, 1)


def sigmoid(x: Values) -> Values:
    """Compute 1 / (1 + exp(-x))."""
    y: Values = 1 / (1 + np.exp(-x))
    return y


def silu(x: Values) -> Values:
    """Compute `x` times its sigmoid."""
    return x * sigmoid(x)


def gelu(x: Values) -> Values:
    """Compute `ggml_gelu_f32` (tanh), with exp because 1 + tanh cancels for negative x."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))


def gelu_erf(x: Values) -> Values:
    """Compute 0.5 x (1 + erf(x / sqrt 2)), with erfc because 1 + erf cancels for negative x."""
    return 0.5 * x * np.asarray(_erfc(-x / math.sqrt(2)), np.float64)


def gelu_quick(x: Values) -> Values:
    """Compute `x` times the sigmoid of 1.702 `x`."""
    return x * sigmoid(1.702 * x)


def relu(x: Values) -> Values:
    """Return zero for NaN, as ggml's comparison does."""
    return np.where(x > 0, x, 0.0)


def _hardsigmoid(x: Values) -> Values:
    """Return zero for NaN: C's fmin and fmax drop it."""
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
"""Sub-op of UNARY -> its function; XIELU, which has parameters, is `_xielu`."""

GATES: dict[str, str] = {
    "REGLU": "RELU",
    "GEGLU": "GELU",
    "SWIGLU": "SILU",
    "GEGLU_ERF": "GELU_ERF",
    "GEGLU_QUICK": "GELU_QUICK",
}
"""Sub-op of GLU -> sub-op of UNARY; two with parameters have their own functions."""

_TABLE_TYPES = (F32, F16)


def _xielu(node: Tensor, x: Values) -> Values:
    """Compute `op_xielu`; alpha_n and alpha_p are already softplus values with beta added."""
    p = node.params
    negative: Values = (np.expm1(np.minimum(x, p.eps)) - x) * p.alpha_n + p.beta * x
    positive: Values = p.alpha_p * x * x + p.beta * x
    return np.where(x > 0, positive, negative)


def _swiglu_oai(node: Tensor, x: Values, g: Values) -> Values:
    """Compute `x sigmoid(alpha x) (g + 1)`, x below limit and g within it."""
    alpha, limit = node.params.alpha, node.params.limit
    x = np.minimum(x, limit)
    return x * sigmoid(alpha * x) * (np.clip(g, -limit, limit) + 1)


def _swiglu_clamp(node: Tensor, x: Values, g: Values) -> Values:
    """Compute `silu(x) g`, x below limit and g within it."""
    limit = node.params.limit
    return silu(np.minimum(x, limit)) * np.clip(g, -limit, limit)


def _looked_up(function: Function, table: str, x: Values) -> Values:
    """Round argument and value of `function` to `table`, as in `ggml_vec_gelu_f32`."""
    return rounded(function(rounded(x, table)), table)


def _gelu_looked_up(table: str, x: Values) -> Values:
    """Apply GELU's table for F32, which ends at ten: zero below, the argument itself above."""
    inside = np.abs(x) < 10
    return np.where(inside | np.isnan(x), _looked_up(gelu, table, np.where(inside, x, 0.0)), np.maximum(x, 0.0))


def _function(tables: Mapping[str, str], op: str, type_: GGMLType) -> Function:
    """Return the function of a sub-op for arguments of `type_`, through its table if any."""
    table = tables.get(op) if type_ in _TABLE_TYPES else None
    if table is None:
        return UNARY[op]
    if op == "GELU" and type_ is F32:
        return partial(_gelu_looked_up, table)
    return partial(_looked_up, UNARY[op], table)


def _applied(tables: Mapping[str, str], node: Tensor, x: Values) -> NDArray[Any]:
    op = node.params.op
    return _xielu(node, x) if op == "XIELU" else _function(tables, op, node.type)(x)


def _unary(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    in_float64(partial(_applied, arithmetic.tables))(arithmetic, node, dst, src)


def _gated(tables: Mapping[str, str], node: Tensor, a: Values, b: Values | None = None) -> NDArray[Any]:
    """Multiply an activated gate by the other half: `a` and `b`, or halves of `a`'s rows.

    A half has `ne[0] / 2` whole elements: the last one of an odd row is never read. `swapped` exchanges the halves of
    the single-tensor variant, so that the second is the activated one.
    """
    op = node.params.op
    if b is None:
        half = a.shape[-1] // 2
        first, second = a[..., :half], a[..., half : 2 * half]
        a, b = (second, first) if node.params.swapped else (first, second)
    if op == "SWIGLU_OAI":
        return _swiglu_oai(node, a, b)
    if op == "SWIGLU_CLAMP":
        return _swiglu_clamp(node, a, b)
    gated: Values = _function(tables, GATES[op], node.type)(a) * b
    return np.where(a > 0, gated, 0.0) if op == "REGLU" else gated


def _glu(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    in_float64(partial(_gated, arithmetic.tables))(arithmetic, node, dst, src)


_SUM = Takes((VALUES, FLOAT), FLOAT | BLOCKS_STORED)

TABLE: Table = {
    "ADD": (_SUM, in_float64(partial(_binary, np.add))),
    "ADD1": (_SUM, in_float64(partial(_binary, np.add))),
    "SUB": (BINARY, in_float64(partial(_binary, np.subtract))),
    "MUL": (BINARY, in_float64(partial(_binary, np.multiply))),
    "DIV": (BINARY, in_float64(partial(_binary, np.divide))),
    "ADD_ID": (Takes((FLOAT, FLOAT, ONLY_I32)), in_float64(_add_id)),
    "SCALE": (ELEMENT, in_float64(lambda node, x: x * node.params.s + node.params.b)),
    "SQR": (ELEMENT, in_float64(lambda _, x: x * x)),
    "SQRT": (ELEMENT, in_float64(lambda _, x: np.sqrt(x))),
    "LOG": (ELEMENT, in_float64(lambda _, x: np.log(x))),
    "SIN": (ELEMENT, in_float64(lambda _, x: np.sin(x))),
    "COS": (ELEMENT, in_float64(lambda _, x: np.cos(x))),
    "CLAMP": (ELEMENT, in_float64(_clamp)),
    "LEAKY_RELU": (ELEMENT, in_float64(_leaky_relu)),
    "FILL": (ELEMENT, in_float64(lambda node, x: np.full_like(x, node.params.c))),
    "ARANGE": (Takes(), in_float64(_arange)),
    "UNARY": (ELEMENT, _unary),
    "GLU": (BINARY, _glu),
}
