"""Faults of the past: is each found in the build that has it, and gone from the one that has not?

The file says nothing else: no case and no op, so that nothing can be looked for where it is known to be.

    [[fault]]
    link = "https://…"                # where it was fixed
    package = "pypi:xllamacpp"        # or npm:NAME
    bad = "0.2.0"                     # the version that has it
    good = "0.2.1"                    # the version that has not
    device = "CPU"                    # targets whose names begin so
    minutes = 10.0
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.case.case import JSON
from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.errors import ConformanceError

from .causes import Found, State
from .release import Release

KEYS = ("link", "package", "bad", "good", "device", "minutes")
_ADDRESS = re.compile(r"https?://\S+")
_PACKAGE = re.compile(r"(?:(pypi|npm):)?(@?[A-Za-z0-9][A-Za-z0-9._/-]*)")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry."""

    link: str
    package: str
    bad: str
    good: str
    device: str
    minutes: float

    def build(self, version: str) -> str:
        """One of its two builds, as `builds.source.locate` takes it."""
        kind, _, name = self.package.rpartition(":")
        if kind == "npm" or (not kind and name.startswith("@")):
            return f"npm:{name}@{version}"
        return f"pypi:{name}=={version}"


def read(path: Path) -> list[Fault]:
    """The faults of a file; UsageError names the entry (the first is 1) and the key."""
    document = parse_toml(read_text(path), str(path))
    only(document, ("fault",), str(path))
    tables = document.get("fault", [])
    are_tables = isinstance(tables, list) and bool(tables) and all(isinstance(t, dict) for t in tables)
    expect(are_tables, str(path), "[[fault]] tables", tables)
    return [_fault(t, f"{path}: fault {i + 1}") for i, t in enumerate(tables)]


def _fault(table: dict[str, Any], where: str) -> Fault:
    only(table, KEYS, where)
    link, package, minutes = table.get("link"), table.get("package"), table.get("minutes")
    expect(isinstance(link, str) and bool(_ADDRESS.fullmatch(link)), f"{where} link", "an http(s) address", link)
    named = isinstance(package, str) and bool(_PACKAGE.fullmatch(package))
    expect(named, f"{where} package", "pypi:NAME or npm:NAME", package)
    for key in ("bad", "good"):
        value = table.get(key)
        expect(isinstance(value, str) and bool(_VERSION.fullmatch(value)), f"{where} {key}", "a version", value)
    device = table.get("device")
    expect(isinstance(device, str) and bool(device.strip()), f"{where} device", "a device such as CPU", device)
    number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool) and 0 < minutes < float("inf")
    expect(number, f"{where} minutes", "a number above 0", minutes)
    return Fault(**{**table, "minutes": float(table["minutes"])})


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one fault."""

    fault: Fault
    found: Sequence[Found] = ()
    """What the bad build has and the good one has not, the most urgent first."""
    seconds: float = 0.0
    """Of the run, which all faults of the two builds share."""
    after: bool = False
    """Whether what was found is in the good build, too."""
    error: str = ""
    """Why a build could not be tested."""

    def sentence(self) -> str:
        """One line for a person."""
        if self.error:
            return f"{self.fault.link}: not tried: {self.error}"
        if not self.found:
            return f"{self.fault.link}: missed, in {self.seconds:.0f} s"
        more = f", and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        cause = self.found[0].cause
        return f"{self.fault.link}: {cause.id}: {cause.sentence}, by {cause.smallest}{more}, in {self.seconds:.0f} s"

    def to_json(self) -> dict[str, JSON]:
        """As the record of a backtest has it."""
        return {
            "link": self.fault.link,
            "package": self.fault.package,
            "bad": self.fault.bad,
            "good": self.fault.good,
            "device": self.fault.device,
            "seen_before": bool(self.found),
            "seen_after": self.after,
            "cause": self.found[0].to_json() if self.found else None,
            "others": [f.to_json() for f in self.found[1:]],
            "seconds": round(self.seconds, 1),
            "error": self.error,
        }


def attempt(
    faults: Sequence[Fault],
    release: Callable[[str, str, str, float], Release],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Answer]:
    """An answer for each fault; those of the same two builds and device share one run, in the longest of their times.
    `release` gets both builds, the device and the seconds.
    """
    pairs: dict[tuple[str, str, str], list[Fault]] = {}
    for f in faults:
        pairs.setdefault((f.build(f.bad), f.build(f.good), f.device), []).append(f)
    for pair, own in pairs.items():
        begun = clock()
        try:
            it = release(*pair, 60 * max(f.minutes for f in own))
            it.run()
        except ConformanceError as e:
            yield from (Answer(f, seconds=clock() - begun, error=str(e)) for f in own)
            continue
        found = [f for f in it.found if f.state is State.NEW]
        after = any(it.fails_on_base(f) for f in found[:1])
        yield from (Answer(f, found, clock() - begun, after) for f in own)
