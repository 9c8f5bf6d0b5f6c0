"""Which axes of a graph's tensors count tokens, and which count cells of a KV cache: read off the ops, never off names.

A graph whose axes are known can be computed at another size: tokens in chunks, cells up to the cache's capacity. Every
op of the tables here treats the places along such an axis alike, so that padding at the end of it changes nothing
before. A graph with any other op over them runs at its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import VIEW_OPS, Tensor, computes, nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """A count that changes from graph to graph."""

    kind: Literal["tokens", "outputs", "cells"]
    size: int
    """In this graph."""
    slots: int
    """In the graph that is compiled."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension that runs over a span, `times` neighbours for each place of it."""

    span: Span
    times: int = 1


STORE = 2
"""Place of what SET_ROWS stores into among its sources."""
Axes = tuple[Axis | None, Axis | None, Axis | None, Axis | None]
NONE: Axes = (None, None, None, None)


def kinds(axes: Axes) -> set[str]:
    """What the axes count."""
    return {x.span.kind for x in axes if x is not None}


class FixedError(BackendError):
    """The graph can only run at its own size; the message says why."""


@dataclass(frozen=True, slots=True)
class Spans:
    """What `follow` found."""

    axes: dict[Tensor, Axes]
    """Every tensor that a computed node needs, in the graph's order."""
    tokens: Span
    cells: dict[Tensor, Span]
    """Mask -> the span of its columns."""
    rows: tuple[Tensor, ...]
    """Leaves that say into which cell each token goes."""


def needed(graph: Graph) -> list[Tensor]:
    """Tensors that the computed nodes are or read, in the graph's order; what is not computed is left out."""
    live: set[Tensor] = set()
    open_ = [n for n in graph if computes(n)]
    while open_:
        t = open_.pop()
        if t not in live:
            live.add(t)
            open_ += [s for s in (*t.src, t.view_src) if s is not None]
    return [t for t in graph.tensors() if t in live]


def _queries(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mask and number of rows of an attention: (mask, tensor whose ne[1] counts queries)."""
    if t.op == "FLASH_ATTN_EXT" and len(t.src) > 3 and t.src[3] is not None and t.src[0] is not None:
        return t.src[3], t.src[0]
    if t.op == "SOFT_MAX" and len(t.src) > 1 and t.src[1] is not None and t.src[0] is not None:
        return t.src[1], t.src[0]
    return None


def at(i: int, axis: Axis | None) -> Axes:
    """`axis` in dimension `i`, none elsewhere."""
    out: list[Axis | None] = [None] * 4
    out[i] = axis
    return axes_of(out)


def axes_of(x: list[Axis | None]) -> Axes:
    """Four axes as such."""
    return x[0], x[1], x[2], x[3]


class Walk:
    """Forward through the nodes; leaves get their axes from the first node that reads them.

    Args:
        tensors: what `needed` gives for one step's graph.
        persistent: weights and caches: their sizes never change.
        chunk: tokens of a compiled graph, for more than one.
    """

    def __init__(self, tensors: list[Tensor], persistent: AbstractSet[Tensor], chunk: int) -> None:
        self.persistent = persistent
        self.axes: dict[Tensor, Axes] = {}
        self.masks: dict[Tensor, Span] = {}
        self.zeroed: set[Tensor] = set()
        """Tensors that are 0 in all cells beyond those of the graph."""
        self.transposed: dict[Tensor, bool] = {}
        """Cache that this graph writes -> whether a row is one element, a token's elements a cache apart."""
        self.row_bytes: dict[Tensor, int] = {}
        self.rows: list[Tensor] = []
        found = [q for t in tensors if (q := _queries(t)) is not None]
        counts = {q.ne[1] for _, q in found}
        if len(counts) != 1:
            raise FixedError(f"one number of queries in all attentions with masks expected, {sorted(counts)} found")
        n = counts.pop()
        self.tokens = Span("tokens", n, chunk if n > 1 else 1)
        self._writes(tensors)
        self._cells(tensors, {mask.ne[0] for mask, _ in found})

    def _writes(self, tensors: list[Tensor]) -> None:
        for t in tensors:
            root = t.view_src
            if root is None or t.op in VIEW_OPS or root not in self.persistent:
                continue
            if t.op != "SET_ROWS":
                raise FixedError(f"{t} writes into a cache; only SET_ROWS says in an input where")
            self.transposed[root] = t.ne[0] == 1
            self.row_bytes[root] = t.nb[1]

    def _cells(self, tensors: list[Tensor], counts: set[int]) -> None:
        """One span for each number of cells that the masks have: all of a cache's."""
        capacities: dict[int, set[int]] = {n: set() for n in counts}
        for t in tensors:
            if t.op == "VIEW" and t.view_src in self.transposed:
                axis, capacity = self.cells_of(t)
                if t.ne[axis] in capacities:
                    capacities[t.ne[axis]].add(capacity)
        self.cells: dict[int, Span] = {}
        for n, found in capacities.items():
            if len(found) != 1:
                raise FixedError(
                    f"a mask has {n} cells, but the caches' views show {sorted(found)} cells to choose from"
                )
            self.cells[n] = Span("cells", n, found.pop())

    def cells_of(self, t: Tensor) -> tuple[int, int]:
        """Which axis of a view of a cache counts cells, and how many there are in all."""
        root = t.root
        step = root.type.type_size if self.transposed[root] else self.row_bytes[root]
        # a row of one block is as long as its first stride
        axes = [i for i in range(0 if self.transposed[root] else 1, 4) if t.nb[i] == step and t.ne[i] > 1]
        if len(axes) != 1 or t.view_offs:
            raise FixedError(f"{t}: a view of a cache that does not begin at its first cell, or shows only one")
        wider = [t.nb[i] for i in range(4) if t.ne[i] > 1 and t.nb[i] > step]
        return axes[0], min(wider, default=nbytes(root)) // step

    def run(self, tensors: list[Tensor], rules: Mapping[str, Rule], other: Rule) -> Spans:
        """Every tensor's axes, by the rule of its op, `other` where there is none."""
        for t in tensors:
            if t.op == "NONE" and t.view_src is None:
                if t in self.persistent:
                    self.axes[t] = NONE
                continue
            axes = self.axes[t] = rules.get(t.op, other)(self, t)
            for s in t.src:
                if s is not None:
                    self.axes.setdefault(s, NONE)
            found = [x.span.kind == "cells" for x in axes if x is not None]
            if len(set(found)) < len(found):
                raise FixedError(f"{t}: each token meets every other")
            if t.op not in VIEW_OPS:
                self._check_reads(t)
        return Spans({t: self.axes[t] for t in tensors}, self.tokens, self.masks, tuple(self.rows))

    def _check_reads(self, t: Tensor) -> None:
        """What no mask hides would be read before later tokens have written it."""
        for i, s in enumerate(t.src):
            stored_into = t.op == "SET_ROWS" and i == STORE
            if s is not None and s.root in self.transposed and self.axes[s] == NONE and not stored_into:
                raise FixedError(f"{t}: reads a cache past the masks")

    # -- what rules ask -------------------------------------------------------------------------------------------

    def of(self, t: Tensor, leaf: Axes = NONE) -> Axes:
        """The axes of a src; an input leaf gets `leaf`, where nothing has said otherwise before."""
        if t not in self.axes:
            for axis, n in zip(leaf, t.ne, strict=True):
                if axis is not None and axis.span.size * axis.times > n:
                    raise FixedError(f"{t}: {axis.span.size * axis.times} {axis.span.kind} expected, {n} found")
            self.axes[t] = leaf
        found = self.axes[t]
        if t.op == "NONE" and t not in self.persistent and found != leaf:
            raise FixedError(f"{t}: two nodes read it, one by tokens and one not")
        return found

    def tokens_where(self, t: Tensor, axis: int) -> Axes:
        """Axes of an input leaf that counts tokens along `axis`."""
        return at(axis, Axis(self.tokens)) if self.tokens.size > 1 and t.ne[axis] == self.tokens.size else NONE

    def queries(self) -> Axis | None:
        """The axis of a mask's rows."""
        return Axis(self.tokens) if self.tokens.size > 1 else None


Rule = Callable[[Walk, Tensor], Axes]
"""The axes of a node from those of its sources."""
