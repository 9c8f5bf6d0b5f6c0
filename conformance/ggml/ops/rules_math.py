"""Rules of the elementwise ops, norms and reductions."""

from __future__ import annotations

import numpy as np

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor, can_repeat, is_contiguous, is_contiguous_rows, same_shape
from conformance.ggml.types import BF16, F16, F32, I32

from .names import GLU_OPS, UNARY_OPS
from .rules_base import (
    INT32_MAX,
    Layout,
    Rule,
    dup_or_inplace,
    failed,
    fresh,
    is_matrix,
    is_padded_1d,
    is_vector,
    operand,
    optional,
    violated,
)


def can_add_cast(a: Tensor, b: Tensor) -> None:
    """What `ggml_add_cast` asserts."""
    if not (a.ne[0] == b.ne[0] and can_repeat(b, a)):
        raise failed("ggml_can_repeat_rows(b, a)", (a, b))
    if not (a.type.is_quantized or a.type is F16 or a.type is BF16):
        assertion = "ggml_is_quantized(a->type) || a->type == GGML_TYPE_F16 || a->type == GGML_TYPE_BF16"
        raise failed(assertion, (a, b))


def _add(t: Tensor) -> Layout:
    """`ggml_add`: `a`'s type and shape; `b` repeats to `a`. A result of another type is `ggml_add_cast`'s."""
    a = operand(t)
    if t.view_src is None and t.type is not a.type:
        can_add_cast(a, operand(t, 1))
        return fresh(t.type, a.ne)
    return _broadcast(t)


def _broadcast(t: Tensor) -> Layout:
    """`ggml_sub`, `ggml_mul`, `ggml_div`: `a`'s type and shape; `b` repeats to `a`."""
    a = operand(t)
    if not can_repeat(operand(t, 1), a):
        raise violated(t, "ggml_can_repeat(b, a)")
    return dup_or_inplace(t, a)


def _add1(t: Tensor) -> Layout:
    """`ggml_add1`: `b` is one number."""
    a, b = operand(t), operand(t, 1)
    if not (is_vector(b) and b.ne[0] == 1):
        raise violated(t, "ggml_is_scalar(b)")
    if not is_padded_1d(a):
        raise violated(t, "ggml_is_padded_1d(a)")
    return dup_or_inplace(t, a)


def _add_id(t: Tensor) -> Layout:
    """`ggml_add_id(a, b, ids)`: row `ids` of `b` onto each row of `a`."""
    a, b, ids = operand(t), operand(t, 1), operand(t, 2)
    if a.ne[0] != b.ne[0]:
        raise violated(t, "a->ne[0] == b->ne[0]")
    if a.ne[1] != ids.ne[0]:
        raise violated(t, "a->ne[1] == ids->ne[0]")
    if a.ne[2] != ids.ne[1]:
        raise violated(t, "a->ne[2] == ids->ne[1]")
    if ids.type is not I32:
        raise violated(t, "ids->type == GGML_TYPE_I32")
    return fresh(a.type, a.ne)


def _map(t: Tensor) -> Layout:
    """`a`'s type and shape; nothing asserted."""
    return dup_or_inplace(t, operand(t))


def _scale(t: Tensor) -> Layout:
    """`ggml_scale_bias`."""
    a = operand(t)
    if not is_padded_1d(a):
        raise violated(t, "ggml_is_padded_1d(a)")
    return dup_or_inplace(t, a)


def _eps(t: Tensor, i: int = 0) -> None:
    if not t.param_f32(i) >= 0:
        raise violated(t, "eps >= 0.0f", eps=t.param_f32(i))


def _norm_runs(t: Tensor) -> None:
    _eps(t)


def _group_norm_runs(t: Tensor) -> None:
    if t.op_params[0] < 1:
        raise GraphError(f"n_groups must be at least 1, {t.op_params[0]} found")
    _eps(t, 1)


def _unary(t: Tensor) -> Layout:
    """`ggml_unary`, and `ggml_xielu`, which asserts nothing."""
    a = operand(t)
    if t.op_params[0] != XIELU and not is_contiguous_rows(a):
        raise violated(t, "ggml_is_contiguous_rows(a)")
    return dup_or_inplace(t, a)


XIELU = UNARY_OPS.index("XIELU")


def _unary_runs(t: Tensor) -> None:
    if not 0 <= t.op_params[0] < len(UNARY_OPS):
        raise GraphError(f"op_params[0]={t.op_params[0]} is none of the {len(UNARY_OPS)} unary ops")
    if t.op_params[0] != XIELU and any(t.op_params[1:5]):
        raise GraphError(f"only XIELU has parameters, {list(t.op_params[1:5])} found")


def _glu(t: Tensor) -> Layout:
    """`ggml_glu` (gate and value are halves of `a`'s rows), `ggml_glu_split` (the value is `b`)."""
    a, b = operand(t), optional(t, 1)
    if not is_contiguous(a, 1):
        raise violated(t, "ggml_is_contiguous_1(a)")
    if b is None:
        return fresh(a.type, (a.ne[0] // 2, *a.ne[1:]))
    if not is_contiguous(b, 1):
        raise violated(t, "ggml_is_contiguous_1(b)")
    if not same_shape(a, b):
        raise violated(t, "ggml_are_same_shape(a, b)")
    if a.type is not b.type:
        raise violated(t, "a->type == b->type")
    return fresh(a.type, a.ne)


GLU_PARAMS = {"SWIGLU_OAI": (2, 3), "SWIGLU_CLAMP": (3,)}
"""Which `op_params` beyond sub-op and swapped a GLU has: [2] alpha, [3] limit."""


def _glu_runs(t: Tensor) -> None:
    if not 0 <= t.op_params[0] < len(GLU_OPS):
        raise GraphError(f"op_params[0]={t.op_params[0]} is none of the {len(GLU_OPS)} glu ops")
    if t.op_params[1] not in (0, 1) or (t.op_params[1] and optional(t, 1) is not None):
        raise GraphError(f"op_params[1]={t.op_params[1]}: swapped is 0 or 1, and 0 with two src")
    for i in (2, 3):
        if t.op_params[i] and i not in GLU_PARAMS.get(GLU_OPS[t.op_params[0]], ()):
            raise GraphError(f"{GLU_OPS[t.op_params[0]]} has no op_params[{i}], {t.op_params[i]} found")


def _sum(t: Tensor) -> Layout:
    """`ggml_sum`: one number."""
    return fresh(operand(t).type, (1, 1, 1, 1))


def _sum_rows(t: Tensor) -> Layout:
    """`ggml_sum_rows`: `a`'s type, ne[0] = 1."""
    a = operand(t)
    return fresh(a.type, (1, *a.ne[1:]))


def _mean(t: Tensor) -> Layout:
    """`ggml_mean`: F32, ne[0] = 1."""
    return fresh(F32, (1, *operand(t).ne[1:]))


def _cumsum(t: Tensor) -> Layout:
    """`ggml_cumsum`."""
    a = operand(t)
    if a.type is not F32:
        raise violated(t, "a->type == GGML_TYPE_F32")
    return fresh(a.type, a.ne)


def _argmax(t: Tensor) -> Layout:
    """`ggml_argmax`: I32, one per row."""
    a = operand(t)
    if not is_matrix(a):
        raise violated(t, "ggml_is_matrix(a)")
    if a.ne[0] > INT32_MAX:
        raise violated(t, "a->ne[0] <= INT32_MAX")
    return fresh(I32, (a.ne[1], 1, 1, 1))


def _fill(t: Tensor) -> Layout:
    """`ggml_fill`."""
    a = operand(t)
    if not (a.type is F32 or a.type is F16):
        raise violated(t, "a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16")
    if not is_contiguous(a):
        raise violated(t, "ggml_is_contiguous(a)")
    return dup_or_inplace(t, a)


def _arange(t: Tensor) -> Layout:
    """`ggml_arange`: start, stop and step stand in `op_params`; the count is taken in float32, as C takes it."""
    start, stop, step = (np.float32(t.param_f32(i)) for i in range(3))
    if not stop > start:
        raise violated(t, "stop > start", start=start, stop=stop)
    if not (np.isfinite(stop - start) and step > 0):
        raise GraphError(f"arange({start}, {stop}, {step}) has no end; the step must be positive")
    return fresh(F32, (int(np.ceil((stop - start) / step)), 1, 1, 1))


MATH_RULES: dict[str, Rule] = {
    "ADD": Rule(_add, 2),
    "SUB": Rule(_broadcast, 2),
    "MUL": Rule(_broadcast, 2),
    "DIV": Rule(_broadcast, 2),
    "ADD1": Rule(_add1, 2),
    "ADD_ID": Rule(_add_id, 3),
    "SCALE": Rule(_scale, n_params=2),
    "SQR": Rule(_map),
    "SQRT": Rule(_map),
    "LOG": Rule(_map),
    "SIN": Rule(_map),
    "COS": Rule(_map),
    "CLAMP": Rule(_map, n_params=2),
    "LEAKY_RELU": Rule(_map, n_params=1),
    "DIAG_MASK_INF": Rule(_map, n_params=1),
    "DIAG_MASK_ZERO": Rule(_map, n_params=1),
    "UNARY": Rule(_unary, n_params=5, runs=_unary_runs),
    "GLU": Rule(_glu, 1, 2, n_params=4, runs=_glu_runs),
    "NORM": Rule(_map, n_params=1, runs=_norm_runs),
    "RMS_NORM": Rule(_map, n_params=1, runs=_norm_runs),
    "L2_NORM": Rule(_map, n_params=1, runs=_norm_runs),
    "GROUP_NORM": Rule(_map, n_params=2, runs=_group_norm_runs),
    "SUM": Rule(_sum),
    "SUM_ROWS": Rule(_sum_rows),
    "MEAN": Rule(_mean),
    "CUMSUM": Rule(_cumsum),
    "ARGMAX": Rule(_argmax),
    "FILL": Rule(_fill, n_params=1),
    "ARANGE": Rule(_arange, 0, n_params=3),
}
