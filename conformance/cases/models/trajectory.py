"""A decoder's trajectory as a case: a plan of prompts, decodes and removals becomes one step per ubatch.

The plan is text, its parts joined by dots:

| part | does |
|---|---|
| `at1000` | first only: every sequence already has 1000 tokens, their cells hold random K and V, the others junk |
| `p250` | 250 tokens of every sequence, logits of its last; `p5+9+1` gives each sequence its own number |
| `o20` | as `p20`, logits of every token |
| `d8` | eight times one token of every sequence |
| `back5` | every sequence forgets its last 5 tokens |
| `rm1`, `add1` | sequence 1 is removed and leaves; it comes (back) empty |
| `cp0` | sequence 0's tokens become every other's too, in place of theirs: a shared prefix; unified cache only |
| `reset` | all cells are emptied; what they hold stays |
| `15(d12.p244)` | the parts in brackets, 15 times |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.cgraph.case import Case, Step
from conformance.cgraph.errors import UsageError
from conformance.cgraph.streams import Stream
from conformance.cgraph.tensor import Bytes, Tensor, nbytes, new_tensor, row_size

from . import weights
from .cells import Cells, Slots, Ubatch, split
from .config import Cparams, Hparams, n_rot, weight_shapes
from .decoder import build
from .kv import Cache

GENERATOR = 1
"""Raise it when any id's bytes change."""

_PART = re.compile(r"([a-z]+)([0-9]{1,7}(?:\+[0-9]{1,7})*)?", re.ASCII)
_REPEATED = re.compile(r"([1-9][0-9]{0,3})\(([^()]*)\)", re.ASCII)
MAX_STEPS = 20_000


class Trajectory:
    """A context that decodes batches: each call to `decode` adds the steps that llama.cpp would compute."""

    def __init__(self, case_id: str, hparams: Hparams, cparams: Cparams) -> None:
        hparams.check()
        cparams.check(hparams)
        self.h, self.c = hparams, cparams
        self.id = case_id
        self.cells = Cells(cparams.n_ctx, cparams.n_stream)
        self.cache = Cache(hparams, cparams)
        self.weights = {name: new_tensor(t, *ne, name=name) for name, (t, ne) in weight_shapes(hparams).items()}
        self.active = list(range(cparams.n_seq_max))
        self.steps: list[Step] = []
        self._start: dict[Tensor, Bytes] = {}
        self._tokens = Stream(case_id, "inp_tokens")

    def run(self, plan: str) -> None:
        """Do all parts of a plan.

        Raises:
            UsageError: names the part that cannot be read or done.
        """
        written_out = _REPEATED.sub(_repeat, plan)
        for i, part in enumerate(written_out.split(".")):
            match = _PART.fullmatch(part)
            if match is None or match[1] not in _VERBS:
                raise UsageError(f"run: {part!r} found; parts: {', '.join(_VERBS)}, with numbers, joined by dots")
            numbers = [int(n) for n in match[2].split("+")] if match[2] else []
            if match[1] == "at" and i:
                raise UsageError(f"run: {part} can only come first: later the caches are the backend's")
            _VERBS[match[1]](self, numbers)

    def start(self, n_past: int) -> None:
        """Every sequence has `n_past` tokens already; their cells hold random K and V, all others large numbers."""
        batch = self._batch([n_past] * len(self.active))
        slots = self.cells.find_slot(batch)
        self.cells.apply(batch, slots)
        used = self.cells.pos >= 0
        for t in (*self.cache.k, *self.cache.v):
            transposed = self.c.v_trans and t in self.cache.v
            shape = (t.ne[2], t.ne[0], t.ne[1], -1) if transposed else (t.ne[2], t.ne[1], row_size(t.type, t.ne[0]))
            held, junk = (x.reshape(shape) for x in weights.cached(self.id, t))
            where = used[:, None, :, None] if transposed else used[:, :, None]
            self._start[t] = np.where(where, held, junk).reshape(-1)

    def prompt(self, n_tokens: list[int], *, every: bool = False) -> None:
        """Decode new tokens of the active sequences: one number for all, or one each."""
        self.decode(self._batch(n_tokens, every=every))

    def decode(self, batch: Ubatch) -> None:
        """Add the steps of a batch: `llama_decode`.

        Raises:
            UsageError: the cache is full, or the trajectory too long.
        """
        for ubatch in split(batch, self.c.n_ubatch, unified=self.c.n_stream == 1):
            if len(self.steps) == MAX_STEPS:
                raise UsageError(f"run: more than {MAX_STEPS} steps")
            if not ubatch.outputs.any():
                ubatch.outputs[-1] = True  # a step without a result would have nothing but caches to check
            slots = self.cells.find_slot(ubatch)
            self.cells.apply(ubatch, slots)
            self.steps.append(self._step(ubatch, slots))

    def back(self, n: int) -> None:
        """Every sequence forgets its last `n` tokens."""
        for seq in self.active:
            self.cells.seq_rm(seq, self.cells.seq_pos_max(seq) + 1 - n)

    def remove(self, seq: int) -> None:
        """A sequence is forgotten and takes no part any more."""
        self._known(seq)
        self.cells.seq_rm(seq, 0)
        self.active = [s for s in self.active if s != seq]
        if not self.active:
            raise UsageError(f"run: rm{seq} leaves no sequence")

    def add(self, seq: int) -> None:
        """A sequence takes part (again), from position 0."""
        self._known(seq)
        self.cells.seq_rm(seq, 0)
        self.active = sorted({*self.active, seq})

    def share(self, seq: int) -> None:
        """The other active sequences give up what they have for `seq`'s tokens."""
        self._known(seq)
        for other in self.active:
            if other != seq:
                self.cells.seq_rm(other, 0)
                self.cells.seq_cp(seq, other, 0, self.cells.seq_pos_max(seq) + 1)

    def case(self, family: str, params: Mapping[str, Any], seed: int) -> Case:
        """The finished case.

        Raises:
            UsageError: no step was made.
        """
        if not self.steps:
            raise UsageError(f"case {self.id!r}: run: at least one p, o or d expected")
        persistent = {t: weights.weight(self.id, t) for t in self.weights.values()}
        for t in (*self.cache.k, *self.cache.v):
            persistent[t] = self._start.get(t, np.zeros(nbytes(t), np.uint8))
        return Case(self.id, persistent, self.steps, family=family, params=dict(params), seed=seed, generator=GENERATOR)

    def _known(self, seq: int) -> None:
        if seq >= self.c.n_seq_max:
            raise UsageError(f"run: sequence {seq} of {self.c.n_seq_max} is unknown")

    def _batch(self, n_tokens: list[int], *, every: bool = False) -> Ubatch:
        if len(n_tokens) == 1:
            n_tokens = n_tokens * len(self.active)
        if len(n_tokens) != len(self.active) or not sum(n_tokens):
            raise UsageError(f"run: one number of tokens, or {len(self.active)}, expected; {n_tokens} found")
        seqs = np.repeat(np.array(self.active, np.int64), n_tokens)
        firsts = [self.cells.seq_pos_max(seq) + 1 for seq in self.active]
        pos = np.concatenate([np.arange(p, p + n) for p, n in zip(firsts, n_tokens, strict=True)])
        last = np.cumsum(n_tokens) - 1
        outputs = np.full(len(seqs), every)
        outputs[[i for i, n in zip(last, n_tokens, strict=True) if n]] = True
        return Ubatch(self._tokens.integers(len(seqs), 0, self.h.n_vocab), pos, seqs, outputs)

    def _step(self, ubatch: Ubatch, slots: Slots) -> Step:
        n_kv = self.cells.n_kv(slots)
        made = build(self.h, self.c, self.weights, self.cache, ubatch, slots, n_kv)
        values = self._values(ubatch, slots, n_kv)
        inputs = {t: _encode(t, values[name]()) for name, t in made.inputs.items()}
        rows = [ubatch.tokens, ubatch.pos, ubatch.seqs, ubatch.outputs]
        note = {"tokens": np.stack(rows, axis=1).astype(np.int64).tolist()}
        return Step(made.graph, inputs, (made.logits,), note=note)

    def _values(self, ubatch: Ubatch, slots: Slots, n_kv: int) -> dict[str, Callable[[], NDArray[Any]]]:
        """What each input holds, by its name."""
        n = ubatch.n_tokens
        v_trans = self.c.v_trans
        gqa = self.h.n_embd_gqa
        rot_k, rot_v = n_rot(self.h, self.c)
        return {
            "inp_tokens": lambda: ubatch.tokens,
            "inp_pos": lambda: ubatch.pos,
            "out_ids": lambda: np.flatnonzero(ubatch.outputs),
            "attn_inp_k_idxs": lambda: self.cells.k_idxs(slots),
            "attn_inp_v_idxs": lambda: self.cells.v_idxs_trans(slots, gqa) if v_trans else self.cells.k_idxs(slots),
            "attn_inp_kq_mask": lambda: self.cells.kq_mask(ubatch, n_kv),
            "attn_inp_k_rot": lambda: hadamard(rot_k),
            "attn_inp_v_rot": lambda: hadamard(rot_v),
            "inp_mixed_tokens": lambda: np.zeros(n),
            "inp_mixed_embd": lambda: np.zeros((n, self.h.n_embd)),
            "inp_mixed_slots": lambda: np.zeros(n),
        }


def hadamard(n: int) -> NDArray[np.float32]:
    """The orthonormal Walsh-Hadamard matrix [n, n], `n` a power of 2: `ggml_gen_hadamard`."""
    h = np.array([[np.float32(1.0) / np.sqrt(np.float32(n))]], np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def _encode(t: Tensor, values: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values.astype(t.type.dtype)).view(np.uint8).reshape(-1)


def _repeat(match: re.Match[str]) -> str:
    return ".".join([match[2]] * int(match[1]))


def _one(numbers: list[int]) -> int:
    if len(numbers) != 1:
        raise UsageError(f"run: one number expected, {numbers} found")
    return numbers[0]


def _decode(t: Trajectory, numbers: list[int]) -> None:
    for _ in range(_one(numbers)):
        t.prompt([1])


def _reset(t: Trajectory, numbers: list[int]) -> None:
    if numbers:
        raise UsageError(f"run: reset takes no number, {numbers} found")
    t.cells.clear()


_VERBS: dict[str, Callable[[Trajectory, list[int]], None]] = {
    "at": lambda t, n: t.start(_one(n)),
    "p": lambda t, n: t.prompt(n),
    "o": lambda t, n: t.prompt(n, every=True),
    "d": _decode,
    "back": lambda t, n: t.back(_one(n)),
    "rm": lambda t, n: t.remove(_one(n)),
    "add": lambda t, n: t.add(_one(n)),
    "cp": lambda t, n: t.share(_one(n)),
    "reset": _reset,
}
