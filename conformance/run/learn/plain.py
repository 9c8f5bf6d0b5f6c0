"""Plain cases of the family `ops`: one node over leaves without gaps; of products also permuted operands."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.ggml.arithmetic import key_of
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import Tensor, computes, is_contiguous
from conformance.suite import ops
from conformance.suite.family import Level, expand, with_seed

_EACH = 3
"""Cases of a key that the family offers."""
_FOREIGN = ("data", "hide", "inplace", "special", "hint", "use")
"""Keys of ids whose cases are made to show something else than rounding."""
_PRODUCTS = (
    "MUL_MAT-{}+f32-a=[256x33,b=256|2048x33,b=2048]x[1|2|33]",
    "MUL_MAT-{}+f32-a=256x33x2,b=256x[1|2|25]x4,[va=p0213|vb=p0213|va=p0213,vb=p0213]",
    "MUL_MAT-{}+f32-a=256x33,b=256x[1|2|33],prec=F32",
    "MUL_MAT_ID-{}+f32-as=256x33x4,n_used=2,n_tokens=[1|2|33]",
)
_ATTENTION = "FLASH_ATTN_EXT-{}-q=64x[1|3|33]x4,k=64x[32|255]x2[|,prec=F32]"


def plain(level: Level) -> dict[str, list[str]]:
    """The plain cases of the family `ops` at a level: key of the node -> ids, smallest first."""
    ids = ops.ids(level)
    types = {op: _types(ids, op) for op in ("MUL_MAT", "FLASH_ATTN_EXT")}
    weights = dict.fromkeys(t.partition("+")[0] for t in types["MUL_MAT"])
    patterns = [p.format(t) for t in weights for p in _PRODUCTS] + [
        _ATTENTION.format(t) for t in types["FLASH_ATTN_EXT"]
    ]
    found: dict[str, list[str]] = {}
    for case_id in (with_seed(ops.NAME, body) for p in patterns for body in expand(p)):
        if (node := _node(case_id)) is not None:
            found.setdefault(key_of(node), []).append(case_id)
    offered: dict[str, list[str]] = {}
    for case_id in ids:
        node = _node(case_id)
        if node is not None and all(s is None or (s.op == "NONE" and is_contiguous(s)) for s in node.src):
            offered.setdefault(key_of(node), []).append(case_id)
    for key, each in offered.items():
        found.setdefault(key, [each[i * (len(each) - 1) // max(1, _EACH - 1)] for i in range(_EACH)])
    return {key: list(dict.fromkeys(each)) for key, each in found.items()}


def _types(ids: Sequence[str], op: str) -> list[str]:
    found = (i.partition("/")[2].split("-")[:2] for i in ids)
    return list(dict.fromkeys(parts[1] for parts in found if parts[0] == op))


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
