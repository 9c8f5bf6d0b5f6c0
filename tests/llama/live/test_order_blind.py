"""Faults of order and lifetime, written from ggml's headers and scheduler without knowledge of the lazy device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from marks import needs_wheel

from conformance.ggml.lib.library import Library
from conformance.llama.live.lazy.device import Machine
from conformance.llama.live.lazy.programs import (
    CELLS,
    F32,
    NODES,
    PROGRAMS,
    ROW,
    WIDTH,
    Caller,
    Decoder,
    Streams,
    address,
)
from conformance.llama.live.lazy.run import Setting
from conformance.llama.live.lazy.timeline import Moment
from conformance.llama.live.lazy.worker import play

Case = Callable[["Queues", bool], None]
"""Calls of a program, with the fault if the flag is set, and right if not."""


class Queues(Streams):
    """`Streams` with a third queue of the first device; all are the CPU if the caller has no other backend."""

    def __init__(self, caller: Caller) -> None:
        many = len(caller.backends) > 1
        super().__init__(caller if many else replace(caller, backends=4 * list(caller.backends)))
        self.third = self.caller.backends[3]
        self.scheduled = [self.first, self.other, caller.backends[-1]] if many else caller.backends

    def record(self, event: int, stream: int) -> None:
        """Record an event; the CPU has none."""
        if self.events[event]:
            super().record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Wait for an event; the CPU has none."""
        if self.events[event]:
            super().wait(stream, event)

    def read(self, tensor: int, rows: int = 4) -> None:
        """Read a tensor now, without a queue."""
        self.see(self.caller.get(tensor, rows, WIDTH))


def wait_before_record(s: Queues, fault: bool) -> None:
    """A wait is issued before the record of its event."""
    s.upload(s.first, s.x, s.data[0])
    if fault:
        s.wait(s.second, 0)
    s.record(0, s.first)
    if not fault:
        s.wait(s.second, 0)
    s.double(s.second, s.x, s.y)
    s.synchronize(s.second)
    s.read(s.y)


def event_shared(s: Queues, fault: bool) -> None:
    """Two producers record one event; a wait is for the last of them alone."""
    s.upload(s.first, s.x, s.data[0])
    s.record(0, s.first)
    s.upload(s.second, s.y, s.data[1])
    s.record(0 if fault else 1, s.second)
    s.wait(s.third, 0)
    if not fault:
        s.wait(s.third, 1)
    s.double(s.third, s.x, s.v)
    s.download(s.third, s.y, s.out)
    s.synchronize(s.third)
    s.see(s.out)
    s.read(s.v)


def copy_skipped(s: Queues, fault: bool) -> None:
    """A graph reads an input that was never copied."""
    s.upload(s.first, s.x, s.data[0])
    if not fault:
        s.copy(s.first, s.other, s.x, s.z)
    s.double(s.other, s.z, s.u)
    s.synchronize(s.other)
    s.read(s.u)


def copy_source(s: Queues, fault: bool) -> None:
    """A copy names a queue that does not compute its source."""
    s.upload(s.second, s.x, s.data[0])
    s.double(s.second, s.x, s.y)
    s.copy(s.first if fault else s.second, s.other, s.y, s.z)
    s.synchronize(s.other)
    s.read(s.z)


def copy_source_overwritten(s: Queues, fault: bool) -> None:
    """Another queue overwrites the source of a queued copy."""
    s.upload(s.first, s.x, s.data[0])
    s.synchronize(s.first)
    s.copy(s.first, s.other, s.x, s.z)
    if not fault:
        s.synchronize(s.other)
    s.upload(s.second, s.x, s.data[1])
    s.synchronize(s.second)
    s.synchronize(s.other)
    s.read(s.z)
    s.read(s.x)


def copy_sibling(s: Queues, fault: bool) -> None:
    """A queue reads what a copy writes for another queue of the same device."""
    s.upload(s.other, s.z, s.data[0])
    s.copy(s.other, s.first, s.z, s.x)
    if not fault:
        s.record(0, s.first)
        s.wait(s.second, 0)
    s.double(s.second, s.x, s.y)
    s.synchronize(s.second)
    s.read(s.y)


def copy_blocking(s: Queues, fault: bool) -> None:
    """A blocking copy reads what is queued."""
    s.upload(s.first, s.x, s.data[0])
    s.double(s.first, s.x, s.y)
    if not fault:
        s.synchronize(s.first)
    s.g.backend_tensor_copy(s.y, s.z)
    s.synchronize(s.first)
    s.read(s.z)


def event_before_download(s: Queues, fault: bool) -> None:
    """The host waits for an event that precedes the download."""
    s.upload(s.first, s.x, s.data[0])
    if fault:
        s.record(0, s.first)
    s.download(s.first, s.x, s.out)
    if not fault:
        s.record(0, s.first)
    if s.events[0]:
        s.caller.call("backend_event_synchronize")(s.events[0])
    s.see(s.out)


def host_array_shared(s: Queues, fault: bool) -> None:
    """Two queues download into one array."""
    s.upload(s.first, s.x, s.data[0])
    s.synchronize(s.first)
    s.upload(s.second, s.y, s.data[1])
    s.download(s.first, s.x, s.out)
    if not fault:
        s.synchronize(s.first)
    s.download(s.second, s.y, s.out)
    s.synchronize(s.second)
    s.synchronize(s.first)
    s.see(s.out)


def row_overlap(s: Queues, fault: bool) -> None:
    """Rows 0 to 2 are written while a graph reads rows 2 and 3 of the same tensor."""
    s.upload(s.first, s.x, s.data[0])
    s.synchronize(s.first)
    with s.caller.context(1) as context:
        rows = s.caller.ops["view_2d"](context, s.x, WIDTH, 2, ROW, 2 * ROW)
        s.g.backend_view_init(rows)
        s.double(s.second, rows, s.v)
    s.upload(s.first, s.x, s.data[1][: 3 if fault else 2])
    s.synchronize(s.first)
    s.synchronize(s.second)
    s.read(s.v, 2)


def buffer_freed(s: Queues, fault: bool) -> None:
    """A buffer is freed after its writer ended, before its reader."""
    mine = Caller(s.caller.library, s.caller.backends, 0)
    (weight,) = mine.tensors(s.first, (WIDTH, 4))
    s.upload(s.first, weight, s.data[0])
    s.synchronize(s.first)
    s.double(s.second, weight, s.y)
    if not fault:
        s.synchronize(s.second)
    mine.owned.close()
    s.synchronize(s.second)
    s.read(s.y)


def backend_freed(s: Queues, fault: bool) -> None:
    """A backend is freed with a queued graph, whose result is read."""
    mine = s.g.backend_dev_init(s.caller.call("backend_get_device")(s.first), None)
    s.upload(mine, s.x, s.data[0])
    s.double(mine, s.x, s.y)
    if not fault:
        s.synchronize(mine)
    s.g.backend_free(mine)
    s.read(s.y)


class Decoded:
    """Graphs of a decoder on a scheduler, computed without waiting."""

    def __init__(self, s: Queues, *, second: bool = False, decoder: Decoder | None = None, kept: bool = True) -> None:
        """`second`: on the device's second queue; the caller frees the scheduler unless it is `kept`."""
        queues = [s.second, *s.scheduled[1:]] if second and len(s.scheduled) > 1 else s.scheduled
        self.g, self.caller = s.g, replace(s.caller, backends=queues)
        self.decoder = decoder or Decoder(self.caller, side=False)
        n = len(queues)
        self.sched = self.g.backend_sched_new((ctypes.c_void_p * n)(*queues), None, n, NODES, False, False)
        if kept:
            self.caller.owned.callback(self.g.backend_sched_free, self.sched)
            self.caller.owned.callback(self.wait)

    def wait(self) -> None:
        """Wait for all devices."""
        self.caller.call("backend_sched_synchronize")(self.sched)

    def compute(self, at: int, *, keep: bool = False) -> tuple[int, int]:
        """Queue the graph of two tokens from cell `at` on; return a node, an output if `keep`, and the output."""
        context = self.caller.owned.enter_context(self.caller.context(NODES, graph=True))
        graph, x, h = self.decoder.build(context, at, 2)
        inner: int = self.caller.library.struct(h).src[0]
        if keep:
            self.g.set_output(inner)
        self.g.backend_sched_reset(self.sched)
        assert self.g.backend_sched_alloc_graph(self.sched, graph)
        self.caller.set(x, self.caller.values(2, WIDTH))
        assert not self.caller.call("backend_sched_graph_compute_async")(self.sched, graph)
        return inner, h


def not_an_output(s: Queues, fault: bool) -> None:
    """A node that is no output is read after its graph."""
    it = Decoded(s)
    inner, h = it.compute(0, keep=not fault)
    it.wait()
    s.read(inner, 2)
    s.read(h, 2)


def after_reset(s: Queues, fault: bool) -> None:
    """An output is read after the scheduler was reset and ran another graph."""
    it = Decoded(s)
    _, h = it.compute(0)
    it.wait()
    if not fault:
        s.read(h, 2)
    it.compute(0)  # no larger, or ggml frees the buffer of `h` and crashes
    it.wait()
    if fault:
        s.read(h, 2)


def cache_set(s: Queues, fault: bool) -> None:
    """The host writes a cache between two batches that are queued."""
    it = Decoded(s)
    it.compute(0)
    if not fault:
        it.wait()
    it.caller.set(it.decoder.caches[-1], it.caller.values(CELLS, WIDTH))
    _, h = it.compute(2)
    it.wait()
    s.read(h, 2)


def strided_download(s: Queues, fault: bool) -> None:
    """The host reads rows of a strided download that it did not wait for (`get_2d_async`)."""
    s.upload(s.first, s.x, s.data[0])
    get = s.caller.call("backend_tensor_get_2d_async")
    get(s.first, s.x, address(s.out), 0, ROW, 2, 2 * ROW, 2 * ROW)
    if not fault:
        s.synchronize(s.first)
    s.see(s.out)


def copy_target_in_use(s: Queues, fault: bool) -> None:
    """A copy overwrites what its target queue still reads: it waits for `backend_src` alone."""
    s.upload(s.other, s.z, s.data[0])
    s.synchronize(s.other)
    s.upload(s.first, s.x, s.data[1])
    s.double(s.other, s.z, s.u)
    if not fault:
        s.synchronize(s.other)
    s.copy(s.first, s.other, s.x, s.z)
    s.synchronize(s.other)
    s.read(s.u)
    s.read(s.z)


def through_host(s: Queues, fault: bool) -> None:
    """One queue uploads an array that another one is still downloading into."""
    s.upload(s.first, s.x, s.data[0])
    s.download(s.first, s.x, s.out)
    if not fault:
        s.synchronize(s.first)
    s.upload(s.other, s.z, s.out)
    s.synchronize(s.other)
    s.synchronize(s.first)
    s.read(s.z)


def sync_compute_elsewhere(s: Queues, fault: bool) -> None:
    """`ggml_backend_graph_compute` waits for its own backend only."""
    s.upload(s.first, s.x, s.data[0])
    if not fault:
        s.synchronize(s.first)
    s.double(s.second, s.x, s.y)
    s.synchronize(s.second)
    s.read(s.y)


def write_write(s: Queues, fault: bool) -> None:
    """Two queues write one tensor, and the host waits for both."""
    s.upload(s.first, s.x, s.data[0])
    if not fault:
        s.record(0, s.first)
        s.wait(s.second, 0)
    s.upload(s.second, s.x, s.data[1])
    s.synchronize(s.second)
    s.synchronize(s.first)
    s.read(s.x)


def chain_short(s: Queues, fault: bool) -> None:
    """The middle queue records its event before it waits, so the third queue waits for less."""
    s.upload(s.first, s.x, s.data[0])
    s.record(0, s.first)
    if fault:
        s.record(1, s.second)
    s.wait(s.second, 0)
    if not fault:
        s.record(1, s.second)
    s.wait(s.third, 1)
    s.double(s.third, s.x, s.v)
    s.synchronize(s.third)
    s.read(s.v)


def event_stale(s: Queues, fault: bool) -> None:
    """The host waits for an event that was recorded in the round before."""
    for i in range(2):
        s.upload(s.first, s.x, s.data[i])
        if i == 0 or not fault:
            s.record(0, s.first)
        if s.events[0]:
            s.caller.call("backend_event_synchronize")(s.events[0])
        s.read(s.x)


def two_schedulers(s: Queues, fault: bool) -> None:
    """A scheduler on other queues reads the cache that one is writing."""
    a = Decoded(s)
    _, h = a.compute(0)
    if not fault:
        a.wait()
        s.read(h, 2)
    b = Decoded(s, second=True, decoder=a.decoder)
    _, h = b.compute(2)
    b.wait()
    s.read(h, 2)
    a.wait()


def output_of_another_queue(s: Queues, fault: bool) -> None:
    """An output is downloaded on a backend that did not compute it."""
    it = Decoded(s)
    _, h = it.compute(0)
    owner = s.g.backend_sched_get_tensor_backend(it.sched, h)
    other = next(b for b in s.scheduled if b != owner or len(s.scheduled) == 1)
    s.download(other if fault else owner, h, s.out[:2])
    s.synchronize(other if fault else owner)
    s.see(s.out[:2])
    it.wait()


def scheduler_freed(s: Queues, fault: bool) -> None:
    """A scheduler is freed before its last graph ended."""
    it = Decoded(s, kept=False)
    it.compute(0)
    if not fault:
        it.wait()
    s.g.backend_sched_free(it.sched)
    for backend in s.scheduled:
        s.synchronize(backend)
    s.see(s.caller.get(it.decoder.caches[-1], CELLS, WIDTH))


MOMENTS: tuple[Moment, ...] = ("last", "any")
CASES: tuple[Case, ...] = (
    wait_before_record, event_shared, copy_skipped, copy_source, copy_source_overwritten, copy_sibling,
    copy_blocking, event_before_download, host_array_shared, row_overlap, buffer_freed, backend_freed,
    not_an_output, after_reset, cache_set,
)  # fmt: skip
LATER: tuple[Case, ...] = (
    strided_download, copy_target_in_use, through_host, sync_compute_elsewhere, write_write, chain_short, event_stale,
    two_schedulers, output_of_another_queue, scheduler_freed,
)  # fmt: skip
"""Written later from sentences of ggml-backend.h, one by one."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Lazy devices of the wheel's library."""
    return Machine(Library())


@needs_wheel
@pytest.mark.parametrize("case", CASES + LATER, ids=lambda case: case.__name__)
def test_a_fault_written_from_the_headers_is_found(
    machine: Machine, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each seed, the same way every time; the same calls without the fault are right."""

    def found(lazy: Moment, seed: int, *, fault: bool) -> tuple[str, list[str]]:
        def program(caller: Caller, _: Mapping[str, Any]) -> Iterator[F32]:
            s = Queues(caller)
            case(s, fault and len(caller.backends) > 1)
            for queue in s.caller.backends[:4]:
                s.synchronize(queue)
            yield from s.seen

        monkeypatch.setitem(PROGRAMS, "streams", program)
        said = play(machine, "streams", {}, (0, 0, 1, 0), Setting((lazy,), seed))
        return said["wrong"], said["races"]

    for seed in range(3):
        for lazy in MOMENTS:
            reports = found(lazy, seed, fault=True)
            assert any(reports)
            assert found(lazy, seed, fault=True) == reports
            assert found(lazy, seed, fault=False) == ("", [])
