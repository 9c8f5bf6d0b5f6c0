"""Candidates with smaller dimensions, simpler types and simpler values.

Tokens, sequences, heads, rows and cells all are dimensions of some leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case
from conformance.ggml import quants
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import MAX_DIMS, Bytes, Dims, Tensor, nelements, strided
from conformance.ggml.types import BF16, F16, F32, GGMLType
from conformance.judge.verdict import Result

from .cuts import Recorded
from .reshape import SHAPED_BY_CALLER, Change, as_floats, changed

Axis = tuple[Tensor, int]

MANY = 14
"""Axes up to which every choice of a few of them is tried; beyond, those of equal size go together."""
TOGETHER = 4


def dims(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Dimensions that belong together are cut together, to 1 first.

    Which belong together the rules of the ops know: a wrong choice makes no legal graph and is never run.
    """
    case = recorded.case
    axes = _axes(case)
    made: list[tuple[int, Case]] = []
    for group, unit in _groups(axes):
        for size in _smaller(unit):
            ne = _resized(group, unit, size)
            if ne is None:
                continue
            for last in (False, True):
                with suppress(GraphError):
                    made.append(_sized(changed(case, Change(ne=ne, last=last))))
    made.sort(key=lambda pair: pair[0])
    yield from (c for _, c in made)


def shapes(recorded: Recorded, _: Result) -> Iterator[Case]:
    """A leaf that is read through a RESHAPE has that shape itself."""
    case = recorded.case
    pairs = {(t.src[0], t.ne) for s in case.steps for t in s.graph if t.op == "RESHAPE"}
    for leaf in _leaves_of_steps(case):
        for ne in sorted(ne for t, ne in pairs if t is leaf):
            with suppress(GraphError):
                yield changed(case, Change(ne={leaf: ne}))


def _axes(case: Case) -> list[Axis]:
    shaped = [n for s in case.steps for n in s.graph if n.op in SHAPED_BY_CALLER]
    return [(t, d) for t in (*_leaves_of_steps(case), *shaped) for d in range(MAX_DIMS) if t.ne[d] > 1]


def _groups(axes: Sequence[Axis]) -> Iterator[tuple[Sequence[Axis], int]]:
    """Axes to cut together, and the size that stands for one unit in each: all are whole multiples of it."""
    by_size: dict[int, list[Axis]] = {}
    for t, d in axes:
        by_size.setdefault(t.ne[d], []).append((t, d))
    for size, equal in by_size.items():
        if len(equal) > 1:
            yield equal, size
        multiples = [(t, d) for t, d in axes if t.ne[d] % size == 0]
        if len(multiples) > len(equal):
            yield multiples, size
    pools = [axes] if len(axes) <= MANY else list(by_size.values())
    for pool in pools:
        for n in range(1, min(TOGETHER, len(pool)) + 1) if len(pool) <= MANY else (1,):
            for group in combinations(pool, n):
                unit = min(t.ne[d] for t, d in group)
                if all(t.ne[d] % unit == 0 for t, d in group):
                    yield group, unit


def _smaller(unit: int) -> list[int]:
    return sorted({n for n in (1, 2, 32, 64, 256, unit // 4, unit // 2, unit - 1) if 0 < n < unit})


def _resized(group: Sequence[Axis], unit: int, size: int) -> dict[Tensor, Dims] | None:
    """The new shapes; None where one is no whole number of blocks."""
    ne: dict[Tensor, Dims] = {}
    for t, d in group:
        now = list(ne.get(t, t.ne))
        now[d] = t.ne[d] // unit * size
        ne[t] = (now[0], now[1], now[2], now[3])
    return None if any(n[0] % t.type.blck_size for t, n in ne.items()) else ne


def _sized(case: Case) -> tuple[int, Case]:
    return elements(case), case


def elements(case: Case) -> int:
    """Elements of all leaves."""
    return sum(map(nelements, _leaves_of_steps(case)))


def _leaves_of_steps(case: Case) -> list[Tensor]:
    return [*case.persistent, *(t for s in case.steps for t in s.inputs)]


SIMPLER: tuple[GGMLType, ...] = (F32, F16)
"""What a leaf's type is replaced by, the simplest first."""

Values = NDArray[Any]
Kind = tuple[str, Callable[[Values], Values]]

SIMPLE: tuple[Kind, ...] = (
    ("zeros", np.zeros_like),
    ("ones", np.ones_like),
    ("counting", lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape)),
    ("halves", lambda x: np.clip(np.round(np.nan_to_num(x, posinf=4, neginf=-4) * 2) / 2, -4, 4)),
)
"""What a leaf's values are replaced by, the simplest first."""


def rank(type_: GGMLType) -> int:
    """How simple a leaf's type is: 0 is the simplest."""
    return (*SIMPLER, BF16).index(type_) if type_ in (*SIMPLER, BF16) else 3 if as_floats(type_) else 0


def types(recorded: Recorded, _: Result) -> Iterator[Case]:
    """All leaves of a type, then each by itself, in a simpler type."""
    case = recorded.case
    leaves = [t for t in _leaves(case) if rank(t.type)]
    groups = [[t for t in leaves if t.type is type_] for type_ in dict.fromkeys(t.type for t in leaves)]
    for group in [leaves, *groups, *([t] for t in leaves)]:
        for simple in SIMPLER:
            if group and all(rank(simple) < rank(t.type) for t in group):
                with suppress(GraphError):
                    yield changed(case, Change(types=dict.fromkeys(group, simple)))


def values(recorded: Recorded, _: Result) -> Iterator[Case]:
    """All leaves, then each by itself, with simpler values."""
    case = recorded.case
    leaves = _leaves(case)
    for level, (_name, make) in enumerate(SIMPLE):
        try:
            new = {t: _stored(t, make(_loaded(t, data))) for t, data in leaves.items() if plainness(t, data) > level}
        except GraphError:  # a type that ggml has no reference quantiser for keeps its values
            continue
        for group in [list(new), *([t] for t in new)]:
            if group:
                with suppress(GraphError):
                    yield changed(case, Change(data={t: new[t] for t in group}))


def plainness(t: Tensor, data: Bytes) -> int:
    """Which of `SIMPLE` the values are; its length where they are none."""
    if not nelements(t):
        return 0
    now = _loaded(t, data)
    for level, (_name, make) in enumerate(SIMPLE):
        with suppress(GraphError):
            if np.array_equal(_stored(t, make(now)), data):
                return level
    return len(SIMPLE)


def _leaves(case: Case) -> Mapping[Tensor, Bytes]:
    return {**case.persistent, **{t: data for s in case.steps for t, data in s.inputs.items()}}


def _loaded(t: Tensor, data: Bytes) -> Values:
    raw = strided(data, t)
    return quants.to_float(t.type, raw) if as_floats(t.type) else raw.copy()


def _stored(t: Tensor, x: Values) -> Bytes:
    raw = quants.from_float(t.type, x) if as_floats(t.type) else x
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
