"""Raw byte arrays out of an `.npz` that may come from a stranger."""

from __future__ import annotations

import struct
import zipfile
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np

from conformance.cgraph.errors import CaseFileError
from conformance.cgraph.strictjson import Memory
from conformance.cgraph.tensor import Bytes

_NPY_HEADER = 4096  # bytes at most; NumPy writes 128
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError, MemoryError)
# RuntimeError: encrypted; its subclass NotImplementedError: a method of compression that zipfile does not know.


class Arrays:
    """One-dimensional uint8 arrays by name, each of the size the reader asks for: checked before it is inflated."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self.memory = memory
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise CaseFileError("npz", f"{path} expected beside the capture's JSON, not found") from None
        except _BROKEN as e:
            raise CaseFileError("npz", f"{path} cannot be read: {e}") from None
        self._members = {m.filename.removesuffix(".npy"): m for m in self._zip.infolist()}

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str, size: int) -> Bytes:
        """The array called `name`, which must have `size` bytes.

        Raises:
            CaseFileError: it is missing, of another size or form, or broken.
        """
        member = self._members.get(name)
        field = f"npz.{name}"
        if member is None:
            raise CaseFileError(field, "is missing")
        if not size <= member.file_size <= size + _NPY_HEADER:
            raise CaseFileError(
                field, f"{size} bytes expected, as its tensor takes; {member.file_size} with its header found"
            )
        self.memory.keep(2 * member.file_size, field)  # inflated, and once more out of its header's buffer
        try:
            raw = self._zip.read(member)
            at, dtype, shape = _npy_header(raw)
        except _BROKEN as e:
            raise CaseFileError(field, f"no .npy array that can be read: {e}") from None
        if dtype != np.uint8 or shape != (size,) or len(raw) - at != size:
            raise CaseFileError(field, f"{size} uint8 expected, shape {shape} of {dtype} found")
        return np.frombuffer(raw, np.uint8, size, at)


def _npy_header(raw: bytes) -> tuple[int, np.dtype[np.generic], tuple[int, ...]]:
    """Where the data of a `.npy` begins, its type and shape; nothing is unpickled or evaluated but a literal."""
    file = BytesIO(raw[:_NPY_HEADER])
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version 1.0 of the .npy format expected, {version} found")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return file.tell(), dtype, shape
