"""Which constructor of ggml made a node, and with which arguments: what a snippet in any language is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from conformance.case.case import writes_in_place
from conformance.ggml.errors import GraphError
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.ops.rules_layout import view_offset
from conformance.ggml.tensor import MAX_DIMS, Tensor
from conformance.ggml.types import GGMLType

Argument = Tensor | GGMLType | float | int | bool | tuple[int, ...] | None
_B = Builder()


@dataclass(frozen=True, slots=True)
class Call:
    """One constructor as `ggml.h` has it, without the context; `after` are calls that take the result first."""

    name: str
    args: tuple[Argument, ...]
    after: tuple[tuple[str, tuple[Argument, ...]], ...] = ()


_PLAIN = {
    name.upper(): name
    for name in (
        *("add", "sub", "mul", "div", "add1", "sqr", "sqrt", "log", "sin", "cos", "sum", "sum_rows", "mean", "cumsum"),
        *("argmax", "dup", "cont", "transpose", "get_rows", "mul_mat_id", "add_id", "ssm_conv"),
    )
}
"""Op -> the constructor that takes its src and nothing else."""

_PARAMS: dict[str, tuple[str, str]] = {
    "RMS_NORM": ("rms_norm", "f"),
    "NORM": ("norm", "f"),
    "L2_NORM": ("l2_norm", "f"),
    "GROUP_NORM": ("group_norm", "if"),
    "CLAMP": ("clamp", "ff"),
    "DIAG_MASK_INF": ("diag_mask_inf", "i"),
    "DIAG_MASK_ZERO": ("diag_mask_zero", "i"),
    "FILL": ("fill", "f"),
    "ARANGE": ("arange", "fff"),
    "CONCAT": ("concat", "i"),
    "PERMUTE": ("permute", "iiii"),
    "ARGSORT": ("argsort", "i"),
    "SCALE": ("scale_bias", "ff"),
    "PAD": ("pad_ext", "iiiiiiii"),
}
"""Op -> the constructor that takes its src and then `op_params` in order: i an int, f a float."""


def call_of(t: Tensor) -> Call | None:
    """The constructor that gives `t` over its src; None where none is known to give exactly it."""
    for call in _proposals(t):
        with suppress(GraphError, ValueError, IndexError):
            made = perform(call)
            src = tuple(t if s is made else s for s in made.src)
            if (made.op, made.type, made.ne, made.nb, made.op_params, made.view_src, made.view_offs, src) == (
                *(t.op, t.type, t.ne, t.nb, t.op_params, t.view_src, t.view_offs),
                t.src,
            ):
                return call
    return None


def perform(call: Call) -> Tensor:
    """Make the call: a tensor.

    Raises:
        GraphError: with the assertion of ggml that the arguments break.
    """
    made: Tensor = getattr(_B, call.name)(*call.args)
    for name, args in call.after:
        getattr(_B, name)(made, *args)
    return made


def _proposals(t: Tensor) -> Iterator[Call]:
    inplace = "_inplace" if writes_in_place(t) else ""
    src = t.src
    if t.op in _PLAIN:
        yield Call(_PLAIN[t.op] + inplace if hasattr(_B, _PLAIN[t.op] + inplace) else _PLAIN[t.op], src)
    if t.op in _PARAMS:
        name, kinds = _PARAMS[t.op]
        read = {"i": t.param_i32, "f": t.param_f32}
        yield Call(name + inplace, (*src, *(read[k](i) for i, k in enumerate(kinds))))
    if t.op in _SPECIAL:
        yield from _SPECIAL[t.op](t, inplace)


def _unary(t: Tensor, inplace: str) -> Iterator[Call]:
    name = UNARY_OPS[t.op_params[0]].lower()
    if name != "xielu" and hasattr(_B, name + inplace):  # its parameters are stored as other numbers than were given
        yield Call(name + inplace, t.src)


def _glu(t: Tensor, _: str) -> Iterator[Call]:
    name = GLU_OPS[t.op_params[0]].lower()
    both = t.src if len(t.src) > 1 else (*t.src, None)
    if name == "swiglu_oai":
        yield Call("swiglu_oai", (*both, t.param_f32(2), t.param_f32(3)))
    elif name == "swiglu_clamp":
        yield Call("swiglu_clamp", (*both, t.param_f32(3)))
    else:
        kind = "_split" if len(t.src) > 1 else "_swapped" if t.op_params[1] else ""
        yield Call(name + kind, t.src)


def _dims(t: Tensor) -> int:
    return max((d + 1 for d in range(MAX_DIMS) if t.ne[d] != 1), default=1)


def _view(t: Tensor, _: str) -> Iterator[Call]:
    for n in range(_dims(t), MAX_DIMS + 1):
        yield Call(f"view_{n}d", (t.src[0], *t.ne[:n], *t.nb[1:n], view_offset(t)))


def _reshape(t: Tensor, _: str) -> Iterator[Call]:
    n = _dims(t)
    yield Call(f"reshape_{n}d", (t.src[0], *t.ne[:n]))


def _cont(t: Tensor, _: str) -> Iterator[Call]:
    n = _dims(t)
    yield Call(f"cont_{n}d", (t.src[0], *t.ne[:n]))


def _cpy(t: Tensor, _: str) -> Iterator[Call]:
    yield Call("cast", (t.src[0], t.type)) if t.src[1] is t else Call("cpy", t.src)


def _repeat(t: Tensor, _: str) -> Iterator[Call]:
    yield Call("repeat_4d", (t.src[0], *t.ne))


def _set_rows(t: Tensor, _: str) -> Iterator[Call]:
    yield Call("set_rows", (t.src[2], t.src[0], t.src[1]))


def _scale(t: Tensor, inplace: str) -> Iterator[Call]:
    yield Call("scale" + inplace, (*t.src, t.param_f32(0)))


def _leaky_relu(t: Tensor, inplace: str) -> Iterator[Call]:
    yield Call("leaky_relu", (*t.src, t.param_f32(0), bool(inplace)))


def _mul_mat(t: Tensor, _: str) -> Iterator[Call]:
    after: tuple[tuple[str, tuple[Argument, ...]], ...] = ()
    if t.op_params[0]:
        after += (("prec_set_acc", (t.op_params[0],)),)
    if t.op_params[3]:
        after += (("prec_set_src", (t.op_params[3], 1)),)
    if t.op_params[1]:
        after += (("mul_mat_set_hint", (t.op_params[1],)),)
    yield Call("mul_mat" if t.op == "MUL_MAT" else "mul_mat_id", t.src, after)


def _soft_max(t: Tensor, inplace: str) -> Iterator[Call]:
    a, mask, sinks = (*t.src, None, None)[:3]
    after = (("soft_max_add_sinks", (sinks,)),) if sinks is not None else ()
    yield Call("soft_max_ext" + inplace, (a, mask, t.param_f32(0), t.param_f32(1)), after)


def _rope(t: Tensor, inplace: str) -> Iterator[Call]:
    a, b, c = (*t.src, None)[:3]
    floats = tuple(t.param_f32(i) for i in range(5, 11))
    after = (("rope_set_offset", (t.op_params[15],)),) if t.op_params[15] else ()
    n_dims, mode, n_ctx_orig = t.op_params[1], t.op_params[2], t.op_params[4]
    if mode & ROPE_TYPE["MROPE"]:
        sections = t.op_params[11:15]
        yield Call("rope_multi" + inplace, (a, b, c, n_dims, sections, mode, n_ctx_orig, *floats), after)
    else:
        yield Call("rope_ext" + inplace, (a, b, c, n_dims, mode, n_ctx_orig, *floats), after)


def _flash_attn_ext(t: Tensor, _: str) -> Iterator[Call]:
    q, k, v, mask, sinks = (*t.src, None, None)[:5]
    after: tuple[tuple[str, tuple[Argument, ...]], ...] = ()
    if t.op_params[3]:
        after += (("prec_set_acc", (t.op_params[3],)),)
    if t.op_params[4]:
        after += (("flash_attn_ext_set_n_kv_max", (t.op_params[4],)),)
    if sinks is not None:
        after += (("flash_attn_ext_add_sinks", (sinks,)),)
    yield Call("flash_attn_ext", (q, k, v, mask, *(t.param_f32(i) for i in range(3))), after)


def _top_k(t: Tensor, _: str) -> Iterator[Call]:
    yield Call("top_k", (t.src[0], t.ne[0]))


_SPECIAL: dict[str, Callable[[Tensor, str], Iterator[Call]]] = {
    "UNARY": _unary,
    "GLU": _glu,
    "VIEW": _view,
    "RESHAPE": _reshape,
    "CONT": _cont,
    "CPY": _cpy,
    "REPEAT": _repeat,
    "SET_ROWS": _set_rows,
    "SCALE": _scale,
    "LEAKY_RELU": _leaky_relu,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat,
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "FLASH_ATTN_EXT": _flash_attn_ext,
    "TOP_K": _top_k,
}
"""Op -> the constructors that may have made it."""
