"""The real `ggml_backend_sched` over devices that are copies of its CPU device with our answers for `supports_op`.

A device, a backend and a buffer type are plain structs of function pointers. Copies of the CPU's, in which two pointers
are callbacks of ours, are as many devices as one likes, and `ggml_backend_sched_split_graph` only ever asks these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from backends.ggml.context import Store
from conformance.ggml.graph import Graph
from conformance.ggml.lib.context import Context
from conformance.ggml.lib.layout import CTensor
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import Tensor
from conformance.run.scheduler.assign import Home, Memory

_P = ctypes.c_void_p
_WORD = ctypes.sizeof(_P)
_BUFFER_TYPE_WORDS = 10
_DEVICE_WORDS, _SUPPORTS_OP, _SUPPORTS_BUFT, _OFFLOAD_OP = 17, 9, 10, 11
_BACKEND_WORDS, _BACKEND_DEVICE = 19, 17
"""`ggml-backend-impl.h`: how many words each struct has, and where what is replaced stands in it."""

_QUESTION = ctypes.CFUNCTYPE(ctypes.c_bool, _P, _P)
USAGE_WEIGHTS = 1


@dataclass(frozen=True, slots=True)
class Found:
    """What the real scheduler made of a graph."""

    n_splits: int
    device: dict[Tensor, int]
    """Node -> device."""
    copies: set[tuple[Tensor, int]]
    """Tensor that was copied, and the device it was copied to."""


class RealScheduler:
    """As many devices as `memory` has, made of the installed library's CPU."""

    def __init__(self, memory: Memory) -> None:
        self.library = library = Library("")
        self._split_graph = _split_graph(library)
        self._real = library.devices.by_name("CPU")
        self._backend = self._real.start()
        n = range(len(memory.reads))
        groups = [next(a for a in n if memory.same[b][a]) for b in n]
        bufts = {a: _copy(self._real.buffer_type, _BUFFER_TYPE_WORDS) for a in groups}
        self._bufts = [ctypes.addressof(bufts[a]) for a in groups]
        self._supports: Callable[[int, int], bool] = lambda _b, _t: False
        self._kept: list[object] = [bufts]
        self._backends: list[int] = []
        for b in n:
            reads = {self._bufts[a] for a in n if memory.reads[b][a]}
            device = _copy(self._real.handle, _DEVICE_WORDS)
            op = _QUESTION(lambda _d, t, b=b: self._supports(b, t))
            buft = _QUESTION(lambda _d, t, reads=reads: t in reads)
            device[_SUPPORTS_OP] = ctypes.cast(op, _P).value
            device[_SUPPORTS_BUFT] = ctypes.cast(buft, _P).value
            device[_OFFLOAD_OP] = None
            backend = _copy(self._backend, _BACKEND_WORDS)
            backend[_BACKEND_DEVICE] = ctypes.addressof(device)
            self._kept += [device, op, buft, backend]
            self._backends.append(ctypes.addressof(backend))

    def split(self, graph: Graph, supports: Callable[[int, Tensor], bool], home: Home) -> Found:  # noqa: C901  # follows ggml function by function
        """Let the real scheduler share out `graph`.

        Args:
            graph: rebuilt in the library.
            supports: asked about nodes only.
            home: persistent tensors are allocated in the buffer type of that device.
        """
        g, n = self.library.ggml, len(self._backends)
        tensors = graph.tensors()
        stores = []
        for b in range(n):
            for weights in (True, False):
                held = [t for t in tensors if home.device_of.get(t) == b and (t in home.weights) is weights]
                if held:
                    stores.append(Store(self.library, held, self._bufts[b], USAGE_WEIGHTS if weights else 0))
        at = {t: p for s in stores for t, p in s.at.items()}
        size = 2 * len(tensors) + 16
        context = Context(self.library, len(tensors), size, 1)
        for t in tensors:
            if t not in at:
                at[t] = context.add(t, at)
        here = {p: t for t, p in at.items()}
        self._supports = lambda b, p: here[p].op == "NONE" or supports(b, here[p])
        cgraph = g.new_graph_custom(context.pointer, size, False)
        for node in graph:
            g.build_forward_expand(cgraph, at[node])
        for t in tensors:
            if t not in home.device_of:
                self.library.struct(at[t]).flags = t.flags
        sched = g.backend_sched_new((_P * n)(*self._backends), (_P * n)(*self._bufts), n, size, False, False)
        try:
            self._split_graph(sched, cgraph)
            device = {}
            for node in graph:
                backend = g.backend_sched_get_tensor_backend(sched, at[node])
                device[node] = self._backends.index(backend)
            return Found(g.backend_sched_get_n_splits(sched), device, self._copies(graph, at, here, device))
        finally:
            g.backend_sched_free(sched)
            context.free()
            for store in stores:
                store.free()

    def _copies(
        self, graph: Graph, at: dict[Tensor, int], here: dict[int, Tensor], device: dict[Tensor, int]
    ) -> set[tuple[Tensor, int]]:
        """A src that is none of ours is the scheduler's copy of the one that stood there."""
        found = set()
        for node in graph:
            now = CTensor.from_address(at[node]).src
            for i, s in enumerate(node.src):
                if s is not None and now[i] not in here:
                    found.add((s, device[node]))
        return found

    def close(self) -> None:
        """Free the real device's backend."""
        self.library.ggml.backend_free(self._backend)
        self.library.close()


def _copy(address: int, words: int) -> ctypes.Array[ctypes.c_void_p]:
    return (_P * words).from_buffer_copy((_P * words).from_address(address))


def _split_graph(library: Library) -> Callable[[int, int], None]:
    """`ggml_backend_sched_split_graph`, which the binding does not use."""
    function = ctypes.CDLL(str(library.path)).ggml_backend_sched_split_graph
    function.restype, function.argtypes = None, (_P, _P)
    return function
