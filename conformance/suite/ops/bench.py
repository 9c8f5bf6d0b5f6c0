"""The bench an op case is made on: leaves with their bytes, operands of any layout over them, and the finished case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import FLAG_INPUT, Bytes, Dims, Tensor, contiguous_nb, new_tensor
from conformance.ggml.types import GGMLType

from .data import Fill, chosen, encode
from .grammar import FAMILY_NAME, OpId, word

GENERATOR = 1
"""Raise it when any id's bytes change."""

INPLACE = word("", "leaf", "mid", "input")
"""Key `inplace`: `leaf` overwrites a persistent tensor, `mid` the result of the node before, `input` an input."""

LAYOUTS = "pad, off, rows, slab, part, flat or nothing; then permutes like p0213, joined by dots"


class Bench:
    """One case in the making. Weights and caches are persistent (`keep`), everything else is an input of the step."""

    __slots__ = ("b", "id", "inputs", "persistent", "types", "v")

    def __init__(self, op_id: OpId) -> None:
        self.id = op_id
        self.types = op_id.types
        self.v = op_id.values
        self.b = Builder()
        self.persistent: dict[Tensor, Bytes] = {}
        self.inputs: dict[Tensor, Bytes] = {}

    def leaf(self, name: str, type_: GGMLType, ne: Dims, fill: Fill, *, keep: bool = False) -> Tensor:
        """A tensor that owns its bytes, filled from its own stream."""
        t = new_tensor(type_, *ne, name=name, flags=0 if keep else FLAG_INPUT)
        (self.persistent if keep else self.inputs)[t] = encode(type_, Stream(self.id.id, name), ne, fill)
        return t

    def operand(
        self, name: str, type_: GGMLType, ne: Dims, fill: Fill, layout: str = "", *, keep: bool = False
    ) -> Tensor:
        """A tensor of shape `ne` whose strides are what `layout` says: a view into a leaf that holds more around it.

        A layout reads from the leaf outwards: first how the bytes lie in the leaf, then permutes. `pad` leaves gaps
        between rows, `off` starts behind the leaf's beginning, `rows` takes every second row, `slab` a part of the
        rows of each matrix, `part` a part of the matrices (as K and V in a cache), `flat` reshapes a vector; `p0213` is
        `ggml_permute(0, 2, 1, 3)`.

        Raises:
            UsageError: another word stands in the layout.
        """
        if not layout:
            return self.leaf(name, type_, ne, fill, keep=keep)
        window, axes = _read_layout(layout)
        inner = ne
        for order in reversed(axes):
            inner = tuple(inner[axis] for axis in order)  # type: ignore[assignment]  # four axes
        t = self._window(name, type_, inner, fill, window, keep=keep)
        for order in axes:
            t = self.b.permute(t, *order)
        return t

    def _window(self, name: str, type_: GGMLType, ne: Dims, fill: Fill, window: str, *, keep: bool) -> Tensor:
        n0, n1, n2, n3 = ne
        blck = type_.blck_size
        if window == "":
            return self.leaf(name, type_, ne, fill, keep=keep)
        if window == "flat":
            return self.b.reshape_4d(self.leaf(name, type_, (math.prod(ne), 1, 1, 1), fill, keep=keep), *ne)
        if window == "off":
            leaf = self.leaf(name, type_, (n0, n1 * n2 * n3 + 2, 1, 1), fill, keep=keep)
            nb = contiguous_nb(type_, ne)
            return self.b.view_4d(leaf, *ne, *nb[1:], leaf.nb[1])
        if window == "pad":
            leaf = self.leaf(name, type_, (n0 + 3 * blck, n1, n2, n3), fill, keep=keep)
            return self.b.view_4d(leaf, *ne, *leaf.nb[1:], type_.type_size)
        if window == "rows":
            leaf = self.leaf(name, type_, (n0, 2 * n1, n2, n3), fill, keep=keep)
            return self.b.view_4d(leaf, *ne, 2 * leaf.nb[1], leaf.nb[2], leaf.nb[3], leaf.nb[1])
        dim = 1 if window == "slab" else 2
        larger = (n0, n1 + 3, n2, n3) if dim == 1 else (n0, n1, n2 + 3, n3)
        leaf = self.leaf(name, type_, larger, fill, keep=keep)
        return self.b.view_4d(leaf, *ne, *leaf.nb[1:], 2 * leaf.nb[dim])

    def lists(self, name: str, type_: GGMLType, ne: Dims, n: int, layout: str) -> Tensor:
        """Index lists, one per row, each of different numbers of 0..n-1.

        Raises:
            UsageError: the layout takes rows apart, or a row is longer than `n`.
        """
        if any(order[0] for order in _read_layout(layout)[1]):
            raise UsageError(f"{name}: a layout whose permutes keep axis 0 expected, {layout!r} found")
        return self.operand(name, type_, ne, chosen(n), layout)

    def destination(self, name: str, key: str, fill: Fill) -> Tensor:
        """The first operand, of the shape under `key` and the layout under `v` + `key`; `inplace` says who owns it."""
        a = self.operand(name, self.types[0], self.v[key], fill, self.v["v" + key], keep=self.v["inplace"] == "leaf")
        return self.b.neg(a) if self.v["inplace"] == "mid" else a

    def outputs(self, a: Tensor, out: Tensor) -> Sequence[Tensor]:
        """What to check: with `mid` also the node before, as it was until `out` overwrote it."""
        return (a, out) if self.v["inplace"] == "mid" else (out,)

    def case(self, outputs: Sequence[Tensor]) -> Case:
        """The finished case: the graph that computes `outputs`."""
        graph = self.b.build_forward_expand(*outputs)
        step = Step(graph, self.inputs, tuple(outputs))
        params = {"op": self.id.op, "types": [t.name for t in self.types], **self.id.given}
        return Case(
            self.id.id,
            self.persistent,
            [step],
            family=FAMILY_NAME,
            params=params,
            seed=self.id.seed,
            generator=GENERATOR,
        )


@cache
def _read_layout(layout: str) -> tuple[str, tuple[tuple[int, ...], ...]]:
    first, *rest = layout.split(".")
    if first[:1] == "p" and first[1:].isdigit():
        first, rest = "", [first, *rest]
    axes = tuple(tuple(int(c) for c in part[1:]) for part in rest if part[1:].isdigit())
    legal = len(axes) == len(rest) and all(sorted(order) == [0, 1, 2, 3] for order in axes)
    if first not in {"", "pad", "off", "rows", "slab", "part", "flat"} or not legal:
        raise UsageError(f"layout {layout!r}: {LAYOUTS} expected")
    return first, axes
