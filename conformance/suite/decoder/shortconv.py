"""LFM2's short convolution in attention's place, and the state it keeps of each sequence: `build_rs`."""

from __future__ import annotations

from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Tensor

from .sketch import B, Sketch
from .states import Range

_LABEL = "model.layers.{{}}.conv.{}"
"""llama.cpp leaves the braces in."""


def shortconv(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """[n_embd, n_tokens] to the same; `in_proj` gives B, C and x, the convolution runs over B * x."""
    h, rows = g.h, g.place.recr
    if rows is None:
        raise UsageError("decoder: a short convolution without states")
    n_seqs = len(g.ubatch.seq_ids)
    n = g.n_tokens // n_seqs
    d_conv, n_embd = h.n_shortconv - 1, h.n_embd
    cur = B.reshape_3d(cur, n_embd, n, n_seqs)
    bcx = g.cb(B.mul_mat(g.w(f"blk.{il}.shortconv.in_proj"), cur), _LABEL.format("in_proj"), il)
    b, c, x = (B.view_3d(bcx, n_embd, n, n_seqs, *bcx.nb[1:3], i * n_embd * bcx.nb[0]) for i in range(3))
    bx = B.transpose(B.mul(b, x))
    state = g.cache.r[il]
    held = B.reshape_3d(_read(g, state, rows, n_seqs), d_conv, n_embd, n_seqs)
    bx = B.concat(held, bx, 0)
    last = B.view_3d(bx, d_conv, *bx.ne[1:3], *bx.nb[1:3], (bx.ne[0] - d_conv) * bx.nb[0])
    g.gf.expand(B.cpy(last, B.view_2d(state, d_conv * n_embd, n_seqs, state.nb[1], rows.head * state.nb[1])))
    conv = g.cb(B.ssm_conv(bx, g.w(f"blk.{il}.shortconv.conv")), _LABEL.format("conv"), il)
    out = B.mul_mat(g.w(f"blk.{il}.shortconv.out_proj"), B.mul(c, conv))
    return B.reshape_2d(g.cb(out, _LABEL.format("out_proj"), il), n_embd, n * n_seqs)


def _read(g: Sketch, state: Tensor, rows: Range, n_seqs: int) -> Tensor:
    """[n_embd_r, n_seqs]: one row is made zero, the ubatch's are gathered, those between are moved on."""
    size = g.h.n_embd_r
    states = B.reshape_2d(state, size, state.ne[1])
    clears = rows.zero >= 0
    zero = B.view_1d(states, size * clears, rows.zero * states.nb[1] * clears)
    g.gf.expand(B.scale_inplace(zero, 0.0))
    gathered = B.get_rows(states, g.inputs["rs_s_copy"])
    output = B.view_2d(gathered, size, n_seqs, gathered.nb[1], 0)
    g.gf.expand(output)
    n_rs = len(rows.s_copy)
    extra = B.view_2d(gathered, size, n_rs - n_seqs, gathered.nb[1], n_seqs * gathered.nb[1])
    kept = B.view_2d(state, size, n_rs - n_seqs, state.nb[1], (rows.head + n_seqs) * state.nb[1])
    g.gf.expand(B.cpy(extra, kept))
    return output
