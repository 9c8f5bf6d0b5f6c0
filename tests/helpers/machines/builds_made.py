"""Builds with a known edit, made of the installed wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import capstone

from conformance.builds.elf import Image
from conformance.ggml.lib.library import find


def edited(to: Path, function: str, old: str, new: int) -> Path:
    """Copy the wheel's library with another opcode in the first instruction `old` of a function."""
    path = find()
    library = to / path.name
    shutil.copy(path, library)
    image = Image(path)
    s = next(s for s in image.symbols if s.name == function)
    engine = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    code = image.read(s.address, s.size)
    at, size = next((a, n) for a, n, word, _ in engine.disasm_lite(code, 0) if word.lstrip("v") == old)
    section = image.section(s.address)
    assert section is not None
    with library.open("r+b") as file:
        file.seek(section.offset + s.address - section.address + at + code[at : at + size].index(0x58))
        file.write(bytes([new]))
    return library
