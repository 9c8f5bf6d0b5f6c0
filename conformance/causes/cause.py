"""A cause: the failures of one backend that share a rule confirmed by experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from conformance.case.case import JSON
from conformance.judge.verdict import FAILURES, Result, Verdict

ANY_OF = "|"
"""Separator between alternative values of a condition."""
ALWAYS = "always"
"""Value of `Cause.seen` if each confirmed case failed in every try, in fresh processes."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A property of a node or its step and the value it must have, such as `src[1].ne[2]` `> 1`."""

    key: str
    value: str

    def __str__(self) -> str:
        value = self.value.replace(ANY_OF, " or ")
        if value in ("yes", "given"):
            return self.key.replace(".", " ", 1) + (" given" if value == "given" else "")
        return f"{self.key} {value}" if value[:1] in "<>=!" else f"{self.key} = {value}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Failures of one backend that one bug explains."""

    id: str
    """Stable across runs and builds if the searches end alike: a hash of backend and error. Wrong numbers add the rule,
    and so does a second cause that would get the same id."""
    sentence: str
    """A summary for people: the op, the error, the conditions and the counts."""
    backend: str
    verdict: Verdict
    op: str
    """Op of the failing node; empty if there is no single failing node."""
    message: str
    """The innermost message without addresses, sizes and lines; empty for wrong numbers."""
    conditions: tuple[Condition, ...]
    """Each failing node meets all of them. `rank["passed"]` counts the passing nodes that do."""
    cases: tuple[str, ...]
    """Case ids, smallest case first."""
    seen: str = ""
    """`always`, `k of n` or `after CASE`; empty if the cause was not confirmed."""
    rank: Mapping[str, int] = field(default_factory=dict)
    """`architectures` have a matching node, of the `counted` ones, `of` all in the zoo; `failed` cases; `passed`:
    distinct passing nodes that meet the conditions."""
    folder: str | None = None
    """Folder of the bug report."""

    @property
    def smallest(self) -> str:
        """Id of the smallest failing case."""
        return self.cases[0]

    @property
    def hits(self) -> str:
        """Describe how many architectures contain a matching node; empty if none were counted."""
        if "architectures" not in self.rank:
            return ""
        counted, of = self.rank.get("counted", 0), self.rank.get("of", 0)
        only = f" of the {counted} counted, of {of}" if counted < of else ""
        n = self.rank["architectures"]
        return f"{n} {'architecture has' if n == 1 else 'architectures have'} such a node{only}"

    def to_json(self) -> dict[str, JSON]:
        """Return the JSON object for the run file."""
        return {
            "id": self.id, "sentence": self.sentence, "backend": self.backend, "verdict": self.verdict.value,
            "op": self.op, "message": self.message, "conditions": [[c.key, c.value] for c in self.conditions],
            "cases": list(self.cases), "smallest": self.smallest, "seen": self.seen, "rank": dict(self.rank),
            "folder": self.folder,
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Cause:
        """Read a cause written by `to_json`; `report.runfile` has checked the fields of `row`."""
        conditions = tuple(Condition(k, v) for k, v in row["conditions"])
        return cls(
            row["id"], row["sentence"], row["backend"], Verdict(row["verdict"]), row["op"], row["message"], conditions,
            tuple(row["cases"]), row["seen"], row["rank"], row["folder"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """A cause as stored in a baseline."""

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
        """Make an entry for `cause`, with the reason and link of the earlier entry `said`."""
        words = ("", "") if said is None else (said.reason, said.link)
        return cls(
            cause.id, cause.sentence, cause.backend, cause.verdict, cause.op, cause.message, cause.conditions, *words
        )

    @property
    def key(self) -> tuple[str, str]:
        """Unique key in the file: id and backend."""
        return self.id, self.backend


def unique_ids(causes: Sequence[Cause]) -> list[Cause]:
    """Return `causes` of one backend; all but the largest of several with one id get new ids."""
    keeps: dict[str, Cause] = {}
    for c in sorted(causes, key=lambda c: (-len(c.cases), str(c.conditions))):
        keeps.setdefault(c.id, c)
    return [c if keeps[c.id] is c else replace(c, id=_of_predicate(c)) for c in causes]


def _of_predicate(cause: Cause) -> str:
    name, _, _ = cause.id.rpartition("-")
    return f"{name}-{digest(cause.id, *map(str, cause.conditions))}"


def digest(*words: str) -> str:
    """Return 8 hex digits of the SHA-256 of `words`, for ids."""
    return sha256("\n".join(words).encode()).hexdigest()[:8]


def in_order(causes: Sequence[Cause]) -> list[Cause]:
    """Sort causes by urgency: silent wrong numbers first, then by verdict and architectures hit."""
    silent = {Verdict.FAIL: 0, Verdict.CRASH: 1, Verdict.TIMEOUT: 2, Verdict.OVERCLAIM: 3}
    return sorted(
        causes,
        key=lambda c: (silent.get(c.verdict, 4), -c.rank.get("architectures", 0), -len(c.cases), c.id),
    )


def assigned(results: Iterable[Result], causes: Sequence[Cause]) -> list[Result]:
    """Return the results; each failure gets the id of the first cause that has its case."""
    ids: dict[tuple[str, str], str] = {}
    for cause in causes:
        for case in cause.cases:
            ids.setdefault((cause.backend, case), cause.id)
    return [replace(r, cause=ids.get((r.backend, r.case)) if r.verdict in FAILURES else None) for r in results]
