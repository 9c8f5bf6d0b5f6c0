"""A graph at its compiled size, the inputs of each of its runs, and their outputs.

A CPY into a window of a cache is first replaced by a SET_ROWS: then the window's position is an input, and one model
serves all steps. A chunk is padded with its last token. The padding computes the same values and stores them in the
same cell, so nothing has to be hidden. The graph's masks hide the cells beyond its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backends.openvino.axes import NONE, Axes, Axis, FixedError
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import (
    Bytes,
    Dims,
    Tensor,
    contiguous_nb,
    dims,
    is_contiguous,
    nbytes,
    nelements,
    new_tensor,
    packed_nbytes,
    strided,
)
from conformance.ggml.types import F32, I64

from .axes import Spans

Array: TypeAlias = NDArray[Any]
_B = Builder()


# -- CPY into a window of a cache as SET_ROWS -------------------------------------------------------------------------
def indexed(graph: Graph, persistent: AbstractSet[Tensor]) -> tuple[Graph, dict[Tensor, Bytes]]:
    """Replace each CPY of rows, or of their transpose, into a cache window; return new inputs.

    The inputs are the rows of the windows. The graph itself is returned if there is no such CPY.
    """
    read = {s for n in graph for s in n.src if s is not n}
    nodes: list[Tensor] = []
    inputs: dict[Tensor, Bytes] = {}
    for node in graph:
        store = _stored(node, persistent) if node.op == "CPY" and node not in read else None
        if store is None:
            nodes.append(node)
            continue
        new, ids, rows = store
        inputs[ids] = rows.view(np.uint8)
        for t in new:
            t.flags |= node.flags
        nodes += new
    return (Graph(nodes), inputs) if inputs else (graph, {})


def _stored(node: Tensor, persistent: AbstractSet[Tensor]) -> tuple[list[Tensor], Tensor, NDArray[np.int64]] | None:
    a, b = node.src[:2]
    root = node.view_src
    if a is None or b is None or root is None or b.op != "VIEW":
        return None
    if root not in persistent or root.ne[2] * root.ne[3] != 1:
        return None
    return _rows(a, b, root) or _columns(a, b, root)


def _rows(a: Tensor, b: Tensor, root: Tensor) -> tuple[list[Tensor], Tensor, NDArray[np.int64]] | None:
    """Replace a copy of whole, consecutive rows."""
    width = root.ne[0]
    whole = not b.view_offs % root.nb[1] and not nelements(b) % width
    if not (whole and is_contiguous(b) and is_contiguous(a) and a.type is F32):
        return None
    n = nelements(b) // width
    ids = new_tensor(I64, n)
    rows = _B.reshape_2d(a, width, n)
    return [rows, _B.set_rows(root, rows, ids)], ids, np.arange(n, dtype=np.int64) + b.view_offs // root.nb[1]


def _columns(a: Tensor, b: Tensor, root: Tensor) -> tuple[list[Tensor], Tensor, NDArray[np.int64]] | None:
    """Replace a copy of transposed rows, whose elements lie a whole cache apart."""
    x = a.src[0] if a.op == "TRANSPOSE" else None
    n, width = b.ne[:2]
    size = root.type.type_size
    fits = b.nb[0] == size and b.nb[1] * width == nbytes(root) and b.ne[2] * b.ne[3] == 1
    if x is None or not (fits and is_contiguous(x) and x.type is F32 and x.ne[:2] == (width, n)):
        return None
    ids = new_tensor(I64, n * width)
    rows, column = _B.reshape_2d(x, 1, n * width), _B.reshape_2d(root, 1, nelements(root))
    cells = np.arange(n, dtype=np.int64)[:, None] + b.view_offs // size
    places = cells + np.arange(width, dtype=np.int64) * (b.nb[1] // size)
    return [rows, column, _B.set_rows(column, rows, ids)], ids, places.reshape(-1)


# -- a graph at another size ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sized:
    """A graph at another size."""

    graph: Graph
    twin: dict[Tensor, Tensor]
    """Tensor of the requested graph -> the one in `graph`; a persistent tensor is its own."""


def _ne(t: Tensor, axes: Axes) -> Dims:
    return dims(*(n if x is None else x.span.slots * x.times for n, x in zip(t.ne, axes, strict=True)))


def _nb(t: Tensor, ne: Dims) -> Dims:
    """Return `t`'s strides; the stride of a dimension of 1 is irrelevant, and set as in ggml."""
    nb = list(t.nb)
    for i in range(1, len(nb)):
        if ne[i] == 1:
            nb[i] = contiguous_nb(t.type, ne)[1] if i == 1 and nb[0] == t.type.type_size else nb[i - 1] * ne[i - 1]
    return dims(*nb)


def fingerprint(spans: Spans, persistent: AbstractSet[Tensor]) -> Hashable:
    """Return a key, equal for two graphs if `sized` makes the same graph of both."""
    index: dict[Tensor | None, int] = {t: i for i, t in enumerate(spans.axes)}
    index[None] = -1
    parts = []
    for t, axes in spans.axes.items():
        ne = t.ne if axes == NONE else _ne(t, axes)
        edges = tuple([index[s] for s in t.src])
        layout = (_nb(t, ne), t.view_offs) if t.op == "VIEW" else t if t in persistent else None
        parts.append((t.op, t.op_params, t.type.id, t.flags, ne, edges, index[t.view_src], layout))
    return tuple(parts)


def sized(graph: Graph, spans: Spans) -> Sized:
    """Return `graph`'s computed part with spans of all slots; FixedError if ggml refuses it."""
    twin: dict[Tensor, Tensor] = {}
    nodes = set(graph.nodes)
    for t, axes in spans.axes.items():
        if t.op == "NONE" and t.view_src is None:
            ne = _ne(t, axes)
            twin[t] = t if ne == t.ne else replace(t, ne=ne, nb=contiguous_nb(t.type, ne))
            continue
        ne = _ne(t, axes)
        new = replace(
            t,
            ne=ne,
            nb=_nb(t, ne),
            src=tuple(None if s is None or s is t else twin[s] for s in t.src),
            view_src=None if t.view_src is None else twin[t.view_src],
        )
        if t in t.src:
            new.src = tuple(new if s is t else x for s, x in zip(t.src, new.src, strict=True))
        twin[t] = new
        if t.op == "NONE":
            continue
        try:
            layout = DECLARATIONS[t.op].layout(new)
        except GraphError as e:
            raise FixedError(f"{t}: at {new.ne}: {e}") from None
        if layout[:2] != (t.type, new.ne):
            raise FixedError(f"{t}: {list(new.ne)} expected at the compiled size, ggml gives {list(layout[1])}")
        _, new.ne, new.nb, new.view_src, new.view_offs = layout
    out = Graph([twin[t] for t in twin if t in nodes])
    try:
        out.validate()
    except GraphError as e:
        raise FixedError(f"at the compiled size: {e}") from None
    return Sized(out, twin)


# -- runs: what goes in and what comes out ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Chunk:
    """A run: its tokens, and the outputs that GET_ROWS picks among them."""

    first: int
    size: int
    outputs: dict[Tensor, NDArray[np.int64]]
    """Leaf with indices of tokens -> its positions with tokens of this chunk."""


def _indices(t: Tensor, data: Bytes) -> NDArray[np.int64]:
    return strided(data, t).astype(np.int64).reshape(-1)


def _picks(spans: Spans, inputs: Mapping[Tensor, Bytes]) -> dict[Tensor, NDArray[np.int64]]:
    return {
        t: _indices(t, inputs[t])
        for t, axes in spans.axes.items()
        if t in inputs and axes[0] is not None and axes[0].span.kind == "outputs"
    }


def chunks(spans: Spans, inputs: Mapping[Tensor, Bytes]) -> list[Chunk]:
    """Return runs for all tokens; FixedError on reads of later chunks or too many outputs."""
    n, step = spans.tokens.size, spans.tokens.slots
    picks = _picks(spans, inputs)
    if len(picks) > 1:
        raise FixedError("outputs are picked from the tokens by more than one input")
    out = []
    for first in range(0, n, step):
        size = min(step, n - first)
        here = {t: np.flatnonzero((x >= first) & (x < first + size)) for t, x in picks.items()}
        if any(len(x) > step for t, x in here.items()):
            raise FixedError(f"more than {step} outputs are picked from {size} tokens")
        out.append(Chunk(first, size, here))
    if len(out) > 1:
        _check_order(spans, inputs, out)
    return out


def _check_order(spans: Spans, inputs: Mapping[Tensor, Bytes], runs: Sequence[Chunk]) -> None:
    if not spans.rows:
        raise FixedError("no cache is written by SET_ROWS, so the cells of a chunk are unknown")
    for mask, cells in spans.cells.items():
        seen = _array(mask, inputs[mask])[0, 0] > -np.inf
        for run in runs[:-1]:
            for ids in spans.rows:
                later = _indices(ids, inputs[ids])[run.first + run.size :]
                later = later[later < cells.size]
                if seen[run.first : run.first + run.size][:, later].any():
                    raise FixedError("a token sees cells that are filled by later tokens")


def _array(t: Tensor, data: Bytes) -> Array:
    """Return elements in NumPy's order; for a block type, its blocks."""
    if t.type.dtype is not None:
        return data.view(t.type.dtype).reshape(t.shape)
    if t.type.blck_size == 1:
        return data.view("<u2").reshape(t.shape)
    return data.reshape(*t.shape[:-1], t.ne[0] // t.type.blck_size, t.type.type_size)


def feed(t: Tensor, data: Bytes, axes: Axes, run: Chunk, picks: Mapping[Tensor, NDArray[np.int64]]) -> Bytes:
    """Return the data of input `t` in one run."""
    x = _array(t, data)
    for i, axis in enumerate(axes):
        if axis is None:
            continue
        span = axis.span
        at = 3 - i
        if span.kind == "tokens":
            x = np.take(x, _places(run.first, run.size, axis), at)
        elif span.kind == "cells":
            width = [(0, span.slots - span.size if k == at else 0) for k in range(x.ndim)]
            x = np.pad(x, width, constant_values=-np.inf)
        else:
            here = picks[t][run.outputs[t]] - run.first
            filled = np.resize(here, span.slots) if len(here) else np.zeros(span.slots)
            filled[len(here) :] = here[-1] if len(here) else 0
            x = filled.astype(t.type.dtype).reshape([span.slots if k == at else 1 for k in range(4)])
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _places(first: int, size: int, axis: Axis) -> NDArray[np.int64]:
    """Return tokens of a chunk, padded with the last one, each with its `times` neighbours."""
    token = np.minimum(np.arange(axis.span.slots), size - 1) + first
    return (token[:, None] * axis.times + np.arange(axis.times)).reshape(-1)


def feeds(
    sized_: Sized, spans: Spans, inputs: Mapping[Tensor, Bytes], runs: Sequence[Chunk]
) -> Iterator[dict[Tensor, Bytes]]:
    """Yield the inputs of each run."""
    picks = _picks(spans, inputs)
    for run in runs:
        yield {
            sized_.twin[t]: data if spans.axes[t] == NONE else feed(t, data, spans.axes[t], run, picks)
            for t, data in inputs.items()
            if t in sized_.twin
        }


def collect(t: Tensor, twin: Tensor, axes: Axes, results: Sequence[Bytes], runs: Sequence[Chunk]) -> Bytes:
    """Collect `t`'s packed bytes from its twin in every run, or the last if it has no tokens."""
    whole = np.empty(packed_nbytes(t), np.uint8)
    out = _array(t, whole)
    for data, run in zip(results, runs, strict=True):
        x = _array(twin, data)
        to: list[Any] = [slice(None)] * out.ndim
        source: list[Any] = [slice(None)] * out.ndim
        for i, axis in enumerate(axes):
            if axis is None:
                continue
            at, n = 3 - i, axis.times
            if axis.span.kind == "tokens":
                to[at], source[at] = slice(run.first * n, (run.first + run.size) * n), slice(run.size * n)
            elif axis.span.kind == "cells":
                source[at] = slice(axis.span.size * n)
            else:
                (places,) = run.outputs.values()
                to[at], source[at] = places, slice(len(places))
        out[tuple(to)] = x[tuple(source)]
    return whole
