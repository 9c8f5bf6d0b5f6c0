"""Workers without Dask: simulated ones that die as a seed says, and one that runs chunks at once."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from conformance.campaign.chunk import Chunk, Reply, execute
from conformance.campaign.executor import TaskLost, WorkerInfo
from conformance.judge.verdict import Result, Verdict
from conformance.process import WorkerDiedError

Ended = tuple[int, Reply | Exception]


class InlinePool:
    """One worker that runs a chunk as soon as it is started, in this process."""

    seconds = 10.0
    is_local = False

    def __init__(self, offer: WorkerInfo | None = None) -> None:
        self.ended: queue.Queue[Ended] = queue.Queue()
        self.offer = WorkerInfo(1) if offer is None else offer
        self.chunks: list[Chunk] = []
        self.before: Callable[[], None] = lambda: None
        """Called before each chunk."""

    def workers(self) -> Mapping[str, WorkerInfo]:
        """The one."""
        return {"here": self.offer}

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Run it."""
        assert device is None or device in self.offer.devices
        assert not workers or "here" in workers
        self.before()
        self.chunks.append(chunk)
        reply = execute(Chunk.unpack(chunk.pack()), "here")
        self.ended.put((chunk.number, Reply.unpack(reply.pack())))

    def cancel(self, number: int) -> None:
        """Nothing runs."""

    @contextmanager
    def connect(self, *_: object) -> Iterator[InlinePool]:
        """Stand in for `campaign.pool.connect`."""
        yield self


@dataclass
class _Task:
    chunk: Chunk
    worker: str
    done: int = 0


@dataclass
class Faults:
    """What goes wrong, each as a probability of one step of the simulation."""

    kill: float = 0.0
    """A worker dies."""
    message: float = 0.0
    """A reply does not arrive."""
    killers: frozenset[str] = frozenset()
    """Cases whose worker dies."""


class _Events(queue.Queue[Ended]):
    def __init__(self, pool: SimulatedPool) -> None:
        super().__init__()
        self._pool = pool

    def get(self, block: bool = True, timeout: float | None = None) -> Ended:  # noqa: ARG002  # Queue's own
        for _ in range(50):
            if not self.empty():
                return super().get(block=False)
            self._pool.step()
        raise queue.Empty


@dataclass
class SimulatedPool:
    """Workers that answer PASS, and die as a seed says; time passes by steps, never by a clock."""

    seed: int
    names: Sequence[str] = ("a", "b", "c")
    faults: Faults = field(default_factory=Faults)
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Worker -> why it runs nothing."""
    now: float = 0.0
    kills: int = 0
    seconds: float = 10.0
    is_local = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311  # a simulation
        self._tasks: dict[int, _Task] = {}
        self._late: list[Ended] = []
        self.ended: queue.Queue[Ended] = _Events(self)

    def clock(self) -> float:
        """Seconds of the simulation."""
        return self.now

    def workers(self) -> Mapping[str, WorkerInfo]:
        """Each has one thread."""
        return {n: WorkerInfo(1) for n in self.names}

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Give it to any worker, or any of those named."""
        assert device is None
        self._tasks[chunk.number] = _Task(chunk, self._random.choice(sorted(workers) or list(self.names)))

    def cancel(self, number: int) -> None:
        """Forget it."""
        self._tasks.pop(number, None)

    @property
    def running(self) -> int:
        """Number of chunks that were started and have not ended."""
        return len(self._tasks)

    def step(self) -> None:
        """One thing happens."""
        self.now += 0.1
        if self._late and self._random.random() < 0.3:
            self.ended.put(self._late.pop())
        if not self._tasks:
            return
        number = self._random.choice(list(self._tasks))
        task = self._tasks[number]
        if task.worker in self.refuses:
            self._end(number, Reply([], self.refuses[task.worker], task.worker))
            return
        batch = list(task.chunk.cases)[task.done : task.done + 5]
        by_chance = self._random.random() < self.faults.kill
        if by_chance or not self.faults.killers.isdisjoint(batch):
            self.kills += by_chance
            self._end(number, WorkerDiedError("by the simulation", (), "by the simulation"))
            return
        task.done += len(batch)
        if task.done == len(task.chunk.cases):
            rows = [Result(i, str(task.chunk.spec), Verdict.PASS).to_json() for i in task.chunk.cases]
            self._end(number, Reply(rows, "", task.worker, {"machine": "m"}))

    def _end(self, number: int, reply: Reply | Exception) -> None:
        del self._tasks[number]
        if isinstance(reply, Reply) and self._random.random() < self.faults.message:
            self._late.append((number, reply))  # it comes after its task was given up
            reply = TaskLost("no answer")
        self.ended.put((number, reply))
