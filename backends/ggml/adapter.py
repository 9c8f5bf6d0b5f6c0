"""One device of one ggml library, behind the interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

from conformance.backend.interface import YES, Backend, BufferType, DeviceInfo, Session, Support, no
from conformance.cgraph.arithmetic import EXACT, Arithmetic
from conformance.cgraph.case import Case
from conformance.cgraph.errors import UnavailableError, UsageError
from conformance.cgraph.graph import Graph
from conformance.cgraph.tensor import Tensor

from .arithmetic import cpu_arithmetic
from .context import Context, refusal
from .library import Library
from .placement import place
from .session import GgmlSession

DEVICE_TYPE_CPU = 0
"""`GGML_BACKEND_DEVICE_TYPE_CPU`."""


class _Feature(ctypes.Structure):
    """`struct ggml_backend_feature`."""

    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


class GgmlBackend(Backend):
    """The real ggml.

    Args:
        lib: a library that exports all of ggml, or a folder with libggml and its parts; the installed wheel if empty.
        device: as `ggml_backend_dev_name` has it; CPU if empty.
        buffer: buffer type for weights, as `buffer_types` names it; a weight goes there if every node that uses it
            is supported there, as llama.cpp decides. The device's default if empty.
        threads: how many threads compute. One, unless something is measured: small graphs on busy cores crawl with
            more, and results can differ in the last bits.

    Raises:
        UnavailableError: no such library, or one that does not fit; names both versions.
        UsageError: the library has no such device or buffer type; lists those it has.
    """

    isolate: ClassVar[bool] = True
    batch: ClassVar[int] = 64

    def __init__(self, lib: str = "", device: str = "", buffer: str = "", threads: str = "1") -> None:
        if not threads.isdecimal() or int(threads) < 1:
            raise UsageError(f"ggml: threads must be a number from 1, {threads!r} found")
        self._library = library = Library(lib)
        self._ggml = library.ggml
        self._device = library.device(device or "CPU")
        self._name: str = self._ggml.backend_dev_name(self._device).decode()
        self._buft: int = self._ggml.backend_dev_buffer_type(self._device)
        self._bufts = self._buffer_types()
        if buffer and buffer not in self._bufts:
            raise UsageError(
                f"ggml: buffer {buffer!r} is unknown to device {self._name} of {library.title}; "
                f"its buffer types: {', '.join(self._bufts)}"
            )
        self._weights = self._bufts[buffer] if buffer else self._buft
        self._backend: int | None = self._ggml.backend_dev_init(self._device, None)
        if self._backend is None:
            raise UnavailableError(f"ggml: device {self._name} of {library.title} cannot be initialised")
        self._set_threads(int(threads))

    def info(self) -> DeviceInfo:
        """The library's version, its device, and the CPU features it uses."""
        lib, g = self._library, self._ggml
        versions = {"ggml": lib.version, "backend API": str(lib.api_version(self._device))}
        if g.commit is not None and g.commit() != b"unknown":
            versions["commit"] = g.commit().decode()
        description = g.backend_dev_description(self._device).decode(errors="replace")
        features = " ".join(self._features())
        return DeviceInfo("ggml", self._name, f"{description} ({features})" if features else description, {**versions})

    def buffer_types(self) -> Sequence[BufferType]:
        """The device's default, its host type, and its extra ones such as CPU_REPACK."""
        g = self._ggml
        out = []
        for name, buft in self._bufts.items():
            most = g.backend_buft_get_max_size(buft)
            limit = most if most < 2**63 - 1 else None
            out.append(BufferType(name, g.backend_buft_is_host(buft), g.backend_buft_get_alignment(buft), limit))
        return out

    def arithmetic(self) -> Arithmetic:
        """As the CPU device's tables say; nothing is known of other devices, which count as exact."""
        if self._ggml.backend_dev_type(self._device) == DEVICE_TYPE_CPU:
            return cpu_arithmetic(self._library)
        return EXACT

    def supports_op(self, node: Tensor) -> Support:
        """`ggml_backend_dev_supports_op` on the node rebuilt in the library."""
        return self.supports(Graph([node]))[0]

    def supports(self, graph: Graph) -> list[Support]:
        """`supports_op` of every node, the graph rebuilt once."""
        library, g = self._library, self._ggml
        tensors = graph.tensors()
        context = Context(library, len(tensors))
        lacking: dict[Tensor, str] = {}
        at: dict[Tensor, int] = {}
        try:
            for t in tensors:
                reason = refusal(library, t) or next(
                    (lacking[s] for s in (*t.src, t.view_src) if s is not None and s in lacking), ""
                )
                if reason:
                    lacking[t] = reason
                else:
                    at[t] = context.add(t, at)
            return [
                no(lacking[node])
                if node in lacking
                else YES
                if g.backend_dev_supports_op(self._device, at[node])
                else no(f"ggml_backend_dev_supports_op of {self._name} (ggml {library.version}) refuses {_spell(node)}")
                for node in graph
            ]
        finally:
            context.free()

    def open(self, case: Case) -> Session:
        """Allocate and fill the case's weights and caches.

        Raises:
            BackendError: no memory, or a tensor that this version of ggml cannot have.
        """
        placed: frozenset[Tensor] = frozenset()
        notes: list[str] = []
        if self._weights != self._buft:
            placed, notes = place(self._library, self._device, self._weights, case)
        return GgmlSession(
            self._library, self._name, self._backend or 0, self._buft, case, (placed, self._weights), notes
        )

    def close(self) -> None:
        """Free the device; the library stays loaded."""
        if self._backend is not None:
            self._ggml.backend_free(self._backend)
            self._backend = None
            self._library.close()

    def _buffer_types(self) -> dict[str, int]:
        g = self._ggml
        found = [self._buft, g.backend_dev_host_buffer_type(self._device)]
        extra = self._library.device_function(
            self._device, "ggml_backend_dev_get_extra_bufts", ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        if extra is not None:
            listed = extra(self._device)
            i = 0
            while listed and listed[i]:
                found.append(listed[i])
                i += 1
        return {g.backend_buft_name(b).decode(): b for b in found if b}

    def _set_threads(self, threads: int) -> None:
        function = self._library.device_function(
            self._device, "ggml_backend_set_n_threads", None, ctypes.c_void_p, ctypes.c_int
        )
        if function is not None:
            function(self._backend, threads)
        elif threads > 1:
            raise UsageError(f"ggml: device {self._name} has no threads to set, threads={threads} found")

    def _features(self) -> list[str]:
        function = self._library.device_function(
            self._device, "ggml_backend_get_features", ctypes.POINTER(_Feature), ctypes.c_void_p
        )
        if function is None:
            return []
        listed = function(self._ggml.backend_dev_backend_reg(self._device))
        out: list[str] = []
        while listed and listed[len(out)].name:
            feature = listed[len(out)]
            value = feature.value.decode()
            out.append(feature.name.decode() + ("" if value == "1" else f"={value}"))
        return out


def _spell(node: Tensor) -> str:
    """`MUL_MAT f32[64, 2, 1, 1] of f16[256, 64, 1, 1], f32[256, 2, 1, 1]`."""
    made = f"{node.op} {node.type}{list(node.ne)}"
    src = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    return f"{made} of {src}" if src else made
