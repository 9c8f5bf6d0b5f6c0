"""Counts the instructions of work units on builds; each build is judged against the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from conformance.backend.registry import Spec
from conformance.ggml.errors import UnavailableError
from conformance.judge.verdict import FAILURES, Result, Verdict, counted
from conformance.perf import gates
from conformance.perf.bench import Bench, Row
from conformance.perf.units import Unit
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner

from .target import CPU, Target


class Counting:
    """Counts `unit` on builds; one that executes more than the first build fails."""

    def __init__(self, bench: Bench, unit: Unit) -> None:
        self._bench, self._unit = bench, unit
        self._first: Row | None = None

    def result(self, spec: Spec) -> Result:
        """Return the unit's result on `spec`, with counts and their ratios to the first build's."""
        row = Row(self._unit, spec, replace(self._bench.result(self._unit, spec), case=self._unit.id))
        self._bench.count(row)
        first = self._first = self._first or row
        if row is first or row.counts is None or first.counts is None:
            return row.result
        gate = gates.Gate("", "count", self._unit, spec, gates.COUNT_LIMIT, first.backend)
        judged = gates.judge_counts(gate, row.result, first.result, row.counts.grown(first.counts))
        ratios = {k: v for k, v in judged.metrics.items() if k.startswith("ratio.")}
        return replace(judged, case=self._unit.id, metrics={**row.result.metrics, **ratios})

    def run(self, spec: Spec, _: str) -> Result:
        """Return `result`; UnavailableError if the first build cannot be counted."""
        result, first = self.result(spec), self._first
        if first is not None and first.counts is None:
            unit = self._unit.id
            raise UnavailableError(f"{unit} on {first.backend}: {first.result.sentence()}; nothing to compare with")
        return result


def counts(units: Sequence[Unit], specs: Sequence[Spec], isolation: Isolation) -> Iterator[list[Result]]:
    """Yield the results of each unit on `specs`, the base before the build."""
    with closing(Runner(isolation=isolation)) as runner:
        bench = Bench(runner, isolation)
        for unit in units:
            counting = Counting(bench, unit)
            yield [counting.result(spec) for spec in specs]


@dataclass(slots=True)
class UnitCounts:
    """Units counted on the targets that are the CPU itself, and their results."""

    units: Sequence[Unit]
    targets: Sequence[Target]
    """All targets; the others have no counts."""
    results: list[Result] = field(default_factory=list)
    """Results of both builds, the base's before the build's."""

    def __post_init__(self) -> None:
        self.targets = [t for t in self.targets if t.name == CPU]

    def run(self, isolation: Isolation, say: Callable[[str], None], over: Callable[[], bool]) -> Iterator[list[Result]]:
        """Count unit after unit until the time is `over`; yield the results of each."""
        for target in self.targets if self.units else ():
            specs = [s for s in (target.base, target.build) if s is not None]
            say(f"{target.name}: {counted(len(self.units), 'unit')} to count")
            for results in counts(self.units, specs, isolation):
                self.results += results
                yield results
                if over():
                    return

    def left(self, target: Target) -> list[str]:
        """Return the ids of the units that were not counted on a target."""
        done = {r.case for r in self.results if r.backend == str(target.build)}
        return [u.id for u in self.units if u.id not in done]

    def slower(self) -> list[Result]:
        """Return the results of the build that fail where its base passes."""
        return [r for t in self.targets for r in _failed(self.results, t.build, t.base)]


def _failed(results: Sequence[Result], build: Spec, base: Spec | None) -> list[Result]:
    """Return the results of `build` that fail where `base` passes."""
    before = {r.case: r.verdict for r in results if r.backend == str(base)}
    own = (r for r in results if r.backend == str(build) and r.verdict in FAILURES)
    return [r for r in own if before.get(r.case, Verdict.PASS) is Verdict.PASS]
