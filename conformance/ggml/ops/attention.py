"""Softmax and attention, masks, sinks; DeepSeek's sparse indexer and hyper-connections."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, dims, nelements
from conformance.ggml.types import F32

from .fields import enum, f32, flag, i32, plus, to
from .matmul import PREC, PRODUCT, expect
from .op import (
    DOT,
    LOOP,
    PASSES,
    Layout,
    Op,
    Rounding,
    Work,
    check,
    dup_or_inplace,
    failed,
    fresh,
    operand,
    optional,
    same_layout,
    set_param,
    violated,
)


def _soft_max(t: Tensor) -> Layout:
    """Lay out `ggml_soft_max_ext` and `ggml_soft_max_add_sinks`."""
    _check_bias(t, optional(t, 1), optional(t, 2))
    return dup_or_inplace(t, operand(t))


def _check_bias(t: Tensor, mask: Tensor | None, sinks: Tensor | None) -> None:
    """Check that ALiBi slopes have a mask, and what the setter of sinks asserts."""
    if mask is None and t.params.max_bias > 0:
        raise violated(t, "mask", max_bias=t.params.max_bias)
    if sinks is not None:
        _check_sinks(t, sinks)


def _check_sinks(t: Tensor, sinks: Tensor) -> None:
    """Check as `ggml_soft_max_add_sinks` and `ggml_flash_attn_ext_add_sinks`."""
    if operand(t).ne[2] != sinks.ne[0]:
        raise violated(t, "a->src[0]->ne[2] == sinks->ne[0]", sinks=list(sinks.ne))
    if sinks.type is not F32:
        raise violated(t, "sinks->type == GGML_TYPE_F32", sinks=sinks.type)


def _flash_attn_ext(t: Tensor) -> Layout:
    """Lay out `ggml_flash_attn_ext`: F32 [dv, heads, n, s].

    q [dk, n, heads, s], k [dk, n_kv, kv_heads, s], v [dv, n_kv, kv_heads, s], mask, sinks.
    """
    q, v = operand(t), operand(t, 2)
    _check_bias(t, optional(t, 3), optional(t, 4))
    return fresh(F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]))


def _head_and_keys(t: Tensor) -> int:
    return operand(t).ne[0] + operand(t, 1).ne[1]


def _lightning_indexer(t: Tensor) -> Layout:
    """Lay out `ggml_lightning_indexer`: F32 [n_kv, n_t, 1, s].

    q [n, heads, n_t, s], k [n, 1, n_kv, s], weights [heads, n_t, 1, s], mask F16 [n_kv, n_t, 1, …]. The result is the
    sum over heads of relu(q k) weights, plus the mask.
    """
    q, k = operand(t), operand(t, 1)
    return fresh(F32, (k.ne[2], q.ne[2], 1, q.ne[3]))


HC = 4
"""Streams of a hyper-connection: the only number that `ggml_dsv4_hc_comb` takes."""


def _hc_comb(t: Tensor) -> Layout:
    """Lay out `ggml_dsv4_hc_comb`: [hc, hc, n_tokens].

    mixes [(2 + hc) * hc, n_tokens], scale [3], base [(2 + hc) * hc].
    """
    mixes, scale, base = (operand(t, i) for i in range(3))
    n, n_iter = mixes.ne[0], t.params.n_iter
    hc = next((i for i in range(1, n + 1) if i * i + 2 * i >= n), 0)
    check(
        t,
        (mixes.type is F32, "mixes->type == GGML_TYPE_F32"),
        (scale.type is F32, "scale->type == GGML_TYPE_F32"),
        (base.type is F32, "base->type == GGML_TYPE_F32"),
        (n_iter > 0, "n_iter > 0"),
        ((2 + hc) * hc == n and hc > 0, "hc > 0"),
        (hc == HC, "hc == 4"),
        (mixes.ne[2] == 1, "mixes->ne[2] == 1"),
        (mixes.ne[3] == 1, "mixes->ne[3] == 1"),
        (scale.ne[0] >= 3, "scale->ne[0] >= 3"),  # one each for pre, post and comb
        (scale.ne[1] == 1, "scale->ne[1] == 1"),
        (scale.ne[2] == 1, "scale->ne[2] == 1"),
        (scale.ne[3] == 1, "scale->ne[3] == 1"),
        (base.ne[0] == n, "base->ne[0] == hc_mix_dim"),
        (base.ne[1] == 1, "base->ne[1] == 1"),
        (base.ne[2] == 1, "base->ne[2] == 1"),
        (base.ne[3] == 1, "base->ne[3] == 1"),
        n_iter=n_iter,
    )
    return fresh(F32, dims(hc, hc, mixes.ne[1]))


def _hc_pre(t: Tensor) -> Layout:
    """Lay out `ggml_dsv4_hc_pre`: weights [hc, n_tokens], result F32 [n_embd, n_tokens].

    `ggml_dsv4_hc_pre_gated` takes weights [n_embd, hc, n_tokens] and applies their sigmoid.
    """
    x, w = operand(t), operand(t, 1)
    if t.params.gated:
        check(
            t,
            (w.ne[0] == x.ne[0], "weights->ne[0] == n_embd"),
            (w.ne[1] == x.ne[1], "weights->ne[1] == hc"),
            (w.ne[2] == x.ne[2], "weights->ne[2] == n_tokens"),
        )
    else:
        check(
            t,
            (w.ne[0] == x.ne[1], "weights->ne[0] == hc"),
            (w.ne[1] == x.ne[2], "weights->ne[1] == n_tokens"),
            (w.ne[2] == 1, "weights->ne[2] == 1"),
        )
    if w.ne[3] != 1:
        raise violated(t, "weights->ne[3] == 1")
    return fresh(F32, dims(x.ne[0], x.ne[2]))


def _hc_post(t: Tensor) -> Layout:
    """Lay out `ggml_dsv4_hc_post`: F32 [n_embd, hc, n_tokens].

    x [n_embd, n_tokens], residual [n_embd, hc, n_tokens], post [hc, n_tokens], comb [hc, hc, n_tokens] or None.
    """
    return fresh(F32, operand(t, 1).ne)


_MASK = (i32("n_past", plus(1)),)
_SCALES = (f32("scale"), f32("max_bias", plus(4)))


def _scores(t: Tensor) -> int:
    """Return the number of elements of Q K^T."""
    q, k = operand(t), operand(t, 1)
    return q.ne[1] * q.ne[2] * q.ne[3] * k.ne[1]


def _attention(t: Tensor) -> int:
    q, v = operand(t), operand(t, 2)
    return _scores(t) * (4 * PASSES + 2 * (q.ne[0] + v.ne[0])) + LOOP * v.ne[1]


def _indexer_scores(t: Tensor) -> int:
    q, k = operand(t), operand(t, 1)
    return q.ne[1] * q.ne[2] * q.ne[3] * k.ne[2]


DIAG_MASK_INF = Op("DIAG_MASK_INF", src="a", layout=same_layout, params=_MASK)
DIAG_MASK_ZERO = Op("DIAG_MASK_ZERO", src="a", layout=same_layout, params=_MASK)
SOFT_MAX = Op(
    "SOFT_MAX",
    src="a mask? sinks?",
    layout=_soft_max,
    asserts="""
        ggml_is_contiguous(a); mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32; ggml_is_contiguous(mask);
        mask->ne[0] == a->ne[0]; mask->ne[1] >= a->ne[1]; a->ne[2]%mask->ne[2] == 0; a->ne[3]%mask->ne[3] == 0
    """,
    rounding=Rounding(1024, 1, "exp of differences, their sum, a quotient"),
    params=_SCALES,
    after=(("soft_max_add_sinks", "sinks"),),
)
FLASH_ATTN_EXT = Op(
    "FLASH_ATTN_EXT",
    src="q k v mask? sinks?",
    layout=_flash_attn_ext,
    asserts="""
        ggml_can_mul_mat(k, q); q->ne[3] == k->ne[3]; q->ne[3] == v->ne[3];
        mask->type == GGML_TYPE_F16; ggml_is_contiguous(mask); q->ne[2] % mask->ne[2] == 0; q->ne[3] % mask->ne[3] == 0
    """,
    runs="""
        k->ne[1] == v->ne[1]; q->ne[2] % v->ne[2] == 0;
        mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1]; n_kv_max >= 0
    """,
    rounding=Rounding(
        4096, 1, "two products with a softmax between", terms=_head_and_keys, products=2 * PRODUCT, by="flash_attn"
    ),
    params=(*_SCALES, f32("logit_softcap", plus(0.5)), enum("prec", PREC), i32("n_kv_max")),
    after=(
        ("prec_set_acc", "prec"),
        ("flash_attn_ext_set_n_kv_max", "n_kv_max"),
        ("flash_attn_ext_add_sinks", "sinks"),
    ),
    work=Work(lambda t: 8 * _scores(t), _attention),
    not_by_weights=("FLASH_ATTN_EXT",),  # sinks
)
LIGHTNING_INDEXER = Op(
    "LIGHTNING_INDEXER",
    src="q k weights mask",
    layout=_lightning_indexer,
    asserts="""
        q->type == GGML_TYPE_F32; weights->type == GGML_TYPE_F32; mask->type == GGML_TYPE_F16;
        q->ne[0] == k->ne[0]; mask->ne[0] == k->ne[2]; q->ne[1] == weights->ne[0]; k->ne[1] == 1;
        mask->ne[1] == q->ne[2]; q->ne[2] == weights->ne[1]; weights->ne[2] == 1; mask->ne[2] == 1;
        q->ne[3] == k->ne[3]; k->ne[3] == weights->ne[3]; weights->ne[3] % mask->ne[3] == 0
    """,
    rounding=Rounding(64, 1, "float32 sum of K products, then one over heads", products=2 * PRODUCT),
    work=Work(lambda t: 3 * _indexer_scores(t), lambda t: _indexer_scores(t) * (PASSES + 2 * operand(t).ne[0] // DOT)),
)
DSV4_HC_COMB = Op(
    "DSV4_HC_COMB",
    src="mixes scale base",
    layout=_hc_comb,
    rounding=Rounding(256, why="exp, and repeated normalisation of sums of four"),
    params=(f32("eps", to(0.5)), i32("n_iter", plus(1))),
    work=Work(operations=lambda t: t.params.n_iter * (10 * LOOP + PASSES * nelements(t))),
)
_STREAMS = "a float32 sum over the streams, a sigmoid"
DSV4_HC_PRE = Op(
    "DSV4_HC_PRE",
    src="x weights",
    layout=_hc_pre,
    asserts="x->type == GGML_TYPE_F32; weights->type == GGML_TYPE_F32; hc > 0; x->ne[3] == 1",
    let="hc = x->ne[1]",
    rounding=Rounding(64, why=_STREAMS),
    params=(f32("scale"), flag("gated")),
    work=Work(lambda t: 2 * nelements(operand(t))),
)
DSV4_HC_POST = Op(
    "DSV4_HC_POST",
    src="x residual post comb?",
    layout=_hc_post,
    asserts="""
        x->type == GGML_TYPE_F32; residual->type == GGML_TYPE_F32; post->type == GGML_TYPE_F32; hc > 0; x->ne[2] == 1;
        x->ne[3] == 1; residual->ne[0] == n_embd; residual->ne[2] == n_tokens; residual->ne[3] == 1; post->ne[0] == hc;
        post->ne[1] == n_tokens; post->ne[2] == 1; post->ne[3] == 1; comb->type == GGML_TYPE_F32; comb->ne[0] == hc;
        comb->ne[1] == hc; comb->ne[2] == n_tokens; comb->ne[3] == 1
    """,
    let="n_embd = x->ne[0]; n_tokens = x->ne[1]; hc = residual->ne[1]",
    rounding=Rounding(64, why=_STREAMS, products=PRODUCT),
    work=Work(lambda t: 2 * nelements(t), lambda t: 2 * nelements(t) * operand(t, 1).ne[1]),
)


class Attention:
    """Constructors of softmax and attention and setters of their options, with ggml's `ne`."""

    @DIAG_MASK_INF.constructor
    def diag_mask_inf(self, a: Tensor, n_past: int) -> None:
        """Set `a` to -inf right of diagonal `n_past`."""

    diag_mask_inf_inplace = diag_mask_inf.inplace

    @DIAG_MASK_ZERO.constructor
    def diag_mask_zero(self, a: Tensor, n_past: int) -> None:
        """Set `a` to 0 right of diagonal `n_past`."""

    diag_mask_zero_inplace = diag_mask_zero.inplace

    @SOFT_MAX.variant(scale=1.0)
    def soft_max(self, a: Tensor) -> None:
        """Compute the softmax of rows."""

    soft_max_inplace = soft_max.inplace

    @SOFT_MAX.constructor
    def soft_max_ext(self, a: Tensor, mask: Tensor | None, scale: float, max_bias: float) -> None:
        """Compute the softmax of `a * scale + mask * slope`, ALiBi slopes from `max_bias` or 1."""

    soft_max_ext_inplace = soft_max_ext.inplace

    def soft_max_add_sinks(self, a: Tensor, sinks: Tensor | None) -> None:
        """Set one sink logit per head (F32 [heads]) on a SOFT_MAX, or remove it."""
        _add_sinks(a, sinks, "SOFT_MAX", 2)

    @FLASH_ATTN_EXT.constructor
    def flash_attn_ext(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, max_bias: float, logit_softcap: float
    ) -> None:
        """Attend with `q` [dk, n, heads, s] to `k` [dk, n_kv, …] and `v` [dv, n_kv, kv_heads, s].

        `mask`: F16 [n_kv, at least n, …]. Result: F32 [dv, heads, n, s], heads and tokens swapped.
        """

    def flash_attn_ext_set_prec(self, a: Tensor, prec: int) -> None:
        """Set the accumulation precision of a FLASH_ATTN_EXT."""
        expect(a, "FLASH_ATTN_EXT")
        set_param(a, "prec", prec)

    def flash_attn_ext_set_n_kv_max(self, a: Tensor, n_kv_max: int) -> None:
        """Set the number of keys to which the longest sequence can attend; 0 if unknown."""
        expect(a, "FLASH_ATTN_EXT")
        if n_kv_max < 0:
            raise failed("n_kv_max >= 0", (a,), op=a.op, n_kv_max=n_kv_max)
        set_param(a, "n_kv_max", n_kv_max)

    def flash_attn_ext_add_sinks(self, a: Tensor, sinks: Tensor | None) -> None:
        """Set one sink logit per head (F32 [heads]) on a FLASH_ATTN_EXT, or remove it."""
        _add_sinks(a, sinks, "FLASH_ATTN_EXT", 4)

    @LIGHTNING_INDEXER.constructor
    def lightning_indexer(self, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> None:
        """Compute scores of keys: relu(q k) summed over heads with `weights`, plus `mask`."""

    @DSV4_HC_COMB.constructor
    def dsv4_hc_comb(self, mixes: Tensor, scale: Tensor, base: Tensor, eps: float, n_iter: int) -> None:
        """Compute mixing matrices: softmax of rows, then columns and rows normalised in turn."""

    @DSV4_HC_PRE.variant(scale=1.0)
    def dsv4_hc_pre(self, x: Tensor, weights: Tensor) -> None:
        """Sum streams [n_embd, hc, n_tokens] with `weights` [hc, n_tokens]."""

    @DSV4_HC_PRE.form(gate=lambda t: t.src[1])
    def dsv4_hc_pre_gated(self, x: Tensor, gate: Tensor, scale: float) -> Tensor:
        """Sum streams with sigmoid(`gate`) per element, times `scale`."""
        return DSV4_HC_PRE.node(x, gate, scale=scale, gated=True)

    @DSV4_HC_POST.constructor
    def dsv4_hc_post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> None:
        """Add `x` times `post` to each residual stream; `comb` mixes the residual streams first."""


def _add_sinks(a: Tensor, sinks: Tensor | None, op: str, i: int) -> None:
    if sinks is None:
        a.src = a.src[:i]
        return
    expect(a, op)
    if len(a.src) > i:
        raise failed(f"a->src[{i}] == NULL", (a,), op=a.op)
    _check_sinks(a, sinks)
    a.src = (*a.src, *(None,) * (i - len(a.src)), sinks)
