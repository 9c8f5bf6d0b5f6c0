"""Ops over parts, triangles and windows of matrices, the indexer of sparse attention, and hyper-connections."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.ops.matmul import TRI_TYPE
from conformance.ggml.ops.windows import OP_POOL
from conformance.ggml.tensor import Dims, Tensor, dims
from conformance.ggml.types import F16, F32

from .bench import INPLACE, Bench
from .data import biased, causal, normal, uniform, values
from .grammar import OpCases, count, numbers, real, shape, text, word


def _part(bench: Bench) -> Sequence[Tensor]:
    """`b` into (or onto) the part of `a` that starts at element `at`, with `a`'s strides."""
    v, b, (type_,) = bench.v, bench.b, bench.types
    a = bench.operand("a", type_, v["a"], values(type_), v["va"], keep=v["inplace"] == "leaf")
    a = b.neg(a) if v["inplace"] == "mid" else a
    other = bench.operand("b", type_, v["b"], values(type_), v["vb"])
    at = (*v["at"], 0, 0, 0, 0)
    offset = sum(i * nb for i, nb in zip(at[:4], a.nb, strict=True))
    nb1, nb2, nb3 = a.nb[1:]
    make = getattr(b, bench.id.op.lower() + ("_inplace" if v["inplace"] else ""))
    return bench.outputs(a, make(a, other, nb1 * v["every"], nb2, nb3, offset))


PARTS = OpCases(
    ops=("SET", "ACC"),
    types=("a",),
    keys={
        "a": shape(),
        "b": shape(),
        "at": numbers(),
        "every": count(1),
        "va": text(),
        "vb": text(),
        "inplace": INPLACE,
    },
    make=_part,
    standard=(
        "{SET|ACC}-f32-a=10x6x4x3,{b=4x2x2x2,at=3x1x1x0|b=10x6x4x2,at=0x0x0x1|b=10x3x1x1,at=0x2x3x2|b=10x6x4x3}",
        "{SET|ACC}-f32-a=10x6x4x3,b=5x3x2x2,at=1x0x1x1,every=2",
        "{SET|ACC}-f32-a=96,b=17,at=40",
        "{SET|ACC}-f32-a=10x6x4x2,b=10x2x4x2,at=0x3,{vb=pad|vb=p0213|vb=rows|vb=off|va=off|va=flat}",
        "{SET|ACC}-f32-a=10x6x4x2,b=4x6x4x2,at=5,inplace={leaf|mid}",
        "{SET|ACC}-f32-a=10x6x4x2,b=10x1x4x2,at=0x4,inplace=leaf,va=off",
        "SET-i32-a=10x6x4x2,b=4x2x3,at=3x1x1x1",
        "SET-i32-a=10x6x4x2,b=10x2x3,at=0x1,inplace=leaf",
    ),
    full=("{SET|ACC}-f32-a=128x64x32x2,b=128x64x1x2,at=0x0x7,inplace=leaf",),
)


def _out_prod(bench: Bench) -> Tensor:
    v, (type_a, type_b) = bench.v, bench.types
    a = bench.operand("a", type_a, v["a"], normal(mean=1.0), v["va"], keep=True)
    b = bench.operand("b", type_b, v["b"], normal(mean=1.0), v["vb"])
    return bench.b.out_prod(a, b)


OUT_PROD = OpCases(
    ops=("OUT_PROD",),
    types=("a", "b"),
    keys={"a": shape(), "b": shape(), "va": text(), "vb": text()},
    make=_out_prod,
    standard=(
        "OUT_PROD-{f32|f16|q4_0|q8_0|q4_1|q6_K}+f32-{a=256x1,b=7x1|a=256x5,b=7x5|a=256x33,b=7x33}",
        "OUT_PROD-f32+f32-{a=17x5,b=3x5|a=8x40x2,b=5x40x6|a=8x4x2x1,b=5x4x2x3|a=1x9,b=1x9}",
        "OUT_PROD-{f16|q8_0}+f32-a=64x9x3x2,b=5x9x3x2",
        "OUT_PROD-f32+f32-a=24x6x3x2,b=7x6x3x2,{va=pad|va=off|vb=p1023|vb=p0213|vb=pad}",
    ),
    full=("OUT_PROD-f32+f32-a=512x256,b=128x256",),
)


def _tri(bench: Bench) -> Tensor:
    a = bench.operand("a", bench.types[0], bench.v["ne"], normal(), bench.v["vne"])
    return bench.b.tri(a, TRI_TYPE[bench.v["keep"]])


TRI = OpCases(
    ops=("TRI",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "keep": word(*TRI_TYPE.__members__)},
    make=_tri,
    standard=(
        "TRI-f32-ne={2x2|7x7x3|64x64x2x2},keep={UPPER_DIAG|UPPER|LOWER_DIAG|LOWER}",
        "TRI-f32-ne=9x9x2,vne={off|flat},keep={UPPER|LOWER_DIAG}",
    ),
    full=("TRI-f32-ne=256x256x32,keep={UPPER_DIAG|LOWER}",),
)


def _diag(bench: Bench) -> Tensor:
    return bench.b.diag(bench.operand("a", bench.types[0], bench.v["ne"], normal(), bench.v["vne"]))


DIAG = OpCases(
    ops=("DIAG",),
    types=("a",),
    keys={"ne": shape(), "vne": text()},
    make=_diag,
    standard=("DIAG-f32-ne={5|64x1x3|17x1x2x3}", "DIAG-f32-ne=12x1x3x2,vne={off|pad|p0132|slab}"),
    full=("DIAG-f32-ne=512x1x16",),
)


def _lower(s: Stream, ne: Dims) -> NDArray[np.float32]:
    """Triangles as chunked delta rules have them: ones (or near) on the diagonal, little below; anything above."""
    n = ne[0]
    x = s.normal(math.prod(ne), 0.3).reshape(-1, n, n)
    x[:, np.arange(n), np.arange(n)] = s.uniform(x.shape[0] * n, 0.8, 1.25).reshape(-1, n)
    return x


def _solve_tri(bench: Bench) -> Tensor:
    v = bench.v
    n, k, n2, n3 = v["ne"]
    a = bench.leaf("a", F32, (n, n, n2, n3), _lower)
    return bench.b.solve_tri(a, bench.operand("b", F32, (k, n, n2, n3), normal(), v["vb"]), True, True, False)


SOLVE_TRI = OpCases(
    ops=("SOLVE_TRI",),
    types=("a",),
    keys={"ne": shape(), "vb": text()},
    make=_solve_tri,
    standard=("SOLVE_TRI-f32-ne={1x3|8x1|11x7x3|32x64x2x2}", "SOLVE_TRI-f32-ne=12x5x2,vb={off|flat}"),
    full=("SOLVE_TRI-f32-ne=64x128x32",),
)


def _roll(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.operand("a", bench.types[0], v["ne"], normal(), v["vne"])
    return bench.b.roll(a, *(*v["by"], 0, 0, 0, 0)[:4])


ROLL = OpCases(
    ops=("ROLL",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "by": numbers()},
    make=_roll,
    standard=("ROLL-f32-ne=10x5x4x3,by={3|0x2|1x-2x3x1|-9x4x0x-1}", "ROLL-f32-ne=10x5x4x3,by=2x1,vne={pad|p0213}"),
)


def _pool_2d(bench: Bench) -> Tensor:
    v = bench.v
    a = bench.operand("a", bench.types[0], v["ne"], normal(), v["vne"])
    k0, k1, s0, s1, p0, p1 = v["k"]
    return bench.b.pool_2d(a, OP_POOL[v["op"]], k0, k1, s0, s1, p0, p1)


POOL_2D = OpCases(
    ops=("POOL_2D",),
    types=("a",),
    keys={"ne": shape(), "vne": text(), "op": word(*OP_POOL.__members__), "k": numbers()},
    make=_pool_2d,
    standard=(
        "POOL_2D-{f32|f16}-ne=24x9x3x2,op={MAX|AVG},k={4x1x4x1x0x0|3x3x2x2x1x1|2x3x1x2x0x1|5x9x1x1x0x0}",
        "POOL_2D-f32-ne=24x9x3,op={MAX|AVG},k=4x1x4x1x0x0,vne={pad|off|slab}",
    ),
    full=("POOL_2D-f32-ne=4096x33x8,op=MAX,k=128x1x128x1x0x0",),
)


def _im2col(bench: Bench) -> Tensor:
    v, (type_a, type_b, to) = bench.v, bench.types
    a = bench.leaf("a", type_a, v["a"], normal(), keep=True)
    b = bench.operand("b", type_b, v["b"], normal(), v["vb"])
    s0, s1, p0, p1, d0, d1 = v["k"]
    return bench.b.im2col(a, b, s0, s1, p0, p1, d0, d1, bool(v["is_2D"]), to)


IM2COL = OpCases(
    ops=("IM2COL",),
    types=("a", "b", "to"),
    keys={"a": shape(), "b": shape(), "vb": text(), "k": numbers(), "is_2D": count(0)},
    make=_im2col,
    standard=(
        "IM2COL-f16+f32+{f16|f32}-a=3x5x4,b=20x5x{1|2},k={1x0x1x0x1x0|2x0x0x0x1x0|1x0x3x0x2x0}",
        "IM2COL-f16+f32+{f16|f32}-a=3x2x5x4,b=12x7x5x2,is_2D=1,k={1x1x1x1x1x1|2x3x0x1x1x2}",
        "IM2COL-f16+f32+f16-a=7x1x6,b=20x1x6,k=1x0x3x0x1x0",
    ),
    full=("IM2COL-f16+f32+f16-a=7x512x16,b=60x512,k=1x0x3x0x1x0",),
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


LIGHTNING_INDEXER = OpCases(
    ops=("LIGHTNING_INDEXER",),
    types=("k",),
    keys={
        "q": shape(),
        "n_kv": count(16),
        "masks": count(0),
        "hide": word("causal", "holes", "bias"),
        "vq": text(),
        "vk": text(),
    },
    make=_lightning_indexer,
    standard=(
        "LIGHTNING_INDEXER-{f32|f16|bf16|q8_0|q4_0}-q=64x{1|4}x{1|3},n_kv={16|33},hide={causal|bias}",
        "LIGHTNING_INDEXER-{f32|f16}-q=64x4x3x2,n_kv=32,{hide=holes|masks=1|vq=p0213|vk=slab|vk=part|vk=p0213}",
    ),
    full=("LIGHTNING_INDEXER-{f16|q8_0}-q=128x64x{1|16},n_kv=2048,hide=holes",),
)


def _hc_comb(bench: Bench) -> Tensor:
    v = bench.v
    mixes = bench.operand("mixes", F32, (24, v["n"], 1, 1), normal(), v["vmixes"])
    scale = bench.leaf("scale", F32, (3, 1, 1, 1), uniform(0.3, 2.0), keep=True)
    base = bench.leaf("base", F32, (24, 1, 1, 1), normal(), keep=True)
    return bench.b.dsv4_hc_comb(mixes, scale, base, v["eps"], v["n_iter"])


HC_COMB = OpCases(
    ops=("DSV4_HC_COMB",),
    types=("mixes",),
    keys={"n": count(1), "vmixes": text(), "eps": real(1e-6), "n_iter": count(20)},
    make=_hc_comb,
    standard=(
        "DSV4_HC_COMB-f32-n={1|5|33},n_iter={1|2|20}",
        "DSV4_HC_COMB-f32-n=7,{eps=0.01|eps=0.0|vmixes=pad|vmixes=rows}",
    ),
)


def _hc_pre(bench: Bench) -> Tensor:
    v, b = bench.v, bench.b
    _, hc, n, _ = v["x"]
    x = bench.operand("x", F32, v["x"], normal(), v["vx"])
    if v["gated"]:
        return b.dsv4_hc_pre_gated(x, bench.operand("gate", F32, v["x"], normal(2.0), v["vw"]), v["scale"])
    return b.dsv4_hc_pre(x, bench.operand("weights", F32, dims(hc, n), normal(), v["vw"]))


HC_PRE = OpCases(
    ops=("DSV4_HC_PRE",),
    types=("x",),
    keys={"x": shape(), "vx": text(), "vw": text(), "gated": count(0), "scale": real(1.0)},
    make=_hc_pre,
    standard=(
        "DSV4_HC_PRE-f32-x={64x4|33x4x7|16x2x3}{|,gated=1,scale=0.5}",
        "DSV4_HC_PRE-f32-x=20x4x5{|,gated=1},{vx=pad|vx=p0213|vw=pad|vw=off}",
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


HC_POST = OpCases(
    ops=("DSV4_HC_POST",),
    types=("x",),
    keys={"ne": shape(), "vx": text(), "vr": text(), "vc": text(), "comb": count(1)},
    make=_hc_post,
    standard=(
        "DSV4_HC_POST-f32-ne={64x4|33x4x7|16x2x3},comb={0|1}",
        "DSV4_HC_POST-f32-ne=20x4x5,{vx=pad|vr=p0213|vr=pad|vc=p1023|vc=off}",
    ),
)

CASES = (
    PARTS, OUT_PROD, TRI, DIAG, SOLVE_TRI, ROLL, POOL_2D, IM2COL, LIGHTNING_INDEXER, HC_COMB, HC_PRE, HC_POST,
)  # fmt: skip
