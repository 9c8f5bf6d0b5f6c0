"""A ggml library: found, loaded with ctypes, and probed for its layout before use."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from conformance.ggml.errors import GraphError, UnavailableError
from conformance.ggml.quants.order import swapped
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, FLAG_OUTPUT, VIEW_OPS, Bytes, Tensor, f32_bits
from conformance.ggml.types import F16, F32, GLU_OPS, OPS, TYPES, UNARY_OPS, GGMLType

from .devices import Devices
from .files import files_of, find, is_named, load, loaded, named, open_library, part, plugins
from .layout import (
    GGML,
    LEFT_OUT,
    OLDER_NAMES,
    OLDEST,
    OPTIONAL,
    CpuTypeTraits,
    InitParams,
    Layout,
    Signatures,
    TypeTraits,
    ids,
    layouts,
    mismatch,
    type_ids,
)
from .log import Log
from .made import notes
from .since import unknown_use

_P = ctypes.c_void_p
_ENVIRONMENT = {
    # ggml would start a debugger to print a backtrace; the message before it is what matters
    "GGML_NO_BACKTRACE": "1",
    # Mesa's CPU drivers compile a kernel in half the time without optimisation, and cases are small
    "GALLIVM_PERF": "nopt",
}
"""Environment variables that a library reads on loading, unless the user has set them."""


DEVICES = "ggml_backend_dev_count"
"""A symbol of the device interface, which older builds lack."""


def old_api(what: str, *lacking: str) -> str:
    """Return that a build or fork has an older ggml, with the functions that it lacks."""
    more = f" and {n} more" if (n := len(lacking) - 1) else ""
    return (
        f"{what} has the ggml API of before {OLDEST}, as some forks still do: it lacks {DEVICES}{more}; "
        "the device interface is needed"
    )


_SWAPS = sys.byteorder == "big"
"""True if the library has the bytes of a case in the other order."""


class Library:
    """A loaded ggml: `ggml.backend_dev_get(0)` calls `ggml_backend_dev_get(0)`.

    `where` is a library that exports all of ggml, a folder with `libggml` and its parts, or "" for the wheel. Raises
    UnavailableError if nothing is there, it cannot be loaded, or its layout is unknown.
    """

    parts: ClassVar[Sequence[str]] = ("ggml", "ggml-base", "ggml-cpu")
    """Libraries of a split build, in the order in which symbols are searched."""
    optional: ClassVar[Sequence[str]] = ()
    """Optional libraries of a split build that link these."""

    def __init__(self, where: str = "") -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.path = find(where)
        """Absolute path."""
        self.folder = self.path if self.path.is_dir() else self.path.parent
        """Folder of its libraries."""
        self.made = notes(self.folder)
        """The notes of `conform build make` on them."""
        self.plugins = plugins(self.folder)
        """Folder of the device libraries that ggml loads itself."""
        self._handles = list(load(self.path, self.parts))
        more = (part(self.path, stem) for stem in self.optional if self.path.is_dir())
        self._handles += [open_library(path) for path in more if path is not None]
        self.log = Log()
        self.ggml = SimpleNamespace()
        lacking = self._bind(self.ggml, "ggml_", GGML)
        lacks = self._bind(self.ggml, "ggml_", OPTIONAL)
        self.version = self.ggml.version().decode() if self.ggml.version else "of unknown version"
        self.title = f"ggml {self.version} ({self.path})"
        self._require(lacking)
        self.files = files_of([getattr(self.ggml, name) for name in GGML])
        """Files with its functions, according to the loader; empty if the system cannot tell."""
        self._check_files()
        self.left_out = [why for name, why in LEFT_OUT.items() if f"ggml_{name}" in lacks]
        """Sentences about missing functions and the tests that are skipped for that reason."""
        self.ggml.log_set(ctypes.cast(self.log.callback, _P), None)
        self._probe()
        self.devices = Devices(self.ggml, self.title, self.plugins, self.log)

    def _bind(self, to: SimpleNamespace, prefix: str, signatures: Signatures) -> list[str]:
        """Bind functions into `to`, None for a missing one; return the missing symbols."""
        lacking = []
        for name, (result, arguments) in signatures.items():
            symbol = prefix + name
            function = self.function(symbol)
            if function is None:
                lacking.append(symbol)
            else:
                function.restype, function.argtypes = result, arguments
            setattr(to, name, function)
        return lacking

    def function(self, symbol: str) -> Any:  # noqa: ANN401  # a ctypes function
        """Return the function of a symbol or of one of its older names; None if there is none."""
        for name in (symbol, *OLDER_NAMES.get(symbol, ())):
            for handle in self._handles:
                if (found := getattr(handle, name, None)) is not None:
                    return found
        return None

    def _require(self, lacking: Sequence[str]) -> None:
        if DEVICES in lacking and "ggml_init" not in lacking:
            raise UnavailableError(old_api(self.title, *lacking))
        if lacking:
            raise UnavailableError(
                f"{self.title} does not fit the binding, written for builds from {OLDEST} on: "
                f"it exports no {', '.join(lacking[:4])}"
                + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
                + f"; name the folder that holds lib{self.parts[0]} and its parts"
            )

    def _check_files(self) -> None:
        """Raise UnavailableError if the loader took a part of ggml from another folder."""
        for stem in self.parts:
            own = list(named(self.folder, stem))
            for file in self.files:
                if own and is_named(file.name, stem) and not any(map(file.samefile, own)):
                    raise UnavailableError(
                        f"ggml library {self.path}: {own[0]} expected, the loader took {file}; "
                        "remove its folder from LD_LIBRARY_PATH"
                    )

    def _probe(self) -> None:
        g = self.ggml
        self.ops = ids(g.op_name, OPS)
        """Op -> id in this library."""
        self.sub_ops = {
            "UNARY": (UNARY_OPS, ids(g.unary_op_name, UNARY_OPS)),
            "GLU": (GLU_OPS, ids(g.glu_op_name, GLU_OPS) if g.glu_op_name else {}),
        }
        """Op -> names that `op_params[0]` of a case indexes, and name -> id in this library."""
        self.types, self.other_types = type_ids(g)
        for name in ("NONE", "VIEW", "SCALE", "MUL_MAT", "UNARY"):
            if name not in self.ops:
                raise mismatch(self.title, f"ggml_op_name knows {name}", f"only {', '.join(self.ops) or 'nothing'}")
        for t in (F32, F16):
            if t.name not in self.types:
                raise mismatch(self.title, f"there is a type {t}", f"{t} {self.other_types[t.name]}")
        self._ops = {i: name for name, i in self.ops.items()}
        self._types = {i: TYPES[name] for name, i in self.types.items()}
        self.layout = tensor_layout(g, self.title, self.ops, self.types["f16"])
        self.sub_ops["UNARY"][1].update(unary_ids(self))
        self.flags_compute = marks_computed(self)
        """True if ggml skips nodes without FLAG_COMPUTE."""
        self._symbols: dict[str, bool] = {}
        """Requested symbol -> True if the library exports it."""

    @property
    def build(self) -> str:
        """llama.cpp's build number, such as `b6133`, if known; else ggml's commit, or ""."""
        for handle in self._handles:
            with suppress(ValueError):  # it exports none
                if n := ctypes.c_int.in_dll(handle, "LLAMA_BUILD_NUMBER").value:
                    return f"b{n}"
        commit = self.ggml.commit().decode() if self.ggml.commit else ""
        return "" if commit == "unknown" else commit

    def too_old(self, node: Tensor) -> str:
        """Return why this library does not know a node's use of its op, or "".

        Such a library would silently compute something else.
        """
        if not (node.flags & FLAG_COMPUTE or self.flags_compute or node.op in VIEW_OPS or node.op == "NONE"):
            return f"a {node.op} without FLAG_COMPUTE cannot run on this ggml, which computes every node"
        return unknown_use(node, self._exports)

    def _exports(self, symbol: str) -> bool:
        if symbol not in self._symbols:
            self._symbols[symbol] = self.function(symbol) is not None
        return self._symbols[symbol]

    def lacks(self, type_: GGMLType) -> str:
        """Return why tensors of `type_` cannot be created in this library, or ""."""
        if type_.name in self.types:
            return ""
        return f"type {type_} {self.other_types[type_.name]} (ggml {self.version})"

    def cpu_traits(self) -> dict[str, tuple[TypeTraits, CpuTypeTraits]]:
        """Return type -> CPU traits; empty if the library does not export them."""
        cpu, traits = self.ggml.get_type_traits_cpu, self.ggml.get_type_traits
        if cpu is None and hasattr(os, "RTLD_NOLOAD"):
            handles = (loaded(path) for path in sorted(self.plugins.glob("libggml-cpu*.so")))
            cpu = next((f for h in handles if (f := getattr(h, "ggml_get_type_traits_cpu", None)) is not None), None)
            if cpu is not None:
                cpu.restype, cpu.argtypes = OPTIONAL["get_type_traits_cpu"]
        if cpu is None:
            return {}
        none = TypeTraits()
        return {
            name: (none if traits is None else TypeTraits.from_address(traits(i)), CpuTypeTraits.from_address(cpu(i)))
            for name, i in self.types.items()
        }

    # tensors

    def struct(self, pointer: int) -> Any:  # noqa: ANN401  # a ctypes structure: `layout.CTensor`, or another version's
        """Return the `struct ggml_tensor` at an address, in place."""
        return self.layout.tensor.from_address(pointer)

    def leaf(self, pointer: int) -> Tensor:
        """Return type, `ne`, `nb` and name of the tensor at an address; GraphError if unknown."""
        c = self.struct(pointer)
        if c.type not in self._types:
            raise GraphError(f"{self.title}: a tensor of type id {c.type}, which is unknown here")
        return Tensor(self._types[c.type], tuple(c.ne), tuple(c.nb), name=c.name.decode(errors="replace"))

    def op(self, pointer: int) -> str:
        """Return the op of the tensor at an address; GraphError for an unknown one."""
        i = self.struct(pointer).op
        if i not in self._ops:
            raise GraphError(f"{self.title}: a node of op id {i}, which is unknown here")
        return self._ops[i]

    def sub_op(self, op: str, i: int) -> int:
        """Return a case's `op_params[0]` for the library's sub-op id; GraphError if unknown."""
        known, ids = self.sub_ops[op]
        for position, name in enumerate(known):
            if ids.get(name) == i:
                return position
        raise GraphError(f"{self.title}: {op} with sub-op id {i}, which is unknown here")

    def get(self, pointer: int, size: int) -> Bytes:
        """Return a copy of the first `size` bytes of the tensor at an address."""
        data = np.empty(size, np.uint8)
        if size:
            self.ggml.backend_tensor_get(pointer, data.__array_interface__["data"][0], 0, size)
        return swapped(data, self.leaf(pointer)) if _SWAPS else data

    def mapped(self, pointer: int, size: int) -> Bytes:
        """Return the first `size` bytes of the tensor at an address, read-only and in place.

        They are valid as long as the buffer is; a copy if the host cannot read the buffer.
        """
        c = self.struct(pointer)
        if not size or _SWAPS or not self.ggml.backend_buft_is_host(self.ggml.backend_buffer_get_type(c.buffer)):
            return self.get(pointer, size)
        data: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(c.data))
        data.flags.writeable = False
        return data

    def set(self, pointer: int, data: Bytes) -> None:
        """Set the first bytes of the tensor at an address."""
        if data.size:
            data = np.ascontiguousarray(swapped(data, self.leaf(pointer)) if _SWAPS else data)
            self.ggml.backend_tensor_set(pointer, data.__array_interface__["data"][0], 0, data.nbytes)

    def close(self) -> None:
        """Restore the library's own logging; it stays loaded, as ggml cannot be unloaded safely."""
        self.ggml.log_set(None, None)


def tensor_layout(ggml: SimpleNamespace, title: str, op_ids: dict[str, int], f16: int) -> Layout:
    """Return the first of `layouts` that reads the library's own tensors correctly.

    `op_ids` and `f16` are the library's ids. UnavailableError, with the difference to the newest layout, if none fits.
    """
    overhead = ggml.tensor_overhead()
    differing: list[tuple[str, str]] = []
    for layout in layouts(overhead):
        difference = _difference(ggml, layout, op_ids, f16)
        if difference is None:
            return layout
        differing.append(difference)
    raise mismatch(
        title,
        *(differing or [(f"ggml_tensor_overhead() is {Layout().overhead} bytes or more", f"{overhead} bytes")])[0],
    )


def _difference(ggml: SimpleNamespace, layout: Layout, op_ids: dict[str, int], f16: int) -> tuple[str, str] | None:
    """Return what `layout` expects and what the library has instead; None if it fits."""
    overhead = ggml.tensor_overhead()
    ctx = ggml.init(InitParams(16 * overhead, None, True))
    try:
        a = ggml.new_tensor_4d(ctx, f16, 6, 5, 4, 3)
        ggml.set_name(a, b"probe")
        ggml.set_input(a)
        b = ggml.scale(ctx, a, 2.5)
        ggml.set_name(b, b"n" * overhead)
        ggml.set_output(b)
        c = ggml.view_1d(ctx, a, 7, 12)
        zeros = (0,) * 16
        common: dict[str, Any] = {"type": f16, "buffer": 0, "data": 0, "view_src": 0, "view_offs": 0}
        whole = common | {"ne": (6, 5, 4, 3), "nb": (2, 12, 60, 240)}
        calls: dict[str, tuple[int, dict[str, Any]]] = {
            "new_tensor_4d": (a, whole | {"op": op_ids["NONE"], "op_params": zeros, "flags": FLAG_INPUT}
                              | {"src": (0,) * 10, "name": b"probe"}),
            "scale": (b, whole | {"op": op_ids["SCALE"], "op_params": (f32_bits(2.5), *zeros[1:])}
                      | {"flags": FLAG_OUTPUT, "src": (a, *zeros[:9]), "name": b"n" * (layout.max_name - 1)}),
            "view_1d": (c, common | {"ne": (7, 1, 1, 1), "nb": (2, 14, 14, 14), "op": op_ids["VIEW"], "flags": 0}
                        | {"src": (a, *zeros[:9]), "view_src": a, "view_offs": 12}),
        }  # fmt: skip
        for call, (pointer, fields) in calls.items():
            tensor = layout.tensor.from_address(pointer)
            for key, value in fields.items():
                actual = getattr(tensor, key)
                if isinstance(actual, ctypes.Array):
                    actual = tuple(x or 0 for x in actual)
                if (actual or 0) != value:
                    return f"ggml_{call} leaves {key} {value}", f"{actual}"
    finally:
        ggml.free(ctx)
    return None


def unary_ids(library: Library) -> dict[str, int]:
    """Return sub-op of UNARY -> id that its constructor, such as `ggml_relu`, gives the node.

    In b5456 the names are in another order than the ids. XIELU takes parameters and is found by name only.
    """
    g, found = library.ggml, {}
    ctx = g.init(InitParams(2 * (len(UNARY_OPS) + 1) * library.layout.overhead, None, True))
    try:
        a = g.new_tensor_1d(ctx, library.types["f32"], 4)
        for name in UNARY_OPS:
            make = library.function(f"ggml_{name.lower()}") if name != "XIELU" else None
            if make is not None:
                make.restype, make.argtypes = _P, (_P, _P)
                node = library.struct(make(ctx, a))
                if node.op == library.ops["UNARY"]:
                    found[name] = node.op_params[0]
    finally:
        g.free(ctx)
    return found


def marks_computed(library: Library) -> bool:
    """Return True if ggml computes only nodes with FLAG_COMPUTE, not all of a graph."""
    g, overhead = library.ggml, library.layout.overhead
    ctx = g.init(InitParams(8 * overhead + g.graph_overhead_custom(4, False), None, True))
    try:
        node = g.scale(ctx, g.new_tensor_1d(ctx, library.types["f32"], 4), 2.0)
        g.build_forward_expand(g.new_graph_custom(ctx, 4, False), node)
        return bool(library.struct(node).flags & FLAG_COMPUTE)
    finally:
        g.free(ctx)
