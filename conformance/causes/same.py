"""Match the causes of two runs: a search may end with other sizes, one type more or one op less.

Causes with equal ids are the same. Of the others, two of one backend are the same if they fail alike and

- an error tells itself by its words: some op of one is of the other, too, or no op is at fault in one of them;
- wrong numbers and damaged memory, whatever signal it ends with: some op is the same, and so are the properties that
  they name beside sizes, of which there is one at least.

A cause is the same as one other at most, the likest first.
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
"""Condition in a baseline of an older version -> the same condition today."""


def in_words_of_today(condition: Condition) -> Condition:
    """Return a condition of a file that an older version may have written."""
    text = said = f"{condition.key}={condition.value}"
    for old, new in OLD_WORDS:
        text = text.replace(old, new)
    key, _, value = text.partition("=")
    return Condition(key, value) if text != said else condition


def same(before: Sequence[Cause | Known], after: Sequence[Cause | Known]) -> dict[Key, Key]:
    """Map the key of a cause of `after` to that of the same of `before`, if there is one."""
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
    """Return how much two causes share, from 0 to 2; None if they are two."""
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
    """Return how many of all that is in two sets are in both."""
    return len(a & b) / max(1, len(a | b))


def _named(rule: Rule) -> dict[str, set[str]]:
    """Map each property that a rule names, whichever operand has it, to its values."""
    found: dict[str, set[str]] = {}
    for c in rule.says:
        if c.key != BESIDE:
            found.setdefault(property_of(c), set()).update(c.value.split(ANY_OF))
    return found
