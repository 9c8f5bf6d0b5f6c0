"""Check that a third-party adapter computes by itself, or declares what computes for it.

Its worker detects that it loads the reference or golden values, by import or as a file, or another adapter or a library
of ggml that its `delegates` do not name. This finds unhidden copying; it is not a sandbox.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from conformance import shipped
from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, adapters_of_ours, third_party
from conformance.case.case import JSON
from conformance.ggml.errors import NotIndependentError

REFERENCE = "backends.cpu"
GGML = "ggml"
_MARKS = (b"ggml_backend_graph_compute", b"ggml_graph_compute", b"GGML_ASSERT(")
"""Bytes in a library that contains or calls ggml: symbols, or a string if they are stripped."""
_CHUNK = 1 << 22
GOLDEN = "the golden values"
DESCRIPTORS = "/proc/self/fd"
"""Folder with the open files of this process; Linux has it."""


class Independence:
    """Watches what a third-party adapter loads; create it before the adapter is imported."""

    def __init__(self, spec: Spec) -> None:
        self._found = ""
        self._watched = third_party(spec)
        self._delegates: frozenset[str] = frozenset()
        self._heard: list[str] = []
        """Libraries that Python loaded, which may be unloaded again."""
        self._libraries: dict[str, None] = {}
        """Libraries of ggml that were found, in order."""
        if self._watched:
            self._folders = _folders()
            self._golden = frozenset(_inode(str(p)) for p in shipped.golden().rglob("*.*")) - {None}
            self._others = {p: names for p, names in adapters_of_ours().items() if p != REFERENCE}
            self._known = set(libraries())
            sys.addaudithook(self._hear)

    def declare(self, backend: Backend) -> None:
        """Store the delegates that `backend` declares."""
        self._delegates = frozenset(backend.delegates)

    def check(self) -> None:
        """Raise NotIndependentError if the adapter loaded expected values or an undeclared adapter."""
        if not self._watched:
            return
        if REFERENCE in sys.modules:
            self._found = f"the adapter loaded the reference ({REFERENCE})"
        for package, names in self._others.items():
            if package in sys.modules and not names & self._delegates:
                self._found = self._found or _undeclared(f"the adapter {package}", min(names))
        if self._found:
            raise NotIndependentError(f"{self._found}, so nothing independent was tested")

    def delegates(self, named: JSON) -> list[str]:
        """Return used delegates that its witness has not `named`; NotIndependentError if undeclared.

        The system lists all mapped libraries (Linux), however they were loaded, so one call per case is enough.
        """
        if not self._watched:
            return []
        heard, self._heard = self._heard, []
        for path in (*heard, *libraries()):
            if path not in self._known:
                self._known.add(path)
                if is_ggml(path):
                    self._libraries[path] = None
        if self._libraries and GGML not in self._delegates:
            self._found = self._found or _undeclared(f"a library of ggml ({next(iter(self._libraries))})", GGML)
        self.check()
        loaded = [f"{package} (delegate)" for package in self._others if package in sys.modules]
        return [*loaded, *(path for path in self._libraries if path not in str(named))]

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event == "ctypes.dlopen" or (event == "import" and args[1]):
            path = args[event == "import"]
            if isinstance(path, (str, bytes)):
                self._heard.append(os.fsdecode(path))
        if event != "open" or self._found or not isinstance(args[0], (str, bytes)):
            return
        # a file has many paths (/proc/self/root, links): its real one counts, and for hard links its inode
        for path in map(os.path.realpath, _named(os.fsdecode(args[0]))):
            for folder, what in self._folders:
                if path.startswith(folder):
                    self._found = f"the adapter loaded {what}"
            if _inode(path) in self._golden:
                self._found = f"the adapter loaded {GOLDEN}"


def _undeclared(what: str, name: str) -> str:
    return f"the adapter computes with {what}, which its `delegates` do not name (delegates = ({name!r},))"


def _folders() -> list[tuple[str, str]]:
    from conformance.run.session import expected  # noqa: PLC0415  # every worker imports this module, few need that one

    package = shipped.path().resolve()  # in a checkout the golden values lie beside it, in a wheel within it
    places = (package / "golden", package.parent / "golden", shipped.golden().absolute())
    found = [(place, GOLDEN) for place in places]
    spec = importlib.util.find_spec(REFERENCE)
    if (cache := expected.folder()) is not None:
        found.append((cache.absolute(), "expected values of earlier runs"))
    code = (spec.submodule_search_locations if spec else None) or ()
    found += [(Path(place), f"the reference ({REFERENCE})") for place in code]
    return [(f"{folder.resolve()}{os.sep}", what) for folder, what in found]


def _named(path: str) -> Iterator[str]:
    """Yield the files that `path` may name, also below an open folder: events lack `dir_fd`."""
    yield path
    if not os.path.isabs(path) and not os.path.lexists(path):  # noqa: PTH117  # called for every file that is opened
        with suppress(OSError):
            for descriptor in os.listdir(DESCRIPTORS):  # noqa: PTH208  # as above
                yield os.path.join(DESCRIPTORS, descriptor, path)  # noqa: PTH118  # as above


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  # called for every file that is opened
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def libraries() -> Sequence[str]:
    """Return the paths of all files mapped as code; empty if the system does not list them."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    parts = (line.split(maxsplit=5) for line in lines)
    return list(dict.fromkeys(p[5] for p in parts if len(p) == 6 and "x" in p[1] and p[5].startswith("/")))


def is_ggml(path: str) -> bool:
    """Return True if a library contains ggml or calls it, by content, or by name if unreadable."""
    overlap = max(map(len, _MARKS))
    try:
        with open(path.removesuffix(" (deleted)"), "rb") as f:  # noqa: PTH123  # the loader's name need not be a path
            rest = b""
            while chunk := f.read(_CHUNK):
                if any(mark in rest + chunk for mark in _MARKS):
                    return True
                rest = chunk[-overlap:]
    except OSError:
        return "ggml" in Path(path).name or "llama" in Path(path).name
    return False
