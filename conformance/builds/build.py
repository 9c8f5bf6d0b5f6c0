"""Inspect a build in a worker process: version, devices, features, missing symbols."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.ggml.errors import UnavailableError
from conformance.process import Deadline, Worker, WorkerDiedError

from .emulator import start
from .source import locate

TIME_LIMIT = 120.0
"""Time limit in seconds to load a build and list its devices."""


@dataclass(frozen=True, slots=True)
class DeviceOf:
    """A device of a build on this machine."""

    name: str
    """Device name, from `ggml_backend_dev_name`."""
    type: str
    """Member of `enum ggml_backend_dev_type`: CPU, GPU, IGPU, ACCEL."""
    description: str
    software: bool
    """True if a CPU emulates it, through a driver such as llvmpipe or pocl."""
    buffer_types: tuple[str, ...]
    """Names, default first."""


@dataclass(frozen=True, slots=True)
class Build:
    """A build of ggml, with or without llama.cpp."""

    name: str
    """The name given by the user."""
    path: Path
    """The folder or file that `Library` loads."""
    ggml: str
    """ggml version, or `of unknown version`."""
    number: str
    """llama.cpp build number, such as `b6133`, or the ggml commit; "" if unknown."""
    devices: tuple[DeviceOf, ...]
    features: tuple[str, ...]
    """Features of the CPU device, such as `AVX2` or `LLAMAFILE=1`."""
    llama: bool
    """True if its llama.cpp can run models, as the live family `arch` does."""
    left_out: tuple[str, ...]
    """Messages about missing functions and the tests that are skipped for that reason."""
    variants: tuple[str, ...] = ()
    """CPU libraries that run on this machine, such as `haswell`, if there are several."""
    meta: bool = False
    """True if its llama.cpp can split tensors over several devices, as with `-sm tensor`."""
    server: bool = False
    """True if it has an RPC server program and the RPC backend."""
    architectures: tuple[str, ...] = ()
    """Names of the architectures that its llama.cpp knows; none if it does not list them."""
    isa: str = ""
    """The processor that is emulated; "" for that of this machine."""
    released: str = ""
    """Day of its release, such as `2025-08-28`, if the user gave it."""

    def to_json(self) -> dict[str, Any]:
        """Return a strict JSON object."""
        return {**asdict(self), "path": str(self.path)}


def probe(text: str, environment: Mapping[str, str | None] = {}, isa: str = "") -> Build:
    """Inspect the build that `text` names (see `source.locate`), emulated if `isa`.

    `environment` adds variables to those of its process; None unsets one.

    Raises: UsageError: a package without an exact version.
        UnavailableError: no such build, or it cannot be tested; names the symbol or layout that does not match, or how
            its process died.
    """
    path = locate(text, isa)
    changed = {**os.environ, **environment}
    env = {k: v for k, v in changed.items() if v is not None}
    worker = Worker("conformance.builds.worker", deadline=Deadline(each=TIME_LIMIT), **start(isa, env))
    try:
        reply, _ = worker.ask({"probe": str(path)})
    except WorkerDiedError as e:  # includes timeouts
        raise UnavailableError(f"build {text}: loading {path} and listing its devices: {e}") from None
    finally:
        worker.close()
    return _build(text, path, reply, isa)


def _build(text: str, path: Path, reply: Mapping[str, Any], isa: str) -> Build:
    return Build(
        text,
        path,
        reply["ggml"],
        reply["number"],
        tuple(DeviceOf(**{**d, "buffer_types": tuple(d["buffer_types"])}) for d in reply["devices"]),
        tuple(reply["features"]),
        reply["llama"],
        tuple(reply["left_out"]),
        tuple(reply["variants"]),
        reply["meta"],
        reply["server"] and not isa,  # a program cannot start another one under qemu-user
        tuple(reply["architectures"]),
        isa,
    )
