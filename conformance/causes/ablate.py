"""Run a failing case without one property; if it then passes, the property is necessary.

A property that cannot be removed without the failure going away must stay while the case is shrunk, or shrinking would
drift to another bug. If one failure passes without a property and another still fails, they have different causes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from conformance.case.case import Case
from conformance.ggml.errors import GraphError
from conformance.ggml.ops.op import lay_out, set_param
from conformance.ggml.tensor import VIEW_OPS, Tensor, computes, contiguous_nb
from conformance.judge.cause import Condition
from conformance.judge.verdict import Result
from conformance.run.shrink import cuts, simplify
from conformance.run.shrink.cuts import Recorded

from .features import (
    BARE,
    BROADCAST,
    HOLDS,
    IN_PLACE,
    LAYOUT,
    OFFSET,
    OP,
    OTHER_NODE,
    OUTPUT,
    REPEATING,
    RESULT,
    SHARED,
    STEP,
    STORES,
    TAIL,
    TYPE,
    VIEW,
    Features,
    features,
    name_of,
    nodes_of,
)
from .rule import Rule, is_size, meets, mixes_types, property_of

Make = Callable[[Recorded, Result], Iterator[Case]]
TRIED = 200
"""Maximum candidates of a pass to examine."""
PLACES = frozenset({OFFSET, LAYOUT, VIEW, BARE, IN_PLACE})
"""Properties of the memory layout of an operand or result; they do not change the numbers."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Conditions of the failing node that experiments showed to be necessary."""

    some_of: tuple[frozenset[Condition], ...] = ()
    """Sets of conditions of which at least one is necessary: without the set the case passes."""
    idle: frozenset[Condition] = frozenset()
    """Conditions whose removal, one by one and all together, does not change the failure."""
    right: tuple[Features, ...] = ()
    """Nodes of the op in passing cases that differ only in where operands are stored."""
    known: bool = False
    """True if each condition was tested; else the necessary conditions are unknown."""

    @property
    def alone(self) -> frozenset[Condition]:
        """Conditions that are each necessary."""
        return frozenset(c for some in self.some_of if len(some) == 1 for c in some)

    def met(self, found: Features) -> bool:
        """Return True if a node with these features still meets the necessary conditions."""
        return all(any(meets(c, found) for c in some) for some in self.some_of)

    def conflicts(self, other: Needs) -> bool:
        """Return True if one needs a property of the layout that the other has and does not need.

        A property that one operand needs is needed. The others change the numbers: a case may pass without one because
        its error becomes small. Two values of a property, such as two types, can have one cause.
        """
        said = (conditions for n in (self, other) for conditions in (n.alone, n.idle))
        mine, spare, theirs, their_spare = (PLACES.intersection(map(property_of, c)) for c in said)
        return bool(mine & (their_spare - theirs) or theirs & (spare - mine))


def drop(rule: Rule, recorded: Recorded, result: Result, node: Tensor | None) -> Iterator[Case]:
    """Yield one otherwise unchanged case per way to remove `rule`, so that no node meets it.

    Args:
        rule: the rule that must not hold.
        recorded: the failing case.
        result: its result.
        node: the failing node, whose op stays; if None, as many nodes compute as before.
    """
    makes = dict.fromkeys(make for c in sorted(rule.says, key=str) for make in makers(property_of(c)))
    for make in makes:
        with suppress(GraphError):
            yield from islice(_fitting(make(recorded, result), rule, recorded.case, node), 1)


def _fitting(made: Iterator[Case], rule: Rule, case: Case, node: Tensor | None) -> Iterator[Case]:
    n = len(list(nodes_of(case)))
    for candidate in islice(made, TRIED):
        found = [features(candidate, k, t) for k, _, t in nodes_of(candidate)]
        stays = any(f[OP] == name_of(node) for f in found) if node is not None else len(found) == n
        holds = rule.holds_for_any_op if node is None else rule.holds
        if stays and not any(map(holds, found)) and cuts.is_legal(candidate):
            yield candidate


def makers(name: str) -> tuple[Make, ...]:
    """Return the passes that remove a property, least change first; none if nothing can."""
    if name in {OFFSET, LAYOUT, VIEW, BARE}:
        return {OFFSET: (_from_start, _flat), LAYOUT: (_close_rows, _flat)}.get(name, (_flat,))
    if name in {TYPE, RESULT}:
        return (simplify.types, _same_types) if name == TYPE else (simplify.types,)
    others: dict[str, tuple[Make, ...]] = {
        OUTPUT: (cuts.outputs,), IN_PLACE: (_own_memory,), HOLDS: (simplify.each_values,), TAIL: (_whole_blocks,),
        BROADCAST: (_repeated,),
        STEP: (), SHARED: (), OTHER_NODE: (),
    }  # fmt: skip
    return others.get(name, (simplify.parameters,))


def _same_types(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Store one operand of an elementwise op in the type of the other."""
    leaves = simplify.leaves_of(recorded.case)
    for n in (n for step in recorded.case.steps for n in step.graph if mixes_types(n)):
        for s, other in ((n.src[1], n.src[0]), (n.src[0], n.src[1])):
            if s is not None and other is not None and s.root in leaves:
                with suppress(GraphError):
                    yield simplify.changed(recorded.case, simplify.Change(types={s.root: other.type}))


def _repeated(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Repeat a broadcast leaf in memory, one node at a time: the numbers stay."""
    leaves = simplify.leaves_of(recorded.case)
    for step in recorded.case.steps:
        for n in step.graph:
            if n.op in REPEATING and (b := n.src[1]) is not None and b in leaves and b.ne != n.ne:
                with suppress(GraphError):
                    yield simplify.changed(recorded.case, simplify.Change(ne={b: n.ne}))


def _own_memory(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Allocate separate results for nodes that need not write in place."""
    graphs = {k: s.graph.nodes for k, s in enumerate(recorded.case.steps)}
    ops = {n.op for nodes in graphs.values() for n in nodes if n.view_src is not None and n.op not in VIEW_OPS}
    yield cuts.keep(recorded, graphs, own_memory=ops - STORES.keys())


def _flat(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Replace each view of an input or a weight by a leaf with the same values."""
    case = recorded.case
    caches = set(case.caches())
    kept = {
        k: [
            n
            for n in s.graph
            if not (n.op in VIEW_OPS and n.root not in s.graph.nodes and n.root not in caches)
            and (computes(n) or n.op in VIEW_OPS)
        ]
        for k, s in enumerate(case.steps)
    }
    yield cuts.keep(recorded, kept)


def _from_start(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Set the offset of each view to 0."""
    yield from _with_views(recorded, lambda t: set_param(t, "offset", 0))


def _close_rows(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Make each view contiguous."""

    def close(view: Tensor) -> None:
        view.nb = contiguous_nb(view.type, view.ne)

    yield from _with_views(recorded, close)


def _with_views(recorded: Recorded, change: Callable[[Tensor], None]) -> Iterator[Case]:
    """Yield the case with `change` applied to each VIEW of an input or a weight."""
    case = recorded.case
    copy = cuts.keep(recorded, {k: s.graph.nodes for k, s in enumerate(case.steps)})
    caches = set(copy.caches())
    for step in copy.steps:
        for t in step.graph:
            if t.op == "VIEW" and t.root not in step.graph.nodes and t.root not in caches:
                change(t)
            lay_out(t)
    yield copy


def _whole_blocks(recorded: Recorded, result: Result) -> Iterator[Case]:
    """Shrink dimensions as little as possible."""
    yield from simplify.dims(recorded, result, largest=True)


def needs(rule: Rule, recorded: Recorded, result: Result, node: Tensor, passes: Callable[[Case], bool | None]) -> Needs:
    """Find which conditions of its own `rule` the failing `node` needs.

    Args:
        rule: the conditions to test.
        recorded: the failing case.
        result: its result.
        node: the failing node.
        passes: returns True if a case passes, False if it fails in the same way, None if unknown.
    """
    said = sorted((c for c in rule.rest if not is_size(c)), key=str)
    op = name_of(node)
    some_of: dict[frozenset[Condition], None] = {}
    idle: set[Condition] = set()
    right: list[Features] = []
    tried: set[frozenset[Condition]] = set()
    for condition in said:
        for case in drop(Rule.of([op], [condition]), recorded, result, node):
            rows = [f for k, _, t in nodes_of(case) for f in [features(case, k, t)] if f[OP] == op]
            gone = frozenset(c for c in said if not any(meets(c, f) for f in rows))
            if gone in tried:
                continue
            tried.add(gone)
            passed = passes(case)
            if passed:
                some_of[gone] = None
                right += rows if {property_of(c) for c in gone} <= PLACES else []
            elif passed is False and len(gone) == 1:
                idle |= gone
    if len(idle) > 1 and not _fails_without(idle, op, recorded, result, node, passes):
        idle = set()  # two bugs, each of which shows without what the other needs
    return Needs(tuple(some_of), frozenset(idle), tuple(right), all(makers(property_of(c)) for c in rule.rest))


def _fails_without(
    idle: set[Condition],
    op: str,
    recorded: Recorded,
    result: Result,
    node: Tensor,
    passes: Callable[[Case], bool | None],
) -> bool:
    for condition in sorted(idle, key=str):
        made = next(drop(Rule.of([op], [condition]), recorded, result, node), None)
        recorded = recorded if made is None else Recorded(made, [])
    return passes(recorded.case) is False
