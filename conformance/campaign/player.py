"""Plays cases of a run on lanes, or in this process where starting lanes would take longer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from conformance.backend.registry import Spec
from conformance.ggml.errors import UnavailableError
from conformance.judge.verdict import Result
from conformance.process import Deadline
from conformance.run.live import is_live
from conformance.testrun import TestRun

from .executor import Executor
from .lanes import Lanes, number


class Player:
    """Runs cases of a `TestRun` on backends and their bases."""

    def __init__(self, run: TestRun, specs: Sequence[Spec], cases: int) -> None:
        """Start the lanes: as many as `run.chosen.jobs`, or `lanes.number` for `cases` pairs."""
        self.run = run
        n = number(run.chosen.jobs, cases)
        self._lanes = Lanes(n) if n > 1 else None
        if self._lanes is not None:
            self._lanes.share_devices(specs)

    def play(
        self, spec: Spec, ids: Sequence[str], *, deadline: Deadline, stop: Callable[[], bool]
    ) -> Generator[Result, None, None]:
        """Run cases on a backend and its base; yield each result once both have run the case.

        On lanes the results are not in order. After `stop` or the end of `deadline` no further case starts.

        Raises:
            ConformanceError: a backend does not open.
        """
        base = None if self.run.against is None else self.run.against.base(spec)
        both = [s for s in (spec, base) if s is not None]
        if self._lanes is None:
            for each in both if ids and not is_live(ids[0]) else ():  # a live family starts its own processes
                self.run.runner.backend(each)
            yield from (r for _, r in self.run.play(spec, ids, deadline=deadline, stop=stop))
            return
        asked = {each: list(ids) for each in both}
        work = Executor(self._lanes, self.run, asked, stop=lambda: stop() or deadline.is_over(), each=deadline.each)
        with closing(work.play()) as results:
            yield from results
        for each in both:
            if why := self.run.reasons.pop((str(each), ""), None):
                raise UnavailableError(why)

    def close(self) -> None:
        """End the lanes."""
        if self._lanes is not None:
            self._lanes.close()
