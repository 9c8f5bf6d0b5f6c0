"""What a recording needs to know, as it travels to the worker process: JSON and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One recording, or a list of a model's weights."""

    id: str
    stream: str
    """First text of every stream; the id, unless another's bytes are wanted."""
    model: str = ""
    """A GGUF file: metadata alone, or a whole model."""
    output: str = ""
    """The case file to write; "" for a list of the weights instead."""
    from_file: bool = False
    """Load the file's own weights; otherwise they are made while the model is built."""
    recipes: bool = True
    """Its weights are those that `weights.recipe` makes, wherever they lie."""
    by_reference: bool = False
    """Weights that stand in the model file stay there."""
    lib: str = ""
    plan: str = "p5.d4"
    n_ctx: int = 256
    """Cells of one stream."""
    n_seq_max: int = 1
    n_ubatch: int = 512
    unified: bool = False
    swa_full: bool = True
    """Layers with a sliding window keep as many cells as the others, as by llama.cpp's default."""
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    type_w: str = "f32"
    """Of matrices that may have another type than F32."""
    nodes: int = 0
    """Of this many graphs, from the first on, every node and every cache is recorded."""
    embeddings: bool = False
    family: str = "zoo"
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)
