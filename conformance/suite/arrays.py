"""Raw byte arrays out of an `.npz` that may come from a stranger."""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from conformance.case.strict import Memory
from conformance.ggml.errors import CaseFileError
from conformance.ggml.tensor import Bytes

_NPY_HEADER = 4096  # bytes at most; NumPy writes 128
# NumPy's own reader tokenises and evaluates the header; all that a capture holds has this one.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '\|u1', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),\), \} *\n",
    re.DOTALL,
)
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
        if not size < member.file_size <= size + _NPY_HEADER:
            raise CaseFileError(
                field, f"{size} bytes and a header expected, as its tensor takes; {member.file_size} in all found"
            )
        self.memory.keep(member.file_size, field)
        try:
            raw = self._zip.read(member)
        except _BROKEN as e:
            raise CaseFileError(field, f"cannot be read: {e}") from None
        head = _NPY.match(raw)
        if head is None:
            raise CaseFileError(field, "a .npy array of one dimension and uint8 expected, something else found")
        at = 10 + int.from_bytes(raw[8:10], "little")
        if int(head[1]) != size or len(raw) - at != size:
            raise CaseFileError(field, f"{size} bytes expected, an array of {int(head[1])} in {len(raw) - at} found")
        return np.frombuffer(raw, np.uint8, size, at)
