"""The C interface of ggml and llama.cpp: structs by version (`LAYOUTS`), functions, and ids of ops and types.

A layout is what the headers declare, padded as C does on every 64-bit machine. No version number is trusted: `library`
and `llama` let the loaded library fill these structs, and take the first layout of the table that fits what it wrote.

Ids differ between versions too, so they are looked up by name. ggml's tables of names have no bounds check: a walk
stops at the last name known, or where an entry cannot be a name of this library (`dladdr` says whose a pointer is).
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

from conformance.ggml.errors import UnavailableError
from conformance.ggml.types import TYPES

_I8, _I32, _U32, _I64, _Z, _F32 = (
    ctypes.c_int8, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float,
)  # fmt: skip
_P, _S, _B = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool

EVAL_CALLBACK = ctypes.CFUNCTYPE(_B, _P, _B, _P)
"""`ggml_backend_sched_eval_callback`."""
ABORT_CALLBACK = ctypes.CFUNCTYPE(None, _S)
LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, _S, _P)
SET_TENSOR_DATA = ctypes.CFUNCTYPE(None, _P, _P)
"""`llama_model_set_tensor_data_t`."""
FROM_FLOAT = ctypes.CFUNCTYPE(None, _P, _P, _I64)
"""`ggml_from_float_t`."""

USAGE_ANY, USAGE_WEIGHTS, USAGE_COMPUTE = 0, 1, 2
"""`enum ggml_backend_buffer_usage`."""
STATUS = {-2: "ALLOC_FAILED", -1: "FAILED", 1: "ABORTED"}
"""`enum ggml_status` except SUCCESS."""


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", _B))


class GgufInitParams(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", _B), ("ctx", _P))


class Feature(ctypes.Structure):
    """`struct ggml_backend_feature`."""

    _fields_ = (("name", _S), ("value", _S))


class TypeTraits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", _S), ("blck_size", _I64), ("blck_size_interleave", _I64), ("type_size", _Z), ("is_quantized", _B),
        ("to_float", _P), ("from_float_ref", _P),
    )  # fmt: skip


class CpuTypeTraits(ctypes.Structure):
    """`struct ggml_type_traits_cpu`."""

    _fields_ = (("from_float", _P), ("vec_dot", _P), ("vec_dot_type", ctypes.c_int), ("nrows", _I64))


class CTensor(ctypes.Structure):
    """`struct ggml_tensor`."""

    _fields_ = (
        ("type", _I32), ("buffer", _P), ("ne", _I64 * 4), ("nb", _Z * 4), ("op", _I32), ("op_params", _I32 * 16),
        ("flags", _I32), ("src", _P * 10), ("view_src", _P), ("view_offs", _Z), ("data", _P),
        ("name", ctypes.c_char * 64), ("extra", _P), ("padding", ctypes.c_char * 8),
    )  # fmt: skip


class Batch(ctypes.Structure):
    """`struct llama_batch`."""

    _fields_ = (
        ("n_tokens", _I32), ("token", _P), ("embd", _P), ("pos", _P), ("n_seq_id", _P), ("seq_id", _P), ("logits", _P),
    )  # fmt: skip


_SLACK = ("slack", ctypes.c_char * 256)
"""Behind each struct that a library fills: where its own is larger, nothing else is overwritten."""


class ModelParams(ctypes.Structure):
    """`struct llama_model_params`."""

    _fields_ = (
        ("devices", _P), ("tensor_buft_overrides", _P), ("n_gpu_layers", _I32), ("split_mode", _I32),
        ("load_mode", _I32), ("lazy_mode", _I32), ("main_gpu", _I32), ("tensor_split", _P),
        ("progress_callback", _P), ("progress_callback_user_data", _P), ("kv_overrides", _P),
        ("vocab_only", _I8), ("check_tensors", _I8), ("use_extra_bufts", _I8), ("no_host", _I8), ("no_alloc", _I8),
        ("load_mtp", _I8), _SLACK,
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
        ("moe_cache_size", _Z), ("abort_callback", _P), ("abort_callback_data", _P),
        ("embeddings", _I8), ("offload_kqv", _I8), ("no_perf", _I8), ("op_offload", _I8), ("swa_full", _I8),
        ("kv_unified", _I8), ("samplers", _P), ("n_samplers", _Z), ("ctx_other", _P), _SLACK,
    )  # fmt: skip


class OlderContextParams(ctypes.Structure):
    """`struct llama_context_params` before it had `moe_cache_size`."""

    _fields_ = tuple(f for f in ContextParams._fields_ if f[0] != "moe_cache_size")


_WRITTEN = ("type", "buffer", "ne", "nb", "op", "op_params", "flags", "src", "view_src", "view_offs", "data", "name")
_CODE: dict[Any, str] = {_I32: "i", _I64: "q", _Z: "Q", _P: "Q"}


def _packer(kind: type[ctypes.Structure]) -> struct.Struct:
    """Packs the fields `_WRITTEN` of a tensor in one call: a call per field would make rebuilding a graph slow."""
    text, end = "<", 0
    for name, type_, *_ in kind._fields_:
        if name not in _WRITTEN:
            continue
        at = getattr(kind, name)
        item, count = (type_._type_, type_._length_) if issubclass(type_, ctypes.Array) else (type_, 1)
        text += f"{at.offset - end}x{count}" + ("s" if item is ctypes.c_char else _CODE[item])
        end = at.offset + at.size
    return struct.Struct(text)


@dataclass(frozen=True, slots=True)
class Layout:
    """What changes between versions of ggml and llama.cpp."""

    version: str
    """The ggml whose headers it was read from."""
    tensor: type[ctypes.Structure] = CTensor
    model_params: type[ctypes.Structure] = ModelParams
    context_params: type[ctypes.Structure] = ContextParams
    device_types: tuple[str, ...] = ("CPU", "GPU", "IGPU", "ACCEL", "META")
    """`enum ggml_backend_dev_type`."""
    packer: struct.Struct = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packer", _packer(self.tensor))

    @property
    def overhead(self) -> int:
        """`ggml_tensor_overhead()`: a `ggml_object` of 32 bytes and the tensor."""
        return 32 + ctypes.sizeof(self.tensor)


LAYOUTS = (
    Layout("0.26.0"),  # the wheel xllamacpp 2026.10.11549
    Layout("0.25", context_params=OlderContextParams),  # llama-cpp-python 0.3.36
)
"""Every layout known, the newest first."""
EXPECTED = LAYOUTS[0].version

_F16 = 1
MODEL_DEFAULTS: dict[str, Any] = {
    "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "tensor_split": None, "kv_overrides": None,
    "vocab_only": 0, "check_tensors": 0, "use_extra_bufts": 1, "no_host": 0, "no_alloc": 0,
}  # fmt: skip
"""What `llama_model_default_params` gives, as far as it tells the layout."""
CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "flash_attn_type": -1, "yarn_orig_ctx": 0,
    "cb_eval": None, "type_k": _F16, "type_v": _F16, "abort_callback": None,
    "embeddings": 0, "offload_kqv": 1, "no_perf": 1, "op_offload": 1, "swa_full": 1, "kv_unified": 0,
    "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
"""What `llama_context_default_params` gives, likewise."""


def mismatch(title: str, expected: str, actual: str) -> UnavailableError:
    """The error of a library that fits no layout of the table."""
    return UnavailableError(
        f"{title} does not fit: struct layouts are known for ggml {' and '.join(x.version for x in LAYOUTS)}, where "
        f"{expected}; {actual} found. Use a library of about that version"
    )


# --- functions, and ids by name

CType: TypeAlias = Any
"""A ctypes type, function or None: typeshed has no one name for what may stand as a result type."""
Signatures: TypeAlias = "dict[str, tuple[CType, tuple[CType, ...]]]"
"""Symbol without its prefix -> result and argument types."""

_I, _U, _U8 = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint8

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
    "backend_sched_reset": (None, (_P,)), "backend_sched_reserve": (_B, (_P, _P)),
    "backend_sched_alloc_graph": (_B, (_P, _P)),
    "backend_sched_graph_compute": (_I, (_P, _P)), "backend_sched_get_n_splits": (_I, (_P,)),
    "backend_sched_get_tensor_backend": (_P, (_P, _P)), "backend_sched_get_buffer_size": (_Z, (_P, _P)),
    "backend_sched_set_eval_callback": (None, (_P, _P, _P)),
}
"""`ggml_*`; what tests call besides is bound by them."""

OPTIONAL: Signatures = {
    "version": (_S, ()), "commit": (_S, ()), "set_abort_callback": (_P, (ABORT_CALLBACK,)),
    "backend_load_all_from_path": (None, (_S,)), "backend_load": (_P, (_S,)), "backend_reg_by_name": (_P, (_S,)),
    "backend_register": (None, (_P,)), "get_type_traits": (_P, (_I,)),
    "get_type_traits_cpu": (_P, (_I,)),
}
"""`ggml_*` that some libraries lack."""

GGUF: Signatures = {"init_from_file": (_P, (_S, GgufInitParams))}
"""`gguf_*`."""


def llama_functions(model_params: CType, context_params: CType) -> Signatures:
    """`llama_*`, for the structs of one layout."""
    return {
        "backend_init": (None, ()), "log_set": (None, (LOG_CALLBACK, _P)),
        "model_default_params": (model_params, ()), "context_default_params": (context_params, ()),
        "model_init_from_user": (_P, (_P, SET_TENSOR_DATA, _P, model_params)),
        "model_load_from_file": (_P, (_S, model_params)), "init_from_model": (_P, (_P, context_params)),
        "model_get_vocab": (_P, (_P,)), "vocab_n_tokens": (_I, (_P,)), "model_n_embd": (_I, (_P,)),
        "model_has_encoder": (_B, (_P,)), "model_has_decoder": (_B, (_P,)),
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
    table: dict[str, int] = {}
    for i, name in _walk(name_at, _NAME):
        if name in table:
            break
        if name in known:
            table[name] = i
        if name == known[-1]:
            break
    return table


def type_ids(ggml: SimpleNamespace) -> tuple[dict[str, int], dict[str, str]]:
    """Types by `ggml_type_name`, checked against `ggml_blck_size` and `ggml_type_size`.

    Returns name -> id of each type that is laid out as ours, and name -> what differs for the others.
    """
    last = max(t.id for t in TYPES.values())
    here: dict[str, int] = {}
    for i, name in _walk(ggml.type_name, _TYPE_NAME):
        if i > last:
            break
        here[name] = i
    same: dict[str, int] = {}
    others: dict[str, str] = {}
    for name, t in TYPES.items():
        if name not in here:
            others[name] = "is not in this library"
            continue
        i = here[name]
        blck_size, type_size = ggml.blck_size(i), ggml.type_size(i)
        if (i, blck_size, type_size) == (t.id, t.blck_size, t.type_size):
            same[name] = i
        else:
            others[name] = (
                f"has id {t.id} and {t.type_size} bytes for {t.blck_size} elements, "
                f"in this library id {i} and {type_size} bytes for {blck_size}"
            )
    return same, others
