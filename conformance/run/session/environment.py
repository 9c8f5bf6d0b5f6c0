"""The environment recorded beside every result: versions and the kind of machine, nothing that names its owner."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conformance.case.case import JSON

from .checkout import source

SCHEMA = 1
"""Version of the run documents."""
_PACKAGES = ("ggml-conformance", "numpy", "gguf", "openvino", "xllamacpp", "pytest", "hypothesis")


def header(kind: str) -> dict[str, JSON]:
    """The first fields of every run document: `{"schema", "kind", "run", "written", "environment"}`.

    `run` is a random name of 32 hex digits, which identifies the document wherever it is merged; `written` is in UTC.

    Args:
        kind: `conformance`, `perf`, `planted`, `audit`, `phases` or `zoo`.
    """
    written = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    where = {**environment(), **source()}
    return {"schema": SCHEMA, "kind": kind, "run": uuid.uuid4().hex, "written": written, "environment": where}


def environment() -> dict[str, JSON]:
    """Versions of Python and of the packages that results depend on, the system, the processor, its cores.

    `machine` is a short name of the last three together: the same for machines of one kind.
    """
    system, cpu, cores = f"{platform.system()} {platform.machine()}", _cpu_model(), os.cpu_count()
    return {
        "machine": hashlib.sha256(f"{system}\n{cpu}\n{cores}".encode()).hexdigest()[:12],
        "python": platform.python_version(),
        "system": system,
        "cpu": cpu,
        "cores": cores,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
