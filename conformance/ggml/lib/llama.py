"""llama.cpp as a C library: functions, and a check that its parameter structs are known."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from conformance.ggml.errors import UnavailableError

from .files import part
from .layout import (
    ABORT_CALLBACK,
    CONTEXT_PARAMS,
    DEFAULTS,
    GGUF,
    LLAMA_OWNERS,
    LLAMA_VERBS,
    MODEL_PARAMS,
    CType,
    last_written,
    llama_functions,
    llama_optional,
    mismatch,
)
from .library import Library

_P = ctypes.c_void_p
_ARCH_NAME = "_Z13llm_arch_name8llm_arch"
"""The C++ function `llm_arch_name(llm_arch)`; no C function lists architectures."""


class Llama(Library):
    """A loaded llama.cpp and its ggml: `llama.decode(...)` calls `llama_decode(...)`.

    `where` is as for `Library`; it must contain all of llama.cpp, or `libllama`. UnavailableError as for `Library`, or
    if llama.cpp's parameters fit no known layout.
    """

    parts: ClassVar = ("llama", *Library.parts)

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.llama, self.gguf = SimpleNamespace(), SimpleNamespace()
        self._require(self._bind(self.llama, "llama_", llama_functions(MODEL_PARAMS[0], CONTEXT_PARAMS[0])))
        c = self.llama
        model = choose("llama_model_params", c.model_default_params, MODEL_PARAMS, self.title)
        context = choose("llama_context_params", c.context_default_params, CONTEXT_PARAMS, self.title)
        self._bind(c, "llama_", llama_functions(model, context))
        for symbol in self._bind(c, "llama_", LLAMA_OWNERS):
            setattr(c, symbol.removeprefix("llama_"), lambda whole: whole)
        self._bind(c, "llama_", {**llama_optional(model), **LLAMA_VERBS})
        self._bind(self.gguf, "gguf_", GGUF)
        if c.model_init_from_user is None:
            self.left_out.append("it exports no llama_model_init_from_user, so it cannot create models from metadata")
        c.log_set(self.log.callback, None)

    def initialise(self, on_abort: Callable[[bytes], None]) -> None:
        """Call `llama_backend_init` and load devices; `on_abort` gets ggml's last message."""
        self._abort_callback = ABORT_CALLBACK(lambda message: on_abort(message or b""))
        if self.ggml.set_abort_callback is not None:
            self.ggml.set_abort_callback(self._abort_callback)
        self.llama.backend_init()
        self.devices.load_all()

    def architectures(self) -> list[str]:
        """Return the names of all its architectures; none without `llm_arch_name`, as on Windows."""
        function = self.function(_ARCH_NAME)
        if function is None:
            return []
        function.restype, function.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        names = ((function(i) or b"").decode() for i in count())
        return list(takewhile(lambda name: name.strip("()") not in ("", "unknown"), names))

    def reason(self) -> str:
        """Return llama.cpp's last error messages."""
        return " / ".join(self.log.complaints()) or "it did not say why"


def put(params: ctypes.Structure, **values: object) -> list[str]:
    """Set parameters; return the names that this version does not have."""
    known = {name for name, *_ in params._fields_}
    for name, value in values.items():
        if name in known:
            setattr(params, name, value)
    return [name for name in values if name not in known]


def find_llama(lib: Path) -> Path:
    """Return where llama.cpp is: `lib`, or its folder; UnavailableError for a folder without it."""
    if lib.is_dir():
        if part(lib, "llama") is None:
            raise UnavailableError(f"{lib}: no libllama there, so llama.cpp cannot run on this library")
        return lib
    return lib if part(lib.parent, "llama") is None else lib.parent


def choose(
    struct: str,
    function: CType,
    known: Sequence[type[ctypes.Structure]],
    title: str,
) -> type[ctypes.Structure]:
    """Return the first layout of a parameter struct that `function` fills as in `DEFAULTS`.

    UnavailableError, with the difference to the newest layout, if none fits.
    """
    differing = [_differs(struct, function, kind) for kind in known]
    for kind, difference in zip(known, differing, strict=True):
        if difference is None:
            return kind
    raise mismatch(title, *(differing[0] or ("", "")))


def _differs(struct: str, function: CType, kind: CType) -> tuple[str, str] | None:
    """Return what a layout expects and what the library has instead; None if it fits."""
    function.restype = kind
    size = _size(function, kind)
    end = kind.slack.offset
    if size is not None and not end <= size <= -(-end // 8) * 8:  # padding may be written or not
        return f"{struct} has {end} bytes", f"{size}"
    params = function()
    for field, *_ in kind._fields_:
        value, possible = getattr(params, field), DEFAULTS.get(field)
        if possible is not None and value not in possible:
            return f"{struct}.{field} is {' or '.join(map(str, possible))}", f"{value}"
    return None


def _size(function: Callable[..., Any], kind: type[ctypes.Structure]) -> int | None:
    """Return how many bytes a function that returns a struct writes (System V x86-64)."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return None
    raw = ctypes.CFUNCTYPE(_P, _P)(ctypes.cast(cast("Any", function), _P).value or 0)
    return last_written(raw, ctypes.sizeof(kind))
