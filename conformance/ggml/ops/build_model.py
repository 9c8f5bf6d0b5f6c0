"""Constructors of the ops a language model is made of: matrix products, attention, positions, routing, convolution."""

from __future__ import annotations

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import MAX_SRC, Tensor, f32_bits

from .build_base import node, set_param
from .rope import ROPE_TYPE
from .rules_base import failed
from .rules_model import MROPE_SECTIONS, check_sinks

_PREC_ACC = {"MUL_MAT": 0, "MUL_MAT_ID": 0, "FLASH_ATTN_EXT": 3}
"""Op -> which of its `op_params` holds the precision of accumulation."""


class ModelOps:
    """`mul_mat`, `soft_max`, `rope`, `flash_attn_ext`, `argsort`, `top_k`, `ssm_conv` and what sets their options.

    Shapes are ggml's `ne`; `prec`, `hint`, `mode` and `order` are ggml's numbers (`rules_model.PREC`, `ROPE_TYPE` …).
    """

    def mul_mat(self, a: Tensor, b: Tensor) -> Tensor:
        """`a` [k, n, s2, s3] and `b` [k, m, r*s2, q*s3] to F32 [n, m, r*s2, q*s3]."""
        return node("MUL_MAT", (a, b))

    def mul_mat_set_prec(self, a: Tensor, prec: int) -> None:
        """Precision of accumulation of a MUL_MAT."""
        if a.op != "MUL_MAT":
            raise failed("a->op == GGML_OP_MUL_MAT", (a,), op=a.op)
        set_param(a, 0, prec)

    def mul_mat_set_hint(self, a: Tensor, hint: int) -> None:
        """What a MUL_MAT may know of its operands."""
        if a.op != "MUL_MAT":
            raise failed("a->op == GGML_OP_MUL_MAT", (a,), op=a.op)
        set_param(a, 1, hint)

    def prec_set_acc(self, a: Tensor, prec: int) -> bool:
        """Precision of accumulation; False where the op has none."""
        if a.op not in _PREC_ACC:
            return False
        set_param(a, _PREC_ACC[a.op], prec)
        return True

    def prec_set_src(self, a: Tensor, prec: int, idx: int) -> bool:
        """The least precision `src[idx]` may be converted to; False where the op has none for it."""
        if not 0 <= idx < MAX_SRC:
            raise failed("idx >= 0 && idx < GGML_MAX_SRC", (a,), op=a.op, idx=idx)
        if a.op not in {"MUL_MAT", "MUL_MAT_ID"} or idx != 1:
            return False
        set_param(a, 2 + idx, prec)
        return True

    def mul_mat_id(self, as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """`as_` [k, n, n_expert], `b` [k, r, n_tokens], `ids` I32 [n_used, n_tokens] to F32 [n, n_used, n_tokens]."""
        return node("MUL_MAT_ID", (as_, b, ids))

    def diag_mask_inf(self, a: Tensor, n_past: int) -> Tensor:
        """`a` with -inf right of diagonal `n_past`."""
        return node("DIAG_MASK_INF", (a,), (n_past,))

    def diag_mask_inf_inplace(self, a: Tensor, n_past: int) -> Tensor:
        """`diag_mask_inf` into `a`'s bytes."""
        return node("DIAG_MASK_INF", (a,), (n_past,), inplace=True)

    def diag_mask_zero(self, a: Tensor, n_past: int) -> Tensor:
        """`a` with 0 right of diagonal `n_past`."""
        return node("DIAG_MASK_ZERO", (a,), (n_past,))

    def diag_mask_zero_inplace(self, a: Tensor, n_past: int) -> Tensor:
        """`diag_mask_zero` into `a`'s bytes."""
        return node("DIAG_MASK_ZERO", (a,), (n_past,), inplace=True)

    def soft_max(self, a: Tensor) -> Tensor:
        """Softmax over rows."""
        return self.soft_max_ext(a, None, 1.0, 0.0)

    def soft_max_inplace(self, a: Tensor) -> Tensor:
        """`soft_max` into `a`'s bytes."""
        return self.soft_max_ext_inplace(a, None, 1.0, 0.0)

    def soft_max_ext(self, a: Tensor, mask: Tensor | None, scale: float, max_bias: float) -> Tensor:
        """Softmax of `a * scale + mask * slope`; ALiBi slopes from `max_bias`, 1 where it is 0."""
        return node("SOFT_MAX", (a, mask), (f32_bits(scale), f32_bits(max_bias)))

    def soft_max_ext_inplace(self, a: Tensor, mask: Tensor | None, scale: float, max_bias: float) -> Tensor:
        """`soft_max_ext` into `a`'s bytes."""
        return node("SOFT_MAX", (a, mask), (f32_bits(scale), f32_bits(max_bias)), inplace=True)

    def soft_max_add_sinks(self, a: Tensor, sinks: Tensor | None) -> None:
        """Give a SOFT_MAX one sink logit per head (F32 [heads]), or take it away."""
        _add_sinks(a, sinks, "SOFT_MAX", 2)

    def rope(self, a: Tensor, b: Tensor, n_dims: int, mode: int) -> Tensor:
        """`rope_ext` with base 10000 and no scaling."""
        return _rope(a, b, None, n_dims, (), mode, 0, _PLAIN)

    def rope_inplace(self, a: Tensor, b: Tensor, n_dims: int, mode: int) -> Tensor:
        """`rope` into `a`'s bytes."""
        return _rope(a, b, None, n_dims, (), mode, 0, _PLAIN, inplace=True)

    def rope_ext(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """Rotate `a` [head, heads, tokens] by positions `b` (I32 [tokens]); `c` frequency factors (F32 [n_dims/2])."""
        floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
        return _rope(a, b, c, n_dims, (), mode, n_ctx_orig, floats)

    def rope_ext_inplace(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """`rope_ext` into `a`'s bytes."""
        floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
        return _rope(a, b, c, n_dims, (), mode, n_ctx_orig, floats, inplace=True)

    def rope_multi(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        sections: tuple[int, ...],
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """`rope_ext` with four positions per token (`b` I32 [4 * tokens]), shared out by four `sections`."""
        floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
        return _rope(a, b, c, n_dims, sections, mode, n_ctx_orig, floats)

    def rope_multi_inplace(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        sections: tuple[int, ...],
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """`rope_multi` into `a`'s bytes."""
        floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
        return _rope(a, b, c, n_dims, sections, mode, n_ctx_orig, floats, inplace=True)

    def rope_ext_back(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """`rope_ext` turned the other way."""
        floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
        return _rope(a, b, c, n_dims, (), mode, n_ctx_orig, floats, op="ROPE_BACK")

    def rope_multi_back(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        n_dims: int,
        sections: tuple[int, ...],
        mode: int,
        n_ctx_orig: int,
        freq_base: float,
        freq_scale: float,
        ext_factor: float,
        attn_factor: float,
        beta_fast: float,
        beta_slow: float,
    ) -> Tensor:
        """`rope_multi` turned the other way."""
        floats = (freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
        return _rope(a, b, c, n_dims, sections, mode, n_ctx_orig, floats, op="ROPE_BACK")

    def rope_set_offset(self, a: Tensor, n_offs: int) -> Tensor:
        """Rotate from element `n_offs` of each row on; gives `a` back."""
        if a.op not in {"ROPE", "ROPE_BACK"}:
            raise failed("a->op == GGML_OP_ROPE || a->op == GGML_OP_ROPE_BACK", (a,), op=a.op)
        if n_offs < 0:
            raise failed("n_offs >= 0", (a,), op=a.op, n_offs=n_offs)
        if a.op_params[2] == ROPE_TYPE["VISION"]:
            raise failed("mode != GGML_ROPE_TYPE_VISION", (a,), op=a.op)
        set_param(a, 15, n_offs)
        return a

    def flash_attn_ext(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        max_bias: float,
        logit_softcap: float,
    ) -> Tensor:
        """Attention of `q` [dk, n, heads, s] over `k` [dk, n_kv, kv_heads, s] and `v` [dv, n_kv, kv_heads, s].

        `mask`: F16 [n_kv, at least n, …]. Result: F32 [dv, heads, n, s], heads and tokens swapped.
        """
        params = (f32_bits(scale), f32_bits(max_bias), f32_bits(logit_softcap))
        return node("FLASH_ATTN_EXT", (q, k, v, mask), params)

    def flash_attn_ext_set_prec(self, a: Tensor, prec: int) -> None:
        """Precision of accumulation of a FLASH_ATTN_EXT."""
        _expect(a, "FLASH_ATTN_EXT")
        set_param(a, 3, prec)

    def flash_attn_ext_set_n_kv_max(self, a: Tensor, n_kv_max: int) -> None:
        """How many keys the longest sequence can attend to; 0: unknown."""
        _expect(a, "FLASH_ATTN_EXT")
        if n_kv_max < 0:
            raise failed("n_kv_max >= 0", (a,), op=a.op, n_kv_max=n_kv_max)
        set_param(a, 4, n_kv_max)

    def flash_attn_ext_add_sinks(self, a: Tensor, sinks: Tensor | None) -> None:
        """Give a FLASH_ATTN_EXT one sink logit per head (F32 [heads]), or take it away."""
        _add_sinks(a, sinks, "FLASH_ATTN_EXT", 4)

    def argsort(self, a: Tensor, order: int) -> Tensor:
        """I32 indices that sort each row; `order` is `SORT_ORDER["ASC"]` or `["DESC"]`."""
        return node("ARGSORT", (a,), (int(order),))

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """I32 [k, …]: indices of each row's `k` largest, in no order."""
        return node("TOP_K", (a,), ne=(k, *a.ne[1:]))

    def ssm_conv(self, sx: Tensor, c: Tensor) -> Tensor:
        """`sx` [d_conv - 1 + n_t, d_inner, n_s] and `c` [d_conv, d_inner] to F32 [d_inner, n_t, n_s]."""
        return node("SSM_CONV", (sx, c))


_PLAIN = (10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
"""freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow of `ggml_rope`."""


def _rope(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    n_dims: int,
    sections: tuple[int, ...],
    mode: int,
    n_ctx_orig: int,
    floats: tuple[float, ...],
    *,
    inplace: bool = False,
    op: str = "ROPE",
) -> Tensor:
    if sections and len(sections) != MROPE_SECTIONS:
        raise GraphError(f"sections: {MROPE_SECTIONS} numbers expected, {list(sections)} found")
    kept = sections if mode & ROPE_TYPE["MROPE"] else ()
    params = (0, n_dims, int(mode), 0, n_ctx_orig, *map(f32_bits, floats), *kept)
    return node(op, (a, b, c), params, inplace=inplace)


def _expect(a: Tensor, op: str) -> None:
    if a.op != op:
        raise failed(f"a->op == GGML_OP_{op}", (a,), op=a.op)


def _add_sinks(a: Tensor, sinks: Tensor | None, op: str, i: int) -> None:
    if sinks is None:
        a.src = a.src[:i]
        return
    _expect(a, op)
    if len(a.src) > i:
        raise failed(f"a->src[{i}] == NULL", (a,), op=a.op)
    check_sinks(a, sinks)
    a.src = (*a.src, *(None,) * (i - len(a.src)), sinks)
