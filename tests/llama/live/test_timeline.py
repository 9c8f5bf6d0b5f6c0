"""Virtual time: queues, events and the order of accesses, without a library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.ggml.errors import ConformanceError
from conformance.llama.live.lazy.timeline import HOST, Access, Addresses, Moment, Op, Queue, Race, Timeline

MOMENTS: tuple[Moment, ...] = ("first", "last", "any")
CALLS = st.lists(
    st.tuples(
        st.sampled_from(("write", "read", "record", "wait", "synchronize", "event", "host write", "host read")),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    max_size=20,
)
"""Calls on queue, first byte (or event) and size."""


class Program:
    """Calls on three queues of a timeline, and what their operations did."""

    def __init__(self, moment: Moment, seed: int = 0) -> None:
        self.timeline = Timeline(seed)
        self.queues = [self.timeline.queue(f"q{i}", moment) for i in range(3)]
        self.events: dict[int, Op] = {}
        self.ran: list[int] = []
        self.queued: list[tuple[Queue, int]] = []

    def call(self, kind: str, queue: int, at: int, size: int) -> None:
        """Make one call."""
        q, access = self.queues[queue], Access(at, at + size, "write" in kind, f"{kind} {at} {size}")
        if kind in ("write", "read"):
            self.queued.append((q, len(self.queued)))
            self.timeline.enqueue(q, kind, (access,), self._note(len(self.queued) - 1))
        elif kind == "record":
            self.events[at] = self.timeline.enqueue(q, kind)
        elif kind == "wait":
            self.timeline.enqueue(q, kind, after=self.events.get(at))
        elif kind == "synchronize":
            self.timeline.wait(q.last)
        elif kind == "event":
            self.timeline.wait(self.events.get(at))
        else:
            self.timeline.at_host(kind, (access,))

    def _note(self, i: int) -> Callable[[], None]:
        return lambda: self.ran.append(i)


@given(CALLS, st.integers(0, 99))
def test_races_do_not_depend_on_the_moments(calls: list[tuple[str, int, int, int]], seed: int) -> None:
    """The same calls race alike whenever their operations take effect."""
    found = []
    for moment in MOMENTS:
        program = Program(moment, seed)
        for call in calls:
            program.call(*call)
        found.append([str(race) for race in program.timeline.races])
    assert found[0] == found[1] == found[2]


@given(CALLS, st.sampled_from(MOMENTS), st.integers(0, 99))
def test_operations_of_a_queue_keep_their_order(
    calls: list[tuple[str, int, int, int]], moment: Moment, seed: int
) -> None:
    """Each operation takes effect once, after those queued before it."""
    program = Program(moment, seed)
    for call in calls:
        program.call(*call)
    program.timeline.drain()
    assert sorted(program.ran) == list(range(len(program.queued)))
    for queue in program.queues:
        own = [i for q, i in program.queued if q is queue]
        assert [i for i in program.ran if i in own] == own


@given(CALLS)
def test_a_chain_of_waits_orders_everything(calls: list[tuple[str, int, int, int]]) -> None:
    """Nothing races if the host waits after each call."""
    program = Program("last")
    for kind, queue, at, size in calls:
        program.call(kind, queue, at, size)
        program.timeline.wait(program.queues[queue].last)
    assert program.timeline.races == []


@given(CALLS)
def test_accesses_are_followed_byte_by_byte(calls: list[tuple[str, int, int, int]]) -> None:
    """The first race is found by a model that keeps every access to every byte and knows all orders."""
    program = Program("first")
    log: list[tuple[str, int, bool, set[int]]] = []
    for kind, queue, at, size in calls:
        if kind.startswith("host"):
            clock, actor = program.timeline.host, HOST
        else:
            clock, actor = program.queues[queue].clock, program.queues[queue].name
        program.call(kind, queue, at, size)
        if kind.endswith(("write", "read")):
            mine = set(range(at, at + size))
            races = any(
                (writes or "write" in kind) and mine & theirs and clock.get(other, 0) < tick
                for other, tick, writes, theirs in log
            )
            assert bool(program.timeline.races) == races
            log.append((actor, clock[actor], "write" in kind, mine))
            if races:
                return


def test_a_lazy_queue_waits_to_the_last_moment() -> None:
    """Nothing takes effect before the host waits, and then only what it waits for."""
    program = Program("last")
    for call in (("write", 0, 0, 1), ("record", 0, 0, 1), ("write", 0, 1, 1), ("write", 1, 2, 1)):
        program.call(*call)
    assert program.ran == []
    program.call("event", 0, 0, 1)
    assert program.ran == [0]
    program.call("wait", 1, 0, 1)
    program.call("synchronize", 1, 0, 1)
    assert program.ran == [0, 2]


def test_a_race_names_both_accesses_and_what_is_missing() -> None:
    """Between queues an event is missing, before the host a synchronisation."""
    program = Program("last")
    program.call("write", 0, 0, 4)
    program.call("read", 1, 2, 4)
    program.call("host write", 0, 3, 1)
    texts = [str(race) for race in program.timeline.races]
    assert texts[0] == (
        "read (q1, #1): read 2 4 is not ordered after write (q0, #1): write 0 4: "
        "no event recorded on q0 after it that q1 waits for"
    )
    assert texts[1].endswith("no ggml_backend_synchronize of q0, nor of an event recorded after it")
    assert program.ran == [0, 1]  # what follows a race has right values


def test_addresses_are_never_used_twice() -> None:
    """A buffer is found by each of its bytes, and bytes outside are refused."""
    addresses = Addresses()
    memories = [addresses.add("x", memoryview(bytearray(size))) for size in (1, 70_000, 5)]
    for memory in memories:
        last = memory.base + memory.data.nbytes - 1
        assert addresses.find(memory.base, memory.data.nbytes) is addresses.find(last, 1) is memory
        with pytest.raises(ConformanceError, match="are in no buffer"):
            addresses.find(last, 2)
    with pytest.raises(ConformanceError, match="are in no buffer"):
        addresses.find(1000, 1)


def test_races_are_kept_once_and_not_without_end() -> None:
    """A loop that races each time gives one race."""
    program = Program("last")
    for _ in range(50):
        program.call("write", 0, 0, 4)
        program.call("host read", 0, 0, 4)
    assert [type(r) for r in program.timeline.races] == [Race]


@given(st.integers(0, 99))
@settings(max_examples=10)
def test_threads_take_turns_as_the_seed_says(seed: int) -> None:
    """One runs at a time, in an order that depends on the seed alone; what they do without an order races."""

    def play() -> tuple[list[str], list[str]]:
        program, ran = Program("last", seed), list[str]()
        program.call("host write", 0, 9, 1)

        def thread(name: str) -> str:
            for i in range(4):
                program.timeline.switch()
                ran.append(f"{name}{i}")
                program.call("host read", 0, 9, 1)
            program.call("host write", 0, "ab".index(name) + 4, 1)
            program.call("host write", 0, Addresses.FIRST, 1)
            return name

        assert program.timeline.together([lambda: thread("a"), lambda: thread("b")]) == ["a", "b"]
        program.call("host write", 0, 0, 9)
        program.call("host write", 0, Addresses.FIRST, 1)
        return ran, [str(race) for race in program.timeline.races]

    ran, races = play()
    assert (ran, races) == play()
    assert [r for r in ran if r[0] == "a"] == ["a0", "a1", "a2", "a3"]
    (race,) = races
    assert f"host write {Addresses.FIRST} 1 is not ordered after" in race
    assert race.endswith("these are different threads")


@pytest.mark.parametrize(("begin", "waits", "races"), [
    (0, True, 0), (0, False, 1), (Addresses.FIRST, True, 1), (Addresses.FIRST, False, 1),
])  # fmt: skip
@pytest.mark.parametrize("first", ["a", "b"])
def test_memory_of_the_host_passes_to_another_thread(begin: int, waits: bool, races: int, first: str) -> None:
    """Once its thread has waited for what it queued there; memory of a device needs an order of its own."""
    program, turns = Program("last"), list[str]()

    def thread(name: str) -> None:
        while not turns and name != first:
            program.timeline.switch()
        turns.append(name)
        if name == first:
            program.call("host write", 0, begin, 8)
            program.call("read", 0, begin, 8)
            if waits:
                program.call("synchronize", 0, 0, 1)
        else:
            program.call("write", 1, begin, 8)

    program.timeline.together([lambda: thread("a"), lambda: thread("b")])
    assert len({str(race.earlier.actor) for race in program.timeline.races if race.earlier.call == "read"}) == races


def test_an_error_of_a_thread_is_raised() -> None:
    """The other thread runs to its end."""
    program, ran = Program("last"), list[int]()

    def broken() -> None:
        raise ConformanceError("broken")

    with pytest.raises(ConformanceError, match="broken"):
        program.timeline.together([broken, lambda: ran.append(1)])
    assert ran == [1]
