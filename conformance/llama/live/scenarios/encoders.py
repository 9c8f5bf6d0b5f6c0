"""API scenarios for encoder-decoders: the decoder sees the text encoded last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance.llama.live.comparison import Comparison

from .harness import F32, PROMPT, Context, Harness

LENGTHS = (1, 33, 2, 200, 7)
"""Lengths in tokens of the texts that one context encodes in turn."""


def _read(context: Context, *texts: tuple[int, str]) -> None:
    """Clear the context and encode for sequence i a text of the given length and name."""
    context.clear()
    context.encode(*((seq, context.harness.tokens(n, name)) for seq, (n, name) in enumerate(texts)))


def _decode(context: Context, seqs: Sequence[int] = (0,)) -> F32:
    """Decode the same tokens in several sequences as one batch: `[seqs * PROMPT, n_vocab]`."""
    text = context.harness.tokens(PROMPT)
    return context.feed(*((seq, text) for seq in seqs), every=True)


def twice(harness: Harness) -> Iterator[Comparison]:
    """Decode twice after one encoding."""
    context = harness.context()
    _read(context, (9, "text"))
    first = _decode(context)
    context.clear()
    yield Comparison("the second time", _decode(context), first, exact=True)
    _read(context, (9, "text"))
    yield Comparison("the text read once more", _decode(context), first, exact=True)


def again(harness: Harness) -> Iterator[Comparison]:
    """Encode another text, longer or shorter, in place of the first."""
    context = harness.context()
    before: F32 | None = None
    for i, n in enumerate(LENGTHS):
        _read(context, (n, f"text {i}"))
        found = _decode(context)
        if before is not None:
            yield Comparison(f"text {i} in place of the one before", found, before, differs=True)
        fresh = harness.context()
        _read(fresh, (n, f"text {i}"))
        yield Comparison(f"{n} tokens, text {i}", found, _decode(fresh))
        before = found


def together(harness: Harness) -> Iterator[Comparison]:
    """Encode two texts in one batch, and compare with each alone."""
    texts = ((7, "text a"), (12, "text b"))
    context = harness.context(2)
    _read(context, *texts)
    found = _decode(context, (0, 1)).reshape(2, PROMPT, -1)
    for rows, text in zip(found, texts, strict=True):
        control = harness.context()
        _read(control, text)
        yield Comparison(f"the sequence of {text[0]} tokens", rows, _decode(control))
    yield Comparison("the two sequences", found[0], found[1], differs=True)
