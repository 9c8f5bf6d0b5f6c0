"""Constructors of leaves and of the ops that move or reinterpret elements."""

from __future__ import annotations

from conformance.ggml.tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor, can_repeat, row_size
from conformance.ggml.types import GGMLType

from .build_base import fit_name, int32, lay_out, node, pad_params
from .rules_base import failed, fresh


class LayoutOps:
    """Leaves, views, copies, `concat`, `repeat`, rows, `pad`. `ne` in elements, `nb` and offsets in bytes."""

    def new_tensor_1d(self, type_: GGMLType, ne0: int) -> Tensor:
        """A leaf of [ne0]."""
        return self.new_tensor_4d(type_, ne0, 1, 1, 1)

    def new_tensor_2d(self, type_: GGMLType, ne0: int, ne1: int) -> Tensor:
        """A leaf of [ne0, ne1]."""
        return self.new_tensor_4d(type_, ne0, ne1, 1, 1)

    def new_tensor_3d(self, type_: GGMLType, ne0: int, ne1: int, ne2: int) -> Tensor:
        """A leaf of [ne0, ne1, ne2]."""
        return self.new_tensor_4d(type_, ne0, ne1, ne2, 1)

    def new_tensor_4d(self, type_: GGMLType, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """A leaf of [ne0, ne1, ne2, ne3].

        Raises:
            GraphError: ne0 is no multiple of the block, a dimension is negative, or the elements overflow an int64.
        """
        type_, ne, nb, _, _ = fresh(type_, (ne0, ne1, ne2, ne3))
        return Tensor(type_, ne, nb)

    def dup_tensor(self, src: Tensor) -> Tensor:
        """A leaf of `src`'s type and shape."""
        return self.new_tensor_4d(src.type, *src.ne)

    def view_tensor(self, src: Tensor) -> Tensor:
        """A NONE tensor over all of `src`, its strides kept."""
        t = Tensor(src.type, src.ne, src.nb, name=fit_name(f"{src.name} (view)"))
        t.view_src, t.view_offs = src.root, src.view_offs
        return t

    def set_name(self, tensor: Tensor, name: str) -> Tensor:
        """Name `tensor`, cut to 63 bytes; gives it back."""
        tensor.name = fit_name(name)
        return tensor

    def set_input(self, tensor: Tensor) -> None:
        """Flag a leaf as filled per run: `ggml_set_input`."""
        if tensor.op != "NONE":
            raise failed("tensor->op == GGML_OP_NONE", (tensor,), op=tensor.op)
        tensor.flags |= FLAG_INPUT

    def set_output(self, tensor: Tensor) -> None:
        """Flag `tensor` and the owner of its bytes as never overwritten: `ggml_set_output`."""
        tensor.flags |= FLAG_OUTPUT
        tensor.root.flags |= FLAG_OUTPUT

    def dup(self, a: Tensor) -> Tensor:
        """A contiguous copy."""
        return node("DUP", (a,))

    def dup_inplace(self, a: Tensor) -> Tensor:
        """A copy of `a` onto itself."""
        return node("DUP", (a,), inplace=True)

    def cont(self, a: Tensor) -> Tensor:
        """`a` with its gaps closed."""
        return node("CONT", (a,), suffix="(cont)")

    def cont_1d(self, a: Tensor, ne0: int) -> Tensor:
        """`cont` of another shape of as many elements."""
        return self.cont_4d(a, ne0, 1, 1, 1)

    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """`cont` of another shape of as many elements."""
        return self.cont_4d(a, ne0, ne1, 1, 1)

    def cont_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """`cont` of another shape of as many elements."""
        return self.cont_4d(a, ne0, ne1, ne2, 1)

    def cont_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """`cont` of another shape of as many elements."""
        return node("CONT", (a,), ne=(ne0, ne1, ne2, ne3), suffix="(cont)")

    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Store `a` into `b`'s bytes, converting to its type; a view of `b`."""
        t = node("CPY", (a, b))
        t.name = fit_name(f"{b.name} (copy of {a.name})" if b.name else f"{a.name} (copy)")
        return t

    def cast(self, a: Tensor, type_: GGMLType) -> Tensor:
        """`a` as another type: a CPY whose `src[1]` is itself, as in ggml."""
        t = Tensor(type_, a.ne, a.nb, "CPY", name=fit_name(f"{a.name} (copy)"))
        t.src = (a, t)
        lay_out(t)
        return t

    def reshape(self, a: Tensor, b: Tensor) -> Tensor:
        """`a` in the shape of `b`."""
        return self.reshape_4d(a, *b.ne)

    def reshape_1d(self, a: Tensor, ne0: int) -> Tensor:
        """`a`, contiguous, as [ne0]."""
        return self.reshape_4d(a, ne0, 1, 1, 1)

    def reshape_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """`a`, contiguous, as [ne0, ne1]."""
        return self.reshape_4d(a, ne0, ne1, 1, 1)

    def reshape_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """`a`, contiguous, as [ne0, ne1, ne2]."""
        return self.reshape_4d(a, ne0, ne1, ne2, 1)

    def reshape_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """`a`, contiguous, as [ne0, ne1, ne2, ne3]."""
        return node("RESHAPE", (a,), ne=(ne0, ne1, ne2, ne3), suffix="(reshaped)")

    def view_1d(self, a: Tensor, ne0: int, offset: int) -> Tensor:
        """`ne0` elements of `a` from `offset` on."""
        nb1 = row_size(a.type, ne0)
        return self.view_4d(a, ne0, 1, 1, 1, nb1, nb1, nb1, offset)

    def view_2d(self, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
        """[ne0, ne1] of `a` from `offset` on, rows `nb1` apart."""
        return self.view_4d(a, ne0, ne1, 1, 1, nb1, nb1 * ne1, nb1 * ne1, offset)

    def view_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
        """[ne0, ne1, ne2] of `a` from `offset` on, with these strides."""
        return self.view_4d(a, ne0, ne1, ne2, 1, nb1, nb2, nb2 * ne2, offset)

    def view_4d(
        self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int
    ) -> Tensor:
        """[ne0, ne1, ne2, ne3] of `a` from `offset` on, with these strides.

        Raises:
            GraphError: so many elements do not fit behind the offset. As in ggml the strides are not looked at; that a
                view stays inside its buffer is `Graph.validate`'s to see.
        """
        params = pad_params((int32(offset), int32(offset >> 32)))
        return node("VIEW", (a,), params, ne=(ne0, ne1, ne2, ne3), nb=(0, nb1, nb2, nb3), suffix="(view)")

    def permute(self, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
        """Dimension i of `a` becomes dimension axis_i."""
        return node("PERMUTE", (a,), (axis0, axis1, axis2, axis3), suffix="(permuted)")

    def transpose(self, a: Tensor) -> Tensor:
        """Dimensions 0 and 1 swapped."""
        return node("TRANSPOSE", (a,), suffix="(transposed)")

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """`b` after `a` along `dim`."""
        return node("CONCAT", (a, b), (dim,))

    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """`a` repeated to the shape of `b`."""
        if not can_repeat(a, b):
            raise failed("ggml_can_repeat(a, b)", (a, b))
        return self.repeat_4d(a, *b.ne)

    def repeat_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """`a` repeated to [ne0, ne1, ne2, ne3]."""
        return node("REPEAT", (a,), ne=(ne0, ne1, ne2, ne3))

    def get_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows `b` (I32 [n, s2, s3]) of `a` [m, rows, s2, s3]: F32 [m, n, s2, s3], I32 of an I32 `a`."""
        return node("GET_ROWS", (a, b))

    def set_rows(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Store the rows `b` [m, n, s2, s3] into `a` [m, rows, s2, s3] at the indices `c`; a view of `a`."""
        t = node("SET_ROWS", (b, c, a))
        t.name = fit_name(f"{a.name} (view)")
        return t

    def pad(self, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
        """`p_i` zeros after dimension i."""
        return self.pad_ext(a, 0, p0, 0, p1, 0, p2, 0, p3)

    def pad_ext(
        self, a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int
    ) -> Tensor:
        """`lp_i` zeros before and `rp_i` after dimension i."""
        return node("PAD", (a,), (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3))
