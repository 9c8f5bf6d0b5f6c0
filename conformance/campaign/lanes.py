"""Lanes: processes on this machine that run chunks at the same time, one on each core."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory

import psutil

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.builds.build import probe
from conformance.case.case import JSON, Case
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.process import FOREVER, Worker, WorkerDiedError
from conformance.process.memory import cores
from conformance.run.live import is_timed
from conformance.testrun import Chosen

from .chunk import Chunk, Reply
from .executor import WorkerInfo, device_of

SERVICE = "conformance.campaign.lane"
SECONDS = 2.0
"""Seconds after which a lane starts no further case of a chunk: results appear early."""
MEMORY = 2 << 30
"""Free bytes for a lane and the processes of its backends; with less, fewer lanes start."""
LEAST = 16
"""Cases for each lane; with fewer, starting one takes longer than running them."""


class Lanes:
    """`count` lanes; one that died is replaced."""

    seconds = SECONDS
    is_local = True

    def __init__(self, count: int) -> None:
        """Start the processes: they import while the caller looks for backends."""
        self.ended: queue.Queue[tuple[int, Reply | Exception]] = queue.Queue()
        self._info = {f"lane {k}": WorkerInfo(1) for k in range(1, count + 1)}
        self._waiting: list[tuple[Chunk, str | None, frozenset[str]]] = []
        self._changed = threading.Condition()
        self._open = True
        self._lanes: dict[str, Worker] = {}
        self._folder = TemporaryDirectory(prefix="conformance-lanes-", ignore_cleanup_errors=True)
        """Temporary files of the lanes, which may be ended while they use them."""
        self._threads = [threading.Thread(target=self._serve, args=(n,), name=n, daemon=True) for n in self._info]
        for thread in self._threads:
            thread.start()

    def share_devices(self, specs: Sequence[Spec]) -> None:
        """Give each lane its devices: one lane per device, all for an emulated one."""
        each = zip(self._info, devices_of(specs, len(self._info)), strict=True)
        self._info = {name: WorkerInfo(1, own) for name, own in each}

    def workers(self) -> Mapping[str, WorkerInfo]:
        """Return the lanes."""
        return self._info

    def start(self, chunk: Chunk, device: str | None, workers: Collection[str]) -> None:
        """Run a chunk on the first lane that is free and may run it."""
        with self._changed:
            self._waiting.append((chunk, device, frozenset(workers)))
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """Forget a chunk that no lane runs yet."""
        with self._changed:
            self._waiting = [w for w in self._waiting if w[0].number != number]

    def close(self) -> None:
        """End the lanes and what they run."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        for thread in self._threads:
            thread.join()
        self._folder.cleanup()

    def _serve(self, name: str) -> None:
        with suppress(Exception):  # its first chunk tells
            self._lane(name)
        while (chunk := self._next(name)) is not None:
            try:
                lane = self._lane(name)
                request: dict[str, JSON] | None = {"chunk": chunk.pack(), "lane": name}
                while not (reply := Reply(**lane.ask(request)[0]["reply"])).ended:
                    self.ended.put((chunk.number, reply))
                    request = None
                self.ended.put((chunk.number, reply))
            except WorkerDiedError as e:
                with self._changed:
                    self._lanes.pop(name, None)
                self.ended.put((chunk.number, e))
            except Exception as e:  # noqa: BLE001  # without an answer the run would wait for this lane forever
                self.ended.put((chunk.number, Reply((), f"{type(e).__name__}: {e}", name)))

    def _next(self, name: str) -> Chunk | None:
        """Wait for a chunk that this lane may run; None if there are no more."""
        with self._changed:
            while self._open:
                for i, (chunk, device, only) in enumerate(self._waiting):
                    if (not only or name in only) and (device is None or device in self._info[name].devices):
                        del self._waiting[i]
                        return chunk
                self._changed.wait()
        return None

    def _lane(self, name: str) -> Worker:
        with self._changed:
            if not self._open:
                raise WorkerDiedError("the run is over", (), "the run is over")
            if name not in self._lanes:
                # no limit of its own: each case has one, in the process of its backend
                own = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder.name)
                self._lanes[name] = Worker(SERVICE, deadline=FOREVER, env={**os.environ, **own})
            return self._lanes[name]


def shares(case: Case | str) -> bool:
    """Return True if a lane may run a case: it has an id, and measures no time."""
    return isinstance(case, str) and not is_timed(case)


def pairs_of(chosen: Chosen) -> int:
    """Return the number of pairs for lanes if this machine has all backends; opens none."""
    if chosen.only is not None:
        return sum(map(len, chosen.only.values()))
    levels = (chosen.settings.level(spec, chosen.level) for spec in chosen.asked)
    ids = (chosen.shard.share(chosen.level_ids.get(n, ())) for n in levels)
    return sum(sum(not is_timed(i) for i in own) + chosen.fresh for own in ids)


def number(jobs: int | None, cases: int) -> int:
    """Return the number of lanes for `cases` pairs of case and backend; 1 for none.

    `jobs` is the user's choice; without it, one for each core that this process may use, if memory and cases suffice.
    """
    free = psutil.virtual_memory().available // MEMORY
    return jobs or max(1, min(cores(), free, cases // LEAST))


def devices_of(specs: Sequence[Spec], workers: int) -> list[dict[str, int]]:
    """Return the devices of each worker: one worker per device, all for an emulated one."""
    resources: list[dict[str, int]] = [{} for _ in range(workers)]
    names = dict.fromkeys(filter(None, map(device_of, specs)))
    for k, device in enumerate(names):
        shared = any(device_of(s) == device and _in_software(s, device) for s in specs)
        for own in resources if shared else [resources[k % workers]]:
            own[device] = 1
    return resources


def _in_software(spec: Spec, device: str) -> bool:
    build = dict(registry.resolve(spec).options).get("lib")
    try:
        found = probe(build, registry.environment(spec), registry.isa_of(spec)).devices if build else ()
    except (UnavailableError, UsageError):  # the workers refuse it with the same message
        return False
    return any(d.name == device and d.software for d in found)
