"""Ops over rows: norms, reductions, sorting, and rows read and stored by index."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from conformance.ggml.tensor import Tensor, nelements
from conformance.ggml.types import F32, I32

from .fields import enum, f32, i32, swap, to
from .op import (
    LOOP,
    MOVES,
    NORMS,
    SUMS,
    Layout,
    Op,
    Work,
    fit_name,
    fresh,
    fresh_like,
    operand,
    same_layout,
    view_tensor,
    violated,
)

SORT_ORDER = IntEnum("SORT_ORDER", {"ASC": 0, "DESC": 1})
"""`enum ggml_sort_order`."""


def _sum(t: Tensor) -> Layout:
    """Sum all elements to one number."""
    return fresh(operand(t).type, (1, 1, 1, 1))


def _sum_rows(t: Tensor) -> Layout:
    """Sum each row: `a`'s type, ne[0] = 1."""
    a = operand(t)
    return fresh(a.type, (1, *a.ne[1:]))


def _mean(t: Tensor) -> Layout:
    """Compute the mean of each row: F32, ne[0] = 1."""
    return fresh(F32, (1, *operand(t).ne[1:]))


def _argmax(t: Tensor) -> Layout:
    """Return the index of each row's largest element: I32, one per row."""
    return fresh(I32, (operand(t).ne[1], 1, 1, 1))


def _argsort(t: Tensor) -> Layout:
    """Lay out `ggml_argsort`: I32 indices."""
    return fresh(I32, operand(t).ne)


def _top_k(t: Tensor) -> Layout:
    """Lay out `ggml_top_k`: I32 indices of the `ne[0]` largest, the caller's k."""
    a, k = operand(t), t.ne[0]
    if a.ne[0] < k:
        raise violated(t, "a->ne[0] >= k", k=k)
    return fresh(I32, (k, *a.ne[1:]))


def _get_rows(t: Tensor) -> Layout:
    """Read rows `b` [n, s2, s3] of `a` [m, rows, s2, s3]: F32 [m, n, s2, s3], I32 if `a` is."""
    a, b = operand(t), operand(t, 1)
    return fresh(I32 if a.type is I32 else F32, (a.ne[0], b.ne[0], b.ne[1], b.ne[2]))


def _set_rows(t: Tensor) -> Layout:
    """Lay out `ggml_set_rows(a, b, c)`: rows `b` into `a` at indices `c`; `src` is (b, c, a)."""
    return view_tensor(t, operand(t, 2))


def _first(t: Tensor) -> int:
    return nelements(operand(t))


_EPS = f32("eps", to(0.5))


def _sorting(t: Tensor) -> int:
    n = nelements(operand(t))
    return n * max(1, n.bit_length())


_EPS_RUNS = "eps >= 0.0f"
NORM = Op("NORM", src="a", layout=same_layout, runs=_EPS_RUNS, rounding=NORMS, params=(_EPS,))
RMS_NORM = Op("RMS_NORM", src="a", layout=same_layout, runs=_EPS_RUNS, rounding=NORMS, params=(_EPS,))
L2_NORM = Op("L2_NORM", src="a", layout=same_layout, runs=_EPS_RUNS, rounding=NORMS, params=(_EPS,))
GROUP_NORM = Op(
    "GROUP_NORM",
    src="a",
    layout=same_layout,
    runs=f"n_groups >= 1; {_EPS_RUNS}",
    rounding=replace(NORMS, terms=_first),
    params=(i32("n_groups", lambda _, n: 1 if n > 1 else 2), _EPS),
    work=Work(operations=lambda t: LOOP * max(1, min(t.params.n_groups, t.ne[2]))),
)
SUM = Op("SUM", src="a", layout=_sum, rounding=replace(SUMS, terms=_first))
SUM_ROWS = Op("SUM_ROWS", src="a", layout=_sum_rows, rounding=SUMS)
MEAN = Op("MEAN", src="a", layout=_mean, rounding=SUMS)
CUMSUM = Op("CUMSUM", src="a", layout=fresh_like, asserts="a->type == GGML_TYPE_F32", rounding=SUMS)
ARGMAX = Op("ARGMAX", src="a", layout=_argmax, asserts="ggml_is_matrix(a); a->ne[0] <= INT32_MAX")
ARGSORT = Op(
    "ARGSORT",
    src="a",
    layout=_argsort,
    asserts="a->ne[0] <= INT32_MAX",
    params=(enum("order", SORT_ORDER, swap("ASC", "DESC"), always=True),),
    work=Work(nelements, _sorting),
)
TOP_K = Op("TOP_K", src="a", layout=_top_k, work=Work(_first, _sorting))
GET_ROWS = Op(
    "GET_ROWS",
    src="a b",
    layout=_get_rows,
    asserts="a->ne[2] == b->ne[1]; a->ne[3] == b->ne[2]; b->ne[3] == 1; b->type == GGML_TYPE_I32",
    rounding=replace(MOVES, by="rows"),
    work=Work(nelements),
)
SET_ROWS = Op(
    "SET_ROWS",
    src="b c a",
    layout=_set_rows,
    asserts="""
        a->ne[0] == b->ne[0]; a->ne[2] == b->ne[2]; a->ne[3] == b->ne[3]; b->ne[1] == c->ne[0];
        b->ne[2] % c->ne[1] == 0; b->ne[3] % c->ne[2] == 0; c->ne[3] == 1;
        b->type == GGML_TYPE_F32 || b->type == GGML_TYPE_F16; c->type == GGML_TYPE_I64 || c->type == GGML_TYPE_I32;
        ggml_is_contiguous_rows(a); ggml_is_contiguous_rows(b)
    """,
    rounding=replace(MOVES, by="quantize"),
    work=Work(held=lambda t: 4 * _first(t)),
)


class RowOps:
    """Constructors of the ops over rows."""

    @NORM.constructor
    def norm(self, a: Tensor, eps: float) -> None:
        """Normalise each row to mean 0 and variance 1."""

    norm_inplace = norm.inplace

    @RMS_NORM.constructor
    def rms_norm(self, a: Tensor, eps: float) -> None:
        """Divide each row by its root mean square."""

    rms_norm_inplace = rms_norm.inplace

    @L2_NORM.constructor
    def l2_norm(self, a: Tensor, eps: float) -> None:
        """Divide each row by its length, which is at least `eps`."""

    l2_norm_inplace = l2_norm.inplace

    @GROUP_NORM.constructor
    def group_norm(self, a: Tensor, n_groups: int, eps: float) -> None:
        """Apply `norm` to groups of `ne[2] / n_groups` channels."""

    group_norm_inplace = group_norm.inplace

    sum = SUM.of_a()
    sum_rows = SUM_ROWS.of_a()
    mean = MEAN.of_a()
    cumsum = CUMSUM.of_a()
    argmax = ARGMAX.of_a()

    @ARGSORT.constructor
    def argsort(self, a: Tensor, order: int) -> None:
        """Return I32 indices that sort each row in an order of `SORT_ORDER`."""

    @TOP_K.form(k=lambda t: t.ne[0])
    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Return indices of each row's `k` largest in no order: I32 [k, …]."""
        return TOP_K.node(a, ne=(k, *a.ne[1:]))

    get_rows = GET_ROWS.of_a_b()

    @SET_ROWS.form()
    def set_rows(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Store rows `b` [m, n, s2, s3] into `a` [m, rows, s2, s3] at indices `c`; a view of `a`."""
        t = SET_ROWS.node(b, c, a)
        t.name = fit_name(f"{a.name} (view)")
        return t
