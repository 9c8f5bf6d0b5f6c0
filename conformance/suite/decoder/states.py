"""Which sequence's recurrent state sits in which row, and from where each graph reads it: `llama_memory_recurrent`.

Each sequence has one row. A graph works on a range of rows; a sequence that is new there starts from a row of zeros,
one that shared its row with another from a copy of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.ggml.errors import UsageError

from .cells import Ubatch


@dataclass(slots=True)
class _Row:
    pos: int = -1
    """The last position of its sequences, -1 where it has none."""
    src: int = -1
    """The row that holds its state; -1: zeros."""
    seqs: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Range:
    """The rows of one graph."""

    head: int
    s_copy: tuple[int, ...]
    """Where each of them is read from."""
    zero: int
    """The row that is made zero before, -1 for none."""


class States:
    """The rows, as steps go by."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self._rows = [_Row() for _ in range(self.size)]
        self._tail = [-1] * self.size
        """The row of each sequence."""
        self._head = 0

    def seq_pos(self, seq: int) -> int:
        """The last position of a sequence, -1 where it has none."""
        tail = self._tail[seq]
        return self._rows[tail].pos if tail >= 0 else -1

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Forget positions p0 to p1 of a sequence: all, or none.

        Raises:
            UsageError: only its last ones, of which the state cannot be rid.
        """
        pos = self.seq_pos(seq)
        if pos < p0 or (p1 is not None and p1 <= pos):
            return
        if p0 > 0:
            raise UsageError(f"sequence {seq}: a convolution's state cannot go back to position {p0}; only rm forgets")
        tail = self._tail[seq]
        self._leave(seq)
        if not self._rows[tail].seqs:
            self._head = min(self._head, tail)

    def seq_cp(self, src: int, dst: int) -> None:
        """Let `dst` share the state of `src`, in place of its own."""
        self._leave(dst)
        self._tail[dst] = self._tail[src]
        if self._tail[src] >= 0:
            self._rows[self._tail[src]].seqs.add(dst)

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Move positions p0 and after of a sequence."""
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
        """Give each sequence of a ubatch its row, all in one range: `find_slot`."""
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
