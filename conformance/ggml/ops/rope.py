"""Rotary position embedding, forward and backward."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor, nelements
from conformance.ggml.types import F32, I32

from .fields import GAP, enum, f32, i32, swap, times, vec
from .op import LOOP, Layout, Op, Rounding, Work, check, dup_or_inplace, failed, operand, optional, set_param, violated

ROPE_TYPE = IntEnum("ROPE_TYPE", {"NORMAL": 0, "NEOX": 2, "MROPE": 8, "VISION": 24, "IMROPE": 40})
"""`GGML_ROPE_TYPE_*`."""

MROPE_SECTIONS = 4


def _rope(t: Tensor) -> Layout:
    """Lay out `ggml_rope_ext`, `ggml_rope_multi`, `_back`: a, positions, frequency factors."""
    a, b, c = operand(t), operand(t, 1), optional(t, 2)
    n_dims, mode = t.params.n_dims, t.params.mode
    if mode & 1:
        raise violated(t, '(mode & 1) == 0 && "mode & 1 == 1 is no longer supported"', mode=mode)
    if b.ne[1:] != (1, 1, 1):
        raise violated(t, "ggml_is_vector(b)")
    if b.type is not I32:
        raise violated(t, "b->type == GGML_TYPE_I32")
    if mode & ROPE_TYPE.MROPE:
        if a.ne[2] * 4 != b.ne[0]:
            raise violated(t, "a->ne[2] * 4 == b->ne[0]", mode=mode)
    elif a.ne[2] != b.ne[0]:
        raise violated(t, "a->ne[2] == b->ne[0]", mode=mode)
    if c is not None:
        if c.type is not F32:
            raise violated(t, "c->type == GGML_TYPE_F32")
        if c.ne[0] < int(n_dims / 2):
            raise violated(t, "c->ne[0] >= n_dims / 2", n_dims=n_dims)
    return dup_or_inplace(t, a)


def _rope_limits(t: Tensor) -> None:
    """Check what `ggml_compute_forward_rope_flt` asserts."""
    n_dims, mode, sections, n_offs = t.params.n_dims, t.params.mode, t.params.sections, t.params.n_offs
    ne0 = t.ne[0]
    check(
        t,
        (0 <= n_dims <= ne0, "n_dims <= ne0"),
        (n_dims % 2 == 0, "n_dims % 2 == 0"),
        (n_offs >= 0, "n_offs >= 0"),
        (n_offs % 2 == 0, "n_offs % 2 == 0"),
        (n_offs + n_dims <= ne0, "n_offs + n_dims <= ne0"),
        n_dims=n_dims,
        mode=mode,
        n_offs=n_offs,
    )
    if not mode & ROPE_TYPE.MROPE:
        if any(sections):
            raise GraphError(f"sections {list(sections)} belong to mrope, mode {mode} is not")
    elif min(sections) < 0 or not any(s > 0 for s in sections[:3]):
        raise violated(t, "sections[0] > 0 || sections[1] > 0 || sections[2] > 0", sections=list(sections))
    if mode == ROPE_TYPE.VISION and (n_dims != ne0 // 2 or n_offs):
        raise violated(t, "n_dims == ne0/2 && n_offs == 0", n_dims=n_dims, n_offs=n_offs)


def _keep_sections(params: dict[str, Any]) -> None:
    """Drop `sections` unless the mode has several positions per token."""
    sections = params.get("sections", ())
    if sections and len(sections) != MROPE_SECTIONS:
        raise GraphError(f"sections: {MROPE_SECTIONS} numbers expected, {list(sections)} found")
    if not params["mode"] & ROPE_TYPE.MROPE:
        params["sections"] = ()


def _half_pairs(_: Tensor, n_dims: int) -> int:
    return n_dims // 4 * 2


def _rotated(_: Tensor, sections: tuple[int, ...]) -> tuple[int, ...]:
    return (*sections[1:3], sections[0], sections[3])


def _with_yarn(t: Tensor, value: float) -> float:
    """Halve a value that matters only if YaRN extrapolates."""
    return type(value)(value / 2) if t.params.ext_factor else value


ROPE = Op(
    "ROPE",
    "ROPE_BACK",
    src="a b c?",
    layout=_rope,
    limits=_rope_limits,
    rounding=Rounding(
        16384,
        why="sin and cos of an angle of up to some hundred turns",
        products=8.0,  # a kernel rounds what it rotates, its sines and its result, never the angles
        by="rope",
    ),
    params=(
        GAP,
        i32("n_dims", _half_pairs),
        enum("mode", ROPE_TYPE, swap("NORMAL", "NEOX")),
        GAP,
        i32("n_ctx_orig", _with_yarn),
        f32("freq_base", times(0.01)),
        f32("freq_scale"),
        f32("ext_factor"),
        f32("attn_factor", times(1.5)),
        f32("beta_fast", _with_yarn),
        f32("beta_slow", _with_yarn),
        vec("sections", MROPE_SECTIONS, _rotated),
        i32("n_offs", lambda _, n_offs: 0 if n_offs else 2),
    ),
    prepare=_keep_sections,
    after=(("rope_set_offset", "n_offs"),),
    work=Work(lambda t: 2 * nelements(t), lambda t: LOOP * t.ne[0]),
    not_by_weights=("ROPE",),  # frequency factors; ggml names no ROPE_BACK
)


class Rope:
    """Constructors of rotary position embedding; `mode` is a member of `ROPE_TYPE`."""

    @ROPE.constructor
    def rope_ext(
        self, a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
        freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float
    ) -> None:  # fmt: skip
        """Rotate `a` [head, heads, tokens] by positions `b` (I32); `c` [n_dims/2] divides angles."""

    rope_ext_inplace = rope_ext.inplace
    rope_ext_back = rope_ext.back

    @ROPE.constructor
    def rope_multi(
        self, a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, sections: tuple[int, ...], mode: int,
        n_ctx_orig: int, freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float,
        beta_fast: float, beta_slow: float
    ) -> None:  # fmt: skip
        """Apply `rope_ext` with four positions per token (`b` [4 * tokens]), split by `sections`."""

    rope_multi_inplace = rope_multi.inplace
    rope_multi_back = rope_multi.back

    @ROPE.variant(freq_base=10000.0, freq_scale=1.0, attn_factor=1.0)
    def rope(self, a: Tensor, b: Tensor, n_dims: int, mode: int) -> None:
        """Apply `rope_ext` with base 10000 and no scaling."""

    rope_inplace = rope.inplace

    def rope_set_offset(self, a: Tensor, n_offs: int) -> Tensor:
        """Rotate from element `n_offs` of each row on; return `a`."""
        if a.op not in ROPE.names:
            raise failed("a->op == GGML_OP_ROPE || a->op == GGML_OP_ROPE_BACK", (a,), op=a.op)
        if n_offs < 0:
            raise failed("n_offs >= 0", (a,), op=a.op, n_offs=n_offs)
        if a.params.mode == ROPE_TYPE.VISION:
            raise failed("mode != GGML_ROPE_TYPE_VISION", (a,), op=a.op)
        set_param(a, "n_offs", n_offs)
        return a
