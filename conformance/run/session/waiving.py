"""Waivers in a run: results set against them as they come, and what is wrong with them at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import Result
from conformance.judge.waivers import Waivers, problems, proposal, waive
from conformance.suite import FAMILIES

from .select import build
from .settings import Settings


class Waiving:
    """The waivers of a run's backends, on one day."""

    def __init__(self, waivers: Mapping[Spec, Waivers], today: date) -> None:
        self._waivers = waivers
        self._today = today

    def to_json(self) -> dict[str, JSON]:
        """Backend -> its file of waivers, and how many failures that knows."""
        return {str(s): {"file": w.path, "known": len(w.entries)} for s, w in self._waivers.items()}

    def apply(self, spec: Spec, result: Result) -> None:
        """XFAIL or XPASS where a waiver of `spec` speaks of the case."""
        if spec in self._waivers:
            waive(self._waivers[spec], result, self._today)

    def problems(self, results: Iterable[Result]) -> tuple[list[str], list[str]]:
        """What fails the run: a sentence per waiver, and a unified diff per file that would mend it."""
        kept = list(results)
        sentences: list[str] = []
        edits: list[str] = []
        for spec, waivers in self._waivers.items():
            mine = [r for r in kept if r.backend == str(spec)]
            found = problems(waivers, mine, self._today, _listed, _exists)
            sentences += [p.sentence for p in found]
            edits += filter(None, [proposal(waivers, found) if found else ""])
        return sentences, edits


def in_force(settings: Settings, waiving: Waiving | None = None) -> dict[str, JSON] | None:
    """What a file of settings or of waivers changes in a run, for its record; None where neither was read."""
    waivers = {} if waiving is None else waiving.to_json()
    if settings.path is None and not waivers:
        return None
    return {
        "file": None if settings.path is None else str(settings.path.absolute()),
        "names": sorted(registry.defined()),
        "levels": dict(settings.levels),
        "waivers": waivers,
    }


def told(found: dict[str, JSON] | None) -> list[str]:
    """`in_force` as a line for people; none where nothing is."""
    if found is None:
        return []
    said = [f"names: {', '.join(found['names'])}"] if found["names"] else []
    said += [f"level of {name}: {level}" for name, level in found["levels"].items()]
    said += [
        f"waivers of {name}: {w['file']}: {w['known']} known failure{'s' * (w['known'] != 1)}"
        for name, w in found["waivers"].items()
    ]
    return [f"settings: {found['file'] or 'no file'} ({'; '.join(said)})"] if said else []


def today() -> date:
    """This machine's date: the only clock that a verdict knows, and only through a waiver's last day."""
    return datetime.now().astimezone().date()


def report(sentences: Sequence[str], edits: Sequence[str]) -> list[str]:
    """What `problems` found, as lines for people."""
    lines = [f"waivers fail this run: {sentence}" for sentence in sentences]
    if edits:
        lines += ["proposed, for a person to make (as a patch, `git apply` or `patch -p0` takes it):", *edits]
    return lines


def _listed(family: str) -> Sequence[str]:
    """Every id that a level has; a case from a file may be of no family."""
    return FAMILIES[family].ids("full") if family in FAMILIES else ()


def _exists(case_id: str) -> bool:
    try:
        build(case_id)
    except ConformanceError:
        return False
    return True
