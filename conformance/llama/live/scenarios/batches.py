"""API scenarios for batches: sequences together or alone, a prompt split or in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conformance.llama.live.comparison import Comparison

from .harness import AFTER, F32, PROMPT, Context, Harness, joined


def _length(seq: int) -> int:
    """Return a number of tokens that differs between neighbouring sequences."""
    return 4 + 3 * seq % 8


def _alone(context: Context, seq: int, n: int, steps: int = AFTER) -> F32:
    """Decode a sequence alone: the last row of its prompt, and a row per step."""
    if context.memory:
        context.clear()
    rows = [context.feed((0, context.harness.tokens(n, f"prompt {seq}")))]
    tokens = context.harness.tokens(AFTER, f"after {seq}")
    if context.kind != "encoder":
        rows += [context.feed((0, tokens[i : i + 1])) for i in range(steps)]
    return joined(*rows)


def together(
    harness: Harness, seqs: Sequence[int], *, unified: bool | None = None, same_length: bool = False
) -> Iterator[Comparison]:
    """Decode prompts and steps of several sequences together; `alike`: all of one length.

    The context has room for one more sequence than it needs, so that the two runs differ even for a single sequence.
    """
    context, control = harness.context(max(*seqs, 1) + 1, unified=unified), harness.context()
    lengths = {seq: PROMPT if same_length else _length(seq) for seq in seqs}
    rows = [context.feed(*((seq, harness.tokens(lengths[seq], f"prompt {seq}")) for seq in seqs))]
    after = {seq: harness.tokens(AFTER, f"after {seq}") for seq in seqs}
    n_steps = AFTER if context.kind != "encoder" else 0
    rows += [context.feed(*((seq, after[seq][i : i + 1]) for seq in seqs)) for i in range(n_steps)]
    for k, seq in enumerate(seqs):
        yield Comparison(f"sequence {seq}", np.stack([r[k] for r in rows]), _alone(control, seq, lengths[seq]))


def needle(harness: Harness, n: int) -> Iterator[Comparison]:
    """Decode many sequences whose texts differ only in their first token."""
    context, control = harness.context(n, unified=True, n_ctx=1024), harness.context(n_ctx=1024)
    first, text = harness.tokens(n, "needles"), harness.tokens(4, "hay")
    fed = context.feed(*((seq, np.append(first[seq], text)) for seq in range(n)))
    expected = []
    for seq in range(n):
        control.clear()
        expected.append(control.feed((0, np.append(first[seq], text))))
    yield Comparison("each sequence", fed, joined(*expected))


def ubatch(harness: Harness, n: int) -> Iterator[Comparison]:
    """Compare a prompt split into graphs of `n` tokens with one graph."""
    text = harness.tokens(27)
    context, control = harness.context(n_ubatch=n), harness.context()
    fed, expected = context.feed((0, text)), control.feed((0, text))
    yield Comparison("the prompt", fed, expected)
    yield Comparison("steps after it", context.steps(), control.steps())


def ubatch_several(harness: Harness) -> Iterator[Comparison]:
    """Compare three prompts in one batch, split into small graphs, with one graph."""
    spans = [(seq, harness.tokens(11 + seq, f"prompt {seq}")) for seq in range(3)]
    context, control = harness.context(3, n_ubatch=6), harness.context(3)
    yield Comparison("the prompts", context.feed(*spans), control.feed(*spans))
    for seq in range(3):
        yield Comparison(f"sequence {seq} after the batch", context.steps(seq), control.steps(seq))


def chunks(harness: Harness) -> Iterator[Comparison]:
    """Compare a prompt in two batches, and token by token, with one batch."""
    text, context, control = harness.tokens(PROMPT), harness.context(), harness.context()
    pieces, single = context.feed((0, text[:5])), harness.context()
    pieces = context.feed((0, text[5:]))
    expected = control.feed((0, text), every=True)
    yield Comparison("two batches", pieces, expected[-1:])
    rows = joined(*(single.feed((0, text[i : i + 1])) for i in range(PROMPT)))
    yield Comparison("token by token", rows, expected)


def unified(harness: Harness) -> Iterator[Comparison]:
    """Compare sequences in one stream of cells with one stream each."""
    spans = [(seq, harness.tokens(_length(seq), f"prompt {seq}")) for seq in range(3)]
    one, each = harness.context(3, unified=True), harness.context(3)
    yield Comparison("the prompts", one.feed(*spans), each.feed(*spans))
    for seq in range(3):
        yield Comparison(f"sequence {seq} after the batch", one.steps(seq), each.steps(seq))


def sets(harness: Harness, *, unified: bool) -> Iterator[Comparison]:
    """Decode batches of equal shape or size with other sequences, to test graph reuse."""
    n = 4
    context, control = harness.context(n, unified=unified), [harness.context() for _ in range(n)]
    for seq in range(n):
        text = harness.tokens(PROMPT, f"prompt {seq}")
        context.feed((seq, text))
        control[seq].feed((0, text))
    shapes = [{0: 1, 1: 1}, {2: 1, 3: 1}, {1: 1, 2: 1}, {0: 2}, {3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 2, 1: 2},
              {2: 2, 3: 2}, {1: 4}, {2: 1, 3: 1}, {0: 1, 1: 1}]  # fmt: skip
    for i, shape in enumerate(shapes):
        spans = [(seq, harness.tokens(k, f"set {i} {seq}")) for seq, k in shape.items()]
        expected = joined(*(control[seq].feed((0, text)) for seq, text in spans))
        yield Comparison(f"batch {i}, of sequences {', '.join(map(str, shape))}", context.feed(*spans), expected)
