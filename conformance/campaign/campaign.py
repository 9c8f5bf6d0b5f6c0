"""Hands out the cases of a run in chunks, and takes in what comes: each pair of backend and case is answered once.

A chunk whose worker died is cut in halves, until one case stands alone. A case that ends `LIVES` workers by itself is
a CRASH; whatever else a death cost runs again. So a worker may die at any moment, and nothing is lost or counted twice.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from conformance.backend.registry import Spec, resolve
from conformance.case.case import JSON
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.report.runfile import checked
from conformance.run.isolation.isolate import Isolation

from .chunk import Chunk, Reply, unpack_rows

SECONDS = 20.0
"""Of a task: what it has left then is handed out again."""
SHORTEST = 1.0
"""Seconds of work that a task is given at least, where there are as many: handing it out takes milliseconds."""
FIRST, MANY = 32, 2000
"""Cases of a chunk of unknown duration, and of any at most."""
AHEAD = 2
"""Chunks for each thread of a worker, so that none waits for the next."""
LIVES = 3
"""Workers that one case must end, alone, to be called their killer: a machine may go down by chance."""
PATIENCE = 60.0
"""Seconds to wait for a worker that can run what is left."""
QUIET = 5.0
"""Seconds of waiting of which nothing is said: a worker that died is back by then."""
LOOK = 1.0
"""Seconds between two looks at the workers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Results that a task sent."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """A task that ended."""

    number: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Died:
    """A task whose worker died."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A task that is no more, by no fault of its cases: the scheduler is gone, or refuses it."""

    number: int


Event = Rows | Done | Died | Lost


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker: how many tasks it runs at a time, and its devices."""

    threads: int
    devices: Mapping[str, float] = field(default_factory=dict)


class Pool(Protocol):
    """Workers that run chunks."""

    events: queue.Queue[Event]

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
    """What is left of one backend."""

    spec: Spec
    left: deque[str]
    parts: deque[list[str]] = field(default_factory=deque)
    """Parts of chunks whose worker died; each runs by itself."""
    rate: float = 0.0
    """Cases per second of one worker, as measured; 0 before."""
    running: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Worker -> why it cannot run it."""
    alone_since: float | None = None
    """When nobody could run it any more."""
    said: str = ""
    """Why, as it was said."""

    @property
    def name(self) -> str:
        return str(self.spec)

    @property
    def waiting(self) -> int:
        return len(self.left) + sum(map(len, self.parts))

    def seconds(self) -> float:
        """Estimate of what is left for one worker."""
        return self.waiting / self.rate if self.rate else inf


class Campaign:
    """One run in progress.

    Args:
        pool: the workers.
        asked: cases of each backend, each once.
        isolation: limits of the processes in which backends run.
        keep: takes new results, as soon as they come; they are written down by it.
        say: takes sentences for people.
        earlier: results that an earlier start has.
        ends: of `clock`, after which no chunk is handed out.
    """

    def __init__(
        self,
        pool: Pool,
        asked: Mapping[Spec, Iterable[str]],
        *,
        isolation: Isolation,
        topic: str,
        keep: Callable[[Sequence[Result]], list[Result]],
        say: Callable[[str], None],
        earlier: Iterable[Result] = (),
        ends: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._isolation, self._topic, self._keep, self._say = pool, isolation, topic, keep, say
        self._ends, self._clock = ends, clock
        self.results: dict[tuple[str, str], Result] = {(r.backend, r.case): r for r in earlier}
        self._asked = {(str(s), i) for s, ids in asked.items() for i in ids}
        self._backends = {
            str(s): _Backend(s, deque(i for i in dict.fromkeys(ids) if (str(s), i) not in self.results))
            for s, ids in asked.items()
        }
        self._chunks: dict[int, tuple[Chunk, frozenset[str]]] = {}
        """Tasks that run, and the workers that they are bound to, if any."""
        self._numbers = 0
        self._alone: Counter[tuple[str, str]] = Counter()
        """Deaths of workers that ran one case."""
        self._silent: Counter[tuple[str, str]] = Counter()
        """Tasks that ended well and sent no result of a case."""
        self._workers: Mapping[str, Offer] = {}
        self._began = clock()
        self._at_start = len(self.results)
        self.why: dict[tuple[str, str], str] = {}
        """(backend, case), or (backend, "") for all its cases -> why there is no result."""
        self.environments: dict[str, dict[str, JSON]] = {}
        """Of each worker that ended a task."""
        self.tasks = 0
        self.deaths = 0
        self.busy = 0.0
        """Seconds of workers, as they count them."""

    def run(self) -> None:
        """Hand out and take in until nothing is left, or the time is over. UnavailableError if the scheduler is gone
        for good; what came before is kept.
        """
        looked = -inf
        while any(b.waiting or b.running for b in self._backends.values()):
            if self._clock() - looked >= LOOK:
                self._look()
                looked = self._clock()
            self._feed()
            try:
                event = self._pool.events.get(timeout=LOOK if self._chunks else 0.1)
            except queue.Empty:
                continue
            self._take(event)

    def __str__(self) -> str:
        new = len(self.results) - self._at_start
        rate = new / max(self._clock() - self._began, 1e-3)
        threads = sum(w.threads for w in self._workers.values())
        names = ", ".join(f"{b.waiting} of {b.name}" for b in self._backends.values() if b.waiting)
        return (
            f"{len(self.results):,} of {len(self._asked):,}, {rate:.0f}/s, {len(self._workers)} workers of "
            f"{threads} threads{f', {self.deaths} died' if self.deaths else ''}; waiting: {names or 'nothing'}"
        )

    # -- handing out ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look who is here; take back what waits for nobody, and give up what nobody can run."""
        self._workers = self._pool.workers()
        now = self._clock()
        for number, (chunk, bound) in list(self._chunks.items()):
            if bound and not bound & set(self._workers):
                self._pool.cancel(number)
                self._back(chunk)
        for b in self._backends.values():
            if now > self._ends:
                b.left.clear()
                b.parts.clear()
            if not b.waiting or self._able(b):
                b.alone_since = None
                continue
            need = device_of(b.spec)
            why = next(iter(b.refused.values()), "") or (
                f"no worker offers the device {need}: dask worker ADDRESS --resources '{need}=1'" if need
                else "there is no worker"
            )  # fmt: skip
            b.alone_since = now if b.alone_since is None else b.alone_since
            if why != b.said and (b.refused or now - b.alone_since > QUIET):
                b.said = why
                self._say(f"{b.name}: {why}")
            refused = self._workers and set(self._workers) <= set(b.refused)
            if refused or now - b.alone_since > PATIENCE:
                self.why[b.name, ""] = why
                b.left.clear()
                b.parts.clear()

    def _able(self, b: _Backend) -> list[str]:
        need = device_of(b.spec)
        return [w for w, o in self._workers.items() if w not in b.refused and (need is None or o.devices.get(need))]

    def _feed(self) -> None:
        """Start chunks of the backend that needs the most time, until each thread has its share."""
        if self._clock() > self._ends:
            return
        while able := [b for b in self._backends.values() if b.waiting and self._room(b) > 0]:
            b = max(able, key=_Backend.seconds)
            cases = b.parts.popleft() if b.parts else [b.left.popleft() for _ in range(self._size(b))]
            cases = [i for i in cases if (b.name, i) not in self.results]  # it may have come after all
            if cases:
                self._start(b, cases)

    def _room(self, b: _Backend) -> int:
        here = [self._workers[w] for w in self._able(b)]
        need = device_of(b.spec)
        if need is None:
            free = [x for x in self._backends.values() if device_of(x.spec) is None]
            return AHEAD * sum(o.threads for o in here) - sum(x.running for x in free)
        same = [x for x in self._backends.values() if device_of(x.spec) == need]
        return AHEAD * int(sum(o.devices[need] for o in here)) - sum(x.running for x in same)

    def _size(self, b: _Backend) -> int:
        """Cases of the next chunk: the fewer are left, the shorter, so that all workers end together."""
        threads = max(1, sum(self._workers[w].threads for w in self._able(b)))
        fair = len(b.left) // (AHEAD * threads)
        if not b.rate:
            return min(len(b.left), FIRST)
        return min(len(b.left), max(1, int(b.rate * SHORTEST), min(int(b.rate * SECONDS), fair, MANY)))

    def _start(self, b: _Backend, cases: Sequence[str]) -> None:
        self._numbers += 1
        chunk = Chunk(self._numbers, b.spec, list(cases), SECONDS, self._isolation, self._topic)
        bound = frozenset(self._able(b)) if b.refused else frozenset[str]()
        self._chunks[chunk.number] = chunk, bound
        b.running += 1
        self._pool.start(chunk, device_of(b.spec), bound)

    # -- taking in -----------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, Rows):
            self._results(unpack_rows(event.data))
            return
        if event.number not in self._chunks:
            return
        chunk = self._chunks[event.number][0]
        b = self._backends[str(chunk.spec)]
        if isinstance(event, Lost):
            self._back(chunk)
        elif isinstance(event, Died):
            self._died(b, chunk, event.why)
        else:
            self._done(b, chunk, event.reply)

    def _results(self, rows: JSON) -> None:
        new = []
        for row in rows:
            result = checked(Path("results of a worker"), "", partial(Result.from_json, row))
            key = result.backend, result.case
            if key in self._asked and key not in self.results:
                self.results[key] = result
                new.append(result)
        if new:
            for result in self._keep(new):
                self.results[result.backend, result.case] = result

    def _end(self, chunk: Chunk) -> list[str]:
        """Forget a task; its cases without a result."""
        del self._chunks[chunk.number]
        name = str(chunk.spec)
        self._backends[name].running -= 1
        return [i for i in chunk.cases if (name, i) not in self.results]

    def _back(self, chunk: Chunk) -> None:
        self._backends[str(chunk.spec)].left.extendleft(reversed(self._end(chunk)))

    def _done(self, b: _Backend, chunk: Chunk, reply: Reply) -> None:
        left = self._end(chunk)
        self.tasks += 1
        self.busy += reply.seconds
        self.environments[reply.worker] = reply.environment
        ran = len(chunk.cases) - len(reply.left)
        if ran and reply.seconds:
            rate = ran / reply.seconds
            b.rate = (b.rate + rate) / 2 if b.rate else rate
        if reply.why:
            b.refused[reply.worker] = f"{reply.worker}: {reply.why}"
        for case in set(left) - set(reply.left):  # its message was lost on the way
            self._silent[b.name, case] += 1
            if self._silent[b.name, case] >= LIVES:
                self.why[b.name, case] = f"{LIVES} tasks ran it, and no result arrived"
        b.left.extendleft(i for i in reversed(left) if (b.name, i) not in self.why)

    def _died(self, b: _Backend, chunk: Chunk, why: str) -> None:
        left = self._end(chunk)
        self.deaths += 1
        if len(left) > 1:
            half = (len(left) + 1) // 2
            b.parts.extend([left[:half], left[half:]])
        elif left:
            key = b.name, left[0]
            self._alone[key] += 1
            if self._alone[key] < LIVES:
                b.parts.append(left)
                return
            detail = f"each of {LIVES} workers that ran it alone died: {why}"
            (self.results[key],) = self._keep([Result(left[0], b.name, Verdict.CRASH, error=Error(detail))])
