"""Devices of a ggml library, and the device libraries that ggml loads itself."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from conformance.ggml.errors import UnavailableError, UsageError

from .files import loaded, runs_here
from .layout import (
    DEVICE_TYPES,
    FIRST_DEVICE_TYPES,
    OLDER_DEVICE_TYPES,
    CType,
    Feature,
    OlderProps,
    last_written,
)
from .log import Log

_VARIANT = "ggml-cpu-"
"""Prefix of a CPU library's name in a build with several."""
_REPAIRED = re.compile(r"libggml-(?!base-|cpu-)\w+-[0-9a-f]{8}\.so.*")
"""A device library that auditwheel renamed."""

_SOFTWARE = re.compile(
    r"llvmpipe|lavapipe|softpipe|swiftshader|pocl|\bpthread\b|\bcpu-|basic render|, a cpu called", re.IGNORECASE
)
"""Pattern for the description of a device that is emulated on the CPU."""

_P = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry of devices of one kind, such as `RPC`."""

    ggml: SimpleNamespace = field(repr=False, compare=False)
    """The library's functions."""
    handle: int
    """`ggml_backend_reg_t`."""

    @property
    def api_version(self) -> int:
        """`ggml_backend_reg.api_version`."""
        return ctypes.c_int.from_address(self.handle).value

    def function(self, name: str, result: CType, *arguments: CType) -> CType:
        """Return a function by `ggml_backend_reg_get_proc_address`, or None."""
        address = self.ggml.backend_reg_get_proc_address(self.handle, name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a library."""

    devices: Devices = field(repr=False)
    """All devices of the library."""
    handle: int
    """`ggml_backend_dev_t`."""

    @property
    def name(self) -> str:
        """The device's name, such as `CPU` or `Vulkan0`."""
        return str(self.devices.ggml.backend_dev_name(self.handle).decode())

    @property
    def description(self) -> str:
        """The device's description, such as a processor's name."""
        return str(self.devices.ggml.backend_dev_description(self.handle).decode(errors="replace"))

    @property
    def type(self) -> str:
        """The device type from `enum ggml_backend_dev_type`, as `CPU` or `type N`."""
        g = self.devices.ggml
        i, known = g.backend_dev_type(self.handle), DEVICE_TYPES
        if self.older_props() is not None:
            cpu = g.backend_dev_by_name(b"CPU")
            first = bool(cpu) and g.backend_dev_type(cpu) == len(OLDER_DEVICE_TYPES) - 1
            known = FIRST_DEVICE_TYPES if first else OLDER_DEVICE_TYPES
        return known[i] if 0 <= i < len(known) else f"type {i}"

    def older_props(self) -> OlderProps | None:
        """Return the device's properties if this ggml has the older struct, else None."""
        fill, props = self.devices.ggml.backend_dev_get_props, OlderProps()
        size = ctypes.sizeof(props)
        if last_written(lambda at: fill(self.handle, at), 4 * size) > size:
            return None
        fill(self.handle, ctypes.addressof(props))
        return props

    @property
    def software(self) -> bool:
        """True if a driver such as llvmpipe or pocl emulates the device on the CPU.

        Some drivers, such as Intel's OpenCL runtime, name the processor.
        """
        if self.type == "CPU":
            return False
        named = self.description
        return _SOFTWARE.search(named) is not None or named in {
            d.description for d in self.devices.registered().values() if d.type == "CPU"
        }

    @property
    def registry(self) -> Registry:
        """The registry that the device is in."""
        g = self.devices.ggml
        return Registry(g, g.backend_dev_backend_reg(self.handle))

    def features(self) -> list[str]:
        """Return the device's features, such as `AVX2` or `LLAMAFILE`; `NAME=value` if not a flag."""
        registry = self.registry
        function = registry.function("ggml_backend_get_features", ctypes.POINTER(Feature), _P)
        array = None if function is None else function(registry.handle)
        out: list[str] = []
        while array and array[len(out)].name:
            name, value = array[len(out)].name.decode(), array[len(out)].value.decode()
            out.append(name if value == "1" else f"{name}={value}")
        return out

    @property
    def buffer_type(self) -> int:
        """The device's default buffer type, a `ggml_backend_buffer_type_t`."""
        buft: int = self.devices.ggml.backend_dev_buffer_type(self.handle)
        return buft

    def buffer_types(self) -> dict[str, int]:
        """Return name -> handle of the device's default, host and extra buffer types."""
        g = self.devices.ggml
        props = self.older_props()
        # the first versions with devices call a function that a device without a host buffer lacks
        host = None if props is not None and not props.host_buffer else g.backend_dev_host_buffer_type(self.handle)
        handles = [self.buffer_type, host]
        extra = self.registry.function("ggml_backend_dev_get_extra_bufts", ctypes.POINTER(_P), _P)
        array = extra(self.handle) if extra is not None else None
        while array and array[len(handles) - 2]:
            handles.append(array[len(handles) - 2])
        return {g.backend_buft_name(b).decode(): b for b in handles if b}

    def supports_op(self, node: int) -> bool:
        """Return `ggml_backend_dev_supports_op` for the node at an address."""
        return bool(self.devices.ggml.backend_dev_supports_op(self.handle, node))

    def start(self, threads: int | None = None, *, ref: bool = False) -> int:
        """Return a new `ggml_backend_t` of the device with `threads` threads, or its default.

        UnavailableError if it cannot be initialised; UsageError if it has no setting for several threads, or for `ref`.
        """
        g = self.devices.ggml
        backend: int | None = g.backend_dev_init(self.handle, None)
        if not backend:
            raise UnavailableError(f"ggml: device {self.name} of {self.devices.title} cannot be initialised")
        if ref:
            use_ref = self.registry.function("ggml_backend_cpu_set_use_ref", None, _P, ctypes.c_bool)
            if use_ref is None:
                g.backend_free(backend)
                raise UsageError(f"ggml: device {self.name} has no ggml_backend_cpu_set_use_ref, ref=on found")
            use_ref(backend, True)
        if threads is None:
            return backend
        set_threads = self.registry.function("ggml_backend_set_n_threads", None, _P, ctypes.c_int)
        if set_threads is not None:
            set_threads(backend, threads)
        elif threads > 1:
            g.backend_free(backend)
            raise UsageError(f"ggml: device {self.name} has no threads to set, threads={threads} found")
        return backend


class Devices:
    """The devices of a library: those registered, and those in libraries in `plugins`."""

    def __init__(self, ggml: SimpleNamespace, title: str, plugins: Path, log: Log) -> None:
        self.ggml, self.title = ggml, title
        self._plugins, self._log = plugins, log
        self._loaded = False

    def at(self, handle: int) -> Device:
        """Return the device of a `ggml_backend_dev_t`, registered or not."""
        return Device(self, handle)

    def registered(self) -> dict[str, Device]:
        """Return name -> device of every device registered so far."""
        g = self.ggml
        devices = [self.at(g.backend_dev_get(i)) for i in range(g.backend_dev_count())]
        return {device.name: device for device in devices}

    def by_name(self, name: str) -> Device:
        """Return the device called `name` (case-insensitive), loading device libraries if needed.

        UsageError lists the devices and the library's messages on loading.
        """
        for attempt in range(2):
            devices = self.registered()
            for label, device in devices.items():
                if label.lower() == name.lower():
                    return device
            if attempt == 0:
                self.load_all()
        reasons = self._log.refusals()
        raise UsageError(
            f"ggml: device {name!r} is unknown to {self.title}; its devices: {', '.join(devices) or 'none'}"
            + (f"; it said: {'; '.join(reasons)}" if reasons else "")
        )

    def load_all(self) -> None:
        """Load the folder's device libraries, once, if this ggml can."""
        load, load_all = self.ggml.backend_load, self.ggml.backend_load_all_from_path
        if self._loaded or load is None or load_all is None:
            return
        self._loaded = True
        load_all(os.fsencode(self._plugins))
        # ggml loads the names of its own build only; a renamed library loads only if it has variants, as the CPU has
        for path in sorted(self._plugins.iterdir()):
            if _REPAIRED.fullmatch(path.name) and not hasattr(loaded(path), "ggml_backend_score"):
                load(os.fsencode(path))

    def variants(self) -> list[str]:
        """Return the folder's CPU libraries that this processor can execute, such as `haswell`.

        There is none if the CPU is built into ggml. They stay loaded, so `Library.cpu_traits` is of no use afterwards.
        """
        paths = sorted(self._plugins.glob(f"lib{_VARIANT}*.so"))
        return [path.stem.removeprefix(f"lib{_VARIANT}") for path in paths if runs_here(path)]

    def load_variant(self, name: str) -> None:
        """Load the CPU library called `name` even if another one fits this processor better.

        UsageError if it is not there or this ggml has a CPU already; UnavailableError if this processor cannot execute
        it.
        """
        path = self._plugins / f"lib{_VARIANT}{name}.so"
        if not path.is_file() or self.ggml.backend_load is None:
            there = sorted(p.name for p in self._plugins.glob(f"lib{_VARIANT}*.so"))
            raise UsageError(f"ggml: variant={name}: {path} expected; found: {', '.join(there) or 'none'}")
        if "CPU" in self.registered():
            raise UsageError(f"ggml: variant={name}: {self.title} has a CPU already, which it cannot unload")
        if not runs_here(path) or not self.ggml.backend_load(os.fsencode(path)):
            raise UnavailableError(f"ggml: variant={name} of {self.title}: this processor cannot execute it")

    def reg_by_name(self, name: str) -> Registry | None:
        """Return a registry such as `RPC`, loading device libraries, or None."""
        find = self.ggml.backend_reg_by_name
        if find is None:
            return None
        handle = find(name.encode())
        if not handle:
            self.load_all()
            handle = find(name.encode())
        return Registry(self.ggml, handle) if handle else None
