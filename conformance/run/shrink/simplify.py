"""Generate candidates with smaller dimensions, simpler types and simpler values.

Tokens, sequences, heads, rows and cells are all dimensions of some leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case.case import Case, Step
from conformance.ggml import quants
from conformance.ggml.errors import GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.ops.fields import Field
from conformance.ggml.ops.op import DECLARATIONS, lay_out, set_param
from conformance.ggml.ops.rope import ROPE_TYPE
from conformance.ggml.ops.views import view_offset
from conformance.ggml.partial import below
from conformance.ggml.tensor import (
    FIELDS,
    MAX_DIMS,
    VIEW_OPS,
    Bytes,
    Dims,
    Tensor,
    contiguous_nb,
    nbytes,
    nelements,
    new_tensor,
    row_size,
    strided,
)
from conformance.ggml.types import BF16, F16, F32, I32, I64, GGMLType
from conformance.judge.verdict import Result

from .cuts import Recorded, over, renamed, same_place

Axis = tuple[Tensor, int]

MANY = 14
"""Maximum number of axes for all combinations; else only equal sizes are combined."""
TOGETHER = 4
TILES = (32, 64, 256)
"""Elements that kernels handle at a time."""


def dims(recorded: Recorded, _: Result, *, largest: bool = False) -> Iterator[Case]:
    """Yield cases with related dimensions reduced together, to 1 or the `largest` cases first.

    The ops' shape rules decide which are related: a wrong combination raises GraphError and never runs. Cases are
    generated lazily, because a trajectory may have thousands.
    """
    case = recorded.case
    shaped = [n for s in case.steps for n in s.graph if n.op in SHAPED_BY_CALLER]
    leaves = Counter(_leaves_of_steps(case))
    axes = [(t, d) for t in (*leaves, *shaped) for d in range(MAX_DIMS) if t.ne[d] > 1]
    changes: list[tuple[int, dict[Tensor, Dims]]] = []
    for group, unit in _groups(axes):
        for size in _smaller(unit):
            ne = _resized(group, unit, size)
            if ne is not None:
                changes.append((sum(leaves[t] * (prod(ne[t]) - nelements(t)) for t in ne), ne))
    for _less, ne in sorted(changes, key=itemgetter(0), reverse=largest):
        for last in (False, True):
            with suppress(GraphError):
                yield changed(case, Change(ne=ne, last=last))


def shapes(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases in which a leaf that is read through a RESHAPE has that shape itself."""
    case = recorded.case
    pairs = {(t.src[0], t.ne) for s in case.steps for t in s.graph if t.op == "RESHAPE"}
    for leaf in _leaves_of_steps(case):
        for ne in sorted(ne for t, ne in pairs if t is leaf):
            with suppress(GraphError):
                yield changed(case, Change(ne={leaf: ne}))


def _groups(axes: Sequence[Axis]) -> Iterator[tuple[Sequence[Axis], int]]:
    """Yield axes to reduce together, and the unit size of which all are multiples."""
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
    """Return the sizes to try for `unit`, among them those that leave the same rest of a tile.

    A kernel that handles the rest of a row of 257 wrongly also fails with 33, if its tiles have 32 elements.
    """
    alike = {tiles * tile + unit % tile for tile in TILES for tiles in (0, 1, 2)}
    return sorted(n for n in {1, 2, *TILES, *alike, unit // 4, unit // 2, unit - 1} if 0 < n < unit)


def _resized(group: Sequence[Axis], unit: int, size: int) -> dict[Tensor, Dims] | None:
    """Return the new shapes; None if one is not a whole number of blocks."""
    ne: dict[Tensor, Dims] = {}
    for t, d in group:
        now = list(ne.get(t, t.ne))
        now[d] = t.ne[d] // unit * size
        ne[t] = (now[0], now[1], now[2], now[3])
    return None if any(n[0] % t.type.blck_size for t, n in ne.items()) else ne


def elements(case: Case) -> int:
    """Return the number of elements in all leaves."""
    return sum(map(nelements, _leaves_of_steps(case)))


def _leaves_of_steps(case: Case) -> list[Tensor]:
    return [*case.persistent, *(t for s in case.steps for t in s.inputs)]


SIMPLER: tuple[GGMLType, ...] = (F32, F16)
"""Replacement types of a leaf, simplest first."""

Values = NDArray[Any]
SIMPLE: tuple[Callable[[Values], Values], ...] = (
    np.zeros_like,
    np.ones_like,
    lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape),  # counting
    lambda x: np.round(np.clip(np.nan_to_num(x, posinf=4, neginf=-4), -4, 4) * 2) / 2,  # halves
)
"""Replacement values of a leaf, simplest first."""
CONSTANT = 2
"""Number of leading entries of `SIMPLE` that make all rows equal."""


def rank(type_: GGMLType) -> int:
    """Return the complexity of a leaf's type; 0 is the simplest."""
    return (*SIMPLER, BF16).index(type_) if type_ in (*SIMPLER, BF16) else 3 if as_floats(type_) else 0


def may_be_simpler(node: Tensor, i: int) -> bool:
    """Return True if the op accepts source `i`, or all sources of its type, in a simpler type."""
    t = node.src[i]
    assert t is not None
    simpler = [I32] if t.type is I64 else [s for s in SIMPLER if rank(s) < rank(t.type)]
    return any(
        _takes(node, sources, s) for sources in ([t], [s for s in node.src if s and s.type is t.type]) for s in simpler
    )


def _takes(node: Tensor, sources: Sequence[Tensor], type_: GGMLType) -> bool:
    plain = {s: Tensor(type_, s.ne, contiguous_nb(type_, s.ne)) for s in sources}
    try:
        lay_out(_over(node, lambda s: plain.get(s, s)))
    except GraphError:
        return False
    return True


def types(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases with all leaves, those of one type, then each leaf in a simpler type."""
    case = recorded.case
    leaves = [t for t in leaves_of(case) if rank(t.type)]
    groups = [[t for t in leaves if t.type is type_] for type_ in dict.fromkeys(t.type for t in leaves)]
    with suppress(GraphError):
        if long := [t for t in leaves_of(case) if t.type is I64]:
            yield changed(case, Change(types=dict.fromkeys(long, I32)))
    for group in [leaves, *groups, *([t] for t in leaves)]:
        for simple in SIMPLER:
            if group and all(rank(simple) < rank(t.type) for t in group):
                with suppress(GraphError):
                    yield changed(case, Change(types=dict.fromkeys(group, simple)))


def values(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases with simpler values in all leaves, then in each."""
    yield from _plainer(recorded.case, lambda leaves: [leaves, *([t] for t in leaves)])


def each_values(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases with simpler values in one leaf each, least change first."""
    yield from _plainer(recorded.case, lambda leaves: [[t] for t in leaves], least_first=True)


def _plainer(
    case: Case, groups: Callable[[list[Tensor]], list[list[Tensor]]], *, least_first: bool = False
) -> Iterator[Case]:
    leaves = leaves_of(case)
    levels = list(enumerate(SIMPLE))
    for level, make in reversed(levels) if least_first else levels:
        try:
            new = {t: _stored(t, make(_loaded(t, data))) for t, data in leaves.items() if plainness(t, data) > level}
        except GraphError:  # a type without quantiser keeps its values
            continue
        for group in groups(list(new)):
            if group:
                with suppress(GraphError):
                    yield changed(case, Change(data={t: new[t] for t in group}))


def parameters(recorded: Recorded, _: Result) -> Iterator[Case]:
    """Yield cases with ops without an optional source, or with a neutral parameter."""
    case = recorded.case
    nodes = [n for s in case.steps for n in s.graph]
    for op, i in dict.fromkeys((n.op, i) for n in nodes for i in optional_sources(n)):
        with suppress(GraphError):
            yield changed(case, Change(without=(op, i)))
    for op, name in dict.fromkeys((n.op, f.name) for n in nodes for f in parameters_of(n)):
        with suppress(GraphError, ValueError, TypeError):  # a value that the op rejects
            yield changed(case, Change(param=(op, name, neutral(name))))


def parameters_of(node: Tensor) -> list[Field]:
    """Return the parameters of a node that are not neutral."""
    declared = DECLARATIONS.get(node.op)
    fields = declared.fields if declared and node.op not in VIEW_OPS else ()
    return [f for f in fields if f.name not in {"", "op"} and not _is_neutral(node, f.name, f.of(node.op_params))]


def _is_neutral(node: Tensor, parameter: str, value: object) -> bool:
    if parameter == TURNED:
        return turns_all(node)
    return not any(value) if isinstance(value, tuple) else value == neutral(parameter)


def turns_all(node: Tensor) -> bool:
    """Return True if ROPE rotates whole rows, as far as its mode allows."""
    a = node.src[0]
    return a is not None and node.params.n_dims == a.ne[0] // _share(node)


def _share(node: Tensor) -> int:
    """Return the row elements per unit of `n_dims`: 2 for VISION, else 1."""
    return 2 if node.params.mode == ROPE_TYPE.VISION else 1


def neutral(parameter: str) -> int:
    """Return the value with which a parameter of this name has no effect."""
    return NEUTRAL.get(parameter, 0)


TURNED = "n_dims"
"""ROPE's parameter for the rotated part of a row."""
NEUTRAL = {"scale": 1, "freq_scale": 1, "attn_factor": 1, "s": 1, "freq_base": 10_000, "n_groups": 1} | dict.fromkeys(
    ("stride", "stride0", "stride1", "dilation0", "dilation1", "s0", "s1", "s2", "d0", "d1", "d2", "k0", "k1"), 1
)
"""Neutral or usual values of parameters, where that is not 0."""


def optional_sources(node: Tensor) -> list[int]:
    """Return the indices of a node's optional sources that are present."""
    declared = DECLARATIONS.get(node.op)
    given = [i for i, s in enumerate(node.src) if s is not None]
    return [i for i in given if declared and declared.n_src <= i < len(declared.src)]


def words(case: Case) -> int:
    """Count optional sources and parameters that are not neutral."""
    return sum(len(optional_sources(n)) + len(parameters_of(n)) for s in case.steps for n in s.graph)


def plainness(t: Tensor, data: Bytes) -> int:
    """Return the index in `SIMPLE` that matches the values; its length if there is none."""
    if not nelements(t):
        return 0
    row = new_tensor(t.type, t.ne[0])
    first = data[: nbytes(row)]  # usually decides; re-encoding all values is slow
    for level, make in enumerate(SIMPLE):
        if _are(make, row, first) and (
            np.array_equal(data, np.resize(first, data.size)) if level < CONSTANT else _are(make, t, data)
        ):
            return level
    return len(SIMPLE)


def _are(make: Callable[[Values], Values], t: Tensor, data: Bytes) -> bool:
    """Return True if `make` changes no value; False for a type without quantiser."""
    with suppress(GraphError):
        return np.array_equal(_stored(t, make(_loaded(t, data))), data)
    return False


def leaves_of(case: Case) -> Mapping[Tensor, Bytes]:
    """Return every leaf of every step with its bytes."""
    return {**case.persistent, **{t: data for s in case.steps for t, data in s.inputs.items()}}


def _loaded(t: Tensor, data: Bytes) -> Values:
    raw = strided(data, t)
    return quants.to_float(t.type, raw) if as_floats(t.type) else raw.copy()


def _stored(t: Tensor, x: Values) -> Bytes:
    return _bytes(quants.from_float(t.type, x) if as_floats(t.type) else x)


def _bytes(x: Values) -> Bytes:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


SHAPED_BY_CALLER = frozenset({"VIEW", "RESHAPE", "CONT", "REPEAT", "TOP_K"})
"""Ops whose constructor takes the shape of the result."""
INDEXES: dict[str, tuple[int, int, int]] = {
    "GET_ROWS": (1, 0, 1),
    "SET_ROWS": (1, 2, 1),
    "MUL_MAT_ID": (2, 0, 2),
    "ADD_ID": (2, 1, 1),
}
"""Op -> its index src, the src that is indexed, and along which dimension."""


@dataclass(frozen=True, slots=True)
class Change:
    """A modification of a case."""

    ne: Mapping[Tensor, Dims] = field(default_factory=dict)
    """Leaf, or node shaped by its caller -> its new shape: smaller, repeated, or as large."""
    types: Mapping[Tensor, GGMLType] = field(default_factory=dict)
    """Leaf -> its new type; the values are converted."""
    data: Mapping[Tensor, Bytes] = field(default_factory=dict)
    """Leaf of unchanged shape and type -> its new bytes."""
    without: tuple[str, int] | None = None
    """An op, and the index of the source to remove from all its nodes."""
    param: tuple[str, str, int] | None = None
    """An op, a ggml parameter name and its new value in all nodes of the op."""
    last: bool = False
    """True to retain the last elements of a shortened dimension instead of the first."""


def changed(case: Case, change: Change) -> Case:
    """Return `case` with `change` applied in every step, without view ops that became no-ops.

    Raises:
        GraphError: an op rejects its new sources, or indices are out of range.
    """
    persistent: dict[Tensor, Tensor] = {}
    bytes_of: dict[Tensor, Bytes] = {}
    for t, data in case.persistent.items():
        persistent[t], leaf_data = _leaf(t, data, change)
        bytes_of[persistent[t]] = leaf_data
    steps = [_step(step, persistent, change) for step in case.steps]
    if change.without is not None:
        used = {t for s in steps for t in s.graph.tensors()}
        bytes_of = {t: data for t, data in bytes_of.items() if t in used}
        for s in steps:
            s.inputs = {t: data for t, data in s.inputs.items() if t in used}
        persistent = {t: new for t, new in persistent.items() if new in used}
    placement = {persistent[t]: p for t, p in case.placement.items() if t in persistent}
    return renamed(replace(case, persistent=bytes_of, steps=steps, placement=placement))


def _step(step: Step, persistent: Mapping[Tensor, Tensor], change: Change) -> Step:
    new = dict(persistent)
    inputs: dict[Tensor, Bytes] = {}
    for t, data in step.inputs.items():
        new[t], inputs[new[t]] = _leaf(t, data, change)
    nodes: list[Tensor] = []
    for t in step.graph:
        node = _node(t, new, change)
        under = below(node) if node.op in VIEW_OPS else None
        if under is not None and same_place(node, under) and t not in step.outputs:
            node = under
        else:
            nodes.append(node)
        new[t] = node
    for node in nodes:
        _fit_indices(node, inputs)
    return Step(Graph(nodes), inputs, tuple(new[t] for t in step.outputs))


def _leaf(t: Tensor, data: Bytes, change: Change) -> tuple[Tensor, Bytes]:
    ne, type_ = change.ne.get(t, t.ne), change.types.get(t, t.type)
    leaf = Tensor(type_, ne, contiguous_nb(type_, ne), flags=t.flags, name=t.name)
    if t in change.data:
        return leaf, change.data[t]
    if ne != t.ne and nelements(leaf) != nelements(t):
        blocks = t.type.blck_size
        have, want = (t.ne[0] // blocks, *t.ne[1:]), (ne[0] // blocks, *ne[1:])
        if all(w % h == 0 for h, w in zip(have, want, strict=True)):
            whole = strided(data, t)
            times = tuple(w // h for h, w in zip(have, want, strict=True))[::-1]
            return leaf, _bytes(np.tile(whole, (*times, *(1,) * (whole.ndim - len(times)))))
        cut = tuple(slice(h - w, h) if change.last else slice(w) for h, w in zip(have, want, strict=True))[::-1]
        data = _bytes(strided(data, t)[cut])
    if type_ is not t.type:
        raw = strided(data, Tensor(t.type, ne, contiguous_nb(t.type, ne)))
        data = _bytes(raw.astype("<i4") if t.type is I64 else quants.from_float(type_, quants.to_float(t.type, raw)))
    return leaf, data


def _node(t: Tensor, new: Mapping[Tensor, Tensor], change: Change) -> Tensor:
    if any(s not in new for s in t.src if s is not None and s is not t):
        raise GraphError(f"{t}: reads a leaf that is a view of another, which stays as it is")
    copy = _over(t, new.__getitem__)
    copy.ne = _ne(t, new, change)
    if change.without is not None and t.op == change.without[0]:
        copy.src = _without(copy.src, change.without[1])
    if change.param is not None and t.op == change.param[0]:
        set_param(copy, *change.param[1:])
    if t.op == "VIEW":
        _place(t, copy)
    if TURNED in FIELDS[t.op]:
        _turn_all(t, copy)
    lay_out(copy)
    return copy


def _over(t: Tensor, source: Callable[[Tensor], Tensor]) -> Tensor:
    """Copy a node as `over` does; ggml_add does not become ggml_add_cast to the old type."""
    copy = over(t, source)
    first = t.src[0] if t.op == "ADD" else None
    if first is not None and first.type is t.type:
        copy.type = source(first).type
    return copy


def _without(src: tuple[Tensor | None, ...], i: int) -> tuple[Tensor | None, ...]:
    left = [None if k == i else s for k, s in enumerate(src)]
    while left and left[-1] is None:
        left.pop()
    return tuple(left)


def _ne(t: Tensor, new: Mapping[Tensor, Tensor], change: Change) -> Dims:
    """Return the proposed shape: the requested one, or with the source's new dimensions."""
    if t in change.ne or t.op not in SHAPED_BY_CALLER:
        return change.ne.get(t, t.ne)
    a = t.src[0]
    if a is None or a.ne == new[a].ne or t.op == "REPEAT":
        return t.ne
    a0, a1, a2, a3 = (now if mine == was else mine for mine, was, now in zip(t.ne, a.ne, new[a].ne, strict=True))
    return a0, a1, a2, a3


def _place(t: Tensor, copy: Tensor) -> None:
    """Set strides and offset of a VIEW whose parent may have new strides."""
    old, now = t.src[0], copy.src[0]
    assert old is not None
    assert now is not None
    nb = [now.nb[0], 0, 0, 0]
    for d in range(1, MAX_DIMS):
        same = next((j for j in range(1, MAX_DIMS) if t.nb[d] == old.nb[j]), None)
        own = row_size(t.type, t.ne[0]) if d == 1 else t.nb[d - 1] * t.ne[d - 1]
        if same is not None:
            nb[d] = now.nb[same]
        elif t.nb[d] == own:
            nb[d] = row_size(copy.type, copy.ne[0]) if d == 1 else nb[d - 1] * copy.ne[d - 1]
        else:
            nb[d] = t.nb[d]
    copy.nb = (nb[0], nb[1], nb[2], nb[3])
    rest, offset = view_offset(t), 0
    for j in sorted(range(MAX_DIMS), key=lambda j: (-old.nb[j], j)):
        index, rest = divmod(rest, old.nb[j]) if old.nb[j] else (0, rest)
        offset += min(index, max(now.ne[j] - 1, 0)) * now.nb[j]
    offset += rest
    set_param(copy, "offset", offset)


def _turn_all(t: Tensor, copy: Tensor) -> None:
    """Rotate whole rows again if the original rotation covers whole rows."""
    now = copy.src[0]
    assert now is not None
    if turns_all(t) or (t.params.n_dims and not copy.params.n_dims):
        set_param(copy, TURNED, now.ne[0] // _share(copy))


def _fit_indices(node: Tensor, inputs: dict[Tensor, Bytes]) -> None:
    """Wrap indices that are out of range; GraphError if SET_ROWS would write a row twice."""
    if node.op not in INDEXES:
        return
    i, among, dim = INDEXES[node.op]
    index, rows = node.src[i], node.src[among]
    if index is None or rows is None or index not in inputs or index.type not in {I32, I64}:
        return
    held = inputs[index].view("<i4" if index.type is I32 else "<i8")
    limit = rows.ne[dim]
    if not held.size or held.max() < limit:
        return
    if node.op == "SET_ROWS" and index.ne[0] > limit:
        raise GraphError(f"{node}: {index.ne[0]} rows do not fit {limit}")
    folded = np.broadcast_to(np.arange(index.ne[0]) % limit, index.shape) if node.op == "SET_ROWS" else held % limit
    inputs[index] = _bytes(folded.astype(held.dtype))


def as_floats(type_: GGMLType) -> bool:
    """Return True if values of the type can be converted to F32."""
    return type_ is F32 or type_.dtype is None or type_.dtype.kind == "f"
