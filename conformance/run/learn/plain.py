"""Plain cases of the family `ops`: one node over leaves without gaps; of products also permuted operands."""

from __future__ import annotations

from contextlib import suppress

from conformance.ggml.arithmetic import key_of
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import Tensor, computes, is_contiguous
from conformance.suite import FAMILIES, ops
from conformance.suite.family import Level, expand, with_seed

_EACH = 3
"""Cases of a key that the family offers."""
_FOREIGN = ("data", "hide", "inplace", "special", "hint", "use")
"""Keys of ids whose cases are made to show something else than rounding."""
_PRODUCTS = (
    "MUL_MAT-{}+f32-a=[256x33,b=256|2048x33,b=2048]x[1|2|33]",
    "MUL_MAT-{}+f32-a=256x33x2,b=256x[1|2|25]x4[|,va=p0213|,vb=p0213|,va=p0213,vb=p0213]",
    "MUL_MAT-{}+f32-a=256x33,b=256x[1|2|33],prec=F32",
    "MUL_MAT-{}+f32-a=256x33x2,b=256x[1|2|25]x4[|,va=p0213|,vb=p0213|,va=p0213,vb=p0213],prec=F32",
    "MUL_MAT_ID-{}+f32-as=256x33x4,n_used=2,n_tokens=[1|2|33]",
)
_ATTENTION = "FLASH_ATTN_EXT-{}-q=64x[1|3|33]x4,k=64x[32|255]x2[|,prec=F32]"

_ANGLES = "[ROPE|ROPE_BACK]-[f32|f16]-ne=128x4x9,mode=[NORMAL|NEOX],[to=512|from=2000,to=9000]"
"""An angle is off in proportion to the position."""


def plain(level: Level) -> dict[str, list[str]]:
    """Plain cases for the kernels that the cases of a level use, in any family: key -> ids, smallest first."""
    used = _used(level)
    weights = dict.fromkeys(t for key in used if key.startswith("MUL_MAT") for t in _types(key)[:1])
    caches = dict.fromkeys("+".join(_types(key)[1:]) for key in used if key.startswith("FLASH_ATTN_EXT-"))
    patterns = [p.format(t) for t in weights for p in _PRODUCTS] + [_ATTENTION.format(t) for t in caches]
    patterns.append(_ANGLES)
    found: dict[str, list[str]] = {}
    for case_id in (with_seed(ops.NAME, body) for p in patterns for body in expand(p)):
        if (node := _node(case_id)) is not None and (key := key_of(node)) in used:
            found.setdefault(key, []).append(case_id)
    offered: dict[str, list[str]] = {}
    for case_id in ops.ids("standard"):
        node = _node(case_id)
        if node is not None and all(s is None or (s.op == "NONE" and is_contiguous(s)) for s in node.src):
            offered.setdefault(key_of(node), []).append(case_id)
    for key, each in offered.items():
        if key in used:
            found.setdefault(key, [each[i * (len(each) - 1) // max(1, _EACH - 1)] for i in range(_EACH)])
    return {key: list(dict.fromkeys(each)) for key, each in found.items()}


def _used(level: Level) -> set[str]:
    """The keys of all nodes that compute in the cases of a level."""
    used: set[str] = set()
    for family in FAMILIES.values():
        for case_id in family.ids(level):
            with suppress(ConformanceError):  # what this machine lacks to make a case
                used.update(key_of(n) for s in family.build(case_id).steps for n in s.graph if computes(n))
    return used


def _types(key: str) -> list[str]:
    """The types in a key."""
    return key.partition("-")[2].partition("@")[0].split("+")


def _node(case_id: str) -> Tensor | None:
    """The one node that the case computes; None for a case of several, or one that shows something else."""
    try:
        case = ops.build(case_id)
    except ConformanceError:  # a type whose blocks do not fit the shape
        return None
    if any(k in case.params for k in _FOREIGN):
        return None
    nodes = [n for n in case.steps[0].graph if computes(n)]
    return nodes[0] if len(nodes) == 1 and len(case.steps[0].outputs) == 1 else None
