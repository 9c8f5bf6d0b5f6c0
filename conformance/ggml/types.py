"""ggml's enumerations in the order of ggml 0.26: types with block sizes, and ops.

Op ids differ between versions, so only names are stored. The sub-op of UNARY and GLU is in `op_params[0]` as its index
in `UNARY_OPS` and `GLU_OPS`; an adapter to another version of the library translates it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import GraphError


@dataclass(frozen=True, slots=True)
class GGMLType:
    """An `enum ggml_type`: `blck_size` elements take `type_size` bytes."""

    name: str
    id: int
    blck_size: int
    type_size: int
    dtype: np.dtype[Any] | None = None
    """NumPy dtype of one element; None for BF16 and block types."""

    @property
    def is_quantized(self) -> bool:
        """True if stored in blocks that share scales: `ggml_is_quantized`."""
        return self.blck_size > 1

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


def _scalar(name: str, type_id: int, dtype: str) -> GGMLType:
    d = np.dtype(dtype)
    return GGMLType(name, type_id, 1, d.itemsize, d)


F32 = _scalar("f32", 0, "<f4")
F16 = _scalar("f16", 1, "<f2")
Q4_0 = GGMLType("q4_0", 2, 32, 18)
Q4_1 = GGMLType("q4_1", 3, 32, 20)
Q5_0 = GGMLType("q5_0", 6, 32, 22)
Q5_1 = GGMLType("q5_1", 7, 32, 24)
Q8_0 = GGMLType("q8_0", 8, 32, 34)
Q8_1 = GGMLType("q8_1", 9, 32, 36)
Q2_K = GGMLType("q2_K", 10, 256, 84)
Q3_K = GGMLType("q3_K", 11, 256, 110)
Q4_K = GGMLType("q4_K", 12, 256, 144)
Q5_K = GGMLType("q5_K", 13, 256, 176)
Q6_K = GGMLType("q6_K", 14, 256, 210)
Q8_K = GGMLType("q8_K", 15, 256, 292)
IQ2_XXS = GGMLType("iq2_xxs", 16, 256, 66)
IQ2_XS = GGMLType("iq2_xs", 17, 256, 74)
IQ3_XXS = GGMLType("iq3_xxs", 18, 256, 98)
IQ1_S = GGMLType("iq1_s", 19, 256, 50)
IQ4_NL = GGMLType("iq4_nl", 20, 32, 18)
IQ3_S = GGMLType("iq3_s", 21, 256, 110)
IQ2_S = GGMLType("iq2_s", 22, 256, 82)
IQ4_XS = GGMLType("iq4_xs", 23, 256, 136)
I8 = _scalar("i8", 24, "i1")
I16 = _scalar("i16", 25, "<i2")
I32 = _scalar("i32", 26, "<i4")
I64 = _scalar("i64", 27, "<i8")
F64 = _scalar("f64", 28, "<f8")
IQ1_M = GGMLType("iq1_m", 29, 256, 56)
BF16 = GGMLType("bf16", 30, 1, 2)
TQ1_0 = GGMLType("tq1_0", 34, 256, 54)
TQ2_0 = GGMLType("tq2_0", 35, 256, 66)
MXFP4 = GGMLType("mxfp4", 39, 32, 17)
NVFP4 = GGMLType("nvfp4", 40, 64, 36)
Q1_0 = GGMLType("q1_0", 41, 128, 18)
Q2_0 = GGMLType("q2_0", 42, 64, 18)

# fmt: off
TYPES: dict[str, GGMLType] = {t.name: t for t in (
    F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K,
    IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, I8, I16, I32, I64, F64, IQ1_M, BF16,
    TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0,
)}
# fmt: on
"""ggml's name -> type, in the order of ids."""


def type_named(name: str) -> GGMLType:
    """Return the type that `ggml_type_name` calls `name`; GraphError if there is none."""
    try:
        return TYPES[name]
    except KeyError:
        raise GraphError(f"type: one of {', '.join(TYPES)} expected, {name!r} found") from None


# fmt: off
OPS: tuple[str, ...] = (
    "NONE", "DUP", "ADD", "ADD_ID", "ADD1", "ACC", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "SIN", "COS",
    "SUM", "SUM_ROWS", "CUMSUM", "MEAN", "ARGMAX", "COUNT_EQUAL", "REPEAT", "REPEAT_BACK", "CONCAT",
    "SILU_BACK", "NORM", "RMS_NORM", "RMS_NORM_BACK", "GROUP_NORM", "L2_NORM", "MUL_MAT", "MUL_MAT_ID",
    "OUT_PROD", "SCALE", "SET", "CPY", "CONT", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE", "GET_ROWS",
    "GET_ROWS_BACK", "SET_ROWS", "DIAG", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "SOFT_MAX", "SOFT_MAX_BACK",
    "ROPE", "ROPE_BACK", "CLAMP", "CONV_TRANSPOSE_1D", "IM2COL", "IM2COL_BACK", "IM2COL_3D", "COL2IM_1D",
    "CONV_2D", "CONV_3D", "CONV_2D_DW", "CONV_TRANSPOSE_2D", "POOL_1D", "POOL_2D", "POOL_2D_BACK", "UPSCALE",
    "PAD", "PAD_REFLECT_1D", "ROLL", "ARANGE", "TIMESTEP_EMBEDDING", "ARGSORT", "TOP_K", "LEAKY_RELU", "TRI",
    "FILL", "FLASH_ATTN_EXT", "FLASH_ATTN_BACK", "SSM_CONV", "SSM_SCAN", "WIN_PART", "WIN_UNPART",
    "GET_REL_POS", "ADD_REL_POS", "RWKV_WKV6", "GATED_LINEAR_ATTN", "RWKV_WKV7", "SOLVE_TRI",
    "GATED_DELTA_NET", "LIGHTNING_INDEXER", "DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST", "UNARY",
    "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM", "CROSS_ENTROPY_LOSS", "CROSS_ENTROPY_LOSS_BACK",
    "OPT_STEP_ADAMW", "OPT_STEP_SGD", "GLU",
)
"""Names of `enum ggml_op`, as from `ggml_op_name`."""

UNARY_OPS: tuple[str, ...] = (
    "ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "GELU", "GELU_QUICK", "SILU", "HARDSWISH",
    "HARDSIGMOID", "EXP", "EXPM1", "SOFTPLUS", "GELU_ERF", "XIELU", "FLOOR", "CEIL", "ROUND", "TRUNC",
)
"""Names of `enum ggml_unary_op`, as from `ggml_unary_op_name`."""

GLU_OPS: tuple[str, ...] = (
    "REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP",
)
"""Names of `enum ggml_glu_op`, as from `ggml_glu_op_name`."""
# fmt: on
