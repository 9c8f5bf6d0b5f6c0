"""The page: both suites on the same mutants, by area, file and kind, and every mutant that ours does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from ..rate import Rate  # noqa: TID252  # this package is `trust` in pytest and `tests.trust` as a command
from .score import Score
from .tree import Mutant, Tree

HEADERS = (
    "drawn", "reached", "ours, smoke", "ours, standard", "test-backend-ops", "both", "ours alone", "theirs alone",
    "neither",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judged:
    """A mutant and its score."""

    mutant: Mutant
    score: Score
    folder: str

    @property
    def is_reached(self) -> bool:
        """Return True if a case of either suite reaches it."""
        return self.score.status != "not reached"


def page(trees: Sequence[tuple[Tree, Mapping[int, Score]]]) -> str:
    """Return the page in Markdown, of the mutants that have a score."""
    judged = [Judged(m, s[m.number], t.folder.name) for t, s in trees for m in t.mutants if m.number in s]
    parts = [
        _head([t for t, _ in trees], judged),
        _table("area", judged, lambda j: j.mutant.area),
        _table("file", judged, lambda j: j.mutant.file),
        _table("kind", judged, lambda j: j.mutant.edit.kind),
        "\n".join(_missed(judged)),
    ]
    return "\n\n".join(parts) + "\n"


def _head(trees: Sequence[Tree], judged: Sequence[Judged]) -> str:
    reached = [j for j in judged if j.is_reached]
    determined = [j for j in reached if j.score.status != "undetermined"]
    rows = [
        (
            name,
            *(str(Rate(sum(map(is_noticed, among)), len(among))) for among in (reached, determined)),
            f"{seconds:.0f}",
        )
        for name, is_noticed, seconds in (
            ("ours, smoke", _at_smoke, sum(j.score.ours.seconds for j in judged)),
            ("ours, standard", _by_ours, sum(j.score.ours.seconds for j in judged)),
            ("test-backend-ops", _by_theirs, sum(j.score.theirs.seconds for j in judged)),
        )
    ]
    counted = (
        f"{len(judged)} mutants judged ({', '.join(f'{t.folder.name}: seed {t.seed}' for t in trees)}); "
        f"{sum(t.dropped for t in trees)} more did not compile. "
        f"{len(reached)} are reached, {len(determined)} of them determined: "
        "a suite noticed them, or an output has other bytes."
    )
    headers = ("suite", "noticed of all reached", "of all determined", "processor seconds")
    return f"{counted}\n\n{tabulate(rows, headers, 'pipe')}"


def _table(name: str, judged: Sequence[Judged], key: Callable[[Judged], str]) -> str:
    names = dict.fromkeys(key(j) for j in judged)
    rows = [_row(n, [j for j in judged if key(j) == n]) for n in names]
    rows.append(_row("all", judged))
    return tabulate(rows, (name, *HEADERS), "pipe")


def _row(name: str, judged: Sequence[Judged]) -> tuple[str | int, ...]:
    reached = [j for j in judged if j.is_reached]
    both = sum(_by_ours(j) and _by_theirs(j) for j in reached)
    ours, theirs = sum(map(_by_ours, reached)), sum(map(_by_theirs, reached))
    neither = len(reached) - ours - theirs + both
    smoke = sum(map(_at_smoke, reached))
    return (name, len(judged), len(reached), smoke, ours, theirs, both, ours - both, theirs - both, neither)


def _missed(judged: Iterable[Judged]) -> Iterator[str]:
    for j in judged:
        if not j.is_reached or _by_ours(j):
            continue
        m, ours, theirs = j.mutant, j.score.ours, j.score.theirs.by
        seen = f"other bytes in {ours.differs}" if ours.differs else "no other bytes seen"
        said = f"{ours.reaching} cases reach it; {f'noticed by {theirs}' if theirs else seen}."
        yield f"### {j.folder} {m.number}. {m.place}, {m.edit.function}: {m.edit.kind}\n\n{said}\n"
        yield f"```diff\n{diff(m)}\n```\n"


def diff(m: Mutant) -> str:
    """Return what a mutant replaces, as a diff."""
    new = m.edit.new or ""
    return "\n".join([*(f"-{line}" for line in m.edit.old.splitlines()), *(f"+{line}" for line in new.splitlines())])


def _at_smoke(j: Judged) -> bool:
    return j.score.ours.level == "smoke"


def _by_ours(j: Judged) -> bool:
    return bool(j.score.ours.by)


def _by_theirs(j: Judged) -> bool:
    return bool(j.score.theirs.by)
