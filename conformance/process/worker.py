"""The parent's side of a worker process: start a service in a child, send requests, get replies, end it.

Every wait has a deadline, what a reply may weigh is bounded before it is read, and a child that dies, hangs or holds
too much memory is an error with its last words.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from conformance.ggml import errors
from conformance.ggml.errors import BackendError, CaseFileError, ConformanceError

from .memory import held_below
from .service import Closed, Garbage, Header, receive, send
from .spawn import Child, end_group, spawn, spawn_script, worker_pid
from .wire import Late, Wire

KEPT = 4096
"""Bytes of the end of a child's output that are kept."""
LINES = 8
"""How many of its last lines reach a message."""
LONGEST_MESSAGE = 9 << 10
"""Characters of an error's message that are taken over; what our own services send is shorter."""
MEMORY_INTERVAL = 0.05
"""Seconds between two looks at the memory of a worker and what it started: what they can take in between is what they
can exceed their limit by."""
PATIENCE = 5.0
"""Seconds a worker gets to end by itself when its wire is closed."""
WIRE_PATIENCE = 2.0
"""Seconds it gets where it closed its wire itself, in the middle of a request."""

ERRORS: dict[str, type[ConformanceError]] = {
    c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ConformanceError)
}
"""The one exception family, by class name."""


class WorkerDiedError(ConformanceError):
    """The child ended, or was ended for what it did; the message has its last words.

    Args:
        how: signal, exit status, or why it was ended.
        lines: the last lines of its stderr.
        message: the sentence.
    """

    def __init__(self, how: str, lines: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.how, self.lines = how, lines


class WorkerTimeoutError(WorkerDiedError):
    """The child did not answer in time and was ended."""


class _MemoryLimitError(Exception):
    """A worker and what it started hold more than they may; says how much."""


class Tail:
    """A thread that reads a stream to its end and keeps the last `KEPT` bytes.

    Args:
        stream: what a child writes.
        sink: gets each piece of it.
    """

    def __init__(self, stream: IO[bytes], sink: Callable[[bytes], None] | None = None) -> None:
        self._data = bytearray()
        self._thread = threading.Thread(target=_read, args=(stream, self._data, sink), name="tail", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, for so long at most."""
        self._thread.join(seconds)

    @property
    def text(self) -> str:
        """The end of what was written."""
        return self._data.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """Its last lines that are not empty."""
        return [stripped for line in self.text.splitlines() if (stripped := line.strip())][-LINES:]


def _read(stream: IO[bytes], data: bytearray, sink: Callable[[bytes], None] | None) -> None:
    with suppress(ValueError, OSError):
        while chunk := os.read(stream.fileno(), 1 << 16):
            data += chunk
            del data[:-KEPT]
            if sink is not None:
                sink(chunk)


class Worker:
    """A service in a child process. It ends when nothing holds it any more, at exit at the latest.

    Args:
        service: the name of a module of ours that serves by `service.Service`; with `python` the path of a script.
        args: its arguments.
        time_limit: seconds that one reply may take.
        memory_limit: bytes that it and all that it starts may hold.
        env: its environment; this process's where None.
        python: the interpreter of a script, which finds nothing but what is installed there.
        cwd: where it runs; here where None.
        patience: seconds it gets to end by itself when it is closed.
        parse: reads the JSON of a reply; raises ValueError for what is none.
    """

    def __init__(
        self,
        service: str | Path,
        args: Sequence[str] = (),
        *,
        time_limit: float,
        memory_limit: int | None = None,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
        cwd: Path | None = None,
        patience: float = PATIENCE,
        parse: Callable[[bytearray], Any] = json.loads,
    ) -> None:
        self.time_limit = time_limit
        self.death = ""
        """How the child ended, in words; empty while it lives."""
        start = partial(spawn, str(service), env=env)
        if python is not None:
            start = partial(spawn_script, Path(service), python=python)
        pipe = subprocess.PIPE
        self._child = start(args, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd)
        self._tail = Tail(cast("BinaryIO", self._child.stderr))
        look = None if memory_limit is None else partial(_look, self._child.pid, memory_limit)
        streams = cast("BinaryIO", self._child.stdout), cast("BinaryIO", self._child.stdin)
        self._wire = Wire(*streams, look, MEMORY_INTERVAL)
        self._parse = parse
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._child, self._wire, self._tail, patience)

    @property
    def pid(self) -> int:
        """The number of the process that works; its keeper's where the system does not tell."""
        pid = worker_pid(self._child)
        return self._child.pid if pid is None else pid

    def ask(
        self, header: Header, blobs: Sequence[Any] = (), *, sizes: Sequence[int] = (), seconds: float | None = None
    ) -> tuple[Header, list[memoryview]]:
        """Send a request and wait for its reply.

        Args:
            header: JSON.
            blobs: one-dimensional buffers of bytes.
            sizes: bytes of each blob that the reply must have.
            seconds: that the reply may take; `time_limit` where None.

        Raises:
            ConformanceError: the service's own.
            WorkerDiedError: the child died, now or before.
            WorkerTimeoutError: no reply in time; the child is ended.
        """
        return self._exchange(header, blobs, sizes, seconds)

    def receive(self, sizes: Sequence[int] = (), seconds: float | None = None) -> tuple[Header, list[memoryview]]:
        """A reply that nobody asked for: the first word of a service, or another reply to the last request.

        Raises:
            ConformanceError: as `ask`.
        """
        return self._exchange(None, (), sizes, seconds)

    def close(self) -> None:
        """Close the wire and wait for the child; end it where it does not end by itself."""
        self.death = self.death or "its process has ended"
        self._finalizer()

    def _exchange(
        self, header: Header | None, blobs: Sequence[Any], sizes: Sequence[int], seconds: float | None
    ) -> tuple[Header, list[memoryview]]:
        seconds = self.time_limit if seconds is None else seconds
        with self._lock:
            if self.death:
                raise WorkerDiedError(self.death, (), self.death)
            self._wire.deadline = time.monotonic() + seconds
            try:
                if header is not None:
                    send(self._wire, header, blobs)
                reply, found = receive(self._wire, sizes, self._parse)
            except (Closed, OSError):
                raise self._dead(self._wait()) from None
            except Garbage:
                raise self._dead("someone wrote on its wire, so it was ended") from None
            except _MemoryLimitError as e:
                raise self._dead(str(e)) from None
            except Late:
                lines = self._last_lines()
                self.death = f"no answer within {seconds:g} s, its process was ended{_quote(lines)}"
                raise WorkerTimeoutError("no answer", lines, self.death) from None
            except BaseException:  # an interrupt leaves half a frame on the wire
                self.death = "its process was ended by an interrupt"
                end_group(self._child)
                self._finalizer()
                raise
        if "error" in reply:
            raise unpack_error(reply)
        return reply, found

    def _wait(self) -> str:
        """Why it was ended, where it closed its wire and lives on."""
        try:
            self._child.wait(WIRE_PATIENCE)
        except subprocess.TimeoutExpired:
            return "its wire was closed while it lived, so it was ended"
        return ""

    def _dead(self, how: str) -> WorkerDiedError:
        lines = self._last_lines()
        how = how or _how(self._child.returncode)
        self.death = f"its process died ({how}){_quote(lines)}"
        return WorkerDiedError(how, lines, self.death)

    def _last_lines(self) -> list[str]:
        """End it and all that it started; what it said last."""
        end_group(self._child)
        self._finalizer()
        return self._tail.lines


def unpack_error(reply: Mapping[str, Any]) -> ConformanceError:
    """The exception that a service sent, as the same class."""
    cls = ERRORS.get(str(reply["error"]), BackendError)
    message = str(reply.get("message", ""))[:LONGEST_MESSAGE]
    if cls is CaseFileError:
        return CaseFileError(str(reply.get("field", ""))[:LONGEST_MESSAGE], message)
    return cls(message)


def _quote(lines: Sequence[str]) -> str:
    return f": {' / '.join(lines)}" if lines else ""


def _look(pid: int, limit: int) -> None:
    held = held_below(pid, limit)
    if held is not None and held > limit:
        raise _MemoryLimitError(f"out of memory: it held {held >> 20} MiB, {limit >> 20} MiB are allowed")


def _end(child: Child, wire: Wire, tail: Tail, patience: float) -> None:
    if not child.ours:
        return
    wire.close()
    with suppress(OSError):
        cast("BinaryIO", child.stdin).close()
    end_group(child, patience)
    cast("BinaryIO", child.stdout).close()
    tail.join(1.0)  # what left its group on a system that cannot find it may hold stderr open
    cast("BinaryIO", child.stderr).close()


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code} in the middle of it"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name}, as when a system runs out of memory" if name == "SIGKILL" else name
