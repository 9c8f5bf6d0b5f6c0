"""Builds with a known edit, made of the installed wheel.

`python tests/helpers/machines/builds_made.py FUNCTION NEW OLD` writes two folders: NEW, in whose FUNCTION one addition
subtracts, and OLD, without the edit. It needs a library for x86-64.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import capstone

from conformance.builds.elf import Image
from conformance.ggml.lib.files import find


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


def pair(function: str, new: Path, old: Path) -> None:
    """Make two builds, of which one addition of `function` subtracts in the new one."""
    for folder in (new, old):
        if folder.exists():
            sys.exit(f"{folder} exists: remove it, or start in an empty folder")
        folder.mkdir()
    edited(new, function, "addss", 0x5C)
    (old / find().name).symlink_to(find())


if __name__ == "__main__":
    pair(sys.argv[1], *map(Path, sys.argv[2:]))
