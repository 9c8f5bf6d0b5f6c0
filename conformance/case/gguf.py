"""A strict reader for the header of an untrusted GGUF file.

The reader of the `gguf` package trusts every count: it builds one array object per element in Python loops, clips reads
past the end and multiplies dimensions without an overflow check. So that package only writes case files, and this
module reads them; it allocates 16 bytes per string and 24 per tensor, never more than the file's size justifies.

It accepts a subset of GGUF: version 3, little endian, only the caller's keys with values of their `Kind`, tensors in
the order of their offsets without gaps except padding to 32 bytes, and nothing after the last one.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

import numpy as np

from conformance.ggml.errors import CaseFileError
from conformance.ggml.types import TYPES, GGMLType

MAGIC = b"GGUF"
GGUF_VERSION = 3
ALIGNMENT = 32
MAX_KEY = 65535
MAX_TENSOR_NAME = 63
_TYPE_BY_ID: dict[int, GGMLType] = {t.id: t for t in TYPES.values()}
_ARRAY = 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Kind(Enum):
    """Value types in a case file: GGUF's type id, for an array also that of its elements."""

    UINT32 = (4,)
    STRING = (8,)
    UINT32S = (_ARRAY, 4)
    STRINGS = (_ARRAY, 8)


@dataclass(frozen=True, slots=True)
class Strings:
    """A GGUF string, or an array of them: offset and size of each in the file."""

    offsets: array[int]
    sizes: array[int]

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(slots=True)
class Header:
    """Values by key, and offset and size of each tensor's bytes."""

    strings: dict[str, Strings] = field(default_factory=dict)
    numbers: dict[str, array[int]] = field(default_factory=dict)
    offsets: array[int] = field(default_factory=lambda: array("q"))
    """Offset of tensor i from the start of the file."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """Size of tensor i in bytes."""
    end: int = 0
    """Offset of the byte after the last tensor's info; the seal covers everything before it."""


class _Walk:
    """A read position in the buffer, never past its end."""

    __slots__ = ("at", "buffer", "size")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def take(self, n: int, field: str) -> int:
        """Skip `n` bytes and return the offset of the first."""
        at = self.at
        if n > self.size - at:
            raise CaseFileError(field, f"{n} bytes at {at} expected, the file ends at {self.size}: it is truncated")
        self.at = at + n
        return at

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, field))[0]
        return value

    def count(self, least: int, field: str) -> int:
        """Read the number of entries, of at least `least` bytes each, that follow."""
        n = self.u64(field)
        if n > (self.size - self.at) // least:
            raise CaseFileError(field, f"{n} entries expected, {self.size - self.at} bytes follow: it is truncated")
        return n

    def text(self, most: int, field: str) -> str:
        n = self.u64(field)
        if n > most:
            raise CaseFileError(field, f"at most {most} bytes of text expected, {n} found")
        at = self.take(n, field)
        try:
            return str(self.buffer[at : at + n], "utf-8")
        except UnicodeDecodeError:
            raise CaseFileError(field, "UTF-8 expected, other bytes found") from None


def _strings(walk: _Walk, field: str, n: int) -> Strings:
    strings = Strings(array("q"), array("q"))
    for _ in range(n):
        size = walk.u64(field)
        strings.offsets.append(walk.take(size, field))
        strings.sizes.append(size)
    return strings


def _read_value(walk: _Walk, key: str, kind: Kind, header: Header) -> None:
    ids: tuple[int, ...] = (walk.u32(key),)
    if ids == (_ARRAY,):
        ids = (_ARRAY, walk.u32(key))
    if ids != kind.value:
        raise CaseFileError(key, f"a {kind.name} expected, a value of kind {'/'.join(map(str, ids))} found")
    if kind is Kind.STRING:
        header.strings[key] = _strings(walk, key, 1)
    elif kind is Kind.STRINGS:
        header.strings[key] = _strings(walk, key, walk.count(8, key))
    else:
        n = 1 if kind is Kind.UINT32 else walk.count(4, key)
        at = walk.take(4 * n, key)
        header.numbers[key] = array("q", (v for (v,) in struct.iter_unpack("<I", walk.buffer[at : walk.at])))


def read_header(buffer: memoryview, keys: Mapping[str, Kind]) -> Header:
    """Read the header of a GGUF file; check counts, sizes and offsets with the file's size.

    `keys` maps allowed keys to the type of their values. CaseFileError names the part of the file and what is wrong
    with it.
    """
    walk = _Walk(buffer)
    if bytes(buffer[:4]) != MAGIC:
        raise CaseFileError("magic", f"{MAGIC!r} expected, {bytes(buffer[:4])!r} found: not a GGUF file")
    walk.take(4, "magic")
    version = walk.u32("gguf.version")
    if version != GGUF_VERSION:
        raise CaseFileError("gguf.version", f"{GGUF_VERSION} expected, {version} found")
    n_tensors = walk.u64("gguf.tensor_count")
    n_values = walk.u64("gguf.kv_count")
    if n_values > len(keys):
        raise CaseFileError("gguf.kv_count", f"at most {len(keys)} expected, {n_values} found")
    header = Header()
    for i in range(n_values):
        key = walk.text(MAX_KEY, f"kv[{i}].key")
        if key not in keys:
            raise CaseFileError(f"kv[{i}].key", f"one of {', '.join(keys)} expected, {key[:80]!a} found")
        if key in header.strings or key in header.numbers:
            raise CaseFileError(key, "occurs twice")
        _read_value(walk, key, keys[key], header)
    _read_tensors(walk, header, n_tensors)
    return header


def _read_tensors(walk: _Walk, header: Header, n: int) -> None:
    if n > (walk.size - walk.at) // 33:  # minimum size of a tensor's info
        raise CaseFileError("gguf.tensor_count", f"{n} tensors expected, {walk.size - walk.at} bytes follow")
    starts, sizes, names = header.offsets, header.sizes, array("Q")
    end = 0  # end of the tensors so far, from the start of the data
    for i in range(n):
        field = f"tensors[{i}]"
        name = walk.text(MAX_TENSOR_NAME, f"{field}.name")
        # a 64-bit digest instead of the name bounds a hundred thousand of them by the file's own size
        names.append(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))
        size = _tensor_size(walk, field)
        offset = walk.u64(f"{field}.offset")
        if offset != end:
            raise CaseFileError(f"{field}.offset", f"{end} expected (no gap, no overlap), {offset} found")
        starts.append(offset)
        sizes.append(size)
        end = _padded(offset + size)
    if np.unique(np.frombuffer(names, np.uint64)).size != n:
        raise CaseFileError("tensors", "two tensors have the same name")
    header.end = walk.at
    data = _padded(header.end)
    if data + end != walk.size:
        raise CaseFileError("data", f"a file of {data + end} bytes expected, {walk.size} found")
    at = header.end
    for i in range(n):
        starts[i] += data
        _check_padding(walk.buffer, at, starts[i])
        at = starts[i] + sizes[i]
    _check_padding(walk.buffer, at, walk.size)


def _tensor_size(walk: _Walk, field: str) -> int:
    n_dims = walk.u32(f"{field}.n_dims")
    if not 1 <= n_dims <= 4:
        raise CaseFileError(f"{field}.n_dims", f"1 to 4 expected, {n_dims} found")
    ne = struct.unpack_from(f"<{n_dims}Q", walk.buffer, walk.take(8 * n_dims, f"{field}.ne"))
    type_id = walk.u32(f"{field}.type")
    type_ = _TYPE_BY_ID.get(type_id)
    if type_ is None:
        raise CaseFileError(f"{field}.type", f"the id of a ggml type expected, {type_id} found")
    n = 1
    for k in ne:
        n *= k
        if not 0 < n < 2**63:  # tensors without elements are not stored
            raise CaseFileError(f"{field}.ne", f"{list(ne)} is not the shape of a stored tensor")
    if ne[0] % type_.blck_size:
        raise CaseFileError(f"{field}.ne", f"ne[0] must be a multiple of {type_}'s block of {type_.blck_size}: {ne[0]}")
    size = n // type_.blck_size * type_.type_size
    if size > walk.size:
        raise CaseFileError(f"{field}.ne", f"{list(ne)} of {type_} take {size} bytes, the whole file has {walk.size}")
    return size


def _check_padding(buffer: memoryview, at: int, end: int) -> None:
    if any(buffer[at:end]):
        raise CaseFileError("data", f"zeros expected between bytes {at} and {end}, other bytes found")


def _padded(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def crc32(buffer: memoryview, offset: int, size: int) -> int:
    """Compute the CRC-32 of a part of the file without a copy."""
    return zlib.crc32(buffer[offset : offset + size])
