"""Later uses of an op: an older library silently computes something else.

A row names the new use and a symbol that was added with it, such as the constructor for such nodes. Version numbers are
not used. If no symbol was added with a use, the row names the next symbol that was added later; so a build between the
two counts as one without the use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.ggml.ops.media.images import SCALE_FLAG, SCALE_MODE
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16


@dataclass(frozen=True, slots=True)
class Since:
    """A use of an op that was added later than the op."""

    use: str
    """Name of the use, such as `a bias`."""
    sign: str
    """Symbol without which a library does not know the use."""
    made: Callable[[Tensor], bool]
    """True if a node has this use."""


def _has(i: int) -> Callable[[Tensor], bool]:
    """Return a predicate: True if a node has source `i`."""
    return lambda t: len(t.src) > i and t.src[i] is not None


def _stacked(i: int) -> Callable[[Tensor], bool]:
    """Return a predicate: True if source `i` has more than one matrix."""
    return lambda t: len(t.src) > i and (s := t.src[i]) is not None and s.ne[2] * s.ne[3] > 1


def _other_rows(t: Tensor) -> bool:
    _, k, v = t.src[:3]
    return k is not None and v is not None and k.ne[0] != v.ne[0]


def _left(t: Tensor) -> bool:
    return any(t.params.padding[::2])


def _bicubic(t: Tensor) -> bool:
    return bool(t.params.mode & 0xFF == SCALE_MODE.BICUBIC)


def _aligned_nearest(t: Tensor) -> bool:
    return bool(t.params.mode == SCALE_MODE.NEAREST | SCALE_FLAG.ALIGN_CORNERS)


_ROPE = (
    Since("an offset", "ggml_rope_set_offset", lambda t: bool(t.params.n_offs)),
    Since("mode IMROPE", "ggml_cumsum", lambda t: t.params.mode == ROPE_TYPE.IMROPE),
)

SINCE: dict[str, tuple[Since, ...]] = {
    "SCALE": (Since("a bias", "ggml_scale_bias", lambda t: bool(t.params.b)),),
    "SOFT_MAX": (
        Since("sinks", "ggml_soft_max_add_sinks", _has(2)),
        Since("a mask of several matrices", "ggml_glu_op_name", _stacked(1)),
    ),
    "FLASH_ATTN_EXT": (
        Since("sinks", "ggml_flash_attn_ext_add_sinks", _has(4)),
        Since("a mask of several matrices", "ggml_glu_op_name", _stacked(3)),
        Since("V with other row sizes than K", "ggml_is_contiguously_allocated", _other_rows),
    ),
    "ROPE": _ROPE,
    "ROPE_BACK": _ROPE,
    "PAD": (
        Since("zeros before a dimension", "ggml_pad_ext", _left),
        Since("circular padding", "ggml_pad_ext_circular", lambda t: bool(t.params.circular)),
    ),
    "UPSCALE": (
        Since("mode BICUBIC", "ggml_cumsum", _bicubic),
        Since("aligned corners in mode NEAREST", "ggml_cumsum", _aligned_nearest),
        Since("antialias", "ggml_pad_ext_circular", lambda t: bool(t.params.mode & SCALE_FLAG.ANTIALIAS)),
    ),
    "SSM_SCAN": (
        Since("selected rows of states", "ggml_set_abort_callback", _has(6)),
        Since("more than one state kept", "ggml_rope_set_offset", lambda t: t.params.K > 1),
    ),
    "GATED_DELTA_NET": (Since("its states in this order", "ggml_col2im_1d", lambda _: True),),
    "DSV4_HC_PRE": (Since("gated weights", "ggml_dsv4_hc_pre_gated", lambda t: bool(t.params.gated)),),
    "DSV4_HC_POST": (Since("no comb", "ggml_dsv4_hc_pre_gated", lambda t: not _has(3)(t)),),
    "SET_ROWS": (Since("rows of F16", "ggml_col2im_1d", lambda t: (s := t.src[0]) is not None and s.type is F16),),
}
"""Op -> its later uses."""


def unknown_use(t: Tensor, exports: Callable[[str], bool]) -> str:
    """Return why a library with these symbols does not know the node's use of its op, or ""."""
    for row in SINCE.get(t.op, ()):
        if row.made(t) and not exports(row.sign):
            return f"{t.op} with {row.use} is not in this ggml (it exports no {row.sign})"
    return ""
