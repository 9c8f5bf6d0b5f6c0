"""Ops with a state: selective scans and linear attention. Each gives outputs and then new states in one tensor.

ggml's kernels assume F32 and a token count that divides evenly, and do not check it; `runs` of these ops does.
"""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, dims, is_contiguous, nelements, same_shape
from conformance.ggml.types import F32

from .matmul import PRODUCT
from .op import (
    LOOP,
    PASSES,
    Layout,
    Rounding,
    Work,
    all_f32,
    check,
    divides,
    f32,
    fresh,
    i32,
    op,
    operand,
    violated,
)


def _ssm_scan(t: Tensor) -> Layout:
    """`ggml_ssm_scan`: `src` s, x, dt, A, B, C, ids; of the states the last K are kept.

    s [d_state, head_dim, n_head, rows], x [head_dim, n_head, n_t, n_s], dt [n_head, n_t, n_s],
    A [1 or d_state, n_head], B and C [d_state, n_group, n_t, n_s], ids I32 [n_s]: row of s that a sequence starts from.
    Result: F32 [nelements(x) + K * d_state * head_dim * n_head * n_s], y and then the states, the latest first.
    """
    s, x, a, ids, k = operand(t), operand(t, 1), operand(t, 3), operand(t, 6), t.params.K
    if a.ne[0] != 1:
        check(t, (a.ne[0] == s.ne[0], "A->ne[0] == d_state"), (k == 1, "K == 1"), K=k)
    return fresh(F32, dims(nelements(x) + k * s.ne[0] * s.ne[1] * s.ne[2] * ids.ne[0]))


def _ssm_scan_runs(t: Tensor) -> None:
    all_f32(t, 6)
    x, b, ids = operand(t, 1), operand(t, 4), operand(t, 6)
    check(
        t,
        (divides(b.ne[1], x.ne[1]), "nh % ng == 0"),
        (ids.nb[0] == ids.type.type_size, "src6->nb[0] == sizeof(int32_t)"),
    )


def _dense(t: Tensor, names: str) -> None:
    for i, name in enumerate(names.split()):
        if not is_contiguous(operand(t, i)):
            raise violated(t, f"ggml_is_contiguous({name})")


def _alike(t: Tensor, k: Tensor, others: dict[str, Tensor], state: Tensor) -> Layout:
    """Every one of `others` has `k`'s shape; result [S * H, n_tokens + S * n_seqs]: outputs, then states."""
    s, h, n, n_seqs = k.ne[0], k.ne[1], k.ne[2], state.ne[1]
    for name, x in others.items():
        if x.ne[:3] != k.ne[:3]:
            raise violated(t, f"{name}->ne[0] == S && {name}->ne[1] == H && {name}->ne[2] == n_tokens")
    if nelements(state) != s * s * h * n_seqs:
        raise violated(t, "ggml_nelements(state) == S * S * H * n_seqs")
    return fresh(F32, dims(s * h, n + s * n_seqs))


def _wkv6(t: Tensor) -> Layout:
    """`ggml_rwkv_wkv6`: `src` k, v, r [S, H, n_tokens], tf [S, H], td as k, state [S * S * H, n_seqs]."""
    _dense(t, "k v r tf td state")
    k, v, r, _, td, state = (operand(t, i) for i in range(6))
    return _alike(t, k, {"v": v, "r": r, "td": td}, state)


def _wkv6_runs(t: Tensor) -> None:
    _shared_runs(t, 6)
    k, tf = operand(t), operand(t, 3)
    check(t, (nelements(tf) == k.ne[0] * k.ne[1], "ggml_nelements(tf) == S * H"))


def _wkv7(t: Tensor) -> Layout:
    """`ggml_rwkv_wkv7`: `src` r, w, k, v, a, b [S, H, n_tokens], state [S * S * H, n_seqs]."""
    _dense(t, "r w k v a b state")
    _, w, k, v, a, b, state = (operand(t, i) for i in range(7))
    return _alike(t, k, {"w": w, "v": v, "a": a, "b": b}, state)


def _wkv7_runs(t: Tensor) -> None:
    _shared_runs(t, 7)
    r, k = operand(t), operand(t, 2)
    check(t, (same_shape(r, k), "ggml_are_same_shape(r, k)"))


def _gated_linear_attn(t: Tensor) -> Layout:
    """`ggml_gated_linear_attn`: `src` k, v, q, g [S, H, n_tokens], state [S * S * H, n_seqs]."""
    _dense(t, "k v q g state")
    k, v, q, g, state = (operand(t, i) for i in range(5))
    return _alike(t, k, {"v": v, "q": q, "g": g}, state)


def _shared_runs(t: Tensor, n: int) -> None:
    """`n` src of float32, and tokens that share out evenly among the sequences: ggml divides one by the other twice."""
    all_f32(t, n)
    tokens, seqs = operand(t, 1).ne[2], operand(t, n - 1).ne[1]
    check(
        t,
        (operand(t).ne[3] == 1, "ggml_is_3d(src[0])"),
        (divides(seqs, tokens) and tokens >= seqs, "n_tokens % n_seqs == 0"),
    )


def _gla_runs(t: Tensor) -> None:
    _shared_runs(t, 5)


def _gated_delta_net(t: Tensor) -> Layout:
    """`ggml_gated_delta_net`: `src` q, k, v, g, beta, state; of the states the last K are kept.

    v [S, H, n_t, n_s], q and k [S, heads, n_t, seqs] (repeated to v's), g [1 or S, H, n_t, n_s], beta
    [1, H, n_t, n_s], state [S, S, H, n_s]. Result: F32 [S * H, n_t * n_s + K * S * n_s], outputs and then the states,
    the latest first; with fewer tokens than K the rest of them is left as it was.
    """
    s, h, n_t, n_s = operand(t, 2).ne
    return fresh(F32, dims(s * h, n_t * n_s + t.params.K * s * n_s))


def _gated_delta_net_runs(t: Tensor) -> None:
    """What `ggml_compute_forward_gated_delta_net_one_chunk` takes for granted: it would read past the end otherwise."""
    q, k, v, g, beta = (operand(t, i) for i in range(5))
    for x, name in ((q, "q"), (k, "k")):
        check(
            t,
            (x.ne[0] == v.ne[0], f"{name}->ne[0] == S_v"),
            (divides(x.ne[1], v.ne[1]), f"H % {name}->ne[1] == 0"),
            (x.ne[2] == v.ne[2], f"{name}->ne[2] == n_tokens"),
            (divides(x.ne[3], v.ne[3]), f"n_seqs % {name}->ne[3] == 0"),
        )
    check(t, (g.ne[1:] == v.ne[1:], "g holds H, n_tokens, n_seqs"), (beta.ne[1:] == v.ne[1:], "beta holds as many"))


def _state_and_tokens(t: Tensor) -> int:
    return operand(t).ne[0] + operand(t, 1).ne[2]


_STATES = Rounding(
    64, 1, "float32 sums of K products into a state that tokens share", terms=_state_and_tokens, products=PRODUCT
)
_K = (i32("K"),)


def _turns(tokens: int, state: int) -> int:
    """A loop over tokens, each of which changes a state."""
    return tokens * (20 * LOOP + PASSES * state)


def _scan_state(t: Tensor) -> int:
    s = operand(t)
    return s.ne[0] * s.ne[1] * s.ne[2] * operand(t, 1).ne[3]


def _scan_elements(t: Tensor) -> int:
    x = operand(t, 1)
    return x.ne[2] * _scan_state(t) + 2 * x.ne[1] * nelements(operand(t, 4))


def _linear(state: int, values: int) -> Work:
    """Of an op over the state `src[state]`, which holds so many values of its size."""
    return Work(
        lambda t: values * nelements(operand(t, state)),
        lambda t: _turns(operand(t).ne[2], nelements(operand(t, state))),
    )


def _delta_elements(t: Tensor) -> int:
    v = operand(t, 2)
    return v.ne[2] * nelements(operand(t, 5)) + 3 * nelements(v)


SSM_SCAN = op(
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
    runs=_ssm_scan_runs,
    rounding=_STATES,
    params=_K,
    work=Work(_scan_elements, lambda t: _turns(operand(t, 1).ne[2], _scan_state(t))),
)
RWKV_WKV6 = op(
    "RWKV_WKV6", src="k v r tf td state", layout=_wkv6, runs=_wkv6_runs, rounding=_STATES, work=_linear(5, 4)
)
RWKV_WKV7 = op(
    "RWKV_WKV7", src="r w k v a b state", layout=_wkv7, runs=_wkv7_runs, rounding=_STATES, work=_linear(6, 6)
)
GATED_LINEAR_ATTN = op(
    "GATED_LINEAR_ATTN",
    src="k v q g state",
    layout=_gated_linear_attn,
    runs=_gla_runs,
    rounding=_STATES,
    params=(f32("scale"),),
    work=_linear(4, 4),
)
GATED_DELTA_NET = op(
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
    let="S_v = v->ne[0]; H = v->ne[1]; n_seqs = v->ne[3]",
    runs=_gated_delta_net_runs,
    rounding=_STATES,
    params=_K,
    work=Work(_delta_elements, lambda t: _turns(operand(t, 2).ne[2], nelements(operand(t, 5)))),
)


class Recurrent:
    """Constructors of the ops with a state. Shapes are those of the rules; everything is F32 but `ids`."""

    @SSM_SCAN.constructor
    def ssm_scan(
        self, s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int
    ) -> None:  # fmt: skip
        """`x` through the state space of `A`, `B`, `C` with steps softplus(`dt`), from rows `ids` of `s`.

        Of the states the last `K` are kept, the latest first.
        """

    @RWKV_WKV6.constructor
    def rwkv_wkv6(self, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> None:
        """RWKV 6: y = r (tf k v + state), then state = td state + k v."""

    @RWKV_WKV7.constructor
    def rwkv_wkv7(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
        """RWKV 7: state = w state + v k + (state a) b, then y = state r."""

    @GATED_LINEAR_ATTN.constructor
    def gated_linear_attn(self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> None:
        """Gated linear attention: state = g state + k v, then y = scale q state."""

    @GATED_DELTA_NET.constructor
    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int
    ) -> None:  # fmt: skip
        """The gated delta rule: state = exp(g) state, then + k beta (v - k state); y = q state / sqrt(S).

        Of the states the last `K` are kept, the latest first.
        """
