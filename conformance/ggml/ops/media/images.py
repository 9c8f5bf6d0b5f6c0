"""Images: resizing, the windows of a vision transformer and its relative positions."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import GraphError
from conformance.ggml.ops.fields import flag, i32, i32s
from conformance.ggml.ops.op import (
    LOOP,
    ROUNDS,
    Layout,
    Op,
    Rounding,
    Work,
    check,
    dup_or_inplace,
    failed,
    fresh,
    operand,
)  # fmt: skip
from conformance.ggml.tensor import Tensor, nelements
from conformance.ggml.types import F16, F32

SCALE_MODE = IntEnum("SCALE_MODE", {"NEAREST": 0, "BILINEAR": 1, "BICUBIC": 2})
"""`enum ggml_scale_mode`, the low byte of a mode."""
SCALE_FLAG = IntEnum("SCALE_FLAG", {"ALIGN_CORNERS": 1 << 8, "ANTIALIAS": 1 << 9})
"""`enum ggml_scale_flag`."""
_MODE = 0xFF
_KNOWN = _MODE | SCALE_FLAG.ALIGN_CORNERS | SCALE_FLAG.ANTIALIAS
_SHARP = -0.75
"""alpha of the cubic kernel."""


def _upscale(t: Tensor) -> Layout:
    """Lay out `ggml_interpolate`; the caller chooses `ne`."""
    mode = t.params.mode
    check(
        t,
        (0 <= mode & _MODE < len(SCALE_MODE), "(mode & 0xFF) < GGML_SCALE_MODE_COUNT"),
        (
            not mode & SCALE_FLAG.ANTIALIAS or mode & _MODE == SCALE_MODE.BILINEAR,
            "!(mode & GGML_SCALE_FLAG_ANTIALIAS) || (mode & 0xFF) == GGML_SCALE_MODE_BILINEAR",
        ),
        mode=mode,
    )
    if mode & ~_KNOWN:
        raise GraphError(f"mode={mode:#x}: a ggml_scale_mode and ggml_scale_flags expected")
    return fresh(operand(t).type, t.ne)


def _upscale_limits(t: Tensor) -> None:
    if min(*operand(t).ne, *t.ne) < 1:
        raise GraphError(f"sizes from 1 expected, {list(operand(t).ne)} to {list(t.ne)} found")


def taps(t: Tensor, dim: int) -> NDArray[np.float64]:
    """Return the weights of `a`'s elements along a dimension: [ne[dim], a->ne[dim]].

    Positions are float32, as in ggml: they decide which element is the nearest. Dimensions 2 and 3 always use
    the nearest.
    """
    n, size, flags = operand(t).ne[dim], t.ne[dim], t.params.mode
    mode = SCALE_MODE(flags & _MODE) if dim < 2 else SCALE_MODE.NEAREST  # planes have two dimensions
    aligned = bool(flags & SCALE_FLAG.ALIGN_CORNERS) and dim < 2
    one, half = np.float32(1), np.float32(0.0 if aligned else 0.5)
    scale = np.float32(size) / np.float32(n)
    if aligned and size > 1 and n > 1:
        scale = np.float32(size - 1) / np.float32(n - 1)
    i = np.arange(size, dtype=np.float32)
    weights = np.zeros((size, n))
    if mode == SCALE_MODE.NEAREST:
        weights[np.arange(size), (i / scale).astype(np.int64)] = 1.0
    elif flags & SCALE_FLAG.ANTIALIAS:
        support = max(one, one / scale)
        middle = (i + half) / scale
        first, last = (np.trunc(middle + side * support + half)[:, None] for side in (-one, one))
        k = np.arange(n)
        weights = np.maximum(0.0, 1.0 - abs(k - middle[:, None].astype(np.float64) + half) / np.float64(support))
        weights[(k < first) | (k >= last)] = 0.0
        total = weights.sum(1, keepdims=True)
        weights /= np.where(total > 0.0, total, 1.0)
    else:
        at = (i + half) / scale - half
        low = np.floor(at)
        part = at.astype(np.float64) - low
        if mode == SCALE_MODE.BILINEAR:
            low = np.clip(low, 0, n - 1)
            part = np.clip(at.astype(np.float64) - low, 0.0, 1.0)
            shares = {0: 1.0 - part, 1: part}
        else:
            shares = {step: _cubic(abs(part - step)) for step in (-1, 0, 1, 2)}
        for step, share in shares.items():
            np.add.at(weights, (np.arange(size), np.clip(low.astype(np.int64) + step, 0, n - 1)), share)
    return weights


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the cubic convolution kernel at distances `x` up to 2."""
    a = _SHARP
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1.0, near, far)


def _win_part(t: Tensor) -> Layout:
    """Lay out `ggml_win_part`: zero-padded squares of `a` [C, W, H], [C, w, w, npx * npy]."""
    a, p = operand(t), t.params
    if p.w < 1:
        raise GraphError(f"windows from 1 expected, w={p.w} found")
    found, right = (p.npx, p.npy), (-(-a.ne[1] // p.w), -(-a.ne[2] // p.w))
    if found != right:
        raise GraphError(f"ggml counts {right[0]} x {right[1]} windows, {found[0]} x {found[1]} found")
    return fresh(F32, (a.ne[0], p.w, p.w, p.npx * p.npy))


def _win_unpart(t: Tensor) -> Layout:
    """Lay out `ggml_win_unpart`: windows a [C, w, w, n] joined to the caller's [C, w0, h0]."""
    return fresh(F32, (operand(t).ne[0], t.ne[1], t.ne[2], 1))


def _win_unpart_limits(t: Tensor) -> None:
    a, w = operand(t), t.params.w
    if w < 1 or a.ne[1:] != (w, w, -(-t.ne[1] // w) * -(-t.ne[2] // w)):
        raise GraphError(f"windows of {w} for a result of {list(t.ne[1:3])} expected, {list(a.ne)} found")


def _get_rel_pos(t: Tensor) -> Layout:
    """Lay out `ggml_get_rel_pos`: rows of a [C, 2 n - 1] by distance, F16 [C, n, n]."""
    a = operand(t)
    n = (a.ne[1] + 1) // 2
    check(t, (2 * n - 1 == a.ne[1], "2*MAX(qh, kh) - 1 == a->ne[1]"))
    return fresh(F16, (a.ne[0], n, n, 1))


def _add_rel_pos(t: Tensor) -> Layout:
    """Lay out `ggml_add_rel_pos`: a [n * n, w * h, heads], pw and ph [n, w, h, heads]."""
    return dup_or_inplace(t, operand(t))


def _square(t: Tensor) -> int:
    """Return the squared longer side; positions are float32, and their error scales values."""
    a = operand(t)
    return int(max(a.ne[0], a.ne[1], t.ne[0], t.ne[1])) ** 2


def _other_mode(_: Tensor, mode: int) -> int:
    """Return NEAREST for another mode, and BILINEAR for NEAREST."""
    return mode & SCALE_FLAG.ALIGN_CORNERS | (SCALE_MODE.NEAREST if mode & _MODE else SCALE_MODE.BILINEAR)


UPSCALE = Op(
    "UPSCALE",
    src="a",
    layout=_upscale,
    asserts="a->type == GGML_TYPE_F32",
    limits=_upscale_limits,
    rounding=Rounding(64, 1, "float32 positions up to the root of K, and products with shares of a pixel", _square),
    params=(i32("mode", _other_mode, always=True),),
    work=Work(
        lambda t: 2 * nelements(t) + 2 * operand(t).ne[1] * t.ne[0] * t.ne[2] * t.ne[3],
        lambda t: nelements(t) * (operand(t).ne[0] + operand(t).ne[1]) // 10 + LOOP,
    ),
)
WIN_PART = Op(
    "WIN_PART",
    src="a",
    layout=_win_part,
    asserts="a->ne[3] == 1; a->type == GGML_TYPE_F32",
    params=tuple(i32s("npx npy w")),
    work=Work(lambda t: 2 * nelements(t)),
)
WIN_UNPART = Op(
    "WIN_UNPART",
    src="a",
    layout=_win_unpart,
    asserts="a->type == GGML_TYPE_F32",
    limits=_win_unpart_limits,
    params=tuple(i32s("w")),
    work=Work(lambda t: 2 * nelements(operand(t))),
)
GET_REL_POS = Op("GET_REL_POS", src="a", layout=_get_rel_pos, runs="a->type == GGML_TYPE_F16")
ADD_REL_POS = Op(
    "ADD_REL_POS",
    src="a pw ph",
    layout=_add_rel_pos,
    asserts="""
        ggml_are_same_shape(pw, ph); ggml_is_contiguous(a); ggml_is_contiguous(pw); ggml_is_contiguous(ph);
        ph->type == GGML_TYPE_F32; pw->type == GGML_TYPE_F32; pw->ne[3] == a->ne[2]; pw->ne[0]*pw->ne[0] == a->ne[0];
        pw->ne[1]*pw->ne[2] == a->ne[1]
    """,
    runs="a->type == GGML_TYPE_F32; a->ne[3] == 1",
    rounding=ROUNDS,
    params=(flag("inplace"),),
    work=Work(nelements),
)


class Images:
    """Constructors of the ops over images."""

    @UPSCALE.form(
        ne0=lambda t: t.ne[0], ne1=lambda t: t.ne[1], ne2=lambda t: t.ne[2], ne3=lambda t: t.ne[3],
        mode=lambda t: t.params.mode,
    )  # fmt: skip
    def interpolate(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int) -> Tensor:
        """Resize `a` with a mode of `SCALE_MODE` and flags of `SCALE_FLAG`."""
        return UPSCALE.node(a, ne=(ne0, ne1, ne2, ne3), mode=mode)

    def upscale(self, a: Tensor, scale_factor: int, mode: int) -> Tensor:
        """Apply `interpolate` to `scale_factor` times the width and the height."""
        if scale_factor <= 1:
            raise failed("scale_factor > 1", (a,), scale_factor=scale_factor)
        return self.interpolate(a, a.ne[0] * scale_factor, a.ne[1] * scale_factor, a.ne[2], a.ne[3], mode)

    @WIN_PART.form(w=lambda t: t.params.w)
    def win_part(self, a: Tensor, w: int) -> Tensor:
        """Cut `a` [C, W, H] into squares of `w`: [C, w, w, n]."""
        size = max(1, w)
        return WIN_PART.node(a, npx=-(-a.ne[1] // size), npy=-(-a.ne[2] // size), w=w)

    @WIN_UNPART.form(w0=lambda t: t.ne[1], h0=lambda t: t.ne[2], w=lambda t: t.params.w)
    def win_unpart(self, a: Tensor, w0: int, h0: int, w: int) -> Tensor:
        """Join squares `a` [C, w, w, n] to [C, w0, h0]."""
        return WIN_UNPART.node(a, ne=(a.ne[0], w0, h0, 1), w=w)

    @GET_REL_POS.form(qh=lambda t: t.ne[2], kh=lambda t: t.ne[1])
    def get_rel_pos(self, a: Tensor, qh: int, kh: int) -> Tensor:
        """Return row `qh - 1 + key - query` of `a` [C, 2 qh - 1] for each pair: [C, kh, qh]."""
        t = GET_REL_POS.node(a)
        check(t, (qh == kh, "qh == kh"), (t.ne[1:3] == (kh, qh), "2*MAX(qh, kh) - 1 == a->ne[1]"), qh=qh, kh=kh)
        return t

    @ADD_REL_POS.constructor
    def add_rel_pos(self, a: Tensor, pw: Tensor, ph: Tensor) -> None:
        """Add `pw` by key column, `ph` by row, [n, w, h, heads], to `a` [n * n, w * h, heads]."""

    add_rel_pos_inplace = add_rel_pos.inplace
