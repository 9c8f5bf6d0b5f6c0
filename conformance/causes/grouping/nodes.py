"""The nodes of a run: does what a form says tell those that fail from those that are right?"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from conformance.case.case import Case
from conformance.causes.cause import ANY_OF, Condition
from conformance.causes.failure import Failure
from conformance.causes.features import OP, Features, features, nodes_of
from conformance.causes.form import SHOWN, Form, base_of, is_size, meets, type_of

JOINED = 0.6
"""How much of the share of failures may be lost where two groups are joined."""
TELLS = 0.1
"""The share of failures below which a form explains no other failure."""
FEW = 3
"""Right nodes without which nobody can say that a condition tells nothing."""


class Nodes:
    """The nodes of failures, and those of cases that pass, by op."""

    def __init__(self, failures: Iterable[Failure], passed: Iterable[Case]) -> None:
        self._failed = _by_op(f.features for f in failures if f.at is not None)
        self._passed = _by_op(features(case, k, n) for case in passed for k, _, n in nodes_of(case))

    def always(self, ops: Sequence[str], condition: Condition) -> bool:
        """Whether every node of `ops` meets the condition, and enough of them are right to say so."""
        right = [f for op in ops for f in self._passed.get(op, ())]
        wrong = [f for op in ops for f in self._failed.get(op, ())]
        return len(right) >= FEW and all(meets(condition, f) for f in (*right, *wrong))

    def share(self, form: Form, others: Collection[Form] = ()) -> float:
        """Failures that none of `others` explains among the nodes that meet `form`."""
        failed = sum(
            form.holds(f) and not any(o.holds(f) for o in others) for op in form.ops for f in self._failed.get(op, ())
        )
        return failed / max(1, failed + self.passed(form))

    def joins(self, form: Form, *parts: Form, others: Collection[Form] = ()) -> bool:
        """Whether `form` tells failures from right nodes nearly as well as each of its `parts`, without `others`; of
        the ops of each part, where it says nothing but sizes, or those of one op would hide that the other is right.
        A part whose failures `others` explain all is no witness.
        """
        if others and all(map(is_size, form.rest)):
            shares = [(self.share(form.of_ops(p), others), self.share(p, others)) for p in parts]
            return self._tells_by_sizes(form) and all(joint >= JOINED * alone > 0 for joint, alone in shares)
        return self.share(form, others) >= JOINED * max(self.share(p, others) for p in parts)

    def show_alike(self, form: Form) -> bool:
        """Whether each part that an operand may show, such as of an input or of a cache, tells failures from right
        nodes nearly as well as any other: what throws at views of inputs may be right with those of caches.
        """
        parts = next((c for c in form.rest if c.key == SHOWN and ANY_OF in c.value), None)
        if parts is None:
            return True
        each = [Form((*form.but([parts]).conditions, replace(parts, value=v))) for v in parts.value.split(ANY_OF)]
        shares = [self.share(f) for f in each]
        return min(shares) >= JOINED * max(shares)

    def _tells_by_sizes(self, form: Form) -> bool:
        """Whether sizes tell failures from right nodes of each op of `form`, where these are no parts of one op."""
        alone = [Form((Condition(OP, op),)) for op in form.ops]
        of_one = len({base_of(op) for op in form.ops}) == 1
        return of_one or all(self.share(op) <= JOINED * self.share(form.of_ops(op)) for op in alone)

    def fail_with_each_type(self, form: Form, whole: Form) -> bool:
        """Whether each op of `form` fails with every type of it that it has where it has one of a failure; whatever a
        store writes, where `whole`, of which it is a part, is about blocks that are read.
        """
        types = set(type_of(form).split(ANY_OF))
        for op in form.ops:
            failed, right = ([whole.as_read(f) for f in side.get(op, ())] for side in (self._failed, self._passed))
            wrong = {_typed(f, k): f[k] for f in failed for k in f if k.endswith(".type") and f[k] in types}
            known = set(wrong.values())
            if any(f.get(k) in types - known and _typed(f, k) in wrong for f in right for _, k in [*wrong] if k in f):
                return False
        return True

    def count(self, form: Form, side: Mapping[str, Sequence[Features]]) -> int:
        """Nodes of one side that meet `form`."""
        return sum(form.holds(f) for op in form.ops for f in side.get(op, ()))

    def passed(self, form: Form) -> int:
        """Nodes that meet `form` and are right."""
        return self.count(form, self._passed)


def _by_op(rows: Iterable[Features]) -> Mapping[str, Sequence[Features]]:
    """Different ones, by their op."""
    different = {frozenset(f.items()): f for f in rows}.values()
    return {op: list(fs) for op, fs in itertools.groupby(sorted(different, key=itemgetter(OP)), itemgetter(OP))}


def _typed(found: Features, key: str) -> tuple[frozenset[tuple[str, str]], str]:
    """The types of a node beside that at `key`, where others may be the same, and the key."""
    own = found[key]
    others = ((k, "the same" if v == own else v) for k, v in found.items() if k.endswith(".type") and k != key)
    return frozenset(others), key
