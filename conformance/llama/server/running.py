"""Starts a server of a build on loopback, and ends it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.builds.source import locate
from conformance.ggml.errors import (
    BackendCrashError,
    BackendTimeoutError,
    ConformanceError,
    UnavailableError,
    UsageError,
)
from conformance.ggml.lib.files import program
from conformance.llama.live.llama import Device
from conformance.process import Deadline, Worker, WorkerDiedError, WorkerTimeoutError

from .client import Server
from .worker import ENDS, LISTENS, Start, patience

PROGRAMS = ("llama-server", "llama-server.exe")
WHOLE = "xllamacpp"
"""The package whose library contains a server."""


def of_device(device: Device) -> dict[str, Any]:
    """Return the fields of `Start` that choose the server of a backend.

    UnavailableError if its build has none.
    """
    if device.rpc or device.isa:
        raise UnavailableError(f"{device.name}: a server runs on devices of its own build and machine only")
    build = of_build(Path(device.lib)) if device.lib else {}
    return {**build, "device": "" if device.on_cpu else device.device, "threads": 1}


def of_build(library: Path) -> dict[str, Any]:
    """Return the fields of `Start` for a build; UnavailableError if it has no server."""
    folder = library if library.is_dir() else library.parent
    found = program(folder, PROGRAMS)
    if found is not None:
        return {"program": str(found), "libraries": str(folder)}
    if library.name.startswith(WHOLE):
        return {"package": str(folder.parent)}
    raise UnavailableError(f"{library}: no {PROGRAMS[0]} beside it; llama.cpp's own packages have one")


def of_text(text: str) -> dict[str, Any]:
    """Return the fields of `Start` for what a user names: a program, or a build.

    UsageError if it is neither, UnavailableError as `of_build`.
    """
    path = Path(text)
    if path.is_file() and path.name.startswith(PROGRAMS[0]):
        return {"program": str(path.resolve())}
    try:
        library = locate(text)
    except ConformanceError as e:
        raise UsageError(f"--server {text!r}: a URL such as http://127.0.0.1:8080, or a build expected: {e}") from None
    return of_build(library)


class RunningServer:
    """A server on loopback with one model, in processes of its own.

    Raises:
        UnavailableError: it cannot be started.
        BackendCrashError: it ended.
        BackendTimeoutError: it does not answer.
    """

    def __init__(self, start: Mapping[str, Any], model: Path, words: Callable[[], Sequence[str]], time_limit: float,
                 process: Mapping[str, Any] | None = None, n_ctx: int = 512,
                 context: Mapping[str, object] | None = None) -> None:  # fmt: skip
        self._folder = tempfile.mkdtemp(prefix="conformance-slots-")
        limit = Deadline(each=patience(str(model)) + LISTENS + ENDS)
        self._worker = Worker(
            "conformance.llama.server.worker", deadline=limit, **(process or Device("server").process())
        )
        asked = Start(str(model.resolve()), self._folder, n_ctx=n_ctx, context=context or {}, **start)
        try:
            found = self._ask(start=asdict(asked))
        except BaseException:  # the caller has no object to close
            self.close()
            raise
        self.pid: int = found["pid"]
        self.client = Server(found["url"], words, lambda: self._ask(alive=True), time_limit)

    def _ask(self, **header: object) -> dict[str, Any]:
        try:
            return self._worker.ask(header)[0]
        except WorkerTimeoutError as e:
            raise BackendTimeoutError(f"its server: {e.how}") from None
        except WorkerDiedError as e:
            text = f"its server died ({e.how}): {' / '.join(e.lines[-3:])}"
            raise BackendCrashError(text, words="\n".join(e.lines), died=e.how) from None

    def close(self) -> None:
        """End the server, and remove its saved slots."""
        self._worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)
