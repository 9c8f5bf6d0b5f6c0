"""llama.cpp as a C library: its functions, and the proof that it fills its parameters as a known layout says."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from conformance.ggml.errors import UnavailableError

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
from .library import Library, part

_P = ctypes.c_void_p


class Llama(Library):
    """One loaded llama.cpp and the ggml it uses. `llama.decode(...)` calls `llama_decode(...)`, or what it was called.

    `where` as of `Library`, with all of llama.cpp or `libllama`. UnavailableError as there; or its parameters fit no
    layout of the table.
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
            self.left_out.append(
                "it exports no llama_model_init_from_user, so it plays model files and makes no models from metadata"
            )
        c.log_set(self._log_callback, None)

    def initialise(self, on_abort: Callable[[bytes], None]) -> None:
        """`llama_backend_init`, and the folder's devices; `on_abort` gets the message before ggml ends the process."""
        self._abort_callback = ABORT_CALLBACK(lambda message: on_abort(message or b""))
        if self.ggml.set_abort_callback is not None:
            self.ggml.set_abort_callback(self._abort_callback)
        self.llama.backend_init()
        self.load_devices()

    def reason(self) -> str:
        """What llama.cpp last complained of."""
        return " / ".join(self.complaints()) or "it did not say why"


def put(params: ctypes.Structure, **values: object) -> list[str]:
    """Set parameters; the names of those that this version does not have."""
    known = {name for name, *_ in params._fields_}
    for name, value in values.items():
        if name in known:
            setattr(params, name, value)
    return [name for name in values if name not in known]


def find_llama(lib: Path) -> Path:
    """The library with llama.cpp: in the folder `lib`, beside the file `lib`, or that file itself; UnavailableError if
    the folder has none.
    """
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
    """The first layout of a struct of parameters that `function`, which returns one, fills as `DEFAULTS` says.

    UnavailableError if it fits none; says what differs from the newest.
    """
    differing = [_differs(struct, function, kind) for kind in known]
    for kind, difference in zip(known, differing, strict=True):
        if difference is None:
            return kind
    raise mismatch(title, *(differing[0] or ("", "")))


def _differs(struct: str, function: CType, kind: CType) -> tuple[str, str] | None:
    """What a layout says and what the library has instead; None where it fits."""
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
    """How many bytes a function that returns a struct writes, where the caller passes the place first (System V)."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return None
    raw = ctypes.CFUNCTYPE(_P, _P)(ctypes.cast(cast("Any", function), _P).value or 0)
    return last_written(raw, ctypes.sizeof(kind))
