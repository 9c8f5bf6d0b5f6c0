"""Prefill and decode by themselves: tokens per second, energy per token, and each device's share of the time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conformance.backend.interface import Backend
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError
from conformance.suite.decoder import make

from .measure import play, restore

MODEL = "llama-l=2,embd=256,heads=4,kv=2,head=64,ff=512,vocab=256,w=q8_0"
"""A decoder that takes minutes anywhere; docs/suite/models.md has the grammar for others."""
_CELLS = 256
"""A KV cache has a multiple of this."""
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Meter:
    """RAPL counters of all processor packages, through Linux's powercap files. They count whatever runs there."""

    ranges: Mapping[Path, int]
    """`energy_uj` of a package -> microjoules at which it wraps to 0."""

    def read(self) -> dict[Path, int]:
        """Microjoules of each package now."""
        return {path: int(path.read_text(encoding="ascii")) for path in self.ranges}

    def joules(self, before: Mapping[Path, int], after: Mapping[Path, int]) -> float:
        """Energy between two readings, which are less than one wrap of a counter apart."""
        return sum((after[p] - before[p]) % turn for p, turn in self.ranges.items()) / 1e6


def meter(folder: Path = POWERCAP) -> Meter:
    """The machine's packages: zones `intel-rapl:N` (AMD's too), no subzones; UnavailableError if none is readable."""
    zones = sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else []
    packages = [z for z in zones if z.name.count(":") == 1 and _text(z / "name").startswith("package")]
    if not packages:
        raise UnavailableError(f"no RAPL counters in {folder}")
    ranges = {}
    for zone in packages:
        counter = zone / "energy_uj"
        turn, now = _text(zone / "max_energy_range_uj"), _text(counter)
        if not turn.isdecimal() or not now.isdecimal():
            raise UnavailableError(f"{counter} cannot be read here; it is root's unless the machine's owner opened it")
        ranges[counter] = int(turn)
    return Meter(ranges)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


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
    splits: int = 0
    """Splits per graph, at most."""
    joules: float | None = None
    """None without a meter."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the processor packages per token."""
        return None if self.joules is None else self.joules / self.tokens

    @property
    def watts(self) -> float | None:
        """Average power of the processor packages."""
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
    _check(backend, case)
    with backend.open(case) as session:
        play(session, case.steps[:1])
        restore(session, case)
        before, joules = session.witness(), None
        spent, nodes, splits = dict(before.seconds), before.nodes, before.splits
        counted = meter.read() if meter else {}
        start = time.perf_counter()
        play(session, case.steps)
        seconds = time.perf_counter() - start
        if meter:
            joules = meter.joules(counted, meter.read())
        witness = session.witness()
    computing = {d: s - spent.get(d, 0.0) for d, s in witness.seconds.items()} or {witness.device: seconds}
    total = sum(computing.values()) or 1.0
    return Phase(
        name,
        tokens,
        seconds,
        {device: s / total for device, s in computing.items()},
        witness.nodes - nodes,
        -(-(witness.splits - splits) // len(case.steps)),
        joules,
    )


def _check(backend: Backend, case: Case) -> None:
    for step in case.steps:
        for node, answer in zip(step.graph, backend.supports(step.graph), strict=True):
            if not answer:
                raise UnavailableError(f"{node}: {answer.reason}")
    whole = backend.supports_case(case)
    if not whole:
        raise UnavailableError(whole.reason)
