"""SOFT_MAX, FLASH_ATTN_EXT, the sparse attention indexer and hyper-connections.

Masks, ALiBi, softcap, sinks, head groups, caches of any type and layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.ops.matmul import PREC
from conformance.ggml.tensor import Dims, Tensor, dims
from conformance.ggml.types import F16, F32, type_named
from conformance.suite.data import Fill, biased, blind, causal, normal, uniform, whole
from conformance.suite.grid import grid, operands, points, shapes

from .bench import BLOCKS_32, BLOCKS_256, FLOATS, INPLACE, RARE, Bench, Timed, cases, same

_HIDE = "hide=causal|holes|bias|blind|junk|seen|some|finite"
"""Key: the cells that a mask hides.

`causal`: the future. `holes`: also a third of the past. `bias`: the same, with finite values elsewhere. `blind`: all
of one row. `junk`: the last cells, where K and V contain NaN and infinities, from every row. `some`: the same cells,
from every second row. `seen`: the future; every row sees one infinity in V. `finite`: nothing; hidden cells have a
large negative number instead of -inf, and every second row has only that. Then products are integers, which float32 can
add to that number exactly."""
_JUNK = 5
"""Number of cells that `junk` hides."""


def _mask_fill(kind: str, n_kv: int, n: int) -> Fill:
    if kind == "causal":
        return causal(n_kv - n)
    holes = causal(n_kv - n, dead=0.3)
    unseen = causal(n_kv - n - _JUNK, dead=0.3)
    return {
        "holes": holes, "bias": biased(holes, 1.0), "blind": blind(holes), "junk": unseen, "seen": causal(n_kv - n),
        "some": _every_second(unseen), "finite": _finite(holes),
    }[kind]  # fmt: skip


def _every_second(mask: Fill) -> Fill:
    """Return `mask`, of which every second row hides nothing."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = mask(s, ne).reshape(-1, ne[0]).copy()
        x[::2] = 0.0
        return x

    return filled


def _finite(mask: Fill) -> Fill:
    """Return `mask` with large negative numbers instead of -inf; every second row is constant."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = mask(s, ne).reshape(-1, ne[0]).copy()
        low = np.resize(np.array([-40000, -10000, -65504, -1000, -5], np.float32), len(x))[:, None]
        x = np.where(np.isneginf(x), low, x)
        x[::2] = low[::2]
        return x

    return filled


def _junk(fill: Fill) -> Fill:
    """Return K or V of shape (size, n_kv, …) with NaN and infinities in the last, hidden cells."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = fill(s, ne).reshape(ne[::-1]).copy()
        x[:, :, -_JUNK:] = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), ne[0])
        return x

    return filled


def _infinite(fill: Fill) -> Fill:
    """Return V of shape (size, n_kv, …) with one infinity in the first cell, seen by every row."""

    def filled(s: Stream, ne: Dims) -> NDArray[Any]:
        x = fill(s, ne).reshape(ne[::-1]).copy()
        x[:, :, 0, ne[0] // 2] = np.inf
        return x

    return filled


_CACHE = same(f"{FLOATS} {BLOCKS_32}")
_SAME_FLOATS, _TWO, _THREE = same(FLOATS), same("f16 f32"), same("f16 f32 q8_0")
_FEW = same("f16 f32 bf16 q4_0 q8_0")
_MIXED = "q8_0+f16 f16+q8_0 q8_0+q4_0 f32+f16 f16+f32 bf16+f16"


@cases(
    "FLASH_ATTN_EXT",
    keys=(
        f"q=SHAPE k=SHAPE dv=0 mask=SHAPE? {_HIDE} scale=0.0 max_bias=0.0 softcap=0.0 sinks=0 prec=|F32 mla=0 vq= "
        "vk= vv= vm= data=|large|rising"
    ),
    types="k v",
    standard=(
        grid(_CACHE, q="32x1x4 32x3x4", k="32x24x4 32x24x2 32x24"),
        grid(_CACHE, q="64x3x4x2", k="64x32x2x2", mask="32x3 32x8 32x3x1x2 32x3x4x2"),
        grid(_FEW, q="64x5x4", k="64x32x2", mask="32x5", variant=points("hide=holes hide=bias sinks=1 softcap=10.0")),
        grid(
            _FEW,
            q="64x5x4",
            k="64x32x2",
            mask="32x5",
            hide="bias",
            max_bias="8.0",
            variant=points("- softcap=5.0,sinks=1"),
        ),
        grid(_CACHE, q="64x4x6x2", k="64x16x2x2", mask="16x4x1x2", vq="p0213", vk="p0213", vv="p0213"),
        grid(_FEW, q="64x2x4", k="64x32x2", mask="32x2", layout=points("vk=part.p0213,vv=part.p0213 vk=slab,vv=pad")),
        grid(_FEW, q="64x2x4", k="64x32x2", mask="32x2", vk="off.p0213", vv="rows", vq="pad.p0213"),
        grid(_MIXED, q="64x3x4", k="64x32x2", mask="32x3", layout=points("- vk=p0213,vv=p0213")),
        grid(_TWO, shape=points("q=40x3x4,k=40x16x4 q=72x3x2,k=72x16x2 q=80x3x2,k=80x16x1"), mask="16x3"),
        grid(_THREE, shape=points("q=96x3x2,k=96x16x1 q=128x3x4,k=128x16x2 q=256x3x2,k=256x16x2"), mask="16x3"),
        grid("f16+f16 q8_0+q8_0", q="192x2x4", dv=128, k="192x16x2", mask="16x2"),
        grid(_THREE, q="576x2x4", dv=512, k="576x16x1", mask="16x2", mla=1),
        grid(_THREE, q="64x2x12", k="64x16x3", mask="16x2", hide="bias", max_bias="8.0", sinks=1),
        grid(_TWO, shape=points("q=64x64x2,k=64x80x2,mask=80x64 q=64x75x2,k=64x131x2,mask=131x75"), hide="holes"),
        grid(_THREE, q="64x1x8", k="64x256x2 64x512x2 64x777x2", sinks="- 1"),
        grid(_THREE, q="64x1x8", k="64x512x2", mask="512x4", hide="holes"),
        grid("f16+f16 q8_0+q8_0", q="64x3x4", k="64x32x2", mask="32x3", prec="F32"),
        grid("f16+f16 q8_0+q8_0", q="64x3x4", k="64x32x2", mask="32x3", scale="0.5 0.01"),
        grid(_THREE, q="32x4x2", k="32x16x2", mask="16x4", hide="blind", sinks="- 1"),
        grid(
            _SAME_FLOATS,
            shape=points("q=64x1x4,k=64x40x2,mask=40x1 q=32x3x4,k=32x16x2,mask=16x3"),
            hide="junk",
            variant=points("- max_bias=8.0 sinks=1"),
        ),
        grid(_SAME_FLOATS, q="32x3x4", k="32x16x2", mask="16x3", hide="seen", sinks="- 1"),
    ),
    wide=(
        grid(_SAME_FLOATS, q="64x4x4", k="64x40x2", mask="40x4", hide="some", sinks="- 1"),
        grid(_FEW, q="64x5x4", k="64x32x2", mask="32x5", hide="holes", scale="40.0", softcap="10.0 1.0"),
        grid(operands("iq4_nl nvfp4 q2_0 q1_0 f16", "iq4_nl nvfp4 q2_0 q1_0"), q="128x3x4", k="128x32x2", mask="32x3"),
        grid(same(f"{BLOCKS_256} {RARE}"), q="256x3x4", k="256x16x2", mask="16x3"),
        grid(_SAME_FLOATS, q="64x9x4 64x1x4", k="64x32x2", mask="32x9", hide="finite", max_bias="- 8.0"),
        grid(_TWO, q="64x75x2", k="64x131x2", mask="131x75", hide="finite"),
        grid(_FEW, q="64x1x4 64x9x4 64x65x4", k="64x96x2", mask="96x65", data="large"),
        grid(_FEW, q="64x1x4 64x9x4 64x65x4", k="64x96x2 64x528x2", data="rising", sinks="- 1"),
        grid(_THREE, q="64x3x4", shape=points("k=64x255x2,mask=255x3 k=64x256x2,mask=256x3"), hide="holes"),
        grid(_THREE, q="64x3x4", k="64x257x2", mask="257x3", hide="holes"),
        grid(_TWO, shape=points("q=64x257x2,k=64x257x1,mask=257x257 q=64x513x2,k=64x513x1,mask=513x513"), hide="holes"),
        grid("f16+f16 q8_0+q8_0", q="192x1x2", dv=128, k="192x512x1"),
        "FLASH_ATTN_EXT-f16+f16-q=64x3x4,k=64x66048x1,mask=66048x3,hide=holes",  # cells over 2^16
    ),
    smoke=(
        "FLASH_ATTN_EXT-f16+f16-q=64x9x4,k=64x32x2,mask=32x9,hide=finite",
        "FLASH_ATTN_EXT-f32+f32-q=32x4x2,k=32x16x2,mask=16x4,hide=blind",
        "FLASH_ATTN_EXT-f16+f16-q=64x5x4,k=64x32x2,mask=32x5,hide=holes,scale=40.0,softcap=10.0",
        "FLASH_ATTN_EXT-f32+f32-q=64x3x6x4,k=64x32x3x4,mask=32x5x6x2,hide=bias,vm=off",
        "FLASH_ATTN_EXT-f32+f32-q=64x4x4,k=64x40x2,mask=40x4,hide=some",
        "FLASH_ATTN_EXT-f32+f32-q=64x9x4,k=64x96x2,mask=96x65,data=large",
        "FLASH_ATTN_EXT-q8_0+q8_0-q=64x9x4,k=64x528x2,sinks=1,data=rising",
        "FLASH_ATTN_EXT-f16+f16-q=128x33x1,k=128x16x1,mask=16x33,hide=causal",
    ),
    full=(
        grid(_CACHE, q="128x1x32 128x32x32", k="128x1024x8", vk="p0213", vv="p0213"),
        grid("f16+f16 q8_0+q8_0", q="64x1x32 64x256x32", k="64x2048x8", mask="2048x256", hide="holes"),
        grid("f16+f16 q8_0+q8_0", q="128x1x64x4", k="128x512x8x4", mask="512x1x1x4"),
        grid("f16+f16 q8_0+q8_0", q="64x1x8", k="64x{kv}x2", mask="{kv}x1", hide="holes", data="- rising").where(
            kv="8192 32768 131072"
        ),
    ),
    timed=(
        Timed("FLASH_ATTN_EXT-f16+f16-q=64x1x32,k=64x1024x8,vk=p0213,vv=p0213", 1, 8, "smoke"),
        Timed("FLASH_ATTN_EXT-f16+f16-q=64x64x32,k=64x1024x8,mask=1024x64,vk=p0213,vv=p0213", 64, 1),
        Timed("FLASH_ATTN_EXT-q8_0+q8_0-q=64x1x32,k=64x1024x8,vk=p0213,vv=p0213", 1, 8),
        Timed("FLASH_ATTN_EXT-f16+f16-q=64x512x32,k=64x512x8,mask=512x512,vk=p0213,vv=p0213", 512, 1, "full"),
        Timed("FLASH_ATTN_EXT-q4_0+q4_0-q=64x1x32,k=64x1024x8,vk=p0213,vv=p0213", 1, 8, "full"),
        Timed("FLASH_ATTN_EXT-f16+f16-q=64x4x32,k=64x1024x8,mask=1024x4,vk=p0213,vv=p0213", 4, 4, "full"),
    ),
    pairs=(
        grid(
            "f16+f16 f32+f32 bf16+bf16 q4_0+q4_0 q8_0+q8_0 q8_0+f16 f32+f16",
            q="64x1x6x4 64x3x6x4 64x66x6x4",
            k="64x96x6x4 64x96x3x4 64x96x1x4",
            mask="96x68 96x68x6 96x68x3 96x68x1x4 96x68x1x2 96x68x6x4 96x68x6x2 96x68x2x2 112x68x6x2 -",
            hide="causal holes bias",
            vm="- off flat",
            max_bias="- 8.0",
            softcap="- 5.0",
            sinks="- 1",
            vq="- pad p0213 rows part",
            vk="- pad slab p0213 part.p0213",
            vv="- pad slab p0213 part.p0213",
            dv="- 32",
            scale="- 0.3",
            prec="- F32",
        ),
    ),
)
def _flash_attn(bench: Bench) -> Tensor:
    v, b, (type_k, type_v) = bench.v, bench.b, bench.types
    dk, n, heads, n_seq = v["q"]
    _, n_kv, heads_kv, _ = v["k"]
    dv = v["dv"] or dk
    exact = v["hide"] == "finite"
    cells = _junk(normal()) if v["hide"] in {"junk", "some"} else whole(-2, 3) if exact else normal()
    cells_v = _infinite(normal()) if v["hide"] == "seen" else cells
    q = bench.operand("Qcur-0", F32, v["q"], whole(-2, 3) if exact else normal(1.5), v["vq"])
    k = bench.operand("cache_k_l0", type_k, v["k"], cells, v["vk"], keep=True)
    if v["mla"]:
        vv = b.view_4d(k, dv, *k.ne[1:], *k.nb[1:], 0)
    else:
        vv = bench.operand("cache_v_l0", type_v, (dv, n_kv, heads_kv, n_seq), cells_v, v["vv"], keep=True)
    mask = None
    if v["mask"]:
        mask = bench.operand("KQ_mask", F16, v["mask"], _mask_fill(v["hide"], n_kv, n), v["vm"])
    scale = v["scale"] or (2.0**-17 if v["data"] == "large" else 1.0 / math.sqrt(dk))
    out = b.flash_attn_ext(q, k, vv, mask, scale, v["max_bias"], v["softcap"])
    if v["sinks"]:
        b.flash_attn_ext_add_sinks(out, bench.leaf("attn_sinks", F32, (heads, 1, 1, 1), uniform(-1.0, 4.0), keep=True))
    if v["prec"]:
        b.flash_attn_ext_set_prec(out, PREC[v["prec"]])
    return out


_BIASED = "ne=33x5x4,mask=33x5 ne=33x5x6x2,mask=33x5x1x2 ne=33x5x12,mask=33x5 ne=17x1x3,mask=17x4"


@cases(
    "SOFT_MAX",
    keys=(
        f"ne=SHAPE vne= {INPLACE} mask=SHAPE? mt=f16|f32 {_HIDE} scale=1.0 max_bias=0.0 sinks=0 vm= data=|range|rising"
    ),
    standard=(
        grid("f32", ne="2x1 9x5x3x2 32x4 67x3x2 256x5 1023x2", scale="1.0 0.125 2.5"),
        grid("f32", ne="32x6x4x2", mask="32x6 32x6x4 32x6x1x2 32x6x4x2 32x6x2 32x9", mt="f16 f32", scale="0.5"),
        grid("f32", ne="32x6x4x2", mask="32x6", mt="f16 f32", hide="holes bias", scale="0.5"),
        grid("f32", shape=points(_BIASED), hide="bias", max_bias="8.0 2.0", scale="0.5", sinks="- 1"),
        grid("f32", ne="33x5x4 64x1x8x2", sinks=1, scale="0.125 1.0"),
        grid("f32", ne="40x5x4x2", mask="40x5 40x8x4", mt="f16 f32", hide="holes", sinks=1),
        grid("f32", ne="24x5x3", vne="off flat", mask="- 24x5"),
        grid("f32", ne="24x5x3", inplace="leaf mid input", variant=points("- mask=24x5,scale=0.3")),
    ),
    wide=(
        grid("f32", ne="32x9x4", mask="32x9 32x9x4", mt="f16 f32", hide="finite", scale="- 0.5"),
        grid("f32", ne="32x9x4", mask="32x9 32x9x4", mt="f16 f32", hide="finite", max_bias="8.0"),
        "SOFT_MAX-f32-ne=131x75x2,mask=131x75,hide=finite",
        grid("f32", ne="67x4", sinks="- 1", data="range"),
        grid("f32", ne="67x4 2049x3 4097x3 16385x2", sinks="- 1", data="rising"),
        grid("f32", shape=points("ne=255x3x2,mask=255x3 ne=256x3x2,mask=256x3 ne=257x3x2,mask=257x3"), hide="holes"),
        grid("f32", shape=points("ne=513x257,mask=513x257 ne=3x65537"), hide="holes"),
        "SOFT_MAX-f32-ne=151936x2",
    ),
    smoke=(
        "SOFT_MAX-f32-ne=32x9x4,mask=32x9,mt=f16,hide=finite",
        "SOFT_MAX-f32-ne=33x5x6x4,mask=33x7x6x2,hide=bias,vm=off",
        "SOFT_MAX-f32-ne=2049x3,data=rising",
    ),
    full=(
        grid("f32", ne="4096x32x2 2048x1x32x4 16384x3 65537x2 4096x4100"),
        "SOFT_MAX-f32-ne=1024x64x32,mask=1024x64,scale=0.0883",
        "SOFT_MAX-f32-ne=131073x3,mask=131073x3,hide=holes",
    ),
    timed=(Timed("SOFT_MAX-f32-ne=1024x64x16,mask=1024x64,scale=0.125", 64, 2),),
    pairs=(
        grid(
            "f32",
            ne="33x5x6x4",
            mask="33x5 33x7x6 33x5x3 33x7x1x4 33x5x1x2 33x5x6x4 33x7x6x2 33x5x2x2 -",
            mt="f16 f32",
            hide="causal holes bias",
            vm="- off flat",
            vne="- off flat",
            inplace="- leaf mid input",
            max_bias="- 8.0",
            sinks="- 1",
            scale="1.0 0.3",
        ),
    ),
)
def _soft_max(bench: Bench) -> Sequence[Tensor]:
    v, b = bench.v, bench.b
    a = bench.first("a", "ne", whole(-9, 10) if v["hide"] == "finite" else normal(3.0))
    n_kv, n, heads, _ = v["ne"]
    mask = None
    if v["mask"]:
        mask = bench.operand("kq_mask", type_named(v["mt"]), v["mask"], _mask_fill(v["hide"], n_kv, n), v["vm"])
    out = bench.build("soft_max_ext")(a, mask, v["scale"], v["max_bias"])
    if v["sinks"]:
        b.soft_max_add_sinks(out, bench.leaf("attn_sinks", F32, (heads, 1, 1, 1), uniform(-1.0, 4.0), keep=True))
    return bench.outputs(a, out)


@cases(
    "LIGHTNING_INDEXER",
    wide=(grid("iq4_nl nvfp4 q2_0 q1_0", q="128x4x3", n_kv=33, hide="bias"),),
    keys="q=SHAPE n_kv=16 masks=0 hide=causal|holes|bias vq= vk= vw= vm=",
    types="k",
    standard=(
        grid("f32 f16 bf16 q8_0 q4_0", q="64x1x1 64x1x3 64x4x1 64x4x3", n_kv="16 33", hide="causal bias"),
        grid("f32 f16", q="64x4x3x2", n_kv=32, variant=points("hide=holes masks=1 vq=p0213 vk=slab vk=part vk=p0213")),
    ),
    full=(grid("f16 q8_0", q="128x64x1 128x64x16", n_kv=2048, hide="holes"),),
    smoke=("LIGHTNING_INDEXER-f32-q=64x4x3x4,n_kv=33,masks=2,hide=bias,vw=pad,vm=pad",),
    pairs=(
        grid(
            "f32 f16 bf16 q8_0 q4_0",
            q=shapes("64", "1 6", "1 5", "4"),
            n_kv="16 33",
            masks="- 1 2",
            hide="causal holes bias",
            vq="- pad p0213 part",
            vk="- pad slab part",
            vw="- pad off",
            vm="- pad off slab",
        ),
    ),
)
def _lightning_indexer(bench: Bench) -> Tensor:
    v = bench.v
    n, heads, n_t, n_s = v["q"]
    q = bench.operand("q", F32, v["q"], normal(), v["vq"])
    k = bench.operand("cache_k_l0", bench.types[0], (n, 1, v["n_kv"], n_s), normal(), v["vk"], keep=True)
    weights = bench.operand("weights", F32, (heads, n_t, 1, n_s), uniform(0.0, 1.0), v["vw"])
    holes = causal(v["n_kv"] - n_t, dead=0.3)
    hidden = {"causal": causal(v["n_kv"] - n_t), "holes": holes, "bias": biased(holes, 1.0)}[v["hide"]]
    mask = bench.operand("KQ_mask", F16, (v["n_kv"], n_t, 1, v["masks"] or n_s), hidden, v["vm"])
    return bench.b.lightning_indexer(q, k, weights, mask)


@cases(
    "DSV4_HC_COMB",
    keys="n=1 vmixes= eps=1e-6 n_iter=20",
    types="mixes",
    standard=(
        grid("f32", n="1 5 33", n_iter="1 2 20"),
        grid("f32", n=7, variant=points("eps=0.01 eps=0.0 vmixes=pad vmixes=rows")),
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
        grid("f32", x="64x4 33x4x7 16x2x3", variant=points("- gated=1,scale=0.5")),
        grid("f32", x="20x4x5", gated="- 1", layout=points("vx=pad vx=p0213 vw=pad vw=off")),
    ),
    pairs=(grid("f32", x="20x4x5 33x3x1 16x1x4", gated="- 1", vx="- pad rows p0213", vw="- pad off", scale="- 0.5"),),
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
        grid("f32", ne="64x4 33x4x7 16x2x3", comb="0 1"),
        grid("f32", ne="20x4x5", layout=points("vx=pad vr=p0213 vr=pad vc=p1023 vc=off")),
    ),
    pairs=(
        grid("f32", ne="20x4x5 33x3x1 16x1x4", comb="0 1", vx="- pad off", vr="- pad p0213 rows", vc="- p1023 off pad"),
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
