"""The two pipes to a child, read and written under a deadline, whoever holds their other ends."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import IO, Final

CHUNK = 1 << 16
POLLS: Final = hasattr(select, "poll")
"""Whether this system can wait for a pipe; where it cannot, a thread does for each."""


class Late(Exception):  # noqa: N818  # an end, not an error of its own
    """The deadline has passed."""


class Wire:
    """A source and sink of frames.

    Args:
        incoming: the child's output.
        outgoing: its input.
        look: called every `interval` seconds of waiting; it may raise.
        interval: seconds.
    """

    def __init__(
        self, incoming: IO[bytes], outgoing: IO[bytes], look: Callable[[], None] | None = None, interval: float = inf
    ) -> None:
        self.deadline = inf
        """By `time.monotonic`."""
        self._look = look
        self._interval = interval if look is not None else inf
        self._next = time.monotonic() + self._interval
        self._held = memoryview(b"")
        self._reader: _Polled | _Threaded = (_Polled if POLLS else _Threaded)(incoming, writes=False)
        self._writer: _Polled | _Threaded = (_Polled if POLLS else _Threaded)(outgoing, writes=True)

    def readinto(self, view: memoryview) -> int:
        """Read at least one byte; 0 at the end.

        Raises:
            Late: nothing came by the deadline.
        """
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
        """Write all of `data`.

        Raises:
            Late: it was not taken by the deadline.
            OSError: nobody reads.
        """
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._writer.write(rest) or self._wait(self._writer).write(rest) :]

    def flush(self) -> None:
        """Do nothing: no byte is buffered."""

    def close(self) -> None:
        """Stop waiting; the owner of the pipes closes them."""
        self._reader.close()
        self._writer.close()

    def _wait(self, side: _Polled | _Threaded) -> _Polled | _Threaded:
        while True:
            now = time.monotonic()
            if now >= self._next and self._look is not None:
                self._look()
                self._next = time.monotonic() + self._interval
            if side.ready(max(0.0, min(self.deadline, self._next) - now)):
                return side
            if time.monotonic() >= self.deadline:
                raise Late


class _Polled:
    """A pipe, on a system that can wait for one."""

    def __init__(self, stream: IO[bytes], *, writes: bool) -> None:
        self._fd = stream.fileno()
        os.set_blocking(self._fd, False)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT if writes else select.POLLIN)

    def ready(self, seconds: float) -> bool:
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
    """A pipe, on a system that cannot: a thread waits for it, and ends with it."""

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
