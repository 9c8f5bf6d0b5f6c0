"""Verbs of adapters: LoRA and control vectors. An adapter is loaded before the contexts, as llama.cpp asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conformance.live.pairs import Pair

from . import lora
from .desk import F32, PROMPT, Desk, Way
from .lora import Adapter


def _with(desk: Desk, adapters: Sequence[Adapter], text: str = "prompt") -> F32:
    """What a new context with these adapters gives."""
    way = desk.way()
    lora.put(way, adapters)
    return _read(way, text)


def _read(way: Way, text: str = "prompt") -> F32:
    """A text in an empty memory, always in one batch of one shape."""
    if way.memory:
        way.clear()
    return way.feed((0, way.desk.tokens(PROMPT, text)))


def removed(desk: Desk) -> Iterator[Pair]:
    """An adapter is there and then no more."""
    a = Adapter(lora.load(desk, "a", lora.factors(desk, "a")))
    way, plain = desk.way(), _read(desk.way())
    lora.put(way, [a])
    yield Pair("with the adapter", _read(way), plain, apart=True)
    lora.put(way, [])
    yield Pair("without it again", _read(way), plain)


def scaled(desk: Desk) -> Iterator[Pair]:
    """Half of an adapter is one whose B is half; none of it is none."""
    of = lora.factors(desk, "a")
    a = lora.load(desk, "a", of)
    half = lora.load(desk, "half", {w: (f[0], f[1] / np.float32(2)) for w, f in of.items()})
    expected = _with(desk, [Adapter(half)])
    yield Pair("half of it", _with(desk, [Adapter(a, 0.5)]), expected)
    yield Pair("half of it and all of it", _with(desk, [Adapter(a)]), expected, apart=True)
    yield Pair("none of it", _with(desk, [Adapter(a, 0.0)]), _read(desk.way()))


def both(desk: Desk) -> Iterator[Pair]:
    """Two adapters at once are one that holds the ranks of both."""
    one, other = lora.factors(desk, "a"), lora.factors(desk, "b")
    # A file's scale is alpha / rank, so that of both together is 1, as that of each.
    twice = {w: (f[0], np.float32(2) * f[1]) for w, f in other.items()}
    of = {w: (np.concatenate([f[0], twice[w][0]]), np.concatenate([f[1], twice[w][1]], 1)) for w, f in one.items()}
    a, b, ab = (lora.load(desk, name, f) for name, f in (("a", one), ("b", other), ("ab", of)))
    expected = _with(desk, [Adapter(ab)])
    yield Pair("both", _with(desk, [Adapter(a), Adapter(b, 2.0)]), expected)
    yield Pair("both and one", _with(desk, [Adapter(a)]), expected, apart=True)


def many(desk: Desk, n: int) -> Iterator[Pair]:
    """Many adapters at once, each with its share of one."""
    of = lora.factors(desk, "a")
    adapters = [lora.load(desk, "a", of) for _ in range(n)]
    yield Pair(f"{n} adapters", _with(desk, [Adapter(a, 1 / n) for a in adapters]), _with(desk, [Adapter(adapters[0])]))


def changed(desk: Desk) -> Iterator[Pair]:
    """Adapters change between batches of one shape, whose graph may be used again."""
    a, b = (lora.load(desk, name, lora.factors(desk, name)) for name in ("a", "b"))
    settings = [[], [Adapter(a)], [Adapter(b)], [Adapter(b, 0.5)], [Adapter(a), Adapter(b)], []]
    way, before = desk.way(), None
    for i, adapters in enumerate(settings):
        lora.put(way, adapters)
        expected = _with(desk, adapters)
        if before is not None:
            yield Pair(f"settings {i - 1} and {i}", before, expected, apart=True)
        yield Pair(f"setting {i}", _read(way), expected)
        before = expected


def steered(desk: Desk) -> Iterator[Pair]:
    """A control vector is there and then no more."""
    way, plain = desk.way(), _read(desk.way())
    lora.steer(way, lora.control(desk, "a"))
    yield Pair("with the vector", _read(way), plain, apart=True)
    lora.steer(way, None)
    yield Pair("without it again", _read(way), plain)


def resteered(desk: Desk) -> Iterator[Pair]:
    """Control vectors change between batches of one shape, whose graph may be used again."""
    way, before = desk.way(), None
    for i, name in enumerate(("", "a", "b", "", "b")):
        vector = lora.control(desk, name) if name else None
        new = desk.way()
        for each in (way, new):
            lora.steer(each, vector)
        expected = _read(new)
        if before is not None:
            yield Pair(f"settings {i - 1} and {i}", before, expected, apart=True)
        yield Pair(f"setting {i}", _read(way), expected)
        before = expected
