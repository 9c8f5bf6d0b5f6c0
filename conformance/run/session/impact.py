"""Differences between two builds, and the cases of a run that can show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from conformance.backend.registry import Spec, resolve
from conformance.builds.build import Build, probe
from conformance.builds.changes import Changes, changes, counted, sentences
from conformance.builds.code import shown
from conformance.builds.difference import Difference, difference
from conformance.builds.reach import SETUPS, Impact, code_of, impact
from conformance.builds.source import locate
from conformance.ggml.errors import UnavailableError
from conformance.judge.verdict import FAILURES, Result

from .select import case_ids


@dataclass(frozen=True, slots=True)
class Impacted:
    """The difference of two builds, and the cases of each backend that can show it."""

    found: Difference
    impacts: Mapping[str, Impact]
    """Backend -> the cases that reach changed code on it."""
    builds: tuple[Build, Build]
    """The new and the old build."""

    @property
    def first(self) -> dict[str, list[str]]:
        """Backend -> cases that reach changed code, in the order in which they run."""
        return {name: of.first() for name, of in self.impacts.items()}

    @property
    def summary(self) -> str:
        """How much differs, or why that does not show what was edited."""
        return self.found.rebuilt or self.found.summary

    def changes(self, results: Sequence[tuple[Sequence[Result], Sequence[Result]]]) -> Changes:
        """Return the changes, with the cases that ran and that fail only on the new build.

        Args:
            results: of the new and of the old build, per backend.
        """
        tested: dict[str, set[tuple[str, str]]] = defaultdict(set)
        failing: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for new, old in results:
            bad = {r.case for r in new if r.verdict in FAILURES} - {r.case for r in old if r.verdict in FAILURES}
            ran = {r.case for r in new}
            for backend in {r.backend for r in new}:
                for name, ids in self.impacts.get(backend, Impact()).cases.items():
                    tested[shown(name)].update((backend, i) for i in ids if i in ran)
                    failing[shown(name)].update((backend, i) for i in ids if i in bad)
        numbers = {name: (len(ids), len(failing[name])) for name, ids in tested.items()}
        return counted(_changes(self.found, list(self.impacts.values()), self.builds), numbers)

    def lines(self, results: Sequence[tuple[Sequence[Result], Sequence[Result]]]) -> Iterator[str]:
        """Yield `changes` as text."""
        new, old = self.builds
        yield f"{new.name} against {old.name}{_commits(new, old)}"
        yield from sentences(self.changes(results))

    def to_json(self, results: Sequence[tuple[Sequence[Result], Sequence[Result]]]) -> dict[str, Any]:
        """Return `changes` for the run file."""
        return to_builtins(self.changes(results))  # type: ignore[no-any-return]  # a struct gives a dict


def impacted(new: Build, old: Build, ids: Mapping[Spec, Sequence[str]]) -> Impacted:
    """Compare two builds; UnavailableError if one has no library in ELF format.

    `ids`: the cases of each backend, those with something new first.
    """
    found = difference(new.path, old.path)
    impacts: dict[str, Impact] = {}
    for spec, own in ids.items():
        code, setup = code_of(found, dict(resolve(spec).options))
        impacts[str(spec)] = impact(code, own, setup)
    return Impacted(found, impacts, (new, old))


def described(new: str, old: str) -> Iterator[str]:
    """Yield what differs between two builds, as the user names them, in at most 40 lines.

    UnavailableError if one cannot be found, or not be compared.
    """
    found = difference(locate(new), locate(old))
    builds = [_probed(text) for text in (new, old)]
    names = [" ".join(filter(None, (text, b.number if b else ""))) for text, b in zip((new, old), builds, strict=True)]
    yield f"{names[0]} against {names[1]}{_commits(*builds)}"
    ids = case_ids((), (), "standard")
    impacts = [impact(found.functions.differ, [i for i in ids if of.match(i)], setup) for setup, of in SETUPS.items()]
    impacts.append(impact([*found.shaders.differ, *found.sources.differ], ids))
    yield from sentences(_changes(found, impacts, builds))


def _probed(text: str) -> Build | None:
    """Return a build as it loads here; None if it does not, as one for another processor."""
    try:
        return probe(text)
    except UnavailableError:
        return None


def _changes(found: Difference, impacts: Sequence[Impact], builds: Sequence[Build | None]) -> Changes:
    new, old = (b.architectures if b else () for b in builds)
    return changes(found, impacts, (old, new))


def _commits(new: Build | None, old: Build | None) -> str:
    """Return the range of commits between two builds, if both tell theirs; else ""."""
    ends = [b.number if b else "" for b in (old, new)]
    return f": commits {'..'.join(ends)}" if all(ends) and ends[0] != ends[1] else ""
