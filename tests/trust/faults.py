"""The list of faults: each changes one place in one file of an adapter, of its engine or of the quantisers.

A TOML file holds any number of

    [[fault]]
    name = "rope-wrong-half"                   # unique
    says = "NEOX turns neighbours"             # one line for people
    of = "cpu"                                 # the adapter that has it, with options as on the command line
    families = ["kv_growth", "ops"]            # each of these families must notice it
    file = "backends/cpu/rope.py"
    old = "if mode == NORMAL:"                 # stands there exactly once
    new = "if mode == NEOX:"
    report = 17565                             # issue or pull request of ggml-org/llama.cpp that it is from, if any
    level = "standard"                         # the first level whose cases notice it, if not smoke
    kind = "positions of images"               # what an earlier suite did not see, if it is of such a kind
    case = "ops/ROPE-f32-ne=64x3x4,mode=NEOX@1"  # then also a case of that level that notices it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.case.strict import parse_toml, read_text
from conformance.ggml.errors import UsageError
from conformance.suite.family import Level

ROOT = shipped.path().parent
"""What `file` is relative to."""
FOLDER = Path(__file__).with_name("tables")


class PlantError(UsageError):
    """A fault that cannot be injected: its text is not there, or there more than once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug; with no `file` the adapter as it is."""

    name: str
    says: str
    of: str
    families: tuple[str, ...]
    file: str
    old: str
    new: str
    report: int = 0
    level: Level = "smoke"
    kind: str = ""
    case: str = ""

    @property
    def spec(self) -> Spec:
        """The faulty backend's own name, with the options of the adapter it is made from."""
        base = Spec.parse(self.of)
        return Spec(f"{base.name}+{self.name}", base.options)

    def apply(self, source: str) -> str:
        """`source` with the fault in it; PlantError if the place is not there, or there more than once."""
        if source.count(self.old) != 1:
            raise PlantError(
                f"fault {self.name}: {self.old!r} expected once in {self.file}, found {source.count(self.old)} times"
            )
        return source.replace(self.old, self.new)

    def sources(self) -> dict[str, str]:
        """File -> its text with the fault in it; PlantError as `apply`."""
        return {self.file: self.apply(original(self.file))} if self.file else {}

    def line(self, source: str) -> int:
        """The first line of `source`, from 1, that the fault changes."""
        same = next((i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b), 0)
        return source.count("\n", 0, source.index(self.old) + same) + 1


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several faults at once in the one adapter that all of them are of."""

    name: str
    faults: tuple[Fault, ...]

    @property
    def of(self) -> str:
        """The adapter."""
        return self.faults[0].of

    @property
    def spec(self) -> Spec:
        """As of one fault."""
        base = Spec.parse(self.of)
        return Spec(f"{base.name}+{self.name}", base.options)

    def sources(self) -> dict[str, str]:
        """As of one fault, with all of them; PlantError also where two change one place."""
        changed: dict[str, str] = {}
        for fault in self.faults:
            changed[fault.file] = fault.apply(changed.get(fault.file) or original(fault.file))
        return changed


def original(file: str) -> str:
    """The text of a file of the packages."""
    return (ROOT / file).read_text(encoding="utf-8")


def control(of: str) -> Fault:
    """The adapter itself, run in the same way: whatever notices it is a false alarm."""
    return Fault("no-fault", "the adapter as it is", of, (), "", "", "")


def read(paths: Sequence[Path]) -> list[Fault]:
    """Every fault of the TOML files in `paths`, folders included."""
    files = [f for p in paths for f in (sorted(p.glob("*.toml")) if p.is_dir() else [p])]
    entries = [e for f in files for e in parse_toml(read_text(f), str(f))["fault"]]
    return [Fault(**{**e, "families": tuple(e["families"])}) for e in entries]
