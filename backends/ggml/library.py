"""A real ggml library: found, loaded by ctypes, and asked what it is before anything relies on it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.ops.names import GLU_OPS, UNARY_OPS
from conformance.ggml.types import F16, F32, GGMLType

from . import names
from .layout import EXPECTED, InitParams, mismatch, verify

WHEEL = "xllamacpp"
"""The wheel whose extension module exports a whole ggml; loaded, never imported."""

CType: TypeAlias = Any
"""A ctypes type, function or None: typeshed has no one name for what may stand as a result type."""

_P = ctypes.c_void_p
_S = ctypes.c_char_p
_I = ctypes.c_int
_Z = ctypes.c_size_t
_I64 = ctypes.c_int64
_B = ctypes.c_bool

# fmt: off
FUNCTIONS: dict[str, tuple[CType, tuple[CType, ...]]] = {
    "init": (_P, (InitParams,)), "free": (None, (_P,)), "get_mem_buffer": (_P, (_P,)),
    "tensor_overhead": (_Z, ()), "graph_overhead_custom": (_Z, (_Z, _B)),
    "op_name": (_P, (_I,)), "unary_op_name": (_P, (_I,)), "glu_op_name": (_P, (_I,)),
    "type_name": (_P, (_I,)), "blck_size": (_I64, (_I,)), "type_size": (_Z, (_I,)),
    "new_tensor_1d": (_P, (_P, _I, _I64)), "new_tensor_4d": (_P, (_P, _I, _I64, _I64, _I64, _I64)),
    "set_name": (_P, (_P, _S)), "set_input": (None, (_P,)), "set_output": (None, (_P,)),
    "scale": (_P, (_P, _P, ctypes.c_float)), "view_1d": (_P, (_P, _P, _I64, _Z)),
    "new_graph_custom": (_P, (_P, _Z, _B)), "build_forward_expand": (None, (_P, _P)),
    "graph_add_node": (None, (_P, _P)),
    "gallocr_new": (_P, (_P,)), "gallocr_free": (None, (_P,)), "gallocr_reserve": (_B, (_P, _P)),
    "gallocr_alloc_graph": (_B, (_P, _P)),
    "gallocr_get_buffer_size": (_Z, (_P, _I)),
    "log_set": (None, (_P, _P)),
    "backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "backend_buffer_free": (None, (_P,)), "backend_buffer_name": (_S, (_P,)), "backend_buffer_get_size": (_Z, (_P,)),
    "backend_buffer_clear": (None, (_P, ctypes.c_uint8)), "backend_buffer_set_usage": (None, (_P, _I)),
    "backend_buft_name": (_S, (_P,)), "backend_buft_is_host": (_B, (_P,)), "backend_buft_get_alignment": (_Z, (_P,)),
    "backend_buft_get_max_size": (_Z, (_P,)), "backend_buft_alloc_buffer": (_P, (_P, _Z)),
    "backend_tensor_set": (None, (_P, _P, _Z, _Z)), "backend_tensor_get": (None, (_P, _P, _Z, _Z)),
    "backend_graph_compute": (_I, (_P, _P)), "backend_free": (None, (_P,)),
    "backend_dev_count": (_Z, ()), "backend_dev_get": (_P, (_Z,)), "backend_dev_name": (_S, (_P,)),
    "backend_dev_description": (_S, (_P,)), "backend_dev_init": (_P, (_P, _S)), "backend_dev_type": (_I, (_P,)),
    "backend_dev_buffer_type": (_P, (_P,)), "backend_dev_host_buffer_type": (_P, (_P,)),
    "backend_dev_supports_op": (_B, (_P, _P)), "backend_dev_backend_reg": (_P, (_P,)),
    "backend_reg_name": (_S, (_P,)), "backend_reg_get_proc_address": (_P, (_P, _S)),
    "backend_name": (_S, (_P,)), "backend_supports_buft": (_B, (_P, _P)), "backend_buffer_get_type": (_P, (_P,)),
    "backend_buffer_get_base": (_P, (_P,)), "backend_buft_get_alloc_size": (_Z, (_P, _P)),
    "backend_tensor_alloc": (_I, (_P, _P, _P)), "backend_view_init": (_I, (_P,)),
    "backend_tensor_memset": (None, (_P, ctypes.c_uint8, _Z, _Z)),
    "backend_sched_new": (_P, (_P, _P, _I, _Z, _B, _B)), "backend_sched_free": (None, (_P,)),
    "backend_sched_reset": (None, (_P,)), "backend_sched_alloc_graph": (_B, (_P, _P)),
    "backend_sched_graph_compute": (_I, (_P, _P)), "backend_sched_get_n_splits": (_I, (_P,)),
    "backend_sched_get_tensor_backend": (_P, (_P, _P)), "backend_sched_get_buffer_size": (_Z, (_P, _P)),
    "backend_sched_set_eval_callback": (None, (_P, _P, _P)),
}
"""Every function used, without the prefix `ggml_` -> result and argument types."""

OPTIONAL: dict[str, tuple[CType, tuple[CType, ...]]] = {
    "version": (_S, ()), "commit": (_S, ()), "backend_load_all_from_path": (None, (_S,)),
    "get_type_traits": (_P, (_I,)), "get_type_traits_cpu": (_P, (_I,)),
}
"""Functions that some libraries lack; absent ones are None."""
# fmt: on

LOG_CALLBACK = ctypes.CFUNCTYPE(None, _I, _S, _P)
_COMPLAINT = re.compile(r"xception|rror|[Ff]ailed|ASSERT|nsupported|Check '")
PARTS = ("ggml", "ggml-base", "ggml-cpu")
"""The libraries of a split build; symbols are looked for in this order, the first also finds what it links."""


class Library:
    """One loaded ggml. `ggml.backend_dev_get(0)` calls `ggml_backend_dev_get(0)`.

    Args:
        where: a library that exports all of ggml, a folder with `libggml` and its parts, or "" for the wheel.

    Raises:
        UnavailableError: nothing there, it cannot be loaded, or it is not a ggml of this layout.
    """

    def __init__(self, where: str = "") -> None:
        # ggml would start a debugger to print a backtrace; the message before it is what matters.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self.path = Path(where) if where else _installed()
        self.folder = self.path if self.path.is_dir() else self.path.parent
        """Where device libraries lie that ggml loads itself."""
        self._handles = list(_load(self.path))
        self.log: deque[str] = deque(maxlen=32)
        """The library's last log lines."""
        self.ggml = SimpleNamespace()
        lacking = [name for name in FUNCTIONS if not self._bind(name, *FUNCTIONS[name])]
        for name, signature in OPTIONAL.items():
            if not self._bind(name, *signature):
                setattr(self.ggml, name, None)
        self.version = self.ggml.version().decode() if self.ggml.version else "of unknown version"
        self.title = f"ggml {self.version} ({self.path})"
        if lacking:
            raise UnavailableError(
                f"{self.title} does not fit this adapter, written against ggml {EXPECTED}: "
                f"it exports no {', '.join('ggml_' + n for n in lacking[:4])}"
                + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
                + "; name the folder that holds libggml and its parts, or a library of about that version"
            )
        self._log_callback = LOG_CALLBACK(lambda _level, text, _data: self.log.append(_text(text).rstrip()))
        self.ggml.log_set(ctypes.cast(self._log_callback, _P), None)
        self._probe()

    def _bind(self, name: str, result: CType, arguments: tuple[CType, ...]) -> bool:
        for handle in self._handles:
            function = getattr(handle, f"ggml_{name}", None)
            if function is not None:
                function.restype = result
                function.argtypes = arguments
                setattr(self.ggml, name, function)
                return True
        return False

    def _probe(self) -> None:
        self.ops = names.op_ids(self.ggml)
        self.sub_ops = {"UNARY": (UNARY_OPS, names.unary_ids(self.ggml)), "GLU": (GLU_OPS, names.glu_ids(self.ggml))}
        """Op -> the names that `op_params[0]` counts in a case, and name -> id here."""
        self.types, self.other_types = names.type_ids(self.ggml)
        for name in ("NONE", "VIEW", "SCALE", "MUL_MAT", "UNARY"):
            if name not in self.ops:
                raise mismatch(self.title, f"ggml_op_name knows {name}", f"only {', '.join(self.ops) or 'nothing'}")
        for t in (F32, F16):
            if t.name not in self.types:
                raise mismatch(self.title, f"type {t}", self.other_types[t.name])
        verify(self.ggml, self.title, self.ops, self.types["f16"])

    def lacks(self, type_: GGMLType) -> str:
        """Why tensors of `type_` cannot be made here, or ""."""
        if type_.name in self.types:
            return ""
        return f"type {type_} {self.other_types[type_.name]} (ggml {self.version})"

    def devices(self) -> dict[str, int]:
        """Name -> handle of every device registered so far."""
        g = self.ggml
        handles = [g.backend_dev_get(i) for i in range(g.backend_dev_count())]
        return {g.backend_dev_name(h).decode(): h for h in handles}

    def device(self, name: str) -> int:
        """The device called `name`, in any case of letters, loading the folder's device libraries where it needs one.

        Raises:
            UsageError: lists the devices there are, and what the library said while loading.
        """
        for attempt in range(2):
            known = self.devices()
            for label, handle in known.items():
                if label.lower() == name.lower():
                    return handle
            if attempt == 0:
                self.load_devices()
        said = [line for line in self.log if "ncompatible" in line or "failed to load" in line]
        raise UsageError(
            f"ggml: device {name!r} is unknown to {self.title}; its devices: {', '.join(known) or 'none'}"
            + (f"; it said: {'; '.join(said)}" if said else "")
        )

    def load_devices(self) -> None:
        """Load the folder's device libraries, where this ggml loads any."""
        if self.ggml.backend_load_all_from_path is not None:
            self.ggml.backend_load_all_from_path(os.fsencode(self.folder))

    def complaints(self) -> list[str]:
        """What it last said went wrong, or else its last lines."""
        told = [" ".join(text.split()) for text in self.log if text.strip()]
        return [text for text in told if _COMPLAINT.search(text)][-2:] or told[-3:]

    def device_function(self, device: int, name: str, result: CType, *arguments: CType) -> CType:
        """A function by `ggml_backend_reg_get_proc_address`, or None where the device has none of that name."""
        address = self.ggml.backend_reg_get_proc_address(self.ggml.backend_dev_backend_reg(device), name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    def api_version(self, device: int) -> int:
        """`ggml_backend_reg.api_version` of the device's registry."""
        return ctypes.c_int.from_address(self.ggml.backend_dev_backend_reg(device)).value

    def close(self) -> None:
        """Let the library log as it likes again; it stays loaded, as ggml cannot be unloaded safely."""
        self.ggml.log_set(None, None)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


def _installed() -> Path:
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in (f"{WHEEL}*.so", f"{WHEEL}*.pyd"):
            for path in sorted(Path(folder).glob(pattern)):
                return path
    raise UnavailableError(
        f"the wheel {WHEEL} with the real ggml is not installed here; install it, "
        "or name a library: --backend 'ggml?lib=DIR_OR_FILE'"
    )


def _part(folder: Path, stem: str) -> Path | None:
    for pattern in (f"lib{stem}.so", f"lib{stem}.so.*", f"lib{stem}.*.so", f"lib{stem}.dylib", f"{stem}.dll"):
        for path in sorted(folder.glob(pattern)):
            return path
    return None


def _load(path: Path) -> Iterator[ctypes.CDLL]:
    """RTLD_LOCAL, so that two versions of ggml can live in one process."""
    if not path.exists():
        raise UnavailableError(f"ggml library {path}: no such file or folder")
    if not path.is_dir():
        yield _open(path)
        return
    found = [p for p in (_part(path, stem) for stem in PARTS) if p is not None]
    if not found or not found[0].name.removeprefix("lib").startswith("ggml."):
        raise UnavailableError(f"ggml library {path}: a folder with libggml.so (and libggml-base.so) expected")
    try:
        yield _open(found[0])
    except UnavailableError:
        # Without an rpath of its own it finds its parts only once they are loaded.
        parts = [_open(p) for p in (_part(path, "ggml-base"), _part(path, "ggml-cpu")) if p is not None]
        yield _open(found[0])
        yield from parts


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_LOCAL)
    except OSError as e:
        raise UnavailableError(f"ggml library {path} cannot be loaded: {e}") from None
