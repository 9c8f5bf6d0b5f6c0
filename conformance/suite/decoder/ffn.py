"""Feed-forwards: `build_ffn`."""

from __future__ import annotations

from collections.abc import Callable

from conformance.ggml.tensor import Tensor

from .sketch import B, Sketch

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
"""Of gpt-oss's SwiGLU."""

GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": B.swiglu_split,
    "geglu": B.geglu_split,
    "swiglu_oai": lambda gate, up: B.swiglu_oai(gate, up, OAI_ALPHA, OAI_LIMIT),
}
"""What becomes of gate and up, by the feed-forward's name."""


def ffn(g: Sketch, cur: Tensor, il: int) -> Tensor:
    """[n_embd, n] to the same."""
    up = g.mul_mat(f"blk.{il}.ffn_up", cur, "ffn_up", il, "ffn_up_b")
    if g.h.ffn in GATED:
        gate = g.mul_mat(f"blk.{il}.ffn_gate", cur, "ffn_gate", il, "ffn_gate_b")
        cur = g.cb(GATED[g.h.ffn](gate, up), f"ffn_{g.h.ffn}", il)
    else:
        cur = g.cb(B.gelu(up), "ffn_gelu", il)
    cur = B.mul_mat(g.w(f"blk.{il}.ffn_down"), cur)
    bias = g.b(f"blk.{il}.ffn_down")
    if bias is not None:
        cur = B.add(g.cb(cur, "ffn_down", il), bias)
    return g.cb(cur, "ffn_out", il)
