"""Memory of a case in a ggml library: tensors rebuilt there, and graphs run over them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance.backend.interface import Session, Witness
from conformance.backend.measure import Clock
from conformance.backend.snapshot import Snapshot
from conformance.case.case import Case, writes_in_place
from conformance.ggml.errors import BackendError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.context import Arena, Context
from conformance.ggml.lib.layout import STATUS, USAGE_COMPUTE, InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import (
    FLAG_COMPUTE,
    FLAG_INPUT,
    FLAG_OUTPUT,
    VIEW_OPS,
    Bytes,
    Tensor,
    is_contiguous,
    nbytes,
    pack,
)

from .context import Persistent, Store, set_bytes
from .placement import Home

PATHS = {"OPENVINO": "translated"}
"""Device name prefix -> how it executes; all others run node by node."""

UNWRITTEN = 0xFF
"""Byte that fills compute memory first: NaN in floats, so skipped nodes are noticed."""


@dataclass(slots=True)
class Plan:
    """A graph built in the library, cut where an output must be read before it is overwritten."""

    graph: Graph
    snapshot: Snapshot
    """The graph when it was built: a caller may build its next one in the same objects."""
    outputs: tuple[Tensor, ...]
    inputs: Store
    context: Context
    leaves: list[Tensor]
    """Leaves that are not persistent."""
    at: dict[Tensor, int]
    parts: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    """`ggml_cgraph` pointers, each with the outputs to read after it ran."""
    nodes: int = 0
    buffer: int = 0
    """Compute buffer, 0 if no node needs memory."""
    guarded: Guarded | None = None
    """Guarded memory in place of the compute buffer, in a `GuardSession`."""

    def free(self) -> None:
        """Free the graph."""
        self.context.free()
        self.inputs.free()
        if self.guarded is not None:
            self.guarded.free()


class GgmlSession(Session):
    """Weights, caches and the graph allocator (`ggml_gallocr`) of one case.

    Nodes share memory as in llama.cpp, in place where ggml allows it, except outputs, which have FLAG_OUTPUT. A
    graph computed again with the same outputs is not built again.

    `backend` is a `ggml_backend_t`, `buft` the device's default buffer type; the witness reports `notes` about the
    placement. With memory `reused` each graph is made in the memory of the previous one, with `fresh` in its own.
    `clock` is the session's.
    """

    _owns_inputs = True
    """True if inputs have a buffer of their own instead of memory from a scheduler."""
    _drop = False
    """True if nodes without FLAG_COMPUTE are omitted from the graph."""

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
        clock: Clock = time.perf_counter,
    ) -> None:
        start = clock()
        self._clock = clock
        self._library = library
        self._ggml = library.ggml
        self._backend = backend
        self._buft = buft
        self._plan: Plan | None = None
        self._arenas = (Arena(), Arena()) if memory == "reused" else (None, None)
        self._kept: list[Plan] = []
        self._galloc: int | None = None
        self._persistent = Persistent(library)
        path = next((p for prefix, p in PATHS.items() if device.upper().startswith(prefix)), "eager")
        libraries = [library.title, *(f"{what}: {text}" for what, text in library.made.items())]
        self._witness = Witness(device=device, path=path, notes=list(notes), libraries=libraries)
        try:
            for home in dict.fromkeys(homes.values()):
                here = [t for t in case.persistent if homes[t] == home]
                self._persistent.add(self._store(here, home.buft, home.usage))
            self._galloc = self._ggml.gallocr_new(buft)
            own = {h.buft for h in homes.values() if h.buft != buft and not self._ggml.backend_buft_is_host(h.buft)}
            self._persistent.hide({t: case.persistent[t] for t, home in homes.items() if home.buft in own})
            for t, data in case.persistent.items():
                self.write(t, data)
        except BaseException:
            self.close()
            raise
        self._spent = clock() - start

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Set all bytes of a persistent tensor.

        GraphError if the tensor is not persistent in this case, or `data` has another size.
        """
        self._persistent.write(tensor, data)

    def read(self, tensor: Tensor) -> Bytes:
        """Return the bytes of a persistent tensor; GraphError for another tensor.

        A weight in a buffer with its own layout returns the bytes last written.
        """
        return self._persistent.read(tensor)

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph`; see `Session.compute`.

        Raises:
            BackendError: `ggml_backend_graph_compute` returned another status than SUCCESS, or no memory was left.
            GraphError: a leaf has no bytes.
        """
        self._library.log.lines.clear()  # messages from here on belong to this graph
        plan = self._plan
        if plan is None or not (plan.graph is graph and plan.outputs == tuple(outputs) and plan.snapshot.shows(graph)):
            plan = self._plan = self._build(graph, tuple(outputs))
        self._clear(plan)
        start = self._clock()
        for t in plan.leaves:
            if t not in inputs:
                raise GraphError(f"{t}: a leaf of the graph that is neither persistent nor among the inputs given")
            self._set(plan.at[t], t, inputs[t])
        values = self._run(plan)
        self._spent += self._clock() - start
        self._count(plan)
        return values

    def _run(self, plan: Plan) -> dict[Tensor, Bytes]:
        values: dict[Tensor, Bytes] = {}
        for part, readable in plan.parts:
            self._check("ggml_backend_graph_compute", self._ggml.backend_graph_compute(self._backend, part), plan)
            for t in readable:
                values[t] = self._packed(plan.at[t], t)
        return values

    def _count(self, plan: Plan) -> None:
        self._witness.nodes += plan.nodes

    def clock(self) -> float:
        """Return seconds of opening, setting inputs, computing and reading, not of rebuilding."""
        return self._spent

    def witness(self) -> Witness:
        """Return device, nodes computed, bytes by buffer name."""
        sizes = self._persistent.sizes()
        if self._galloc is not None:
            sizes["compute"] = self._ggml.gallocr_get_buffer_size(self._galloc, 0)
        self._witness.bytes = sizes
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
        self._persistent.free()

    def _check(self, function: str, status: int, plan: Plan) -> None:
        if status:
            complaints = "; ".join(self._library.log.complaints())
            raise BackendError(
                f"{function} returned {STATUS.get(status, status)} on a graph of {plan.nodes} nodes on "
                f"{self._witness.device}{self._split()}" + (f": {complaints}" if complaints else "")
            )

    def _split(self) -> str:
        """Describe the splits of the last graph; empty if nothing splits it."""
        return ""

    def _set(self, pointer: int, t: Tensor, data: Bytes) -> None:
        set_bytes(self._library, pointer, t, data)

    def _packed(self, pointer: int, t: Tensor) -> Bytes:
        data = self._library.get(pointer, nbytes(t))
        return data if is_contiguous(t) else pack(data, t, 0)

    def _retire(self) -> None:
        """Free the last plan now; or on close, if its memory must not be reused."""
        if self._plan is not None:
            if self._arenas[0] is None:
                self._kept.append(self._plan)
            else:
                self._plan.free()
            self._plan = None

    def _build(self, graph: Graph, outputs: tuple[Tensor, ...]) -> Plan:
        self._retire()
        inside = {*graph.nodes, *self._persistent.at}
        leaves = [t for t in graph.tensors() if t.op == "NONE" and t.view_src is None and t not in inside]
        store = self._store(leaves if self._owns_inputs else (), self._buft, USAGE_COMPUTE, self._arenas[0])
        cuts = self._cuts(graph, outputs)
        n = len(graph.tensors())
        context = Context(self._library, n, n + 1, 2 + len(cuts) if cuts else 1, self._arenas[1])
        plan = Plan(graph, Snapshot(graph), outputs, store, context, leaves, {**self._persistent.at, **store.at})
        try:
            self._fill(plan, cuts, n + 1)
        except BaseException:
            plan.free()
            raise
        return plan

    def _fill(self, plan: Plan, cuts: list[int], size: int) -> None:
        g, context, at = self._ggml, plan.context, plan.at
        new = [t for t in plan.graph.tensors() if t not in at]
        for t in new:
            at[t] = context.add(t, at)
        cgraph = g.new_graph_custom(context.pointer, size, False)
        for node in plan.graph:
            if node.flags & FLAG_COMPUTE or not self._drop:
                g.build_forward_expand(cgraph, at[node])
        # Expanding sets COMPUTE on every node; restore the case's flags, and make outputs retain their memory.
        leaves = set(plan.leaves)
        keep = {t.root for t in plan.outputs} | set(plan.outputs)
        for t in new:
            more = FLAG_INPUT if t in leaves else FLAG_OUTPUT if t in keep else 0
            self._library.struct(at[t]).flags = t.flags | more
        self._allocate(plan, cgraph, new)
        plan.nodes = sum(1 for n in plan.graph if n.flags & FLAG_COMPUTE and n.op not in VIEW_OPS)
        place = {t: i for i, t in enumerate(plan.graph)}
        for start, end in zip([-1, *cuts], [*cuts, len(plan.graph)], strict=True):
            part = cgraph if not cuts else g.new_graph_custom(context.pointer, size, False)
            if cuts:
                for node in plan.graph.nodes[max(start, 0) : end]:
                    g.graph_add_node(part, at[node])
            plan.parts.append((part, [t for t in plan.outputs if start <= place.get(t, -1) < end]))

    def _store(self, tensors: Iterable[Tensor], buft: int, usage: int, arena: Arena | None = None) -> Store:
        return Store(self._library, tensors, buft, usage, arena)

    def _allocate(self, plan: Plan, cgraph: int, new: Sequence[Tensor]) -> None:
        g, at = self._ggml, plan.at
        # Without a reserve the allocator reuses the last graph's plan if the sizes are equal: it compares neither flags
        # nor src, and would reuse an output's memory.
        if not (g.gallocr_reserve(self._galloc, cgraph) and g.gallocr_alloc_graph(self._galloc, cgraph)):
            raise BackendError(f"ggml_gallocr_reserve: no memory for a graph of {len(plan.graph)} nodes")
        plan.buffer = next(
            (self._library.struct(at[t]).buffer or 0 for t in new if t.view_src is None and nbytes(t)), 0
        )

    def _cuts(self, graph: Graph, outputs: Sequence[Tensor]) -> list[int]:
        """Return where to stop and read: before the first node that overwrites an output."""
        return sorted(set(overwriters(graph, outputs).values()))

    def _clear(self, plan: Plan) -> None:
        if plan.buffer:
            self._ggml.backend_buffer_clear(plan.buffer, UNWRITTEN)


def unwrite(library: Library, pointer: int, t: Tensor) -> None:
    """Fill a tensor with `UNWRITTEN` by `set_tensor`: not every buffer has `memset_tensor`."""
    library.set(pointer, np.full(nbytes(t), UNWRITTEN, np.uint8))


def overwriters(graph: Graph, outputs: Sequence[Tensor]) -> dict[Tensor, int]:
    """Return output -> index of the first later node that overwrites it in place, if any."""
    place = {t: i for i, t in enumerate(graph)}
    writers: dict[Tensor, list[int]] = {}
    for i, node in enumerate(graph):
        if writes_in_place(node) and node.flags & FLAG_COMPUTE:
            writers.setdefault(node.root, []).append(i)
    first = {t: next((i for i in writers.get(t.root, ()) if i > place.get(t, -1)), None) for t in outputs}
    return {t: i for t, i in first.items() if i is not None}


PATTERN = 0xA5
"""Value of a guard byte: repeated, no usual float, small integer or NaN."""
GUARD = 64
"""Minimum bytes between two tensors."""


class Guarded:
    """A buffer with guard bytes between its tensors, none of which is a view.

    BackendError for no memory.
    """

    def __init__(self, library: Library, buft: int, tensors: Mapping[Tensor, int], usage: int = 0) -> None:
        self._library, g = library, library.ggml
        self._gaps: list[tuple[int, int, Tensor | None, Tensor | None]] = []
        align = max(GUARD, g.backend_buft_get_alignment(buft))
        places: list[tuple[Tensor, int, int]] = []
        end = 0
        for t, pointer in tensors.items():
            start = -(-(end + GUARD) // align) * align
            end = start + max(nbytes(t), g.backend_buft_get_alloc_size(buft, pointer))
            places.append((t, start, end))
        self.size = end + GUARD
        self.buffer: int | None = g.backend_buft_alloc_buffer(buft, self.size)
        if self.buffer is None:
            raise BackendError(f"no memory for {len(places)} tensors of {self.size} bytes, with guards between them")
        if usage:
            g.backend_buffer_set_usage(self.buffer, usage)
        self._context = g.init(InitParams((len(places) + 2) * library.layout.overhead, None, True))
        base = g.backend_buffer_get_base(self.buffer)
        last: Tensor | None = None
        at = 0
        stretches: list[tuple[Tensor | None, int, int]] = [*places, (None, self.size, self.size)]
        for behind, start, stop in stretches:
            gap = g.new_tensor_1d(self._context, library.types["i8"], start - at)
            g.backend_tensor_alloc(self.buffer, gap, base + at)
            self._gaps.append((gap, start - at, last, behind))
            if behind is not None:
                g.backend_tensor_alloc(self.buffer, tensors[behind], base + start)
            last, at = behind, stop
        g.backend_buffer_clear(self.buffer, PATTERN)
        for gap, size, _, _ in self._gaps:  # Vulkan's clear makes the byte a 32-bit word
            library.set(gap, np.full(size, PATTERN, np.uint8))

    def damage(self) -> str:
        """Describe which guard bytes were written; empty if none."""
        for gap, size, before, behind in self._gaps:
            hit = np.flatnonzero(self._library.get(gap, size) != PATTERN)
            if not hit.size:
                continue
            first, last = int(hit[0]), int(hit[-1])
            # Nearer to the end of the one than to the start of the other.
            if before is not None and (behind is None or first <= size - 1 - last):
                return f"{hit.size} bytes behind the end of {_spell(before)} were written, the first {first} behind it"
            assert behind is not None
            return f"{hit.size} bytes before {_spell(behind)} were written, the first {size - first} before it"
        return ""

    def free(self) -> None:
        """Free the buffer."""
        if self.buffer is not None:
            self._library.ggml.backend_buffer_free(self.buffer)
            self.buffer = None
            self._library.ggml.free(self._context)


class GuardedStore(Store):
    """Leaves of one buffer type, separated by guard bytes."""

    guarded: Guarded

    def _allocate(self, buft: int, usage: int) -> None:
        self.guarded = Guarded(self.library, buft, self.at, usage)
        self.buffer = self.guarded.buffer

    def free(self) -> None:
        """Free buffer and tensors."""
        self.guarded.free()
        self.context.free()


class GuardSession(GgmlSession):
    """A `GgmlSession` with every tensor in its own guarded memory."""

    def compute(
        self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]
    ) -> Mapping[Tensor, Bytes]:
        """Run `graph`, then check every guard; see `Session.compute`.

        Raises:
            BackendError: as `GgmlSession`; or bytes outside a tensor, or of an input, were written: names the tensor.
            GraphError: a leaf has no bytes.
        """
        values = super().compute(graph, inputs, outputs)
        plan = self._plan
        assert plan is not None
        assert plan.guarded is not None
        stores = [s for s in (*self._persistent.stores, plan.inputs) if isinstance(s, GuardedStore)]
        for guarded in (plan.guarded, *(s.guarded for s in stores)):
            if damage := guarded.damage():
                raise BackendError(f"output written outside its tensor on {self._witness.device}: {damage}")
        written = {n.root for n in graph}
        for t, pointer in plan.inputs.at.items():
            if t not in written and not np.array_equal(self._library.get(pointer, nbytes(t)), inputs[t]):
                raise BackendError(f"an input was written on {self._witness.device}: {_spell(t)} has other bytes now")
        return values

    def _store(self, tensors: Iterable[Tensor], buft: int, usage: int, arena: Arena | None = None) -> Store:
        """Make a guarded store, unless the buffer's own layout hides a tensor's bytes."""
        kind = GuardedStore if buft == self._buft else Store
        return kind(self._library, tensors, buft, usage, arena)

    def _allocate(self, plan: Plan, cgraph: int, new: Sequence[Tensor]) -> None:
        del cgraph
        owners = {t: plan.at[t] for t in new if t.view_src is None}
        plan.guarded = Guarded(self._library, self._buft, owners, USAGE_COMPUTE)
        for t in new:
            if t.view_src is not None:
                self._ggml.backend_view_init(plan.at[t])

    def _clear(self, plan: Plan) -> None:
        for t in plan.at:
            if t not in self._persistent.at and t not in plan.inputs.at and t.view_src is None and nbytes(t):
                unwrite(self._library, plan.at[t], t)


def _spell(t: Tensor) -> str:
    return f"{t.op if t.op != 'NONE' else 'leaf'} {t.name} {t.type}{list(t.ne)}".replace("  ", " ")
