"""All that a context remembers: cells of full and of sliding-window attention, states of convolutions.

`llama_kv_cache`, `llama_kv_cache_iswa` and `llama_memory_hybrid` in one: what a model does not have is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.ggml.errors import UsageError

from .cells import Cells, Slots, Ubatch, split
from .config import Cparams, Hparams
from .states import Range, States


@dataclass(frozen=True, slots=True)
class Part:
    """Where one graph stores into cells, and how many it reads."""

    cells: Cells
    slots: Slots
    n_kv: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one graph stores and reads."""

    base: Part
    swa: Part | None
    recr: Range | None

    def part(self, *, swa: bool) -> Part:
        """The cells of a layer."""
        return self.swa if swa and self.swa is not None else self.base


class Memory:
    """The books of a context."""

    def __init__(self, h: Hparams, c: Cparams) -> None:
        self.c = c
        self.base = Cells(c.n_ctx, c.n_stream)
        self.swa = Cells(c.n_ctx_swa(h), c.n_stream, h.n_swa) if h.n_swa else None
        self.recr = States(c.n_seq_max) if h.n_shortconv else None

    def all_cells(self) -> Iterator[Cells]:
        """Of full attention, and of sliding-window attention where there is any."""
        yield self.base
        if self.swa is not None:
            yield self.swa

    def cells(self, *, swa: bool) -> Cells:
        """The cells of a layer."""
        return self.swa if swa and self.swa is not None else self.base

    def clear(self) -> None:
        """Forget all tokens: `llama_memory_clear` without data."""
        for cells in self.all_cells():
            cells.clear()
        if self.recr is not None:
            self.recr.clear()

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Forget positions p0 to p1 of a sequence: `llama_memory_seq_rm`.

        Raises:
            UsageError: a convolution's state would have to go back.
        """
        if self.recr is not None:
            self.recr.seq_rm(seq, p0, p1)
        for cells in self.all_cells():
            cells.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int) -> None:
        """Let `dst` have all tokens of `src` too: `llama_memory_seq_cp`."""
        for cells in self.all_cells():
            cells.seq_cp(src, dst, 0, self.seq_pos_max(src) + 1)
        if self.recr is not None:
            self.recr.seq_cp(src, dst)

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Move positions p0 and after of a sequence: `llama_memory_seq_add`.

        Raises:
            UsageError: llama.cpp cannot (`llama_memory_can_shift`).
        """
        if self.swa is not None and self.swa.n_ctx != self.base.n_ctx:
            raise UsageError("shift: sliding-window layers have fewer cells than the others; swafull=1 expected")
        for cells in self.all_cells():
            cells.seq_add(seq, p0, shift)
        if self.recr is not None:
            self.recr.seq_add(seq, p0, shift)

    def seq_pos_max(self, seq: int) -> int:
        """The last position of a sequence, -1 where it has none."""
        return self.base.seq_pos_max(seq)

    def split(self, batch: Ubatch) -> list[Ubatch]:
        """The ubatches of a batch: `init_batch`."""
        return split(batch, self.c.n_ubatch, unified=self.c.n_stream == 1, equal=self.recr is not None)

    def place(self, ubatches: list[Ubatch]) -> Iterator[tuple[Ubatch, Place]]:
        """Find room for all ubatches of a batch, then fill it, one after the other.

        Raises:
            UsageError: a cache is too small.
        """
        found = [(cells, cells.prepare(ubatches)) for cells in self.all_cells()]
        for k, ubatch in enumerate(ubatches):
            parts = []
            for cells, slots in found:
                cells.apply(ubatch, slots[k])
                parts.append(Part(cells, slots[k], cells.n_kv(slots[k])))
            recr = None if self.recr is None else self.recr.place(ubatch)
            yield ubatch, Place(parts[0], parts[1] if len(parts) > 1 else None, recr)
