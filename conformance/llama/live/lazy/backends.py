"""Backends of lazy devices, each a queue, and events: functions of `ggml_backend_i`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from conformance.ggml.lib.library import Library

from .buffers import POISON, Buffers, Place
from .native import P, content, host, move, struct, text_at
from .run import Run
from .timeline import Access, Moment, Op, Queue, Race, Stamp

TRANSFERS = ("set_tensor_async", "get_tensor_async", "set_tensor_2d_async", "get_tensor_2d_async", "cpy_tensor_async")
"""Functions that a device may lack."""
SLOW = 0.05
"""Seconds that a slow event takes."""


@dataclass(slots=True, eq=False)
class _Backend:
    device: str
    queue: Queue
    struct: Any
    """`ggml_backend`, which must stay alive."""


class Backends:
    """The `ggml_backend_t` of all devices: transfers and copies on their queues."""

    def __init__(self, library: Library, run: Run, buffers: Buffers) -> None:
        self._library, self._run, self._buffers = library, run, buffers
        self._backends: dict[int, _Backend] = {}
        self._table: Any = None

    def __len__(self) -> int:
        return len(self._backends)

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of the interface that are neither of events nor of graphs."""
        return {
            "get_name": lambda b: text_at(self._backends[b].device), "free": self._free,
            **dict.fromkeys(("set_tensor_async", "set_tensor_2d_async"), lambda *a: self._transfer(True, *a)),
            **dict.fromkeys(("get_tensor_async", "get_tensor_2d_async"), lambda *a: self._transfer(False, *a)),
            "cpy_tensor_async": self._copy, "synchronize": self._synchronize,
        }  # fmt: skip

    def use(self, table: ctypes.Structure) -> None:
        """Create backends with this table from now on."""
        self._table = table

    def new(self, device: int, name: str, moment: Moment) -> int:
        """Return a new `ggml_backend_t` of a `ggml_backend_dev_t`; 0 if it fails on request."""
        if self._run.fails("init"):
            return 0
        queue = self._run.timeline.queue(name, moment)
        kind = struct("ggml_backend", ("guid", P), ("iface", type(self._table)), ("device", P), ("context", P))
        made = kind(text_at("conformance lazy"), self._table, device, None)
        for function in TRANSFERS if self._run.setting.blocking else ():
            if hasattr(self._table, function):  # an older interface lacks those of two dimensions
                setattr(made.iface, function, None)
        self._backends[ctypes.addressof(made)] = _Backend(name, queue, made)
        return ctypes.addressof(made)

    def queue(self, backend: int) -> Queue:
        """Return the queue of a `ggml_backend_t`."""
        return self._backends[backend].queue

    def _free(self, backend: int) -> None:
        queue = self._backends.pop(backend).queue
        self._run.timeline.finish(queue.last)  # orders nothing: by the contract only `synchronize` waits for the queue

    def _transfer(
        self,
        sets: bool,
        backend: int,
        tensor: int,
        data: int,
        offset: int,
        size: int,
        n: int = 1,
        step: int = 0,
        by: int = 0,
    ) -> None:
        """Queue the transfer of `n` blocks."""
        queue, call = self.queue(backend), "set_tensor_async" if sets else "get_tensor_async"
        for i in range(n):
            place = self._buffers.place(tensor, offset + i * step, size, writes=sets)
            own = host(data + i * by, size, writes=not sets)
            if sets:
                run = self._upload(queue, call, place, own)
            else:
                ctypes.memset(own.begin, POISON, size)  # no value before the host has waited
                run = partial(move, own.begin, place.real, size)
            self._run.enqueue(queue, call, (place.access, own), run)

    def _upload(self, queue: Queue, call: str, place: Place, reads: Access) -> Callable[[], None]:
        """Return the copy of host memory, which must not change before it."""
        copy = partial(move, place.real, reads.begin, reads.end - reads.begin)
        return self.watched(queue, call, (reads,), copy)

    def watched(self, queue: Queue, call: str, reads: Sequence[Access], run: Callable[[], None]) -> Callable[[], None]:
        """Return an operation that first checks that host memory did not change."""
        timeline = self._run.timeline
        before = [(Stamp(queue.name, queue.clock.get(queue.name, 0) + 1, call, r), content(r)) for r in reads]

        def check() -> None:
            for stamp, data in before:
                if content(stamp.access) != data:
                    changed = timeline.now("the caller", replace(stamp.access, writes=True))
                    timeline.report(Race(stamp, changed, kind="changed"))
            run()

        return check

    def _copy(self, from_: int, to: int, source: int, target: int) -> bool:
        """Copy on the source's queue and let the other wait, as `ggml-backend.h` says."""
        call = "cpy_tensor_async"
        if to not in self._backends:
            return False
        if from_ not in self._backends:
            return self._copy_from_host(self.queue(to), call, source, target)
        places = self._buffers.both(source, target)
        if places is None:
            return False
        a, b = places
        run = partial(move, b.real, a.real, self._library.ggml.nbytes(source))
        op = self._run.enqueue(self.queue(from_), call, (a.access, b.access), run)
        if from_ != to:
            self._run.enqueue(self.queue(to), call, after=op)
        return True

    def _copy_from_host(self, queue: Queue, call: str, source: int, target: int) -> bool:
        t, g = self._library.struct(source), self._library.ggml
        buffer = t.buffer or self._library.struct(t.view_src).buffer
        if not (self._run.setting.from_host and g.backend_buft_is_host(g.backend_buffer_get_type(buffer))):
            return False
        size = g.nbytes(source)
        place, reads = self._buffers.place(target, 0, size, writes=True), host(t.data, size, writes=False)
        self._run.enqueue(queue, call, (place.access, reads), self._upload(queue, call, place, reads))
        return True

    def _synchronize(self, backend: int) -> None:
        self._run.timeline.wait(self.queue(backend).last)


class Events:
    """The events of all devices."""

    def __init__(self, run: Run, backends: Backends) -> None:
        self._run, self._backends = run, backends
        self._events: dict[int, tuple[Op | None, Any]] = {}

    def __len__(self) -> int:
        return len(self._events)

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of a backend's table that use events."""
        return {"event_record": self._record, "event_wait": self._wait}

    def device_callbacks(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of a device's table that create, free and await events."""
        return {"event_new": self._new, "event_free": self._free, "event_synchronize": self._synchronize}

    def _new(self, device: int) -> int:
        made = struct("ggml_backend_event", ("device", P), ("context", P))(device, None)
        self._events[ctypes.addressof(made)] = None, made
        return ctypes.addressof(made)

    def _free(self, _device: int, event: int) -> None:
        del self._events[event]

    def _record(self, backend: int, event: int) -> None:
        op = self._run.enqueue(self._backends.queue(backend), "event_record")
        self._events[event] = op, self._events[event][1]

    def _wait(self, backend: int, event: int) -> None:
        self._run.enqueue(self._backends.queue(backend), "event_wait", after=self._events[event][0])

    def _synchronize(self, _device: int, event: int) -> None:
        if self._run.setting.fail.what == "event":
            time.sleep(SLOW)
        self._run.timeline.wait(self._events[event][0])
