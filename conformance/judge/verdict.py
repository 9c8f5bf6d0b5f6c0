"""Verdicts, and the record of one case on one backend. The list of verdicts is closed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

import numpy as np

from conformance.case.case import JSON
from conformance.ggml.text import printable


class Verdict(str, enum.Enum):
    """What became of a case on a backend."""

    PASS = "PASS"  # noqa: S105  # a verdict, no password
    """Every output and cache of every step within its budget."""
    FAIL = "FAIL"
    """It ran, and numbers are wrong."""
    UNSUPPORTED = "UNSUPPORTED"
    """The backend said no through supports_op; its reason is kept."""
    OVERCLAIM = "OVERCLAIM"
    """The backend said yes through supports_op and then could not."""
    CRASH = "CRASH"
    """The process that ran it died."""
    TIMEOUT = "TIMEOUT"
    """It did not answer in time."""
    VACUOUS = "VACUOUS"
    """It ran, but not on the path the case demands, or nothing independent was there to check it against."""
    XFAIL = "XFAIL"
    """Failed as a waiver says it does."""
    XPASS = "XPASS"
    """Passed although a waiver says that it fails."""

    def __str__(self) -> str:
        return self.value


FAILURES = frozenset({Verdict.FAIL, Verdict.OVERCLAIM, Verdict.CRASH, Verdict.TIMEOUT, Verdict.VACUOUS, Verdict.XPASS})
"""Verdicts that make a run fail."""

EXECUTED = frozenset(set(Verdict) - {Verdict.UNSUPPORTED})
"""Verdicts of cases that a backend was given to run."""


@dataclass(slots=True)
class Result:
    """One case on one backend: the only source of every report."""

    case: str
    backend: str
    verdict: Verdict
    budget_used: float | None = None
    """Largest fraction of an error budget that any checked tensor used; over 1 fails. None where nothing was checked,
    Inf (null in JSON) where no budget allows the difference at all."""
    nmse: float | None = None
    """Largest NMSE of any checked tensor against what the backend's declared arithmetic gives."""
    nmse_exact: float | None = None
    """The same against the exact value, where the declared arithmetic is another."""
    seconds: float = 0.0
    """Wall time of the backend's part."""
    steps: int = 0
    """Steps that ran."""
    witness: dict[str, JSON] | None = None
    first_divergence: dict[str, JSON] | None = None
    """`step`, `node` (index), `op`, `name`, `index`, `expected`, `found`, `nmse`, `budget` of the first wrong node;
    `kind` is `graph` where it is wrong though each node by itself is right, `node` otherwise."""
    saved: str | None = None
    """The case file that reproduces it."""
    fresh: bool = False
    """Whether the case was made of a seed that nobody knew before: it is filed, and never fails a run."""
    waived: str | None = None
    """Its verdict before a waiver made it XFAIL or XPASS."""
    detail: str = ""
    """The story in a sentence: a reason, an abort text, a divergence."""

    def to_json(self) -> dict[str, JSON]:
        """The record as strict JSON (no NaN, no Inf)."""
        return {f.name: _strict(getattr(self, f.name)) for f in fields(self)}

    def sentence(self) -> str:
        """One line for a person."""
        line = f"{self.verdict} {printable(self.case)} on {printable(self.backend)}"
        return f"{line}: {printable(' '.join(self.detail.split()))}" if self.detail else line


def _strict(value: Any) -> JSON:  # noqa: ANN401  # whatever a record holds
    if isinstance(value, Verdict):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return f"({type(value).__name__})"  # no result may cost a run its record


@dataclass(slots=True)
class Totals:
    """How many of each verdict."""

    counts: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    filed: int = 0
    """Failures of fresh cases among them."""

    def add(self, result: Result) -> None:
        """Count one result."""
        self.counts[result.verdict] += 1
        self.filed += result.fresh and result.verdict in FAILURES

    @property
    def executed(self) -> int:
        """Cases that a backend was given to run."""
        return sum(n for v, n in self.counts.items() if v in EXECUTED)

    @property
    def failed(self) -> int:
        """Cases whose verdict fails the run."""
        return sum(n for v, n in self.counts.items() if v in FAILURES) - self.filed

    def exit_code(self) -> int:
        """0 fine, 1 conformance failures, 3 nothing executed."""
        if self.failed:
            return 1
        return 0 if self.executed else 3

    def to_json(self) -> dict[str, int]:
        """Every verdict with its count, zeros included, and what was executed."""
        return {**{v.value: n for v, n in self.counts.items()}, "executed": self.executed}

    def __str__(self) -> str:
        said = ", ".join(f"{n} {v}" for v, n in self.counts.items() if n) or "nothing ran"
        return f"{said} ({self.filed} of fresh cases, filed)" if self.filed else said
