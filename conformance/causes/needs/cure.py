"""Failing cases without one thing: whether a failure goes with what a form says is how a form is tested.

A case that passes as soon as nothing in it meets a form failed by what the form says, whatever the message was. What
cannot be taken away without the failure is needed, so that shrinking must not slip to another fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from conformance.case.case import Case
from conformance.causes.cause import Condition
from conformance.causes.features import (
    BROADCAST,
    HOLDS,
    IN_PLACE,
    LAYOUT,
    OFFSET,
    OP,
    OUTPUT,
    SHOWS,
    VIEW,
    WRITTEN,
    Features,
    features,
    name_of,
    nodes_of,
)
from conformance.causes.form import ALWAYS_IN_PLACE, HELD, SHOWN, TYPE, Form, is_size, meets
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import VIEW_OPS, Tensor, computes
from conformance.ggml.types import BF16, F16, F32, I64
from conformance.judge.verdict import Result
from conformance.run.shrink import cuts, simplify
from conformance.run.shrink.cuts import Recorded

Make = Callable[[Recorded, Result], Iterator[Case]]
TRIED = 200
"""Candidates of a pass that are looked at."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a failure needs, of the conditions that hold for its node."""

    some_of: tuple[frozenset[Condition], ...] = ()
    """Of each set one at least: without it the case passes."""
    idle: frozenset[Condition] = frozenset()
    """Without each of these, and without all, the case fails as before."""

    def met(self, found: Features) -> bool:
        """Whether a node with these features still has what is needed."""
        return all(any(meets(c, found) for c in some) for some in self.some_of)

    @property
    def alone(self) -> frozenset[Condition]:
        """The conditions that are needed, each by itself."""
        return frozenset(c for some in self.some_of if len(some) == 1 for c in some)


def without(form: Form, recorded: Recorded, result: Result, node: Tensor | None) -> Iterator[Case]:
    """Cases in which no node meets `form`, all else as it was, as far as a pass can: one for each kind of condition.

    Args:
        form: what shall not hold.
        recorded: the failing case.
        result: its result.
        node: the one at fault, whose op stays; None where no single node is, then as many nodes compute as before.
    """
    makes = dict.fromkeys(make for c in form.rest if not is_size(c) and (make := _maker(c)) is not None)
    for make in makes or dict.fromkeys([_smaller] if form.rest else []):
        with suppress(GraphError):
            yield from islice(_fitting(make(recorded, result), form, recorded.case, node), 1)


def _fitting(made: Iterator[Case], form: Form, case: Case, node: Tensor | None) -> Iterator[Case]:
    n = len(list(nodes_of(case)))
    for candidate in islice(made, TRIED):
        found = [features(candidate, k, t) for k, _, t in nodes_of(candidate)]
        stays = any(f[OP] == name_of(node) for f in found) if node is not None else len(found) == n
        met = any(form.holds(f) or (form.spreads and form.beside(f)) for f in found)
        if stays and not met and cuts.is_legal(candidate):
            yield candidate


def _maker(condition: Condition) -> Make | None:
    """The pass that takes away what a condition says; None where none does."""
    key = condition.key
    if key == SHOWN or key.endswith((SHOWS, OFFSET, LAYOUT, VIEW)):
        return flat
    if key in (OUTPUT, IN_PLACE):
        return cuts.outputs if key == OUTPUT else apart
    if key == TYPE or key.endswith(".type"):
        return simplify.types
    if key == HELD or key.endswith(HOLDS):
        return simplify.each_values
    return None if key == OP or key.endswith((WRITTEN, BROADCAST)) else simplify.parameters


def apart(recorded: Recorded, _: Result) -> Iterator[Case]:
    """What need not write in place has memory of its own."""
    graphs = {k: s.graph.nodes for k, s in enumerate(recorded.case.steps)}
    ops = {n.op for nodes in graphs.values() for n in nodes if n.view_src is not None and n.op not in VIEW_OPS}
    yield cuts.keep(recorded, graphs, apart=ops - ALWAYS_IN_PLACE)


def flat(recorded: Recorded, _: Result) -> Iterator[Case]:
    """What a view shows of an input or a weight is a leaf of its own, with the same values."""
    case = recorded.case
    caches = set(case.caches())
    kept = {
        k: [
            n
            for n in s.graph
            if not (n.op in VIEW_OPS and _of_leaf(n, s.graph.nodes, caches)) and (computes(n) or n.op in VIEW_OPS)
        ]
        for k, s in enumerate(case.steps)
    }
    yield cuts.keep(recorded, kept)


def _of_leaf(view: Tensor, nodes: Sequence[Tensor], caches: set[Tensor]) -> bool:
    return view.root not in nodes and view.root not in caches


def _smaller(recorded: Recorded, result: Result) -> Iterator[Case]:
    """The least that a dimension can give, first."""
    yield from simplify.dims(recorded, result, largest=True)


def needs(form: Form, recorded: Recorded, result: Result, node: Tensor, passes: Callable[[Case], bool | None]) -> Needs:
    """What the failing `node` needs of `form`, its own. `passes` says whether a case does; None where nobody knows."""
    said = [c for c in form.rest if not is_size(c)]
    some_of: dict[frozenset[Condition], None] = {}
    idle: set[Condition] = set()
    tried: set[frozenset[Condition]] = set()
    op = Condition(OP, name_of(node))
    for condition in sorted(said, key=str):
        for case in without(Form((op, condition)), recorded, result, node):
            rows = [f for k, _, t in nodes_of(case) for f in [features(case, k, t)] if f[OP] == op.value]
            gone = frozenset(c for c in said if not any(meets(c, f) for f in rows))
            if gone in tried:
                continue
            tried.add(gone)
            passed = passes(case)
            if passed:
                some_of[gone] = None
            elif passed is False and len(gone) == 1:
                idle |= gone
    if len(idle) > 1 and not _still_fails(idle, recorded, result, node, passes):
        idle = set()  # the node has two faults, each of which fails without what the other needs
    loose = {c: _loose(c, recorded, result, op, passes) for c in said if any(c in some for some in some_of)}
    return Needs(tuple(frozenset(loose[c] for c in some) for some in some_of), frozenset(idle))


def _still_fails(
    idle: Collection[Condition],
    recorded: Recorded,
    result: Result,
    node: Tensor,
    passes: Callable[[Case], bool | None],
) -> bool:
    """Whether the case fails without all of `idle` at once."""
    for condition in sorted(idle, key=str):
        form = Form((Condition(OP, name_of(node)), condition))
        made = next(without(form, recorded, result, node), None)
        recorded = recorded if made is None else Recorded(made, [])
    return passes(recorded.case) is False


def _loose(
    condition: Condition, recorded: Recorded, result: Result, op: Condition, passes: Callable[[Case], bool | None]
) -> Condition:
    """Of a type that must not be F32, whether it may be F16."""
    if not condition.key.endswith(".type") or condition.value in {F16.name, BF16.name, I64.name}:
        return condition
    half = Condition(condition.key, F16.name)
    for case in islice(filter(cuts.is_legal, simplify.types(recorded, result)), TRIED):
        if any(f[OP] == op.value and meets(half, f) for k, _, t in nodes_of(case) for f in [features(case, k, t)]):
            return Condition(condition.key, f"!= {F32.name}") if passes(case) is False else condition
    return condition
