"""Runs a `TestRun` on workers: each pair gets one result, even if workers die.

If a worker dies, the cases of its chunk without a result are cut in halves, until one case runs alone. A case that
kills `LIVES` workers by itself is a CRASH; the others run again.
"""

from __future__ import annotations

import hashlib
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Protocol

from conformance.backend.registry import Spec, resolve
from conformance.case.case import JSON
from conformance.case.strict import checked
from conformance.ggml.errors import BackendCrashError, ConformanceError
from conformance.judge.evidence import Error
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.process import WorkerDiedError
from conformance.run.session import failures
from conformance.run.session.select import build
from conformance.testrun import TestRun

from .chunk import Chunk, Reply

FEW, MANY = 8, 2000
"""Minimum and maximum number of cases in a chunk."""
AHEAD = 2
"""Chunks for each thread of a worker, so that none waits for the next."""
LIVES = 3
"""Deaths of workers that count as a CRASH of a case; machines can also fail by themselves."""
PATIENCE = 60.0
"""Seconds to wait for a worker that can run the remaining cases."""
QUIET = 5.0
"""Seconds of waiting before a message; a worker that died is back by then."""
LOOK = 1.0
"""Seconds between two checks of the workers."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """How many tasks a worker runs at a time, and its devices."""

    threads: int
    devices: Mapping[str, float] = field(default_factory=dict)


class TaskLost(Exception):  # noqa: N818  # an event
    """A task ended without a result for a reason other than its cases."""


class Pool(Protocol):
    """Workers that run chunks."""

    ended: queue.Queue[tuple[int, Reply | Exception]]
    """Number of a chunk, and its next reply or its error.

    WorkerDiedError if its worker died, TaskLost if it has to run again."""
    seconds: float
    """`Chunk.seconds`."""
    is_local: bool
    """True if the workers are processes of this machine, and save their cases themselves."""

    def workers(self) -> Mapping[str, WorkerInfo]:
        """Return address -> worker. UnavailableError if the scheduler cannot be reached."""

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Run a chunk on a worker that has `device`, and is one of `workers` if any are named."""

    def cancel(self, number: int) -> None:
        """Forget a chunk."""


def device_of(spec: Spec) -> str | None:
    """Return the device that a worker must have to run `spec`; None if each worker can run it."""
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
    """Worker -> why it cannot run the backend."""
    alone_since: float | None = None
    """When the last worker able to run it left."""
    told: str = ""
    """The reason that was printed last."""
    size: int = FEW
    """Maximum number of cases in a chunk.

    Cases that do not run in its time come back, after later ones ran."""

    @property
    def waiting(self) -> int:
        return len(self.left) + sum(map(len, self.parts))

    def drop(self) -> None:
        self.left.clear()
        self.parts.clear()

    def took(self, done: int, cases: int) -> None:
        """Take how many cases of a chunk ran in its time."""
        self.size = min(MANY, 2 * done) if done == cases else max(FEW, done)


class Executor:
    """One `TestRun` on workers.

    Args:
        pool: the workers.
        run: takes the results; its journal has those of an earlier start.
        asked: cases of each backend, each once.
        tell: takes messages.
        stop: true once no chunk may start.
        each: seconds of a request, if less than the run's limit.
    """

    _numbers = count(1)
    """Numbers of chunks, unique in this process.

    A reply may come after its executor has stopped, and the next one uses the same workers."""

    def __init__(
        self,
        pool: Pool,
        run: TestRun,
        asked: Mapping[Spec, Sequence[str]],
        *,
        tell: Callable[[str], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        each: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._run, self._tell, self._stop, self._each, self._clock = pool, run, tell, stop, each, clock
        self._results = {(s, i): run.take(s, i) for s, ids in asked.items() for i in ids}
        self._backends = {s: _Backend(s, deque(i for i in ids if not self._results[s, i])) for s, ids in asked.items()}
        against = run.against
        bases = {s: None if against is None else against.base(s) for s in asked}
        self._bases = {s: base for s, base in bases.items() if s not in bases.values()}
        """Backend -> the one to compare with; those are not in it."""
        self._chunks: dict[int, tuple[Chunk, frozenset[str]]] = {}
        """Running tasks, and the workers to which they are bound, if any."""
        self._new = [(s, i) for (s, i), r in self._results.items() if r is not None]
        """Results that `play` has not yielded."""
        self._alone: Counter[tuple[Spec, str]] = Counter()
        """Deaths of workers that ran one case."""
        self._workers: Mapping[str, WorkerInfo] = {}
        self.environments: dict[str, dict[str, JSON]] = {}
        """Worker address -> its environment, for workers that finished a task."""
        self.deaths = 0
        self._looked = -inf
        """Time of the last `_look`."""
        self._stopped: float | None = None
        """Time at which `stop` became true."""

    def play(self) -> Generator[Result, None, None]:
        """Submit chunks until none is left or `stop`; `run.results` gets the results in order.

        Yields:
            Each result once it is on disk and the base has run the case, too. One that comes before the end of the run,
            without the base's, does not count: it would look new.

        Raises:
            UnavailableError: the scheduler is gone.
        """
        try:
            yield from self._whole()
            while self._is_busy():
                self._advance()
                yield from self._whole()
        finally:
            for number in self._chunks:
                self._pool.cancel(number)  # else it would take the next executor's time
            found = {pair: r for pair, r in self._results.items() if r is not None and self._is_whole(*pair)}
            against = self._run.against
            self._run.results += (found if against is None else against.without_bases(found)).values()
            if machine := self._machine():
                self._run.about["environment"] = machine

    def _whole(self) -> Iterator[Result]:
        """Yield the results, except those of bases, that became whole."""
        new, self._new = self._new, []
        for spec, case in new:
            if not self._is_whole(spec, case):
                self._new.append((spec, case))
            elif spec in self._bases and (found := self._results[spec, case]) is not None:
                if self._run.against is not None and (base := self._bases[spec]) is not None:
                    self._run.against.know(spec, self._results.get((base, case)))
                yield found

    def _is_whole(self, spec: Spec, case: str) -> bool:
        """Return True if the base has run a case, or runs none."""
        base = self._bases.get(spec)
        known = base is None or (base, case) not in self._results or self._results[base, case] is not None
        return known or (str(base), "") in self._run.reasons

    def result(self, spec: Spec, case_id: str) -> Result | None:
        """Run until the result of a requested case is known, and return it; None if it gets none.

        Raises:
            UnavailableError: the scheduler is gone.
        """
        while (found := self._results[spec, case_id]) is None and self._is_busy():
            self._advance()
        return found

    def _is_busy(self) -> bool:
        """Return True while cases run or wait; after `stop`, running ones have the time of a chunk."""
        if not self._stop():
            self._stopped = None
        elif self._stopped is None:
            self._stopped = self._clock()
        late = self._stopped is not None and self._clock() - self._stopped > self._pool.seconds
        return not late and any(b.waiting or b.running for b in self._backends.values())

    def _advance(self) -> None:
        """Start what has room, and take at most one reply."""
        if self._clock() - self._looked >= LOOK:
            self._look()
            self._looked = self._clock()
        self._feed()
        with suppress(queue.Empty):
            self._take(*self._pool.ended.get(timeout=LOOK if self._chunks else 0.1))

    def __str__(self) -> str:
        names = ", ".join(f"{b.waiting} of {s}" for s, b in self._backends.items() if b.waiting)
        left = f"; waiting: {names}" if names else ""
        done = sum(r is not None for r in self._results.values())
        died = f", {self.deaths} died" if self.deaths else ""
        return f"{done:,} of {len(self._results):,} on {len(self._workers)} workers{died}{left}"

    def _machine(self) -> dict[str, JSON]:
        """Return the workers' environment; for several kinds of machines a common name."""
        each = {repr(sorted(e.items(), key=str)): e for e in self.environments.values()}.values()
        if len(each) < 2:
            return next(iter(each), {})
        names = "\n".join(sorted(str(e.get("machine")) for e in each))
        return {"machine": hashlib.sha256(names.encode()).hexdigest()[:12]}

    def _look(self) -> None:
        """Refresh workers, requeue tasks of lost ones, drop backends that no worker can run."""
        self._workers = self._pool.workers()
        now = self._clock()
        for number, (chunk, bound) in list(self._chunks.items()):
            if bound and not bound & set(self._workers):
                self._pool.cancel(number)
                self._end(number, chunk)
        for b in self._backends.values():
            if self._stop():
                b.drop()
            if not b.waiting or self._able(b):
                b.alone_since = None
                continue
            need = device_of(b.spec)
            none = f"no worker has the device {need}: dask worker ADDRESS --resources '{need}=1'"
            why = next(iter(b.refused.values()), none if need else "there is no worker")
            b.alone_since = now if b.alone_since is None else b.alone_since
            if why != b.told and (b.refused or now - b.alone_since > QUIET):
                b.told = why
                self._tell(f"{b.spec}: {why}")
            if (self._workers and set(self._workers) <= set(b.refused)) or now - b.alone_since > PATIENCE:
                self._run.reasons[str(b.spec), ""] = why
                b.drop()

    def _able(self, b: _Backend) -> list[str]:
        need = device_of(b.spec)
        return [w for w, o in self._workers.items() if w not in b.refused and (need is None or o.devices.get(need))]

    def _feed(self) -> None:
        """Start chunks of the backend that has the most left, until each thread has its share."""
        while not self._stop() and (able := [b for b in self._backends.values() if self._room(b) > 0]):
            b = max(able, key=lambda b: b.waiting)
            fair = len(b.left) // max(1, AHEAD * sum(self._workers[w].threads for w in self._able(b)))
            size = min(len(b.left), max(FEW, min(fair, b.size)))
            self._start(b, b.parts.popleft() if b.parts else [b.left.popleft() for _ in range(size)])

    def _room(self, b: _Backend) -> int:
        """Return how many more chunks of a backend its workers can accept."""
        need, here = device_of(b.spec), [self._workers[w] for w in self._able(b)]
        places = sum(o.threads if need is None else int(o.devices[need]) for o in here) if b.waiting else 0
        return AHEAD * places - sum(x.running for x in self._backends.values() if device_of(x.spec) == need)

    def _start(self, b: _Backend, cases: Sequence[str]) -> None:
        run = self._run
        save = run.chosen.saves if self._pool.is_local else None
        chunk = Chunk(
            next(self._numbers), b.spec, cases, run.chosen.isolation, self._pool.seconds, exact=run.chosen.exact,
            locates=run.runner.locates, checks_stale_state=run.runner.checks_stale_state, each=self._each,
            journals=str(run.chosen.folder) if self._pool.is_local else None,
            save_failures=None if save is None else str(save), waivers=run.waivers.pack(b.spec),
        )  # fmt: skip
        bound = frozenset(self._able(b)) if b.refused else frozenset[str]()
        self._chunks[chunk.number] = chunk, bound
        b.running += 1
        self._pool.start(chunk, device_of(b.spec), bound)

    def _take(self, number: int, reply: Reply | Exception) -> None:
        """Process the reply of a task; ignore an abandoned task."""
        chunk = self._chunks.get(number, (None,))[0]
        if chunk is None:
            return
        if isinstance(reply, WorkerDiedError):
            self._died(number, chunk, str(reply))
            return
        if isinstance(reply, Reply):
            self._keep(chunk.spec, [_result(row) for row in reply.rows])
            if not reply.ended:
                return
            self.environments[reply.worker] = reply.environment
            if reply.undeclared:
                self._run.runner.undeclared[chunk.spec] = None
            if reply.why:
                self._backends[chunk.spec].refused[reply.worker] = f"{reply.worker}: {reply.why}"
        self._end(number, chunk)

    def _end(self, number: int, chunk: Chunk) -> _Backend:
        """Forget a task; cases without a result wait again."""
        del self._chunks[number]
        b = self._backends[chunk.spec]
        b.running -= 1
        left = [i for i in chunk.cases if self._results[b.spec, i] is None]
        b.took(len(chunk.cases) - len(left), len(chunk.cases))
        b.left.extendleft(reversed(left))
        return b

    def _died(self, number: int, chunk: Chunk, why: str) -> None:
        """Run the halves of what is left of a chunk; run a single case at most `LIVES` times."""
        b = self._end(number, replace(chunk, cases=()))
        self.deaths += 1
        left = [i for i in chunk.cases if self._results[b.spec, i] is None]
        half = (len(left) + 1) // 2
        if len(chunk.cases) > 1:
            b.parts.extend(filter(None, (left[:half], left[half:])))
            return
        (case,) = chunk.cases
        self._alone[b.spec, case] += 1
        if self._alone[b.spec, case] < LIVES:
            b.parts.append([case])
            return
        error = Error(f"each of {LIVES} workers that ran it alone died: {why}")
        crash = Result(case, str(b.spec), Verdict.CRASH, error=error)
        self._keep(b.spec, [self._run.waivers.apply(b.spec, crash)])

    def _keep(self, spec: Spec, results: Sequence[Result]) -> None:
        """Record new results, and save failing cases as files."""
        new = [r for r in results if (spec, r.case) in self._results and self._results[spec, r.case] is None]
        fresh = self._run.fresh
        new = [self._saved(replace(r, backend=str(spec), fresh=r.case in fresh)) for r in new]
        self._run.keep(new)
        self._check_start(spec, new)
        for r in new:
            self._results[spec, r.case] = r
            self._new.append((spec, r.case))

    def _check_start(self, spec: Spec, new: Sequence[Result]) -> None:
        """Drop a backend that does not start (`run.start`)."""
        try:
            self._run.check_start(spec, new)
        except BackendCrashError as e:
            if (str(spec), "") not in self._run.reasons:
                self._tell(str(e))
            self._run.reasons[str(spec), ""] = str(e)
            self._backends[spec].drop()

    def _saved(self, result: Result) -> Result:
        folder = self._run.chosen.saves
        if folder is None or result.saved or result.verdict not in FAILURES or result.waived:
            return result
        try:
            return replace(result, saved=failures.save(folder, build(result.case), result))
        except (ConformanceError, OSError) as e:
            self._tell(f"{result.case}: could not be saved: {e}")
            return result


def _result(row: JSON) -> Result:
    return checked(Path("results of a worker"), "", partial(Result.from_json, row))
