"""Queues in virtual time, and the order of what they and the host do.

A queued operation takes effect at the first legal moment, at the last, or at any: when the host waits for it, or
earlier, as a seed decides. Order is followed with vector clocks, whatever the moments are: two accesses to the same
bytes, one of them a write, must be ordered by a queue, an event or a synchronisation. Threads that `Timeline.together`
starts are ordered by their start and end only, and take turns by the seed; all others count as the host, because this
module cannot see how they wait for each other.

Nor does it see the host's allocator, through which memory passes from one thread to another. So an access to memory of
the host orders all that follow as soon as one thread has waited for it; memory of a device has an address of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Condition, Thread, get_ident
from typing import Literal, TypeVar

from conformance.ggml.errors import ConformanceError

Moment = Literal["first", "last", "any"]
HOST = "host"
"""The actor of the host, and the beginning of those of its threads."""
MOST = 20
"""Maximum number of races that are kept."""
PACES = (0.02, 0.2, 0.8)
"""Paces of queues whose operations take effect at any moment."""
T = TypeVar("T")
Clock = dict[str, int]
"""Actor -> the number of its operations that happened before."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an operation reads or writes."""

    begin: int
    end: int
    writes: bool
    what: str = ""
    """The access, such as `MUL_MAT h-1 reads w-1`."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """An access with its actor and time."""

    actor: str
    """`host`, one of its threads, or the name of a queue."""
    tick: int
    call: str
    """The function of the interface, such as `graph_compute`."""
    access: Access

    def __str__(self) -> str:
        return f"{self.call} ({self.actor}, #{self.tick}): {self.access.what}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses without order."""

    earlier: Stamp
    """The access that was called first."""
    later: Stamp
    kind: Literal["order", "freed", "changed"] = "order"
    """`freed`: the memory was freed before; `changed`: the host changed bytes too early."""

    def __str__(self) -> str:
        if self.kind == "freed":
            return f"{self.later}, after {self.earlier}"
        if self.kind == "changed":
            return f"{self.earlier} that changed before they were read: no wait for {self.earlier.actor}"
        a, b = self.earlier.actor, self.later.actor
        if a.startswith(HOST):
            missing = "these are different threads"
        elif b.startswith(HOST):
            missing = f"no ggml_backend_synchronize of {a}, nor of an event recorded after it"
        else:
            missing = f"no event recorded on {a} after it that {b} waits for"
        return f"{self.later} is not ordered after {self.earlier}: {missing}"


@dataclass(slots=True)
class _Cell:
    """The last write to some bytes, and the reads since."""

    writer: Stamp | None = None
    readers: dict[str, Stamp] = field(default_factory=dict)


class Shadow:
    """The accesses to each byte of the address space."""

    def __init__(self) -> None:
        self._starts = [0]
        self._cells = [_Cell()]

    def touch(self, stamp: Stamp, clock: Clock) -> Iterator[Stamp]:
        """Record an access; yield the earlier ones that it races with.

        These are conflicting accesses that `clock` does not order before it.
        """
        access = stamp.access
        if access.begin >= access.end:
            return
        i, j = self._cut(access.begin), self._cut(access.end)
        for cell in self._cells[i:j]:
            before = [cell.writer] if cell.writer is not None else []
            before += cell.readers.values() if access.writes else ()
            yield from (s for s in before if clock.get(s.actor, 0) < s.tick)
            if not access.writes:
                cell.readers[stamp.actor] = stamp
        if access.writes:
            self._starts[i:j], self._cells[i:j] = [access.begin], [_Cell(stamp)]

    def _cut(self, at: int) -> int:
        """Return the index of the cell that begins at an address, cutting one in two if necessary."""
        i = bisect_left(self._starts, at)
        if i == len(self._starts) or self._starts[i] != at:
            cell = self._cells[i - 1]
            self._starts.insert(i, at)
            self._cells.insert(i, _Cell(cell.writer, dict(cell.readers)))
        return i


@dataclass(slots=True, eq=False)
class Op:
    """A queued operation."""

    queue: Queue
    clock: Clock
    """All that happens before its end, and itself."""
    run: Callable[[], None] | None
    after: Op | None
    """An operation of another queue that it waits for."""
    done: bool = False


@dataclass(slots=True, eq=False)
class Queue:
    """Operations that take effect in order."""

    name: str
    moment: Moment
    pace: float = 1.0
    """Chance that its next operation takes effect, each time that anything is called."""
    clock: Clock = field(default_factory=dict)
    pending: deque[Op] = field(default_factory=deque)
    last: Op | None = None


@dataclass(slots=True, eq=False)
class _Thread:
    """A thread of the host."""

    actor: str
    clock: Clock
    runs: bool = True


class Timeline:
    """All queues of a process, the host, and the races between them."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)  # noqa: S311  # a schedule, no secret
        self.host: Clock = {}
        self._main = _Thread(HOST, self.host)
        self._threads: dict[int, _Thread] = {}
        """Threads that take turns, by `get_ident`."""
        self._alternating: Sequence[_Thread] = ()
        self._running = self._main
        """The thread whose turn it is."""
        self._turn = Condition()
        self._turns = Random(seed)  # noqa: S311  # as above
        self.queues: list[Queue] = []
        self.races: list[Race] = []
        self._shadow = Shadow()

    def queue(self, name: str, moment: Moment) -> Queue:
        """Return a new queue, whose name is made unique."""
        n = sum(q.name.partition(".")[0] == name for q in self.queues)
        queue = Queue(f"{name}.{n}" if n else name, moment, self._pace(moment))
        self.queues.append(queue)
        return queue

    def _pace(self, moment: Moment) -> float:
        return {"first": 1.0, "last": 0.0, "any": self.random.choice(PACES)}[moment]

    def enqueue(
        self,
        queue: Queue,
        call: str,
        accesses: Sequence[Access] = (),
        run: Callable[[], None] | None = None,
        after: Op | None = None,
    ) -> Op:
        """Append an operation to a queue and return it; with `after` it waits for that one."""
        _join(queue.clock, self._me().clock)
        if after is not None:
            _join(queue.clock, after.clock)
        self._check(queue.name, queue.clock, call, accesses)
        op = Op(queue, dict(queue.clock), run, after)
        queue.pending.append(op)
        queue.last = op
        self._advance()
        return op

    def at_host(self, call: str, accesses: Sequence[Access]) -> None:
        """Record what the host itself does, at once."""
        self._advance()
        me = self._me()
        self._check(me.actor, me.clock, call, accesses)

    def now(self, call: str, access: Access) -> Stamp:
        """Return an access of the host after all that it did."""
        me = self._me()
        return Stamp(me.actor, me.clock.get(me.actor, 0), call, access)

    def _me(self) -> _Thread:
        return self._threads.get(get_ident(), self._main)

    def wait(self, op: Op | None) -> None:
        """Let the host wait for an operation: it and all that it waits for take effect."""
        self.finish(op)
        if op is not None:
            _join(self._me().clock, op.clock)

    def together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions in a thread each, one at a time; `switch` lets another go on.

        A thread starts after all that the host did, and the host goes on after all of them. Raises as the first that
        does.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        self._alternating = threads = [_Thread(f"{HOST}.{i}", dict(self.host)) for i in range(len(functions))]

        def run(i: int) -> None:
            self._threads[get_ident()] = me = threads[i]
            self._wait_for(me)
            try:
                results[i] = functions[i]()
            except BaseException as e:  # noqa: BLE001  # raised below
                errors.append(e)
            me.runs = False
            self._pass_on()

        started = [Thread(target=run, args=(i,)) for i in range(len(functions))]
        self._running = threads[0]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        self._threads.clear()
        for each in threads:
            _join(self.host, each.clock)
        if errors:
            raise errors[0]
        return [results[i] for i in range(len(functions))]

    def switch(self) -> None:
        """Let a thread of `together` go on, as the seed says, and wait for this one's turn."""
        me = self._me()
        if me is not self._main:
            self._pass_on()
            self._wait_for(me)

    def _pass_on(self) -> None:
        with self._turn:
            self._running = self._turns.choice([t for t in self._alternating if t.runs] or [self._main])
            self._turn.notify_all()

    def _wait_for(self, me: _Thread) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._running is me)

    def drain(self) -> None:
        """Let everything take effect, without any order for the host."""
        for queue in self.queues:
            self.finish(queue.last)

    def finish(self, op: Op | None) -> None:
        """Let an operation and all that it waits for take effect, without any order for the host."""
        while op is not None and not op.done:
            self.finish(op.queue.pending[0].after)
            self._step(op.queue)

    def report(self, race: Race) -> None:
        """Keep a race, once for each pair of accesses."""
        pair = (race.earlier.call, race.earlier.access, race.later.call, race.later.access)
        known = ((r.earlier.call, r.earlier.access, r.later.call, r.later.access) for r in self.races)
        if len(self.races) < MOST and pair not in known:
            self.races.append(race)

    def _check(self, actor: str, clock: Clock, call: str, accesses: Sequence[Access]) -> None:
        clock[actor] = clock.get(actor, 0) + 1
        found = False
        for access in accesses:
            stamp = Stamp(actor, clock[actor], call, access)
            for earlier in self._shadow.touch(stamp, clock):
                if access.begin < Addresses.FIRST and self._is_over(earlier):
                    continue
                self.report(Race(earlier, stamp))
                found = True
        if found:
            self.drain()  # what follows has right values: a stale index would abort the process before the report

    def _is_over(self, stamp: Stamp) -> bool:
        """Return True if a thread has waited for an access: its memory may be another's since."""
        threads = (self._main, *self._alternating)
        return any(t.clock.get(stamp.actor, 0) >= stamp.tick for t in threads)

    def _advance(self) -> None:
        """Let those operations take effect whose queues are not lazy."""
        moved = True
        while moved:
            moved = False
            for queue in self.queues:
                while queue.pending and self._may_run(queue):
                    self._step(queue)
                    moved = True

    def _may_run(self, queue: Queue) -> bool:
        after = queue.pending[0].after
        if after is not None and not after.done:
            return False
        return self.random.random() < queue.pace

    @staticmethod
    def _step(queue: Queue) -> None:
        op = queue.pending.popleft()
        op.done = True
        if op.run is not None:
            op.run()


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if tick > clock.get(actor, 0):
            clock[actor] = tick


@dataclass(slots=True)
class Memory:
    """A buffer of a device: its addresses mean nothing to the host, which faults if it uses one."""

    name: str
    base: int
    data: memoryview
    freed: Stamp | None = None


class Addresses:
    """The buffers of all devices; no address is used twice."""

    FIRST = 1 << 54
    """Above the addresses of any process."""
    STEP = 1 << 16
    """Multiple of each base, and minimum distance of two buffers, in bytes."""

    def __init__(self) -> None:
        self._next = self.FIRST
        self._bases: list[int] = []
        self._memories: list[Memory] = []

    def add(self, name: str, data: memoryview) -> Memory:
        """Return a new buffer."""
        memory = Memory(f"{name}#{len(self._memories)}", self._next, data)
        self._next += (data.nbytes // self.STEP + 2) * self.STEP
        self._bases.append(memory.base)
        self._memories.append(memory)
        return memory

    def find(self, begin: int, size: int) -> Memory:
        """Return the buffer of some bytes, maybe a freed one; ConformanceError if there is none."""
        i = bisect_right(self._bases, begin) - 1
        if i < 0 or begin + size > self._bases[i] + self._memories[i].data.nbytes:
            raise ConformanceError(f"{size} bytes at {begin:#x} are in no buffer of this device")
        return self._memories[i]
