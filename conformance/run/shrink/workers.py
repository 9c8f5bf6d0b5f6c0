"""Run experiments in parallel, each in its own worker process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from conformance.backend.registry import Spec
from conformance.process.memory import cores
from conformance.run.isolation.isolate import runs_here
from conformance.run.runner import Runner

_T = TypeVar("_T")
_R = TypeVar("_R")
MOST = 2
"""Maximum number of runners by default; libraries also have their own threads."""


class Runners:
    """Runners in parallel: a thread for each, and the backend in its own process."""

    def __init__(self, runners: Iterable[Runner]) -> None:
        self._runners = list(runners)
        self._free: SimpleQueue[Runner] = SimpleQueue()
        for runner in self._runners:
            self._free.put(runner)
        self._pool = ThreadPoolExecutor(len(self._runners))
        self._busy: set[Future[Any]] = set()

    def ahead(self, do: Callable[[Runner, _T], _R], items: Iterable[_T]) -> Iterator[tuple[_T, _R]]:
        """Yield each item and the result of `do` on one of the runners, in order.

        The next items run while one is examined; results that are no longer requested are discarded.
        """
        waiting: deque[tuple[_T, Future[_R]]] = deque()
        for item in items:
            waiting.append((item, self._start(do, item)))
            if len(waiting) == len(self._runners):
                first, future = waiting.popleft()
                yield first, future.result()
        for item, future in waiting:
            yield item, future.result()

    def restart(self) -> None:
        """Wait for running cases, then close the backends: the next cases run in fresh processes."""
        wait(self._busy)
        for runner in self._runners:
            runner.restart()

    def close(self) -> None:
        """Wait for running cases, then end the processes."""
        self._pool.shutdown(cancel_futures=True)
        for runner in self._runners:
            runner.close()

    def _start(self, do: Callable[[Runner, _T], _R], item: _T) -> Future[_R]:
        future = self._pool.submit(self._on_one, do, item)
        self._busy = {f for f in self._busy if not f.done()} | {future}
        return future

    def _on_one(self, do: Callable[[Runner, _T], _R], item: _T) -> _R:
        runner = self._free.get()
        try:
            return do(runner, item)
        finally:
            self._free.put(runner)


def how_many(spec: Spec, jobs: int | None) -> int:
    """Return the number of runners: `jobs`, or one per processor, at most `MOST`.

    It is 1 for a backend in this process.
    """
    return 1 if runs_here(spec) else jobs or min(MOST, cores())


def runners_of(spec: Spec, make: Callable[[], Runner], jobs: int | None = None) -> Runners | None:
    """Return `how_many` runners; None for one, which runs no experiment in advance."""
    n = how_many(spec, jobs)
    return Runners(make() for _ in range(n)) if n > 1 else None
