"""Candidates with simpler types and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case
from conformance.ggml import quants
from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Bytes, Tensor, nelements, strided
from conformance.ggml.types import BF16, F16, F32, GGMLType
from conformance.judge.verdict import Result

from .keep import Recorded
from .reshape import Change, as_floats, changed

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
