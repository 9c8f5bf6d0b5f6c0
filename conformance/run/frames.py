"""What travels between a backend's process and ours: one JSON header, then raw byte arrays. No pickle.

A frame is `<u4` length of the header, the header in UTF-8, and its blobs one after another; the header's `blobs` gives
their sizes in bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from conformance.backend.interface import Support
from conformance.cgraph import errors
from conformance.cgraph.case import JSON
from conformance.cgraph.errors import BackendError, CaseFileError, ConformanceError
from conformance.cgraph.tensor import Bytes

_LENGTH = struct.Struct("<I")
_JOIN = 1 << 16
"""Blobs up to this size are copied together first; a write for each would cost more."""

_LONGEST = 1 << 28
"""Bytes of a header; more is no header of ours."""

ERRORS: dict[str, type[ConformanceError]] = {
    c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ConformanceError)
}
"""The one exception family, by class name."""


class Closed(Exception):  # noqa: N818  # an end, not an error of its own
    """The other side is gone."""


class Garbage(Exception):  # noqa: N818  # as above
    """What came is no frame: someone else wrote between ours."""


def send(stream: BinaryIO, header: dict[str, JSON], blobs: Sequence[Bytes] = ()) -> None:
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


def receive(stream: BinaryIO) -> tuple[dict[str, JSON], list[Bytes]]:
    """Read one frame; the arrays share one buffer of their own and may be written to.

    Raises:
        Closed: the stream ended.
        Garbage: what came is no frame.
    """
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length > _LONGEST:
        raise Garbage
    try:
        header: dict[str, JSON] = json.loads(bytes(_exactly(stream, length)))
        sizes: list[int] = header["blobs"]
        data = np.frombuffer(_exactly(stream, sum(sizes)), np.uint8)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError):
        raise Garbage from None
    blobs: list[Bytes] = []
    at = 0
    for size in sizes:
        blobs.append(data[at : at + size])
        at += size
    return header, blobs


def _exactly(stream: BinaryIO, size: int) -> bytearray:
    out = bytearray(size)
    view = memoryview(out)
    got = 0
    while got < size:
        n = stream.readinto(view[got:])  # type: ignore[attr-defined]  # every buffered reader has it
        if not n:
            raise Closed
        got += n
    return out


def pack_error(error: Exception) -> dict[str, JSON]:
    """An exception as a header: one of our family by name and message, any other as a `BackendError` that names it."""
    if isinstance(error, CaseFileError):
        message = str(error).removeprefix(f"{error.field}: ")
        return {"error": type(error).__name__, "message": message, "field": error.field}
    if isinstance(error, ConformanceError):
        return {"error": type(error).__name__, "message": str(error)}
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return {"error": BackendError.__name__, "message": f"{type(error).__name__}: {error}{where}"}


def unpack_error(header: dict[str, JSON]) -> ConformanceError:
    """The exception that `pack_error` wrote, as the same class."""
    cls = ERRORS.get(header["error"], BackendError)
    if cls is CaseFileError:
        return CaseFileError(header["field"], header["message"])
    return cls(header["message"])


def pack_support(supports: Sequence[Support]) -> list[JSON]:
    """Each yes as null, each no as its reason."""
    return [None if s.ok else s.reason for s in supports]


def unpack_support(values: list[JSON]) -> list[Support]:
    """The other way."""
    return [Support(True) if v is None else Support(False, v) for v in values]
