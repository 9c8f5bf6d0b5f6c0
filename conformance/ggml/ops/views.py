"""Leaves, views, copies, concatenation, parts of a tensor; `nb` and offsets in bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from conformance.ggml.tensor import (
    FLAG_INPUT,
    FLAG_OUTPUT,
    FLAG_PARAM,
    MAX_DIMS,
    Dims,
    Tensor,
    can_repeat,
    contiguous_nb,
    is_contiguous,
    is_empty,
    nbytes,
    nelements,
    row_size,
)
from conformance.ggml.types import F32, I32, GGMLType

from .fields import flag, i32, low32, u64, vec
from .op import (
    MOVES,
    ROUNDS,
    Constructor,
    Layout,
    Op,
    check,
    check_size,
    divides,
    dup_or_inplace,
    failed,
    fit_name,
    fresh,
    lay_out,
    operand,
    same_layout,
    view,
    view_tensor,
    violated,
)

STORES = replace(MOVES, by="quantize")


def _none(t: Tensor) -> Layout:
    """Lay out a leaf, or `ggml_view_tensor` of one."""
    return (t.type, t.ne, t.nb, t.view_src, t.view_offs) if t.view_src is not None else fresh(t.type, t.ne)


def view_offset(t: Tensor) -> int:
    """Return `params.offset` of a VIEW in bytes; fast, as every bound node needs it."""
    return (t.op_params[0] & 0xFFFFFFFF) | (t.op_params[1] & 0xFFFFFFFF) << 32


def _view(t: Tensor) -> Layout:
    """Lay out `ggml_view_1d` to `ggml_view_4d`; the caller chooses `ne` and `nb[1:]`."""
    a = operand(t)
    return view(t, a, t.ne, (a.type.type_size, *t.nb[1:]), view_offset(t))


def _reshape(t: Tensor) -> Layout:
    """Lay out `ggml_reshape*`; the caller chooses `ne`."""
    a = operand(t)
    if not is_contiguous(a):
        raise violated(t, "ggml_is_contiguous(a)")
    check_size(a.type, t.ne)
    if nelements(a) != nelements(t):
        raise violated(t, "ggml_nelements(a) == ne0*ne1*ne2*ne3", ne=list(t.ne))
    return view(t, a, t.ne, contiguous_nb(a.type, t.ne))


def _permute(t: Tensor) -> Layout:
    """Lay out `ggml_permute`: dimension i of `a` becomes dimension `axes[i]`."""
    a, axes = operand(t), t.params.axes
    if sorted(axes) != [0, 1, 2, 3]:  # find which of ggml's assertions breaks first
        broken = [f"axis{i} >= 0 && axis{i} < GGML_MAX_DIMS" for i, x in enumerate(axes) if not 0 <= x < MAX_DIMS]
        broken += [f"axis{i} != axis{j}" for i, j in combinations(range(MAX_DIMS), 2) if axes[i] == axes[j]]
        raise violated(t, broken[0], axes=list(axes))
    type_, ne, nb, root, offs = view_tensor(t, a)
    return type_, _scatter(ne, axes), _scatter(nb, axes), root, offs


def _scatter(values: Dims, axes: tuple[int, ...]) -> Dims:
    out = [0] * MAX_DIMS
    for axis, value in zip(axes, values, strict=True):
        out[axis] = value
    return (out[0], out[1], out[2], out[3])


def _transpose(t: Tensor) -> Layout:
    """Swap dimensions 0 and 1."""
    type_, ne, nb, root, offs = view_tensor(t, operand(t))
    return type_, (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3]), root, offs


def _cont(t: Tensor) -> Layout:
    """Copy `a` without gaps; `ggml_cont_1d` to `ggml_cont_4d` take `ne` from the caller."""
    a = operand(t)
    check_size(a.type, t.ne)
    if nelements(a) != nelements(t):
        raise violated(t, "ggml_nelements(a) == (ne0*ne1*ne2*ne3)", ne=list(t.ne))
    return fresh(a.type, t.ne)


def _cpy(t: Tensor) -> Layout:
    """Lay out `ggml_cpy` into `src[1]`, or `ggml_cast`, whose `src[1]` is the result itself."""
    a, b = operand(t), operand(t, 1)
    if b is t:
        return fresh(t.type, a.ne)
    if nelements(a) != nelements(b):
        raise violated(t, "ggml_nelements(a) == ggml_nelements(b)")
    return view_tensor(t, b)


def _concat(t: Tensor) -> Layout:
    """Lay out `ggml_concat` along `dim`."""
    a, b, dim = operand(t), operand(t, 1), t.params.dim
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
    """Lay out `ggml_repeat` and `ggml_repeat_4d`; the caller chooses `ne`."""
    a = operand(t)
    if not is_empty(a) and not all(divides(n, m) for n, m in zip(a.ne, t.ne, strict=True)):
        raise violated(t, "ggml_can_repeat(a, b)", ne=list(t.ne))
    return fresh(a.type, t.ne)


MAX_OFFSET = 1 << 30


def _set(t: Tensor) -> Layout:
    """Lay out `ggml_set` and `ggml_acc`: `b` replaces or is added to a part of `a`."""
    if not 0 <= t.params.offset < MAX_OFFSET:
        raise violated(t, "offset < (size_t)(1 << 30)", offset=t.params.offset)
    return dup_or_inplace(t, operand(t))


def part(t: Tensor) -> tuple[Dims, Dims, int]:
    """Return the part of `src[0]` that a SET or ACC changes: ne, nb and offset in bytes."""
    p = t.params
    return operand(t, 1).ne, (operand(t).type.type_size, p.nb1, p.nb2, p.nb3), p.offset


def _part_limits(t: Tensor) -> None:
    """Check what `ggml_compute_forward_set_f32` and `ggml_compute_forward_acc_f32` assert."""
    a, b = operand(t), operand(t, 1)
    ne, nb, offset = part(t)
    last = offset + sum((n - 1) * s for n, s in zip(ne, nb, strict=True) if n)
    check(
        t,
        (a.type is F32 or a.type is I32, "src0->type == GGML_TYPE_F32 || src0->type == GGML_TYPE_I32"),
        (b.type is a.type, "src1->type == src0->type"),
        (min(nb) >= 0 and last + nb[0] <= nbytes(t), "offset + (ne1 - 1)*nb <= ggml_nbytes(dst)"),
        (t.params.inplace == (t.view_src is not None), "op_params[4] says whether the result is a view"),
        part=[ne, nb, offset],
    )


def _elsewhere(t: Tensor, offset: int) -> int:
    """Return another offset for the part of a SET or ACC: the start, or one element further."""
    return 0 if offset else operand(t).type.type_size


NONE = Op("NONE", src="", layout=_none)
VIEW = Op("VIEW", src="a", layout=_view, params=(u64("offset"),), suffix="(view)")
RESHAPE = Op("RESHAPE", src="a", layout=_reshape, suffix="(reshaped)")
PERMUTE = Op(
    "PERMUTE",
    src="a",
    layout=_permute,
    params=(vec("axes", "axis0 axis1 axis2 axis3", always=True),),
    suffix="(permuted)",
)
TRANSPOSE = Op("TRANSPOSE", src="a", layout=_transpose, suffix="(transposed)")
CONT = Op("CONT", src="a", layout=_cont, rounding=STORES, suffix="(cont)")
CPY = Op("CPY", src="a b", layout=_cpy, rounding=STORES)
DUP = Op("DUP", src="a", layout=same_layout, rounding=STORES)
CONCAT = Op("CONCAT", src="a b", layout=_concat, params=(i32("dim", always=True),))
REPEAT = Op("REPEAT", src="a", layout=_repeat)
_PART = (*map(low32, ("nb1", "nb2", "nb3")), i32("offset", _elsewhere), flag("inplace"))
SET = Op(
    "SET", src="a b", layout=_set, asserts="ggml_nelements(a) >= ggml_nelements(b)", limits=_part_limits, params=_PART
)
ACC = Op(
    "ACC",
    src="a b",
    layout=_set,
    asserts="""
        ggml_nelements(b) <= ggml_nelements(a); ggml_is_contiguous(a);
        a->type == GGML_TYPE_F32; b->type == GGML_TYPE_F32
    """,
    limits=_part_limits,
    rounding=ROUNDS,
    params=_PART,
)


_Sizes1 = Constructor[[Tensor, int]]
_Sizes2 = Constructor[[Tensor, int, int]]
_Sizes3 = Constructor[[Tensor, int, int, int]]
_Sizes4 = Constructor[[Tensor, int, int, int, int]]


def _shaped(op: Op) -> tuple[_Sizes1, _Sizes2, _Sizes3, _Sizes4]:
    """Return the constructors that take `a` and one to four sizes: [ne0], [ne0, ne1], …."""
    sizes = ("a", "ne0", "ne1", "ne2", "ne3")
    one, two, three, four = (Constructor[Any](op, sizes[:n], {}, op.rule.__doc__) for n in (2, 3, 4, 5))
    return one, two, three, four


class Leaves:
    """Constructors of leaves, and the names and flags of tensors."""

    def new_tensor_1d(self, type_: GGMLType, ne0: int) -> Tensor:
        """Make a leaf of [ne0]."""
        return self.new_tensor_4d(type_, ne0, 1, 1, 1)

    def new_tensor_2d(self, type_: GGMLType, ne0: int, ne1: int) -> Tensor:
        """Make a leaf of [ne0, ne1]."""
        return self.new_tensor_4d(type_, ne0, ne1, 1, 1)

    def new_tensor_3d(self, type_: GGMLType, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Make a leaf of [ne0, ne1, ne2]."""
        return self.new_tensor_4d(type_, ne0, ne1, ne2, 1)

    def new_tensor_4d(self, type_: GGMLType, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Make a leaf of [ne0, ne1, ne2, ne3]; GraphError as `check_size`."""
        type_, ne, nb, _, _ = fresh(type_, (ne0, ne1, ne2, ne3))
        return Tensor(type_, ne, nb)

    def dup_tensor(self, src: Tensor) -> Tensor:
        """Make a leaf of `src`'s type and shape."""
        return self.new_tensor_4d(src.type, *src.ne)

    def view_tensor(self, src: Tensor) -> Tensor:
        """Make a NONE tensor over all of `src` with its strides."""
        t = Tensor(src.type, src.ne, src.nb, name=fit_name(f"{src.name} (view)"))
        t.view_src, t.view_offs = src.root, src.view_offs
        return t

    def set_name(self, tensor: Tensor, name: str) -> Tensor:
        """Name `tensor`, cut to 63 bytes; return it."""
        tensor.name = fit_name(name)
        return tensor

    def set_input(self, tensor: Tensor) -> None:
        """Flag a leaf as an input, set before each run: `ggml_set_input`."""
        if tensor.op != "NONE":
            raise failed("tensor->op == GGML_OP_NONE", (tensor,), op=tensor.op)
        tensor.flags |= FLAG_INPUT

    def set_param(self, tensor: Tensor) -> None:
        """Flag `tensor` as a parameter, which an optimiser may change: `ggml_set_param`."""
        if tensor.op != "NONE":
            raise failed("tensor->op == GGML_OP_NONE", (tensor,), op=tensor.op)
        tensor.flags |= FLAG_PARAM

    def set_output(self, tensor: Tensor) -> None:
        """Flag `tensor` and the owner of its bytes as never overwritten: `ggml_set_output`."""
        tensor.flags |= FLAG_OUTPUT
        tensor.root.flags |= FLAG_OUTPUT


class Views:
    """Constructors of the ops that move or reinterpret elements."""

    dup = DUP.of_a()
    dup_inplace = dup.inplace
    cont = CONT.of_a()
    cont_1d, cont_2d, cont_3d, cont_4d = _shaped(CONT)

    @CPY.form()
    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Store `a` into `b`'s bytes, converting to its type; a view of `b`."""
        t = CPY.node(a, b)
        t.name = fit_name(f"{b.name} (copy of {a.name})" if b.name else f"{a.name} (copy)")
        return t

    @CPY.form()
    def cast(self, a: Tensor, type_: GGMLType) -> Tensor:
        """Convert `a` to another type: a CPY whose `src[1]` is itself, as in ggml."""
        t = Tensor(type_, a.ne, a.nb, "CPY", name=fit_name(f"{a.name} (copy)"))
        t.src = (a, t)
        lay_out(t)
        return t

    def reshape(self, a: Tensor, b: Tensor) -> Tensor:
        """Reshape `a` to the shape of `b`."""
        return self.reshape_4d(a, *b.ne)

    reshape_1d, reshape_2d, reshape_3d, reshape_4d = _shaped(RESHAPE)

    @VIEW.form()
    def view_1d(self, a: Tensor, ne0: int, offset: int) -> Tensor:
        """View `ne0` elements of `a` from `offset` on."""
        nb1 = row_size(a.type, ne0)
        return self.view_4d(a, ne0, 1, 1, 1, nb1, nb1, nb1, offset)

    @VIEW.form()
    def view_2d(self, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
        """View [ne0, ne1] of `a` from byte `offset` on, with a row stride of `nb1` bytes."""
        return self.view_4d(a, ne0, ne1, 1, 1, nb1, nb1 * ne1, nb1 * ne1, offset)

    @VIEW.form()
    def view_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
        """View [ne0, ne1, ne2] of `a` from `offset` on, with these strides."""
        return self.view_4d(a, ne0, ne1, ne2, 1, nb1, nb2, nb2 * ne2, offset)

    @VIEW.constructor
    def view_4d(
        self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int
    ) -> None:
        """View [ne0, ne1, ne2, ne3] of `a` from `offset` on, with these strides.

        GraphError if that many elements do not fit after the offset. As in ggml, the strides are not checked;
        `Graph.validate` checks that a view stays inside its buffer.
        """

    @PERMUTE.constructor
    def permute(self, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> None:
        """Move dimension i of `a` to dimension axis_i."""

    transpose = TRANSPOSE.of_a()

    @CONCAT.constructor
    def concat(self, a: Tensor, b: Tensor, dim: int) -> None:
        """Concatenate `a` and `b` along `dim`."""

    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """Repeat `a` to the shape of `b`."""
        if not can_repeat(a, b):
            raise failed("ggml_can_repeat(a, b)", (a, b))
        return self.repeat_4d(a, *b.ne)

    @REPEAT.constructor
    def repeat_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> None:
        """Repeat `a` to [ne0, ne1, ne2, ne3]."""

    @SET.constructor
    def set(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> None:
        """Replace the part of `a` at these strides and this offset, in bytes, by `b`."""

    set_inplace = set.inplace  # noqa: A003  # the constructor above has ggml's name

    def set_1d(self, a: Tensor, b: Tensor, offset: int) -> Tensor:
        """Apply `set` with `a`'s own strides."""
        return self.set(a, b, *a.nb[1:], offset)

    def set_1d_inplace(self, a: Tensor, b: Tensor, offset: int) -> Tensor:
        """Apply `set_1d` in `a`'s bytes."""
        return self.set_inplace(a, b, *a.nb[1:], offset)

    def set_2d(self, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
        """Apply `set` with `a`'s own strides except the row stride."""
        return self.set(a, b, nb1, *a.nb[2:], offset)

    def set_2d_inplace(self, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
        """Apply `set_2d` in `a`'s bytes."""
        return self.set_inplace(a, b, nb1, *a.nb[2:], offset)

    @ACC.constructor
    def acc(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> None:
        """Add `b` to the part of `a` at these strides and this offset, in bytes."""

    acc_inplace = acc.inplace
