"""Workers of Dask: jobs of Slurm, or those of a scheduler.

`distributed` is imported on use: it is an extra. Its messages contain pickles, so anyone who can connect to a scheduler
can run code on it, on its workers and here.
"""

from __future__ import annotations

import logging
import queue
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

from conformance.ggml.errors import UnavailableError, UsageError
from conformance.process import WorkerDiedError

from .chunk import SECONDS, Chunk, Reply, run_chunk
from .executor import TaskLost, WorkerInfo

ANSWER = 10.0
"""Seconds in which a scheduler must answer."""
INSTALL = "pip install 'ggml-conformance[campaign]'"
_WORKERS = re.compile(r"slurm:(?P<n>[1-9][0-9]{0,5})|(?P<address>\w+://\S+)", re.ASCII)


class DaskPool:
    """The workers of a scheduler."""

    seconds = SECONDS
    is_local = False

    def __init__(self, target: Any, address: str) -> None:  # noqa: ANN401  # what Dask's client takes
        """Connect to `target`, a cluster or an address; UnavailableError if there is no answer."""
        from distributed import Client  # noqa: PLC0415  # an extra

        self.ended: queue.Queue[tuple[int, Reply | Exception]] = queue.Queue()
        self._address = address
        self._name = f"conform-{uuid.uuid4().hex[:12]}"
        """Part of task names, new for each start, because tasks of an earlier one may still run."""
        self._futures: dict[int, Any] = {}
        self.client = Client.__new__(Client)
        try:
            Client.__init__(self.client, target, timeout=ANSWER, set_as_default=False)
            self._scheduler = self.client.scheduler_info()["id"]
        except Exception as e:
            with suppress(Exception):  # left to the garbage collector, it waits for a lock that the next client holds
                self.client.close(timeout=ANSWER)
            # a scheme without its package or its certificates raises whatever Dask's own code stumbles over
            tls = "; certificates in Dask's configuration, distributed.comm.tls, are needed for tls://"
            hint = tls if isinstance(e, TypeError) and address.startswith("tls://") else ""
            raise UnavailableError(f"--workers {address}: a Dask scheduler expected: {e}{hint}") from e

    def workers(self) -> Mapping[str, WorkerInfo]:
        """Return address -> worker; UnavailableError if the scheduler is gone, or another answers."""
        try:
            info = self.client.scheduler_info()
        except (OSError, RuntimeError, ValueError, TimeoutError) as e:  # as Dask's client raises where it is cut off
            raise self._gone(e) from e
        if info["id"] != self._scheduler:  # the client went over to it by itself, and it knows none of the tasks
            raise self._gone("another scheduler answers")
        return {a: WorkerInfo(int(w["nthreads"]), dict(w.get("resources") or {})) for a, w in info["workers"].items()}

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Submit a task under a new name."""
        words = {"workers": sorted(workers) or None, "resources": {device: 1} if device else None, "pure": False}
        try:
            future = self.client.submit(run_chunk, chunk.pack(), key=f"{self._name}-{chunk.number}", **words)
        except (OSError, RuntimeError, ValueError) as e:
            raise self._gone(e) from e
        self._futures[chunk.number] = future
        future.add_done_callback(partial(self._done, chunk.number))

    def cancel(self, number: int) -> None:
        """Forget a task; if it runs, it runs to its end."""
        future = self._futures.pop(number, None)
        if future is not None:
            with suppress(Exception):
                future.cancel(force=True)

    def close(self) -> None:
        """Forget the running tasks, and disconnect."""
        for number in list(self._futures):
            self.cancel(number)
        with suppress(Exception):
            self.client.close(timeout=ANSWER)

    def _gone(self, why: object) -> UnavailableError:
        text = "its scheduler is gone; with --journal the same command continues"
        return UnavailableError(f"--workers {self._address}: {text}: {why}")

    def _done(self, number: int, future: Any) -> None:  # noqa: ANN401  # Dask's future
        held = self._futures.get(number)
        if held is None or held is not future:  # it was given up
            return
        del self._futures[number]
        reply: Reply | Exception
        try:
            reply = self._reply(future)
        except Exception as e:  # noqa: BLE001  # a worker may die between its answer and the moment it is fetched
            reply = TaskLost(str(e))
        self.ended.put((number, reply))
        held.release()

    def _reply(self, future: Any) -> Reply | Exception:  # noqa: ANN401  # as above
        from distributed.scheduler import KilledWorker  # noqa: PLC0415  # an extra

        if future.status == "finished":
            return Reply.unpack(future.result(timeout=ANSWER))
        if future.status != "error":
            return TaskLost(str(future.status))
        error = future.exception()
        if isinstance(error, KilledWorker):
            last = f"the last was {error.last_worker.address}"
            return WorkerDiedError(last, (), last)
        return Reply((), f"{type(error).__name__}: {error}", getattr(error, "worker", "") or "a worker")


@contextmanager
def connect(workers: str) -> Iterator[DaskPool]:
    """Start or reach workers; those started here end with the block.

    Args:
        workers: `slurm:N` as jobs, or the address of a scheduler.

    Raises:
        UsageError: other text.
        UnavailableError: a package is not installed, or no scheduler answers.
    """
    found = _WORKERS.fullmatch(workers)
    if found is None:
        raise UsageError(
            f"--workers {workers}: slurm:N or the address of a Dask scheduler expected (--jobs N: this machine)"
        )
    try:
        import distributed  # noqa: F401, PLC0415  # an extra
    except ImportError as e:
        raise UnavailableError(f"--workers needs Dask, which is not installed here ({e}): {INSTALL}") from e
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # messages about workers that died are ours
    if found["address"]:
        with closing(DaskPool(workers, workers)) as pool:
            yield pool
        return
    cluster = _slurm(int(found["n"]))
    try:
        with closing(DaskPool(cluster, str(cluster.scheduler_address))) as pool:
            yield pool
    finally:
        with suppress(TimeoutError):
            cluster.close(timeout=ANSWER)


def _slurm(workers: int) -> Any:  # noqa: ANN401  # dask-jobqueue's cluster
    try:
        from dask_jobqueue import SLURMCluster  # noqa: PLC0415  # the user's own choice
    except ImportError as e:
        raise UnavailableError(
            f"--workers slurm:N needs dask-jobqueue, which is not installed here ({e}): pip install dask-jobqueue"
        ) from e
    return SLURMCluster(n_workers=workers)
