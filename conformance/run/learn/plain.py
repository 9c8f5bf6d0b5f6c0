"""Select plain `ops` cases: one node over contiguous leaves, or permuted ones for products."""

from __future__ import annotations

from contextlib import suppress

from conformance.ggml.arithmetic import key_of
from conformance.ggml.errors import ConformanceError
from conformance.ggml.tensor import Tensor, computes, is_contiguous
from conformance.suite import FAMILIES, ops
from conformance.suite.family import Level, with_seed
from conformance.suite.grid import Grid, Keys, grid, ids_of_rows, operands, points, shapes

_EACH = 3
"""Number of existing `ops` cases per key."""
_FOREIGN = ("data", "hide", "inplace", "special", "hint", "use")
"""Parameters of cases that test something other than rounding."""
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
"""The error of an angle is proportional to the position."""


def plain(level: Level) -> dict[str, list[str]]:
    """Return plain cases for the kernels used at a level: key -> ids, smallest first."""
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
    """Return the keys of all computing nodes in the cases of a level."""
    used: set[str] = set()
    for family in FAMILIES.values():
        for case_id in family.ids(level):
            with suppress(ConformanceError):  # this machine cannot build the case
                used.update(key_of(n) for s in family.build(case_id).steps for n in s.graph if computes(n))
    return used


def _types(key: str) -> list[str]:
    """Return the types in a key."""
    return key.partition("-")[2].partition("@")[0].split("+")


def _node(case_id: str) -> Tensor | None:
    """Return the only computing node of a case; None for several, or other purposes."""
    try:
        case = ops.build(case_id)
    except ConformanceError:  # the shape is not a multiple of the type's blocks
        return None
    if any(k in case.params for k in _FOREIGN):
        return None
    nodes = [n for n in case.steps[0].graph if computes(n)]
    return nodes[0] if len(nodes) == 1 and len(case.steps[0].outputs) == 1 else None
