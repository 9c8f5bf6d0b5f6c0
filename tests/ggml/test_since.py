"""What ops learnt late, and that a library too old for it is told by its symbols."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.ggml.lib.since import SINCE, unknown_use
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.media.images import SCALE_FLAG, SCALE_MODE
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, F32, I32

g = Builder()
NEAREST, BILINEAR, BICUBIC = SCALE_MODE
CORNERS = SCALE_FLAG.ALIGN_CORNERS


def _rope(mode: int, offset: int = 0) -> Tensor:
    a, b = g.new_tensor_3d(F32, 64, 2, 3), g.new_tensor_1d(I32, 12 if mode == ROPE_TYPE.IMROPE else 3)
    if mode == ROPE_TYPE.IMROPE:
        return g.rope_multi(a, b, None, 32, (8, 8, 8, 8), mode, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
    node = g.rope(a, b, 32, mode)
    return g.rope_set_offset(node, offset) if offset else node


def _soft_max(sinks: bool, matrices: int = 1) -> Tensor:
    node = g.soft_max_ext(g.new_tensor_3d(F32, 8, 4, 2), g.new_tensor_3d(F16, 8, 4, matrices), 1.0, 0.0)
    if sinks:
        g.soft_max_add_sinks(node, g.new_tensor_1d(F32, 2))
    return node


def _flash_attn(sinks: bool, matrices: int = 1, dv: int = 64) -> Tensor:
    q, k, v = g.new_tensor_3d(F32, 64, 4, 2), g.new_tensor_3d(F16, 64, 8, 2), g.new_tensor_3d(F16, dv, 8, 2)
    node = g.flash_attn_ext(q, k, v, g.new_tensor_3d(F16, 8, 64, matrices), 1.0, 0.0, 0.0)
    if sinks:
        g.flash_attn_ext_add_sinks(node, g.new_tensor_1d(F32, 2))
    return node


def _pad(left: int) -> Tensor:
    return g.pad_ext(g.new_tensor_2d(F32, 4, 4), left, 1, 0, 0, 0, 0, 0, 0)


def _upscale(mode: int) -> Tensor:
    return g.interpolate(g.new_tensor_2d(F32, 4, 4), 6, 6, 1, 1, mode)


def _set_rows(of: str) -> Tensor:
    rows = g.new_tensor_2d(F16 if of == "f16" else F32, 8, 2)
    return g.set_rows(g.new_tensor_2d(F16, 8, 4), rows, g.new_tensor_1d(I32, 2))


a = g.new_tensor_2d(F32, 4, 4)
NEW: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], str]] = {
    "SCALE": (lambda: g.scale_bias(a, 2.0, 1.0), lambda: g.scale(a, 2.0), "ggml_scale_bias"),
    "sinks of SOFT_MAX": (lambda: _soft_max(True), lambda: _soft_max(False), "ggml_soft_max_add_sinks"),
    "masks of SOFT_MAX": (lambda: _soft_max(False, 2), lambda: _soft_max(False), "ggml_glu_op_name"),
    "sinks of FLASH_ATTN_EXT": (lambda: _flash_attn(True), lambda: _flash_attn(False), "ggml_flash_attn_ext_add_sinks"),
    "masks of FLASH_ATTN_EXT": (lambda: _flash_attn(False, 2), lambda: _flash_attn(False), "ggml_glu_op_name"),
    "V of FLASH_ATTN_EXT": (
        lambda: _flash_attn(False, dv=32),
        lambda: _flash_attn(False),
        "ggml_is_contiguously_allocated",
    ),
    "offset of ROPE": (lambda: _rope(ROPE_TYPE.NEOX, 16), lambda: _rope(ROPE_TYPE.NEOX), "ggml_rope_set_offset"),
    "IMROPE": (lambda: _rope(ROPE_TYPE.IMROPE), lambda: _rope(ROPE_TYPE.NORMAL), "ggml_cumsum"),
    "PAD": (lambda: _pad(1), lambda: _pad(0), "ggml_pad_ext"),
    "BICUBIC of UPSCALE": (lambda: _upscale(BICUBIC), lambda: _upscale(BILINEAR), "ggml_cumsum"),
    "corners of UPSCALE": (lambda: _upscale(NEAREST | CORNERS), lambda: _upscale(NEAREST), "ggml_cumsum"),
    "antialias of UPSCALE": (
        lambda: _upscale(BILINEAR | SCALE_FLAG.ANTIALIAS),
        lambda: _upscale(BILINEAR | CORNERS),
        "ggml_pad_ext_circular",
    ),
    "SET_ROWS": (lambda: _set_rows("f16"), lambda: _set_rows("f32"), "ggml_col2im_1d"),
}


@pytest.mark.parametrize("name", NEW)
def test_a_use_is_told_by_its_symbol(name: str) -> None:
    """A library without the sign is too old for the new use of an op, with it it is not, and the old use needs none."""
    new, old, sign = NEW[name]
    why = unknown_use(new(), lambda symbol: symbol != sign)
    assert why.startswith(new().op)
    assert f"it exports no {sign}" in why
    assert unknown_use(new(), lambda _: True) == ""
    assert unknown_use(old(), lambda symbol: symbol != sign) == ""


def test_every_sign_is_a_symbol_of_ggml() -> None:
    """A sign is spelled as a C function of ggml is, and stands for an op that exists here."""
    for op, rows in SINCE.items():
        assert rows
        assert all(row.sign.startswith("ggml_") and row.sign.isidentifier() for row in rows), op
