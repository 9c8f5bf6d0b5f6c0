"""Match the causes of two runs, whose rules may differ in a size, a type or an op.

Causes with equal ids match. Otherwise two causes of one backend match if they fail in the same way and

- for errors: they share an op, or one of them has no failing op;
- for wrong numbers and memory corruption, whatever the signal: they share an op and name the same properties apart from
  sizes, at least one.

Each cause matches at most one other; the most similar pairs match first.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import product

from conformance.judge.cause import ANY_OF, Cause
from conformance.report.compare import Key

from .failure import is_flaky
from .features import OTHER_NODE
from .rule import Rule, property_of


def same(before: Sequence[Cause], after: Sequence[Cause]) -> dict[Key, Key]:
    """Map the key of each cause in `after` to its match in `before`, if there is one."""
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


def _likeness(a: Cause, b: Cause) -> float | None:
    """Return the similarity of two causes, from 0 to 2; None if they do not match."""
    flaky = is_flaky(a.verdict, a.message) and is_flaky(b.verdict, b.message)
    if (a.backend, a.verdict) != (b.backend, b.verdict) or (a.message != b.message and not flaky):
        return None
    x, y = Rule(a.conditions), Rule(b.conditions)
    ops = _share(set(x.ops), set(y.ops))
    mine, theirs = _named(x), _named(y)
    if flaky:
        is_match = ops and mine and mine.keys() == theirs.keys() and all(mine[name] & theirs[name] for name in mine)
    else:
        is_match = ops or not (x.ops and y.ops)
    pairs = ({(name, v) for name, values in named.items() for v in values} for named in (mine, theirs))
    return ops + _share(*pairs) if is_match else None


def _share(a: AbstractSet[object], b: AbstractSet[object]) -> float:
    """Return the Jaccard index of two sets."""
    return len(a & b) / max(1, len(a | b))


def _named(rule: Rule) -> dict[str, set[str]]:
    """Map each property name in a rule, for any operand, to its values."""
    found: dict[str, set[str]] = {}
    for c in rule.says:
        if c.key != OTHER_NODE:
            found.setdefault(property_of(c), set()).update(c.value.split(ANY_OF))
    return found
