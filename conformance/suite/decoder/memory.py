"""Memory of a context: the cell of each token, and the rows of recurrent states.

The rules are those of llama.cpp's `llama_kv_cache`, `llama_kv_cache_iswa`, `llama_memory_recurrent` and
`llama_memory_hybrid`; each method names its counterpart. No tensor is accessed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError

from .config import Cparams, Hparams

I64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

N_PAD = 256
"""n_kv is a multiple of this, up to the number of cells."""


@dataclass(frozen=True, slots=True)
class Ubatch:
    """The tokens of one graph; if each sequence has a stream, the same number of each, in order."""

    tokens: I64Array
    pos: I64Array
    seqs: I64Array
    outputs: BoolArray
    """True if a token's logits are requested."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def rows(self) -> list[list[int]]:
        """Return `[token, position, sequence, wants_logits]` of each token: the note of a step."""
        columns = [self.tokens, self.pos, self.seqs, self.outputs]
        rows: list[list[int]] = np.stack(columns, axis=1).astype(np.int64).tolist()
        return rows

    @property
    def seq_ids(self) -> list[int]:
        """Distinct sequences in order of appearance (`seq_id_unq`)."""
        return list(dict.fromkeys(self.seqs.tolist()))


@dataclass(frozen=True, slots=True)
class Slots:
    """Cells for the tokens of a ubatch: `slot_info`."""

    streams: tuple[int, ...]
    """Streams that the ubatch uses, in its order."""
    idxs: I64Array
    """[streams, tokens of each]: cell of each token within its stream."""

    @property
    def first(self) -> int:
        """`s0`: the first stream that the graph reads."""
        return min(self.streams)

    @property
    def count(self) -> int:
        """`s1 - s0 + 1`: the number of streams it reads."""
        return max(self.streams) - self.first + 1


class Cells:
    """Position and sequences of each cell, per stream."""

    def __init__(self, n_ctx: int, n_stream: int, n_swa: int = 0) -> None:
        self.n_ctx = n_ctx
        self.n_stream = n_stream
        self.n_swa = n_swa
        """Window of a token, including itself, or 0; cells before every window may be overwritten."""
        self.pos: I64Array = np.full((n_stream, n_ctx), -1, np.int64)
        """Position, or -1 if empty."""
        self.seq: I64Array = np.zeros((n_stream, n_ctx), np.int64)
        """Sequences to which the cell belongs: bit i for sequence i."""
        self.shift: I64Array = np.zeros((n_stream, n_ctx), np.int64)
        """Change of the position since K was rotated."""
        self.has_shift = False
        self._head = [0] * n_stream

    def stream_of(self, seq: int) -> int:
        """Return the stream of a sequence (`seq_to_stream`)."""
        return seq if self.n_stream > 1 else 0

    def clear(self) -> None:
        """Remove all tokens without clearing the bytes (`llama_memory_clear` without data)."""
        self.pos[:], self.seq[:] = -1, 0
        self.reset_shift()
        self._head = [0] * self.n_stream

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions p0 to p1 (all from p0 on) of a sequence: `llama_memory_seq_rm`."""
        s = self.stream_of(seq)
        leaves = self._has(s, seq) & (self.pos[s] >= p0)
        if p1 is not None:
            leaves &= self.pos[s] < p1
        self.seq[s][leaves] &= ~(1 << seq)
        freed = leaves & (self.seq[s] == 0)
        if freed.any():
            self.pos[s][freed], self.shift[s][freed] = -1, 0
            self._head[s] = min(self._head[s], int(np.argmax(freed)))

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Shift positions from p0 on: `llama_memory_seq_add`; clears cells shifted below 0."""
        s = self.stream_of(seq)
        moved = self._has(s, seq) & (self.pos[s] >= p0)
        self.pos[s][moved] += shift
        self.shift[s][moved] += shift
        self.has_shift |= bool(moved.any())
        below_zero = moved & (self.pos[s] < 0)
        self.pos[s][below_zero], self.seq[s][below_zero], self.shift[s][below_zero] = -1, 0, 0
        self._head[s] = int(np.argmax(below_zero))

    def reset_shift(self) -> None:
        """Record that K was rotated to the new positions."""
        self.shift[:] = 0
        self.has_shift = False

    def seq_cp(self, src: int, dst: int) -> None:
        """Add all tokens of `src` to `dst` (`llama_memory_seq_cp`); UsageError for another stream."""
        s = self.stream_of(src)
        if s != self.stream_of(dst):
            raise UsageError(f"seq_cp: sequences {src} and {dst} have a stream each; a unified cache expected")
        self.seq[s][self._has(s, src)] |= 1 << dst

    def _has(self, s: int, seq: int) -> BoolArray:
        positions: BoolArray = (self.seq[s] >> seq & 1).astype(np.bool_)
        return positions

    def seq_pos_max(self, seq: int) -> int:
        """Return the last position of a sequence, or -1."""
        s = self.stream_of(seq)
        return int(np.max(self.pos[s], where=self._has(s, seq), initial=-1))

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Slots]:
        """Find slots for all ubatches of a batch and restore the cells afterwards.

        As in llama.cpp, positions before a window that are purged while a slot is filled stay purged.

        Raises:
            UsageError: the cache is too small.
        """
        result, before = [], []
        heads = list(self._head)
        for ubatch in ubatches:
            slots = self.find_slot(ubatch)
            at = (np.array(slots.streams)[:, None], slots.idxs)
            result.append(slots)
            before.append((at, self.pos[at], self.seq[at]))
            self.apply(ubatch, slots)
        for at, pos, seq in reversed(before):
            self.pos[at], self.seq[at] = pos, seq
        self._head = heads
        return result

    def find_slot(self, ubatch: Ubatch) -> Slots:
        """Find a cell per token, from the head of its stream on; cells need not be adjacent.

        A cell is free if it is empty, or if its only sequence has moved its window past it.

        Raises:
            UsageError: the cache is too small.
        """
        ids = ubatch.seq_ids if self.n_stream > 1 else ubatch.seq_ids[:1]
        per_stream = ubatch.n_tokens // len(ids)
        streams = tuple(self.stream_of(seq) for seq in ids)
        return Slots(streams, np.array([self._free(s, per_stream) for s in streams], np.int64))

    def _free(self, s: int, n: int) -> I64Array:
        empty = self.pos[s] < 0
        head = self._head[s]
        # llama.cpp restarts at 0 if that many cells are free before the head
        if head > int(np.count_nonzero(~empty)) + 2 * n:
            head = 0
        order = np.r_[head : self.n_ctx, 0:head]
        result: I64Array = order[(empty | self._passed(s))[order]][:n]
        if len(result) < n:
            raise UsageError(f"stream {s}: no {n} free cells of {self.n_ctx}; set a larger n_ctx")
        return result

    def _passed(self, s: int) -> BoolArray:
        """Return cells of a single sequence that are outside its next token's window."""
        passed = np.zeros(self.n_ctx, np.bool_)
        for bit in np.unique(self.seq[s]).tolist() if self.n_swa else ():
            if bit.bit_count() == 1:
                next_ = self.seq_pos_max(bit.bit_length() - 1) + 1
                passed |= (self.seq[s] == bit) & (next_ - self.pos[s] >= self.n_swa)
        return passed

    def apply(self, ubatch: Ubatch, slots: Slots) -> None:
        """Store tokens (`apply_ubatch`); a sequence that loses a token also loses every older one."""
        shape = slots.idxs.shape
        for s, idxs, pos, seq in zip(
            slots.streams, slots.idxs, ubatch.pos.reshape(shape), ubatch.seqs.reshape(shape), strict=True
        ):
            lost: dict[int, int] = {}
            for bit, p in zip(self.seq[s, idxs].tolist(), self.pos[s, idxs].tolist(), strict=True):
                if bit:
                    lost[bit] = max(lost.get(bit, -1), p)
            self.pos[s, idxs], self.seq[s, idxs], self.shift[s, idxs] = pos, 1 << seq, 0
            for bit, last in lost.items():
                self.seq_rm(bit.bit_length() - 1, 0, last + 1)
            self._head[s] = int(idxs[-1]) + 1

    def n_kv(self, slots: Slots) -> int:
        """Return the cells that a graph reads per stream: `get_n_kv`, after `apply`."""
        used = np.flatnonzero((self.pos[list(slots.streams)] >= 0).any(axis=0))
        last = int(used[-1]) + 1 if used.size else 0
        return min(self.n_ctx, max(N_PAD, -(-last // N_PAD) * N_PAD))

    def k_idxs(self, slots: Slots) -> I64Array:
        """Return the row of each token, over all streams."""
        streams = np.array(slots.streams, np.int64)
        return (streams[:, None] * self.n_ctx + slots.idxs).reshape(-1)

    def v_idxs_trans(self, slots: Slots, n_embd_v_gqa: int) -> I64Array:
        """Return the position of each element of each token in a transposed V."""
        streams = np.array(slots.streams, np.int64)[:, None, None]
        rows = np.arange(n_embd_v_gqa) * self.n_ctx
        return (streams * (self.n_ctx * n_embd_v_gqa) + slots.idxs[:, :, None] + rows).reshape(-1)

    def kq_mask(self, ubatch: Ubatch, n_kv: int, *, alibi: bool = False) -> NDArray[np.float32]:
        """Return [n_tokens, n_kv]: 0 for visible cells of the same sequence, else -inf.

        Future cells and those before a window are hidden; with `alibi` visible ones have minus the distance instead of
        0.
        """
        stream = np.array([self.stream_of(s) for s in ubatch.seqs.tolist()])
        seen = (self.seq[stream, :n_kv] >> ubatch.seqs[:, None] & 1).astype(np.bool_)
        ago = ubatch.pos[:, None] - self.pos[stream, :n_kv]
        seen &= ago >= 0
        if self.n_swa:
            seen &= ago < self.n_swa
        bias = (-ago).astype(np.float32) if alibi else np.float32(0)
        return np.where(seen, bias, np.float32(-np.inf))


def split(batch: Ubatch, n_ubatch: int, *, unified: bool, equal: bool = False) -> list[Ubatch]:
    """Return the ubatches into which llama.cpp splits a batch.

    With one stream: `n_ubatch` tokens at a time (`split_simple`). With one stream per sequence: sequences with adjacent
    ids, with the same number of tokens of each, as many as the shortest has left (`split_equal`). With `equal`, this
    also applies to one stream, for any ids.
    """
    if unified and not equal:
        return [_take(batch, range(i, min(i + n_ubatch, batch.n_tokens))) for i in range(0, batch.n_tokens, n_ubatch)]
    left: dict[int, list[int]] = {}
    for i, seq in enumerate(batch.seqs.tolist()):
        left.setdefault(seq, []).append(i)
    parts = []
    while left:
        ids: list[int] = []
        for seq in left:
            if (unified or not ids or seq == ids[-1] + 1) and len(ids) < n_ubatch:
                ids.append(seq)
        n = min(*(len(left[seq]) for seq in ids), max(1, n_ubatch // len(ids)))
        parts.append(_take(batch, [i for seq in ids for i in left[seq][:n]]))
        left = {seq: rest for seq, idxs in left.items() if (rest := idxs[n:] if seq in ids else idxs)}
    return parts


def _take(batch: Ubatch, idxs: Sequence[int]) -> Ubatch:
    at: NDArray[Any] = np.array(idxs, np.int64)
    return Ubatch(batch.tokens[at], batch.pos[at], batch.seqs[at], batch.outputs[at])


@dataclass(slots=True)
class _Row:
    pos: int = -1
    """Last position of its sequences, or -1."""
    src: int = -1
    """Row with its state; -1 for zeros."""
    seqs: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Range:
    """The rows of one graph."""

    head: int
    s_copy: tuple[int, ...]
    """Source row of each row."""
    zero: int
    """Row to set to zero first, or -1."""


class States:
    """Rows of recurrent states, one per sequence; a graph uses a range of rows.

    A sequence that is new in a graph starts from a row of zeros; one that shared its row starts from a copy of that
    row.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Remove all sequences."""
        self._rows = [_Row() for _ in range(self.size)]
        self._tail = [-1] * self.size
        """Row of each sequence."""
        self._head = 0

    def seq_pos(self, seq: int) -> int:
        """Return the last position of a sequence, or -1."""
        tail = self._tail[seq]
        return self._rows[tail].pos if tail >= 0 else -1

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions p0 to p1, if these are all or none; UsageError for only the last ones."""
        pos = self.seq_pos(seq)
        if pos < p0 or (p1 is not None and p1 <= pos):
            return
        if p0 > 0:
            raise UsageError(f"sequence {seq}: a convolution's state cannot be rewound to position {p0}")
        tail = self._tail[seq]
        self._leave(seq)
        if not self._rows[tail].seqs:
            self._head = min(self._head, tail)

    def seq_cp(self, src: int, dst: int) -> None:
        """Replace the state of `dst` by that of `src`, shared."""
        self._leave(dst)
        self._tail[dst] = self._tail[src]
        if self._tail[src] >= 0:
            self._rows[self._tail[src]].seqs.add(dst)

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Shift positions from p0 on of a sequence."""
        if self.seq_pos(seq) >= p0:
            self._rows[self._tail[seq]].pos += shift

    def _leave(self, seq: int) -> None:
        tail = self._tail[seq]
        if tail < 0:
            return
        row = self._rows[tail]
        row.seqs.discard(seq)
        self._tail[seq] = -1
        if not row.seqs:
            row.pos = row.src = -1

    def place(self, ubatch: Ubatch) -> Range:
        """Assign each sequence of a ubatch its row, all in one range: `find_slot`."""
        seqs = ubatch.seq_ids
        if self._head > sum(bool(r.seqs) for r in self._rows) + 2 * len(seqs):
            self._head = 0
        empty = self._next_empty(self._head)
        for i, seq in enumerate(seqs):
            tail = self._tail[seq]
            if tail < 0 or len(self._rows[tail].seqs) > 1:
                if tail >= 0:
                    self._rows[empty].pos, self._rows[empty].src = self._rows[tail].pos, self._rows[tail].src
                    self._rows[tail].seqs.discard(seq)
                    self._rows[empty].seqs.add(seq)
                self._tail[seq] = empty
                if i + 1 < len(seqs):
                    empty = self._next_empty(empty + 1)
        tails = [self._tail[seq] for seq in seqs]
        first, last = min(tails), max(tails)
        for i, seq in enumerate(seqs):
            self._swap(first + i, self._tail[seq])
        for i, seq in enumerate(seqs):
            row = self._rows[first + i]
            row.pos, row.seqs = int(ubatch.pos[ubatch.seqs == seq][-1]), {seq}
            self._tail[seq] = first + i
        return self._read(first, last)

    def _next_empty(self, start: int) -> int:
        order = [(start + i) % self.size for i in range(self.size)]
        return next((i for i in order if not self._rows[i].seqs), order[0])

    def _swap(self, a: int, b: int) -> None:
        if a != b:
            self._rows[a], self._rows[b] = self._rows[b], self._rows[a]
            self._tail = [{a: b, b: a}.get(t, t) for t in self._tail]

    def _read(self, first: int, last: int) -> Range:
        used = {r.src for r in self._rows}
        zero = next((i for i in range(first, last + 1) if i not in used), -1)
        s_copy = []
        for i in range(first, last + 1):
            s_copy.append(zero if self._rows[i].src < 0 else self._rows[i].src)
            self._rows[i].src = i
        self._head = first
        return Range(first, tuple(s_copy), zero)


@dataclass(frozen=True, slots=True)
class Part:
    """Cells into which a graph stores, and the number that it reads."""

    cells: Cells
    slots: Slots
    n_kv: int


@dataclass(frozen=True, slots=True)
class Place:
    """Cells and rows that one graph stores and reads."""

    base: Part
    swa: Part | None
    recr: Range | None

    def part(self, *, swa: bool) -> Part:
        """Return the cells of a layer."""
        return self.swa if swa and self.swa is not None else self.base


class Memory:
    """The memory of a context: cells of full and sliding-window attention, convolution states."""

    def __init__(self, h: Hparams, c: Cparams) -> None:
        self.c = c
        self.base = Cells(c.n_ctx, c.n_stream)
        self.swa = Cells(c.n_ctx_swa(h), c.n_stream, h.n_swa) if h.n_swa else None
        self.recr = States(c.n_seq_max) if h.n_shortconv else None
        self._parts = [part for part in (self.recr, self.base, self.swa) if part is not None]

    def all_cells(self) -> Iterator[Cells]:
        """Yield the cells of full attention, and of sliding-window attention if there is any."""
        yield self.base
        if self.swa is not None:
            yield self.swa

    def cells(self, *, swa: bool) -> Cells:
        """Return the cells of a layer."""
        return self.swa if swa and self.swa is not None else self.base

    def clear(self) -> None:
        """Remove all tokens: `llama_memory_clear` without data."""
        for part in self._parts:
            part.clear()

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions p0 to p1; UsageError if a convolution's state would have to be rewound."""
        for part in self._parts:
            part.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int) -> None:
        """Add all tokens of `src` to `dst`: `llama_memory_seq_cp`."""
        for part in self._parts:
            part.seq_cp(src, dst)

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Shift positions from p0 on; UsageError where `llama_memory_can_shift` is false."""
        if self.swa is not None and self.swa.n_ctx != self.base.n_ctx:
            raise UsageError("shift: sliding-window layers have fewer cells than the others; swafull=1 expected")
        for part in self._parts:
            part.seq_add(seq, p0, shift)

    def place(self, batch: Ubatch) -> Iterator[tuple[Ubatch, Place]]:
        """Find slots for all ubatches of a batch (`init_batch`), then fill them; UsageError if full."""
        ubatches = split(batch, self.c.n_ubatch, unified=self.c.n_stream == 1, equal=self.recr is not None)
        result = [(cells, cells.prepare(ubatches)) for cells in self.all_cells()]
        for k, ubatch in enumerate(ubatches):
            parts = []
            for cells, slots in result:
                cells.apply(ubatch, slots[k])
                parts.append(Part(cells, slots[k], cells.n_kv(slots[k])))
            recr = None if self.recr is None else self.recr.place(ubatch)
            yield ubatch, Place(parts[0], parts[1] if len(parts) > 1 else None, recr)
