"""The family `phases`: times prefill and decode of a decoder separately.

An id is `phases/DECODER,pp=512@0` (a prompt of 512 tokens on an empty cache, batches of at most 512, as llama-bench's
pp) or `phases/DECODER,tg=64@0` (64 tokens one by one, as its tg). `without=DEVICE` alternates between runs with and
without one of the devices that share a graph; with `unchanged=1` a difference in time fails the case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path

import numpy as np

from conformance.backend.interface import Backend, Session
from conformance.backend.registry import Spec, resolve
from conformance.case.case import Case
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.compare import compare
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.perf.measure import Rounds, Subject, Values, play, restore
from conformance.perf.statistics import FINE, REGRESSED, decide
from conformance.run.isolation.isolate import Isolation, Workers, open_backend
from conformance.run.live import LiveFamily, without_steps
from conformance.run.scheduler.assign import labels, read_devices
from conformance.run.scheduler.backend import NAME as SCHED
from conformance.suite import decoder
from conformance.suite.family import Level, keys, read_keys, split_id, text
from conformance.suite.family import without as split_keys

from .energy import Energy, Meter, meter

NAME = "phases"
MODEL = "llama-l=2,embd=256,heads=4,kv=2,head=64,ff=512,vocab=256,w=q8_0"
"""A decoder that is small enough to take only minutes on any machine."""
_KEYS = {**keys("pp=0 tg=0"), "without": text("", "a device"), **keys("unchanged=0|1")}
_PROMPTS = {"smoke": (512,), "standard": (512, 1024, 2048, 4096, 8192), "full": (512, 1024, 2048, 4096, 8192)}
_TOKENS = 64
_CELLS = 256
"""The size of a KV cache is a multiple of this."""
BUDGET = 60.0
"""Seconds for timing a phase with and without a device."""
SAME = 1.05
"""Ratios of times up to this, or its inverse, count as unchanged."""
WITH, WITHOUT = "with", "without"
UNCHANGED, UNDECIDED = "nothing changes", "undecided"


@dataclass(frozen=True, slots=True)
class Phase:
    """The parsed parameters of an id."""

    tokens: int
    without: str
    """A device to leave out; empty to keep all."""
    unchanged: bool
    case: Case


@lru_cache(maxsize=2)
def read(case_id: str) -> Phase:
    """Parse an id and make its case; UsageError if it is invalid."""
    body, seed = split_id(case_id, NAME, "DECODER,pp=TOKENS")
    model, own = split_keys(body, _KEYS)
    values, _ = read_keys(case_id, own, _KEYS)
    pp, tg = values["pp"], values["tg"]
    if min(pp, tg) < 0 or (pp > 0) == (tg > 0):
        raise UsageError(f"case {case_id!r}: pp=TOKENS or tg=TOKENS expected")
    unchanged = values["unchanged"] == "1"
    if unchanged and not values["without"]:
        raise UsageError(f"case {case_id!r}: unchanged=1: without=DEVICE expected beside it")
    n = pp or tg
    more = f"ctx={-(-n // _CELLS) * _CELLS},run={'p' if pp else 'd'}{n}"
    case = decoder.make(f"{NAME}/{model}{',' if '=' in model else '-'}{more}@{seed}")
    return Phase(n, values["without"], unchanged, case)


def _build(case_id: str) -> Case:
    read(case_id)
    return without_steps(case_id)


def _ids(level: Level) -> list[str]:
    return [f"{NAME}/{MODEL},{phase}@0" for phase in (*(f"pp={n}" for n in _PROMPTS[level]), f"tg={_TOKENS}")]


class Player:
    """Times one backend."""

    def __init__(self, spec: Spec, isolation: Isolation, _save: Path | None) -> None:
        """Open the backend. ConformanceError if it cannot be opened."""
        self._spec, self._workers = spec, Workers(isolation)
        self._backend = open_backend(spec, self._workers)
        self._meter: Meter | None = None
        self._lacks = ""
        """Reasons why energy is missing or incomplete."""
        try:
            self._meter = meter()
            self._lacks = self._meter.lacks
        except UnavailableError as e:
            self._lacks = str(e)

    def play(self, case_id: str) -> Result:
        """Time one phase.

        Raises:
            UnavailableError: the backend refuses the case, or has no such device to leave out.
            BackendError: the backend failed.
        """
        phase, pair = read(case_id), Pair(case_id, str(self._spec))
        if phase.without:
            with closing(open_backend(left_out(self._spec, phase.without), self._workers)) as less:
                return compared(pair, self._backend, less, phase)
        result = measure(pair, self._backend, phase, self._meter)
        counted = f"energy: {self._meter}" if self._meter else "energy: not available"
        return result.noted(f"{counted} ({self._lacks})" if self._lacks else counted)

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()


def measure(pair: Pair, backend: Backend, phase: Phase, counters: Meter | None) -> Result:
    """Run the first step of a case to warm up, restore its caches, and time all of its steps.

    Raises:
        UnavailableError: the backend refuses a node or the case; gives its reason.
        BackendError: the backend failed.
    """
    case = phase.case
    _check(backend, case)
    with backend.open(case) as session:
        play(session, case.steps[:1])
        restore(session, case)
        before = session.witness()
        spent, splits = dict(before.seconds), before.splits
        with counters.measure() if counters else nullcontext(Energy()) as energy:
            seconds, values = timed(session, case)
        witness = session.witness()
    metrics = {"tokens_per_second": phase.tokens / seconds, "seconds": seconds}
    if of_a_graph := -(-(witness.splits - splits) // len(case.steps)) or witness.splits:
        metrics["splits"] = float(of_a_graph)
    if energy.total is not None:
        watts, per_token = energy.total / seconds, energy.total / phase.tokens
        metrics |= {"joules": energy.total, "watts": watts, "joules_per_token": per_token}
    metrics |= {f"joules of {counter}": j for counter, j in energy.joules.items() if j is not None}
    computing = {d: s - spent.get(d, 0.0) for d, s in witness.seconds.items()} or {witness.device: seconds}
    total = sum(computing.values()) or 1.0
    nodes = {} if witness.seconds else _shares(witness.placed)
    metrics |= {f"share of {d}": s / total for d, s in computing.items() if not nodes}
    metrics |= {f"share of nodes on {d}": share for d, share in nodes.items()}
    result = Result(*pair, Verdict.PASS, seconds=seconds, steps=len(case.steps), metrics=metrics)
    if not all(np.isfinite(v.view(np.float32)).all() for step in values for v in step.values()):
        return Result(*pair, Verdict.FAIL, error=Error("NaN or infinity in the logits"), metrics=metrics)
    return result


def _shares(placed: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return each device's share of the nodes."""
    counts = {device: sum(ops.values()) for device, ops in placed.items()}
    return {device: n / sum(counts.values()) for device, n in counts.items()}


def _check(backend: Backend, case: Case) -> None:
    """Raise UnavailableError with the backend's reason if it refuses a node or the case."""
    for step in case.steps:
        for node, answer in zip(step.graph, backend.supports(step.graph), strict=True):
            if not answer:
                raise UnavailableError(f"{node}: {answer.reason}")
    whole = backend.supports_case(case)
    if not whole:
        raise UnavailableError(whole.reason)


def timed(session: Session, case: Case) -> tuple[float, Values]:
    """Run all steps of `case`; return the seconds and the outputs."""
    start = time.perf_counter()
    values = play(session, case.steps)
    return time.perf_counter() - start, values


def left_out(spec: Spec, device: str) -> Spec:
    """Return `spec` without one of its devices, given by its scheduler name.

    UnavailableError unless `device` is one that can be left out: of `sched?devices=a,b,cpu` all but the last, of a ggml
    device with `mode=sched` the device itself.
    """
    whole = resolve(spec)
    options = dict(whole.options)
    possible: dict[str, dict[str, str]] = {}
    if whole.name == SCHED and "devices" in options:
        parts = options["devices"].split(",")
        for i, name in enumerate(labels(read_devices(options["devices"]))[:-1]):
            possible[name] = {"devices": ",".join(p for j, p in enumerate(parts) if j != i)}
    elif options.get("mode") == SCHED and options.get("device", "CPU") != "CPU":
        possible[options["device"]] = {"device": "CPU"}
    if not possible:
        raise UnavailableError(
            f"{spec}: devices that share graphs expected: sched?devices=…, or a ggml device with mode=sched"
        )
    if device not in possible:
        raise UnavailableError(f"without={device}: one of {', '.join(possible)} expected of {spec}")
    return Spec(spec.name, tuple({**dict(spec.options), **possible[device]}.items()))


def compared(pair: Pair, whole: Backend, less: Backend, phase: Phase, budget: float = BUDGET) -> Result:
    """Time a phase with and without a device for up to `budget` seconds; compare the outputs.

    Raises:
        UnavailableError: `whole` refuses the case.
        BackendError: one of them failed.
    """
    case = phase.case
    _check(whole, case)
    try:
        _check(less, case)
    except UnavailableError as e:
        return _answered(pair, phase, f"needed: {e}", {})
    with ExitStack() as stack:
        sessions = {k: stack.enter_context(b.open(case)) for k, b in ((WITH, whole), (WITHOUT, less))}
        values: dict[str, Values] = {}
        rounds = Rounds([Subject(k, _timer(s, case, k, values)) for k, s in sessions.items()])
        slower = decide(rounds, WITHOUT, WITH, SAME, budget)
        faster = decide(rounds, WITH, WITHOUT, SAME, budget)
        seconds = sessions[WITH].witness().seconds
    answers = {slower.answer, faster.answer}
    answer = (
        "slower without it" if slower.answer == REGRESSED
        else "faster without it" if faster.answer == REGRESSED
        else UNCHANGED if answers == {FINE}
        else UNDECIDED
    )  # fmt: skip
    found = {
        "ratio": slower.interval.estimate,
        "ratio_low": slower.interval.low,
        "ratio_high": slower.interval.high,
        "nmse_without": _nmse(values[WITHOUT], values[WITH], case),
    }
    if total := sum(seconds.values()):
        found[f"share of {phase.without}"] = seconds.get(phase.without, 0.0) / total
    return _answered(pair, phase, answer, {k: v for k, v in found.items() if isfinite(v)})


def _answered(pair: Pair, phase: Phase, answer: str, metrics: dict[str, float]) -> Result:
    if phase.unchanged and answer == UNDECIDED:
        error = Error(f"{UNDECIDED}: the times vary too much")
        return Result(*pair, Verdict.UNSUPPORTED, error=error, metrics=metrics, undecided=True)
    if phase.unchanged and answer != UNCHANGED:
        return Result(*pair, Verdict.FAIL, error=Error(answer), metrics=metrics)
    return Result(*pair, Verdict.PASS, notes=(f"without {phase.without}: {answer}",), metrics=metrics)


def _timer(session: Session, case: Case, name: str, values: dict[str, Values]) -> Callable[[], float]:
    def run() -> float:
        restore(session, case)
        seconds, values[name] = timed(session, case)
        return seconds

    return run


def _nmse(actual: Values, expected: Values, case: Case) -> float:
    """Return the largest NMSE of any output; inf if only one of them has a NaN or infinity."""
    differences = [
        compare(t, theirs[t], ours[t])
        for step, ours, theirs in zip(case.steps, actual, expected, strict=True)
        for t in step.outputs
    ]
    return max((inf if d.special else d.nmse for d in differences), default=0.0)


FAMILY = LiveFamily(
    NAME,
    "time prefill and decode of a decoder: tokens per second, energy, each device's share",
    _ids,
    _build,
    player=Player,
    is_timed=True,
    columns=("tokens_per_second", "watts", "joules_per_token", "splits", "ratio*", "nmse_without", "share of *"),
)
