"""A cause: what failures of one backend have in common, as experiments show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES, Result, Verdict

ANY_OF = "|"
"""Between values of a condition, any of which will do."""
ALWAYS = "always"
"""Value of `Cause.seen`: each confirmed case of it failed alone in a fresh process, each time."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One property of a node or of its step, and the value that it has: `src[1].ne[2]` is `> 1`."""

    key: str
    value: str

    def __str__(self) -> str:
        value = self.value.replace(ANY_OF, " or ")
        if value in ("yes", "given"):
            return self.key.replace(".", " ", 1) + (" given" if value == "given" else "")
        return f"{self.key} {value}" if value[:1] in "<>=!" else f"{self.key} = {value}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Failures of one backend that one fault explains."""

    id: str
    """The same in every run and build, as far as a search ends alike: from how it fails, and from the predicate where
    wrong numbers are of an op, or where two causes share the rest.
    """
    sentence: str
    """For a person: the op, the conditions, how it fails, and the counts behind them."""
    backend: str
    verdict: Verdict
    op: str
    """Op of the node at fault; empty if no single node is."""
    message: str
    """The innermost message, without addresses, sizes and lines of source; empty for wrong numbers."""
    conditions: tuple[Condition, ...]
    """All hold for a node at fault; none passes that has them all."""
    cases: tuple[str, ...]
    """Ids, smallest first."""
    seen: str = ""
    """`always`, `k of n`, `after CASE`; empty where it was not confirmed."""
    rank: Mapping[str, int] = field(default_factory=dict)
    """`architectures`: how many of the zoo's hold a node with the conditions, of how many `counted` ones, `of` how many
    there are; `failed`: cases; `passed`: different nodes with the conditions that are right."""
    folder: str | None = None
    """Folder of its bug report."""

    @property
    def smallest(self) -> str:
        """The smallest case."""
        return self.cases[0]

    @property
    def hits(self) -> str:
        """Return how many architectures hold such a node, for a person; empty where none were counted."""
        if "architectures" not in self.rank:
            return ""
        counted, of = self.rank.get("counted", 0), self.rank.get("of", 0)
        only = f" of the {counted} counted, of {of}" if counted < of else ""
        n = self.rank["architectures"]
        return f"{n} {'architecture has' if n == 1 else 'architectures have'} such a node{only}"

    def to_json(self) -> dict[str, JSON]:
        """Return it as the run file has it."""
        return {
            "id": self.id, "sentence": self.sentence, "backend": self.backend, "verdict": self.verdict.value,
            "op": self.op, "message": self.message, "conditions": [[c.key, c.value] for c in self.conditions],
            "cases": list(self.cases), "smallest": self.smallest, "seen": self.seen, "rank": dict(self.rank),
            "folder": self.folder,
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Cause:
        """`to_json`, read; the row has the fields that `report.runfile` checks."""
        conditions = tuple(Condition(k, v) for k, v in row["conditions"])
        return cls(
            row["id"], row["sentence"], row["backend"], Verdict(row["verdict"]), row["op"], row["message"], conditions,
            tuple(row["cases"]), row["seen"], row["rank"], row["folder"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """A cause as a baseline stores it."""

    id: str
    sentence: str
    backend: str
    verdict: Verdict
    op: str
    message: str
    conditions: tuple[Condition, ...]
    reason: str = ""
    link: str = ""

    @classmethod
    def of(cls, cause: Cause, said: Known | None = None) -> Known:
        """An entry for `cause`, with the reason and link that were `said` of it before."""
        words = ("", "") if said is None else (said.reason, said.link)
        return cls(
            cause.id, cause.sentence, cause.backend, cause.verdict, cause.op, cause.message, cause.conditions, *words
        )

    @property
    def key(self) -> tuple[str, str]:
        """Its unique key in the file: id and backend."""
        return self.id, self.backend


def unique_ids(causes: Sequence[Cause]) -> list[Cause]:
    """`causes` of one backend, each with an id of its own: where several have one, that of the most cases keeps it, and
    the ids of the others are from their predicates, too.
    """
    keeps: dict[str, Cause] = {}
    for c in sorted(causes, key=lambda c: (-len(c.cases), str(c.conditions))):
        keeps.setdefault(c.id, c)
    return [c if keeps[c.id] is c else replace(c, id=_of_predicate(c)) for c in causes]


def _of_predicate(cause: Cause) -> str:
    name, _, _ = cause.id.rpartition("-")
    return f"{name}-{digest(cause.id, *map(str, cause.conditions))}"


def digest(*words: str) -> str:
    """What tells the words of one cause from those of another."""
    return sha256("\n".join(words).encode()).hexdigest()[:8]


def in_order(causes: Sequence[Cause]) -> list[Cause]:
    """Most urgent first: wrong numbers in silence before errors, then by how many architectures they hit."""
    silent = {Verdict.FAIL: 0, Verdict.CRASH: 1, Verdict.TIMEOUT: 2, Verdict.OVERCLAIM: 3}
    return sorted(
        causes,
        key=lambda c: (silent.get(c.verdict, 4), -c.rank.get("architectures", 0), -len(c.cases), c.id),
    )


def assigned(results: Iterable[Result], causes: Sequence[Cause]) -> list[Result]:
    """The results, each failing one with the id of the first of `causes` that has its case."""
    ids: dict[tuple[str, str], str] = {}
    for cause in causes:
        for case in cause.cases:
            ids.setdefault((cause.backend, case), cause.id)
    return [replace(r, cause=ids.get((r.backend, r.case)) if r.verdict in FAILURES else None) for r in results]
