"""The C structs of llama.cpp and ggml that a recording passes and reads, and the proof that a library uses them.

`llama_context_params` and `llama_model_params` change between releases. They are declared as llama.h of
`EXPECTED` has them, with slack behind; what a library's own `*_default_params` put into them is checked field by field
before anything is trusted, and, where the calling convention shows it, so is how many bytes it writes.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable
from typing import Any, cast

from conformance.ggml.errors import UnavailableError
from conformance.ggml.tensor import MAX_NAME

EXPECTED = "the wheel xllamacpp 2026.10.11549 (ggml 0.26)"
"""The release whose headers these structs were read from."""

TENSOR = struct.Struct(f"<i4xQ4q4Qi16ii10QQQQ{MAX_NAME}s")
"""`struct ggml_tensor`: type, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name."""
TENSOR_OVERHEAD = 368
"""`ggml_tensor_overhead()`: a `ggml_object` of 32 bytes and the tensor."""

_SLACK = 256
_I8, _I32, _U32, _F32, _P = ctypes.c_int8, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p

EVAL_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, _P, ctypes.c_bool, _P)
SET_TENSOR_DATA = ctypes.CFUNCTYPE(None, _P, _P)
ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _P)


class GgufInitParams(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", _P))


class ModelParams(ctypes.Structure):
    """`struct llama_model_params`."""

    _fields_ = (
        ("devices", _P), ("tensor_buft_overrides", _P), ("n_gpu_layers", _I32), ("split_mode", _I32),
        ("load_mode", _I32), ("lazy_mode", _I32), ("main_gpu", _I32), ("tensor_split", _P),
        ("progress_callback", _P), ("progress_callback_user_data", _P), ("kv_overrides", _P),
        ("vocab_only", _I8), ("check_tensors", _I8), ("use_extra_bufts", _I8), ("no_host", _I8), ("no_alloc", _I8),
        ("load_mtp", _I8), ("slack", ctypes.c_char * _SLACK),
    )  # fmt: skip


class ContextParams(ctypes.Structure):
    """`struct llama_context_params`."""

    _fields_ = (
        ("n_ctx", _U32), ("n_batch", _U32), ("n_ubatch", _U32), ("n_seq_max", _U32), ("n_rs_seq", _U32),
        ("n_outputs_max", _U32), ("n_outputs_max_per_seq", _U32), ("n_threads", _I32), ("n_threads_batch", _I32),
        ("ctx_type", _I32), ("rope_scaling_type", _I32), ("pooling_type", _I32), ("attention_type", _I32),
        ("flash_attn_type", _I32),
        ("rope_freq_base", _F32), ("rope_freq_scale", _F32), ("yarn_ext_factor", _F32), ("yarn_attn_factor", _F32),
        ("yarn_beta_fast", _F32), ("yarn_beta_slow", _F32), ("yarn_orig_ctx", _U32), ("defrag_thold", _F32),
        ("cb_eval", _P), ("cb_eval_user_data", _P), ("type_k", _I32), ("type_v", _I32),
        ("moe_cache_size", ctypes.c_size_t), ("abort_callback", _P), ("abort_callback_data", _P),
        ("embeddings", _I8), ("offload_kqv", _I8), ("no_perf", _I8), ("op_offload", _I8), ("swa_full", _I8),
        ("kv_unified", _I8), ("samplers", _P), ("n_samplers", ctypes.c_size_t), ("ctx_other", _P),
        ("slack", ctypes.c_char * _SLACK),
    )  # fmt: skip


class OlderContextParams(ctypes.Structure):
    """`struct llama_context_params` before it had `moe_cache_size` (llama-cpp-python 0.3.36, ggml 0.25)."""

    _fields_ = tuple(f for f in ContextParams._fields_ if f[0] != "moe_cache_size")


CONTEXT_PARAMS: tuple[type[ctypes.Structure], ...] = (ContextParams, OlderContextParams)
"""What `llama_context_params` has looked like, the newest first."""


class Batch(ctypes.Structure):
    """`struct llama_batch`."""

    _fields_ = (
        ("n_tokens", _I32), ("token", _P), ("embd", _P), ("pos", _P), ("n_seq_id", _P), ("seq_id", _P), ("logits", _P),
    )  # fmt: skip


_F16 = 1
_CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "flash_attn_type": -1, "yarn_orig_ctx": 0,
    "cb_eval": None, "type_k": _F16, "type_v": _F16, "abort_callback": None,
    "embeddings": 0, "offload_kqv": 1, "no_perf": 1, "op_offload": 1, "swa_full": 1, "kv_unified": 0,
    "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
_DEFAULTS: dict[type[ctypes.Structure], dict[str, Any]] = {
    ModelParams: {
        "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "tensor_split": None, "kv_overrides": None,
        "vocab_only": 0, "check_tensors": 0, "use_extra_bufts": 1, "no_host": 0, "no_alloc": 0,
    },
    ContextParams: _CONTEXT_DEFAULTS,
    OlderContextParams: _CONTEXT_DEFAULTS,
}  # fmt: skip
"""What `llama_model_default_params` and `llama_context_default_params` say, as far as it tells the layout."""


def check_defaults(found: ctypes.Structure, function: Callable[..., Any], title: str) -> None:
    """Whether `function`, which returned `found`, fills the struct as it is declared here.

    Raises:
        UnavailableError: it does not; names the library and the field.
    """
    kind = type(found)
    for field, expected in _DEFAULTS[kind].items():
        value = getattr(found, field)
        if value != expected:
            raise _mismatch(title, f"{kind.__name__}.{field} {expected}", f"{value}")
    size = _written(function, kind)
    declared = kind.slack.offset
    if size is not None and not declared - 8 < size <= declared:
        raise _mismatch(title, f"{kind.__name__} of {declared} bytes", f"{size}")


def context_params(function: Callable[..., Any]) -> type[ctypes.Structure]:
    """Which of `CONTEXT_PARAMS` the function `llama_context_default_params` fills; the newest where that is hidden."""
    size = _written(function, ContextParams)
    return next((k for k in CONTEXT_PARAMS if size and k.slack.offset - 8 < size <= k.slack.offset), ContextParams)


def _written(function: Callable[..., Any], kind: type[ctypes.Structure]) -> int | None:
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


def _mismatch(title: str, expected: str, came: str) -> UnavailableError:
    return UnavailableError(
        f"{title} does not lay its structs out as {EXPECTED}: {expected} expected, {came} found; use that release"
    )
