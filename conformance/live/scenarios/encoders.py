"""Verbs of an encoder beside a decoder: what it read last is what the decoder sees, of each sequence its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conformance.live.pairs import Pair

from .desk import F32, PROMPT, Desk, Way

LENGTHS = (1, 33, 2, 200, 7)
"""Tokens of the texts that one context reads in turn."""


def _read(way: Way, *texts: tuple[int, str]) -> None:
    """Begin anew: sequence i reads the text of so many tokens and such a name."""
    way.clear()
    way.encode(*((seq, way.desk.tokens(n, name)) for seq, (n, name) in enumerate(texts)))


def _decode(way: Way, seqs: Sequence[int] = (0,)) -> F32:
    """The results of all tokens of sequences that decode the same ones in one batch: `[seqs * PROMPT, n_vocab]`."""
    text = way.desk.tokens(PROMPT)
    return way.feed(*((seq, text) for seq in seqs), every=True)


def twice(desk: Desk) -> Iterator[Pair]:
    """A decoder begins anew, with what the encoder read before."""
    way = desk.way()
    _read(way, (9, "text"))
    first = _decode(way)
    way.clear()
    yield Pair("the second time", _decode(way), first, exact=True)
    _read(way, (9, "text"))
    yield Pair("the text read once more", _decode(way), first, exact=True)


def again(desk: Desk) -> Iterator[Pair]:
    """Another text replaces what was read, be it longer or shorter."""
    way = desk.way()
    before: F32 | None = None
    for i, n in enumerate(LENGTHS):
        _read(way, (n, f"text {i}"))
        found = _decode(way)
        if before is not None:
            yield Pair(f"text {i} in place of the one before", found, before, apart=True)
        fresh = desk.way()
        _read(fresh, (n, f"text {i}"))
        yield Pair(f"{n} tokens, text {i}", found, _decode(fresh))
        before = found


def together(desk: Desk) -> Iterator[Pair]:
    """Two sequences read texts in one batch, each as if alone."""
    texts = ((7, "text a"), (12, "text b"))
    way = desk.way(2)
    _read(way, *texts)
    found = _decode(way, (0, 1)).reshape(2, PROMPT, -1)
    for rows, text in zip(found, texts, strict=True):
        calm = desk.way()
        _read(calm, text)
        yield Pair(f"the sequence of {text[0]} tokens", rows, _decode(calm))
    yield Pair("the two sequences", found[0], found[1], apart=True)
