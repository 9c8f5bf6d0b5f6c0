"""Rules of the ops that move or reinterpret elements: views, copies, concatenation, rows."""

from __future__ import annotations

from itertools import combinations

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import (
    MAX_DIMS,
    Dims,
    Tensor,
    contiguous_nb,
    is_contiguous,
    is_contiguous_rows,
    is_empty,
    nelements,
)
from conformance.ggml.types import F16, F32, I32, I64

from .rules_base import (
    Layout,
    Rule,
    check_size,
    divides,
    dup_or_inplace,
    fresh,
    operand,
    view,
    view_tensor,
    violated,
)


def _none(t: Tensor) -> Layout:
    """A leaf, or `ggml_view_tensor` of one."""
    return (t.type, t.ne, t.nb, t.view_src, t.view_offs) if t.view_src is not None else fresh(t.type, t.ne)


def view_offset(t: Tensor) -> int:
    """Bytes from the start of `src[0]`: the size_t that `ggml_view_impl` stores in `op_params[0:2]`."""
    return (t.op_params[0] & 0xFFFFFFFF) | (t.op_params[1] & 0xFFFFFFFF) << 32


def _view(t: Tensor) -> Layout:
    """`ggml_view_1d` to `ggml_view_4d`: `ne` and `nb[1:]` are the caller's."""
    a = operand(t)
    return view(t, a, t.ne, (a.type.type_size, *t.nb[1:]), view_offset(t))


def _reshape(t: Tensor) -> Layout:
    """`ggml_reshape*`: `ne` is the caller's."""
    a = operand(t)
    if not is_contiguous(a):
        raise violated(t, "ggml_is_contiguous(a)")
    check_size(a.type, t.ne)
    if nelements(a) != nelements(t):
        raise violated(t, "ggml_nelements(a) == ne0*ne1*ne2*ne3", ne=list(t.ne))
    return view(t, a, t.ne, contiguous_nb(a.type, t.ne))


def _permute(t: Tensor) -> Layout:
    """`ggml_permute`: dimension i of `a` becomes dimension `op_params[i]`."""
    a, axes = operand(t), t.op_params[:MAX_DIMS]
    if sorted(axes) != [0, 1, 2, 3]:
        raise _axes_violated(t, axes)
    type_, ne, nb, root, offs = view_tensor(t, a)
    return type_, _scatter(ne, axes), _scatter(nb, axes), root, offs


def _axes_violated(t: Tensor, axes: tuple[int, ...]) -> GraphError:
    """The first assertion of `ggml_permute` that `axes`, no permutation, break."""
    broken = [f"axis{i} >= 0 && axis{i} < GGML_MAX_DIMS" for i, x in enumerate(axes) if not 0 <= x < MAX_DIMS]
    broken += [f"axis{i} != axis{j}" for i, j in combinations(range(MAX_DIMS), 2) if axes[i] == axes[j]]
    return violated(t, broken[0], axes=list(axes))


def _scatter(values: Dims, axes: tuple[int, ...]) -> Dims:
    out = [0] * MAX_DIMS
    for axis, value in zip(axes, values, strict=True):
        out[axis] = value
    return (out[0], out[1], out[2], out[3])


def _transpose(t: Tensor) -> Layout:
    """`ggml_transpose`: dimensions 0 and 1 swapped."""
    type_, ne, nb, root, offs = view_tensor(t, operand(t))
    return type_, (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3]), root, offs


def _cont(t: Tensor) -> Layout:
    """`ggml_cont`, `ggml_cont_1d` to `ggml_cont_4d`: `ne` is the caller's."""
    a = operand(t)
    check_size(a.type, t.ne)
    if nelements(a) != nelements(t):
        raise violated(t, "ggml_nelements(a) == (ne0*ne1*ne2*ne3)", ne=list(t.ne))
    return fresh(a.type, t.ne)


def _cpy(t: Tensor) -> Layout:
    """`ggml_cpy` into `src[1]`; or `ggml_cast`, whose `src[1]` is the result itself and whose type is the caller's."""
    a, b = operand(t), operand(t, 1)
    if b is t:
        return fresh(t.type, a.ne)
    if nelements(a) != nelements(b):
        raise violated(t, "ggml_nelements(a) == ggml_nelements(b)")
    return view_tensor(t, b)


def _dup(t: Tensor) -> Layout:
    """`ggml_dup`, `ggml_dup_inplace`."""
    return dup_or_inplace(t, operand(t))


def _concat(t: Tensor) -> Layout:
    """`ggml_concat` along `op_params[0]`."""
    a, b, dim = operand(t), operand(t, 1), t.op_params[0]
    if not 0 <= dim < MAX_DIMS:
        raise violated(t, "dim >= 0 && dim < GGML_MAX_DIMS", dim=dim)
    if a.type is not b.type:
        raise violated(t, "a->type == b->type")
    ne = list(a.ne)
    for d in range(MAX_DIMS):
        if d == dim:
            ne[d] += b.ne[d]
        elif a.ne[d] != b.ne[d]:
            raise violated(t, "a->ne[d] == b->ne[d]", d=d, dim=dim)
    return fresh(a.type, (ne[0], ne[1], ne[2], ne[3]))


def _repeat(t: Tensor) -> Layout:
    """`ggml_repeat`, `ggml_repeat_4d`: `ne` is the caller's."""
    a = operand(t)
    if not is_empty(a) and not all(divides(n, m) for n, m in zip(a.ne, t.ne, strict=True)):
        raise violated(t, "ggml_can_repeat(a, b)", ne=list(t.ne))
    return fresh(a.type, t.ne)


def _get_rows(t: Tensor) -> Layout:
    """`ggml_get_rows`: rows of `a` by the I32 indices of `b`, as F32 (I32 stays I32)."""
    a, b = operand(t), operand(t, 1)
    if a.ne[2] != b.ne[1]:
        raise violated(t, "a->ne[2] == b->ne[1]")
    if a.ne[3] != b.ne[2]:
        raise violated(t, "a->ne[3] == b->ne[2]")
    if b.ne[3] != 1:
        raise violated(t, "b->ne[3] == 1")
    if b.type is not I32:
        raise violated(t, "b->type == GGML_TYPE_I32")
    return fresh(I32 if a.type is I32 else F32, (a.ne[0], b.ne[0], b.ne[1], b.ne[2]))


def _set_rows(t: Tensor) -> Layout:
    """`ggml_set_rows(a, b, c)`: rows `b` into `a` at indices `c`; `src` is (b, c, a)."""
    b, c, a = operand(t), operand(t, 1), operand(t, 2)
    for holds, assertion in (
        (a.ne[0] == b.ne[0], "a->ne[0] == b->ne[0]"),
        (a.ne[2] == b.ne[2], "a->ne[2] == b->ne[2]"),
        (a.ne[3] == b.ne[3], "a->ne[3] == b->ne[3]"),
        (b.ne[1] == c.ne[0], "b->ne[1] == c->ne[0]"),
        (divides(c.ne[1], b.ne[2]), "b->ne[2] % c->ne[1] == 0"),
        (divides(c.ne[2], b.ne[3]), "b->ne[3] % c->ne[2] == 0"),
        (c.ne[3] == 1, "c->ne[3] == 1"),
        (b.type is F32 or b.type is F16, "b->type == GGML_TYPE_F32 || b->type == GGML_TYPE_F16"),
        (c.type is I64 or c.type is I32, "c->type == GGML_TYPE_I64 || c->type == GGML_TYPE_I32"),
        (is_contiguous_rows(a), "ggml_is_contiguous_rows(a)"),
        (is_contiguous_rows(b), "ggml_is_contiguous_rows(b)"),
    ):
        if not holds:
            raise violated(t, assertion)
    return view_tensor(t, a)


def _pad(t: Tensor) -> Layout:
    """`ggml_pad_ext`: `op_params[2*i]` elements before and `op_params[2*i+1]` after dimension i; [8]: circular."""
    a, p = operand(t), t.op_params
    ne = [a.ne[i] + p[2 * i] + p[2 * i + 1] for i in range(MAX_DIMS)]
    return fresh(a.type, (ne[0], ne[1], ne[2], ne[3]))


def _pad_runs(t: Tensor) -> None:
    if min(t.op_params[:8]) < 0 or t.op_params[8] not in (0, 1):
        raise GraphError(f"padding must not be negative and circular 0 or 1: {list(t.op_params[:9])}")


LAYOUT_RULES: dict[str, Rule] = {
    "NONE": Rule(_none, 0),
    "VIEW": Rule(_view, n_params=2),
    "RESHAPE": Rule(_reshape),
    "PERMUTE": Rule(_permute, n_params=4),
    "TRANSPOSE": Rule(_transpose),
    "CONT": Rule(_cont),
    "CPY": Rule(_cpy, 2),
    "DUP": Rule(_dup),
    "CONCAT": Rule(_concat, 2, n_params=1),
    "REPEAT": Rule(_repeat),
    "GET_ROWS": Rule(_get_rows, 2),
    "SET_ROWS": Rule(_set_rows, 3),
    "PAD": Rule(_pad, n_params=9, runs=_pad_runs),
}
