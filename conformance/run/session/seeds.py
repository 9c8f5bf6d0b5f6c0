"""Other seeds: every generated case with one seed of the user's, and fresh cases that no level lists."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from fnmatch import fnmatchcase

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.suite import FAMILIES
from conformance.suite.family import Level

from .select import family_named

LARGEST = 10**9
"""Fresh seeds are below."""
FOLDER = "failures"
"""Where fresh cases that fail are kept unless told otherwise."""


def new_seed() -> int:
    """A seed that nobody knew before."""
    return secrets.randbelow(LARGEST)


def reseeded(case_id: str, seed: int | None) -> str:
    """The id with this seed; itself where there is none, or where nothing is generated of a seed."""
    body, at, own = case_id.rpartition("@")
    if seed is None or not at or not re.fullmatch(r"[0-9]+", own, re.ASCII):
        return case_id
    family = FAMILIES.get(case_id.partition("/")[0])
    return case_id if family is None or not family.seeded else f"{body}@{seed}"


def fresh_ids(families: Sequence[str], globs: Sequence[str], level: Level, n: int, seed: int) -> list[str]:
    """`n` cases that no level lists: what the chosen families have at `level`, in turn, each with a seed of its own.

    Args:
        families: names; every family that has seeds where none is given.
        globs: only ids that match one of these, but for their seeds; all where there is none.
        level: what to choose from.
        n: how many.
        seed: the same seed gives the same cases.

    Raises:
        UsageError: an unknown family, or nothing to choose from.
    """
    if n < 1:
        return []
    chosen = [f for f in (map(family_named, families) if families else FAMILIES.values()) if f.seeded and not f.lacks()]
    listed = [[i for i in f.ids(level) if not globs or any(fnmatchcase(i, g) for g in globs)] for f in chosen]
    listed = [ids for ids in listed if ids]
    if not listed:
        raise UsageError("--fresh: none of the chosen cases has a seed")
    stream = Stream("fresh", str(seed))
    found: dict[str, None] = {}
    while len(found) < n:
        ids = listed[len(found) % len(listed)]
        at, own = int(stream.integers(1, 0, len(ids))[0]), int(stream.integers(1, 0, LARGEST)[0])
        found[reseeded(ids[at], own)] = None
    return list(found)
