"""Constructors of the ops with a state: selective scans and linear attention."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, f32_bits

from .build_base import node


class RecurrentOps:
    """`ssm_scan`, `rwkv_wkv6`, `rwkv_wkv7`, `gated_linear_attn`, `gated_delta_net`: outputs and new states in one.

    Shapes are those of the rules (`rules_recurrent`); everything is F32 but `ids`.
    """

    def ssm_scan(
        self, s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int
    ) -> Tensor:  # fmt: skip
        """`x` through the state space of `A`, `B`, `C` with steps softplus(`dt`), from rows `ids` of `s`.

        Of the states the last `K` are kept, the latest first.
        """
        return node("SSM_SCAN", (s, x, dt, A, B, C, ids), (K,), ne=(0, 1, 1, 1))

    def rwkv_wkv6(self, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
        """RWKV 6: y = r (tf k v + state), then state = td state + k v."""
        return node("RWKV_WKV6", (k, v, r, tf, td, state))

    def rwkv_wkv7(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
    ) -> Tensor:  # fmt: skip
        """RWKV 7: state = w state + v k + (state a) b, then y = state r."""
        return node("RWKV_WKV7", (r, w, k, v, a, b, state))

    def gated_linear_attn(self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
        """Gated linear attention: state = g state + k v, then y = scale q state."""
        return node("GATED_LINEAR_ATTN", (k, v, q, g, state), (f32_bits(scale),))

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int
    ) -> Tensor:  # fmt: skip
        """The gated delta rule: state = exp(g) state, then + k beta (v - k state); y = q state / sqrt(S).

        Of the states the last `K` are kept, the latest first.
        """
        return node("GATED_DELTA_NET", (q, k, v, g, beta, state), (K,))
