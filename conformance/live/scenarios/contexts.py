"""Verbs of contexts: what else a context does, or how it is made, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.live.pairs import Pair
from conformance.suite.zoo.model import table

from .desk import PROMPT, Desk, RefusedError, Way, joined


def two(desk: Desk) -> Iterator[Pair]:
    """Two contexts on one model decode in turn."""
    a, b = desk.way(), desk.way()
    calm = [desk.way(), desk.way()]
    fed: list[list[np.ndarray]] = [[], []]
    tokens = [desk.tokens(3 * PROMPT, name) for name in ("a", "b")]
    for i in range(3):
        piece = slice(i * PROMPT, (i + 1) * PROMPT)
        for rows, way, text in zip(fed, (a, b), tokens, strict=True):
            rows.append(way.feed((0, text[piece])))
    for k, way in enumerate(calm):
        expected = [way.feed((0, tokens[k][i * PROMPT : (i + 1) * PROMPT])) for i in range(3)]
        yield Pair(f"context {k}", joined(*fed[k]), joined(*expected), exact=True)


def sizes(desk: Desk) -> Iterator[Pair]:
    """Small, large, small and middle texts in one context, each as in a new one."""
    way = desk.way()
    for i, n in enumerate((1, 200, 1, 60, 2)):
        if way.memory:
            way.clear()
        text = desk.tokens(n, f"size {i}")
        yield Pair(f"{n} tokens, text {i}", way.feed((0, text)), desk.way().feed((0, text)))


def other(desk: Desk, **more: int) -> Iterator[Pair]:
    """With another value of a parameter, as with the default."""
    yield from _same(desk, desk.way(more=dict(more)))


def threads(desk: Desk) -> Iterator[Pair]:
    """With 3 threads as with one."""
    yield from _same(desk, desk.way(more={"n_threads": 3, "n_threads_batch": 3}))


def larger(desk: Desk) -> Iterator[Pair]:
    """With more cells than are needed."""
    yield from _same(desk, desk.larger(4))


def flash_attn(desk: Desk) -> Iterator[Pair]:
    """Without flash attention as with it."""
    arch = str(desk.request.params.get("arch"))
    if arch in table() and not table()[arch].flash_attn:
        raise RefusedError("this architecture has no flash attention")
    yield from _same(desk, desk.way(flash_attn=not desk.request.flash_attn))


def _same(desk: Desk, way: Way) -> Iterator[Pair]:
    calm, text = desk.way(), desk.tokens(40)
    yield Pair("the prompt", way.feed((0, text)), calm.feed((0, text)))
    yield Pair("steps after it", way.steps(), calm.steps())


def full(desk: Desk) -> Iterator[Pair]:
    """A batch for which there are no cells is declined and leaves all as it was."""
    way, calm = desk.way(n_ctx=256), desk.way(n_ctx=256)
    text, more = desk.tokens(245), desk.tokens(30, "more")
    way.feed((0, text))
    calm.feed((0, text))
    try:
        way.feed((0, more))
    except UsageError:
        way.next = list(calm.next)
    else:
        raise UsageError("275 tokens fit into 256 cells: nothing was declined")
    yield Pair("after the batch that was declined", way.steps(), calm.steps())
