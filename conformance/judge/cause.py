"""A cause: failures of a backend that share a rule; a part of the record of a run."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from conformance.case.case import JSON

from .evidence import Count
from .message import on_host
from .verdict import Verdict

ANY_OF = "|"
"""Separator between alternative values of a condition."""
ALWAYS = "always"
"""Value of `Cause.seen` if each confirmed case failed in every try, in fresh processes."""


class Condition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A property of a node or its step and the value it must have, such as `src[1].ne[2]` `> 1`."""

    key: str
    value: str

    def __str__(self) -> str:
        value = self.value.replace(ANY_OF, " or ")
        if value in ("yes", "given"):
            return self.key.replace(".", " ", 1) + (" given" if value == "given" else "")
        return f"{self.key} {value}" if value[:1] in "<>=!" else f"{self.key} = {value}"


class Neighbour(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Values of a property in a passing and in a failing node that are otherwise equal."""

    passes: str = ""
    """Empty if the passing node lacks the property."""
    fails: str = ""
    """The failing size; empty for other properties."""

    def __str__(self) -> str:
        if self.fails:
            near = int(self.fails) == int(self.passes) + 1
            return "" if near else f" ({self.passes} passes, {self.fails} fails)"
        return f" ({self.passes} passes)" if self.passes else ""


class Party(str, enum.Enum):
    """The party at fault, as far as experiments show."""

    LIBRARY = "library"
    """It fails without an emulating driver, on the host, or alike with two drivers."""
    ONE_DRIVER = "driver, or library that relies on what it does not give"
    """It passes with another driver: this one is wrong, or gives less than the library needs."""
    UNKNOWN = "library or its software driver"
    """No other driver ran it, or it failed there in another way."""

    def __str__(self) -> str:
        return self.value


class OnDriver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The smallest case of a cause on the device of one driver."""

    driver: str
    """Name and version; empty if unknown."""
    verdict: Verdict
    alike: bool
    """True if it fails as it does with the first driver."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Failures of one backend that one bug explains."""

    id: Annotated[str, msgspec.Meta(pattern=r"\S")]
    """Ops and a hash of backend and error; it does not depend on how far the search came.

    A second cause with the same ops and error gets an ordinal suffix."""
    sentence: str
    """A summary for people: the op, the error, the conditions and the counts."""
    backend: str
    verdict: Verdict
    op: str
    """Op of the failing node, or of the first wrong one of a graph; empty if unknown."""
    message: str
    """The innermost message without addresses, sizes and lines; empty for wrong numbers."""
    conditions: tuple[Condition, ...]
    """Conditions of the rule; each failing node meets all of them.

    `rank["passed"]` counts the passing nodes that do."""
    cases: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Case ids, smallest case first."""
    seen: str = ""
    """`always`, `k of n` or `after CASE`; empty if the cause was not confirmed."""
    rank: Mapping[str, Count] = field(default_factory=dict)
    """Counts of matching nodes: `architectures`, of the `counted`; `failed`; `passed`.

    `of`: all architectures of the zoo. `failed`: cases. `passed`: distinct passing nodes that meet the conditions."""
    folder: str | None = None
    """Folder of the bug report."""
    search: Literal["complete", "cut"] = "complete"
    """`cut` if the search ended before the smallest case was found.

    Then only conditions without which a case was seen to pass are listed, and the first case is not minimal."""
    neighbours: tuple[Neighbour, ...] = ()
    """For each of `conditions` but the op, in order: the values that show it."""
    state: str = ""
    """Comparison with the base (`report.compare.State`); empty if there is none."""
    drivers: tuple[OnDriver, ...] = ()
    """The driver of an emulated device, then others that ran the smallest case; else empty."""

    @property
    def party(self) -> Party:
        """The party at fault."""
        return self.party_if(emulated=bool(self.drivers))

    def party_if(self, *, emulated: bool) -> Party:
        """Return the party at fault, given whether a CPU emulates all devices that have it."""
        others = self.drivers[1:]
        if not emulated or on_host(self.message) or any(d.alike for d in others):
            return Party.LIBRARY
        return Party.ONE_DRIVER if any(d.verdict is Verdict.PASS for d in others) else Party.UNKNOWN

    @property
    def emulated(self) -> str:
        """Sentence on the drivers and the party; empty if the device is not emulated."""
        if not self.drivers:
            return ""
        own, *others = self.drivers
        told = [f"{d.driver or 'another driver'}: {'alike' if d.alike else d.verdict}" for d in others]
        return f"emulated by {', '.join([own.driver or 'an unknown driver', *told])}; at fault: {self.party}"

    @property
    def shown(self) -> dict[Condition, Neighbour]:
        """Condition -> what shows it."""
        return dict(zip((c for c in self.conditions if c.key != "op"), self.neighbours, strict=False))

    @property
    def smallest(self) -> str:
        """Id of the smallest failing case."""
        return self.cases[0]

    @property
    def text(self) -> str:
        """State and sentence."""
        return ": ".join(filter(None, (self.state, self.sentence)))

    @property
    def hits(self) -> str:
        """Describe how many architectures contain a matching node; empty if none were counted."""
        if "architectures" not in self.rank:
            return ""
        counted, of = self.rank.get("counted", 0), self.rank.get("of", 0)
        n = self.rank["architectures"]
        if counted < of:
            return f"{n} of {counted} checked architectures have such a node ({of} in total)"
        return f"{n} {'architecture has' if n == 1 else 'architectures have'} such a node"

    def to_json(self) -> dict[str, JSON]:
        """Return the JSON object for the run file."""
        row: dict[str, JSON] = msgspec.json.decode(msgspec.json.encode(self))
        return {**row, "smallest": self.smallest}

    @classmethod
    def from_json(cls, row: JSON) -> Cause:
        """Read a cause written by `to_json`; msgspec.ValidationError for another value."""
        return msgspec.convert(row, cls)
