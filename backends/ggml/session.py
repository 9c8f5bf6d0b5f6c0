"""One case's memory in a ggml library: tensors rebuilt there, and graphs run over them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from conformance.backend.interface import Session, Witness
from conformance.case.case import Case, writes_in_place
from conformance.ggml.errors import BackendError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.layout import STATUS, USAGE_COMPUTE
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_OUTPUT, VIEW_OPS, Bytes, Tensor, is_contiguous, nbytes, pack

from .context import Arena, Context, Store
from .placement import Home

if TYPE_CHECKING:
    from .guard import Guarded

PATHS = {"OPENVINO": "translated"}
"""Device name prefix -> how it executes; all others run node by node."""

UNWRITTEN = 0xFF
"""Byte that fills compute memory first: NaN in every float type, so a node that was skipped cannot show old results."""


@dataclass(slots=True)
class Plan:
    """A graph built in the library, with its inputs, cut where an output must be read before it is overwritten."""

    graph: Graph
    outputs: tuple[Tensor, ...]
    inputs: Store
    context: Context
    at: dict[Tensor, int]
    parts: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    """A `ggml_cgraph`, and the outputs to read once it has run."""
    nodes: int = 0
    buffer: int = 0
    """The compute buffer, 0 where no node needs memory."""
    guarded: Guarded | None = None
    """Instead of it, in a `GuardSession`."""

    def free(self) -> None:
        """Give the graph back."""
        self.context.free()
        self.inputs.free()
        if self.guarded is not None:
            self.guarded.free()


class GgmlSession(Session):
    """Weights, caches and the graph allocator (`ggml_gallocr`) of one case.

    Nodes share memory as in llama.cpp, in place where ggml allows it, except outputs, which carry FLAG_OUTPUT. A
    graph computed again with the same outputs is not built again.

    Args:
        library: where it runs.
        backend: `ggml_backend_t`.
        buft: the device's default buffer type.
        case: what to allocate and fill.
        homes: where each persistent tensor lies.
        notes: what the witness should say about the placement.
        memory: `reused`: each graph is made where the one before was; `fresh`: none is, while the session lives.
    """

    def __init__(
        self,
        library: Library,
        device: str,
        backend: int,
        buft: int,
        case: Case,
        homes: Mapping[Tensor, Home],
        notes: Sequence[str] = (),
        memory: str = "reused",
    ) -> None:
        start = time.perf_counter()
        self._library = library
        self._ggml = library.ggml
        self._backend = backend
        self._buft = buft
        self._plan: Plan | None = None
        self._arenas = (Arena(), Arena()) if memory == "reused" else (None, None)
        self._kept: list[Plan] = []
        self._galloc: int | None = None
        self._stores: list[Store] = []
        self._unreadable: dict[Tensor, Bytes] = {}
        path = next((p for prefix, p in PATHS.items() if device.upper().startswith(prefix)), "eager")
        self._witness = Witness(device=device, path=path, notes=list(notes))
        try:
            for home in dict.fromkeys(homes.values()):
                here = [t for t in case.persistent if homes[t] == home]
                self._stores.append(self._store(here, home.buft, home.usage))
            self._galloc = self._ggml.gallocr_new(buft)
            self._at = {t: p for store in self._stores for t, p in store.at.items()}
            own = {h.buft for h in homes.values() if h.buft != buft and not self._ggml.backend_buft_is_host(h.buft)}
            self._unreadable = {t: case.persistent[t] for t, home in homes.items() if home.buft in own}
            for t, data in case.persistent.items():
                self.write(t, data)
        except BaseException:
            self.close()
            raise
        self._spent = time.perf_counter() - start

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set the bytes of a persistent tensor, whole.

        Raises:
            GraphError: the tensor is not persistent in this case, or `data` has another size.
        """
        pointer = self._persistent(tensor)
        if tensor in self._unreadable:
            self._unreadable[tensor] = data.copy()
        self._set(pointer, tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """The bytes of a persistent tensor. A weight in a buffer with a layout of its own gives the bytes last written.

        Raises:
            GraphError: the tensor is not persistent in this case.
        """
        pointer = self._persistent(tensor)
        if tensor in self._unreadable:
            return self._unreadable[tensor].copy()
        return self._library.get(pointer, nbytes(tensor))

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph`; see `Session.compute`.

        Raises:
            BackendError: `ggml_backend_graph_compute` returned another status than SUCCESS, or no memory was left.
            GraphError: a leaf has no bytes.
        """
        self._library.log.clear()  # what it says from here on is of this graph
        plan = self._plan
        if plan is None or plan.graph is not graph or plan.outputs != tuple(outputs):
            plan = self._build(graph, tuple(outputs))
        self._clear(plan)
        start = time.perf_counter()
        for t, pointer in plan.inputs.at.items():
            if t not in inputs:
                raise GraphError(f"{t}: a leaf of the graph that is neither persistent nor among the inputs given")
            self._set(pointer, t, inputs[t])
        values: dict[Tensor, Bytes] = {}
        for part, readable in plan.parts:
            self._check("ggml_backend_graph_compute", self._ggml.backend_graph_compute(self._backend, part), plan)
            for t in readable:
                values[t] = self._packed(plan.at[t], t)
        self._spent += time.perf_counter() - start
        self._witness.nodes += plan.nodes
        return values

    def clock(self) -> float:
        """Opening, then setting inputs, computing and reading outputs; rebuilding graphs through ctypes is left out."""
        return self._spent

    def witness(self) -> Witness:
        """Device, nodes computed, bytes by buffer name."""
        held: dict[str, int] = {}
        for store in self._stores:
            if store.buffer is not None:
                name, size = store.held()
                held[name] = held.get(name, 0) + size
        if self._galloc is not None:
            held["compute"] = self._ggml.gallocr_get_buffer_size(self._galloc, 0)
        self._witness.bytes = held
        return self._witness

    def close(self) -> None:
        """Free every buffer and context of the case."""
        if self._plan is not None:
            self._kept.append(self._plan)
            self._plan = None
        while self._kept:
            self._kept.pop().free()
        if self._galloc is not None:
            self._ggml.gallocr_free(self._galloc)
            self._galloc = None
        while self._stores:
            self._stores.pop().free()

    def _check(self, function: str, status: int, plan: Plan) -> None:
        if status:
            complaints = "; ".join(self._library.complaints())
            raise BackendError(
                f"{function} returned {STATUS.get(status, status)} on a graph of {plan.nodes} nodes on "
                f"{self._witness.device}" + (f": {complaints}" if complaints else "")
            )

    def _persistent(self, tensor: Tensor) -> int:
        try:
            return self._at[tensor]
        except KeyError:
            raise GraphError(f"{tensor} is no persistent tensor of the case that this session opened") from None

    def _set(self, pointer: int, t: Tensor, data: Bytes) -> None:
        size = nbytes(t)
        if data.dtype != np.uint8 or data.nbytes != size:
            raise GraphError(f"{t} takes {size} bytes, {data.nbytes} of {data.dtype} given")
        self._library.set(pointer, data)

    def _packed(self, pointer: int, t: Tensor) -> Bytes:
        data = self._library.get(pointer, nbytes(t))
        return data if is_contiguous(t) else pack(data, t, 0)

    def _retire(self) -> None:
        """Free the last plan; where its memory must not be used again, when the session closes."""
        if self._plan is not None:
            if self._arenas[0] is None:
                self._kept.append(self._plan)
            else:
                self._plan.free()
            self._plan = None

    def _inputs(self, graph: Graph) -> list[Tensor]:
        """The leaves of a graph that are not persistent."""
        inside = {*graph.nodes, *self._at}
        return [t for t in graph.tensors() if t.op == "NONE" and t.view_src is None and t not in inside]

    def _build(self, graph: Graph, outputs: tuple[Tensor, ...]) -> Plan:
        self._retire()
        tensors = graph.tensors()
        place = {t: i for i, t in enumerate(graph.nodes)}
        store = self._store(self._inputs(graph), self._buft, USAGE_COMPUTE, self._arenas[0])
        cuts = _cuts(graph, place, outputs)
        size = len(tensors) + 1
        graphs = 2 + len(cuts) if cuts else 1
        context = Context(self._library, len(tensors), size, graphs, self._arenas[1])
        plan = Plan(graph, outputs, store, context, {**self._at, **store.at})
        try:
            self._fill(plan, tensors, place, cuts, size)
        except BaseException:
            plan.free()
            raise
        self._plan = plan
        return plan

    def _fill(self, plan: Plan, tensors: list[Tensor], place: dict[Tensor, int], cuts: list[int], size: int) -> None:
        g, context, at = self._ggml, plan.context, plan.at
        made = [t for t in tensors if t not in at]
        for t in made:
            at[t] = context.add(t, at)
        cgraph = g.new_graph_custom(context.pointer, size, False)
        for node in plan.graph.nodes:
            g.build_forward_expand(cgraph, at[node])
        # Expanding sets COMPUTE on every node; what the case says holds, and outputs must keep their memory.
        keep = {t.root for t in plan.outputs} | set(plan.outputs)
        for t in made:
            self._library.struct(at[t]).flags = t.flags | FLAG_OUTPUT if t in keep else t.flags
        self._allocate(plan, cgraph, made)
        plan.nodes = sum(1 for n in plan.graph if n.flags & FLAG_COMPUTE and n.op not in VIEW_OPS)
        starts = [-1, *cuts]
        ends = [*cuts, len(plan.graph)]
        for start, end in zip(starts, ends, strict=True):
            part = cgraph if not cuts else g.new_graph_custom(context.pointer, size, False)
            if cuts:
                for node in plan.graph.nodes[max(start, 0) : end]:
                    g.graph_add_node(part, at[node])
            plan.parts.append((part, [t for t in plan.outputs if start <= place.get(t, -1) < end]))

    def _store(self, tensors: Iterable[Tensor], buft: int, usage: int, arena: Arena | None = None) -> Store:
        """What holds leaves."""
        return Store(self._library, tensors, buft, usage, arena)

    def _allocate(self, plan: Plan, cgraph: int, made: Sequence[Tensor]) -> None:
        g, at = self._ggml, plan.at
        # Without a reserve the allocator keeps the last graph's plan if the sizes are the same: it compares neither
        # flags nor src, and would give an output's memory away.
        if not (g.gallocr_reserve(self._galloc, cgraph) and g.gallocr_alloc_graph(self._galloc, cgraph)):
            raise BackendError(f"ggml_gallocr_reserve: no memory for a graph of {len(plan.graph)} nodes")
        plan.buffer = next(
            (self._library.struct(at[t]).buffer or 0 for t in made if t.view_src is None and nbytes(t)), 0
        )

    def _clear(self, plan: Plan) -> None:
        if plan.buffer:
            self._ggml.backend_buffer_clear(plan.buffer, UNWRITTEN)


def _cuts(graph: Graph, place: Mapping[Tensor, int], outputs: Sequence[Tensor]) -> list[int]:
    """Where to stop and read: before the first node that overwrites, in place, what an output held when it ran."""
    writers: dict[Tensor, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if writes_in_place(node) and node.flags & FLAG_COMPUTE:
            writers.setdefault(node.root, []).append(i)
    cuts = set()
    for t in outputs:
        later = [i for i in writers.get(t.root, ()) if i > place.get(t, -1)]
        if later:
            cuts.add(later[0])
    return sorted(cuts)
