"""What a graph begins with: embeddings, and the indices, masks and rotations of attention and convolutions."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F16, F32, I32, I64

from .config import n_rot
from .sketch import B, Sketch


def inp_embd(g: Sketch) -> Tensor:
    """`build_inp_embd`: rows of the embedding; beside them the branch of a mixed batch, not computed."""
    tok_embd = g.w("token_embd")
    n = g.n_tokens
    embd = B.get_rows(tok_embd, g.input("inp_tokens", I32, n))
    g.gf.expand(embd, compute=False)
    branches: tuple[Tensor, ...] = (embd,)
    if g.c.mixed:
        rows = B.get_rows(tok_embd, g.input("inp_mixed_tokens", I32, n))
        g.gf.expand(rows, compute=False)
        copy = B.dup(g.input("inp_mixed_embd", F32, g.h.n_embd, n))
        branches += (B.set_rows(copy, rows, g.input("inp_mixed_slots", I64, n)),)
    cur = g.cb(g.gf.select(branches, 0), "embd", -1)
    if g.h.embd_scale:
        cur = g.cb(B.scale(cur, g.h.embd_scale), "inp_scaled", -1)
    return cur


def inp_attn(g: Sketch) -> None:
    """`build_attn_inp_kv`, or `build_attn_inp_kv_iswa`: for each kind of layer that the model has."""
    kinds = {g.h.is_swa(il) for il in range(g.h.n_layer) if not g.h.is_recr(il)}
    for swa in sorted(kinds):
        _inp_cells(g, swa=swa)
    for swa in sorted(kinds):
        for name, size in zip(("attn_inp_k_rot", "attn_inp_v_rot"), n_rot(g.h, g.c), strict=True):
            if size:
                g.input(name, F32, size, size, key=keyed(name, swa=swa))


def _inp_cells(g: Sketch, *, swa: bool) -> None:
    part, n = g.place.part(swa=swa), g.n_tokens
    if g.c.write == "set_rows":
        g.input("attn_inp_k_idxs", I64, n, key=keyed("attn_inp_k_idxs", swa=swa))
        n_v = n * g.h.n_embd_v_gqa if g.c.v_trans else n
        g.input("attn_inp_v_idxs", I64, n_v, key=keyed("attn_inp_v_idxs", swa=swa))
    n_stream = 1 if g.c.kv_unified else len(part.slots.streams)
    type_ = F16 if g.c.flash_attn else F32
    key = keyed("attn_inp_kq_mask", swa=swa)
    g.input("attn_inp_kq_mask", type_, part.n_kv, n // n_stream, 1, n_stream, key=key)


def inp_rs(g: Sketch) -> None:
    """`build_rs_inp`: from which row each state is read."""
    if g.place.recr is not None:
        g.input("rs_s_copy", I32, len(g.place.recr.s_copy))


def keyed(name: str, *, swa: bool) -> str:
    """How `Sketch.inputs` calls an input that full and sliding-window attention each have."""
    return f"{name}_swa" if swa else name
