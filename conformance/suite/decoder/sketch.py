"""A graph under construction (`llm_graph_context`), and the small builds that sublayers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from conformance.ggml.ops.build import Builder, Expansion
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import GGMLType

from .config import Cparams, Hparams
from .kv import Cache
from .memory import Place, Ubatch

B = Builder()


@dataclass(slots=True)
class Sketch:
    """A graph under construction: its model, context, ubatch, weights and caches."""

    h: Hparams
    c: Cparams
    weights: Mapping[str, Tensor]
    cache: Cache
    ubatch: Ubatch
    place: Place
    gf: Expansion = field(default_factory=Expansion)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Leaves that a trajectory fills: llama.cpp's name, `_swa` behind it for those of sliding-window layers."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the ubatch."""
        return self.ubatch.n_tokens

    def w(self, name: str) -> Tensor:
        """A weight, by Llama's name without suffix."""
        head, dot, role = name.rpartition(".")
        return self.weights[f"{head}{dot}{self.h.tensors.get(role, role)}.weight"]

    def b(self, name: str) -> Tensor | None:
        """A bias, or None where there is none."""
        head, dot, role = name.rpartition(".")
        return self.weights.get(f"{head}{dot}{self.h.tensors.get(role, role)}.bias")

    def input(self, name: str, type_: GGMLType, *ne: int, key: str = "") -> Tensor:
        """A leaf with new bytes in each graph."""
        ne0, ne1, ne2, ne3 = (*ne, *(1,) * (4 - len(ne)))
        t = B.set_name(B.new_tensor_4d(type_, ne0, ne1, ne2, ne3), name)
        B.set_input(t)
        self.inputs[key or name] = t
        return t

    def cb(self, t: Tensor, name: str, il: int) -> Tensor:
        """Name a node as the architecture does."""
        label = self.h.labels.get(name, name)
        if label is None:
            return t
        return B.set_name(t, label if il < 0 else f"{label}-{il}")

    def norm(self, cur: Tensor, weight: str, name: str, il: int, *, rms: bool = False) -> Tensor:
        """`build_norm`."""
        rms = rms or self.h.norm == "rms"
        cur = B.rms_norm(cur, self.h.eps) if rms else B.norm(cur, self.h.eps)
        cur = B.mul(B.set_name(cur, "norm" if il < 0 else f"norm-{il}"), self.w(weight))
        bias = self.b(weight)
        if bias is not None:
            cur = B.add(self.cb(cur, "norm_w", il), bias)
        return self.cb(cur, name, il)

    def mul_mat(self, weight: str, cur: Tensor, name: str, il: int, biased: str = "") -> Tensor:
        """`build_lora_mm` and its bias: the product is called `name`, the sum `biased`, or `name` too."""
        cur = self.cb(B.mul_mat(self.w(weight), cur), name, il)
        bias = self.b(weight)
        return cur if bias is None else self.cb(B.add(cur, bias), biased or name, il)

    def rope(self, cur: Tensor, pos: Tensor) -> Tensor:
        """`ggml_rope_ext` with the model's parameters."""
        return rope(self.h, self.weights, cur, pos)


def rope(h: Hparams, weights: Mapping[str, Tensor], cur: Tensor, pos: Tensor, *, inplace: bool = False) -> Tensor:
    """`ggml_rope_ext`, or `ggml_rope_ext_inplace`, with the model's parameters."""
    turn = B.rope_ext_inplace if inplace else B.rope_ext
    freqs = weights.get("rope_freqs.weight")
    mode = ROPE_TYPE[h.rope]
    return turn(cur, pos, freqs, h.n_embd_head, mode, h.n_ctx_orig, h.freq_base, 1.0, 0.0, 1.0, 32.0, 1.0)


def inverse(x: float) -> float:
    """`1.0f / x` in C's float."""
    return float(np.float32(1) / np.float32(x))


def root(x: float) -> float:
    """`sqrtf`."""
    return float(np.sqrt(np.float32(x)))


def keyed(name: str, *, swa: bool) -> str:
    """Key in `Sketch.inputs` of an input that full and sliding-window attention each have."""
    return f"{name}_swa" if swa else name
