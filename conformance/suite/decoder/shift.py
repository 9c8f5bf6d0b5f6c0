"""The K-shift: K that is in the cache is rotated to where its tokens moved (`build_graph_shift`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conformance.ggml.ops.build import Expansion
from conformance.ggml.tensor import Tensor, new_tensor, row_size
from conformance.ggml.types import F32, I32

from .attention import hadamard
from .config import Cparams, Hparams, n_rot
from .decoder import Decode
from .sketch import B, rope


def build_shift(h: Hparams, c: Cparams, weights: Mapping[str, Tensor], caches: Sequence[Tensor]) -> Decode:
    """The graph that rotates the K caches `caches`, of as many cells each.

    Its inputs: `k_shift`, by how much the position of each cell of all streams moved; `attn_inp_k_rot`, where K is
    rotated by a Hadamard matrix.
    """
    inputs = {"k_shift": new_tensor(I32, caches[0].ne[1] * caches[0].ne[2])}
    size = n_rot(h, c)[0]
    if size:
        inputs["attn_inp_k_rot"] = new_tensor(F32, size, size, name="attn_inp_k_rot")
    for t in inputs.values():
        B.set_input(t)
    gf, shifted = Expansion(), []
    for cache in caches:
        shifted.append(_shift(h, weights, cache, inputs["k_shift"], inputs.get("attn_inp_k_rot")))
        gf.expand(shifted[-1])
    return Decode(gf.graph(), inputs, tuple(shifted))


def _shift(h: Hparams, weights: Mapping[str, Tensor], cache: Tensor, k_shift: Tensor, rot: Tensor | None) -> Tensor:
    """`build_rope_shift`; a quantised cache whose heads no Hadamard matrix fits is one llama.cpp cannot shift."""
    nb1, nb2 = row_size(cache.type, h.n_embd_head), row_size(cache.type, h.n_embd_gqa)
    k = B.view_3d(cache, h.n_embd_head, h.n_head_kv, cache.ne[1] * cache.ne[2], nb1, nb2, 0)
    if not cache.type.is_quantized:
        return rope(h, weights, k, k_shift, inplace=True)
    turned = B.cast(k, F32)
    if rot is not None:
        turned = hadamard(turned, rot)
    turned = rope(h, weights, turned, k_shift)
    if rot is not None:
        turned = hadamard(turned, rot)
    return B.cpy(turned, k)
