"""Run a backend in its own process: an abort, a fault or a hang does not end the suite."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

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
from conformance.backend.strict import MAX_ENTRIES, plain
from conformance.case import codec
from conformance.case.case import JSON, Case, Step
from conformance.case.strict import Memory, parse_json
from conformance.ggml.arithmetic import Arithmetic, Mixed, faults
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
MOST = 1 << 20
"""Maximum number of cases that a backend may request in one graph."""


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
        self.hello: _Reply = {}
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

    def take(self, spec: Spec) -> _Process:
        """Return a process whose backend is open; ConformanceError as for `_Process.ready`."""
        self.timely(f"{spec}: opening the backend", self.isolation.until)
        known, process = spec in self._waiting, None
        waiting = self._waiting.setdefault(spec, [])
        while waiting and process is None:
            found = waiting.pop()
            if found.worker.lives():  # it may have died while idle
                with suppress(ConformanceError):
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
        self._watch = False
        self._closed = False
        self._declared: tuple[Case, Arithmetic] | None = None
        process = self._alive()
        try:
            self._adopt(process.hello)
        except BackendError as e:
            self.renew()
            raise BackendError(f"{spec}: opening the backend: {e}", words=e.words or str(e)) from None

    def _adopt(self, hello: _Reply) -> None:
        """Set the properties that the adapter describes; BackendError if malformed."""
        buffers = _field(hello, "buffer_types", _is_list, "a list")
        stages = _field(hello, "stages", _texts, "a list of texts")
        if "run" not in stages[-1:]:
            raise BackendError(f"stages: names of stages, the last of them 'run', expected, {stages!r:.80} found")
        batch = _field(hello, "batch", _count, "a whole number")
        if not 1 <= batch <= MOST:
            raise BackendError(f"batch: a whole number from 1 to {MOST} expected, {batch} found")
        if not buffers:
            raise BackendError("buffer_types: at least one expected (the default), none found")
        self._info = _record(DeviceInfo, hello.get("info"), "info")
        self._arithmetic = _arithmetic(hello.get("arithmetic"))
        self._buffer_types = [_record(BufferType, b, f"buffer_types[{i}]") for i, b in enumerate(buffers)]
        self.batch = batch  # type: ignore[misc]  # the adapter's, which lives in the other process
        self.threads = _field(hello, "threads", lambda v: v is None or _count(v), "a whole number or nothing")
        self.fragile = _field(hello, "fragile", lambda v: type(v) is bool, "true or false")
        self._whole = _field(hello, "whole", lambda v: type(v) is bool, "true or false")
        self._rounds_by_case = _field(hello, "by_case", lambda v: type(v) is bool, "true or false")
        self.by_case = self._whole or self._rounds_by_case
        self.stages = tuple(stages)  # type: ignore[misc]  # as above
        self._options = frozenset(_field(hello, "options", _texts, "a list of texts"))

    def takes(self, option: str) -> bool:
        """Return True if the adapter's constructor has this option."""
        return option in self._options

    def info(self) -> DeviceInfo:
        """Return the description that the adapter gave when it was opened."""
        return self._info

    def arithmetic(self) -> Arithmetic:
        """Return the description that the adapter gave when it was opened."""
        return self._arithmetic

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """Return the adapter's `arithmetic_in` in one round trip, if it overrides that.

        If its process dies, as it may when it runs the case, return the device's own arithmetic, so that the case can
        still shrink.
        """
        if not self._rounds_by_case:
            return self._arithmetic
        if self._declared is None or self._declared[0] is not case:
            try:
                reply, _ = self._alive().ask(*_request("arithmetic_in", case), "answering arithmetic_in")
            except BackendCrashError:
                return self._arithmetic
            self._declared = case, unpack_arithmetic(reply, case)
        return self._declared[1]

    def buffer_types(self) -> Sequence[BufferType]:
        """Return the description that the adapter gave when it was opened."""
        return self._buffer_types

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
        return _supports(reply, len(graph))

    def renew(self) -> None:
        """End the process, its sessions and any damage; the next request starts a fresh one."""
        if self._process is not None:
            self._process.worker.close()
            self._process = None

    def supports_case(self, case: Case) -> Support:
        """Ask in one round trip, if the adapter overrides it."""
        if not self._whole:
            return super().supports_case(case)
        reply, _ = self._alive().ask(*_request("supports_case", case), "answering supports_case")
        return _supports(reply, 1)[0]

    def open(self, case: Case) -> Session:
        """Open `case` in the worker; graphs, bytes and inputs are sent once, expected values never."""
        watch, self._watch = self._watch, False
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

    def watch(self) -> None:
        """Measure the memory of the process from the next `open` on, for `risen`."""
        self._watch = True

    def risen(self) -> Rise:
        """Return the increase in bytes, without those of the case; once after each `watch`."""
        reply, _ = self._alive().ask({"do": "risen"}, (), "measuring its memory")
        fits, wanted = (lambda v: v is None or _count(v)), "a whole number or nothing"
        return Rise(_field(reply, "held", fits, wanted), _field(reply, "peak", fits, wanted))

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
        self._seconds = _seconds(reply)

        def indices(v: JSON) -> bool:
            return type(v) is list and all(_count(i) and i < len(self._persistent) for i in v)

        opaque = _field(reply, "opaque", indices, f"a list of indices below {len(self._persistent)}")
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
        self._seconds = _seconds(reply)
        return dict(zip(outputs, blobs, strict=True))

    def compute_rebuilt(self, step: Step) -> Mapping[Tensor, Bytes]:
        """Compute a step of the case; the worker rebuilds its graph in the previous one's memory."""
        return self.compute(step.graph, step.inputs, step.outputs, rebuilt=True)

    def witness(self) -> Witness:
        reply, _ = self._ask({"do": "witness"}, (), "reading the witness of")
        return _record(Witness, reply.get("witness"), "witness")

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


# -- checks of replies, whose writer may be anyone: a missing field, or one of another type, is a `BackendError` -------

_R = TypeVar("_R", DeviceInfo, Arithmetic, BufferType, Witness)
_Reply = Mapping[str, JSON]


def _supports(reply: _Reply, wanted: int) -> list[Support]:
    found = _field(reply, "supports", lambda v: type(v) is list, "a list")
    if len(found) != wanted or not all(v is None or type(v) is str for v in found):
        raise BackendError(f"supports: yes or a reason for each of {wanted}nodes expected, other values found")
    return [Support(True) if v is None else Support(False, plain(v, "supports")) for v in found]


def unpack_arithmetic(reply: Mapping[str, JSON], case: Case) -> Arithmetic:
    """Decode the reply of a worker's `do_arithmetic_in`; BackendError if malformed."""
    kinds = [_arithmetic(a) for a in _field(reply, "arithmetics", _is_list, "a list")]
    name = _field(reply, "mixed", lambda v: v is None or _text(v), "a text or nothing")
    if name is None and len(kinds) == 1:
        return kinds[0]
    found = _field(reply, "nodes", _is_list, "a list")
    graphs = [s.graph for s in case.steps]
    fits = len(found) == len(graphs) and all(
        _is_list(own) and len(own) == len(g) and all(_count(i) and i < len(kinds) for i in own)
        for own, g in zip(found, graphs, strict=True)
    )
    if name is None or not fits:
        raise BackendError(f"nodes: one of {len(kinds)} arithmetics expected for each node, other values found")
    nodes = {n: kinds[i] for own, g in zip(found, graphs, strict=True) for n, i in zip(g, own, strict=True)}
    return Mixed(name, nodes=nodes)


def _arithmetic(value: JSON) -> Arithmetic:
    """Decode a declared arithmetic; BackendError if beyond upstream's limits."""
    found = _record(Arithmetic, value, "arithmetic")
    for fault in faults(found):
        raise BackendError(f"arithmetic: {fault}")
    return found


def _seconds(reply: _Reply) -> float:
    return float(_field(reply, "seconds", _finite, "a finite number"))


def _field(reply: _Reply, name: str, fits: Callable[[JSON], bool], wanted: str) -> JSON:
    value = reply.get(name)
    if not fits(value):
        raise BackendError(f"{name}: {wanted} expected, {value!r:.80} found")
    return value


def _record(kind: type[_R], value: JSON, where: str) -> _R:
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(kind)}:
        raise BackendError(f"{where}: the fields of {kind.__name__} expected, {value!r:.80} found")
    for f in fields(kind):
        wanted, fits = _TYPES[str(f.type)]
        if not fits(value[f.name]):
            raise BackendError(f"{where}.{f.name}: {wanted} expected, {value[f.name]!r:.80} found")
    return kind(**plain(value, where))


def _text(v: JSON) -> bool:
    return type(v) is str


def _count(v: JSON) -> bool:
    return type(v) is int and 0 <= v < 1 << 63


def _whole(v: JSON) -> bool:
    return type(v) is int and abs(v) < 1 << 63


def _finite(v: JSON) -> bool:
    return type(v) in (int, float) and math.isfinite(v)


def _is_list(v: JSON) -> bool:
    return type(v) is list and len(v) <= MAX_ENTRIES


def _texts(v: JSON) -> bool:
    return _is_list(v) and all(type(e) is str for e in v)


def _of(fits: Callable[[JSON], bool]) -> Callable[[JSON], bool]:
    return lambda v: type(v) is dict and len(v) <= MAX_ENTRIES and all(map(fits, v.values()))


_TYPES: dict[str, tuple[str, Callable[[JSON], bool]]] = {
    "str": ("a text", _text),
    "bool": ("true or false", lambda v: type(v) is bool),
    "int": ("a whole number", _whole),
    "int | None": ("a whole number or nothing", lambda v: v is None or _whole(v)),
    "list[str]": ("a list of texts", _texts),
    "dict[str, int]": ("whole numbers by name", _of(_whole)),
    "dict[str, float]": ("numbers by name", _of(_finite)),
    "Mapping[str, str]": ("texts by name", _of(_text)),
    "Mapping[str, int]": ("whole numbers by name", _of(_whole)),
    "Mapping[str, float]": ("numbers by name", _of(_finite)),
}
"""Annotation of a record's field -> its description in messages, and the check of a value."""
