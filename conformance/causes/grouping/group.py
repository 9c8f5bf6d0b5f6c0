"""A group of failures, and its record as a cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.causes.cause import Cause, Condition, digest
from conformance.causes.failure import Failure, by_chance, size
from conformance.causes.features import OP
from conformance.causes.form import SEVERAL, Form
from conformance.causes.needs.whole import may_be_of_relation, shared_by
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Verdict
from conformance.run.shrink.cuts import PREFIX
from conformance.suite.relations import claim

from .nodes import Nodes

GONE = "not seen again in a process of its own, so what ran before may be at fault"
"""The message of failures that did not come again."""
UNSEEN = "not looked at, as time was over, and not of one cause that is known of its op"
"""The message of failures of which nobody can say more."""
SAID = {
    Fault.STALE: "by what the backend kept",
    Fault.EARLIER: "by what the backend kept from other cases",
    Fault.GRAPH: "each node by itself is right",
    Fault.HANDOVER: "between two devices of a scheduler",
    Fault.OUTPUT: "an output, and nobody knows the first wrong node",
    "relation": "two runs differ",
}
"""Word of a kind of wrong numbers -> what a sentence says."""


@dataclass(slots=True)
class Group:
    """What one fault explains."""

    kind: tuple[str, str]
    """Of `proof`."""
    form: Form
    proof: Failure
    """The smallest case that shows it."""
    failures: list[Failure] = field(default_factory=list)
    needed: frozenset[Condition] = frozenset()
    """Conditions without each of which a failure of it passes."""
    more: frozenset[Condition] = frozenset()
    """Of these, what tells it from a group whose form holds for it, too: without it a failure passes there."""
    behind: bool = False
    """Whether another hid it: its smallest case met no form that was known then."""
    unsure: int = 0
    """Of the failures, those that nothing known explains: they are here as time was over, and this is the nearest."""

    def explains(self, failure: Failure) -> bool:
        """Whether the fault makes `failure`: at its node; or, of one without, wherever in it."""
        if not self.fails_as(failure):
            return False
        if not self.form.ops:
            if failure.kind == self.kind and failure.signature.kind == Fault.OUTPUT:  # which says nothing
                return bool(self.form.rest) and shared_by(self.form, [failure.case]) == self.form
            by_words = self.kind[0] != Verdict.FAIL  # an error says the same with and without the relation
            return failure.kind == self.kind and (by_words or may_be_of_relation(self.form, failure.case))
        return self._holds_in(failure) if failure.at is None else self._holds_at(failure)

    def may_be_in(self, failure: Failure) -> bool:
        """Whether an error of single nodes may be what a case as a whole says in the same words: only if the case has
        a node that meets what it says, whatever its sizes.
        """
        form = self.form.but(self.form.rest - self.form.says)
        return any(map(form.beside if form.spreads else form.holds, failure.all))

    def take(self, other: Group) -> None:
        """Have the failures of `other`, which is no cause of its own."""
        self.failures = self.failures + other.failures
        self.unsure += other.unsure

    def _holds_at(self, failure: Failure) -> bool:
        spreads = self.form.spreads and (failure.kind == self.kind or self.form.of_extent)
        return self.form.holds(failure.features) or (spreads and self.form.beside(failure.features))

    def _holds_in(self, failure: Failure) -> bool:
        kind = failure.signature.kind
        if failure.result.verdict is Verdict.FAIL and claim.applies(failure.case):  # its runs alone are asked
            return False
        if kind.startswith(
            (Fault.STALE, Fault.EARLIER, Fault.HANDOVER)
        ):  # right on a backend opened anew, or on one device: no kernel is at fault
            return False
        if kind.startswith(Fault.GRAPH) and not self.form.of_place:  # each node alone is right
            return False
        anywhere = self.form.spreads and (failure.result.verdict is Verdict.CRASH or self.form.of_in_place)
        return any(map(self.form.beside if anywhere else self.form.holds, failure.all))

    @property
    def is_shrunk(self) -> bool:
        """Whether smaller cases than its smallest were tried."""
        return self.proof.case.id.startswith(PREFIX)

    @property
    def of_kept(self) -> bool:
        """Whether a failure of it comes by what the backend kept."""
        return any(f.kept for f in (self.proof, *self.failures))

    @property
    def most_said(self) -> tuple[str, str]:
        """Of joined errors the words of the most failures: which of them came first differs from run to run."""
        counts = Counter(f.kind for f in self.failures)
        if self.by_chance or self.kind not in counts:
            return self.kind
        return min(counts, key=lambda kind: (-counts[kind], kind))

    @property
    def by_chance(self) -> bool:
        """Whether its failures are wrong numbers or damaged memory."""
        return by_chance(*self.kind)

    def fails_as(self, failure: Failure) -> bool:
        """Whether the fault may look like `failure`: by the same words; wrong numbers anywhere; damage of one op, or,
        where an extent is wrong, wrong numbers and damage.
        """
        if failure.kind == self.kind:
            return True
        if failure.by_chance and self.by_chance and self.form.of_extent:
            return True
        return self.kind[0] == failure.kind[0] and self.by_chance and failure.by_chance


def cause_of(group: Group, backend: str, nodes: Nodes, seen: str = "") -> Cause:
    """The record of a group; `seen` says how it came again."""
    result, form = group.proof.result, group.form
    failed = sorted(group.failures, key=size)
    passed = nodes.passed(form)
    return Cause(
        _id(group, backend),
        _sentence(group, len(failed), passed),
        backend,
        result.verdict,
        form.ops[0] if len(form.ops) == 1 else "",
        "" if result.verdict is Verdict.FAIL else group.proof.signature.kind,
        form.conditions,
        tuple(dict.fromkeys(f.case.id for f in failed)),
        seen,
        rank={"failed": len(failed), "passed": passed},
    )


def _id(group: Group, backend: str) -> str:
    """From how it fails and, of wrong numbers and damage of an op, from its conditions. An error tells itself by its
    words and op; one of several ops, or of none, by its words: what else they have in common differs from run to run.
    """
    ops = group.form.ops
    if not ops:
        told: Sequence[object] = [c for c in group.form.conditions if c.key == claim.KEY and group.by_chance]
    elif group.by_chance:
        told = group.form.conditions
    else:
        told = sorted(ops) if len(ops) < SEVERAL else ["several ops"]
    name = group.kind[0] if not ops or (len(ops) >= SEVERAL and not group.by_chance) else "+".join(ops[:2])
    return f"{name}-{digest(backend.partition('?')[0], *group.kind, *map(str, told))}"


def _sentence(group: Group, failed: int, passed: int) -> str:
    rest = [c for c in group.form.conditions if c.key != OP]
    what = " and ".join(group.form.ops) or "a case as a whole"
    where = f" with {', '.join(map(str, rest))}" if rest else ""
    verdict, message = group.kind
    said = ", ".join(SAID.get(word, word) for word in message.split(", ")) if verdict == Verdict.FAIL else message
    how = f"wrong numbers{f' ({said})' if said else ''}" if verdict == Verdict.FAIL else f"{verdict}: {said}"
    unsure = f"; {group.unsure} of them put here as time was over" if group.unsure else ""
    right = f"; {passed} such nodes are right" if group.form.ops else ""
    return f"{what}{where}: {how} ({failed} fail{unsure}{right})"
