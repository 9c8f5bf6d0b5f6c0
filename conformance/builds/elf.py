"""Read an ELF library without loading it: sections, symbols, relocations, constants."""

from __future__ import annotations

import mmap
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from conformance.ggml.errors import UnavailableError

FUNCTION, OBJECT, FILE = 2, 1, 4
"""Types of symbols: STT_FUNC, STT_OBJECT, STT_FILE."""
RELATIVE = {"EM_X86_64": 8, "EM_AARCH64": 1027}
"""Machine -> the type of a relocation without a symbol, whose addend is an address."""
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_WRITABLE, _EXECUTABLE = 1, 4
_PRINTABLE = re.compile(rb"[\t\n\r\x1b -~]+\0")
_LONGEST = 1 << 20
"""Maximum bytes of a text."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section in memory."""

    name: str
    address: int
    size: int
    offset: int
    """Position in the file."""
    flags: int
    is_filled: bool
    """False if the file holds no bytes of it, as for `.bss`."""

    @property
    def is_code(self) -> bool:
        """True if it is executable."""
        return bool(self.flags & _EXECUTABLE)

    @property
    def is_constant(self) -> bool:
        """True if it holds constants without relocations."""
        return self.is_filled and not self.flags & (_WRITABLE | _EXECUTABLE)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function or object."""

    name: str
    address: int
    size: int
    type: int
    file: str
    """Name of its source file; empty unless it is local."""


class Image:
    """An ELF library for x86-64 or aarch64; UnavailableError for anything else."""

    def __init__(self, path: Path) -> None:
        from elftools.common.exceptions import ELFError  # noqa: PLC0415  # most commands compare nothing
        from elftools.elf.elffile import ELFFile  # noqa: PLC0415  # as above

        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.elf: Any = ELFFile(cast("Any", self._map))
            self.machine = str(self.elf["e_machine"])
            headers = [(s.name, s.header) for s in self.elf.iter_sections()]
        except (ELFError, ValueError, OSError) as e:
            raise UnavailableError(
                f"{path}: a library in ELF format expected: {str(e) or 'it is another one'}"
            ) from None
        if self.machine not in RELATIVE or not self.elf.little_endian or self.elf.elfclass != 64:
            raise UnavailableError(f"{path}: a library for x86-64 or aarch64 expected, it is for {self.machine}")
        self.headers = dict(headers)
        """Section -> its header."""
        self.sections = sorted(
            (
                Section(n, h["sh_addr"], h["sh_size"], h["sh_offset"], h["sh_flags"], h["sh_type"] != "SHT_NOBITS")
                for n, h in headers
                if h["sh_flags"] & 2 and h["sh_size"]
            ),
            key=lambda s: s.address,
        )
        """Sections in memory, by address."""
        self._starts = [s.address for s in self.sections]

    def data(self, name: str) -> bytes:
        """Return the bytes of a section; empty if there is none."""
        h = self.headers.get(name)
        if h is None or h["sh_type"] == "SHT_NOBITS":
            return b""
        return self._map[h["sh_offset"] : h["sh_offset"] + h["sh_size"]]

    def size(self, name: str) -> int:
        """Return the bytes of a section in the file; 0 if there is none."""
        h = self.headers.get(name)
        return 0 if h is None else int(h["sh_size"])

    def section(self, address: int) -> Section | None:
        """Return the section at an address."""
        i = bisect_right(self._starts, address) - 1
        if i < 0 or address >= self.sections[i].address + self.sections[i].size:
            return None
        return self.sections[i]

    def read(self, address: int, size: int) -> bytes:
        """Return at most `size` bytes at an address, up to the end of its section."""
        s = self.section(address)
        if s is None or not s.is_filled:
            return b""
        at = address - s.address
        return self._map[s.offset + at : s.offset + min(at + size, s.size)]

    def text(self, address: int) -> bytes | None:
        """Return the printable text at an address, without its NUL; None if there is none."""
        s = self.section(address)
        if s is None or not s.is_filled:
            return None
        found = _PRINTABLE.match(self._map, s.offset + address - s.address, s.offset + s.size)
        return found[0][:-1] if found and len(found[0]) <= _LONGEST else None

    @cached_property
    def symbols(self) -> list[Symbol]:
        """Functions and objects, of the full table if it was not stripped."""
        table, names = self._table
        found: list[Symbol] = []
        file = ""
        for at, info, _, section, value, size in table.tolist():
            kind = info & 15
            if kind == FILE:
                file = self._name(names, at)
            elif kind in (FUNCTION, OBJECT, 10) and section:
                local = file if info >> 4 == 0 else ""
                found.append(Symbol(self._name(names, at), value, size, FUNCTION if kind == 10 else kind, local))
        return found

    @property
    def _table(self) -> tuple[Any, bytes]:
        for table, names in ((".symtab", ".strtab"), (".dynsym", ".dynstr")):
            if data := self.data(table):
                return np.frombuffer(data[: len(data) // 24 * 24], _SYMBOL), self.data(names)
        return np.empty(0, _SYMBOL), b""

    @property
    def is_stripped(self) -> bool:
        """True if only exported functions have names."""
        return ".symtab" not in self.headers

    @staticmethod
    def _name(names: bytes, at: int) -> str:
        return names[at : names.find(b"\0", at)].decode("utf-8", "replace")

    @cached_property
    def _dynamic(self) -> list[tuple[str, int]]:
        """Return name and section of each dynamic symbol."""
        data, names = self.data(".dynsym"), self.data(".dynstr")
        table = np.frombuffer(data[: len(data) // 24 * 24], _SYMBOL)
        return [(self._name(names, r[0]), r[3]) for r in table.tolist()]

    @property
    def exported(self) -> list[str]:
        """Names of exported symbols."""
        return sorted({name for name, section in self._dynamic if section and name})

    @property
    def expected(self) -> list[str]:
        """Names of functions and objects that it expects of other libraries."""
        return sorted({name for name, section in self._dynamic if not section and name})

    @cached_property
    def relocations(self) -> dict[int, str | int]:
        """Address -> the symbol, or the address, that the loader writes there."""
        found: dict[int, str | int] = {}
        relative = RELATIVE[self.machine]
        for name in (".rela.dyn", ".rela.plt"):
            data = self.data(name)
            for offset, kind, symbol, addend in np.frombuffer(data[: len(data) // 24 * 24], _RELOCATION).tolist():
                found[offset] = addend if kind == relative else self._dynamic[symbol][0] if symbol else addend
        return found

    @cached_property
    def functions(self) -> Addresses:
        """Symbols by address."""
        return Addresses(self.symbols)

    def label(self, target: str | int) -> str:
        """Return the symbol to which a relocation points; empty for an address without one."""
        if isinstance(target, str):
            return target
        found = self.functions.at(target)
        return "" if found is None else f"{found.name}+{target - found.address}"

    def dwarf(self) -> Any:  # noqa: ANN401  # pyelftools has no types
        """Return the debugging information."""
        return self.elf.get_dwarf_info(relocate_dwarf_sections=False)

    def borders(self) -> Iterator[tuple[int, int]]:
        """Yield address and size of each function that `.eh_frame` describes."""
        head = self.headers.get(".eh_frame_hdr")
        data = self.data(".eh_frame_hdr")
        if head is None or data[1:4] != b"\x1b\x03\x3b":  # the encodings that all linkers write
            return
        (count,) = struct.unpack_from("<I", data, 8)
        base = head["sh_addr"]
        for start, frame in struct.iter_unpack("<ii", data[12 : 12 + 8 * count]):
            entry = self.read(base + frame, 16)
            if len(entry) == 16:
                yield base + start, struct.unpack_from("<I", entry, 12)[0]


class Addresses:
    """Symbols by address."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self._symbols = sorted((s for s in symbols if s.name), key=lambda s: (s.address, s.size))
        self._starts = [s.address for s in self._symbols]

    def at(self, address: int) -> Symbol | None:
        """Return the symbol that contains an address."""
        i = bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        s = self._symbols[i]
        return s if address == s.address or address < s.address + s.size else None
