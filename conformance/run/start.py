"""Tell a device that dies at any graph from one that dies in a few cases.

A library whose device cannot compute at all would otherwise be opened again for each of a thousand cases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendCrashError
from conformance.judge.verdict import EXECUTED, Result, Verdict

from .runner import Runner

DEATHS = 4
"""Number of first cases with the same death after which other graphs are tried."""
TRIED = ("ops/ADD-f32+f32-a=1x1x1@325", "ops/MUL_MAT-f32+f32-a=9x8,b=9x2@549")
"""Ids of small graphs of two ops that share no kernel."""
_DEATHS = frozenset({Verdict.CRASH, Verdict.TIMEOUT})


class Starts:
    """Watches the first results of each backend."""

    def __init__(self, runner: Runner) -> None:
        """Watch the backends of `runner`."""
        self._runner = runner
        self._lives: set[Spec] = set()
        """Backends whose process survived a case, or a graph of `TRIED`."""
        self._deaths: dict[Spec, list[Result]] = {}
        self._dead: dict[Spec, BackendCrashError] = {}

    def left(self, spec: Spec) -> int:
        """Return the number of cases to run before the next `check`."""
        return sys.maxsize if spec in self._lives else max(1, DEATHS - len(self._deaths.get(spec, ())))

    def check(self, spec: Spec, results: Sequence[Result] = ()) -> None:
        """Take the next results of a backend.

        Raises:
            BackendCrashError: it does not start: its first `DEATHS` cases died in the same way, and so does every graph
                of `TRIED` that it does not refuse. Raised again at each later call.
        """
        if spec in self._dead:
            raise self._dead[spec]
        ran = [r for r in results if r.verdict in EXECUTED]
        if spec in self._lives or not ran:
            return
        deaths = self._deaths.setdefault(spec, [])
        deaths += ran
        if any(_how(r) != _how(deaths[0]) or r.verdict not in _DEATHS for r in deaths):
            self._lives.add(spec)
        elif len(deaths) >= DEATHS:
            tried = [r for i in TRIED if (r := self._play(spec, i)).verdict in EXECUTED]
            if not tried or any(_how(r) != _how(deaths[0]) for r in tried):
                self._lives.add(spec)
                return
            what = deaths[0].error.message if deaths[0].error else ""
            ops = ", ".join(r.case.partition("/")[2].partition("-")[0] for r in tried)
            self._dead[spec] = BackendCrashError(
                f"{spec}: the device does not start: its first {len(deaths)} cases and a small graph of {ops} "
                f"ended with {deaths[0].verdict}: {what}"
            )
            raise self._dead[spec]

    def _play(self, spec: Spec, case_id: str) -> Result:
        with self._runner.quick(locates=False, checks_stale_state=False):
            return self._runner.run(spec, [self._runner.case(case_id)])[0]


def _how(result: Result) -> tuple[Verdict, str]:
    return result.verdict, result.error.died if result.error else ""
