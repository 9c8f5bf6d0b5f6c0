"""Runs the cases of a `TestRun` on workers: each pair of backend and case gets one result, whatever dies meanwhile.

A chunk whose worker died is cut in halves, until one case stands alone. A case that ends `LIVES` workers by itself is
a CRASH; whatever else a death cost runs again.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from conformance.backend.registry import Spec, resolve
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError
from conformance.judge.evidence import Error
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process import WorkerDiedError
from conformance.report.runfile import checked
from conformance.run.session import failures
from conformance.run.session.select import build
from conformance.testrun import TestRun

from .chunk import Chunk, Reply

FEW, MANY = 8, 2000
"""Cases of a chunk, at least and at most."""
AHEAD = 2
"""Chunks for each thread of a worker, so that none waits for the next."""
LIVES = 3
"""Worker deaths after which a case that ran alone counts as CRASH; a machine may go down by chance."""
PATIENCE = 60.0
"""Seconds to wait for a worker that can run what is left."""
QUIET = 5.0
"""Seconds of waiting before a message; a worker that died is back by then."""
LOOK = 1.0
"""Seconds between two looks at the workers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker: how many tasks it runs at a time, and its devices."""

    threads: int
    devices: Mapping[str, float] = field(default_factory=dict)


class Pool(Protocol):
    """Workers that run chunks."""

    ended: queue.Queue[tuple[int, Reply | Exception]]
    """Number of a chunk, and its reply; WorkerDiedError where its worker died, another error where the chunk is lost by
    no fault of its cases.
    """

    def workers(self) -> Mapping[str, Offer]:
        """Address -> worker, of those that are here now. UnavailableError if their scheduler cannot be reached."""

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Run a chunk on a worker that has `device`, and is one of `workers` where any are named."""

    def cancel(self, number: int) -> None:
        """Forget a chunk."""


def device_of(spec: Spec) -> str | None:
    """The device that a worker must offer to run `spec`; None where each worker can."""
    name = dict(resolve(spec).options).get("device", "CPU")
    return None if name.upper() == "CPU" else name


@dataclass(slots=True)
class _Backend:
    """The queue of one backend."""

    spec: Spec
    left: deque[str]
    parts: deque[list[str]] = field(default_factory=deque)
    """Parts of chunks whose worker died; each runs by itself."""
    running: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Worker -> why it cannot run it."""
    alone_since: float | None = None
    """When the last worker able to run it left."""
    said: str = ""
    """Why, as it was said."""

    @property
    def waiting(self) -> int:
        return len(self.left) + sum(map(len, self.parts))

    def drop(self) -> None:
        self.left.clear()
        self.parts.clear()


class Executor:
    """The workers at a run.

    Args:
        pool: the workers.
        run: takes the results, and knows why there is none; a journal of it has those of an earlier start.
        asked: cases of each backend, each once.
        fresh: whether the cases are new.
        say: takes sentences for people.
        show: takes each new result.
        ends: of `clock`, after which no chunk is handed out.
    """

    def __init__(
        self,
        pool: Pool,
        run: TestRun,
        asked: Mapping[Spec, Sequence[str]],
        *,
        fresh: bool = False,
        say: Callable[[str], None] = lambda _: None,
        show: Callable[[Result], None] = lambda _: None,
        ends: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._run, self._fresh, self._say, self._show = pool, run, fresh, say, show
        self._ends, self._clock = ends, clock
        self._results = {(s, i): run.take(s, i) for s, ids in asked.items() for i in ids}
        self._backends = {s: _Backend(s, deque(i for i in ids if not self._results[s, i])) for s, ids in asked.items()}
        self._chunks: dict[int, tuple[Chunk, frozenset[str]]] = {}
        """Tasks that run, and the workers that they are bound to, if any."""
        self._numbers = 0
        self._alone: Counter[tuple[Spec, str]] = Counter()
        """Deaths of workers that ran one case."""
        self._workers: Mapping[str, Offer] = {}
        self._began, self._new = clock(), 0
        self.environments: dict[str, dict[str, JSON]] = {}
        """Worker address -> its environment, for workers that finished a task."""
        self.tasks, self.deaths, self.busy = 0, 0, 0.0
        """`busy`: seconds of workers, as they count them."""

    def run(self) -> None:
        """Hand out and take in until nothing is left, or the time is over. The run has what came, in order, however it
        ends. UnavailableError if the scheduler is gone for good.
        """
        looked = -inf
        try:
            while any(b.waiting or b.running for b in self._backends.values()):
                if self._clock() - looked >= LOOK:
                    self._look()
                    looked = self._clock()
                self._feed()
                try:
                    self._take(*self._pool.ended.get(timeout=LOOK if self._chunks else 0.1))
                except queue.Empty:
                    continue
        finally:
            self._run.results = [r for r in self._results.values() if r is not None]

    def __str__(self) -> str:
        rate = self._new / max(self._clock() - self._began, 1e-3)
        threads = sum(w.threads for w in self._workers.values())
        names = ", ".join(f"{b.waiting} of {s}" for s, b in self._backends.items() if b.waiting)
        done = sum(r is not None for r in self._results.values())
        return (
            f"{done:,} of {len(self._results):,}, {rate:.0f}/s, {len(self._workers)} workers of "
            f"{threads} threads{f', {self.deaths} died' if self.deaths else ''}; waiting: {names or 'nothing'}"
        )

    def _look(self) -> None:
        """Refresh the workers; requeue tasks of workers that left, and drop backends that no worker can run."""
        self._workers = self._pool.workers()
        now = self._clock()
        for number, (chunk, bound) in list(self._chunks.items()):
            if bound and not bound & set(self._workers):
                self._pool.cancel(number)
                self._end(number, chunk)
        for b in self._backends.values():
            if now > self._ends:
                b.drop()
            if not b.waiting or self._able(b):
                b.alone_since = None
                continue
            need = device_of(b.spec)
            none = f"no worker offers the device {need}: dask worker ADDRESS --resources '{need}=1'"
            why = next(iter(b.refused.values()), none if need else "there is no worker")
            b.alone_since = now if b.alone_since is None else b.alone_since
            if why != b.said and (b.refused or now - b.alone_since > QUIET):
                b.said = why
                self._say(f"{b.spec}: {why}")
            if (self._workers and set(self._workers) <= set(b.refused)) or now - b.alone_since > PATIENCE:
                self._run.reasons[str(b.spec), ""] = why
                b.drop()

    def _able(self, b: _Backend) -> list[str]:
        need = device_of(b.spec)
        return [w for w, o in self._workers.items() if w not in b.refused and (need is None or o.devices.get(need))]

    def _feed(self) -> None:
        """Start chunks of the backend that has the most left, until each thread has its share."""
        while self._clock() <= self._ends and (able := [b for b in self._backends.values() if self._room(b) > 0]):
            b = max(able, key=lambda b: b.waiting)
            fair = len(b.left) // max(1, AHEAD * sum(self._workers[w].threads for w in self._able(b)))
            size = min(len(b.left), max(FEW, min(fair, MANY)))
            self._start(b, b.parts.popleft() if b.parts else [b.left.popleft() for _ in range(size)])

    def _room(self, b: _Backend) -> int:
        """How many more chunks of a backend its workers take."""
        need, here = device_of(b.spec), [self._workers[w] for w in self._able(b)]
        places = sum(o.threads if need is None else int(o.devices[need]) for o in here) if b.waiting else 0
        return AHEAD * places - sum(x.running for x in self._backends.values() if device_of(x.spec) == need)

    def _start(self, b: _Backend, cases: Sequence[str]) -> None:
        self._numbers += 1
        chunk = Chunk(self._numbers, b.spec, cases, self._run.chosen.isolation)
        bound = frozenset(self._able(b)) if b.refused else frozenset[str]()
        self._chunks[chunk.number] = chunk, bound
        b.running += 1
        self._pool.start(chunk, device_of(b.spec), bound)

    def _take(self, number: int, reply: Reply | Exception) -> None:
        """Take in what a task gave; one that was given up counts no more."""
        chunk = self._chunks.get(number, (None,))[0]
        if chunk is None:
            return
        b = self._backends[chunk.spec]
        if isinstance(reply, WorkerDiedError):
            self._died(b, number, chunk, str(reply))
            return
        if isinstance(reply, Reply):
            self._keep(chunk.spec, [_result(row) for row in reply.rows])
            self.tasks += 1
            self.busy += reply.seconds
            self.environments[reply.worker] = reply.environment
            if reply.why:
                b.refused[reply.worker] = f"{reply.worker}: {reply.why}"
        self._end(number, chunk)

    def _end(self, number: int, chunk: Chunk) -> None:
        """Forget a task; what it left waits again."""
        del self._chunks[number]
        b = self._backends[chunk.spec]
        b.running -= 1
        b.left.extendleft(i for i in reversed(chunk.cases) if self._results[b.spec, i] is None)

    def _died(self, b: _Backend, number: int, chunk: Chunk, why: str) -> None:
        del self._chunks[number]
        b.running -= 1
        self.deaths += 1
        half = (len(chunk.cases) + 1) // 2
        if half < len(chunk.cases):
            b.parts.extend([list(chunk.cases[:half]), list(chunk.cases[half:])])
            return
        (case,) = chunk.cases
        self._alone[b.spec, case] += 1
        if self._alone[b.spec, case] < LIVES:
            b.parts.append([case])
            return
        error = Error(f"each of {LIVES} workers that ran it alone died: {why}")
        self._keep(b.spec, [Result(case, str(b.spec), Verdict.CRASH, error=error)])

    def _keep(self, spec: Spec, results: Sequence[Result]) -> None:
        """Write new results down, and failing cases as files."""
        new = [r for r in results if (spec, r.case) in self._results and self._results[spec, r.case] is None]
        new = [self._run.waiving.apply(spec, replace(r, backend=str(spec), fresh=self._fresh)) for r in new]
        new = [self._saved(r) for r in new]
        self._run.keep(new)
        self._new += len(new)
        for r in new:
            self._results[spec, r.case] = r
            self._show(r)

    def _saved(self, result: Result) -> Result:
        folder = self._run.chosen.save_failures
        if folder is None or result.verdict not in FAILURES or result.waived:
            return result
        try:
            return replace(result, saved=failures.save(folder, build(result.case), result))
        except (ConformanceError, OSError) as e:
            self._say(f"{result.case}: could not be saved: {e}")
            return result


def _result(row: JSON) -> Result:
    return checked(Path("results of a worker"), "", partial(Result.from_json, row))
