"""What every op rule is made of: the layout a constructor gives its result, and how a violated assertion reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Dims, Tensor, contiguous_nb, nbytes, row_size
from conformance.ggml.types import F32, GGMLType

Layout = tuple[GGMLType, Dims, Dims, Tensor | None, int]
"""What a constructor decides of its result: type, ne, nb, view_src, view_offs."""

Rows = tuple[tuple[bool, str], ...]
"""Conditions and the assertions of ggml that state them."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Rule:
    """One op: how many `src` and `op_params` it has, and what ggml makes of them."""

    layout: Callable[[Tensor], Layout]
    """From a tensor's op, `src` and `op_params` (and its proposed type, ne, nb and view_src, where the constructor
    leaves these to the caller) to the layout ggml would give it; `GraphError` where the constructor would assert."""
    n_src: int = 1
    """The first `n_src` sources must be there."""
    max_src: int | None = None
    """Sources from `n_src` to here may be absent; None: as many as `n_src`."""
    n_params: int = 0
    """`op_params` from here on are zero."""
    runs: Callable[[Tensor], None] | None = None
    """What ggml asserts only when it computes the node, so that a constructed node may still break it."""


def violated(t: Tensor, assertion: str, **values: object) -> GraphError:
    """The error for an assertion of ggml that `t` breaks: which, and the values that came."""
    return failed(assertion, t.src, **values)


def failed(assertion: str, src: Sequence[Tensor | None], **values: object) -> GraphError:
    """The error for an assertion of ggml that these sources or values break."""
    came = [f"{k}={v}" for k, v in values.items()]
    came += [f"src[{i}]={s.type}{list(s.ne)} nb{list(s.nb)}" for i, s in enumerate(src) if s is not None]
    return GraphError(f"GGML_ASSERT({assertion}) failed: {', '.join(came)}")


def operand(t: Tensor, i: int = 0) -> Tensor:
    """`t.src[i]`, which the op requires.

    Raises:
        GraphError: it is absent.
    """
    s = t.src[i] if i < len(t.src) else None
    if s is None:
        raise GraphError(f"src[{i}] is absent, but {t.op} needs it")
    return s


def optional(t: Tensor, i: int) -> Tensor | None:
    """`t.src[i]`, or None where it is absent."""
    return t.src[i] if i < len(t.src) else None


def divides(d: int, n: int) -> bool:
    """Whether `n % d == 0`; False for `d == 0`, where ggml would die of a division by zero."""
    return d != 0 and n % d == 0


def fresh(type_: GGMLType, ne: Dims) -> Layout:
    """A tensor that owns its bytes: `ggml_new_tensor`.

    Raises:
        GraphError: a negative dimension, a broken block, or more elements than an int64 counts.
    """
    check_size(type_, ne)
    return type_, ne, contiguous_nb(type_, ne), None, 0


def check_size(type_: GGMLType, ne: Dims) -> int:
    """Bytes that `ne` elements of `type_` take without gaps.

    Raises:
        GraphError: as `fresh`. Negative dimensions and a byte count that overflows pass ggml's own constructor and give
            a tensor without sense; here they are errors.
    """
    if min(ne) < 0:
        raise GraphError(f"ne must not be negative: {list(ne)}")
    if max(ne) > INT64_MAX:
        raise GraphError(f"ne must be int64: {list(ne)}")
    n = ne[0]
    for m in ne[1:]:
        if m > 1:
            if INT64_MAX // m <= n:
                raise failed("INT64_MAX / ne[i] > current_nelements", (), ne=list(ne))
            n *= m
    size = row_size(type_, ne[0]) * ne[1] * ne[2] * ne[3]
    if size > INT64_MAX:
        raise GraphError(f"{type_}{list(ne)} would take {size} bytes, more than a machine can address")
    return size


def view(t: Tensor, a: Tensor, ne: Dims, nb: Dims, offset: int = 0) -> Layout:
    """A tensor over `a`'s bytes from `offset` on: `ggml_new_tensor_impl` with a view_src.

    Raises:
        GraphError: `ne` elements without gaps do not fit the bytes of the tensor that owns them. As in ggml, `nb` is
            not looked at here; `graph.check_tensor` does that.
    """
    size = check_size(a.type, ne)
    root = a.root
    offs = a.view_offs + offset
    if size and size + offs > nbytes(root):
        raise violated(
            t,
            "view_src == NULL || data_size == 0 || data_size + view_offs <= ggml_nbytes(view_src)",
            data_size=size,
            view_offs=offs,
            nbytes=nbytes(root),
        )
    return a.type, ne, nb, root, offs


def view_tensor(t: Tensor, a: Tensor) -> Layout:
    """All of `a` again: `ggml_view_tensor`."""
    return view(t, a, a.ne, a.nb)


def dup_or_inplace(t: Tensor, a: Tensor) -> Layout:
    """`a`'s type and shape: in `a`'s own bytes for an `*_inplace` constructor, contiguous otherwise."""
    return fresh(a.type, a.ne) if t.view_src is None else view_tensor(t, a)


def is_padded_1d(t: Tensor) -> bool:
    """`ggml_is_padded_1d`: only rows may have gaps between them."""
    return t.nb[0] == t.type.type_size and t.nb[2] == t.nb[1] * t.ne[1] and t.nb[3] == t.nb[2] * t.ne[2]


def is_matrix(t: Tensor) -> bool:
    """`ggml_is_matrix`."""
    return t.ne[2] == 1 and t.ne[3] == 1


def is_vector(t: Tensor) -> bool:
    """`ggml_is_vector`."""
    return t.ne[1] == 1 and t.ne[2] == 1 and t.ne[3] == 1


def check(t: Tensor, rows: Rows, **values: object) -> None:
    """Raise for the first row whose condition does not hold.

    Raises:
        GraphError: with the assertion.
    """
    for holds, assertion in rows:
        if not holds:
            raise violated(t, assertion, **values)


def all_f32(t: Tensor, n: int) -> None:
    """The first `n` src hold float32: ggml reads them so whatever they are.

    Raises:
        GraphError: one does not.
    """
    for i in range(n):
        if operand(t, i).type is not F32:
            raise violated(t, f"src[{i}]->type == GGML_TYPE_F32")
