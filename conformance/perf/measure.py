"""Measuring a work unit on a backend: seconds of what counts and nothing else, and what the witness counted meanwhile.

Whose clock: a session may have its own (`Session.clock`). A backend in a worker process is timed over there, around
`compute`, so that the pipe is not in its figures; graphs, weights and inputs travel once, when the session is opened.
ggml's session also leaves out that its graphs are rebuilt through ctypes, as llama.cpp uses one again where nothing but
inputs changed. Every other session in this process is timed from outside, all that `compute` does included. A scheduler
stays in this process, so the way to its devices counts. `Measured.elapsed` has the seconds that passed outside, so what
was left out can be seen: of a small decoder's 8 tokens behind 512, 1.9 ms are charged in a worker as in this process,
while 6.4 ms pass outside the worker and 5.3 ms here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from conformance.backend.interface import Backend, Session, Witness
from conformance.case.case import JSON, Case, Step
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Bytes, Tensor, nbytes
from conformance.run.isolation.isolate import IsolatedBackend

from .rounds import Subject
from .units import Unit

Opener = Callable[[], Backend]
"""Gives a backend just started; whoever asked closes it."""
Values = list[Mapping[Tensor, Bytes]]
"""The outputs of each timed step."""
COUNTED = {"compiles": "compiles", "hits": "cache_hits", "splits": "splits", "copies": "copies", "nodes": "nodes"}
"""Counter in a document -> what a witness calls it."""


class Measured:
    """A unit on a backend of its own, so that nothing is warm but what it warmed up itself.

    `subject` is what `Rounds` takes. The session of a unit that is not `fresh` plays its case once before anything is
    timed, and all its caches are put back before each measurement.

    Args:
        unit: that is timed.
        case: of the unit; it has PASSed on this backend.
        name: of the backend.
        opener: starts the backend.

    Raises:
        BackendError: the backend failed.
        UnavailableError: it is not there any more.
    """

    def __init__(self, unit: Unit, case: Case, name: str, opener: Opener) -> None:
        self.unit, self.name = unit, name
        self.error: Exception | None = None
        """What ended a measurement."""
        self._clocks: list[tuple[float, float]] = []
        """Seconds charged, and those that passed here, of each measurement."""
        self.subject = Subject(name, self._guarded, None if unit.fresh else self._renew)
        self._case, self._opener = case, opener
        self._before, self._timed = case.steps[: unit.first], case.steps[unit.first :]
        self._total: dict[str, JSON] = {}
        self._during: dict[str, int] = {}
        self._changed = self._lives = 0
        self._seen: Values | None = None
        self._backend: Backend | None = None
        self._session: Session | None = None
        self._measure = self._once if unit.fresh or unit.opens else self._again
        if not unit.fresh:
            self._begin()

    def run(self) -> float:
        """One measurement, in seconds. The state that it starts from is the same each time.

        Raises:
            BackendError: the backend failed, or its clock says more than passed.
        """
        return self._measure()

    def counters(self) -> dict[str, JSON]:
        """What the witness counted.

        Returns:
            `compiles`, `hits`, `splits`, `copies`, `nodes` and `bytes` and `kernels` by name, once the case was played
            for the first time. `timed`: by how much the first five rose in the timed part of a measurement, at most.
            Neither depends on the number of rounds. `changed`: in how many measurements outputs were not the first's.
        """
        return {**self._total, "timed": dict(self._during), "changed": self._changed}

    def elapsed(self, seconds: Sequence[float]) -> list[float]:
        """What passed by this process's clock in those of its measurements that were charged `seconds`, in order."""
        clocks = iter(self._clocks)
        return [next(passed for charged, passed in clocks if charged == s) for s in seconds]

    def close(self) -> None:
        """Give the session and the backend back."""
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
        if isinstance(backend, IsolatedBackend):
            # the same for all subjects of a round: one may be slower by half for as long as a life lasts
            backend.settle(self._lives)
        self._lives += 1
        return backend

    def _begin(self) -> None:
        self._backend = self._start()
        try:
            if not self.unit.opens:
                self._warm_up(self._backend)
        except BaseException:
            self.close()
            raise

    def _renew(self) -> None:
        """Another life: the backend started anew, and warmed up as the first was."""
        try:
            self.close()
            self._begin()
        except Exception as e:
            self.error = e
            raise

    def _guarded(self) -> float:
        try:
            return self.run()
        except Exception as e:
            self.error = e
            raise

    def _warm_up(self, backend: Backend) -> None:
        self._session = session = backend.open(self._case)
        _play(session, self._before)
        self._compare(_play(session, self._timed))
        self._look(session.witness())

    def _again(self) -> float:
        session = self._session
        assert session is not None  # until it is closed
        self._restore(session)
        _play(session, self._before)
        earlier = _counts(session.witness())
        found: Values = []
        seconds = self._clocked(session, partial(self._repeat, session, found))
        self._count(earlier, session.witness())
        self._compare(found)
        return seconds

    def _once(self) -> float:
        """A session that lives for one measurement, on a backend that does, where the unit is `fresh`."""
        backend = self._backend or self._start()
        found: Values = []
        try:
            if self.unit.opens:
                session, seconds = self._opened(backend, found)
            else:
                session = backend.open(self._case)
            with session:
                _play(session, self._before)
                earlier = dict.fromkeys(COUNTED, 0) if self.unit.opens else _counts(session.witness())
                if not self.unit.opens:
                    seconds = self._clocked(session, partial(self._repeat, session, found))
                witness = session.witness()
                self._count(earlier, witness)
                self._look(witness)
        finally:
            if backend is not self._backend:
                backend.close()
        self._compare(found)
        return seconds

    def _opened(self, backend: Backend, found: Values) -> tuple[Session, float]:
        opened: list[Session] = []

        def work() -> None:
            opened.append(backend.open(self._case))
            if self.unit.steps:
                self._repeat(opened[0], found)

        try:
            elapsed = _elapsed(work)
        except BaseException:
            for session in opened:
                session.close()
            raise
        return opened[0], self._charged(elapsed, opened[0].clock())

    def _repeat(self, session: Session, found: Values) -> None:
        for _ in range(self.unit.repeat):
            found[:] = _play(session, self._timed)

    def _clocked(self, session: Session, work: Callable[[], None]) -> float:
        before = session.clock()
        elapsed = _elapsed(work)
        after = session.clock()
        return self._charged(elapsed, None if before is None or after is None else after - before)

    def _charged(self, elapsed: float, own: float | None) -> float:
        seconds = elapsed if own is None else own
        if not 0 < seconds <= elapsed:
            raise BackendError(f"{self.name}: {self.unit.name}: its clock says {own} s, of which {elapsed} s passed")
        self._clocks.append((seconds, elapsed))
        return seconds

    def _restore(self, session: Session) -> None:
        opaque = session.opaque()
        for t in self._case.caches():
            if t not in opaque:
                session.write(t, self._case.persistent[t])

    def _look(self, witness: Witness) -> None:
        if not self._total:
            self._total = {**_counts(witness), "bytes": dict(witness.bytes), "kernels": dict(witness.kernels)}

    def _count(self, earlier: Mapping[str, int], witness: Witness) -> None:
        for name, n in _counts(witness).items():
            self._during[name] = max(self._during.get(name, 0), n - earlier[name])

    def _compare(self, found: Values) -> None:
        if self._seen is None:
            self._seen = found
        elif not _equal(self._seen, found):
            self._changed += 1


def weights(witness: Witness, case: Case) -> int | None:
    """Bytes that a session holds its case's weights in, of all that its witness lists; None where it lists nothing.

    OpenVINO's `constants` are counted once per program that reads them, so `weights`, what they share, goes before
    them; kernels may keep `packed copies` beside. A ggml buffer has weights and caches: what caches take is known.
    """
    held: dict[str, int] = {}
    for name, n in witness.bytes.items():
        kind = name.rpartition(": ")[2]  # of a device of a scheduler
        held[kind] = held.get(kind, 0) + n
    if not held:
        return None
    if "weights" in held or "constants" in held:
        return (held.get("weights", 0) or held.get("constants", 0)) + held.get("packed copies", 0)
    kept = sum(n for kind, n in held.items() if not kind.startswith(("compute", "copied")))
    return max(0, kept - sum(nbytes(t) for t in case.caches()))


def memory(case: Case, opener: Opener) -> tuple[dict[str, JSON], dict[str, int | None]]:
    """The counters, and the bytes of weights held and by how much resident memory rose at most while the case ran.

    The rise is of a worker process, the case's own bytes there not counted; None for a backend that is in this one,
    where nobody can tell it from the rest.

    Raises:
        BackendError: the backend failed.
    """
    backend, peak = opener(), None
    try:
        if isinstance(backend, IsolatedBackend):
            backend.watch()
        with backend.open(case) as session:
            _play(session, case.steps)
            if isinstance(backend, IsolatedBackend):
                peak = backend.peak()
            witness = session.witness()
            counters = {**_counts(witness), "bytes": dict(witness.bytes), "kernels": dict(witness.kernels)}
    finally:
        backend.close()
    return counters, {"weights": weights(witness, case), "peak": peak}


def rate(work: int, seconds: Sequence[float]) -> float | None:
    """The median measurement's work per second; None without a measurement."""
    return work / median(seconds) if seconds else None


def _play(session: Session, steps: list[Step]) -> Values:
    return [session.compute(s.graph, s.inputs, s.outputs) for s in steps]


def _elapsed(work: Callable[[], None]) -> float:
    """Seconds that `work` takes, Python's garbage collector held back meanwhile."""
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


def _equal(a: Values, b: Values) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(x[t].tobytes() == y[t].tobytes() for t in x) for x, y in zip(a, b, strict=True)
    )
