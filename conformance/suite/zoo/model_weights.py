"""Which weights of a recording stand in its model file as they are, and where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf import GGUFReader

from conformance.case.reference import Reference
from conformance.ggml.tensor import Bytes, Tensor


def references(model: Path, weights: Mapping[Tensor, Bytes]) -> dict[Tensor, Reference]:
    """Weight -> its place in the file, for each whose bytes are those of the file's tensor of that name.

    Args:
        model: a GGUF file that llama.cpp has loaded.
        weights: with the bytes that llama.cpp computes with.
    """
    stored = {t.name: t for t in GGUFReader(model).tensors}
    found = {}
    for t, data in weights.items():
        there = stored.get(t.name)
        if there is not None and there.n_bytes == data.nbytes and there.data.tobytes() == data.tobytes():
            found[t] = Reference(model.name, int(there.data_offset))
    return found
