"""Which axes of a graph's tensors count tokens, and which count cells of a KV cache: read off the ops, never off names.

A graph whose axes are known can be computed at another size: tokens in chunks, cells up to the cache's capacity. Every
op of `RULES` treats the places along such an axis alike, so that padding at the end of it changes nothing before. A
graph with any other op over them runs at its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from backends.openvino.state.log import reached
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import VIEW_OPS, Tensor, computes, nbytes

STORE = 2
"""Place of what SET_ROWS stores into among its sources."""


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


Axes: TypeAlias = tuple[Axis | None, ...]
"""One for each dimension."""
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


def follow(graph: Graph, persistent: AbstractSet[Tensor], chunk: int) -> Spans:
    """The axes of every tensor of a graph that attends through masks to caches which it writes by SET_ROWS.

    `persistent` are weights and caches, whose sizes never change; `chunk` is the number of tokens of a compiled graph,
    for more than one. FixedError if there is no such attention, or an op over tokens or cells has no rule.
    """
    tensors = _needed(graph)
    return AxisWalk(tensors, persistent, chunk).run(tensors)


def _needed(graph: Graph) -> list[Tensor]:
    """Tensors that the computed nodes are or read, in the graph's order; what is not computed is left out."""
    live = reached(n for n in graph if computes(n))
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
    return tuple([axis if k == i else None for k in range(4)])


class AxisWalk:
    """Forward through the nodes; leaves get their axes from the first node that reads them. Arguments: see `follow`."""

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
        attentions = [q for t in tensors if (q := _queries(t)) is not None]
        counts = {q.ne[1] for _, q in attentions}
        if len(counts) != 1:
            raise FixedError(f"one number of queries in all attentions with masks expected, {sorted(counts)} found")
        n = counts.pop()
        self.tokens = Span("tokens", n, chunk if n > 1 else 1)
        self._writes(tensors)
        self._cells(tensors, {mask.ne[0] for mask, _ in attentions})

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
        for n, sizes in capacities.items():
            if len(sizes) != 1:
                raise FixedError(
                    f"a mask has {n} cells, but the caches' views show {sorted(sizes)} cells to choose from"
                )
            self.cells[n] = Span("cells", n, sizes.pop())

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

    def run(self, tensors: list[Tensor]) -> Spans:
        """Every tensor's axes, by the rule of its op."""
        for t in tensors:
            if t.op == "NONE" and t.view_src is None:
                if t in self.persistent:
                    self.axes[t] = NONE
                continue
            axes = self.axes[t] = RULES.get(t.op, _untouched)(self, t)
            for s in t.src:
                if s is not None:
                    self.axes.setdefault(s, NONE)
            over_cells = [x.span.kind == "cells" for x in axes if x is not None]
            if len(set(over_cells)) < len(over_cells):
                raise FixedError(f"{t}: each token meets every other")
            if t.op not in VIEW_OPS:
                self._check_reads(t)
        return Spans({t: self.axes[t] for t in tensors}, self.tokens, self.masks, tuple(self.rows))

    def _check_reads(self, t: Tensor) -> None:
        """Refuse a read past the masks: it would see cells before later tokens have written them."""
        for i, s in enumerate(t.src):
            stored_into = t.op == "SET_ROWS" and i == STORE
            if s is not None and s.root in self.transposed and self.axes[s] == NONE and not stored_into:
                raise FixedError(f"{t}: reads a cache past the masks")

    # -- what rules ask -------------------------------------------------------------------------------------------

    def of(self, t: Tensor, leaf: Axes = NONE) -> Axes:
        """The axes of a src; an input leaf without axes gets `leaf`."""
        if t not in self.axes:
            for axis, n in zip(leaf, t.ne, strict=True):
                if axis is not None and axis.span.size * axis.times > n:
                    raise FixedError(f"{t}: {axis.span.size * axis.times} {axis.span.kind} expected, {n} found")
            self.axes[t] = leaf
        axes = self.axes[t]
        if t.op == "NONE" and t not in self.persistent and axes != leaf:
            raise FixedError(f"{t}: two nodes read it, one by tokens and one not")
        return axes

    def tokens_where(self, t: Tensor, axis: int) -> Axes:
        """Axes of an input leaf that counts tokens along `axis`."""
        return at(axis, Axis(self.tokens)) if self.tokens.size > 1 and t.ne[axis] == self.tokens.size else NONE

    def queries(self) -> Axis | None:
        """The axis of a mask's rows."""
        return Axis(self.tokens) if self.tokens.size > 1 else None


# -- how each op carries tokens and cells from its sources to its result ----------------------------------------------
def _src(t: Tensor) -> Iterator[Tensor]:
    return (s for s in t.src if s is not None and s is not t)


def _sources(t: Tensor, n: int) -> list[Tensor]:
    present = [s for s in t.src[:n] if s is not None]
    if len(present) < n:
        raise FixedError(f"{t}: {n} sources expected")
    return present


def _first(t: Tensor) -> Tensor:
    return _sources(t, 1)[0]


def _require(holds: bool, t: Tensor, what: str) -> None:  # reads as an assertion
    if not holds:
        raise FixedError(f"{t}: {what}")


def _untouched(w: AxisWalk, t: Tensor) -> Axes:
    """An op without a rule: allowed as long as it sees neither tokens nor cells."""
    for s in _src(t):
        _require(w.of(s) == NONE, t, f"{t.op} over tokens or cells has no rule")
    return NONE


def _alias(w: AxisWalk, t: Tensor) -> Axes:
    _require(t.view_src in w.persistent and t.view_src not in w.transposed, t, "a view of a tensor without an op")
    return NONE


def _unknown_size(w: AxisWalk, t: Tensor) -> Axes:
    del w
    raise FixedError(f"{t}: its size is not its sources'")


def _alike(w: AxisWalk, t: Tensor) -> Axes:
    """Element by element; a src of fewer elements is repeated."""
    a = _first(t)
    axes = w.of(a, w.tokens_where(a, 1))
    for s in _src(t):
        if s is a:
            continue
        own = w.of(s, tuple([x if n != 1 else None for x, n in zip(axes, s.ne, strict=True)]))
        for x, y, n in zip(axes, own, s.ne, strict=True):
            _require(y == x or (y is None and n == 1), t, f"{s} is repeated along tokens or cells")
    return axes


def _row_alike(w: AxisWalk, t: Tensor) -> Axes:
    """Whole rows, each by itself."""
    axes = _alike(w, t)
    _require(axes[0] is None, t, "mixes what lies along a row of tokens or cells")
    return axes


def _sums(w: AxisWalk, t: Tensor) -> Axes:
    axes = w.of(_first(t))
    _require(axes[0] is None, t, "adds up tokens or cells")
    return axes


def _mask(w: AxisWalk, mask: Tensor) -> Axes:
    cells = w.cells[mask.ne[0]]
    axes = w.of(mask, (Axis(cells), w.queries(), None, None))
    leaf = mask.root if mask.op == "NONE" else _first(mask) if mask.op == "CPY" else mask
    _require(leaf.op == "NONE" and leaf not in w.persistent, mask, "a mask must be an input, or an input cast")
    w.masks[leaf] = cells
    return axes


def _soft_max(w: AxisWalk, t: Tensor) -> Axes:
    a = _first(t)
    axes = w.of(a)
    mask = t.src[1] if len(t.src) > 1 else None
    if mask is None:
        _require(axes[0] is None, t, "a row of cells without a mask")
        return axes
    own = _mask(w, mask)
    _require(own[:2] == axes[:2], t, "its mask counts something else than its rows")
    w.zeroed.add(t)
    return axes


def _flash_attn_ext(w: AxisWalk, t: Tensor) -> Axes:
    q, k, v = t.src[:3]
    mask = t.src[3] if len(t.src) > 3 else None
    if q is None or k is None or v is None or mask is None:
        raise FixedError(f"{t}: attention without a mask")
    own = _mask(w, mask)
    _require(w.of(q) == at(1, own[1]), t, "q counts something else than its mask's rows")
    _require(w.of(k) == w.of(v) == at(1, own[0]), t, "k or v count something else than its mask's columns")
    return at(2, own[1])


def _mul_mat(w: AxisWalk, t: Tensor) -> Axes:
    a, b = _sources(t, 2)
    x, y = w.of(a), w.of(b, w.tokens_where(b, 1))
    _require(x[2] is None and x[3] is None, t, "src[0] has tokens or cells in its outer dimensions")
    if x[0] is not None or y[0] is not None:
        cells = x[0] is not None and x[0].span.kind == "cells"
        _require(x[0] == y[0] and cells and b in w.zeroed, t, "adds up tokens, or cells that no mask hides")
    return x[1], y[1], y[2], y[3]


def _mul_mat_id(w: AxisWalk, t: Tensor) -> Axes:
    a, b, ids = _sources(t, 3)
    x, y = w.of(b), w.of(ids)
    _require(w.of(a) == NONE and x[0] is None, t, "adds up tokens or cells")
    _require(y[0] is None and y[1] == x[2], t, "ids and src[1] count different things")
    return x


def _rope(w: AxisWalk, t: Tensor) -> Axes:
    a, pos = _sources(t, 2)
    axes = w.of(a)
    _require(axes[0] is None, t, "turns pairs of tokens or cells")
    own = w.of(pos, at(0, axes[2]))
    _require(own[0] == axes[2] and pos.ne[0] == a.ne[2], t, "positions that are not one per token")
    for s in t.src[2:]:
        if s is not None:
            _require(w.of(s) == NONE, t, "frequency factors that change with the tokens")
    return axes


def _get_rows(w: AxisWalk, t: Tensor) -> Axes:
    a, ids = _sources(t, 2)
    axes = w.of(a)
    _require(axes[0] is None, t, "rows over tokens or cells")
    if axes[1] is None:
        own = w.of(ids, w.tokens_where(ids, 0))
    else:
        _require(axes[1] == Axis(w.tokens) and ids.op == "NONE", t, "picks cells, or tokens by computed indices")
        own = w.of(ids, at(0, Axis(Span("outputs", ids.ne[0], 1 if ids.ne[0] == 1 else w.tokens.slots))))
    _require(axes[2] == own[1] and axes[3] == own[2], t, "rows and indices count different things")
    return None, own[0], own[1], own[2]


def _set_rows(w: AxisWalk, t: Tensor) -> Axes:
    b, ids, a = _sources(t, 3)
    axes = w.of(b)
    _require(axes == at(1, axes[1]), t, "stores tokens or cells otherwise than as rows")
    _require(ids.op == "NONE" and ids not in w.persistent, t, "stores at computed indices")
    _require(w.of(ids, at(0, axes[1])) == at(0, axes[1]) and w.of(a) == NONE, t, "rows and indices differ")
    if t.view_src in w.transposed:
        _require(axes[1] is not None or w.tokens.size == 1, t, "stores what does not depend on the tokens")
        if not w.transposed[t.root] and ids not in w.rows:
            w.rows.append(ids)
    return NONE


def _glu(w: AxisWalk, t: Tensor) -> Axes:
    axes = _row_alike(w, t)
    for s in _src(t):
        _require(w.of(s) == axes, t, "its two sources count different things")
    return axes


def _cpy(w: AxisWalk, t: Tensor) -> Axes:
    a, b = _first(t), t.src[1]
    axes = w.of(a, (Axis(w.cells[a.ne[0]]), w.queries(), None, None)) if _casts_mask(w, a) else w.of(a)
    if b is not None and b is not t:
        _require(w.of(b) == axes == NONE or (w.of(b) == axes and a.ne == b.ne), t, "copies into another layout")
    return axes


def _casts_mask(w: AxisWalk, a: Tensor) -> bool:
    return a.op == "NONE" and a not in w.persistent and a.ne[0] in w.cells and a.ne[1] >= w.tokens.size


def _permute(w: AxisWalk, t: Tensor) -> Axes:
    own = w.of(_first(t))
    order = t.params.axes if t.op == "PERMUTE" else (1, 0, 2, 3)
    out: list[Axis | None] = [None] * 4
    for i, axis in zip(order, own, strict=True):
        out[i] = axis
    return tuple(out)


def _reshape(w: AxisWalk, t: Tensor) -> Axes:
    """Tokens are the outermost of what is reshaped, so they are the outermost of the result."""
    a = _first(t)
    own = w.of(a)
    if own == NONE or a.ne == t.ne:
        return own
    _require(sum(x is not None for x in own) == 1, t, "reshapes tokens and cells together")
    i = next(k for k in range(4) if own[k] is not None)
    axis = own[i]
    assert axis is not None  # found above
    _require(prod(a.ne[i + 1 :]) == 1, t, "reshapes across tokens")
    step = prod(a.ne[:i]) * axis.times
    j = max(k for k in range(4) if t.ne[k] != 1)
    inner = prod(t.ne[:j])
    _require(step % inner == 0 and axis.span.kind != "cells", t, "reshapes across tokens")
    return at(j, Axis(axis.span, step // inner))


def _view(w: AxisWalk, t: Tensor) -> Axes:
    a = _first(t)
    if t.view_src in w.transposed:
        _require(a.op == "NONE" or w.of(a) == NONE, t, "a view of a view of a cache")
        i, capacity = w.cells_of(t)
        span = w.cells.get(t.ne[i])
        _require(span is not None and span.slots == capacity, t, "shows a number of cells that no mask has")
        return at(i, Axis(span)) if span is not None else NONE
    own = w.of(a)
    if own == NONE:
        return NONE
    _require(sum(x is not None for x in own) == 1, t, "shows a part of tokens and cells")
    j = next(k for k in range(4) if own[k] is not None)
    same = [k for k in range(4) if t.ne[k] > 1 and t.nb[k] == a.nb[j] and t.ne[k] == a.ne[j]]
    last = t.view_offs - a.view_offs + sum((t.ne[k] - 1) * t.nb[k] for k in range(4) if k not in same)
    _require(len(same) == 1 and last < a.nb[j], t, "shows some of the tokens only")
    return at(same[0], own[j])


ALIKE = ("ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP", "SQR", "SQRT", "LOG", "SIN", "COS", "UNARY", "DUP")
ROWS = ("NORM", "RMS_NORM", "L2_NORM", "ARGSORT", "TOP_K")
RULES: Mapping[str, Callable[[AxisWalk, Tensor], Axes]] = {
    **dict.fromkeys(ALIKE, _alike),
    **dict.fromkeys(ROWS, _row_alike),
    "SUM_ROWS": _sums, "SOFT_MAX": _soft_max, "FLASH_ATTN_EXT": _flash_attn_ext, "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id, "ROPE": _rope, "GET_ROWS": _get_rows, "SET_ROWS": _set_rows, "GLU": _glu, "CPY": _cpy,
    "CONT": _reshape, "RESHAPE": _reshape, "PERMUTE": _permute, "TRANSPOSE": _permute, "VIEW": _view,
    "REPEAT": _unknown_size, "NONE": _alias,
}  # fmt: skip
"""Op -> the axes of a node from those of its sources."""
