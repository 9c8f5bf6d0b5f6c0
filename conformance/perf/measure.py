"""Measures work units: interleaved rounds of subjects, seconds of a unit on a backend.

A session may have its own clock (`Session.clock`): a backend in a worker process is timed in that process, around
`compute`, so its times exclude the pipe; graphs, weights and inputs are sent once, when the session is opened. ggml's
session excludes rebuilding its graphs through ctypes, since llama.cpp reuses a graph if only inputs changed. Any other
session in this process is timed by the caller. A scheduler runs in this process, so the transfer to its devices counts.
`Measured.elapsed` has the seconds that passed in this process, which shows the excluded time. Example: 8 tokens of a
small decoder after 512 others take 1.9 ms by the session's clock; 6.4 ms pass in this process if the session is in a
worker, 5.3 ms if it is not.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from conformance.backend.interface import Backend, Session, Witness
from conformance.case.case import Case, Step
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.process.memory import cores
from conformance.run.isolation.isolate import process_of

from .statistics import Measurements
from .units import Unit

LIFE = 0.5
"""Minimum seconds of rounds in a life.

The rounds also last as long as the start of the life, so that half of all time is used to measure."""
LIFE_ROUNDS = 4
"""Minimum rounds in a life."""
Opener = Callable[[], Backend]
"""Starts a backend; the caller closes it."""
Values = list[Mapping[Tensor, Bytes]]
"""The outputs of each timed step."""
COUNTED = {
    "compiles": "compiles", "hits": "cache_hits", "splits": "splits", "copies": "copies", "nodes": "nodes",
    "cache_bytes": "cache_bytes",
}  # fmt: skip
"""Counter in a document -> field of `Witness`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that can be measured again and again."""

    name: str
    run: Callable[[], float]
    """Measure once, timed by the subject itself; seconds."""
    renew: Callable[[], None] | None = None
    """Restarts the subject, in other memory; None if every measurement restarts it."""


class Rounds(Measurements):
    """Interleaved measurements of several subjects.

    Every second round reverses the order of the previous one, so each of two subjects is first equally often.
    After each such pair the order starts two subjects later, so that neighbours change.
    """

    def __init__(self, subjects: Sequence[Subject], clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without rounds; `clock` measures `spent`; UsageError for no or equal names."""
        names = [s.name for s in subjects]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"rounds: subjects of different names expected, {names} found")
        super().__init__(names)
        self._subjects = tuple(subjects)
        self._clock = clock

    def more(self, n: int = 1) -> None:
        """Measure `n` more rounds; a round with a failure or a time of 0 does not count."""
        start = self._clock()
        try:
            if not self.lives:
                self._begin()
            for _ in range(n):
                for name, seconds in self._round(len(self)).items():
                    self.seconds[name].append(seconds)
        finally:
            self.spent += self._clock() - start

    def live(self) -> None:
        """Restart all subjects (except for the first life), warm up, and measure some rounds.

        The number of rounds is even. If every measurement restarts its subject anyway, each pair of rounds is a life.

        Raises:
            BackendError: as `more`.
        """
        if not any(s.renew for s in self._subjects):
            if self.lives:
                self.lives.append(len(self))
            self.more(2)
            return
        start = self._clock()
        if self.lives:
            for subject in self._subjects:
                if subject.renew:
                    subject.renew()
            self._begin()
        opening = self._clock() - start
        self.spent += opening
        first, until = len(self), self.spent + max(opening, LIFE)
        while self.spent < until or len(self) < first + LIFE_ROUNDS:
            self.more(2)

    def _begin(self) -> None:
        # to warm up, in the order of the round before: the first one that counts finds the same as all others
        self._round(len(self) - 1)
        self.lives.append(len(self))

    def _round(self, r: int) -> dict[str, float]:
        measured = {}
        for i in order(r, len(self._subjects)):
            subject = self._subjects[i]
            seconds = subject.run()
            if not (math.isfinite(seconds) and seconds > 0):
                raise BackendError(f"{subject.name}: a time above 0 s expected, {seconds} s measured")
            measured[subject.name] = seconds
        return measured


def order(r: int, n: int) -> list[int]:
    """Return the order in which `n` subjects are measured in round `r`."""
    first = 2 * (r // 2)
    turn = [(first + i) % n for i in range(n)]
    return turn[::-1] if r % 2 else turn


class Measured:
    """A unit on a separate backend, so that only its own warm-up counts.

    `subject` is for `Rounds`. Unless the unit is `fresh`, its session runs the case once before anything is timed, and
    all caches are restored before each measurement.

    Raises:
        BackendError: the backend failed.
        UnavailableError: the backend is no longer available.
    """

    def __init__(self, unit: Unit, case: Case, name: str, opener: Opener) -> None:
        self.unit, self.name = unit, name
        self.error: Exception | None = None
        """The failure that ended a measurement."""
        self._clocks: list[tuple[float, float]] = []
        """Seconds charged, and seconds that passed in this process, for each measurement."""
        self.subject = Subject(name, self.run, None if unit.fresh else self._renew)
        self._case, self._opener = case, opener
        self._before, self._timed = case.steps[: unit.first], case.steps[unit.first :]
        self._total: dict[str, float] = {}
        self._during: dict[str, int] = {}
        self._changed = self._lives = 0
        self._expected: Values | None = None
        self._backend: Backend | None = None
        self._session: Session | None = None
        self._measure = self._once if unit.fresh or unit.opens else self._again
        if not unit.fresh:
            self._begin()

    def run(self) -> float:
        """Measure once, from the same state; seconds. BackendError if its clock is implausible."""
        with self._noting_errors():
            return self._measure()

    def counters(self) -> dict[str, float]:
        """Return the witness's counters; independent of the number of rounds, but for `changed`.

        Returns: `compiles`, `hits`, `splits`, `copies`, `nodes`, `bytes.NAME` and `kernels.NAME`, after the case first
        ran. `timed.compiles` and so on: the largest rise of the first five in the timed part of a measurement.
        `changed`: the number of measurements whose outputs differed from those of the first.
        """
        return {**self._total, **_named("timed", self._during), "changed": self._changed}

    def elapsed(self, seconds: Sequence[float]) -> list[float]:
        """Return the seconds that passed here while measurements were charged `seconds`."""
        clocks = iter(self._clocks)
        return [next(passed for charged, passed in clocks if charged == s) for s in seconds]

    def close(self) -> None:
        """Close the session and the backend."""
        session, self._session = self._session, None
        backend, self._backend = self._backend, None
        try:
            if session is not None:
                session.close()
        finally:
            if backend is not None:
                backend.close()

    def _start(self) -> Backend:
        backend = self._opener()
        if (own := process_of(backend)) is not None:
            # the same processor for all subjects of a life: one may be slower by half for minutes
            own.settle(self._lives)
        self._lives += 1
        return backend

    def _begin(self) -> None:
        self._backend = self._start()
        try:
            if not self.unit.opens:  # warm up
                self._session = session = self._backend.open(self._case)
                play(session, self._before)
                self._compare(play(session, self._timed))
                self._total = self._total or _totals(session.witness())
        except BaseException:
            self.close()
            raise

    def _renew(self) -> None:
        """Start another life: a new backend, warmed up like the first."""
        with self._noting_errors():
            self.close()
            self._begin()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.error = e
            raise

    def _again(self) -> float:
        session = self._session
        assert session is not None  # until it is closed
        restore(session, self._case)
        play(session, self._before)
        earlier = _counts(session.witness())
        values: Values = []
        seconds = self._clocked(session, partial(self._repeat, session, values))
        self._count(earlier, session.witness())
        self._compare(values)
        return seconds

    def _once(self) -> float:
        """Measure with a new session, and if the unit is `fresh` with a new backend."""
        backend = self._backend or self._start()
        values: Values = []
        with ExitStack() as stack:
            if backend is not self._backend:
                stack.callback(backend.close)
            sessions: list[Session] = []

            def begin() -> None:
                sessions.append(stack.enter_context(backend.open(self._case)))
                if self.unit.opens and self.unit.steps:
                    self._repeat(sessions[0], values)

            elapsed = _elapsed(begin)
            (session,) = sessions
            if self.unit.opens:
                seconds, earlier = self._charged(elapsed, session.clock()), dict.fromkeys(COUNTED, 0)
            else:
                play(session, self._before)
                earlier = _counts(session.witness())
                seconds = self._clocked(session, partial(self._repeat, session, values))
            witness = session.witness()
            self._count(earlier, witness)
            self._total = self._total or _totals(witness)
        self._compare(values)
        return seconds

    def _repeat(self, session: Session, values: Values) -> None:
        for _ in range(self.unit.repeat):
            values[:] = play(session, self._timed)

    def _clocked(self, session: Session, work: Callable[[], None]) -> float:
        before = session.clock()
        elapsed = _elapsed(work)
        after = session.clock()
        return self._charged(elapsed, None if before is None or after is None else after - before)

    def _charged(self, elapsed: float, own: float | None) -> float:
        seconds = elapsed if own is None else own
        if not 0 < seconds <= elapsed * cores():  # processor time of a compiler with threads may exceed what passed
            raise BackendError(f"{self.name}: {self.unit.name}: its clock counted {own} s, but only {elapsed} s passed")
        self._clocks.append((seconds, elapsed))
        return seconds

    def _count(self, earlier: Mapping[str, int], witness: Witness) -> None:
        for name, n in _counts(witness).items():
            self._during[name] = max(self._during.get(name, 0), n - earlier[name])

    def _compare(self, values: Values) -> None:
        if self._expected is None:
            self._expected = values
        elif not _equal(self._expected, values):
            self._changed += 1


def weights(witness: Witness, case: Case) -> int | None:
    """Return the bytes of the case's weights by the witness; None if it lists no bytes.

    OpenVINO's `constants` count once per program that reads them, so `weights`, which programs share, takes precedence;
    kernels may have `packed copies` besides. A ggml buffer holds weights and caches: the caches' size is known.
    """
    held: dict[str, int] = {}
    for name, n in witness.bytes.items():
        kind = name.rpartition(": ")[2]  # a scheduler prefixes the device
        held[kind] = held.get(kind, 0) + n
    if not held:
        return None
    if "weights" in held or "constants" in held:
        return (held.get("weights", 0) or held.get("constants", 0)) + held.get("packed copies", 0)
    rest = sum(n for kind, n in held.items() if not kind.startswith(("compute", "copied")))
    return max(0, rest - sum(nbytes(t) for t in case.caches()))


def memory(case: Case, opener: Opener) -> dict[str, float]:
    """Run `case`; return its counters, with `memory.weights` and `.peak` (bytes) if known.

    The peak is the growth of a process's resident memory, without the case's own bytes there; a backend in this process
    has none, since its memory cannot be separated from the rest.

    Raises:
        BackendError: the backend failed.
    """
    backend, peak = opener(), None
    try:
        if (own := process_of(backend)) is not None:
            own.watches = True
        with backend.open(case) as session:
            play(session, case.steps)
            peak = own.risen().peak if own is not None else None
            witness = session.witness()
    finally:
        backend.close()
    known = {"weights": weights(witness, case), "peak": peak}
    return {**_totals(witness), **_named("memory", {k: n for k, n in known.items() if n is not None})}


def play(session: Session, steps: Sequence[Step]) -> Values:
    """Compute steps in order; return the outputs of each."""
    return [session.compute(s.graph, s.inputs, s.outputs) for s in steps]


def restore(session: Session, case: Case) -> None:
    """Restore a case's caches to their initial bytes, where the session can write them."""
    opaque = session.opaque()
    for t in case.caches():
        if t not in opaque:
            session.write(t, case.persistent[t])


def _elapsed(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes, without Python's garbage collector."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def _counts(witness: Witness) -> dict[str, int]:
    return {name: getattr(witness, field) for name, field in COUNTED.items()}


def _totals(witness: Witness) -> dict[str, float]:
    return {**_counts(witness), **_named("bytes", witness.bytes), **_named("kernels", witness.kernels)}


def _named(group: str, counts: Mapping[str, float]) -> dict[str, float]:
    return {f"{group}.{name}": n for name, n in counts.items()}


def _equal(a: Values, b: Values) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(x[t].tobytes() == y[t].tobytes() for t in x) for x, y in zip(a, b, strict=True)
    )
