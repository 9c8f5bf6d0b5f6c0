"""A node of a trajectory once more with one op_param changed: who ignores that op_param gives the old result.

A trajectory has one value of most op_params, often the usual one, so a backend that has it built in passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from conformance.case.case import writes_in_place
from conformance.ggml.errors import GraphError
from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.ops.rules import check_node
from conformance.ggml.partial import like
from conformance.ggml.tensor import Tensor, f32_bits

Change = Callable[[Tensor, int], int]
"""Node and position of the op_param -> its other value, as 32 bits."""


def _times(factor: float) -> Change:
    return lambda t, i: f32_bits(t.param_f32(i) * factor)


def _plus(term: float) -> Change:
    return lambda t, i: f32_bits(t.param_f32(i) + term)


def _to(value: float) -> Change:
    return lambda _t, _i: f32_bits(value)


def _other(first: int, second: int) -> Change:
    return lambda t, i: second if t.op_params[i] == first else first


def _half(t: Tensor, i: int) -> int:
    return t.op_params[i] // 4 * 2


_EPS: tuple[tuple[int, str, Change], ...] = ((0, "eps", _to(0.5)),)
_ROPE: tuple[tuple[int, str, Change], ...] = (
    (1, "n_dims", _half),
    (2, "mode", _other(ROPE_TYPE["NORMAL"], ROPE_TYPE["NEOX"])),
    (5, "freq_base", _times(0.01)),
    (6, "freq_scale", _times(0.5)),
    (8, "attn_factor", _times(1.5)),
)

VARIED: dict[str, tuple[tuple[int, str, Change], ...]] = {
    "UNARY": ((0, "unary_op", _other(UNARY_OPS.index("TANH"), UNARY_OPS.index("SILU"))),),
    "GLU": (
        (0, "glu_op", _other(GLU_OPS.index("SWIGLU"), GLU_OPS.index("GEGLU"))),
        (1, "swapped", _other(0, 1)),
        (2, "alpha", _times(0.5)),
        (3, "limit", _times(0.01)),
    ),
    "NORM": _EPS,
    "RMS_NORM": _EPS,
    "L2_NORM": _EPS,
    "GROUP_NORM": ((1, "eps", _to(0.5)),),
    "SCALE": ((0, "s", _times(0.5)), (1, "b", _plus(0.5))),
    "CLAMP": ((0, "min", _times(0.5)), (1, "max", _times(0.5))),
    "LEAKY_RELU": ((0, "negative_slope", _times(0.5)),),
    "SOFT_MAX": ((0, "scale", _times(0.5)), (1, "max_bias", _plus(4))),
    "FLASH_ATTN_EXT": ((0, "scale", _times(0.5)), (1, "max_bias", _plus(4)), (2, "logit_softcap", _plus(0.5))),
    "ROPE": _ROPE,
    "GATED_LINEAR_ATTN": ((0, "scale", _times(0.5)),),
    "ARGSORT": ((0, "order", _other(SORT_ORDER["ASC"], SORT_ORDER["DESC"])),),
}
"""Op -> op_params that change numbers and no shape: position, ggml's name of the argument, another value."""


_WHOLE = frozenset({"n_dims", "mode", "unary_op", "glu_op", "swapped", "order"})
"""Those that are integers."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One node with one op_param changed."""

    name: str
    """Op and op_param: `ROPE freq_base`."""
    node: Tensor
    """As it is."""
    changed: Tensor
    values: str
    """`freq_base 100 instead of 10000`."""


def variations(nodes: Iterable[Tensor]) -> Iterator[Variation]:
    """For each op and op_param the first of `nodes` where it can be changed.

    Args:
        nodes: with their sources; one that writes in place is left alone.
    """
    known: set[str] = set()
    for node in nodes:
        if writes_in_place(node):
            continue
        for i, name, change in VARIED.get(node.op, ()):
            spelled = f"{_op(node)} {name}"
            if spelled in known:
                continue
            other = like(node, node.src, None)
            value = change(node, i)
            other.op_params = (*node.op_params[:i], value, *node.op_params[i + 1 :])
            if value != node.op_params[i] and _legal(other):
                known.add(spelled)
                yield Variation(
                    spelled, node, other, f"{name} {_value(other, i, name)} instead of {_value(node, i, name)}"
                )


def _value(t: Tensor, i: int, name: str) -> str:
    return str(t.op_params[i]) if name in _WHOLE else f"{t.param_f32(i):.7g}"


def _op(node: Tensor) -> str:
    return {"UNARY": UNARY_OPS, "GLU": GLU_OPS}[node.op][node.op_params[0]] if node.op in {"UNARY", "GLU"} else node.op


def _legal(node: Tensor) -> bool:
    try:
        check_node(node)
    except GraphError:
        return False
    return True
