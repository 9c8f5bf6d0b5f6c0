"""Workers of Dask: a cluster on this machine, jobs of Slurm, or whatever a scheduler has.

`distributed` is imported on use: it is an extra. Its messages hold pickles, so whoever can reach a scheduler can run
code on it, on its workers and here. The cluster that is started here listens on this machine alone, and takes TLS with
a key of its own.
"""

from __future__ import annotations

import logging
import os
import queue
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from conformance.ggml.errors import UnavailableError, UsageError
from conformance.process import WorkerDiedError

from .chunk import Chunk, Reply, run_chunk
from .executor import Offer

PATIENCE = 60.0
"""Seconds in which a scheduler that is gone may come again."""
ANSWER = 10.0
"""Seconds in which a scheduler must answer."""
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""There is a worker for each core."""
INSTALL = "pip install 'ggml-conformance[campaign]'"
JOBQUEUE = "pip install dask-jobqueue"


@dataclass(frozen=True, slots=True)
class Where:
    """Which workers."""

    workers: int
    """To start here, or as jobs; 0 with a scheduler's address."""
    scheduler: str = ""
    """Address of a scheduler that has workers."""
    slurm: bool = False
    """Start workers as jobs, as the user's jobqueue.yaml says."""
    devices: tuple[str, ...] = ()
    """Devices of this machine; each goes to one of the workers started here."""
    shared: frozenset[str] = frozenset()
    """Of `devices`, those for which the processor computes: each worker has them."""


class DaskPool:
    """The workers of a scheduler."""

    def __init__(self, target: Any, address: str) -> None:  # noqa: ANN401  # what Dask's client takes
        """Connect to `target`, a cluster or an address; UnavailableError if there is no answer."""
        self.ended: queue.Queue[tuple[int, Reply | Exception]] = queue.Queue()
        self._target, self._address = target, address
        self._name = f"conform-{uuid.uuid4().hex[:12]}"
        """New for each start: a task of an earlier one may still run."""
        self._futures: dict[int, Any] = {}
        self._connect()

    def workers(self) -> Mapping[str, Offer]:
        """Address -> worker. A scheduler that is gone has `PATIENCE` to come again; all chunks are lost then."""
        try:
            return self._workers()
        except (OSError, RuntimeError, ValueError, TimeoutError):  # as Dask's client raises them where it is cut off
            self._again()
            return self._workers()

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Submit a task under a new name."""
        words = {"workers": sorted(workers) or None, "resources": {device: 1} if device else None, "pure": False}
        try:
            future = self.client.submit(run_chunk, chunk.pack(), key=f"{self._name}-{chunk.number}", **words)
        except (OSError, RuntimeError, ValueError) as e:
            self.ended.put((chunk.number, e))  # `workers` finds out why
            return
        self._futures[chunk.number] = future
        future.add_done_callback(partial(self._done, chunk.number))

    def cancel(self, number: int) -> None:
        """Forget a task; if it runs, it runs to its end."""
        future = self._futures.pop(number, None)
        if future is not None:
            with suppress(Exception):
                future.cancel(force=True)

    def close(self) -> None:
        """Forget what runs, and leave."""
        for number in list(self._futures):
            self.cancel(number)
        with suppress(Exception):
            self.client.close(timeout=ANSWER)

    def _workers(self) -> Mapping[str, Offer]:
        info = self.client.scheduler_info()
        if info["id"] != self._scheduler:  # the client went over to it by itself, and it knows none of the tasks
            raise OSError(f"another scheduler than {self._scheduler} answers")
        return {a: Offer(int(w["nthreads"]), dict(w.get("resources") or {})) for a, w in info["workers"].items()}

    def _connect(self) -> None:
        from distributed import Client  # noqa: PLC0415  # an extra

        self.client = Client.__new__(Client)
        try:
            Client.__init__(self.client, self._target, timeout=ANSWER, set_as_default=False)
            self._scheduler = self.client.scheduler_info()["id"]
        except Exception as e:
            with suppress(Exception):  # left to the garbage collector, it waits for a lock that the next client holds
                self.client.close(timeout=ANSWER)
            # a scheme without its package or its certificates raises whatever Dask's own code stumbles over
            tls = "; certificates in Dask's configuration, distributed.comm.tls, are needed for tls://"
            hint = tls if isinstance(e, TypeError) and self._address.startswith("tls://") else ""
            raise UnavailableError(f"--scheduler {self._address}: a Dask scheduler expected: {e}{hint}") from e

    def _again(self) -> None:
        lost, self._futures = list(self._futures), {}
        with suppress(Exception):
            self.client.close(timeout=1)
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                self._connect()
                break
            except UnavailableError as e:
                if time.monotonic() > ends:
                    raise UnavailableError(f"{e}; it is gone for {PATIENCE:.0f} s") from None
                time.sleep(1)
        for number in lost:
            self.ended.put((number, ConnectionError("its scheduler is gone")))

    def _done(self, number: int, future: Any) -> None:  # noqa: ANN401  # Dask's future
        held = self._futures.get(number)
        if held is None or held is not future:  # it was given up
            return
        del self._futures[number]
        reply: Reply | Exception
        try:
            reply = self._reply(future)
        except Exception as e:  # noqa: BLE001  # a worker may die between its answer and the moment it is fetched
            reply = e
        self.ended.put((number, reply))
        held.release()

    def _reply(self, future: Any) -> Reply | Exception:  # noqa: ANN401  # as above
        from distributed.scheduler import KilledWorker  # noqa: PLC0415  # an extra

        if future.status == "finished":
            return Reply.unpack(future.result(timeout=ANSWER))
        if future.status != "error":
            return ConnectionError(str(future.status))
        error = future.exception()
        if isinstance(error, KilledWorker):
            last = f"the last was {error.last_worker.address}"
            return WorkerDiedError(last, (), last)
        return Reply((), f"{type(error).__name__}: {error}", getattr(error, "worker", "") or "a worker")


@contextmanager
def connect(where: Where) -> Iterator[DaskPool]:
    """The workers of `where`, which end with the block where they were started here.

    Raises:
        UsageError: words that exclude each other.
        UnavailableError: a package is not installed, or no scheduler answers.
    """
    if where.scheduler and where.slurm:
        raise UsageError(
            "--scheduler and --slurm: one of them expected: a scheduler has its workers, or jobs are started"
        )
    try:
        import distributed  # noqa: F401, PLC0415  # an extra
    except ImportError as e:
        raise UnavailableError(f"conform campaign needs Dask, which is not installed here ({e}): {INSTALL}") from e
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # the campaign says itself who died
    if where.scheduler:
        with closing(DaskPool(where.scheduler, where.scheduler)) as pool:
            yield pool
        return
    cluster = _slurm(where.workers) if where.slurm else _local(where)
    try:
        with closing(DaskPool(cluster, str(cluster.scheduler_address))) as pool:
            yield pool
    finally:
        with suppress(TimeoutError):
            cluster.close(timeout=ANSWER)


def _local(where: Where) -> Any:  # noqa: ANN401  # Dask's cluster
    """A scheduler in this process, and workers of one thread each: a nanny starts again whichever dies.

    UnavailableError if cryptography is not installed.
    """
    from distributed import Nanny, Scheduler, SpecCluster  # noqa: PLC0415  # an extra
    from distributed.security import Security  # noqa: PLC0415  # as above

    try:
        security = Security.temporary()
    except ImportError as e:
        raise UnavailableError(f"conform campaign runs its workers under TLS, by cryptography ({e}): {INSTALL}") from e
    offers: list[dict[str, int]] = [{} for _ in range(where.workers)]
    for k, device in enumerate(where.devices):
        for offer in offers if device in where.shared else [offers[k % where.workers]]:
            offer[device] = 1
    common = {"protocol": "tls://", "host": "127.0.0.1", "security": security, "dashboard_address": "127.0.0.1:0"}
    worker = {
        **common,
        "nthreads": 1,
        "dashboard": False,
        "env": {k: os.environ.get(k, v) for k, v in THREADS.items()},
        "memory_limit": 0,  # the keeper limits the processes of backends
        "preload": [run_chunk.__module__],
        "silence_logs": logging.CRITICAL,
    }
    scheduler = {**common, "dashboard": False, "allowed_failures": 0}
    return SpecCluster(
        scheduler={"cls": Scheduler, "options": scheduler},
        workers={k: {"cls": Nanny, "options": {**worker, "resources": offer}} for k, offer in enumerate(offers)},
        security=security,
        silence_logs=logging.CRITICAL,
    )


def _slurm(workers: int) -> Any:  # noqa: ANN401  # dask-jobqueue's cluster
    try:
        from dask_jobqueue import SLURMCluster  # noqa: PLC0415  # the user's own choice
    except ImportError as e:
        raise UnavailableError(f"--slurm needs dask-jobqueue, which is not installed here ({e}): {JOBQUEUE}") from e
    return SLURMCluster(n_workers=workers)
