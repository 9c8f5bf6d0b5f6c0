"""What a build is: versions, devices, features, what it lacks. A process of its own asks it, as a library may crash."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.ggml.errors import UnavailableError
from conformance.process import Worker, WorkerDiedError

from .source import locate

TIME_LIMIT = 120.0
"""Seconds that a build may take to load and to list its devices."""


@dataclass(frozen=True, slots=True)
class DeviceOf:
    """A device of a build on this machine."""

    name: str
    """As `ggml_backend_dev_name` has it."""
    type: str
    """Of `enum ggml_backend_dev_type`: CPU, GPU, IGPU, ACCEL."""
    description: str
    software: bool
    """A CPU computes for it, by a driver such as llvmpipe or pocl."""
    buffer_types: tuple[str, ...]
    """Names, the default first."""


@dataclass(frozen=True, slots=True)
class Build:
    """A build of ggml, with or without llama.cpp."""

    name: str
    """As it was given."""
    path: Path
    """What `Library` loads: a folder or a file."""
    ggml: str
    """Version of ggml, or `of unknown version`."""
    number: str
    """llama.cpp's build number, as `b6133`, or ggml's commit; "" where the build does not tell."""
    devices: tuple[DeviceOf, ...]
    features: tuple[str, ...]
    """Of the CPU device, such as `AVX2` or `LLAMAFILE=1`."""
    llama: bool
    """Whether its llama.cpp can be driven: `conform zoo` plays models on it."""
    left_out: tuple[str, ...]
    """Sentences: what it lacks, and what is thus not tested."""
    variants: tuple[str, ...] = ()
    """CPU libraries that this machine can execute, such as `haswell`, where it has several."""
    meta: bool = False
    """Whether its llama.cpp can split each tensor over several devices, as by `-sm tensor`."""
    server: bool = False
    """Whether it has a program that serves its devices by RPC, and the device that calls one."""

    def to_json(self) -> dict[str, Any]:
        """As strict JSON."""
        return {**asdict(self), "path": str(self.path)}


def probe(text: str, environment: Mapping[str, str | None] = {}) -> Build:
    """What the build that `text` names holds (`source.locate`).

    `environment`: variables that its process has beside our own; None unsets one.

    Raises:
        UsageError: a package without an exact version.
        UnavailableError: there is no such build, or it cannot be tested: names the symbol or the layout that does not
            fit, or how its process died.
    """
    path = locate(text)
    changed = {**os.environ, **environment}
    env = {k: v for k, v in changed.items() if v is not None}
    worker = Worker("conformance.builds.worker", time_limit=TIME_LIMIT, env=env)
    try:
        reply, _ = worker.ask({"probe": str(path)})
    except WorkerDiedError as e:  # or it did not answer in time
        raise UnavailableError(f"build {text}: loading {path} and listing its devices: {e}") from None
    finally:
        worker.close()
    return _build(text, path, reply)


def _build(text: str, path: Path, reply: Mapping[str, Any]) -> Build:
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
        reply["server"],
    )
