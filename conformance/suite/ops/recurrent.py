"""Ops with state: selective scans and linear attention over heads, sequences and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from conformance.ggml.tensor import Dims, Tensor, nelements
from conformance.ggml.types import F32, I32
from conformance.suite.data import Fill, normal, uniform
from conformance.suite.grid import grid, points, shapes

from .bench import Bench, Timed, cases


def _both(bench: Bench, out: Tensor, ne: Dims, n_states: int) -> Sequence[Tensor]:
    """Return the result, outputs of shape `ne`, and the `n_states` state elements that follow.

    If llama.cpp does not read all elements of a result, the result is not checked as a whole.
    """
    b, n = bench.b, math.prod(ne)
    nb1, nb2, nb3 = (4 * math.prod(ne[:i]) for i in (1, 2, 3))
    parts = b.cont(b.view_4d(out, *ne, nb1, nb2, nb3, 0)), b.cont(b.view_1d(out, n_states, 4 * n))
    return (out, *parts) if n + n_states == nelements(out) else parts


@cases(
    "SSM_SCAN",
    keys="x=SHAPE d_state=16 a=0 n_group=1 K=1 spare=2 dt=mid|large|small vs= vx= vb=",
    types="s",
    standard=(
        grid("f32", x="1x8x1 1x8x5 1x33x1 1x33x5", d_state="16 7", spare="- 0"),
        grid("f32", x="1x16x1x3 1x16x4x3", d_state=16),
        grid("f32", x="16x4x1 16x4x7 64x6x1 64x6x7", d_state="32 128 20", a=1, n_group="1 2"),
        grid("f32", x="32x4x1x3 32x4x6x3", d_state=64, a=1, n_group="1 4"),
        grid("f32", x="16x4x5x2", d_state=32, a=1, n_group=2, layout=points("vx=slab vx=part vb=part vs=off")),
        grid("f32", x="1x12x5x2", variant=points("vx=part vb=part vs=off dt=large dt=small")),
        grid("f32", x="16x4x5x2", d_state=32, a=1, variant=points("K=3 K=5 K=8 dt=large dt=small")),
        "SSM_SCAN-f32-x=16x4x1,d_state=32,a=1,K=4",
    ),
    pairs=(
        grid(
            "f32",
            x=shapes("1x12 16x4", "1 5", "1 3"),
            d_state="16 32 20",
            a="- 1",
            n_group="1 2 4",
            K="1 3 8",
            spare="0 2",
            dt="mid large small",
            vs="- off",
            vx="- off slab part",
            vb="- off part",
        ),
    ),
    wide=("SSM_SCAN-f32-x=16x2x2049,d_state=16,a=1",),
    full=(
        grid("f32", x="16x2x8193 1x32x8193", d_state=16, a=1),
        grid("f32", x="1x1536x1x2 1x1536x33x2", d_state=16),
        grid("f32", x="64x48x1x2 64x48x33x2", d_state=128, a=1, n_group=8),
    ),
    timed=tuple(Timed(f"SSM_SCAN-f32-x=64x48x{n},d_state=128,a=1,n_group=8", n, 4, "full") for n in (1, 32)),
)
def _ssm_scan(bench: Bench) -> Sequence[Tensor]:
    v, b = bench.v, bench.b
    head_dim, n_head, n_t, n_s = v["x"]
    d_state, n_group = v["d_state"], v["n_group"]
    cells = n_s + v["spare"]
    s = bench.operand("cache_s_l0", F32, (d_state, head_dim, n_head, cells), normal(), v["vs"], keep=True)
    x = bench.operand("x", F32, v["x"], normal(), v["vx"])
    dt = bench.leaf("dt", F32, (n_head, n_t, n_s, 1), uniform(*_STEPS[v["dt"]]))
    decay = bench.leaf("ssm_a", F32, (v["a"] or d_state, n_head, 1, 1), uniform(-2.0, -0.05), keep=True)
    bb, c = (bench.operand(name, F32, (d_state, n_group, n_t, n_s), normal(0.5), v["vb"]) for name in ("B", "C"))
    ids = bench.lists("ids", I32, (n_s, 1, 1, 1), cells, "")
    out = b.ssm_scan(s, x, dt, decay, bb, c, ids, v["K"])
    return _both(bench, out, v["x"], min(v["K"], n_t) * d_state * head_dim * n_head * n_s)


_STEPS = {"mid": (-4.0, 3.0), "large": (15.0, 25.0), "small": (-12.0, -6.0)}
"""Ranges of dt before the softplus: typical, around its bend at 20, near zero."""


def _unit(size: int) -> Fill:
    """Return keys with a norm of about 1, as models normalise them."""
    return normal(1.0 / math.sqrt(size))


@cases(
    "RWKV_WKV6 RWKV_WKV7 GATED_LINEAR_ATTN",
    keys="ne=SHAPE scale=0.125 v= vs=",
    types="state",
    standard=(
        grid("f32", ne=shapes("32 64", "1 3", "1 5 17")),
        grid("f32", ne=shapes("32x3", "1 4", "2 3")),
        grid("RWKV_WKV6 GATED_LINEAR_ATTN", "f32", ne="20x2x3x2 16x2x3x2"),
        grid("f32", ne="32x2x5", layout=points("v=off vs=off v=flat")),
        grid("GATED_LINEAR_ATTN", "f32", ne="32x2x3", scale="1.0 0.3"),
    ),
    pairs=(grid("f32", ne=shapes("32 64", "1 3", "1 5", "1 2"), v="- off flat", vs="- off flat"),),
    full=(grid("f32", ne="64x32x1x2 64x32x33x2"),),
    timed=tuple(
        Timed(f"{op}-f32-ne=64x32x{n}", n, 4, "full")
        for op in ("RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN")
        for n in (1, 32)
    ),
)
def _wkv(bench: Bench) -> Sequence[Tensor]:
    v, b, op = bench.v, bench.b, bench.id.op
    size, heads, n_t, n_s = v["ne"]
    ne = (size, heads, n_t * n_s, 1)
    state = bench.operand("cache_s_l0", F32, (size * size * heads, n_s, 1, 1), normal(), v["vs"], keep=True)
    decay = bench.leaf("w", F32, ne, uniform(0.3, 1.0))
    r, vv = (bench.operand(name, F32, ne, normal(), v["v"]) for name in ("r", "v"))
    k = bench.operand("k", F32, ne, _unit(size), v["v"])
    if op == "RWKV_WKV6":
        tf = bench.leaf("time_mix_first.weight", F32, (size, heads, 1, 1), normal(), keep=True)
        out = b.rwkv_wkv6(k, vv, r, tf, decay, state)
    elif op == "RWKV_WKV7":
        a, bb = (bench.leaf(name, F32, ne, _unit(size)) for name in ("a", "b"))
        out = b.rwkv_wkv7(r, decay, k, vv, a, bb, state)
    else:
        out = b.gated_linear_attn(k, vv, r, decay, state, v["scale"])
    return _both(bench, out, ne, size * size * heads * n_s)


@cases(
    "GATED_DELTA_NET",
    keys="ne=SHAPE k_heads=0 k_seqs=0 kda=0 K=1 vk= vv= vs=",
    types="state",
    standard=(
        grid("f32", ne=shapes("16 32 64 20", "1 4", "1 6"), kda="- 1"),
        grid("f32", ne="32x4x1x3 32x4x5x3", kda="- 1", k_heads="1 2 4"),
        grid("f32", ne="32x4x3x4", k_heads=2, k_seqs="1 2"),
        grid("f32", ne="32x4x5x2", kda="- 1", layout=points("vk=pad vv=p0213 vk=p0213,vv=pad vs=off vk=slab,vv=part")),
        grid("f32", ne="16x2x5x2", kda="- 1", K="2 5 8"),
        "GATED_DELTA_NET-f32-ne=16x2x1x2,K=4",
    ),
    pairs=(
        grid(
            "f32",
            ne=shapes("16 32 20", "4", "1 5", "4"),
            kda="- 1",
            k_heads="- 1 2",
            k_seqs="- 1 2",
            K="1 3 8",
            vk="- pad off slab part p0213",
            vv="- pad off slab part p0213",
            vs="- off",
        ),
    ),
    wide=("GATED_DELTA_NET-f32-ne=16x2x2049",),
    full=(
        grid("f32", ne="128x32x1x2 128x32x33x2", variant=points("- k_heads=16 kda=1")),
        grid("f32", ne="16x2x8193", kda="- 1"),
    ),
    timed=tuple(Timed(f"GATED_DELTA_NET-f32-ne=128x32x{n},k_heads=16", n, 4, "full") for n in (1, 32)),
    smoke=("GATED_DELTA_NET-f32-ne=16x2x5x2,K=2",),
)
def _gated_delta_net(bench: Bench) -> Sequence[Tensor]:
    v, b = bench.v, bench.b
    size, heads, n_t, n_s = v["ne"]
    ne_k = (size, v["k_heads"] or heads, n_t, v["k_seqs"] or n_s)
    q = bench.operand("q", F32, ne_k, normal(), v["vk"])
    k = bench.operand("k", F32, ne_k, _unit(size), v["vk"])
    vv = bench.operand("v", F32, v["ne"], normal(), v["vv"])
    g = bench.leaf("g", F32, (size if v["kda"] else 1, heads, n_t, n_s), uniform(-2.0, 0.0))
    beta = bench.leaf("beta", F32, (1, heads, n_t, n_s), uniform(0.0, 1.0))
    state = bench.operand("cache_s_l0", F32, (size, size, heads, n_s), normal(), v["vs"], keep=True)
    out = b.gated_delta_net(q, k, vv, g, beta, state, v["K"])
    return _both(bench, out, v["ne"], min(v["K"], n_t) * size * size * heads * n_s)
