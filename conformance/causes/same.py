"""Which causes of two runs are one: a search may end with other sizes, one type more or one op less.

An id says so where it is the same. Of what is left, two causes of one backend are one if they fail alike and

- an error that tells itself by its words: some op of one is of the other, too, or no op is at fault in one of them;
- wrong numbers and damaged memory, whatever signal it ends with: some op is the same, and so is what they say beside
  sizes and of another node, and that is something.

A cause is of one other at most, the likest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Protocol

from conformance.judge.verdict import Verdict
from conformance.report.compare import Key

from .cause import ANY_OF, Condition
from .failure import by_chance
from .features import BESIDE
from .form import Form, of_any


class Predicate(Protocol):
    """A cause, or what a baseline has of one: properties as those of `Cause`."""

    @property
    def id(self) -> str:
        """As there."""

    @property
    def backend(self) -> str:
        """As there."""

    @property
    def verdict(self) -> Verdict:
        """As there."""

    @property
    def message(self) -> str:
        """As there."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """As there."""


def same(before: Sequence[Predicate], after: Sequence[Predicate]) -> dict[Key, Key]:
    """Key of a cause of `after` -> that of the same of `before`, where there is one."""
    old, new = ({(c.id, c.backend): c for c in causes} for causes in (before, after))
    found = {key: key for key in new if key in old}
    pairs = [
        (-likeness, mine, theirs)
        for (theirs, b), (mine, a) in product(old.items(), new.items())
        if theirs not in new and mine not in old and (likeness := _likeness(b, a)) is not None
    ]
    for _, mine, theirs in sorted(pairs):
        if mine not in found and theirs not in found.values():
            found[mine] = theirs
    return found


def _likeness(a: Predicate, b: Predicate) -> float | None:
    """How much two causes share, from 0 to 2; None if they are two."""
    chance = by_chance(a.verdict, a.message) and by_chance(b.verdict, b.message)
    if (a.backend, a.verdict) != (b.backend, b.verdict) or (a.message != b.message and not chance):
        return None
    x, y = Form(a.conditions), Form(b.conditions)
    ops, said = _share(set(x.ops), set(y.ops)), _share(_said(x), _said(y))
    if chance:
        alike = ops and _keys(x) and _keys(x) == _keys(y) and all(_meet(x, y, key) for key in _keys(x))
    else:
        alike = ops or not (x.ops and y.ops)
    return ops + said if alike else None


def _share(a: set[str], b: set[str]) -> float:
    """Of all that two sets have, what both have."""
    return len(a & b) / max(1, len(a | b))


def _said(form: Form) -> set[str]:
    return {f"{of_any(c.key)} {value}" for c in form.says for value in c.value.split(ANY_OF)}


def _keys(form: Form) -> set[str]:
    return {of_any(c.key) for c in form.says if c.key != BESIDE}


def _meet(a: Form, b: Form, key: str) -> bool:
    """Whether two forms have a value in common for what `key` says of any operand."""
    x, y = ({v for c in f.says if of_any(c.key) == key for v in c.value.split(ANY_OF)} for f in (a, b))
    return bool(x & y)
