"""Traits of a case of `ops`, read from its id, and pairs of them.

    MUL_MAT-q4_0+f32-a=64x5,b=64x33,va=pad

has the op, per operand a type and its group, per shape the classes of the length and the number of its rows, what is
left of both in blocks, whether it has several matrices, per key a layout, a word or the class of a number, and per two
shapes how their extents compare. A pair is two traits of cases of one op; its kind is the kinds of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Literal, NamedTuple

from conformance.ggml.tensor import Dims
from conformance.ggml.types import GGMLType
from conformance.suite.ops import KNOWN
from conformance.suite.ops.bench import parse

Kind = Literal[
    "op", "type", "group", "length", "tail", "rows", "rest", "several", "layout", "number", "word", "match",
]  # fmt: skip
PairKind = tuple[Kind, Kind]
_LAYOUT = re.compile(r"p[0-3]{4}|pad|off|rows|slab|part|flat")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?|-?inf|nan")
_LARGEST = 17
"""The last class of sizes, which are powers of two: from 65,536."""
_BLOCK, _FEW = 32, 8
"""Divisors of row lengths and of numbers of rows."""
_SMALL = range(-2, 9)
"""Numbers that are a class of their own."""


class Trait(NamedTuple):
    """One thing that a case varies."""

    kind: Kind
    where: str
    """Key, operand or two keys of the id."""
    value: str


class Pair(NamedTuple):
    """Two traits of one case."""

    op: str
    """Without its sub-op, whose cases share code."""
    a: Trait
    b: Trait

    @property
    def kind(self) -> PairKind:
        """Return the kinds of both."""
        return self.a.kind, self.b.kind


def traits(case_id: str) -> tuple[str, list[Trait]]:
    """Return the op of a case without its sub-op, and its traits in order."""
    op_id = parse(case_id, KNOWN)
    keys = KNOWN[op_id.op].keys
    found = {Trait("op", "", op_id.op)}
    found |= {Trait("type", str(i), t.name) for i, t in enumerate(op_id.types)}
    found |= {Trait("group", str(i), _group(t)) for i, t in enumerate(op_id.types)}
    shapes: dict[str, Dims] = {}
    for key, value in op_id.given.items():
        if keys[key].is_shape:
            shapes[key] = op_id.values[key]
            found.update(_of_shape(key, shapes[key]))
        else:
            found.update(_of_value(key, value))
    for (a, x), (b, y) in combinations(shapes.items(), 2):
        found |= {Trait("match", f"{a} {b} {i}", _compared(*each)) for i, each in enumerate(zip(x, y, strict=True))}
    return op_id.op.partition(".")[0], sorted(found)


def pairs(case_id: str) -> Iterator[Pair]:
    """Yield every pair of traits of a case."""
    op, found = traits(case_id)
    for a, b in combinations(found, 2):
        yield Pair(op, a, b)


def _of_shape(key: str, ne: Dims) -> Iterator[Trait]:
    yield Trait("length", key, str(min(ne[0].bit_length(), _LARGEST)))
    yield Trait("tail", key, _rest(ne[0], _BLOCK))
    yield Trait("rows", key, str(min(ne[1].bit_length(), _LARGEST)))
    yield Trait("rest", key, _rest(ne[1], _FEW))
    yield Trait("several", key, f"{ne[2] > 1} {ne[3] > 1}")


def _of_value(key: str, value: str) -> Iterator[Trait]:
    if _NUMBER.fullmatch(value):
        yield Trait("number", key, _class(value))
    elif re.fullmatch(r"-?[0-9]+(x-?[0-9]+)+", value):
        yield from (Trait("number", f"{key}{i}", _class(n)) for i, n in enumerate(value.split("x")))
    else:
        for part in value.split("."):
            is_layout = _LAYOUT.fullmatch(part) is not None
            turned = re.sub(r"^p(0?)[0-9]+$", r"p\1", part)  # p0: rows remain rows
            yield Trait("layout" if is_layout else "word", key, turned if is_layout else part)


def _rest(n: int, by: int) -> str:
    return "none" if n % by == 0 else "odd" if n % 2 else "even"


def _group(type_: GGMLType) -> str:
    """Return the group of types whose kernels are alike."""
    if type_.blck_size == 1:
        return type_.name if type_.name in {"f32", "f16", "bf16"} else "integer"
    return f"blocks of {type_.blck_size}"


def _class(number: str) -> str:
    x = float(number)
    if x in _SMALL:
        return str(int(x))
    size = "a fraction" if abs(x) < 1 else "large" if abs(x) > 64 else "medium"  # where kernels change
    return f"{'negative ' if x < 0 else ''}{size}"


def _compared(x: int, y: int) -> str:
    return "=" if x == y else "1" if y == 1 else "r" if x == 1 else "<" if x < y else ">"
