"""The parameters of every op, at their positions."""

from __future__ import annotations

from .matmul import OP_HINT, PREC, TRI_TYPE
from .names import GLU_OPS, UNARY_OPS
from .op import GAP, Field, declare_fields, enum, f32, flag, i32, placed, u64, vec
from .rope import ROPE_TYPE
from .rows import SORT_ORDER
from .windows import OP_POOL

_EPS = (f32("eps"),)
_MUL_MAT = (enum("prec", PREC), enum("hint", OP_HINT), GAP, enum("prec_src1", PREC))
_PART = (i32("nb1"), i32("nb2"), i32("nb3"), i32("offset"), flag("inplace"))
_ROPE = (
    GAP, i32("n_dims"), enum("mode", ROPE_TYPE), GAP, i32("n_ctx_orig"), f32("freq_base"), f32("freq_scale"),
    f32("ext_factor"), f32("attn_factor"), f32("beta_fast"), f32("beta_slow"), vec("sections", 4), i32("n_offs"),
)  # fmt: skip
_K = (i32("K"),)
_N_PAST = (i32("n_past"),)

PARAMS: dict[str, tuple[Field, ...]] = {
    "VIEW": (u64("offset"),),
    "PERMUTE": (vec("axes", "axis0 axis1 axis2 axis3"),),
    "CONCAT": (i32("dim"),),
    "PAD": (vec("padding", "lp0 rp0 lp1 rp1 lp2 rp2 lp3 rp3"), flag("circular")),
    "SCALE": (f32("s"), f32("b")),
    "CLAMP": (f32("min"), f32("max")),
    "LEAKY_RELU": (f32("negative_slope"),),
    "DIAG_MASK_INF": _N_PAST,
    "DIAG_MASK_ZERO": _N_PAST,
    "UNARY": (enum("op", UNARY_OPS), f32("alpha_n"), f32("alpha_p"), f32("beta"), f32("eps")),
    "GLU": (enum("op", GLU_OPS), flag("swapped"), f32("alpha"), f32("limit")),
    "NORM": _EPS,
    "RMS_NORM": _EPS,
    "L2_NORM": _EPS,
    "GROUP_NORM": (i32("n_groups"), f32("eps")),
    "FILL": (f32("c"),),
    "ARANGE": (f32("start"), f32("stop"), f32("step")),
    "SET": _PART,
    "ACC": _PART,
    "TRI": (enum("type", TRI_TYPE),),
    "POOL_2D": (enum("op", OP_POOL), *map(i32, ("k0", "k1", "s0", "s1", "p0", "p1"))),
    "IM2COL": (*map(i32, ("s0", "s1", "p0", "p1", "d0", "d1")), flag("is_2D")),
    "ROLL": (vec("shifts", "shift0 shift1 shift2 shift3"),),
    "MUL_MAT": _MUL_MAT,
    "MUL_MAT_ID": _MUL_MAT,
    "SOFT_MAX": (f32("scale"), f32("max_bias")),
    "ROPE": _ROPE,
    "ROPE_BACK": _ROPE,
    "FLASH_ATTN_EXT": (f32("scale"), f32("max_bias"), f32("logit_softcap"), enum("prec", PREC), i32("n_kv_max")),
    "ARGSORT": (enum("order", SORT_ORDER),),
    "SSM_SCAN": _K,
    "GATED_LINEAR_ATTN": (f32("scale"),),
    "GATED_DELTA_NET": _K,
    "DSV4_HC_COMB": (f32("eps"), i32("n_iter")),
    "DSV4_HC_PRE": (f32("scale"), flag("gated")),
}
"""Op -> its parameters, in order."""

for _op, _fields in PARAMS.items():
    declare_fields(_op, tuple(placed(_fields)))
