"""Plain cases of the family `ops`: one node over leaves without gaps; of products also permuted operands."""

from __future__ import annotations

from contextlib import suppress

from conformance.ggml.arithmetic import key_of
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import Tensor, computes, is_contiguous
from conformance.suite import FAMILIES, ops
from conformance.suite.family import Level, with_seed
from conformance.suite.grid import Grid, Keys, grid, ids_of_rows, operands, points, shapes

_EACH = 3
"""Cases of a key that the family offers."""
_FOREIGN = ("data", "hide", "inplace", "special", "hint", "use")
"""Keys of ids whose cases are made to show something else than rounding."""
_PERMUTED = points("- va=p0213 vb=p0213 va=p0213,vb=p0213")


def _products(weights: str) -> tuple[Grid, ...]:
    types = operands(weights, "f32")
    batch: Keys = {"a": "256x33x2", "b": shapes("256", "1 2 25", "4"), "layout": _PERMUTED}
    return (
        grid("MUL_MAT", types, a="256x33", b=shapes("256", "1 2 33")),
        grid("MUL_MAT", types, a="2048x33", b=shapes("2048", "1 2 33")),
        grid("MUL_MAT", types, **batch),
        grid("MUL_MAT", types, a="256x33", b=shapes("256", "1 2 33"), prec="F32"),
        grid("MUL_MAT", types, **batch, prec="F32"),
        grid("MUL_MAT_ID", types, as_="256x33x4", n_used=2, n_tokens="1 2 33"),
    )


def _attention(caches: str) -> Grid:
    return grid("FLASH_ATTN_EXT", caches, q=shapes("64", "1 3 33", "4"), k=shapes("64", "32 255", "2"), prec="- F32")


_ANGLES = grid(
    "ROPE ROPE_BACK", "f32 f16", ne="128x4x9", mode="NORMAL NEOX", positions=points("to=512 from=2000,to=9000")
)
"""An angle is off in proportion to the position."""


def plain(level: Level) -> dict[str, list[str]]:
    """Plain cases for the kernels that the cases of a level use, in any family: key -> ids, smallest first."""
    used = _used(level)
    weights = dict.fromkeys(t for key in used if key.startswith("MUL_MAT") for t in _types(key)[:1])
    caches = dict.fromkeys("+".join(_types(key)[1:]) for key in used if key.startswith("FLASH_ATTN_EXT-"))
    grids = (*(each for t in weights for each in _products(t)), *map(_attention, caches), _ANGLES)
    found: dict[str, list[str]] = {}
    for case_id in (with_seed(ops.NAME, body) for body in ids_of_rows(grids)):
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
