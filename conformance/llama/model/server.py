"""Judges a server with OpenAI's completions endpoint by its tokens and log probabilities.

The server generates `TOKENS` tokens for each of many prompts. llama.cpp decodes the same tokens on its own CPU: once as
the pivot, and in m variants that also are right (without flash attention, F32 caches, other batches, repacked weights;
those that equal the pivot bit for bit do not count). The distance of a run from the pivot is the geometric mean over
tokens of

    d = sum over the server's candidates of (p + q) / 2 * (log p - log q)^2 / 2,

about the KL divergence in nats. A prompt counts as an excess if the server's d is `FACTOR` times the largest of: d of
the variants on this prompt, the float64 reference's d on the first prompt, and `SAME`, below which distributions are
equal.

Null hypothesis: given all earlier prompts, the server's distance on the next one is exchangeable with those of the
variants, or stochastically smaller. Then an excess has at most the probability p = 1 / (m + 1), and each factor
1 + b (excess - p) has at most the mean 1. The product over the prompts of a band of positions is an e-process, and so
is the mean over all bands. By Ville's inequality it ever reaches 1 / ALARM with at most the probability ALARM, however
often one looks. This is the rate of false alarms of one call; `FACTOR` and the reference make it smaller. A server that
rounds by far more than all these, as with activations in 8 bits where llama.cpp has none, is no member of the family.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf, log

import msgspec
import numpy as np

from conformance.case.case import JSON
from conformance.case.streams import Stream
from conformance.ggml.arithmetic import EXACT
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict

from .figures import F32, log_softmax, number
from .graphs import Say, silent
from .llama_process import LlamaProcess, Setting, Talk, Turn
from .recording import ModelRecording
from .references import SAME
from .turns import Checking, setting

ALARM = 1e-3
"""Maximum probability of a false alarm."""
FACTOR = 4.0
"""A server's distance from the pivot may be this many times that of a right run."""
BET = 0.75
"""Share of the e-process that is staked on an excess."""
TOKENS = 16
"""Tokens per prompt."""
CANDIDATES = 20
"""Log probabilities per token."""
BANDS = (24, 288)
"""Lengths of prompts: one before and one after the first 256 cells."""
EXACT_ROWS = 4
"""Tokens that the float64 reference computes."""
MOST = 512
"""Maximum number of generated tokens."""
VARIANTS = ("fa=0", "fa=0,cache=f32", "batch=16")
"""Settings that are as right as the pivot; repacked weights are a further variant."""
CACHES = ("cache=q8_0", "cache=q5_1", "cache=q5_0", "cache=q4_1", "cache=q4_0")
"""Settings that may explain an alarm."""
TIMEOUT = 600.0
"""Seconds for an answer of the server."""

PLAIN_DEFAULTS = partial(setting, flash_attn=True)
"""Parses a setting of a model with flash attention."""
Candidates = Mapping[int, float]
"""Token -> log probability."""


class Candidate(msgspec.Struct):
    """A token as llama-server writes it."""

    id: int
    logprob: float
    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    """Log probabilities: llama-server's, or OpenAI's, which has texts in place of ids."""

    content: list[Candidate] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float]] = []


class Choice(msgspec.Struct):
    """One completion."""

    logprobs: Logprobs | None = None


class Usage(msgspec.Struct):
    """The number of generated tokens."""

    completion_tokens: int


class Completion(msgspec.Struct):
    """The reply of a completions endpoint."""

    choices: list[Choice]
    usage: Usage | None = None


class CompletionServer:
    """A completions endpoint; UsageError for a URL of another kind.

    `llama` has the texts of tokens, for a server that sends no ids.
    """

    def __init__(self, url: str, llama: LlamaProcess) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server {url!r}: a URL such as http://127.0.0.1:8080 expected")
        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._llama, self._ids = llama, dict[str, int]()

    def complete(self, prompt: Sequence[int], n: int) -> tuple[list[int], Sequence[Candidates]]:
        """Return up to `n` greedy tokens after a prompt, and the candidates of each.

        None of them if the reply lacks some: llama-server leaves out tokens that end within a character.

        Raises:
            UnavailableError: there is no server, or it refuses the prompt.
            UsageError: the reply has another form.
        """
        asked = {"prompt": list(prompt), "max_tokens": n, "temperature": 0, "logprobs": CANDIDATES, "ignore_eos": True,
                 "cache_prompt": False}  # fmt: skip
        body = json.dumps(asked).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310  # checked above
                reply = msgspec.json.decode(response.read(), type=Completion)
        except urllib.error.HTTPError as e:
            said = e.read(400).decode(errors="replace")
            raise UnavailableError(f"{self.url}: HTTP {e.code} for {len(prompt)} tokens: {said}") from None
        except OSError as e:
            raise UnavailableError(f"{self.url}: {getattr(e, 'reason', e)}; is the server running?") from None
        except msgspec.MsgspecError as e:
            raise UsageError(f"{self.url}: the reply of a completions endpoint expected: {e}") from None
        found = reply.choices[0].logprobs if reply.choices else None
        if found is None or not (found.content or (found.top_logprobs and all(found.top_logprobs))):
            raise UsageError(f"{self.url}: the reply has no log probabilities; llama-server and vLLM give them")
        if reply.usage and reply.usage.completion_tokens != len(found.content or found.tokens):
            return [], []
        if found.content:
            rows = [{t.id: t.logprob for t in (c, *c.top_logprobs)} for c in found.content]
            return [c.id for c in found.content], rows
        return self._by_text(found)

    def _by_text(self, found: Logprobs) -> tuple[list[int], Sequence[Candidates]]:
        """Find tokens by their texts, up to the first whose text is not that of one token alone."""
        if not self._ids:
            words = self._llama.words(range(self._llama.n_vocab))
            many = Counter(words)
            self._ids = {w: i for i, w in enumerate(words) if many[w] == 1}
        ids = [self._ids.get(text) for text in found.tokens]
        upto = ids.index(None) if None in ids else len(ids)
        known = [i for i in ids[:upto] if i is not None]
        rows = [{self._ids[w]: x for w, x in row.items() if w in self._ids} for row in found.top_logprobs]
        return known, rows[: len(known)]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One prompt with the server's tokens."""

    prompt: Sequence[int]
    answer: Sequence[int]
    rows: Sequence[Candidates]
    """The server's candidates."""
    kl: float
    """Geometric mean of d from llama.cpp; infinite with a token that the model lacks."""
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
    variants: int = 1
    """Number m of right runs that differ from the pivot."""
    wrong: bool = False
    """True if it does not run the model as llama.cpp does."""
    rounding: float = SAME
    """KL between llama.cpp and float64 on the first prompt."""
    blocks: dict[int, list[Continuation]] = field(default_factory=dict)
    """Length of prompts -> what was measured."""
    fits: str = ""
    """The setting that explains the distance."""
    position: int | None = None
    """The first wrong position, if earlier ones are right."""
    notes: list[str] = field(default_factory=list)

    @property
    def e_value(self) -> float:
        """The e-process; an alarm if it reaches 1 / ALARM."""
        p = 1 / (self.variants + 1)
        bet = BET / p
        each = [np.prod([1 + bet * (b.excess - p) for b in self.blocks.get(n, ())]) for n in BANDS]
        return float(np.mean(each))

    @property
    def every(self) -> list[Continuation]:
        """All prompts."""
        return [b for blocks in self.blocks.values() for b in blocks]

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(b.answer) for b in self.every)

    @property
    def worst(self) -> Continuation:
        """The prompt with the largest distance."""
        return max(self.every, key=lambda b: b.kl / b.limit)

    @property
    def talk(self) -> Talk | None:
        """The worst prompt of a wrong server, to locate the fault; None if there is none."""
        b = self.worst
        return [[Turn(b.prompt, forced=b.answer)]] if self.wrong and b.kl < inf else None

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        n = f"{self.tokens} tokens of {len(self.every)} prompts"
        if not self.wrong:
            return f"the same model: KL {self.worst.kl:.1g} at most, {n}, e-value {self.e_value:.2g}"
        agree = sum(b.agree for b in self.every) / self.tokens
        why = f"wrong from position {self.position} on" if self.position else (
            f"{self.fits} explains it" if self.fits else f"another model or other weights, {agree:.0%} of tokens agree"
        )  # fmt: skip
        b = self.worst
        return f"wrong: KL {b.kl:.1g}, at most {b.limit:.1g} expected, after {n}, e-value {self.e_value:.2g}: {why}"

    def result(self, case_id: str) -> Result:
        """Return the result of a case of the family `model`; the backend is the server."""
        said, kl = self.sentence(), number(self.worst.kl)
        metrics = {"e_value": self.e_value, "tokens": float(self.tokens), **({} if kl is None else {"kl_max": kl})}
        if self.wrong:
            return Result(
                case_id, self.server, Verdict.FAIL, error=Error(said), notes=tuple(self.notes), metrics=metrics
            )
        return Result(case_id, self.server, Verdict.PASS, notes=(said, *self.notes), metrics=metrics)

    def to_json(self) -> dict[str, JSON]:
        """Return what a `Result` has no field for: each prompt, and what explains an alarm."""
        return {
            "answer": self.sentence(), "tokens": self.tokens, "e_value": self.e_value,
            "alarm": 1 / ALARM, "variants": self.variants, "rounding": self.rounding, "fits": self.fits or None,
            "position": self.position, "notes": list(self.notes),
            "prompts": [{"length": len(b.prompt), "kl": number(b.kl), "limit": b.limit, "excess": b.excess,
                         "agree": b.agree, "tokens": list(b.answer)} for b in self.every],
        }  # fmt: skip


def distance(one: Sequence[Candidates], other: Sequence[Candidates]) -> float:
    """Return the geometric mean over rows of d, at least `SAME`; infinite with NaN."""
    total = 0.0
    for p, q in zip(one, other, strict=True):
        d = sum((exp(min(p[t], 0)) + exp(min(q[t], 0))) / 4 * (p[t] - q[t]) ** 2 for t in q)
        total += log(max(SAME, d)) if d < inf else inf
    return exp(total / len(one)) if total < inf else inf


@dataclass(slots=True)
class ServerJudge:
    """Compares a server with right runs of llama.cpp."""

    server: CompletionServer
    llama: LlamaProcess
    packed: LlamaProcess
    """The same model with repacked weights."""
    check: Checking
    read: Callable[[str], Setting] = PLAIN_DEFAULTS
    """Parses a setting; it has the model's defaults."""
    say: Say = silent
    runs: list[tuple[LlamaProcess, Setting]] = field(init=False)
    """The pivot, and the variants that the model can run."""
    _floor: float = 0.0
    """`Judgement.rounding`; 0 before the first prompt."""

    def __post_init__(self) -> None:
        self.runs = [(llama, self.read("")) for llama in (self.llama, self.packed)]
        for text in VARIANTS:
            with suppress(UsageError):
                self._play(self.llama, self.read(text), [0], [0])
                self.runs.append((self.llama, self.read(text)))

    def judge(self, first: Sequence[int] = (), tokens: int = MOST) -> Judgement:
        """Judge the server by prompts of random tokens, after the prompt `first` if there is one.

        Raises:
            UnavailableError: it does not answer the first prompt, or with no token of the model.
            UsageError: its replies have another form.
        """
        result = Judgement(self.server.url)
        lengths = list(BANDS)
        for k in range(4 * tokens // TOKENS):
            if result.tokens >= tokens or result.e_value >= 1 / ALARM or not lengths:
                break
            length = lengths[k % len(lengths)]
            stream = Stream("server", f"prompt {k}")
            prompt = list(first) if first and not k else stream.integers(length, 0, self.llama.n_vocab).tolist()
            self.say(f"prompt {k + 1}, {result.tokens} of {tokens} tokens, e-value {result.e_value:.2g}")
            try:
                block = self.block(prompt, TOKENS)
            except UnavailableError as e:
                if not k:
                    raise
                lengths.remove(length)
                result.notes.append(f"no prompts of {length} tokens: {e}")
                continue
            result.blocks.setdefault(length, []).extend([block] if block else [])
            result.variants, result.rounding = max(1, len(self.runs) - 1), self._floor
        if not result.every:
            raise UnavailableError(f"{self.server.url}: it generates no tokens that the model has")
        if result.e_value >= 1 / ALARM:
            result.wrong = True
            self._explain(result)
        return result

    def block(self, prompt: Sequence[int], n: int) -> Continuation | None:
        """Measure one prompt; None if no token is known. Raises as `CompletionServer.complete`."""
        answer, rows = self.server.complete(prompt, n)
        if not answer:
            return None
        if max(token for row in rows for token in row) >= self.llama.n_vocab:
            return Continuation(prompt, answer, rows, inf, SAME, 0)
        pivot, *others = (self._play(llama, how, prompt, answer) for llama, how in self.runs)
        if not self._floor:  # the first prompt
            some = rows[:EXACT_ROWS]
            logits = self._exact([[Turn(prompt, forced=answer[: len(some) - 1])]])
            some = some[: len(logits)]
            self._floor = max(SAME, distance(at(logits, some), at(pivot, some)))
            differ = [not np.array_equal(x, pivot) for x in others]
            self.runs = [run for run, kept in zip(self.runs, [True, *differ], strict=True) if kept]
        right = at(pivot, rows)
        most = max(self._floor, *(distance(at(x, rows), right) for x in others))
        agree = int(np.sum(pivot.argmax(1) == answer))
        return Continuation(prompt, answer, rows, distance(rows, right), FACTOR * most, agree)

    def _exact(self, talk: Talk) -> F32:
        """Return logits in float64, of the first rows."""
        with closing(self.check(ModelRecording.of(self.llama, talk, self.runs[0][1]))) as session:
            return session.references.logits(EXACT)

    def _play(self, llama: LlamaProcess, how: Setting, prompt: Sequence[int], answer: Sequence[int]) -> F32:
        return llama.play([[Turn(prompt, forced=answer[:-1])]], how).logits[-len(answer) :]

    def _explain(self, result: Judgement) -> None:
        """Find the setting, or the first position, that explains an alarm."""
        short, long = (result.blocks.get(n, []) for n in (BANDS[0], BANDS[-1]))
        if short and not any(b.excess for b in short):
            result.position = self._first_position(max(long, key=lambda b: b.kl / b.limit))
            return
        b = result.worst
        by = (
            {}
            if b.kl == inf
            else {
                text: distance(b.rows, at(self._play(self.llama, self.read(text), b.prompt, b.answer), b.rows))
                for text in CACHES
            }
        )
        best = min(by, key=by.__getitem__, default="")
        if by and by[best] * FACTOR < b.kl:
            result.fits = best

    def _first_position(self, block: Continuation) -> int:
        """Return the first position of a prompt whose next token has too large a distance."""
        right, wrong = BANDS[0], len(block.prompt)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            self.say(f"looking for the first wrong position: {right} to {wrong}")
            found = self.block(block.prompt[:middle], 1)
            excess = found is None or found.excess
            right, wrong = (right, middle) if excess else (middle, wrong)
        return wrong - 1


def at(logits: F32, rows: Sequence[Candidates]) -> list[Candidates]:
    """Return the log probabilities of the same tokens as `rows`."""
    return [{t: float(x[t]) for t in row} for x, row in zip(map(log_softmax, logits), rows, strict=False)]
