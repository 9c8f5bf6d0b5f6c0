"""The process that runs a backend for `IsolatedBackend`: `python -m conformance.run.isolation.worker SPEC [NAMES]`.

Frames come on what was stdin and leave on what was stdout. Both descriptors are taken away before the backend is
loaded, so nothing that a library prints can come between them: prints go to stderr, reading finds the end.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from conformance.backend.interface import Backend, Session, Support, describe
from conformance.backend.measure import Peak
from conformance.backend.registry import Spec, create
from conformance.backend.strict import plain
from conformance.case import codec
from conformance.case.case import JSON, Case
from conformance.ggml.errors import BackendError
from conformance.ggml.tensor import Bytes, Tensor, nbytes, packed_nbytes

from .definitions import take
from .frames import LONGEST_REPLY, Closed, pack_error, pack_support, receive, send
from .independence import Independence

Reply = tuple[dict[str, JSON], list[Bytes]]


class _Open:
    """An opened case, its tensors in the order in which the other side counts them."""

    def __init__(self, backend: Backend, case: Case) -> None:
        self.case = case
        start = time.perf_counter()
        self.session: Session = backend.open(case)
        self._spent = time.perf_counter() - start
        self.persistent = list(case.persistent)
        self._tensors: dict[int, list[Tensor]] = {}

    def tensors(self, step: int) -> list[Tensor]:
        if step not in self._tensors:
            self._tensors[step] = self.case.steps[step].graph.tensors()
        return self._tensors[step]

    def compute(self, step: int, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]) -> Mapping[Tensor, Bytes]:
        start = time.perf_counter()
        values = self.session.compute(self.case.steps[step].graph, inputs, outputs)
        self._spent += time.perf_counter() - start
        return values

    def seconds(self) -> JSON:
        """The session's own clock, or this one: neither counts what travels."""
        own = self.session.clock()
        return plain(self._spent if own is None else own, "clock")


class Worker:
    """One backend and its open cases, by the numbers that the other side gave them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.cases: dict[int, _Open] = {}
        self.watched = False
        """Whether the next case is to be opened under `peak`."""
        self.peak: Peak | None = None

    def close(self) -> None:
        """End every session and the backend."""
        for opened in self.cases.values():
            opened.session.close()
        self.cases.clear()
        self.backend.close()


def _supports(worker: Worker, header: dict[str, JSON], _: list[Bytes]) -> Reply:
    graph = codec.load_graph(header["graph"])
    return _answered(worker.backend.supports(graph), len(graph)), []


def _answered(supports: Sequence[Support], wanted: int) -> dict[str, JSON]:
    if len(supports) != wanted:
        raise BackendError(f"supports: an answer for each of {wanted} nodes expected, {len(supports)} found")
    return {"supports": pack_support(supports)}


def _supports_placed(worker: Worker, header: dict[str, JSON], _: list[Bytes]) -> Reply:
    graph = codec.load_graph(header["graph"])
    tensor = graph.tensors()[header["tensor"]]
    return _answered(worker.backend.supports_placed(graph, tensor, header["buffer"]), len(graph)), []


def _open(worker: Worker, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
    named = dict(zip(header["names"], blobs, strict=True))
    # Sent by this program, which validates every case that comes from elsewhere.
    case = codec.load(header["case"], named, validate=False)
    if worker.watched:
        worker.watched, worker.peak = False, Peak().__enter__()
    opened = worker.cases[header["session"]] = _Open(worker.backend, case)
    opaque = opened.session.opaque()
    listed = [i for i, t in enumerate(opened.persistent) if t in opaque]
    return {"opaque": listed, "seconds": opened.seconds()}, []


def _supports_case(worker: Worker, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
    case = codec.load(header["case"], dict(zip(header["names"], blobs, strict=True)), validate=False)
    return {"supports": pack_support([worker.backend.supports_case(case)])}, []


def _close(worker: Worker, header: dict[str, JSON], _: list[Bytes]) -> Reply:
    worker.cases.pop(header["session"]).session.close()
    return {}, []


def _write(worker: Worker, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
    opened = worker.cases[header["session"]]
    opened.session.write(opened.persistent[header["tensor"]], blobs[0])
    return {}, []


def _read(worker: Worker, header: dict[str, JSON], _: list[Bytes]) -> Reply:
    opened = worker.cases[header["session"]]
    tensor = opened.persistent[header["tensor"]]
    return {}, [_bytes(opened.session.read(tensor), nbytes(tensor), f"read of {tensor}")]


def _bytes(data: object, size: int, where: str) -> Bytes:
    """What an adapter gave as the bytes of a tensor, if that is what they are.

    Raises:
        BackendError: they are not.
    """
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
        found = f"{data.dtype}{list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise BackendError(f"{where}: {size} bytes as a uint8 array expected, {found} found")
    if data.size != size:
        raise BackendError(f"{where}: {size} bytes expected, {data.size} found")
    return data


def _compute(worker: Worker, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
    opened = worker.cases[header["session"]]
    step = opened.case.steps[header["step"]]
    tensors = opened.tensors(header["step"])
    inputs = {tensors[j]: step.inputs[tensors[j]] for j in header["kept"]}
    inputs.update((tensors[j], data) for j, data in zip(header["inputs"], blobs, strict=True))
    outputs = [tensors[j] for j in header["outputs"]]
    values = opened.compute(header["step"], inputs, outputs)
    for t in outputs:
        if t not in values:
            raise BackendError(f"compute: the bytes of {t} expected, none found")
    found = [_bytes(values[t], packed_nbytes(t), f"compute: {t}") for t in outputs]
    return {"seconds": opened.seconds()}, found


def _witness(worker: Worker, header: dict[str, JSON], _: list[Bytes]) -> Reply:
    return {"witness": describe(worker.cases[header["session"]].session.witness())}, []


def _watch(worker: Worker, _header: dict[str, JSON], _: list[Bytes]) -> Reply:
    worker.watched = True
    return {}, []


def _peak(worker: Worker, _header: dict[str, JSON], _: list[Bytes]) -> Reply:
    if worker.peak is None:
        return {"peak": None}, []
    worker.peak.__exit__(None, None, None)
    peak, worker.peak = worker.peak.bytes, None
    return {"peak": peak}, []


REQUESTS: dict[str, Callable[[Worker, dict[str, JSON], list[Bytes]], Reply]] = {
    "supports": _supports,
    "supports_placed": _supports_placed,
    "supports_case": _supports_case,
    "open": _open,
    "close": _close,
    "write": _write,
    "read": _read,
    "compute": _compute,
    "witness": _witness,
    "watch": _watch,
    "peak": _peak,
}
"""What `do` in a request's header may say -> what answers it."""


def _take_wire() -> tuple[BinaryIO, BinaryIO]:
    wire = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire


def _no_core_files() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415  # POSIX only

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _hello(backend: Backend) -> dict[str, JSON]:
    return {
        "info": describe(backend.info()),
        "arithmetic": describe(backend.arithmetic()),
        "buffer_types": [describe(b) for b in backend.buffer_types()],
        "batch": plain(backend.batch, "batch"),
        "threads": plain(backend.threads, "threads"),
        "whole": type(backend).supports_case is not Backend.supports_case,
        "stages": plain(backend.stages, "stages"),
        "options": list(inspect.signature(type(backend)).parameters),
    }


def _reply(stream: BinaryIO, reply: dict[str, JSON], blobs: Sequence[Bytes] = ()) -> None:
    """Send an answer, or that it is too long for one."""
    size = len(json.dumps(reply)) if "supports" in reply or "witness" in reply else 0
    if size > LONGEST_REPLY // 2:
        reply, blobs = (
            pack_error(BackendError(f"an answer of {LONGEST_REPLY >> 21} MiB at most expected, it is longer")),
            (),
        )
    send(stream, reply, blobs)


def main(spec: str, *names: str) -> int:
    """Serve until the other side closes the wire."""
    incoming, outgoing = _take_wire()
    _no_core_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side decides what an interrupt ends
    with incoming, outgoing:
        try:
            take(names)
            independence = Independence(Spec.parse(spec))
            backend = create(Spec.parse(spec))
            hello = _hello(backend)
        except BaseException as error:  # noqa: BLE001  # whatever it is, sys.exit too, the other side reports it
            send(outgoing, pack_error(error))
            return 0
        _reply(outgoing, hello)
        worker = Worker(backend)
        while True:
            try:
                header, blobs = receive(incoming)
            except Closed:
                break
            try:
                reply, arrays = REQUESTS[header["do"]](worker, header, blobs)
                independence.check()
            except BaseException as error:  # noqa: BLE001  # as above
                reply, arrays = pack_error(error), []
            _reply(outgoing, reply, arrays)
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
