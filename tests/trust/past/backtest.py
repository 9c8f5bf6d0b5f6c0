"""Known faults of old builds, each with a faulty build and the one that fixed it.

    [[fault]]
    link = "https://…"                # where it was fixed
    package = "pypi:xllamacpp"        # or npm:NAME
    bad = "0.2.0"                     # the version that has it
    good = "0.2.1"                    # the version that fixed it
    device = "CPU"                    # prefix of target names
    minutes = 10.0
    class = "numerics"                # one of CLASSES
    known = true                      # it was named in this repository before the list was drawn

The other columns (`sealed`) say what the fix names. They are read after the run, so they cannot
steer the search, and a new cause counts only if it agrees with them.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.case.case import JSON
from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.errors import ConformanceError
from conformance.llama.release.causes import SharedCause
from conformance.llama.release.release import Release
from conformance.report.compare import State

from . import sealed
from .sealed import Sealed

KEYS = ("link", "package", "bad", "good", "device", "minutes", "class", "known")
CLASSES = (
    "layouts", "concurrency", "claims", "tails", "memory", "sizes", "scheduler", "semantics", "types", "fusion",
    "numerics", "driver",
)  # fmt: skip
"""Classes of fixes.

layouts: strides, views, alignment. concurrency: races, hangs. claims: support claims, choice of kernels. tails: bounds,
odd sizes. memory: leaks, lifetime, allocation. sizes: integer overflow. scheduler: also RPC and state. semantics: the
meaning of an op. types: quantised types. fusion: also aliasing. numerics: precision. driver: one device."""
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
    group: str
    """Its class."""
    columns: dict[str, Any]
    """The sealed columns as they are in the file."""
    sealed: Sealed
    known: bool = False

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
    only(table, (*KEYS, *sealed.KEYS), where)
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
    group, known = table.get("class"), table.get("known", False)
    expect(group in CLASSES, f"{where} class", f"one of {', '.join(CLASSES)}", group)
    expect(isinstance(known, bool), f"{where} known", "true or false", known)
    return Fault(
        link=table["link"],
        package=table["package"],
        bad=table["bad"],
        good=table["good"],
        device=table["device"],
        minutes=float(table["minutes"]),
        group=table["class"],
        columns={key: table[key] for key in sealed.KEYS if key in table},
        sealed=Sealed.read(table, where),
        known=known,
    )


class Answer(str, enum.Enum):
    """Result of an entry."""

    FOUND = "found"
    """A new cause has its op, its conditions and its kind."""
    OTHER = "other finding only"
    """The bad build has new causes, and all of them are other bugs."""
    MISSED = "missed"
    NOT_RUN = "not run"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Attempt:
    """A fault, and the results of its two builds."""

    fault: Fault
    found: Sequence[SharedCause] = ()
    """Causes that show the fault and are in the bad build alone, the most urgent first."""
    other: Sequence[SharedCause] = ()
    """Other causes that are new in the bad build."""
    seconds: float = 0.0
    """Seconds of the run, which all faults of the two builds share."""
    after: bool = False
    """True if the good build also has the first of `found`."""
    error: str = ""
    """Why a build could not be tested."""

    @property
    def state(self) -> State | None:
        """FIXED if only the bad build has it, STILL if both; None if it was missed or not tried."""
        return None if not self.found else State.STILL if self.after else State.FIXED

    @property
    def answer(self) -> Answer:
        """Return the result of the entry."""
        if self.error:
            return Answer.NOT_RUN
        if self.found:
            return Answer.FOUND if self.state is State.FIXED else Answer.MISSED
        return Answer.OTHER if self.other else Answer.MISSED

    def sentence(self) -> str:
        """Return the result as a line of text."""
        head = f"{self.fault.link}: {self.answer}"
        if self.error:
            return f"{head}: {self.error}"
        if not self.found:
            ids = f": {', '.join(f.cause.id for f in self.other)}" if self.other else ""
            return f"{head}{ids}, in {self.seconds:.0f} s"
        more = f", and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        both = ", which the good build also has" if self.after else ""
        cause = self.found[0].cause
        return f"{head}: {cause.id}{both}: {cause.sentence}, by {cause.smallest}{more}, in {self.seconds:.0f} s"

    def to_json(self) -> dict[str, JSON]:
        """Return a row of `python -m tests.trust backtest --json`."""
        fault = self.fault
        return {
            **{key: getattr(fault, key) for key in KEYS[:6]},
            "class": fault.group,
            "known": fault.known,
            **fault.columns,
            "answer": str(self.answer),
            "state": None if self.state is None else str(self.state),
            "causes": [f.cause.to_json() for f in self.found],
            "other": [f.cause.to_json() for f in self.other],
            "seconds": round(self.seconds, 1),
            "error": self.error,
        }


def attempt(
    faults: Sequence[Fault],
    release: Callable[[str, str, str, float], Release],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Attempt]:
    """Test each fault; faults with the same builds and device share the longest run.

    `release` gets both builds, the device and the seconds, and nothing of the sealed columns.
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
        seconds = clock() - begun
        if not it.executed():
            yield from (Attempt(f, seconds=seconds, error=f"no cases ran: {it.why_not_executed()}") for f in own)
            continue
        new = [f for f in it.found if f.state is State.NEW]
        for f in own:
            mine = [c for c in new if f.sealed.shows(c)]
            after = any(it.fails_on_base(c) for c in mine[:1])
            yield Attempt(f, mine, [c for c in new if c not in mine], seconds, after)


def rates(attempts: Sequence[Attempt]) -> list[tuple[str, int, int]]:
    """Return class, found and tried of the entries that ran, in the order of `CLASSES`."""
    ran = [a for a in attempts if a.answer is not Answer.NOT_RUN]
    by_class = {group: [a for a in ran if a.fault.group == group] for group in CLASSES}
    return [(group, sum(a.answer is Answer.FOUND for a in own), len(own)) for group, own in by_class.items() if own]
