"""Lazy devices: ggml's function tables over a `Timeline`.

Its memory is not the host's: tensors have addresses above those of any process. Memory is filled with `POISON` until it
is written, and once it is freed. Nodes run on the library's own CPU backend, so the numbers are right if the order is.
A graph's tensors are copied when it is queued, as a caller may build its next graph in their place.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from conformance.ggml.lib.library import Library
from conformance.ggml.lib.tables import DEVICE, REG, Callbacks, Table, interface

from .backends import Backends, Events
from .buffers import ALIGNMENT, TOTAL, Buffers
from .graphs import FAILED, Graphs
from .native import P, struct, text_at
from .run import Run, Setting
from .timeline import Race

NAMES = ("LAZY0", "LAZY1", "LAZY2")
GPU = 1
"""`GGML_BACKEND_DEVICE_TYPE_GPU`; in builds before August 2025 too."""
DESCRIPTION = "a lazy device"
UNLIMITED = (1 << 64) - 1
"""`SIZE_MAX`, the largest size of a buffer type without a limit."""


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
        asks = self.interface.api > 2 or library.function("ggml_op_alloc_size_may_expand") is not None
        self.run = Run()
        self.buffers = Buffers(library, self.run)
        self.backends = Backends(library, self.run, self.buffers)
        self.events = Events(self.run, self.backends)
        self.graphs = Graphs(library, self.run, self.buffers, self.backends, asks=asks)
        self.buffers.use(self.fill(self.interface.buffer, self.buffers.callbacks()))
        parts = (self.backends.callbacks(), self.events.callbacks(), self.graphs.callbacks())
        functions = {name: function for part in parts for name, function in part.items()}
        self.backends.use(self.fill(self.interface.backend, functions, FAILED))
        self._reg = self._registry()
        self._devices = [_Device(self, i, name, ctypes.addressof(self._reg)) for i, name in enumerate(names)]

    def _registry(self) -> Any:  # noqa: ANN401  # a ctypes structure
        table = self.fill(REG, {
            "get_name": lambda _: text_at("LAZY"), "get_device_count": lambda _: len(self._devices),
            "get_device": lambda _, i: self.devices[i], "get_proc_address": lambda _, __: None,
        })  # fmt: skip
        kind = struct("ggml_backend_reg", ("api_version", ctypes.c_int), ("iface", type(table)), ("context", P))
        return kind(self.interface.api, table, None)

    def begin(self, setting: Setting) -> None:
        """Start a new timeline with a setting; backends and buffers of the last one must be freed.

        UnavailableError if this ggml knows no allocation dependencies, and `setting` asks for some.
        """
        self.graphs.begin(setting)
        self.run.begin(setting)
        self.buffers.begin()
        self._callbacks.errors.clear()

    @property
    def devices(self) -> list[int]:
        """The `ggml_backend_dev_t` of each device."""
        return [device.address for device in self._devices]

    @property
    def alive(self) -> int:
        """Number of backends, events, buffers and plans that were not freed."""
        return len(self.backends) + len(self.events) + len(self.buffers) + self.graphs.plans

    def register(self) -> None:
        """Add the devices to the library's registry, for the life of the process."""
        self.g.backend_register(ctypes.addressof(self._reg))

    def check(self) -> list[Race]:
        """Return the races so far; raises the first exception of a callback."""
        if self._callbacks.errors:
            raise self._callbacks.errors[0]
        return list(self.run.timeline.races)

    def fill(self, table: Table, functions: dict[str, Callable[..., Any]], failed: int = 0) -> ctypes.Structure:
        """Return a function table whose calls are counted, and run one at a time."""
        return self._callbacks.fill(table, {n: self._locked(n, f) for n, f in functions.items()}, failed)

    def _locked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401  # as the C function
            if not self._inside:
                self.run.timeline.switch()
            with self._lock:
                self._inside += 1
                self.run.calls[name] += 1
                try:
                    return function(*arguments)
                finally:
                    self._inside -= 1

        return call


class _Device:
    """One device and its buffer type: the functions of `ggml_backend_device_i`."""

    def __init__(self, machine: Machine, index: int, name: str, registry: int) -> None:
        self._machine, self._index, self._name = machine, index, name
        library = machine.library
        self._cpu = library.devices.by_name("CPU")
        self._has_older_props = self._cpu.older_props() is not None
        self._op_names = {i: op for op, i in library.ops.items()}
        types = machine.fill(machine.interface.buffer_type, {
            "get_name": lambda _: text_at(name), "get_alignment": lambda _: ALIGNMENT,
            "alloc_buffer": lambda buft, size: machine.buffers.alloc(name, buft, size),
            "get_max_size": lambda _: machine.run.setting.largest or UNLIMITED,
            "get_alloc_size": lambda _, tensor: library.ggml.nbytes(tensor) + machine.buffers.behind(tensor),
        })  # fmt: skip
        kind = struct("ggml_backend_buffer_type", ("iface", type(types)), ("device", P), ("context", P))
        self._buft = kind(types, None, None)
        table = machine.fill(DEVICE, {
            "get_name": lambda _: text_at(name), "get_description": lambda _: text_at(DESCRIPTION),
            "get_memory": self._memory, "get_type": lambda _: GPU, "get_props": self._props,
            "init_backend": self._init, "get_buffer_type": lambda _: ctypes.addressof(self._buft),
            "supports_op": self._supports_op, "supports_buft": self._supports_buft,
            "offload_op": lambda _, __: machine.run.setting.offloads, **machine.events.device_callbacks(),
        })  # fmt: skip
        kind = struct("ggml_backend_device", ("iface", type(table)), ("reg", P), ("context", P))
        self._struct = kind(table, registry, None)
        self.address = ctypes.addressof(self._struct)
        """`ggml_backend_dev_t`."""
        self._buft.device = self.address

    def _memory(self, _device: int, free: int, total: int) -> None:
        ctypes.c_size_t.from_address(free).value = max(0, self._machine.buffers.left)
        ctypes.c_size_t.from_address(total).value = self._machine.buffers.total

    def _props(self, _device: int, props: int) -> None:
        """Fill `ggml_backend_dev_props`: asynchronous, with events, without host buffers."""
        where = iter(range(props, props + 64, 8))
        free = TOTAL - self._machine.buffers.used
        for value in (text_at(self._name), text_at(DESCRIPTION), free, TOTAL):
            P.from_address(next(where)).value = value
        kind = next(where)
        ctypes.c_int.from_address(kind).value = GPU
        caps = kind + 4 if self._has_older_props else kind + 16
        for i, value in enumerate((True, False, False, True)):
            ctypes.c_bool.from_address(caps + i).value = value

    def _init(self, device: int, _params: int) -> int:
        moments = self._machine.run.setting.moments
        return self._machine.backends.new(device, self._name, moments[min(self._index, len(moments) - 1)])

    def _supports_op(self, _device: int, node: int) -> bool:
        op = self._op_names.get(self._machine.library.struct(node).op)
        if op in self._machine.run.setting.refused:
            return False
        return self._cpu.supports_op(node)

    def _supports_buft(self, _device: int, buft: int) -> bool:
        """Return True for the device's own type; for the host's too, if the setting shares it."""
        shared = self._machine.run.setting.shared
        return buft == ctypes.addressof(self._buft) or (shared and bool(self._machine.g.backend_buft_is_host(buft)))
