"""Gradients of ggml's backward graphs; the first source is the gradient of the result."""

from __future__ import annotations

from dataclasses import replace

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.fields import HALF, enum, f32, flag, i32s, swap
from conformance.ggml.ops.op import (
    EXPS,
    LOOP,
    NORMS,
    PASSES,
    SUMS,
    Layout,
    Longs,
    Op,
    Rounding,
    Work,
    failed,
    fresh,
    fresh_like,
    operand,
    same_layout,
)
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Dims, Tensor, can_repeat, nelements, new_tensor
from conformance.ggml.types import F32


def _repeat_back(t: Tensor) -> Layout:
    """Lay out `ggml_repeat_back`: the repetitions `a` summed to `ne`, which the caller chooses."""
    a = operand(t)
    return fresh(a.type, t.ne)


def _repeat_back_limits(t: Tensor) -> None:
    a = operand(t)
    if not can_repeat(t, a):
        raise failed("ggml_can_repeat(b, a)", t.src, ne=list(t.ne))


def _get_rows_back(t: Tensor) -> Layout:
    """Lay out `ggml_get_rows_back`: rows of `a` [n, r] added to rows `b` of F32 [n, rows]."""
    return fresh(F32, (operand(t).ne[0], t.ne[1], 1, 1))


def _pool_2d_back(t: Tensor) -> Layout:
    """Lay out `ggml_pool_2d_back`: the shape of `af`, the forward operand."""
    return fresh(F32, operand(t, 1).ne)


def _im2col_back(t: Tensor) -> Layout:
    """Lay out `ggml_im2col_back`: the shape of IM2COL's operand, which the caller chooses."""
    return fresh(F32, t.ne)


def _im2col_back_limits(t: Tensor) -> None:
    """Check the rows of `a`: the kernel reads as many as `b` and the result need."""
    a, b, p = operand(t), operand(t, 1), t.params
    channels, batches = (t.ne[2], t.ne[3]) if p.is_2D else (t.ne[1], t.ne[2])
    row = channels * b.ne[0] * (b.ne[1] if p.is_2D else 1)
    have = (a.ne[0], a.ne[3]) if p.is_2D else (a.ne[0], a.ne[2])
    if have != (row, batches) or not (p.is_2D or t.ne[3] == a.ne[3] == 1):
        raise GraphError(f"rows of {row} of {batches} batches expected, a is {list(a.ne)} for a result {list(t.ne)}")


def _kernel_area(t: Tensor) -> int:
    """Return how many windows one element may be part of."""
    b = operand(t, 1)
    return b.ne[0] * (b.ne[1] if t.params.is_2D else 1)


def _repeats(t: Tensor) -> int:
    return nelements(operand(t)) // max(1, nelements(t))


def _rows(t: Tensor) -> int:
    return operand(t).ne[1]


def _area(t: Tensor) -> int:
    """Return how many windows one element may be part of."""
    n: int = t.params.k0 * t.params.k1
    return n


def _windowed(t: Tensor) -> int:
    return _area(t) * LOOP + 4 * PASSES * (nelements(operand(t)) + nelements(t)) * (1 + _area(t) // 8)


REPEAT_BACK = Op(
    "REPEAT_BACK",
    src="a",
    layout=_repeat_back,
    runs="a->type == GGML_TYPE_F32",
    limits=_repeat_back_limits,
    rounding=replace(SUMS, terms=_repeats),
    work=Work(lambda t: nelements(operand(t))),
)
SILU_BACK = Op(
    "SILU_BACK",
    src="a b",
    layout=fresh_like,
    runs="a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16; b->type == a->type; ggml_are_same_shape(a, b)",
    rounding=EXPS,
)
RMS_NORM_BACK = Op(
    "RMS_NORM_BACK",
    src="a b",
    layout=fresh_like,
    runs="a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32; ggml_are_same_shape(a, b)",
    rounding=NORMS,
    params=(f32("eps", lambda _, eps: eps * 2 + 1),),
)
GET_ROWS_BACK = Op(
    "GET_ROWS_BACK",
    src="a b",
    layout=_get_rows_back,
    asserts="ggml_is_matrix(a) && ggml_is_vector(b) && b->type == GGML_TYPE_I32",
    runs="a->ne[1] >= b->ne[0]",
    rounding=replace(SUMS, terms=_rows),
    work=Work(nelements, nelements),
)
SOFT_MAX_BACK = Op(
    "SOFT_MAX_BACK",
    src="a b",
    layout=same_layout,
    runs="a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32; ggml_are_same_shape(a, b)",
    rounding=Rounding(64, 1, "float32 sum of K products, a difference from it"),
    params=(f32("scale", HALF), f32("max_bias", None)),
)
POOL_2D_BACK = Op(
    "POOL_2D_BACK",
    src="a af",
    layout=_pool_2d_back,
    runs="""
        a->type == GGML_TYPE_F32; af->type == GGML_TYPE_F32;
        k0 > 0 && k1 > 0; s0 > 0 && s1 > 0; p0 >= 0 && p1 >= 0; a->ne[2] == af->ne[2]; a->ne[3] == af->ne[3]
    """,
    rounding=replace(SUMS, terms=_area),
    params=(enum("op", OP_POOL, swap("MAX", "AVG"), always=True), *i32s("k0 k1 s0 s1 p0 p1")),
    work=Work(lambda t: 8 * (nelements(t) + nelements(operand(t))), _windowed),
)

IM2COL_BACK = Op(
    "IM2COL_BACK",
    src="a b",
    layout=_im2col_back,
    runs="""
        a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32 || b->type == GGML_TYPE_F16;
        s0 > 0 && p0 >= 0 && d0 > 0; !is_2D || (s1 > 0 && p1 >= 0 && d1 > 0)
    """,
    limits=_im2col_back_limits,
    rounding=replace(SUMS, terms=_kernel_area),
    params=(*i32s("s0 s1 p0 p1 d0 d1"), flag("is_2D")),
    work=Work(
        lambda t: 4 * (nelements(t) + nelements(operand(t))),
        lambda t: _kernel_area(t) * LOOP + PASSES * nelements(operand(t)),
    ),
)


def _like(t: Tensor) -> Tensor:
    """Return a leaf of the result's shape, which is all that a constructor reads."""
    return new_tensor(F32, *t.ne)


class Gradients:
    """Constructors of the gradients."""

    @REPEAT_BACK.form(b=_like)
    def repeat_back(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the gradient of `repeat(b, a)` by `b`: repetitions in `a` are summed."""
        if not can_repeat(b, a):
            raise failed("ggml_can_repeat(b, a)", (a, b))
        return REPEAT_BACK.node(a, ne=b.ne)

    @SILU_BACK.constructor
    def silu_back(self, a: Tensor, b: Tensor) -> None:
        """Compute the gradient of SiLU: the gradient `a` of its result times its slope at `b`."""

    @RMS_NORM_BACK.constructor
    def rms_norm_back(self, a: Tensor, b: Tensor, eps: float) -> None:
        """Compute the gradient of `rms_norm(b, eps)` by `b`, where that of its result is `a`."""

    @GET_ROWS_BACK.form(c=_like)
    def get_rows_back(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Compute the gradient of `get_rows(c, b)` by `c`: sum rows of `a` by indices `b`."""
        if not (c.ne[2] == c.ne[3] == 1 and a.ne[0] == c.ne[0]):
            GET_ROWS_BACK.node(a, b)  # its assertions on `a` and `b` come first
            raise failed("ggml_is_matrix(c) && (a->ne[0] == c->ne[0])", (a, b, c))
        return GET_ROWS_BACK.node(a, b, ne=c.ne)

    @SOFT_MAX_BACK.constructor
    def soft_max_ext_back(self, a: Tensor, b: Tensor, scale: float, max_bias: float) -> None:
        """Compute the gradient of a softmax with result `b` by its argument; `a` is the result's."""

    soft_max_ext_back_inplace = soft_max_ext_back.inplace

    @IM2COL_BACK.form(ne=lambda t: Longs(t.ne))
    def im2col_back(
        self,
        a: Tensor,
        b: Tensor,
        ne: Dims,
        s0: int,
        s1: int,
        p0: int,
        p1: int,
        d0: int,
        d1: int,
        is_2D: bool,
    ) -> Tensor:
        """Compute the gradient of `im2col(b, x, …)` by `x`, of shape `ne`: sum overlaps in `a`."""
        return IM2COL_BACK.node(a, b, ne=ne, s0=s0, s1=s1, p0=p0, p1=p1, d0=d0, d1=d1, is_2D=is_2D)

    @POOL_2D_BACK.constructor
    def pool_2d_back(
        self, a: Tensor, af: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float
    ) -> None:
        """Compute the gradient of `pool_2d(af, …)`: to the first maximum of a window, or shared."""
