"""Run a backend in its own process: an abort, a fault or a hang does not end the suite."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from conformance.backend.interface import Backend, BufferType, DeviceInfo, Session, Support, Witness
from conformance.backend.measure import Rise
from conformance.backend.registry import (
    REFERENCE,
    Spec,
    create,
    entry_of,
    environment,
    installed,
    is_provided,
    isa_of,
    located,
    pack,
    resolve,
)
from conformance.case import codec
from conformance.case.case import JSON, Case, Step
from conformance.case.strict import Memory, parse_json
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import (
    BackendCrashError,
    BackendError,
    BackendTimeoutError,
    CaseFileError,
    ConformanceError,
    GraphError,
    UsageError,
)
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor, nbytes, packed_nbytes
from conformance.process import FOREVER, Deadline, Worker, WorkerDiedError, WorkerTimeoutError
from conformance.process.memory import default_limit
from conformance.run.scheduler.backend import SchedBackend

from . import replies

EMULATED = 5.0
"""Factor of the time limit for an emulated device: its driver compiles a kernel for minutes."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Limits of a backend's process, and the command that runs it."""

    time_limit: float = 120.0
    """Seconds of a request (`Deadline.each`); an emulated device has `emulated_limit`."""
    memory_limit: int | None = None
    """Maximum bytes of the process; `memory.default_limit` if None."""
    under: tuple[str, ...] = ()
    """Words of a command that runs the process, such as a profiler."""
    until: Deadline = FOREVER
    """End of the run: every request ends there, and no process starts after it."""
    emulated: bool = False
    """True if a CPU emulates the device, as it does for a `Backend.fragile`."""
    emulated_limit: float | None = None
    """`time_limit` of an emulated device; None for `EMULATED` times as much."""

    def deadline(self, *, emulated: bool = False) -> Deadline:
        """Return the deadline of a request to a device, or of its opening."""
        longer = EMULATED * self.time_limit if self.emulated_limit is None else self.emulated_limit
        return self.until.request(longer if emulated else self.time_limit)


_PARSED = 1 << 28
"""Maximum bytes of memory to parse a reply header."""


def runs_here(spec: Spec) -> bool:
    """Return True for a scheduler, and the reference without `env.` and `isa`."""
    name = resolve(spec).name
    return is_provided(name) or (name == REFERENCE and not environment(spec) and not isa_of(spec))


def open_backend(spec: Spec, workers: Workers | None = None, *, own: bool = False) -> Backend:
    """Open the backend of `spec` in a process of `workers`, or in this one if `runs_here`.

    With `own` the reference gets a process too. Closing an unused backend returns its process.

    Raises:
        UsageError: the name or an option is unknown.
        UnavailableError: the machine lacks what it needs.
        BackendError: it did not open in time, or its description has wrong types.
    """
    name = resolve(spec).name
    if is_provided(name) and (environment(spec) or isa_of(spec)):
        raise UsageError(f"{spec}: set the variables and isa of its devices instead: NAME:env.VARIABLE=VALUE")
    if not runs_here(spec) or (own and not is_provided(name)):
        entry_of(name)
        return IsolatedBackend(spec, workers)
    return create(spec, partial(open_backend, workers=workers, own=own))


def process_of(backend: Backend) -> IsolatedBackend | None:
    """Return a backend that has exactly one process; None for any other."""
    return backend if isinstance(backend, IsolatedBackend) else None


def pids(backend: Backend) -> list[int]:
    """Return the pids that compute for a backend of `open_backend`."""
    devices = backend.devices if isinstance(backend, SchedBackend) else [backend]
    return list(dict.fromkeys(d.pid if isinstance(d, IsolatedBackend) else os.getpid() for d in devices))


class _Process:
    """The worker process of a backend; its death is a crash or a timeout of the backend."""

    def __init__(self, spec: Spec, workers: Workers) -> None:
        self._name, self._workers, limits = str(spec), workers, workers.isolation
        isa = isa_of(spec)
        self.worker = Worker(
            "conformance.run.isolation.worker",
            [str(located(spec)) if isa else self._name, json.dumps(pack()), json.dumps(installed())],
            deadline=limits.deadline(emulated=limits.emulated),
            memory_limit=default_limit() if limits.memory_limit is None else limits.memory_limit,
            parse=_parse,
            under=limits.under,
            emulated=limits.emulated,
            **_start(isa, _environment(spec)),
        )
        self.hello: replies.Reply = {}
        self.is_fresh = True
        """True if the process has had no request since the backend was opened."""
        self.is_used = False
        """True if a case was opened in it."""

    def ready(self) -> _Process:
        """Return itself once the backend is open; ConformanceError if it does not open."""
        try:
            self.hello = self.hello or self.ask(None, (), "opening the backend")[0]
            self.worker.emulated |= self.hello.get("fragile") is True
        except ConformanceError:
            self.worker.close()
            raise
        return self

    def ask(
        self, header: dict[str, JSON] | None, blobs: Sequence[Bytes], doing: str, sizes: Sequence[int] = ()
    ) -> tuple[dict[str, JSON], list[Bytes]]:
        """Send a request, if any, and return the reply, whose byte arrays must have `sizes`.

        ConformanceError if the adapter raised it, BackendCrashError or BackendTimeoutError.
        """
        self.is_fresh = header is None
        deadline = self._workers.isolation.deadline(emulated=self.worker.emulated)
        if header is None or header["do"] != "close":  # which is quick, and frees a session
            deadline = self._workers.timely(f"{self._name}: {doing}", deadline, opens=self.is_fresh)
        try:
            reply, found = self.worker.ask(header, blobs, sizes=sizes, deadline=deadline)
        except WorkerTimeoutError as e:
            raise BackendTimeoutError(f"{self._name}: {doing}: {e}", words="no answer") from None
        except WorkerDiedError as e:
            raise BackendCrashError(f"{self._name}: {doing}: {e}", words="\n".join(e.lines), died=e.how) from None
        return reply, [np.frombuffer(b, np.uint8) for b in found]


class Workers:
    """The idle worker processes of a run, and the limits of all."""

    def __init__(self, isolation: Isolation | None = None, *, ahead: bool = False) -> None:
        """Start no process yet; if `ahead`, start the next process of a backend in advance."""
        self.isolation = isolation or Isolation()
        self.deadline = FOREVER
        """Deadline of the current work (`within`); opening a backend may take longer."""
        self._ahead = ahead
        self._waiting: dict[Spec, list[_Process]] = {}
        """Idle processes of each backend that was opened before."""

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Limit each request in this context; after its end no process starts."""
        before, self.deadline = self.deadline, deadline
        try:
            yield
        finally:
            self.deadline = before

    def timely(self, doing: str, deadline: Deadline, *, opens: bool = False) -> Deadline:
        """Return the deadline of a request, or of an opening; BackendTimeoutError if it is over."""
        now = deadline.both(self.deadline)
        if now.is_over():
            raise BackendTimeoutError(f"{doing}: the time of the run is over", words="no answer")
        return deadline if opens else now

    def start(self, specs: Sequence[Spec]) -> None:
        """Start a process for each backend, to open them at the same time; `take` raises errors."""
        for spec in specs:
            with suppress(ConformanceError):
                if not runs_here(spec):
                    self._waiting.setdefault(spec, []).append(_Process(spec, self))

    def take(self, spec: Spec) -> _Process:
        """Return a process whose backend is open; ConformanceError as for `_Process.ready`."""
        self.timely(f"{spec}: opening the backend", self.isolation.until)
        known, process = spec in self._waiting, None
        waiting = self._waiting.setdefault(spec, [])
        while waiting and process is None:
            found = waiting.pop()
            if not found.hello or found.worker.lives():  # it may have died while idle
                with suppress(BackendCrashError, BackendTimeoutError):
                    process = found.ready()
        process = process or self._opened(spec)
        if self._ahead and known and not waiting:
            waiting.append(_Process(spec, self))
        return process

    def _opened(self, spec: Spec) -> _Process:
        """Open a backend in a new process, a second time if there was no answer in time."""
        try:
            return _Process(spec, self).ready()
        except BackendTimeoutError:
            self.timely(f"{spec}: opening the backend", self.isolation.until)
            return _Process(spec, self).ready()

    def give(self, spec: Spec, process: _Process) -> None:
        """Take back a process; end it if it was used."""
        if process.is_fresh:
            self._waiting.setdefault(spec, []).append(process)
        else:
            process.worker.close()

    def close(self) -> None:
        """End the idle processes."""
        for process in itertools.chain.from_iterable(self._waiting.values()):
            process.worker.close()
        self._waiting.clear()


def _start(isa: str, env: Mapping[str, str] | None) -> dict[str, Any]:
    if not isa:
        return {"env": env}
    from conformance.builds.emulator import start  # noqa: PLC0415  # archives: few runs emulate

    return start(isa, env)


def _environment(spec: Spec) -> dict[str, str] | None:
    """Return the environment for `spec`; None for this process's own."""
    changes = environment(spec)
    if not changes:
        return None
    unchanged = {k: v for k, v in os.environ.items() if k not in changes}
    return {**unchanged, **{k: v for k, v in changes.items() if v is not None}}


def _parse(raw: bytearray) -> Any:  # noqa: ANN401  # JSON
    """Parse the header of an untrusted reply, within limits."""
    try:
        return parse_json(memoryview(raw), Memory(_PARSED, 0), "header")
    except CaseFileError as e:
        raise ValueError(str(e)) from None


class IsolatedBackend(Backend):
    """The backend of `spec`, run by `isolation.worker`; a process that died is replaced.

    ConformanceError as for `open_backend`; BackendCrashError if the process died while it was opened.
    """

    def __init__(self, spec: Spec, workers: Workers | None = None) -> None:
        self._spec = spec
        self._workers = workers or Workers()
        self._shares = workers is not None
        self._ids = itertools.count()
        self._process: _Process | None = None
        self._sessions: list[_IsolatedSession] = []
        self.watches = False
        """True to measure the memory of the process from the next `open` on, for `risen`."""
        self._closed = False
        self._declared: tuple[Case, Arithmetic] | None = None
        process = self._alive()
        try:
            said = self._said = replies.description(process.hello)
        except BackendError as e:
            self.renew()
            raise BackendError(f"{spec}: opening the backend: {e}", words=e.words or str(e)) from None
        self.batch = said.batch  # type: ignore[misc]  # the adapter's, which lives in the other process
        self.stages = said.stages  # type: ignore[misc]  # as above
        self.threads, self.fragile = said.threads, said.fragile
        self.by_case = said.whole or said.rounds_by_case

    def takes(self, option: str) -> bool:
        """Return True if the adapter's constructor has this option."""
        return option in self._said.options

    def info(self) -> DeviceInfo:
        """Return the description that the adapter gave when it was opened."""
        return self._said.info

    def arithmetic(self) -> Arithmetic:
        """Return the description that the adapter gave when it was opened."""
        return self._said.arithmetic

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """Return the adapter's `arithmetic_in` in one round trip, if it overrides that.

        If its process dies, as it may when it runs the case, return the device's own arithmetic, so that the case can
        still shrink.
        """
        if not self._said.rounds_by_case:
            return self._said.arithmetic
        if self._declared is None or self._declared[0] is not case:
            try:
                reply, _ = self._alive().ask(*_request("arithmetic_in", case), "answering arithmetic_in")
            except BackendCrashError:
                return self._said.arithmetic
            self._declared = case, replies.unpack_arithmetic(reply, case)
        return self._declared[1]

    def buffer_types(self) -> Sequence[BufferType]:
        """Return the description that the adapter gave when it was opened."""
        return self._said.buffer_types

    def supports_op(self, node: Tensor) -> Support:
        """Ask in one round trip; `supports` takes one for a whole graph."""
        return self.supports(Graph([node]))[0]

    def supports(self, graph: Graph) -> list[Support]:
        """Return `supports_op` of every node in one round trip."""
        return self._supports(graph, "supports_op")

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """Ask in one round trip."""
        return self._supports(graph, "supports_placed", tensor=graph.tensors().index(tensor), buffer=buffer)

    def _supports(self, graph: Graph, method: str, **place: int) -> list[Support]:
        header: dict[str, JSON] = {"do": "supports", "graph": codec.dump_graph(graph), **place}
        reply, _ = self._alive().ask(header, (), f"answering {method}")
        return replies.supports(reply, len(graph))

    def renew(self) -> None:
        """End the process, its sessions and any damage; the next request starts a fresh one."""
        if self._process is not None:
            self._process.worker.close()
            self._process = None

    def supports_case(self, case: Case) -> Support:
        """Ask in one round trip, if the adapter overrides it."""
        if not self._said.whole:
            return super().supports_case(case)
        reply, _ = self._alive().ask(*_request("supports_case", case), "answering supports_case")
        return replies.supports(reply, 1)[0]

    def open(self, case: Case) -> Session:
        """Open `case` in the worker; graphs, bytes and inputs are sent once, expected values never."""
        watch, self.watches = self.watches, False
        if self.fragile and len(case.steps) > 1 and not any(s.lives() for s in self._sessions):
            self.renew()
        process = self._alive()
        session = _IsolatedSession(process, next(self._ids), case, watch=watch)
        process.is_used = True
        self._sessions = [*(s for s in self._sessions if s.lives()), session]
        return session

    def is_doubtful(self, case: Case) -> bool:
        """Return True if an earlier case may kill the process in `case`: it is fragile, and had one."""
        return self.fragile and len(case.steps) == 1 and self._process is not None and self._process.is_used

    def settle(self, turn: int) -> None:
        """Pin a single-threaded backend to the `turn`-th processor (modulo their number) on Linux.

        Processors of a shared machine differ in speed.
        """
        if self.threads == 1 and sys.platform == "linux":
            processors = sorted(os.sched_getaffinity(0))
            with suppress(OSError):  # it has died, or the system forbids it
                os.sched_setaffinity(self.pid, {processors[turn % len(processors)]})

    @property
    def pid(self) -> int:
        """The pid of the process that computes."""
        return self._alive().worker.pid

    def risen(self) -> Rise:
        """Return the increase in bytes, without those of the case; once after each `watches`."""
        reply, _ = self._alive().ask({"do": "risen"}, (), "measuring its memory")
        fits, wanted = (lambda v: v is None or replies.is_count(v)), "a whole number or nothing"
        return Rise(replies.entry(reply, "held", fits, wanted), replies.entry(reply, "peak", fits, wanted))

    def close(self) -> None:
        """End the process, or return it to its workers if it is unused."""
        self._closed = True
        if self._process is not None and self._shares:
            self._workers.give(self._spec, self._process)
            self._process = None
        self.renew()

    def _alive(self) -> _Process:
        if self._closed:
            raise BackendCrashError(f"{self._spec}: the backend is closed")
        if self._process is None or self._process.worker.death:
            self._process = self._workers.take(self._spec)
        return self._process


def _request(do: str, case: Case, **more: JSON) -> tuple[dict[str, JSON], list[Bytes]]:
    """Return header and arrays of a request with a case, without its expected values."""
    bare = replace(case, steps=[Step(s.graph, s.inputs, s.outputs) for s in case.steps])
    doc, blobs = codec.dump(bare)
    return {"do": do, "case": doc, "names": list(blobs), **more}, list(blobs.values())


class _IsolatedSession(Session):
    """A session in another process; `compute` accepts only the opened case's own graphs."""

    def __init__(self, process: _Process, number: int, case: Case, *, watch: bool) -> None:
        self._process = process
        self._closed = False
        self._number = number
        self._case = case
        self._persistent = {t: i for i, t in enumerate(case.persistent)}
        self._steps: dict[Graph, int] = {}
        for k, step in enumerate(case.steps):
            self._steps.setdefault(step.graph, k)
        self._tensors: dict[int, dict[Tensor, int]] = {}
        reply, _ = self._ask(*_request("open", case, watch=watch), "opening")
        self._seconds = replies.seconds(reply)

        def indices(v: JSON) -> bool:
            return type(v) is list and all(replies.is_count(i) and i < len(self._persistent) for i in v)

        opaque = replies.entry(reply, "opaque", indices, f"a list of indices below {len(self._persistent)}")
        self._opaque = frozenset(t for t, i in self._persistent.items() if i in opaque)

    def clock(self) -> float:
        """Return seconds spent in the worker, by the session's own clock if any, without transfers."""
        return self._seconds

    def opaque(self) -> frozenset[Tensor]:
        return self._opaque

    def write(self, tensor: Tensor, data: Bytes) -> None:
        self._ask({"do": "write", "tensor": self._index(tensor)}, [data], f"writing {tensor} of")

    def read(self, tensor: Tensor) -> Bytes:
        header: dict[str, JSON] = {"do": "read", "tensor": self._index(tensor)}
        _, blobs = self._ask(header, (), f"reading {tensor} of", [nbytes(tensor)])
        return blobs[0]

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor], *, rebuilt: bool = False
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph` of the opened case; the case's own input arrays are not sent again.

        If `rebuilt`, in reused memory as `execute.Memory` does. GraphError if `graph`, an input or an output is not of
        the case; BackendError if the backend failed, its process died, or it did not answer in time.
        """
        k = self._steps.get(graph)
        if k is None:
            raise GraphError(
                f"{self._case.id}: compute takes the graphs of the opened case only; open the case it is in"
            )
        if k not in self._tensors:
            self._tensors[k] = {t: j for j, t in enumerate(graph.tensors())}
        index = self._tensors[k]
        own = self._case.steps[k].inputs
        for t in (*inputs, *outputs):
            if t not in index:
                raise GraphError(f"{self._case.id}: steps[{k}]: {t} is not a tensor of its graph")
        fresh = [t for t, data in inputs.items() if own.get(t) is not data]
        header: dict[str, JSON] = {
            "do": "compute",
            "step": k,
            "kept": [index[t] for t, data in inputs.items() if own.get(t) is data],
            "inputs": [index[t] for t in fresh],
            "outputs": [index[t] for t in outputs],
            "rebuilt": rebuilt,
        }
        sizes = [packed_nbytes(t) for t in outputs]
        reply, blobs = self._ask(header, [inputs[t] for t in fresh], f"computing steps[{k}] of", sizes)
        self._seconds = replies.seconds(reply)
        return dict(zip(outputs, blobs, strict=True))

    def compute_rebuilt(self, step: Step) -> Mapping[Tensor, Bytes]:
        """Compute a step of the case; the worker rebuilds its graph in the previous one's memory."""
        return self.compute(step.graph, step.inputs, step.outputs, rebuilt=True)

    def witness(self) -> Witness:
        reply, _ = self._ask({"do": "witness"}, (), "reading the witness of")
        return replies.record(Witness, reply.get("witness"), "witness")

    def close(self) -> None:
        """Close the worker's session, if the worker is alive."""
        self._closed = True
        if not self._process.worker.death:
            self._ask({"do": "close"}, (), "closing")

    def lives(self) -> bool:
        """Return True if it can still compute."""
        return not self._closed and not self._process.worker.death

    def _index(self, tensor: Tensor) -> int:
        try:
            return self._persistent[tensor]
        except KeyError:
            raise GraphError(f"{self._case.id}: {tensor} is not a persistent tensor of the opened case") from None

    def _ask(
        self, header: dict[str, JSON], blobs: Sequence[Bytes], doing: str, sizes: Sequence[int] = ()
    ) -> tuple[dict[str, JSON], list[Bytes]]:
        header["session"] = self._number
        return self._process.ask(header, blobs, f"{doing} {self._case.id}", sizes)
