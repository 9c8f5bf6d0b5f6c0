"""A case: weights and caches that persist across steps, and the graphs that use them."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import VIEW_OPS, Bytes, Tensor, nbytes, packed_nbytes

from .demands import parse
from .recipe import Recipe
from .reference import Reference
from .strict import JSON

__all__ = ["JSON", "MAX_BUFFER", "USAGES", "Case", "Placement", "Step", "writes_in_place"]

USAGES = ("weights", "any")
"""`enum ggml_backend_buffer_usage` of persistent tensors.

A backend may treat weights as constants, repack them, or run the nodes that read them on their device."""
MAX_BUFFER = 1000


@dataclass(frozen=True, slots=True)
class Placement:
    """Buffer of one tensor."""

    buffer: int = 0
    """Index of the buffer type (0: the default), modulo their number on the backend."""
    usage: str = "weights"
    """One of `USAGES`."""
    must: bool = False
    """True if the buffer type is required; set by audits.

    The backend then refuses the case unless its device accepts every use; in other cases an adapter may choose
    another buffer type."""


@dataclass(eq=False, slots=True)
class Step:
    """A cgraph and its inputs: a batch, in llama.cpp's terms."""

    graph: Graph
    inputs: dict[Tensor, Bytes] = field(default_factory=dict)
    """Every leaf that is not persistent -> its bytes."""
    outputs: tuple[Tensor, ...] = ()
    """Nodes whose values are checked; caches are always checked after every step."""
    expected: dict[Tensor, Bytes] = field(default_factory=dict)
    """Recorded values, packed (without gaps, `ne[0]` fastest).

    Nodes are recorded right after they ran, persistent tensors after the step. A reference computes missing values."""
    note: JSON = None
    """Data of the recorder, such as tokens."""


@dataclass(eq=False, slots=True)
class Case:
    """A trajectory of steps; a single op is one step with one node."""

    id: str
    """`family/params@seed`."""
    persistent: dict[Tensor, Bytes]
    """Weights and caches, shared by all steps -> their bytes before the first step."""
    steps: list[Step]
    family: str = ""
    params: dict[str, JSON] = field(default_factory=dict)
    """Keys of the id, for readers of a case file; the runner reads those of a relation only."""
    seed: int = 0
    """Seed of the id, for readers of a case file."""
    generator: int = 1
    """Version of the generator; the same id may have other bytes in another version."""
    tolerance: dict[str, float] = field(default_factory=dict)
    """`{"nmse": x}`: tolerance of a free run of the whole trajectory against `expected`."""
    provenance: dict[str, JSON] = field(default_factory=dict)
    """Source of recorded values."""
    recipes: dict[Tensor, Recipe] = field(default_factory=dict)
    """Persistent tensor -> recipe of its bytes; a case file stores it and a digest."""
    references: dict[Tensor, Reference] = field(default_factory=dict)
    """Persistent tensor -> model file with its bytes; a case file stores only a digest."""
    demands: dict[str, JSON] = field(default_factory=dict)
    """Requirements on the witness, or the run is VACUOUS; `case.demands` has the grammar."""
    placement: dict[Tensor, Placement] = field(default_factory=dict)
    """Persistent tensor -> its buffer, else the backend decides.

    A backend with one kind of memory may ignore it; results never depend on it."""
    file: str = ""
    """Case file from which it was read; empty if it was generated."""

    def caches(self) -> list[Tensor]:
        """Return the persistent tensors that a step writes."""
        written = {n.view_src for s in self.steps for n in s.graph if writes_in_place(n)}
        return [t for t in self.persistent if t in written]

    @property
    def nbytes(self) -> int:
        """Bytes of the persistent tensors and of all inputs and outputs."""
        steps = sum(sum(map(nbytes, s.inputs)) + sum(map(packed_nbytes, s.outputs)) for s in self.steps)
        return steps + sum(map(nbytes, self.persistent))

    def uses(self, tensor: Tensor) -> list[Tensor]:
        """Return every computing node that reads a persistent tensor, whole or through a view."""
        nodes = dict.fromkeys(n for s in self.steps for n in s.graph if n.op not in VIEW_OPS)
        return [n for n in nodes if any(s is not None and s.root is tensor for s in n.src)]

    def validate(self, *, graphs: bool = True) -> None:
        """Check graphs, demands and data sizes; GraphError names step, tensor and rule.

        `graphs`: False if a `Builder` made each node, which takes most of the time.
        """
        parse(self.demands)
        for t, data in self.persistent.items():
            _check_bytes(t, data, nbytes(t), "persistent")
            if not _owns_bytes(t):
                raise GraphError(f"persistent: {t} must be a leaf that owns its bytes")
        for t in self.placement:
            if t not in self.persistent:
                raise GraphError(f"placement: {t} is not a persistent tensor")
        for k, step in enumerate(self.steps):
            try:
                if graphs:
                    step.graph.validate()
            except GraphError as e:
                raise GraphError(f"steps[{k}]: {e}") from None
            self._check_step(step, f"steps[{k}]")

    def _check_step(self, step: Step, where: str) -> None:
        tensors = set(step.graph.tensors())
        for leaf in step.graph.leafs():
            if leaf.view_src is None and leaf not in self.persistent and leaf not in step.inputs:
                raise GraphError(f"{where}: {leaf} is neither persistent nor an input, so nothing fills it")
        for t, data in step.inputs.items():
            if t not in tensors or not _owns_bytes(t) or t in self.persistent:
                raise GraphError(f"{where}: input {t} must be a leaf of the graph that owns its bytes")
            _check_bytes(t, data, nbytes(t), f"{where}: input")
        for t in step.outputs:
            if t not in tensors or t in step.inputs or t in self.persistent:
                raise GraphError(f"{where}: output {t} is not a node of the graph")
        for t, data in step.expected.items():
            if t not in tensors and t not in self.persistent:
                raise GraphError(f"{where}: expected {t} is not in a graph of the step")
            _check_bytes(t, data, packed_nbytes(t), f"{where}: expected")


def writes_in_place(node: Tensor) -> bool:
    """Return True if `node` writes another tensor's bytes, as SET_ROWS or `*_inplace` do."""
    return node.view_src is not None and node.op not in VIEW_OPS


def _owns_bytes(t: Tensor) -> bool:
    return t.op == "NONE" and t.view_src is None


def _check_bytes(t: Tensor, data: Bytes, size: int, where: str) -> None:
    if data.dtype != "u1" or data.ndim != 1 or data.nbytes != size:
        raise GraphError(f"{where}: {t} takes {size} bytes, {data.nbytes} given")
