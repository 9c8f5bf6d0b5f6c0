"""LoRA adapters and control vectors for a generated model."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Bytes, Tensor
from conformance.ggml.types import F32 as F32_TYPE
from conformance.llama.zoo.load import RefusedError
from conformance.llama.zoo.model import open_writer

from .harness import F32, Context, Harness

KINDS = {
    "layers": re.compile(
        r"(?:enc\.|dec\.)?blk\.\d+\."
        r"(?!.*(?:norm|conv|gate_inp|lerp|decay|rel_b|indexer|cls|exps|attn_[kv]_b\.|_ape\.)).+\.weight"
    ),
    "experts": re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight"),
    "router": re.compile(r"blk\.\d+\.ffn_gate_inp\.weight"),
    "head": re.compile(r"output\.weight"),
    "embeddings": re.compile(r"token_embd\.weight"),
}
"""Kind of tensors that llama.cpp takes adapters for -> names.

Not those that its converter cannot write: `attn_k_b` and `attn_v_b` are parts of a transposed matrix.
"""
_SIZE_OF_B = {"experts": 1.2, "router": 4.8}
"""Kind -> standard deviation of B, if not 0.3.

Experts are a small part of some results, and their choice a smaller one.
"""
_NONE = "the model's file holds no weights that an adapter could change"
_LEAST = 16
"""Smallest side of a matrix of a layer that gets an adapter."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`llama_adapter_lora *` and its scale."""

    pointer: int
    scale: float = 1.0


Factors = dict[str, tuple[F32, F32]]
"""Weight -> A `[rank, ne0]` and B `[ne1, rank]`, for experts with a first dimension `ne2`.

A is `[ne1, rank]` and B `[ne0, rank]` for token embeddings.
"""


@cache
def _matrices(model: str, kind: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return name and `ne` of every weight of a kind."""
    shapes = [(t.name, tuple(int(n) for n in t.shape)) for t in GGUFReader(model).tensors]
    least = _LEAST if kind == "layers" else 1
    return tuple(
        (name, ne)
        for name, ne in shapes
        if len(ne) == (3 if kind == "experts" else 2) and min(ne[:2]) >= least and KINDS[kind].fullmatch(name)
    )


def present(harness: Harness, kinds: Sequence[str]) -> list[str]:
    """Return the kinds of which the model's file has weights that its results need.

    RefusedError if it has none. Embeddings need no head.
    """
    unread = {"head"} if harness.request.embeddings else set()
    found = [kind for kind in kinds if kind not in unread and _matrices(harness.request.model, kind)]
    if not found:
        raise RefusedError(_NONE)
    return found


def factors(harness: Harness, name: str, rank: int = 4, kind: str = "layers") -> Factors:
    """Draw random factors for every weight of a kind; RefusedError if the file has none."""
    out: Factors = {}
    for weight, (ne0, ne1, *more) in _matrices(harness.request.model, kind):
        stream = Stream(harness.request.stream, f"lora {name} {weight}")
        n = prod(more)
        if kind == "embeddings":
            a, b = stream.normal(rank * ne1, 0.5), stream.normal(rank * ne0, 0.5)
            out[weight] = a.reshape(ne1, rank), b.reshape(ne0, rank)
            continue
        a = stream.normal(n * rank * ne0, ne0**-0.5)
        b = stream.normal(n * rank * ne1, _SIZE_OF_B.get(kind, 0.3))
        out[weight] = a.reshape(*more, rank, ne0), b.reshape(*more, ne1, rank)
    if not out:
        raise RefusedError(_NONE)
    return out


def merged(harness: Harness, name: str, of: Factors, scale: float) -> Harness:
    """Load the model with an adapter added to its weights.

    Raises:
        RefusedError: they are not F32, or the file holds none.
    """

    def data(t: Tensor, held: Bytes) -> Bytes:
        if t.name not in of:
            return held
        if t.type is not F32_TYPE:
            raise RefusedError(f"{t.name} is {t.type.name}: an adapter is added to F32 weights only")
        a, b = (x.astype(np.float64) for x in of[t.name])
        change = a @ b.T if KINDS["embeddings"].fullmatch(t.name) else b @ a
        shape = t.ne[: change.ndim][::-1]
        return (held.view(np.float32).reshape(shape) + scale * change).astype(np.float32).reshape(-1).view(np.uint8)

    return harness.another(harness.rewrite(name, data))


def load(harness: Harness, name: str, of: Factors, scale: float = 1.0) -> int:
    """Write and load an adapter file of a scale; UsageError if llama.cpp refuses it."""
    adapter = offer(harness, name, of, scale=scale)
    if not adapter:
        raise UsageError(f"llama_adapter_lora_init returned NULL: {harness.library.reason()}")
    return adapter


def offer(harness: Harness, name: str, of: Factors, arch: str = "", scale: float = 1.0) -> int:
    """Write and load an adapter file; return 0 if llama.cpp refuses it.

    `arch`: instead of the model's architecture.
    """
    path = harness.folder / f"{name}.gguf"
    rank = next(iter(of.values()))[1].shape[-1]
    _write(path, arch or str(harness.request.params["arch"]), of, scale * rank)
    adapter: int | None = harness.call("adapter_lora_init")(harness.model, bytes(path))
    return adapter or 0


def _write(path: Path, arch: str, of: Factors, alpha: float) -> None:
    writer = open_writer(path, arch, {})
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for weight, pair in of.items():
        for end, values in zip("ab", pair, strict=True):
            if values.size:
                writer.add_tensor(f"{weight}.lora_{end}", np.ascontiguousarray(values))
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
