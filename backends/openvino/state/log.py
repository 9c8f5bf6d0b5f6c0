"""Caches that a model can keep as logs, recognised from a graph's structure.

A log holds rows in the order they were written, whatever cells of the cache they went to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.backend.translating.plan import Role
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor, computes, is_contiguous, nelements
from conformance.ggml.types import BF16, F16, F32, I32, I64

TYPES = frozenset({F32, F16, BF16})
"""Types of caches whose every value float32 holds."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A FLASH_ATTN_EXT over two caches of the same shape."""

    node: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Logged:
    """Caches that one graph writes to the same cells and attends to with the same mask: one log."""

    caches: tuple[Tensor, ...]
    writers: tuple[Tensor, ...]
    """SET_ROWS or CPY that appends to each cache."""
    places: tuple[Tensor, ...]
    """Of the writers, one for each leaf of ids and each place: they must all mean the same cells."""
    attentions: tuple[Attention, ...]
    mask: Tensor
    heads: int
    head_size: int
    tokens: int
    """New rows per stream."""
    first: int
    """The first stream attended to."""
    streams: int
    size: int
    """Cells per stream."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for graphs that can go on with one another's log."""
        return self.caches, self.heads, self.head_size, self.first, self.streams, self.size


def logs(graph: Graph, roles: Mapping[Tensor, Role], outputs: Sequence[Tensor]) -> list[Logged] | str:
    """The logs that the caches of `graph` can be kept as, or why one cannot.

    Each cache must be written by one node of `WRITES`, and read after it by
    FLASH_ATTN_EXT alone, as K or V, through a view of the first cells of consecutive streams.
    """
    caches = [t for t, role in roles.items() if role == "cache"]
    nodes = [n for n in graph if computes(n)]
    place = {n: i for i, n in enumerate(nodes)}
    found: dict[tuple[Any, ...], list[Attention]] = {}
    writers: dict[Tensor, Tensor] = {}
    for t in caches:
        writer = _writer(t, nodes, roles)
        if isinstance(writer, str):
            return writer
        writers[t] = writer
    for node in nodes:
        read = [s for s in node.src if s is not None and s.root in writers and node is not writers[s.root]]
        if not read:
            continue
        reason = _unfit(node, roles)
        if reason:
            return reason
        k, v, mask = (s for s in node.src[1:4] if s is not None)
        if place[node] < max(place[writers[k.root]], place[writers[v.root]]):
            return f"{node}: reads a cache before it is written"
        found.setdefault((mask, *_extent(k)), []).append(Attention(node, k.root, v.root, mask))
    if any(t.root in writers for t in outputs):
        return "a cache is an output of the graph"
    return _grouped(found, writers)


def _grouped(found: Mapping[tuple[Any, ...], list[Attention]], writers: Mapping[Tensor, Tensor]) -> list[Logged] | str:
    out = []
    for (mask, heads, head_size, first, streams, size), attentions in found.items():
        caches = tuple(dict.fromkeys(t for a in attentions for t in (a.k, a.v)))
        node = attentions[0].node
        places = {
            (writers[t].src[1] if writers[t].op == "SET_ROWS" else writers[t].view_offs): writers[t] for t in caches
        }
        rows = {nelements(writers[t].src[0] or t) for t in caches}  # the caches' rows are of one size
        if any(rows != {a.node.ne[2] * streams * heads * head_size} for a in attentions):
            return f"{node}: not every query has a row of its own in the cache"
        written = tuple(writers[t] for t in caches)
        shape = heads, head_size, node.ne[2], first, streams, size
        out.append(Logged(caches, written, tuple(places.values()), tuple(attentions), mask, *shape))
    attended = [t for log in out for t in log.caches]
    if len(set(attended)) < len(attended):
        return "a cache is attended to with two masks"
    if len(attended) < len(writers):
        return "a cache is written that nothing attends to"
    return out


def _writer(t: Tensor, nodes: Sequence[Tensor], roles: Mapping[Tensor, Role]) -> Tensor | str:
    """The one node that writes whole rows of `t`."""
    writers = [n for n in nodes if n.root is t]
    if t.type not in TYPES:
        return f"{t}: log rows are float32, which {t.type} blocks are not"
    if len(writers) != 1 or writers[0].op not in WRITES:
        return f"{t}: one {' or '.join(WRITES)} expected, written by {', '.join(n.op for n in writers) or 'nothing'}"
    node = writers[0]
    if node.src[0] is None or node.src[0].root is t or not WRITES[node.op](node, t, roles):
        return f"{node}: does not write whole rows of {t} that an input or its place says"
    return node


def _by_ids(node: Tensor, t: Tensor, roles: Mapping[Tensor, Role]) -> bool:
    """Whether this SET_ROWS writes whole rows of `t` which an input says."""
    ids = node.src[1]
    return (
        ids is not None
        and (node.ne[0], node.nb[1], node.view_offs) == (t.ne[0], t.nb[1], 0)
        and (node.ne[2] * node.ne[3], ids.ne[1] * ids.ne[2]) == (1, 1)
        and roles.get(ids) == "input"
        and ids.type in (I32, I64)
    )


def _by_place(node: Tensor, t: Tensor, _: Mapping[Tensor, Role]) -> bool:
    """Whether this CPY writes whole rows of `t` that follow one another."""
    return is_contiguous(node) and node.view_offs % t.nb[1] == 0 and nelements(node) % t.ne[0] == 0


WRITES: dict[str, Callable[[Tensor, Tensor, Mapping[Tensor, Role]], bool]] = {"SET_ROWS": _by_ids, "CPY": _by_place}
"""What can append to a log: `f(node, cache, roles)`, whether it does."""


def _unfit(node: Tensor, roles: Mapping[Tensor, Role]) -> str:
    """Why `node`, which reads a cache, is no attention over a log."""
    if node.op != "FLASH_ATTN_EXT":
        return f"{node}: reads a cache, and is no FLASH_ATTN_EXT"
    q, k, v, mask, sinks = (*node.src, None, None)[:5]
    if q is None or k is None or v is None or mask is None or sinks is not None:
        return f"{node}: has sinks or no mask"
    if node.param_f32(1) or node.param_f32(2):
        return f"{node}: has ALiBi slopes or a softcap"
    if q.root is k.root or q.type is not F32 or roles.get(k.root) != "cache" or roles.get(v.root) != "cache":
        return f"{node}: K or V is no cache"
    if roles.get(mask) != "input" or mask.type not in (F16, F32) or mask.ne[2] != 1 or mask.ne[3] not in (1, q.ne[3]):
        return f"{node}: the mask is no input, or differs from head to head"
    extents = _extent(k), _extent(v)
    if extents[0] is None or extents[0] != extents[1] or extents[0][3] != q.ne[3]:
        return f"{node}: K and V are not the first cells of the queries' streams"
    return ""


def _extent(x: Tensor) -> Any:  # noqa: ANN401  # a tuple of five ints, or None
    """Heads, head size, first stream, streams, cells per stream of the part of a cache that `x` shows: or None.

    `x`: ne (head size, cells, heads, streams).
    """
    root, ts = x.root, x.type.type_size
    row = root.nb[1]
    size = x.nb[3] // row if x.ne[3] > 1 else root.ne[1]
    stream = size * row
    right = (
        x.nb[0] == ts
        and (x.nb[1] == row or x.ne[1] == 1)
        and (x.nb[2] == ts * x.ne[0] or x.ne[2] == 1)
        and (x.nb[3] == stream or x.ne[3] == 1)
        and x.ne[0] * x.ne[2] == root.ne[0]
        and x.view_offs % stream == 0
        and x.ne[1] <= size
    )
    return (x.ne[2], x.ne[0], x.view_offs // stream, x.ne[3], size) if right else None
