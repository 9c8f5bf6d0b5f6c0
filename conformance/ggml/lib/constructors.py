"""Signatures of ggml's constructors of nodes, and of the functions that change a node."""

from __future__ import annotations

import ctypes
from typing import Any

_P, _INT, _LONG, _SIZE, _FLOAT = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float,
)  # fmt: skip
KINDS: dict[str, Any] = {
    "t": _P, "y": _INT, "u": _INT, "g": _INT, "i": _INT, "b": ctypes.c_bool, "l": _LONG, "z": _SIZE, "f": _FLOAT,
    "S": ctypes.POINTER(ctypes.c_int), "n": ctypes.POINTER(_LONG), "s": ctypes.c_char_p,
}  # fmt: skip
"""Kind of an argument -> its C type.

They are tensor, type, unary op and glu op by name, int, bool, int64, size_t, float, sections, sizes, text.
"""

_UNARY = (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "gelu_erf", "silu", "exp",
    "expm1", "softplus", "floor", "ceil", "round", "trunc",
)  # fmt: skip
_MAPS = ("dup", "sqr", "sqrt", "log", "sin", "cos")
_BINARY = ("add", "sub", "mul", "div", "add1")
_GLU = ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick")

CONSTRUCTORS: dict[str, str] = {
    **{f"new_tensor_{n}d": "y" + "l" * n for n in (1, 2, 3, 4)},
    "dup_tensor": "t", "view_tensor": "t",
    **{name + suffix: "t" for name in _UNARY + _MAPS for suffix in ("", "_inplace")},
    "hardswish": "t", "hardsigmoid": "t", "unary": "tu", "unary_inplace": "tu", "xielu": "tffff",
    "leaky_relu": "tfi",
    **{name + suffix: "tt" for name in _BINARY for suffix in ("", "_inplace")},
    "add_cast": "tty", "add_id": "ttt",
    **{name + suffix: "t" for name in _GLU for suffix in ("", "_swapped")},
    **{f"{name}_split": "tt" for name in _GLU},
    "glu": "tgi", "glu_split": "ttg", "swiglu_oai": "ttff", "swiglu_clamp": "ttf",
    "sum": "t", "sum_rows": "t", "mean": "t", "cumsum": "t", "argmax": "t",
    **{name + suffix: "tf" for name in ("norm", "rms_norm", "l2_norm", "scale", "fill") for suffix in ("", "_inplace")},
    **{name + suffix: "tif" for name in ("group_norm",) for suffix in ("", "_inplace")},
    **{name + suffix: "tff" for name in ("scale_bias", "clamp") for suffix in ("", "_inplace")},
    "arange": "fff",
    "repeat": "tt", "repeat_4d": "tllll", "concat": "tti", "pad": "tiiii", "pad_ext": "tiiiiiiii",
    "cpy": "tt", "cast": "ty", "cont": "t", "reshape": "tt", "permute": "tiiii", "transpose": "t",
    **{f"{name}_{n}d": "t" + "l" * n for name in ("cont", "reshape") for n in (1, 2, 3, 4)},
    **{f"view_{n}d": "t" + "l" * n + "z" * n for n in (1, 2, 3, 4)},
    "get_rows": "tt", "set_rows": "ttt",
    "mul_mat": "tt", "mul_mat_id": "ttt",
    "diag_mask_inf": "ti", "diag_mask_inf_inplace": "ti", "diag_mask_zero": "ti", "diag_mask_zero_inplace": "ti",
    "soft_max": "t", "soft_max_inplace": "t", "soft_max_ext": "ttff", "soft_max_ext_inplace": "ttff",
    "rope": "ttii", "rope_inplace": "ttii",
    **{name + suffix: "tttiiiffffff" for name in ("rope_ext",) for suffix in ("", "_inplace")},
    **{name + suffix: "tttiSiiffffff" for name in ("rope_multi",) for suffix in ("", "_inplace")},
    "rope_ext_back": "tttiiiffffff", "rope_multi_back": "tttiSiiffffff",
    "ssm_scan": "tttttttl", "rwkv_wkv6": "tttttt", "rwkv_wkv7": "ttttttt", "gated_linear_attn": "tttttf",
    "gated_delta_net": "ttttttl",
    **{name + suffix: "ttzzzz" for name in ("set", "acc") for suffix in ("", "_inplace")},
    **{name + suffix: "ttz" for name in ("set_1d",) for suffix in ("", "_inplace")},
    **{name + suffix: "ttzz" for name in ("set_2d",) for suffix in ("", "_inplace")},
    "out_prod": "tt", "tri": "ti", "diag": "t", "solve_tri": "ttbbb", "roll": "tiiii", "pool_2d": "tiiiiiff",
    "im2col": "ttiiiiiiby", "conv_1d": "ttiii", "conv_1d_ph": "ttii", "conv_1d_dw": "ttiii", "conv_1d_dw_ph": "ttii",
    "conv_2d_dw_direct": "ttiiiiii",
    "conv_2d_direct": "ttiiiiii", "conv_3d_direct": "tt" + "i" * 12, "im2col_3d": "ttl" + "i" * 9 + "y",
    "conv_transpose_1d": "ttiii", "conv_transpose_2d_p0": "tti", "col2im_1d": "tiii", "pool_1d": "tiiii",
    "upscale": "tii", "interpolate": "tlllli", "win_part": "ti", "win_unpart": "tiii", "get_rel_pos": "tii",
    "add_rel_pos": "ttt", "add_rel_pos_inplace": "ttt", "pad_reflect_1d": "tii", "timestep_embedding": "tii",
    "pad_ext_circular": "tiiiiiiii", "repeat_back": "tt", "silu_back": "tt", "rms_norm_back": "ttf",
    "get_rows_back": "ttt", "soft_max_ext_back": "ttff", "soft_max_ext_back_inplace": "ttff",
    "pool_2d_back": "ttiiiiiff", "count_equal": "tt", "cross_entropy_loss": "tt", "cross_entropy_loss_back": "ttt",
    "im2col_back": "ttniiiiiib", "opt_step_adamw": "ttttt", "opt_step_sgd": "ttt",
    "lightning_indexer": "tttt", "dsv4_hc_comb": "tttfi", "dsv4_hc_pre": "tt", "dsv4_hc_pre_gated": "ttf",
    "dsv4_hc_post": "tttt",
    "flash_attn_ext": "ttttfff", "argsort": "ti", "argsort_top_k": "ti", "top_k": "ti", "ssm_conv": "tt",
}  # fmt: skip
"""Function -> kinds of its arguments after the context; the result is a tensor."""

SETTERS: dict[str, str] = {
    "set_name": "ts", "set_input": "t", "set_output": "t", "set_param": "t",
    "mul_mat_set_prec": "ti", "mul_mat_set_hint": "ti", "prec_set_acc": "ti", "prec_set_src": "tii",
    "soft_max_add_sinks": "tt", "flash_attn_ext_add_sinks": "tt", "flash_attn_ext_set_prec": "ti",
    "flash_attn_ext_set_n_kv_max": "ti", "rope_set_offset": "ti",
}  # fmt: skip
"""Function -> kinds of its arguments, no context before them; the first tensor is changed."""
