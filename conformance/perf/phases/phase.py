"""Prefill and decode by themselves: tokens per second, energy per token, and each device's share of the time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from conformance.backend.interface import Backend, Session
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError
from conformance.perf.measure import Values, play, restore
from conformance.suite.decoder import make

from .energy import Energy, Meter

MODEL = "llama-l=2,embd=256,heads=4,kv=2,head=64,ff=512,vocab=256,w=q8_0"
"""A decoder that takes minutes anywhere; docs/suite/models.md has the grammar for others."""
_CELLS = 256
"""A KV cache has a multiple of this."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One row: `pp512` is a prompt of 512 tokens on an empty cache, `tg64` are 64 tokens one by one."""

    name: str
    tokens: int
    seconds: float
    shares: Mapping[str, float] = field(default_factory=dict)
    """Device -> fraction of the time spent computing."""
    nodes: int = 0
    """Nodes computed."""
    nodes_on: Mapping[str, float] = field(default_factory=dict)
    """Device -> fraction of the nodes, where ggml's own scheduler shares a graph and nobody tells the time of each."""
    splits: int = 0
    """Splits per graph, at most."""
    energy: Mapping[str, float | None] = field(default_factory=dict)
    """Counter -> joules; None where it did not move. Empty without a meter."""
    joules: float | None = None
    """Their sum; None without a meter, or where one did not move."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        """Energy per token of what the counters count."""
        return None if self.joules is None else self.joules / self.tokens

    @property
    def watts(self) -> float | None:
        """Average power of what the counters count."""
        return None if self.joules is None else self.joules / self.seconds


def prompt(model: str, n: int, ubatch: int = 512) -> Case:
    """A prompt of `n` tokens in batches of at most `ubatch`, as llama-bench's pp; UsageError for an unknown `model`."""
    return make(f"phases/{_with(model, n)},ubatch={ubatch},run=p{n}@0")


def generation(model: str, n: int) -> Case:
    """`n` tokens one by one on an empty cache, as llama-bench's tg; UsageError for an unknown `model`."""
    return make(f"phases/{_with(model, n)},run=d{n}@0")


def _with(model: str, n: int) -> str:
    return f"{model}{',' if '-' in model else '-'}ctx={-(-n // _CELLS) * _CELLS}"


def measure(backend: Backend, case: Case, name: str, tokens: int, meter: Meter | None) -> Phase:
    """Run the first step of `case` to warm up, restore its caches, and time all of its steps.

    Raises:
        UnavailableError: the backend refuses a node or the case; its reason.
        BackendError: it failed.
    """
    check(backend, case)
    with backend.open(case) as session:
        play(session, case.steps[:1])
        restore(session, case)
        before = session.witness()
        spent, nodes, splits = dict(before.seconds), before.nodes, before.splits
        with meter.measure() if meter else nullcontext(Energy()) as energy:
            seconds, _ = timed(session, case)
        witness = session.witness()
    computing = {d: s - spent.get(d, 0.0) for d, s in witness.seconds.items()} or {witness.device: seconds}
    total = sum(computing.values()) or 1.0
    return Phase(
        name,
        tokens,
        seconds,
        {device: s / total for device, s in computing.items()},
        witness.nodes - nodes,
        {} if witness.seconds else _nodes_on(witness.kernels),
        -(-(witness.splits - splits) // len(case.steps)) or witness.splits,
        energy.joules,
        energy.total,
    )


def _nodes_on(kernels: Mapping[str, int]) -> dict[str, float]:
    """Fractions by device of kernels that are named `DEVICE OP`."""
    counts: dict[str, int] = {}
    for name, n in kernels.items():
        device, space, _ = name.partition(" ")
        if space:
            counts[device] = counts.get(device, 0) + n
    return {device: n / sum(counts.values()) for device, n in counts.items()}


def check(backend: Backend, case: Case) -> None:
    """UnavailableError where `backend` refuses a node or the case; its reason."""
    for step in case.steps:
        for node, answer in zip(step.graph, backend.supports(step.graph), strict=True):
            if not answer:
                raise UnavailableError(f"{node}: {answer.reason}")
    whole = backend.supports_case(case)
    if not whole:
        raise UnavailableError(whole.reason)


def timed(session: Session, case: Case) -> tuple[float, Values]:
    """Seconds of all steps of `case`, and what they gave."""
    start = time.perf_counter()
    values = play(session, case.steps)
    return time.perf_counter() - start, values
