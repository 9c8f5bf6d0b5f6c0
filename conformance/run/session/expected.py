"""Expected values on disk, so that later runs, of any backend, need not compute them again.

A file's name is the digest of everything on which its values depend: the content of the case (graphs, strides,
parameters and bytes, not its id), the arithmetic, and the code that computes (`code`). After a change of a kernel no
old file is found. A file begins with a checksum; if it does not match (a partial write, a full disk), values are
computed again. Files are renamed into place, so any number of processes may share the folder.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from conformance import shipped
from conformance.backend.interface import describe
from conformance.backend.registry import adapter
from conformance.builds import archive
from conformance.case import codec
from conformance.case.case import Case, Step
from conformance.ggml.arithmetic import Arithmetic
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Bytes, Tensor, packed_nbytes
from conformance.run import cost
from conformance.run.execute import StepValues

PLACE = "CONFORMANCE_EXPECTED"
"""Environment variable: the folder of the cache; empty for no cache."""
LIMIT = 2 << 30
"""Maximum bytes of all files."""
WORTH = 2_000_000
"""Minimum operations of a cached case, by `cost`."""
PER_BYTE = 8
"""Minimum operations per byte of a cached case; below, a digest may take longer."""
_REFERENCE = "cpu"
_CHECK = 8
"""Size of the CRC-32 in bytes; three times as fast as a digest."""
_PAGE = 4096
"""Minimum bytes of a file on disk."""
_HOUR = 3600.0
_UNFINISHED = ".unfinished-"


def folder() -> Path | None:
    """Return the cache folder: `PLACE`, or `expected` in the user's caches; None for no cache."""
    said = os.environ.get(PLACE)
    if said is None:
        return archive.cache().parent / "expected"
    return Path(said) if said else None


def files() -> list[Path]:
    """Return the code that computes expected values: reference, adapter interface, execution."""
    rooms = [Path(inspect.getfile(adapter(_REFERENCE))).parent, *map(shipped.path, ("ggml", "case", "backend"))]
    steps = [shipped.path("run", "execute.py"), shipped.path("suite", "batch.py")]
    return [*(p for room in rooms for p in sorted(room.rglob("*.py"))), *steps]


@cache
def code() -> str:
    """Return the digest of that code and of the versions of Python and NumPy."""
    return digest(files())


def digest(paths: Iterable[Path]) -> str:
    """Return the digest of files and of the versions of Python and NumPy."""
    whole = hashlib.sha256(repr((np.__version__, platform.python_version(), platform.machine())).encode())
    for path in paths:
        whole.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """The file of one case's values in one arithmetic."""

    case: Case
    path: Path

    def read(self) -> list[StepValues] | None:
        """Read the values; None if there are none, or the checksum is wrong."""
        sizes = [packed_nbytes(t) for _, t, _ in self._places()]
        try:
            held = np.fromfile(self.path, np.uint8)
        except OSError:
            return None
        data = held[_CHECK:]
        if data.nbytes != sum(sizes) or _checksum([data]) != held[:_CHECK].tobytes():
            with suppress(OSError):
                self.path.unlink()
            return None
        with suppress(OSError):  # the least recently used are deleted first
            os.utime(self.path)
        values = [StepValues() for _ in self.case.steps]
        parts = np.split(data, np.cumsum(sizes)[:-1])
        for (k, t, is_cache), part in zip(self._places(), parts, strict=True):
            (values[k].caches if is_cache else values[k].outputs)[t] = part
        return values

    def write(self, values: list[StepValues]) -> int:
        """Write the values and return the number of bytes; OSError if it fails."""
        arrays = [(values[k].caches if is_cache else values[k].outputs)[t] for k, t, is_cache in self._places()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.path.parent)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(_checksum(arrays))
                f.writelines(map(_bytes, arrays))
            Path(name).replace(self.path)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise
        return _CHECK + sum(a.nbytes for a in arrays)

    def _places(self) -> Iterator[tuple[int, Tensor, bool]]:
        """Yield step, tensor, and True for a cache, of each value."""
        caches = self.case.caches()
        for k, step in enumerate(self.case.steps):
            yield from ((k, t, False) for t in dict.fromkeys(step.outputs))
            yield from ((k, t, True) for t in caches)


def _checksum(arrays: Iterable[Bytes]) -> bytes:
    crc = 0
    for a in arrays:
        crc = zlib.crc32(_bytes(a), crc)
    return crc.to_bytes(_CHECK, "little")


def _bytes(a: Bytes) -> memoryview:
    return np.ascontiguousarray(a).data


def here() -> Expected | None:
    """Return the cache of this machine; None if `PLACE` disables it."""
    place = folder()
    return None if place is None else Expected(place)


class Expected:
    """A folder of files, at most `limit` bytes."""

    def __init__(self, place: Path, limit: int = LIMIT) -> None:
        self._place = place
        self._limit = limit
        self._written = 0
        self._broken = False
        """True if the folder cannot be written."""

    def entry(self, case: Case, arithmetic: Arithmetic) -> Entry | None:
        """Return the entry of `case`; None if it is too cheap or too large to cache."""
        if type(arithmetic) is not Arithmetic:  # `key` does not cover a subclass
            return None
        if cost.total(case, arithmetic) < max(WORTH, PER_BYTE * case.nbytes):
            return None
        size = sum(packed_nbytes(t) for s in case.steps for t in (*s.outputs, *case.caches()))
        if not 0 < size <= self._limit // 8:
            return None
        try:
            name = key(case, arithmetic)
        except GraphError:  # it cannot be encoded
            return None
        return Entry(case, self._place / name[:2] / name[2:])

    def add(self, entry: Entry, values: list[StepValues]) -> None:
        """Write the values of an entry, if possible."""
        if self._broken:
            return
        try:
            self._written += entry.write(values)
        except OSError:
            self._broken = True
        if self._written > self._limit // 8:
            self.trim()

    def trim(self) -> None:
        """After writes, delete the oldest files above the limit, and those of killed processes."""
        if not self._written:
            return
        self._written = 0
        found = sorted(_listed(self._place))
        now = found[-1][0] if found else 0.0
        size = sum(nbytes for _, nbytes, _ in found)
        least = self._limit - self._limit // 4 if size > self._limit else size
        for read, nbytes, path in found:
            left = path.name.startswith(_UNFINISHED)
            if size > least or (left and now - read > _HOUR):
                with suppress(OSError):
                    path.unlink()
                size -= nbytes


def _listed(place: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield time of last use, bytes on disk and path of each file that still exists."""
    for path in place.glob("??/*"):
        with suppress(OSError):
            found = path.lstat()
            yield found.st_mtime, -(-found.st_size // _PAGE) * _PAGE, path


def key(case: Case, arithmetic: Arithmetic) -> str:
    """Return the digest of everything on which the values of `case` depend."""
    steps = [Step(s.graph, s.inputs, s.outputs) for s in case.steps]
    doc, blobs = codec.dump(replace(_BARE, persistent=case.persistent, steps=steps))
    said = [code(), describe(arithmetic), doc, [[name, data.nbytes] for name, data in blobs.items()]]
    whole = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=32)
    for data in blobs.values():
        whole.update(_bytes(data))
    return whole.hexdigest()


_BARE = Case("expected", {}, [])
