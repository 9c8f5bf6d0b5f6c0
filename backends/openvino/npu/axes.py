"""Axes that count tokens or KV cache cells, derived from a graph's ops, never from names.

A graph with known axes can be computed at another size: tokens in chunks, cells up to the cache's capacity. A graph
with an op over such axes that has no rule runs at its own size.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from backends.openvino.axes import NONE, Axes, AxisContext, FixedError, Span, others, require
from backends.openvino.state.append_log import reached
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import VIEW_OPS, Tensor, computes

STORE = 2
"""Index among SET_ROWS's sources of its destination."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Axes and leaves that `follow` finds."""

    axes: dict[Tensor, Axes]
    """Every tensor that a computed node needs, in the graph's order."""
    tokens: Span
    cells: dict[Tensor, Span]
    """Mask -> the span of its columns."""
    rows: tuple[Tensor, ...]
    """Leaves with the cell of each token."""


def source(t: Tensor, name: str) -> Tensor | None:
    """Return the source that ggml calls `name`; None if the node has none."""
    declared = DECLARATIONS[t.op].src
    i = declared.index(name) if name in declared else len(t.src)
    return t.src[i] if i < len(t.src) else None


def follow(graph: Graph, persistent: AbstractSet[Tensor], chunk: int) -> Spans:
    """Return the axes of every tensor of a graph with masked attention to SET_ROWS caches.

    `persistent` are weights and caches, whose sizes never change; `chunk` is the number of tokens of a compiled graph
    with more than one. FixedError if there is no such attention, or an op over tokens or cells has no rule.
    """
    from backends.openvino.emit import AXES  # noqa: PLC0415  # needs openvino, which may be absent until now

    live = reached(n for n in graph if computes(n))
    tensors = [t for t in graph.tensors() if t in live]
    masks = {t: mask for t in tensors if t.op in AXES and (mask := source(t, "mask")) is not None}
    w = AxisContext(tensors, masks, persistent, chunk)
    for t in tensors:
        if t.op == "NONE" and t.view_src is None:
            if t in persistent:
                w.axes[t] = NONE
            continue
        axes = w.axes[t] = AXES.get(t.op, _untouched)(w, t)
        for s in t.src:
            if s is not None:
                w.axes.setdefault(s, NONE)
        over_cells = [x.span.kind == "cells" for x in axes if x is not None]
        require(len(set(over_cells)) == len(over_cells), t, "a product of all tokens with all tokens")
        if t.op not in VIEW_OPS:
            _check_reads(w, t)
    return Spans({t: w.axes[t] for t in tensors}, w.tokens, w.masks, tuple(w.rows))


def _check_reads(w: AxisContext, t: Tensor) -> None:
    """Raise FixedError for a read without a mask: it would see cells before they are written."""
    for i, s in enumerate(t.src):
        stored_into = t.op == "SET_ROWS" and i == STORE
        if s is not None and s.root in w.transposed and w.axes[s] == NONE and not stored_into:
            raise FixedError(f"{t}: reads a cache without a mask")


def _untouched(w: AxisContext, t: Tensor) -> Axes:
    """Accept an op without a rule if it has neither tokens nor cells."""
    for s in others(t):
        require(w.axes_of(s) == NONE, t, f"{t.op} over tokens or cells has no rule")
    return NONE
