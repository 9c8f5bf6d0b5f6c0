"""Load a model and make a context of llama.cpp from a request."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.lib.layout import SET_TENSOR_DATA, GgufInitParams
from conformance.ggml.lib.llama import Llama, put
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import TYPES

from .family import Request


class LacksError(UsageError):
    """This version of llama.cpp or libmtmd lacks a symbol, a struct field or an architecture."""

    def __init__(self, what: str, library: str = "llama.cpp") -> None:
        super().__init__(f"this {library} has no {what}")


class RefusedError(UsageError):
    """llama.cpp declines what it need not accept, and says so."""


class UnloadableError(UsageError):
    """llama.cpp refuses a model's file; has its words."""


SPLIT_LAYER, SPLIT_TENSOR = 1, 3
"""`enum llama_split_mode`; `TENSOR` is one meta device over several."""
ALL_LAYERS = 999
_UNKNOWN = re.compile(r"unknown model architecture: ('[^']+')")
MAX_DEVICES = 128
"""At least `llama_max_devices()` of any build: so many shares may be read."""
READ = 0
"""`LLAMA_LOAD_MODE_NONE`: neither mapped nor locked."""


@dataclass(frozen=True, slots=True)
class Split:
    """How several devices share a model."""

    mode: int = SPLIT_TENSOR
    shares: Sequence[float] = ()
    """`tensor_split`; empty: equal shares, or by free memory."""
    layers: int = ALL_LAYERS
    """`n_gpu_layers`; the weights of the others stay on the CPU."""


EVENLY = Split()


def load_model(
    library: Llama,
    request: Request,
    device: str = "",
    weight: Callable[[Tensor, int], None] | None = None,
    *,
    mapped: bool = True,
    split: Split = EVENLY,
) -> int:
    """Load the model of a request and return its `llama_model *`.

    `weight` sets the bytes of a weight if the file has metadata only. Several devices joined by `+` share the model as
    `split` says, by default each tensor as with `-sm tensor`. Without a device the model runs on the CPU alone, because
    a callback would otherwise see a scheduler's split graph, and weights are not repacked. Unless `mapped`, a file's
    weights are read into own memory. Generated models keep their MTP layers.

    Raises:
        LacksError: this version does not know the model's architecture.
        UnloadableError: llama.cpp cannot load the model.
        UsageError: there is no such device.
        ConformanceError: `weight` raised it.
    """
    llama = library.llama
    params = llama.model_default_params()
    handles = _devices(library, device, split)
    devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
    put(params, n_gpu_layers=split.layers if device else 0, use_extra_bufts=int(bool(device)))
    put(params, load_mtp=int(request.recipes))
    shares = (ctypes.c_float * MAX_DEVICES)(*split.shares)  # all 0: equal shares, or by free memory
    if len(handles) > 1:
        put(params, split_mode=split.mode, tensor_split=ctypes.addressof(shares))
    if put(params, devices=ctypes.cast(devices, ctypes.c_void_p)) and device:
        raise UsageError(f"{library.title}: this llama.cpp lacks llama_model_params.devices: it chooses devices itself")
    if not mapped and put(params, use_mmap=0):
        put(params, load_mode=READ)
    errors: list[ConformanceError] = []

    def set_data(pointer: int, _data: int | None) -> None:
        try:
            if weight is not None:
                weight(library.leaf(pointer), pointer)
        except ConformanceError as e:
            errors.append(e)

    if request.from_file:
        model = llama.model_load_from_file(os.fsencode(request.model), params)
    else:
        model = from_metadata(library, request.model, set_data, params)
    if errors:
        raise errors[0]
    if not model:
        raise _unloadable(library.reason())
    return int(model)


def _unloadable(reason: str) -> UsageError:
    unknown = _UNKNOWN.search(reason)
    return (
        LacksError(f"architecture {unknown[1]}") if unknown else UnloadableError(f"llama.cpp cannot load it: {reason}")
    )


def _devices(library: Llama, names: str, split: Split) -> list[int]:
    """Return handles of devices joined by `+`; UsageError if unknown or impossible to join."""
    handles: list[int] = []
    for name in filter(None, names.split("+")):
        handles.append(library.ggml.backend_dev_by_name(name.encode()) or 0)
        if not handles[-1]:
            found = ", ".join(library.devices.registered())
            raise UsageError(f"{library.title} has no device {name!r}; found: {found}")
    if len(handles) > 1 and split.mode == SPLIT_TENSOR and library.ggml.backend_meta_device is None:
        raise UsageError(f"{library.title} cannot split tensors over {names}: it exports no ggml_backend_meta_device")
    return handles


def from_metadata(
    library: Llama, path: str, set_data: Callable[[int, int | None], None], params: ctypes.Structure
) -> int | None:
    """Make a model whose weights `set_data` sets; None if it fails, UsageError if not possible."""
    if library.llama.model_init_from_user is None:
        raise UsageError(
            f"{library.title} cannot create models from metadata: it exports no llama_model_init_from_user"
        )
    metadata = library.gguf.init_from_file(os.fsencode(path), GgufInitParams(True, None))
    if not metadata:
        raise UsageError(f"{path}: llama.cpp cannot read this metadata: {library.reason()}")
    model: int | None = library.llama.model_init_from_user(metadata, SET_TENSOR_DATA(set_data), None, params)
    return model


def new_context(
    library: Llama,
    model: int,
    request: Request,
    callback: Any = None,  # noqa: ANN401  # ctypes' own
    more: Mapping[str, object] | None = None,
) -> int:
    """Make the context of a request and return its `llama_context *`.

    The caller keeps `callback`, an `EVAL_CALLBACK`, alive. `more`: further fields of `llama_context_params`.

    Raises:
        LacksError: this version has no such field.
        RefusedError: llama.cpp cannot make it, as V in blocks needs flash attention.
        UsageError: llama.cpp cannot make it.
    """
    params = library.llama.context_default_params()
    params.n_ctx = request.n_ctx * (1 if request.unified else request.n_seq_max)
    params.n_batch = params.n_ctx
    params.n_ubatch = min(request.n_ubatch, params.n_ctx)
    params.n_seq_max = request.n_seq_max
    params.n_threads = params.n_threads_batch = 1
    params.type_k, params.type_v = TYPES[request.type_k].id, TYPES[request.type_v].id
    params.embeddings = int(request.embeddings)
    if put(params, flash_attn_type=int(request.flash_attn)):
        put(params, flash_attn=int(request.flash_attn))
    if put(params, kv_unified=int(request.unified)) and request.n_seq_max > 1 and not request.unified:
        raise UsageError(f"{library.title}: this llama.cpp lacks kv_unified: it has one stream for all sequences")
    if put(params, swa_full=int(request.swa_full)) and not request.swa_full:
        raise UsageError(f"{library.title}: this llama.cpp lacks swa_full: it keeps every cell of a sliding window")
    if lacking := put(params, **(more or {})):
        raise LacksError(f"llama_context_params.{lacking[0]}")
    if callback is not None:
        params.cb_eval = ctypes.cast(callback, ctypes.c_void_p)
    library.log.lines.clear()  # an error gives the reason of this call alone
    context = library.llama.init_from_model(model, params)
    if not context:
        refuses = TYPES[request.type_v].is_quantized and not request.flash_attn
        error = RefusedError if refuses else UsageError
        raise error(f"llama.cpp cannot create a context: {library.reason()}")
    return int(context)
