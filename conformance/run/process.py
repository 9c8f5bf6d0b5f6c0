"""The process of an isolated backend: its wire, its last words, its limits and its end."""

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

from conformance.backend.registry import Spec, environment
from conformance.cgraph.case import JSON
from conformance.cgraph.errors import BackendCrashError, BackendTimeoutError, ConformanceError
from conformance.cgraph.tensor import Bytes

from .definitions import definitions
from .frames import Closed, Garbage, receive, send, unpack_error
from .memory import resident

KEPT = 4096
"""Bytes of a dead process's last words that are kept."""
LINES = 8
"""How many of their last lines reach a message."""
MEMORY_INTERVAL = 0.05
"""Seconds between two looks at a worker's memory: what it can take in between is what it can exceed its limit by."""
PATIENCE = 5.0
"""Seconds a process gets to end by itself when its wire is closed."""


class Process:
    """One worker process and its wire. It ends when nothing holds it any more, at exit at the latest."""

    def __init__(self, spec: Spec, time_limit: float, memory_limit: int | None = None) -> None:
        self._name = str(spec)
        self._time_limit = time_limit
        self.death = ""
        """How the process ended, in words; empty while it lives."""
        text = spec.name + ("?" + urlencode(spec.options) if spec.options else "")
        self._popen = subprocess.Popen(  # noqa: S603  # our own module under our own interpreter
            [sys.executable, "-m", "conformance.run.worker", text, *definitions()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(spec),
        )
        self._stdin = cast("BinaryIO", self._popen.stdin)
        self._stdout = cast("BinaryIO", self._popen.stdout)
        self._words = bytearray()
        self._watch = Watch(self._popen, memory_limit)
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
            except Garbage:
                self._popen.kill()
                raise self._dead(doing, "someone wrote on its wire, so it was ended") from None
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

    def settle(self, turn: int) -> None:
        """Keep its main thread on the `turn`-th processor, counted round and round, where the system can."""
        if sys.platform == "linux":
            here = sorted(os.sched_getaffinity(0))
            with suppress(OSError):  # it has died, or may not: then it stays where it is
                os.sched_setaffinity(self._popen.pid, {here[turn % len(here)]})

    def end(self) -> None:
        """Close the wire and wait for the process."""
        self.death = self.death or "its process has ended"
        self._finalizer()

    def _dead(self, doing: str, how: str = "") -> ConformanceError:
        fired = self._watch.fired
        if not fired:
            try:
                self._popen.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                how = "its wire was closed while it lived, so it was ended"
        self._finalizer()
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines()]
        said = " / ".join([line for line in lines if line][-LINES:])
        said = f": {said}" if said else ""
        if fired == TIME:
            self.death = f"no answer within {self._time_limit:g} s, its process was ended{said}"
            return BackendTimeoutError(f"{self._name}: {doing}: {self.death}")
        how = fired or how or _how(self._popen.returncode)
        self.death = f"its process died ({how}){said}"
        return BackendCrashError(f"{self._name}: {doing}: {self.death}")


TIME = "time"


class Watch:
    """Kills a process that is late or too large. One thread that looks now and then costs nothing per request."""

    def __init__(self, popen: subprocess.Popen[bytes], memory_limit: int | None = None) -> None:
        self.fired = ""
        """Why it killed: `TIME`, or words about memory; empty while it did not."""
        self._popen = popen
        self._memory_limit = memory_limit
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        """A request begins."""
        self._deadline = time.monotonic() + seconds
        if self._thread is None:
            interval = min(seconds / 4, 1.0 if self._memory_limit is None else MEMORY_INTERVAL)
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
                if self._deadline is None:
                    continue
                self.fired = TIME if time.monotonic() > self._deadline else self._too_large()
                if self.fired:
                    self._popen.kill()
                    return

    def _too_large(self) -> str:
        if self._memory_limit is None:
            return ""
        held = resident(self._popen.pid)
        if held is None or held <= self._memory_limit:
            return ""
        return f"out of memory: it held {held >> 20} MiB, {self._memory_limit >> 20} MiB are allowed"


def _environment(spec: Spec) -> dict[str, str] | None:
    """This process's, with what `spec` sets and without what it must not have; None is this process's as it is."""
    wanted = environment(spec)
    if not wanted:
        return None
    kept = {k: v for k, v in os.environ.items() if k not in wanted}
    return {**kept, **{k: v for k, v in wanted.items() if v is not None}}


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
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name}, as when a system runs out of memory" if name == "SIGKILL" else name
