"""ROPE: all five modes, partial rotation, YaRN, frequency factors, positions of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.tensor import Tensor
from conformance.ggml.types import F32, I32
from conformance.suite.data import integers, normal, uniform
from conformance.suite.grid import grid, points

from .bench import INPLACE, VIEWS, Bench, Timed, cases

_PLAIN = "NORMAL NEOX"
_MULTI = (
    "mode=MROPE,sections=8x4x4x0 mode=MROPE,sections=4x4x4x4 mode=IMROPE,sections=6x5x5x0 mode=IMROPE,sections=8x4x4x0"
)
_VISION = "mode=VISION,sections=8x8x0x0 mode=VISION,sections=4x4x4x4"
_YARN = "freq_scale=0.25,ext_factor=1.0,attn_factor=1.1,beta_fast=32.0,beta_slow=1.0,n_ctx_orig=128"
_LONG_YARN = "freq_scale=0.03125,ext_factor=1.0,attn_factor=1.1,n_ctx_orig=262144"
_MIXED = {"ext_factor": "0.7465", "attn_factor": "1.4245", "beta_fast": "1.0"}
_BENT = "ext_factor=0.7,freq_scale=0.5,n_ctx_orig=512,beta_fast=24.0,beta_slow=2.0"
_EVERY = (
    "mode=NORMAL mode=NEOX mode=MROPE,sections=8x8x8x8 mode=MROPE,sections=16x4x12x0 mode=IMROPE,sections=11x11x10x0 "
    "mode=VISION,sections=16x16x0x0"
)
_TYPE = "f32 f16"
_rope_rows = partial(grid, "ROPE", _TYPE)


@cases(
    "ROPE ROPE_BACK",
    keys=(
        f"ne=SHAPE mode={'|'.join(ROPE_TYPE.__members__)} n_dims=0 offs=0 sections=NUMBERS vne= {INPLACE} ff=0 "
        "from=0 to=256 n_ctx_orig=0 freq_base=10000.0 freq_scale=1.0 ext_factor=0.0 attn_factor=1.0 beta_fast=32.0 "
        "beta_slow=1.0 vpos="
    ),
    standard=(
        _rope_rows(ne="32x4x3 64x2x1 64x3x5x2 128x2x2", mode=_PLAIN, ff="- 1"),
        _rope_rows(ne="64x3x4", n_dims="32 20 2", mode=_PLAIN, ff="- 1"),
        _rope_rows(ne="64x3x4", n_dims=32, offs="16 32", mode=_PLAIN),
        _rope_rows(
            ne="64x3x4",
            mode=_PLAIN,
            variant=points(f"freq_scale=0.5 freq_base=500000.0 attn_factor=1.3 {_YARN} {_YARN},n_dims=32 {_YARN},ff=1"),
        ),
        _rope_rows(ne="64x3x4", mode=_PLAIN, variant=points(_BENT, "from=-300,to=0 from=4000,to=32768")),
        _rope_rows(ne="48x4x5x2", mode=_PLAIN, vne="pad rows off slab p0213 p0321 pad.p0213"),
        _rope_rows(ne="32x3x4", mode=_PLAIN, inplace="leaf mid"),
        _rope_rows(ne="32x3x4", mode=_PLAIN, vne="off p0213", inplace="leaf"),
        _rope_rows(ne="32x3x4 32x2x3x2", mode=points(_MULTI), ff="- 1"),
        _rope_rows(ne="48x3x4", n_dims=32, mode=points(_MULTI), variant=points(f"- freq_base=1000000.0 {_YARN}")),
        _rope_rows(ne="32x3x4", mode=points(_MULTI), variant=points("vne=pad vne=p0213 inplace=leaf")),
        _rope_rows(ne="32x3x4", mode=points(_MULTI), from_=2000, to=9000),
        _rope_rows(ne="32x3x4 32x2x3x2", mode=points(_VISION), ff="- 1"),
        _rope_rows(ne="32x3x4", mode=points(_VISION), variant=points("vne=pad vne=p0213 freq_scale=0.5")),
        _rope_rows(
            ne="128x4x9",
            mode=_PLAIN,
            to=512,
            freq_scale="1.4245",
            **_MIXED,
            variant=points("- n_ctx_orig=512 n_ctx_orig=512,ff=1"),
        ),
        _rope_rows(
            ne="128x4x9",
            mode=_PLAIN,
            to=32768,
            freq_scale="1.0 0.4245",
            n_ctx_orig=4096,
            ext_factor="0.7465",
            beta_fast="1.0 32.0",
        ),
        grid("ROPE", "f32", ne="48x4x9", mode=points(_MULTI), to=8192, freq_scale="1.4245", **_MIXED),
        grid("ROPE_BACK", "f32", ne="128x4x9", mode=_PLAIN, to=512, freq_scale="1.4245", **_MIXED),
        grid("ROPE_BACK", _TYPE, ne="64x3x4", mode=_PLAIN, variant=points(f"n_dims=32 ff=1 vne=p0213 {_YARN}")),
        grid("ROPE_BACK", _TYPE, ne="32x3x4", mode=points(f"{_MULTI} {_VISION}")),
        _rope_rows(
            ne="128x2x9", mode=_PLAIN, from_=65530, to=65545, freq_base="500000.0", variant=points(f"- {_LONG_YARN}")
        ),
    ),
    smoke=(
        "ROPE-f32-ne=64x3x4,mode=NEOX,vpos=off,n_ctx_orig=262144,ext_factor=1.0,freq_scale=0.25",
        "ROPE-f16-ne=32x2x3x2,mode=IMROPE,sections=8x4x4x0,ff=1",
    ),
    wide=(
        _rope_rows(ne="64x2x257 64x2x513", mode=_PLAIN),
        _rope_rows(ne="64x2x9", mode=_PLAIN, from_=131065, to=131085, freq_base="500000.0"),
    ),
    pairs=(
        grid(
            _TYPE,
            ne="64x3x4 64x3x4x2",
            mode=points(_EVERY),
            variant=points("- n_dims=32 n_dims=20 n_dims=32,offs=16 n_dims=32,offs=32"),
            vne=VIEWS,
            inplace="- leaf mid input",
            ff="- 1",
            vpos="- off",
            to="- 1024",
            n_ctx_orig="0 512 4096 262144",
            freq_base="- 500000.0",
            freq_scale="- 0.25 1.5",
            ext_factor="0.0 1.0 0.7",
            attn_factor="1.0 1.3",
            beta_fast="- 24.0",
            beta_slow="- 2.0",
        ),
    ),
    full=(
        _rope_rows(ne="128x32x1 128x32x65", mode=_PLAIN),
        _rope_rows(ne="128x32x65", mode="MROPE", sections="16x24x24x0"),
        _rope_rows(ne="80x16x128", mode="VISION", sections="20x20x0x0"),
    ),
    timed=(Timed("ROPE-f32-ne=64x32x64,mode=NEOX", 64, 8),),
)
def _rope(bench: Bench) -> Sequence[Tensor]:
    v = bench.v
    d, _, n_tokens, _ = v["ne"]
    mode = ROPE_TYPE[v["mode"]]
    multi = bool(mode & ROPE_TYPE["MROPE"])
    n_dims = v["n_dims"] or (d // 2 if v["mode"] == "VISION" else d)
    a = bench.first("Qcur-0", "ne", normal())
    n_pos = n_tokens * 4 if multi else n_tokens
    pos = bench.operand("inp_pos", I32, (n_pos, 1, 1, 1), integers(v["from"], v["to"]), v["vpos"])
    factors = bench.leaf("rope_freqs.weight", F32, (d // 2, 1, 1, 1), uniform(0.9, 8.0), keep=True) if v["ff"] else None
    floats = (v["freq_base"], v["freq_scale"], v["ext_factor"], v["attn_factor"], v["beta_fast"], v["beta_slow"])
    back = "_back" if bench.id.op == "ROPE_BACK" else ""
    if multi:
        out = bench.build(f"rope_multi{back}")(a, pos, factors, n_dims, v["sections"], mode, v["n_ctx_orig"], *floats)
    else:
        out = bench.build(f"rope_ext{back}")(a, pos, factors, n_dims, mode, v["n_ctx_orig"], *floats)
    if v["offs"]:
        bench.b.rope_set_offset(out, v["offs"])
    return bench.outputs(a, out)
