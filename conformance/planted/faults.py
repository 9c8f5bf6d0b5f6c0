"""What to plant, and adapters with it planted: a fault is one place in one file of an adapter, read from TOML.

A file holds any number of

    [[fault]]
    name = "rope-wrong-half"                   # unique
    says = "NEOX turns neighbours"             # one line for people
    of = "cpu"                                 # the adapter that has it, with options as on the command line
    families = ["kv_growth", "ops"]            # the kind of fault: each of these families must notice it
    file = "backends/cpu/rope.py"
    old = "if mode == NORMAL:"                 # stands there exactly once
    new = "if mode == NEOX:"

A faulty adapter is a copy: its modules are loaded once more under another name, one of them with its fault. The copy
has its own `backends.*`, engine (`conformance.backend.*`), quantisers and scheduler, with its devices, so a fault may
sit in any of them; tensors, cases and the interface are the program's own, so the suite runs the copy like any other
backend.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

import conformance.backend
import conformance.case
import conformance.ggml
from conformance import shipped
from conformance.backend.interface import Backend
from conformance.backend.registry import GROUP, Spec
from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.errors import UsageError
from conformance.run.scheduler.backend import NAME as SCHED
from conformance.suite import FAMILIES

ROOT = shipped.path().parent
"""What `file` is relative to."""
FOLDER = shipped.path("planted", "tables")
"""The faults of this package."""

SHARED = ("conformance.backend.interface", "conformance.backend.registry")
"""Of the engine, what every backend must have in common."""
COPIED = "conformance.ggml.quants"
"""Of `ggml`, what computes: no object of it is compared by identity."""
SCHEDULER = "conformance.run.scheduler"
VOCABULARY = (conformance.backend, conformance.case, conformance.ggml)
"""All that an adapter may import of the framework."""
_number = count()
_FIELDS = ("name", "says", "of", "file", "old", "new")


class PlantError(UsageError):
    """A fault that cannot be planted: its place is elsewhere, or its file is no file of the adapter."""


class Plant(Protocol):
    """What an adapter's copy has in its code."""

    @property
    def name(self) -> str:
        """Of the copy."""

    @property
    def of(self) -> str:
        """The adapter, with options as on the command line."""

    @property
    def file(self) -> str:
        """The one file that must change; empty where none must."""

    @property
    def names(self) -> Mapping[str, object]:
        """What every module of the copy may call, by name."""

    def change(self, file: str, source: str) -> ast.Module | None:
        """What runs in place of a file of the copy; None where it stays as it is."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted bug."""

    name: str
    says: str
    of: str
    families: tuple[str, ...]
    file: str
    old: str
    new: str

    @property
    def spec(self) -> Spec:
        """The faulty backend's own name, with the options of the adapter it is made from."""
        base = Spec.parse(self.of)
        return Spec(f"{base.name}+{self.name}", base.options)

    def apply(self, source: str) -> str:
        """`source` with the fault in it; PlantError if the place is not there, or there more than once."""
        if self.old and source.count(self.old) != 1:
            raise PlantError(
                f"fault {self.name}: {self.old!r} expected once in {self.file}, found {source.count(self.old)} times"
            )
        return source.replace(self.old, self.new) if self.old else source

    @property
    def names(self) -> Mapping[str, object]:
        """None: a fault brings all it calls."""
        return {}

    def change(self, file: str, source: str) -> ast.Module | None:
        """The program with the fault in it, where `file` is the one it stands in."""
        return ast.parse(self.apply(source)) if file == self.file else None

    def line(self, source: str) -> int:
        """The first line of `source`, from 1, that the fault changes."""
        same = next((i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b), 0)
        return source.count("\n", 0, source.index(self.old) + same) + 1


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several faults at once in a copy of the one adapter that all of them are of."""

    name: str
    faults: tuple[Fault, ...]

    @property
    def of(self) -> str:
        """The adapter."""
        return self.faults[0].of

    @property
    def file(self) -> str:
        """The first fault's; `change` finds the others'."""
        return self.faults[0].file

    @property
    def spec(self) -> Spec:
        """As of one fault."""
        return replace(self.faults[0], name=self.name).spec

    @property
    def names(self) -> Mapping[str, object]:
        """None."""
        return {}

    def change(self, file: str, source: str) -> ast.Module | None:
        """The program with every fault that stands in `file`."""
        own = [f for f in self.faults if f.file == file]
        for fault in own:
            source = fault.apply(source)
        return ast.parse(source) if own else None


def control(of: str, families: Sequence[str]) -> Fault:
    """The adapter itself, loaded in the same way: whatever notices it is a false alarm."""
    return Fault("no-fault", "the adapter as it is", of, tuple(families), "", "", "")


def read(paths: Sequence[Path]) -> list[Fault]:
    """Every fault of the TOML files in `paths`, folders included; UsageError names the file and the field."""
    files = [f for p in paths for f in (sorted(p.glob("*.toml")) if p.is_dir() else [p])]
    faults = [fault for f in files for fault in _read(f)]
    names = [fault.name for fault in faults]
    if twice := {n for n in names if names.count(n) > 1}:
        raise UsageError(f"faults: names must differ; {', '.join(sorted(twice))} found more than once")
    if not faults:
        why = f"; {shipped.AGAIN}" if FOLDER in paths else ""
        raise UsageError(f"faults: none found in {', '.join(map(str, paths))}{why}")
    return faults


def _read(path: Path) -> list[Fault]:
    entries: Any = parse_toml(read_text(path), str(path)).get("fault")
    expect(isinstance(entries, list), str(path), "[[fault]] tables", entries)
    return [_fault(e, f"{path}: fault {i}") for i, e in enumerate(entries)]


def _fault(entry: dict[str, Any], where: str) -> Fault:
    for key in _FIELDS:
        expect(isinstance(entry.get(key), str), f"{where}: {key}", "a text", entry.get(key))
    families: Any = entry.get("families")
    expect(isinstance(families, list) and bool(families), f"{where}: families", "a list of names", families)
    if unknown := [f for f in families if f not in FAMILIES]:
        raise UsageError(f"{where}: family {unknown[0]!r} is unknown; known: {', '.join(FAMILIES)}")
    only(entry, (*_FIELDS, "families"), where)
    return Fault(families=tuple(families), **{key: entry[key] for key in _FIELDS})


def load(fault: Plant, options: Mapping[str, str] | None = None) -> Backend:
    """A backend with the fault in it; `options` of the adapter replace those that the fault names.

    PlantError if the fault cannot be planted, UsageError if its adapter is unknown, UnavailableError if this machine
    cannot have it.
    """
    base = Spec.parse(fault.of)
    copy = _Copy(f"planted_{next(_number)}", fault)
    backend = copy.open(base if options is None else Spec(base.name, tuple(options.items())))
    if fault.file and not copy.planted:  # a module that is imported late
        copy.module(fault.file.removesuffix(".py").replace("/", "."))
    if fault.file and not copy.planted:
        raise PlantError(f"fault {fault.name}: {fault.file} is no file of an adapter, its engine or the quantisers")
    return backend


def _is_copied(name: str) -> bool:
    if name in SHARED:
        return False
    return f"{name}.".startswith(("backends.", "conformance.backend.", f"{COPIED}.", f"{SCHEDULER}."))


class _Copy(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of one copy: `{alias}.backends.cpu.rope` is `backends.cpu.rope` again."""

    def __init__(self, alias: str, fault: Plant) -> None:
        self.alias, self.fault = alias, fault
        self.planted = False
        for name in (
            alias,
            f"{alias}.conformance",
            f"{alias}.conformance.run",
            *(f"{alias}.{package.__name__}" for package in VOCABULARY),
        ):
            package = ModuleType(name)
            package.__path__ = []
            sys.modules[name] = package
        for package in VOCABULARY:
            for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if not _is_copied(info.name):
                    sys.modules[f"{alias}.{info.name}"] = importlib.import_module(info.name)
        sys.meta_path.insert(0, self)

    def module(self, name: str) -> ModuleType:
        """The copy of module `name`."""
        return importlib.import_module(f"{self.alias}.{name}")

    def open(self, spec: Spec) -> Backend:
        """The backend behind `spec`, and where it is a scheduler its devices, of the copy's own modules."""
        values = [e.value for e in entry_points(group=GROUP) if e.name == spec.name]
        if spec.name == SCHED:
            values = [f"{SCHEDULER}.backend:SchedBackend"]
        if not values:
            raise UsageError(f"fault {self.fault.name}: no adapter {spec.name!r} is installed")
        module, _, name = values[0].partition(":")
        backend = getattr(self.module(module), name)(**dict(spec.options))
        if not isinstance(backend, Backend):
            raise UsageError(f"fault {self.fault.name}: {values[0]} is no Backend")
        return backend.attach(self.open) if spec.name == SCHED else backend  # type: ignore[attr-defined]  # a scheduler

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The copy's own modules; no others."""
        name = fullname.removeprefix(f"{self.alias}.")
        if name == fullname or not _is_copied(name):
            return None
        original = importlib.util.find_spec(name)
        if original is None or original.origin is None:
            return None
        spec = importlib.machinery.ModuleSpec(
            fullname, self, origin=original.origin, is_package=original.submodule_search_locations is not None
        )
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the source, with the fault where this is its file, and with absolute imports kept within the copy."""
        path = Path(str(module.__file__))
        code = _code(path)
        if path.is_relative_to(ROOT):
            changed = self.fault.change(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
            if changed is not None:
                self.planted = True
                code = compile(changed, str(path), "exec", dont_inherit=True)
        module.__dict__.update(self.fault.names, __builtins__={**vars(builtins), "__import__": self._import})
        exec(code, module.__dict__)  # noqa: S102  # our own source, one line changed

    def _import(
        self,
        name: str,
        scope: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        names: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """`from conformance.backend.kernel import x` -> `from {alias}.conformance.backend.kernel import x`."""
        inward = level == 0 and bool(names) and _reaches_copies(name)
        return __import__(f"{self.alias}.{name}" if inward else name, scope, local, names, level)


@cache
def _code(path: Path) -> CodeType:
    """The same for all copies."""
    return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)


def _reaches_copies(module: str) -> bool:
    return f"{module}.".startswith(("backends.", f"{SCHEDULER}.", *(f"{package.__name__}." for package in VOCABULARY)))
