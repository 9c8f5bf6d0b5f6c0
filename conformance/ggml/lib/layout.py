"""C interface of ggml and llama.cpp: structs by version, functions, ids of ops and types.

A layout has the fields that the headers declare, padded as C does on every 64-bit machine. No version number is
trusted: `library` and `llama` let the loaded library fill these structs, and take the first layout of the table that
fits the result.

Ids differ between versions too, so they are looked up by name. ggml's name tables have no bounds check: a walk stops at
the last known name, or at an entry that cannot be a name of this library (`dladdr` gives a pointer's owner).
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

CType: TypeAlias = Any
"""A ctypes type, function or None; typeshed has no common name for valid result types."""

_I8, _I32, _I64, _Z, _F32 = (
    ctypes.c_int8, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float,
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


class OlderProps(ctypes.Structure):
    """`struct ggml_backend_dev_props` before it had a `device_id`, until about b6400."""

    _fields_ = (
        ("name", _S), ("description", _S), ("memory_free", _Z), ("memory_total", _Z), ("type", ctypes.c_int),
        ("async_", _B), ("host_buffer", _B), ("buffer_from_host_ptr", _B), ("events", _B),
    )  # fmt: skip


class TypeTraits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", _S), ("blck_size", _I64), ("blck_size_interleave", _I64), ("type_size", _Z), ("is_quantized", _B),
        ("to_float", _P), ("from_float_ref", _P),
    )  # fmt: skip


class CpuTypeTraits(ctypes.Structure):
    """`struct ggml_type_traits_cpu`."""

    _fields_ = (("from_float", _P), ("vec_dot", _P), ("vec_dot_type", ctypes.c_int), ("nrows", _I64))


_TENSOR: tuple[tuple[str, CType], ...] = (
    ("type", _I32), ("buffer", _P), ("ne", _I64 * 4), ("nb", _Z * 4), ("op", _I32), ("op_params", _I32 * 16),
    ("flags", _I32), ("src", _P * 10), ("view_src", _P), ("view_offs", _Z), ("data", _P),
    ("name", ctypes.c_char * 64), ("extra", _P), ("padding", ctypes.c_char * 8),
)  # fmt: skip
_OLDER_TENSOR = (*_TENSOR[:7], ("grad", _P), *_TENSOR[7:-1])
"""Layout until about b4100."""


class CTensor(ctypes.Structure):
    """`struct ggml_tensor`."""

    _fields_ = _TENSOR


def tensor_struct(fields: tuple[tuple[str, CType], ...], max_name: int) -> type[ctypes.Structure]:
    """Return `struct ggml_tensor` for a library built with another `GGML_MAX_NAME`."""
    own = tuple((name, ctypes.c_char * max_name if name == "name" else kind) for name, kind in fields)
    return type("NamedTensor", (ctypes.Structure,), {"_fields_": own})


class Embedding(ctypes.Structure):
    """`struct llama_embd`."""

    _fields_ = (("data", _P), ("n_rows", _Z), ("n_embd", _Z))


class Batch(ctypes.Structure):
    """`struct llama_batch`."""

    _fields_ = (
        ("n_tokens", _I32), ("token", _P), ("embd", _P), ("pos", _P), ("n_seq_id", _P), ("seq_id", _P), ("logits", _P),
    )  # fmt: skip


_SLACK = ("slack", ctypes.c_char * 256)
"""Padding after each struct that a library fills, in case its struct is larger."""


_POINTERS = (
    "devices tensor_buft_overrides tensor_split rpc_servers progress_callback progress_callback_user_data kv_overrides "
    "cb_eval cb_eval_user_data abort_callback abort_callback_data samplers ctx_other device image_marker media_marker"
)
_BOOLS = (
    "vocab_only use_mmap use_direct_io use_mlock check_tensors use_extra_bufts no_host no_alloc load_mtp logits_all "
    "embeddings offload_kqv flash_attn no_perf op_offload swa_full kv_unified use_gpu print_timings warmup"
)
_FLOATS = "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow defrag_thold"
_SIZES = "moe_cache_size n_samplers"
_KINDS: dict[str, CType] = {
    name: kind
    for names, kind in ((_POINTERS, _P), (_BOOLS, _I8), (_FLOATS, _F32), (_SIZES, _Z))
    for name in names.split()
}
"""Parameter of a model or context -> its type, if not an enum or a 32-bit int."""


def history(name: str, newest: str, *changes: tuple[str, str]) -> tuple[type[ctypes.Structure], ...]:
    """Return every layout of a struct, newest first; each change is (new text, older text)."""
    out, text = [], newest
    for now, before in (("", ""), *changes):
        assert now in text, now
        text = " ".join(text.replace(now, before).split()) if now else text
        fields = tuple((field, _KINDS.get(field, _I32)) for field in text.split())
        out.append(type(name, (ctypes.Structure,), {"_fields_": (*fields, _SLACK)}))
    return tuple(out)


MODEL_PARAMS = history(
    "llama_model_params",
    "devices tensor_buft_overrides n_gpu_layers split_mode load_mode lazy_mode main_gpu tensor_split progress_callback "
    "progress_callback_user_data kv_overrides vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp",
    ("lazy_mode ", ""),  # ggml 0.21
    (" load_mtp", ""),
    (" load_mode", ""), ("vocab_only ", "vocab_only use_mmap use_direct_io use_mlock "),  # ggml 0.17
    ("use_direct_io ", ""),
    (" no_alloc", ""),  # b7376
    (" no_host", ""),  # b6673
    (" use_extra_bufts", ""),  # b5835
    ("tensor_buft_overrides ", ""),  # b4798
    ("tensor_split ", "tensor_split rpc_servers "),
    ("devices ", ""),  # b3889
)  # fmt: skip
"""`struct llama_model_params`, newest first; comments: last build before the change."""
CONTEXT_PARAMS = history(
    "llama_context_params",
    "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq n_threads n_threads_batch ctx_type "
    "rope_scaling_type pooling_type attention_type flash_attn_type rope_freq_base rope_freq_scale yarn_ext_factor "
    "yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx defrag_thold cb_eval cb_eval_user_data type_k type_v "
    "moe_cache_size abort_callback abort_callback_data embeddings offload_kqv no_perf op_offload swa_full kv_unified "
    "samplers n_samplers ctx_other",
    ("moe_cache_size ", ""),  # ggml 0.25
    ("n_outputs_max_per_seq ", ""),  # ggml 0.17
    (" ctx_other", ""),
    ("n_outputs_max ", ""),
    ("n_rs_seq ", ""), ("ctx_type ", ""),  # ggml 0.11
    (" samplers n_samplers", ""),  # b7376
    ("flash_attn_type ", ""), ("offload_kqv ", "offload_kqv flash_attn "),  # b6301
    (" kv_unified", ""),  # b5835
    (" swa_full", ""),
    (" op_offload", ""),
    ("abort_callback abort_callback_data embeddings offload_kqv flash_attn no_perf",
     "logits_all embeddings offload_kqv flash_attn no_perf abort_callback abort_callback_data"),  # b4798
)  # fmt: skip
"""`struct llama_context_params`, in the same order."""


_WRITTEN = ("type", "buffer", "ne", "nb", "op", "op_params", "flags", "src", "view_src", "view_offs", "data", "name")
_CODE: dict[Any, str] = {_I32: "i", _I64: "q", _Z: "Q", _P: "Q"}


def _packer(kind: type[ctypes.Structure]) -> struct.Struct:
    """Return a packer for the fields `_WRITTEN`; a call per field would be slow."""
    text, end = "=", 0
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
    """Layout of `struct ggml_tensor` in a library."""

    tensor: type[ctypes.Structure] = CTensor
    packer: struct.Struct = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packer", _packer(self.tensor))

    @property
    def overhead(self) -> int:
        """`ggml_tensor_overhead()`: a `ggml_object` of 32 bytes and the tensor."""
        return 32 + ctypes.sizeof(self.tensor)

    @property
    def max_name(self) -> int:
        """`GGML_MAX_NAME`."""
        return int(self.tensor.name.size)


def layouts(overhead: int) -> list[Layout]:
    """Return the tensor layouts with this `ggml_tensor_overhead()` in bytes, newest first."""
    found = []
    for fields in (_TENSOR, _OLDER_TENSOR):
        max_name = overhead - Layout(tensor_struct(fields, 64)).overhead + 64
        if max_name >= 64 and max_name % 8 == 0:
            found.append(Layout(tensor_struct(fields, max_name)))
    return found


DeviceTypes: TypeAlias = tuple[str, ...]
DEVICE_TYPES: DeviceTypes = ("CPU", "GPU", "IGPU", "ACCEL", "META")
"""`enum ggml_backend_dev_type`."""
OLDER_DEVICE_TYPES: DeviceTypes = ("CPU", "GPU", "ACCEL")
"""`enum ggml_backend_dev_type` where `struct ggml_backend_dev_props` is `OlderProps`."""
FIRST_DEVICE_TYPES: DeviceTypes = ("CPU", "GPU", "CPU", "GPU")
"""`enum ggml_backend_dev_type` of b3889, where the CPU has type 2 (full)."""
OLDEST, EXPECTED = "b3889 (October 2024)", "0.26.0"
"""Builds whose layouts were checked; newer ones fit as long as no field moves."""

_F16 = 1
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "n_gpu_layers": (-1, 0, 99, 999), "split_mode": (1,), "main_gpu": (0,), "tensor_split": (None,),
    "progress_callback": (None,), "kv_overrides": (None,), "vocab_only": (0,), "use_mmap": (1,), "use_mlock": (0,),
    "use_direct_io": (0, 1), "check_tensors": (0,), "use_extra_bufts": (1,), "no_host": (0,), "no_alloc": (0,),
    "n_ctx": (512,), "n_batch": (2048,), "n_ubatch": (512,), "n_seq_max": (1,),
    "rope_scaling_type": (-1,), "pooling_type": (-1,), "attention_type": (-1,), "flash_attn_type": (-1,),
    "rope_freq_base": (0,), "rope_freq_scale": (0,), "yarn_ext_factor": (-1,), "yarn_orig_ctx": (0,),
    "cb_eval": (None,), "type_k": (_F16,), "type_v": (_F16,), "abort_callback": (None,), "logits_all": (0,),
    "embeddings": (0,), "offload_kqv": (1,), "flash_attn": (0,), "no_perf": (1,), "op_offload": (1,), "swa_full": (1,),
    "kv_unified": (0,), "samplers": (None,), "n_samplers": (0,), "ctx_other": (None,),
    "use_gpu": (1,), "device": (None,), "print_timings": (1,), "image_marker": (None,), "warmup": (1,),
    "image_min_tokens": (-1,), "image_max_tokens": (-1,), "batch_max_tokens": (1024,),
}  # fmt: skip
"""Parameter -> its defaults in any version, if they distinguish layouts.

They come from `llama_model_default_params`, `llama_context_default_params` and `mtmd_context_params_default`."""


def last_written(fill: Callable[[int], object], room: int) -> int:
    """Return how far `fill` writes from an address on, in bytes; `room` bytes are observed."""
    last = 0
    for poison in (0x5A, 0xA5):
        buffer = ctypes.create_string_buffer(bytes([poison]) * room, room)
        fill(ctypes.addressof(buffer))
        written = [i for i, byte in enumerate(buffer.raw) if byte != poison]
        last = max(last, written[-1] + 1 if written else 0)
    return last


def mismatch(title: str, expected: str, actual: str) -> UnavailableError:
    """Return the error for a library that fits no known layout."""
    return UnavailableError(
        f"{title} does not fit: struct layouts are known for builds from {OLDEST} to ggml {EXPECTED}, where "
        f"{expected}; {actual} found"
    )


# --- functions, and ids by name

Signatures: TypeAlias = "dict[str, tuple[CType, tuple[CType, ...]]]"
"""Symbol without its prefix -> result type and argument types."""

_I, _U, _U8 = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint8

# fmt: off
GGML: Signatures = {
    "init": (_P, (InitParams,)), "free": (None, (_P,)), "get_mem_buffer": (_P, (_P,)),
    "tensor_overhead": (_Z, ()), "graph_overhead_custom": (_Z, (_Z, _B)),
    "op_name": (_P, (_I,)), "unary_op_name": (_P, (_I,)),
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
    "backend_tensor_alloc": (_I, (_P, _P, _P)), "backend_view_init": (_I, (_P,)),
    "backend_graph_compute": (_I, (_P, _P)), "backend_free": (None, (_P,)), "backend_name": (_S, (_P,)),
    "backend_supports_buft": (_B, (_P, _P)),
    "backend_dev_count": (_Z, ()), "backend_dev_get": (_P, (_Z,)), "backend_dev_by_name": (_P, (_S,)),
    "backend_dev_name": (_S, (_P,)), "backend_dev_description": (_S, (_P,)), "backend_dev_init": (_P, (_P, _S)),
    "backend_dev_type": (_I, (_P,)), "backend_dev_buffer_type": (_P, (_P,)),
    "backend_dev_host_buffer_type": (_P, (_P,)), "backend_dev_supports_op": (_B, (_P, _P)),
    "backend_dev_get_props": (None, (_P, _P)), "backend_dev_backend_reg": (_P, (_P,)), "backend_reg_name": (_S, (_P,)),
    "backend_reg_get_proc_address": (_P, (_P, _S)), "backend_reg_dev_get": (_P, (_P, _Z)),
    "backend_sched_new": (_P, (_P, _P, _I, _Z, _B, _B)), "backend_sched_free": (None, (_P,)),
    "backend_sched_reset": (None, (_P,)), "backend_sched_reserve": (_B, (_P, _P)),
    "backend_sched_alloc_graph": (_B, (_P, _P)),
    "backend_sched_graph_compute": (_I, (_P, _P)), "backend_sched_get_n_splits": (_I, (_P,)),
    "backend_sched_get_tensor_backend": (_P, (_P, _P)), "backend_sched_get_buffer_size": (_Z, (_P, _P)),
    "backend_sched_set_eval_callback": (None, (_P, _P, _P)),
}
"""`ggml_*`; tests bind further functions themselves."""

OPTIONAL: Signatures = {
    "backend_dev_memory": (None, (_P, _P, _P)),
    "version": (_S, ()), "commit": (_S, ()), "set_abort_callback": (_P, (ABORT_CALLBACK,)),
    "backend_load_all_from_path": (None, (_S,)), "backend_load": (_P, (_S,)), "backend_reg_by_name": (_P, (_S,)),
    "backend_register": (None, (_P,)), "get_type_traits": (_P, (_I,)), "get_type_traits_cpu": (_P, (_I,)),
    "glu_op_name": (_P, (_I,)), "backend_meta_device": (_P, (_P, _Z, _P, _P)),
    "backend_tensor_memset": (None, (_P, _U8, _Z, _Z)), "backend_tensor_copy": (None, (_P, _P)),
    "backend_tensor_set_2d": (None, (_P, _P, _Z, _Z, _Z, _Z, _Z)),
    "backend_tensor_get_2d": (None, (_P, _P, _Z, _Z, _Z, _Z, _Z)),
    "backend_tensor_set_async": (None, (_P, _P, _P, _Z, _Z)), "backend_tensor_get_async": (None, (_P, _P, _P, _Z, _Z)),
    "backend_tensor_set_2d_async": (None, (_P, _P, _P, _Z, _Z, _Z, _Z, _Z)),
    "backend_tensor_get_2d_async": (None, (_P, _P, _P, _Z, _Z, _Z, _Z, _Z)),
    "backend_buffer_reset": (None, (_P,)), "backend_buffer_init_tensor": (_I, (_P, _P)),
    "backend_tensor_copy_async": (None, (_P, _P, _P, _P)), "backend_synchronize": (None, (_P,)),
    "backend_event_new": (_P, (_P,)), "backend_event_free": (None, (_P,)), "backend_event_record": (None, (_P, _P)),
    "backend_event_wait": (None, (_P, _P)), "backend_event_synchronize": (None, (_P,)),
    "backend_graph_plan_create": (_P, (_P, _P)), "backend_graph_plan_free": (None, (_P, _P)),
    "backend_graph_plan_compute": (_I, (_P, _P)),
    "backend_graph_compute_async": (_I, (_P, _P)), "backend_sched_graph_compute_async": (_I, (_P, _P)),
    "backend_sched_synchronize": (None, (_P,)), "backend_get_device": (_P, (_P,)),
    "backend_sched_set_tensor_backend": (None, (_P, _P, _P)),
}
"""`ggml_*` that some libraries lack."""
LEFT_OUT = {
    "glu_op_name": "it exports no ggml_glu_op_name, so no GLU node runs on it",
    "set_abort_callback": "it exports no ggml_set_abort_callback, so ggml's last message is on stderr only",
}
"""Optional function -> test that is skipped if a library lacks it."""

GGUF: Signatures = {"init_from_file": (_P, (_S, GgufInitParams))}
"""`gguf_*`."""


def llama_functions(model_params: CType, context_params: CType) -> Signatures:
    """Return the `llama_*` signatures for the structs of one layout."""
    return {
        "backend_init": (None, ()), "log_set": (None, (LOG_CALLBACK, _P)),
        "model_default_params": (model_params, ()), "context_default_params": (context_params, ()),
        "model_load_from_file": (_P, (_S, model_params)), "init_from_model": (_P, (_P, context_params)),
        "vocab_n_tokens": (_I, (_P,)), "model_n_embd": (_I, (_P,)),
        "model_has_encoder": (_B, (_P,)), "model_has_decoder": (_B, (_P,)),
        "free": (None, (_P,)), "n_ctx": (_U, (_P,)), "pooling_type": (_I, (_P,)),
        "decode": (_I, (_P, Batch)), "encode": (_I, (_P, Batch)),
        "memory_clear": (None, (_P, _B)),
        "memory_seq_rm": (_B, (_P, _I, _I, _I)), "memory_seq_cp": (None, (_P, _I, _I, _I, _I)),
        "memory_seq_add": (None, (_P, _I, _I, _I, _I)),
        "get_logits_ith": (_P, (_P, _I)), "get_embeddings_ith": (_P, (_P, _I)), "get_embeddings_seq": (_P, (_P, _I)),
    }


LLAMA_OWNERS: Signatures = {"get_memory": (_P, (_P,)), "model_get_vocab": (_P, (_P,))}
"""`llama_*` that return a part of an object; older versions take the object itself."""


def llama_optional(model_params: CType) -> Signatures:
    """Return the `llama_*` signatures that older versions lack.

    Without them no model can be created from metadata, and it is unknown if a memory can shift, if a vocabulary has
    text, and how wide an input embedding is.
    """
    return {
        "model_init_from_user": (_P, (_P, SET_TENSOR_DATA, _P, model_params)), "memory_can_shift": (_B, (_P,)),
        "tokenize": (_I, (_P, _S, _I, _P, _I, _B, _B)), "detokenize": (_I, (_P, _P, _I, _P, _I, _B, _B)),
        "vocab_type": (_I, (_P,)), "model_n_embd_inp": (_I, (_P,)),
    }


LLAMA_VERBS: Signatures = {
    "n_seq_max": (_U, (_P,)), "set_causal_attn": (None, (_P, _B)),
    "model_is_recurrent": (_B, (_P,)), "model_is_hybrid": (_B, (_P,)), "model_rope_type": (_I, (_P,)),
    "model_chat_template": (_S, (_P, _S)), "chat_apply_template": (_I, (_S, _P, _Z, _B, _P, _I)),
    "vocab_is_eog": (_B, (_P, _I)), "vocab_get_add_bos": (_B, (_P,)),
    "model_n_layer": (_I, (_P,)), "set_embeddings": (None, (_P, _B)),
    "memory_seq_keep": (None, (_P, _I)), "memory_seq_div": (None, (_P, _I, _I, _I, _I)),
    "memory_seq_pos_max": (_I, (_P, _I)),
    "state_get_size": (_Z, (_P,)), "state_get_data": (_Z, (_P, _P, _Z)), "state_set_data": (_Z, (_P, _P, _Z)),
    "state_save_file": (_B, (_P, _S, _P, _Z)), "state_load_file": (_B, (_P, _S, _P, _Z, _P)),
    "state_seq_get_size": (_Z, (_P, _I)),
    "state_seq_get_data": (_Z, (_P, _P, _Z, _I)), "state_seq_set_data": (_Z, (_P, _P, _Z, _I)),
    "state_seq_get_size_ext": (_Z, (_P, _I, _U)),
    "state_seq_get_data_ext": (_Z, (_P, _P, _Z, _I, _U)), "state_seq_set_data_ext": (_Z, (_P, _P, _Z, _I, _U)),
    "state_seq_save_file": (_Z, (_P, _S, _I, _P, _Z)), "state_seq_load_file": (_Z, (_P, _S, _I, _P, _Z, _P)),
    "adapter_lora_init": (_P, (_P, _S)), "set_adapters_lora": (_I, (_P, _P, _Z, _P)),
    "set_adapter_lora": (_I, (_P, _P, _F32)), "clear_adapter_lora": (None, (_P,)),
    "set_adapter_cvec": (_I, (_P, _P, _Z, _I, _I, _I)),
    "sampler_chain_default_params": (_I64, ()), "sampler_chain_init": (_P, (_I64,)),
    "sampler_chain_add": (None, (_P, _P)), "sampler_init_greedy": (_P, ()),
    "sampler_init_temp": (_P, (_F32,)), "sampler_init_top_k": (_P, (_I,)),
    "sampler_init_top_p": (_P, (_F32, _Z)), "sampler_init_min_p": (_P, (_F32, _Z)),
    "sampler_init_logit_bias": (_P, (_I, _I, _P)), "sampler_apply": (None, (_P, _P)), "sampler_free": (None, (_P,)),
    "set_sampler": (_B, (_P, _I, _P)), "get_sampled_token_ith": (_I, (_P, _I)),
    "get_sampled_logits_ith": (_P, (_P, _I)), "get_sampled_logits_count_ith": (_U, (_P, _I)),
    "get_sampled_candidates_ith": (_P, (_P, _I)), "get_sampled_candidates_count_ith": (_U, (_P, _I)),
    "model_free": (None, (_P,)), "model_save_to_file": (None, (_P, _S)),
    "model_n_layer_nextn": (_I, (_P,)), "model_n_devices": (_I, (_P,)),
    "set_embeddings_nextn": (None, (_P, _B, _B)), "get_embeddings_nextn_ith": (_P, (_P, _I)),
    "set_nextn_layer_offset": (None, (_P, _I)),
    "batch_ext_init": (_P, (_P,)), "batch_ext_free": (None, (_P,)), "batch_ext_add_token": (_I, (_P, _I, _I)),
    "batch_ext_set_embd_state": (_B, (_P, _I, Embedding)), "batch_ext_set_pos": (_B, (_P, _I, _P)),
    "batch_ext_set_output_logits": (_B, (_P, _I, _B)), "process": (_I, (_P, _I, _P)),
}
"""`llama_*` for the API scenarios; a library may lack any.

`llama_sampler_chain_params` is one bool: a register."""


OLDER_NAMES = {
    "llama_model_load_from_file": ("llama_load_model_from_file",),
    "llama_init_from_model": ("llama_new_context_with_model",),
    "llama_vocab_n_tokens": ("llama_n_vocab",), "llama_model_n_embd": ("llama_n_embd",),
    **{f"llama_memory_{f}": (f"llama_kv_self_{f}", f"llama_kv_cache_{f}")
       for f in ("clear", "can_shift", "seq_rm", "seq_cp", "seq_add", "seq_keep", "seq_div", "seq_pos_max")},
    "llama_model_n_layer": ("llama_n_layer",), "llama_model_rope_type": ("llama_rope_type",),
    "llama_set_adapter_cvec": ("llama_apply_adapter_cvec",),
    # of llama-ext.h, which is C++
    "llama_model_n_devices": ("_Z21llama_model_n_devicesPK11llama_model",),
    "llama_set_embeddings_nextn": ("_Z26llama_set_embeddings_nextnP13llama_contextbb",),
    "llama_get_embeddings_nextn_ith": ("_Z30llama_get_embeddings_nextn_ithP13llama_contexti",),
    "llama_set_nextn_layer_offset": ("_Z28llama_set_nextn_layer_offsetP13llama_contexti",),
}
"""Symbol -> its former or mangled names; `clear` had one argument fewer: the ABI allows it."""
# fmt: on


_LIMIT = 256
_LONGEST = 64
_FAR = 1 << 26
"""Maximum distance in bytes between names of one library, if there is no `dladdr`."""
_NEAR = 1 << 20
"""Distance in bytes within which the next addresses are expected."""
_NAME = re.compile(rb"[A-Z][A-Z0-9_]*")
_TYPE_NAME = re.compile(rb"[ -~]+")


class DlInfo(ctypes.Structure):
    """`Dl_info`; all zero for an address in no library."""

    _fields_ = (("dli_fname", _S), ("dli_fbase", _P), ("dli_sname", _S), ("dli_saddr", _P))


def home(pointer: int) -> DlInfo | None:
    """Return `dladdr`'s answer for an address; None on a system without it."""
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None) if os.name == "posix" else None
    if dladdr is None:
        return None
    dladdr.argtypes = (_P, _P)
    info = DlInfo()
    return info if dladdr(pointer, ctypes.byref(info)) else DlInfo()


def _in_library_of(pointer: int) -> Callable[[int], bool]:
    """Return a predicate: True if an address lies in the library of `pointer`.

    `dladdr` searches all symbols of a library, so it is called only for addresses above those already known: everything
    between the library's base and a known address belongs to the library.
    """
    info = home(pointer)
    if info is None:
        return lambda other: other // _FAR == pointer // _FAR
    base: int | None = info.dli_fbase
    end = pointer

    def test(other: int) -> bool:
        nonlocal end
        if base is None:
            return _base(other) is None
        if other > end:
            end = next((p for p in (other + _NEAR, other) if _base(p) == base), end)
        return base <= other <= end

    return test


def _base(pointer: int) -> int | None:
    info = home(pointer)
    return info.dli_fbase if info is not None else None


def _walk(name_at: Callable[[int], int | None], legal: re.Pattern[bytes]) -> Iterator[tuple[int, str]]:
    is_near: Callable[[int], bool] | None = None
    for i in range(_LIMIT):
        pointer = name_at(i)
        if pointer is None and is_near is not None:
            continue  # a removed type has no name
        if pointer is None or not (is_near is None or is_near(pointer)):
            return
        is_near = is_near or _in_library_of(pointer)
        text = _text(pointer)
        if not legal.fullmatch(text):
            return
        yield i, text.decode()


def _text(pointer: int) -> bytes:
    """Return a C string of at most `_LONGEST` bytes, without reading beyond its end."""
    found = bytearray()
    while len(found) < _LONGEST and (byte := ctypes.c_char.from_address(pointer + len(found)).value) != b"\0":
        found += byte
    return bytes(found)


def ids(name_at: Callable[[int], int | None], known: tuple[str, ...]) -> dict[str, int]:
    """Return name -> id from a function such as `ggml_op_name`; missing names are absent."""
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
    """Return the library's type ids by name, and why other types cannot be used.

    Types are found by `ggml_type_name` and checked with `ggml_blck_size` and `ggml_type_size`. The first dict has name
    -> id of each type with our layout, the second name -> difference for the others.
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
