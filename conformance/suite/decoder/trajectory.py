"""Build a case from a plan (`decoder/plan.py`): a step per ubatch and per position shift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Bytes, Tensor, nbytes, new_tensor, row_size
from conformance.ggml.types import BF16
from conformance.suite.data import hadamard

from . import weights
from .config import Cparams, Hparams, n_rot
from .costs import demands
from .decoder import Decode, build, build_shift
from .kv import Cache
from .layers import Sketch
from .memory import Cells, Memory, Part, Place, Ubatch
from .plan import Player
from .weights import weight_shapes

GENERATOR = 1
"""Increment when the bytes of any id change."""

MAX_STEPS = 20_000


class Trajectory(Player):
    """A context that decodes batches; each `decode` adds the steps that llama.cpp would compute."""

    def __init__(self, case_id: str, hparams: Hparams, cparams: Cparams) -> None:
        hparams.check()
        cparams.check(hparams)
        super().__init__(cparams.n_seq_max, Stream(case_id, "inp_tokens"))
        self.h, self.c = hparams, cparams
        self.id = case_id
        self.memory = Memory(hparams, cparams)
        self.cache = Cache(hparams, cparams)
        self.weights = {name: new_tensor(t, *ne, name=name) for name, (t, ne) in weight_shapes(hparams).items()}
        self.steps: list[Step] = []
        self._start: dict[Tensor, Bytes] = {}

    def start(self, n_past: int) -> None:
        """Give every sequence `n_past` tokens: random K and V in their cells, junk elsewhere."""
        for _ in self.memory.place(self.batch([n_past], self.h.n_vocab, every=False)):
            pass
        for t in self.cache.tensors():
            self._start[t] = self._cache_bytes(t)

    def _cache_bytes(self, t: Tensor) -> Bytes:
        """Return the bytes of a cache: K and V in cells with a token, junk in the others."""
        values, junk = weights.cached(self.id, t)
        if t in self.cache.r.values():
            return values
        swa = self.h.is_swa(int(t.name.rpartition("_l")[2]))
        used = self.memory.cells(swa=swa).pos >= 0
        transposed = self.c.v_trans and t in self.cache.v.values()
        shape = (t.ne[2], t.ne[0], t.ne[1], -1) if transposed else (t.ne[2], t.ne[1], row_size(t.type, t.ne[0]))
        where = used[:, None, :, None] if transposed else used[:, :, None]
        return np.where(where, values.reshape(shape), junk.reshape(shape)).reshape(-1)

    def prompt(self, n_tokens: list[int], *, every: bool = False) -> None:
        """Decode new tokens of the active sequences: one count for all, or one each."""
        self.decode(self.batch(n_tokens, self.h.n_vocab, every=every))

    def decode(self, batch: Ubatch) -> None:
        """Add the steps of a batch: `llama_decode`; UsageError if cache or trajectory is full."""
        for cells in self.memory.all_cells():
            if cells.has_shift:
                self._shift(cells)
        for ubatch, place in self.memory.place(batch):
            if not ubatch.outputs.any():
                ubatch.outputs[-1] = True  # otherwise the step would have only caches to check
            sketch = Sketch(self.h, self.c, self.weights, self.cache, ubatch, place)
            self._add(build(sketch), self._values(ubatch, place), {"tokens": ubatch.rows()})

    def _shift(self, cells: Cells) -> None:
        """Add the step that rotates K to new positions before a batch: `llama_kv_cache::update`."""
        swa = cells is not self.memory.base
        caches = {il: k for il, k in self.cache.k.items() if self.h.is_swa(il) == swa}
        if caches and self.h.rope != "NONE":
            values: dict[str, Callable[[], NDArray[Any]]] = {
                "k_shift": lambda: cells.shift,
                "attn_inp_k_rot": lambda: hadamard(n_rot(self.h, self.c)[0]),
            }
            self._add(build_shift(self.h, self.c, self.weights, caches), values, {"shift": True})
        cells.reset_shift()

    def reset(self) -> None:
        """Remove all tokens; the bytes of the caches remain."""
        self.memory.clear()

    def n_past(self, seq: int) -> int:
        """Return the position of a sequence's next token."""
        return self.memory.base.seq_pos_max(seq) + 1

    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions p0 to p1 (all from p0 on) of a sequence."""
        self.memory.seq_rm(seq, p0, p1)

    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Shift positions from p0 on of a sequence; UsageError for BF16, where llama.cpp aborts."""
        if self.c.type_k is BF16:
            raise UsageError("shift: K in a BF16 cache cannot be rotated; cache=f16, f32 or a quantised one expected")
        self.memory.seq_add(seq, p0, shift)

    def seq_cp(self, src: int, dst: int) -> None:
        """Add all tokens of `src` to `dst`."""
        self.memory.seq_cp(src, dst)

    def case(self, family: str, params: Mapping[str, Any], seed: int) -> Case:
        """Return the finished case; UsageError if it has no step."""
        if not self.steps:
            raise UsageError(f"case {self.id!r}: run: at least one p, o or d expected")
        persistent = {t: weights.weight(self.id, self.h, t) for t in self.weights.values()}
        for t in self.cache.tensors():
            persistent[t] = self._start.get(t, np.zeros(nbytes(t), np.uint8))
        return Case(
            self.id, persistent, self.steps, family=family, params=dict(params), seed=seed, generator=GENERATOR,
            demands=demands(self.steps, persistent),
        )  # fmt: skip

    def _add(self, decode: Decode, values: Mapping[str, Callable[[], NDArray[Any]]], note: dict[str, Any]) -> None:
        if len(self.steps) == MAX_STEPS:
            raise UsageError(f"run: more than {MAX_STEPS} steps")
        inputs = {t: _encode(t, values[key]()) for key, t in decode.inputs.items()}
        self.steps.append(Step(decode.graph, inputs, decode.outputs, note=note))

    def _values(self, ubatch: Ubatch, place: Place) -> dict[str, Callable[[], NDArray[Any]]]:
        """Return key of an input -> its values."""
        n = ubatch.n_tokens
        values: dict[str, Callable[[], NDArray[Any]]] = {
            "inp_tokens": lambda: ubatch.tokens,
            "inp_pos": lambda: ubatch.pos,
            "out_ids": lambda: np.flatnonzero(ubatch.outputs),
            "rs_s_copy": lambda: np.array(place.recr.s_copy if place.recr else (), np.int64),
            "inp_mixed_tokens": lambda: np.zeros(n),
            "inp_mixed_embd": lambda: np.zeros((n, self.h.n_embd)),
            "inp_mixed_slots": lambda: np.zeros(n),
        }
        values |= self._attended(ubatch, place.base)
        if place.swa is not None:
            values |= {f"{name}_swa": value for name, value in self._attended(ubatch, place.swa).items()}
        return values

    def _attended(self, ubatch: Ubatch, part: Part) -> dict[str, Callable[[], NDArray[Any]]]:
        cells, slots = part.cells, part.slots
        n_v, alibi = self.h.n_embd_v_gqa, bool(self.h.alibi)
        rot_k, rot_v = n_rot(self.h, self.c)
        return {
            "attn_inp_k_idxs": lambda: cells.k_idxs(slots),
            "attn_inp_v_idxs": lambda: cells.v_idxs_trans(slots, n_v) if self.c.v_trans else cells.k_idxs(slots),
            "attn_inp_kq_mask": lambda: cells.kq_mask(ubatch, part.n_kv, alibi=alibi),
            "attn_inp_k_rot": lambda: hadamard(rot_k),
            "attn_inp_v_rot": lambda: hadamard(rot_v),
        }


def _encode(t: Tensor, values: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values.astype(t.type.dtype)).view(np.uint8).reshape(-1)
