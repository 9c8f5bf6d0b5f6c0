"""llama.cpp as a C library: found in the wheel (which is never imported) or named by the user, and checked."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from conformance.ggml.errors import UnavailableError
from conformance.ggml.ops.names import GLU_OPS, OPS, UNARY_OPS
from conformance.ggml.types import TYPES

from .layout import (
    ABORT_CALLBACK,
    LOG_CALLBACK,
    SET_TENSOR_DATA,
    TENSOR_OVERHEAD,
    Batch,
    ContextParams,
    GgufInitParams,
    ModelParams,
    check_defaults,
    context_params,
)

WHEEL = "xllamacpp"
"""The wheel whose extension module exports the C API of llama.cpp."""

CType: TypeAlias = Any
"""A ctypes type or None: typeshed has no one name for what may stand as a result type."""

_P, _S, _I, _U, _Z, _B = (
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_bool,
)  # fmt: skip

# fmt: off
FUNCTIONS: dict[str, tuple[CType, tuple[CType, ...]]] = {
    "llama_backend_init": (None, ()), "llama_log_set": (None, (LOG_CALLBACK, _P)),
    "llama_model_default_params": (ModelParams, ()), "llama_context_default_params": (ContextParams, ()),
    "llama_model_init_from_user": (_P, (_P, SET_TENSOR_DATA, _P, ModelParams)),
    "llama_model_load_from_file": (_P, (_S, ModelParams)), "llama_model_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)), "llama_vocab_n_tokens": (_I, (_P,)),
    "llama_model_has_encoder": (_B, (_P,)), "llama_model_has_decoder": (_B, (_P,)),
    "llama_model_meta_val_str": (_I, (_P, _S, _P, _Z)), "llama_model_decoder_start_token": (_I, (_P,)),
    "llama_init_from_model": (_P, (_P, ContextParams)), "llama_free": (None, (_P,)),
    "llama_n_ctx": (_U, (_P,)), "llama_n_ubatch": (_U, (_P,)),
    "llama_decode": (_I, (_P, Batch)), "llama_encode": (_I, (_P, Batch)),
    "llama_get_memory": (_P, (_P,)), "llama_memory_clear": (None, (_P, _B)),
    "llama_memory_seq_rm": (_B, (_P, _I, _I, _I)), "llama_memory_seq_cp": (None, (_P, _I, _I, _I, _I)),
    "llama_memory_seq_add": (None, (_P, _I, _I, _I, _I)), "llama_memory_can_shift": (_B, (_P,)),
    "llama_memory_seq_pos_max": (_I, (_P, _I)),
    "gguf_init_from_file": (_P, (_S, GgufInitParams)), "gguf_free": (None, (_P,)),
    "ggml_tensor_overhead": (_Z, ()), "ggml_nbytes": (_Z, (_P,)), "ggml_version": (_S, ()),
    "ggml_op_name": (_S, (_I,)), "ggml_unary_op_name": (_S, (_I,)), "ggml_glu_op_name": (_S, (_I,)),
    "ggml_type_name": (_S, (_I,)), "ggml_type_size": (_Z, (_I,)), "ggml_blck_size": (ctypes.c_int64, (_I,)),
    "ggml_backend_tensor_set": (None, (_P, _P, _Z, _Z)), "ggml_backend_tensor_get": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_buffer_get_usage": (_I, (_P,)), "ggml_backend_buffer_clear": (None, (_P, ctypes.c_uint8)),
    "ggml_backend_dev_by_type": (_P, (_I,)), "ggml_backend_dev_by_name": (_P, (_S,)),
    "llama_get_logits_ith": (_P, (_P, _I)), "llama_get_embeddings_ith": (_P, (_P, _I)),
    "llama_get_embeddings_seq": (_P, (_P, _I)), "llama_pooling_type": (_I, (_P,)), "llama_model_n_embd": (_I, (_P,)),
    "ggml_set_abort_callback": (_P, (ABORT_CALLBACK,)),
}
"""Every function used -> result and argument types."""
# fmt: on


def find(where: str = "") -> Path:
    """The library that exports the C API of llama.cpp: the file `where`, or that of the installed wheel.

    Raises:
        UnavailableError: there is none; says how to get one.
    """
    if where:
        if not Path(where).is_file():
            raise UnavailableError(f"llama.cpp library {where}: no such file")
        return Path(where)
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in (f"{WHEEL}*.so", f"{WHEEL}*.pyd"):
            for path in sorted(Path(folder).glob(pattern)):
                return path
    raise UnavailableError(
        f"the wheel {WHEEL} with the real llama.cpp is not installed here; install it, or name a library: --lib FILE"
    )


class Library:
    """One loaded llama.cpp. `library.c.llama_decode(...)` calls it.

    Args:
        where: a library file, or "" for the wheel's.

    Raises:
        UnavailableError: none is there, it cannot be loaded, or it is not laid out as `layout` says.
    """

    def __init__(self, where: str = "") -> None:
        # ggml would start a debugger to print a backtrace; the message before it is what matters.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self.path = find(where)
        try:
            handle = ctypes.CDLL(os.fspath(self.path), mode=ctypes.RTLD_LOCAL)
        except OSError as e:
            raise UnavailableError(f"llama.cpp library {self.path} cannot be loaded: {e}") from None
        self.c = SimpleNamespace()
        lacking = []
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(handle, name, None)
            if function is None:
                lacking.append(name)
                continue
            function.restype, function.argtypes = result, arguments
            setattr(self.c, name, function)
        if lacking:
            raise UnavailableError(
                f"{self.path} exports no {', '.join(lacking[:4])}"
                + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
                + f"; a library that exports all of llama.cpp and ggml is needed, such as that of the wheel {WHEEL}"
            )
        self.version = self.c.ggml_version().decode()
        self.title = f"{self.path.name} (ggml {self.version})"
        if self.c.ggml_tensor_overhead() != TENSOR_OVERHEAD:
            found = self.c.ggml_tensor_overhead()
            raise UnavailableError(f"{self.title}: ggml_tensor_overhead() is {found}, {TENSOR_OVERHEAD} expected")
        older = context_params(self.c.llama_context_default_params)
        self.c.llama_context_default_params.restype = older
        self.c.llama_init_from_model.argtypes = (_P, older)
        for function in (self.c.llama_model_default_params, self.c.llama_context_default_params):
            check_defaults(function(), function, self.title)
        self.log: deque[str] = deque(maxlen=64)
        """The library's last log lines."""
        self._log_callback = LOG_CALLBACK(self._logged)
        self.c.llama_log_set(self._log_callback, None)
        self.ops = _by_id(self.c.ggml_op_name, OPS)
        self.sub_ops = {
            "UNARY": _by_id(self.c.ggml_unary_op_name, UNARY_OPS),
            "GLU": _by_id(self.c.ggml_glu_op_name, GLU_OPS),
        }
        """Op -> id of its sub-op here -> name."""
        self.types = {t.id: t for t in TYPES.values()}

    def _logged(self, _level: int, text: bytes | None, _data: int | None) -> None:
        self.log.append((text or b"").decode(errors="replace").rstrip())


def _by_id(name_of: Any, known: tuple[str, ...]) -> dict[int, str]:  # noqa: ANN401  # a foreign function
    """Id -> name; ggml's tables have no bounds check, so the walk ends at the last name known."""
    found: dict[int, str] = {}
    for i in range(len(known) + 8):
        name = name_of(i).decode(errors="replace")
        found[i] = name
        if name == known[-1]:
            return found
    raise UnavailableError(f"no {known[-1]} among the names of this ggml: it is older or newer than this release knows")
