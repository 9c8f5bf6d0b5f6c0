"""Lazy devices: ggml's function tables over a `Timeline`.

Its memory is not the host's: tensors have addresses above those of any process. Memory is filled with `POISON` until it
is written, and once it is freed. Nodes run on the library's own CPU backend, so the numbers are right if the order is.
A graph's tensors are copied when it is queued, as a caller may build its next graph in their place.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.lib.layout import InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.tables import DEVICE, REG, Callbacks, Table, interface
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS

from .timeline import Access, Addresses, Memory, Moment, Op, Queue, Race, Stamp, Timeline

_P = ctypes.c_void_p
NAMES = ("LAZY0", "LAZY1", "LAZY2")
GPU = 1
"""`GGML_BACKEND_DEVICE_TYPE_GPU`; in builds before August 2025 too."""
FAILED = -1
"""`GGML_STATUS_FAILED`."""
ALIGNMENT = 64
POISON = 0xFF
"""Byte of memory without a value: NaN in floats."""
TOTAL = 1 << 30
"""Bytes of memory of each device."""
UID_OFFSET = 88
"""Offset of `uid` in `ggml_cgraph`, if the library has `ggml_graph_next_uid`."""
DROP = "drop"
"""The failure of a connection to an RPC server."""
SLOW = 0.05
"""Seconds that a slow event takes."""


SORTS, ASKS = 1, 2
"""`graph_optimize` sorts nodes as the seed says, or `graph_compute` does.

For the latter `graph_optimize` asks for all tensors to stay allocated until the last node.
"""


@dataclass(frozen=True, slots=True)
class Fail:
    """A failure on request."""

    what: str = ""
    """`alloc`, `compute`, `lost`, `memory`, `event`, `init`, `drop`; empty for none."""
    n: int = 1
    """Number of the call that fails, from 1 on, or of the first one (`lost`).

    Bytes for `memory` and `drop`.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """How the devices behave until the next one."""

    moments: Sequence[Moment] = ("last",)
    """Moments of the devices in order; the last one also counts for those that follow."""
    seed: int = 0
    refused: frozenset[str] = frozenset()
    """Ops that no device supports."""
    from_host: bool = False
    """Queue copies from the host's memory too, as Vulkan does."""
    offloads: bool = False
    """Run nodes whose weights are on the CPU (`offload_op`)."""
    keeps_graphs: bool = False
    """Run the last graph of a `ggml_cgraph.uid` again, as CUDA and RPC do."""
    shared: bool = False
    """Read and write the host's memory, too, as devices do that share it."""
    optimize: int = 0
    """0, `SORTS` or `ASKS`."""
    fail: Fail = Fail()


@dataclass(slots=True, eq=False)
class _Device:
    index: int
    name: str
    struct: Any
    buft: Any


class Machine:
    """Lazy devices for a library; not in its registry, so that it does not use them by itself.

    UnavailableError if the library has another interface.
    """

    def __init__(self, library: Library, names: Sequence[str] = NAMES) -> None:
        self.library, self.g = library, library.ggml
        self.interface = interface(library)
        self._lock = threading.RLock()
        self._inside = 0
        """Depth of calls of the interface."""
        self._callbacks = Callbacks()
        self._cpu_device = library.device("CPU")
        self._cpu = library.start(self._cpu_device, 1)
        self._older = library.older_props(self._cpu_device)
        self._views = {library.ops[op] for op in (*VIEW_OPS, "NONE")}
        self._op_names = {i: name for name, i in library.ops.items()}
        self._init_buffer = library.function("ggml_backend_buffer_init")
        self._texts = {text: ctypes.create_string_buffer(text.encode()) for text in (*names, "LAZY", "a lazy device")}
        self._guid = ctypes.create_string_buffer(b"conformance lazy")
        self._streams: dict[int, tuple[Queue, Any]] = {}
        self._events: dict[int, tuple[Op | None, Any]] = {}
        self._buffers: dict[int, Memory] = {}
        self._devices: list[_Device] = []
        self._has_uid = library.function("ggml_graph_next_uid") is not None
        self._has_deps = self.interface.api > 2 or library.function("ggml_op_alloc_size_may_expand") is not None
        self._graphs: dict[tuple[int, int], list[_Graph]] = {}
        """Kept graphs, by backend and uid."""
        self._plans: dict[int, _Graph] = {}
        """Graph plans by address."""
        self._sorted: set[int] = set()
        """Nodes that `graph_compute` may sort."""
        self._host_writes: list[Access] = []
        """Accesses of devices that write the host's memory."""
        self.begin(Setting())
        self._make(names)

    def begin(self, setting: Setting) -> None:
        """Start a new timeline with a setting; backends and buffers of the last one must be freed.

        UnavailableError if this ggml knows no allocation dependencies, and `setting` asks for some.
        """
        if setting.optimize == ASKS and not self._has_deps:
            raise UnavailableError(f"{self.library.title}: its graph_optimize takes no allocation dependencies")
        self.setting = setting
        self.timeline = Timeline(setting.seed)
        self.calls: Counter[str] = Counter()
        """Calls of the interface by name."""
        self.failures = 0
        """Calls that failed on request."""
        for graph in chain(*self._graphs.values(), self._plans.values()):
            graph.free()
        self._graphs.clear()
        self._plans.clear()
        self._sorted.clear()
        self._host_writes.clear()
        self._addresses = Addresses()
        self._bytes = 0
        self._callbacks.errors.clear()

    @property
    def devices(self) -> list[int]:
        """The `ggml_backend_dev_t` of each device."""
        return [ctypes.addressof(d.struct) for d in self._devices]

    @property
    def alive(self) -> int:
        """Number of backends, events, buffers and plans that were not freed."""
        return len(self._streams) + len(self._events) + len(self._buffers) + len(self._plans)

    def register(self) -> None:
        """Add the devices to the library's registry, for the life of the process."""
        self.g.backend_register(ctypes.addressof(self._reg))

    def check(self) -> list[Race]:
        """Return the races so far; raises the first exception of a callback."""
        if self._callbacks.errors:
            raise self._callbacks.errors[0]
        return list(self.timeline.races)

    def _make(self, names: Sequence[str]) -> None:
        self._buffer_table = self._fill(self.interface.buffer, {
            "free_buffer": self._free_buffer, "get_base": lambda b: self._buffers[b].base,
            "memset_tensor": self._memset, "clear": self._clear, "cpy_tensor": self._copy,
            **dict.fromkeys(("set_tensor", "set_tensor_2d"), lambda _, *a: self._now(True, *a)),
            **dict.fromkeys(("get_tensor", "get_tensor_2d"), lambda _, *a: self._now(False, *a)),
        })  # fmt: skip
        self._backend_table = self._fill(self.interface.backend, {
            "get_name": lambda b: self._text(self._streams[b][0].name.partition(".")[0]), "free": self._free,
            **dict.fromkeys(("set_tensor_async", "set_tensor_2d_async"), lambda *a: self._later(True, *a)),
            **dict.fromkeys(("get_tensor_async", "get_tensor_2d_async"), lambda *a: self._later(False, *a)),
            "cpy_tensor_async": self._copy_async, "synchronize": self._synchronize, "graph_compute": self._compute,
            "event_record": self._record, "event_wait": self._wait, "graph_optimize": self._optimize,
            "graph_plan_create": self._plan, "graph_plan_free": self._plan_free,
            "graph_plan_compute": self._plan_compute,
        }, FAILED)  # fmt: skip
        reg_table = self._fill(REG, {
            "get_name": lambda _: self._text("LAZY"), "get_device_count": lambda _: len(self._devices),
            "get_device": lambda _, i: self.devices[i], "get_proc_address": lambda _, __: None,
        })  # fmt: skip
        kind = _struct("ggml_backend_reg", ("api_version", ctypes.c_int), ("iface", type(reg_table)), ("context", _P))
        self._reg = kind(self.interface.api, reg_table, None)
        for i, name in enumerate(names):
            self._devices.append(self._device(i, name))

    def _device(self, index: int, name: str) -> _Device:
        types = self._fill(self.interface.buffer_type, {
            "get_name": lambda _: self._text(name), "alloc_buffer": lambda b, size: self._alloc(index, b, size),
            "get_alignment": lambda _: ALIGNMENT,
        })  # fmt: skip
        kind = _struct("ggml_backend_buffer_type", ("iface", type(types)), ("device", _P), ("context", _P))
        buft = kind(types, None, None)
        table = self._fill(DEVICE, {
            "get_name": lambda _: self._text(name), "get_description": lambda _: self._text("a lazy device"),
            "get_memory": self._memory, "get_type": lambda _: GPU,
            "get_props": lambda _, props: self._props(name, props),
            "init_backend": lambda _, __: self._init(index), "get_buffer_type": lambda _: ctypes.addressof(buft),
            "supports_op": self._supports_op,
            "supports_buft": lambda _, other: other == ctypes.addressof(buft) or self._shares(other),
            "offload_op": lambda _, __: self.setting.offloads,
            "event_new": lambda _: self._event_new(index), "event_free": self._event_free,
            "event_synchronize": self._event_synchronize,
        })  # fmt: skip
        kind = _struct("ggml_backend_device", ("iface", type(table)), ("reg", _P), ("context", _P))
        struct = kind(table, ctypes.addressof(self._reg), None)
        buft.device = ctypes.addressof(struct)
        return _Device(index, name, struct, buft)

    def _fill(self, table: Table, functions: dict[str, Callable[..., Any]], failed: int = 0) -> ctypes.Structure:
        return self._callbacks.fill(table, {n: self._locked(n, f) for n, f in functions.items()}, failed)

    def _locked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401  # as the C function
            if not self._inside:
                self.timeline.switch()
            with self._lock:
                self._inside += 1
                self.calls[name] += 1
                try:
                    return function(*arguments)
                finally:
                    self._inside -= 1

        return call

    def _text(self, text: str) -> int:
        return ctypes.addressof(self._texts[text])

    # failures

    def _fails(self, what: str) -> bool:
        """Return True if this call fails on request."""
        fail = self.setting.fail
        lost = fail.what == "lost" and self.calls["graph_compute"] >= fail.n
        if lost or (fail.what == what and sum(self.calls[name] for name in _COUNTED[what]) == fail.n):
            self.failures += 1
            return True
        return False

    # device

    def _memory(self, _device: int, free: int, total: int) -> None:
        ctypes.c_size_t.from_address(free).value = max(0, self._total - self._bytes)
        ctypes.c_size_t.from_address(total).value = self._total

    @property
    def _total(self) -> int:
        return self.setting.fail.n if self.setting.fail.what == "memory" else TOTAL

    def _props(self, name: str, props: int) -> None:
        """Fill `ggml_backend_dev_props`: asynchronous, with events, without host buffers."""
        where = iter(range(props, props + 64, 8))
        for value in (self._text(name), self._text("a lazy device"), TOTAL - self._bytes, TOTAL):
            _P.from_address(next(where)).value = value
        kind = next(where)
        ctypes.c_int.from_address(kind).value = GPU
        caps = kind + 4 if self._older else kind + 16
        for i, value in enumerate((True, False, False, True)):
            ctypes.c_bool.from_address(caps + i).value = value

    def _init(self, index: int) -> int:
        if self._fails("init"):
            return 0
        moments = self.setting.moments
        queue = self.timeline.queue(self._devices[index].name, moments[min(index, len(moments) - 1)])
        kind = _struct("ggml_backend", ("guid", _P), ("iface", type(self._backend_table)), ("device", _P),
                       ("context", _P))  # fmt: skip
        struct = kind(ctypes.addressof(self._guid), self._backend_table, self.devices[index], None)
        self._streams[ctypes.addressof(struct)] = queue, struct
        return ctypes.addressof(struct)

    def _free(self, backend: int) -> None:
        queue, _ = self._streams.pop(backend)
        self.timeline.finish(queue.last)  # orders nothing: by the contract only `synchronize` waits for the queue

    def _supports_op(self, _device: int, node: int) -> bool:
        op = self._op_names.get(self.library.struct(node).op)
        if op in self.setting.refused:
            return False
        return bool(self.g.backend_dev_supports_op(self._cpu_device, node))

    def _shares(self, buft: int) -> bool:
        return self.setting.shared and bool(self.g.backend_buft_is_host(buft))

    # buffers

    def _alloc(self, index: int, buft: int, size: int) -> int:
        if self._fails("alloc"):
            return 0
        if self._bytes + size > self._total:
            self.failures += 1
            return 0
        raw = np.full(size + ALIGNMENT, POISON, np.uint8)
        skip = -raw.__array_interface__["data"][0] % ALIGNMENT
        memory = self._addresses.add(self._devices[index].name, raw[skip : skip + size].data)
        self._init_buffer.restype = _P
        self._init_buffer.argtypes = (_P, type(self._buffer_table), _P, ctypes.c_size_t)
        buffer: int = self._init_buffer(buft, self._buffer_table, None, size)
        self._buffers[buffer] = memory
        self._bytes += size
        return buffer

    def _free_buffer(self, buffer: int) -> None:
        memory = self._buffers.pop(buffer)
        end = memory.base + memory.data.nbytes
        whole = Access(memory.base, end, writes=True, what=f"frees {memory.name}")
        self.timeline.at_host("free_buffer", (whole,))
        memory.freed = self.timeline.now("free_buffer", whole)
        memory.data[:] = bytes([POISON]) * memory.data.nbytes
        self._bytes -= memory.data.nbytes

    def _clear(self, buffer: int, value: int) -> None:
        memory = self._buffers[buffer]
        whole = Access(memory.base, memory.base + memory.data.nbytes, writes=True, what=f"writes {memory.name}")
        self.timeline.at_host("clear", (whole,))
        memory.data[:] = bytes([value]) * memory.data.nbytes

    def _memset(self, _buffer: int, tensor: int, value: int, offset: int, size: int) -> None:
        place = self._place(tensor, offset, size, writes=True)
        self.timeline.at_host("memset_tensor", (place.access,))
        ctypes.memset(place.real, value, size)

    def _now(
        self, sets: bool, tensor: int, data: int, offset: int, size: int, n: int = 1, step: int = 0, by: int = 0
    ) -> None:
        """Transfer `n` blocks between a tensor and the host, which waits."""
        for i in range(n):
            place = self._place(tensor, offset + i * step, size, writes=sets)
            host = _host(data + i * by, size, writes=not sets)
            self.timeline.at_host("set_tensor" if sets else "get_tensor", (place.access, host))
            _move(place.real, host.begin, size) if sets else _move(host.begin, place.real, size)

    def _copy(self, _buffer: int, source: int, target: int) -> bool:
        size = self.g.nbytes(source)
        try:
            a, b = self._place(source, 0, size, writes=False), self._place(target, 0, size, writes=True)
        except ConformanceError:
            return False  # of another kind of device
        self.timeline.at_host("cpy_tensor", (a.access, b.access))
        _move(b.real, a.real, size)
        return True

    # queues

    def _later(
        self,
        sets: bool,
        backend: int,
        tensor: int,
        data: int,
        offset: int,
        size: int,
        n: int = 1,
        step: int = 0,
        by: int = 0,
    ) -> None:
        """Queue the transfer of `n` blocks."""
        queue, call = self._streams[backend][0], "set_tensor_async" if sets else "get_tensor_async"
        for i in range(n):
            place = self._place(tensor, offset + i * step, size, writes=sets)
            host = _host(data + i * by, size, writes=not sets)
            if sets:
                run = self._upload(queue, call, place, host)
            else:
                ctypes.memset(host.begin, POISON, size)  # no value before the host has waited
                run = partial(_move, host.begin, place.real, size)
            self._queue(queue, call, (place.access, host), run)

    def _upload(self, queue: Queue, call: str, place: _Place, reads: Access) -> Callable[[], None]:
        """Return the copy of host memory, which must not change before it."""
        copy = partial(_move, place.real, reads.begin, reads.end - reads.begin)
        return self._watched(queue, call, (reads,), copy)

    def _watched(self, queue: Queue, call: str, reads: Sequence[Access], run: Callable[[], None]) -> Callable[[], None]:
        """Return an operation that first checks that host memory did not change."""
        before = [(Stamp(queue.name, queue.clock.get(queue.name, 0) + 1, call, r), _bytes(r)) for r in reads]

        def check() -> None:
            for stamp, data in before:
                if _bytes(stamp.access) != data:
                    changed = self.timeline.now("the caller", replace(stamp.access, writes=True))
                    self.timeline.report(Race(stamp, changed, kind="changed"))
            run()

        return check

    def _copy_async(self, from_: int, to: int, source: int, target: int) -> bool:
        """Copy on the source's queue and let the other wait, as `ggml-backend.h` says."""
        size = self.g.nbytes(source)
        if to not in self._streams:
            return False
        if from_ not in self._streams:
            return self._copy_from_host(self._streams[to][0], source, target, size)
        try:
            a, b = self._place(source, 0, size, writes=False), self._place(target, 0, size, writes=True)
        except ConformanceError:
            return False  # of another kind of device
        run = partial(_move, b.real, a.real, size)
        op = self._queue(self._streams[from_][0], "cpy_tensor_async", (a.access, b.access), run)
        if from_ != to:
            self._queue(self._streams[to][0], "cpy_tensor_async", after=op)
        return True

    def _copy_from_host(self, queue: Queue, source: int, target: int, size: int) -> bool:
        t = self.library.struct(source)
        buffer = t.buffer or self.library.struct(t.view_src).buffer
        if not (self.setting.from_host and self.g.backend_buft_is_host(self.g.backend_buffer_get_type(buffer))):
            return False
        place, reads = self._place(target, 0, size, writes=True), _host(t.data, size, writes=False)
        call = "cpy_tensor_async"
        self._queue(queue, call, (place.access, reads), self._upload(queue, call, place, reads))
        return True

    def _synchronize(self, backend: int) -> None:
        self.timeline.wait(self._streams[backend][0].last)

    def _compute(self, backend: int, cgraph: int) -> int:
        if self._fails("compute"):
            return FAILED
        queue = self._streams[backend][0]
        uid = self._uid(cgraph)
        keep = bool(self.setting.keeps_graphs and uid)
        graphs = self._graphs.get((backend, uid)) if keep else None
        if graphs is None:
            nodes = list(self._nodes(cgraph))
            if self._sorted.issuperset(nodes):
                nodes = self._sort(nodes)
            cut = self.timeline.random.randrange(len(nodes) + 1) if queue.moment == "any" else len(nodes)
            graphs = [_Graph(self, part, keep=keep) for part in (nodes[:cut], nodes[cut:]) if part]
        else:
            self.calls["graph_reused"] += 1
        if keep:
            self._graphs[backend, uid] = graphs
        for graph in graphs:
            self._queue_graph(queue, "graph_compute", graph)
        return 0

    def _queue_graph(self, queue: Queue, call: str, graph: _Graph) -> None:
        run = graph.run
        if self.setting.shared:
            host = [a for a in graph.accesses if a.begin < Addresses.FIRST]
            self._host_writes += [a for a in host if a.writes]
            own = self._host_writes  # what a device wrote may change before this graph runs
            reads = [a for a in host if not a.writes and not any(a.begin < w.end and w.begin < a.end for w in own)]
            run = self._watched(queue, call, reads, run)
        self._queue(queue, call, graph.accesses, run)

    # plans and the order of nodes

    def _plan(self, _backend: int, cgraph: int) -> int:
        graph = _Graph(self, list(self._nodes(cgraph)), keep=True)
        self._plans[graph.context] = graph
        return graph.context

    def _plan_free(self, _backend: int, plan: int) -> None:
        self._graphs.setdefault((0, 0), []).append(self._plans.pop(plan))  # it may be queued

    def _plan_compute(self, backend: int, plan: int) -> int:
        if self._fails("compute"):
            return FAILED
        self._queue_graph(self._streams[backend][0], "graph_plan_compute", self._plans[plan])
        return 0

    def _optimize(self, _backend: int, cgraph: int, params: int) -> None:
        array = self._pointers(cgraph)
        if self.setting.optimize == SORTS:
            array[:] = self._sort(list(array))
        if self.setting.optimize == ASKS and len(array):
            for pointer in array:
                for tensor in (pointer, *filter(None, self.library.struct(pointer).src)):
                    self._keep(params, tensor, array[-1])
            self._sorted.update(array)

    @staticmethod
    def _keep(params: int, tensor: int, until: int) -> None:
        """Ask for a tensor to stay allocated until a node (`ggml_backend_graph_optimize_params`)."""
        add, data = (_P * 2).from_address(params)
        ctypes.CFUNCTYPE(None, _P, _P, _P)(add or 0)(data, tensor, until)

    def _sort(self, nodes: Sequence[int]) -> list[int]:
        """Return nodes in an order of the seed, each behind those that it needs."""
        uses = [self._uses(node) for node in nodes]
        behind = [{i for i in range(j) if _collide(uses[i], uses[j])} for j in range(len(nodes))]
        order: list[int] = []
        while len(order) < len(nodes):
            ready = [j for j in range(len(nodes)) if j not in order and behind[j].issubset(order)]
            order.append(self.timeline.random.choice(ready))
        return [nodes[j] for j in order]

    def _uses(self, node: int) -> tuple[set[int], set[int]]:
        """Return the tensors that a node reads, and that it writes; a view is also its `view_src`."""
        t = self.library.struct(node)
        sources = set(filter(None, t.src))
        reads = sources | {root for s in sources if (root := self.library.struct(s).view_src)}
        writes_view = t.view_src and t.op not in self._views
        return reads, {node, t.view_src} if writes_view else {node}

    def _uid(self, cgraph: int) -> int:
        """Return `ggml_cgraph.uid`, or 0."""
        return ctypes.c_uint64.from_address(cgraph + UID_OFFSET).value if self._has_uid else 0

    def _nodes(self, cgraph: int) -> Iterator[int]:
        """Yield the nodes that compute something; `ggml_cgraph` begins alike in all known versions."""
        for pointer in filter(None, self._pointers(cgraph)):
            node = self.library.struct(pointer)
            computes = node.op not in self._views and all(node.ne)
            if computes and (node.flags & FLAG_COMPUTE or not self.library.flags_compute):
                yield pointer

    @staticmethod
    def _pointers(cgraph: int) -> Any:  # noqa: ANN401  # an array of ctypes
        n = ctypes.c_int.from_address(cgraph + 4).value
        return (_P * n).from_address(_P.from_address(cgraph + 16).value or 0) if n else (_P * 0)()

    def _queue(
        self,
        queue: Queue,
        call: str,
        accesses: Sequence[Access] = (),
        run: Callable[[], None] | None = None,
        after: Op | None = None,
    ) -> Op:
        if self.setting.fail.what == "lost" and self._fails("lost"):
            run = None
        return self.timeline.enqueue(queue, call, accesses, run, after)

    # events

    def _event_new(self, index: int) -> int:
        kind = _struct("ggml_backend_event", ("device", _P), ("context", _P))
        struct = kind(self.devices[index], None)
        self._events[ctypes.addressof(struct)] = None, struct
        return ctypes.addressof(struct)

    def _event_free(self, _device: int, event: int) -> None:
        del self._events[event]

    def _record(self, backend: int, event: int) -> None:
        op = self._queue(self._streams[backend][0], "event_record")
        self._events[event] = op, self._events[event][1]

    def _wait(self, backend: int, event: int) -> None:
        self._queue(self._streams[backend][0], "event_wait", after=self._events[event][0])

    def _event_synchronize(self, _device: int, event: int) -> None:
        if self.setting.fail.what == "event":
            time.sleep(SLOW)
        self.timeline.wait(self._events[event][0])

    # memory

    def _place(self, tensor: int, offset: int, size: int, *, writes: bool, op: str = "") -> _Place:
        """Return bytes of a tensor; reports a race if their buffer was freed."""
        t = self.library.struct(tensor)
        begin = (t.data or 0) + offset
        name = t.name.decode(errors="replace") or "a tensor"
        if self.setting.shared and begin < Addresses.FIRST:
            what = f"{op}{'writes' if writes else 'reads'} {name} (the host's)"
            return _Place(Access(begin, begin + size, writes, what), begin)
        memory = self._addresses.find(begin, size)
        inside = f"{memory.name}+{begin - memory.base}"
        access = Access(begin, begin + size, writes, f"{op}{'writes' if writes else 'reads'} {name} ({inside})")
        if memory.freed is not None:
            self.timeline.report(Race(memory.freed, self.timeline.now("a later call", access), kind="freed"))
        return _Place(access, _address(memory) + begin - memory.base)


_COUNTED = {
    "alloc": ("alloc_buffer",), "compute": ("graph_compute", "graph_plan_compute"), "init": ("init_backend",),
    "lost": ("graph_compute",),
}  # fmt: skip
"""Failure -> the functions whose calls it counts."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An access to a device's memory, and the host's address of it."""

    access: Access
    real: int


class _Graph:
    """Nodes copied when they are queued, with the accesses of each."""

    def __init__(self, machine: Machine, nodes: Sequence[int], *, keep: bool) -> None:
        self._machine, self._keep = machine, keep
        g, library = machine.g, machine.library
        self._copies: dict[int, int] = {}
        most = 11 * len(nodes)
        size = (most + 1) * library.layout.overhead + g.graph_overhead_custom(len(nodes), False)
        self.context: int = g.init(InitParams(size, None, True))
        self._graph: int = g.new_graph_custom(self.context, len(nodes), False)
        self.accesses: list[Access] = []
        for pointer in nodes:
            node = library.struct(self._copy(pointer))
            op = machine._op_names.get(library.struct(pointer).op, "a node")  # noqa: SLF001  # one module
            sources = [s for s in library.struct(pointer).src if s]
            for i, source in enumerate(library.struct(pointer).src):
                node.src[i] = self._copy(source) if source else None
            self.accesses += [self._access(s, op, writes=False) for s in dict.fromkeys(sources)]
            self.accesses.append(self._access(pointer, op, writes=True))
            g.graph_add_node(self._graph, self._copy(pointer))

    def _access(self, pointer: int, op: str, *, writes: bool) -> Access:
        size = self._machine.g.nbytes(pointer)
        return self._machine._place(pointer, 0, size, writes=writes, op=f"{op} ").access  # noqa: SLF001  # one module

    def _copy(self, pointer: int) -> int:
        """Return the copy of a tensor, at an address that the CPU can use."""
        if pointer not in self._copies:
            machine, library = self._machine, self._machine.library
            new: int = machine.g.new_tensor_1d(self.context, library.types["f32"], 1)
            ctypes.memmove(new, pointer, ctypes.sizeof(library.layout.tensor))
            t = library.struct(new)
            size = machine.g.nbytes(pointer)
            t.data = machine._place(pointer, 0, size, writes=False).real  # noqa: SLF001  # one module
            t.buffer = t.view_src = t.extra = None
            for i in range(len(t.src)):
                t.src[i] = None
            self._copies[pointer] = new
        return self._copies[pointer]

    def run(self) -> None:
        """Compute the nodes on the CPU."""
        machine = self._machine
        status = machine.g.backend_graph_compute(machine._cpu, self._graph)  # noqa: SLF001  # one module
        if not self._keep:
            self.free()
        if status:
            raise ConformanceError(f"the CPU backend returns status {status} for nodes of the lazy device")

    def free(self) -> None:
        """Free the copies."""
        self._machine.g.free(self.context)


def _collide(a: tuple[set[int], set[int]], b: tuple[set[int], set[int]]) -> bool:
    return bool(a[1] & (b[0] | b[1]) or a[0] & b[1])


def _struct(name: str, *fields: tuple[str, Any]) -> Any:  # noqa: ANN401  # a ctypes structure
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _host(address: int, size: int, *, writes: bool) -> Access:
    return Access(address, address + size, writes, f"{'writes' if writes else 'reads'} {size} bytes of the host")


def _bytes(access: Access) -> bytes:
    return ctypes.string_at(access.begin, access.end - access.begin)


def _move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def _address(memory: Memory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.data))
