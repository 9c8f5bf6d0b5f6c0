"""Constructors of the ops over parts, triangles and windows of matrices, and of DeepSeek's sparse attention."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, f32_bits
from conformance.ggml.types import GGMLType

from .build_base import int32, node
from .rules_base import failed


class MatrixOps:
    """`set`, `acc`, `out_prod`, `tri`, `diag`, `solve_tri`, `roll`, windows, the indexer and hyper-connections."""

    def set(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """`a` with `b` in place of the part that these strides and this offset, in bytes, show."""
        return node("SET", (a, b), (*map(int32, (nb1, nb2, nb3)), offset))

    def set_inplace(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """`set` into `a`'s bytes."""
        return node("SET", (a, b), (*map(int32, (nb1, nb2, nb3)), offset, 1), inplace=True)

    def set_1d(self, a: Tensor, b: Tensor, offset: int) -> Tensor:
        """`set` with `a`'s own strides."""
        return self.set(a, b, *a.nb[1:], offset)

    def set_1d_inplace(self, a: Tensor, b: Tensor, offset: int) -> Tensor:
        """`set_1d` into `a`'s bytes."""
        return self.set_inplace(a, b, *a.nb[1:], offset)

    def set_2d(self, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
        """`set` with `a`'s own strides but for the rows'."""
        return self.set(a, b, nb1, *a.nb[2:], offset)

    def set_2d_inplace(self, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
        """`set_2d` into `a`'s bytes."""
        return self.set_inplace(a, b, nb1, *a.nb[2:], offset)

    def acc(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """`a` with `b` added to the part that these strides and this offset, in bytes, show."""
        return node("ACC", (a, b), (*map(int32, (nb1, nb2, nb3)), offset))

    def acc_inplace(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """`acc` into `a`'s bytes."""
        return node("ACC", (a, b), (*map(int32, (nb1, nb2, nb3)), offset, 1), inplace=True)

    def out_prod(self, a: Tensor, b: Tensor) -> Tensor:
        """`a` [m, k, s2, s3] and `b` [n, k, r*s2, q*s3] to F32 [m, n, r*s2, q*s3]."""
        return node("OUT_PROD", (a, b))

    def tri(self, a: Tensor, type_: int) -> Tensor:
        """One triangle of `a`'s square matrices; `type_` is one of `rules_matrix.TRI_TYPE`."""
        return node("TRI", (a,), (int(type_),))

    def diag(self, a: Tensor) -> Tensor:
        """Rows `a` [n, 1, …] on the diagonals of [n, n, …]."""
        return node("DIAG", (a,))

    def solve_tri(self, a: Tensor, b: Tensor, left: bool, lower: bool, uni: bool) -> Tensor:
        """The x of `a` x = `b`, `a` lower triangular: ggml has no other variant."""
        t = node("SOLVE_TRI", (a, b))
        if not (lower and left and not uni):
            raise failed("lower && left && !uni", (a, b), left=left, lower=lower, uni=uni)
        return t

    def roll(self, a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> Tensor:
        """Each dimension shifted around."""
        return node("ROLL", (a,), (shift0, shift1, shift2, shift3))

    def pool_2d(
        self, a: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float
    ) -> Tensor:  # fmt: skip
        """The largest or the mean of each window; `op` is one of `rules_matrix.OP_POOL`, padding whole."""
        return node("POOL_2D", (a,), (int(op), k0, k1, s0, s1, int(p0), int(p1)))

    def im2col(
        self,
        a: Tensor,
        b: Tensor,
        s0: int,
        s1: int,
        p0: int,
        p1: int,
        d0: int,
        d1: int,
        is_2D: bool,
        dst_type: GGMLType,
    ) -> Tensor:
        """`b`'s windows of the size of kernel `a`, one a row."""
        return node("IM2COL", (a, b), (s0, s1, p0, p1, d0, d1, int(is_2D)), type_=dst_type)

    def lightning_indexer(self, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        """Scores of keys: relu(q k) summed over heads with `weights`, plus `mask`."""
        return node("LIGHTNING_INDEXER", (q, k, weights, mask))

    def dsv4_hc_comb(self, mixes: Tensor, scale: Tensor, base: Tensor, eps: float, n_iter: int) -> Tensor:
        """How streams mix: softmax of rows, then columns and rows in turn made to sum to one."""
        return node("DSV4_HC_COMB", (mixes, scale, base), (f32_bits(eps), n_iter))

    def dsv4_hc_pre(self, x: Tensor, weights: Tensor) -> Tensor:
        """Streams [n_embd, hc, n_tokens] summed with `weights` [hc, n_tokens]."""
        return node("DSV4_HC_PRE", (x, weights), (f32_bits(1.0),))

    def dsv4_hc_pre_gated(self, x: Tensor, gate: Tensor, scale: float) -> Tensor:
        """Streams summed with sigmoid(`gate`) per element, times `scale`."""
        return node("DSV4_HC_PRE", (x, gate), (f32_bits(scale), 1))

    def dsv4_hc_post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
        """`x` given out to streams by `post`, onto the residual streams mixed by `comb`."""
        return node("DSV4_HC_POST", (x, residual, post, comb))
