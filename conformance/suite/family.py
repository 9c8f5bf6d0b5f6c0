"""What a case family is: a name, a size-ordered list of case ids per level, and a function from id to case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from conformance.case.case import Case

Level = Literal["smoke", "standard", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of case. `ids("smoke")` is part of `ids("standard")`, which is part of `ids("full")`."""

    name: str
    summary: str
    ids: Callable[[Level], Sequence[str]]
    """Case ids `family/params@seed`, smallest first; the same on every machine."""
    build: Callable[[str], Case]
    """The case behind an id, the same bytes on every machine; `UsageError` for an id it does not know."""
    seeded: bool = True
    """Whether another seed makes another case; a recording has but one."""
    lacks: Callable[[], str] = str
    """Why it has no cases in this installation; empty where nothing is missing."""
