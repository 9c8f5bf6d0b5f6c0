"""Products and triangles of matrices, in float64.

ggml converts `src[1]` to the `vec_dot_type` of `src[0]`'s type before it multiplies. With an `Arithmetic` that lists
the type, the kernel rounds in the same way, and the product after that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.backend.kernel import Raw, Sources
from conformance.ggml import quants
from conformance.ggml.arithmetic import EXACT, SUMS, Arithmetic
from conformance.ggml.ops.matmul import AT_ONCE, TRI_TYPE
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import Q4_1, Q5_1, Q8_1, GGMLType

from .takes import DOTS, FLOAT, MATRIX, ONLY_F32, ONLY_I32, VALUES, WEIGHTS, Table, Takes
from .values import Values, checked_index, in_float64, load, operand, rounded, store, weight

_OFFSET_TYPES = (Q4_1, Q5_1)
"""Weights `d q + m` whose m ggml multiplies by the F16 block sum `s` of Q8_1."""


def product(w: Values, x: Values) -> Values:
    """Compute `x @ w^T`: (n3, n2, m, k), (n3 r3, n2 r2, n, k) to (n3 r3, n2 r2, n, m).

    As in `ggml_compute_forward_mul_mat`, matrix i of `x` is multiplied by matrix i / r of `w`.
    """
    n3, n2, m, k = w.shape
    m3, m2, n, _ = x.shape
    if n3 == m3 and n2 == m2:
        return x @ w.swapaxes(-1, -2)
    grouped = x.reshape(n3, m3 // n3, n2, m2 // n2 * n, k)
    return (grouped @ w[:, None].swapaxes(-1, -2)).reshape(m3, m2, n, m)


def _block_sum_error(raw: Raw) -> Values:
    """Return, per Q8_1 block, `s` minus d times the sum of its quants."""
    blocks = raw.view(BLOCK[Q8_1])[..., 0]
    total: Values = blocks["d"].astype(np.float64) * blocks["qs"].sum(-1, dtype=np.int64)
    return blocks["s"].astype(np.float64) - total


class Activations:
    """Operands of weights (or K) of type `weights`, rounded as `arithmetic` and its table `to`."""

    __slots__ = ("_arithmetic", "error", "values")

    def __init__(
        self, arithmetic: Arithmetic, to: Mapping[str, str], weights: GGMLType, type_: GGMLType, raw: Raw
    ) -> None:
        self._arithmetic = arithmetic
        self.error: Values | None = None
        """Error of each block's sum, (..., k / 32), for weights with an offset."""
        name = to.get(weights.name, arithmetic.operands)
        if name == Q8_1.name and weights in _OFFSET_TYPES:
            stored = raw if type_ is Q8_1 else quants.quantizer(arithmetic.quantize)(Q8_1, load(type_, raw))
            self.values = load(Q8_1, stored)
            self.error = _block_sum_error(stored)
        elif name in (EXACT.operands, type_.name):  # quantising twice would not give the same blocks
            self.values = load(type_, raw)
        else:
            self.values = rounded(load(type_, raw), name, arithmetic.quantize)

    def times(self, type_: GGMLType, raw: Raw, rows: tuple[NDArray[Any], ...] = ()) -> Values:
        """Multiply by the weights `raw` of `type_`; `rows` selects rows of the activations first."""
        x, error = self.values, self.error
        if rows:
            x, error = x[rows][None, None], None if error is None else error[rows][None, None]
        step = max(1, AT_ONCE // max(1, raw.shape[0] * raw.shape[1] * x.shape[-1]))
        parts = [self._dot(type_, raw[:, :, i : i + step], x, error) for i in range(0, raw.shape[2], step)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def _dot(self, type_: GGMLType, raw: Raw, x: Values, error: Values | None) -> Values:
        w = narrowed(self._arithmetic, type_, load(type_, raw))
        if self._arithmetic.sums != EXACT.sums:
            return _added_up(w, x, SUMS[self._arithmetic.sums])
        y = product(w, x)
        if error is not None:
            y += product(raw.view(BLOCK[type_])["m"][..., 0].astype(np.float64), error)
        return y


def narrowed(arithmetic: Arithmetic, type_: GGMLType, x: Values) -> Values:
    """Round the values of an operand of `type_` to `Arithmetic.operands`."""
    return x if arithmetic.operands in (EXACT.operands, type_.name) else rounded(x, arithmetic.operands)


def _added_up(w: Values, x: Values, together: int) -> Values:
    """Compute `product` with each product and sum rounded to F16; `together` as in `SUMS`."""
    n = w.shape[-1]
    total = product(w[..., :0], x[..., :0])
    for start in range(0, n, together):
        for k in reversed(range(start, min(n, start + together))):
            term = product(w[..., k : k + 1], x[..., k : k + 1]).astype(np.float16)
            total = (total + term).astype(np.float16).astype(np.float64)
    return total


def _mul_mat(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `dst[i3, i2, i1, i0] = sum_k src0[i3 / r3, i2 / r2, i0, k] src1[i3, i2, i1, k]`.

    With the hint GGML_HINT_SRC0_IS_HADAMARD ggml may not read `src[0]`; here it is multiplied.
    """
    (type_, w_raw), (x, x_raw) = weight(arithmetic, node, src), operand(node, src, 1)
    activations = Activations(arithmetic, arithmetic.mul_mat, type_, x.type, x_raw)
    store(node.type, dst, activations.times(type_, w_raw))


def _mul_mat_id(arithmetic: Arithmetic, node: Tensor, dst: Raw, src: Sources) -> None:
    """Compute `dst[:, iu, it] = src0[:, :, ids[iu, it]] src1[:, iu % ne11, it]`, by experts."""
    (type_, w_raw), (x, x_raw) = weight(arithmetic, node, src), operand(node, src, 1)
    ids = checked_index(operand(node, src, 2)[1][0, 0], w_raw.shape[1], "ids", "experts, ne[2] of src[0]")
    activations = Activations(arithmetic, arithmetic.mul_mat, type_, x.type, x_raw)
    zero = np.zeros(1, np.int64)
    out = np.empty((*ids.shape, node.ne[0]))
    for expert in np.unique(ids):
        token, used = np.nonzero(ids == expert)
        rows = (zero, token, used % x.ne[1])
        out[token, used] = activations.times(type_, w_raw[:, expert : expert + 1], rows)[0, 0]
    store(node.type, dst, out[None])


def _out_prod(_: Tensor, a: Values, b: Values) -> Values:
    """Compute `dst[i0, i1] = sum_k a[i0, k] b[i1, k]`; matrix i of `b`, `i / r` of `a`."""
    for axis in (0, 1):
        a = np.repeat(a, b.shape[axis] // a.shape[axis], axis)
    y: Values = b.swapaxes(-1, -2) @ a
    return y


_TRIANGLES: dict[TRI_TYPE, Callable[[Values], Values]] = {
    TRI_TYPE.UPPER_DIAG: np.triu,
    TRI_TYPE.UPPER: lambda x: np.triu(x, 1),
    TRI_TYPE.LOWER_DIAG: np.tril,
    TRI_TYPE.LOWER: lambda x: np.tril(x, -1),
}


def _solve_tri(_: Tensor, a: Values, b: Values) -> Values:
    """Solve by forward substitution; elements above the diagonal are not read."""
    x = np.empty_like(b)
    for i in range(b.shape[-2]):
        below = (a[..., i : i + 1, :i] @ x[..., :i, :])[..., 0, :]
        x[..., i, :] = (b[..., i, :] - below) / a[..., i, i, None]
    return x


TABLE: Table = {
    "MUL_MAT": (Takes((WEIGHTS, VALUES | DOTS), ONLY_F32), _mul_mat),
    "MUL_MAT_ID": (Takes((WEIGHTS, VALUES | DOTS, ONLY_I32), ONLY_F32), _mul_mat_id),
    "OUT_PROD": (Takes((WEIGHTS, FLOAT), ONLY_F32), in_float64(_out_prod)),
    "TRI": (MATRIX, in_float64(lambda node, x: _TRIANGLES[node.params.type](x))),
    "DIAG": (MATRIX, in_float64(lambda node, x: np.where(np.eye(node.ne[0], dtype=np.bool_), x, 0.0))),
    "SOLVE_TRI": (Takes((ONLY_F32,) * 2, ONLY_F32), in_float64(_solve_tri)),
}
