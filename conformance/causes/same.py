"""Match the causes of two runs, whose rules may differ in a size, a type or an op.

Causes with equal ids match. Otherwise two causes of one backend match if they fail alike and

- for errors: they share an op, or one of them has no failing op;
- for wrong numbers and memory corruption, whatever the signal: they share an op and name the same properties apart from
  sizes, at least one.

Each cause matches at most one other; the most similar pairs match first.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import product

from conformance.report.compare import Key

from .cause import ANY_OF, Cause, Condition, Known
from .failure import is_flaky
from .features import BESIDE
from .rule import Rule, property_of

OLD_WORDS = (
    ("a type=", "any operand.type="),
    ("an operand shows=", "any operand.view of="),
    ("an operand holds=", "any operand.holds="),
    ("an operand's offset=", "any operand.offset view="),
    ("an operand is written=", "any operand.written="),
    (".shows=", ".view of="),
    ("a part of ", "part of "),
    (".offset=yes", ".offset view=yes"),
    (".layout=rows apart", ".layout=strided rows"),
    (".view=by no op", ".bare view=yes"),
    (".written=by a node before, whose result it does not read", ".shared buffer=yes"),
    ("beside=another node", f"{BESIDE}=yes"),
    ("output=and read later", "output=read by another node"),
    ("step=same shape", "step=same sizes as before"),
)
"""Text of a condition in an old baseline -> its current text."""


def in_words_of_today(condition: Condition) -> Condition:
    """Convert a condition written by an older version to the current names."""
    text = said = f"{condition.key}={condition.value}"
    for old, new in OLD_WORDS:
        text = text.replace(old, new)
    key, _, value = text.partition("=")
    return Condition(key, value) if text != said else condition


def same(before: Sequence[Cause | Known], after: Sequence[Cause | Known]) -> dict[Key, Key]:
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


def _likeness(a: Cause | Known, b: Cause | Known) -> float | None:
    """Return the similarity of two causes, from 0 to 2; None if they do not match."""
    flaky = is_flaky(a.verdict, a.message) and is_flaky(b.verdict, b.message)
    if (a.backend, a.verdict) != (b.backend, b.verdict) or (a.message != b.message and not flaky):
        return None
    x, y = Rule(a.conditions), Rule(b.conditions)
    ops = _share(set(x.ops), set(y.ops))
    mine, theirs = _named(x), _named(y)
    if flaky:
        alike = ops and mine and mine.keys() == theirs.keys() and all(mine[name] & theirs[name] for name in mine)
    else:
        alike = ops or not (x.ops and y.ops)
    pairs = ({(name, v) for name, values in named.items() for v in values} for named in (mine, theirs))
    return ops + _share(*pairs) if alike else None


def _share(a: AbstractSet[object], b: AbstractSet[object]) -> float:
    """Return the Jaccard index of two sets."""
    return len(a & b) / max(1, len(a | b))


def _named(rule: Rule) -> dict[str, set[str]]:
    """Map each property name in a rule, for any operand, to its values."""
    found: dict[str, set[str]] = {}
    for c in rule.says:
        if c.key != BESIDE:
            found.setdefault(property_of(c), set()).update(c.value.split(ANY_OF))
    return found
