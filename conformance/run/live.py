"""Live families: cases without a graph of the suite, which run llama.cpp or query a backend.

Such a case has an id like any other, and no steps. A player of its family returns its result from its own processes.
Everything else (globs, levels, shards, journals, waivers, causes, records) works as for a graph, except that a live
family runs only if the user names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.ggml.errors import BackendError, ConformanceError, UnavailableError, UsageError
from conformance.installed import Parts
from conformance.judge.evidence import Error
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.suite import FAMILIES
from conformance.suite.family import Family

from .failed import result_of_error, unjudged, unsupported
from .isolation.isolate import Isolation, Workers


class Player(Protocol):
    """One live family on one backend."""

    def play(self, case_id: str) -> Result:
        """Return the result of a case on its backend; without seconds, those of this call count.

        Raises:
            UnavailableError: it cannot be run or checked here; the result is UNSUPPORTED.
            ConformanceError: the backend failed; the runner makes the result as for a graph.
        """

    def close(self) -> None:
        """End its processes."""


class Players:
    """The players of a run, each opened once."""

    def __init__(self, workers: Workers, save: Path | None) -> None:
        """Open none yet; `workers` has their limits, `save` is a folder for files of failing cases."""
        self._workers, self._save = workers, save
        self._players: dict[tuple[Spec, str], Player | ConformanceError] = {}
        """A player, or why it could not be opened."""

    def play(self, spec: Spec, case_id: str) -> Result:
        """Return the result of a case on `spec`; UsageError if the backend or an option is unknown."""
        pair, begun = Pair(case_id, str(spec)), time.perf_counter()
        try:
            player = self._player(spec, case_id.partition("/")[0])
            result = player.play(case_id)
            if result.verdict is Verdict.TIMEOUT and not self._workers.isolation.until.is_over():
                result = player.play(case_id)
        except UsageError:
            raise
        except UnavailableError as e:
            return unsupported(pair, Error(str(e), str(e)))
        except ConformanceError as e:
            return result_of_error(pair, e)
        except Exception as e:  # noqa: BLE001  # a bug of a player must fail one case, not the run
            return unjudged(pair, e)
        if (result.case, result.backend) == tuple(pair):
            return result if result.seconds else replace(result, seconds=time.perf_counter() - begun)
        wrong = f"its player returned the result of {result.case!r} on {result.backend!r}"
        return result_of_error(pair, BackendError(wrong))

    def _player(self, spec: Spec, family: str) -> Player:
        """Return the player of a live family; always the same ConformanceError if not possible."""
        if (spec, family) not in self._players:
            try:
                self._players[spec, family] = LIVE[family].player(spec, self._workers.isolation, self._save)
            except UsageError:
                raise
            except ConformanceError as e:
                self._players[spec, family] = e
        found = self._players[spec, family]
        if isinstance(found, ConformanceError):
            raise found
        return found

    def close(self) -> None:
        """Close all players; they may be opened again."""
        for player in self._players.values():
            if not isinstance(player, ConformanceError):
                player.close()
        self._players.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFamily(Family):
    """A family whose cases have no steps."""

    player: Callable[[Spec, Isolation, Path | None], Player]
    """Function that opens a player on a backend, with a folder for files of failing cases."""
    columns: Sequence[str] = ()
    """Globs of the metrics in the terminal's table, in order."""
    is_timed: bool = False
    """True if its cases measure time or energy: they run alone, one after the other."""
    unlisted: Callable[[str], Sequence[str]] = lambda _: ()
    """Function that returns ids that are in no level and match a glob."""
    recorded: Callable[[Path, int, int], Case] | None = None
    """Function that records a model file: a prompt of N tokens, then M single tokens."""


def fault(name: str, family: object) -> str:
    """Return why `family` cannot be installed as the live family `name`; "" if it can."""
    if type(family) is not LiveFamily:
        return f"a LiveFamily expected, {type(family).__name__} found"
    return "" if family.name == name else f"its name is {family.name!r}, {name!r} expected"


GROUP = "conformance.live_families"
"""Entry points of live families, each a `LiveFamily` under its own name."""
ORDER = (
    "audit", "layout", "arch", "scenario", "settings", "projector", "memory", "phases", "access", "functions", "order",
    "server", "model",
)  # fmt: skip
LIVE: Parts[LiveFamily] = Parts(GROUP, "live family", fault, ORDER)
"""Every installed live family by name, imported on use."""


def is_live(case_id: str) -> bool:
    """Return True if a case belongs to a live family."""
    return _is_live(case_id.partition("/")[0])


def _is_live(name: str) -> bool:
    """Return True for a live family; a family of ours wins over one of another distribution."""
    return name in ORDER or (name in LIVE and name not in FAMILIES)


def is_timed(case_id: str) -> bool:
    """Return True if a case measures time or energy and must run alone."""
    return is_live(case_id) and LIVE[case_id.partition("/")[0]].is_timed


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
