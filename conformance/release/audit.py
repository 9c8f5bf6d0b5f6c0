"""The placement audit on the devices of two builds: what each says of weights, buffers and op_params, against runs.

A case is a cell, `audit/DECODER: WEIGHT in BUFFER`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from conformance.backend.registry import Spec
from conformance.causes.cause import Cause
from conformance.causes.cells import audit_message
from conformance.ggml.errors import ConformanceError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.run import audit
from conformance.run.audit import Cell, Finding
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.select import build

from .target import Target
from .work import alike

STAGE = "audit"
PREFIX = f"{STAGE}/"
_VERDICTS = {
    Finding.AGREED: Verdict.PASS,
    Finding.OVERCLAIM: Verdict.OVERCLAIM,
    Finding.XFAIL: Verdict.XFAIL,
    Finding.XPASS: Verdict.XPASS,
    Finding.UNRUN: Verdict.UNSUPPORTED,
}
"""A finding that is not here is wrong, though no number is."""


@dataclass(frozen=True, slots=True)
class Audits:
    """Audits of devices."""

    isolation: Isolation

    def play(self, runner: Runner, spec: Spec, decoder: str) -> list[Result]:
        """A result for each cell of one decoder; one for all of it where the backend cannot be opened."""
        try:
            return list(self._cells(runner, spec, decoder))
        except ConformanceError as e:
            return [_unopened(spec, decoder, e)]

    def _cells(self, runner: Runner, spec: Spec, decoder: str) -> Iterator[Result]:
        yield from (_result(spec, c) for c in audit.audit(runner, audit.strict(runner, spec), [build(decoder)]))

    def find(self, results: Sequence[Result], _seconds: float) -> list[Cause]:
        """A cause for each way in which cells fail: the finding, what was varied, and the innermost message."""
        return alike(STAGE, results, lambda r: r.error.message if r.error else "", _words)

    def again(self, spec: Spec, case_id: str) -> Result:
        """The cell of a case, from an audit of its decoder in a process of its own that goes no further."""
        runner = Runner(isolation=replace(self.isolation, isolate=True))
        decoder = case_id.removeprefix(PREFIX).partition(": ")[0]
        gone = Result(case_id, str(spec), Verdict.UNSUPPORTED, error=Error("the audit has no such cell"))
        try:
            return next((r for r in self._cells(runner, spec, decoder) if r.case == case_id), gone)
        except ConformanceError as e:
            return _unopened(spec, decoder, e)
        finally:
            runner.close()


@dataclass(slots=True)
class Audit:
    """The decoders on one target."""

    target: Target
    kind: Audits
    left: list[str] = field(default_factory=lambda: list(audit.CASES))
    """Decoders that did not run yet, in order."""
    results: dict[Spec, list[Result]] = field(default_factory=dict)
    hung: dict[str, list[str]] = field(default_factory=dict)
    stage: ClassVar[str] = STAGE

    def run(self, runner: Runner, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Run what is left, for so long; the decoder that is under way then is brought to its end."""
        end = clock() + seconds
        while self.left and clock() < end:
            for spec in self.target.specs:
                self.results.setdefault(spec, []).extend(self.kind.play(runner, spec, self.left[0]))
            del self.left[0]


def _unopened(spec: Spec, decoder: str, e: ConformanceError) -> Result:
    return Result(f"{PREFIX}{decoder}", str(spec), Verdict.CRASH, error=Error(str(e)))


def _result(spec: Spec, cell: Cell) -> Result:
    case = f"{PREFIX}{cell.case}" + (f": {cell.name} in {cell.buffer}" if cell.name else "")
    verdict = _VERDICTS.get(cell.finding, Verdict.FAIL)
    known = verdict in (Verdict.PASS, Verdict.UNSUPPORTED)
    error = None if known else Error(f"{cell.finding}: {audit_message(cell)}")
    return Result(case, str(spec), verdict, error=error)


def _words(_: Verdict, message: str, rows: Sequence[Result]) -> tuple[str, dict[str, int]]:
    return f"{message} ({len(rows)} cells)", {"failed": len(rows)}
