"""A plan played on a llama.cpp context: batches for `llama_decode`, and what is done to its memory between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.suite.decoder.memory import Ubatch, split
from conformance.suite.plan import Part, parse

from .layout import Batch
from .library import Library

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch: one entry per token."""

    tokens: I32
    pos: I32
    seqs: I32
    outputs: NDArray[np.int8]
    """Whether a token's logits are wanted."""

    def rows(self) -> list[list[int]]:
        """`[token, position, sequence, wants_logits]` of each token: the note of a step."""
        rows: list[list[int]] = np.stack([self.tokens, self.pos, self.seqs, self.outputs], axis=1).astype(int).tolist()
        return rows


class Drive:
    """Plays plans on one context.

    Args:
        library: llama.cpp.
        model: `llama_model *`.
        context: `llama_context *`.
        n_seq_max: sequences of the context, all active at first.
        unified: whether they share one stream of cells.
        stream: the case's name, which the tokens' stream has.
        n_ubatch: tokens of one graph, at most.
        begin: called before each batch with the function that computes it.
        each: called after each batch with what was decoded.
    """

    def __init__(  # the context's facts, each by its name
        self,
        library: Library,
        model: int,
        context: int,
        *,
        n_seq_max: int,
        unified: bool,
        n_ubatch: int,
        stream: str,
        begin: Callable[[str], None],
        each: Callable[[Tokens], None],
    ) -> None:
        self._library, self._c = library, library.c
        self._context = context
        self._memory = self._c.llama_get_memory(context)
        self._n_ctx = int(self._c.llama_n_ctx(context))
        self._unified = unified
        self._n_seq_max = n_seq_max
        self._n_ubatch = n_ubatch
        self._begin, self._each = begin, each
        self._n_vocab = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(model))
        self._encodes = bool(self._c.llama_model_has_encoder(model))
        self._decodes = bool(self._c.llama_model_has_decoder(model))
        self._start_token = self._c.llama_model_decoder_start_token(model)
        self._tokens = Stream(stream, "inp_tokens")
        self._next = [0] * n_seq_max
        """Sequence -> the position of its next token."""
        self.active = list(range(n_seq_max))

    def run(self, plan: str) -> None:
        """Do all parts.

        Raises:
            UsageError: names the part that cannot be done, with what llama.cpp said.
        """
        for part in parse(plan):
            _VERBS[part.verb](self, part)

    def decode(self, n_tokens: Sequence[int], *, every: bool = False) -> None:
        """New tokens of the active sequences: one number for all, or one each."""
        if len(n_tokens) == 1:
            n_tokens = list(n_tokens) * len(self.active)
        if len(n_tokens) != len(self.active) or not sum(n_tokens):
            raise UsageError(f"run: one number of tokens, or {len(self.active)}, expected; {list(n_tokens)} found")
        seqs = np.repeat(np.array(self.active, np.int32), n_tokens)
        firsts = [self._next[s] for s in self.active]
        pos = np.concatenate([np.arange(p, p + n) for p, n in zip(firsts, n_tokens, strict=True)])
        outputs = np.full(len(seqs), int(every), np.int8)
        outputs[[end - 1 for end, n in zip(np.cumsum(n_tokens), n_tokens, strict=True) if n]] = 1
        tokens = self._tokens.integers(len(seqs), 0, self._n_vocab).astype(np.int32)
        self._want_results(seqs, outputs)
        batch = Tokens(tokens, pos.astype(np.int32), seqs, outputs)
        if self._encodes and not self._decodes:
            outputs[:] = 1
            self._call("llama_encode", batch)
            self._each(batch)
            return
        if self._encodes and not any(self._next):
            self._call("llama_encode", Tokens(tokens, batch.pos, seqs, np.ones_like(outputs)))
            self._each(batch)
        self._call("llama_decode", batch)
        for s, n in zip(self.active, n_tokens, strict=True):
            self._next[s] += n
        self._each(batch)

    def _want_results(self, seqs: I32, outputs: NDArray[np.int8]) -> None:
        """One result of every graph: the last token's, where the batch is split and a part would have none."""
        everyone = np.arange(len(seqs), dtype=np.int64)
        batch = Ubatch(everyone, everyone, seqs.astype(np.int64), outputs.astype(np.bool_))
        for part in split(batch, self._n_ubatch, unified=self._unified or self._n_seq_max == 1):
            if not part.outputs.any():
                outputs[part.tokens[-1]] = 1

    def _call(self, function: str, b: Tokens) -> None:
        self._begin(function)
        n = len(b.tokens)
        if n > self._n_ctx:
            raise UsageError(f"run: a batch of {n} tokens, where there are {self._n_ctx} cells; take a larger ctx")
        ids = np.ascontiguousarray(b.seqs)
        counts = np.ones(n, np.int32)
        pointers = (ids.ctypes.data + 4 * np.arange(n, dtype=np.uint64)).astype(np.uint64)
        arrays: list[NDArray[Any]] = [np.ascontiguousarray(a) for a in (b.tokens, b.pos, counts, pointers, b.outputs)]
        at = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        failed = getattr(self._c, function)(self._context, Batch(n, at[0], None, at[1], at[2], at[3], at[4]))
        if failed:
            said = " / ".join(line for line in list(self._library.log)[-3:] if line)
            raise UsageError(f"run: {function} of {n} tokens returned {failed}: {said}")

    def back(self, n: int) -> None:
        """Every sequence forgets its last `n` tokens."""
        for s in self.active:
            self._next[s] = max(0, self._next[s] - n)
            self._remove(s, self._next[s], -1)

    def shift(self, n: int) -> None:
        """Every sequence forgets its first `n` tokens and moves the others up."""
        if not self._memory or not self._c.llama_memory_can_shift(self._memory):
            raise UsageError("run: the memory of this architecture cannot shift positions")
        for s in self.active:
            self._remove(s, 0, n)
            self._c.llama_memory_seq_add(self._memory, s, n, -1, -n)
            self._next[s] = max(0, self._next[s] - n)

    def remove(self, seq: int) -> None:
        """A sequence is forgotten and takes no part any more."""
        self._forget(seq)
        self.active = [s for s in self.active if s != seq]
        if not self.active:
            raise UsageError(f"run: rm{seq} leaves no sequence")

    def add(self, seq: int) -> None:
        """A sequence takes part (again), from position 0."""
        self._forget(seq)
        self.active = sorted({*self.active, seq})

    def share(self, seq: int) -> None:
        """The other active sequences give up what they have for `seq`'s tokens."""
        if not self._unified:
            raise UsageError("run: cp: sequences have a stream each, and llama.cpp copies bytes; take unified=1")
        for other in self.active:
            if other != seq:
                self._forget(other)
                self._c.llama_memory_seq_cp(self._memory, seq, other, 0, self._next[seq])
                self._next[other] = self._next[seq]

    def reset(self) -> None:
        """All cells are emptied; what they hold stays."""
        if self._memory:
            self._c.llama_memory_clear(self._memory, False)  # C's signature
        self._next = [0] * self._n_seq_max

    def _forget(self, seq: int) -> None:
        if seq >= self._n_seq_max:
            raise UsageError(f"run: sequence {seq} of {self._n_seq_max} is unknown")
        self._remove(seq, 0, -1)
        self._next[seq] = 0

    def _remove(self, seq: int, p0: int, p1: int) -> None:
        if self._memory and not self._c.llama_memory_seq_rm(self._memory, seq, p0, p1):
            raise UsageError(f"run: the memory of this architecture cannot forget positions {p0} to {p1} of a sequence")


def _start(_drive: Drive, part: Part) -> None:
    raise UsageError(f"run: {part}: llama.cpp cannot start with made-up caches; decode a prompt first")


def _singles(drive: Drive, part: Part) -> None:
    for _ in range(part.number):
        drive.decode([1])


_VERBS: dict[str, Callable[[Drive, Part], None]] = {
    "at": _start,
    "p": lambda d, p: d.decode(p.numbers),
    "o": lambda d, p: d.decode(p.numbers, every=True),
    "d": _singles,
    "back": lambda d, p: d.back(p.number),
    "shift": lambda d, p: d.shift(p.number),
    "rm": lambda d, p: d.remove(p.number),
    "add": lambda d, p: d.add(p.number),
    "cp": lambda d, p: d.share(p.number),
    "reset": lambda d, _: d.reset(),
}
