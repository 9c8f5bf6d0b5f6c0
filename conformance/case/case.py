"""A case: weights and caches that live across steps, and the graphs that run over them."""

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
"""`enum ggml_backend_buffer_usage` for persistent tensors: a backend may treat weights as constants, repack them, or
run the nodes that read them where they lie."""
MAX_BUFFER = 1000


@dataclass(frozen=True, slots=True)
class Placement:
    """The buffer of one tensor."""

    buffer: int = 0
    """Index into the backend's buffer types (0: its default), modulo their number: the same case runs on backends with
    one kind of memory and with three."""
    usage: str = "weights"
    """One of `USAGES`."""
    must: bool = False
    """No other buffer type will do: the backend refuses the case unless its device accepts every use. Audits set this;
    in other cases an adapter may know better than its device."""


@dataclass(eq=False, slots=True)
class Step:
    """One cgraph and its inputs: a batch, in llama.cpp's words."""

    graph: Graph
    inputs: dict[Tensor, Bytes] = field(default_factory=dict)
    """Every leaf that is not persistent -> its bytes."""
    outputs: tuple[Tensor, ...] = ()
    """Nodes whose values are checked; caches are checked after every step anyway."""
    expected: dict[Tensor, Bytes] = field(default_factory=dict)
    """Recorded values, packed (gaps closed, `ne[0]` fastest): of nodes right after they ran, of persistent tensors
    after the step. An oracle computes what is missing."""
    note: JSON = None
    """The recorder's own data, such as tokens."""


@dataclass(eq=False, slots=True)
class Case:
    """A trajectory. A single op is the smallest: one step, one node."""

    id: str
    """`family/params@seed`."""
    persistent: dict[Tensor, Bytes]
    """Weights and caches, the same objects in every step's graph -> their bytes before the first step."""
    steps: list[Step]
    family: str = ""
    params: dict[str, JSON] = field(default_factory=dict)
    seed: int = 0
    generator: int = 1
    """Version of the generator: the same id may have other bytes in another version."""
    tolerance: dict[str, float] = field(default_factory=dict)
    """`{"nmse": x}`: the budget of the whole trajectory when run freely against `expected`."""
    provenance: dict[str, JSON] = field(default_factory=dict)
    """Where recorded values come from."""
    recipes: dict[Tensor, Recipe] = field(default_factory=dict)
    """Persistent tensor -> how to make its bytes; a case file stores the recipe and a digest instead of the bytes."""
    references: dict[Tensor, Reference] = field(default_factory=dict)
    """Persistent tensor -> the model file with its bytes; a case file stores a digest instead of the bytes."""
    demands: dict[str, JSON] = field(default_factory=dict)
    """What a witness must say, or the run is VACUOUS; `case.demands` has the grammar."""
    placement: dict[Tensor, Placement] = field(default_factory=dict)
    """Persistent tensor -> where it should lie, else the backend decides. A backend with one kind of memory may ignore
    it; results never depend on it."""
    file: str = ""
    """The case file that it was read from; empty where it was made."""

    def caches(self) -> list[Tensor]:
        """Persistent tensors that a step writes."""
        written = {n.view_src for s in self.steps for n in s.graph if writes_in_place(n)}
        return [t for t in self.persistent if t in written]

    @property
    def nbytes(self) -> int:
        """Bytes of its persistent tensors, of what each step is given, and of what each step gives."""
        steps = sum(sum(map(nbytes, s.inputs)) + sum(map(packed_nbytes, s.outputs)) for s in self.steps)
        return steps + sum(map(nbytes, self.persistent))

    def uses(self, tensor: Tensor) -> list[Tensor]:
        """Every computing node of every step that reads a persistent tensor, whole or through a view."""
        nodes = dict.fromkeys(n for s in self.steps for n in s.graph if n.op not in VIEW_OPS)
        return [n for n in nodes if any(s is not None and s.root is tensor for s in n.src)]

    def validate(self) -> None:
        """Check graphs, demands and the size of each leaf's bytes; GraphError names step, tensor and rule."""
        parse(self.demands)
        for t, data in self.persistent.items():
            _check_bytes(t, data, nbytes(t), "persistent")
            if not _owns_bytes(t):
                raise GraphError(f"persistent: {t} must be a leaf that owns its bytes")
        for t in self.placement:
            if t not in self.persistent:
                raise GraphError(f"placement: {t} is no persistent tensor")
        for k, step in enumerate(self.steps):
            self._check_step(step, f"steps[{k}]")

    def _check_step(self, step: Step, where: str) -> None:
        try:
            step.graph.validate()
        except GraphError as e:
            raise GraphError(f"{where}: {e}") from None
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
                raise GraphError(f"{where}: output {t} is no node of the graph")
        for t, data in step.expected.items():
            if t not in tensors and t not in self.persistent:
                raise GraphError(f"{where}: expected {t} is in no graph of the step")
            _check_bytes(t, data, packed_nbytes(t), f"{where}: expected")


def writes_in_place(node: Tensor) -> bool:
    """Whether `node` computes into bytes that another tensor owns (SET_ROWS, CPY into a view, `*_inplace`)."""
    return node.view_src is not None and node.op not in VIEW_OPS


def _owns_bytes(t: Tensor) -> bool:
    return t.op == "NONE" and t.view_src is None


def _check_bytes(t: Tensor, data: Bytes, size: int, where: str) -> None:
    if data.dtype != "u1" or data.ndim != 1 or data.nbytes != size:
        raise GraphError(f"{where}: {t} takes {size} bytes, {data.nbytes} given")
