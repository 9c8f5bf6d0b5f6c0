"""What a device under llama.cpp may do wrong: keep what changed, read elsewhere, compute too little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from faulty_device import Device, Fault, Node
from numpy.typing import NDArray

Params = Any
"""`llama_context_params`."""
Ids = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Rows = NDArray[Any]


def always(make: Callable[[], Fault]) -> Device:
    """In every context."""
    return lambda _: make()


def where(holds: Callable[[Params], bool], make: Callable[[], Fault]) -> Device:
    """In contexts with such parameters."""
    return lambda params: make() if holds(params) else None


def _leaves(node: Node, *names: str) -> list[Node]:
    """Inputs among the sources of a node, whose names contain one of `names`."""
    return [s for s in node.src if s.op == "NONE" and any(n in s.name for n in names)]


# --- what a compiled program keeps


def kept(*names: str) -> Callable[[], Fault]:
    """Inputs of such names keep what they held in the first graph of a shape."""

    def make() -> Fault:
        first: dict[tuple[object, ...], Bytes] = {}

        def before(node: Node) -> None:
            for leaf in _leaves(node, *names):
                data = leaf.bytes
                data[:] = first.setdefault((leaf.name, leaf.ne, node.src[0].ne), data.copy())

        return Fault(before)

    return make


def params_kept(op: str) -> Callable[[], Fault]:
    """A compiled program is found again by op and shape; the op_params are those of the first."""

    def make() -> Fault:
        first: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}

        def before(node: Node) -> None:
            if node.op == op:
                params = node.c.op_params
                params[:] = first.setdefault((node.name, node.ne), tuple(params))

        return Fault(before)

    return make


def views_kept() -> Fault:
    """Attention reads the caches where it read them in the first graph of as many streams."""
    first: dict[tuple[str, int], int] = {}

    def before(node: Node) -> None:
        if node.op in ("FLASH_ATTN_EXT", "SOFT_MAX"):
            for s in node.src[1:3]:
                if s.c.view_src:
                    offset = s.c.data - s.root.c.data
                    s.c.data = s.root.c.data + first.setdefault((s.name, s.ne[3]), offset)

    return Fault(before)


def first_stream() -> Fault:
    """Attention reads the caches from their beginning, whichever stream it is told."""

    def before(node: Node) -> None:
        if node.op == "FLASH_ATTN_EXT":
            for s in node.src[1:3]:
                s.c.data = s.root.c.data

    return Fault(before)


def last_stream() -> Fault:
    """Attention reads the caches where the last stream begins."""

    def before(node: Node) -> None:
        if node.op == "FLASH_ATTN_EXT" and node.ne[3] == 1:
            for s in node.src[1:3]:
                n = s.root.ne[2]
                s.c.data = s.root.c.data + s.root.bytes.size // n * (n - 1)

    return Fault(before)


def rows_kept(op: str) -> Callable[[], Fault]:
    """A kernel keeps the number of rows of its first launch: it leaves the rest of a larger result at 0."""

    def make() -> Fault:
        first: dict[str, int] = {}

        def before(node: Node) -> bool:
            return node.op == op and first.setdefault(node.name, node.ne[1]) < node.ne[1]

        def after(node: Node) -> None:
            node.rows[first[node.name] :] = 0

        return Fault(before, after)

    return make


def left_over(op: str) -> Callable[[], Fault]:
    """A kernel adds up in memory that a larger launch has used, and does not clear it."""

    def make() -> Fault:
        used: dict[str, Rows] = {}

        def before(node: Node) -> bool:
            return node.op == op and not node.c.view_src

        def after(node: Node) -> None:
            data = node.rows
            held = used.get(node.name)
            if held is None or len(data) > len(held):
                used[node.name] = data.copy()
            elif len(data) < len(held):
                data += held[: len(data)]

        return Fault(before, after)

    return make


# --- masks


def one_mask() -> Fault:
    """The mask of the first stream serves all of them."""

    def before(node: Node) -> None:
        for leaf in _leaves(node, "kq_mask"):
            if leaf.ne[3] > 1:
                rows = leaf.rows.reshape(leaf.ne[3], -1)
                rows[1:] = rows[0]

    return Fault(before)


def mask_of_one_row() -> Fault:
    """A kernel for many rows masks each of them as the last one: a token sees what comes after it."""

    def before(node: Node) -> None:
        for leaf in _leaves(node, "kq_mask"):
            if leaf.ne[1] >= 4:
                rows = leaf.rows.reshape(-1, leaf.ne[1], leaf.ne[0])
                rows[:] = rows[:, -1:]

    return Fault(before)


def mask_by_count() -> Fault:
    """A kernel for one row counts cells in place of its mask: it sees as many, from the first one on."""

    def before(node: Node) -> None:
        for leaf in _leaves(node, "kq_mask"):
            if leaf.ne[1] == 1:
                for row in leaf.rows:
                    n = int((row > -1).sum())
                    row[:n], row[n:] = 0, -np.inf

    return Fault(before)


def window_open(size: int) -> Callable[[], Fault]:
    """A kernel for one row also attends to the cells before a window of at most `size` cells."""

    def make() -> Fault:
        def before(node: Node) -> None:
            for leaf in _leaves(node, "kq_mask"):
                for row in leaf.rows if leaf.ne[1] == 1 else ():
                    seen = np.flatnonzero(row > -1)
                    if 0 < len(seen) <= size:
                        row[: seen[-1]] = 0

        return Fault(before)

    return make


def first_choice() -> Fault:
    """Every token attends to the cells that sparse attention chose for the first."""

    def after(node: Node) -> None:
        node.rows[:] = node.rows[0]

    return Fault(lambda node: node.op == "TOP_K" and node.ne[1] > 1, after)


def mask_ends(n: int) -> Callable[[], Fault]:
    """Attention sees no cell from the n-th on."""

    def make() -> Fault:
        def before(node: Node) -> None:
            for leaf in _leaves(node, "kq_mask"):
                leaf.rows[:, n:] = -np.inf

        return Fault(before)

    return make


def own_cell_late() -> Fault:
    """A token's own cell is stored after attention has run."""
    cells: list[int] = []

    def before(node: Node) -> None:
        for leaf in _leaves(node, "k_idxs"):
            cells[:] = leaf.rows.reshape(-1).tolist()
        for leaf in _leaves(node, "kq_mask"):
            if leaf.ne[1] == 1 and leaf.ne[3] == 1:
                leaf.rows[:, [c % leaf.ne[0] for c in cells]] = -np.inf

    return Fault(before)


# --- stores


def _cache(node: Node) -> bool:
    return node.op == "SET_ROWS" and node.root.name.startswith("cache_")


def last_row_lost(least: int) -> Callable[[], Fault]:
    """A store of `least` rows and more leaves the last one out."""

    def make() -> Fault:
        def before(node: Node) -> None:
            if _cache(node) and node.src[0].ne[1] >= least:
                ids = node.src[1].rows.reshape(-1)
                ids[-1] = ids[-2]

        return Fault(before)

    return make


def stores_in_order() -> Fault:
    """A store writes consecutive rows from the first index on, as where cells were always neighbours."""

    def before(node: Node) -> None:
        if _cache(node):
            ids = node.src[1].rows.reshape(-1)
            ids[:] = np.minimum(ids[0] + np.arange(ids.size), node.root.bytes.size // 512 - 1)

    return Fault(before)


def kept_below(n: int) -> Callable[[], Fault]:
    """Row indices wrap at the n-th row: an index of too few bits."""

    def make() -> Fault:
        def before(node: Node) -> None:
            if _cache(node):
                node.src[1].rows[:] %= n

        return Fault(before)

    return make


# --- the turning of keys


def _shifts(node: Node) -> bool:
    return node.op == "ROPE" and node.root.name.startswith("cache_k")


def _stores_shifted(node: Node) -> bool:
    """Keys of a quantised cache are turned beside it, and stored by a CPY."""
    return node.op in ("ROPE", "CPY") and node.root.name.startswith("cache_k")


def shift_lost(layer: str = "", cells: int = 0) -> Callable[[], Fault]:
    """A K-shift leaves the keys as they are: of all layers or one, from some cell on."""

    def make() -> Fault:
        before_it: dict[str, Bytes] = {}

        def before(node: Node) -> bool:
            if _stores_shifted(node) and layer in node.root.name:
                before_it[node.root.name] = node.root.bytes.copy()
                return True
            return False

        def after(node: Node) -> None:
            root, n = node.root, cells * node.ne[0] * node.ne[1] * 2
            root.bytes[n:] = before_it[root.name][n:]

        return Fault(before, after)

    return make


def shift_by_first() -> Fault:
    """A K-shift turns all keys by what the first cell turns."""

    def before(node: Node) -> None:
        if _shifts(node):
            by = node.src[1].bytes.view(np.int32)
            by[:] = by[0]

    return Fault(before)


def shift_one_too_far() -> Fault:
    """A K-shift turns the keys of cells that moved by one position more."""

    def before(node: Node) -> None:
        if node.op == "ROPE" and node.src[1].name != "inp_pos":  # by how far cells moved, not by where tokens are
            by = node.src[1].bytes.view(np.int32)
            by[by != 0] += 1

    return Fault(before)


def shift_unsigned() -> Fault:
    """A K-shift takes no turn back."""

    def before(node: Node) -> None:
        if _shifts(node):
            by = node.src[1].bytes.view(np.int32)
            by[:] = np.maximum(by, 0)

    return Fault(before)


# --- kernels


def tail_left(op: str, rows: int = 1, tile: int = 8) -> Callable[[], Fault]:
    """Of an op over more rows than a tile has, and not a multiple of it, the last ones are those of the row before."""

    def make() -> Fault:
        def before(node: Node) -> bool:
            return node.op == op and node.ne[1] > tile and node.ne[1] % tile > 0

        def after(node: Node) -> None:
            data = node.rows
            data[-rows:] = data[-rows - 1]

        return Fault(before, after)

    return make


def share_lost(op: str, least: int = 1) -> Callable[[], Fault]:
    """The last quarter of each row stays 0: what another thread, or the other memory, should have given."""

    def make() -> Fault:
        def before(node: Node) -> bool:
            return node.op == op and node.ne[1] >= least and not node.c.view_src

        def after(node: Node) -> None:
            node.rows[:, -(node.ne[0] // 4) :] = 0

        return Fault(before, after)

    return make


def first_row(op: str) -> Callable[[], Fault]:
    """An op of two rows gives the first one twice."""

    def make() -> Fault:
        def before(node: Node) -> bool:
            return node.op == op and node.ne[1] == 2

        def after(node: Node) -> None:
            node.rows[1] = node.rows[0]

        return Fault(before, after)

    return make


def rows_for(*names: str, change: Callable[[Ids, int], object]) -> Callable[[], Fault]:
    """An input with the ids of rows names others: `change` gets the ids, in place, and how many rows there are."""

    def make() -> Fault:
        def before(node: Node) -> None:
            for leaf in _leaves(node, *names):
                change(leaf.bytes.view(np.int32), node.src[0].ne[1])

        return Fault(before)

    return make


def scale_of(op: str, value: float) -> Callable[[], Fault]:
    """The first of an op's parameters, a scale, is always the same."""

    def make() -> Fault:
        def before(node: Node) -> None:
            if node.op == op:
                node.c.op_params[0] = int(np.float32(value).view(np.int32))

        return Fault(before)

    return make


# --- states


def _state(node: Node, kind: str) -> bool:
    return node.op == "CPY" and node.root.name.startswith(f"cache_{kind}")


def state_lost(kind: str) -> Callable[[], Fault]:
    """Recurrent states (`r`: of convolutions, `s`: of scans) of the second sequence of a batch are not written back."""

    def make() -> Fault:
        held: list[Bytes] = []

        def before(node: Node) -> bool:
            if _state(node, kind) and node.ne[0] > 0:
                held[:] = [node.root.bytes.copy()]
                return True
            return False

        def after(node: Node) -> None:
            data = node.root.bytes
            row = data.size // max(1, node.root.ne[1])
            data[row:] = held[0][row:]

        return Fault(before, after)

    return make


def state_not_zeroed() -> Fault:
    """The state of a sequence that begins is not set to 0."""
    held: list[Bytes] = []

    def before(node: Node) -> bool:
        if node.op == "SCALE" and node.root.name.startswith("cache_"):
            held[:] = [node.root.bytes.copy()]
            return True
        return False

    def after(node: Node) -> None:
        node.root.bytes[:] = held[0]

    return Fault(before, after)


def mean_of_all() -> Fault:
    """A mean divides by the tokens of the whole batch."""

    def before(node: Node) -> None:
        for leaf in _leaves(node, "mean"):
            rows = leaf.rows
            rows[rows > 0] = 1 / leaf.ne[0]

    return Fault(before)


# --- several contexts


def shared(*names: str) -> Device:
    """Contexts share an input's buffer: after another context has run, the first graph reads what that one left."""
    left: dict[tuple[str, tuple[int, ...]], tuple[int, Bytes]] = {}
    contexts: list[None] = []

    def device(_: Params) -> Fault:
        contexts.append(None)
        me = len(contexts)
        mine: dict[int, Bytes] = {}

        def before(node: Node) -> None:
            for leaf in _leaves(node, *names):
                key, data = (leaf.name, leaf.ne), leaf.bytes
                if leaf.pointer in mine and np.array_equal(mine[leaf.pointer], data):
                    continue
                true = data.copy()
                if key in left and left[key][0] != me:
                    data[:] = left[key][1]
                left[key] = me, true
                mine[leaf.pointer] = data.copy()

        return Fault(before)

    return device
