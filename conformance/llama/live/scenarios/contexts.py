"""API scenarios for contexts: other activity or parameters change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError
from conformance.llama.zoo.model import table

from .harness import AFTER, F32, PROMPT, Context, Harness, joined
from .states import load_seq, save_seq


def two(harness: Harness) -> Iterator[Comparison]:
    """Decode alternately in two contexts on one model."""
    a, b = harness.context(), harness.context()
    control = [harness.context(), harness.context()]
    fed: list[list[np.ndarray]] = [[], []]
    tokens = [harness.tokens(3 * PROMPT, name) for name in ("a", "b")]
    for i in range(3):
        piece = slice(i * PROMPT, (i + 1) * PROMPT)
        for rows, context, text in zip(fed, (a, b), tokens, strict=True):
            rows.append(context.feed((0, text[piece])))
    for k, context in enumerate(control):
        expected = [context.feed((0, tokens[k][i * PROMPT : (i + 1) * PROMPT])) for i in range(3)]
        yield Comparison(f"context {k}", joined(*fed[k]), joined(*expected), exact=True)


def in_threads(harness: Harness) -> Iterator[Comparison]:
    """Decode in two contexts on one model, in a thread each, or one after the other."""
    texts = [harness.tokens(2 * PROMPT, name) for name in ("a", "b")]
    batches = [np.split(texts[0], (PROMPT, 2 * PROMPT - 2, 2 * PROMPT - 1)), np.split(texts[1][:AFTER], AFTER)]

    def run(k: int, context: Context) -> F32:
        return joined(*(context.feed((0, tokens)) for tokens in batches[k]))

    found = harness.together([partial(run, k, harness.context()) for k in range(2)])
    for k in range(2):
        yield Comparison(f"context {k}", found[k], run(k, harness.context()), exact=True)
    yield Comparison("the contexts", found[1][-1:], found[0][-1:], differs=True)


def loads(harness: Harness) -> Iterator[Comparison]:
    """Load the model again, three times; free it right after a batch was decoded."""
    text = harness.tokens(2 * PROMPT)
    control = harness.context()
    expected = joined(control.feed((0, text)), control.steps())
    for i in range(3):
        other = harness.another()
        with other.clean():
            context = other.context()
            rows = joined(context.feed((0, text)), context.steps())
            context.decode((0, text))
        yield Comparison(f"load {i}", rows, expected)


def written(harness: Harness) -> Iterator[Comparison]:
    """Write the model with `llama_model_save_to_file`, and load that file."""
    if not harness.request.from_file:
        raise RefusedError("the model has no file: the scenario needs real=1")
    path = harness.folder / "written.gguf"
    harness.call("model_save_to_file")(harness.model, os.fsencode(path))
    text, other = harness.tokens(2 * PROMPT), harness.another(path)
    found, right = ([c.feed((0, text)), c.steps()] for c in (other.context(), harness.context()))
    for what, a, b in zip(("the prompt", "steps after it"), found, right, strict=True):
        yield Comparison(what, a, b, exact=True)


def in_flight(harness: Harness) -> Iterator[Comparison]:
    """Save, remove and load a sequence without waiting for the batches before."""
    context, control = harness.context(2), harness.context(2)
    texts = [harness.tokens(PROMPT, name) for name in ("a", "b")]
    for seq in range(2):
        control.feed((seq, texts[seq]))
    context.decode((0, texts[0]))
    saved = save_seq(context, 0)
    context.rm(0)
    context.decode((1, texts[1]))
    load_seq(context, 0, saved)
    for seq in range(2):
        yield Comparison(f"sequence {seq}", context.steps(seq), control.steps(seq))


def sizes(harness: Harness) -> Iterator[Comparison]:
    """Decode texts of different sizes in one context, and compare with a new context for each."""
    context = harness.context()
    for i, n in enumerate((1, 200, 1, 60, 2)):
        if context.memory:
            context.clear()
        text = harness.tokens(n, f"size {i}")
        yield Comparison(f"{n} tokens, text {i}", context.feed((0, text)), harness.context().feed((0, text)))


def other(harness: Harness, **more: int) -> Iterator[Comparison]:
    """Compare another value of a parameter with the default."""
    yield from _same(harness, harness.context(more=dict(more)))


def threads(harness: Harness) -> Iterator[Comparison]:
    """Compare 3 threads with one."""
    yield from _same(harness, harness.context(more={"n_threads": 3, "n_threads_batch": 3}))


def larger(harness: Harness) -> Iterator[Comparison]:
    """Compare a context with more cells than needed."""
    yield from _same(harness, harness.larger(4))


def flash_attn(harness: Harness) -> Iterator[Comparison]:
    """Compare with and without flash attention."""
    arch = str(harness.request.params.get("arch"))
    if arch in table() and not table()[arch].flash_attn:
        raise RefusedError("this architecture has no flash attention")
    yield from _same(harness, harness.context(flash_attn=not harness.request.flash_attn))


def _same(harness: Harness, context: Context) -> Iterator[Comparison]:
    control, text = harness.context(), harness.tokens(40)
    yield Comparison("the prompt", context.feed((0, text)), control.feed((0, text)))
    yield Comparison("steps after it", context.steps(), control.steps())


def full(harness: Harness) -> Iterator[Comparison]:
    """Check that a batch with too few free cells is refused and changes nothing."""
    context, control = harness.context(n_ctx=256), harness.context(n_ctx=256)
    text, more = harness.tokens(245), harness.tokens(30, "more")
    context.feed((0, text))
    control.feed((0, text))
    try:
        context.feed((0, more))
    except UsageError:
        context.next = list(control.next)
    else:
        raise UsageError("a batch of 275 tokens was accepted with 256 cells, refusal expected")
    yield Comparison("after the batch that was declined", context.steps(), control.steps())
