"""Programs that call ggml as llama.cpp does, on lazy devices or on the CPU alone.

Each returns the values that a caller sees. They must be those of the same program on the CPU alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.ggml.lib.layout import USAGE_WEIGHTS, InitParams, Signatures
from conformance.ggml.lib.library import Library

_P, _I64, _Z, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
OPS: Signatures = {
    "add": (_P, (_P, _P, _P)), "mul_mat": (_P, (_P, _P, _P)), "cpy": (_P, (_P, _P, _P)), "cont": (_P, (_P, _P)),
    "transpose": (_P, (_P, _P)), "rms_norm": (_P, (_P, _P, _F)), "scale": (_P, (_P, _P, _F)),
    "view_2d": (_P, (_P, _P, _I64, _I64, _Z, _Z)),
}  # fmt: skip
WIDTH, CELLS, LAYERS = 32, 64, 4
"""Elements of a token, tokens that a cache has room for, layers."""
NODES = 256
"""Maximum nodes of a graph."""
DEEPER = 4
"""Layers of a deeper graph, for each layer of a decoder."""
F32 = NDArray[np.float32]
ROW = 4 * WIDTH
RPC = "rpc"
"""The program `sched` on the device of an RPC server."""


Together = Callable[[Sequence[Callable[[], list[F32]]]], list[list[F32]]]


def in_turn(functions: Sequence[Callable[[], list[F32]]]) -> list[list[F32]]:
    """Call functions one after the other and return their results."""
    return [function() for function in functions]


class ReportedError(ConformanceError):
    """ggml reported a failure, as it must if a device fails."""


class BrokenError(ConformanceError):
    """A function of ggml did not do what its interface says."""


@dataclass
class Caller:
    """A program's backends, and what it allocated."""

    library: Library
    backends: Sequence[int]
    """`ggml_backend_t` in order of priority; the CPU is last."""
    seed: int
    together: Together = in_turn
    """Calls functions in threads; on the CPU alone one after the other."""
    owned: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.g = self.library.ggml
        self.random = np.random.default_rng(self.seed)
        self.ops: dict[str, Callable[..., int]] = {}
        for name, (result, arguments) in OPS.items():
            function = self.library.function(f"ggml_{name}")
            function.restype, function.argtypes = result, arguments
            self.ops[name] = function

    def another(self, seed: int) -> Caller:
        """Return another caller with new backends on the same devices, freed with this one's."""
        devices = [self.call("backend_get_device")(b) for b in self.backends]
        threads = [None] * (len(devices) - 1) + [1]
        backends = [self.library.devices.at(d).start(n) for d, n in zip(devices, threads, strict=True)]
        for backend in backends:
            self.owned.callback(self.g.backend_free, backend)
        other = replace(self, backends=backends, seed=seed, owned=ExitStack())
        self.owned.callback(other.owned.close)
        return other

    @contextmanager
    def context(self, tensors: int, *, graph: bool = False) -> Iterator[int]:
        """Yield a `ggml_context` for tensors, and for a graph of `NODES`."""
        size = (tensors + 1) * self.library.layout.overhead + graph * self.g.graph_overhead_custom(NODES, False)
        context = self.g.init(InitParams(size, None, True))
        try:
            yield context
        finally:
            self.g.free(context)

    def tensors(self, backend: int, *shapes: tuple[int, int], usage: int = 0) -> list[int]:
        """Return F32 tensors in a buffer of a backend's default type, freed with the caller."""
        context = self.owned.enter_context(self.context(len(shapes)))
        made = [self.g.new_tensor_4d(context, self.library.types["f32"], *ne, 1, 1) for ne in shapes]
        buft = self.g.backend_dev_buffer_type(self.call("backend_get_device")(backend))
        buffer = self.g.backend_alloc_ctx_tensors_from_buft(context, buft)
        if not buffer:
            raise ReportedError("ggml_backend_alloc_ctx_tensors_from_buft returned NULL")
        self.owned.callback(self.g.backend_buffer_free, buffer)
        self.g.backend_buffer_set_usage(buffer, usage)
        return made

    def call(self, name: str) -> Callable[..., Any]:
        """Return `ggml_NAME`; UnavailableError if this library lacks it."""
        function: Callable[..., Any] | None = getattr(self.g, name)
        if function is None:
            raise UnavailableError(f"this ggml exports no ggml_{name}")
        return function

    def values(self, *shape: int) -> F32:
        """Return random values."""
        return self.random.standard_normal(shape, np.float32)

    def set(self, tensor: int, data: F32) -> None:
        """Write a tensor; the caller may change `data` afterwards."""
        self.g.backend_tensor_set(tensor, address(data), 0, data.nbytes)

    def get(self, tensor: int, *shape: int) -> F32:
        """Read a tensor."""
        data = np.empty(shape, np.float32)
        self.g.backend_tensor_get(tensor, address(data), 0, data.nbytes)
        return data


def address(data: F32) -> int:
    """Return the address of an array's values."""
    return int(data.__array_interface__["data"][0])


def _must(status: int, function: str) -> None:
    if status:
        raise ReportedError(f"{function} returned {status}")


# sched: a decoder in batches over ggml_backend_sched


class Decoder:
    """Layers with a cache each, on the devices in turn, maybe with another's `weights`."""

    def __init__(self, caller: Caller, *, side: bool = False, weights: Sequence[int] = ()) -> None:
        self.caller = caller
        self.side = caller.tensors(caller.backends[-1], (WIDTH, 1))[0] if side else None
        """A row that each layer normalises and adds, in a split of the CPU without inputs."""
        if self.side:
            caller.set(self.side, caller.values(WIDTH))
        owners = caller.backends[:-1] or caller.backends
        self.weights = list(weights)
        self.caches: list[int] = []
        for layer in range(LAYERS):
            owner = owners[layer * len(owners) // LAYERS]
            if not weights:
                self.weights += caller.tensors(owner, (WIDTH, WIDTH), usage=USAGE_WEIGHTS)
                caller.set(self.weights[-1], caller.values(WIDTH, WIDTH) / np.float32(8))
            self.caches += caller.tensors(owner, (WIDTH, CELLS))
            caller.set(self.caches[-1], np.zeros((CELLS, WIDTH), np.float32))

    def build(self, context: int, at: int, n: int, times: int = 1) -> tuple[int, int, int]:
        """Return the graph of `n` tokens from cell `at` on, its input and its output.

        `ends` then has the last node of each layer. `times`: so often the layers follow each other.
        """
        self.ends: list[int] = []
        g, op = self.caller.g, self.caller.ops
        graph = g.new_graph_custom(context, NODES, False)
        x = h = g.new_tensor_4d(context, self.caller.library.types["f32"], WIDTH, n, 1, 1)
        g.set_input(x)
        for weight, cache in times * list(zip(self.weights, self.caches, strict=True)):
            h = op["mul_mat"](context, weight, op["rms_norm"](context, h, 1e-5))
            cells = op["view_2d"](context, cache, WIDTH, n, ROW, at * ROW)
            g.build_forward_expand(graph, op["cpy"](context, h, cells))
            seen = op["view_2d"](context, cache, WIDTH, at + n, ROW, 0)
            scores = op["scale"](context, op["mul_mat"](context, seen, h), 1 / WIDTH)
            mixed = op["mul_mat"](context, op["cont"](context, op["transpose"](context, seen)), scores)
            h = op["add"](context, h, mixed)
            if self.side:
                g.build_forward_expand(graph, h)
                h = op["add"](context, h, op["rms_norm"](context, self.side, 1e-5))
            self.ends.append(h)
        g.set_output(h)
        g.build_forward_expand(graph, h)
        return graph, x, h


def sched(caller: Caller, params: Mapping[str, Any]) -> Iterator[F32]:
    """Decode batches without waiting between them; yield their outputs, then the caches.

    `n`: tokens of each batch; `copies=4`: as llama.cpp over several devices; `reserve`: tokens of a graph that is
    reserved first; `pin=1`: see `Scheduler`; `deep=1`: see `Scheduler.reserve_deeper`; `again=1`: a batch of the same
    size computes the same graph again; `side=1`: see `Decoder`; `threads`: so many decoders share the weights, in a
    thread each.
    """
    first = Decoder(caller, side=params["side"])
    if params["threads"] == 1:
        yield from _decode(first, params)
        return

    def decode(own: Caller) -> list[F32]:
        return list(_decode(Decoder(own, side=params["side"], weights=first.weights), params))

    callers = [caller.another(caller.seed + 1 + i) for i in range(params["threads"])]
    for outputs in caller.together([partial(decode, own) for own in callers]):
        yield from outputs


class Scheduler:
    """A `ggml_backend_sched` over backends; with `pin` each layer ends on the last of them."""

    def __init__(self, decoder: Decoder, *, copies: int, pin: int) -> None:
        self._decoder, self._pin = decoder, pin
        self._caller, self._g = caller, g = decoder.caller, decoder.caller.g
        backends = (_P * len(caller.backends))(*caller.backends)
        self.pointer: int = g.backend_sched_new(backends, None, len(backends), NODES, copies > 1, False)
        caller.owned.callback(g.backend_sched_free, self.pointer)
        caller.owned.callback(self.wait)  # before anything is freed
        self._reserved: list[int] = []
        """Bytes for each backend that suffice for every graph; empty if unknown."""

    def wait(self) -> None:
        """Wait for all backends."""
        self._caller.call("backend_sched_synchronize")(self.pointer)

    def reserve(self, graph: int, *, largest: bool) -> None:
        """Reserve memory for a graph, `largest` if none is larger; ReportedError if there is none."""
        self._choose()
        if not self._g.backend_sched_reserve(self.pointer, graph):
            raise ReportedError("ggml_backend_sched_reserve returned false")
        self._reserved = self._sizes() if largest else []

    def reserve_deeper(self, n: int) -> None:
        """Reserve a graph, and one of `DEEPER` times its layers; BrokenError if that takes more.

        Only one layer's tensors are alive at a time, so what a further layer adds was not freed.
        """
        sizes = []
        for times in (1, DEEPER):
            with self._caller.context(NODES, graph=True) as context:
                self.reserve(self._decoder.build(context, CELLS - n, n, times)[0], largest=False)
            sizes.append(self._sizes())
        if sizes[0] != sizes[1]:
            raise BrokenError(
                f"ggml_backend_sched_reserve: {sizes[0]} bytes for {LAYERS} layers, {sizes[1]} for {DEEPER * LAYERS}: "
                "no more expected, since a layer's tensors are freed before the next"
            )

    def alloc(self, graph: int) -> None:
        """Allocate a graph; BrokenError if more memory is taken than for the largest one."""
        self._g.backend_sched_reset(self.pointer)
        self._choose()
        if not self._g.backend_sched_alloc_graph(self.pointer, graph):
            raise ReportedError("ggml_backend_sched_alloc_graph returned false")
        if self._reserved and self._sizes() != self._reserved:
            raise BrokenError(
                f"ggml_backend_sched_reserve: {self._reserved} bytes reserved for the largest graph, {self._sizes()} "
                "taken by another: no allocation expected"
            )

    def owner(self, node: int) -> int:
        """Return the backend of a node; BrokenError if it is not the chosen one."""
        found: int = self._g.backend_sched_get_tensor_backend(self.pointer, node)
        if self._pin and node in self._decoder.ends and found != self._caller.backends[-1]:
            raise BrokenError("ggml_backend_sched_set_tensor_backend: a layer's end is not on the CPU")
        return found

    def _choose(self) -> None:
        for node in self._decoder.ends if self._pin else ():
            choose = self._caller.call("backend_sched_set_tensor_backend")
            choose(self.pointer, node, self._caller.backends[-1])

    def _sizes(self) -> list[int]:
        return [self._g.backend_sched_get_buffer_size(self.pointer, b) for b in self._caller.backends]


def _decode(decoder: Decoder, params: Mapping[str, Any]) -> Iterator[F32]:
    caller = decoder.caller
    scheduler = Scheduler(decoder, copies=params["copies"], pin=params["pin"])
    if params["deep"]:
        scheduler.reserve_deeper(max(params["n"]))
    if n := params["reserve"]:
        with caller.context(NODES, graph=True) as context:
            scheduler.reserve(decoder.build(context, CELLS - n, n)[0], largest=n >= max(params["n"]))
    outputs: list[F32] = []
    at = 0
    with ExitStack() as stack:
        for n in params["n"]:
            stack.close()
            context = stack.enter_context(caller.context(NODES, graph=True))
            graph, x, h = decoder.build(context, at, n)
            scheduler.alloc(graph)
            for turn in range(1 + params["again"]):
                if turn:
                    scheduler.wait()  # as llama.cpp before it reuses a graph
                caller.set(x, caller.values(n, WIDTH))
                compute = caller.call("backend_sched_graph_compute_async")
                _must(compute(scheduler.pointer, graph), "ggml_backend_sched_graph_compute_async")
                outputs.append(np.zeros((n, WIDTH), np.float32))
                get = caller.call("backend_tensor_get_async")
                get(scheduler.owner(h), h, address(outputs[-1]), 0, outputs[-1].nbytes)
            at += n
        scheduler.wait()
    yield from outputs
    yield from (caller.get(cache, CELLS, WIDTH) for cache in decoder.caches)


# streams: two queues of a device and one of another, called directly


class Streams:
    """Tensors and events of the program `streams`, whose steps are `STEPS`."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self.g = caller, caller.g
        new = caller.call("backend_event_new")
        self.first, self.second, self.other = caller.backends[:3]
        self.x, self.y, self.v = caller.tensors(self.first, *3 * [(WIDTH, 4)])
        self.z, self.u = caller.tensors(self.other, *2 * [(WIDTH, 4)])
        device = caller.call("backend_get_device")
        self.events = [new(device(b)) for b in (self.first, self.second)]
        for event in filter(None, self.events):
            caller.owned.callback(caller.call("backend_event_free"), event)
        self.data = [caller.values(4, WIDTH) for _ in range(3)]
        self.out = np.zeros((4, WIDTH), np.float32)
        self.seen: list[F32] = []

    def upload(self, stream: int, tensor: int, data: F32) -> None:
        """Queue a write."""
        self.caller.call("backend_tensor_set_async")(stream, tensor, address(data), 0, data.nbytes)

    def download(self, stream: int, tensor: int, data: F32) -> None:
        """Queue a read."""
        self.caller.call("backend_tensor_get_async")(stream, tensor, address(data), 0, data.nbytes)

    def copy(self, source: int, target: int, a: int, b: int) -> None:
        """Queue a copy from stream `source` to `target`."""
        self.caller.call("backend_tensor_copy_async")(source, target, a, b)

    def double(self, stream: int, source: int, target: int) -> None:
        """Queue `target = source + source`."""
        t = self.caller.library.struct(target)
        with self.caller.context(NODES, graph=True) as context:
            graph = self.g.new_graph_custom(context, NODES, False)
            node = self.caller.ops["add"](context, source, source)
            self.g.backend_tensor_alloc(t.buffer, node, t.data)
            self.g.build_forward_expand(graph, node)
            _must(self.caller.call("backend_graph_compute_async")(stream, graph), "ggml_backend_graph_compute_async")

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""
        self.caller.call("backend_event_record")(self.events[event], stream)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self.caller.call("backend_event_wait")(stream, self.events[event])

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self.caller.call("backend_synchronize")(stream)

    def see(self, data: F32) -> None:
        """Keep what the caller sees now."""
        self.seen.append(data.copy())


Step = Callable[[Streams], object]
STEPS: Mapping[str, Step] = {
    "set x": lambda s: s.upload(s.first, s.x, s.data[0]),
    "record x": lambda s: s.record(0, s.first),
    "wait x": lambda s: s.wait(s.second, 0),
    "y = 2 x": lambda s: s.double(s.second, s.x, s.y),
    "record y": lambda s: s.record(1, s.second),
    "wait y": lambda s: s.wait(s.first, 1),
    "set x again": lambda s: s.upload(s.first, s.x, s.data[1]),
    "z = y": lambda s: s.copy(s.second, s.other, s.y, s.z),
    "v = 2 y": lambda s: s.double(s.second, s.y, s.v),
    "u = 2 z": lambda s: s.double(s.other, s.z, s.u),
    "get u": lambda s: s.download(s.other, s.u, s.out),
    "wait for other": lambda s: s.synchronize(s.other),
    "see u": lambda s: s.see(s.out),
    "wait for first": lambda s: s.synchronize(s.first),
    "see x": lambda s: s.see(s.caller.get(s.x, 4, WIDTH)),
    "wait for second": lambda s: s.synchronize(s.second),
    "y = data": lambda s: s.caller.set(s.y, s.data[2]),
    "see y": lambda s: s.see(s.caller.get(s.y, 4, WIDTH)),
    "see v": lambda s: s.see(s.caller.get(s.v, 4, WIDTH)),
}
"""The steps of `streams`: each event and each wait is needed."""


def streams(caller: Caller, _: Mapping[str, Any], steps: Mapping[str, Step] = STEPS) -> Iterator[F32]:
    """Write, compute, copy and read on three queues; yield what the caller sees.

    Two queues are of one device.
    """
    if len(caller.backends) == 1:  # the CPU has neither queues nor events
        first, second, third = (caller.values(4, WIDTH) for _ in range(3))
        yield from (4 * first, second, third, 4 * first)
        return
    it = Streams(caller)
    for step in steps.values():
        step(it)
    yield from it.seen


# plan: graphs that are planned once and computed often


def plan(caller: Caller, params: Mapping[str, Any]) -> Iterator[F32]:
    """Compute planned graphs in turn; yield outputs, then caches.

    The first backend and the CPU have a decoder each; the CPU alone computes the same without plans. `n`: tokens of
    each graph; `again`: further turns with other inputs.
    """
    alone = len(caller.backends) == 1
    for backend in (caller.backends[0], caller.backends[-1]):
        own = replace(caller, backends=[backend])
        decoder, starts = Decoder(own), np.cumsum([0, *params["n"]])
        graphs = [_allocated(decoder, int(at), n) for at, n in zip(starts, params["n"], strict=False)]
        plans = [0 if alone else _planned(own, graph) for graph, _, _ in graphs]
        for _ in range(1 + params["again"]):
            for n, created, (graph, x, h) in zip(params["n"], plans, graphs, strict=True):
                own.set(x, own.values(n, WIDTH))
                if alone:
                    _must(own.g.backend_graph_compute(backend, graph), "ggml_backend_graph_compute")
                else:
                    _must(own.call("backend_graph_plan_compute")(backend, created), "ggml_backend_graph_plan_compute")
                    own.call("backend_synchronize")(backend)
                yield own.get(h, n, WIDTH)
        yield from (own.get(cache, CELLS, WIDTH) for cache in decoder.caches)


def _planned(caller: Caller, graph: int) -> int:
    """Return a plan of a graph, freed with the caller."""
    backend = caller.backends[0]
    created: int = caller.call("backend_graph_plan_create")(backend, graph)
    caller.owned.callback(caller.call("backend_graph_plan_free"), backend, created)
    return created


def _allocated(decoder: Decoder, at: int, n: int) -> tuple[int, int, int]:
    """Return a graph, its input and its output, whose tensors each have memory of their own."""
    caller = decoder.caller
    context = caller.owned.enter_context(caller.context(NODES, graph=True))
    built = decoder.build(context, at, n)
    device = caller.call("backend_get_device")(caller.backends[0])
    buffer = caller.g.backend_alloc_ctx_tensors_from_buft(context, caller.g.backend_dev_buffer_type(device))
    if not buffer:
        raise ReportedError("ggml_backend_alloc_ctx_tensors_from_buft returned NULL")
    caller.owned.callback(caller.g.backend_buffer_free, buffer)
    return built


PROGRAMS: Mapping[str, Callable[[Caller, Mapping[str, Any]], Iterator[F32]]] = {
    "sched": sched, "streams": streams, "plan": plan, RPC: sched,
}  # fmt: skip
