"""Compile and run a program that proves a bug, and check its verdict on a library."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from conformance.ggml.errors import UnavailableError
from conformance.process import Tail, end_group, spawn_command

COMPILERS = ("c++", "g++", "clang++")
LIMIT = 300.0
"""Time limit in seconds to compile or run."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    code: int
    """0: correct, 1: wrong, 2: not tried, negative: the signal that ended it."""
    said: str

    def __str__(self) -> str:
        last = next(reversed(self.said.strip().splitlines()), "nothing")
        return f"exit code {self.code}: {last}"


def headers_in(source: Path) -> Path:
    """Return the headers folder of a ggml or llama.cpp checkout; UnavailableError without one."""
    for folder in (source / "include", source / "ggml/include"):
        if (folder / "ggml-backend.h").is_file():
            return folder
    raise UnavailableError(f"{source}: no ggml-backend.h in include or ggml/include; a checkout of ggml expected")


def prove(
    program: Path, *, headers: Path, libraries: Sequence[Path], args: Sequence[str] = (), limit: float = LIMIT
) -> Ended:
    """Compile `program` against `headers`, link `libraries` (files), and run it with `args`.

    UnavailableError if there is no compiler, or it does not compile, with the compiler's output.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise UnavailableError(f"no C++ compiler here; one of {', '.join(COMPILERS)} expected")
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder) / "program")
        linked = [word for path in libraries for word in (str(path.resolve()), f"-Wl,-rpath,{path.resolve().parent}")]
        # A Python module with ggml inside has Python symbols that this program never calls.
        loose = ["-Wl,--unresolved-symbols=ignore-in-shared-libs"] if sys.platform == "linux" else []
        built = _run([compiler, "-std=c++17", f"-I{headers}", str(program), *linked, *loose, "-o", made], limit)
        if built.code:
            raise UnavailableError(f"{program} does not compile: {built.said}")
        return _run([made, *args], limit)


def _run(command: Sequence[str], limit: float) -> Ended:
    popen = spawn_command(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    stream = cast("BinaryIO", popen.stdout)
    tail = Tail(stream)
    try:
        end_group(popen, limit)
        tail.join(limit)
    finally:
        stream.close()
    return Ended(popen.returncode, tail.text)
