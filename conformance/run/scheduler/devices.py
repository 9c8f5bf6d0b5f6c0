"""The backends that share a graph, and which of them can read whose memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError

MAX_DEVICES = 16
"""`GGML_SCHED_MAX_BACKENDS`."""

DECLARED, APART = "declared", "apart"
MEMORIES = (DECLARED, APART)


@dataclass(frozen=True, slots=True)
class Memory:
    """Buffer types as the scheduler sees them; device b's own default buffer type goes by its index."""

    reads: tuple[tuple[bool, ...], ...]
    """`reads[b][a]`: device b can use tensors in the buffer type of a (`ggml_backend_supports_buft`)."""
    same: tuple[tuple[bool, ...], ...]
    """`same[b][a]`: both have one and the same buffer type."""


def memory_of(backends: Sequence[Backend], how: str) -> Memory:
    """What the backends say of their default buffer types.

    Args:
        backends: in order of priority.
        how: `declared`: two devices whose default buffer types are host memory share it, as a BLAS or NPU backend on
            host pointers does with the CPU; `apart`: each has memory of its own.

    Raises:
        UsageError: another word.
    """
    if how not in MEMORIES:
        raise UsageError(f"sched: buffers: one of {', '.join(MEMORIES)} expected, {how!r} found")
    host = [how == DECLARED and b.buffer_types()[0].is_host for b in backends]
    n = range(len(backends))
    shared = tuple(tuple(a == b or (host[a] and host[b]) for a in n) for b in n)
    return Memory(shared, shared)


def read_devices(text: str) -> list[Spec]:
    """Specs of `xdna2:k=64+128:max_n=1,cpu`: devices joined by commas, the options of each behind colons.

    A comma, colon or percent sign within a value is written as a percent escape (once more escaped on a command line,
    where the whole spec is one escaped text already: `%252C`).

    Raises:
        UsageError: another form, no device, or too many.
    """
    specs = []
    for part in text.split(","):
        name, *options = part.split(":")
        pairs = [option.partition("=") for option in options]
        if not name or any(not key or not sign for key, sign, _ in pairs):
            raise UsageError(f"sched: devices: NAME[:KEY=VALUE…],NAME… expected, {text!r} found")
        specs.append(Spec(unquote(name), tuple((unquote(k), unquote(v)) for k, _, v in pairs)))
    if len(specs) > MAX_DEVICES:
        raise UsageError(f"sched: devices: at most {MAX_DEVICES} expected, {len(specs)} found")
    return specs


def labels(specs: Sequence[Spec]) -> list[str]:
    """A short name for each device: its adapter's, numbered where it stands there more than once."""
    names = [s.name for s in specs]
    return [n if names.count(n) == 1 else f"{n}#{names[: i + 1].count(n)}" for i, n in enumerate(names)]
