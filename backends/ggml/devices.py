"""What a loaded ggml library offers: its devices, and every kind of memory that each of them has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .library import Library

KINDS = ("CPU", "GPU", "IGPU", "ACCEL", "META")
"""`enum ggml_backend_dev_type`."""


@dataclass(frozen=True, slots=True)
class Offered:
    """One device of a library."""

    name: str
    kind: str
    """One of `KINDS`; `type N` where a library knows more."""
    description: str
    buffer_types: tuple[str, ...]
    """The default first, then its host type, then the extra ones."""


def buffer_types(library: Library, device: int) -> dict[str, int]:
    """Name -> handle of a device's default buffer type, its host type and its extra ones such as CPU_REPACK."""
    g = library.ggml
    found = [g.backend_dev_buffer_type(device), g.backend_dev_host_buffer_type(device)]
    extra = library.device_function(
        device, "ggml_backend_dev_get_extra_bufts", ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    )
    if extra is not None:
        listed = extra(device)
        i = 0
        while listed and listed[i]:
            found.append(listed[i])
            i += 1
    return {g.backend_buft_name(b).decode(): b for b in found if b}


def survey(library: Library) -> list[Offered]:
    """Every device, those of the folder's device libraries too."""
    g = library.ggml
    library.load_devices()
    out = []
    for name, device in library.devices().items():
        kind = g.backend_dev_type(device)
        title = KINDS[kind] if 0 <= kind < len(KINDS) else f"type {kind}"
        description = g.backend_dev_description(device).decode(errors="replace")
        out.append(Offered(name, title, description, tuple(buffer_types(library, device))))
    return out
