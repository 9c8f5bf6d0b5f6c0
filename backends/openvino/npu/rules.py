"""How each op carries tokens and cells from its sources to its result, and which ops treat the places of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from math import prod

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

from .spans import NONE, Axes, Axis, FixedError, Rule, Span, Spans, Walk, at, axes_of, needed


def _src(t: Tensor) -> Iterator[Tensor]:
    return (s for s in t.src if s is not None and s is not t)


def _first(t: Tensor) -> Tensor:
    s = t.src[0]
    if s is None:
        raise FixedError(f"{t}: src[0] is absent")
    return s


def _require(holds: bool, t: Tensor, what: str) -> None:  # reads as an assertion
    if not holds:
        raise FixedError(f"{t}: {what}")


def _untouched(w: Walk, t: Tensor) -> Axes:
    """An op nothing is known about: fine as long as it sees neither tokens nor cells."""
    for s in _src(t):
        _require(w.of(s) == NONE, t, f"{t.op} over tokens or cells has no rule")
    return NONE


def _alias(w: Walk, t: Tensor) -> Axes:
    _require(t.view_src in w.persistent and t.view_src not in w.transposed, t, "a view of a tensor without an op")
    return NONE


def _unknown_size(w: Walk, t: Tensor) -> Axes:
    del w
    raise FixedError(f"{t}: its size is not its sources'")


def _alike(w: Walk, t: Tensor) -> Axes:
    """Element by element; a src of fewer elements is repeated."""
    a = _first(t)
    axes = w.of(a, w.tokens_where(a, 1))
    for s in _src(t):
        if s is a:
            continue
        own = w.of(s, axes_of([x if n != 1 else None for x, n in zip(axes, s.ne, strict=True)]))
        for x, y, n in zip(axes, own, s.ne, strict=True):
            _require(y == x or (y is None and n == 1), t, f"{s} is repeated along tokens or cells")
    return axes


def _row_alike(w: Walk, t: Tensor) -> Axes:
    """Whole rows, each by itself."""
    axes = _alike(w, t)
    _require(axes[0] is None, t, "mixes what lies along a row of tokens or cells")
    return axes


def _sums(w: Walk, t: Tensor) -> Axes:
    axes = w.of(_first(t))
    _require(axes[0] is None, t, "adds up tokens or cells")
    return axes


def _mask(w: Walk, mask: Tensor) -> Axes:
    cells = w.cells[mask.ne[0]]
    axes = w.of(mask, (Axis(cells), w.queries(), None, None))
    leaf = mask.root if mask.op == "NONE" else _first(mask) if mask.op == "CPY" else mask
    _require(leaf.op == "NONE" and leaf not in w.persistent, mask, "a mask must be an input, or an input cast")
    w.masks[leaf] = cells
    return axes


def _soft_max(w: Walk, t: Tensor) -> Axes:
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


def _flash_attn_ext(w: Walk, t: Tensor) -> Axes:
    q, k, v = t.src[:3]
    mask = t.src[3] if len(t.src) > 3 else None
    if q is None or k is None or v is None or mask is None:
        raise FixedError(f"{t}: attention without a mask")
    own = _mask(w, mask)
    _require(w.of(q) == at(1, own[1]), t, "q counts something else than its mask's rows")
    _require(w.of(k) == w.of(v) == at(1, own[0]), t, "k or v count something else than its mask's columns")
    return at(2, own[1])


def _mul_mat(w: Walk, t: Tensor) -> Axes:
    a, b = t.src[:2]
    if a is None or b is None:
        raise FixedError(f"{t}: src is absent")
    x, y = w.of(a), w.of(b, w.tokens_where(b, 1))
    _require(x[2] is None and x[3] is None, t, "src[0] has tokens or cells in its outer dimensions")
    if x[0] is not None or y[0] is not None:
        cells = x[0] is not None and x[0].span.kind == "cells"
        _require(x[0] == y[0] and cells and b in w.zeroed, t, "adds up tokens, or cells that no mask hides")
    return x[1], y[1], y[2], y[3]


def _mul_mat_id(w: Walk, t: Tensor) -> Axes:
    a, b, ids = t.src[:3]
    if a is None or b is None or ids is None:
        raise FixedError(f"{t}: src is absent")
    x, y = w.of(b), w.of(ids)
    _require(w.of(a) == NONE and x[0] is None, t, "adds up tokens or cells")
    _require(y[0] is None and y[1] == x[2], t, "ids and src[1] count different things")
    return x


def _rope(w: Walk, t: Tensor) -> Axes:
    a, pos = t.src[:2]
    if a is None or pos is None:
        raise FixedError(f"{t}: src is absent")
    axes = w.of(a)
    _require(axes[0] is None, t, "turns pairs of tokens or cells")
    own = w.of(pos, at(0, axes[2]))
    _require(own[0] == axes[2] and pos.ne[0] == a.ne[2], t, "positions that are not one per token")
    for s in t.src[2:]:
        if s is not None:
            _require(w.of(s) == NONE, t, "frequency factors that change with the tokens")
    return axes


def _get_rows(w: Walk, t: Tensor) -> Axes:
    a, ids = t.src[:2]
    if a is None or ids is None:
        raise FixedError(f"{t}: src is absent")
    axes = w.of(a)
    _require(axes[0] is None, t, "rows over tokens or cells")
    if axes[1] is None:
        own = w.of(ids, w.tokens_where(ids, 0))
    else:
        _require(axes[1] == Axis(w.tokens) and ids.op == "NONE", t, "picks cells, or tokens by computed indices")
        own = w.of(ids, at(0, Axis(Span("outputs", ids.ne[0], 1 if ids.ne[0] == 1 else w.tokens.slots))))
    _require(axes[2] == own[1] and axes[3] == own[2], t, "rows and indices count different things")
    return None, own[0], own[1], own[2]


def _set_rows(w: Walk, t: Tensor) -> Axes:
    b, ids, a = t.src[:3]
    if b is None or ids is None or a is None:
        raise FixedError(f"{t}: src is absent")
    axes = w.of(b)
    _require(axes == at(1, axes[1]), t, "stores tokens or cells otherwise than as rows")
    _require(ids.op == "NONE" and ids not in w.persistent, t, "stores at computed indices")
    _require(w.of(ids, at(0, axes[1])) == at(0, axes[1]) and w.of(a) == NONE, t, "rows and indices differ")
    if t.view_src in w.transposed:
        _require(axes[1] is not None or w.tokens.size == 1, t, "stores what does not depend on the tokens")
        if not w.transposed[t.root] and ids not in w.rows:
            w.rows.append(ids)
    return NONE


def _glu(w: Walk, t: Tensor) -> Axes:
    axes = _row_alike(w, t)
    for s in _src(t):
        _require(w.of(s) == axes, t, "its two sources count different things")
    return axes


def _cpy(w: Walk, t: Tensor) -> Axes:
    a, b = t.src[:2]
    if a is None:
        raise FixedError(f"{t}: src is absent")
    axes = w.of(a, (Axis(w.cells[a.ne[0]]), w.queries(), None, None)) if _casts_mask(w, a) else w.of(a)
    if b is not None and b is not t:
        _require(w.of(b) == axes == NONE or (w.of(b) == axes and a.ne == b.ne), t, "copies into another layout")
    return axes


def _casts_mask(w: Walk, a: Tensor) -> bool:
    return a.op == "NONE" and a not in w.persistent and a.ne[0] in w.cells and a.ne[1] >= w.tokens.size


def _permute(w: Walk, t: Tensor) -> Axes:
    own = w.of(_first(t))
    order = t.op_params[:4] if t.op == "PERMUTE" else (1, 0, 2, 3)
    out: list[Axis | None] = [None] * 4
    for i, axis in zip(order, own, strict=True):
        out[i] = axis
    return axes_of(out)


def _reshape(w: Walk, t: Tensor) -> Axes:
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


def _view(w: Walk, t: Tensor) -> Axes:
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
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ALIKE, _alike),
    **dict.fromkeys(ROWS, _row_alike),
    "SUM_ROWS": _sums, "SOFT_MAX": _soft_max, "FLASH_ATTN_EXT": _flash_attn_ext, "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id, "ROPE": _rope, "GET_ROWS": _get_rows, "SET_ROWS": _set_rows, "GLU": _glu, "CPY": _cpy,
    "CONT": _reshape, "RESHAPE": _reshape, "PERMUTE": _permute, "TRANSPOSE": _permute, "VIEW": _view,
    "REPEAT": _unknown_size, "NONE": _alias,
}  # fmt: skip
"""Op -> the axes of a node from those of its sources."""


def follow(graph: Graph, persistent: AbstractSet[Tensor], chunk: int) -> Spans:
    """The axes of every tensor of a graph that attends through masks to caches which it writes by SET_ROWS.

    Args:
        graph: one step.
        persistent: weights and caches: their sizes never change.
        chunk: tokens of a compiled graph, for more than one.

    Raises:
        FixedError: there is no such attention, or an op over tokens or cells that is not known to treat them alike.
    """
    tensors = needed(graph)
    return Walk(tensors, persistent, chunk).run(tensors, RULES, _untouched)
