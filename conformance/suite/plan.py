"""The text of a trajectory: what is decoded, forgotten and shared, step by step. The builder and the zoo both read it.

The plan's parts are joined by dots:

| part | does |
|---|---|
| `at1000` | first only: every sequence already has 1000 tokens, their cells hold random K and V, the others junk |
| `p250` | 250 tokens of every sequence, logits of its last; `p5+9+1` gives each active sequence its own number |
| `o20` | as `p20`, logits of every token |
| `d8` | eight times one token of every sequence |
| `back5` | every sequence forgets its last 5 tokens |
| `shift5` | every sequence forgets its first 5 tokens and the others move up to position 0: a context shift |
| `rm1`, `add1` | sequence 1 is removed and leaves; it comes (back) empty |
| `cp0` | sequence 0's tokens become every other's too, in place of theirs: a shared prefix; unified cache only |
| `reset` | all cells are emptied; what they hold stays |
| `15(d12.p244)` | the parts in brackets, 15 times |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from conformance.ggml.errors import UsageError

VERBS = ("at", "p", "o", "d", "back", "shift", "rm", "add", "cp", "reset")

_PART = re.compile(r"([a-z]+)([0-9]{1,7}(?:\+[0-9]{1,7})*)?", re.ASCII)
_REPEATED = re.compile(r"([1-9][0-9]{0,3})\(([^()]*)\)", re.ASCII)
_SEVERAL = frozenset({"p", "o"})


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its verb and its numbers: none for `reset`, one or more for `p` and `o`, one for all others."""

    verb: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return self.verb + "+".join(map(str, self.numbers))

    @property
    def number(self) -> int:
        """The only number."""
        return self.numbers[0]


def parse(plan: str) -> list[Part]:
    """The parts of a plan, with repetitions written out.

    Raises:
        UsageError: names the part that cannot be read.
    """
    parts = [_part(text) for text in _REPEATED.sub(_repeat, plan).split(".")]
    for part in parts[1:]:
        if part.verb == "at":
            raise UsageError(f"run: {part} can only come first: later the caches are the backend's")
    return parts


def _part(text: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None or match[1] not in VERBS:
        raise UsageError(f"run: {text!r} found; parts: {', '.join(VERBS)}, with numbers, joined by dots")
    part = Part(match[1], tuple(int(n) for n in match[2].split("+")) if match[2] else ())
    if part.verb == "reset" and part.numbers:
        raise UsageError(f"run: reset takes no number, {text!r} found")
    if part.verb != "reset" and (not part.numbers or (len(part.numbers) > 1 and part.verb not in _SEVERAL)):
        raise UsageError(f"run: {text!r} found, one number expected")
    return part


def _repeat(match: re.Match[str]) -> str:
    return ".".join([match[2]] * int(match[1]))
