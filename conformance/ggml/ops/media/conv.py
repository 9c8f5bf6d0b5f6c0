"""Convolutions in one, two and three dimensions, transposed ones, and im2col."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.fields import i32s
from conformance.ggml.ops.matmul import PRODUCT
from conformance.ggml.ops.op import DOT, DOTS, LOOP, PASSES, SUMS, Layout, Op, Work, check, fresh, operand
from conformance.ggml.ops.windows import conv_output_size
from conformance.ggml.tensor import Tensor, nelements
from conformance.ggml.types import F32, GGMLType


def _slide(t: Tensor, axes: int) -> tuple[int, ...]:
    """Return how many windows of `a` fit `b` along each of the first `axes` dimensions.

    GraphError for strides and dilations below 1, or padding below 0.
    """
    a, b, p = operand(t), operand(t, 1), t.params
    sizes = []
    for i in range(axes):
        s, pad, d = getattr(p, f"s{i}"), getattr(p, f"p{i}"), getattr(p, f"d{i}")
        if s < 1 or d < 1 or pad < 0:
            raise GraphError(
                f"stride and dilation from 1 and padding from 0 expected, s{i}={s} p{i}={pad} d{i}={d} found"
            )
        sizes.append(conv_output_size(b.ne[i], a.ne[i], s, pad, d))
    return tuple(sizes)


def _conv_2d(t: Tensor) -> Layout:
    """Lay out `ggml_conv_2d_direct`: a [KW, KH, IC, OC] and b [W, H, IC, N] to [OW, OH, OC, N]."""
    a, b = operand(t), operand(t, 1)
    ow, oh = _slide(t, 2)
    return fresh(b.type, (ow, oh, a.ne[3], b.ne[3]))


def _conv_3d(t: Tensor) -> Layout:
    """Lay out `ggml_conv_3d_direct`: [OW, OH, OD, OC * N]."""
    p = t.params
    if min(p.c, p.n, p.oc) < 1:
        raise GraphError(f"channels, batches and filters from 1 expected, c={p.c} n={p.n} oc={p.oc} found")
    ow, oh, od = _slide(t, 3)
    return fresh(F32, (ow, oh, od, p.oc * p.n))


def _im2col_3d(t: Tensor) -> Layout:
    """Lay out `ggml_im2col_3d`: windows of b [W, H, D, IC * N], one per row.

    The result is [IC * KD * KH * KW, OW, OH, OD * N]; the caller chooses its type, F16 or F32.
    """
    a, b, channels = operand(t), operand(t, 1), t.params.IC
    if channels < 1:
        raise GraphError(f"channels from 1 expected, IC={channels} found")
    ow, oh, od = _slide(t, 3)
    for n, name in ((od, "OD"), (oh, "OH"), (ow, "OW")):
        check(t, (n > 0, f'({name} > 0) && "b too small compared to a"'))
    return fresh(t.type, (a.ne[0] * a.ne[1] * a.ne[2] * channels, ow, oh, od * (b.ne[3] // channels)))


def _conv_transpose_1d(t: Tensor) -> Layout:
    """Lay out `ggml_conv_transpose_1d`: a [K, OC, IC] and b [L, IC] to [(L - 1) * s0 + K, OC]."""
    a, b = operand(t), operand(t, 1)
    return fresh(F32, ((b.ne[0] - 1) * t.params.s0 + a.ne[0], a.ne[1], b.ne[2], 1))


def _conv_transpose_2d(t: Tensor) -> Layout:
    """Lay out `ggml_conv_transpose_2d_p0`: [OW, OH, OC, N]."""
    a, b, s = operand(t), operand(t, 1), t.params.stride
    return fresh(F32, ((b.ne[0] - 1) * s + a.ne[0], (b.ne[1] - 1) * s + a.ne[1], a.ne[2], b.ne[3]))


def _col2im_1d(t: Tensor) -> Layout:
    """Lay out `ggml_col2im_1d`: [(T - 1) * s0 + K - 2 * p0, OC]."""
    a, p = operand(t), t.params
    check(t, (p.s0 > 0, "s0 > 0"), (p.oc > 0, "oc > 0"), (p.p0 >= 0, "p0 >= 0"), s0=p.s0, oc=p.oc, p0=p.p0)
    k = a.ne[0] // p.oc
    n = (a.ne[1] - 1) * p.s0 + k - 2 * p.p0
    check(t, (a.ne[0] == k * p.oc, "K_OC == K * oc"), (k > 0 and n > 0, "K > 0 && T_out > 0"), K=k, T_out=n)
    return fresh(a.type, (n, p.oc, 1, 1))


def _volume(t: Tensor) -> int:
    """Return the number of elements of one filter."""
    a = operand(t)
    return a.ne[0] * a.ne[1] * a.ne[2] * (t.params.c if t.op == "CONV_3D" else 1)


def _reached(t: Tensor) -> int:
    """Return the number of terms of a result: elements of a transposed filter, in all channels."""
    a = operand(t)
    return prod(a.ne) // max(1, t.ne[2] if t.op == "CONV_TRANSPOSE_2D" else t.ne[1])


def _columns(t: Tensor) -> int:
    """Return how many columns overlap in one element."""
    step: int = t.params.oc * t.params.s0
    return -(-operand(t).ne[0] // step)


def _turns(t: Tensor) -> int:
    """Return the elements of a kernel's window; the reference loops over them."""
    a = operand(t)
    return a.ne[0] * (1 if t.op == "CONV_TRANSPOSE_1D" else a.ne[1]) * (a.ne[2] if t.op.endswith("3D") else 1)


def _padded(t: Tensor, axes: int) -> int:
    """Return the elements of the padded operand."""
    a, b, p, out = operand(t), operand(t, 1), t.params, t.ne[1:] if t.op.startswith("IM2COL") else t.ne
    n = prod(b.ne[axes:])
    for i in range(axes):
        s, pad, d = getattr(p, f"s{i}"), getattr(p, f"p{i}"), getattr(p, f"d{i}")
        n *= b.ne[i] + pad + max(pad, (out[i] - 1) * s + a.ne[i] * d + 1)
    return n


def _work(axes: int) -> Work:
    """Return the work of a convolution: a product for each element of the window."""
    return Work(
        lambda t: 2 * _padded(t, axes) + 2 * nelements(t) + 2 * nelements(operand(t)),
        lambda t: _turns(t) * (LOOP + 2 * nelements(t)) + nelements(t) * _volume(t) // DOT + PASSES * _padded(t, axes),
    )


def _transposed_operations(t: Tensor) -> int:
    b = operand(t, 1)
    return _turns(t) * (LOOP + 2 * nelements(t)) + nelements(operand(t)) * nelements(b) // max(1, b.ne[2] * DOT)


_KERNEL = "a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16; b->type == GGML_TYPE_F32"
_TRANSPOSED = replace(DOTS, terms=_reached, products=PRODUCT, by="mul_mat")
_TRANSPOSED_WORK = Work(lambda t: 2 * nelements(t) + 2 * nelements(operand(t)), _transposed_operations)

CONV_2D = Op(
    "CONV_2D",
    src="a b",
    layout=_conv_2d,
    asserts="a->ne[2] == b->ne[2]",
    runs=_KERNEL,
    rounding=replace(DOTS, terms=_volume, products=PRODUCT, by="mul_mat"),
    params=tuple(i32s("s0 s1 p0 p1 d0 d1")),
    work=_work(2),
)
CONV_3D = Op(
    "CONV_3D",
    src="a b",
    layout=_conv_3d,
    asserts="a->ne[3] == c*oc; b->ne[3] == c*n",
    runs=_KERNEL,
    rounding=replace(DOTS, terms=_volume, products=PRODUCT, by="mul_mat"),
    params=tuple(i32s("s0 s1 s2 p0 p1 p2 d0 d1 d2 c n oc")),
    work=_work(3),
)
IM2COL_3D = Op(
    "IM2COL_3D",
    src="a b",
    layout=_im2col_3d,
    runs="""
        dst->type == GGML_TYPE_F16 || dst->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32;
        b->ne[3] % IC == 0 || dst->ne[3] == 0
    """,
    params=tuple(i32s("s0 s1 s2 p0 p1 p2 d0 d1 d2 IC")),
    work=Work(lambda t: 2 * _padded(t, 3), lambda t: _turns(t) * LOOP + PASSES * _padded(t, 3)),
)
CONV_TRANSPOSE_1D = Op(
    "CONV_TRANSPOSE_1D",
    src="a b",
    layout=_conv_transpose_1d,
    asserts="ggml_is_matrix(b); a->ne[2] == b->ne[1]; a->ne[3] == 1; p0 == 0; d0 == 1",
    runs=f"{_KERNEL}; s0 >= 1",
    rounding=_TRANSPOSED,
    params=tuple(i32s("s0 p0 d0")),
    work=_TRANSPOSED_WORK,
)
CONV_TRANSPOSE_2D = Op(
    "CONV_TRANSPOSE_2D",
    src="a b",
    layout=_conv_transpose_2d,
    asserts="a->ne[3] == b->ne[2]",
    runs=f"{_KERNEL}; stride >= 1",
    rounding=_TRANSPOSED,
    params=tuple(i32s("stride")),
    work=_TRANSPOSED_WORK,
)
COL2IM_1D = Op(
    "COL2IM_1D",
    src="a",
    layout=_col2im_1d,
    asserts="""
        ggml_is_matrix(a); ggml_is_contiguous(a);
        a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16 || a->type == GGML_TYPE_BF16
    """,
    rounding=replace(SUMS, terms=_columns),
    params=tuple(i32s("s0 oc p0")),
    work=Work(lambda t: 2 * nelements(t), lambda t: operand(t).ne[0] // max(1, t.ne[1]) * (LOOP + 2 * nelements(t))),
)


class Convolutions:
    """Constructors of convolutions."""

    @CONV_2D.constructor
    def conv_2d_direct(self, a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> None:
        """Convolve `b` [W, H, IC, N] with the filters `a` [KW, KH, IC, OC] to [OW, OH, OC, N]."""

    @CONV_3D.constructor
    def conv_3d_direct(
        self, a: Tensor, b: Tensor, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int, d2: int,
        c: int, n: int, oc: int
    ) -> None:  # fmt: skip
        """Convolve `b` [W, H, D, c * n] with `a` [KW, KH, KD, c * oc]: `n` volumes, `oc` filters."""

    @IM2COL_3D.constructor
    def im2col_3d(
        self, a: Tensor, b: Tensor, IC: int, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int,
        d2: int, dst_type: GGMLType
    ) -> None:  # fmt: skip
        """Return the windows of `b` [W, H, D, IC * N] of the size of kernel `a`, one per row."""

    @CONV_TRANSPOSE_1D.constructor
    def conv_transpose_1d(self, a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> None:
        """Sum kernel `a` [K, OC, IC] times each of `b` [L, IC], `s0` apart; `p0` is 0, `d0` 1."""

    @CONV_TRANSPOSE_2D.constructor
    def conv_transpose_2d_p0(self, a: Tensor, b: Tensor, stride: int) -> None:
        """Sum kernel `a` [KW, KH, OC, IC] times each of `b` [W, H, IC, N], `stride` apart."""

    @COL2IM_1D.constructor
    def col2im_1d(self, a: Tensor, s0: int, oc: int, p0: int) -> None:
        """Sum the columns `a` [K * oc, T] `s0` apart, with `p0` cut off at both ends."""
