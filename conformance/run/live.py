"""Live families: cases that have no graph of ours, because llama.cpp itself runs them, or a backend answers questions.

Such a case has an id like any other, and no steps. A player of its family gives its result from processes of its own.
Everything else (globs, levels, shards, journals, waivers, causes, records) is as for a graph, except that a live family
runs only where the user names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.judge.verdict import Result
from conformance.suite import FAMILIES
from conformance.suite.family import Family

from .isolation.isolate import Isolation

LIVE = {
    name: f"conformance.live.{name}"
    for name in ("audit", "layout", "arch", "scenario", "projector", "memory", "phases")
}
"""Name of a live family -> the module that exports it as `FAMILY`; imported when it is used."""


class Player(Protocol):
    """One live family on one backend."""

    def play(self, case_id: str) -> Result:
        """The result of a case; its names of case and backend may be empty.

        Raises:
            UnavailableError: it cannot be run or checked here, which is UNSUPPORTED.
            ConformanceError: the backend failed; the runner makes the result that a graph's case would have.
        """

    def close(self) -> None:
        """End its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFamily(Family):
    """A family whose cases have no steps."""

    player: Callable[[Spec, Isolation, Path | None], Player]
    """Opens a player on a backend. A folder, where one is given, takes files of failing cases."""
    columns: Sequence[str] = ()
    """Globs of the metrics that the terminal shows in a table, in this order."""
    unlisted: Callable[[str], Sequence[str]] = lambda _: ()
    """Ids of no level that a glob may match."""


def is_live(case_id: str) -> bool:
    """Return whether a case is of a live family."""
    return case_id.partition("/")[0] in LIVE


def without_steps(case_id: str) -> Case:
    """The case of a live id."""
    return Case(case_id, {}, [], family=case_id.partition("/")[0])


def split_glob(glob: str) -> tuple[str, str]:
    """Split a glob or id `family/WHAT-key=value…` into `WHAT` and the rest; two empty texts if it has no keys."""
    body = glob.partition("/")[2]
    what, dash, _ = body.partition("=")[0].rpartition("-")
    return (what, body[len(what) + 1 :]) if dash else ("", "")


def is_glob(text: str) -> bool:
    """True if `text` has wildcards."""
    return any(sign in text for sign in "*?[")


@cache
def live_family(name: str) -> LiveFamily:
    """The live family called `name`, one of `LIVE`."""
    return cast("LiveFamily", import_module(LIVE[name]).FAMILY)


def family_or_none(name: str) -> Family | None:
    """The family of graphs or live family called `name`."""
    return live_family(name) if name in LIVE else FAMILIES.get(name)
