"""A list of builds, each tested once, for one page.

units = ["decode@past=0"]                   # optional: counted by callgrind, on the CPU
[released]                                  # build -> day of its release
"pypi:xllamacpp==0.2.0" = 2025-08-28
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.perf.units import Unit, units

_PLAIN = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Listed:
    """The builds of a file."""

    released: Mapping[str, str]
    """Build, as the user names it -> day of its release, in the order of the file."""
    units: Sequence[Unit]
    """Units to count on the CPU."""


def read(path: Path) -> Listed:
    """Read a list of builds; UsageError names the key that is wrong."""
    document = parse_toml(read_text(path), str(path))
    only(document, ("units", "released"), str(path))
    days, names = document.get("released"), document.get("units", [])
    expect(isinstance(days, dict) and bool(days), f"{path} released", "a table with a day for each build", days)
    for name, day in document["released"].items():
        expect(type(day) is date, f"{path} released {name}", "a day such as 2025-08-28", day)
    are_texts = isinstance(names, list) and all(isinstance(n, str) for n in names)
    expect(are_texts, f"{path} units", "names as `conform perf run --list` prints them", names)
    chosen = units("standard", names) if names else ()
    return Listed({name: str(day) for name, day in document["released"].items()}, chosen)


def folder(name: str) -> str:
    """Return a name for the folder of a build's record."""
    return _PLAIN.sub("-", name).strip("-")
