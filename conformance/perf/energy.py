"""Energy that the machine's own counters say was used: RAPL through Linux's powercap files, read and never written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.ggml.errors import UnavailableError

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Meter:
    """The counters of all processor packages. They count everything that runs there, not this process alone."""

    ranges: Mapping[Path, int]
    """`energy_uj` of a package -> microjoules after which it starts from 0 again."""

    def read(self) -> dict[Path, int]:
        """Microjoules of each package now."""
        return {path: int(path.read_text(encoding="ascii")) for path in self.ranges}

    def joules(self, before: Mapping[Path, int], after: Mapping[Path, int]) -> float:
        """Used between two readings that are less than one turn of a counter apart."""
        return sum((after[p] - before[p]) % turn for p, turn in self.ranges.items()) / 1e6


def meter(folder: Path = POWERCAP) -> Meter:
    """The machine's packages: zones `intel-rapl:N`, as AMD's are called too, without the parts of a package.

    Raises:
        UnavailableError: there are none, or they may not be read.
    """
    zones = sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else []
    packages = [z for z in zones if z.name.count(":") == 1 and _text(z / "name").startswith("package")]
    if not packages:
        raise UnavailableError(f"no RAPL counters in {folder}")
    ranges = {}
    for zone in packages:
        counter = zone / "energy_uj"
        turn, now = _text(zone / "max_energy_range_uj"), _text(counter)
        if not turn.isdecimal() or not now.isdecimal():
            raise UnavailableError(f"{counter} cannot be read here; it is root's unless the machine's owner opened it")
        ranges[counter] = int(turn)
    return Meter(ranges)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
