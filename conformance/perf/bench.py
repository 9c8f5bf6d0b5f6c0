"""Measure units on backends: each case must PASS through the `Runner` before it is timed.

A unit gives one `Result` under `Unit.id`. Its metrics are `seconds` (median of the rounds), `seconds.low` and
`seconds.high` (95 % interval of that median), `elapsed` (median by this process's clock), `rounds`, a rate such as
`tokens_per_second`, and the counters of `measure.Measured` and `measure.memory`. One series is one id on one backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.text import error_text
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.run.failed import result_of_error
from conformance.run.isolation.isolate import Isolation, Workers, open_backend
from conformance.run.runner import Runner

from .count import SLOWDOWN, Counts, Tool, callgrind, count
from .held import weights_held
from .measure import Measured, Opener, Rounds, memory
from .statistics import median_interval
from .units import Unit


@dataclass(slots=True)
class Row:
    """The measurement of a unit on a backend."""

    unit: Unit
    backend: Spec
    result: Result
    """Result of the unit; before the unit is measured, the result of its case."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each round, without warm-up."""
    counts: Counts | None = None
    """Counts of the timed steps, if they were counted."""

    @property
    def rate(self) -> float | None:
        """Work per second of the median round."""
        return self.unit.work / median(self.seconds) if self.seconds else None

    def measured(
        self, counters: Mapping[str, float], seconds: Sequence[float] = (), elapsed: Sequence[float] = ()
    ) -> None:
        """Add counters, and seconds of rounds by the session's and this process's clock."""
        self.seconds = list(seconds)
        found = dict(counters)
        if seconds:
            low, high = median_interval(seconds)
            found |= {"seconds": median(seconds), "elapsed": median(elapsed), "rounds": len(seconds)}
            found |= {f"{self.unit.of}_per_second": self.unit.work / median(seconds)}
            found |= {} if low is None or high is None else {"seconds.low": low, "seconds.high": high}
        self.result = replace(self.result, metrics=found)

    def failed(self, error: Exception) -> None:
        """Store the error of a measurement that failed after the case had passed."""
        known = error if isinstance(error, ConformanceError) else ConformanceError(error_text(error))
        found = result_of_error(Pair(self.result.case, self.result.backend), known)
        told = Error(f"it passed, and failed while it was measured: {known}", found.error.words if found.error else "")
        self.result = replace(self.result, verdict=found.verdict, error=told)


class Bench:
    """Measures units whose cases pass. The caller closes the runner.

    Args:
        runner: runs the cases.
        isolation: limits of the measured processes.
        cases: cases that cannot be built from their id, by id.
        graphs: what is timed of units whose case has no steps.
    """

    def __init__(
        self,
        runner: Runner,
        isolation: Isolation | None = None,
        cases: Mapping[str, Case] | None = None,
        graphs: Mapping[Unit, Case] | None = None,
    ) -> None:
        self._runner = runner
        self._isolation = isolation or Isolation()
        self._cases, self._graphs = cases or {}, graphs or {}
        self._results: dict[tuple[Spec, str], Result] = {}

    def case(self, unit: Unit) -> Case:
        """Return the case of a unit."""
        return self._cases.get(unit.case_id) or self._runner.case(unit.case_id)

    def graphs(self, unit: Unit) -> Case:
        """Return the steps of a unit."""
        return self._graphs.get(unit) or self.case(unit)

    def result(self, unit: Unit, spec: Spec) -> Result:
        """Run the unit's case on a backend; several units that share a case run it once."""
        key = spec, unit.case_id
        if key not in self._results:
            (self._results[key],) = self._runner.run(spec, [self.case(unit)])
        return self._results[key]

    def opener(self, spec: Spec) -> Opener:
        """Return a function that starts a separate backend for a measurement, in its own process."""
        return partial(open_backend, spec, Workers(self._isolation), own=True)

    def measured(self, unit: Unit, spec: Spec, name: str = "") -> Measured:
        """Prepare a unit on a backend under `name` (default: its spec); the caller closes it.

        Raises:
            UsageError: the unit has nothing to time, or its case did not PASS here.
            BackendError: the backend failed.
        """
        result = self.result(unit, spec)
        if not unit.timed or result.verdict is not Verdict.PASS:
            why = result.sentence() if result.verdict is not Verdict.PASS else "nothing is timed in it"
            raise UsageError(f"{unit.name} on {spec}: {why}")
        return Measured(unit, self.graphs(unit), name or str(spec), self.opener(spec))

    def held(self, spec: Spec) -> int:
        """Return the Q8_0 weights in a process's memory in percent (`perf.held`)."""
        return round(100 * weights_held(spec, self.opener(spec), "q8_0").held)

    def count(self, row: Row, tool: Tool = callgrind) -> None:
        """Count the steps of a row that passed; UNSUPPORTED, with the reason, if that is impossible."""
        if row.result.verdict is not Verdict.PASS or not row.unit.steps:
            return
        try:
            with tool() as counter:
                limit = SLOWDOWN * self._isolation.time_limit
                isolation = replace(self._isolation, under=counter.under, time_limit=limit)
                opener = partial(open_backend, row.backend, Workers(isolation), own=True)
                row.counts = count(row.unit, self.graphs(row.unit), opener, counter)
        except UnavailableError as e:
            row.result = replace(row.result, verdict=Verdict.UNSUPPORTED, error=Error(f"not counted: {e}"))
        except Exception as e:  # noqa: BLE001  # an adapter's own fault costs one unit, not the run
            row.failed(e)
        else:
            row.result = replace(row.result, metrics={**row.result.metrics, **row.counts.metrics()})

    def rows(self, unit: Unit, specs: Sequence[Spec], buy: Callable[[Rounds], None]) -> list[Row]:
        """Measure a unit on all backends, interleaved; `buy` measures the rounds.

        A backend whose case did not PASS gets the verdict of that case; a backend that fails during measurement gets
        that verdict. Then the others are measured again, so that all have the same rounds.
        """
        rows = {s: Row(unit, s, replace(self.result(unit, s), case=unit.id)) for s in specs}
        while passed := [r for r in rows.values() if r.result.verdict is Verdict.PASS]:
            if not unit.timed:
                for row in passed:
                    self._memory(row)
                break
            if self._contest(unit, passed, buy):
                break
        return [rows[s] for s in specs]

    def _contest(self, unit: Unit, rows: Sequence[Row], buy: Callable[[Rounds], None]) -> bool:
        """Measure and return True; return False if a backend fails, with the reason in its row."""
        with ExitStack() as stack:
            ready: list[Measured] = []
            for row in rows:
                try:
                    ready.append(self.measured(unit, row.backend))
                except Exception as e:  # noqa: BLE001  # an adapter's own fault costs one unit, not the run
                    row.failed(e)
                    return False
                stack.callback(_close, ready[-1])
            rounds = Rounds([m.subject for m in ready])
            try:
                buy(rounds)
            except Exception as e:  # noqa: BLE001  # as above
                broken = [row for row, m in zip(rows, ready, strict=True) if m.error is e]
                for row in broken or rows:
                    row.failed(e)
                return False
            for row, m in zip(rows, ready, strict=True):
                seconds = rounds.seconds[m.name]
                row.measured(m.counters(), seconds, m.elapsed(seconds))
        return True

    def _memory(self, row: Row) -> None:
        try:
            row.measured(memory(self.graphs(row.unit), self.opener(row.backend)))
        except Exception as e:  # noqa: BLE001  # as above
            row.failed(e)


def _close(measured: Measured) -> None:
    with suppress(ConformanceError):  # a backend that died while it was measured was reported then
        measured.close()
