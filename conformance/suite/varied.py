"""Vary an op_param of a trajectory's node: a backend that ignores it gives the old result.

A trajectory has one value of most op_params, often the usual one, so a backend with that value hard-coded passes. The
op's declaration defines each variation (`Field.vary`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from conformance.case.case import writes_in_place
from conformance.ggml.errors import GraphError
from conformance.ggml.ops.fields import Field
from conformance.ggml.ops.op import DECLARATIONS, check_node, set_param
from conformance.ggml.partial import like
from conformance.ggml.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Variation:
    """A node with one op_param changed."""

    name: str
    """Op and op_param: `SCALE s`."""
    node: Tensor
    """The original node."""
    changed: Tensor
    values: str
    """The change, such as `freq_base 100 instead of 10000`."""


def variations(nodes: Iterable[Tensor]) -> Iterator[Variation]:
    """Yield one variation per op and op_param, of the first of `nodes` that has one.

    Nodes that write in place are excluded.
    """
    known: set[str] = set()
    for node in nodes:
        declared = DECLARATIONS.get(node.op)
        if writes_in_place(node) or declared is None:
            continue
        for f in declared.fields:
            name = f"{_op(node)} {f.name}"
            other = None if name in known else _changed(node, f)
            if other is not None:
                known.add(name)
                values = f"{f.name} {f.text(other.op_params)} instead of {f.text(node.op_params)}"
                yield Variation(name, node, other, values)


def _changed(node: Tensor, f: Field) -> Tensor | None:
    """Return `node` with another value of `f`; None if ggml would accept no other."""
    if f.vary is None:
        return None
    other = like(node, node.src, None)
    set_param(other, f.name, f.vary(node, f.of(node.op_params)))
    if other.op_params == node.op_params:
        return None
    try:
        check_node(other)
    except GraphError:
        return None
    return other


def _op(node: Tensor) -> str:
    return str(node.params.op) if node.op in {"UNARY", "GLU"} else node.op
