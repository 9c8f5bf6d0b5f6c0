"""Sizes, types and layouts by which backends choose a kernel: axes and their classes.

An axis has a value on each side of every border at which a backend branches (`BORDERS`). Level `standard` has each pair
of values of two axes of a grid, and each combination of three axes where kernels are chosen by three (`triple`), unless
ggml refuses each graph with it or each is larger than `LARGEST`. `ci/pairs.py` computes the rows.
"""

from __future__ import annotations

from typing import NamedTuple

from conformance.suite.grid import Grid, grid, operands, points

from .bench import BLOCKS_32, BLOCKS_256, FLOATS, RARE, VIEWS, same

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
)  # fmt: skip
"""Sizes at which a kernel changes, from the sources of ggml 0.16 to 0.26."""
