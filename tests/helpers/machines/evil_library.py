"""A shared library whose constructor leaves a mark: whoever loads it has run a stranger's code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or not sys.platform.startswith("linux"), reason="compiles an ELF library with gcc"
)


@dataclass(frozen=True, slots=True)
class Evil:
    """The library and its mark."""

    library: Path
    mark: Path

    def ran(self) -> bool:
        """True if the constructor ran since the last look; forgets it."""
        there = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return there


def evil(library: Path, body: str = "") -> Evil:
    """Compile `library`; `body` is more C for it."""
    mark = library.with_name(f"{library.name}.ran").absolute()
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".c")
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) static void run(void) {{ fclose(fopen({json.dumps(str(mark))}, "w")); }}\n'
        f"{body}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    return Evil(library.absolute(), mark)
