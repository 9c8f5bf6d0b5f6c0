"""Run a case as llama.cpp does: `ggml_backend_sched` over a device and the CPU.

As in `llama_context`, caches and weights lie in the device's buffers, weights with usage WEIGHTS. Weights lie in the
CPU's if only GET_ROWS reads them or the device refuses a node that does. Inputs are flagged INPUT, outputs OUTPUT.
Every graph is made in the memory of the previous one; before each step the scheduler is reset and the graph allocated.
The CPU backend uses the device's host buffer type if there is one. A session has its own backends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from conformance.backend.interface import Witness
from conformance.case.case import Case
from conformance.ggml.errors import BackendError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.context import Context
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.layout import EVAL_CALLBACK
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, nbytes

from .placement import sched_homes
from .session import GgmlSession, Plan, overwriters, unwrite

NAMED = 8
"""Maximum number of nodes off the device in a note; `placed` counts all."""
LEAST_GRAPH = 1024
"""`llama_context::graph_max_nodes`: at least this many nodes, and 8 for each tensor."""


class SchedSession(GgmlSession):
    """A case's memory on a device and the CPU, and the scheduler over both.

    `device` comes first; `cpu` equals it to test the CPU itself. Weights lie in `weights` of the device's buffer types
    `bufts`. With `opaque`, caches are in the device's own state and not read; with `drop` the device's graph lacks the
    nodes without FLAG_COMPUTE.

    Raises:
        UnavailableError: a device cannot be initialised.
        BackendError: no memory.
    """

    _owns_inputs = False

    def __init__(
        self,
        library: Library,
        device: Device,
        cpu: Device,
        bufts: Sequence[int],
        weights: int,
        case: Case,
        memory: str,
        threads: int,
        opaque: bool,
        drop: bool,
    ) -> None:
        g = library.ggml
        self._sched: int | None = None
        self._backends: list[int] = []
        self._drop = drop
        self._early: dict[int, Tensor] = {}
        """Outputs that a later node overwrites, by address; they are read when computed."""
        self._values: dict[Tensor, Bytes] = {}
        self._callback = EVAL_CALLBACK(self._computed)
        self._nothing = Context(library, 0, 1, 1)
        places, notes = sched_homes(library, device, cpu, bufts, weights, case)
        self._opaque = frozenset(case.caches()) if opaque else frozenset()
        super().__init__(library, device.name, 0, device.buffer_type, case, places, notes, memory)
        # A device may store a weight in its own format: reading returns what was written.
        self._persistent.hide(
            {t: data for t, data in case.persistent.items() if t.type.is_quantized and t not in case.caches()}
        )
        try:
            self._backends = [d.start(threads if d == cpu else None) for d in dict.fromkeys((device, cpu))]
            own = [device.buffer_type]
            if cpu != device:
                own.append(g.backend_dev_host_buffer_type(device.handle) or cpu.buffer_type)
            n = len(self._backends)
            most = max([LEAST_GRAPH, *(8 * len(step.graph.tensors()) for step in case.steps)])
            array = ctypes.c_void_p * n
            self._sched = g.backend_sched_new(array(*self._backends), array(*own), n, most, False, True)
            self._empty: int = g.new_graph_custom(self._nothing.pointer, 1, False)
        except BaseException:
            self.close()
            raise

    def opaque(self) -> frozenset[Tensor]:
        """Return caches that the device stores in its own state."""
        return self._opaque

    def on_device(self, graph: Graph, outputs: Sequence[Tensor]) -> frozenset[Tensor]:
        """Return the computing nodes that the scheduler gives to the device, without running any."""
        plan = self._plan = self._build(graph, tuple(outputs))
        return frozenset(node for node, backend in self._backends_of(plan) if backend == self._backends[0])

    def _run(self, plan: Plan) -> dict[Tensor, Bytes]:
        self._values = {}
        status = self._ggml.backend_sched_graph_compute(self._sched, plan.parts[0][0])
        self._check("ggml_backend_sched_graph_compute", status, plan)
        return {t: self._values[t] if t in self._values else self._packed(plan.at[t], t) for t in plan.outputs}

    def witness(self) -> Witness:
        """Return splits and copies of the last graph, nodes by backend and op, bytes by buffer."""
        witness = super().witness()
        witness.bytes.pop("compute", None)
        for backend in self._backends:
            name = self._ggml.backend_name(backend).decode()
            witness.bytes[f"compute {name}"] = self._ggml.backend_sched_get_buffer_size(self._sched, backend)
        return witness

    def close(self) -> None:
        """Free the scheduler, the graphs, every buffer and the backends."""
        if self._sched is not None:
            self._ggml.backend_sched_free(self._sched)
            self._sched = None
        super().close()
        self._nothing.free()
        while self._backends:
            self._ggml.backend_free(self._backends.pop())

    def _build(self, graph: Graph, outputs: tuple[Tensor, ...]) -> Plan:
        self._ggml.backend_sched_reset(self._sched)
        # As in `GgmlSession._allocate`: with equal sizes the allocator would reuse the last graph's plan.
        self._ggml.backend_sched_reserve(self._sched, self._empty)
        return super()._build(graph, outputs)

    def _cuts(self, graph: Graph, outputs: Sequence[Tensor]) -> list[int]:
        """Return no cuts: the callback reads overwritten outputs."""
        del graph, outputs
        return []

    def _allocate(self, plan: Plan, cgraph: int, new: Sequence[Tensor]) -> None:
        del new
        nodes = set(plan.graph)
        self._early = {plan.at[t]: t for t in overwriters(plan.graph, plan.outputs) if t in nodes}
        callback = ctypes.cast(self._callback, ctypes.c_void_p) if self._early else None
        self._ggml.backend_sched_set_eval_callback(self._sched, callback, None)
        if not self._ggml.backend_sched_alloc_graph(self._sched, cgraph):
            raise BackendError(f"ggml_backend_sched_alloc_graph: no memory for a graph of {len(plan.graph)} nodes")

    def _clear(self, plan: Plan) -> None:
        for t in plan.outputs:
            if t.view_src is None and nbytes(t) and self._buffer(plan.at[t]):
                unwrite(self._library, plan.at[t], t)

    def _set(self, pointer: int, t: Tensor, data: Bytes) -> None:
        if self._buffer(pointer):  # no memory if only dropped nodes read it
            super()._set(pointer, t, data)

    def _computed(self, pointer: int, ask: bool, _data: int | None) -> bool:  # C's signature
        t = self._early.get(pointer)
        if t is not None and not ask:
            self._values[t] = self._packed(pointer, t)
        return t is not None or not ask

    def _split(self) -> str:
        n = self._ggml.backend_sched_get_n_splits(self._sched)
        return f", in {n} split{'s' if n > 1 else ''}"

    def _buffer(self, pointer: int) -> int | None:
        return self._library.struct(pointer).buffer  # type: ignore[no-any-return]  # a pointer field

    def _backends_of(self, plan: Plan) -> Iterator[tuple[Tensor, int]]:
        """Yield each computing node, and the backend that the scheduler assigns to it."""
        for node in plan.graph.nodes:
            if node.flags & FLAG_COMPUTE and node.op not in VIEW_OPS:
                yield node, self._ggml.backend_sched_get_tensor_backend(self._sched, plan.at[node]) or 0

    def _count(self, plan: Plan) -> None:
        """Count nodes by backend, and copies, as `ggml_backend_sched_split_graph` decides them."""
        g, witness = self._ggml, self._witness
        where = dict(zip(self._backends, (g.backend_name(b).decode() for b in self._backends), strict=True))
        elsewhere: list[str] = []
        copied: set[tuple[int, Tensor]] = set()
        for node, backend in self._backends_of(plan):
            ops = witness.placed.setdefault(where.get(backend, "no device"), {})
            ops[node.op] = ops.get(node.op, 0) + 1
            witness.kernels[node.op] = witness.kernels.get(node.op, 0) + 1
            if backend != self._backends[0]:
                elsewhere.append(f"{node.op} {node.name}".strip())
            for s in node.src:
                if s is None:
                    continue
                buffer = self._buffer(plan.at[s.root])
                if buffer and not g.backend_supports_buft(backend, g.backend_buffer_get_type(buffer)):
                    copied.add((backend, s))
        witness.splits = g.backend_sched_get_n_splits(self._sched)
        witness.copies = len(copied)
        witness.nodes += plan.nodes - len(elsewhere)
        if elsewhere:
            more = f" and {len(elsewhere) - NAMED} more" if len(elsewhere) > NAMED else ""
            note = f"beside {witness.device}: {', '.join(elsewhere[:NAMED])}{more}"
            if note not in witness.notes:
                witness.notes.append(note)


class SplitSession(SchedSession):
    """The same memory without data: splits depend on placement, not on values."""

    def write(self, tensor: Tensor, data: Bytes) -> None:
        """Do nothing."""
