"""Live families: cases without a graph of the suite, which run llama.cpp or query a backend.

Such a case has an id like any other, and no steps. A player of its family returns its result from its own processes.
Everything else (globs, levels, shards, journals, waivers, causes, records) works as for a graph, except that a live
family runs only if the user names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.installed import Parts
from conformance.judge.verdict import Result
from conformance.suite import FAMILIES
from conformance.suite.family import Family

from .isolation.isolate import Isolation


class Player(Protocol):
    """One live family on one backend."""

    def play(self, case_id: str) -> Result:
        """Return the result of a case; its backend and case may be empty.

        Raises:
            UnavailableError: it cannot be run or checked here; the result is UNSUPPORTED.
            ConformanceError: the backend failed; the runner makes the result as for a graph.
        """

    def close(self) -> None:
        """End its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFamily(Family):
    """A family whose cases have no steps."""

    player: Callable[[Spec, Isolation, Path | None], Player]
    """Function that opens a player on a backend, with a folder for files of failing cases."""
    columns: Sequence[str] = ()
    """Globs of the metrics in the terminal's table, in order."""
    unlisted: Callable[[str], Sequence[str]] = lambda _: ()
    """Function that returns ids that are in no level and match a glob."""


def fault(name: str, family: object) -> str:
    """Return why `family` cannot be installed as the live family `name`; "" if it can."""
    if type(family) is not LiveFamily:
        return f"a LiveFamily expected, {type(family).__name__} found"
    return "" if family.name == name else f"its name is {family.name!r}, {name!r} expected"


GROUP = "conformance.live_families"
"""Entry points of live families, each a `LiveFamily` under its own name."""
ORDER = ("audit", "layout", "arch", "scenario", "projector", "memory", "phases", "access", "order")
LIVE: Parts[LiveFamily] = Parts(GROUP, "live family", fault, ORDER)
"""Every installed live family by name, imported on use."""


def is_live(case_id: str) -> bool:
    """Return True if a case belongs to a live family."""
    return _is_live(case_id.partition("/")[0])


def _is_live(name: str) -> bool:
    """Return True for a live family; a family of ours wins over one of another distribution."""
    return name in ORDER or (name in LIVE and name not in FAMILIES)


def without_steps(case_id: str) -> Case:
    """Return the case of a live id."""
    return Case(case_id, {}, [], family=case_id.partition("/")[0])


def split_glob(glob: str) -> tuple[str, str]:
    """Split a glob or id `family/WHAT-key=value…` into `WHAT` and the rest; empty without keys."""
    body = glob.partition("/")[2]
    what, dash, _ = body.partition("=")[0].rpartition("-")
    return (what, body[len(what) + 1 :]) if dash else ("", "")


def is_glob(text: str) -> bool:
    """Return True if `text` has wildcards."""
    return any(sign in text for sign in "*?[")


def family_names() -> list[str]:
    """Return the names of all installed families, live ones last; imports none."""
    return list(dict.fromkeys((*FAMILIES, *LIVE)))


def family_or_none(name: str) -> Family | None:
    """Return the family or live family called `name`; None if unknown.

    Raises:
        UnavailableError: it cannot be imported or is not valid.
    """
    return LIVE[name] if _is_live(name) else FAMILIES.get(name)
