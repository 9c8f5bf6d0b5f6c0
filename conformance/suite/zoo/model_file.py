"""A whole model in a GGUF file, small and made up, that llama.cpp loads: metadata, and weights by their recipes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from conformance.case.recipe import make
from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F32, TYPES, GGMLType

from . import weights
from .metadata import Architecture, Value, open_writer
from .request import Request

_OPTIONAL = re.compile(r"(\.scale|_scale|\.bias|rope_freqs\.weight)$")
"""What llama.cpp may do without: a file lacks it unless llama.cpp then misses it."""
_STAY_F32 = re.compile(
    r"norm|ssm_(?!in|out)|conv|time_mix_(?!key|value|receptance|output|gate)|gate_inp|position_embd|token_types|sinks|"
    r"rel_b|bias|_b$|lerp|indexer|cls"
)
"""Matrices that llama.cpp computes with as they are, in F32."""

Listed = Sequence[Sequence[Any]]
"""Weights as the worker lists them: `[name, type, ne]`."""


def chosen_types(listed: Listed, type_name: str, arch: Architecture) -> dict[str, tuple[GGMLType, list[int]]]:
    """Name -> type and `ne` of every weight that is not F32: matrices that may have type `type_name`, and some."""
    chosen = TYPES[type_name]
    found = {
        name: (chosen, list(ne))
        for name, _, ne in listed
        if chosen is not F32 and ne[1] > 1 and ne[0] % chosen.blck_size == 0 and not _STAY_F32.search(name)
    }
    for pattern, must in arch.types.items():
        found.update((name, (TYPES[must], list(ne))) for name, _, ne in listed if re.search(pattern, name))
    return found


def write_model(  # what a file is made of
    path: Path,
    request: Request,
    arch: Architecture,
    keys: Mapping[str, Value],
    listed: Listed,
    missing: Collection[str],
) -> None:
    """Write the file.

    Args:
        path: where to.
        request: `stream` and `type_w`.
        arch: the architecture.
        keys: its metadata.
        listed: every weight that it has a place for.
        missing: names of weights that llama.cpp cannot do without, though they look so.
    """
    types = chosen_types(listed, request.type_w, arch)
    writer = open_writer(path, arch.name, keys)
    done: set[str] = set()
    for name, _, ne in listed:
        wanted = not _OPTIONAL.search(name) or name in missing or _matches(arch.optional, name)
        if not wanted or _matches(arch.absent, name) or name in done:
            continue
        done.add(name)
        t = new_tensor(types.get(name, (F32, []))[0], *ne, name=name)
        data = make(weights.recipe(request.stream, t), t)
        n_dims = max([1, *(i + 1 for i, n in enumerate(ne) if n > 1)])
        raw = GGMLQuantizationType(t.type.id)
        writer.add_tensor(name, data.view(np.int8), raw_shape=list(ne[:n_dims])[::-1], raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matches(pattern: str, name: str) -> bool:
    return bool(pattern) and re.search(pattern, name) is not None
