"""Ops over windows: convolution, pooling, padding, rolling."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import MAX_DIMS, Tensor, dims, nelements
from conformance.ggml.types import F32, GGMLType

from .fields import enum, flag, flip, i32s, swap, vec
from .op import DOTS, LOOP, PASSES, SUMS, Layout, Op, Work, check, fresh, operand, violated

OP_POOL = IntEnum("OP_POOL", {"MAX": 0, "AVG": 1})
"""`enum ggml_op_pool`."""


def _pad(t: Tensor) -> Layout:
    """Lay out `ggml_pad_ext` and `_circular`: elements before and after each dimension."""
    a, p = operand(t), t.params.padding
    ne = [a.ne[i] + p[2 * i] + p[2 * i + 1] for i in range(MAX_DIMS)]
    return fresh(a.type, (ne[0], ne[1], ne[2], ne[3]))


def _pad_limits(t: Tensor) -> None:
    if min(t.params.padding) < 0:
        raise GraphError(f"padding must not be negative: {list(t.params.padding)}")


def _pool_2d(t: Tensor) -> Layout:
    """Lay out `ggml_pool_2d`: windows of [k0, k1]."""
    a, p = operand(t), t.params
    k0, k1, s0, s1, p0, p1 = p.k0, p.k1, p.s0, p.s1, p.p0, p.p1
    if s0 < 1 or s1 < 1:
        raise GraphError(f"strides must be positive, {s0} and {s1} found")
    n0, n1 = ((n + 2 * p - k) // s + 1 for n, k, s, p in ((a.ne[0], k0, s0, p0), (a.ne[1], k1, s1, p1)))
    check(t, (n0 > 0, "ne[0] > 0"), (n1 > 0, "ne[1] > 0"), kernel=[k0, k1])
    return fresh(F32, (n0, n1, a.ne[2], a.ne[3]))


def _im2col(t: Tensor) -> Layout:
    """Lay out `ggml_im2col`: `b`'s windows of the size of kernel `a`, one per row.

    2D: a [KW, KH, IC], b [IW, IH, IC, N] to [IC * KH * KW, OW, OH, N]; 1D: a [K, IC], b [IW, IC, N] to [IC * K, OW, N].
    The caller chooses the type, F16 or F32.
    """
    a, b = operand(t), operand(t, 1)
    p = t.params
    s0, s1, is_2d = p.s0, p.s1, p.is_2D
    if is_2d:
        check(t, (a.ne[2] == b.ne[2], "a->ne[2] == b->ne[2]"))
    else:
        check(t, (b.ne[1] == a.ne[1], "b->ne[1] == a->ne[1]"), (b.ne[3] == 1, "b->ne[3] == 1"))
    if s0 < 1 or (is_2d and s1 < 1):
        raise GraphError(f"strides must be positive, {s0} and {s1} found")
    oh = conv_output_size(b.ne[1], a.ne[1], s1, p.p1, p.d1) if is_2d else 1
    ow = conv_output_size(b.ne[0], a.ne[0], s0, p.p0, p.d0)
    check(
        t,
        (oh > 0, '(!is_2D || OH > 0) && "b too small compared to a"'),
        (ow > 0, '(OW > 0) && "b too small compared to a"'),
        OW=ow,
        OH=oh,
    )
    if is_2d:
        return fresh(t.type, (a.ne[2] * a.ne[1] * a.ne[0], ow, oh, b.ne[3]))
    return fresh(t.type, dims(a.ne[1] * a.ne[0], ow, b.ne[2]))


def conv_output_size(n: int, k: int, stride: int, padding: int, dilation: int) -> int:
    """Compute `ggml_calc_conv_output_size`; C divides toward zero."""
    left = n + 2 * padding - dilation * (k - 1) - 1
    return left // stride + 1 if left >= 0 else 1 - (-left) // stride


def _conv_2d_dw(t: Tensor) -> Layout:
    """Lay out `ggml_conv_2d_dw_direct`: [KW, KH, 1, C] and [W, H, C, N] to [OW, OH, C, N].

    The order of the result's channels in memory is that of b.
    """
    a, b, p = operand(t), operand(t, 1), t.params
    if p.stride0 < 1 or p.stride1 < 1:
        raise GraphError(f"strides must be positive, {p.stride0} and {p.stride1} found")
    ow = conv_output_size(b.ne[0], a.ne[0], p.stride0, p.pad0, p.dilation0)
    oh = conv_output_size(b.ne[1], a.ne[1], p.stride1, p.pad1, p.dilation1)
    type_, ne, nb, _, _ = fresh(b.type, (ow, oh, b.ne[2], b.ne[3]))
    if b.nb[0] > b.nb[2] == b.type.type_size and b.nb[1] > b.nb[0]:
        channels = b.ne[2] * b.type.type_size
        nb = channels, ow * channels, b.type.type_size, nb[3]
    return type_, ne, nb, None, 0


def _roll(t: Tensor) -> Layout:
    """Lay out `ggml_roll`: element i of dimension d moves to `(i + shifts[d]) % ne[d]`."""
    a = operand(t)
    if a.nb[0] != a.type.type_size:
        raise violated(t, "a->nb[0] == ggml_type_size(a->type)")
    for d, shift in enumerate(t.params.shifts):
        if not abs(shift) < a.ne[d]:
            raise violated(t, f"abs(shift{d}) < a->ne[{d}]", shift=shift)
    return fresh(a.type, a.ne)


def _ssm_conv(t: Tensor) -> Layout:
    """Lay out `ggml_ssm_conv(sx, c)`: [d_inner, n_t, n_s]."""
    sx, c = operand(t), operand(t, 1)
    n_t = sx.ne[0] - c.ne[0] + 1
    if n_t < 0:
        raise violated(t, "n_t >= 0", n_t=n_t)
    return fresh(F32, (c.ne[1], n_t, sx.ne[2], 1))


def _window(t: Tensor) -> int:
    n: int = t.params.k0 * t.params.k1
    return n


def _area(t: Tensor) -> int:
    """Return the elements of a channel's kernel."""
    a = operand(t)
    return a.ne[0] * a.ne[1]


def _kernel(t: Tensor) -> int:
    return operand(t, 1).ne[0]


def _swapped(_: Tensor, padding: tuple[int, ...]) -> tuple[int, ...]:
    """Exchange padding before and after."""
    return tuple(padding[i ^ 1] for i in range(len(padding)))


def _other_shifts(t: Tensor, shifts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(s - 1 if s > 0 else s + (n > 1 - s) for s, n in zip(shifts, t.ne, strict=True))


def _padded(ne: int, before: int, windows: int, stride: int, reach: int) -> int:
    return ne + before + max(before, (windows - 1) * stride + reach)


def _pooled(t: Tensor) -> int:
    """Return the elements of the padded operand."""
    a, p = operand(t), t.params
    wide = _padded(a.ne[0], p.p0, t.ne[0], p.s0, p.k0)
    return wide * _padded(a.ne[1], p.p1, t.ne[1], p.s1, p.k1) * a.ne[2] * a.ne[3]


def _unfolded(t: Tensor) -> int:
    """Return the elements of the padded operand of IM2COL."""
    a, b, p = operand(t), operand(t, 1), t.params
    wide = _padded(b.ne[0], p.p0, t.ne[1], p.s0, abs(a.ne[0] * p.d0) + 1)
    if not p.is_2D:
        return wide * b.ne[1] * b.ne[2]
    return wide * _padded(b.ne[1], p.p1, t.ne[2], p.s1, abs(a.ne[1] * p.d1) + 1) * b.ne[2] * b.ne[3]


def _im2col_operations(t: Tensor) -> int:
    a = operand(t)
    return a.ne[0] * (a.ne[1] if t.params.is_2D else 1) * LOOP + PASSES * _unfolded(t)


PAD = Op(
    "PAD",
    src="a",
    layout=_pad,
    limits=_pad_limits,
    params=(vec("padding", "lp0 rp0 lp1 rp1 lp2 rp2 lp3 rp3", _swapped), flag("circular", flip)),
)
ROLL = Op("ROLL", src="a", layout=_roll, params=(vec("shifts", "shift0 shift1 shift2 shift3", _other_shifts),))
POOL_2D = Op(
    "POOL_2D",
    src="a",
    layout=_pool_2d,
    runs="""
        a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16; k0 > 0 && k1 > 0
    """,
    rounding=replace(SUMS, terms=_window),
    params=(enum("op", OP_POOL, swap("MAX", "AVG"), always=True), *i32s("k0 k1 s0 s1 p0 p1")),
    work=Work(lambda t: 2 * _pooled(t), lambda t: _window(t) * (LOOP + 2 * nelements(t)) + PASSES * _pooled(t)),
)
IM2COL = Op(
    "IM2COL",
    src="a b",
    layout=_im2col,
    runs="""
        dst->type == GGML_TYPE_F16 || dst->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32
    """,
    params=(*i32s("s0 s1 p0 p1 d0 d1"), flag("is_2D")),
    work=Work(lambda t: 2 * _unfolded(t), _im2col_operations),
)
CONV_2D_DW = Op(
    "CONV_2D_DW",
    src="a b",
    layout=_conv_2d_dw,
    asserts="a->ne[2] == 1; a->ne[3] == b->ne[2]",
    runs="""
        a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16; b->type == GGML_TYPE_F32;
        pad0 >= 0; pad1 >= 0; dilation0 >= 1; dilation1 >= 1
    """,
    rounding=replace(DOTS, terms=_area),
    params=tuple(i32s("stride0 stride1 pad0 pad1 dilation0 dilation1")),
    work=Work(lambda t: 2 * _area(t) * nelements(t), lambda t: _area(t) * (LOOP + 2 * nelements(t))),
)
SSM_CONV = Op(
    "SSM_CONV",
    src="sx c",
    layout=_ssm_conv,
    asserts="ggml_is_3d(sx); ggml_is_matrix(c); sx->ne[1] == d_inner",
    let="d_inner = c->ne[1]",
    rounding=replace(DOTS, terms=_kernel),
    work=Work(lambda t: nelements(t) * _kernel(t), lambda t: 2 * nelements(t) * _kernel(t)),
)


class Windows:
    """Constructors of the ops over windows."""

    @PAD.constructor
    def pad_ext(
        self, a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int
    ) -> None:
        """Pad with `lp_i` zeros before and `rp_i` after dimension i."""

    @PAD.variant(circular=True)
    def pad_ext_circular(
        self, a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int
    ) -> None:
        """Pad with `lp_i` elements before and `rp_i` after dimension i, taken from its other end."""

    def pad(self, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
        """Pad with `p_i` zeros after dimension i."""
        return self.pad_ext(a, 0, p0, 0, p1, 0, p2, 0, p3)

    @ROLL.constructor
    def roll(self, a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> None:
        """Shift each dimension circularly."""

    @POOL_2D.constructor
    def pool_2d(self, a: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float) -> None:
        """Pool each window to maximum or mean (`OP_POOL`); padding counts in the size of a window."""

    @IM2COL.constructor
    def im2col(
        self, a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, is_2D: bool,
        dst_type: GGMLType
    ) -> None:  # fmt: skip
        """Return `b`'s windows of the size of kernel `a`, one per row."""

    @CONV_2D_DW.constructor
    def conv_2d_dw_direct(
        self, a: Tensor, b: Tensor, stride0: int, stride1: int, pad0: int, pad1: int, dilation0: int, dilation1: int
    ) -> None:
        """Convolve `b` [W, H, C, N] channel by channel with `a` [KW, KH, 1, C]."""

    @SSM_CONV.constructor
    def ssm_conv(self, sx: Tensor, c: Tensor) -> None:
        """Convolve `sx` [d_conv - 1 + n_t, d_inner, n_s] with `c` [d_conv, d_inner] along tokens."""
