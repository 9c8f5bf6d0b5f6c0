"""The indexer of sparse attention, and hyper-connections."""

from __future__ import annotations

from conformance.ggml.tensor import Tensor, dims
from conformance.ggml.types import F16, F32
from conformance.suite.data import biased, causal, normal, uniform

from .bench import Bench, cases


@cases(
    "LIGHTNING_INDEXER",
    keys="q=SHAPE n_kv=16 masks=0 hide=causal|holes|bias vq= vk=",
    types="k",
    standard=(
        "LIGHTNING_INDEXER-[f32|f16|bf16|q8_0|q4_0]-q=64x[1|4]x[1|3],n_kv=[16|33],hide=[causal|bias]",
        "LIGHTNING_INDEXER-[f32|f16]-q=64x4x3x2,n_kv=32,[hide=holes|masks=1|vq=p0213|vk=slab|vk=part|vk=p0213]",
    ),
    full=("LIGHTNING_INDEXER-[f16|q8_0]-q=128x64x[1|16],n_kv=2048,hide=holes",),
)
def _lightning_indexer(bench: Bench) -> Tensor:
    v = bench.v
    n, heads, n_t, n_s = v["q"]
    q = bench.operand("q", F32, v["q"], normal(), v["vq"])
    k = bench.operand("cache_k_l0", bench.types[0], (n, 1, v["n_kv"], n_s), normal(), v["vk"], keep=True)
    weights = bench.leaf("weights", F32, (heads, n_t, 1, n_s), uniform(0.0, 1.0))
    holes = causal(v["n_kv"] - n_t, dead=0.3)
    hidden = {"causal": causal(v["n_kv"] - n_t), "holes": holes, "bias": biased(holes, 1.0)}[v["hide"]]
    mask = bench.leaf("KQ_mask", F16, (v["n_kv"], n_t, 1, v["masks"] or n_s), hidden)
    return bench.b.lightning_indexer(q, k, weights, mask)


@cases(
    "DSV4_HC_COMB",
    keys="n=1 vmixes= eps=1e-6 n_iter=20",
    types="mixes",
    standard=(
        "DSV4_HC_COMB-f32-n=[1|5|33],n_iter=[1|2|20]",
        "DSV4_HC_COMB-f32-n=7,[eps=0.01|eps=0.0|vmixes=pad|vmixes=rows]",
    ),
)
def _hc_comb(bench: Bench) -> Tensor:
    v = bench.v
    mixes = bench.operand("mixes", F32, (24, v["n"], 1, 1), normal(), v["vmixes"])
    scale = bench.leaf("scale", F32, (3, 1, 1, 1), uniform(0.3, 2.0), keep=True)
    base = bench.leaf("base", F32, (24, 1, 1, 1), normal(), keep=True)
    return bench.b.dsv4_hc_comb(mixes, scale, base, v["eps"], v["n_iter"])


@cases(
    "DSV4_HC_PRE",
    keys="x=SHAPE vx= vw= gated=0 scale=1.0",
    types="x",
    standard=(
        "DSV4_HC_PRE-f32-x=[64x4|33x4x7|16x2x3][|,gated=1,scale=0.5]",
        "DSV4_HC_PRE-f32-x=20x4x5[|,gated=1],[vx=pad|vx=p0213|vw=pad|vw=off]",
    ),
)
def _hc_pre(bench: Bench) -> Tensor:
    v, b = bench.v, bench.b
    _, hc, n, _ = v["x"]
    x = bench.operand("x", F32, v["x"], normal(), v["vx"])
    if v["gated"]:
        return b.dsv4_hc_pre_gated(x, bench.operand("gate", F32, v["x"], normal(2.0), v["vw"]), v["scale"])
    return b.dsv4_hc_pre(x, bench.operand("weights", F32, dims(hc, n), normal(), v["vw"]))


@cases(
    "DSV4_HC_POST",
    keys="ne=SHAPE vx= vr= vc= comb=1",
    types="x",
    standard=(
        "DSV4_HC_POST-f32-ne=[64x4|33x4x7|16x2x3],comb=[0|1]",
        "DSV4_HC_POST-f32-ne=20x4x5,[vx=pad|vr=p0213|vr=pad|vc=p1023|vc=off]",
    ),
)
def _hc_post(bench: Bench) -> Tensor:
    v = bench.v
    n_embd, hc, n, _ = v["ne"]
    x = bench.operand("x", F32, dims(n_embd, n), normal(), v["vx"])
    residual = bench.operand("residual", F32, v["ne"], normal(), v["vr"])
    post = bench.leaf("post", F32, dims(hc, n), normal())
    comb = bench.operand("comb", F32, dims(hc, hc, n), normal(), v["vc"]) if v["comb"] else None
    return bench.b.dsv4_hc_post(x, residual, post, comb)
