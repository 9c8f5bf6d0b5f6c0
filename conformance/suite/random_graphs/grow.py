"""A graph that grows in all steps of a trajectory at once: a node is added to every step, or to none.

Beside each value stands what is known of its elements, roughly: how large they are and what may be done with them
without making a case in which right backends differ. Nothing here looks at values: the bytes are never computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import check_tensor
from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.ops.op import check_node
from conformance.ggml.tensor import (
    FLAG_INPUT,
    Bytes,
    Dims,
    Tensor,
    computes,
    dims,
    is_contiguous,
    nelements,
    new_tensor,
)
from conformance.ggml.types import F32, GGMLType
from conformance.suite.decoder.weights import random_bytes
from conformance.suite.ops.data import Fill, encode, normal

B = Builder()

TOKENS = (3, 5, 1, 1, 7, 2, 1, 4)
"""Rows of the inputs, step by step: a prompt, decodes, another prompt."""
CELLS = 32
"""Rows of a cache."""
TRIES = 40
"""Moves that may fail in a row before a plain one is taken."""
FEW = 8
"""Elements of a value at least: one alone may be nearly zero, and its error is measured against it."""
SIZE = 1 << 13
"""Elements of a value at most: small graphs find as much, sooner."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a value's elements."""

    std: float = 1.0
    """Root mean square, roughly."""
    peak: float = 3.5
    """No element is larger, roughly."""
    spread: bool = True
    """Elements of a row, and of a column, differ from each other as random ones do: a variance is no difference of
    nearly equal numbers."""

    def times(self, factor: float) -> Facts:
        """Of the elements multiplied by `factor`."""
        return replace(self, std=self.std * abs(factor), peak=self.peak * abs(factor))


@dataclass(slots=True)
class Value:
    """One tensor in every step, and what is known of it."""

    at: list[Tensor]
    """Step -> the tensor."""
    facts: Facts = field(default_factory=Facts)
    kind: str = "node"
    """`node`, `input`, `weight` or `cache`."""

    @property
    def type(self) -> GGMLType:
        """The same in every step."""
        return self.at[0].type


Make = Callable[[int], Tensor]
"""Step -> the tensor there; `GraphError` where ggml would refuse it."""


class Growth:
    """The case in the making."""

    def __init__(self, case_id: str, steps: int, row: int, weights: GGMLType, caches: GGMLType) -> None:
        self.id = case_id
        self.row, self.weights, self.caches = row, weights, caches
        self.tokens = [TOKENS[k % len(TOKENS)] for k in range(steps)]
        self.values: list[Value] = []
        self.persistent: dict[Tensor, Bytes] = {}
        self.inputs: list[dict[Tensor, Bytes]] = [{} for _ in range(steps)]
        self.stored: dict[Tensor, int] = {}
        """Cache -> rows that steps have written of it so far, per step alike."""
        self._stream = Stream(case_id, "graph")
        self._expansions = [Expansion() for _ in range(steps)]
        self._count = 0
        self.input("x", lambda k: dims(row, self.tokens[k]))
        self.input("y", lambda k: dims(row, self.tokens[k]))

    # choices, each drawn once for all steps

    def below(self, n: int) -> int:
        """A number of 0..n-1."""
        return int(self._stream.integers(1, 0, n)[0])

    def choice(self, items: Sequence[Any]) -> Any:  # noqa: ANN401  # an item
        """One of `items`."""
        return items[self.below(len(items))]

    def recent(self, accept: Callable[[Value], bool]) -> Value | None:
        """A value that `accept` takes, sooner a late one than an early one."""
        fit = [v for v in self.values if accept(v)]
        if not fit:
            return None
        return fit[max(self.below(len(fit)), self.below(len(fit)))]

    # leaves

    def input(self, name: str, ne: Callable[[int], Dims], fill: Fill | None = None, type_: GGMLType = F32) -> Value:
        """An input of each step, with other bytes in each."""
        leaves = []
        for k in range(len(self.tokens)):
            t = new_tensor(type_, *ne(k), name=name, flags=FLAG_INPUT)
            self.inputs[k][t] = encode(type_, Stream(self.id, f"{name} {k}"), t.ne, fill or normal())
            leaves.append(t)
        value = Value(leaves, kind="input")
        if type_ is F32 and fill is None:
            self.values.append(value)
        return value

    def name(self, kind: str) -> str:
        """A name that no leaf has yet."""
        self._count += 1
        return f"{kind}{self._count}"

    def weight(self, type_: GGMLType, *ne: int, std: float) -> Tensor:
        """A weight, shared by all steps."""
        t = new_tensor(type_, *ne, name=self.name("w"))
        self.persistent[t] = random_bytes(type_, Stream(self.id, t.name), nelements(t), std)
        return t

    def cache(self, row: int) -> Tensor:
        """A cache [row, CELLS] that holds random rows already."""
        t = new_tensor(self.caches, row, CELLS, name=self.name("cache"))
        self.persistent[t] = random_bytes(self.caches, Stream(self.id, t.name), nelements(t), 1.0)
        self.stored[t] = 0
        return t

    # nodes

    def add(self, make: Make, facts: Facts | None = None, *, keep: bool = True) -> Value | None:
        """Add a node to every step, or to none where one refuses it, or it is too large.

        Args:
            make: gives the node.
            facts: what is known of it.
            keep: whether later nodes may read it.
        """
        try:
            made = [make(k) for k in range(len(self.tokens))]
            for t in made:
                check_tensor(t)
                check_node(t)
        except GraphError:
            return None
        if any(not (FEW if t.type is F32 else 1) <= nelements(t) <= SIZE for t in made):
            return None
        for t, e in zip(made, self._expansions, strict=True):
            e.expand(t)
        value = Value(made, facts or Facts())
        if keep:
            self.values.append(value)
        return value

    def overwritten(self, old: Value, facts: Facts) -> None:
        """All that shows the bytes of `old` holds other elements now."""
        for v in self.values:
            if v.at[0].root is old.at[0].root:
                v.facts = facts

    @property
    def nodes(self) -> int:
        """Nodes so far, of each step."""
        return len(self._expansions[0].nodes)

    def grow(self, moves: Mapping[Callable[[Growth], Any], int], nodes: int) -> None:
        """Go on to exactly `nodes` nodes, by moves of these weights that add one to three nodes each."""
        lots = [m for m, weight in moves.items() for _ in range(weight)]
        failed = 0
        while self.nodes < nodes:
            before = self.nodes
            move = self.choice(lots)
            if nodes - before >= 4:
                move(self)
            failed = 0 if self.nodes > before else failed + 1
            if nodes - before < 4 or failed > TRIES:
                self._go_on()
                failed = 0

    def _go_on(self) -> None:
        """A move that never fails."""
        last = self.recent(lambda v: v.type is F32 and all(is_contiguous(t) for t in v.at))
        assert last is not None  # the inputs are
        self.add(lambda k: B.scale(last.at[k], 0.75), last.facts.times(0.75))

    # the case

    def case(self, family: str, params: dict[str, Any], seed: int, generator: int) -> Case:
        """The finished case; what no node reads is left out."""
        steps = []
        used: set[Tensor] = set()
        for k, e in enumerate(self._expansions):
            graph = e.graph()
            tensors = set(graph.tensors())
            used |= tensors
            inputs = {t: d for t, d in self.inputs[k].items() if t in tensors}
            steps.append(Step(graph, inputs, self._outputs(graph.nodes)))
        persistent = {t: d for t, d in self.persistent.items() if t in used}
        return Case(self.id, persistent, steps, family=family, params=params, seed=seed, generator=generator)

    def _outputs(self, nodes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What no node reads, and every fifth of the others; results that lie in a cache are checked there."""
        read = {s for n in nodes for s in n.src if s is not None and s is not n}
        able = [(i, n) for i, n in enumerate(nodes) if n.root not in self.persistent]
        wanted = [n for i, n in able if n not in read or (i % 5 == 0 and computes(n))]
        return tuple(wanted)


def after(a: Facts, b: Facts) -> Facts:
    """Of a sum."""
    return Facts(math.hypot(a.std, b.std), a.peak + b.peak, a.spread or b.spread)
