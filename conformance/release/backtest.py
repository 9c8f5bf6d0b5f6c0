"""Known faults of old builds, each with a faulty build and the one that fixed it.

A list of faults names no case and no op, so the search cannot be steered to them:

    [[fault]]
    link = "https://…"                # where it was fixed
    package = "pypi:xllamacpp"        # or npm:NAME
    bad = "0.2.0"                     # the version that has it
    good = "0.2.1"                    # the version that fixed it
    device = "CPU"                    # prefix of target names
    minutes = 10.0
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.case.case import JSON
from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.errors import ConformanceError
from conformance.report.compare import State

from .causes import Found
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
        """Return one of its two builds in the form that `builds.source.locate` accepts."""
        kind, _, name = self.package.rpartition(":")
        if kind == "npm" or (not kind and name.startswith("@")):
            return f"npm:{name}@{version}"
        return f"pypi:{name}=={version}"


def read(path: Path) -> list[Fault]:
    """Return the faults of a file; UsageError names the entry (the first is 1) and the key."""
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
class Attempt:
    """A fault, and the results of its two builds."""

    fault: Fault
    found: Sequence[Found] = ()
    """Causes in the bad build that are not in the good one, the most urgent first."""
    seconds: float = 0.0
    """Seconds of the run, which all faults of the two builds share."""
    after: bool = False
    """True if the good build also has the first of them."""
    error: str = ""
    """Why a build could not be tested."""

    @property
    def state(self) -> State | None:
        """FIXED if only the bad build has it, STILL if both; None if it was missed or not tried."""
        return None if not self.found else State.STILL if self.after else State.FIXED

    def sentence(self) -> str:
        """Return the result as a line of text."""
        if self.error:
            return f"{self.fault.link}: not tested: {self.error}"
        if not self.found:
            return f"{self.fault.link}: missed, in {self.seconds:.0f} s"
        more = f", and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        cause = self.found[0].cause
        return f"{self.fault.link}: {cause.id}: {cause.sentence}, by {cause.smallest}{more}, in {self.seconds:.0f} s"

    def to_json(self) -> dict[str, JSON]:
        """Return a row of `conform build backtest --json`."""
        return {
            **asdict(self.fault),
            "state": None if self.state is None else str(self.state),
            "causes": [f.cause.to_json() for f in self.found],
            "seconds": round(self.seconds, 1),
            "error": self.error,
        }


def attempt(
    faults: Sequence[Fault],
    release: Callable[[str, str, str, float], Release],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Attempt]:
    """Test each fault; faults with the same builds and device share the longest run.

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
            yield from (Attempt(f, seconds=clock() - begun, error=str(e)) for f in own)
            continue
        found = [f for f in it.found if f.state is State.NEW]
        after = any(it.fails_on_base(f) for f in found[:1])
        yield from (Attempt(f, found, clock() - begun, after) for f in own)
