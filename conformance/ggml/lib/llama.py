"""llama.cpp as a C library: its functions, and the proof that it fills its parameters as a known layout says."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from conformance.ggml.errors import UnavailableError

from .layout import ABORT_CALLBACK, CONTEXT_DEFAULTS, GGUF, LAYOUTS, MODEL_DEFAULTS, llama_functions, mismatch
from .library import Library, part

_P = ctypes.c_void_p


class Llama(Library):
    """One loaded llama.cpp and the ggml it uses. `llama.decode(...)` calls `llama_decode(...)`.

    `where` as of `Library`, with all of llama.cpp or `libllama`. UnavailableError as there; or its parameters are not
    laid out as in `layout.LAYOUTS`.
    """

    parts: ClassVar = ("llama", *Library.parts)

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.llama, self.gguf = SimpleNamespace(), SimpleNamespace()
        newest = LAYOUTS[0]
        lacking = self._bind(self.llama, "llama_", llama_functions(newest.model_params, newest.context_params))
        self._require(lacking + self._bind(self.gguf, "gguf_", GGUF))
        size = _size(self.llama.context_default_params, newest.context_params)
        layout = next((x for x in LAYOUTS if size and _fits(x.context_params, size)), newest)
        self._bind(self.llama, "llama_", llama_functions(layout.model_params, layout.context_params))
        check(self.llama.model_default_params, MODEL_DEFAULTS, self.title)
        check(self.llama.context_default_params, CONTEXT_DEFAULTS, self.title)
        self.llama.log_set(self._log_callback, None)

    def initialise(self, on_abort: Callable[[bytes], None]) -> None:
        """`llama_backend_init`; `on_abort` gets the message before ggml ends the process."""
        self._abort_callback = ABORT_CALLBACK(lambda message: on_abort(message or b""))
        if self.ggml.set_abort_callback is not None:
            self.ggml.set_abort_callback(self._abort_callback)
        self.llama.backend_init()

    def reason(self) -> str:
        """What llama.cpp last complained of."""
        return " / ".join(self.complaints()) or "it did not say why"


def find_llama(lib: Path) -> Path:
    """The library with llama.cpp: in the folder `lib`, beside the file `lib`, or that file itself; UnavailableError if
    the folder has none.
    """
    found = part(lib if lib.is_dir() else lib.parent, "llama")
    if found is None and lib.is_dir():
        raise UnavailableError(f"{lib}: no libllama there, so llama.cpp cannot run on this library")
    return found or lib


def check(function: Any, defaults: Mapping[str, Any], title: str) -> None:  # noqa: ANN401  # a foreign function
    """Check that `function`, which returns a struct of parameters, fills it as it is declared.

    UnavailableError if it does not; names the library and the field.
    """
    params = function()
    kind = type(params)
    for field, expected in defaults.items():
        value = getattr(params, field)
        if value != expected:
            raise mismatch(title, f"{kind.__name__}.{field} is {expected}", f"{value}")
    size = _size(function, kind)
    if size is not None and not _fits(kind, size):
        raise mismatch(title, f"{kind.__name__} has {kind.slack.offset} bytes", f"{size}")


def _fits(kind: Any, size: int) -> bool:  # noqa: ANN401  # a ctypes structure with a field `slack`
    """Whether a struct of which `size` bytes are written can be `kind`: padding at its end is not."""
    return bool(kind.slack.offset - 8 < size <= kind.slack.offset)


def _size(function: Callable[..., Any], kind: type[ctypes.Structure]) -> int | None:
    """How many bytes a function that returns a struct writes, where the caller passes the place first (System V)."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return None
    raw = ctypes.CFUNCTYPE(_P, _P)(ctypes.cast(cast("Any", function), _P).value or 0)
    last = 0
    for poison in (0x5A, 0xA5):
        buffer = ctypes.create_string_buffer(bytes([poison]) * ctypes.sizeof(kind), ctypes.sizeof(kind))
        raw(ctypes.addressof(buffer))
        written = [i for i, byte in enumerate(buffer.raw) if byte != poison]
        last = max(last, written[-1] + 1 if written else 0)
    return last
