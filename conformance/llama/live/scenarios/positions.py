"""API scenarios for positions, spans that are not causal, and capacities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError

from .harness import PROMPT, Harness, joined

MOST = (256, 64)
"""`LLAMA_MAX_SEQ` of this and older versions."""
Bad = Callable[[int, int, int], tuple[Sequence[int], Sequence[int], int]]
"""Maps next position, size of the vocabulary, number of sequences to a batch.

The batch has tokens, their positions, and their sequence."""
BAD: dict[str, Bad] = {
    "a gap before them": lambda p, _v, _n: ([1, 2], [p + 4, p + 5], 0),
    "a position taken": lambda p, _v, _n: ([1, 2], [p - 1, p], 0),
    "positions backwards": lambda p, _v, _n: ([1, 2], [p + 1, p], 0),
    "a negative position": lambda _p, _v, _n: ([1], [-2], 0),
    "a sequence too many": lambda p, _v, n: ([1], [p], n),
    "a negative sequence": lambda p, _v, _n: ([1], [p], -1),
    "a token beyond the vocabulary": lambda p, v, _n: ([1, v], [p, p + 1], 0),
    "a negative token": lambda p, _v, _n: ([1, -1], [p, p + 1], 0),
    "no tokens": lambda _p, _v, _n: ([], [], 0),
}
"""Fault -> a batch that `llama_decode` may refuse by an error, but not by an abort."""


def refused(harness: Harness) -> Iterator[Comparison]:
    """Offer batches that llama.cpp refuses; nothing changes. RefusedError if it takes them all."""
    text, control = harness.tokens(PROMPT), harness.context()
    control.feed((0, text))
    expected = control.steps()
    taken = []
    for name, bad in BAD.items():
        context = harness.context()
        context.feed((0, text))
        if context.offer(*bad(PROMPT, harness.n_vocab, 1)):
            taken.append(name)
        else:
            yield Comparison(f"steps after {name}", context.steps(), expected)
    if len(taken) == len(BAD):
        raise RefusedError("llama_decode takes every batch")


def causal(harness: Harness, *, unified: bool) -> Iterator[Comparison]:
    """Decode spans that are not causal: single tokens, and two sequences together and alone."""
    set_causal, text = harness.call("set_causal_attn"), harness.tokens(PROMPT)
    context, control = harness.context(), harness.context()
    rows = [context.feed((0, text))]
    set_causal(context.pointer, False)  # C's signature
    rows += [context.steps()]
    set_causal(context.pointer, True)
    yield Comparison("single tokens", joined(*rows), joined(control.feed((0, text)), control.steps()))
    later = harness.tokens(5, "later")
    yield Comparison("causal ones later", context.feed((0, later), every=True), control.feed((0, later), every=True))
    spans = [(seq, harness.tokens(7 + 4 * seq, f"prompt {seq}")) for seq in range(2)]
    both, each = harness.context(2, unified=unified), []
    set_causal(both.pointer, False)
    found = both.feed(*spans, every=True)
    causal_ones = harness.context().feed(spans[0], every=True)
    yield Comparison("not as a causal one", found[: len(causal_ones)], causal_ones, differs=True)
    for _, tokens in spans:
        alone = harness.context()
        set_causal(alone.pointer, False)
        each.append(alone.feed((0, tokens), every=True))
    yield Comparison("two sequences", found, joined(*each))


def cells(harness: Harness) -> Iterator[Comparison]:
    """Fill each cell of a context in a batch and in steps, beside a larger context.

    Without flash attention both agree to 1e-13: with it the CPU sums a single row in F16, which over 256 cells is 1e-5.
    """
    n = harness.request.n_ctx
    control, text = harness.larger(2, flash_attn=False), harness.tokens(n, "filling")
    expected = control.feed((0, text), every=True)
    yield Comparison("in one batch", harness.context(flash_attn=False).feed((0, text), every=True), expected)
    context = harness.context(flash_attn=False)
    first = context.feed((0, text[: n - 3]))
    rows = [context.feed((0, text[i : i + 1])) for i in range(n - 3, n)]
    yield Comparison("the last three in steps", joined(first, *rows), expected[n - 4 :])


def sequences(harness: Harness) -> Iterator[Comparison]:
    """Decode as many sequences as llama.cpp allows, in one stream; one more changes nothing."""
    for most in MOST:
        try:
            context = harness.context(most, unified=True, n_ctx=4 * most)
            break
        except UsageError:
            continue
    else:
        raise RefusedError(f"llama.cpp makes no context for {MOST[-1]} sequences")
    with suppress(UsageError):
        harness.context(most + 1, unified=True, n_ctx=4 * most + 4)
    control, text = harness.context(), harness.tokens(3)
    fed = context.feed(*((seq, text[: 1 + seq % 3]) for seq in range(most)))
    expected = control.feed((0, text), every=True)
    yield Comparison("each sequence", fed, expected[[seq % 3 for seq in range(most)]])
    control.clear()
    control.feed((0, text[: 1 + (most - 1) % 3]))
    yield Comparison("the last one", context.steps(most - 1), control.steps())
