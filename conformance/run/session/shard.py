"""One of N shards of a run: which cases it takes, so that machines share a run without talking to each other.

The cases of each family are dealt out like cards, in the order of a hash of their ids: all shards get equally many of
each family, give or take one, and neighbours in a table, which cost alike, are spread. The same cases are always dealt
alike; `whole` names those cases, so that a merge sees which shards belong together and which is missing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError

LARGEST = 9999
"""Shards."""
_TEXT = re.compile(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `of`; the first is 1."""

    index: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def share(self, ids: Iterable[str]) -> list[str]:
        """The cases of `ids` that this shard takes, in their order, each once.

        All shards' shares of the same ids make the whole, and no two have a case in common.
        """
        listed = dict.fromkeys(ids)
        if self.of == 1:
            return list(listed)
        families: dict[str, list[str]] = {}
        for i in listed:
            families.setdefault(i.partition("/")[0], []).append(i)
        mine: set[str] = set()
        for name, own in families.items():
            # small families would all begin with the first shard
            start = (self.index - 1 - int(_digest(name), 16)) % self.of
            mine.update(sorted(own, key=lambda i: (_digest(i), i))[start :: self.of])
        return [i for i in listed if i in mine]

    def to_json(self, ids: Iterable[str]) -> dict[str, JSON]:
        """`{"index", "of", "whole"}` for a document of a run that shared out `ids`."""
        return {"index": self.index, "of": self.of, "whole": whole(ids)}


WHOLE = Shard()
"""The only one."""


def parse(text: str) -> Shard:
    """The shard that `I/N` names; UsageError for another text."""
    found = _TEXT.fullmatch(text)
    index, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= of:
        raise UsageError(f"--shard {text!r}: I/N with 1 <= I <= N <= {LARGEST} expected, as 2/4")
    return Shard(index, of)


def whole(ids: Iterable[str]) -> str:
    """A name of the cases that were shared out: 16 hex digits, the same whatever their order."""
    return _digest("\n".join(sorted(set(ids))))


def missing(shards: Iterable[JSON]) -> list[str]:
    """A sentence for each run that lacks a shard, given the `shard` entries of documents that belong together."""
    present: dict[tuple[str, int], set[int]] = {}
    for s in shards:
        present.setdefault((s["whole"], s["of"]), set()).add(s["index"])
    return [
        f"shard {', '.join(map(str, lacking))} of {of} is missing: "
        f"about {100 * len(lacking) / of:.0f} % of the cases did not run"
        for (_, of), indices in sorted(present.items())
        if (lacking := sorted(set(range(1, of + 1)) - indices))
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
