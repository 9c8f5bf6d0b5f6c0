"""Rules of the ops that DeepSeek's later models add: the indexer of sparse attention, and hyper-connections."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, dims
from conformance.ggml.types import F16, F32

from .rules_base import Layout, Rule, check, divides, fresh, operand, optional, violated

HC = 4
"""Streams of a hyper-connection: all that `ggml_dsv4_hc_comb` takes."""


def _lightning_indexer(t: Tensor) -> Layout:
    """`ggml_lightning_indexer`: q [n, heads, n_t, s], k [n, 1, n_kv, s], weights [heads, n_t, 1, s], mask F16.

    Result: F32 [n_kv, n_t, 1, s], the sum over heads of relu(q k) weights, plus the mask [n_kv, n_t, 1, …].
    """
    q, k, weights, mask = (operand(t, i) for i in range(4))
    check(
        t,
        (
            (q.type is F32, "q->type == GGML_TYPE_F32"),
            (weights.type is F32, "weights->type == GGML_TYPE_F32"),
            (mask.type is F16, "mask->type == GGML_TYPE_F16"),
            (q.ne[0] == k.ne[0], "q->ne[0] == k->ne[0]"),
            (mask.ne[0] == k.ne[2], "mask->ne[0] == k->ne[2]"),
            (q.ne[1] == weights.ne[0], "q->ne[1] == weights->ne[0]"),
            (k.ne[1] == 1, "k->ne[1] == 1"),
            (mask.ne[1] == q.ne[2], "mask->ne[1] == q->ne[2]"),
            (q.ne[2] == weights.ne[1], "q->ne[2] == weights->ne[1]"),
            (weights.ne[2] == 1, "weights->ne[2] == 1"),
            (mask.ne[2] == 1, "mask->ne[2] == 1"),
            (q.ne[3] == k.ne[3], "q->ne[3] == k->ne[3]"),
            (k.ne[3] == weights.ne[3], "k->ne[3] == weights->ne[3]"),
            (divides(mask.ne[3], weights.ne[3]), "weights->ne[3] % mask->ne[3] == 0"),
        ),
    )
    return fresh(F32, (k.ne[2], q.ne[2], 1, q.ne[3]))


def _lightning_indexer_runs(t: Tensor) -> None:
    for i, name in enumerate(("q", "k", "w", "m")):
        s = operand(t, i)
        if s.nb[0] != s.type.type_size:
            raise violated(t, f"nb{name}0 == ggml_type_size({name}->type)")


def _hc_comb(t: Tensor) -> Layout:
    """`ggml_dsv4_hc_comb`: mixes [(2 + hc) * hc, n_tokens], scale [3], base [(2 + hc) * hc] to F32 [hc, hc, n_tokens].

    `op_params`: eps, n_iter.
    """
    mixes, scale, base = (operand(t, i) for i in range(3))
    n = mixes.ne[0]
    hc = next((i for i in range(1, n + 1) if i * i + 2 * i >= n), 0)
    check(
        t,
        (
            (mixes.type is F32, "mixes->type == GGML_TYPE_F32"),
            (scale.type is F32, "scale->type == GGML_TYPE_F32"),
            (base.type is F32, "base->type == GGML_TYPE_F32"),
            (t.op_params[1] > 0, "n_iter > 0"),
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
        ),
        n_iter=t.op_params[1],
    )
    return fresh(F32, dims(hc, hc, mixes.ne[1]))


def _hc_pre(t: Tensor) -> Layout:
    """`ggml_dsv4_hc_pre`: x [n_embd, hc, n_tokens], weights [hc, n_tokens] to F32 [n_embd, n_tokens].

    `ggml_dsv4_hc_pre_gated`: weights [n_embd, hc, n_tokens], of which the sigmoid counts. `op_params`: scale, gated.
    """
    x, w = operand(t), operand(t, 1)
    gated = t.op_params[1] != 0
    check(
        t,
        (
            (x.type is F32, "x->type == GGML_TYPE_F32"),
            (w.type is F32, "weights->type == GGML_TYPE_F32"),
            (x.ne[1] > 0, "hc > 0"),
            (x.ne[3] == 1, "x->ne[3] == 1"),
        ),
    )
    if gated:
        check(
            t,
            (
                (w.ne[0] == x.ne[0], "weights->ne[0] == n_embd"),
                (w.ne[1] == x.ne[1], "weights->ne[1] == hc"),
                (w.ne[2] == x.ne[2], "weights->ne[2] == n_tokens"),
            ),
        )
    else:
        check(
            t,
            (
                (w.ne[0] == x.ne[1], "weights->ne[0] == hc"),
                (w.ne[1] == x.ne[2], "weights->ne[1] == n_tokens"),
                (w.ne[2] == 1, "weights->ne[2] == 1"),
            ),
        )
    if w.ne[3] != 1:
        raise violated(t, "weights->ne[3] == 1")
    return fresh(F32, dims(x.ne[0], x.ne[2]))


def _hc_post(t: Tensor) -> Layout:
    """`ggml_dsv4_hc_post`: x [n_embd, n_tokens], residual [n_embd, hc, n_tokens], post [hc, n_tokens], comb or None.

    comb [hc, hc, n_tokens]; result F32 [n_embd, hc, n_tokens].
    """
    x, residual, post, comb = operand(t), operand(t, 1), operand(t, 2), optional(t, 3)
    n_embd, n_tokens, hc = x.ne[0], x.ne[1], residual.ne[1]
    check(
        t,
        (
            (x.type is F32, "x->type == GGML_TYPE_F32"),
            (residual.type is F32, "residual->type == GGML_TYPE_F32"),
            (post.type is F32, "post->type == GGML_TYPE_F32"),
            (hc > 0, "hc > 0"),
            (x.ne[2] == 1, "x->ne[2] == 1"),
            (x.ne[3] == 1, "x->ne[3] == 1"),
            (residual.ne[0] == n_embd, "residual->ne[0] == n_embd"),
            (residual.ne[2] == n_tokens, "residual->ne[2] == n_tokens"),
            (residual.ne[3] == 1, "residual->ne[3] == 1"),
            (post.ne[0] == hc, "post->ne[0] == hc"),
            (post.ne[1] == n_tokens, "post->ne[1] == n_tokens"),
            (post.ne[2] == 1, "post->ne[2] == 1"),
            (post.ne[3] == 1, "post->ne[3] == 1"),
        ),
    )
    if comb is not None:
        check(
            t,
            (
                (comb.type is F32, "comb->type == GGML_TYPE_F32"),
                (comb.ne[0] == hc, "comb->ne[0] == hc"),
                (comb.ne[1] == hc, "comb->ne[1] == hc"),
                (comb.ne[2] == n_tokens, "comb->ne[2] == n_tokens"),
                (comb.ne[3] == 1, "comb->ne[3] == 1"),
            ),
        )
    return fresh(F32, dims(n_embd, hc, n_tokens))


SPARSE_RULES: dict[str, Rule] = {
    "LIGHTNING_INDEXER": Rule(_lightning_indexer, 4, runs=_lightning_indexer_runs),
    "DSV4_HC_COMB": Rule(_hc_comb, 3, n_params=2),
    "DSV4_HC_PRE": Rule(_hc_pre, 2, n_params=2),
    "DSV4_HC_POST": Rule(_hc_post, 3, 4),
}
