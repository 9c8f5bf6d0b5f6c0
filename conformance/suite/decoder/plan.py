"""Plans of trajectories: tokens to decode, remove and share, for the builder and the zoo.

The plan's parts are joined by dots:

| part | meaning |
|---|---|
| `at1000` | first only: every sequence has 1000 tokens with random K and V in their cells, junk in the others |
| `p250` | 250 tokens of every sequence, logits of its last; `p5+9+1` sets the number per active sequence |
| `o20` | like `p20`, with logits of every token |
| `d8` | one token of every sequence, eight times |
| `back5` | remove the last 5 tokens of every sequence |
| `shift5` | context shift: remove the first 5 tokens of every sequence and shift the others to position 0 |
| `rm1`, `add1` | remove sequence 1 from later batches; add it (again) without tokens |
| `cp0` | replace the tokens of all other sequences by sequence 0's (shared prefix); unified cache only |
| `reset` | clear all cells; their bytes remain |
| `15(d12.p244)` | repeat the parts in brackets 15 times |
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError

from .memory import Ubatch

VERBS = ("at", "p", "o", "d", "back", "shift", "rm", "add", "cp", "reset")

_PART = re.compile(r"([a-z]+)([0-9]{1,7}(?:\+[0-9]{1,7})*)?", re.ASCII)
_REPEATED = re.compile(r"([1-9][0-9]{0,3})\(([^()]*)\)", re.ASCII)
_SEVERAL = frozenset({"p", "o"})


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a plan: its verb and numbers; `reset` has none, `p` and `o` any, others one."""

    verb: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return self.verb + "+".join(map(str, self.numbers))

    @property
    def number(self) -> int:
        """The only number."""
        return self.numbers[0]


def parse(plan: str) -> list[Part]:
    """Return the parts of a plan with repeats expanded; UsageError names an invalid one."""
    parts = [_part(text) for text in _REPEATED.sub(_repeat, plan).split(".")]
    for part in parts[1:]:
        if part.verb == "at":
            raise UsageError(f"run: {part} must be the first part, because it sets the caches that later parts use")
    return parts


def _part(text: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None or match[1] not in VERBS:
        raise UsageError(
            f"run: {text!r} found; parts: {', '.join(VERBS)}, each with a number, joined by dots, such as p5.d4"
        )
    part = Part(match[1], tuple(int(n) for n in match[2].split("+")) if match[2] else ())
    if part.verb == "reset" and part.numbers:
        raise UsageError(f"run: reset takes no number, {text!r} found")
    if part.verb != "reset" and (not part.numbers or (len(part.numbers) > 1 and part.verb not in _SEVERAL)):
        raise UsageError(f"run: {text!r} found, one number expected")
    return part


def _repeat(match: re.Match[str]) -> str:
    return ".".join([match[2]] * int(match[1]))


class Player(ABC):
    """Runs plans over sequences, initially all active; draws tokens from the stream `tokens`."""

    def __init__(self, n_seq_max: int, tokens: Stream) -> None:
        self._n_seq_max = n_seq_max
        self._tokens = tokens
        self.active = list(range(n_seq_max))

    def run(self, plan: str) -> None:
        """Run all parts of a plan; UsageError if one is invalid or impossible."""
        methods = {
            "at": self.start, "back": self.back, "shift": self.shift, "rm": self.remove, "add": self.add,
            "cp": self.share,
        }  # fmt: skip
        for part in parse(plan):
            if part.verb in _SEVERAL:
                self.prompt(list(part.numbers), every=part.verb == "o")
            elif part.verb == "d":
                for _ in range(part.number):
                    self.prompt([1])
            elif part.verb == "reset":
                self.reset()
            else:
                methods[part.verb](part.number)

    @abstractmethod
    def start(self, n_past: int) -> None:
        """Give every sequence `n_past` tokens: random K and V in their cells, and junk elsewhere."""

    @abstractmethod
    def prompt(self, n_tokens: list[int], *, every: bool = False) -> None:
        """Decode new tokens of the active sequences: one count for all, or one each."""

    @abstractmethod
    def reset(self) -> None:
        """Clear all cells; their bytes remain."""

    @abstractmethod
    def n_past(self, seq: int) -> int:
        """Return the position of a sequence's next token."""

    @abstractmethod
    def seq_rm(self, seq: int, p0: int, p1: int | None = None) -> None:
        """Remove positions p0 to p1 (all from p0 on) of a sequence: `llama_memory_seq_rm`."""

    @abstractmethod
    def seq_add(self, seq: int, p0: int, shift: int) -> None:
        """Shift positions from p0 on of a sequence: `llama_memory_seq_add`."""

    @abstractmethod
    def seq_cp(self, src: int, dst: int) -> None:
        """Add all tokens of `src` to `dst`: `llama_memory_seq_cp`."""

    def batch(self, n_tokens: list[int], n_vocab: int, *, every: bool) -> Ubatch:
        """Return new tokens of the active sequences, with outputs for the last of each, or for all.

        UsageError for neither one count nor one for each active sequence, or no token.
        """
        if len(n_tokens) == 1:
            n_tokens = n_tokens * len(self.active)
        if len(n_tokens) != len(self.active) or not sum(n_tokens):
            raise UsageError(f"run: one number of tokens, or {len(self.active)}, expected; {n_tokens} found")
        seqs = np.repeat(np.array(self.active, np.int64), n_tokens)
        firsts = [self.n_past(seq) for seq in self.active]
        pos = np.concatenate([np.arange(p, p + n) for p, n in zip(firsts, n_tokens, strict=True)])
        outputs = np.full(len(seqs), every)
        outputs[[end - 1 for end, n in zip(np.cumsum(n_tokens), n_tokens, strict=True) if n]] = True
        return Ubatch(self._tokens.integers(len(seqs), 0, n_vocab), pos, seqs, outputs)

    def back(self, n: int) -> None:
        """Remove the last `n` tokens of every sequence."""
        for seq in self.active:
            self.seq_rm(seq, max(0, self.n_past(seq) - n))

    def shift(self, n: int, keep: int = 0) -> None:
        """Remove `n` tokens of every sequence behind its first `keep`; the others shift down."""
        for seq in self.active:
            self.seq_rm(seq, keep, keep + n)
            self.seq_add(seq, keep + n, -n)

    def remove(self, seq: int) -> None:
        """Remove a sequence and exclude it from later batches."""
        self._forget(seq)
        self.active = [s for s in self.active if s != seq]
        if not self.active:
            raise UsageError(f"run: rm{seq} leaves no sequence")

    def add(self, seq: int) -> None:
        """Include an empty sequence in later batches, from position 0."""
        self._forget(seq)
        self.active = sorted({*self.active, seq})

    def share(self, seq: int) -> None:
        """Replace the tokens of the other active sequences by `seq`'s."""
        self._check(seq)
        for other in self.active:
            if other != seq:
                self.seq_rm(other, 0)
                self.seq_cp(seq, other)

    def _forget(self, seq: int) -> None:
        self._check(seq)
        self.seq_rm(seq, 0)

    def _check(self, seq: int) -> None:
        if seq >= self._n_seq_max:
            raise UsageError(f"run: sequence {seq} of {self._n_seq_max} is unknown")
