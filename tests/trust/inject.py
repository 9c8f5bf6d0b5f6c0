"""Run an adapter with changed sources, in a process of its own; what does the computing for the suite stays as it is.

A plant has a name, the adapter `of` which it is, and the `sources` of the files that it changes. The process of the
adapter finds these in place of the packages' own, from its start on: what runs at import or once per backend is changed
like all else.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, adapter, is_provided
from conformance.ggml.errors import BackendCrashError, BackendError, BackendTimeoutError, ConformanceError, UsageError
from conformance.run.isolation.isolate import IsolatedBackend, Isolation, Workers
from conformance.run.runner import Runner
from conformance.run.session.settings import WaiverBook

from .faults import ROOT, Fault, original

UNLOADABLE = "does not load: "
"""How the detail of a plant begins whose module, or adapter, raises when it is loaded."""
MARK = "_reached"
WORKER = "conformance.run.isolation.worker"
HOOK = f"""
import builtins, contextlib, importlib.abc, importlib.util, json, mmap, os, sys

HERE = os.path.dirname(__file__)
with open(os.path.join(HERE, "changed.json"), encoding="utf-8") as file:
    CHANGED = json.load(file)
if os.path.exists(os.path.join(HERE, "reached")):
    with open(os.path.join(HERE, "reached"), "r+b") as file:
        builtins.{MARK} = mmap.mmap(file.fileno(), 0)

class Changed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "{WORKER}":
            with contextlib.suppress(Exception):
                importlib.import_module(OF)
        if name in CHANGED:
            file, package = CHANGED[name]
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=package)

sys.meta_path.insert(0, Changed())
"""
"""`sitecustomize` of the process: Python runs it before all else. `OF` is the module of a backend that is no adapter,
which a process does not know of itself; one that does not load is an unknown backend there."""


class Plant(Protocol):
    """What changes an adapter."""

    @property
    def of(self) -> str:
        """The adapter, with options as on the command line."""

    @property
    def spec(self) -> Spec:
        """The name of the changed adapter, with the options of `of`."""

    def sources(self) -> Mapping[str, str]:
        """File, relative to the root of the packages -> its changed text."""


class Probe:
    """The adapter `of` as it is, which notes which of `faults` have their statement run, from its start on."""

    def __init__(self, of: str, faults: Sequence[Fault]) -> None:
        base = Spec.parse(of)
        self.of, self.spec = of, Spec(f"{base.name}+unchanged", base.options)
        self._faults = faults
        self.marks = bytearray(max(1, len(faults)))

    def sources(self) -> Mapping[str, str]:
        """Each file with a mark before each statement that a fault changes."""
        files = dict.fromkeys(f.file for f in self._faults)
        return {file: self._marked(file, original(file)) for file in files}

    def _marked(self, file: str, source: str) -> str:
        tree = ast.parse(source)
        marks: dict[ast.stmt, list[int]] = {}
        for i, f in enumerate(self._faults):
            if f.file == file:
                f.apply(source)
                marks.setdefault(_statement(tree, f.line(source)), []).append(i)
        return ast.unparse(ast.fix_missing_locations(_Marks(marks).visit(tree)))


def _statement(tree: ast.Module, line: int) -> ast.stmt:
    """The innermost statement that holds `line`, or the first after it; decorators of a definition are part of it."""
    found: ast.stmt | None = None
    after: list[tuple[int, ast.stmt]] = []
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt):
            first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
            if first <= line <= (node.end_lineno or first):
                found = node
            elif first > line:
                after.append((first, node))
    return found or min(after, key=lambda entry: entry[0])[1]


class _Marks(ast.NodeTransformer):
    def __init__(self, marks: Mapping[ast.stmt, Sequence[int]]) -> None:
        self._marks = marks

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401  # one node or several, as `ast` takes them
        """`node`, behind its marks."""
        self.generic_visit(node)
        numbers = self._marks.get(node, ()) if isinstance(node, ast.stmt) else ()
        marks = [ast.parse(f"{MARK}[{i}] = 1").body[0] for i in numbers]
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":  # nothing may stand before it
            return [node, *marks]
        return [*marks, node] if marks else node


class Folder:
    """The files of a plant, for its processes."""

    def __init__(self, plant: Plant) -> None:
        sources = plant.sources()
        self.path = Path(tempfile.mkdtemp(prefix="trust-"))
        self.close = weakref.finalize(self, shutil.rmtree, self.path)
        """Remove the files."""
        changed = {}
        for file, text in sources.items():
            # not beside the hook: the folder is on the path, where `backends/` would be a package without its __init__
            path = self.path / "changed" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            package = [str((ROOT / file).parent)] if path.name == "__init__.py" else None
            changed[".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")] = [str(path), package]
        name = Spec.parse(plant.of).name
        of = adapter(name).__module__ if is_provided(name) else "conformance"
        (self.path / "sitecustomize.py").write_text(f"OF = {of!r}\n{HOOK}", encoding="utf-8")
        (self.path / "changed.json").write_text(json.dumps(changed), encoding="utf-8")
        self.reached: mmap | None = None
        if isinstance(plant, Probe):
            (self.path / "reached").write_bytes(plant.marks)
            with (self.path / "reached").open("r+b") as marks:
                self.reached = mmap(marks.fileno(), 0)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """While this lasts, processes that start find the changed sources."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.path), before]))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


class Injected(IsolatedBackend):
    """The adapter behind `spec`, with the changed sources of a folder."""

    def __init__(self, spec: Spec, folder: Folder, workers: Workers) -> None:
        self._folder = folder
        super().__init__(spec, workers)

    def _alive(self) -> Any:  # noqa: ANN401  # a private class of `isolate`
        with self._folder.environment():
            return super()._alive()


class Injector(Runner):
    """A runner whose backends may be plants, by the names of their specs."""

    locates = False

    def __init__(
        self, plants: Sequence[Plant], *, isolation: Isolation | None = None, waivers: WaiverBook | None = None
    ) -> None:
        super().__init__(isolation=isolation, waivers=waivers)
        self._plants = {p.spec.name: p for p in plants}
        if len(self._plants) < len(plants):
            raise ValueError("plants have names of their own: by these a relation opens one with other options")
        self._folders: dict[str, Folder] = {}

    def folder(self, plant: Plant) -> Folder:
        """Its files, made once."""
        name = plant.spec.name
        if name not in self._folders:
            self._folders[name] = Folder(plant)
        return self._folders[name]

    def open(self, spec: Spec, *, own: bool) -> Backend:
        """A plant, or the backend itself."""
        plant = self._plants.get(spec.name)
        if plant is None:
            return super().open(spec, own=own)
        adapter, folder = Spec(Spec.parse(plant.of).name, spec.options), self.folder(plant)
        try:
            return Injected(adapter, folder, Workers(self._workers.isolation))
        except (BackendCrashError, BackendTimeoutError):
            raise
        except ConformanceError as e:
            if isinstance(plant, Probe):
                raise UsageError(f"{plant.of} as it is: {e}") from e
            raise BackendError(f"{UNLOADABLE}{e}") from e

    def close(self) -> None:
        """Also remove the files of the plants."""
        super().close()
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()
