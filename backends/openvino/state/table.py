"""The host's account of a log: which cell of the cache each of its positions shows.

Attention does not care about the order of its keys as long as the mask has the same, so each step's mask is laid out by
the table. Rewinding, removed sequences and cells used again are changes of the table, not of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.tensor import Bytes, Tensor, nelements
from conformance.ggml.types import F16, I32

from .log import Logged

NOTHING = -1
"""In a table: a position that shows no cell, a cell that no position shows."""
SPARE = 256
"""Positions that may show nothing before a log is laid out anew, if they are a quarter of it."""

Cells = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Appending:
    """What one step does to a log."""

    log: Logged
    cells: Cells
    """Written, counted within each stream: (streams, tokens)."""
    mask: NDArray[Any]
    """(streams or 1, 1, tokens, cells)."""
    loaded: NDArray[np.bool_]
    """Cells that some row of the mask lets through and that the step does not write: (streams, cells)."""


def appendings(found: Sequence[Logged], inputs: Mapping[Tensor, Bytes]) -> list[Appending] | str:
    """What a step's inputs do to each log, or why they cannot."""
    out = []
    for log in found:
        cells = _new_cells(log, inputs)
        if isinstance(cells, str):
            return cells
        data = inputs[log.mask].view("<f2" if log.mask.type is F16 else "<f4")
        mask = data.reshape(log.mask.shape)[:, :, : log.tokens]
        through = mask > -np.inf
        if not through.any(axis=3).all():
            return "a query sees nothing"  # ggml gives zeros, a softmax over nothing NaN
        seen = through.any(axis=(1, 2))
        loaded = np.broadcast_to(seen, (log.streams, seen.shape[1])).copy()
        stream, i = np.nonzero(cells < seen.shape[1])
        loaded[stream, cells[stream, i]] = False
        out.append(Appending(log, cells, mask, loaded))
    return out


def _new_cells(log: Logged, inputs: Mapping[Tensor, Bytes]) -> Cells | str:
    given = [_rows_of(w, inputs) for w in log.places]
    if any(not np.array_equal(given[0], x) for x in given[1:]):
        return "K and V are written to different cells"
    cells = given[0].reshape(log.streams, log.tokens) - (log.first + np.arange(log.streams)[:, None]) * log.size
    if cells.min() < 0 or cells.max() >= log.size:
        return "rows are written outside the streams attended to"
    if log.tokens > 1 and any(len(set(row)) < len(row) for row in cells.tolist()):
        return "a cell is written twice"
    return cells


@dataclass(slots=True)
class Table:
    """Which cell each position of a log shows."""

    cells: Cells
    """(streams, positions)."""
    positions: NDArray[np.int64]
    """(streams, size): the way back."""
    straight: bool
    """Whether position i shows cell i everywhere."""
    settled: int = 0
    """Positions whose rows the host has."""
    dead: int = field(default=0)
    """Positions that show nothing."""
    endless: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 0), np.bool_))
    """Of the first positions, as far as the host has looked, whether K or V is NaN or infinite: (streams or 1, …)."""

    @classmethod
    def of(cls, cells: Cells, size: int) -> Table:
        """A log that shows `cells`, all of which the host has."""
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
        """Rows for `new` follow; positions that showed one of these cells show nothing any more."""
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
        """Positions that no query of a step sees, or whose cell it writes: (streams, positions)."""
        if self.straight and self.length <= a.loaded.shape[1]:
            return ~a.loaded[:, : self.length]
        shown = (self.cells != NOTHING) & (self.cells < a.loaded.shape[1])
        seen = np.take_along_axis(a.loaded, np.where(shown, self.cells, 0), axis=1)
        unseen: NDArray[np.bool_] = np.logical_not(shown & seen)
        return unseen

    def serves(self, a: Appending) -> bool:
        """Whether every cell that a step attends to is in the log or about to be, and not too little else."""
        if self.dead > max(SPARE, self.cells.size // 4):
            return False
        return not (a.loaded & (self.positions[:, : a.loaded.shape[1]] == NOTHING)).any()

    def laid(self, mask: NDArray[Any]) -> NDArray[Any]:
        """`mask`, shape (streams or 1, 1, rows, cells), with one column per position."""
        if self.straight and self.length <= mask.shape[3]:
            return mask[..., : self.length]
        cells = self.cells
        shown = (cells != NOTHING) & (cells < mask.shape[3])
        wide = np.broadcast_to(mask, (len(cells), *mask.shape[1:]))
        out = np.take_along_axis(wide, np.where(shown, cells, 0)[:, None, None, :], axis=3)
        return np.where(shown[:, None, None, :], out, mask.dtype.type(-np.inf))


def _rows_of(writer: Tensor, inputs: Mapping[Tensor, Bytes]) -> NDArray[np.int64]:
    """The rows of its cache that `writer` writes."""
    ids = writer.src[1]
    if writer.op == "SET_ROWS" and ids is not None:
        return inputs[ids].view("<i4" if ids.type is I32 else "<i8").astype(np.int64)
    cache = writer.root
    return np.arange(nelements(writer) // cache.ne[0]) + writer.view_offs // cache.nb[1]


def to_load(a: Appending) -> Cells:
    """The cells that a log must show at least, shape (streams, positions): padded with nothing to equal length."""
    rest = [np.nonzero(row)[0] for row in a.loaded]
    out = np.full((len(rest), max(map(len, rest))), NOTHING)
    for row, cells in zip(out, rest, strict=True):
        row[: len(cells)] = cells
    return out
