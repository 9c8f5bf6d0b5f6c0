"""Programs for all graphs of a template: the first graph is compiled as it is, the next one with symbols."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import cast

from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

from .lift import Template, kinds, lift, structure, values
from .plan import Plan, Program
from .sym import Assumption, assumptions

LIFTS = 3
"""How often a template is lifted, each time with one more graph, before its graphs are compiled one by one."""


@dataclass(frozen=True, slots=True)
class TracedPlan(Plan):
    """A plan whose `ne`, `nb` and `view_offs` are symbolic; tensors are copies."""

    own: tuple[Tensor, ...]
    """The original tensors, in the order of `tensors`."""
    bindings: tuple[int, ...]
    """Of the original graph."""
    assumptions: Mapping[Assumption, None]
    """Comparisons so far."""

    def check_assumptions(self) -> None:
        """Raise UnfitError if a comparison came out differently than in the original graph."""
        for a in self.assumptions:
            if not a.holds(self.bindings):
                raise UnfitError(f"{a}, which does not hold for every graph of the template")


class UnfitError(BackendError):
    """A translation does not fit the graph that it is for."""


@dataclass(slots=True)
class TemplateState:
    """The state of one template."""

    graph: Graph
    """A copy of the first graph."""
    digest: str
    template: Template | None = None
    program: Program | None = None
    lifts: int = 0
    reason: str = ""
    """Why its graphs are compiled one by one, if they are."""
    row: tuple[int, ...] | None = None
    """Values of the first graph."""
    kinds: set[Hashable] = field(default_factory=set)
    """`lift.kinds` of its graphs so far."""
    split: bool = False
    """Graphs that it does not serve have a `TemplateState` per kind."""


class TemplateKey:
    """A plan's key without values; caches its hash."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TemplateKey) and (other is self or other._parts == self._parts)

    def digest(self) -> str:
        """A short name, the same on every machine."""
        return hashlib.blake2b(repr(self._parts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A plan's template and values."""

    template: TemplateKey
    row: tuple[int, ...]
    """`lift.values`."""
    kinds: Hashable
    """`lift.kinds`."""

    @classmethod
    def of(cls, plan: Plan) -> Fingerprint:
        """The fingerprint of `plan`."""
        parts, outputs = cast("tuple[tuple[tuple[Hashable, ...], ...], Hashable]", plan.key)
        template = (structure(plan.tensors, plan.graph.nodes), tuple([p[-2:] for p in parts]), outputs)
        return cls(TemplateKey(template), values(plan.tensors), kinds(plan.tensors))


def lift_program(
    state: TemplateState, plan: Plan, row: tuple[int, ...], translate: Callable[[Plan], Program]
) -> Program | None:
    """Lift the template of `plan`, whose values are `row`, to serve `plan` too, and compile it; None if impossible."""
    if state.reason or state.lifts >= LIFTS:
        return None
    state.lifts += 1
    inputs = [t for t in state.graph.tensors() if t.op == "NONE"]
    try:
        if state.template is None:
            first = {t: plan.index[o] for t, o in zip(state.graph.tensors(), plan.tensors, strict=True)}
            given = [t for t in inputs if plan.roles.get(plan.tensors[first[t]]) == "input"]
            template = lift([state.graph, plan.graph], given)
        else:
            template = state.template.refine(plan.graph)
        with assumptions() as compared:
            program = translate(traced(template, plan, row, compared))
    except UnfitError as e:
        # a graph with one row differs from those with many: split by kind
        state.split = len(state.kinds) > 1
        state.reason = "" if state.split else str(e)
        return None
    except BackendError as e:
        state.reason = str(e)
        return None
    state.template, state.program = template.guarded(compared), program
    return program


def traced(template: Template, plan: Plan, row: tuple[int, ...], compared: Mapping[Assumption, None]) -> TracedPlan:
    """`plan` with symbols, with the numbers of the template's most generic sample."""
    graph = template.traced()
    tensors = graph.tensors()
    index = {t: i for i, t in enumerate(tensors)}
    roles = {tensors[plan.index[t]]: r for t, r in plan.roles.items()}
    outputs = tuple(tensors[plan.index[t]] for t in plan.outputs)
    bindings = template.solve(row)
    if bindings is None:
        raise UnfitError("no numbers of the template's symbols give this graph")
    return TracedPlan(graph, tensors, index, roles, outputs, plan.key, tuple(plan.tensors), bindings, compared)
