"""Parse `ops/OP-types-key=value,key=value@seed` and build the graph of an op case.

`OP` is ggml's name, with its sub-op after a dot (`UNARY.GELU`, `GLU.SWIGLU`); `types` are the operands' types joined by
`+`; `OpCases` lists the keys of an op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError, unknown
from conformance.ggml.ops.build import Builder
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import (
    FLAG_INPUT,
    Bytes,
    Dims,
    Tensor,
    contiguous_nb,
    is_contiguous,
    nbytes,
    new_tensor,
    strided,
)
from conformance.ggml.types import F32, TYPES, GGMLType
from conformance.suite import family
from conformance.suite.data import Fill, chosen, encode, whole, with_last, with_repeat
from conformance.suite.grid import Axis, Grid, Row

from .regimes import Regime, regimes

NAME = "ops"
GENERATOR = 3
"""Increment when the bytes of any id change."""

FLOATS = "f32 f16 bf16"
BLOCKS_32 = "q4_0 q4_1 q5_0 q5_1 q8_0 mxfp4"
BLOCKS_256 = "q2_K q3_K q4_K q5_K q6_K"
BLOCKS = f"{BLOCKS_32} {BLOCKS_256}"
"""Types for the axes of grids."""
PLAIN = f"{FLOATS} {BLOCKS}"
RARE_STORED = "iq4_nl q1_0 q2_0 nvfp4 tq1_0 tq2_0 iq4_xs"
RARE = f"{RARE_STORED} iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s"
"""Other block types, for rows of a multiple of 256; ggml's CPU can quantise `RARE_STORED`."""


def same(types: str) -> str:
    """Return each type twice, for two operands."""
    return " ".join(f"{t}+{t}" for t in types.split())


VIEWS = "- pad off rows slab part p0213"
"""Layouts of most operands in covering arrays."""
ONE_ROW = "pad rows"
"""Layouts that give a dimension of one element a stride that no contiguous tensor has."""
INPLACE = "inplace=|leaf|mid|input"
"""Key: overwrite a persistent tensor (`leaf`), the previous result (`mid`) or an `input`."""

LAYOUTS = "pad, off, rows, slab, part, flat or nothing; then permutes like p0213, joined by dots"
SOURCE = "src"
"""Prefix of keys such as `src1=pad`, which set the layout of a source without its own key."""
DST = "dst"
"""Key: `between` places the output between two live results, to find writes out of bounds."""
ALIGNMENT = 32
"""Multiple in bytes to which ggml's CPU pads the size of a result."""


@dataclass(frozen=True, slots=True)
class OpId:
    """A parsed id."""

    id: str
    op: str
    types: tuple[GGMLType, ...]
    values: Mapping[str, Any]
    given: Mapping[str, str]
    """Keys that appear in the id, as text."""
    seed: int


def parse(case_id: str, known: Mapping[str, OpCases]) -> OpId:
    """Parse an id; UsageError names the invalid part and the valid values."""
    body, seed = family.split_id(case_id, NAME, "OP-types-key=value,key=value")
    op, _, rest = body.partition("-")
    types_text, _, keys_text = rest.partition("-")
    cases = known.get(op)
    if cases is None:
        raise unknown(f"case {case_id!r}: op", op, known)
    names = types_text.split("+")
    if len(names) != len(cases.types) or any(n not in TYPES for n in names):
        raise UsageError(
            f"case {case_id!r}: types of {', '.join(cases.types)} joined by + expected, {types_text!r} found; "
            f"types: {', '.join(TYPES)}"
        )
    values, given = family.read_keys(case_id, keys_text, cases.keys)
    return OpId(case_id, op, tuple(TYPES[n] for n in names), values, given, seed)


class Bench:
    """Builds one case; weights and caches are persistent (`keep`), other leaves are inputs."""

    __slots__ = ("b", "first_nodes", "id", "inputs", "laid", "layouts", "persistent", "regime", "suffix", "types", "v")

    def __init__(self, op_id: OpId, layouts: Mapping[str, str] | None = None) -> None:
        """Create a bench; `layouts` maps leaf names to the layouts of operands that replace them."""
        self.id = op_id
        self.types = op_id.types
        self.v = op_id.values
        self.b = Builder()
        self.persistent: dict[Tensor, Bytes] = {}
        self.inputs: dict[Tensor, Bytes] = {}
        self.suffix = ""
        """Suffix of leaf names: the regime for which the graph is currently built."""
        self.regime: Regime = {}
        self.layouts = dict(layouts or {})
        self.laid: dict[Tensor, str] = {}
        """Operand -> its layout."""
        self.first_nodes: tuple[Tensor, ...] = ()
        """Nodes that the graph computes first, in this order."""

    def leaf(self, name: str, type_: GGMLType, ne: Dims, fill: Fill, *, keep: bool = False) -> Tensor:
        """Add a tensor that owns its bytes, filled from its own random stream."""
        full_name = f"{name}.{self.suffix}" if self.suffix else name
        make = self.regime.get(name, partial(encode, fill=fill))
        data = make(type_, Stream(self.id.id, full_name), ne)
        if full_name in self.layouts:
            return self._spread(full_name, type_, ne, data, keep=keep)
        return self._add(full_name, type_, ne, data, keep=keep)

    def _add(self, name: str, type_: GGMLType, ne: Dims, data: Bytes, *, keep: bool) -> Tensor:
        t = new_tensor(type_, *ne, name=name, flags=0 if keep else FLAG_INPUT)
        (self.persistent if keep else self.inputs)[t] = data
        return t

    def _spread(self, name: str, type_: GGMLType, ne: Dims, data: Bytes, *, keep: bool) -> Tensor:
        """Add an operand with elements `data` in the layout from `layouts`.

        Gaps contain elements, too, but the operand is wrong if it is read without gaps.
        """

        def leaf(larger: Dims) -> Tensor:
            size = math.prod(larger) // type_.blck_size * type_.type_size
            return self._add(name, type_, larger, np.zeros(size, np.uint8), keep=keep)

        t = self._view(ne, type_, leaf, self.layouts[name])
        buffer = (self.persistent if keep else self.inputs)[t.root]
        units = data.reshape(-1, type_.type_size)
        elements = strided(buffer, t)
        for turn in (1, 2):
            buffer[:] = np.resize(np.roll(units, turn, axis=0), buffer.nbytes)
            elements[...] = data.view(elements.dtype).reshape(elements.shape)
            if is_contiguous(t) or not np.array_equal(buffer[t.view_offs :][: data.nbytes], data):
                break
        return t

    def operand(
        self, name: str, type_: GGMLType, ne: Dims, fill: Fill, layout: str = "", *, keep: bool = False
    ) -> Tensor:
        """Add a tensor of shape `ne` with the strides of `layout`: a view into a larger leaf.

        A layout lists first how the bytes are placed in the leaf, then permutes. `pad` leaves gaps between rows, `off`
        starts after the leaf's beginning, `rows` takes every second row, `slab` a part of the rows of each matrix,
        `part` a part of the matrices (as K and V in a cache), `flat` reshapes a vector; `p0213` is `ggml_permute(0, 2,
        1, 3)`.

        Raises:
            UsageError: the layout has any other word.
        """
        if not layout:
            return self.leaf(name, type_, ne, fill, keep=keep)
        return self._view(ne, type_, lambda larger: self.leaf(name, type_, larger, fill, keep=keep), layout)

    def _view(self, ne: Dims, type_: GGMLType, leaf: Callable[[Dims], Tensor], layout: str) -> Tensor:
        window, axes = _read_layout(layout)
        inner = ne
        for order in reversed(axes):
            inner = tuple(inner[axis] for axis in order)  # type: ignore[assignment]  # four axes
        t = self._window(inner, type_, leaf, window)
        for order in axes:
            t = self.b.permute(t, *order)
        self.laid[t] = layout
        return t

    def _window(self, ne: Dims, type_: GGMLType, leaf: Callable[[Dims], Tensor], window: str) -> Tensor:
        n0, n1, n2, n3 = ne
        if window == "":
            return leaf(ne)
        if window == "flat":
            return self.b.reshape_4d(leaf((math.prod(ne), 1, 1, 1)), *ne)
        if window == "off":
            root = leaf((n0, n1 * n2 * n3 + 2, 1, 1))
            return self.b.view_4d(root, *ne, *contiguous_nb(type_, ne)[1:], root.nb[1])
        larger = {
            "pad": (n0 + 3 * type_.blck_size, n1, n2, n3),
            "rows": (n0, 2 * n1, n2, n3),
            "slab": (n0, n1 + 3, n2, n3),
            "part": (n0, n1, n2 + 3, n3),
        }
        root = leaf(larger[window])
        nb0, nb1, nb2, nb3 = root.nb
        offset = {"pad": nb0, "rows": nb1, "slab": 2 * nb1, "part": 2 * nb2}[window]
        return self.b.view_4d(root, *ne, 2 * nb1 if window == "rows" else nb1, nb2, nb3, offset)

    def lists(self, name: str, type_: GGMLType, ne: Dims, n: int, layout: str, pick: str = "") -> Tensor:
        """Add index lists, one per row, each with distinct numbers from 0..n-1.

        `pick`: `last` puts n - 1 into each list, `twice` repeats the first number of a list at its end.

        UsageError if the layout does not keep axis 0, or a row is longer than `n`.
        """
        if any(order[0] for order in _read_layout(layout)[1]):
            raise UsageError(f"{name}: a layout whose permutes keep axis 0 expected, {layout!r} found")
        fill = {"": chosen, "last": with_last, "twice": with_repeat}[pick](n)
        return self.operand(name, type_, ne, fill, layout)

    def first(self, name: str, key: str, fill: Fill) -> Tensor:
        """Add the first operand: shape at `key`, layout at `v` + `key`, owner at `inplace`."""
        inplace = self.v.get("inplace")
        a = self.operand(name, self.types[0], self.v[key], fill, self.v["v" + key], keep=inplace == "leaf")
        return self.b.neg(a) if inplace == "mid" else a

    def build(self, name: str) -> Callable[..., Tensor]:
        """Return the constructor `name`, or its in-place variant; UsageError if it is missing."""
        name = f"{name}_inplace" if self.v["inplace"] else name
        constructor: Callable[..., Tensor] | None = getattr(self.b, name, None)
        if constructor is None:
            raise UsageError(f"case {self.id.id!r}: ggml has no {name}")
        return constructor

    def outputs(self, a: Tensor, out: Tensor) -> Sequence[Tensor]:
        """Return the tensors to check; with `mid` also the previous node before it is overwritten."""
        return (a, out) if self.v["inplace"] == "mid" else (out,)

    def laid_out(self, outputs: Sequence[Tensor]) -> Bench:
        """Return a bench whose op sources have the layouts of the keys `src0`, `src1` and so on.

        UsageError if such a source is not a leaf.
        """
        layouts: dict[str, str] = {}
        for i, layout in sources(self.id):
            leaves = [s for s in self.sources(outputs, i) if s.op == "NONE" and s.view_src is None]
            if not leaves:
                raise UsageError(f"case {self.id.id!r}: {SOURCE}{i}: there is no src[{i}] that is a leaf")
            layouts |= {leaf.name: layout for leaf in leaves}
        return Bench(self.id, layouts)

    def sources(self, outputs: Sequence[Tensor], i: int) -> list[Tensor]:
        """Return `src[i]` of each node of the id's op."""
        op = self.id.op.partition(".")[0]
        nodes = [n for n in self.b.build_forward_expand(*outputs) if n.op == op]
        return [s for n in nodes for s in n.src[i : i + 1] if s is not None]

    def only_result(self, outputs: Sequence[Tensor]) -> Tensor | None:
        """Return the output if no other node of its graph has memory of its own."""
        results = [n for n in self.b.build_forward_expand(*outputs) if n.view_src is None]
        return results[0] if len(results) == 1 and results == list(outputs) else None

    def between(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute a result of the output's size between two others, then free it for the output.

        UsageError if the output is not the graph's only result.
        """
        if (dst := self.only_result(outputs)) is None:
            raise UsageError(f"case {self.id.id!r}: {DST}: a graph with one result, which is no view, expected")
        words = -(-nbytes(dst) // 4)
        below, freed, above = (
            self.b.neg(self.leaf(name, F32, (n, 1, 1, 1), whole(-999, 1000)))
            for name, n in (("below", 8), ("freed", words), ("above", 8))
        )
        user = self.b.sum(freed)
        self.first_nodes = below, freed, above, user
        return below, above, user, *outputs

    def outputs_of(self, make: Make) -> Sequence[Tensor]:
        """Build the graph, once per regime of the key `data`; return the tensors to check."""
        outputs: list[Tensor] = []
        for suffix, regime in regimes(self.v.get("data", ""), self.id.op, self.types).items():
            self.suffix, self.regime = suffix, regime
            made = make(self)
            outputs += (made,) if isinstance(made, Tensor) else made
        return outputs

    def case(self, outputs: Sequence[Tensor]) -> Case:
        """Return the finished case, whose graph computes `outputs`."""
        graph = self.b.build_forward_expand(*self.first_nodes, *outputs)
        step = Step(graph, self.inputs, tuple(outputs))
        params = {"op": self.id.op, "types": [t.name for t in self.types], **self.id.given}
        seed = self.id.seed
        return Case(self.id.id, self.persistent, [step], family=NAME, params=params, seed=seed, generator=GENERATOR)


def sources(op_id: OpId) -> list[tuple[int, str]]:
    """Return index and layout of each source with a key `src0`, `src1`, …."""
    keys = ((name.removeprefix(SOURCE), layout) for name, layout in op_id.given.items() if name.startswith(SOURCE))
    return [(int(i), layout) for i, layout in keys if i.isdigit()]


Make = Callable[[Bench], Tensor | Sequence[Tensor]]
"""Builds the graph on a bench; returns one or more tensors to check."""


class Timed(NamedTuple):
    """A case that `conform perf` times, with the sizes of a decoder."""

    body: str
    """Id without family and seed."""
    tokens: int
    """Number of tokens that the op processes."""
    repeat: int
    """Number of runs per measurement, so that it lasts long enough for the clock."""
    level: family.Level = "standard"
    """`smoke` is part of `standard`, which is part of `full`."""


@dataclass(frozen=True, slots=True)
class OpCases:
    """The cases of one op or several similar ops: keys of the ids, builder and rows."""

    ops: tuple[str, ...]
    """First part of the id; `UNARY.GELU` for a sub-op."""
    types: tuple[str, ...]
    """Operands whose types are part of the id."""
    keys: Mapping[str, family.Key]
    make: Make
    standard: Sequence[Row]
    """Rows without family and seed."""
    wide: Sequence[Row]
    """Further rows of level `standard` that are not candidates for `smoke`."""
    full: Sequence[Row]
    """Further, large rows of level `full`."""
    smoke: Sequence[Row]
    """Rows that are always in `smoke`, if few backends accept others; some `wide` ones."""
    timed: Sequence[Timed]
    pairs: Sequence[Grid]
    """Grids of which enough rows run to cover each pair of values of two axes: `PAIRS`."""


TABLES: list[OpCases] = []
"""Cases of all topics, in order of declaration."""


def cases(
    ops: str,
    *,
    keys: str,
    standard: Sequence[Row] = (),
    types: str = "a",
    wide: Sequence[Row] = (),
    full: Sequence[Row] = (),
    smoke: Sequence[Row] = (),
    timed: Sequence[Timed] = (),
    pairs: Sequence[Grid] = (),
) -> Callable[[Make], Make]:
    """Declare the cases that a function builds; `ops` and `types` are separated by spaces.

    The arguments are the fields of `OpCases`. A grid whose only head is types applies to all `ops`.
    """
    names = tuple(ops.split())

    def whole(grid: Grid) -> Grid:
        if len(grid.heads) == 2:
            return grid
        return replace(grid, heads=(Axis("what", (names,), has_keys=True), replace(grid.heads[0], name="types")))

    def rows(table: Sequence[Row]) -> list[Row]:
        return [row if isinstance(row, str) else whole(row) for row in table]

    def declare(make: Make) -> Make:
        n_src = max(len(DECLARATIONS[op.partition(".")[0]].src) for op in names)
        declared = family.keys(f"{keys} {DST}=|between") | {f"{SOURCE}{i}": family.text() for i in range(n_src)}
        tables = rows(standard), rows(wide), rows(full), rows(smoke), timed, [*map(whole, pairs)]
        TABLES.append(OpCases(names, tuple(types.split()), declared, make, *tables))
        return make

    return declare


@cache
def _read_layout(layout: str) -> tuple[str, tuple[tuple[int, ...], ...]]:
    first, *rest = layout.split(".")
    if first[:1] == "p" and first[1:].isdigit():
        first, rest = "", [first, *rest]
    axes = tuple(tuple(int(c) for c in part[1:]) for part in rest if part[1:].isdigit())
    legal = len(axes) == len(rest) and all(sorted(order) == [0, 1, 2, 3] for order in axes)
    if first not in {"", "pad", "off", "rows", "slab", "part", "flat"} or not legal:
        raise UsageError(f"layout {layout!r}: {LAYOUTS} expected")
    return first, axes
