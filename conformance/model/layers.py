"""Finds the layer of a tensor by llama.cpp's names, and names steps."""

from __future__ import annotations

import re

from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Tensor

_LAYER = re.compile(r"blk\.(\d+)\.|_l(\d+)\b|-(\d+)(?= \(|$)")
"""A weight, a cache, a node: `blk.7.attn_v.weight`, `cache_k_l7`, `Vcur-7`."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def layer_of(t: Tensor, graph: Graph) -> int | None:
    """Return the layer of a node or cache; None before the first layer and in the head of the model.

    It is found in the tensor's own name, in that of a source, or else in the last node before it that has one.
    """
    own = _own(t)
    if own is not None or t not in graph.nodes:
        return own
    at = graph.nodes.index(t)
    before = (_own(n) for n in reversed(graph.nodes[:at]))
    inside = any(_own(n) is not None for n in graph.nodes[at:])
    return next((layer for layer in before if layer is not None), None) if inside else None


def _own(t: Tensor) -> int | None:
    """Return the layer in the tensor's own name, or in that of a weight or cache that it reads."""
    for name in (t.name, *(s.name for s in t.src if s is not None and s.op == "NONE")):
        if found := _LAYER.search(name):
            return int(next(g for g in found.groups() if g is not None))
    return None


def step_words(k: int, prompts: int) -> str:
    """Format step `k`, counted from 0; the first `prompts` steps decode the prompt."""
    which = f"{_ORDINALS[k]} step" if k < len(_ORDINALS) else f"step {k + 1}"
    return f"{which} (the prompt)" if k < prompts else which
