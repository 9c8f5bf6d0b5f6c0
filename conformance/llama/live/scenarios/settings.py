"""One plan on two contexts of a model that must agree, and values of nodes of both."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from conformance.case.streams import Stream
from conformance.ggml.lib.layout import EVAL_CALLBACK
from conformance.ggml.lib.llama import Llama
from conformance.ggml.tensor import nbytes, pack
from conformance.ggml.types import F32 as FLOAT
from conformance.llama.live.comparison import Comparison, nmse
from conformance.llama.zoo.load import RefusedError
from conformance.llama.zoo.recorder import ROUTERS, Choice, flips

from .harness import F32, Context, Harness, Tokens, joined

STEPS = 3
"""Single tokens of each sequence, after the prompts and at the end."""
LONG = 70
"""Tokens of the first prompt: over 64, where attention of ggml's CPU takes another kernel."""
NO_REUSE = "LLAMA_GRAPH_REUSE_DISABLE"
"""Variable that llama.cpp reads when it makes a context."""
Parts: TypeAlias = "list[tuple[str, F32]]"
"""Parts of the plan, and the results of all their tokens, `[n_tokens, n]`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of a context that change no result but for roundings."""

    request: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Request`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `llama_context_params` that a request lacks."""
    batch: int = 0
    """Maximum number of tokens per call of `llama_decode`; 0 for no limit."""
    reuse: bool = True
    """False: llama.cpp reuses no graph."""


def compare(harness: Harness, settings: Sequence[Setting]) -> Iterator[Comparison]:
    """Play the plan with two settings; the second is the expected one. Raises as `play`."""
    actual, expected = (play(harness, s) for s in settings)
    for (what, found), (_, right) in zip(actual, expected, strict=True):
        yield Comparison(what, found, right)


def play(harness: Harness, setting: Setting, watch: Values | None = None) -> Parts:
    """Decode prompts of several sequences, steps, a longer text, and a new sequence.

    Raises:
        LacksError: this llama.cpp lacks a parameter.
        RefusedError: llama.cpp, or the architecture, cannot have the setting.
        UsageError: llama.cpp fails.
    """
    params = dict(setting.params) | ({"n_batch": setting.batch} if setting.batch else {})
    if harness.kind == "encoder" and ({"n_batch"} & params.keys() or "n_ubatch" in setting.request):
        raise RefusedError("an encoder reads a text in one graph")
    with _environment({} if setting.reuse else {NO_REUSE: "1"}):
        changes = {"n_seq_max": harness.request.n_seq_max, **setting.request}
        context = harness.context(more=params, callback=watch and watch.callback, **changes)
    feed = _Feed(context, setting.batch, watch)
    seqs = range(harness.request.n_seq_max)
    lengths = [LONG if seq == 0 else 5 + 24 * (seq - 1) % 31 for seq in seqs]
    feed("the prompts", list(zip(seqs, feed.texts("prompts", lengths), strict=True)))
    if context.kind == "encoder":
        return feed.parts
    feed.steps("steps", seqs)
    feed("a longer text", [(seqs[-1], feed.texts("longer", [20])[0])])
    if len(seqs) > 1:
        context.rm(seqs[-1])
        feed("a new sequence", [(seqs[-1], feed.texts("new", [9])[0])])
    feed.steps("steps at the end", seqs)
    return feed.parts


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Feed:
    """Decodes texts in batches of limited size and keeps the results of all tokens."""

    def __init__(self, context: Context, most: int, watch: Values | None) -> None:
        self._context, self._most, self._watch = context, most, watch
        self.parts: Parts = []

    def texts(self, name: str, lengths: Sequence[int]) -> list[Tokens]:
        """Return texts in which no token occurs twice, as long as the vocabulary lasts."""
        harness = self._context.harness
        n, n_vocab = sum(lengths), harness.n_vocab
        draws = Stream(harness.request.stream, f"settings {name}").integers(-(-n // n_vocab) * n_vocab, 0, 1 << 30)
        tokens = np.argsort(draws.reshape(-1, n_vocab), axis=1, kind="stable").reshape(-1)[:n]
        return np.split(tokens, np.cumsum(lengths)[:-1])

    def __call__(self, what: str, spans: Sequence[tuple[int, Tokens]]) -> None:
        """Decode tokens of sequences, in as many batches as needed."""
        if self._watch:
            self._watch.parts.append({})
            self._watch.choices.append({})
        rows = [self._context.feed(*part, every=True) for part in _pieces(spans, self._most)]
        self.parts.append((what, joined(*rows)))

    def steps(self, what: str, seqs: Sequence[int]) -> None:
        """Decode single tokens of all sequences."""
        tokens = self.texts(what, [1] * STEPS * len(seqs))
        for i in range(STEPS):
            self(f"{what}, step {i}", list(zip(seqs, tokens[i * len(seqs) :], strict=False)))


def _pieces(spans: Sequence[tuple[int, Tokens]], most: int) -> Iterator[list[tuple[int, Tokens]]]:
    """Yield the spans in batches of at most `most` tokens; 0 for one batch."""
    batch: list[tuple[int, Tokens]] = []
    room = most
    for seq, tokens in spans:
        left = tokens
        while most and len(left) >= room:
            yield [*batch, (seq, left[:room])]
            batch, left, room = [], left[room:], most
        if len(left):
            batch.append((seq, left))
            room -= len(left)
    if batch:
        yield batch


class Values:
    """Values of named nodes, a row per token; set `callback` as `llama_context_params.cb_eval`.

    A token is known by its id, which no other token of a part has.
    """

    def __init__(self, library: Llama, forced: Values | None = None) -> None:
        self._library, self._forced = library, forced
        self._routers: dict[int, dict[int, Choice]] = {}
        self.choices: list[dict[tuple[str, str, int], dict[int, Choice]]] = []
        """Per part: node that chooses experts -> token -> its choice; those of `forced` replace it."""
        self._tokens = np.zeros(0, np.int32)
        self._count: Counter[tuple[str, str]] = Counter()
        self.parts: list[dict[tuple[str, str, int], dict[int, F32]]] = []
        """Per part of the plan: node, in the order of the graph -> token -> values.

        A node has a name, an op, and its index among those of its graph.
        """
        self.error: Exception | None = None
        """Exception in the callback, which must not raise."""
        self.callback = EVAL_CALLBACK(self._called)

    def _called(self, pointer: int, ask: bool, _data: int | None) -> bool:  # C's signature
        try:
            if self.error is None:
                if ask:
                    return self._wants(pointer)
                self._keep(pointer)
        except Exception as e:  # noqa: BLE001  # a callback must not raise
            self.error = e
        return not ask

    def _wants(self, pointer: int) -> bool:
        c = self._library.struct(pointer)
        if self._library.op(pointer) == "GET_ROWS" and b"inp_tokens" in self._library.struct(c.src[1]).name:
            leaf = self._library.leaf(c.src[1])
            self._tokens = self._library.get(c.src[1], nbytes(leaf)).view(np.int32)
            self._count.clear()
        if self._library.op(pointer) == "VIEW" and c.view_src in self._routers:
            for choice in self._routers[c.view_src].values():
                choice.k = c.ne[0]
        name = c.name.decode(errors="replace")
        return bool(self._tokens.size) and "(" not in name and not name.startswith(("node_", "leaf_"))

    def _keep(self, pointer: int) -> None:
        t, n = self._library.leaf(pointer), len(self._tokens)
        named = t.name, self._library.op(pointer)
        self._count[named] += 1
        if named[1] in ROUTERS and t.ne[1] == n:
            self._choose(pointer, (*named, self._count[named]))
        last = max((d for d in range(4) if t.ne[d] > 1), default=0)
        if t.type is not FLOAT or (n > 1 and t.ne[last] != n):
            return
        rows = pack(self._library.get(pointer, nbytes(t)), t, 0).view(np.float32).reshape(n, -1)
        node = self.parts[-1].setdefault((*named, self._count[named]), {})
        node.update(zip(self._tokens.tolist(), rows, strict=True))

    def _choose(self, pointer: int, node: tuple[str, str, int]) -> None:
        """Keep each token's choice; replace it by that of `forced`."""
        source = self._library.struct(pointer).src[0]
        scores = self._library.get(source, nbytes(self._library.leaf(source))).view(np.float32)
        chosen = self._library.get(pointer, nbytes(self._library.leaf(pointer))).view(np.int32)
        n, part = len(self._tokens), len(self.parts) - 1
        rows = zip(scores.reshape(n, -1).astype(np.float64), chosen.reshape(n, -1).copy(), strict=True)
        made = {
            int(token): Choice(node[0], part, len(row), score[None], row[None])
            for token, (score, row) in zip(self._tokens, rows, strict=True)
        }
        self._routers[pointer] = made
        self.choices[-1].setdefault(node, {}).update(made)
        if self._forced is not None:
            theirs = self._forced.choices[part][node]
            new = np.stack([theirs[int(token)].chosen[0] for token in self._tokens])
            self._library.set(pointer, np.ascontiguousarray(new).reshape(-1).view(np.uint8))


def with_choices(harness: Harness, settings: Sequence[Setting]) -> tuple[list[Comparison], list[str], str]:
    """Compare two settings of which the first uses the experts that the second chose.

    Return the comparisons, notes on choices at near-ties, and the first choice that rounding does not explain. Raises
    as `first_difference`.
    """
    theirs = Values(harness.library)
    expected = play(harness, settings[1], theirs)
    ours = Values(harness.library, theirs)
    actual = play(harness, settings[0], ours)
    for watch in (ours, theirs):
        if watch.error is not None:
            raise watch.error
    pairs = [
        (choice, right[token])
        for part, base in zip(ours.choices, theirs.choices, strict=True)
        for node, right in base.items()
        for token, choice in part[node].items()
    ]
    notes, wrong = flips(*zip(*pairs, strict=True)) if pairs else ([], "")
    return [Comparison(what, a, b) for (what, a), (_, b) in zip(actual, expected, strict=True)], notes, wrong


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first node whose values differ between two settings."""

    part: int
    """Index of the part of the plan."""
    name: str
    op: str
    error: float
    """NMSE of the values."""


def first_difference(harness: Harness, settings: Sequence[Setting], limit: float) -> Divergence | None:
    """Return the first node of both settings whose NMSE exceeds `limit`; None if there is none.

    llama.cpp computes each node by itself. Raises as `play`, and what reading a node raised.
    """
    watched = [Values(harness.library) for _ in settings]
    for setting, watch in zip(settings, watched, strict=True):
        play(harness, setting, watch)
        if watch.error is not None:
            raise watch.error
    for i, (actual, expected) in enumerate(zip(*(w.parts for w in watched), strict=True)):
        for node, right in expected.items():
            found = actual.get(node, {})
            if found.keys() != right.keys() or len({r.size for r in (*found.values(), *right.values())}) > 1:
                continue
            error = nmse(*(np.stack([rows[token] for token in right]) for rows in (found, right)))
            if not error <= limit:
                return Divergence(i, node[0], node[1], error)
    return None
