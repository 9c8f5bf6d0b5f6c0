"""Sizes, types and layouts by which backends choose a kernel: axes and their classes.

An axis has a value on each side of every border at which a backend branches (`BORDERS`). Level `standard` has each pair
of values of two axes of a grid, and each combination of three axes where kernels are chosen by three (`triple`), unless
ggml refuses each graph with it or each is larger than `LARGEST`. `ci/pairs.py` computes the rows.
"""

from __future__ import annotations

from typing import NamedTuple

from conformance.suite.grid import Grid, grid, operands, points

from .bench import BLOCKS, BLOCKS_32, BLOCKS_256, FLOATS, RARE, RARE_STORED, VIEWS, same

LARGEST = 1 << 21
"""Number of elements of an id's shapes above which a row takes too long."""

_ROW = (
    "1 2 3 4 5 7 8 9 15 16 17 31 32 33 63 64 65 96 127 128 129 255 256 257 511 512 513 1023 1024 1025 2048 4097 8200 "
    "16392 16385"
)
"""Lengths of rows: around powers of two up to 1,024, then beyond a workgroup.

The longest also exceed a stride of 64 KiB."""
_NORMED = _ROW.removeprefix("1 2 3 4 5 ")
"""Lengths of rows for norms and sorting, without the shortest."""
_SHORT = "1 3 4 5 8 9 16 17 31 32 33 64 65 255 256 257 1023 1024 1025 16392"
_TOKENS = "1 2 3 4 5 6 7 8 9 16 17 33 65 129"
_ROWS = "7 8 16 32 33 64 65 128 129"
_SMALL_BLOCKS = f"{FLOATS} {BLOCKS_32} iq4_nl"
_LARGE_BLOCKS = " ".join((BLOCKS_256, *(t for t in RARE.split() if t != "iq4_nl")))
_LARGE_STORED = f"{BLOCKS_256} {RARE_STORED.removeprefix('iq4_nl ')}"
_ATTENDED = f"{same(f'{FLOATS} {BLOCKS_32} iq4_nl')} q8_0+f16 f16+q8_0 q8_0+q4_0"
_SUMS = "- pad rows off slab"
_VECTORS = "3 7 31 65537"
_ROPE_MODES = (
    "mode=NORMAL mode=NEOX mode=MROPE,sections=8x4x4x0 mode=IMROPE,sections=6x5x5x0 mode=VISION,sections=8x8x0x0"
)

DISPATCH: tuple[Grid, ...] = (
    grid("MUL_MAT", operands(_SMALL_BLOCKS, "f32"), a="{k}x{m}{a2}", b="{k}x{n}{b2}")
    .where(k="32 64 96 128 256 288 544", m=_ROWS, n=_TOKENS, a2="- x2", b2="- x2 x6 x2x3")
    .triple("types", "k", "n"),
    grid("MUL_MAT", operands(_LARGE_BLOCKS, "f32"), a="{k}x{m}{a2}", b="{k}x{n}{b2}")
    .where(k="256 512 768", m=_ROWS, n=_TOKENS, a2="- x2", b2="- x2 x6 x2x3")
    .triple("types", "k", "n"),
    grid("MUL_MAT", "f32+f32 f16+f32 bf16+f32 f16+f16 bf16+bf16", a="{k}x{m}", b="{k}x{n}").where(
        k="1 2 3 4 5 7 8 9 15 16 17 31 33 63 65 127 129 1000 1023 1025", m="7 8 33 1024 1025", n=_TOKENS
    ),
    grid("MUL_MAT_ID", operands(_SMALL_BLOCKS, "f32"), as_="{k}x{m}x{e}", n_used="1 2 4 8", n_tokens=_TOKENS, n_b="- 1")
    .where(k="32 64 96 256 288", m="7 8 33 64", e="2 4 8 33")
    .triple("types", "k", "n_tokens"),
    grid("MUL_MAT_ID", operands(_LARGE_BLOCKS, "f32"), as_="{k}x{m}x{e}", n_used="1 2 4 8", n_tokens=_TOKENS, n_b="- 1")
    .where(k="256 512", m="7 8 33 64", e="2 4 8 33")
    .triple("types", "k", "n_tokens"),
    grid(
        "FLASH_ATTN_EXT", _ATTENDED, q="{d}x{n}x{h}", k="{d}x{kv}x{g}", mask="{kv}x{n} -", hide="causal holes",
        layout=points("- vk=p0213,vv=p0213"), max_bias="- 8.0", softcap="- 10.0", sinks="- 1", prec="- F32",
    )
    .where(
        d="32 40 64 72 80 96 112 128 192 256", n="1 2 3 4 5 8 9 16 17 19 20 32 33 64 65",
        kv="16 32 64 96 256 511 512 528 1024 1056", h="1 2 4 5 8 12 16 17", g="1 2",
    )
    .triple("types", "d", "n"),
    grid("FLASH_ATTN_EXT", same("f16 f32 q8_0 q4_0"), q="{d}x{n}x{h}", k="{d}x{kv}x1", mask="{kv}x{n}", dims=points(
        "mla=1,dv=512 mla=1,dv=256 dv=128 dv=256"), sinks="- 1")
    .where(d="192 320 576", n="1 2 4 8 9 16 17 33 65", kv="32 96 256 512 1056", h="1 4 8 16 17"),
    grid("SOFT_MAX", "f32", ne="{c}x{n}x{h}", mask="{c}x{n} {c}x{n}x{h} -", mt="f16 f32", hide="holes bias",
         max_bias="- 8.0", sinks="- 1", scale="- 0.5", inplace="- leaf").where(
        c=_ROW.removeprefix("1 "), n="1 2 5 33", h="1 2 12"
    ),
    grid("NORM RMS_NORM L2_NORM", "f32", ne="{c}x{n}x{z}", vne=_SUMS, eps="1e-5 0.0", inplace="- leaf").where(
        c=_NORMED, n="1 3 33", z="1 4"
    ),
    grid("SUM_ROWS MEAN CUMSUM", "f32", ne="{c}x{n}", vne=_SUMS).where(c=_ROW, n=_VECTORS),
    grid("ARGMAX", "f32", ne="{c}x{n}", vne="- pad rows off").where(c=_NORMED, n=_VECTORS),
    grid("ARGSORT", "f32", ne="{c}x{n}", order="ASC DESC", vne="- pad rows off").where(c=_NORMED, n=_VECTORS),
    grid("TOP_K", "f32", ne="{c}x{n}", k="1 6 10 40 100", vne="- pad rows off").where(c=_NORMED, n=_VECTORS),
    grid("ADD SUB MUL DIV", "f32+f32 f16+f16 bf16+bf16 f16+f32", a="{c}x{n}x{z}",
         b="- {c} 1 {c}x{n} {c}x1x{z} 1x{n}x{z}", va=VIEWS, vb="- pad rows off slab part", inplace="- leaf").where(
        c=_SHORT, n="1 2 6 33", z="1 4"
    ),
    grid("GLU.REGLU GLU.GEGLU GLU.SWIGLU GLU.GEGLU_ERF GLU.GEGLU_QUICK", FLOATS, ne="{c}x{n}", va="- pad rows off slab",
         form=points("- form=swapped form=split form=split,vb=pad")).where(
        c="2 4 6 8 10 16 18 32 34 62 64 66 128 130 256 258 510 512 514 2046 2048 2050 16392", n="1 2 5 33"
    ),
    grid("UNARY.SILU UNARY.GELU UNARY.GELU_QUICK UNARY.GELU_ERF UNARY.RELU UNARY.TANH UNARY.SIGMOID UNARY.EXP SQR",
         FLOATS, ne="{c}x{n}", vne="- pad off", inplace="- leaf").where(c=_SHORT, n="1 2 5 33"),
    grid("ROPE", "f32 f16", ne="{d}x{h}x{n}", mode=points(_ROPE_MODES), ff="- 1", vne="- pad off slab p0213",
         inplace="- leaf").where(d="32 64 80 96 128 192 256 512", h="1 2 3 8 33", n="1 2 3 5 33 65"),
    grid("SSM_CONV", "f32+f32", out="{c}x{n}x{s}", d_conv="2 3 4 9", vsx="- slab").where(
        c="1 16 33 127 128 129 256 384", n="1 2 3 4 5 8 9 16 17 31 32 33 64 65 129", s="1 3"
    ),
    grid("SSM_SCAN", "f32", x="{d}x{h}x{n}x{s}", d_state="16 20 32 64 128 256", a="- 1", n_group="1 2").where(
        d="1 16 32 64", h="2 4 128", n="1 2 3 4 5 6 7 8 9 17 33", s="1 3"
    ),
    grid("RWKV_WKV6 RWKV_WKV7 GATED_LINEAR_ATTN", "f32", ne="{d}x{h}x{n}x{s}").where(
        d="32 64 128", h="1 2 3", n="1 2 3 4 5 15 16 17 31 32 33 65", s="1 2"
    ),
    grid("GATED_DELTA_NET", "f32", ne="{d}x{h}x{n}x{s}", kda="- 1", k_heads="- 2", K="1 3").where(
        d="16 20 32 64 128", h="2 4", n="1 2 3 5 6 7 8 9 16 31 32 33 63 64 65 129", s="1 2"
    ),
    grid("GET_ROWS", operands(f"{_SMALL_BLOCKS} i32", "i32"), a="{c}x{r}", n="1 2 5 33 300", va="- pad rows off").where(
        c="32 64 96 128 256 288 512 1056 4128", r="2 7 300"
    ),
    grid("GET_ROWS", operands(_LARGE_BLOCKS, "i32"), a="{c}x{r}", n="1 2 5 33 300", va="- pad rows off").where(
        c="256 512 768 4096", r="2 7 300"
    ),
    grid("SET_ROWS", operands(_SMALL_BLOCKS, "f32 f16", "i64 i32"), a="{c}x{r}", n="1 2 5 33", va="- pad slab off",
         vb="- pad").where(c="32 64 96 128 256 288 512 1056", r="33 300"),
    grid("CPY", operands(FLOATS, FLOATS), a="{c}x{n}x{z}", va="- pad p0213 p1023", vb="- off p1023",
         form="- cast").where(
        c="1 2 3 4 7 8 9 31 32 33 63 64 65 128 256 1025 16392", n="1 2 8 31 32 33 64 65", z="1 3"
    ),
    grid("CPY", operands("f32 f16 bf16", f"{BLOCKS_32} iq4_nl"), a="{c}x{n}x{z}", va="- pad p0213",
         form="- cast").where(
        c="32 64 96 128 256 288 1056 4128", n="1 2 33", z="1 3"
    ),
)  # fmt: skip
"""Grids of which level `standard` has a covering array, and `smoke` each value once."""

FURTHER: tuple[Grid, ...] = (
    grid("SET_ROWS", operands(_LARGE_STORED, "f32 f16", "i64 i32"), a="{c}x33", n="1 2 5", va="- pad slab off",
         vb="- pad").where(c="256 512 768"),
    grid("CPY", operands("f32 f16 bf16", _LARGE_STORED), a="{c}x{n}x{z}", va="- pad p0213", form="- cast").where(
        c="256 512 768", n="1 2 33", z="1 3"
    ),
    grid("ADD", operands(f"{BLOCKS_32} iq4_nl {_LARGE_STORED}", "f32"), a="{c}x{n}x{z}", b="{c}x{n}x{z}").where(
        c="256 512 768", n="1 2 33", z="1 3"
    ),
    grid("MUL_MAT", "f32+f32", a="{n}x{n}", b="{n}x{t}", hint="SRC0_IS_HADAMARD").where(
        n="2 32 64 128 256 512 1024", t="1 3 33"
    ),
    grid("MUL_MAT", "f16+f32", a="64x{m}x2", b="64x{n}x{h}",
         layout=points("- va=p0213,vb=p0213 va=pad va=p0213")).where(m="7 8 512 513", n="1 2 9", h="2 4 16 18")
    .triple("layout", "n", "h"),
    grid("MUL_MAT_ID", operands("f32 f16 q4_0 q8_0 q4_K", "f32"), as_="256x{m}x{e}",
         n_used="1 2 3 4 5 6 7 8 9 15 16 17 31 32", n_tokens="1 9 33").where(m="8 32", e="1 32 64 65"),
    grid("FLASH_ATTN_EXT", same("f16 f32 q8_0"), q="{d}x{n}x{h}", k="{d}x{kv}x1", mask="{kv}x{n} -").where(
        d="36 48 60 104 512", n="1 3 33 65", kv="32 256", h="1 4 8"
    ),
    grid("FLASH_ATTN_EXT", same("f16 q8_0"), q="64x{n}x{h}", k="64x{kv}x1", mask="{kv}x{n} -").where(
        n="1 2 20", h="1 5 8", kv="1024 1025 2048 2049 4096 8191 8192"
    ),
    grid("FLASH_ATTN_EXT", same("f16 f32 q8_0"), q="32x{n}x{h}", k="32x{kv}x1", mask="{kv}x{n}", hide="causal holes")
    .where(n="127 128 256 511 512 1023 1024", h="1 2", kv="96 256 288"),
    grid("FLASH_ATTN_EXT", same("f16 f32 q8_0"), q="64x{n}x4x{s}", k="64x{kv}x2x{t}", mask="{kv}x{n} {kv}x{n}x1x{s} -")
    .where(n="1 4 33 65", s="2 3", t="1 2 3", kv="255 256 512"),
    grid("FLASH_ATTN_EXT", same("f16 q8_0"), q="{d}x{n}x{h}", k="{d}x{kv}x1", mask="{kv}x{n}", dims=points(
        "mla=1,dv=512 dv=256"))
    .where(d="320 576", n="1 4 5 9", h="16 20 32", kv="256 1024 16384 16640"),
    grid("SOFT_MAX", "f32", ne="{c}x{n}", mask="{c}x{n} -", scale="- 0.5").where(
        c="4095 4096 8191 8192 12256 12257 16385 32768", n="1 2"
    ),
    grid("GROUP_NORM", "f32", ne="31x33x4 32x32x4 25x41x4 96x64x4", groups="2 4", vne="- pad"),
    grid("SUM_ROWS MEAN CUMSUM", "f32", ne="{c}x{n}").where(
        c="31 1023 1024 1025 4096 8200 32768 32769 65537", n="1 2 256"
    ).triple("what", "c", "n"),
    grid("ARGSORT", "f32", ne="{c}x{n}", order="ASC DESC").where(c="7 33 1000 1024 1025 16385", n="1 2"),
    grid("TOP_K", "f32", ne="{c}x{n}", k="31 32 33 512 1023 1024").where(c="1024 1025 4097", n="1 2"),
    grid("ADD MUL", "f32+f32 f16+f16", a="2x1x{z}", b="- 2 1x1x{z}").where(z="255 65535 65536 65537"),
    grid("ADD SUB", "f32+f32 f16+f16", a="{c}x5x2", b="- {c}", chain="2 3 4 5 6 7 8 9").where(c="13 64"),
    grid("MUL DIV", "f32+f32", a="{c}x5x2", b="- {c}", chain="2 3 4 5 6 7 8 9").where(c="13 64"),
    grid("SIN", "f32 f16", ne="{c}x{n}", form="snake").where(c="7 64", n="1 5 33"),
    grid("LEAKY_RELU ADD1", "f32 f16", ne="7x5 64x5 1024x5", c="0.1 2.0"),
    grid("ROPE", "f32 f16", ne="{d}x2x{n}", mode=points(_ROPE_MODES), n_dims="- 64", ff="- 1").where(
        d="768 896 898 1024", n="1 3 33"
    ),
    grid("SSM_CONV", "f32+f32", out="{c}x{n}", d_conv="3 4 5 6 8 9 14 15 16").where(c="33 128", n="1 4 32 33"),
    grid("SSM_SCAN", "f32", x="1x{h}x{n}x{s}").where(h="8 64 128", n="1 2 3 4 5 6 7 8 9", s="1 2"),
    grid("SSM_SCAN", "f32", x="{d}x{h}x{n}", d_state="64 128 256", a=1, n_group="1 2").where(
        d="16 24 64", h="2 4", n="1 127 128 129 257"
    ),
    grid("GATED_DELTA_NET", "f32", ne="{d}x2x{n}", kda="- 1").where(d="128 144 256", n="1 5 33"),
    grid("LIGHTNING_INDEXER", "f32 f16 bf16 q8_0 q4_0", q="128x{h}x{n}", n_kv="16 33").where(
        h="31 32 33 63 64 65", n="1 4"
    ),
    grid("SOLVE_TRI", "f32", ne="{n}x{k}{z}").where(
        n="16 63 64 65", k="1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 31 32 33 64 65 128 129", z="- x3"
    ),
    grid("CONV_2D", "f32+f32 f16+f32 f16+f16", a="{s}x{s}x2x{o}", b="{w}x{h}x2", k="1x1x0x0x1x1 1x1x1x1x1x1").where(
        s="1 3", o="31 32 33 64 65 96 128", w="8 17 64", h="4 8 32"
    ),
    grid("POOL_2D", "f32 f16", ne="24x9x3", op="MAX AVG", k="3x3x1x1x1x1 3x3x1x1x2x2 5x4x2x2x2x2 5x4x2x2x3x3"),
    grid("CONCAT", "i8 f16 i32 i64", a="12x6x4", dim="0 1 2 3", n="1 7"),
    grid("MUL_MAT", "f32+f32 f16+f32", a="4x3", b="4x{n}x{z}").where(n="1 2", z="65535 65536 65537"),
    grid("FLASH_ATTN_EXT", same("f16 q8_0"), q="{d}x{n}x{h}", k="{d}x256x2", mask="256x{n}").where(
        d="64 128 256 512", n="1 3 33", h="2 4 6 8 10 24"
    ),
    grid("FLASH_ATTN_EXT", same("f16 bf16 q8_0"), q="64x{n}x4", k="64x{kv}x2", mask="{kv}x{n}",
         layout=points("vk=pad,vv=pad vk=rows,vv=slab vk=slab,vv=rows")).where(n="1 9 33 65", kv="32 256")
    .triple("types", "layout", "n"),
    grid("CPY", same(FLOATS), a="{c}x{n}x{z}", va="- pad p0213 p1023", vb="- pad rows slab p1023").where(
        c="1 12 33", n="1 5 33", z="1 3"
    ),
    grid("MUL_MAT", operands(f"{FLOATS} {BLOCKS_32} iq4_nl", "f32"), a="{k}x{m}", b="{k}x1").where(
        k="32 256 1024", m="511 512 513 576 640 1000 1152"
    ),
    grid("MUL_MAT", operands(_LARGE_BLOCKS, "f32"), a="{k}x{m}", b="{k}x1").where(
        k="256 512 1024", m="511 512 513 576 640 1000 1152"
    ),
    grid("MUL_MAT", operands(f"{FLOATS} {BLOCKS} {RARE}", "f32"), a="256x{m}", b="256x{n}", glu="REGLU GEGLU SWIGLU")
    .where(m="7 32 33", n="1 2 5 8 9"),
    grid("MUL_MAT_ID", operands(f"{FLOATS} {BLOCKS} {RARE}", "f32"), as_="256x{m}x{e}", n_used="1 2 4",
         n_tokens="1 2 5 8 9", glu="REGLU GEGLU SWIGLU").where(m="7 32", e="4 6 33"),
    grid("ARGSORT TOP_K ARGMAX SUM_ROWS CUMSUM SOFT_MAX RMS_NORM", "f32", ne="{c}x{n}").where(
        c="1025 2048 4095", n="128 255 256 257 512"
    ),
    grid("ARGSORT", "f32", ne="{e}x{n}", order="DESC", form="softmax sigmoid biased", n_used="1 2 4").where(
        e="4 6 8 12 32 40 60 64 72 96 128 160 192 256 384 512 576", n="1 2 9 33"
    ),
    grid("SIN COS", "f32 f16", ne="{c}x{n}{z}", form="snake").where(c="1 7 64 256", n="1 5 33", z="x3 x1x2 x2x3"),
    grid("REPEAT_BACK", "f32", ne="4x6 4x6x2 4x2x32768 4x2x32769", to="2x2 4x1"),
    grid("CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK", "f32", ne="{c}x{n}").where(
        c="12256 12257 12288 12289 16385", n="1 2"
    ),
)  # fmt: skip
"""Grids with a covering array in `standard` alone: few backends branch at their sizes."""


class Border(NamedTuple):
    """Two neighbouring sizes for which a backend uses different kernels."""

    ops: str
    axis: str
    below: int
    above: int
    source: str
    """File of ggml's `src` that branches there."""


def _borders(ops: str, axis: str, *rows: str) -> tuple[Border, ...]:
    """Return the borders of rows like `8|9 64|65: ggml-cuda/mmvq.cu`."""
    found = []
    for row in rows:
        sizes, _, source = row.partition(": ")
        for size in sizes.split():
            below, _, above = size.partition("|")
            found.append(Border(ops, axis, int(below), int(above), source))
    return tuple(found)


BORDERS: tuple[Border, ...] = (
    *_borders(
        "MUL_MAT", "n",
        "1|2 3|4 7|8: ggml-cpu/llamafile/sgemm.cpp", "3|4: ggml-cpu/repack.cpp",
        "8|9 1|2: ggml-vulkan/ggml-vulkan.cpp",
        "1|2 2|3 3|4 4|5 5|6 6|7 7|8 8|9: ggml-cuda/mmvq.cu", "16|17: ggml-cuda/mmf.cu",
        "64|65 128|129: ggml-cuda/mmq.cu",
        "2|3 8|9: ggml-metal/ggml-metal-ops.cpp", "8|9: ggml-sycl/ggml-sycl.cpp", "4|5: ggml-hexagon/ggml-hexagon.cpp",
    ),
    *_borders("MUL_MAT", "m", "7|8: ggml-cpu/repack.cpp", "8|9 32|33 64|65: ggml-vulkan/ggml-vulkan.cpp",
              "128|129 1024|1025: ggml-cuda/mmq.cu"),
    *_borders("MUL_MAT", "k", "32|33 63|64: ggml-metal/ggml-metal-ops.cpp", "7|8: ggml-cpu/llamafile/sgemm.cpp"),
    *_borders("MUL_MAT_ID", "n_tokens", "1|2 8|9 16|17: ggml-cuda/mmf.cu", "8|9: ggml-vulkan/ggml-vulkan.cpp",
              "32|33: ggml-metal/ggml-metal-ops.cpp"),
    *_borders("FLASH_ATTN_EXT", "n", "1|2 2|3 4|5 8|9 16|17 32|33 64|65: ggml-cuda/fattn.cu",
              "1|2 63|64: ggml-cpu/ops.cpp",
              "19|20: ggml-metal/ggml-metal-ops.cpp", "4|5: ggml-hexagon/ggml-hexagon.cpp"),
    *_borders("FLASH_ATTN_EXT", "d", "128|129 64|65: ggml-hexagon/ggml-hexagon.cpp", "256|257: ggml-cuda/fattn.cu"),
    *_borders("FLASH_ATTN_EXT", "kv", "511|512: ggml-cpu/ops.cpp", "1024|1025: ggml-cuda/fattn.cu"),
    *_borders("SOFT_MAX", "c", "1024|1025 16384|16385: ggml-vulkan/ggml-vulkan.cpp",
              "512|513 4096|4097: ggml-cuda/softmax.cu"),
    *_borders("NORM RMS_NORM L2_NORM", "c", "1023|1024: ggml-cuda/norm.cu", "512|513: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("SUM_ROWS CUMSUM", "c", "1023|1024: ggml-cuda/cumsum.cu"),
    *_borders("ARGSORT TOP_K", "c", "1024|1025: ggml-cuda/argsort.cu"),
    *_borders("ARGMAX ARGSORT TOP_K CUMSUM", "n", "65535|65536: ggml-cuda/argmax.cu"),
    *_borders("SSM_CONV", "n", "1|2 4|5 8|9 16|17 32|33 64|65 128|129: ggml-metal/ggml-metal-ops.cpp",
              "32|33: ggml-cuda/ssm-conv.cu"),
    *_borders("SSM_SCAN", "n", "1|2 2|3 3|4 4|5 5|6 6|7 7|8 8|9: ggml-cuda/ssm-scan.cu"),
    *_borders("GATED_DELTA_NET", "n", "6|7 64|65: ggml-cuda/gated_delta_net.cu"),
    *_borders("ROPE", "d", "256|257: ggml-cuda/rope.cu"),
    *_borders("MUL_MAT", "n", "1|2: ggml-cpu/ggml-cpu.c", "1|2: ggml-cpu/kleidiai/kleidiai.cpp",
              "8|9: ggml-cuda/ggml-cuda.cu", "63|64 256|257: ggml-cuda/mmq.cu",
              "1|2 2|3 3|4 4|5 5|6 8|9: ggml-cuda/mmvf.cu", "1|2: ggml-hexagon/htp/matmul-ops.c",
              "1|2 4|5 5|6: ggml-metal/ggml-metal-ops.cpp", "31|32: ggml-opencl/ggml-opencl.cpp",
              "32|33: ggml-sycl/ggml-sycl.cpp", "32|33 64|65: ggml-vulkan/ggml-vulkan.cpp",
              "4|5: ggml-webgpu/ggml-webgpu-shader-lib.hpp"),
    *_borders("MUL_MAT", "m", "16|17: ggml-cpu/ggml-cpu.c", "512|513: ggml-cuda/mmvf.cu",
              "127|128 511|512: ggml-opencl/ggml-opencl.cpp"),
    *_borders("MUL_MAT_ID", "n_tokens", "1|2: ggml-cpu/ggml-cpu.c", "1|2 8|9: ggml-cuda/ggml-cuda.cu",
              "128|129: ggml-cuda/mmf.cu", "32|33: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("MUL_MAT_ID", "e", "63|64 64|65: ggml-cuda/mmq.cu", "1|2: ggml-openvino/ggml-openvino.cpp"),
    *_borders("MUL_MAT_ID", "n_used", "1|2 2|3 3|4 4|5 5|6 6|7 7|8 8|9 15|16 16|17: ggml-cuda/mmid.cu"),
    *_borders("MUL_MAT", "k", "32|33: ggml-cann/aclnn_ops.cpp",
              "63|64 64|65 127|128 128|129 255|256 256|257 511|512 512|513: ggml-cuda/fwht.cu",
              "31|32: ggml-metal/ggml-metal-device.cpp"),
    *_borders("FLASH_ATTN_EXT", "d",
              "39|40 40|41 63|64 64|65 79|80 80|81 96|97 111|112 112|113 128|129 255|256 320|321: ggml-cuda/fattn.cu",
              "512|513: ggml-cuda/fattn.cu", "64|65 255|256: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("FLASH_ATTN_EXT", "kv", "8191|8192 16384|16385: ggml-cuda/fattn.cu",
              "2048|2049: ggml-metal/ggml-metal-ops.cpp", "1023|1024: ggml-sycl/fattn.cpp",
              "1023|1024: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("FLASH_ATTN_EXT", "n", "1|2: ggml-cann/aclnn_ops.cpp", "1023|1024: ggml-cuda/fattn-common.cuh",
              "31|32: ggml-metal/ggml-metal-ops.cpp", "31|32: ggml-sycl/fattn.cpp",
              "1|2 2|3 3|4 8|9 63|64: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("SOFT_MAX", "c",
              "31|32 32|33 63|64 64|65 127|128 128|129 255|256 256|257 511|512: ggml-cuda/softmax.cu",
              "1023|1024 1024|1025 2047|2048 2048|2049 4095|4096 12256|12257: ggml-cuda/softmax.cu",
              "1024|1025: ggml-sycl/softmax.cpp"),
    *_borders("TOP_K", "c", "1024|1025: ggml-cuda/top-k.cu", "1024|1025: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("ARGSORT", "c", "512|513: ggml-cuda/topk-moe.cu", "16384|16385: ggml-hexagon/ggml-hexagon.cpp",
              "1024|1025: ggml-metal/ggml-metal-ops.cpp", "1024|1025: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("SSM_CONV", "d_conv", "2|3 3|4 4|5 5|6 8|9 9|10 14|15 15|16: ggml-cuda/ssm-conv.cu"),
    *_borders("SSM_SCAN", "d_state", "16|17 127|128 128|129: ggml-cuda/ssm-scan.cu"),
    *_borders("SSM_SCAN", "n", "128|129: ggml-cuda/ssm-scan.cu"),
    *_borders("GATED_LINEAR_ATTN", "d", "63|64 64|65: ggml-cuda/gla.cu"),
    *_borders("RWKV_WKV6 RWKV_WKV7", "d", "63|64 64|65: ggml-cuda/wkv.cu"),
    *_borders("GATED_DELTA_NET", "d", "16|17 31|32 32|33 64|65 128|129: ggml-cuda/gated_delta_net.cu",
              "128|129: ggml-hexagon/ggml-hexagon.cpp"),
    *_borders("CUMSUM", "c", "1024|1025: ggml-cuda/cumsum.cu", "1024|1025: ggml-metal/ggml-metal-ops.cpp",
              "512|513: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("SOLVE_TRI", "n", "63|64 64|65: ggml-cuda/solve_tri.cu"),
    *_borders("SOLVE_TRI", "k", "1|2 2|3 3|4 4|5 5|6 6|7 7|8 8|9 9|10 10|11 11|12 12|13: ggml-cuda/solve_tri.cu",
              "13|14 14|15 15|16 16|17 31|32 32|33: ggml-cuda/solve_tri.cu", "64|65: ggml-sycl/ggml-sycl.cpp",
              "128|129: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("MEAN", "c", "32768|32769: ggml-cuda/mean.cu"),
    *_borders("ARGMAX", "c", "32|33 1024|1025: ggml-cuda/argmax.cu"),
    *_borders("CROSS_ENTROPY_LOSS", "c", "12288|12289: ggml-cuda/cross-entropy-loss.cu"),
    *_borders("LIGHTNING_INDEXER", "h", "63|64 64|65: ggml-cuda/lightning-indexer.cu"),
    *_borders("MUL_MAT_ID", "m", "32|33: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("TOP_K", "k", "32|33: ggml-sycl/ggml-sycl.cpp", "32|33 1023|1024: ggml-vulkan/ggml-vulkan.cpp"),
    *_borders("MUL_MAT_ID", "k", "63|64: ggml-metal/ggml-metal-ops.cpp"),
    *_borders("NORM", "c", "1023|1024: ggml-sycl/norm.cpp"),
    *_borders("ROPE", "d", "896|897: ggml-cann/ggml-cann.cpp"),
)  # fmt: skip
"""Sizes at which a kernel changes, from the sources of ggml 0.16 to 0.26."""
