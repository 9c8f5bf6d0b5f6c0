"""The child side of a `Worker` and the frame protocol; imports only the standard library.

A frame is a `<u4` header length, the header (JSON in UTF-8) and its blobs; `blobs` in the header lists their sizes in
bytes. Pickle is not used. A reply with `error` (a class of `ggml.errors`) and `message` is raised in the caller.

`perf/compare_worker.py` loads this file by path, under the Python of another build of this package.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Protocol

_LENGTH = struct.Struct("<I")
_JOIN = 1 << 16
"""Blobs up to this size are copied together, because separate writes would take longer."""
_LONGEST_REQUEST = 1 << 28
LONGEST_REPLY = 1 << 24
"""Maximum bytes of a reply header."""

Header = dict[str, Any]
Frame = tuple[Header, Sequence[Any]]
"""A header and its blobs, one-dimensional buffers of bytes."""


class Closed(Exception):  # noqa: N818  # an end, not an error
    """The other side has closed the stream."""


class Garbage(Exception):  # noqa: N818  # as above
    """The bytes are not a frame, or not the expected reply: something else wrote to the stream."""


class Source(Protocol):
    """A readable stream of frames: a file, or a pipe with a deadline."""

    def readinto(self, view: memoryview, /) -> int:
        """Read at least one byte; return 0 at the end."""


class Sink(Protocol):
    """A writable stream of frames."""

    def write(self, data: bytearray | memoryview, /) -> object:
        """Write all of `data`."""

    def flush(self) -> None:
        """Flush all data."""


def send(stream: Sink, header: Header, blobs: Sequence[Any] = ()) -> None:
    """Write one frame and flush it; OSError if the other side is gone."""
    views = [memoryview(b) for b in blobs]
    text = json.dumps({**header, "blobs": [v.nbytes for v in views]}, separators=(",", ":")).encode()
    pending = bytearray(_LENGTH.pack(len(text)))
    pending += text
    for view in views:
        if view.nbytes <= _JOIN:
            pending += view if view.c_contiguous else view.tobytes()
            continue
        stream.write(pending)
        stream.write(view if view.c_contiguous else memoryview(view.tobytes()))
        pending = bytearray()
    stream.write(pending)
    stream.flush()


def receive(
    stream: Source | BinaryIO, sizes: Sequence[int] | None = None, parse: Callable[[bytearray], Any] = json.loads
) -> tuple[Header, list[memoryview]]:
    """Read one frame; the blobs share one writable buffer.

    `sizes` lists the bytes of each blob in a reply, because replies are untrusted (an error has no blobs); None for a
    request, which this program wrote itself. `parse` raises ValueError for invalid JSON.

    Raises:
        Closed: the stream ended.
        Garbage: the data is not a frame, or not the expected reply.
    """
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length > (_LONGEST_REQUEST if sizes is None else LONGEST_REPLY):
        raise Garbage
    raw = _exactly(stream, length)
    try:
        header: Header = parse(raw)
        found = header.pop("blobs")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise Garbage from None
    if sizes is not None and found != ([] if "error" in header else list(sizes)):
        raise Garbage  # before anything of that size is allocated
    data = memoryview(_exactly(stream, sum(found)))
    blobs: list[memoryview] = []
    at = 0
    for size in found:
        blobs.append(data[at : at + size])
        at += size
    return header, blobs


def _exactly(stream: Source | BinaryIO, size: int) -> bytearray:
    out = bytearray(size)
    view = memoryview(out)
    got = 0
    while got < size:
        n = stream.readinto(view[got:])  # type: ignore[union-attr]  # every buffered reader has it
        if not n:
            raise Closed
        got += n
    return out


def failure(error: Exception, kind: str = "") -> Frame:
    """Return the reply that raises `error` in the caller, as the class `kind` of `ggml.errors`."""
    return {"error": kind or type(error).__name__, "message": str(error)}, ()


class Service:
    """Request loop of a worker process over its original stdin and stdout.

    Both descriptors are replaced, so that output of libraries cannot end up between frames: prints go to stderr, and
    stdin is empty. Create it before any other library is loaded.
    """

    def __init__(self) -> None:
        self._incoming, self._outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def receive(self) -> tuple[Header, list[memoryview]]:
        """Return the next request; Closed if there are no more."""
        return receive(self._incoming)

    def send(self, header: Header, blobs: Sequence[Any] = ()) -> None:
        """Send a reply; does nothing if the caller is gone."""
        with suppress(BrokenPipeError):
            send(self._outgoing, header, blobs)

    def serve(self, answer: Callable[[Header, list[memoryview]], Frame]) -> None:
        """Answer requests until the caller closes the stream."""
        with suppress(Closed):
            while True:
                self.send(*answer(*self.receive()))
