"""Workers of Dask: a cluster on this machine, jobs of Slurm, or whatever a scheduler has.

`distributed` is imported on use: it is an extra. Its messages hold pickles, so whoever can reach a scheduler can run
code on it, on its workers and here. The cluster that is started here listens on this machine alone, and takes TLS with
a key of its own.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from conformance.ggml.errors import UnavailableError, UsageError
from conformance.process import Child, end_group, spawn

from .campaign import Died, Done, Event, Lost, Offer, Rows
from .chunk import Chunk, Reply, run_chunk

PATIENCE = 60.0
"""Seconds in which a scheduler that is gone may come again."""
ANSWER = 10.0
"""Seconds in which a scheduler must answer."""
STARTS = 20
"""Times in a row that a worker may end before its scheduler saw it."""
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

    def __init__(self, target: Any, address: str, topic: str, local: Local | None = None) -> None:  # noqa: ANN401  # what Dask's client takes
        """Connect to `target`, a cluster or an address; UnavailableError if nobody answers. `local` are its workers,
        where this process keeps them up.
        """
        self.local = local
        self.events: queue.Queue[Event] = queue.Queue()
        self._target, self._address, self._topic = target, address, topic
        self._futures: dict[int, Any] = {}
        self._client = self._connect()

    def workers(self) -> Mapping[str, Offer]:
        """Address -> worker. A scheduler that is gone has `PATIENCE` to come again; all chunks are lost then."""
        try:
            return self._workers()
        except (OSError, RuntimeError, ValueError, TimeoutError):  # as Dask's client raises them where it is cut off
            self._again()
            return self._workers()

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Submit a task under a new name."""
        number = chunk.number
        try:
            future = self._client.submit(
                run_chunk,
                chunk.pack(),
                key=f"{self._topic}-{number}",
                pure=False,
                workers=sorted(workers) or None,
                resources={device: 1} if device else None,
            )
        except (OSError, RuntimeError, ValueError):
            self.events.put(Lost(number))  # `workers` finds out why
            return
        self._futures[number] = future
        future.add_done_callback(partial(self._ended, number))

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
            self._client.close(timeout=ANSWER)

    def _workers(self) -> Mapping[str, Offer]:
        info = self._client.scheduler_info()
        if info["id"] != self._scheduler:  # the client went over to it by itself, and nobody sends it results there
            raise OSError(f"another scheduler than {self._scheduler} answers")
        found = info["workers"]
        if self.local is not None:
            self.local.keep_up({str(w["name"]) for w in found.values()})
        return {a: Offer(int(w["nthreads"]), dict(w.get("resources") or {})) for a, w in found.items()}

    def _connect(self) -> Any:  # noqa: ANN401  # Dask's client
        from distributed import Client  # noqa: PLC0415  # an extra

        client = Client.__new__(Client)
        try:
            Client.__init__(client, self._target, timeout=ANSWER, set_as_default=False)
            self._scheduler = client.scheduler_info()["id"]
        except Exception as e:
            with suppress(Exception):  # left to the garbage collector, it waits for a lock that the next client holds
                client.close(timeout=ANSWER)
            # a scheme without its package or its certificates raises whatever Dask's own code stumbles over
            tls = "; certificates in Dask's configuration, distributed.comm.tls, are needed for tls://"
            hint = tls if isinstance(e, TypeError) and self._address.startswith("tls://") else ""
            raise UnavailableError(f"--scheduler {self._address}: a Dask scheduler expected: {e}{hint}") from e
        client.subscribe_topic(self._topic, self._heard)
        return client

    def _again(self) -> None:
        lost, self._futures = list(self._futures), {}
        with suppress(Exception):
            self._client.close(timeout=1)
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                self._client = self._connect()
                break
            except UnavailableError as e:
                if time.monotonic() > ends:
                    raise UnavailableError(f"{e}; it is gone for {PATIENCE:.0f} s") from None
                time.sleep(1)
        for number in lost:
            self.events.put(Lost(number))

    def _heard(self, event: tuple[float, dict[str, Any]]) -> None:
        self.events.put(Rows(int(event[1]["number"]), event[1]["rows"]))

    def _ended(self, number: int, future: Any) -> None:  # noqa: ANN401  # Dask's future
        held = self._futures.get(number)
        if held is None or held is not future:  # it was given up
            return
        del self._futures[number]
        event: Event = Lost(number)  # a worker may die between its answer and the moment at which it is fetched
        try:
            event = self._outcome(number, future)
        finally:
            self.events.put(event)
            held.release()

    def _outcome(self, number: int, future: Any) -> Event:  # noqa: ANN401  # as above
        from distributed.scheduler import KilledWorker  # noqa: PLC0415  # an extra

        if future.status == "finished":
            return Done(number, Reply(**future.result(timeout=ANSWER)))
        if future.status != "error":
            return Lost(number)
        error = future.exception()
        if isinstance(error, KilledWorker):
            return Died(number, f"the last was {error.last_worker.address}")
        raise_at = getattr(error, "worker", "") or "a worker"
        return Done(number, Reply((), f"{type(error).__name__}: {error}", raise_at))


@contextmanager
def connect(where: Where, topic: str) -> Iterator[DaskPool]:
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
        yield from _pool(where.scheduler, where.scheduler, topic)
        return
    if where.slurm:
        cluster = _slurm(where.workers)
        try:
            yield from _pool(cluster, str(cluster.scheduler_address), topic)
        finally:
            with suppress(TimeoutError):
                cluster.close(timeout=ANSWER)
        return
    local = Local(where)
    try:
        yield from _pool(local.cluster, str(local.cluster.scheduler_address), topic, local)
    finally:
        local.close()


def _pool(target: Any, address: str, topic: str, local: Local | None = None) -> Iterator[DaskPool]:  # noqa: ANN401  # as of `DaskPool`
    pool = DaskPool(target, address, topic, local)
    try:
        yield pool
    finally:
        pool.close()


class Local:
    """A scheduler in this process, and workers of one thread each: whichever dies is started again."""

    def __init__(self, where: Where) -> None:
        """Start all of them; UnavailableError if cryptography is not installed."""
        from distributed import Scheduler, SpecCluster  # noqa: PLC0415  # an extra
        from distributed.security import Security  # noqa: PLC0415  # as above

        try:
            security = Security.temporary()
        except ImportError as e:
            raise UnavailableError(
                f"conform campaign runs its workers under TLS, by cryptography ({e}): {INSTALL}"
            ) from e
        common = {"protocol": "tls://", "host": "127.0.0.1", "security": security}
        self.cluster = SpecCluster(
            scheduler={
                "cls": Scheduler,
                "options": {**common, "dashboard": False, "dashboard_address": "127.0.0.1:0", "allowed_failures": 0},
            },
            workers={},
            security=security,
            silence_logs=logging.CRITICAL,
        )
        offers: list[dict[str, int]] = [{} for _ in range(where.workers)]
        for k, device in enumerate(where.devices):
            for offer in offers if device in where.shared else [offers[k % where.workers]]:
                offer[device] = 1
        tls = ("tls_ca_file", "tls_client_key", "tls_client_cert", "tls_worker_key", "tls_worker_cert")
        self._words = {
            "address": str(self.cluster.scheduler_address),
            "security": {"require_encryption": True, **{k: getattr(security, k) for k in tls}},
        }
        self._offers = offers
        self._starts = 0
        self._here: dict[int, Child] = {}
        self._failed: Counter[int] = Counter()
        """Times in a row that a worker ended before it was seen."""
        self.keep_up(set())

    @property
    def processes(self) -> list[Child]:
        """Of the workers."""
        return list(self._here.values())

    def keep_up(self, seen: Collection[str]) -> None:
        """Start again whatever ended; `seen` are the names of the workers that the scheduler has.

        Raises:
            UnavailableError: a worker ended so often before it was seen that it will not start here.
        """
        for k, offer in enumerate(self._offers):
            before = self._here.get(k)
            if before is not None and any(n.startswith(f"{k}.") for n in seen):
                self._failed[k] = 0
            if before is not None and before.poll() is None:
                continue
            if before is not None:
                self._end(before)
                self._failed[k] += 1
                if self._failed[k] > STARTS:
                    raise UnavailableError(
                        f"worker {k} ended {STARTS} times before it worked, exit code {before.returncode}"
                    )
            self._starts += 1
            words = {**self._words, "name": f"{k}.{self._starts}", "devices": offer}
            self._here[k] = spawn("conformance.campaign.worker", env={**THREADS, **os.environ}, stdin=subprocess.PIPE)
            stream = cast("BinaryIO", self._here[k].stdin)
            with suppress(OSError):
                stream.write(json.dumps(words).encode() + b"\n")
                stream.flush()

    @staticmethod
    def _end(child: Child) -> None:
        end_group(child)
        with suppress(OSError):
            cast("BinaryIO", child.stdin).close()

    def close(self) -> None:
        """End all of them."""
        for child in self._here.values():
            self._end(child)
        with suppress(TimeoutError):
            self.cluster.close(timeout=ANSWER)


def _slurm(workers: int) -> Any:  # noqa: ANN401  # dask-jobqueue's cluster
    try:
        from dask_jobqueue import SLURMCluster  # noqa: PLC0415  # the user's own choice
    except ImportError as e:
        raise UnavailableError(f"--slurm needs dask-jobqueue, which is not installed here ({e}): {JOBQUEUE}") from e
    return SLURMCluster(n_workers=workers)
