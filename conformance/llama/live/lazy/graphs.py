"""Graphs on lazy devices: computed later, kept, planned and sorted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.lib.layout import InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS

from .backends import Backends
from .buffers import POISON, Buffers
from .native import P
from .run import ASKS, SORTS, Run, Setting
from .timeline import Access, Addresses, Queue

FAILED = -1
"""`GGML_STATUS_FAILED`."""
UID_OFFSET = 88
"""Offset of `uid` in `ggml_cgraph`, if the library has `ggml_graph_next_uid`."""


class Graphs:
    """The functions of `ggml_backend_i` that take a graph, and the graphs that they keep.

    `asks` is True if `graph_optimize` may ask for tensors to stay allocated.
    """

    def __init__(self, library: Library, run: Run, buffers: Buffers, backends: Backends, *, asks: bool) -> None:
        self._library, self._run, self._buffers, self._backends = library, run, buffers, backends
        self._asks = asks
        self._cpu = library.devices.by_name("CPU").start(1)
        self._views = {library.ops[op] for op in (*VIEW_OPS, "NONE")}
        self._has_uid = library.function("ggml_graph_next_uid") is not None
        self._kept: dict[tuple[int, int], list[_Copy]] = {}
        """Kept graphs, by backend and uid."""
        self._plans: dict[int, _Copy] = {}
        """Graph plans by address."""
        self._sorted: set[int] = set()
        """Nodes that `graph_compute` may sort."""
        self._host_writes: list[Access] = []
        """Accesses of devices that write the host's memory."""

    def begin(self, setting: Setting) -> None:
        """Forget the graphs of the last run.

        UnavailableError if this ggml knows no allocation dependencies, and `setting` asks for some.
        """
        if setting.optimize == ASKS and not self._asks:
            raise UnavailableError(f"{self._library.title}: its graph_optimize takes no allocation dependencies")
        for graph in chain(*self._kept.values(), self._plans.values()):
            graph.free()
        self._kept.clear()
        self._plans.clear()
        self._sorted.clear()
        self._host_writes.clear()

    @property
    def plans(self) -> int:
        """Number of graph plans that were not freed."""
        return len(self._plans)

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of the interface by name."""
        return {
            "graph_compute": self._compute, "graph_optimize": self._optimize, "graph_plan_create": self._plan,
            "graph_plan_free": self._plan_free, "graph_plan_compute": self._plan_compute,
        }  # fmt: skip

    def _compute(self, backend: int, cgraph: int) -> int:
        run, queue = self._run, self._backends.queue(backend)
        if run.fails("compute"):
            return FAILED
        uid = self._uid(cgraph)
        keep = bool(run.setting.keeps_graphs and uid)
        graphs = self._kept.get((backend, uid)) if keep else None
        if graphs is None:
            nodes = list(self._nodes(cgraph))
            if self._sorted.issuperset(nodes):
                nodes = self._sort(nodes)
            cut = run.timeline.random.randrange(len(nodes) + 1) if queue.moment == "any" else len(nodes)
            # what is behind a tensor is written before the next node runs
            cuts = {0, cut, len(nodes), *(i for i, n in enumerate(nodes, 1) if self._buffers.behind(n))}
            graphs = [self._copied(nodes[a:b], keep=keep) for a, b in pairwise(sorted(cuts))]
        else:
            run.calls["graph_reused"] += 1
        if keep:
            self._kept[backend, uid] = graphs
        for graph in graphs:
            self._enqueue(queue, "graph_compute", graph)
        return 0

    def _copied(self, nodes: Sequence[int], *, keep: bool) -> _Copy:
        return _Copy(self._library, self._buffers, self._cpu, nodes, keep=keep)

    def _enqueue(self, queue: Queue, call: str, graph: _Copy) -> None:
        run = graph.run
        if self._run.setting.shared:
            host = [a for a in graph.accesses if a.begin < Addresses.FIRST]
            self._host_writes += [a for a in host if a.writes]
            own = self._host_writes  # what a device wrote may change before this graph runs
            reads = [a for a in host if not a.writes and not any(a.begin < w.end and w.begin < a.end for w in own)]
            run = self._backends.watched(queue, call, reads, run)
        self._run.enqueue(queue, call, graph.accesses, run)

    def _plan(self, _backend: int, cgraph: int) -> int:
        graph = self._copied(list(self._nodes(cgraph)), keep=True)
        self._plans[graph.context] = graph
        return graph.context

    def _plan_free(self, _backend: int, plan: int) -> None:
        self._kept.setdefault((0, 0), []).append(self._plans.pop(plan))  # it may be queued

    def _plan_compute(self, backend: int, plan: int) -> int:
        if self._run.fails("compute"):
            return FAILED
        self._enqueue(self._backends.queue(backend), "graph_plan_compute", self._plans[plan])
        return 0

    def _optimize(self, _backend: int, cgraph: int, params: int) -> None:
        array = self._pointers(cgraph)
        if self._run.setting.optimize == SORTS:
            array[:] = self._sort(list(array))
        if self._run.setting.optimize == ASKS and len(array):
            for pointer in array:
                for tensor in (pointer, *filter(None, self._library.struct(pointer).src)):
                    self._keep(params, tensor, array[-1])
            self._sorted.update(array)

    @staticmethod
    def _keep(params: int, tensor: int, until: int) -> None:
        """Ask for a tensor to stay allocated until a node (`ggml_backend_graph_optimize_params`)."""
        add, data = (P * 2).from_address(params)
        ctypes.CFUNCTYPE(None, P, P, P)(add or 0)(data, tensor, until)

    def _sort(self, nodes: Sequence[int]) -> list[int]:
        """Return nodes in an order of the seed, each behind those that it needs."""
        uses = [self._uses(node) for node in nodes]
        behind = [{i for i in range(j) if _collide(uses[i], uses[j])} for j in range(len(nodes))]
        order: list[int] = []
        while len(order) < len(nodes):
            ready = [j for j in range(len(nodes)) if j not in order and behind[j].issubset(order)]
            order.append(self._run.timeline.random.choice(ready))
        return [nodes[j] for j in order]

    def _uses(self, node: int) -> tuple[set[int], set[int]]:
        """Return the tensors that a node reads, and that it writes; a view is also its `view_src`."""
        t = self._library.struct(node)
        sources = set(filter(None, t.src))
        reads = sources | {root for s in sources if (root := self._library.struct(s).view_src)}
        writes_view = t.view_src and t.op not in self._views
        return reads, {node, t.view_src} if writes_view else {node}

    def _uid(self, cgraph: int) -> int:
        """Return `ggml_cgraph.uid`, or 0."""
        return ctypes.c_uint64.from_address(cgraph + UID_OFFSET).value if self._has_uid else 0

    def _nodes(self, cgraph: int) -> Iterator[int]:
        """Yield the nodes that compute something."""
        for pointer in filter(None, self._pointers(cgraph)):
            node = self._library.struct(pointer)
            computes = node.op not in self._views and all(node.ne)
            if computes and (node.flags & FLAG_COMPUTE or not self._library.flags_compute):
                yield pointer

    @staticmethod
    def _pointers(cgraph: int) -> Any:  # noqa: ANN401  # an array of ctypes
        """Return `ggml_cgraph.nodes`: the struct begins in the same way in all known versions."""
        n = ctypes.c_int.from_address(cgraph + 4).value
        return (P * n).from_address(P.from_address(cgraph + 16).value or 0) if n else (P * 0)()


class _Copy:
    """Nodes copied when they are queued, with the accesses of each; computed on the CPU."""

    def __init__(self, library: Library, buffers: Buffers, cpu: int, nodes: Sequence[int], *, keep: bool) -> None:
        self._library, self._buffers, self._cpu, self._keep = library, buffers, cpu, keep
        g = library.ggml
        self._copies: dict[int, int] = {}
        most = 11 * len(nodes)
        size = (most + 1) * library.layout.overhead + g.graph_overhead_custom(len(nodes), False)
        self.context: int = g.init(InitParams(size, None, True))
        self._graph: int = g.new_graph_custom(self.context, len(nodes), False)
        self.accesses: list[Access] = []
        names = {i: name for name, i in library.ops.items()}
        for pointer in nodes:
            node = library.struct(self._copy(pointer))
            op = names.get(library.struct(pointer).op, "a node")
            sources = [s for s in library.struct(pointer).src if s]
            for i, source in enumerate(library.struct(pointer).src):
                node.src[i] = self._copy(source) if source else None
            self.accesses += [self._access(s, op, writes=False) for s in dict.fromkeys(sources)]
            self.accesses.append(self._access(pointer, op, writes=True))
            g.graph_add_node(self._graph, self._copy(pointer))
        self._behind = [
            (buffers.place(n, g.nbytes(n), size, writes=True).real, size)
            for n in nodes[-1:]
            if (size := buffers.behind(n))
        ]
        """Addresses and sizes of what the last node writes behind itself."""

    def _access(self, pointer: int, op: str, *, writes: bool) -> Access:
        size = self._library.ggml.nbytes(pointer) + writes * self._buffers.behind(pointer)
        return self._buffers.place(pointer, 0, size, writes=writes, op=f"{op} ").access

    def _copy(self, pointer: int) -> int:
        """Return the copy of a tensor, at an address that the CPU can use."""
        if pointer not in self._copies:
            library = self._library
            new: int = library.ggml.new_tensor_1d(self.context, library.types["f32"], 1)
            ctypes.memmove(new, pointer, ctypes.sizeof(library.layout.tensor))
            t = library.struct(new)
            t.data = self._buffers.place(pointer, 0, library.ggml.nbytes(pointer), writes=False).real
            t.buffer = t.view_src = t.extra = None
            for i in range(len(t.src)):
                t.src[i] = None
            self._copies[pointer] = new
        return self._copies[pointer]

    def run(self) -> None:
        """Compute the nodes on the CPU, then write behind the last one."""
        status = self._library.ggml.backend_graph_compute(self._cpu, self._graph)
        for real, size in self._behind:
            ctypes.memset(real, POISON, size)
        if not self._keep:
            self.free()
        if status:
            raise ConformanceError(f"the CPU backend returns status {status} for nodes of the lazy device")

    def free(self) -> None:
        """Free the copies."""
        self._library.ggml.free(self.context)


def _collide(a: tuple[set[int], set[int]], b: tuple[set[int], set[int]]) -> bool:
    return bool(a[1] & (b[0] | b[1]) or a[0] & b[1])
