"""Logs: caches as rows in the order in which they were written, whatever their cells.

`logs` recognises from a graph's structure which caches can be logs. `fused` makes the graph that attends to the rows of
its logs, independent of the number of cells in its views. `Table` is the host's record of the cell at each position of
a log: attention is independent of the order of its keys as long as the mask has the same order, so each step's mask is
laid out by the table. Rewinding, removed sequences and reused cells change the table, not the model. Needs no OpenVINO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backends.openvino.translating.plan import Role
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import operand
from conformance.ggml.tensor import VIEW_OPS, Bytes, Dims, Tensor, computes, is_contiguous, nelements, new_tensor
from conformance.ggml.types import BF16, F16, F32, I32, I64

TYPES = frozenset({F32, F16, BF16})
"""Types of caches whose every value is exact in float32."""
MARK = 15
"""Index of the unused op_param that is 1 in a node whose cache is a log."""
NOTHING = -1
"""Table entry of a position without a cell, and of a cell without a position."""
SPARE = 256
"""Number of dead positions after which a log is laid out again, if they are a quarter of it."""
Cells: TypeAlias = NDArray[np.int64]
Extent: TypeAlias = tuple[int, int, int, int, int]
"""Heads, head size, first stream, streams, cells per stream."""


# -- recognising logs -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Logged:
    """Caches that a graph writes to the same cells and attends to with the same mask: one log."""

    caches: tuple[Tensor, ...]
    writers: tuple[Tensor, ...]
    """SET_ROWS or CPY that appends to each cache."""
    places: tuple[Tensor, ...]
    """Writers, one for each leaf of ids and each offset: all must write the same cells."""
    attentions: tuple[Tensor, ...]
    """FLASH_ATTN_EXT nodes over two of the caches."""
    mask: Tensor
    heads: int
    head_size: int
    tokens: int
    """New rows per stream."""
    first: int
    """First stream to which queries attend."""
    streams: int
    size: int
    """Cells per stream."""

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for graphs that can continue each other's log."""
        return self.caches, self.heads, self.head_size, self.first, self.streams, self.size


def roles_in(graph: Graph, persistent: Mapping[Tensor, Role]) -> dict[Tensor, Role]:
    """Return leaf of `graph` that owns its bytes -> its role."""
    nodes = set(graph.nodes)
    return {t: persistent.get(t, "input") for t in graph.tensors() if t.view_src is None and t not in nodes}


def caches_of(attention: Tensor) -> tuple[Tensor, Tensor]:
    """Return the caches of which K and V are views."""
    return operand(attention, 1).root, operand(attention, 2).root


def logs(graph: Graph, roles: Mapping[Tensor, Role], outputs: Sequence[Tensor]) -> list[Logged] | str:
    """Return the logs as which the caches of `graph` can be stored, or why one cannot.

    One node of `WRITES` must write each cache, and only FLASH_ATTN_EXT may read it after that, as K or V, through a
    view of the first cells of consecutive streams.
    """
    caches = [t for t, role in roles.items() if role == "cache"]
    nodes = [n for n in graph if computes(n)]
    place = {n: i for i, n in enumerate(nodes)}
    groups: dict[tuple[Tensor, Extent | None], list[Tensor]] = {}
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
        groups.setdefault((mask, _extent(k)), []).append(node)
    if any(t.root in writers for t in outputs):
        return "a cache is an output of the graph"
    return _grouped(groups, writers)


def _grouped(
    groups: Mapping[tuple[Tensor, Extent | None], list[Tensor]], writers: Mapping[Tensor, Tensor]
) -> list[Logged] | str:
    out = []
    for (mask, extent), attentions in groups.items():
        assert extent is not None  # checked by `_unfit`
        heads, head_size, first, streams, size = extent
        caches = tuple(dict.fromkeys(t for a in attentions for t in caches_of(a)))
        node = attentions[0]
        places = {
            (writers[t].src[1] if writers[t].op == "SET_ROWS" else writers[t].view_offs): writers[t] for t in caches
        }
        rows = {nelements(writers[t].src[0] or t) for t in caches}  # the caches' rows have the same size
        if any(rows != {a.ne[2] * streams * heads * head_size} for a in attentions):
            return f"{node}: some queries have no row of their own in the cache"
        written = tuple(writers[t] for t in caches)
        shape = heads, head_size, node.ne[2], first, streams, size
        out.append(Logged(caches, written, tuple(places.values()), tuple(attentions), mask, *shape))
    attended = [t for log in out for t in log.caches]
    if len(set(attended)) < len(attended):
        return "a cache is attended to with two masks"
    if len(attended) < len(writers):
        return "no attention reads a cache that is written"
    return out


def _writer(t: Tensor, nodes: Sequence[Tensor], roles: Mapping[Tensor, Role]) -> Tensor | str:
    """Return the node that writes whole rows of `t`, or why there is none."""
    writers = [n for n in nodes if n.root is t]
    if t.type not in TYPES:
        return f"{t}: log rows are float32, which {t.type} blocks are not"
    if len(writers) != 1 or writers[0].op not in WRITES:
        return f"{t}: one {' or '.join(WRITES)} expected, written by {', '.join(n.op for n in writers) or 'nothing'}"
    node = writers[0]
    if node.src[0] is None or node.src[0].root is t or not WRITES[node.op](node, t, roles):
        return f"{node}: whole rows of {t} expected, at cells given by an input or an offset"
    return node


def _by_ids(node: Tensor, t: Tensor, roles: Mapping[Tensor, Role]) -> bool:
    """Return True if this SET_ROWS writes whole rows of `t` at indices from an input."""
    ids = node.src[1]
    return (
        ids is not None
        and (node.ne[0], node.nb[1], node.view_offs) == (t.ne[0], t.nb[1], 0)
        and (node.ne[2] * node.ne[3], ids.ne[1] * ids.ne[2]) == (1, 1)
        and roles.get(ids) == "input"
        and ids.type in (I32, I64)
    )


def _by_place(node: Tensor, t: Tensor, _: Mapping[Tensor, Role]) -> bool:
    """Return True if this CPY writes whole, consecutive rows of `t`."""
    return is_contiguous(node) and node.view_offs % t.nb[1] == 0 and nelements(node) % t.ne[0] == 0


WRITES: dict[str, Callable[[Tensor, Tensor, Mapping[Tensor, Role]], bool]] = {"SET_ROWS": _by_ids, "CPY": _by_place}
"""Op that can append to a log -> `f(node, cache, roles)`, True if a node does."""


def _unfit(node: Tensor, roles: Mapping[Tensor, Role]) -> str:
    """Return why `node`, which reads a cache, is not attention over a log, or ""."""
    if node.op != "FLASH_ATTN_EXT":
        return f"{node}: FLASH_ATTN_EXT expected, as it reads a cache"
    q, k, v, mask, sinks = (*node.src, None, None)[:5]
    if q is None or k is None or v is None or mask is None or sinks is not None:
        return f"{node}: has sinks, or has no mask"
    if node.params.max_bias or node.params.logit_softcap:
        return f"{node}: has ALiBi slopes or a softcap"
    if q.root is k.root or q.type is not F32 or roles.get(k.root) != "cache" or roles.get(v.root) != "cache":
        return f"{node}: K or V is not a cache"
    if roles.get(mask) != "input" or mask.type not in (F16, F32) or mask.ne[2] != 1 or mask.ne[3] not in (1, q.ne[3]):
        return f"{node}: the mask is not an input, or differs from head to head"
    extent = _extent(k)
    fits = extent is not None and extent == _extent(v) and extent[3] == q.ne[3]
    return "" if fits else f"{node}: K and V are not the first cells of the queries' streams"


def _extent(x: Tensor) -> Extent | None:
    """Return the extent of cache view `x`, (head size, cells, heads, streams), or None."""
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


# -- the graph of the fused form --------------------------------------------------------------------------------------
def is_logged(node: Tensor) -> bool:
    """Return True if `node` appends to a log or attends to one."""
    return node.op_params[MARK] == 1


def fused(graph: Graph, logs: Sequence[Logged], outputs: Sequence[Tensor]) -> tuple[Graph, tuple[Tensor, ...]]:
    """Copy `graph` with n_kv = 1, so that graphs with any n_kv are equal; return its `outputs`.

    Persistent tensors and inputs except masks stay the same objects.
    """
    masks = {m: new_tensor(m.type, 1, *m.ne[1:], name=m.name, flags=m.flags) for m in (log.mask for log in logs)}
    attentions = {a for log in logs for a in log.attentions}
    marked = attentions | {w for log in logs for w in log.writers}
    copies = {
        s: _view(s, (s.ne[0], 1, *s.ne[2:]), s.view_offs) for a in attentions for s in a.src[1:3] if s is not None
    }
    for t in graph.tensors():
        if t in copies:
            continue
        own = {**copies, **masks} if t in attentions else copies
        src = tuple(None if s is None else own.get(s, s) for s in t.src)
        root = None if t.view_src is None else copies.get(t.view_src, t.view_src)
        offset = t.view_offs
        if t in marked and t.op == "CPY":  # it writes at the end of the log, wherever its cells are
            src, offset = (src[0], _view(t, t.ne, 0)), 0
        if t in marked or root is not t.view_src or src != t.src:
            params = (*t.op_params[:MARK], 1) if t in marked else t.op_params
            copies[t] = Tensor(t.type, t.ne, t.nb, t.op, params, src, root, offset, t.flags, t.name)
            if t in t.src:  # ggml_cast makes a node its own src
                copies[t].src = tuple(copies[t] if s is t else s for s in src)
    nodes = [copies.get(n, n) for n in graph]
    wanted = tuple(copies.get(t, t) for t in outputs)
    used = reached([*(n for n in nodes if n.op not in VIEW_OPS), *wanted])
    return Graph(n for n in nodes if n in used), wanted


def _view(x: Tensor, ne: Dims, offset: int) -> Tensor:
    """Return a view with the strides of `x`, directly of its cache."""
    words = tuple(((offset >> shift) + 2**31) % 2**32 - 2**31 for shift in (0, 32))
    return Tensor(x.type, ne, x.nb, "VIEW", (*words, *(0,) * 14), (x.root,), x.root, offset, x.flags, x.name)


def reached(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return `tensors` and everything that they read or view."""
    seen: set[Tensor] = set()
    stack = list(tensors)
    while stack:
        t = stack.pop()
        if t not in seen:
            seen.add(t)
            stack.extend(s for s in (*t.src, t.view_src) if s is not None)
    return seen


# -- the host's account of a log --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Appending:
    """Effect of one step on a log."""

    log: Logged
    cells: Cells
    """Cells written, counted within each stream: (streams, tokens)."""
    mask: NDArray[Any]
    """Mask (streams or 1, 1, tokens, cells)."""
    loaded: NDArray[np.bool_]
    """Cells visible in some row of the mask that the step does not write: (streams, cells)."""


def appendings(own_logs: Sequence[Logged], inputs: Mapping[Tensor, Bytes]) -> list[Appending] | str:
    """Return the effect of a step on each log, or why its inputs do not allow it."""
    out = []
    for log in own_logs:
        cells = _new_cells(log, inputs)
        if isinstance(cells, str):
            return cells
        data = inputs[log.mask].view("<f2" if log.mask.type is F16 else "<f4")
        mask = data.reshape(log.mask.shape)[:, :, : log.tokens]
        through = mask > -np.inf
        if not through.any(axis=3).all():
            return "a query has no visible cell"  # ggml gives zeros, a softmax over nothing NaN
        seen = np.asarray(through[:, 0, 0] if through.shape[1:3] == (1, 1) else through.any(axis=(1, 2)))
        loaded = seen.repeat(log.streams // len(seen), axis=0)
        for stream, row in enumerate(cells):
            loaded[stream, [c for c in row if c < seen.shape[1]]] = False
        out.append(Appending(log, np.array(cells), mask, loaded))
    return out


def _new_cells(log: Logged, inputs: Mapping[Tensor, Bytes]) -> list[list[int]] | str:
    # lists, as a NumPy call costs more than the few numbers of most steps
    rows = [_rows_of(w, inputs) for w in log.places]
    if any(x != rows[0] for x in rows[1:]):
        return "K and V are written to different cells"
    starts = range(log.first * log.size, (log.first + log.streams) * log.size, log.size)
    cells = [[r - start for r in rows[0][i * log.tokens : (i + 1) * log.tokens]] for i, start in enumerate(starts)]
    if any(min(own) < 0 or max(own) >= log.size for own in cells):
        return "rows are written outside the streams of the attention"
    if any(len(set(own)) < len(own) for own in cells):
        return "a cell is written twice"
    return cells


def _rows_of(writer: Tensor, inputs: Mapping[Tensor, Bytes]) -> list[int]:
    """Return the rows of its cache that `writer` writes."""
    ids = writer.src[1]
    if writer.op == "SET_ROWS" and ids is not None:
        rows: list[int] = inputs[ids].view("<i4" if ids.type is I32 else "<i8").tolist()
        return rows
    first = writer.view_offs // writer.root.nb[1]
    return list(range(first, first + nelements(writer) // writer.root.ne[0]))


@dataclass(slots=True)
class Table:
    """Cell at each position of a log."""

    cells: Cells
    """Position -> cell: (streams, positions)."""
    positions: NDArray[np.int64]
    """Cell -> position: (streams, size)."""
    straight: bool
    """True if position i has cell i in every stream."""
    settled: int = 0
    """Positions whose rows the host has."""
    dead: int = 0
    """Number of positions without a cell."""
    endless: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 0), np.bool_))
    """True where K or V is NaN or infinite: (streams or 1, checked positions)."""

    @classmethod
    def of(cls, cells: Cells, size: int) -> Table:
        """Return a table of `cells` whose values are all on the host."""
        streams, count = cells.shape
        positions = np.full((streams, size), NOTHING)
        at = np.broadcast_to(np.arange(count), cells.shape)
        stream, i = np.nonzero(cells != NOTHING)
        positions[stream, cells[stream, i]] = at[stream, i]
        dead = count * streams - len(i)
        return cls(cells, positions, bool((cells == np.arange(count)).all()), count, dead)

    @property
    def length(self) -> int:
        """Positions per stream."""
        return int(self.cells.shape[1])

    def append(self, new: Cells) -> None:
        """Append rows for `new`; earlier positions of these cells become dead."""
        streams = np.arange(len(new))[:, None]
        old = self.positions[streams, new]
        gone = old != NOTHING
        if gone.any():
            self.cells[np.broadcast_to(streams, new.shape)[gone], old[gone]] = NOTHING
            self.dead += int(gone.sum())
        length, tokens = self.length, new.shape[1]
        self.straight = self.straight and not gone.any() and bool((new == length + np.arange(tokens)).all())
        self.positions[streams, new] = length + np.arange(tokens)
        self.cells = np.concatenate([self.cells, new], axis=1)

    def hidden(self, a: Appending) -> NDArray[np.bool_]:
        """Return positions that no query of a step sees, or whose cells it writes: (streams, n)."""
        if self.straight and self.length <= a.loaded.shape[1]:
            return ~a.loaded[:, : self.length]
        shown = (self.cells != NOTHING) & (self.cells < a.loaded.shape[1])
        seen = np.take_along_axis(a.loaded, np.where(shown, self.cells, 0), axis=1)
        unseen: NDArray[np.bool_] = np.logical_not(shown & seen)
        return unseen

    def serves(self, a: Appending) -> bool:
        """Return True if all cells that a step reads are there and not too many positions are dead."""
        if self.dead > max(SPARE, self.cells.size // 4):
            return False
        return not (a.loaded & (self.positions[:, : a.loaded.shape[1]] == NOTHING)).any()

    def laid(self, mask: NDArray[Any]) -> NDArray[Any]:
        """Arrange `mask`, (streams or 1, 1, rows, cells), with one column per position."""
        if self.straight and self.length <= mask.shape[3]:
            return mask[..., : self.length]
        cells = self.cells
        shown = (cells != NOTHING) & (cells < mask.shape[3])
        wide = np.broadcast_to(mask, (len(cells), *mask.shape[1:]))
        out = np.take_along_axis(wide, np.where(shown, cells, 0)[:, None, None, :], axis=3)
        return np.where(shown[:, None, None, :], out, mask.dtype.type(-np.inf))


def to_load(a: Appending) -> Cells:
    """Return the cells that a log must have, (streams, positions), padded to equal length."""
    rest = [np.nonzero(row)[0] for row in a.loaded]
    out = np.full((len(rest), max(map(len, rest))), NOTHING)
    for row, cells in zip(out, rest, strict=True):
        row[: len(cells)] = cells
    return out
