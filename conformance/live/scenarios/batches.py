"""Verbs of batches: sequences together as each alone, a prompt in pieces as at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conformance.live.pairs import Pair

from .desk import AFTER, F32, PROMPT, Desk, Way, joined


def _length(seq: int) -> int:
    """Another number of tokens for each sequence, of a few kinds."""
    return 4 + 3 * seq % 8


def _alone(way: Way, seq: int, n: int, steps: int = AFTER) -> F32:
    """What a sequence gives by itself: its prompt's last row, and its steps' rows."""
    if way.memory:
        way.clear()
    rows = [way.feed((0, way.desk.tokens(n, f"prompt {seq}")))]
    tokens = way.desk.tokens(AFTER, f"after {seq}")
    if way.kind != "encoder":
        rows += [way.feed((0, tokens[i : i + 1])) for i in range(steps)]
    return joined(*rows)


def together(desk: Desk, seqs: Sequence[int], *, unified: bool | None = None, alike: bool = False) -> Iterator[Pair]:
    """Sequences of different lengths (`alike`: of one length) in one batch, and in each step after it.

    Where there is one alone, others might have joined: else both ways would be the same.
    """
    way, calm = desk.way(max(*seqs, 1) + 1, unified=unified), desk.way()
    lengths = {seq: PROMPT if alike else _length(seq) for seq in seqs}
    rows = [way.feed(*((seq, desk.tokens(lengths[seq], f"prompt {seq}")) for seq in seqs))]
    after = {seq: desk.tokens(AFTER, f"after {seq}") for seq in seqs}
    n_steps = AFTER if way.kind != "encoder" else 0
    rows += [way.feed(*((seq, after[seq][i : i + 1]) for seq in seqs)) for i in range(n_steps)]
    for k, seq in enumerate(seqs):
        yield Pair(f"sequence {seq}", np.stack([r[k] for r in rows]), _alone(calm, seq, lengths[seq]))


def needle(desk: Desk, n: int) -> Iterator[Pair]:
    """Many sequences whose texts differ in their first token alone."""
    way, calm = desk.way(n, unified=True, n_ctx=1024), desk.way(n_ctx=1024)
    first, text = desk.tokens(n, "needles"), desk.tokens(4, "hay")
    fed = way.feed(*((seq, np.append(first[seq], text)) for seq in range(n)))
    expected = []
    for seq in range(n):
        calm.clear()
        expected.append(calm.feed((0, np.append(first[seq], text))))
    yield Pair("each sequence", fed, joined(*expected))


def ubatch(desk: Desk, n: int) -> Iterator[Pair]:
    """A prompt in graphs of few tokens, against one graph."""
    text = desk.tokens(27)
    way, calm = desk.way(n_ubatch=n), desk.way()
    fed, expected = way.feed((0, text)), calm.feed((0, text))
    yield Pair("the prompt", fed, expected)
    yield Pair("steps after it", way.steps(), calm.steps())


def ubatch_several(desk: Desk) -> Iterator[Pair]:
    """Three prompts in one batch, in graphs of few tokens, against one graph."""
    spans = [(seq, desk.tokens(11 + seq, f"prompt {seq}")) for seq in range(3)]
    way, calm = desk.way(3, n_ubatch=6), desk.way(3)
    yield Pair("the prompts", way.feed(*spans), calm.feed(*spans))
    for seq in range(3):
        yield Pair(f"sequence {seq} after it", way.steps(seq), calm.steps(seq))


def chunks(desk: Desk) -> Iterator[Pair]:
    """A prompt in two batches and token by token, against one batch."""
    text, way, calm = desk.tokens(PROMPT), desk.way(), desk.way()
    pieces, single = way.feed((0, text[:5])), desk.way()
    pieces = way.feed((0, text[5:]))
    expected = calm.feed((0, text), every=True)
    yield Pair("two batches", pieces, expected[-1:])
    rows = joined(*(single.feed((0, text[i : i + 1])) for i in range(PROMPT)))
    yield Pair("token by token", rows, expected)


def unified(desk: Desk) -> Iterator[Pair]:
    """Sequences in one stream of cells, against a stream each."""
    spans = [(seq, desk.tokens(_length(seq), f"prompt {seq}")) for seq in range(3)]
    one, each = desk.way(3, unified=True), desk.way(3)
    yield Pair("the prompts", one.feed(*spans), each.feed(*spans))
    for seq in range(3):
        yield Pair(f"sequence {seq} after it", one.steps(seq), each.steps(seq))


def sets(desk: Desk, *, unified: bool) -> Iterator[Pair]:
    """Batches of one shape with other sequences, and of one size in other shapes: a graph may be used again or not."""
    n = 4
    way, calm = desk.way(n, unified=unified), [desk.way() for _ in range(n)]
    for seq in range(n):
        text = desk.tokens(PROMPT, f"prompt {seq}")
        way.feed((seq, text))
        calm[seq].feed((0, text))
    shapes = [{0: 1, 1: 1}, {2: 1, 3: 1}, {1: 1, 2: 1}, {0: 2}, {3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 2, 1: 2},
              {2: 2, 3: 2}, {1: 4}, {2: 1, 3: 1}, {0: 1, 1: 1}]  # fmt: skip
    for i, shape in enumerate(shapes):
        spans = [(seq, desk.tokens(k, f"set {i} {seq}")) for seq, k in shape.items()]
        expected = joined(*(calm[seq].feed((0, text)) for seq, text in spans))
        yield Pair(f"batch {i}, of sequences {', '.join(map(str, shape))}", way.feed(*spans), expected)
