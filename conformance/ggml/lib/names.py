"""The symbols of ggml and llama.cpp with their C signatures, and the ids that a library gives to ops and types.

Ids differ between versions, so they are looked up by name. ggml's tables of names have no bounds check: a walk stops at
the last name known, or where an entry cannot be a name of this library (`dladdr` knows which library a pointer is in).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

from conformance.ggml.types import TYPES

from .layout import ABORT_CALLBACK, LOG_CALLBACK, SET_TENSOR_DATA, Batch, GgufInitParams, InitParams

CType: TypeAlias = Any
"""A ctypes type, function or None: typeshed has no one name for what may stand as a result type."""
Signatures: TypeAlias = "dict[str, tuple[CType, tuple[CType, ...]]]"
"""Symbol without its prefix -> result and argument types."""

_P, _S, _B = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_I, _U, _I64, _Z, _U8 = ctypes.c_int, ctypes.c_uint32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_uint8

# fmt: off
GGML: Signatures = {
    "init": (_P, (InitParams,)), "free": (None, (_P,)), "get_mem_buffer": (_P, (_P,)),
    "tensor_overhead": (_Z, ()), "graph_overhead_custom": (_Z, (_Z, _B)),
    "op_name": (_P, (_I,)), "unary_op_name": (_P, (_I,)), "glu_op_name": (_P, (_I,)),
    "type_name": (_P, (_I,)), "blck_size": (_I64, (_I,)), "type_size": (_Z, (_I,)), "nbytes": (_Z, (_P,)),
    "new_tensor_1d": (_P, (_P, _I, _I64)), "new_tensor_4d": (_P, (_P, _I, _I64, _I64, _I64, _I64)),
    "set_name": (_P, (_P, _S)), "set_input": (None, (_P,)), "set_output": (None, (_P,)),
    "scale": (_P, (_P, _P, ctypes.c_float)), "view_1d": (_P, (_P, _P, _I64, _Z)),
    "new_graph_custom": (_P, (_P, _Z, _B)), "build_forward_expand": (None, (_P, _P)),
    "graph_add_node": (None, (_P, _P)),
    "gallocr_new": (_P, (_P,)), "gallocr_free": (None, (_P,)), "gallocr_reserve": (_B, (_P, _P)),
    "gallocr_alloc_graph": (_B, (_P, _P)), "gallocr_get_buffer_size": (_Z, (_P, _I)),
    "log_set": (None, (_P, _P)),
    "backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "backend_buffer_free": (None, (_P,)), "backend_buffer_name": (_S, (_P,)), "backend_buffer_get_size": (_Z, (_P,)),
    "backend_buffer_clear": (None, (_P, _U8)), "backend_buffer_get_base": (_P, (_P,)),
    "backend_buffer_set_usage": (None, (_P, _I)), "backend_buffer_get_usage": (_I, (_P,)),
    "backend_buffer_get_type": (_P, (_P,)),
    "backend_buft_name": (_S, (_P,)), "backend_buft_is_host": (_B, (_P,)), "backend_buft_get_alignment": (_Z, (_P,)),
    "backend_buft_get_max_size": (_Z, (_P,)), "backend_buft_alloc_buffer": (_P, (_P, _Z)),
    "backend_buft_get_alloc_size": (_Z, (_P, _P)),
    "backend_tensor_set": (None, (_P, _P, _Z, _Z)), "backend_tensor_get": (None, (_P, _P, _Z, _Z)),
    "backend_tensor_memset": (None, (_P, _U8, _Z, _Z)), "backend_tensor_alloc": (_I, (_P, _P, _P)),
    "backend_view_init": (_I, (_P,)),
    "backend_graph_compute": (_I, (_P, _P)), "backend_free": (None, (_P,)), "backend_name": (_S, (_P,)),
    "backend_supports_buft": (_B, (_P, _P)),
    "backend_dev_count": (_Z, ()), "backend_dev_get": (_P, (_Z,)), "backend_dev_by_name": (_P, (_S,)),
    "backend_dev_name": (_S, (_P,)), "backend_dev_description": (_S, (_P,)), "backend_dev_init": (_P, (_P, _S)),
    "backend_dev_type": (_I, (_P,)), "backend_dev_buffer_type": (_P, (_P,)),
    "backend_dev_host_buffer_type": (_P, (_P,)), "backend_dev_supports_op": (_B, (_P, _P)),
    "backend_dev_backend_reg": (_P, (_P,)), "backend_reg_name": (_S, (_P,)),
    "backend_reg_get_proc_address": (_P, (_P, _S)),
    "backend_sched_new": (_P, (_P, _P, _I, _Z, _B, _B)), "backend_sched_free": (None, (_P,)),
    "backend_sched_reset": (None, (_P,)), "backend_sched_alloc_graph": (_B, (_P, _P)),
    "backend_sched_graph_compute": (_I, (_P, _P)), "backend_sched_get_n_splits": (_I, (_P,)),
    "backend_sched_get_tensor_backend": (_P, (_P, _P)), "backend_sched_get_buffer_size": (_Z, (_P, _P)),
    "backend_sched_set_eval_callback": (None, (_P, _P, _P)),
}
"""`ggml_*`; what tests call besides is bound by them."""

OPTIONAL: Signatures = {
    "version": (_S, ()), "commit": (_S, ()), "set_abort_callback": (_P, (ABORT_CALLBACK,)),
    "backend_load_all_from_path": (None, (_S,)), "get_type_traits": (_P, (_I,)),
    "get_type_traits_cpu": (_P, (_I,)),
}
"""`ggml_*` that some libraries lack."""

GGUF: Signatures = {"init_from_file": (_P, (_S, GgufInitParams))}
"""`gguf_*`."""


def llama(model_params: CType, context_params: CType) -> Signatures:
    """`llama_*`, for the structs of one layout."""
    return {
        "backend_init": (None, ()), "log_set": (None, (LOG_CALLBACK, _P)),
        "model_default_params": (model_params, ()), "context_default_params": (context_params, ()),
        "model_init_from_user": (_P, (_P, SET_TENSOR_DATA, _P, model_params)),
        "model_load_from_file": (_P, (_S, model_params)), "init_from_model": (_P, (_P, context_params)),
        "model_get_vocab": (_P, (_P,)), "vocab_n_tokens": (_I, (_P,)), "model_n_embd": (_I, (_P,)),
        "model_has_encoder": (_B, (_P,)), "model_has_decoder": (_B, (_P,)), "model_decoder_start_token": (_I, (_P,)),
        "free": (None, (_P,)), "n_ctx": (_U, (_P,)), "pooling_type": (_I, (_P,)),
        "decode": (_I, (_P, Batch)), "encode": (_I, (_P, Batch)),
        "get_memory": (_P, (_P,)), "memory_clear": (None, (_P, _B)), "memory_can_shift": (_B, (_P,)),
        "memory_seq_rm": (_B, (_P, _I, _I, _I)), "memory_seq_cp": (None, (_P, _I, _I, _I, _I)),
        "memory_seq_add": (None, (_P, _I, _I, _I, _I)),
        "get_logits_ith": (_P, (_P, _I)), "get_embeddings_ith": (_P, (_P, _I)), "get_embeddings_seq": (_P, (_P, _I)),
    }
# fmt: on


_LIMIT = 256
_FAR = 1 << 26
"""Where `dladdr` is missing: names of one library are never this many bytes apart."""
_NAME = re.compile(rb"[A-Z][A-Z0-9_]*")
_TYPE_NAME = re.compile(rb"[ -~]+")


class _DlInfo(ctypes.Structure):
    """`Dl_info`."""

    _fields_ = (("dli_fname", _S), ("dli_fbase", _P), ("dli_sname", _S), ("dli_saddr", _P))


def _home(pointer: int) -> int:
    """Something equal for all pointers into one library."""
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None) if os.name == "posix" else None
    if dladdr is None:
        return pointer // _FAR
    dladdr.argtypes = (_P, _P)
    info = _DlInfo()
    return (info.dli_fbase or 0) if dladdr(pointer, ctypes.byref(info)) else 0


def _walk(name_at: Callable[[int], int | None], legal: re.Pattern[bytes]) -> Iterator[tuple[int, str]]:
    home: int | None = None
    for i in range(_LIMIT):
        pointer = name_at(i)
        if pointer is None and home is not None:
            continue  # a removed type has no name
        if pointer is None or home not in (None, _home(pointer)):
            return
        home = _home(pointer) if home is None else home
        text = ctypes.string_at(pointer, 64).split(b"\0", 1)[0]
        if not legal.fullmatch(text):
            return
        yield i, text.decode()


def ids(name_at: Callable[[int], int | None], known: tuple[str, ...]) -> dict[str, int]:
    """Name -> id, by a function such as `ggml_op_name`; the names of `known` that the library lacks are absent."""
    found: dict[str, int] = {}
    for i, name in _walk(name_at, _NAME):
        if name in found:
            break
        if name in known:
            found[name] = i
        if name == known[-1]:
            break
    return found


def type_ids(ggml: SimpleNamespace) -> tuple[dict[str, int], dict[str, str]]:
    """Types by `ggml_type_name`, checked against `ggml_blck_size` and `ggml_type_size`.

    Returns:
        name -> id of each type that is laid out as ours, and name -> what differs for the others.
    """
    last = max(t.id for t in TYPES.values())
    seen: dict[str, int] = {}
    for i, name in _walk(ggml.type_name, _TYPE_NAME):
        if i > last:
            break
        seen[name] = i
    same: dict[str, int] = {}
    others: dict[str, str] = {}
    for name, t in TYPES.items():
        if name not in seen:
            others[name] = "is not in this library"
            continue
        i = seen[name]
        blck_size, type_size = ggml.blck_size(i), ggml.type_size(i)
        if (i, blck_size, type_size) == (t.id, t.blck_size, t.type_size):
            same[name] = i
        else:
            others[name] = (
                f"has id {t.id} and {t.type_size} bytes for {t.blck_size} elements, "
                f"in this library id {i} and {type_size} bytes for {blck_size}"
            )
    return same, others
