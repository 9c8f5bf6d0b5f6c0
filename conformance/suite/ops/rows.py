"""Ops on rows: sums, norms, sorting and indexed rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.ops.rows import SORT_ORDER
from conformance.ggml.tensor import Dims, Tensor, dims
from conformance.ggml.types import F32, I32
from conformance.suite.data import Fill, distinct, integers, normal, uniform, values, whole
from conformance.suite.grid import grid, operands, points

from .bench import BLOCKS, BLOCKS_256, FLOATS, INPLACE, ONE_ROW, PLAIN, RARE, RARE_STORED, VIEWS, Bench, Timed, cases


@cases(
    "SUM_ROWS MEAN",
    keys="ne=SHAPE vne= data=|range",
    wide=(
        grid("f32", ne="4096x3", data="range"),
        grid("f32", ne="255x3 257x3 511x3 512x3 513x3 3x65537"),
    ),
    standard=(
        grid("f32", ne="1x7 2x5x3x2 33x5x3x2 67x4 256x5 1025x3 4096x2"),
        grid("f32", ne="35x6x3x2", vne="pad rows off slab p0213 p0321 pad.p0213 flat"),
    ),
    full=(grid("f32", ne="65536x3 4096x129 65537x2 4096x4100"), grid("f32", ne="64x1x3", vne=ONE_ROW)),
    pairs=(grid("f32", ne="35x6x3x2 2x5 1x7 130x1x4", vne=f"{VIEWS} p0321 flat"),),
)
def _sum(bench: Bench) -> Tensor:
    a = bench.first("a", "ne", normal(1.0, 0.25))
    return bench.b.sum_rows(a) if bench.id.op == "SUM_ROWS" else bench.b.mean(a)


_NORMAL = normal(1.5, 0.5)


@cases(
    "NORM RMS_NORM L2_NORM",
    keys=f"ne=SHAPE vne= {INPLACE} eps=1e-5 data=|range|far by=|first|second vby=",
    wide=(
        grid("f32", ne="257x5", eps="1e-5 0.0", data="range"),
        grid("f32", ne="255x3 256x3 511x3 512x3 513x3 7x65537"),
        grid("NORM", "f32", ne="67x4 1025x3", data="far"),
    ),
    smoke=("NORM-f32-ne=67x4,data=far", "L2_NORM-f32-ne=7x5x3x2,eps=10.0"),
    standard=(
        grid("f32", ne="7x5x3x2 64x6 67x4 257x3x2 2048x2"),
        grid("f32", ne="64x5x2 33x4", eps="0.0 1e-6 0.1 10.0"),
        grid("f32", ne="35x6x3x2", vne="pad rows off slab p0213 p0321 pad.p0213"),
        grid("NORM L2_NORM", "f32", ne="18x6x3x2", vne="p1023 p2013 pad.p1023"),
        grid("f32", ne="64x5x2", inplace="leaf mid"),
        grid("f32", ne="40x5x2", vne="pad", inplace="leaf"),
        grid("RMS_NORM", "f32", ne="40x5x2", vne="- pad", inplace="input"),
        grid("RMS_NORM NORM", "f32", ne="40x5x2 257x3", by="first second", vby="- off pad"),
    ),
    full=(
        grid("f32", ne="4096x65 16384x3 65537x2"),
        "RMS_NORM-f32-ne=4096x4100",
        grid("f32", ne="64x1x3", vne=ONE_ROW),
    ),
    pairs=(
        grid("f32", ne="35x6x3x2 64x5x2 6x7 130x1x4", vne=f"{VIEWS} p0321", inplace="- leaf mid input", eps="1e-5 0.1"),
    ),
    timed=(Timed("RMS_NORM-f32-ne=2048x64", 64, 16, "smoke"),),
)
def _norm(bench: Bench) -> Sequence[Tensor]:
    """Build a norm; with `by` it is a factor of a MUL, with which backends fuse it."""
    v = bench.v
    a = bench.first("a", "ne", _NORMAL)
    out = bench.build(bench.id.op.lower())(a, v["eps"])
    if v["by"]:
        ne = v["ne"] if v["by"] == "second" else dims(v["ne"][0])
        factor = bench.operand("attn_norm.weight", F32, ne, normal(1.0), v["vby"], keep=True)
        return (bench.b.mul(out, factor) if v["by"] == "first" else bench.b.mul(factor, out),)
    return bench.outputs(a, out)


@cases(
    "GROUP_NORM",
    keys=f"ne=SHAPE vne= {INPLACE} groups=1 eps=1e-5",
    standard=(
        grid("f32", ne="9x5x12x2", groups="1 3 5 12"),
        grid("f32", ne="64x1x32", groups=4, eps="0.1 1e-6"),
        grid("f32", ne="9x5x12x2", groups=4, layout=points("vne=pad vne=off inplace=leaf inplace=mid")),
    ),
    full=("GROUP_NORM-f32-ne=64x33x320,groups=32",),
    smoke=("GROUP_NORM-f32-ne=9x5x12x2,groups=5",),
    pairs=(
        grid(
            "f32",
            ne="9x5x12x2 16x1x12",
            groups="1 3 5 12",
            vne="- pad off rows slab part",
            inplace="- leaf mid",
            eps="1e-5 0.1",
        ),
    ),
)
def _group_norm(bench: Bench) -> Sequence[Tensor]:
    a = bench.first("a", "ne", _NORMAL)
    return bench.outputs(a, bench.build("group_norm")(a, bench.v["groups"], bench.v["eps"]))


_SORTED = "3x3 2x3 16x10 60x10 7x5x3x2 128x4x2 513x3 1024x2"


@cases(
    "ARGSORT",
    keys="ne=SHAPE vne= order=ASC|DESC form=|softmax|sigmoid|biased n_used=2 data=|ties|negative",
    standard=(
        grid("f32", ne=_SORTED, order="ASC DESC"),
        grid("f32", ne="24x6x3", vne="pad off flat", order="ASC DESC"),
        grid("f32", ne="24x6", vne="rows", order="ASC DESC"),
    ),
    wide=(
        grid("f32", ne="7x9 64x9 1025x9", order="ASC DESC", data="ties negative"),
        grid("f32", ne="3x65537", order="ASC DESC"),
        grid("f32", ne="151936x2", order="ASC DESC"),
    ),
    full=(
        grid("f32", ne="8192x17 2x4097 2048x2x1x3", order="ASC DESC"),
        grid("f32", ne="64x1x3", vne=ONE_ROW, order="ASC"),
    ),
    pairs=(grid("f32", ne="24x6x3x2 2x7 130x4", vne="- pad rows off flat", order="ASC DESC"),),
)
@cases(
    "TOP_K",
    keys="ne=SHAPE vne= k=1 data=|ties|negative",
    standard=(
        grid("f32", ne="16x10 60x5x3 128x4x2 513x3 1024x2", k="1 2 3 8 15"),
        grid("f32", ne="8x5", k="1 2 7"),
        grid("f32", ne="24x6x3", vne="pad off", k="4 23"),
    ),
    wide=(
        grid("f32", ne="8x9 64x9 1025x9", k="1 2 7", data="ties negative"),
        grid("f32", ne="3x65537", k="1 2"),
        "TOP_K-f32-ne=151936x2,k=40",
    ),
    smoke=("TOP_K-f32-ne=64x9,k=7,data=ties",),
    full=(grid("f32", ne="8192x17 151936x2", k="1 40 100"), grid("f32", ne="64x1x3", vne=ONE_ROW, k=5)),
    pairs=(grid("f32", ne="24x6x3x2 24x1 130x4", vne="- pad rows off flat", k="1 2 5 23"),),
)
def _sort(bench: Bench) -> Tensor | Sequence[Tensor]:
    v = bench.v
    if v["data"] == "ties":
        return _sort_ties(bench)
    if bench.id.op == "TOP_K":
        return bench.b.top_k(bench.first("a", "ne", _distinct(bench)), v["k"])
    if v["form"]:
        return _router(bench)
    a = bench.first("a", "ne", _distinct(bench))
    return bench.b.argsort(a, SORT_ORDER[v["order"]])


def _router(bench: Bench) -> Sequence[Tensor]:
    """Build the router of an expert layer, which backends fuse: experts and their weights.

    A bias is a whole number, so that no two scores of a token are nearly equal.
    """
    v, b = bench.v, bench.b
    n_expert, n_tokens = v["ne"][:2]
    logits = bench.first("a", "ne", distinct(-4.0, 4.0))
    probs = b.soft_max(logits) if v["form"] == "softmax" else b.unary(logits, "SIGMOID")
    scores = probs
    if v["form"] == "biased":
        scores = b.add(probs, bench.leaf("exp_probs_b.bias", F32, dims(n_expert), whole(0, 3), keep=True))
    experts = b.view_2d(b.argsort(scores, SORT_ORDER.DESC), v["n_used"], n_tokens, 4 * n_expert, 0)
    weights = b.reshape_2d(_picked(bench, probs, experts), v["n_used"], n_tokens)
    if v["n_used"] == 1:  # divided by its sum, a weight is 1 whatever the logits are
        return experts, weights
    return experts, b.div(weights, b.clamp(b.sum_rows(weights), 6.103515625e-5, math.inf))


def _distinct(bench: Bench) -> Fill:
    """Return distinct values; if `negative`, all below the zeros of a padding."""
    return distinct(-8.0, -1.0 if bench.v["data"] == "negative" else 8.0)


def _tied(s: Stream, ne: Dims) -> NDArray[Any]:
    """Return rows with few distinct values: one, two, five, and infinities."""
    n0 = ne[0]
    rows = [
        np.full(n0, s.normal(1)[0]),
        s.integers(n0, 0, 2) - 0.5,
        s.integers(n0, 0, 5) + 0.25,
        np.where(s.integers(n0, 0, 4) == 0, s.integers(n0, 1, 4), -np.inf),
        np.where(s.integers(n0, 0, 9) == 0, np.inf, s.integers(n0, 1, 3)),
        np.full(n0, -np.inf),
    ]
    return np.stack([rows[i % len(rows)] for i in range(math.prod(ne[1:]))]).astype(np.float32)


def _picked(bench: Bench, rows: Tensor, indices: Tensor) -> Tensor:
    """Return the elements [1, k, n] of `rows` [n0, n] at `indices` [k, n]."""
    return bench.b.get_rows(bench.b.reshape_3d(rows, 1, *rows.ne[:2]), indices)


def _sort_ties(bench: Bench) -> Sequence[Tensor]:
    """Check picked values and that none is picked twice; ggml does not define the order of ties.

    ARGSORT: the sorted values, and `a` rebuilt from them. TOP_K, which may omit any of several ties: the picked values
    written over larger ones at their positions, sorted.
    """
    v, b = bench.v, bench.b
    n0, n, _, _ = v["ne"]
    a = bench.leaf("a", F32, v["ne"], _tied, keep=True)
    top = bench.id.op == "TOP_K"
    indices = b.top_k(a, v["k"]) if top else b.argsort(a, SORT_ORDER[v["order"]])
    values = _picked(bench, a, indices)
    blank = bench.leaf("blank", F32, (1, n0, n, 1), uniform(99.0, 99.0), keep=True)
    back = b.set_rows(b.cont(blank), values, indices)
    if not top:
        return values, back
    again = b.reshape_2d(back, n0, n)
    return (_picked(bench, again, b.argsort(again, SORT_ORDER.ASC)),)


@cases(
    "ARGMAX",
    keys="ne=SHAPE vne= data=|ties|negative",
    standard=(grid("f32", ne="9x6 17x5 1025x3"), grid("f32", ne="33x6", vne="pad rows off")),
    wide=(
        grid("f32", ne="7x9 64x9 1025x9", data="ties negative"),
        grid("f32", ne="257x3 3x65537"),
    ),
    smoke=("ARGMAX-f32-ne=64x9,data=ties",),
    full=("ARGMAX-f32-ne=151936x2",),
)
def _argmax(bench: Bench) -> Tensor:
    if bench.v["data"] == "ties":  # any of several ties is correct, so compare values
        a = bench.leaf("a", F32, bench.v["ne"], _tied, keep=True)
        return _picked(bench, a, bench.b.reshape_2d(bench.b.argmax(a), 1, a.ne[1]))
    return bench.b.argmax(bench.first("a", "ne", _distinct(bench)))


@cases(
    "SET_ROWS",
    keys="a=SHAPE n=1 ids=NUMBERS va= vb= vids= data=|borders|casts",
    types="a b ids",
    standard=(
        grid(operands(PLAIN, "f32+i64 f32+i32 f16+i64 f16+i32"), a="256x7", n=4),
        grid(operands(PLAIN, "f32", "i64"), a="256x7", n=1),
        grid(operands(PLAIN, "f32", "i64"), a="256x7", n=7),
        grid(operands(PLAIN, "f32", "i64"), a="256x5x2x2", n=3, ids="2x2 1"),
        grid(operands(PLAIN, "f32", "i32"), a="256x5x4x2", n=2, ids=2),
        grid(operands(PLAIN, "f32", "i64"), a="256x9x2", n=4, layout=points("vb=pad va=off,vb=p0213 va=slab")),
        grid(operands(PLAIN, "f16", "i64"), a="256x9x2", n=4, va="slab", vb="pad"),
        grid(operands("f32 f16 q8_0", "f32", "i64"), a="256x9x2", n=4, va="p0213", ids=2, vids="pad off"),
        grid(operands("f32 f16 bf16", "f32 f16", "i64"), a="1x33 31x6", n=5),
        "SET_ROWS-i32+f32+i64-a=33x6,n=4",
    ),
    wide=(
        grid(operands(RARE_STORED, "f32+i64 f32+i32 f16+i64"), a="256x7", n=4),
        grid(operands(RARE_STORED, "f32", "i64"), a="256x9x2", n=4, layout=points("va=slab va=off,vb=p0213")),
        grid(operands(f"{BLOCKS} {RARE_STORED}", "f32", "i64"), a="256x21", n=16, data="borders"),
        grid(operands("f32 f16 bf16", "f32 f16", "i64"), a="67x18", n=12, data="casts"),
        grid("f32+f32+i32 f32+f32+i64 f16+f32+i64 q8_0+f32+i64", a="32x131080", n=40),
    ),
    smoke=(
        "SET_ROWS-f16+f16+i32-a=256x9x4x4,n=1,ids=2x2,va=off,vb=part,vids=rows",
        "SET_ROWS-f16+f32+i64-a=32x131080,n=40",
        grid(operands(BLOCKS_256, "f32", "i64"), a="512x7", n=4),
    ),
    full=(
        grid(operands(PLAIN, "f32", "i64"), a="1024x4096", n=512),
        grid(operands("f32 f16 q8_0", "f32", "i64"), a="64x4x3", n=1, vb=ONE_ROW),
    ),
    pairs=(
        grid(
            operands(PLAIN, "f32+i64 f32+i32 f16+i64 f16+i32"),
            a="256x9x4x4",
            n="1 4 9",
            ids="1 4 2 1x4 4x2 2x2",
            va=VIEWS,
            vb=VIEWS,
            vids="- pad off rows part",
        ),
    ),
    timed=(
        Timed("SET_ROWS-f16+f32+i64-a=512x4096,n=64", 64, 32),
        Timed("SET_ROWS-q8_0+f32+i64-a=512x4096,n=64", 64, 32),
        Timed("SET_ROWS-q4_0+f32+i64-a=512x4096,n=64", 64, 32, "full"),
    ),
)
def _set_rows(bench: Bench) -> Tensor:
    v, (type_a, type_b, type_ids) = bench.v, bench.types
    n0, n1, n2, n3 = v["a"]
    n = v["n"]
    ids_ne = dims(n, *v["ids"])
    a = bench.operand("cache_k_l0", type_a, v["a"], values(type_a), v["va"], keep=True)
    b = bench.operand("b", type_b, (n0, n, n2, n3), normal(300.0) if type_a is I32 else normal(), v["vb"])
    ids = bench.lists("ids", type_ids, ids_ne, n1, v["vids"])
    return bench.b.set_rows(a, b, ids)


_GOT = f"{FLOATS} i32 {BLOCKS}"


@cases(
    "GET_ROWS",
    keys="a=SHAPE n=1 va= vids= data=|scales|bytes",
    types="a ids",
    standard=(
        grid(operands(_GOT, "i32"), a="256x5", n="1 9"),
        grid(operands(_GOT, "i32"), a="256x6x3x2", n=4),
        grid(operands(_GOT, "i32"), a="256x6x3x2", n=4, layout=points("va=pad va=p0213,vids=p1023 va=slab,vids=pad")),
        grid(operands(f"{FLOATS} i32", "i32"), a="1x9 33x7", n="1 12"),
    ),
    wide=(
        grid(operands(RARE, "i32"), variant=points("a=256x5,n=9 a=256x6x3x2,n=4 a=256x6x3x2,n=4,va=pad")),
        grid(operands(RARE, "i32"), a="256x6x3", n=4, va="p0213"),
        grid(operands(f"{BLOCKS} {RARE}", "i32"), a="256x9", n=12, data="scales"),
        grid("nvfp4+i32 mxfp4+i32", a="256x9 256x65", n=33, data="bytes"),
        grid(operands("f32 f16 q4_0 q8_0", "i32"), a="32x262145", n=40),
        grid(operands("f32 f16 q4_0 q8_0", "i32"), shape=points("a=32x131080,n=40 a=32x9,n=65540")),
    ),
    smoke=(
        "GET_ROWS-mxfp4+i32-a=256x9,n=12,data=scales",
        grid("q4_0+i32", shape=points("a=256x6x3x2,n=4 a=32x131080,n=40 a=32x9,n=65540")),
        grid(operands(RARE, "i32"), a="256x5", n=9),
    ),
    full=(
        grid(operands(_GOT, "i32"), a="4096x1000", n=64),
        grid(operands("f32 f16", "i32"), a="1x33554500 256x131100", n=64),
        grid(operands("q4_0 q8_0 q4_K", "i32"), a="256x131100", n=64),
        grid(operands("f32 f16 q8_0", "i32"), a="64x1x3", n=4, va=ONE_ROW),
    ),
    pairs=(
        grid(
            operands(_GOT, "i32"),
            a="256x6 256x6x3 256x6x1x2 256x6x3x2",
            n="1 4 9",
            va=VIEWS,
            vids="- pad off rows slab p1023",
        ),
    ),
    timed=(Timed("GET_ROWS-q4_0+i32-a=2048x4096,n=64", 64, 16),),
)
def _get_rows(bench: Bench) -> Tensor:
    v = bench.v
    _, n, n2, n3 = v["a"]
    a = bench.operand("token_embd.weight", bench.types[0], v["a"], values(bench.types[0]), v["va"], keep=True)
    ids = bench.operand("ids", bench.types[1], (v["n"], n2, n3, 1), integers(0, n), v["vids"])
    return bench.b.get_rows(a, ids)
