"""Units on backends: each case must PASS through the `Runner` first; those that do are measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation, open_backend
from conformance.run.runner import Runner

from .measure import Measured, Opener, memory, rate
from .rounds import Rounds
from .units import Unit


@dataclass(slots=True)
class Row:
    """A unit on a backend: what a document has of it."""

    unit: Unit
    backend: Spec
    result: Result
    """Of the unit's case."""
    seconds: list[float] = field(default_factory=list)
    """One for each round, warm-up apart."""
    elapsed: list[float] = field(default_factory=list)
    """The same measurements by the clock of this process; `seconds` where a session has no other."""
    counters: dict[str, JSON] = field(default_factory=dict)
    weights: int | None = None
    """Bytes that the session holds its weights in; this and `peak` of the unit `memory` alone."""
    peak: int | None = None
    reason: str = ""
    """Why it was not timed, if it was not."""
    broke: bool = False
    """Whether it was not timed because measuring it failed: it had PASSed before."""

    @property
    def rate(self) -> float | None:
        """Work per second of the median round."""
        return rate(self.unit.work, self.seconds)


class Bench:
    """Hands out what may be measured.

    Args:
        runner: through which cases must pass; whoever made it closes it.
        isolation: who runs in a process of its own.
    """

    def __init__(self, runner: Runner, isolation: Isolation | None = None) -> None:
        self._runner = runner
        self._isolation = isolation or Isolation()
        self._results: dict[tuple[Spec, str], Result] = {}

    def result(self, unit: Unit, spec: Spec) -> Result:
        """Of the unit's case on a backend, run once however many units share it."""
        key = spec, unit.case_id
        if key not in self._results:
            (self._results[key],) = self._runner.run(spec, [self._runner.case(unit.case_id)])
        return self._results[key]

    def opener(self, spec: Spec, *, isolate: bool | None = None) -> Opener:
        """What starts a backend of its own for a measurement."""
        i = self._isolation
        chosen = i.isolate if isolate is None else isolate
        return partial(open_backend, spec, isolate=chosen, time_limit=i.time_limit, memory_limit=i.memory_limit)

    def measured(self, unit: Unit, spec: Spec, name: str = "") -> Measured:
        """A unit on a backend, ready to be measured under `name`, its spec by default; whoever asked closes it.

        Raises:
            UsageError: there is nothing to time in it, or its case did not PASS here.
            BackendError: the backend failed.
        """
        result = self.result(unit, spec)
        if not unit.timed or result.verdict is not Verdict.PASS:
            raise UsageError(f"{unit.name} on {spec}: {_why(result) or 'nothing is timed in it'}")
        return Measured(unit, self._runner.case(unit.case_id), name or str(spec), self.opener(spec))

    def rows(self, unit: Unit, specs: Sequence[Spec], buy: Callable[[Rounds], None]) -> list[Row]:
        """Measure a unit on all backends in turns.

        One whose case did not PASS, or that fails while it is measured, stands there with the reason; the others are
        then measured anew, so that all have the same rounds.

        Args:
            unit: what.
            specs: where, each once.
            buy: asks `Rounds` for as many as it needs.
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
        """Measure; gives those that failed, and why stands in their rows."""
        with ExitStack() as stack:
            ready: dict[Spec, Measured] = {}
            for spec in specs:
                try:
                    ready[spec] = self.measured(unit, spec)
                except Exception as e:  # noqa: BLE001  # an adapter's own fault costs one unit, not the run
                    _broke(rows[spec], e)
                    return {spec}
                stack.callback(_quietly, ready[spec].close)
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
            opener = self.opener(row.backend, isolate=True)
            row.counters, found = memory(self._runner.case(row.unit.case_id), opener)
        except Exception as e:  # noqa: BLE001  # as above
            _broke(row, e)
            return
        row.weights, row.peak = found["weights"], found["peak"]
        row.reason = "nothing is timed in it: it is about memory"


def _broke(row: Row, error: Exception) -> None:
    row.reason, row.broke = f"it passed, and failed while it was measured: {error}", True


def _why(result: Result) -> str:
    """Why a case's unit is not timed; empty where it is."""
    if result.verdict is Verdict.PASS:
        return ""
    return f"{result.verdict}: {result.detail}" if result.detail else str(result.verdict)


def _quietly(close: Callable[[], None]) -> None:
    """A backend that died while it was measured has nothing more to say."""
    try:
        close()
    except ConformanceError:
        return
