"""Function tables of ggml's backend interface (`ggml-backend-impl.h`), by layout.

With them a device can be written in Python. The number `GGML_BACKEND_API_VERSION` does not tell the layouts apart, so
`interface` compares each with objects that the library made itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.ggml.errors import UnavailableError

from .layout import CType
from .library import Library

_P, _Z, _B, _I, _U8 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_int, ctypes.c_uint8

Table = tuple[tuple[str, CType, tuple[CType, ...]], ...]
"""Functions in the order of the struct: name, result type, argument types."""

REG: Table = (
    ("get_name", _P, (_P,)), ("get_device_count", _Z, (_P,)), ("get_device", _P, (_P, _Z)),
    ("get_proc_address", _P, (_P, _P)),
)  # fmt: skip
DEVICE: Table = (
    ("get_name", _P, (_P,)), ("get_description", _P, (_P,)), ("get_memory", None, (_P, _P, _P)),
    ("get_type", _I, (_P,)), ("get_props", None, (_P, _P)), ("init_backend", _P, (_P, _P)),
    ("get_buffer_type", _P, (_P,)), ("get_host_buffer_type", _P, (_P,)),
    ("buffer_from_host_ptr", _P, (_P, _P, _Z, _Z)), ("supports_op", _B, (_P, _P)), ("supports_buft", _B, (_P, _P)),
    ("offload_op", _B, (_P, _P)), ("event_new", _P, (_P,)), ("event_free", None, (_P, _P)),
    ("event_synchronize", None, (_P, _P)),
)  # fmt: skip
BUFFER_TYPE: Table = (
    ("get_name", _P, (_P,)), ("alloc_buffer", _P, (_P, _Z)), ("alloc_buffer_n", _P, (_P, _P, _I)),
    ("get_alignment", _Z, (_P,)), ("get_max_size", _Z, (_P,)), ("get_alloc_size", _Z, (_P, _P)),
    ("get_alloc_size_n", _Z, (_P, _P, _I)), ("is_host", _B, (_P,)),
)  # fmt: skip
_SET, _SET_2D = (_P, _P, _P, _Z, _Z), (_P, _P, _P, _Z, _Z, _Z, _Z, _Z)
BUFFER: Table = (
    ("free_buffer", None, (_P,)), ("get_base", _P, (_P,)), ("init_tensor", _I, (_P, _P)),
    ("memset_tensor", None, (_P, _P, _U8, _Z, _Z)), ("set_tensor", None, _SET), ("get_tensor", None, _SET),
    ("set_tensor_2d", None, _SET_2D), ("get_tensor_2d", None, _SET_2D), ("cpy_tensor", _B, (_P, _P, _P)),
    ("clear", None, (_P, _U8)), ("reset", None, (_P,)),
)  # fmt: skip
BACKEND: Table = (
    ("get_name", _P, (_P,)), ("free", None, (_P,)), ("set_tensor_async", None, _SET), ("get_tensor_async", None, _SET),
    ("set_tensor_2d_async", None, _SET_2D), ("get_tensor_2d_async", None, _SET_2D),
    ("cpy_tensor_async", _B, (_P, _P, _P, _P)), ("synchronize", None, (_P,)), ("graph_plan_create", _P, (_P, _P)),
    ("graph_plan_free", None, (_P, _P)), ("graph_plan_update", None, (_P, _P, _P)),
    ("graph_plan_compute", _I, (_P, _P)), ("graph_compute", _I, (_P, _P)), ("event_record", None, (_P, _P)),
    ("event_wait", None, (_P, _P)), ("graph_optimize", None, (_P, _P, _P)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interface:
    """Tables that changed since API version 1."""

    api: int
    """`GGML_BACKEND_API_VERSION`."""
    backend: Table = BACKEND
    buffer: Table = BUFFER
    buffer_type: Table = BUFFER_TYPE


def _without(table: Table, *suffixes: str) -> Table:
    return tuple(row for row in table if not row[0].removesuffix("_async").endswith(suffixes))


_OLD_TYPE = _without(BUFFER_TYPE, "_n")
INTERFACES = (
    Interface(3),  # ggml 0.26
    Interface(2, buffer_type=_OLD_TYPE),  # 0.13 to 0.25
    Interface(2, _without(BACKEND, "_2d"), _without(BUFFER, "_2d"), _OLD_TYPE),  # 0.9
    Interface(1, _without(BACKEND, "_2d", "graph_optimize"), _without(BUFFER, "_2d"), _OLD_TYPE),  # b6301
)
"""Known interfaces, newest first; comments: builds whose layout was checked."""


def interface(library: Library) -> Interface:
    """Return the interface of a library; UnavailableError, with its number, if it is unknown.

    The pointers behind tables of the CPU are checked: to its registry, its device and its buffer type.
    """
    g = library.ggml
    cpu = library.devices.by_name("CPU")
    api = cpu.registry.api_version
    known = sorted({i.api for i in INTERFACES})
    if api not in known:
        raise UnavailableError(
            f"{library.title} has version {api} of ggml's backend interface, one of "
            f"{', '.join(map(str, known))} expected: no device of ours can be added to it"
        )
    buft = cpu.buffer_type
    backend, buffer = cpu.start(), g.backend_buft_alloc_buffer(buft, 64)
    try:
        for each in (i for i in INTERFACES if i.api == api):
            behind = (
                (cpu.handle + 8 * len(DEVICE), cpu.registry.handle),
                (backend + 8 * (1 + len(each.backend)), cpu.handle),
                (buffer + 8 * len(each.buffer), buft),
            )
            is_host = _P.from_address(buft + 8 * (len(each.buffer_type) - 1)).value
            if is_host and all(_P.from_address(place).value == value for place, value in behind):
                return each
    finally:
        g.backend_buffer_free(buffer)
        g.backend_free(backend)
    raise UnavailableError(f"{library.title}: its function tables of version {api} have an unknown layout")


def struct_of(table: Table) -> type[ctypes.Structure]:
    """Return the struct of a table: one pointer per function."""
    return type("Table", (ctypes.Structure,), {"_fields_": tuple((name, _P) for name, *_ in table)})


class Callbacks:
    """C functions made of Python functions, kept alive.

    An exception in a function is stored in `errors`, as C cannot see it; the function then returns 0, or `failed`.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self._kept: list[Any] = []

    def fill(self, table: Table, functions: Mapping[str, Callable[..., Any]], failed: int = 0) -> ctypes.Structure:
        """Return a table with those of `functions` that it has, and null for the others."""
        filled = struct_of(table)()
        for name, result, arguments in table:
            if name in functions:
                callback = ctypes.CFUNCTYPE(result, *arguments)(self._guarded(functions[name], result, failed))
                self._kept.append(callback)
                setattr(filled, name, ctypes.cast(callback, _P).value)
        return filled

    def _guarded(self, function: Callable[..., Any], result: CType, failed: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401  # as the C function
            try:
                return function(*arguments)
            except Exception as e:  # noqa: BLE001  # whatever it is, C must not see it
                self.errors.append(e)
                return None if result is None else failed if result is _I else 0

        return call
