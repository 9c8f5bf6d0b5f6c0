"""What to plant: a fault is one place in one file of an adapter, read from TOML.

A file holds any number of

    [[fault]]
    name = "rope-wrong-half"                   # unique
    says = "NEOX turns neighbours"             # one line for people
    of = "cpu"                                 # the adapter that has it, with options as on the command line
    families = ["kv_growth", "ops"]            # the kind of fault: each of these families must notice it
    file = "backends/cpu/rope.py"
    old = "if mode == NORMAL:"                 # stands there exactly once
    new = "if mode == NEOX:"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.suite import FAMILIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = shipped.path().parent
"""What `file` is relative to."""
FOLDER = shipped.path("planted", "tables")
"""The faults that come along."""

_FIELDS = ("name", "says", "of", "file", "old", "new")


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
        """`source` with the fault in it.

        Raises:
            UsageError: the place is not there, or there more than once.
        """
        if self.old and source.count(self.old) != 1:
            raise UsageError(
                f"fault {self.name}: {self.old!r} expected once in {self.file}, found {source.count(self.old)} times"
            )
        return source.replace(self.old, self.new) if self.old else source


def control(of: str, families: Sequence[str]) -> Fault:
    """The adapter itself, loaded in the same way: whatever notices it is a false alarm."""
    return Fault("no-fault", "the adapter as it is", of, tuple(families), "", "", "")


def read(paths: Sequence[Path]) -> list[Fault]:
    """Every fault of the TOML files in `paths`, folders included.

    Raises:
        UsageError: names the file and the field.
    """
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
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: {e}") from None
    entries = document.get("fault")
    if not isinstance(entries, list):
        raise UsageError(f"{path}: [[fault]] tables expected, none found")
    return [_fault(e, f"{path}: fault {i}") for i, e in enumerate(entries)]


def _fault(entry: dict[str, Any], where: str) -> Fault:
    for key in _FIELDS:
        if not isinstance(entry.get(key), str):
            raise UsageError(f"{where}: {key}: a text expected, {entry.get(key)!r} found")
    families = entry.get("families")
    if not isinstance(families, list) or not families:
        raise UsageError(f"{where}: families: a list of names expected, {families!r} found")
    if unknown := [f for f in families if f not in FAMILIES]:
        raise UsageError(f"{where}: family {unknown[0]!r} is unknown; known: {', '.join(FAMILIES)}")
    if extra := entry.keys() - {*_FIELDS, "families"}:
        raise UsageError(f"{where}: {min(extra)} is unknown; known: {', '.join((*_FIELDS, 'families'))}")
    return Fault(families=tuple(families), **{key: entry[key] for key in _FIELDS})
