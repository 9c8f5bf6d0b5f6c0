"""Units on backends: each case must PASS through the `Runner` before it is timed; and the document of a perf run.

    {…header("perf")…, "level": "smoke", "units": [{
        "unit": "decode@past=512", "model": "llama-l=2,…", "case": "kv_growth/…@1", "backend": "ggml",
        "verdict": "PASS", "work": 8, "of": "tokens", "seconds": [one per round], "elapsed": [likewise], "rounds": 10,
        "rate": 512.0,
        "counters": {
            "compiles": 2, "hits": 6, "splits": 0, "copies": 0, "nodes": 568, "bytes": {…}, "kernels": {…},
            "timed": {"compiles": 0, "hits": 8, "splits": 0, "copies": 0, "nodes": 568}, "changed": 0},
        "memory": {"weights": 1234, "peak": null}, "reason": ""}], "gates": []}

A unit that was not timed has `seconds: []`, `rate: null` and the reason; it is never left out. `elapsed` and the
counters are those of `measure.Measured`, `rate` is `work` by the median of `seconds`. One series is one `unit`, `model`
and `backend`: levels differ in models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import cast

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.outcome import Outcome, Why, judge
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation, Workers, open_backend
from conformance.run.runner import Runner
from conformance.run.session.environment import header

from .held import weights_held
from .measure import Measured, Opener, Rounds, memory
from .units import Unit

COLUMNS = ("unit", "backend", "rounds", "rate", "of", "spread", "not charged", "compiles", "hits", "MiB",
           "why not timed")  # fmt: skip
CASE_COLUMNS = ("backend", "verdict", "ms", "of the first", "compiles", "nodes", "peak MiB", "kernels")
BOOKKEEPING = ("Const", "Input", "Output", "MemoryInput", "MemoryOutput", "Reshape")
"""Layers that compute nothing."""
_MIB = 2**20


@dataclass(slots=True)
class Row:
    """A unit on a backend."""

    unit: Unit
    backend: Spec
    result: Result
    """Of the unit's case."""
    seconds: list[float] = field(default_factory=list)
    """One per round, without warm-up."""
    elapsed: list[float] = field(default_factory=list)
    """The same measurements by this process's clock; `seconds` where a session has no other."""
    counters: dict[str, JSON] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=lambda: {"weights": None, "peak": None})
    """Bytes, as of `measure.memory`; known only of the unit `memory`."""
    reason: str = ""
    """Why it was not timed."""
    broke: bool = False
    """Whether measuring it failed after its case had PASSed."""

    @property
    def rate(self) -> float | None:
        """Work per second of the median round."""
        return self.unit.work / median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, JSON]:
        """Its entry in the document."""
        u = self.unit
        return {
            "unit": u.name,
            "model": u.model,
            "case": u.case_id,
            "backend": str(self.backend),
            "verdict": self.result.verdict.value,
            "work": u.work,
            "of": u.of,
            "seconds": list(self.seconds),
            "elapsed": list(self.elapsed),
            "rounds": len(self.seconds),
            "rate": self.rate,
            "counters": dict(self.counters),
            "memory": dict(self.memory),
            "reason": self.reason,
        }


class Bench:
    """Measures units whose cases pass. The runner stays its maker's to close."""

    def __init__(self, runner: Runner, isolation: Isolation | None = None) -> None:
        self._runner = runner
        self._isolation = isolation or Isolation()
        self._results: dict[tuple[Spec, str], Result] = {}

    def result(self, unit: Unit, spec: Spec) -> Result:
        """The result of the unit's case on a backend; several units that share a case run it once."""
        key = spec, unit.case_id
        if key not in self._results:
            (self._results[key],) = self._runner.run(spec, [self._runner.case(unit.case_id)])
        return self._results[key]

    def opener(self, spec: Spec) -> Opener:
        """Starts a backend of its own for a measurement, in its own process."""
        return partial(open_backend, spec, Workers(self._isolation), own=True)

    def measured(self, unit: Unit, spec: Spec, name: str = "") -> Measured:
        """A unit on a backend, ready to be measured under `name` (default: its spec); the caller closes it.

        Raises:
            UsageError: there is nothing to time in it, or its case did not PASS here.
            BackendError: the backend failed.
        """
        result = self.result(unit, spec)
        if not unit.timed or result.verdict is not Verdict.PASS:
            raise UsageError(f"{unit.name} on {spec}: {_why(result) or 'nothing is timed in it'}")
        return Measured(unit, self._runner.case(unit.case_id), name or str(spec), self.opener(spec))

    def held(self, spec: Spec) -> int:
        """Per cent of a model's weights that a process of its own holds (`perf.held`), of Q8_0.

        ConformanceError if it cannot be measured.
        """
        return round(100 * weights_held(spec, self.opener(spec), "q8_0").held)

    def rows(self, unit: Unit, specs: Sequence[Spec], buy: Callable[[Rounds], None]) -> list[Row]:
        """Measure a unit on all backends in turns.

        A backend whose case did not PASS, or that fails while it is measured, gets a row with the reason; the others
        are then measured anew, so that all have the same rounds.
        """
        rows = {s: Row(unit, s, self.result(unit, s)) for s in specs}
        for row in rows.values():
            row.reason = _why(row.result)
        passed = [s for s in specs if not rows[s].reason]
        if not unit.timed:
            for spec in passed:
                self._memory(rows[spec])
        while unit.timed and passed:
            broken = self._contest(unit, passed, rows, buy)
            if not broken:
                break
            passed = [s for s in passed if s not in broken]
        return [rows[s] for s in specs]

    def _contest(
        self, unit: Unit, specs: Sequence[Spec], rows: dict[Spec, Row], buy: Callable[[Rounds], None]
    ) -> set[Spec]:
        """Measure; return the backends that failed, with the reason in their rows."""
        with ExitStack() as stack:
            ready: dict[Spec, Measured] = {}
            for spec in specs:
                try:
                    ready[spec] = self.measured(unit, spec)
                except Exception as e:  # noqa: BLE001  # an adapter's own fault costs one unit, not the run
                    _broke(rows[spec], e)
                    return {spec}
                stack.callback(_close, ready[spec])
            rounds = Rounds([m.subject for m in ready.values()])
            try:
                buy(rounds)
            except Exception as e:  # noqa: BLE001  # as above
                broken = {s for s, m in ready.items() if m.error is e} or set(specs)
                for spec in broken:
                    _broke(rows[spec], e)
                return broken
            for spec, m in ready.items():
                row = rows[spec]
                row.seconds = list(rounds.seconds[m.name])
                row.elapsed = m.elapsed(row.seconds)
                row.counters = m.counters()
        return set()

    def _memory(self, row: Row) -> None:
        try:
            opener = self.opener(row.backend)
            row.counters, row.memory = memory(self._runner.case(row.unit.case_id), opener)
            row.reason = "nothing is timed in it: it is about memory"
        except Exception as e:  # noqa: BLE001  # as above
            _broke(row, e)


def _broke(row: Row, error: Exception) -> None:
    row.reason, row.broke = f"it passed, and failed while it was measured: {error}", True


def _why(result: Result) -> str:
    """Why a case's unit is not timed; empty where it is."""
    if result.verdict is Verdict.PASS:
        return ""
    return f"{result.verdict}: {result.detail}" if result.detail else str(result.verdict)


def _close(measured: Measured) -> None:
    with suppress(ConformanceError):  # a backend that died while it was measured was reported then
        measured.close()


def document(
    rows: Sequence[Row], level: str, unavailable: Mapping[str, str] | None = None, gates: Sequence[JSON] = ()
) -> dict[str, JSON]:
    """The document of a perf run."""
    head = header("perf")
    head["environment"]["unavailable"] = dict(unavailable or {})
    return {**head, "level": level, "units": [r.to_json() for r in rows], "gates": list(gates)}


def outcome(rows: Sequence[Row]) -> Outcome:
    """As of `conform run`, of the cases behind the rows; it also fails where one that passed failed when measured."""
    broke = [f"{r.unit.name} on {r.backend}: {r.reason}" for r in rows if r.broke]
    return judge([r.result for r in rows]) + Outcome.of(Why.FAILED, broke)


def spread(seconds: Sequence[float]) -> float | None:
    """The middle half of the rounds as a fraction of their median; None for fewer than four."""
    if len(seconds) < 4:
        return None
    ordered = sorted(seconds)
    n = len(ordered)
    return (ordered[(3 * (n - 1) + 2) // 4] - ordered[(n - 1) // 4]) / median(ordered)


def case_cells(row: Row, held: Row, first: float | None) -> Sequence[str]:
    """A row of `perf case` under `CASE_COLUMNS`: all steps of a case; `held` is its row about memory."""
    kernels = cast("Mapping[str, int]", row.counters.get("kernels", {}))
    told = sorted(((n, k) for k, n in kernels.items() if k not in BOOKKEEPING), key=lambda x: (-x[0], x[1]))
    return (
        str(row.backend),
        row.result.verdict.value,
        "–" if row.rate is None else f"{1000 * row.unit.work / row.rate:.4g}",
        "–" if row.rate is None or first is None else f"{first / row.rate:.3g} x",
        _counter(row.counters, "compiles"),
        str(row.counters.get("nodes", "")),
        _mib(held.memory["peak"]),
        row.reason or ", ".join(f"{n} {k}" for n, k in told),
    )


def cells(row: Row) -> Sequence[str]:
    """A row under `COLUMNS`; an unknown number is a dash, never a 0."""
    wide = spread(row.seconds)
    apart = [1 - s / e for s, e in zip(row.seconds, row.elapsed, strict=True)]
    return (
        row.unit.name,
        str(row.backend),
        str(len(row.seconds)),
        "–" if row.rate is None else f"{row.rate:.4g}",
        f"{row.unit.of}/s" if row.unit.timed else "",
        "–" if wide is None else f"{100 * wide:.1f} %",
        f"{100 * median(apart):.0f} %" if apart and any(apart) else "",
        _counter(row.counters, "compiles"),
        _counter(row.counters, "hits"),
        "" if row.unit.timed else f"{_mib(row.memory['weights'])}, at most {_mib(row.memory['peak'])}",
        row.reason,
    )


def _mib(n: int | None) -> str:
    return "–" if n is None else f"{n / _MIB:.1f}"


def _counter(counters: Mapping[str, JSON], name: str) -> str:
    """Of the first playing, and what a measurement adds."""
    if name not in counters:
        return "–"
    timed = counters.get("timed", {}).get(name)
    return f"{counters[name]}" if timed is None else f"{counters[name]} (+{timed})"
