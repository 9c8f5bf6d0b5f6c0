"""What travels between a backend's process and ours: one JSON header, then raw byte arrays. No pickle.

A frame is `<u4` length of the header, the header in UTF-8, and its blobs one after another; the header's `blobs` gives
their sizes in bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import BinaryIO, Protocol

import numpy as np

from conformance.backend.interface import Support
from conformance.backend.strict import shortened
from conformance.case.case import JSON
from conformance.case.strict import Memory, parse_json
from conformance.ggml import errors
from conformance.ggml.errors import BackendError, CaseFileError, ConformanceError
from conformance.ggml.tensor import Bytes

_LENGTH = struct.Struct("<I")
_JOIN = 1 << 16
"""Blobs up to this size are copied together first; a write for each would cost more."""

_LONGEST = 1 << 28
"""Bytes of a request's header; more is no header of ours."""
LONGEST_REPLY = 1 << 24
"""Bytes of a reply's header."""
_PARSED = 1 << 28
"""Bytes of memory that parsing a reply's header may take."""

ERRORS: dict[str, type[ConformanceError]] = {
    c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ConformanceError)
}
"""The one exception family, by class name."""


class Closed(Exception):  # noqa: N818  # an end, not an error of its own
    """The other side is gone."""


class Garbage(Exception):  # noqa: N818  # as above
    """What came is no frame: someone else wrote between ours."""


class Source(Protocol):
    """What frames are read from: a stream, or a wire with a deadline."""

    def readinto(self, view: memoryview, /) -> int:
        """Read at least one byte; 0 at the end."""


class Sink(Protocol):
    """What frames are written to."""

    def write(self, data: bytearray | memoryview, /) -> object:
        """Write all of it."""

    def flush(self) -> None:
        """Let it go."""


def send(stream: Sink, header: dict[str, JSON], blobs: Sequence[Bytes] = ()) -> None:
    """Write one frame and flush it.

    Raises:
        OSError: the other side is gone.
    """
    header["blobs"] = [b.nbytes for b in blobs]
    text = json.dumps(header, separators=(",", ":")).encode()
    pending = bytearray(_LENGTH.pack(len(text)))
    pending += text
    for blob in blobs:
        if blob.nbytes <= _JOIN:
            pending += blob.data if blob.flags.c_contiguous else blob.tobytes()
            continue
        stream.write(pending)
        stream.write(np.ascontiguousarray(blob).data)
        pending = bytearray()
    stream.write(pending)
    stream.flush()


def receive(stream: Source | BinaryIO, sizes: Sequence[int] | None = None) -> tuple[dict[str, JSON], list[Bytes]]:
    """Read one frame; the arrays share one buffer of their own and may be written to.

    Args:
        stream: where it comes from.
        sizes: of a reply, which is not trusted: how many bytes each of its blobs must have; an error has none. Of a
            request, which is this program's own, None.

    Raises:
        Closed: the stream ended.
        Garbage: what came is no frame, or not the answer.
    """
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length > (_LONGEST if sizes is None else LONGEST_REPLY):
        raise Garbage
    raw = _exactly(stream, length)
    try:
        header = json.loads(raw) if sizes is None else parse_json(memoryview(raw), Memory(_PARSED, 0), "header")
        found = header["blobs"]
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError, CaseFileError):
        raise Garbage from None
    if sizes is not None and found != ([] if "error" in header else list(sizes)):
        raise Garbage  # before anything of that size is allocated
    data = np.frombuffer(_exactly(stream, sum(found)), np.uint8)
    blobs: list[Bytes] = []
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


def pack_error(error: BaseException) -> dict[str, JSON]:
    """An exception as a header: one of our family by name and message, any other as a `BackendError` that names it."""
    name, message = type(error).__name__, shortened(_words(error))
    if isinstance(error, CaseFileError):
        message = message.removeprefix(f"{error.field}: ")
        return {"error": name, "message": message, "field": shortened(str(error.field))}
    if isinstance(error, ConformanceError):
        return {"error": name if name in ERRORS else BackendError.__name__, "message": message}
    if isinstance(error, SystemExit):
        return {"error": BackendError.__name__, "message": f"the adapter called sys.exit({error.code!r:.80})"}
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return {"error": BackendError.__name__, "message": f"the adapter raised {name}: {message}{where}"}


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001  # an adapter's exception may have a fault of its own
        return f"(it cannot be shown: {type(e).__name__})"


def unpack_error(header: dict[str, JSON]) -> ConformanceError:
    """The exception that `pack_error` wrote, as the same class."""
    cls = ERRORS.get(str(header["error"]), BackendError)
    message = shortened(str(header.get("message", "")))
    if cls is CaseFileError:
        return CaseFileError(shortened(str(header.get("field", ""))), message)
    return cls(message)


def pack_support(supports: Sequence[Support]) -> list[JSON]:
    """Each yes as null, each no as its reason.

    Raises:
        BackendError: an answer is none.
    """
    for s in supports:
        if not isinstance(s, Support):
            raise BackendError(f"supports: yes or no with a reason expected, {s!r:.80} found")
    return [None if s.ok else shortened(str(s.reason)) for s in supports]


def unpack_support(values: list[JSON]) -> list[Support]:
    """The other way."""
    return [Support(True) if v is None else Support(False, v) for v in values]
