"""Files of a build: libraries and programs, found by name, and libraries loaded with ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conformance.ggml.errors import UnavailableError

from .layout import home

WHEEL = "xllamacpp"
"""Wheel whose extension module exports ggml and llama.cpp; loaded, never imported."""

_NAMES = (
    r"lib{0}\.so", r"lib{0}\.so\..+", r"lib{0}\..+\.so", r"lib{0}-[0-9a-f]{{8}}\.so.*", r"lib{0}(\..+)?\.dylib",
    r"{0}\.dll",
)  # fmt: skip
"""File names of a library, most likely first."""

RPC_SERVERS = ("ggml-rpc-server", "rpc-server")
"""Names of the RPC server program: the current one, and that before 2026."""

_PLUGIN = re.compile(r"libggml-(?!base\b).+\.(so|dylib)")
"""A device library that ggml loads itself; others have a version after `.so`."""

_P = ctypes.c_void_p


def find(where: str = "") -> Path:
    """Return the path `where`, or the wheel's library (not imported); UnavailableError if none."""
    if where:
        path = Path(where).absolute()  # the loader would search its own path for a name without a folder
        if not path.exists():
            raise UnavailableError(f"ggml library {path}: no such file or folder")
        return path
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in (f"{WHEEL}*.so", f"{WHEEL}*.pyd"):
            for path in sorted(Path(folder).glob(pattern)):
                return path
    raise UnavailableError(
        f"the wheel {WHEEL} with the real ggml and llama.cpp is not installed here; install it, "
        "or name a library: --backend 'ggml?lib=DIR_OR_FILE', --lib FILE"
    )


def part(folder: Path, stem: str) -> Path | None:
    """Return the library `stem` of a split build, such as `ggml-base`, or None.

    The name may have a version after or before `.so`, or the digest that auditwheel adds.
    """
    return next(named(folder, stem), None)


def named(folder: Path, stem: str) -> Iterator[Path]:
    """Yield every file in `folder` that may be the library `stem`, most likely first."""
    for pattern in _NAMES:
        legal = re.compile(pattern.format(re.escape(stem)))
        yield from sorted(p for p in folder.iterdir() if legal.fullmatch(p.name))


def is_named(name: str, stem: str) -> bool:
    """Return True if a file of this name may be the library `stem`."""
    return any(re.fullmatch(pattern.format(re.escape(stem)), name) for pattern in _NAMES)


def plugins(folder: Path) -> Path:
    """Return the folder of a build's device libraries.

    They are beside its libraries or, in Linux distributions, in a folder below `ggml` there, such as `ggml/backends0`.
    """
    below = folder / "ggml"
    own = any(_PLUGIN.fullmatch(p.name) for p in folder.iterdir()) if folder.is_dir() else True
    if own or not below.is_dir():
        return folder
    return next((p.parent for p in sorted(below.rglob("libggml-*")) if _PLUGIN.fullmatch(p.name)), folder)


def program(folder: Path, names: Sequence[str]) -> Path | None:
    """Return a build's program with the first of these names, or None.

    It is beside the libraries or, if these are below a `lib`, among the programs of the same installation.
    """
    lib = next((p for p in (folder, folder.parent) if p.name.startswith("lib")), None)
    places = [folder]
    if lib is not None:
        places += [lib.parent / "bin", lib.parent / "libexec" / folder.relative_to(lib) / "llama" / "bin"]
    return next(filter(Path.is_file, (place / name for place in places for name in names)), None)


def load(path: Path, parts: Sequence[str]) -> Iterator[ctypes.CDLL]:
    """Load the libraries with RTLD_LOCAL, so that two versions of ggml can live in one process.

    For linked libraries, the loader searches its own path before the folder. It does not search for libraries that are
    already loaded, so the folder's `ggml-base` and `ggml-cpu` are loaded first.
    """
    folder = path if path.is_dir() else path.parent
    whole, *others = (part(folder, stem) for stem in parts)
    first = whole if path.is_dir() else path
    if first is None:
        raise UnavailableError(f"ggml library {path}: a folder with lib{parts[0]}.so (and libggml-base.so) expected")
    linked = [p for stem in ("ggml-base", "ggml-cpu") if (p := part(folder, stem)) is not None and p != first]
    if path.is_dir() or is_named(path.name, parts[0]):
        for own in linked:
            with suppress(UnavailableError):  # it may be a plugin for another machine
                open_library(own)
    try:
        yield open_library(first)
    except UnavailableError:
        if not path.is_dir():
            raise
        # Without an rpath of its own it finds its parts only once they are loaded.
        handles = [open_library(p) for p in others if p is not None]
        yield open_library(first)
        yield from handles


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library with RTLD_LOCAL; UnavailableError if that fails."""
    try:
        return ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_LOCAL)
    except OSError as e:
        raise UnavailableError(f"ggml library {path} cannot be loaded: {e}") from None


def files_of(functions: Sequence[Any]) -> list[Path]:
    """Return the sorted library files of ctypes functions, as far as the loader knows them."""
    files: set[Path] = set()
    base = sys.maxsize  # of the library of the pointer before, which holds all down to there
    for pointer in sorted((ctypes.cast(f, _P).value or 0 for f in functions), reverse=True):
        if pointer < base and (info := home(pointer)) is not None:
            base = info.dli_fbase or base
            path = Path(os.fsdecode(info.dli_fname or b""))
            files |= {path} if path.is_file() else set()
    return sorted(files)


def loaded(path: Path) -> ctypes.CDLL | None:
    """Return the library if this process has loaded it; None on a system that cannot tell."""
    if sys.platform == "win32":
        return None
    try:
        return ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def runs_here(path: Path) -> bool:
    """Return True if this processor can execute a CPU library of a build with several."""
    try:
        score = getattr(loaded(path) or open_library(path), "ggml_backend_score", None)
    except UnavailableError:
        return False
    return score is not None and score() > 0
