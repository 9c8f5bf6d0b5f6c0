"""Groups of failures with one cause, and their evidence: the failing and the passing nodes.

Two groups are joined only if

- the error message is the same,
- they fail at one op and differ only in types,
- one rule for both separates failures from passes as well as each rule alone, or
- at the end, they share an op, passing nodes meet one rule, and neither needs what the other's smallest case lacks.

A rule that also matches passing nodes explains no other failure. If one failure passes without a property and another
still fails without it, they stay separate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from conformance.case.case import Case
from conformance.judge.cause import Cause, Condition, Neighbour
from conformance.judge.evidence import Fault
from conformance.judge.message import innermost, said
from conformance.judge.verdict import Verdict
from conformance.suite.relations import relation

from .ablate import Needs
from .cause import digest
from .failure import Failure, Kind, Shape, is_flaky, size
from .features import BROADCAST, OP, TAIL, TYPE, YES, Features, features, nodes_of
from .rule import MATRICES, Rule, common, is_size, kernels, meets, property_of, rule_of
from .wording import sentence

JOINED = 0.8
"""Minimum share of failures that a joint rule must retain, relative to each rule alone."""
SEVERAL = 3
"""Minimum number of ops of a shared rule that may explain further ops."""
SHRUNK = 3
"""Number of failures of one shape to shrink.

If all give the same rule, other failures of the shape get it without a search."""
FEW = 3
"""Minimum number of passing nodes to decide that a condition excludes none of them."""
GONE = "passes in a fresh process, so earlier cases may be at fault"
UNSEEN = "not analysed (time limit), and the known cause of its op does not match"
"""Messages of groups of failures whose cause is unknown."""
UNKNOWN = Rule(())
"""Rule of failures without a single failing node, or of an unknown one."""
_OF_NO_NODE = (Fault.STALE, Fault.EARLIER, Fault.HANDOVER, Fault.GRAPH, "relation ")
"""Message prefixes of failures without a single failing node."""


class Nodes:
    """Distinct failing and passing nodes, by op."""

    def __init__(self, failures: Iterable[Failure], passed: Iterable[Case]) -> None:
        self._failed = _by_op(f.features for f in failures if f.at is not None)
        self._passed = _by_op(features(case, k, n) for case in passed for k, _, n in nodes_of(case))
        self._near: dict[str, list[Features]] = {}
        """Op -> nodes of passing cases that experiments made from failing ones."""
        self._counts: dict[Rule, tuple[int, int]] = {}

    def add_passed(self, rows: Iterable[Features]) -> None:
        """Add nodes of passing cases that an experiment generated."""
        for op, found in _by_op(rows).items():
            self._passed.setdefault(op, []).extend(found)
            self._counts.clear()

    def add_near(self, rows: Iterable[Features]) -> None:
        """Add nodes of passing cases that experiments made from a failing one.

        They show which conditions the failure needs. They are not counted as passes: a small variant of a case may
        pass because its error becomes small.
        """
        for op, found in _by_op(rows).items():
            self._near.setdefault(op, []).extend(found)

    def shown(self, rule: Rule, needed: Collection[Condition], failed: Sequence[Failure]) -> Shown:
        """Return the conditions of `rule` that are shown, and by what.

        A condition is shown if all nodes `failed` meet it and if for each op some of them has a passing neighbour: a
        node that differs in this property alone. A condition that is `needed` was shown by an experiment, for the op of
        the first of `failed`. A size becomes the largest with which a neighbour passes.
        """
        found: Shown = {}
        for c in sorted(rule.rest, key=str):
            each: list[Neighbour] = []
            for op in rule.ops:
                mine = [f for f in failed if f.features[OP] == op]
                pairs = [n for f in mine for n in self._neighbours(c, f)]
                if not pairs and c in needed and failed[0].features[OP] == op:
                    pairs = self._nearest(c, failed[0])
                if pairs:
                    each.append(max(pairs, key=_nearness))
            if each and len(each) == len(rule.ops):
                best = max(each, key=_nearness)
                stated = Condition(c.key, f"> {best.passes}") if is_size(c) else c
                if all(meets(stated, f.features) for f in failed):
                    found[stated] = best
        return found

    def _neighbours(self, condition: Condition, failure: Failure) -> Iterator[Neighbour]:
        """Yield what passes beside a failing node: nodes that lack the condition and share all else.

        All else: the other properties that a rule of this node could name, and all sizes; a size changes in one
        dimension, of every operand.
        """
        assert failure.at is not None
        own, key = failure.features, _key(condition, failure.features)
        others = [
            c
            for c in rule_of(failure.case, failure.at[0], failure.node).rest
            if c.key != key and not (is_size(c) and _varies(c.key, condition))
        ]
        fixed = {k: v for k, v in own.items() if ".ne[" in k and not _varies(k, condition)}
        for f in (f for side in (self._passed, self._near) for f in side.get(own[OP], ())):
            sizes = {k: v for k, v in f.items() if ".ne[" in k and not _varies(k, condition)}
            if sizes == fixed and not meets(condition, f) and all(meets(c, f) for c in others):
                yield Neighbour(_value(f, key), own[key] if is_size(condition) else "")

    def _nearest(self, condition: Condition, failure: Failure) -> list[Neighbour]:
        """Return the node of an experiment that lacks a condition and shares most with the failing."""
        own, key = failure.features, _key(condition, failure.features)
        rows = [f for f in self._near.get(own[OP], ()) if not meets(condition, f)]
        best = max(rows, key=lambda f: len(own.items() & f.items()), default=None)
        return [Neighbour("" if best is None else _value(best, key))]

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
        """Return True if `rule` separates failures as well as each of `parts`, on its ops."""
        return all(self.share(Rule.of(p.ops, rule.rest)) >= JOINED * self.share(p) for p in parts)

    def simplest(self, rule: Rule, needed: Collection[Condition]) -> Rule:
        """Return `rule` without the conditions that exclude no passing node, except those `needed`."""
        if sum(len(self._passed.get(op, ())) for op in rule.ops) < FEW:
            return rule
        for c in sorted(rule.rest - frozenset(needed), key=lambda c: (not is_size(c), str(c))):
            if self.passed(less := rule.but([c])) == self.passed(rule):
                rule = less
        return rule


Shown = dict[Condition, Neighbour]
"""Condition -> what shows it."""


def _key(condition: Condition, found: Features) -> str:
    """Return the property of a node that meets a condition, also of `any operand`."""
    if condition.key in found:
        return condition.key
    name = property_of(condition)
    mine = (k for k in found if k.endswith(f".{name}") and meets(Condition(k, condition.value), found))
    return next(mine, condition.key)


def _value(found: Features, key: str) -> str:
    value = found.get(key, "")
    return "" if value == YES else value


def _varies(key: str, condition: Condition) -> bool:
    """Return True if the size `key` may differ between nodes that differ in `condition` alone.

    A size condition varies its dimension of every operand, broadcasting all sizes of its operand, a tail the row.
    """
    name, operand = property_of(condition), condition.key.partition(".")[0]
    if name == BROADCAST:
        return key.startswith(f"{operand}.")
    if name == TAIL:
        return key.endswith(".ne[0]")
    if not is_size(condition):
        return False
    mine, other = (k.partition(".")[2] for k in (condition.key, key))
    return mine == other or MATRICES in (mine, other)


def _nearness(neighbour: Neighbour) -> tuple[int, int]:
    """Return a sort key: of sizes the largest that passes beside the smallest that fails."""
    return (int(neighbour.passes), -int(neighbour.fails)) if neighbour.fails else (0, 0)


def _by_op(rows: Iterable[Features]) -> dict[str, list[Features]]:
    """Group distinct feature sets by op."""
    found: dict[str, list[Features]] = {}
    for f in {frozenset(f.items()): f for f in rows}.values():
        found.setdefault(f[OP], []).append(f)
    return found


@dataclass(eq=False, slots=True)
class Group:
    """Failures with one cause."""

    kind: Kind
    """Kind of failure of `proof`."""
    rule: Rule
    """Rule of the cause; without conditions if there is no single failing node."""
    proof: Failure
    """The smallest failing case."""
    failures: list[Failure] = field(default_factory=list)
    needs: Needs = field(default_factory=Needs)
    """Necessary conditions of its first failure."""
    unsure: int = 0
    """Failures assigned to this nearest group because time ran out."""
    cut: bool = False
    """True if the search for the smallest case did not finish."""

    @property
    def is_flaky(self) -> bool:
        """True for wrong numbers and memory corruption."""
        return is_flaky(*self.kind)

    def fails_as(self, kind: Kind) -> bool:
        """Return True if a failure of this kind may have the same cause."""
        return kind == self.kind or (bool(self.rule.ops) and self.is_flaky and is_flaky(*kind))

    def explains(self, failure: Failure, nodes: Nodes) -> bool:
        """Return True if the error is equal, or a wrong node meets the rule and no pass does."""
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
        """Add a failure; the rule gains its op, and for errors drops conditions not met."""
        self.failures.append(failure)
        if failure.at is not None and self.rule.ops:
            met = [c for c in self.rule.rest if meets(c, failure.features)]
            if not self.is_flaky or (self.rule.says and len(met) == len(self.rule.rest)):
                self.rule = Rule.of({*self.rule.ops, failure.features[OP]}, met)

    def join(self, other: Group, rule: Rule) -> None:
        """Absorb `other`; the smaller proof is retained, wrong numbers preferred over crashes."""
        first = min(self, other, key=lambda g: (g.kind[0] != Verdict.FAIL, size(g.proof)))
        self.kind, self.proof, self.needs, self.rule = first.kind, first.proof, first.needs, rule
        self.failures += other.failures
        self.unsure += other.unsure
        self.cut = self.cut or other.cut


def joint(a: Group, b: Group, nodes: Nodes) -> Rule | None:
    """Return the rule that covers both groups; None if they are different causes."""
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


def needing_same(a: Group, b: Group, nodes: Nodes) -> Rule | None:
    """Return the rule of both if they share an op of one kernel and what they need.

    If no passing node meets either rule, they are two causes.
    """
    ops = a.rule.ops, b.rule.ops
    similar = set(ops[0]) & set(ops[1]) and len(kernels(*ops)) == 1 and a.fails_as(b.kind)
    known = a.needs.known and b.needs.known and (nodes.passed(a.rule) or nodes.passed(b.rule))
    if not (similar and known) or a.needs.conflicts(b.needs):
        return None
    return common(a.rule, b.rule) if a.needs.met(b.proof.features) and b.needs.met(a.proof.features) else None


def _but_for_types(rule: Rule) -> frozenset[Condition]:
    return frozenset(c for c in rule.says if not property_of(c).endswith(TYPE))


Over = Callable[["Group", "Group", Nodes], Rule | None]
"""Function that returns the rule for two groups; None if they are different causes."""
Separate = set[tuple[int, Rule, int, Rule]]
"""Pairs of groups, with their rules, that cannot be joined."""


def join_all(groups: Sequence[Group], nodes: Nodes, separate: Separate, over: Over = joint) -> list[Group]:
    """Join groups until `over` has no rule for any pair; skip pairs in `separate`, add others."""
    left = list(groups)
    again = True
    while again:
        again = False
        for a, b in itertools.combinations(left, 2):
            key = (id(a), a.rule, id(b), b.rule)
            rule = None if key in separate else over(a, b, nodes)
            if rule is not None:
                a.join(b, rule)
                left.remove(b)
                again = True
                break
            separate.add(key)
    return left


def cause_of(group: Group, backend: str, nodes: Nodes, seen: str = "") -> Cause:
    """Return the record of a group; `seen` states how reliably it failed again."""
    result, rule = group.proof.result, group.rule
    if group.cut:
        rule = rule.but(rule.rest - group.needs.alone)
    shown: Shown = {}
    if rule.ops:
        own = [f for f in (group.proof, *group.failures) if f.at is not None and f.features[OP] in rule.ops]
        shown = nodes.shown(rule, group.needs.alone, own) if own else {}
        rule = Rule((*(c for c in rule.conditions if c.key == OP), *shown))
    failed = sorted(group.failures, key=size)
    passed = nodes.passed(rule)
    verdict, message = group.kind
    if result.error is not None and message == innermost(result.error):
        message = said(result.error)
    of_nodes = passed if rule.ops else None
    return Cause(
        _id(group, backend),
        sentence(rule.conditions, verdict, message, len(failed), of_nodes, group.unsure, shown=shown, cut=group.cut),
        backend,
        result.verdict,
        rule.ops[0] if len(rule.ops) == 1 else "" if rule.ops else group.proof.among,
        "" if result.verdict is Verdict.FAIL else group.proof.signature.kind,
        rule.conditions,
        tuple(dict.fromkeys(f.case.id for f in failed)),
        seen,
        rank={"failed": len(failed), "passed": passed},
        search="cut" if group.cut else "complete",
        neighbours=tuple(shown.values()),
    )


def _id(group: Group, backend: str) -> str:
    """Return an id of what a longer search does not change: ops, backend and error.

    Wrong numbers and damaged memory are one error: which of them shows, and whether NaN is among the numbers, differs
    between the cases of one bug.
    """
    ops = group.rule.ops
    name = "+".join(ops[:2]) if ops and (group.is_flaky or len(ops) < SEVERAL) else group.kind[0]
    error = (Verdict.FAIL.value,) if ops and group.is_flaky else group.kind
    return f"{name}-{digest(backend.partition('?')[0], *error)}"


def relation_rule(name: str) -> Rule:
    """Return the rule for a relation whose runs each pass alone."""
    return Rule((Condition(relation.KEY, name),))


class Groups:
    """The causes found so far, as groups of failures."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._separate: Separate = set()
        self._shrunk: dict[Shape, list[Failure]] = {}
        """Shape of a failure -> the failures of that shape that were shrunk."""
        self.all: list[Group] = []

    def add(self, group: Group) -> Group:
        """Add and return a group."""
        self.all.append(group)
        return group

    def row(self, failure: Failure, message: str, rule: Rule = UNKNOWN) -> Group:
        """Return the group of failures of which only `message`, perhaps with an op, is known."""
        kind = (failure.result.verdict.value, message)
        group = next((g for g in self.all if g.kind == kind and g.rule == rule), None)
        return group or self.add(Group(kind, rule, failure, cut=message == UNSEEN))

    def explaining(self, failure: Failure, needs: Needs | None = None) -> Group | None:
        """Return a group that explains `failure` and does not conflict with `needs`."""
        found = (g for g in self.all if g.explains(failure, self._nodes))
        return next((g for g in found if needs is None or not needs.conflicts(g.needs)), None)

    def of_shape(self, failure: Failure) -> Group | None:
        """Return the group of failures of the same shape if the first few are all in it."""
        known = self._shrunk.get(failure.shape, ())
        if len(known) < SHRUNK:
            return None
        return next((g for g in self.all if all(any(f is k for f in g.failures) for k in known)), None)

    def nearest(self, failure: Failure) -> Group | None:
        """Return the only group with the same error, op and non-size conditions, else a catch-all."""
        similar = [g for g in self.all if g.kind == failure.kind]
        if failure.at is None:
            return next((g for g in similar if not g.rule.ops), None)
        found = failure.features
        same = [g for g in similar if found[OP] in g.rule.ops]
        near = [g for g in same if all(meets(c, found) for c in g.rule.says)]
        return near[0] if len(near) == 1 else self.row(failure, UNSEEN, Rule.of([found[OP]], ())) if same else None

    def needing(self, failure: Failure, needs: Needs) -> Group | None:
        """Return the group of the same op, rule (without sizes) and necessary conditions."""
        if failure.at is None or not needs.alone:
            return None
        found = failure.features
        similar = (g for g in self.all if found[OP] in g.rule.ops and g.fails_as(failure.kind))
        return next((
            g for g in similar if needs.alone == g.needs.alone and all(meets(c, found) for c in g.rule.says)
        ), None)  # fmt: skip

    def join(self) -> None:
        """Join groups of one cause, and drop those without failures."""
        self.all = join_all([g for g in self.all if g.failures], self._nodes, self._separate)

    def was_shrunk(self, failure: Failure) -> None:
        """Remember that a failure of this shape was shrunk to a rule."""
        self._shrunk.setdefault(failure.shape, []).append(failure)

    def simplify(self) -> None:
        """Join groups that need the same, and drop conditions that exclude no passing node."""
        self.join()
        self.all = join_all(self.all, self._nodes, set(), needing_same)
        for g in self.all:
            g.rule = self._nodes.simplest(g.rule, g.needs.alone)
        self.join()
