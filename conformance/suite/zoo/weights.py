"""Recipes for weights of any architecture, by what llama.cpp calls them: so that every part of a graph matters.

Norms are around 1, matrices keep the size of what they multiply, queries and keys are large enough for attention to
look at few cells, decays decay. A name is matched by the first pattern of `TABLE` that is found in it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from conformance.case.recipe import Recipe
from conformance.ggml.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of the table: a draw of `recipe.DRAWS` and its parameters."""

    draw: str
    a: float
    b: float
    by_fan_in: bool = False
    """`b` is the standard deviation of a product with values of order 1: divided by the square root of `ne[0]`."""
    shared: bool = False
    """The first half of each row is the same in all rows."""


_SELECTIVE = 1.5
"""As in `models.weights`: logits of attention then have a standard deviation of about 2."""

# fmt: off
TABLE: tuple[tuple[str, Draw], ...] = (
    (r"rope_freqs|rope_factors", Draw("uniform", 1.0, 8.0)),
    (r"token_embd\.weight$|per_layer_token_embd", Draw("normal", 0.0, 1.0, shared=True)),
    (r"position_embd|token_types|embd.*pos", Draw("normal", 0.0, 0.5)),
    (r"ssm_a\b|ssm_a$", Draw("uniform", -2.0, -0.1)),
    (r"ssm_dt\.bias|ssm_dt_b", Draw("uniform", -2.0, 0.5)),
    (r"ssm_d\b|ssm_d$", Draw("uniform", 0.5, 1.5)),
    (r"conv1d|shortconv\.conv|ssm_conv", Draw("normal", 0.0, 1.0, by_fan_in=True)),
    (r"time_mix_decay\.weight|time_mix_w0", Draw("uniform", -3.0, 0.5)),
    (r"time_mix_decay_w\d", Draw("normal", 0.0, 0.3, by_fan_in=True)),
    (r"time_mix_first|time_mix_r_k", Draw("normal", 0.0, 0.5)),
    (r"time_mix_lerp|channel_mix_lerp", Draw("uniform", 0.1, 0.9)),
    (r"time_mix_(k_k|k_a)", Draw("uniform", 0.5, 1.0)),
    (r"time_mix_(a0|v0)", Draw("uniform", -1.0, 1.0)),
    (r"attn_sinks", Draw("normal", 0.0, 1.0)),
    (r"norm.*\.weight$|norm$|_ln.*\.weight$|ln\.weight$", Draw("uniform", 0.5, 1.5)),
    (r"exp_probs_b", Draw("normal", 0.0, 0.3)),
    (r"\.scale$|_scale|layer_out_scale", Draw("uniform", 0.5, 1.5)),
    (r"\.bias$|_b$", Draw("normal", 0.0, 0.2)),
    (r"attn_[qk](_|\.)", Draw("normal", 0.0, _SELECTIVE, by_fan_in=True)),
    (r"attn_output|attn_out", Draw("normal", 0.0, 2.0, by_fan_in=True)),
    (r"ffn_down", Draw("normal", 0.0, 1.5, by_fan_in=True)),
)
# fmt: on
"""Pattern -> how such a weight is drawn."""
_MATRIX = Draw("normal", 0.0, 1.0, by_fan_in=True)
_VECTOR = Draw("uniform", 0.5, 1.5)


def recipe(case: str, t: Tensor) -> Recipe:
    """How weight `t` of a case is made."""
    default = _VECTOR if t.ne[1:] == (1, 1, 1) else _MATRIX
    draw = next((d for pattern, d in TABLE if re.search(pattern, t.name)), default)
    b = draw.b / math.sqrt(max(1, t.ne[0])) if draw.by_fan_in else draw.b
    block = t.type.blck_size
    return Recipe(case, t.name, draw.draw, draw.a, b, t.ne[0] // 2 // block * block if draw.shared else 0)
