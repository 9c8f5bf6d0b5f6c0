"""Buffers of lazy devices: the functions of `ggml_backend_buffer_i`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.ggml.errors import ConformanceError
from conformance.ggml.lib.library import Library

from .native import P, host, move
from .run import Run
from .timeline import Access, Addresses, Memory, Race

ALIGNMENT = 64
POISON = 0xFF
"""Byte of memory without a value: NaN in floats."""
TOTAL = 1 << 30
"""Bytes of memory of each device."""


@dataclass(frozen=True, slots=True)
class Place:
    """An access to a device's memory, and the host's address of it."""

    access: Access
    real: int


class Buffers:
    """The buffers of all devices, and the places of tensors in them."""

    def __init__(self, library: Library, run: Run) -> None:
        self._library, self._run = library, run
        self._init = library.function("ggml_backend_buffer_init")
        self._product = library.ops["MUL_MAT"]
        self._buffers: dict[int, Memory] = {}
        self._table: Any = None
        self.begin()

    def begin(self) -> None:
        """Start without memory; buffers of the last run must be freed."""
        self._addresses = Addresses()
        self.used = 0
        """Bytes of all buffers."""

    def __len__(self) -> int:
        return len(self._buffers)

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of the interface by name."""
        return {
            "free_buffer": self._free, "get_base": lambda b: self._buffers[b].base, "memset_tensor": self._memset,
            "clear": self._clear, "cpy_tensor": self._copy,
            **dict.fromkeys(("set_tensor", "set_tensor_2d"), lambda _, *a: self._transfer(True, *a)),
            **dict.fromkeys(("get_tensor", "get_tensor_2d"), lambda _, *a: self._transfer(False, *a)),
        }  # fmt: skip

    def use(self, table: ctypes.Structure) -> None:
        """Create buffers with this table of `callbacks` from now on."""
        self._table = table
        self._init.restype = P
        self._init.argtypes = (P, type(table), P, ctypes.c_size_t)

    @property
    def total(self) -> int:
        """Bytes of memory of each device, as the setting says."""
        fail = self._run.setting.fail
        return fail.n if fail.what == "memory" else TOTAL

    @property
    def left(self) -> int:
        """`total` without the bytes used; negative if they are more."""
        return self.total - self.used

    def alloc(self, device: str, buft: int, size: int) -> int:
        """Return a new `ggml_backend_buffer_t`; 0 if there is no memory left."""
        if self._run.fails("alloc"):
            return 0
        if size > self.left:
            self._run.failures += 1
            return 0
        raw = np.full(size + ALIGNMENT, POISON, np.uint8)
        skip = -raw.__array_interface__["data"][0] % ALIGNMENT
        memory = self._addresses.add(device, raw[skip : skip + size].data)
        buffer: int = self._init(buft, self._table, None, size)
        self._buffers[buffer] = memory
        self.used += size
        return buffer

    def _free(self, buffer: int) -> None:
        memory, timeline = self._buffers.pop(buffer), self._run.timeline
        end = memory.base + memory.data.nbytes
        whole = Access(memory.base, end, writes=True, what=f"frees {memory.name}")
        timeline.at_host("free_buffer", (whole,))
        memory.freed = timeline.now("free_buffer", whole)
        memory.data[:] = bytes([POISON]) * memory.data.nbytes
        self.used -= memory.data.nbytes

    def _clear(self, buffer: int, value: int) -> None:
        memory = self._buffers[buffer]
        whole = Access(memory.base, memory.base + memory.data.nbytes, writes=True, what=f"writes {memory.name}")
        self._run.timeline.at_host("clear", (whole,))
        memory.data[:] = bytes([value]) * memory.data.nbytes

    def _memset(self, _buffer: int, tensor: int, value: int, offset: int, size: int) -> None:
        place = self.place(tensor, offset, size, writes=True)
        self._run.timeline.at_host("memset_tensor", (place.access,))
        ctypes.memset(place.real, value, size)

    def _transfer(
        self, sets: bool, tensor: int, data: int, offset: int, size: int, n: int = 1, step: int = 0, by: int = 0
    ) -> None:
        """Transfer `n` blocks between a tensor and the host, which waits."""
        for i in range(n):
            place = self.place(tensor, offset + i * step, size, writes=sets)
            own = host(data + i * by, size, writes=not sets)
            self._run.timeline.at_host("set_tensor" if sets else "get_tensor", (place.access, own))
            move(place.real, own.begin, size) if sets else move(own.begin, place.real, size)

    def _copy(self, _buffer: int, source: int, target: int) -> bool:
        places = self.both(source, target)
        if places is None:
            return False
        a, b = places
        self._run.timeline.at_host("cpy_tensor", (a.access, b.access))
        move(b.real, a.real, self._library.ggml.nbytes(source))
        return True

    def behind(self, tensor: int) -> int:
        """Return the bytes that a device writes behind a tensor, so it asks for them."""
        return self._run.setting.extra if self._library.struct(tensor).op == self._product else 0

    def both(self, source: int, target: int) -> tuple[Place, Place] | None:
        """Return the places of a copy; None if a tensor is on another kind of device."""
        size = self._library.ggml.nbytes(source)
        try:
            return self.place(source, 0, size, writes=False), self.place(target, 0, size, writes=True)
        except ConformanceError:
            return None

    def place(self, tensor: int, offset: int, size: int, *, writes: bool, op: str = "") -> Place:
        """Return bytes of a tensor; reports a race if their buffer was freed.

        ConformanceError if they are in no buffer of these devices.
        """
        t = self._library.struct(tensor)
        begin = (t.data or 0) + offset
        name = t.name.decode(errors="replace") or "a tensor"
        doing = f"{op}{'writes' if writes else 'reads'} {name}"
        if self._run.setting.shared and begin < Addresses.FIRST:
            return Place(Access(begin, begin + size, writes, f"{doing} (the host's)"), begin)
        memory = self._addresses.find(begin, size)
        inside = begin - memory.base
        access = Access(begin, begin + size, writes, f"{doing} ({memory.name}+{inside})")
        if memory.freed is not None:
            timeline = self._run.timeline
            timeline.report(Race(memory.freed, timeline.now("a later call", access), kind="freed"))
        return Place(access, ctypes.addressof(ctypes.c_char.from_buffer(memory.data)) + inside)
