"""Adapters with faults as copies in this process, for tests that open a backend anew for each of many failures.

A copy's modules are loaded once more under another name, with the sources of its plant. It has its own `backends.*`,
engine (`conformance.backend.*`), quantisers and scheduler; tensors, cases and the interface are the program's own. A
crash or a hang ends the program: the hunt uses processes (`inject`).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from types import ModuleType

import conformance.backend
import conformance.case
import conformance.ggml
from conformance.backend.interface import Backend
from conformance.backend.registry import GROUP, Spec
from conformance.run.runner import Runner

from .faults import ROOT
from .inject import Plant

SHARED = ("conformance.backend.interface", "conformance.backend.registry")
"""Of the engine, what every backend must have in common."""
COPIED = ("backends.", "conformance.backend.", "conformance.ggml.quants.")
PACKAGES = (conformance.backend, conformance.case, conformance.ggml)
"""All that an adapter may import of the framework."""
_number = count()


def load(plant: Plant, options: Mapping[str, str] | None = None) -> Backend:
    """A backend with the fault in it; `options` of the adapter replace those that the plant names."""
    base = Spec.parse(plant.of)
    return _Copy(f"copy_{next(_number)}", plant.sources()).open(base.name, dict(base.options) | dict(options or {}))


class Copies(Runner):
    """A runner whose backends may be plants, by the names of their specs."""

    def __init__(self, plants: Sequence[Plant]) -> None:
        super().__init__()
        self._plants = {p.spec.name: p for p in plants}

    def open(self, spec: Spec, *, own: bool) -> Backend:
        """A plant, or the backend itself."""
        plant = self._plants.get(spec.name)
        return super().open(spec, own=own) if plant is None else load(plant, dict(spec.options))


def _is_copied(name: str) -> bool:
    return name not in SHARED and f"{name}.".startswith(COPIED)


class _Copy(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of one copy: `{alias}.backends.cpu.rope` is `backends.cpu.rope` again."""

    def __init__(self, alias: str, sources: Mapping[str, str]) -> None:
        self.alias, self.sources = alias, sources
        for name in (alias, f"{alias}.conformance", *(f"{alias}.{package.__name__}" for package in PACKAGES)):
            package = ModuleType(name)
            package.__path__ = []
            sys.modules[name] = package
        for package in PACKAGES:
            for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if not _is_copied(info.name):
                    sys.modules[f"{alias}.{info.name}"] = importlib.import_module(info.name)
        sys.meta_path.insert(0, self)

    def open(self, name: str, options: Mapping[str, str]) -> Backend:
        """The adapter of that name, of the copy's own modules."""
        (value,) = (e.value for e in entry_points(group=GROUP) if e.name == name)
        module, _, cls = value.partition(":")
        backend: Backend = getattr(importlib.import_module(f"{self.alias}.{module}"), cls)(**options)
        return backend

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The copy's own modules; no others."""
        name = fullname.removeprefix(f"{self.alias}.")
        original = importlib.util.find_spec(name) if name != fullname and _is_copied(name) else None
        if original is None or original.origin is None:
            return None
        is_package = original.submodule_search_locations is not None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=original.origin, is_package=is_package)
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the source, changed where the plant changes it, with absolute imports kept within the copy."""
        path = Path(str(module.__file__))
        source = self.sources.get(path.relative_to(ROOT).as_posix()) or path.read_text(encoding="utf-8")
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102  # our own source

    def _import(
        self,
        name: str,
        scope: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        names: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """`from conformance.backend.kernel import x` -> `from {alias}.conformance.backend.kernel import x`."""
        own = ("backends.", *(f"{package.__name__}." for package in PACKAGES))
        inward = level == 0 and bool(names) and f"{name}.".startswith(own)
        return __import__(f"{self.alias}.{name}" if inward else name, scope, local, names, level)
