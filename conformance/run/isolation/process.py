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
from functools import partial
from typing import IO, BinaryIO, cast
from urllib.parse import urlencode

from conformance.backend.registry import Spec, environment
from conformance.case.case import JSON
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, ConformanceError
from conformance.ggml.tensor import Bytes
from conformance.process import Child, end_group, spawn, worker_pid
from conformance.process.wire import Late, Wire

from .definitions import definitions
from .frames import Closed, Garbage, receive, send, unpack_error
from .memory import held_below

KEPT = 4096
"""Bytes of a dead process's last words that are kept."""
LINES = 8
"""How many of their last lines reach a message."""
MEMORY_INTERVAL = 0.05
"""Seconds between two looks at the memory of a worker and what it started: what they can take in between is what they
can exceed their limit by."""
PATIENCE = 5.0
"""Seconds a process gets to end by itself when its wire is closed."""
WIRE_PATIENCE = 2.0
"""Seconds it gets where it closed its wire itself, in the middle of a request."""


class Process:
    """One worker process and its wire. It ends when nothing holds it any more, at exit at the latest."""

    def __init__(self, spec: Spec, time_limit: float, memory_limit: int | None = None) -> None:
        self._name = str(spec)
        self._time_limit = time_limit
        self.death = ""
        """How the process ended, in words; empty while it lives."""
        text = spec.name + ("?" + urlencode(spec.options) if spec.options else "")
        pipe = subprocess.PIPE
        self._popen = spawn(
            "conformance.run.isolation.worker",
            [text, *definitions()],
            env=_environment(spec),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        self._words = bytearray()
        self._listener = threading.Thread(
            target=_listen, args=(self._popen.stderr, self._words), name=f"stderr of {spec.name}", daemon=True
        )
        self._listener.start()
        look = None if memory_limit is None else partial(_look, self._popen.pid, memory_limit)
        streams = cast("BinaryIO", self._popen.stdout), cast("BinaryIO", self._popen.stdin)
        self._wire = Wire(*streams, look, MEMORY_INTERVAL)
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._popen, self._wire, self._listener)
        self.hello, _ = self.ask(None, (), "opening the backend")

    def ask(
        self, header: dict[str, JSON] | None, blobs: Sequence[Bytes], doing: str, sizes: Sequence[int] = ()
    ) -> tuple[dict[str, JSON], list[Bytes]]:
        """Send a request, if there is one, and wait for the answer, whose byte arrays must have `sizes`.

        Raises:
            ConformanceError: the one that the other side raised.
            BackendCrashError: the process died, now or before.
            BackendTimeoutError: no answer in time; the process is ended.
        """
        with self._lock:
            if self.death:
                raise BackendCrashError(f"{self._name}: {doing}: {self.death}")
            self._wire.deadline = time.monotonic() + self._time_limit
            try:
                if header is not None:
                    send(self._wire, header, blobs)
                reply, arrays = receive(self._wire, sizes)
            except (Closed, OSError):
                raise self._dead(doing, "") from None
            except Garbage:
                raise self._dead(doing, "someone wrote on its wire, so it was ended") from None
            except TooLargeError as e:
                raise self._dead(doing, str(e)) from None
            except Late:
                raise self._late(doing) from None
            except BaseException:  # an interrupt leaves half a frame on the wire
                self.death = "its process was ended by an interrupt"
                end_group(self._popen)
                self._finalizer()
                raise
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
            pid = worker_pid(self._popen)
            with suppress(OSError):  # it has died, or may not: then it stays where it is
                os.sched_setaffinity(self._popen.pid if pid is None else pid, {here[turn % len(here)]})

    def end(self) -> None:
        """Close the wire and wait for the process."""
        self.death = self.death or "its process has ended"
        self._finalizer()

    def _dead(self, doing: str, how: str) -> ConformanceError:
        if not how:
            try:
                self._popen.wait(WIRE_PATIENCE)
            except subprocess.TimeoutExpired:
                how = "its wire was closed while it lived, so it was ended"
        said = self._last_words()
        how = how or _how(self._popen.returncode)
        self.death = f"its process died ({how}){said}"
        return BackendCrashError(f"{self._name}: {doing}: {self.death}")

    def _late(self, doing: str) -> ConformanceError:
        said = self._last_words()
        self.death = f"no answer within {self._time_limit:g} s, its process was ended{said}"
        return BackendTimeoutError(f"{self._name}: {doing}: {self.death}")

    def _last_words(self) -> str:
        """End it and all that it started; what it said last."""
        end_group(self._popen)
        self._finalizer()
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines()]
        said = " / ".join([line for line in lines if line][-LINES:])
        return f": {said}" if said else ""


class TooLargeError(Exception):
    """A worker and what it started hold more than they may; says how much."""


def _look(pid: int, limit: int) -> None:
    held = held_below(pid, limit)
    if held is not None and held > limit:
        raise TooLargeError(f"out of memory: it held {held >> 20} MiB, {limit >> 20} MiB are allowed")


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


def _end(popen: Child, wire: Wire, listener: threading.Thread) -> None:
    if not popen.ours:
        return
    wire.close()
    with suppress(OSError):
        cast("BinaryIO", popen.stdin).close()
    end_group(popen, PATIENCE)
    cast("BinaryIO", popen.stdout).close()
    listener.join(1.0)  # what left its group on a system that cannot find it may hold stderr open
    cast("BinaryIO", popen.stderr).close()


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code} in the middle of it"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name}, as when a system runs out of memory" if name == "SIGKILL" else name
