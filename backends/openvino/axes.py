"""Axes of a graph's tensors that count tokens or KV cache cells, for the emitters' rules.

Each topic of `emit` has a table `AXES`, op -> `Rule`. An op may have a rule if it treats all positions along such an
axis in the same way, so that padding at its end changes no earlier position. `npu/axes.py` propagates the rules through
a graph. Imports without openvino.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, TypeAlias

from conformance.ggml.errors import BackendError
from conformance.ggml.ops.op import operand
from conformance.ggml.tensor import VIEW_OPS, Tensor, nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """A count that changes from graph to graph."""

    kind: Literal["tokens", "outputs", "cells"]
    size: int
    """Count in this graph."""
    slots: int
    """Count in the graph that is compiled."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension with `times` adjacent elements for each position of a span."""

    span: Span
    times: int = 1


Axes: TypeAlias = tuple[Axis | None, ...]
"""An axis or None for each dimension."""
NONE: Axes = (None, None, None, None)


def at(i: int, axis: Axis | None) -> Axes:
    """Return axes with `axis` in dimension `i` only."""
    return tuple([axis if k == i else None for k in range(4)])


class FixedError(BackendError):
    """A graph that can only run at its own size; the message states why."""


def require(holds: bool, t: Tensor, what: str) -> None:  # reads as an assertion
    """Raise FixedError, which names `t`, unless `holds`."""
    if not holds:
        raise FixedError(f"{t}: {what}")


class AxisContext:
    """Context of rules, forward through the nodes; the first reader sets the axes of a leaf.

    Args:
        tensors: all that computed nodes are or read, in the graph's order.
        masks: attention -> its mask.
        persistent: weights and caches, whose sizes never change.
        chunk: tokens of a compiled graph with more than one.
    """

    def __init__(
        self, tensors: Sequence[Tensor], masks: Mapping[Tensor, Tensor], persistent: AbstractSet[Tensor], chunk: int
    ) -> None:
        self.persistent = persistent
        self.axes: dict[Tensor, Axes] = {}
        self.masks: dict[Tensor, Span] = {}
        self.zeroed: set[Tensor] = set()
        """Tensors that are 0 in all cells beyond those of the graph."""
        self.transposed: dict[Tensor, bool] = {}
        """Cache that this graph writes -> True if it is transposed.

        Then a row is one element, and a token's elements are a cache length apart."""
        self.row_bytes: dict[Tensor, int] = {}
        self.rows: list[Tensor] = []
        counts = {operand(t).ne[1] for t in masks}
        if len(counts) != 1:
            raise FixedError(f"the same number of queries in all masked attentions expected, {sorted(counts)} found")
        n = counts.pop()
        self.tokens = Span("tokens", n, chunk if n > 1 else 1)
        self._writes(tensors)
        self.cells = self._cells(tensors, {mask.ne[0] for mask in masks.values()})

    def _writes(self, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            root = t.view_src
            if root is None or t.op in VIEW_OPS or root not in self.persistent:
                continue
            if t.op != "SET_ROWS":
                raise FixedError(f"{t} writes a cache, but only SET_ROWS takes the cells as an input")
            self.transposed[root] = t.ne[0] == 1
            self.row_bytes[root] = t.nb[1]

    def _cells(self, tensors: Sequence[Tensor], counts: AbstractSet[int]) -> dict[int, Span]:
        """Return the span of each cell count in the masks, with the cache's capacity."""
        capacities: dict[int, set[int]] = {n: set() for n in counts}
        for t in tensors:
            if t.op == "VIEW" and t.view_src in self.transposed:
                axis, capacity = self.cells_of(t)
                if t.ne[axis] in capacities:
                    capacities[t.ne[axis]].add(capacity)
        for n, sizes in capacities.items():
            if len(sizes) != 1:
                raise FixedError(
                    f"the same capacity of all caches expected for a mask of {n} cells, {sorted(sizes)} found"
                )
        return {n: Span("cells", n, sizes.pop()) for n, sizes in capacities.items()}

    def cells_of(self, t: Tensor) -> tuple[int, int]:
        """Return the axis of a cache view that counts cells, and the cache's capacity."""
        root = t.root
        step = root.type.type_size if self.transposed[root] else self.row_bytes[root]
        # a row of one block is as long as its first stride
        axes = [i for i in range(0 if self.transposed[root] else 1, 4) if t.nb[i] == step and t.ne[i] > 1]
        if len(axes) != 1 or t.view_offs:
            raise FixedError(f"{t}: a view of a cache that does not begin at its first cell, or shows only one")
        wider = [t.nb[i] for i in range(4) if t.ne[i] > 1 and t.nb[i] > step]
        return axes[0], min(wider, default=nbytes(root)) // step

    def axes_of(self, t: Tensor, leaf: Axes = NONE) -> Axes:
        """Return the axes of a src; an input leaf without axes gets `leaf`."""
        if t not in self.axes:
            for axis, n in zip(leaf, t.ne, strict=True):
                if axis is not None and axis.span.size * axis.times > n:
                    raise FixedError(f"{t}: {axis.span.size * axis.times} {axis.span.kind} expected, {n} found")
            self.axes[t] = leaf
        axes = self.axes[t]
        if t.op == "NONE" and t not in self.persistent and axes != leaf:
            raise FixedError(f"{t}: two nodes read it, one along tokens and one not")
        return axes

    def tokens_where(self, t: Tensor, axis: int) -> Axes:
        """Return the axes of an input leaf that counts tokens along `axis`."""
        return at(axis, Axis(self.tokens)) if self.tokens.size > 1 and t.ne[axis] == self.tokens.size else NONE

    def mask_axes(self, cells: int) -> Axes:
        """Return the axes of a mask with this many cells, whose rows are queries."""
        return Axis(self.cells[cells]), Axis(self.tokens) if self.tokens.size > 1 else None, None, None


Rule: TypeAlias = Callable[[AxisContext, Tensor], Axes]
"""Function from a node and its sources' axes to its axes, or FixedError."""


# -- rules that several topics use ------------------------------------------------------------------------------------
def others(t: Tensor) -> list[Tensor]:
    """Return the sources except the node itself."""
    return [s for s in t.src if s is not None and s is not t]


def elementwise(w: AxisContext, t: Tensor) -> Axes:
    """Apply to elementwise ops; a src of fewer elements is repeated."""
    a = operand(t)
    axes = w.axes_of(a, w.tokens_where(a, 1))
    for s in others(t):
        if s is a:
            continue
        own = w.axes_of(s, tuple([x if n != 1 else None for x, n in zip(axes, s.ne, strict=True)]))
        for x, y, n in zip(axes, own, s.ne, strict=True):
            require(y == x or (y is None and n == 1), t, f"{s} is repeated along tokens or cells")
    return axes


def rowwise(w: AxisContext, t: Tensor) -> Axes:
    """Apply to ops on independent whole rows."""
    axes = elementwise(w, t)
    require(axes[0] is None, t, "computes across tokens or cells")
    return axes
