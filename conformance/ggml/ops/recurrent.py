"""Ops with a state: selective scans and linear attention; results are outputs, then states.

ggml's kernels assume F32 and a token count that divides evenly without checking; `runs` of these ops checks it.
"""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.tensor import Tensor, dims, is_contiguous, nelements
from conformance.ggml.types import F32

from .fields import f32, i32
from .matmul import PRODUCT
from .op import DECLARATIONS, LOOP, PASSES, Layout, Op, Rounding, Work, check, fresh, operand, violated


def _ssm_scan(t: Tensor) -> Layout:
    """Lay out `ggml_ssm_scan`: `src` s, x, dt, A, B, C, ids; the last K states are kept.

    s [d_state, head_dim, n_head, rows], x [head_dim, n_head, n_t, n_s], dt [n_head, n_t, n_s],
    A [1 or d_state, n_head], B and C [d_state, n_group, n_t, n_s], ids I32 [n_s]: row of s that a sequence starts from.
    Result: F32 [nelements(x) + K * d_state * head_dim * n_head * n_s], y and then the states, latest first.
    """
    s, x, a, ids, k = operand(t), operand(t, 1), operand(t, 3), operand(t, 6), t.params.K
    if a.ne[0] != 1:
        check(t, (a.ne[0] == s.ne[0], "A->ne[0] == d_state"), (k == 1, "K == 1"), K=k)
    return fresh(F32, dims(nelements(x) + k * s.ne[0] * s.ne[1] * s.ne[2] * ids.ne[0]))


def _linear(t: Tensor, k: int, same: Sequence[int]) -> Layout:
    """Lay out outputs, then states: [S * H, n_tokens + S * n_seqs]; `same` are shaped as `k`."""
    names = DECLARATIONS[t.op].src
    src = [operand(t, i) for i in range(len(names))]
    for name, x in zip(names, src, strict=True):
        if not is_contiguous(x):
            raise violated(t, f"ggml_is_contiguous({name})")
    s, h, n, _ = src[k].ne
    for name, x in ((names[i], src[i]) for i in same):
        if x.ne[:3] != (s, h, n):
            raise violated(t, f"{name}->ne[0] == S && {name}->ne[1] == H && {name}->ne[2] == n_tokens")
    n_seqs = src[-1].ne[1]
    if nelements(src[-1]) != s * s * h * n_seqs:
        raise violated(t, "ggml_nelements(state) == S * S * H * n_seqs")
    return fresh(F32, dims(s * h, n + s * n_seqs))


def _wkv6(t: Tensor) -> Layout:
    """Lay out `ggml_rwkv_wkv6`: k, v, r, td [S, H, n_tokens], tf [S, H], state."""
    return _linear(t, 0, (1, 2, 4))


def _wkv7(t: Tensor) -> Layout:
    """Lay out `ggml_rwkv_wkv7`: r, w, k, v, a, b [S, H, n_tokens], state [S * S * H, n_seqs]."""
    return _linear(t, 2, (1, 3, 4, 5))


def _gated_linear_attn(t: Tensor) -> Layout:
    """Lay out `ggml_gated_linear_attn`: k, v, q, g [S, H, n_tokens], state [S * S * H, n_seqs]."""
    return _linear(t, 0, (1, 2, 3))


def _gated_delta_net(t: Tensor) -> Layout:
    """Lay out `ggml_gated_delta_net`: q, k, v, g, beta, state; the last K states are kept.

    v [S, H, n_t, n_s], q and k [S, heads, n_t, seqs] (repeated to v's), g [1 or S, H, n_t, n_s], beta [1, H, n_t, n_s],
    state [S, S, H, n_s]. Result: F32 [S * H, n_t * n_s + K * S * n_s], outputs and then the states, latest first; with
    fewer than K tokens the remaining states are left as they were.
    """
    s, h, n_t, n_s = operand(t, 2).ne
    return fresh(F32, dims(s * h, n_t * n_s + t.params.K * s * n_s))


def _state_and_tokens(t: Tensor) -> int:
    return operand(t).ne[0] + operand(t, 1).ne[2]


_STATES = Rounding(
    64, 1, "float32 sums of K products into a state that tokens share", terms=_state_and_tokens, products=PRODUCT
)
_K = (i32("K"),)


def _turns(tokens: int, state: int) -> int:
    """Return the operations of a loop over tokens, each of which changes a state."""
    return tokens * (20 * LOOP + PASSES * state)


def _scan_state(t: Tensor) -> int:
    s = operand(t)
    return s.ne[0] * s.ne[1] * s.ne[2] * operand(t, 1).ne[3]


def _scan_elements(t: Tensor) -> int:
    x = operand(t, 1)
    return x.ne[2] * _scan_state(t) + 2 * x.ne[1] * nelements(operand(t, 4))


def _linear_work(state: int, values: int) -> Work:
    """Return the work of an op that makes `values` arrays of the size of `src[state]`."""
    return Work(
        lambda t: values * nelements(operand(t, state)),
        lambda t: _turns(operand(t).ne[2], nelements(operand(t, state))),
    )


def _delta_elements(t: Tensor) -> int:
    v = operand(t, 2)
    return v.ne[2] * nelements(operand(t, 5)) + 3 * nelements(v)


_LET = "n_tokens = k->ne[2]; n_seqs = state->ne[1]"


def _linear_runs(src: str, more: str = "") -> str:
    """Return `runs` for F32 sources and tokens divided evenly among sequences, as ggml assumes."""
    types = "; ".join(f"{s}->type == GGML_TYPE_F32" for s in src.split())
    return f"{types}; ggml_is_3d({src.split(maxsplit=1)[0]}); n_tokens % n_seqs == 0 && n_tokens >= n_seqs{more}"


SSM_SCAN = Op(
    "SSM_SCAN",
    src="s x dt A B C ids",
    layout=_ssm_scan,
    asserts="""
        K >= 1; ggml_is_contiguous(s); ggml_is_contiguous(dt); ggml_is_contiguous(A);
        x->nb[0] == ggml_type_size(x->type); B->nb[0] == ggml_type_size(B->type); C->nb[0] == ggml_type_size(C->type);
        x->nb[1] == x->ne[0]*x->nb[0]; B->nb[1] == B->ne[0]*B->nb[0]; C->nb[1] == C->ne[0]*C->nb[0];
        ggml_are_same_shape(B, C); ids->type == GGML_TYPE_I32; dt->ne[0] == n_head; dt->ne[1] == n_seq_tokens;
        dt->ne[2] == n_seqs; ggml_is_3d(dt); s->ne[1] == head_dim; s->ne[2] == n_head; B->ne[0] == d_state;
        B->ne[2] == n_seq_tokens; B->ne[3] == n_seqs; ids->ne[0] == n_seqs; ggml_is_vector(ids); A->ne[1] == n_head;
        ggml_is_matrix(A)
    """,
    let="head_dim = x->ne[0]; n_head = x->ne[1]; n_seq_tokens = x->ne[2]; n_seqs = x->ne[3]; d_state = s->ne[0]",
    runs="""
        s->type == GGML_TYPE_F32; x->type == GGML_TYPE_F32; dt->type == GGML_TYPE_F32; A->type == GGML_TYPE_F32;
        B->type == GGML_TYPE_F32; C->type == GGML_TYPE_F32; n_head % B->ne[1] == 0
    """,
    rounding=_STATES,
    outputs="x",
    params=_K,
    work=Work(_scan_elements, lambda t: _turns(operand(t, 1).ne[2], _scan_state(t))),
)
RWKV_WKV6 = Op(
    "RWKV_WKV6",
    src="k v r tf td state",
    layout=_wkv6,
    let=_LET,
    runs=_linear_runs("k v r tf td state", "; ggml_nelements(tf) == k->ne[0] * k->ne[1]"),
    rounding=_STATES,
    outputs="v",
    work=_linear_work(5, 4),
)
RWKV_WKV7 = Op(
    "RWKV_WKV7",
    src="r w k v a b state",
    layout=_wkv7,
    let=_LET,
    runs=_linear_runs("r w k v a b state", "; ggml_are_same_shape(r, k)"),
    rounding=_STATES,
    outputs="v",
    work=_linear_work(6, 6),
)
GATED_LINEAR_ATTN = Op(
    "GATED_LINEAR_ATTN",
    src="k v q g state",
    layout=_gated_linear_attn,
    let=_LET,
    runs=_linear_runs("k v q g state"),
    rounding=_STATES,
    outputs="v",
    params=(f32("scale"),),
    work=_linear_work(4, 4),
)
GATED_DELTA_NET = Op(
    "GATED_DELTA_NET",
    src="q k v g beta state",
    layout=_gated_delta_net,
    asserts="""
        ggml_is_contiguous_rows(q); ggml_is_contiguous_rows(k); ggml_is_contiguous_rows(v);
        ggml_is_contiguous(g); ggml_is_contiguous(beta); ggml_is_contiguous(state);
        q->type == GGML_TYPE_F32; k->type == GGML_TYPE_F32; v->type == GGML_TYPE_F32;
        g->type == GGML_TYPE_F32; beta->type == GGML_TYPE_F32; state->type == GGML_TYPE_F32;
        g->ne[0] == 1 || g->ne[0] == S_v; beta->ne[0] == 1; state->ne[0] == S_v; state->ne[1] == S_v;
        state->ne[2] == H; state->ne[3] == n_seqs; K >= 1
    """,
    let="S_v = v->ne[0]; H = v->ne[1]; n_tokens = v->ne[2]; n_seqs = v->ne[3]",
    runs="""
        q->ne[0] == S_v; H % q->ne[1] == 0; q->ne[2] == n_tokens; n_seqs % q->ne[3] == 0;
        k->ne[0] == S_v; H % k->ne[1] == 0; k->ne[2] == n_tokens; n_seqs % k->ne[3] == 0;
        g->ne[1] == H; g->ne[2] == n_tokens; g->ne[3] == n_seqs;
        beta->ne[1] == H; beta->ne[2] == n_tokens; beta->ne[3] == n_seqs
    """,  # ggml_compute_forward_gated_delta_net_one_chunk would read past the end otherwise
    rounding=_STATES,
    outputs="v",
    params=_K,
    work=Work(_delta_elements, lambda t: _turns(operand(t, 2).ne[2], nelements(operand(t, 5)))),
)


class Recurrent:
    """Constructors of the ops with a state, F32 except `ids`; shapes as in the rules."""

    @SSM_SCAN.constructor
    def ssm_scan(
        self, s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int
    ) -> None:  # fmt: skip
        """Scan `x` with `A`, `B`, `C`, steps softplus(`dt`), from rows `ids` of `s`: `K` states."""

    @RWKV_WKV6.constructor
    def rwkv_wkv6(self, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> None:
        """Compute RWKV 6: y = r (tf k v + state), then state = td state + k v."""

    @RWKV_WKV7.constructor
    def rwkv_wkv7(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
        """Compute RWKV 7: state = w state + v k + (state a) b, then y = state r."""

    @GATED_LINEAR_ATTN.constructor
    def gated_linear_attn(self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> None:
        """Compute gated linear attention: state = g state + k v, then y = scale q state."""

    @GATED_DELTA_NET.constructor
    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int
    ) -> None:  # fmt: skip
        """Compute the gated delta rule; the last `K` states are kept, latest first.

        state = exp(g) state, then + k beta (v - k state); y = q state / sqrt(S)
        """
