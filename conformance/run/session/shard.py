"""Select one of N shards of a run, so that machines share it without communication.

The cases of each family are distributed in turn, in the order of a hash of their ids: all shards get the same number of
each family, give or take one, and neighbours in a table, which have similar costs, are in different shards. The same
cases always give the same shards; `whole` identifies those cases, so that a merge finds shards that belong together and
missing ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.case.case import JSON
from conformance.ggml.errors import UsageError

LARGEST = 9999
"""Maximum number of shards."""
_TEXT = re.compile(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `of`; the first is 1."""

    index: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def share(self, ids: Iterable[str]) -> list[str]:
        """Return the cases of `ids` in this shard, in order, without duplicates.

        Every case is in exactly one shard.
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
        """Return `{"index", "of", "whole"}` for a document of a run that distributed `ids`."""
        return {"index": self.index, "of": self.of, "whole": whole(ids)}


WHOLE = Shard()
"""The shard of an undivided run."""


def parse(text: str) -> Shard:
    """Parse `I/N`; UsageError if malformed."""
    found = _TEXT.fullmatch(text)
    index, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= of:
        raise UsageError(f"--shard {text!r}: I/N with 1 <= I <= N <= {LARGEST} expected, as 2/4")
    return Shard(index, of)


def whole(ids: Iterable[str]) -> str:
    """Return an identifier of the distributed cases, in any order: 16 hex digits."""
    return _digest("\n".join(sorted(set(ids))))


def missing(shards: Iterable[JSON]) -> list[str]:
    """Return a sentence for each run that lacks a shard, from the `shard` entries of documents."""
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
