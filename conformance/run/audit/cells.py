"""What an audit finds: one cell per weight and buffer type, per op_param, and per trajectory."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from conformance.case.case import JSON


class Finding(str, enum.Enum):
    """What became of one cell."""

    AGREED = "agreed"
    """Yes and right, or no to what nothing else was given."""
    OVERCLAIM = "OVERCLAIM"
    """Yes, then wrong, an error or a crash; or it died when it was asked."""
    UNSOUND = "UNSOUND"
    """Nodes that differ in batch dimensions only get different answers: what is decided at load can fail later."""
    UNDERCLAIM = "UNDERCLAIM"
    """No, though equal work is taken in that buffer type."""
    XFAIL = "XFAIL"
    """What a waiver says of it."""
    XPASS = "XPASS"
    """Right, where a waiver says that it is not."""
    UNRUN = "UNRUN"
    """It could not be run or checked, so nothing is proven."""

    def __str__(self) -> str:
        return self.value


FOUND = frozenset({Finding.OVERCLAIM, Finding.UNSOUND, Finding.UNDERCLAIM})
"""Findings of which a case is kept."""
FAILING = FOUND | {Finding.XPASS}
"""Findings that fail an audit."""


@dataclass(slots=True)
class Cell:
    """One weight in one buffer type, one op_param, or a trajectory where nothing is placed."""

    case: str
    subject: str
    """`weight`, `op_param` or `trajectory`."""
    name: str
    """The weight's; op and op_param, as `ROPE freq_base`; empty for a trajectory."""
    type: str
    ne: list[int]
    buffer: str
    uses: int
    """Nodes that were asked about: those that read the weight."""
    taken: int
    """Those of them to which the backend says yes."""
    ran: int
    """Those of them that were computed there and judged."""
    finding: Finding
    detail: str = ""
    saved: str | None = None

    def to_json(self) -> dict[str, JSON]:
        """The record as JSON."""
        return {f.name: str(v) if isinstance(v := getattr(self, f.name), Finding) else v for f in fields(self)}
