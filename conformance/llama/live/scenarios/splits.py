"""API scenarios for a model split over devices: in any shares it computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import SPLIT_TENSOR, RefusedError, Split

from .harness import F32, PROMPT, Context, Harness, joined
from .memories import need_rotations
from .states import load, load_seq, save, save_seq

CPU = 0
"""`GGML_BACKEND_DEVICE_TYPE_CPU`."""
Shares = tuple[float, ...]
UNEVEN: tuple[Shares, ...] = ((0.7, 0.3), (0.1, 0.9), (0.5, 0.3, 0.2))
ZERO: tuple[Shares, ...] = ((1, 0), (0, 1), (0.6, 0, 0.4))
"""`tensor_split`, a share per device."""


def _devices(harness: Harness, n: int) -> str:
    """Return `n` devices joined by `+`: the backend's own, then others of the build.

    Fewer devices are repeated. The CPU alone stands for each of them. RefusedError if another device has no second one.
    """
    names = (harness.device or "CPU").split("+")
    if len(names) == 1 and names != ["CPU"]:
        ggml = harness.library.ggml
        devices = [ggml.backend_dev_get(i) for i in range(ggml.backend_dev_count())]
        names += [ggml.backend_dev_name(d).decode() for d in devices if ggml.backend_dev_type(d) != CPU]
        names = list(dict.fromkeys(names))
        if len(names) == 1:
            raise RefusedError(f"the build has no second device beside {names[0]}")
    return "+".join((names * n)[:n])


def over(harness: Harness, shares: Shares, mode: int = SPLIT_TENSOR) -> Harness:
    """Load the model split over as many devices as there are shares.

    RefusedError if llama.cpp does not split this architecture in this way, or has not done so.
    """
    try:
        split = harness.another(device=_devices(harness, len(shares)), split=Split(mode, shares))
    except UsageError as e:
        raise RefusedError(str(e)) from None
    if mode == SPLIT_TENSOR and harness.call("model_n_devices")(split.model) != 1:
        raise RefusedError("llama.cpp loaded the model without a meta device")
    return split


def _context(harness: Harness, n_seq_max: int = 1, *, unified: bool | None = None) -> Context:
    """Make a context of a split model; RefusedError if llama.cpp makes none of this kind."""
    try:
        return harness.context(n_seq_max, unified=unified)
    except UsageError as e:
        raise RefusedError(str(e)) from None


def _run(harness: Harness, context: Context) -> F32:
    first = context.feed((0, harness.tokens(40)))
    return joined(first, context.steps())


def _named(shares: Shares) -> str:
    return "/".join(f"{share:g}" for share in shares)


def split(harness: Harness, mode: int, shares: Sequence[Shares]) -> Iterator[Comparison]:
    """Compare a model split over devices with the model on the backend's own device."""
    expected = _run(harness, harness.context())
    for each in shares:
        model = over(harness, each, mode)
        yield Comparison(f"shares {_named(each)}", _run(model, _context(model)), expected)


def rm(harness: Harness) -> Iterator[Comparison]:
    """Remove the last tokens of one sequence, and all of another, in a split model."""

    def change(context: Context) -> None:
        context.rm(0, PROMPT - 3, may_refuse=context.kind in ("recurrent", "hybrid"))
        context.rm(1)

    yield from _changed(harness, change)


def cp(harness: Harness, *, unified: bool) -> Iterator[Comparison]:
    """Copy a sequence over another in a split model."""

    def change(context: Context) -> None:
        context.rm(1)
        context.cp(0, 1)

    yield from _changed(harness, change, unified=unified)


def shift(harness: Harness) -> Iterator[Comparison]:
    """Shift the positions of a sequence in a split model."""
    need_rotations(harness)
    yield from _changed(harness, lambda context: context.add(0, 7), allowance=harness.turned(1))


def _changed(
    harness: Harness, change: Callable[[Context], None], *, unified: bool | None = None, allowance: float = 0.0
) -> Iterator[Comparison]:
    """Compare a split model with the backend's own after a change of the memory."""
    found = []
    for model in (harness, over(harness, UNEVEN[0])):
        context = _context(model, 2, unified=unified)
        context.feed((0, harness.tokens(PROMPT)), (1, harness.tokens(PROMPT, "other")))
        change(context)
        found.append([context.steps(seq) for seq in range(2)])
    for seq in range(2):
        yield Comparison(f"sequence {seq}", found[1][seq], found[0][seq], allowance=allowance)


def state(harness: Harness) -> Iterator[Comparison]:
    """Load the state of a split model under other shares and unsplit, and the reverse."""
    a, b = over(harness, UNEVEN[0]), over(harness, UNEVEN[1])
    text = harness.tokens(PROMPT)
    whole, part = harness.context(), _context(a)
    for each in (whole, part):
        each.feed((0, text))
    saved = save(part), save(whole)
    expected = whole.steps()
    yield Comparison("before", part.steps(), expected)
    for what, from_, into in (
        ("under other shares", saved[0], _context(b)),
        ("without a split", saved[0], harness.context()),
        ("from a model without a split", saved[1], _context(a)),
    ):
        load(into, from_)
        yield Comparison(what, into.steps(), expected)
    yield Comparison("without the state", _context(b).steps(), expected, differs=True)


def state_seq(harness: Harness) -> Iterator[Comparison]:
    """Save one sequence of a split model and load it under other shares as another sequence."""
    a, b = over(harness, UNEVEN[0]), over(harness, UNEVEN[1])
    texts = [harness.tokens(PROMPT + 4 * seq, f"prompt {seq}") for seq in range(2)]
    part, into, control = _context(a, 2), _context(b, 2), harness.context(2)
    for each in (part, control):
        each.feed(*enumerate(texts))
    into.feed((0, texts[1]))
    load_seq(into, 1, save_seq(part, 0))
    expected = [control.steps(seq) for seq in range(2)]
    yield Comparison("the loaded sequence", into.steps(1), expected[0])
    yield Comparison("the sequence beside it", into.steps(0), expected[1])
    yield Comparison("the two sequences", expected[1], expected[0], differs=True)
