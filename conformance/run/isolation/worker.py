"""The service of `IsolatedBackend`: one backend, with arguments `SPEC [NAMES [INSTALLED]]`."""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import sys
from collections.abc import Sequence

import numpy as np

from conformance.backend.interface import Backend, Session, Support, describe
from conformance.backend.measure import Peak, clock_of, held
from conformance.backend.registry import Spec, adopt, create, unpack
from conformance.backend.strict import plain, shortened
from conformance.case import codec
from conformance.case.case import JSON, Case, Step
from conformance.ggml.arithmetic import EXACT, Mixed
from conformance.ggml.errors import BY_NAME, BackendError, CaseFileError, ConformanceError
from conformance.ggml.lib.echo import ECHO
from conformance.ggml.tensor import Bytes, Tensor, nbytes, packed_nbytes
from conformance.process.service import LONGEST_REPLY, Service
from conformance.run.execute import Memory

from .independence import Independence

Reply = tuple[dict[str, JSON], Sequence[Bytes]]


class _Open:
    """An open case; tensors are indices in `Graph.tensors` and `Case.persistent`."""

    def __init__(self, backend: Backend, case: Case) -> None:
        self.case = case
        self.clock = clock_of(backend.threads)
        start = self.clock()
        self.session: Session = backend.open(case)
        self.spent = self.clock() - start
        self.persistent = list(case.persistent)
        self.memory = Memory(case)
        """Memory for rebuilt graphs."""
        self._tensors: dict[int, list[Tensor]] = {}

    def tensors(self, step: int) -> list[Tensor]:
        if step not in self._tensors:
            self._tensors[step] = self.case.steps[step].graph.tensors()
        return self._tensors[step]

    def seconds(self) -> JSON:
        """Return the session's own clock, or ours; both exclude the transfer."""
        own = self.session.clock()
        return plain(self.spent if own is None else own, "clock")


class _Worker:
    """One backend and its open cases by the caller's numbers; `do_X` answers the request `X`."""

    def __init__(self, backend: Backend, independence: Independence, libraries: Sequence[str]) -> None:
        self.backend = backend
        self._libraries = list(libraries)
        """Libraries from `info`, for a witness without any."""
        self.independence = independence
        self.cases: dict[int, _Open] = {}
        self._peak: Peak | None = None
        self._before: int | None = None
        """Bytes of the process when the measurement began, including the case."""

    def close(self) -> None:
        for opened in self.cases.values():
            opened.session.close()
        self.cases.clear()
        self.backend.close()

    def do_supports(self, header: dict[str, JSON], _: list[Bytes]) -> Reply:
        graph = codec.load_graph(header["graph"])
        if "buffer" not in header:
            return _pack_support(self.backend.supports(graph), len(graph))
        tensor = graph.tensors()[header["tensor"]]
        return _pack_support(self.backend.supports_placed(graph, tensor, header["buffer"]), len(graph))

    def do_supports_case(self, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
        return _pack_support([self.backend.supports_case(_case(header, blobs))], 1)

    def do_arithmetic_in(self, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
        """Return the arithmetic; for a mixed one its name, its kinds, and their index per node."""
        case = _case(header, blobs)
        found = self.backend.arithmetic_in(case)
        if not isinstance(found, Mixed):
            return {"arithmetics": [describe(found)], "mixed": None, "nodes": []}, []
        each = [[found.nodes.get(n, EXACT) for n in s.graph] for s in case.steps]
        kinds = list({id(a): a for own in each for a in own}.values())
        at = {id(a): i for i, a in enumerate(kinds)}
        nodes = [[at[id(a)] for a in own] for own in each]
        return {"arithmetics": [describe(a) for a in kinds], "mixed": plain(found.name, "name"), "nodes": nodes}, []

    def do_open(self, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
        case = _case(header, blobs)
        if header["watch"]:
            self._before = held()
            self._peak = Peak().__enter__()
        opened = self.cases[header["session"]] = _Open(self.backend, case)
        opaque = opened.session.opaque()
        listed = [i for i, t in enumerate(opened.persistent) if t in opaque]
        return {"opaque": listed, "seconds": opened.seconds()}, []

    def do_close(self, header: dict[str, JSON], _: list[Bytes]) -> Reply:
        self.cases.pop(header["session"]).session.close()
        return {}, []

    def do_write(self, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
        opened = self.cases[header["session"]]
        opened.session.write(opened.persistent[header["tensor"]], blobs[0])
        return {}, []

    def do_read(self, header: dict[str, JSON], _: list[Bytes]) -> Reply:
        opened = self.cases[header["session"]]
        tensor = opened.persistent[header["tensor"]]
        return {}, [_bytes(opened.session.read(tensor), nbytes(tensor), f"read of {tensor}")]

    def do_compute(self, header: dict[str, JSON], blobs: list[Bytes]) -> Reply:
        opened = self.cases[header["session"]]
        step = opened.case.steps[header["step"]]
        tensors = opened.tensors(header["step"])
        inputs = {tensors[j]: step.inputs[tensors[j]] for j in header["kept"]}
        inputs.update((tensors[j], data) for j, data in zip(header["inputs"], blobs, strict=True))
        outputs = [tensors[j] for j in header["outputs"]]
        start = opened.clock()
        if header["rebuilt"]:
            values = opened.memory.compute(opened.session, Step(step.graph, inputs, tuple(outputs)))
        else:
            values = opened.session.compute(step.graph, inputs, outputs)
        opened.spent += opened.clock() - start
        for t in outputs:
            if t not in values:
                raise BackendError(f"compute: the bytes of {t} expected, none found")
        found = [_bytes(values[t], packed_nbytes(t), f"compute: {t}") for t in outputs]
        return {"seconds": opened.seconds()}, found

    def do_witness(self, header: dict[str, JSON], _: list[Bytes]) -> Reply:
        found = describe(self.cases[header["session"]].session.witness())
        found["libraries"] = found["libraries"] or self._libraries
        delegates = self.independence.delegates(found.get("libraries"))
        if delegates:
            found["libraries"] += delegates
        return {"witness": found}, []

    def do_risen(self, _header: dict[str, JSON], _: list[Bytes]) -> Reply:
        if self._peak is None:
            return {"held": None, "peak": None}, []
        self._peak.__exit__(None, None, None)
        peak, self._peak, now = self._peak.bytes, None, held()
        return {"held": None if now is None or self._before is None else max(0, now - self._before), "peak": peak}, []


def _pack_support(supports: Sequence[Support], wanted: int) -> Reply:
    """Encode each supported node as null, each refused one as the reason."""
    if len(supports) != wanted:
        raise BackendError(f"supports: an answer for each of {wanted} nodes expected, {len(supports)} found")
    for s in supports:
        if not isinstance(s, Support):
            raise BackendError(f"supports: yes or no with a reason expected, {s!r:.80} found")
    return {"supports": [None if s.ok else shortened(str(s.reason)) for s in supports]}, []


def _case(header: dict[str, JSON], blobs: list[Bytes]) -> Case:
    """Decode a case that this program validated and sent."""
    return codec.load(header["case"], dict(zip(header["names"], blobs, strict=True)), validate=False)


def _bytes(data: object, size: int, where: str) -> Bytes:
    """Return `data` of an adapter if it has `size` bytes; else raise BackendError."""
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
        found = f"{data.dtype}{list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
        raise BackendError(f"{where}: {size} bytes as a uint8 array expected, {found} found")
    if data.size != size:
        raise BackendError(f"{where}: {size} bytes expected, {data.size} found")
    return data


def _no_core_files() -> None:
    if sys.platform == "win32":
        return
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
        "fragile": plain(backend.fragile, "fragile"),
        "whole": bool(backend.by_case) and type(backend).supports_case is not Backend.supports_case,
        "by_case": bool(backend.by_case) and type(backend).arithmetic_in is not Backend.arithmetic_in,
        "stages": plain(backend.stages, "stages"),
        "options": list(inspect.signature(type(backend)).parameters),
    }


def _bounded(reply: dict[str, JSON], blobs: Sequence[Bytes] = ()) -> Reply:
    """Return a reply, or an error if it is too long."""
    size = len(json.dumps(reply)) if {"supports", "witness", "nodes"} & reply.keys() else 0
    if size > LONGEST_REPLY // 2:
        text = f"an answer of {LONGEST_REPLY >> 21} MiB at most expected, it is longer"
        return pack_error(BackendError(text)), []
    return reply, blobs


def pack_error(error: BaseException) -> dict[str, JSON]:
    """Encode an exception as a reply; a foreign one becomes a `BackendError` with its name."""
    name, message = type(error).__name__, shortened(_message(error))
    if isinstance(error, CaseFileError):
        message = shortened(str(error.message))
        return {"error": name, "message": message, "field": shortened(str(error.field))}
    if isinstance(error, BackendError):
        return {"error": name if name in BY_NAME else BackendError.__name__, "message": message,
                "words": shortened(str(error.words))}  # fmt: skip
    if isinstance(error, ConformanceError):
        return {"error": name if name in BY_NAME else BackendError.__name__, "message": message}
    if isinstance(error, SystemExit):
        return {"error": BackendError.__name__, "message": f"the adapter called sys.exit({error.code!r:.80})"}
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    words = f"{name}: {message}" if message else name
    return {"error": BackendError.__name__, "message": f"the adapter raised {words}{where}", "words": words}


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001  # an adapter's exception may be broken itself
        return f"(it cannot be shown: {type(e).__name__})"


def main(spec: str, names: str = "{}", installed: str = "[]") -> int:
    """Serve until the caller closes the pipe; it passes its `names` and `installed` adapters."""
    service = Service()
    ECHO.on = True
    _no_core_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what an interrupt ends
    try:
        unpack(json.loads(names))
        adopt(json.loads(installed))
        independence = Independence(Spec.parse(spec))
        backend = create(Spec.parse(spec))
        independence.declare(backend)
        hello = _hello(backend)
    except BaseException as error:  # noqa: BLE001  # sys.exit too: the caller reports it
        service.send(pack_error(error))
        return 0
    service.send(*_bounded(hello))
    worker = _Worker(backend, independence, [" ".join(v) for v in hello["info"]["versions"].items()])

    def answer(header: dict[str, JSON], blobs: Sequence[memoryview]) -> Reply:
        try:
            reply, arrays = getattr(worker, f"do_{header['do']}")(header, [np.frombuffer(b, np.uint8) for b in blobs])
            independence.check()
        except BaseException as error:  # noqa: BLE001  # as above
            return pack_error(error), []
        return _bounded(reply, arrays)

    service.serve(answer)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
