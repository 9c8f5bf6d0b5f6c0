"""Ways `threads-*`: graphs whose numbers of threads differ, in one thread pool or without."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.layout import InitParams
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import Bytes
from conformance.llama.live.ways import Mismatch, bound

POOL, ALONE = "threads-pool", "threads-alone"
WAYS = (POOL, ALONE)
ROUNDS = 40
"""Graphs that are computed."""
MOST = 12
"""Threads of the pool."""
COUNTS = (1, 2, 3, 8, 4, 12, 1, 2)
"""Numbers of threads; the seed draws one for each graph."""
WIDTH, ROWS = 64, 40
LENGTHS = (1, 2)
"""Layers of the two graphs, which take turns."""
_P, _I = ctypes.c_void_p, ctypes.c_int
_PARAMS = 1024
"""Bytes for `struct ggml_threadpool_params`, of 528 in ggml 0.26.0."""
_OPS = {"mul_mat": (_P, _P, _P), "add": (_P, _P, _P), "soft_max": (_P, _P)}


class Graphs:
    """Two graphs in the memory of the CPU."""

    def __init__(self, library: Library, seed: int, owned: ExitStack) -> None:
        self._library, self._g = library, library.ggml
        random = np.random.default_rng(seed)
        ops = {name: bound(library, f"ggml_{name}", _P, *arguments) for name, arguments in _OPS.items()}
        nodes = 4 * max(LENGTHS)
        size = 2 * (2 * nodes * library.layout.overhead + self._g.graph_overhead_custom(nodes, False))
        context = self._g.init(InitParams(size, None, True))
        owned.callback(self._g.free, context)
        f32 = library.types["f32"]
        self.all: list[tuple[int, int]] = []
        """Each graph and its result."""
        leaves = []
        for length in LENGTHS:
            h = self._g.new_tensor_4d(context, f32, WIDTH, ROWS, 1, 1)
            leaves.append(h)
            for _ in range(length):
                w = self._g.new_tensor_4d(context, f32, WIDTH, WIDTH, 1, 1)
                leaves.append(w)
                h = ops["add"](context, ops["soft_max"](context, h), ops["mul_mat"](context, w, h))
            graph = self._g.new_graph_custom(context, nodes, False)
            self._g.build_forward_expand(graph, h)
            self.all.append((graph, h))
        buft = library.devices.by_name("CPU").buffer_type
        owned.callback(self._g.backend_buffer_free, self._g.backend_alloc_ctx_tensors_from_buft(context, buft))
        for leaf in leaves:
            values = random.standard_normal(self._g.nbytes(leaf) // 4).astype(np.float32) / 8
            library.set(leaf, values.view(np.uint8))

    def result(self, backend: int, which: int) -> Bytes:
        """Compute a graph over memory of NaN, and return its result."""
        graph, h = self.all[which]
        size = self._g.nbytes(h)
        self._library.set(h, np.full(size, 0xFF, np.uint8))
        if status := self._g.backend_graph_compute(backend, graph):
            raise Mismatch(f"ggml_backend_graph_compute returned {status}")
        return self._library.get(h, size)


@contextmanager
def _pool(library: Library, backend: int) -> Iterator[None]:
    """Let a backend use a thread pool; UnavailableError if the library has none."""
    registry = library.devices.by_name("CPU").registry
    functions: Mapping[str, tuple[Any, ...]] = {
        "ggml_threadpool_new": (_P, _P), "ggml_threadpool_free": (None, _P),
        "ggml_backend_cpu_set_threadpool": (None, _P, _P),
    }  # fmt: skip
    new, free, use = (registry.function(name, *kinds) for name, kinds in functions.items())
    init = library.function("ggml_threadpool_params_init")
    if init is None or None in (new, free, use):
        raise UnavailableError("this ggml has no functions of thread pools")
    init.restype, init.argtypes = None, (_P, _I)
    params = ctypes.create_string_buffer(_PARAMS)
    init(params, MOST)
    pool = new(ctypes.addressof(params))
    try:
        use(backend, pool)
        yield
        use(backend, None)
    finally:
        free(pool)


def play(library: Library, way: str, seed: int) -> None:
    """Compute two graphs in turn, with numbers of threads that the seed draws."""
    cpu = library.devices.by_name("CPU")
    set_threads = cpu.registry.function("ggml_backend_set_n_threads", None, _P, _I)
    if set_threads is None:
        raise UnavailableError("the CPU has no threads to set")
    random = np.random.default_rng(seed)
    with ExitStack() as owned:
        graphs = Graphs(library, seed, owned)
        backend = cpu.start(1)
        owned.callback(library.ggml.backend_free, backend)
        expected = [graphs.result(backend, k) for k in range(len(LENGTHS))]
        if way == POOL:
            owned.enter_context(_pool(library, backend))
        before = 1
        for i in range(ROUNDS):
            threads, which = int(random.choice(COUNTS)), int(random.integers(len(LENGTHS)))
            set_threads(backend, threads)
            wrong = int((graphs.result(backend, which) != expected[which]).sum())
            if wrong:
                raise Mismatch(
                    f"graph {i} of {LENGTHS[which]} layers with {threads} threads, after one with {before}: {wrong} "
                    "bytes differ from those of one thread"
                )
            before = threads
