"""A real ggml library: found, loaded by ctypes, and asked what it is before anything relies on it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from conformance.ggml.errors import GraphError, UnavailableError, UsageError
from conformance.ggml.tensor import FLAG_COMPUTE, FLAG_INPUT, FLAG_OUTPUT, VIEW_OPS, Bytes, Tensor, f32_bits
from conformance.ggml.types import F16, F32, GLU_OPS, OPS, TYPES, UNARY_OPS, GGMLType

from .layout import (
    DEVICE_TYPES,
    FIRST_DEVICE_TYPES,
    GGML,
    LEFT_OUT,
    LOG_CALLBACK,
    OLDER_DEVICE_TYPES,
    OLDER_NAMES,
    OLDEST,
    OPTIONAL,
    CpuTypeTraits,
    CType,
    Feature,
    InitParams,
    Layout,
    OlderProps,
    Signatures,
    TypeTraits,
    home,
    ids,
    last_written,
    layouts,
    mismatch,
    type_ids,
)
from .since import unknown_use

WHEEL = "xllamacpp"
"""The wheel whose extension module exports all of ggml and llama.cpp; loaded, never imported."""

_NAMES = (
    r"lib{0}\.so", r"lib{0}\.so\..+", r"lib{0}\..+\.so", r"lib{0}-[0-9a-f]{{8}}\.so.*", r"lib{0}(\..+)?\.dylib",
    r"{0}\.dll",
)  # fmt: skip
"""What a library is called, the likeliest first."""

RPC_SERVERS = ("ggml-rpc-server", "rpc-server")
"""Programs that serve devices by RPC: today's name, and the one before 2026."""

_VARIANT = "ggml-cpu-"
"""What the name of a CPU library begins with, of a build that has several."""
_REPAIRED = re.compile(r"libggml-(?!base-|cpu-)\w+-[0-9a-f]{8}\.so.*")
"""A device library that auditwheel renamed."""
_PLUGIN = re.compile(r"libggml-(?!base\b).+\.(so|dylib)")
"""A device library that ggml loads itself; what is linked has a version behind `.so`, or stands among `parts`."""

_SOFTWARE = re.compile(r"llvmpipe|lavapipe|softpipe|swiftshader|pocl|\bpthread\b|\bcpu-|basic render", re.IGNORECASE)
"""In the description of a device that a CPU computes for."""

_P = ctypes.c_void_p
_ENVIRONMENT = {
    # ggml would start a debugger to print a backtrace; the message before it is what matters
    "GGML_NO_BACKTRACE": "1",
    # Mesa's drivers that run on the CPU compile a kernel in half the time without optimisation, and cases are small
    "GALLIVM_PERF": "nopt",
}
"""What a library reads when it loads, unless the user has set it."""
_REFUSAL = re.compile(
    r"ncompatible|ailed to (?:load|init)|nsupported (?:GPU|device)|not support|is required|not available|"
    r"(?:\b[Nn]o|find any)(?: \S+)? devices?\b"
)
"""In a line of log that says why there is no device."""
_COMPLAINT = re.compile(r"xception|rror|[Ff]ail|ASSERT|nsupported|Check '")


class Library:
    """One loaded ggml. `ggml.backend_dev_get(0)` calls `ggml_backend_dev_get(0)`.

    `where` is a library that exports all of ggml, a folder with `libggml` and its parts, or "" for the wheel.
    UnavailableError if nothing is there, it cannot be loaded, or it is not a ggml of a known layout.
    """

    parts: ClassVar[Sequence[str]] = ("ggml", "ggml-base", "ggml-cpu")
    """The libraries of a split build; symbols are looked for in this order, the first also finds what it links."""
    beside: ClassVar[Sequence[str]] = ()
    """Libraries of a split build that link these, and that it may lack."""

    def __init__(self, where: str = "") -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.path = find(where)
        """Absolute."""
        self.folder = self.path if self.path.is_dir() else self.path.parent
        """Where its libraries lie."""
        self.plugins = plugins(self.folder)
        """Where device libraries lie that ggml loads itself."""
        self._handles = list(_load(self.path, self.parts))
        more = (part(self.path, stem) for stem in self.beside if self.path.is_dir())
        self._handles += [_open(path) for path in more if path is not None]
        self.log: deque[str] = deque(maxlen=64)
        """The library's last log lines."""
        self.ggml = SimpleNamespace()
        lacking = self._bind(self.ggml, "ggml_", GGML)
        lacks = self._bind(self.ggml, "ggml_", OPTIONAL)
        self.version = self.ggml.version().decode() if self.ggml.version else "of unknown version"
        self.title = f"ggml {self.version} ({self.path})"
        self._require(lacking)
        self.files = sorted({f for name in GGML if (f := file_of(getattr(self.ggml, name))) is not None})
        """The files that its functions are in, as the loader says; empty on a system that does not say."""
        self._check_files()
        self.left_out = [why for name, why in LEFT_OUT.items() if f"ggml_{name}" in lacks]
        """Sentences: what this library lacks, and what is thus not tested."""
        self._log_callback = LOG_CALLBACK(self._logged)
        self.ggml.log_set(ctypes.cast(self._log_callback, _P), None)
        self._probe()

    def _bind(self, to: SimpleNamespace, prefix: str, signatures: Signatures) -> list[str]:
        """Put functions into `to`, None for an absent one; the symbols of these."""
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
        """The function of a symbol, or of one of its older names; None where the library exports none."""
        for name in (symbol, *OLDER_NAMES.get(symbol, ())):
            for handle in self._handles:
                if (found := getattr(handle, name, None)) is not None:
                    return found
        return None

    def _require(self, lacking: Sequence[str]) -> None:
        if lacking:
            raise UnavailableError(
                f"{self.title} does not fit the binding, written for builds from {OLDEST} on: "
                f"it exports no {', '.join(lacking[:4])}"
                + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
                + f"; name the folder that holds lib{self.parts[0]} and its parts"
            )

    def _check_files(self) -> None:
        """UnavailableError if a part of ggml is not the one in the library's folder, but another of that name."""
        for stem in self.parts:
            own = list(named(self.folder, stem))
            for file in self.files:
                if own and is_named(file.name, stem) and not any(map(file.samefile, own)):
                    raise UnavailableError(
                        f"ggml library {self.path}: {own[0]} expected, the loader took {file}; "
                        "take its folder from the loader's path (LD_LIBRARY_PATH)"
                    )

    def _logged(self, _level: int, text: bytes | None, _data: int | None) -> None:
        self.log.append((text or b"").decode(errors="replace").rstrip())

    def _probe(self) -> None:
        g = self.ggml
        self.ops = ids(g.op_name, OPS)
        """Op -> id here."""
        self.sub_ops = {
            "UNARY": (UNARY_OPS, ids(g.unary_op_name, UNARY_OPS)),
            "GLU": (GLU_OPS, ids(g.glu_op_name, GLU_OPS) if g.glu_op_name else {}),
        }
        """Op -> the names that `op_params[0]` counts in a case, and name -> id here."""
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
        """Whether nodes without FLAG_COMPUTE are left alone."""
        self._loaded = False
        self._symbols: dict[str, bool] = {}
        """Those asked for -> whether the library exports them."""

    @property
    def build(self) -> str:
        """llama.cpp's build number, as `b6133`, where its own library tells; else ggml's commit, else ""."""
        for handle in self._handles:
            with suppress(ValueError):  # it exports none
                if n := ctypes.c_int.in_dll(handle, "LLAMA_BUILD_NUMBER").value:
                    return f"b{n}"
        commit = self.ggml.commit().decode() if self.ggml.commit else ""
        return "" if commit == "unknown" else commit

    def too_old(self, node: Tensor) -> str:
        """Why this library is too old for a node's use of its op, or ""; it would compute something else in silence."""
        if not (node.flags & FLAG_COMPUTE or self.flags_compute or node.op in VIEW_OPS or node.op == "NONE"):
            return f"a {node.op} that is not to be computed is not in this ggml, which computes every node"
        return unknown_use(node, self._exports)

    def _exports(self, symbol: str) -> bool:
        if symbol not in self._symbols:
            self._symbols[symbol] = self.function(symbol) is not None
        return self._symbols[symbol]

    def lacks(self, type_: GGMLType) -> str:
        """Why tensors of `type_` cannot be made here, or ""."""
        if type_.name in self.types:
            return ""
        return f"type {type_} {self.other_types[type_.name]} (ggml {self.version})"

    # tensors

    def struct(self, pointer: int) -> Any:  # noqa: ANN401  # a ctypes structure: `layout.CTensor`, or another version's
        """The `struct ggml_tensor` at an address, in place."""
        return self.layout.tensor.from_address(pointer)

    def leaf(self, pointer: int) -> Tensor:
        """Type, `ne`, `nb` and name of the tensor at an address; GraphError for a type that is unknown here."""
        c = self.struct(pointer)
        if c.type not in self._types:
            raise GraphError(f"{self.title}: a tensor of type id {c.type}, which is unknown here")
        return Tensor(self._types[c.type], tuple(c.ne), tuple(c.nb), name=c.name.decode(errors="replace"))

    def op(self, pointer: int) -> str:
        """The op of the tensor at an address; GraphError for one that is unknown here."""
        i = self.struct(pointer).op
        if i not in self._ops:
            raise GraphError(f"{self.title}: a node of op id {i}, which is unknown here")
        return self._ops[i]

    def sub_op(self, op: str, i: int) -> int:
        """What `op_params[0]` of a UNARY or GLU is in a case, where this library has `i`.

        GraphError for a sub-op that is unknown here.
        """
        known, ids = self.sub_ops[op]
        for position, name in enumerate(known):
            if ids.get(name) == i:
                return position
        raise GraphError(f"{self.title}: {op} with sub-op id {i}, which is unknown here")

    def get(self, pointer: int, size: int) -> Bytes:
        """The first `size` bytes of the tensor at an address."""
        data = np.empty(size, np.uint8)
        if size:
            self.ggml.backend_tensor_get(pointer, data.__array_interface__["data"][0], 0, size)
        return data

    def mapped(self, pointer: int, size: int) -> Bytes:
        """The first `size` bytes of the tensor at an address: read-only where they lie, as long as its buffer is there;
        a copy where the host cannot read them.
        """
        c = self.struct(pointer)
        if not size or not self.ggml.backend_buft_is_host(self.ggml.backend_buffer_get_type(c.buffer)):
            return self.get(pointer, size)
        data: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(c.data))
        data.flags.writeable = False
        return data

    def set(self, pointer: int, data: Bytes) -> None:
        """Set the first bytes of the tensor at an address."""
        if data.size:
            data = np.ascontiguousarray(data)
            self.ggml.backend_tensor_set(pointer, data.__array_interface__["data"][0], 0, data.nbytes)

    # devices

    def devices(self) -> dict[str, int]:
        """Name -> handle of every device registered so far."""
        g = self.ggml
        handles = [g.backend_dev_get(i) for i in range(g.backend_dev_count())]
        return {g.backend_dev_name(h).decode(): h for h in handles}

    def device(self, name: str) -> int:
        """The device called `name`, in any case of letters, loading the folder's device libraries where it needs one.

        UsageError lists the devices there are, and what the library said while loading.
        """
        for attempt in range(2):
            devices = self.devices()
            for label, handle in devices.items():
                if label.lower() == name.lower():
                    return handle
            if attempt == 0:
                self.load_devices()
        reasons = self.refusals()
        raise UsageError(
            f"ggml: device {name!r} is unknown to {self.title}; its devices: {', '.join(devices) or 'none'}"
            + (f"; it said: {'; '.join(reasons)}" if reasons else "")
        )

    def load_devices(self) -> None:
        """Load the folder's device libraries, once, where this ggml loads any."""
        load, load_all = self.ggml.backend_load, self.ggml.backend_load_all_from_path
        if self._loaded or load is None or load_all is None:
            return
        self._loaded = True
        load_all(os.fsencode(self.plugins))
        # It looks for the names of its own build, and loads by another name only what has variants, as the CPU has.
        for path in sorted(self.plugins.iterdir()):
            if _REPAIRED.fullmatch(path.name) and not hasattr(_loaded(path), "ggml_backend_score"):
                load(os.fsencode(path))

    def refusals(self) -> list[str]:
        """What this library said of devices that it did not take, or of libraries that it could not load, since it was
        loaded; of its last lines only, so ask before anything runs.
        """
        return list(dict.fromkeys(text for line in self.log if _REFUSAL.search(text := line.strip())))

    def variants(self) -> list[str]:
        """The CPU libraries of the folder that this processor can execute, such as `haswell`; none where ggml has its
        CPU built in. They stay loaded, so that `cpu_traits` tells nothing after this.
        """
        paths = sorted(self.plugins.glob(f"lib{_VARIANT}*.so"))
        return [path.name.removeprefix(f"lib{_VARIANT}").partition(".")[0] for path in paths if _runs_here(path)]

    def load_variant(self, name: str) -> None:
        """Load the CPU library called `name`, and none that this processor fits better; UsageError if it is not there,
        or this ggml has a CPU already; UnavailableError if this processor cannot execute it.
        """
        path = self.plugins / f"lib{_VARIANT}{name}.so"
        if not path.is_file() or self.ggml.backend_load is None:
            there = sorted(p.name for p in self.plugins.glob(f"lib{_VARIANT}*.so"))
            raise UsageError(f"ggml: variant={name}: {path} expected; there are {', '.join(there) or 'none'}")
        if "CPU" in self.devices():
            raise UsageError(f"ggml: variant={name}: {self.title} has a CPU already, which it cannot unload")
        if not _runs_here(path) or not self.ggml.backend_load(os.fsencode(path)):
            raise UnavailableError(f"ggml: variant={name} of {self.title}: this processor cannot execute it")

    def registry(self, name: str) -> int | None:
        """The handle of the registry of a kind of device, such as `RPC`, loading the folder's where it needs one; None
        where there is none.
        """
        if self.ggml.backend_reg_by_name is None:
            return None
        found: int | None = self.ggml.backend_reg_by_name(name.encode())
        if not found:
            self.load_devices()
            found = self.ggml.backend_reg_by_name(name.encode())
        return found or None

    def device_type(self, device: int) -> str:
        """Of `enum ggml_backend_dev_type`, as `CPU`; `type N` where a library knows more."""
        i, known = self.ggml.backend_dev_type(device), DEVICE_TYPES
        if self._older_props(device) is not None:
            cpu = self.ggml.backend_dev_by_name(b"CPU")
            first = bool(cpu) and self.ggml.backend_dev_type(cpu) == len(OLDER_DEVICE_TYPES) - 1
            known = FIRST_DEVICE_TYPES if first else OLDER_DEVICE_TYPES
        return known[i] if 0 <= i < len(known) else f"type {i}"

    def _older_props(self, device: int) -> OlderProps | None:
        """What the device says of itself, where this ggml has the older struct for it."""
        fill, props = self.ggml.backend_dev_get_props, OlderProps()
        size = ctypes.sizeof(props)
        if last_written(lambda at: fill(device, at), 4 * size) > size:
            return None
        fill(device, ctypes.addressof(props))
        return props

    def start(self, device: int, threads: int | None = None) -> int:
        """The device's backend, a `ggml_backend_t`; it computes with `threads` threads, or as many as it likes.

        UnavailableError if it cannot be initialised; UsageError if it has no threads to set, and more than one is asked
        for.
        """
        backend: int | None = self.ggml.backend_dev_init(device, None)
        name = self.ggml.backend_dev_name(device).decode()
        if not backend:
            raise UnavailableError(f"ggml: device {name} of {self.title} cannot be initialised")
        if threads is None:
            return backend
        set_threads = self.device_function(device, "ggml_backend_set_n_threads", None, _P, ctypes.c_int)
        if set_threads is not None:
            set_threads(backend, threads)
        elif threads > 1:
            self.ggml.backend_free(backend)
            raise UsageError(f"ggml: device {name} has no threads to set, threads={threads} found")
        return backend

    def device_function(self, device: int, name: str, result: CType, *arguments: CType) -> CType:
        """A function by `ggml_backend_reg_get_proc_address`, or None where the device has none of that name."""
        return self.registry_function(self.ggml.backend_dev_backend_reg(device), name, result, *arguments)

    def registry_function(self, registry: int, name: str, result: CType, *arguments: CType) -> CType:
        """The same of a registry."""
        address = self.ggml.backend_reg_get_proc_address(registry, name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    def buffer_types(self, device: int) -> dict[str, int]:
        """Name -> handle of a device's default buffer type, its host type and its extra ones such as CPU_REPACK."""
        g = self.ggml
        props = self._older_props(device)
        # the first versions with devices call what a device without a host buffer does not have
        host = None if props is not None and not props.host_buffer else g.backend_dev_host_buffer_type(device)
        handles = [g.backend_dev_buffer_type(device), host]
        extra = self.device_function(device, "ggml_backend_dev_get_extra_bufts", ctypes.POINTER(_P), _P)
        array = extra(device) if extra is not None else None
        while array and array[len(handles) - 2]:
            handles.append(array[len(handles) - 2])
        return {g.backend_buft_name(b).decode(): b for b in handles if b}

    def features(self, device: int) -> list[str]:
        """What a device was compiled with or found, such as `AVX2` or `LLAMAFILE`; `NAME=value` where it is no flag."""
        function = self.device_function(device, "ggml_backend_get_features", ctypes.POINTER(Feature), _P)
        array = None if function is None else function(self.ggml.backend_dev_backend_reg(device))
        out: list[str] = []
        while array and array[len(out)].name:
            name, value = array[len(out)].name.decode(), array[len(out)].value.decode()
            out.append(name if value == "1" else f"{name}={value}")
        return out

    def description(self, device: int) -> str:
        """What the device says of itself, such as a processor's name."""
        return str(self.ggml.backend_dev_description(device).decode(errors="replace"))

    def software(self, device: int) -> bool:
        """Whether a CPU computes for it, by a driver such as llvmpipe or pocl."""
        return self.device_type(device) != "CPU" and _SOFTWARE.search(self.description(device)) is not None

    def api_version(self, device: int) -> int:
        """`ggml_backend_reg.api_version` of the device's registry."""
        return ctypes.c_int.from_address(self.ggml.backend_dev_backend_reg(device)).value

    def cpu_traits(self) -> dict[str, tuple[TypeTraits, CpuTypeTraits]]:
        """Type -> its traits; empty where the library hides them, also in a CPU library that ggml loaded itself."""
        cpu, traits = self.ggml.get_type_traits_cpu, self.ggml.get_type_traits
        if cpu is None and hasattr(os, "RTLD_NOLOAD"):
            handles = (_loaded(path) for path in sorted(self.plugins.glob("libggml-cpu*.so")))
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

    # what it says

    def complaints(self) -> list[str]:
        """What it last said went wrong, or else its last lines."""
        lines = [" ".join(text.split()) for text in self.log if text.strip()]
        return [text for text in lines if _COMPLAINT.search(text)][-2:] or lines[-3:]

    def close(self) -> None:
        """Let the library log as it likes again; it stays loaded, as ggml cannot be unloaded safely."""
        self.ggml.log_set(None, None)


def tensor_layout(ggml: SimpleNamespace, title: str, op_ids: dict[str, int], f16: int) -> Layout:
    """The first of `layouts` by which the tensors that the library itself builds read as they should.

    `op_ids` and `f16` are the library's own ids. UnavailableError if none fits; says what differs from the newest one.
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
    """What `layout` says and what the library has instead; None where it fits."""
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
    """Sub-op of UNARY -> the id that its constructor, such as `ggml_relu`, gives the node.

    The names of b5456 stand in another order than its ids. XIELU, which takes parameters, has its name alone.
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
    """Whether ggml sets FLAG_COMPUTE on the nodes of a graph and leaves the others alone; older ones compute all."""
    g, overhead = library.ggml, library.layout.overhead
    ctx = g.init(InitParams(8 * overhead + g.graph_overhead_custom(4, False), None, True))
    try:
        node = g.scale(ctx, g.new_tensor_1d(ctx, library.types["f32"], 4), 2.0)
        g.build_forward_expand(g.new_graph_custom(ctx, 4, False), node)
        return bool(library.struct(node).flags & FLAG_COMPUTE)
    finally:
        g.free(ctx)


def find(where: str = "") -> Path:
    """The library file or folder `where`, or the installed wheel's library, found without importing the wheel.

    UnavailableError if there is none; says how to get one.
    """
    if where:
        path = Path(where).absolute()  # the loader searches its own path for a name without a folder
        if not path.exists():
            raise UnavailableError(f"ggml library {path}: no such file or folder")
        return path
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in (f"{WHEEL}*.so", f"{WHEEL}*.pyd"):
            for path in sorted(Path(folder).glob(pattern)):
                return path
    raise UnavailableError(
        f"the wheel {WHEEL} with the real ggml and llama.cpp is not installed here; install it, "
        "or name a library: --backend 'ggml?lib=DIR_OR_FILE', --lib FILE"
    )


def part(folder: Path, stem: str) -> Path | None:
    """The library `stem` of a split build, such as `ggml-base`, by any name it has: with a version behind or before
    `.so`, or with the digest that auditwheel puts there. None where `folder` has none.
    """
    return next(named(folder, stem), None)


def named(folder: Path, stem: str) -> Iterator[Path]:
    """Every file in `folder` that may be the library `stem`, the likeliest first."""
    for pattern in _NAMES:
        legal = re.compile(pattern.format(re.escape(stem)))
        yield from sorted(p for p in folder.iterdir() if legal.fullmatch(p.name))


def is_named(name: str, stem: str) -> bool:
    """True if a file of this name may be the library `stem`."""
    return any(re.fullmatch(pattern.format(re.escape(stem)), name) for pattern in _NAMES)


def plugins(folder: Path) -> Path:
    """Where the device libraries of a build lie: beside its libraries, or, as distributions of Linux have them, in a
    folder below `ggml` there, such as `ggml/backends0`.
    """
    below = folder / "ggml"
    own = any(_PLUGIN.fullmatch(p.name) for p in folder.iterdir()) if folder.is_dir() else True
    if own or not below.is_dir():
        return folder
    return next((p.parent for p in sorted(below.rglob("libggml-*")) if _PLUGIN.fullmatch(p.name)), folder)


def rpc_server(folder: Path) -> Path | None:
    """The program of a build that serves its devices by RPC: beside its libraries, or, where these are installed below
    a `lib`, among the programs of the same installation. None where there is none.
    """
    lib = next((p for p in (folder, folder.parent) if p.name.startswith("lib")), None)
    places = [folder]
    if lib is not None:
        places += [lib.parent / "bin", lib.parent / "libexec" / folder.relative_to(lib) / "llama" / "bin"]
    return next(filter(Path.is_file, (place / name for place in places for name in RPC_SERVERS)), None)


def _load(path: Path, parts: Sequence[str]) -> Iterator[ctypes.CDLL]:
    """RTLD_LOCAL, so that two versions of ggml can live in one process.

    What a library links is looked for on the loader's path before beside it, unless it is loaded already: so its
    folder's own `ggml-base` and `ggml-cpu` come first.
    """
    folder = path if path.is_dir() else path.parent
    whole, *others = (part(folder, stem) for stem in parts)
    first = whole if path.is_dir() else path
    if first is None:
        raise UnavailableError(f"ggml library {path}: a folder with lib{parts[0]}.so (and libggml-base.so) expected")
    linked = [p for stem in ("ggml-base", "ggml-cpu") if (p := part(folder, stem)) is not None and p != first]
    if path.is_dir() or is_named(path.name, parts[0]):
        for own in linked:
            with suppress(UnavailableError):  # it may be a plugin for another machine
                _open(own)
    try:
        yield _open(first)
    except UnavailableError:
        if not path.is_dir():
            raise
        # Without an rpath of its own it finds its parts only once they are loaded.
        loaded = [_open(p) for p in others if p is not None]
        yield _open(first)
        yield from loaded


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_LOCAL)
    except OSError as e:
        raise UnavailableError(f"ggml library {path} cannot be loaded: {e}") from None


def file_of(function: Any) -> Path | None:  # noqa: ANN401  # a ctypes function
    """The file that a function is in, as the loader says; None where the system cannot say."""
    info = home(ctypes.cast(function, _P).value or 0)
    path = Path(os.fsdecode(info.dli_fname)) if info is not None and info.dli_fname else None
    return path if path is not None and path.is_file() else None


def _loaded(path: Path) -> ctypes.CDLL | None:
    """The library if this process has it already; None on a system that cannot say."""
    if sys.platform == "win32":
        return None
    try:
        return ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _runs_here(path: Path) -> bool:
    """Whether this processor can execute a CPU library of a build that has several."""
    try:
        score = getattr(_loaded(path) or _open(path), "ggml_backend_score", None)
    except UnavailableError:
        return False
    return score is not None and score() > 0
