"""Writes the files that libmtmd loads: a random projector and a text model's metadata."""

from __future__ import annotations

import re
from math import sqrt
from pathlib import Path

from conformance.case.recipe import Recipe, make
from conformance.ggml.tensor import Tensor, new_tensor
from conformance.ggml.types import F32, TYPES, GGMLType
from conformance.llama.zoo.model import (
    Value,
    architecture,
    full_key,
    open_writer,
    recipe,
    write_metadata,
    write_tensors,
)

from .table import Projector

_SPECIAL, _BYTE, _NORMAL = 3, 6, 1
"""`enum llama_token_type`."""
TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
"""Tokens for each byte, so that every text can be tokenised."""


def write_projector(path: Path, projector: Projector, stream: str, type_w: str = "f32") -> None:
    """Write a projector's file; `stream` seeds its weights, `type_w` is the matrices' type.

    UsageError for a value that GGUF cannot hold.
    """
    writer = open_writer(path, "clip", projector.keys)
    for key, value in projector.signed.items():
        writer.add_int32(key, value)
    f16 = re.compile(projector.f16)
    tensors = [
        new_tensor(TYPES["f16"] if f16.search(name) else _type(name, ne, type_w), *ne, name=name)
        for name, ne in projector.tensors.items()
    ]
    write_tensors(writer, tensors, lambda t: make(weight_recipe(stream, t), t))


def write_text_model(path: Path, projector: Projector) -> None:
    """Write the metadata of a projector's text model; its weights are never read."""
    arch = projector.text
    types = [_SPECIAL, _SPECIAL, _SPECIAL, *[_BYTE] * 256]
    keys: dict[str, Value] = {
        **architecture(arch).keys,
        **{full_key(arch, key): value for key, value in projector.text_keys.items()},
        full_key(arch, "vocab_size"): len(TOKENS),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    write_metadata(path, arch, keys, {})


def _type(name: str, ne: tuple[int, ...], type_w: str) -> GGMLType:
    """Return `type_w` if it fits a matrix's rows, else F32, as llama.cpp's converter does."""
    is_matrix = len(ne) == 2 and ".blk." in name and name.endswith(".weight") and "conv_dw" not in name
    return TYPES[type_w] if is_matrix and ne[0] % TYPES[type_w].blck_size == 0 else F32


def weight_recipe(stream: str, t: Tensor) -> Recipe:
    """Return the zoo's recipe of a weight; a convolution kernel is scaled by its fan-in."""
    if t.ne[2] * t.ne[3] == 1:
        return recipe(stream, t)
    fan_in = t.ne[0] * t.ne[1] * (t.ne[2] if t.ne[3] > 1 else 1)
    return Recipe(stream, t.name, "normal", 0.0, 1.0 / sqrt(fan_in))
