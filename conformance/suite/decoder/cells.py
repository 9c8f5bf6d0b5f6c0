"""Which token sits in which cell of the KV cache, and what follows from it: slots, n_kv, indices, masks.

The rules are those of llama.cpp's `llama_kv_cache` (`prepare`, `find_slot`, `apply_ubatch`, `seq_rm`, `seq_add`,
`get_n_kv`, `set_input_k_idxs`, `set_input_v_idxs`, `set_input_kq_mask`); no tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError

I64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

N_PAD = 256
"""n_kv is a multiple of this, but never more than the cells there are."""


@dataclass(frozen=True, slots=True)
class Ubatch:
    """The tokens of one graph. With a stream per sequence: as many of each sequence, one sequence after the other."""

    tokens: I64Array
    pos: I64Array
    seqs: I64Array
    outputs: BoolArray
    """Whether a token's logits are wanted."""

    @property
    def n_tokens(self) -> int:
        """How many tokens."""
        return len(self.tokens)

    @property
    def seq_ids(self) -> list[int]:
        """The sequences, each once, in order of appearance (`seq_id_unq`)."""
        return list(dict.fromkeys(self.seqs.tolist()))


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of a ubatch go: `slot_info`."""

    streams: tuple[int, ...]
    """The streams that the ubatch touches, in its order."""
    idxs: I64Array
    """[streams, tokens of each]: the cell of each token within its stream."""

    @property
    def first(self) -> int:
        """`s0`: the first stream that the graph reads."""
        return min(self.streams)

    @property
    def count(self) -> int:
        """`s1 - s0 + 1`: how many streams it reads."""
        return max(self.streams) - self.first + 1


class Cells:
    """The cells of every stream, as steps go by."""

    def __init__(self, n_ctx: int, n_stream: int, n_swa: int = 0) -> None:
        self.n_ctx = n_ctx
        self.n_stream = n_stream
        self.n_swa = n_swa
        """Tokens that a token sees, itself among them; what no later one will see may be overwritten. 0: all."""
        self.pos: I64Array = np.full((n_stream, n_ctx), -1, np.int64)
        """The position held, or -1: empty."""
        self.seq: I64Array = np.zeros((n_stream, n_ctx), np.int64)
        """The sequences it belongs to: bit i for sequence i."""
        self.shift: I64Array = np.zeros((n_stream, n_ctx), np.int64)
        """By how much the position moved since K was rotated."""
        self.has_shift = False
        self._head = [0] * n_stream

    def stream_of(self, seq: int) -> int:
        """The stream of a sequence (`seq_to_stream`)."""
        return seq if self.n_stream > 1 else 0

    def clear(self) -> None:
        """Forget all tokens; what the cells hold stays as it is (`llama_memory_clear` without data)."""
        self.pos[:], self.seq[:] = -1, 0
        self.reset_shift()
        self._head = [0] * self.n_stream

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Forget positions p0 to p1 (all from p0 on) of a sequence: `llama_memory_seq_rm`."""
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
        """Move positions p0 and after of a sequence: `llama_memory_seq_add`. A cell moved below 0 is emptied."""
        s = self.stream_of(seq)
        moved = self._has(s, seq) & (self.pos[s] >= p0)
        self.pos[s][moved] += shift
        self.shift[s][moved] += shift
        self.has_shift |= bool(moved.any())
        gone = moved & (self.pos[s] < 0)
        self.pos[s][gone], self.seq[s][gone], self.shift[s][gone] = -1, 0, 0
        self._head[s] = int(np.argmax(gone))

    def reset_shift(self) -> None:
        """K is rotated to where its tokens now are."""
        self.shift[:] = 0
        self.has_shift = False

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let `dst` have positions p0 to p1 of `src` too: `llama_memory_seq_cp` within one stream.

        Raises:
            UsageError: the two are in different streams, where llama.cpp copies the bytes of the cache.
        """
        s = self.stream_of(src)
        if s != self.stream_of(dst):
            raise UsageError(f"seq_cp: sequences {src} and {dst} have a stream each; a unified cache expected")
        shared = self._has(s, src) & (self.pos[s] >= p0) & (self.pos[s] < p1)
        self.seq[s][shared] |= 1 << dst

    def _has(self, s: int, seq: int) -> BoolArray:
        held: BoolArray = (self.seq[s] >> seq & 1).astype(np.bool_)
        return held

    def seq_pos_max(self, seq: int) -> int:
        """The last position of a sequence, -1 where it has none."""
        s = self.stream_of(seq)
        return int(np.max(self.pos[s], where=self._has(s, seq), initial=-1))

    def seq_pos_min(self, seq: int) -> int:
        """The first position of a sequence that a cell still holds, -1 where there is none."""
        s = self.stream_of(seq)
        held = self.pos[s][self._has(s, seq)]
        return int(held.min()) if held.size else -1

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Slots]:
        """Slots for all ubatches of a batch, one after the other; what they overwrite stands again afterwards.

        As in llama.cpp, positions that a window has left behind and that filling a slot purges stay purged.

        Raises:
            UsageError: the cache is too small.
        """
        found, before = [], []
        heads = list(self._head)
        for ubatch in ubatches:
            slots = self.find_slot(ubatch)
            at = (np.array(slots.streams)[:, None], slots.idxs)
            found.append(slots)
            before.append((at, self.pos[at], self.seq[at]))
            self.apply(ubatch, slots)
        for at, pos, seq in reversed(before):
            self.pos[at], self.seq[at] = pos, seq
        self._head = heads
        return found

    def find_slot(self, ubatch: Ubatch) -> Slots:
        """A cell for each token, from the head of its stream on; cells need not be neighbours.

        A cell is free that is empty, or whose one sequence has moved its window past it.

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
        # llama.cpp starts over where that many cells are free before the head
        if head > int(np.count_nonzero(~empty)) + 2 * n:
            head = 0
        order = np.r_[head : self.n_ctx, 0:head]
        found: I64Array = order[(empty | self._passed(s))[order]][:n]
        if len(found) < n:
            raise UsageError(f"stream {s}: no {n} free cells of {self.n_ctx}; take a larger n_ctx")
        return found

    def _passed(self, s: int) -> BoolArray:
        """Cells of one sequence that its next token's window does not reach."""
        passed = np.zeros(self.n_ctx, np.bool_)
        for bit in np.unique(self.seq[s]).tolist() if self.n_swa else ():
            if bit.bit_count() == 1:
                next_ = self.seq_pos_max(bit.bit_length() - 1) + 1
                passed |= (self.seq[s] == bit) & (next_ - self.pos[s] >= self.n_swa)
        return passed

    def apply(self, ubatch: Ubatch, slots: Slots) -> None:
        """Put the tokens into their cells: `apply_ubatch`. Of what a sequence loses, it loses all that is older."""
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
        """Cells that a graph reads of each stream: `get_n_kv`, after `apply`."""
        used = np.flatnonzero((self.pos[list(slots.streams)] >= 0).any(axis=0))
        last = int(used[-1]) + 1 if used.size else 0
        return min(self.n_ctx, max(N_PAD, -(-last // N_PAD) * N_PAD))

    def k_idxs(self, slots: Slots) -> I64Array:
        """The row of each token in all streams' rows."""
        streams = np.array(slots.streams, np.int64)
        return (streams[:, None] * self.n_ctx + slots.idxs).reshape(-1)

    def v_idxs_trans(self, slots: Slots, n_embd_v_gqa: int) -> I64Array:
        """The place of each element of each token where V is kept transposed."""
        streams = np.array(slots.streams, np.int64)[:, None, None]
        rows = np.arange(n_embd_v_gqa) * self.n_ctx
        return (streams * (self.n_ctx * n_embd_v_gqa) + slots.idxs[:, :, None] + rows).reshape(-1)

    def kq_mask(self, ubatch: Ubatch, n_kv: int, *, alibi: bool = False) -> NDArray[np.float32]:
        """[n_tokens, n_kv]: 0 for a cell of the same sequence that is not in the future, -inf for every other.

        A window hides what lies before it; with `alibi` what is seen has minus its distance instead of 0.
        """
        stream = np.array([self.stream_of(s) for s in ubatch.seqs.tolist()])
        seen = (self.seq[stream, :n_kv] >> ubatch.seqs[:, None] & 1).astype(np.bool_)
        ago = ubatch.pos[:, None] - self.pos[stream, :n_kv]
        seen &= ago >= 0
        if self.n_swa:
            seen &= ago < self.n_swa
        shown = (-ago).astype(np.float32) if alibi else np.float32(0)
        return np.where(seen, shown, np.float32(-np.inf))


def split(batch: Ubatch, n_ubatch: int, *, unified: bool, equal: bool = False) -> list[Ubatch]:
    """The ubatches that llama.cpp makes of a batch.

    One stream: `n_ubatch` tokens at a time (`split_simple`). A stream per sequence: of sequences with adjacent ids as
    many tokens each as the shortest still has (`split_equal`). With `equal`, so in one stream too, whatever the ids.
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
