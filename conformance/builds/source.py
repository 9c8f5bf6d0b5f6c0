"""Locate a build: a folder, library, archive, installed distribution or registry package."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

from conformance.ggml.errors import UnavailableError, UsageError, nearest
from conformance.ggml.lib.files import part
from conformance.ggml.lib.library import DEVICES, old_api
from conformance.process import call

from .archive import cache, digest, fresh_folder, is_archive, settle, unpack
from .cross import compiled
from .isa import ISAS, Isa, host, known, machine

FORMS = (
    "a folder or build tree, a library file, an archive (.tar.gz, .tgz, .zip, .whl), an installed distribution, "
    "pypi:NAME==VERSION or npm:NAME@VERSION"
)
LIBRARIES = (".so", ".dylib", ".dll", ".pyd")
"""Suffixes of library names; `.so` may be followed by a version."""
LEVELS = 6
"""Maximum folder depth to search for a build."""
TIME_LIMIT = 1800.0
"""Time limit of a download in seconds."""

PLATFORMS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 42)))
"""Platforms of wheels, without the architecture, that run on Debian trixie (glibc 2.41)."""

_PYPI = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==v?[0-9][A-Za-z0-9.!+]*", re.ASCII)
_NPM = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*@v?[0-9][A-Za-z0-9.+-]*", re.ASCII)
_TAG = re.compile(r"(?<=[=@])v(?=[0-9][^@/]*$)")
"""The first letter of a tag that is used as a version."""
_ANY_AGE = "ggml_graph_compute"
"""A symbol of ggml of any age; those that can be tested also have `DEVICES`."""
_SOURCES = ("ggml/src/ggml.c", "src/ggml.c", "ggml.c")
"""Files beside the CMakeLists.txt of llama.cpp, ggml and their forks."""


def locate(text: str, isa: str = "") -> Path:
    """Return the absolute path that `Library` loads for the build `text`, in one of `FORMS`.

    An archive is unpacked and a package downloaded once, into `cache`: for the processor `isa`, or for this machine.

    Raises:
        UsageError: a package without an exact version, or an unknown processor.
        UnavailableError: no such build, a broken archive, an unknown package, no library with ggml, or one for another
            processor; says what was searched.
    """
    of = known(isa) if isa else None
    path = _located(text, of)
    library = (part(path, "ggml") if path.is_dir() else None) or path
    found, wanted = "" if library.is_dir() else machine(library), of.machine if of else host()
    if found not in ("", wanted):
        names = " or ".join(i.name for i in ISAS.values() if i.machine == found)
        how = f"; name its processor: isa={names} as an option of the backend, or --isa" if names else ""
        raise UnavailableError(f"build {text}: {library.name} for {wanted} expected, it is for {found}{how}")
    return path


def _located(text: str, isa: Isa | None) -> Path:
    kind, colon, name = text.partition(":")
    if colon and kind in _REGISTRIES:
        return _inside(unpack(_download(kind, name, isa), cache() / "unpacked"), text, isa)
    path = Path(text).absolute()
    if path.is_dir():
        return _inside(path, text, isa)
    if path.is_file():
        return _inside(unpack(path, cache() / "unpacked"), text, isa) if is_archive(path) else path
    if path.exists():
        raise UnavailableError(f"build {text}: neither file nor folder; {FORMS} expected")
    if (found := _installed(text)) is not None:
        return found
    at = "" if str(path) == text else f"{path}: "
    like = nearest(text, filter(None, (d.name for d in importlib.metadata.distributions())))
    raise UnavailableError(
        f"build {text}: {at}no such file or folder, and no distribution of that name is installed;"
        f"{like} {FORMS} expected"
    )


def source(text: str) -> Path:
    """Return the folder with the source of llama.cpp or ggml in a folder, archive or package.

    The source of a package is downloaded once. UnavailableError if there is none.
    """
    kind, colon, name = text.partition(":")
    path = Path(text).absolute()
    if colon and kind == "pypi":
        path = _download(_SOURCE, name)
    if is_archive(path):
        path = unpack(path, cache() / "unpacked")
    if path.is_dir() and (tree := _source(path)) is not None:
        return tree
    raise UnavailableError(
        f"{text}: the source of llama.cpp or ggml expected, a CMakeLists.txt beside {' or '.join(_SOURCES)}; not found"
        + (f" in {path} or {LEVELS} levels below" if path.is_dir() else f": {path} is no folder or archive")
    )


def package(text: str) -> Path:
    """Return the folder of a package of npm or another archive; UnavailableError if absent."""
    kind, colon, name = text.partition(":")
    path = _download(kind, name) if colon and kind in _REGISTRIES else Path(text).absolute()
    return unpack(path, cache() / "unpacked") if is_archive(path) else path


def is_build(text: str) -> bool:
    """Return True if `locate` would read a package, folder, archive or library of this name."""
    kind, colon, _ = text.partition(":")
    path = Path(text)
    in_file = path.is_file() and is_archive(path)
    return bool(colon and kind in _REGISTRIES) or path.is_dir() or in_file or _is_library(path)


def libraries(path: Path) -> list[Path]:
    """Return the libraries of a build that `locate` found.

    Those of a single library are itself and the libraries of ggml and llama.cpp beside it, which it loads.
    """
    folders = _folders(path) if path.is_dir() else (path.parent,)
    files = [p for f in folders for p in sorted(f.iterdir()) if _is_library(p)]
    if not path.is_dir():
        files = [path, *(p for p in files if p != path and ("ggml" in p.name or "llama" in p.name))]
    return files


def contents(path: Path) -> str:
    """Return the SHA-256 over `libraries`."""
    return hashlib.sha256("".join(f"{p.name} {digest(p)}\n" for p in libraries(path)).encode()).hexdigest()


def downloaded() -> list[str]:
    """Return the cached packages, in the form that `locate` accepts."""
    return sorted(
        f"{kind}:{folder.name.replace('+', '/')}"
        for kind in _REGISTRIES
        if (cache() / kind).is_dir()
        for folder in (cache() / kind).iterdir()
    )


def _inside(folder: Path, text: str, isa: Isa | None) -> Path:
    """Return the folder with libggml at or below `folder`, or a library that contains ggml.

    Among several folders it prefers one that has llama.cpp too, then one not named `NAME.libs` (by wheel repair tools),
    then the uppermost, then the first by name. If there is only source, it is compiled for `isa`.
    """
    libraries = [p for f in _folders(folder) for p in sorted(f.iterdir()) if _is_library(p)]
    found = _choose(libraries)
    if found is None and isa is not None and (tree := _source(folder)) is not None:
        return _inside(compiled(tree, isa), text, None)
    if found is None:
        raise UnavailableError(f"build {text}: {_lacks(folder, libraries)}")
    return found


def _lacks(folder: Path, libraries: Sequence[Path]) -> str:
    """Return why `folder` cannot be tested: an older ggml, only source, or nothing of it."""
    old = max((p for p in libraries if _names(p, _ANY_AGE)), key=lambda p: p.stat().st_size, default=None)
    if old is not None:
        return old_api(f"{old.relative_to(folder)}", DEVICES)
    if (tree := _source(folder)) is not None:
        cmake = f"cmake -S {tree} -B build -DBUILD_SHARED_LIBS=ON && cmake --build build -j"
        return f"only source in {folder}; build it with `{cmake}`, and name the folder build"
    return f"no libggml, and no library with {DEVICES}, in {folder} or {LEVELS} levels below"


def _source(folder: Path) -> Path | None:
    """Return the source tree of llama.cpp or ggml at or below `folder`; None if there is none."""
    trees = (f for f in _folders(folder) if (f / "CMakeLists.txt").is_file())
    return next((t for t in trees if any((t / name).is_file() for name in _SOURCES)), None)


def _choose(libraries: Sequence[Path]) -> Path | None:
    """Return the folder with libggml, or else the largest library that contains ggml."""
    folders = [f for f in dict.fromkeys(p.parent for p in libraries) if part(f, "ggml") is not None]
    if folders:
        return min(folders, key=lambda f: (part(f, "llama") is None, f.suffix == ".libs", len(f.parts), f.name))
    return max((p for p in libraries if _names(p, DEVICES)), key=lambda p: p.stat().st_size, default=None)


def _folders(folder: Path) -> Iterator[Path]:
    for name, below, _ in os.walk(folder):
        yield Path(name)
        below.sort()
        if len(Path(name).relative_to(folder).parts) >= LEVELS:
            below.clear()


def _is_library(path: Path) -> bool:
    return path.is_file() and (path.name.endswith(LIBRARIES) or ".so." in path.name)


def _names(path: Path, symbol: str) -> bool:
    kept, sought = b"", symbol.encode()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            if sought in kept + piece:
                return True
            kept = piece[-len(sought) :]
    return False


def _installed(name: str) -> Path | None:
    """Return the build in an installed distribution without importing it; None if not installed."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    found = _choose([p for f in files if _is_library(p := Path(str(f.locate())))])
    if found is None:
        raise UnavailableError(f"build {name}: the distribution of that name has no library with ggml")
    return found


def _pip(name: str, isa: Isa | None) -> Iterator[list[str]]:
    tags = [] if isa is None else [f"{tag}_{isa.machine}" for tag in PLATFORMS]
    yield [*_pip_download(name), "--only-binary", ":all:", *(w for t in tags for w in ("--platform", t)), name]
    if isa is not None:
        yield from _pip_source(name, isa)


def _pip_source(name: str, _: Isa | None) -> Iterator[list[str]]:
    # not :all:, which would compile what pip needs to read the package's metadata, such as cmake
    yield [*_pip_download(name), "--no-binary", name.partition("==")[0], name]


def _pip_download(name: str) -> list[str]:
    if not _PYPI.fullmatch(name):
        raise UsageError(f"build pypi:{name}: NAME==VERSION expected, with an exact version")
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]


def _only_source(name: str, folder: Path) -> str:
    """Return how to build a package of which pip finds only the source; empty if it finds none."""
    package, _, version = name.partition("==")
    said = _call([sys.executable, "-m", "pip", "index", "versions", "--no-binary", ":all:", package], folder, "stdout")
    if version not in said.replace(",", " ").split():
        return ""
    return (
        f"there is no wheel for this platform, only the source; build one with `pip wheel --no-deps {name} -w wheels` "
        "(CMAKE_ARGS=-D… sets options of cmake), and name the .whl in the folder wheels"
    )


def _npm(name: str, _: Isa | None) -> Iterator[list[str]]:
    if not _NPM.fullmatch(name):
        raise UsageError(f"build npm:{name}: NAME@VERSION expected, with an exact version")
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError(f"build npm:{name}: npm is not installed here; install it, or name the package's .tgz")
    yield [npm, "pack", "--loglevel=error", name]


_REGISTRIES: dict[str, Callable[[str, Isa | None], Iterator[list[str]]]] = {"pypi": _pip, "npm": _npm}
"""Prefix before the colon -> commands to try, to download a package to the current folder."""
_SOURCE = "pypi-source"
"""The registry of packages with source, for `source`; those of npm have none."""


def _download(kind: str, name: str, isa: Isa | None = None) -> Path:
    """Return a package's archive, downloaded once; UnavailableError has the client's message."""
    name = _TAG.sub("", name)
    commands = {**_REGISTRIES, _SOURCE: _pip_source}[kind](name, isa)
    first = next(commands)
    folder = cache() / (f"{kind}-{isa.machine}" if isa else kind) / name.replace("/", "+")
    if not folder.is_dir():
        with fresh_folder(folder.parent) as made:
            for command in chain([first], commands):
                said = _call(command, made, "stderr")
                if any(map(is_archive, made.iterdir())):
                    break
            else:
                how = _only_source(name, made) if kind == "pypi" else ""
                shown = kind.removesuffix("-source")
                raise UnavailableError(f"build {shown}:{name}: {how or f'it cannot be downloaded: {said}'}")
            settle(made, folder)
    return next(p for p in sorted(folder.iterdir()) if is_archive(p))


def _call(command: Sequence[str], folder: Path, name: Literal["stdout", "stderr"]) -> str:
    """Run a registry client in `folder`; return its errors in a stream, or else the last lines."""
    code, lines = call(command, folder, name, seconds=TIME_LIMIT)
    errors = [line for line in lines if "rror" in line or "ERR" in line]
    return " / ".join(errors or lines[-2:]) or f"its client ended with {code}"
