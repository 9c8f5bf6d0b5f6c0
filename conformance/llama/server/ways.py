"""Ways to ask a server for tokens that a fresh run of llama.cpp also gives.

A way is a few requests to llama-server whose last answers have a history that is known: what slots hold, what a cache
already has, what was saved, shifted or cancelled before. Only `FRESH` needs no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from conformance.case.case import JSON
from conformance.ggml.errors import UnavailableError

from .client import Answer, Candidates, RefusedError, Server

TOKENS = 16
"""Tokens of an answer."""
BANDS = (24, 288)
"""Lengths of prompts: one before and one after the first 256 cells."""
FIRST, MORE = 24, 5
"""Tokens of a slot's first prompt, and of each further one."""
SOON = 4
"""Tokens that a state of a short convolution reaches."""
LEAST, MOST = 128, 1024
"""Cells of a slot that some ways fill."""
FILE = "conformance-slot.bin"
"""The saved slot, in the server's own folder."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Tokens that a server removed once a slot was full."""

    before: int
    """Tokens of the answer that were in the slot."""
    keep: int
    """First tokens that stay."""
    discard: int
    """Tokens behind them that are removed; the others move down."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and the tokens before it."""

    prompt: Sequence[int]
    """All tokens of the slot."""
    answer: Sequence[int] = ()
    rows: Sequence[Candidates] = ()
    """Candidates of the last tokens of the answer."""
    shift: Shift | None = None
    refused: str = ""
    """The server's words if it refuses what fits."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A server, and what its ways need to know."""

    server: Server
    draw: Callable[[int, str], list[int]]
    """Returns random tokens, others for each name."""
    first: Sequence[int] = ()
    """The user's prompt; empty for a random one."""
    cells: int = 0
    """Cells of a slot; 0 if the server has no slots."""
    adds_bos: bool = False
    """True if a shift keeps one token more."""

    def ask(self, prompt: Sequence[int], n: int = TOKENS, **more: JSON) -> tuple[Asked, Answer]:
        """Ask for tokens after a prompt that fits."""
        try:
            answer = self.server.complete(prompt, n, **more)
        except RefusedError as e:
            return Asked(prompt, refused=str(e)), Answer()
        return Asked(prompt, answer.tokens, answer.rows), answer

    @property
    def many(self) -> int:
        """Tokens of a prompt whose answer just fits; UnavailableError with too many cells."""
        if not LEAST <= self.cells <= MOST:
            raise UnavailableError(f"slots of {LEAST} to {MOST} cells expected, they have {self.cells}")
        return self.cells - TOKENS - 2


@dataclass(frozen=True, slots=True)
class Way:
    """A way to ask a server."""

    does: str
    """Description: the history of the answer."""
    ask: Callable[[Asking], Sequence[Asked]]
    """UnavailableError if the server does not offer it."""
    slots: int = 2
    """Number of slots that it needs."""


def fresh(asking: Asking, length: int) -> list[Asked]:
    """Ask for a prompt that no slot has seen."""
    prompt = asking.first if asking.first and length == BANDS[0] else asking.draw(length, "prompt")
    answer = asking.server.complete(prompt, TOKENS)
    return [Asked(prompt, answer.tokens, answer.rows)] if answer.tokens else []


def together(asking: Asking) -> list[Asked]:
    """Continue two conversations at the same time, each in its own slot."""
    begun = [asking.draw(FIRST + 16 * i, f"slot {i}") for i in range(2)]
    said = [asking.ask(prompt, id_slot=i, cache_prompt=True)[1] for i, prompt in enumerate(begun)]
    more = [asking.draw(MORE, f"more {i}") for i in range(2)]
    prompts = [[*p, *a.tokens, *then] for p, a, then in zip(begun, said, more, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(asking.ask, p, id_slot=i, cache_prompt=True) for i, p in enumerate(prompts)]
        return [call.result()[0] for call in calls]


def cached(asking: Asking) -> list[Asked]:
    """Change the end of a prompt."""
    begin, one, other = asking.draw(FIRST, "begin"), asking.draw(MORE, "one"), asking.draw(MORE, "other")
    other[0] = one[0] - 1 if one[0] else 1  # not the token that the slot has there
    asking.ask([*begin, *one], id_slot=0, cache_prompt=True)
    return [asking.ask([*begin, *other], id_slot=0, cache_prompt=True)[0]]


def repeated(asking: Asking) -> list[Asked]:
    """Repeat a prompt, and leave out its end."""
    prompt = asking.draw(FIRST, "prompt")
    asking.ask(prompt, id_slot=0, cache_prompt=True)
    return [asking.ask(of, id_slot=0, cache_prompt=True)[0] for of in (prompt, prompt[:-2])]


def saved(asking: Asking) -> list[Asked]:
    """Save a slot, use it for another prompt, and restore it into another slot."""
    begin = asking.draw(FIRST, "begin")
    first, answer = asking.ask(begin, id_slot=0, cache_prompt=True)
    if first.refused:
        return [first]
    try:
        asking.server.slot(0, "save", FILE)
    except RefusedError as e:
        raise UnavailableError(f"it saves no slots; --slot-save-path lets llama-server: {e}") from None
    asking.ask(asking.draw(FIRST, "between"), id_slot=0)
    asking.server.slot(1, "erase")
    asking.server.slot(1, "restore", FILE)
    found, answer = asking.ask([*begin, *answer.tokens], SOON, id_slot=1, cache_prompt=True)
    if not answer.cached and not found.refused:
        raise UnavailableError("it uses nothing of a restored slot")
    return [found]


def shifted(asking: Asking) -> list[Asked]:
    """Generate beyond the cells of a slot, so that it discards half of them."""
    prompt = asking.draw(asking.many + TOKENS - 2, "prompt")
    keep = asking.cells // 4
    discard = (asking.cells - keep) // 2
    shift = Shift(asking.cells - 1 - len(prompt), keep + asking.adds_bos, discard)
    n = shift.before + 1 + TOKENS
    found, _ = asking.ask(prompt, n, id_slot=0, n_keep=keep, n_discard=discard)
    if found.refused or not found.answer:
        return [found]
    if len(found.answer) < n:
        raise UnavailableError(f"it ends at {asking.cells} cells; --context-shift lets llama-server go on")
    return [Asked(prompt, found.answer, found.rows[shift.before + 1 :], shift)]


def cancelled(asking: Asking) -> list[Asked]:
    """Cancel a long request, and fill its slot with another one."""
    prompt = asking.draw(asking.many, "prompt")
    try:
        asking.server.cancel(asking.draw(asking.cells // 2, "cancelled"), asking.cells // 2 - 1, id_slot=0)
    except RefusedError as e:
        return [Asked(prompt, refused=str(e))]
    return [asking.ask(prompt, id_slot=0)[0]]


WAYS = {
    **{f"fresh-{n}": Way(f"after {n} tokens", partial(fresh, length=n), 0) for n in BANDS},
    "together": Way("while another slot answers", together),
    "cached": Way("after a part of a prompt from a slot's cache", cached),
    "repeated": Way("after a whole prompt from a slot's cache", repeated),
    "saved": Way("after a slot was restored", saved),
    "shifted": Way("after a context shift", shifted),
    "cancelled": Way("after a request was cancelled", cancelled),
}
"""Name -> way."""
FRESH = tuple(name for name, way in WAYS.items() if not way.slots)
"""Ways that any completions endpoint offers."""
