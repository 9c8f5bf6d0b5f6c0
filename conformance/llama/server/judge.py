"""Judges a server by its tokens and log probabilities.

The server generates `TOKENS` tokens for each of many prompts, in several ways (`ways.WAYS`). llama.cpp decodes the same
tokens on its own CPU, in a fresh context: once as the pivot, and in m variants that also are right (without flash
attention, F32 caches, other batches, repacked weights; those that equal the pivot bit for bit do not count). The
distance of a run from the pivot is the geometric mean over tokens of

    d = sum over the server's candidates of (p + q) / 2 * (log p - log q)^2 / 2,

about the KL divergence in nats. A prompt counts as an excess if the server's d is `FACTOR` times the largest of: d of
the variants on this prompt, the float64 reference's d on one prompt, and `SAME`, below which distributions are equal.
A prompt that fits and is refused counts, too.

Null hypothesis: given all earlier prompts, the server's distance on the next one is exchangeable with those of the
variants, or stochastically smaller. Then an excess has at most the probability p = 1 / (m + 1), and each factor
1 + b (excess - p) has at most the mean 1. The product over the prompts of a way is an e-process, and so is the mean
over all ways. By Ville's inequality it ever reaches 1 / ALARM with at most the probability ALARM, however often one
looks. This is the rate of false alarms of one call; `FACTOR` and the reference make it smaller. A server that rounds by
far more than all these, as with activations in 8 bits where llama.cpp has none, is no member of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import exp, inf, log

import numpy as np

from conformance.case.case import JSON
from conformance.case.streams import Stream
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.model.figures import F32, log_softmax, number
from conformance.llama.model.graphs import Say, silent
from conformance.llama.model.llama_process import LlamaProcess, Setting, Talk, Turn, alone
from conformance.llama.model.recording import ModelRecording
from conformance.llama.model.references import SAME
from conformance.llama.model.turns import Checking, setting

from .client import CANDIDATES, Candidates, RefusedError, Server, Slot
from .growth import Growth
from .ways import BANDS, FRESH, WAYS, Asked, Asking, Shift

ALARM = 1e-3
"""Maximum probability of a false alarm."""
FACTOR = 4.0
"""A server's distance from the pivot may be this many times that of a right run."""
BET = 0.75
"""Share of the e-process that is staked on an excess."""
EXACT_ROWS = 4
"""Tokens that the float64 reference computes."""
PROMPTS, LEAST = 16, 4
"""Most prompts of each way, and those after which it is left once it cannot raise an alarm."""
VARIANTS = ("fa=0", "fa=0,cache=f32", "batch=16")
"""Settings that are as right as the pivot; repacked weights are a further variant."""
CACHES = ("cache=q8_0", "cache=q5_1", "cache=q5_0", "cache=q4_1", "cache=q4_0")
"""Settings that may explain an alarm."""

PLAIN_DEFAULTS = partial(setting, flash_attn=True)
"""Parses a setting of a model with flash attention."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One prompt with the server's tokens."""

    asked: Asked
    kl: float
    """Geometric mean of d; infinite if refused, or with a token that the model lacks."""
    limit: float
    """Largest KL that is no excess."""
    agree: int
    """Number of tokens that llama.cpp would choose, too."""

    @property
    def excess(self) -> bool:
        """True if rounding does not explain the distance."""
        return not self.kl <= self.limit


@dataclass(slots=True)
class Judgement:
    """Measurements of a server; `result` is made of them."""

    server: str
    blocks: dict[str, list[Continuation]]
    """Way -> what was measured."""
    variants: int = 1
    """Number m of right runs that differ from the pivot."""
    wrong: bool = False
    """True if it does not run the model as llama.cpp does."""
    rounding: float = SAME
    """KL between llama.cpp and float64 on a prompt."""
    fits: str = ""
    """The setting that explains the distance."""
    position: int | None = None
    """The first wrong position, if earlier ones are right."""
    growth: Growth | None = None
    """Its memory, if that was measured."""
    notes: list[str] = field(default_factory=list)

    @property
    def fails(self) -> bool:
        """True if its tokens are wrong, or its memory grows."""
        return self.wrong or (self.growth is not None and self.growth.over)

    def e_of(self, way: str) -> float:
        """Return the e-process of one way."""
        p = 1 / (self.variants + 1)
        return float(np.prod([1 + BET / p * (b.excess - p) for b in self.blocks[way]]))

    def is_settled(self, way: str) -> bool:
        """Return True if a way is left: excesses of all prompts that could follow would be no alarm."""
        n, p = len(self.blocks[way]), 1 / (self.variants + 1)
        most = self.e_of(way) * (1 + BET / p * (1 - p)) ** (PROMPTS - n)
        return n >= PROMPTS or (n >= LEAST and most < len(self.blocks) / ALARM)

    @property
    def e_value(self) -> float:
        """The e-process; an alarm if it reaches 1 / ALARM."""
        return float(np.mean([self.e_of(way) for way in self.blocks]))

    @property
    def every(self) -> list[Continuation]:
        """All prompts."""
        return [b for blocks in self.blocks.values() for b in blocks]

    @property
    def tokens(self) -> int:
        """Number of judged tokens."""
        return sum(len(b.asked.rows) for b in self.every)

    @property
    def worst(self) -> Continuation:
        """The prompt with the largest distance, of the way with the largest e-value."""
        way = max((way for way in self.blocks if self.blocks[way]), key=self.e_of)
        return max(self.blocks[way], key=lambda b: b.kl / b.limit)

    @property
    def when(self) -> list[str]:
        """The ways that are wrong, unless all of several are."""
        asked = [way for way, blocks in self.blocks.items() if blocks]
        wrong = [way for way in asked if self.e_of(way) > 1]
        return wrong if self.wrong and (len(asked) == 1 or wrong != asked) else []

    @property
    def talk(self) -> Talk | None:
        """The worst prompt of a wrong server, to locate the fault; None if no fresh prompt is wrong."""
        b = self.worst
        return (
            [[Turn(b.asked.prompt, forced=b.asked.answer)]]
            if self.wrong and b.kl < inf and not {*self.when} - {*FRESH}
            else None
        )

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        return self._of_tokens() + (f"; {self.growth.sentence()}" if self.growth else "")

    def _of_tokens(self) -> str:
        over = sum(b.excess for b in self.every)
        n = f"{self.tokens} tokens of {len(self.every)} prompts{f' ({over} over their limits)' if over else ''}"
        b = self.worst
        if not self.wrong:
            return f"the same model: KL {b.kl:.1g} at most, {n}, e-value {self.e_value:.2g}"
        said = f"KL {b.kl:.1g}, at most {b.limit:.1g} expected, after {n}, e-value {self.e_value:.2g}"
        return f"wrong: {said}: {self._why()}"

    def _why(self) -> str:
        refused = self.worst.asked.refused
        when = " and ".join(WAYS[way].does for way in self.when if way not in FRESH)
        if when or refused:
            return f"{when or 'always'}{f'; {refused}' if refused else ''}"
        if self.position:
            return f"wrong from position {self.position} on"
        agree = sum(b.agree for b in self.every) / max(1, self.tokens)
        return f"{self.fits} explains it" if self.fits else (
            f"another model or other weights, {agree:.0%} of tokens agree"
        )  # fmt: skip

    def result(self, case_id: str, backend: str = "") -> Result:
        """Return the result of a case; the backend is the server unless named."""
        pair = Pair(case_id, backend or self.server)
        said, kl = self.sentence(), number(self.worst.kl)
        metrics = {"e_value": self.e_value, "tokens": float(self.tokens), **({} if kl is None else {"kl_max": kl})}
        metrics |= {"growth": self.growth.bytes} if self.growth else {}
        if self.fails:
            return Result(*pair, Verdict.FAIL, error=Error(said), notes=tuple(self.notes), metrics=metrics)
        return Result(*pair, Verdict.PASS, notes=(said, *self.notes), metrics=metrics)

    def to_json(self) -> dict[str, JSON]:
        """Return what a `Result` has no field for: each prompt, and what explains an alarm."""
        return {
            "answer": self.sentence(), "tokens": self.tokens, "e_value": self.e_value,
            "alarm": 1 / ALARM, "variants": self.variants, "rounding": self.rounding, "fits": self.fits or None,
            "position": self.position, "when": list(self.when), "notes": list(self.notes),
            "prompts": [{"way": way, "length": len(b.asked.prompt), "kl": number(b.kl), "limit": b.limit,
                         "excess": b.excess, "agree": b.agree, "tokens": list(b.asked.answer),
                         "refused": b.asked.refused or None}
                        for way, blocks in self.blocks.items() for b in blocks],
        }  # fmt: skip


def distance(one: Sequence[Candidates], other: Sequence[Candidates]) -> float:
    """Return the geometric mean over rows of d, at least `SAME`; infinite with NaN."""
    total = 0.0
    for p, q in zip(one, other, strict=True):
        d = sum((exp(min(p[t], 0)) + exp(min(q[t], 0))) / 4 * (p[t] - q[t]) ** 2 for t in q)
        total += log(max(SAME, d)) if d < inf else inf
    return exp(total / len(one)) if total < inf else inf


def turns(asked: Asked) -> list[Turn]:
    """Return what a fresh context plays: the tokens, with the shift between two turns."""
    if asked.shift is None:
        return [Turn(asked.prompt, forced=asked.answer[:-1])]
    n = asked.shift.before
    return [Turn(asked.prompt, forced=asked.answer[:n]), Turn(asked.answer[n : n + 1], forced=asked.answer[n + 1 : -1])]


def with_shift(how: Setting, shift: Shift | None) -> Setting:
    """Return a setting whose context shifts as the server did."""
    return how if shift is None else replace(how, shift=shift.discard, keep=shift.keep)


Exact = Callable[[Talk, Setting], F32]
"""Returns logits in float64, of the first rows."""


def in_float64(llama: LlamaProcess, check: Checking) -> Exact:
    """Return the function that computes logits in float64."""

    def exact(talk: Talk, how: Setting) -> F32:
        with closing(check(ModelRecording.of(llama, talk, how))) as session:
            return session.references.logits(EXACT)

    return exact


@dataclass(slots=True)
class ServerJudge:
    """Compares a server with right runs of llama.cpp."""

    server: Server
    llama: LlamaProcess
    packed: LlamaProcess
    """The same model with repacked weights."""
    exact: Exact
    read: Callable[[str], Setting] = PLAIN_DEFAULTS
    """Parses a setting; it has the model's defaults."""
    say: Say = silent
    runs: list[tuple[LlamaProcess, Setting]] = field(init=False)
    """The pivot, and the variants that the model can run and that differ from it."""
    floor: float = field(init=False)
    """`Judgement.rounding`."""

    def __post_init__(self) -> None:
        prompt = Stream("server", "rounding").integers(BANDS[0], 0, self.llama.n_vocab).tolist()
        plain = self.read("")
        played = self.llama.play(alone(prompt, EXACT_ROWS - 1), plain)
        asked = Asked(prompt, [*played.tokens, 0], [dict.fromkeys(np.argsort(-x)[:CANDIDATES].tolist(), 0.0)
                                                    for x in played.logits])  # fmt: skip
        pivot = self._play(self.llama, plain, asked)
        exact = self.exact([turns(asked)], plain)
        self.floor = max(SAME, distance(at(exact, asked.rows), at(pivot[: len(exact)], asked.rows)))
        self.runs = [(self.llama, plain)]
        for llama, text in ((self.packed, ""), *((self.llama, text) for text in VARIANTS)):
            with suppress(UsageError):
                how = self.read(text)
                if not np.array_equal(self._play(llama, how, asked), pivot):
                    self.runs.append((llama, how))

    def judge(self, ways: Sequence[str] = FRESH, first: Sequence[int] = ()) -> Judgement:
        """Judge the server in those ways that it offers, by random tokens and the prompt `first`.

        Raises:
            UnavailableError: it does not answer the first prompt, or with no token of the model.
            UsageError: its replies have another form.
        """
        slots: Sequence[Slot] = ()
        with suppress(RefusedError, UsageError):  # other servers have none
            slots = self.server.slots()
        offered = [way for way in ways if WAYS[way].slots <= len(slots)]
        result = Judgement(self.server.url, {way: [] for way in offered}, max(1, len(self.runs) - 1),
                           rounding=self.floor)  # fmt: skip
        if missing := [WAYS[way].does for way in ways if way not in offered]:
            result.notes.append(f"not asked {', '.join(missing)}: the server lists {len(slots)} slots, 2 expected")
        cells = min((slot.n_ctx for slot in slots), default=0)
        left = {*result.blocks}
        for k, way in product(range(PROMPTS), result.blocks):
            if way not in left or result.is_settled(way):
                continue
            self.say(f"{WAYS[way].does}, {k + 1} of {PROMPTS}, e-value {result.e_value:.2g}")
            draw = partial(self._draw, f"{way} {k}")
            asking = Asking(self.server, draw, () if k else first, cells, self.llama.adds_bos)
            try:
                answers = WAYS[way].ask(asking)
            except UnavailableError as e:
                left.remove(way)
                if not left and not result.every:
                    raise
                result.notes.append(f"not asked {WAYS[way].does}: {e}")
                continue
            result.blocks[way] += [self.measured(asked) for asked in answers if asked.rows or asked.refused]
            if result.e_value >= 1 / ALARM:
                result.wrong = True
                self._explain(result)
                break
        if not result.every:
            why = "; ".join(result.notes) or "it generates no tokens that the model has"
            raise UnavailableError(f"{self.server.url}: {why}")
        return result

    def _draw(self, name: str, n: int, more: str) -> list[int]:
        drawn: list[int] = Stream("server", f"{name} {more}").integers(n, 0, self.llama.n_vocab).tolist()
        return drawn

    def measured(self, asked: Asked) -> Continuation:
        """Compare an answer with a fresh run of llama.cpp."""
        rows = asked.rows
        if asked.refused or max(token for row in rows for token in row) >= self.llama.n_vocab:
            return Continuation(asked, inf, SAME, 0)
        pivot, *others = (self._play(llama, how, asked) for llama, how in self.runs)
        right = at(pivot, rows)
        most = max([self.floor, *(distance(at(x, rows), right) for x in others)])
        agree = int(np.sum(pivot.argmax(1) == asked.answer[-len(rows) :]))
        return Continuation(asked, distance(rows, right), FACTOR * most, agree)

    def _play(self, llama: LlamaProcess, how: Setting, asked: Asked) -> F32:
        return llama.play([turns(asked)], with_shift(how, asked.shift)).logits[-len(asked.rows) :]

    def _explain(self, result: Judgement) -> None:
        """Find the setting, or the first position, that explains an alarm of fresh prompts."""
        if {*result.when} - {*FRESH}:
            return
        short, long = (result.blocks.get(way, []) for way in FRESH)
        if short and long and not any(b.excess for b in short):
            result.position = self._first_position(max(long, key=lambda b: b.kl / b.limit))
            return
        b = result.worst
        rows = b.asked.rows
        by = (
            {}
            if b.kl == inf
            else {text: distance(rows, at(self._play(self.llama, self.read(text), b.asked), rows)) for text in CACHES}
        )
        best = min(by, key=by.__getitem__, default="")
        if by and by[best] * FACTOR < b.kl:
            result.fits = best

    def _first_position(self, block: Continuation) -> int:
        """Return the first position of a prompt whose next token has too large a distance."""
        right, wrong = BANDS[0], len(block.asked.prompt)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            self.say(f"looking for the first wrong position: {right} to {wrong}")
            prompt = block.asked.prompt[:middle]
            answer = self.server.complete(prompt, 1)
            is_wrong = not answer.rows or self.measured(Asked(prompt, answer.tokens, answer.rows)).excess
            right, wrong = (right, middle) if is_wrong else (middle, wrong)
        return wrong - 1


def at(logits: F32, rows: Sequence[Candidates]) -> list[Candidates]:
    """Return the log probabilities of the same tokens as `rows`."""
    return [{t: float(x[t]) for t in row} for x, row in zip(map(log_softmax, logits), rows, strict=False)]
