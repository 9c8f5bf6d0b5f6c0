"""Runs llama.cpp on a device: library, models, and the processes that load them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.backend.registry import Spec, environment, isa_of, located, resolve
from conformance.builds.emulator import start
from conformance.builds.source import locate
from conformance.ggml.errors import (
    BackendCrashError,
    BackendError,
    BackendTimeoutError,
    ConformanceError,
    UnavailableError,
)
from conformance.ggml.lib.llama import find_llama
from conformance.llama.zoo import family
from conformance.llama.zoo.family import ENVIRONMENT, TIME_LIMIT, Request, prepare, read
from conformance.llama.zoo.model import Value, architecture, full_key
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError
from conformance.run.isolation.isolate import Isolation
from conformance.suite.family import without

from .placement import Placed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GGML = "ggml"
"""The adapter whose libraries run llama.cpp."""
LAST_WORDS = 400
"""Characters of a dead process's last output in an error message."""
_CONTEXT = ("plan", "n_ctx", "n_seq_max", "n_ubatch", "unified", "swa_full", "flash_attn", "type_k", "type_v",
            "embeddings")  # fmt: skip
"""Fields of a request that belong to a context and not to the model."""


@dataclass(frozen=True, slots=True)
class Device:
    """The library and device that run a model."""

    name: str
    """The backend's spec."""
    lib: str = ""
    """The library with llama.cpp; empty for the wheel's."""
    device: str = ""
    """`ggml_backend_dev_name` of the device; "" for the CPU alone."""
    environment: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    """Variables of its process that differ from our environment; None unsets one."""
    rpc: str = ""
    """RPC server of the device: `HOST:PORT`, or `loopback` to start one of this build."""
    isa: str = ""
    """The emulated processor; "" for this machine's."""

    def process(self, variables: Mapping[str, str] = {}) -> dict[str, Any]:
        """Return the arguments of a `Worker` with the library: interpreter and environment."""
        every = {**os.environ, **ENVIRONMENT, **variables, **self.environment}
        return start(self.isa, {k: v for k, v in every.items() if v is not None})

    @property
    def asked(self) -> dict[str, str]:
        """The fields of a worker's request that choose the device."""
        return {"device": self.device, "rpc": self.rpc}

    @property
    def on_cpu(self) -> bool:
        """True if equal kernels on equal values give equal bits."""
        return self.device in ("", "CPU")

    @property
    def judge(self) -> Device:
        """The CPU for the comparison: of the same library, or of the wheel if the device is a CPU.

        The wheel's CPU also shows bugs in code that all devices of a build share.
        """
        return Device("CPU", "" if self.on_cpu else self.lib)


def device(spec: Spec) -> Device:
    """Return the device of a backend; UnavailableError if it is not an installed ggml library."""
    isa = isa_of(spec)
    whole = located(spec) if isa else resolve(spec)
    options = dict(whole.options)
    if whole.name != GGML:
        raise UnavailableError(f"{spec}: llama.cpp runs on ggml's own backends only: --backend with the adapter {GGML}")
    lib = llama_of(options.get("lib"), isa)
    return Device(str(spec), lib, options.get("device", ""), environment(spec), options.get("rpc", ""), isa)


def llama_of(build: str | None, isa: str = "") -> str:
    """Return the llama.cpp library of a build; "" for the wheel's."""
    return str(find_llama(locate(build, isa))) if build else ""


class Process:
    """A process with one model on one device, started on request, restarted after it ends."""

    def __init__(self, service: str, device: Device, load: DataclassInstance, limits: Isolation) -> None:
        """Store `load`, fields for the module `service`, and `limits` of time."""
        self._service, self._device, self._load, self._limits = service, device, load, limits
        self._worker: Worker | None = None
        self.placed: Placed = {}
        """`DEVICE OP` -> nodes of a graph; empty on the CPU, or if unknown."""

    def ask(self, **request: object) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            BackendCrashError: the process died.
            BackendTimeoutError: it did not answer in time.
            UnavailableError: the model or the library lacks the feature, or llama.cpp refuses it.
            BackendError: llama.cpp reports an error.
        """
        try:
            worker = self._ready()
            reply = worker.ask(request)[0]
        except WorkerTimeoutError as e:
            self.close()
            raise BackendTimeoutError(e.how) from None
        except WorkerDiedError as e:
            self.close()
            words = " / ".join(e.lines)[-LAST_WORDS:]
            text = f"its process died ({e.how}): {words}"
            raise BackendCrashError(text, words="\n".join(e.lines), died=e.how) from None
        if "unsupported" in reply:
            raise UnavailableError(reply["unsupported"])
        if "failed" in reply:
            more = " / ".join(c for c in reply.get("complaints", ()) if c not in reply["failed"])
            raise BackendError(f"{reply['failed']}: {more}" if more else reply["failed"], words=more or None)
        return reply

    def _ready(self) -> Worker:
        if self._worker is None:
            if self._limits.until.is_over():
                raise BackendTimeoutError("the time of the run is over")
            limits, process = self._limits, self._device.process()
            deadline = limits.deadline(emulated=limits.emulated)
            self._worker = Worker(self._service, deadline=deadline, emulated=limits.emulated, **process)
            try:
                reply = self._worker.ask({"load": asdict(self._load), **self._device.asked})[0]
            except WorkerDiedError:
                raise
            except ConformanceError as e:
                self.close()
                raise BackendError(str(e)) from None
            if "unsupported" in reply:
                self.close()
                raise UnavailableError(reply["unsupported"])
            self._worker.emulated |= bool(reply.get("emulated"))
            self.placed = reply.get("placed", {})
            self._worker.deadline = limits.deadline(emulated=self._worker.emulated)
        return self._worker

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class Models:
    """The generated model of the last case, and the processes that have loaded it."""

    def __init__(self, limits: Isolation, more: Mapping[str, Value] = {}) -> None:
        """Make none yet; `more`: further metadata of all models."""
        self._more = more
        self.folder = Path(tempfile.mkdtemp(prefix="conformance-live-"))
        self.embeddings = False
        """The model gives embeddings instead of logits."""
        self._limits = limits
        self._key = ""
        self._model = Request("", "")
        self._processes: dict[tuple[str, str], Process] = {}

    def use(self, case_id: str, own: frozenset[str] = frozenset({"do"})) -> Request:
        """Generate the model of an id `FAMILY/ARCH-key=value@seed` and return its request.

        `own`: keys that the family reads itself.

        Raises:
            UsageError: the id is invalid.
            UnavailableError: the model cannot be made here.
            BackendTimeoutError: it was not made in time.
        """
        request, arch, keys, whole = read_id(case_id, own)
        key = repr((arch, keys, request.type_w, whole, request.seed))
        if key != self._key:
            self._end()
            limit = max(TIME_LIMIT, self._limits.time_limit)
            added = {full_key(architecture(arch).of or arch, name): value for name, value in self._more.items()}
            made = replace(request, stream=key)
            try:
                # The wheel's llama.cpp makes the model, whatever library runs it.
                self._model = prepare(self.folder / "model.gguf", made, arch, {**keys, **added}, whole, limit)
            except BackendTimeoutError as e:
                raise BackendTimeoutError(f"no model: {e}") from None
            except ConformanceError as e:
                raise UnavailableError(f"no model: {e}") from None
            self._key = key
        context = {name: getattr(request, name) for name in _CONTEXT}
        return replace(self._model, **context)

    def changes(self, request: Request) -> dict[str, Any]:
        """Return the `changes` field of a worker's request."""
        made = {name: getattr(request, name) for name in _CONTEXT}
        return {**made, "embeddings": request.embeddings or self.embeddings}

    def on(self, device: Device) -> Process:
        """Return the process that has loaded the model on a device."""
        key = device.lib, device.device
        if key not in self._processes:
            load = replace(self._model, lib=device.lib, embeddings=self._model.embeddings or self.embeddings)
            self._processes[key] = Process("conformance.llama.live.worker", device, load, self._limits)
        return self._processes[key]

    def _end(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self.embeddings, self._key = False, ""

    def close(self) -> None:
        """End the processes and remove the model."""
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)


def without_reference(error: ConformanceError, on: Device, play: Callable[[], object]) -> ConformanceError:
    """Return the error of a case on a device whose CPU reference failed; a time-out stays one.

    `play` runs the case on the device. A CPU fails with its own error, which `play` raises: no failure of a build's CPU
    may hide behind that of its reference. Another device is not to blame.
    """
    if isinstance(error, BackendTimeoutError):
        return BackendTimeoutError(f"no reference: on the CPU: {error}")
    if on.on_cpu:
        play()
    return UnavailableError(f"no reference: on the CPU of {'the wheel' if on.on_cpu else 'the same build'}: {error}")


def read_id(case_id: str, own: frozenset[str] = frozenset({"do"})) -> tuple[Request, str, dict[str, Any], bool]:
    """Parse the id of another family as `llama.zoo.family.read` does, without its `own` keys."""
    body, at, seed = case_id.partition("/")[2].rpartition("@")
    return read(f"{family.NAME}/{without(body, own)[0]}{at}{seed}")
