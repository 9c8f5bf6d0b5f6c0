"""Answering gates: who is measured against whom, how often, and what stands in the document afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.backend.registry import Spec
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import FAILURES, Verdict
from conformance.run.session.environment import environment

from .bench import Bench, Row
from .compare import Pair, UncomparableError
from .decide import REGRESSED, Decision, decide
from .gates import BASELINE, NOT_RUN, Answer, Gate, counted, decided
from .rounds import Rounds
from .units import Unit

ONCE = 1
"""Rounds for a counter: it is the same in each."""


@dataclass(slots=True)
class Judge:
    """Answers gates one after the other and keeps what it measured."""

    bench: Bench
    budget: float
    """Seconds of measuring for each gate."""
    lacking: Mapping[Spec, str] = field(default_factory=dict)
    """Backend that this machine does not have -> why."""
    pair: Pair | None = None
    """This build and the baseline; None where there is none."""
    machine: str = field(default_factory=lambda: str(environment()["machine"]))
    rows: dict[tuple[Unit, Spec], Row] = field(default_factory=dict)
    """What was measured on the way, each unit of a backend once: where it had most rounds."""

    def answer(self, gate: Gate) -> Answer:
        """What is true of a gate here; whatever prevents measuring it makes it `not run`, with the reason."""
        if gate.machine and gate.machine != self.machine:
            return Answer(gate, NOT_RUN, f"it is about machine {gate.machine}, and this is {self.machine}")
        if gate.against == BASELINE:
            return self._against_baseline(gate)
        specs = [gate.backend, *([gate.against] if isinstance(gate.against, Spec) else [])]
        for spec in specs:
            if spec in self.lacking:
                return Answer(gate, NOT_RUN, f"{spec}: not available: {self.lacking[spec]}")
        return self._measured(gate, specs)

    def _measured(self, gate: Gate, specs: list[Spec]) -> Answer:
        found: list[Decision] = []
        against = None if gate.against is None else str(gate.against)

        def buy(rounds: Rounds) -> None:
            if gate.kind == "counter":
                rounds.more(ONCE)
            elif len(rounds.seconds) == len(specs):
                found.append(decide(rounds, str(gate.backend), against, gate.limit, self.budget))

        rows = self.bench.rows(gate.unit, specs, buy)
        for row in rows:
            self._keep(row)
        for row in rows:
            if row.broke or row.result.verdict is not Verdict.PASS:
                broke = row.broke or row.result.verdict in FAILURES
                return Answer(gate, NOT_RUN, f"{row.backend}: {row.reason}", broke=broke)
        if gate.kind == "counter":
            memory = {"weights": rows[0].weights, "peak": rows[0].peak}
            return counted(gate, {**rows[0].counters, "memory": memory})
        return decided(gate, found[-1])

    def _against_baseline(self, gate: Gate) -> Answer:
        if self.pair is None:
            return Answer(gate, NOT_RUN, "no baseline was given: --base names a virtual environment that has one")
        try:
            return decided(gate, self.pair.decide(gate.unit, gate.backend, gate.limit, self.budget))
        except UncomparableError as e:
            return Answer(gate, NOT_RUN, str(e), broke=e.broke)
        except ConformanceError as e:
            return Answer(gate, NOT_RUN, f"it failed while it was measured: {e}", broke=True)

    def _keep(self, row: Row) -> None:
        key = row.unit, row.backend
        if key not in self.rows or len(row.seconds) >= len(self.rows[key].seconds):
            self.rows[key] = row


def exit_code(answers: list[Answer]) -> int:
    """1 where a gate regressed or a case behind one failed, 3 where no gate was run at all."""
    if any(a.answer == REGRESSED or a.broke for a in answers):
        return 1
    return 3 if all(a.answer == NOT_RUN for a in answers) else 0
