"""Windows: the first cells of a cache, if a graph reads nothing else of it.

A cache has a whole context of cells, of which a step reads the `n_kv` in use, by a view of the first rows that reorders
their axes. The host stores such a cache in the view's order, so that a program takes the cells by one slice, and puts
the rows that the step writes into that slice instead of into a copy of the whole cache. Those rows must lie in the
window. The graph does not guarantee this for its indices. So a program names the leaves with indices, and does not run
if one points beyond the window (`bind.Request`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino.opset15 as o
from numpy.typing import NDArray

from backends.openvino.translating.plan import Plan
from backends.openvino.translating.template import Sym, same
from conformance.ggml.tensor import Tensor, computes

from .nodes import Constants, Value, cut, reshape, shape_of, transpose
from .storage import NUMBERS
from .views import factored, region


@dataclass(frozen=True, slots=True)
class Order:
    """Axis order of a cache in memory, if not ggml's."""

    extents: tuple[int, ...]
    """Shape of the cache in ggml's order: cells first."""
    axes: tuple[int, ...]
    """Axes of the cache in memory order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the cache in memory order."""
        return tuple(self.extents[a] for a in self.axes)

    @property
    def cells(self) -> int:
        """Axis of cells in memory."""
        return self.axes.index(0)

    def ordered(self, x: NDArray[Any]) -> NDArray[Any]:
        """Copy the cache `x`, in ggml's order, to memory order."""
        return x.reshape(self.extents).transpose(self.axes).copy()

    def table(self, x: NDArray[Any]) -> NDArray[Any]:
        """View the memory `x` in ggml's order: shape `extents`, not contiguous."""
        return x.transpose(np.argsort(self.axes))


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a cache that a program reads."""

    order: Order
    cells: int
    """Number of cells that it reads."""
    ids: tuple[Tensor, ...]
    """Leaves with the cells that the graph writes."""

    def read(self, c: Constants, x: Value, written: Iterable[tuple[Value, Value]]) -> Value:
        """Return the window of cache `x`, with rows (n, row) of `written` at their ids (n,)."""
        axis = self.order.cells
        x = cut(c, x, [0], [self.cells], [axis])
        for ids, rows in written:
            new = reshape(c, rows, (shape_of(c, rows)[0], *self.order.extents[1:]))
            x = c.shaped(o.scatter_update(x, ids, transpose(c, new, self.order.axes), c.axis(axis)), shape_of(c, x))
        return x


def windows(plan: Plan) -> dict[Tensor, Window]:
    """Return cache -> window, if all nodes read the same first cells and write whole rows."""
    uses: dict[Tensor, list[tuple[Tensor, Tensor]]] = {t: [] for t in plan.caches if t.type in NUMBERS}
    for node in plan.graph:
        for s in node.src if computes(node) else ():
            if s is not None and s.root in uses:
                uses[s.root].append((node, s))
    shown = {t.root for t in plan.outputs}
    found = {t: _window(plan, t, nodes) for t, nodes in uses.items() if t not in shown}
    return {t: w for t, w in found.items() if w is not None}


def _window(plan: Plan, t: Tensor, uses: list[tuple[Tensor, Tensor]]) -> Window | None:
    """Return the window of `t`, which nodes use through views; None if it has none."""
    reads = [_first(s) for node, s in uses if node.root is not t]
    if not reads or reads[0] is None:
        return None
    order, cells = reads[0]
    if not all(r is not None and r[0] == order and same(r[1], cells) for r in reads):
        return None
    row = int(np.prod(order.extents[1:]))
    ids = dict.fromkeys(_ids(plan, node, s, row) for node, s in uses if node.root is t)
    if None in ids:
        return None
    return Window(order, cells, tuple(i for i in ids if i is not None))


def _first(s: Tensor) -> tuple[Order, int] | None:
    """Return axis order and cell count of view `s`; None unless it is the first cells, whole."""
    f = factored(region(s, blocks=False))
    if f is None or any(isinstance(n, Sym) for n in f.extents) or not all(same(n, 0) for n in f.starts):
        return None
    if not all(same(n, e) for n, e in zip(f.counts[1:], f.extents[1:], strict=True)):
        return None
    return Order(tuple(f.extents), tuple(f.order)), f.counts[0]


def _ids(plan: Plan, node: Tensor, s: Tensor, row: int) -> Tensor | None:
    """Return the leaf with the cells, of `row` elements, that `node` writes into `s`, or None."""
    ids = node.src[1] if node.op == "SET_ROWS" and s is not node.src[0] else None
    if ids is None or plan.roles.get(ids) != "input" or not same(node.ne[0], row):
        return None
    r = region(node, blocks=False)
    return ids if r.contiguous and same(r.offset, 0) and node.ne[2] * node.ne[3] == 1 else None
