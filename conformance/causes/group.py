"""Groups of failures with one cause, and the evidence for it: the nodes that fail and those that pass.

Two groups are one only if

- the error is the same in the same words,
- it is one op with several types, or
- one rule over both separates failures from passes as well as each alone.

A rule that also matches nodes that pass explains no other failure. Two failures of which one passes without a property
that the other fails without are apart, whatever the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from conformance.case.case import Case
from conformance.judge.evidence import Fault
from conformance.judge.verdict import Verdict
from conformance.suite.relations import claim

from .ablate import Needs
from .cause import Cause, Condition, digest
from .failure import Failure, Kind, is_flaky, size
from .features import OP, TYPE, Features, features, nodes_of
from .rule import Rule, common, is_size, meets, property_of

JOINED = 0.8
"""How much of the share of failures must be left where two groups are joined."""
SEVERAL = 3
"""Ops from which on what they share explains another op."""
FEW = 3
"""Fewest passing nodes needed to decide that a condition excludes none."""
GONE = "not seen again in a process of its own, so what ran before may be at fault"
UNSEEN = "not looked at (time limit), and not of the one cause that is known of its op"
"""Messages of rows of failures of which no more is known."""
_OF_NO_NODE = (Fault.STALE, Fault.EARLIER, Fault.HANDOVER, Fault.GRAPH, "relation ")
"""Prefixes of messages of failures that no single node causes."""
SAID: dict[str, str] = {
    Fault.STALE: "stale state of the backend",
    Fault.EARLIER: "stale state of the backend, or chance",
    Fault.GRAPH: "each node alone is right",
    Fault.HANDOVER: "between two devices of a scheduler",
    Fault.OUTPUT: "an output, first wrong node unknown",
}
"""Kind of wrong numbers -> what a sentence says."""


class Nodes:
    """The different nodes that fail, and those that pass, by op."""

    def __init__(self, failures: Iterable[Failure], passed: Iterable[Case]) -> None:
        self._failed = _by_op(f.features for f in failures if f.at is not None)
        self._passed = _by_op(features(case, k, n) for case in passed for k, _, n in nodes_of(case))
        self._counts: dict[Rule, tuple[int, int]] = {}

    def add_passed(self, rows: Iterable[Features]) -> None:
        """Add nodes of cases that an experiment made, and that pass."""
        for op, found in _by_op(rows).items():
            self._passed.setdefault(op, []).extend(found)
            self._counts.clear()

    def passed(self, rule: Rule) -> int:
        """Count the passing nodes that meet `rule`."""
        return self._count(rule)[1]

    def _count(self, rule: Rule) -> tuple[int, int]:
        """Count the failing and the passing nodes that meet `rule`."""
        if rule not in self._counts:
            sides = (self._failed, self._passed)
            failed, passed = (sum(rule.holds(f) for op in rule.ops for f in side.get(op, ())) for side in sides)
            self._counts[rule] = failed, passed
        return self._counts[rule]

    def share(self, rule: Rule) -> float:
        """Return the share of failures among the nodes that meet `rule`."""
        failed, passed = self._count(rule)
        return failed / max(1, failed + passed)

    def separates(self, rule: Rule, *parts: Rule) -> bool:
        """True if `rule` separates failures from passes as well as each of `parts`, of the ops of each."""
        return all(self.share(Rule.of(p.ops, rule.rest)) >= JOINED * self.share(p) for p in parts)

    def simplest(self, rule: Rule, needed: Collection[Condition]) -> Rule:
        """Return `rule` without conditions, beside those `needed`, that exclude no node that passes."""
        if sum(len(self._passed.get(op, ())) for op in rule.ops) < FEW:
            return rule
        for c in sorted(rule.rest - frozenset(needed), key=lambda c: (not is_size(c), str(c))):
            if self.passed(less := rule.but([c])) == self.passed(rule):
                rule = less
        return rule


def _by_op(rows: Iterable[Features]) -> dict[str, list[Features]]:
    """Return the different ones by their op."""
    found: dict[str, list[Features]] = {}
    for f in {frozenset(f.items()): f for f in rows}.values():
        found.setdefault(f[OP], []).append(f)
    return found


@dataclass(eq=False, slots=True)
class Group:
    """Failures with one cause."""

    kind: Kind
    """How `proof` fails."""
    rule: Rule
    """Without conditions if no single node is at fault."""
    proof: Failure
    """The smallest case that shows it."""
    failures: list[Failure] = field(default_factory=list)
    needs: Needs = field(default_factory=Needs)
    """The necessary conditions of its first failure."""
    unsure: int = 0
    """Failures that are here because time was over, and this is the nearest group."""

    @property
    def is_flaky(self) -> bool:
        """True for wrong numbers and damaged memory."""
        return is_flaky(*self.kind)

    def fails_as(self, kind: Kind) -> bool:
        """True if what fails in this way may have the same cause."""
        return kind == self.kind or (bool(self.rule.ops) and self.is_flaky and is_flaky(*kind))

    def explains(self, failure: Failure, nodes: Nodes) -> bool:
        """True for the same error in the same words, and for wrong numbers where the rule holds and none passes."""
        if not self.is_flaky or not self.rule.ops or failure.kind[1].startswith(_OF_NO_NODE):
            return failure.kind == self.kind
        if not self.fails_as(failure.kind):
            return False
        rows = failure.all if failure.at is None else [failure.features]
        return any(self._holds(f, nodes) for f in rows)

    def _holds(self, found: Features, nodes: Nodes) -> bool:
        if self.rule.holds(found):
            return nodes.passed(self.rule) == 0
        wider = Rule.of([*self.rule.ops, found[OP]], self.rule.rest)
        return len(self.rule.ops) >= SEVERAL and wider.holds(found) and nodes.passed(wider) == 0

    def take(self, failure: Failure) -> None:
        """Add a failure, and its op to the rule; the rule of an error says no more than is true of each failure."""
        self.failures.append(failure)
        if failure.at is not None and self.rule.ops:
            met = [c for c in self.rule.rest if meets(c, failure.features)]
            if not self.is_flaky or (self.rule.says and len(met) == len(self.rule.rest)):
                self.rule = Rule.of({*self.rule.ops, failure.features[OP]}, met)

    def join(self, other: Group, rule: Rule) -> None:
        """Take all of `other`: the smaller proof stands for both, wrong numbers before damage."""
        first = min(self, other, key=lambda g: (g.kind[0] != Verdict.FAIL, size(g.proof)))
        self.kind, self.proof, self.needs, self.rule = first.kind, first.proof, first.needs, rule
        self.failures += other.failures
        self.unsure += other.unsure


def joint(a: Group, b: Group, nodes: Nodes) -> Rule | None:
    """Return the rule of two groups that are one; None if they are two."""
    if not (a.fails_as(b.kind) and b.fails_as(a.kind)) or a.needs.conflicts(b.needs):
        return None
    if not (a.rule.ops and b.rule.ops):
        return (a.rule if a.rule.ops else b.rule) if a.kind == b.kind else None
    rule = common(a.rule, b.rule)
    if a.kind == b.kind and not a.is_flaky:
        return rule or Rule.of({*a.rule.ops, *b.rule.ops}, ())
    if rule is None:
        return None
    types = a.rule.ops == b.rule.ops and _but_for_types(a.rule) == _but_for_types(b.rule)
    return rule if types or nodes.separates(rule, a.rule, b.rule) else None


def _but_for_types(rule: Rule) -> frozenset[Condition]:
    return frozenset(c for c in rule.says if not property_of(c).endswith(TYPE))


Apart = set[tuple[int, Rule, int, Rule]]
"""Pairs of groups that are two."""


def join_all(groups: Sequence[Group], nodes: Nodes, apart: Apart) -> list[Group]:
    """Join groups until no two are one, but for those that are known to be `apart`."""
    left = list(groups)
    again = True
    while again:
        again = False
        for a, b in itertools.combinations(left, 2):
            key = (id(a), a.rule, id(b), b.rule)
            rule = None if key in apart else joint(a, b, nodes)
            if rule is not None:
                a.join(b, rule)
                left.remove(b)
                again = True
                break
            apart.add(key)
    return left


def cause_of(group: Group, backend: str, nodes: Nodes, seen: str = "") -> Cause:
    """Return the record of a group; `seen` says how it came again."""
    result, rule = group.proof.result, group.rule
    failed = sorted(group.failures, key=size)
    passed = nodes.passed(rule)
    return Cause(
        _id(group, backend),
        _sentence(group, len(failed), passed),
        backend,
        result.verdict,
        rule.ops[0] if len(rule.ops) == 1 else "",
        "" if result.verdict is Verdict.FAIL else group.proof.signature.kind,
        rule.conditions,
        tuple(dict.fromkeys(f.case.id for f in failed)),
        seen,
        rank={"failed": len(failed), "passed": passed},
    )


def _id(group: Group, backend: str) -> str:
    """Return an id from what each search finds: the words of an error; ops and properties of wrong numbers."""
    ops = group.rule.ops
    name = "+".join(ops[:2]) if ops and (group.is_flaky or len(ops) < SEVERAL) else group.kind[0]
    told = sorted(map(str, group.rule.says)) + list(ops) if group.is_flaky else []
    return f"{name}-{digest(backend.partition('?')[0], *group.kind, *told)}"


def _sentence(group: Group, failed: int, passed: int) -> str:
    rest = ", ".join(str(c) for c in group.rule.conditions if c.key != OP)
    verdict, message = group.kind
    said = ", ".join(SAID.get(word, word) for word in message.split(", "))
    said = f"wrong results{f' ({said})' if said else ''}" if verdict == Verdict.FAIL else f"{verdict}: {said}"
    what = ", ".join(group.rule.ops) or "a case as a whole"
    unsure = f"; {group.unsure} of them put here at the time limit" if group.unsure else ""
    right = f", {passed} pass" if group.rule.ops else ""
    return f"{what}: {said}{f' with {rest}' if rest else ''} ({failed} fail{unsure}{right})"


def relation_rule(name: str) -> Rule:
    """Return the rule of a relation each of whose runs is right alone."""
    return Rule((Condition(claim.KEY, name),))
