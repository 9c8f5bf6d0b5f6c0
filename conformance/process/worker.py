"""Parent side of a worker process: start a service, send requests, receive replies, end it.

Every wait has a deadline and the size of a reply is checked before it is read. A child that dies, hangs or exceeds its
memory limit raises an error with its last output.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal, cast

from conformance.ggml.errors import BY_NAME, BackendError, CaseFileError, ConformanceError

from .deadline import FOREVER, Deadline
from .service import Closed, Garbage, Header, receive, send
from .spawn import Child, end_group, ended, spawn, spawn_command, words, worker_pid

CHUNK = 1 << 16
POLLS: Final = hasattr(select, "poll")
"""True if this system can poll a pipe; elsewhere a thread reads each."""


class Late(Exception):  # noqa: N818  # an end, not an error
    """The deadline has passed, or the message says which other limit."""


class Wire:
    """A source and sink of frames; while waiting it calls `look` every `interval` seconds."""

    def __init__(
        self, incoming: IO[bytes], outgoing: IO[bytes], look: Callable[[], None] | None = None, interval: float = inf
    ) -> None:
        self.deadline = FOREVER
        """Deadline of the current request, of wall time."""
        self._look = look
        self._interval = interval if look is not None else inf
        self._next = time.monotonic() + self._interval
        self._held = memoryview(b"")
        self._reader: _Polled | _Threaded = (_Polled if POLLS else _Threaded)(incoming, writes=False)
        self._writer: _Polled | _Threaded = (_Polled if POLLS else _Threaded)(outgoing, writes=True)

    def readinto(self, view: memoryview) -> int:
        """Read at least one byte, 0 at the end; Late if nothing came by the deadline."""
        if not self._held:
            data = self._wait(self._reader).read()
            if not data:
                return 0
            self._held = memoryview(data)
        n = min(len(view), len(self._held))
        view[:n] = self._held[:n]
        self._held = self._held[n:]
        return n

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`; Late if the deadline passes first, OSError if the reader is gone."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._writer.write(rest) or self._wait(self._writer).write(rest) :]

    def flush(self) -> None:
        """Do nothing: no byte is buffered."""

    def close(self) -> None:
        """Stop waiting. The owner of the pipes closes them."""
        self._reader.close()
        self._writer.close()

    def _wait(self, side: _Polled | _Threaded) -> _Polled | _Threaded:
        while True:
            now = time.monotonic()
            if now >= self._next and self._look is not None:
                self._look()
                self._next = time.monotonic() + self._interval
            if side.ready(max(0.0, min(self.deadline.left(), self._next - now))):
                return side
            if self.deadline.is_over():
                raise Late


class _Polled:
    """A pipe on a system with `poll`."""

    def __init__(self, stream: IO[bytes], *, writes: bool) -> None:
        self._fd = stream.fileno()
        if sys.platform == "win32":
            raise OSError("waiting for a pipe is not possible on Windows")
        os.set_blocking(self._fd, False)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT if writes else select.POLLIN)

    def ready(self, seconds: float) -> bool:
        if sys.platform == "win32":
            return False
        return bool(self._poll.poll(None if seconds == inf else 1000 * seconds))

    def read(self) -> bytes:
        return os.read(self._fd, CHUNK)

    def write(self, data: memoryview) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        pass


class _Threaded:
    """A pipe on a system without `poll`: a daemon thread reads or writes it."""

    def __init__(self, stream: IO[bytes], *, writes: bool) -> None:
        self._stream = stream
        self._queue: queue.Queue[bytes] = queue.Queue(1)
        self._next: bytes | None = None
        self._error: OSError | None = None
        threading.Thread(target=self._writing if writes else self._reading, name="wire", daemon=True).start()
        self._writes = writes

    def ready(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        if self._writes:
            while self._queue.full() and time.monotonic() < deadline:
                time.sleep(0.001)
            return not self._queue.full()
        with suppress(queue.Empty):
            self._next = self._queue.get(timeout=None if seconds == inf else seconds)
        return self._next is not None

    def read(self) -> bytes:
        data, self._next = self._next or b"", None
        return data

    def write(self, data: memoryview) -> int:
        if self._error is not None:
            raise self._error
        with suppress(queue.Full):
            self._queue.put_nowait(bytes(data[: 16 * CHUNK]))
            return len(data[: 16 * CHUNK])
        return 0

    def close(self) -> None:
        if self._writes:
            with suppress(queue.Full):
                self._queue.put_nowait(b"")

    def _reading(self) -> None:
        with suppress(OSError, ValueError):
            while data := os.read(self._stream.fileno(), CHUNK):
                self._queue.put(data)
        self._queue.put(b"")

    def _writing(self) -> None:
        try:
            while data := self._queue.get():
                while data:
                    data = data[os.write(self._stream.fileno(), data) :]
        except (OSError, ValueError) as e:
            self._error = e if isinstance(e, OSError) else OSError(str(e))


TAIL_BYTES = 4096
"""Bytes kept of the end of a child's stderr."""
LINES = 8
"""Maximum lines of it in an error message."""
LONGEST_MESSAGE = 9 << 10
"""Maximum characters of an error message from a worker; our own services send less."""
MEMORY_INTERVAL = 0.05
"""Seconds between two measurements of a worker's memory; it can exceed its limit in between."""
PATIENCE = 5.0
"""Seconds a worker has to end by itself after its pipes close."""
WIRE_PATIENCE = 2.0
"""Seconds to wait for the exit code of a worker that closed its pipe during a request."""
CEILING = 20.0
"""Maximum wall time of a request in multiples of its limit, for a busy machine."""
STALLED = 5.0
"""Seconds without processor time after which a child makes no progress, at least."""
FREE = 0.5
"""Share of one processor that is idle on a machine where a child that can run does run."""
POLLING = 0.001
"""Share of a processor below which a child makes no progress: a polling thread uses some."""


class WorkerDiedError(ConformanceError):
    """The child died or was ended; the message quotes `lines`, the last lines of its stderr.

    `how` is the signal, the exit status, or the reason why it was ended.
    """

    def __init__(self, how: str, lines: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.how, self.lines = how, lines


class WorkerTimeoutError(WorkerDiedError):
    """The child did not answer in time and was ended."""


class _MemoryLimitError(Exception):
    """A worker and its descendants exceed their memory limit; the message has both sizes."""


class _Clock:
    """Limits a request to `seconds` that do not depend on the load of the machine.

    While a processor of the machine is idle, wall time counts: a child that can run does run. Otherwise only the
    processor time of the busiest thread below `pid` counts, since the child shares the processors with others. A child
    that uses none for `seconds` (at least `STALLED`) makes no progress. The busiest thread is not the sum over threads:
    one that waits for another may ask repeatedly.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._counted = 0.0
        self._begun = self._checked = self._moved = time.monotonic()
        self._idle: float | None = None
        self._seen = 0.0
        """Processor time of all threads at `_moved`."""
        self._used: dict[tuple[int, int], float] = {}

    def check(self) -> None:
        """Raise Late if the child used its time, or used no processor for that long."""
        now = time.monotonic()
        passed = now - self._checked
        if passed < min(1.0, self._seconds / 20):
            return
        used, idle = _used(self._pid), _idle()
        if self._idle is None:  # nothing was measured before the first interval, which ends here
            self._used, self._idle, self._seen = used, idle, sum(used.values())
        elif idle - self._idle >= FREE * passed:
            self._counted += passed
        else:
            self._counted += max((t - self._used.get(k, 0.0) for k, t in used.items()), default=0.0)
        total = sum(used.values())
        if abs(total - self._seen) > POLLING * self._seconds:
            self._seen, self._moved = total, now
        self._used, self._idle, self._checked = used, idle, now
        wall = now - self._begun
        if self._counted >= self._seconds:
            busy = f" of processor time ({wall:.0f} s on a busy machine)" if wall > 2 * self._seconds else ""
            raise Late(f"no answer within {self._seconds:g} s{busy}")
        if now - self._moved >= max(self._seconds, STALLED):
            still = f"{now - self._moved:.0f} s"
            raise Late(f"no answer within {self._seconds:g} s, and no processor time used for {still}")


class _Watch:
    """Checks the memory of a child, and the time of a request."""

    def __init__(self, pid: int, limit: int | None) -> None:
        self._limit = limit
        self._held = None if limit is None else _held(pid)
        self.clock: _Clock | None = None

    def __call__(self) -> None:
        if self._limit is not None and self._held is not None:
            held = self._held(self._limit)
            if held is not None and held > self._limit:
                raise _MemoryLimitError(f"out of memory: it held {held >> 20} MiB, {self._limit >> 20} MiB are allowed")
        if self.clock is not None:
            self.clock.check()


class Tail:
    """A thread that keeps the last `TAIL_BYTES` of a stream."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._data = bytearray()
        self._thread = threading.Thread(target=_read, args=(stream, self._data), name="tail", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, at most so many seconds."""
        self._thread.join(seconds)

    @property
    def text(self) -> str:
        """The last bytes of the stream, decoded."""
        return self._data.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The last non-empty lines of the stream."""
        return [stripped for line in self.text.splitlines() if (stripped := line.strip())][-LINES:]


def _read(stream: IO[bytes], data: bytearray) -> None:
    with suppress(ValueError, OSError):
        while chunk := os.read(stream.fileno(), 1 << 16):
            data += chunk
            del data[:-TAIL_BYTES]


def call(
    command: Sequence[str],
    folder: Path,
    name: Literal["stdout", "stderr"],
    env: Mapping[str, str] | None = None,
    *,
    seconds: float,
) -> tuple[int, list[str]]:
    """Run a program in `folder`, for at most `seconds`; return its exit code and last lines."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = spawn_command(command, cwd=folder, env=env, **{**streams, name: subprocess.PIPE})
    stream = cast("BinaryIO", getattr(child, name))
    tail = Tail(stream)
    end_group(child, seconds)
    tail.join(1.0)
    stream.close()
    return child.returncode, tail.lines


class Worker:
    """A service in a child process, ended when this object is collected or at exit.

    Args:
        service: the name of a module that runs a `service.Service`; with `python` the path of a script.
        args: its arguments.
        deadline: that of each request; a reply takes at most `CEILING` times `Deadline.each` of wall time.
        emulated: True if a CPU emulates what the child uses; for the owner, who chooses the deadline.
        memory_limit: maximum bytes of the child and its descendants together.
        env: its environment; None inherits ours.
        python: the interpreter of a script, in isolated mode.
        cwd: its working directory; None for ours.
        patience: seconds to wait for its end on `close`.
        parse: parses the JSON of a reply; raises ValueError if invalid.
        under: the words of a command that runs the service, such as a profiler; not with `python`.
        interpreter: the words of a command that is the Python of another, emulated processor; empty for ours.
    """

    def __init__(
        self,
        service: str | Path,
        args: Sequence[str] = (),
        *,
        deadline: Deadline,
        memory_limit: int | None = None,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
        cwd: Path | None = None,
        patience: float = PATIENCE,
        parse: Callable[[bytearray], Any] = json.loads,
        under: Sequence[str] = (),
        emulated: bool = False,
        interpreter: Sequence[str] = (),
    ) -> None:
        self.deadline = deadline
        self.emulated = emulated or bool(interpreter)
        self.death = ""
        """How the child ended, for a message; empty while it lives."""
        start = partial(spawn, service, args, python=python)
        if under or interpreter:
            start = partial(spawn_command, [*under, *words(str(service), interpreter), *args])
        pipe = subprocess.PIPE
        self._child = start(env=env, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd)
        self._tail = Tail(cast("BinaryIO", self._child.stderr))
        self._watch = _Watch(self._child.pid, memory_limit)
        streams = cast("BinaryIO", self._child.stdout), cast("BinaryIO", self._child.stdin)
        self._wire = Wire(*streams, self._watch, MEMORY_INTERVAL)
        self._parse = parse
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._child, self._wire, self._tail, patience)

    @property
    def pid(self) -> int:
        """The pid of the service; its supervisor's if the system does not report it."""
        pid = worker_pid(self._child)
        return self._child.pid if pid is None else pid

    def lives(self) -> bool:
        """Return True if the child has not ended."""
        return not self.death and not ended(self._child, 0)

    def close(self) -> None:
        """Close the pipes, wait for the child, and end it if it does not end by itself."""
        self.death = self.death or "its process has ended"
        self._finalizer()

    def ask(
        self,
        header: Header | None,
        blobs: Sequence[Any] = (),
        *,
        sizes: Sequence[int] = (),
        deadline: Deadline | None = None,
    ) -> tuple[Header, list[memoryview]]:
        """Send a request and return its reply.

        The blobs of the reply must have `sizes` bytes. Without a header, send nothing: wait for the service's first
        message, or another reply to the last request. `deadline`: instead of the worker's own.

        Raises:
            ConformanceError: the service raised it.
            WorkerDiedError: the child died, now or before.
            WorkerTimeoutError: no reply in time; the child was ended.
        """
        deadline = self.deadline if deadline is None else deadline
        with self._lock:
            if self.death:
                raise WorkerDiedError(self.death, (), self.death)
            wall = deadline.wall
            self._watch.clock = _Clock(self._child.pid, deadline.each)
            self._wire.deadline = deadline.within(CEILING * deadline.each)
            try:
                if header is not None:
                    send(self._wire, header, blobs)
                reply, found = receive(self._wire, sizes, self._parse)
            except (Closed, OSError):
                alive = not ended(self._child, WIRE_PATIENCE)
                raise self._dead("it closed its pipe and was killed" if alive else "") from None
            except Garbage:
                raise self._dead("something else wrote on its pipe, so it was killed") from None
            except _MemoryLimitError as e:
                raise self._dead(str(e)) from None
            except Late as e:
                lines, how = self._last_lines(), str(e) or f"no answer within {wall:.3g} s"
                self.death = f"{how}, its process was ended{_quote(lines)}"
                raise WorkerTimeoutError(how, lines, self.death) from None
            except BaseException:  # an interrupt leaves half a frame in the pipe
                self.death = "its process was ended by an interrupt"
                end_group(self._child)
                self._finalizer()
                raise
        if "error" in reply:
            raise unpack_error(reply)
        return reply, found

    def _dead(self, how: str) -> WorkerDiedError:
        lines = self._last_lines()
        how = how or _how(self._child.returncode)
        self.death = f"its process died ({how}){_quote(lines)}"
        return WorkerDiedError(how, lines, self.death)

    def _last_lines(self) -> list[str]:
        """End the child and its descendants; return its last lines of stderr."""
        end_group(self._child)
        self._finalizer()
        return self._tail.lines


def unpack_error(reply: Mapping[str, Any]) -> ConformanceError:
    """Return the exception that a service sent, as the same class."""
    cls = BY_NAME.get(str(reply["error"]), BackendError)
    message = str(reply.get("message", ""))[:LONGEST_MESSAGE]
    if cls is CaseFileError:
        return CaseFileError(str(reply.get("field", ""))[:LONGEST_MESSAGE], message)
    if issubclass(cls, BackendError):
        return cls(message, words=str(reply.get("words", ""))[:LONGEST_MESSAGE])
    return cls(message)


def _quote(lines: Sequence[str]) -> str:
    return f": {' / '.join(lines)}" if lines else ""


def _held(pid: int) -> Callable[[int], int | None]:
    from .memory import Below  # noqa: PLC0415  # psutil is slow to import; no child of a `Worker` measures one

    return Below(pid).held


def _used(pid: int) -> dict[tuple[int, int], float]:
    from .memory import used_below  # noqa: PLC0415  # as above

    return used_below(pid)


def _idle() -> float:
    from .memory import idle  # noqa: PLC0415  # as above

    return idle()


def _end(child: Child, wire: Wire, tail: Tail, patience: float) -> None:
    if not child.ours:
        return
    wire.close()
    with suppress(OSError):
        cast("BinaryIO", child.stdin).close()
    end_group(child, patience)
    cast("BinaryIO", child.stdout).close()
    tail.join(1.0)  # a process that left the group may keep stderr open
    cast("BinaryIO", child.stderr).close()


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code} in the middle of it"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name}, as when a system runs out of memory" if name == "SIGKILL" else name
