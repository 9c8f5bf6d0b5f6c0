"""API scenarios for LoRA and control vectors; adapters are loaded before contexts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison

from . import lora
from .harness import F32, PROMPT, Context, Harness
from .lora import Adapter


def _with(harness: Harness, adapters: Sequence[Adapter], text: str = "prompt") -> F32:
    """Return the outputs of a new context with these adapters."""
    context = harness.context()
    lora.put(context, adapters)
    return _read(context, text)


def _read(context: Context, text: str = "prompt") -> F32:
    """Decode a text into an empty memory, always as one batch of one shape.

    A model with an encoder encodes its text again, since the adapters may have changed.
    """
    if context.memory:
        context.clear()
    context.encode_source()
    return context.feed((0, context.harness.tokens(PROMPT, text)))


def removed(harness: Harness) -> Iterator[Comparison]:
    """Set and remove an adapter."""
    a = Adapter(lora.load(harness, "a", lora.factors(harness, "a")))
    context, plain = harness.context(), _read(harness.context())
    lora.put(context, [a])
    yield Comparison("with the adapter", _read(context), plain, differs=True)
    lora.put(context, [])
    yield Comparison("without it again", _read(context), plain)


def scaled(harness: Harness) -> Iterator[Comparison]:
    """Compare an adapter at scale 0.5 with one whose B is halved, and scale 0 with no adapter."""
    of = lora.factors(harness, "a")
    a = lora.load(harness, "a", of)
    half = lora.load(harness, "half", {w: (f[0], f[1] / np.float32(2)) for w, f in of.items()})
    expected = _with(harness, [Adapter(half)])
    yield Comparison("half of it", _with(harness, [Adapter(a, 0.5)]), expected)
    yield Comparison("half of it and all of it", _with(harness, [Adapter(a)]), expected, differs=True)
    yield Comparison("none of it", _with(harness, [Adapter(a, 0.0)]), _read(harness.context()))


def both(harness: Harness) -> Iterator[Comparison]:
    """Compare two adapters with one that concatenates their ranks."""
    one, other = lora.factors(harness, "a"), lora.factors(harness, "b")
    # A file's scale is alpha / rank, so that of both together is 1, as that of each.
    twice = {w: (f[0], np.float32(2) * f[1]) for w, f in other.items()}
    of = {w: (np.concatenate([f[0], twice[w][0]]), np.concatenate([f[1], twice[w][1]], 1)) for w, f in one.items()}
    a, b, ab = (lora.load(harness, name, f) for name, f in (("a", one), ("b", other), ("ab", of)))
    expected = _with(harness, [Adapter(ab)])
    yield Comparison("both", _with(harness, [Adapter(a), Adapter(b, 2.0)]), expected)
    yield Comparison("both and one", _with(harness, [Adapter(a)]), expected, differs=True)


def many(harness: Harness, n: int) -> Iterator[Comparison]:
    """Compare `n` equal adapters of scale 1/n with one."""
    of = lora.factors(harness, "a")
    adapters = [lora.load(harness, "a", of) for _ in range(n)]
    yield Comparison(
        f"{n} adapters", _with(harness, [Adapter(a, 1 / n) for a in adapters]), _with(harness, [Adapter(adapters[0])])
    )


def changed(harness: Harness) -> Iterator[Comparison]:
    """Change adapters between batches of one shape, whose graph may be reused."""
    a, b = (lora.load(harness, name, lora.factors(harness, name)) for name in ("a", "b"))
    settings = [[], [Adapter(a)], [Adapter(b)], [Adapter(b, 0.5)], [Adapter(a), Adapter(b)], []]
    context, before = harness.context(), None
    for i, adapters in enumerate(settings):
        lora.put(context, adapters)
        expected = _with(harness, adapters)
        if before is not None:
            yield Comparison(f"settings {i - 1} and {i}", before, expected, differs=True)
        yield Comparison(f"setting {i}", _read(context), expected)
        before = expected


def merged(harness: Harness, kinds: Sequence[str]) -> Iterator[Comparison]:
    """Compare an adapter for each kind of weights with a model to whose weights it was added.

    RefusedError if the model has none of these kinds.
    """
    plain, scale = _read(harness.context()), 2.0
    for kind in lora.present(harness, kinds):
        of = lora.factors(harness, kind, kind=kind)
        expected = _read(lora.merged(harness, f"with {kind}", of, scale).context())
        found = _with(harness, [Adapter(lora.load(harness, kind, of, scale))])
        yield Comparison(f"without an adapter of {kind}", plain, expected, differs=True)
        yield Comparison(f"with an adapter of {kind}", found, expected)


def unfit(harness: Harness) -> Iterator[Comparison]:
    """Load adapters that do not fit the model, which must be refused."""
    plain, of = _read(harness.context()), lora.factors(harness, "fits")
    fits = Adapter(lora.load(harness, "fits", of))
    expected = _with(harness, [fits])
    yield Comparison("with and without an adapter", expected, plain, differs=True)
    name, (a, b) = next(iter(of.items()))
    none = np.zeros(0, np.float32)
    offers: dict[str, lora.Factors] = {
        "shorter rows of A": {name: (a[:, :-1], b)},
        "fewer rows of B": {name: (a, b[:-1])},
        "other ranks": {name: (a[:-1], b)},
        "no B": {name: (a, none)},
        "no such tensor": {f"{name}.other": (a, b)},
    }
    for what, wrong in offers.items():
        _refused(what, lora.offer(harness, what, wrong))
    _refused("another architecture", lora.offer(harness, "other", of, "falcon"))
    yield Comparison("without an adapter, after refused ones", _read(harness.context()), plain, exact=True)
    yield Comparison("with one, after refused ones", _with(harness, [fits]), expected, exact=True)


def unfit_experts(harness: Harness) -> Iterator[Comparison]:
    """Load an adapter for half of the experts, which must be refused."""
    plain = _read(harness.context())
    of = lora.factors(harness, "half", kind="experts")
    half = {name: (a[: len(a) // 2], b[: len(b) // 2]) for name, (a, b) in of.items()}
    _refused("half of the experts", lora.offer(harness, "half", half))
    yield Comparison("after it", _read(harness.context()), plain)


def _refused(what: str, adapter: int) -> None:
    """Raise UsageError if llama.cpp loaded an adapter; one that reads past a tensor is not run."""
    if adapter:
        raise UsageError(f"llama_adapter_lora_init took an adapter with {what} that it must refuse")


def steered(harness: Harness) -> Iterator[Comparison]:
    """Set and remove a control vector."""
    context, plain = harness.context(), _read(harness.context())
    lora.steer(context, lora.control(harness, "a"))
    yield Comparison("with the vector", _read(context), plain, differs=True)
    lora.steer(context, None)
    yield Comparison("without it again", _read(context), plain)


def resteered(harness: Harness) -> Iterator[Comparison]:
    """Change control vectors between batches of one shape, whose graph may be reused."""
    context, before = harness.context(), None
    for i, name in enumerate(("", "a", "b", "", "b")):
        vector = lora.control(harness, name) if name else None
        new = harness.context()
        for each in (context, new):
            lora.steer(each, vector)
        expected = _read(new)
        if before is not None:
            yield Comparison(f"settings {i - 1} and {i}", before, expected, differs=True)
        yield Comparison(f"setting {i}", _read(context), expected)
        before = expected
