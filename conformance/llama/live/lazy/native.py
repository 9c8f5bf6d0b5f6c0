"""Structs, texts and bytes at addresses of this process, as C sees them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from .timeline import Access

P = ctypes.c_void_p


def struct(name: str, *fields: tuple[str, Any]) -> Any:  # noqa: ANN401  # a ctypes structure
    """Return a new struct type."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def text_at(text: str) -> int:
    """Return the address of a C string, which lives as long as the process."""
    return ctypes.addressof(_kept(text))


@cache
def _kept(text: str) -> Any:  # noqa: ANN401  # an array of ctypes
    return ctypes.create_string_buffer(text.encode())


def host(address: int, size: int, *, writes: bool) -> Access:
    """Return an access to memory of the host."""
    return Access(address, address + size, writes, f"{'writes' if writes else 'reads'} {size} bytes of the host")


def content(access: Access) -> bytes:
    """Return the bytes of an access to memory of the host."""
    return ctypes.string_at(access.begin, access.end - access.begin)


def move(target: int, source: int, size: int) -> None:
    """Copy bytes, which may overlap."""
    ctypes.memmove(target, source, size)
