"""LoRA adapters and control vectors for a generated model."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.llama.zoo.load import RefusedError

from .harness import F32, Context, Harness

_WEIGHT = re.compile(r"(?:enc\.|dec\.)?blk\.\d+\.(?!.*(?:norm|conv|gate_inp|lerp|decay|rel_b|indexer|cls)).+\.weight")
_LEAST = 16
"""Smallest side of a matrix that gets an adapter."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`llama_adapter_lora *` and its scale."""

    pointer: int
    scale: float = 1.0


Factors = dict[str, tuple[F32, F32]]
"""Weight -> A `[rank, ne0]` and B `[ne1, rank]`."""


@cache
def _matrices(model: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, `ne0` and `ne1` of every matrix of a layer."""
    shapes = [(t.name, [int(n) for n in t.shape]) for t in GGUFReader(model).tensors]
    return tuple((name, *ne) for name, ne in shapes if len(ne) == 2 and min(ne) >= _LEAST and _WEIGHT.fullmatch(name))  # type: ignore[misc]  # two


def factors(harness: Harness, name: str, rank: int = 4) -> Factors:
    """Draw random factors for every matrix; RefusedError if the file has no such weights."""
    out: Factors = {}
    for weight, ne0, ne1 in _matrices(harness.request.model):
        stream = Stream(harness.request.stream, f"lora {name} {weight}")
        a, b = stream.normal(rank * ne0, ne0**-0.5), stream.normal(rank * ne1, 0.3)
        out[weight] = a.reshape(rank, ne0), b.reshape(ne1, rank)
    if not out:
        raise RefusedError("the model's file holds no weights that an adapter could change")
    return out


def load(harness: Harness, name: str, of: Factors) -> int:
    """Write and load an adapter file; UsageError if llama.cpp refuses it."""
    path = harness.folder / f"{name}.gguf"
    _write(path, str(harness.request.params["arch"]), of)
    adapter: int | None = harness.call("adapter_lora_init")(harness.model, bytes(path))
    if not adapter:
        raise UsageError(f"llama_adapter_lora_init returned NULL: {harness.library.reason()}")
    return adapter


def _write(path: Path, arch: str, of: Factors) -> None:
    writer = GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(next(iter(of.values()))[0].shape[0]))
    for weight, (a, b) in of.items():
        writer.add_tensor(f"{weight}.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{weight}.lora_b", np.ascontiguousarray(b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(context: Context, adapters: Sequence[Adapter]) -> None:
    """Set exactly these adapters on a context; UsageError if llama.cpp refuses."""
    call = context.harness.call
    if context.harness.library.llama.set_adapters_lora is None:  # until b8100 or so one by one
        call("clear_adapter_lora")(context.pointer)
        status = sum(call("set_adapter_lora")(context.pointer, a.pointer, a.scale) for a in adapters)
    else:
        pointers = (ctypes.c_void_p * len(adapters))(*(a.pointer for a in adapters))
        scales = (ctypes.c_float * len(adapters))(*(a.scale for a in adapters))
        status = call("set_adapters_lora")(context.pointer, pointers, len(adapters), scales)
    if status:
        raise UsageError(
            f"llama_set_adapters_lora of {len(adapters)} returned {status}: {context.harness.library.reason()}"
        )


def control(harness: Harness, name: str) -> F32:
    """Draw a random control vector: a row for each layer from the second on."""
    n_layer = harness.call("model_n_layer")(harness.model)
    rows = Stream(harness.request.stream, f"control {name}").normal((n_layer - 1) * harness.n_embd, 3.0)
    return rows.astype(np.float32).reshape(n_layer - 1, harness.n_embd)


def steer(context: Context, vector: F32 | None) -> None:
    """Call `llama_set_adapter_cvec`; None removes the vector. UsageError if llama.cpp refuses."""
    n_embd = context.harness.n_embd
    if vector is None:
        status = context.harness.call("set_adapter_cvec")(context.pointer, None, 0, n_embd, 0, 0)
    else:
        data = np.ascontiguousarray(vector)
        arguments = (data.ctypes.data, data.size, n_embd, 1, data.shape[0])
        status = context.harness.call("set_adapter_cvec")(context.pointer, *arguments)
    if status:
        raise UsageError(f"llama_set_adapter_cvec returned {status}: {context.harness.library.reason()}")
