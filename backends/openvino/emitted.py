"""An emitted graph: parameters and results of a model, and what the host does with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import openvino.opset15 as o
from openvino import Node

from backends.openvino.translating.template import Expr

from .cache_window import Order
from .nodes import Value, origin
from .storage import VALUE


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """Rows that the host writes into a cache after the run, so that a step copies nothing else."""

    index: int
    form: str
    extents: tuple[int, ...]
    """Shape of the cache for this write."""
    axis: int
    ids: int
    """Index of the result, or if `given` of the plan's leaf, with the positions along `axis`."""
    rows: int
    """Index of the result with the rows."""
    given: bool = False
    exact: bool = False
    """True if the rows are rounded to the cache's type already."""


@dataclass(frozen=True, slots=True)
class InputBinding:
    """A parameter of the model: its tensor of the plan, and its form."""

    index: int
    form: str


@dataclass(slots=True)
class EmittedGraph:
    """A plan as OpenVINO nodes, not yet a model."""

    parameters: list[Node] = field(default_factory=list)
    feeds: list[InputBinding] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)
    """Tensor of the plan and part, for each result: first the plan's outputs, then the caches."""
    first_cache: int = 0
    """Index of the first result with new contents of a whole cache.

    They go up to the length of `outputs`; then come results of commits."""
    commits: list[CacheWrite] = field(default_factory=list)
    sinks: list[Node] = field(default_factory=list)
    """Assignments of the model's variables."""
    variables: list[InputBinding] = field(default_factory=list)
    """Cache and form of each variable."""
    written: set[int] = field(default_factory=set)
    """Caches in variables that a run changes."""
    symbols: dict[Expr, Node] = field(default_factory=dict)
    """Expression -> parameter of its value; these are the last parameters, in this order."""
    orders: dict[InputBinding, Order] = field(default_factory=dict)
    """Caches that the model reads in another axis order than ggml's."""
    inside: set[tuple[int, int]] = field(default_factory=set)
    """Leaf of the plan with indices, and their upper bound in the model."""
    halves: bool = False
    """True if a product reads a weight of 16-bit floats."""
    notes: Counter[str] = field(default_factory=Counter)
    _indices: dict[int, tuple[int, Value]] = field(default_factory=dict)
    """Value -> index of its result; values are kept, so that no other gets the same id."""

    def output(self, index: int, form: str, x: Value) -> None:
        """Add a result with a part of a tensor of the plan."""
        self.results.append(o.result(x))
        self.outputs.append((index, form))

    def result(self, x: Value) -> int:
        """Return the index of the result with `x`, added at the first call."""
        if id(x) not in self._indices:
            self._indices[id(x)] = (len(self.results), x)
            self.results.append(o.result(x))
        return self._indices[id(x)][0]

    def leaf_of(self, ids: Value) -> int | None:
        """Return the input of the plan with the numbers `ids`; None if they are computed."""
        name = origin(ids).get_name()
        for p, feed in zip(self.parameters, self.feeds, strict=True):
            if p.get_name() == name:
                return feed.index if feed.form == VALUE else None
        return None
