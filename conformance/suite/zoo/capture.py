"""Recordings from outside: a request goes to a worker process, a case comes back."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conformance.case import casefile
from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.process import Worker, WorkerDiedError, WorkerTimeoutError

from . import metadata
from .metadata import Value
from .model_file import chosen_types, write_model
from .request import Request

_MISSING = re.compile(r"missing tensor '([^']+)'|tensor '([^']+)' not found")
TIME_LIMIT = 120.0
"""Seconds that one recording may take."""
ENVIRONMENT = {"GGML_NO_BACKTRACE": "1"}
"""What the processes of llama.cpp have beside our own environment."""


def capture(request: Request, arch: str, keys: Mapping[str, Value]) -> Case:
    """Record an architecture made from metadata, with every weight that llama.cpp has a place for.

    Raises:
        ConformanceError: as the worker; or it died: names the last words of llama.cpp.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        model, output = Path(folder, "model.gguf"), Path(folder, "case.gguf")
        metadata.write(model, arch, keys, {})
        known = metadata.architecture(arch)
        if request.type_w != "f32" or known.types:
            listed = ask(replace(request, model=str(model), output=""))["weights"]
            metadata.write(model, arch, keys, chosen_types(listed, request.type_w, known))
        ask(replace(request, model=str(model), output=str(output)))
        return casefile.read_one(output)


def capture_file(request: Request, arch: str, keys: Mapping[str, Value]) -> Case:
    """As `capture`, of a model file that lacks what llama.cpp can do without.

    Raises:
        ConformanceError: as `capture`.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        model, output = Path(folder, "model.gguf"), Path(folder, "case.gguf")
        make_model(model, request, arch, keys)
        ask(replace(request, model=str(model), output=str(output), from_file=True))
        return casefile.read_one(output)


def record_model(request: Request) -> Case:
    """Record a model that a user has; its weights are part of the case, or stay in the file (`by_reference`).

    Raises:
        ConformanceError: as `capture`.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-zoo-") as folder:
        output = Path(folder, "case.gguf")
        ask(replace(request, output=str(output), from_file=True, recipes=False), time_limit=10 * TIME_LIMIT)
        return casefile.read_one(output, models=[Path(request.model).parent])


def make_model(path: Path, request: Request, arch: str, keys: Mapping[str, Value]) -> None:
    """Write a GGUF file that llama.cpp loads, with made-up weights.

    Raises:
        ConformanceError: as `capture`.
    """
    metadata.write(path, arch, keys, {})
    listed = ask(replace(request, model=str(path), output=""))["weights"]
    missing: set[str] = set()
    for _ in listed:
        write_model(path, request, metadata.architecture(arch), keys, listed, missing)
        try:
            ask(replace(request, model=str(path), output="", from_file=True))
        except UsageError as e:
            name = _missing(str(e))
            if not name or name in missing:
                raise
            missing.add(name)
        else:
            return


def _missing(message: str) -> str:
    """The weight that llama.cpp misses, by its own words."""
    found = _MISSING.search(message)
    return found[1] or found[2] if found else ""


def ask(request: Request, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """The worker's answer.

    Raises:
        ConformanceError: the one that the worker met; or it died or was too slow.
    """
    worker = Worker("conformance.suite.zoo.worker", time_limit=time_limit, env={**os.environ, **ENVIRONMENT})
    try:
        return worker.ask(asdict(request))[0]
    except WorkerTimeoutError:
        raise UsageError(f"llama.cpp gave no answer within {time_limit:g} s") from None
    except WorkerDiedError as e:
        raise UsageError(f"llama.cpp ended its process: {' / '.join(e.lines[-3:]) or e.how}") from None
    finally:
        worker.close()
