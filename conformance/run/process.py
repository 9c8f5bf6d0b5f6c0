"""The process of an isolated backend: its wire, its last words, its time limit and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, BinaryIO, cast
from urllib.parse import urlencode

from conformance.backend.registry import Spec
from conformance.cgraph.case import JSON
from conformance.cgraph.errors import BackendCrashError, BackendTimeoutError, ConformanceError
from conformance.cgraph.tensor import Bytes

from .frames import Closed, receive, send, unpack_error

KEPT = 4096
"""Bytes of a dead process's last words that are kept."""
LINES = 8
"""How many of their last lines reach a message."""
PATIENCE = 5.0
"""Seconds a process gets to end by itself when its wire is closed."""


class Process:
    """One worker process and its wire. It ends when nothing holds it any more, at exit at the latest."""

    def __init__(self, spec: Spec, time_limit: float) -> None:
        self._name = str(spec)
        self._time_limit = time_limit
        self.death = ""
        """How the process ended, in words; empty while it lives."""
        text = spec.name + ("?" + urlencode(spec.options) if spec.options else "")
        self._popen = subprocess.Popen(  # noqa: S603  # our own module under our own interpreter
            [sys.executable, "-m", "conformance.run.worker", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._stdin = cast("BinaryIO", self._popen.stdin)
        self._stdout = cast("BinaryIO", self._popen.stdout)
        self._words = bytearray()
        self._watch = Watch(self._popen)
        self._listener = threading.Thread(
            target=_listen, args=(self._popen.stderr, self._words), name=f"stderr of {spec.name}", daemon=True
        )
        self._listener.start()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._popen, self._watch, self._listener)
        self.hello, _ = self.ask(None, (), "opening the backend")

    def ask(
        self, header: dict[str, JSON] | None, blobs: Sequence[Bytes], doing: str
    ) -> tuple[dict[str, JSON], list[Bytes]]:
        """Send a request, if there is one, and wait for the answer.

        Raises:
            ConformanceError: the one that the other side raised.
            BackendCrashError: the process died, now or before.
            BackendTimeoutError: no answer in time; the process is ended.
        """
        with self._lock:
            if self.death:
                raise BackendCrashError(f"{self._name}: {doing}: {self.death}")
            self._watch.start(self._time_limit)
            try:
                if header is not None:
                    send(self._stdin, header, blobs)
                reply, arrays = receive(self._stdout)
            except (Closed, OSError):
                raise self._dead(doing) from None
            except BaseException:  # an interrupt leaves half a frame on the wire
                self.death = "its process was ended by an interrupt"
                self._popen.kill()
                self._finalizer()
                raise
            finally:
                self._watch.stop()
        if "error" in reply:
            error = unpack_error(reply)
            if header is None:
                self.end()
            raise error
        return reply, arrays

    def end(self) -> None:
        """Close the wire and wait for the process."""
        self.death = self.death or "its process has ended"
        self._finalizer()

    def _dead(self, doing: str) -> ConformanceError:
        late = self._watch.fired
        if not late:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(PATIENCE)
        self._finalizer()
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines()]
        said = " / ".join([line for line in lines if line][-LINES:])
        said = f": {said}" if said else ""
        if late:
            self.death = f"no answer within {self._time_limit:g} s, its process was ended{said}"
            return BackendTimeoutError(f"{self._name}: {doing}: {self.death}")
        self.death = f"its process died ({_how(self._popen.returncode)}){said}"
        return BackendCrashError(f"{self._name}: {doing}: {self.death}")


class Watch:
    """Kills a process that is late. One thread that looks now and then costs nothing per request."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.fired = False
        self._popen = popen
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        """A request begins."""
        self._deadline = time.monotonic() + seconds
        if self._thread is None:
            interval = min(seconds / 4, 1.0)
            self._thread = threading.Thread(target=self._run, args=(interval,), name="watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """It is answered."""
        with self._lock:
            self._deadline = None

    def end(self) -> None:
        """Look no more."""
        self._over = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, interval: float) -> None:
        while not self._wake.wait(interval) and not self._over:
            with self._lock:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self.fired = True
                    self._popen.kill()
                    return


def _listen(stream: IO[bytes], words: bytearray) -> None:
    with suppress(ValueError, OSError):
        while chunk := os.read(stream.fileno(), 65536):
            words += chunk
            del words[:-KEPT]


def _end(popen: subprocess.Popen[bytes], watch: Watch, listener: threading.Thread) -> None:
    watch.end()
    with suppress(OSError):
        cast("BinaryIO", popen.stdin).close()
    try:
        popen.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    cast("BinaryIO", popen.stdout).close()
    listener.join(1.0)  # a grandchild may hold stderr open
    cast("BinaryIO", popen.stderr).close()


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
