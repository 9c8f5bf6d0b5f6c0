"""Compile ggml with cmake; for another processor with Zig, which brings its libraries."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from conformance.ggml.errors import UnavailableError
from conformance.process import call
from conformance.process.lock import alone
from conformance.process.memory import cores

from .archive import cache, fresh_folder, is_archive, settle, unpack
from .isa import Isa

ZIG = "ziglang==0.17.1"
"""The wheel of the compiler."""
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=ON", "GGML_NATIVE=OFF",
    "LLAMA_BUILD_APP=OFF", "LLAMA_BUILD_COMMON=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_SERVER=OFF",
    "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_TOOLS=OFF", "LLAMA_CURL=OFF",
)  # fmt: skip
TIME_LIMIT = 7200.0
"""Time limit in seconds of the compilation."""
_WRAPPER = """\
#!/bin/sh
# Zig takes a processor as -mcpu only
for word do
    shift
    case $word in -march=*|-mabi=*) ;; *) set -- "$@" "$word" ;; esac
done
exec {zig} {tool} {options} "$@"
"""


def compiled(tree: Path, isa: Isa) -> Path:
    """Return a build tree, in the cache, of the ggml in the source `tree`, compiled for `isa`.

    It is compiled again only where the source changed. UnavailableError has the last lines of the failed program.
    """
    folder = cache() / "cross" / f"{hashlib.sha256(str(tree).encode()).hexdigest()[:16]}-{isa.name}"
    with alone(folder, TIME_LIMIT):
        return _compiled(tree, isa, folder)


def _compiled(tree: Path, isa: Isa, folder: Path) -> Path:
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    zig = _zig()
    target = f"-target {isa.triplet} -mcpu={isa.target}"
    for tool, options in (("cc", target), ("c++", target), ("ar", ""), ("ranlib", "")):
        (tools / tool).write_text(_WRAPPER.format(zig=shlex.quote(str(zig)), tool=tool, options=options), "utf-8")
        (tools / tool).chmod(0o755)
    chosen = {"C_COMPILER": "cc", "CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}
    own = ("CMAKE_SYSTEM_NAME=Linux", "GGML_OPENMP=OFF", f"CMAKE_SYSTEM_PROCESSOR={isa.machine}")
    return cmake(tree, folder, [*own, *(f"CMAKE_{key}={tools / tool}" for key, tool in chosen.items())])


def cmake(tree: Path, folder: Path, options: Sequence[str], target: str = "ggml") -> Path:
    """Return `folder`/build with shared libraries of the source `tree`; UnavailableError.

    `target`: ggml, or llama, which has ggml too.
    """
    if shutil.which("cmake") is None:
        raise UnavailableError(f"{tree}: cmake expected, to compile it; install it (pip install cmake)")
    above = {"CMAKE_BUILD_PARALLEL_LEVEL": str(cores()), **os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    words = [f"-D{o}" for o in (*OPTIONS, *options)]
    run(["cmake", "-S", str(tree), "-B", str(folder / "build"), *words], folder, above)
    run(["cmake", "--build", str(folder / "build"), "--target", target], folder, above)
    return folder / "build"


def _zig() -> Path:
    """Return the compiler, downloaded once."""
    folder = cache() / "cross" / ZIG
    if not any(map(is_archive, folder.glob("*"))):
        with fresh_folder(folder.parent) as made:
            run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", ZIG], made, os.environ)
            settle(made, folder)
    zig = unpack(next(p for p in folder.iterdir() if is_archive(p)), cache() / "unpacked") / "ziglang" / "zig"
    zig.chmod(0o755)
    return zig


def run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
    """Run a program of a compilation; UnavailableError has its last lines."""
    code, said = call(command, folder, "stderr", env, seconds=TIME_LIMIT)
    if code:
        raise UnavailableError(f"{shlex.join(command)}: {' / '.join(said) or f'exit status {code}'}")
