"""Compile ggml for a device that no package has, from its source, with the user's compiler.

The build tree lies in the cache, by a digest of what it is made from. A build has a file of `NOTES`, which
`ggml.lib.made` reads, so that each record says what was compiled and what was changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from conformance import shipped
from conformance.ggml.errors import UnavailableError, UsageError, unknown
from conformance.ggml.lib.made import NOTES
from conformance.process import call
from conformance.process.lock import alone

from .archive import cache
from .cross import TIME_LIMIT, cmake, compiled, run
from .dawn import SOURCE as DAWN
from .dawn import dawn
from .emulator import unpacked
from .isa import known
from .source import libraries, package, source

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": (),
    "opencl": ("GGML_OPENCL=ON", "GGML_OPENCL_USE_ADRENO_KERNELS=OFF"),
    "webgpu": ("GGML_WEBGPU=ON",),
}
"""Device -> options of cmake. Adreno's kernels run on no other device."""
DEBIAN = "debian:"
"""Prefix of a package of Debian, which is unpacked without root."""
NPM = "npm:"
"""Prefix of a package of npm, which has parts of Dawn for `webgpu`."""
BETWEEN = "opencl.c"
"""Source of the library between ggml-opencl and libOpenCL."""
_BETWEEN = "libconform-opencl.so"
_WRITTEN = {"opencl": BETWEEN, "webgpu": DAWN}
"""Device -> our source of a library that its build links."""
CHANGED = (
    "on a device that is a CPU: called Intel if its name lacks that; with cl_khr_subgroups if its OpenCL C has "
    "sub-groups; built without -cl-unsafe-math-optimizations and "
    "-cl-fast-relaxed-math, with -Wno-incompatible-pointer-types; with local memory full of NaN when a kernel starts"
)
"""The changes that `BETWEEN` makes, for the record."""
_ORIGIN = ("CMAKE_BUILD_RPATH=$ORIGIN", "CMAKE_BUILD_RPATH_USE_ORIGIN=ON")
"""Libraries find each other where they are copied to."""
_COMPILERS: Mapping[str, str] = {"CC": "cc", "CXX": "c++"}
"""Variable that names a compiler of C or C++ -> its default."""
_FLAGS = ("CFLAGS", "CXXFLAGS", "LDFLAGS")
"""Variables that cmake adds to the commands, when it first sees a build tree."""
_TIME_LIMIT = 600.0
"""Time limit in seconds to ask a compiler for its version."""


@dataclass(frozen=True, slots=True)
class Made:
    """A build of ggml that was compiled here."""

    folder: Path
    """Has the libraries, and the file of notes."""
    notes: Mapping[str, str]
    """Its source, its compiler and the changes."""
    driver: Path | None
    """The OpenCL driver of this Python that it uses; None for those of the system."""


def make(device: str, texts: Sequence[str], folder: Path, isa: str = "") -> Made:
    """Compile ggml for `device` from its source, and the llama.cpp around it, into `folder`.

    Args:
        device: a key of `OPTIONS`.
        texts: a folder, archive or package with source (`source.source`), packages of Debian with headers, and of
            npm with Dawn.
        folder: is created; other files in it are kept.
        isa: a processor that is emulated, for `cpu`; without llama.cpp.

    Raises:
        UsageError: an unknown device or processor, or several sources.
        UnavailableError: no source, no compiler, or what it did not compile; has its last lines.
    """
    if device not in OPTIONS:
        raise unknown("device", device, OPTIONS)
    packages = [t.removeprefix(DEBIAN) for t in texts if t.startswith(DEBIAN)]
    parts = [t for t in texts if t.startswith(NPM)] if device == "webgpu" else []
    trees = [t for t in texts if not t.startswith(DEBIAN) and t not in parts]
    if len(trees) != 1:
        raise UsageError(f"one source of ggml and packages {DEBIAN}NAME expected, found {', '.join(texts)}")
    tree = source(trees[0])
    text = " ".join(texts)
    if isa:
        tools = f"zig for {known(isa).name}"
        return _copied(compiled(tree, known(isa)), folder, {"made from": text, "compiler": tools})
    notes = {"made from": text, "compiler": _compiler()}
    content = [str(tree), *packages, *parts, notes["compiler"], *OPTIONS[device], *_ORIGIN]
    if device in _WRITTEN:
        content.append(hashlib.sha256((shipped.path() / "builds" / _WRITTEN[device]).read_bytes()).hexdigest())
    below = cache() / "made" / f"{device}-{hashlib.sha256(' '.join(content).encode()).hexdigest()[:16]}"
    with alone(below, TIME_LIMIT):
        return _made(device, tree, packages, parts, folder, below, notes)


def _made(
    device: str,
    tree: Path,
    packages: Sequence[str],
    parts: Sequence[str],
    folder: Path,
    below: Path,
    notes: Mapping[str, str],
) -> Made:
    """Compile in `below`, for this processor, and copy what came out."""
    options = [*OPTIONS[device], *_ORIGIN]
    built = partial(cmake, tree, below, target="llama" if (tree / "include" / "llama.h").is_file() else "ggml")
    if device == "webgpu":
        own = dawn([package(p) for p in parts], below, _words("CC"))
        out = _copied(built([*options, f"Dawn_DIR={below}"]), folder, notes)
        for path in own:
            shutil.copy(path, folder)
        return out
    if device != "opencl":
        return _copied(built(options), folder, notes)
    driver, headers = intel_driver(), [unpacked(p) / "usr" / "include" for p in packages]
    between = _between(below, driver, headers)
    found = [f"OpenCL_INCLUDE_DIR={';'.join(map(str, headers))}"] if headers else []
    made = built([*options, f"OpenCL_LIBRARY={between}", *found])
    out = _copied(made, folder, {**notes, BETWEEN: CHANGED}, driver)
    shutil.copy(between, folder)
    vendors = folder / "vendors"
    shutil.rmtree(vendors, ignore_errors=True)
    if driver is not None:
        vendors.mkdir()
        (vendors / "intel.icd").write_text(f"{driver}\n", "utf-8")
    return out


def intel_driver() -> Path | None:
    """Return the driver in the installed distribution intel-opencl-rt; None if there is none."""
    try:
        found = files("intel-opencl-rt") or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())).resolve() for f in found if f.name == "libintelocl.so"), None)


def beside(name: str) -> bool:
    """Return True if a library that Intel's driver loads lies beside it."""
    driver = intel_driver()
    return driver is not None and (driver.parent / name).is_file()


def _between(folder: Path, driver: Path | None, headers: Sequence[Path]) -> Path:
    """Compile `BETWEEN` in `folder`, with the libOpenCL beside the driver or the system's."""
    built = folder / _BETWEEN
    # RPATH, unlike RUNPATH, also serves what libOpenCL loads
    found = [] if driver is None else [f"-L{driver.parent}", f"-Wl,-rpath,{driver.parent},--disable-new-dtags"]
    found += [f"-I{h}" for h in headers]
    words = [*_words("CC"), "-O2", "-shared", "-fPIC", "-o", str(built), f"-Wl,-soname,{_BETWEEN},--no-as-needed"]
    try:
        run([*words, str(shipped.path() / "builds" / BETWEEN), *found, "-l:libOpenCL.so.1", "-ldl"], folder, os.environ)
    except UnavailableError as e:
        raise UnavailableError(f"{e}; `conform build devices` says what OpenCL needs here, and how to add it") from None
    return built


def _words(key: str) -> list[str]:
    """Return the command of a compiler in `_COMPILERS`, which may have options as for cmake."""
    text = os.environ.get(key, "")
    try:
        return shlex.split(text) or [_COMPILERS[key]]
    except ValueError as e:
        raise UsageError(f"{key}: the command of a compiler expected, found {text!r}: {e}") from None


def _compiler() -> str:
    """Return the first line of each compiler's version, and the flags of the environment."""
    said = []
    for key in _COMPILERS:
        words = _words(key)
        if shutil.which(words[0]) is None:
            raise UnavailableError(f"{words[0]}: a compiler expected; install one (apt-get install g++), or set {key}")
        _, lines = call([*words, "--version"], Path.cwd(), "stdout", seconds=_TIME_LIMIT)
        said.append(" ".join([next(iter(lines), words[0]), *words[1:]]))
    return ", ".join([*said, *(f"{key}={value}" for key in _FLAGS if (value := os.environ.get(key)))])


def _copied(tree: Path, folder: Path, notes: Mapping[str, str], driver: Path | None = None) -> Made:
    """Copy the libraries of a build tree, with their links, and write the notes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in libraries(tree):
        target = folder / path.name
        target.unlink(missing_ok=True)
        shutil.copy(path, target, follow_symlinks=False)
    (folder / NOTES).write_text(json.dumps(notes, indent=1) + "\n", "utf-8")
    return Made(folder, notes, driver)
