"""How every constructor makes its node: encode op_params, ask the op's rule for the layout, name it as ggml does."""

from __future__ import annotations

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import MAX_NAME, ZERO_PARAMS, Dims, Tensor
from conformance.ggml.types import GGMLType

from .rules import RULES


def node(
    op: str,
    src: tuple[Tensor | None, ...],
    params: tuple[int, ...] = (),
    *,
    type_: GGMLType | None = None,
    ne: Dims | None = None,
    nb: Dims | None = None,
    inplace: bool = False,
    suffix: str = "",
) -> Tensor:
    """A node of `op` over `src`, with the layout that the op's rule decides.

    Args:
        op: ggml's name of the op.
        src: its sources; `src[0]` is there, trailing None are dropped.
        params: the leading `op_params`, floats by their bits.
        type_: proposed where the caller chooses it (`cast`).
        ne: proposed where the caller chooses it (views, `cont_4d`, `repeat`, `top_k`).
        nb: proposed where the caller chooses it (views).
        inplace: store into `src[0]`'s bytes, as an `*_inplace` constructor.
        suffix: what ggml appends to `src[0]`'s name; `(view)` for a result in place.

    Raises:
        GraphError: with the assertion of ggml that the arguments break.
    """
    while src and src[-1] is None:
        src = src[:-1]
    a = src[0]
    if a is None:
        raise TypeError(f"{op}: src[0] must be a Tensor")
    t = Tensor(type_ or a.type, ne or a.ne, nb or a.nb, op, pad_params(params), src, a if inplace else None)
    lay_out(t)
    if inplace:
        suffix = "(view)"
    if suffix:
        t.name = fit_name(f"{a.name} {suffix}")
    return t


def lay_out(t: Tensor) -> None:
    """Give `t` the type, shape, strides and view that its op's rule decides.

    Raises:
        GraphError: with the assertion of ggml that `t` breaks.
    """
    try:
        t.type, t.ne, t.nb, t.view_src, t.view_offs = RULES[t.op].layout(t)
    except GraphError as e:
        raise GraphError(f"{t.op}: {e}") from None


def pad_params(params: tuple[int, ...]) -> tuple[int, ...]:
    """All 16 `op_params` from the leading ones."""
    return (*params, *ZERO_PARAMS[len(params) :]) if params else ZERO_PARAMS


def set_param(t: Tensor, i: int, value: int) -> None:
    """`ggml_set_op_params_i32`."""
    t.op_params = (*t.op_params[:i], int(value), *t.op_params[i + 1 :])


def fit_name(name: str) -> str:
    """`name` cut to what `ggml_tensor.name` holds: 63 bytes and never half a character."""
    if len(name) * 4 < MAX_NAME:
        return name
    raw = name.encode()
    return name if len(raw) < MAX_NAME else raw[: MAX_NAME - 1].decode(errors="ignore")


def int32(bits: int) -> int:
    """The low 32 bits as a signed int."""
    low = bits & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low
