"""Samples: what a template fixes of a graph, and the numbers that it leaves open.

The structure of a graph is its ops, `op_params`, types, flags and edges, with the kind of each extent (0, 1 or more)
and the order of strides, so that broadcasting and permutation never change within a template. Its numbers are every
`ne`, `nb` and `view_offs`. Tensor names are never read.

    numbers = ne[0..3] nb[0..3] view_offs | ne[0..3] nb[0..3] view_offs | ... | offset of each VIEW from its src[0]
              tensors[0]: slots 0 to 8     tensors[1]: slots 9 to 17          from slot 9 * len(tensors) on
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from conformance.ggml.ops.views import view_offset
from conformance.ggml.tensor import Dims, Tensor

OFFSET_PARAMS = 2
"""Leading `op_params` of a VIEW that are its offset, which varies, unlike all others."""
SLOTS = 9
"""Numbers of one tensor: ne, nb, view_offs."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A graph as an instance of a template."""

    structure: tuple[Hashable, ...]
    """Per tensor, everything that is equal in all graphs of a template; edges are indices."""
    numbers: tuple[int, ...]
    """By slot."""
    kinds: tuple[tuple[int, ...], ...]
    """Kinds of the extents of `row_selectors`, which `structure` omits."""


def sample_of(tensors: Sequence[Tensor], nodes: Collection[Tensor]) -> Sample:
    """Return the sample of the graph with `nodes`, whose `tensors()` are `tensors`."""
    selectors = row_selectors(tensors)
    numbers: list[int] = []
    for t in tensors:
        numbers += t.ne
        numbers += t.nb
        numbers.append(t.view_offs)
    numbers += [view_offset(t) for t in tensors if t.op == "VIEW"]
    kinds = tuple([_kind(t.ne) for t in tensors if t in selectors])
    return Sample(_structure(tensors, set(nodes), selectors), tuple(numbers), kinds)


def _structure(
    tensors: Sequence[Tensor], nodes: AbstractSet[Tensor], selectors: AbstractSet[Tensor]
) -> tuple[Hashable, ...]:
    index: dict[Tensor | None, int] = {t: i for i, t in enumerate(tensors)}
    index[None] = -1
    return tuple(
        (
            t.op,
            t.op_params if t.op != "VIEW" else t.op_params[OFFSET_PARAMS:],
            t.type.id,
            t.flags,
            index[t.view_src],
            tuple([index[s] for s in t.src]),
            t in nodes,
            _kind(t.ne) if t not in selectors else tuple([n > 0 for n in t.ne]),
            _order(t.nb),
        )
        for t in tensors
    )


def row_selectors(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Return leaves that only select rows of a computed tensor, and their dependents.

    These are the tokens of a batch whose results are wanted: one or more. Rows are computed independently, so a single
    row needs no template of its own; if an op or an emitter treats it differently, guards detect that.
    """
    ids: set[Tensor] = set()
    other: set[Tensor] = set()
    for t in tensors:
        for i, s in enumerate(t.src):
            if s is not None and s.op == "NONE":
                (ids if t.op == "GET_ROWS" and i == 1 and _is_computed(t.src[0]) else other).add(s)
    rows = {t for t in ids - other if t.view_src is None}
    if rows:
        for t in tensors:
            if t.view_src in rows or not rows.isdisjoint(t.src):
                rows.add(t)
    return rows


def _is_computed(t: Tensor | None) -> bool:
    return t is not None and t.root.op != "NONE"


def _kind(ne: Dims) -> tuple[int, ...]:
    return tuple([n if n < 2 else 2 for n in ne])  # noqa: FURB136  # min() takes three times as long


def _order(nb: Dims) -> tuple[int, ...] | None:
    """Return dimensions in order of stride; None for the usual order."""
    return None if nb[0] <= nb[1] <= nb[2] <= nb[3] else tuple(sorted(range(4), key=nb.__getitem__))
