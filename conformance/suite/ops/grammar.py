"""The text of an op case's id: `ops/OP-types-key=value,key=value@seed`.

`OP` is ggml's name, with its sub-op after a dot (`UNARY.GELU`, `GLU.SWIGLU`); `types` are the operands' types joined by
`+`; which keys an op has, stands in its `OpCases`. Shapes are ggml's `ne` joined by `x`, `ne[0]` first, trailing ones
left out. A key left out has its default. The text alone says everything: numbers and seed may be changed at will.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Dims
from conformance.ggml.types import TYPES, GGMLType

if TYPE_CHECKING:
    from conformance.ggml.tensor import Tensor

    from .bench import Bench

FAMILY_NAME = "ops"

FLOATS = "f32|f16|bf16"
BLOCKS_32 = "q4_0|q4_1|q5_0|q5_1|q8_0|mxfp4"
BLOCKS_256 = "q2_K|q3_K|q4_K|q5_K|q6_K"
BLOCKS = f"{BLOCKS_32}|{BLOCKS_256}"
"""Types for the braces of a pattern."""

MAX_ELEMENTS = 2**28
_SEEDS = 1000


def _dims(text: str) -> Dims:
    ne = tuple(int(n) for n in text.split("x"))
    if not 1 <= len(ne) <= 4 or min(ne) < 1 or math.prod(ne) > MAX_ELEMENTS:
        raise ValueError
    return (*ne, *(1,) * (4 - len(ne)))  # type: ignore[return-value]  # four by arithmetic


def _count(text: str) -> int:
    n = int(text)
    if not -(2**31) <= n < 2**31:
        raise ValueError
    return n


def _real(text: str) -> float:
    return float(text)


def _word(text: str) -> str:
    return text


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


@dataclass(frozen=True, slots=True)
class Key:
    """One `key=value` of an id: how its text is read, and its value where the id leaves it out."""

    read: Callable[[str], Any]
    what: str
    default: Any = None
    required: bool = False

    @property
    def is_shape(self) -> bool:
        """Whether its value is a tensor's `ne`."""
        return self.read is _dims


def shape() -> Key:
    """A tensor's `ne`, always there."""
    return Key(_dims, f"a shape like 16x4x2 of at most {MAX_ELEMENTS} elements", required=True)


def opt_shape() -> Key:
    """A tensor's `ne`, or None: no such tensor."""
    return Key(_dims, f"a shape like 16x4x2 of at most {MAX_ELEMENTS} elements")


def count(default: int = 0) -> Key:
    """An int32."""
    return Key(_count, "a 32-bit integer", default)


def real(default: float = 0.0) -> Key:
    """A float."""
    return Key(_real, "a number", default)


def word(*legal: str) -> Key:
    """One of some words, the first by default."""

    def read(text: str) -> str:
        if text not in legal:
            raise ValueError
        return text

    return Key(read, "one of " + ", ".join(w or "(nothing)" for w in legal), legal[0])


def text(default: str = "", what: str = "text") -> Key:
    """Text that the op reads itself."""
    return Key(_word, what, default)


def numbers() -> Key:
    """Some integers joined by x."""
    return Key(_numbers, "integers like 0x2x1x3", ())


@dataclass(frozen=True, slots=True)
class OpCases:
    """One op's (or a group's) cases: what their ids may say, how a case is made, and the table of those that run."""

    ops: tuple[str, ...]
    """Names that stand first in the id; `UNARY.GELU` for a sub-op."""
    types: tuple[str, ...]
    """What each of the types in the id is: `("src0", "src1")`."""
    keys: Mapping[str, Key]
    make: Callable[[Bench], Tensor | Sequence[Tensor]]
    """Makes the graph on a bench and gives the tensor, or tensors, to check."""
    standard: Sequence[str]
    """Ids without family and seed; `{a|b}` stands for both."""
    full: Sequence[str] = ()
    """Further ones of level `full`: large."""
    smoke: Sequence[str] = ()
    """Those of `standard` that `smoke` has too, whatever others show: where few backends take what the others are."""


@dataclass(frozen=True, slots=True)
class OpId:
    """An id, read."""

    id: str
    op: str
    types: tuple[GGMLType, ...]
    values: Mapping[str, Any]
    given: Mapping[str, str] = field(default_factory=dict)
    """The keys that the text itself has, as text."""
    seed: int = 0


def expand(pattern: str) -> Iterator[str]:
    """All texts of a pattern whose braces `{a|b|}` stand for each of their parts in turn."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [piece.split("|") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    for parts in product(*choices):
        yield "".join(parts)


def with_seed(body: str) -> str:
    """The id of a table's row: its default seed comes from its text, so that rows added elsewhere change nothing."""
    return f"{FAMILY_NAME}/{body}@{zlib.crc32(body.encode()) % _SEEDS}"


def parse(case_id: str, known: Mapping[str, OpCases]) -> OpId:
    """Read an id.

    Raises:
        UsageError: says which part is wrong and what may stand there.
    """
    head, _, seed_text = case_id.rpartition("@")
    family, _, body = head.partition("/")
    if family != FAMILY_NAME or not re.fullmatch(r"[0-9]{1,18}", seed_text, re.ASCII):
        raise UsageError(f"case {case_id!r}: {FAMILY_NAME}/OP-types-key=value,key=value@seed expected")
    op, _, rest = body.partition("-")
    types_text, _, keys_text = rest.partition("-")
    cases = known.get(op)
    if cases is None:
        raise UsageError(f"case {case_id!r}: op {op!r} is unknown; known: {', '.join(known)}")
    names = types_text.split("+")
    if len(names) != len(cases.types) or any(n not in TYPES for n in names):
        raise UsageError(
            f"case {case_id!r}: types of {', '.join(cases.types)} joined by + expected, {types_text!r} found; "
            f"types: {', '.join(TYPES)}"
        )
    values, given = read_keys(case_id, keys_text, cases.keys)
    return OpId(case_id, op, tuple(TYPES[n] for n in names), values, given, int(seed_text))


def without(body: str, keys: Container[str]) -> tuple[str, str]:
    """`WHAT-key=value,key=value` without the `keys`, and these: for families whose ids are another's, and more."""
    what, dash, first = body.partition("=")[0].rpartition("-")  # an architecture's name may have dashes too
    items = body[len(what) + 1 :].split(",") if dash and first else []
    if not items:
        return body, ""
    taken = [item for item in items if item.partition("=")[0] in keys]
    kept = ",".join(item for item in items if item not in taken)
    return f"{what}-{kept}" if kept else what, ",".join(taken)


def read_keys(case_id: str, keys_text: str, keys: Mapping[str, Key]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read `key=value,key=value`: every key's value, and the texts of those that are given.

    Raises:
        UsageError: says which key is wrong and what may stand there.
    """
    given: dict[str, str] = {}
    values: dict[str, Any] = {}
    for item in keys_text.split(",") if keys_text else ():
        name, equals, value = item.partition("=")
        key = keys.get(name)
        if key is None or not equals:
            raise UsageError(f"case {case_id!r}: {item!r} found, key=value expected; keys: {', '.join(keys)}")
        if name in given:
            raise UsageError(f"case {case_id!r}: {name} stands twice")
        try:
            values[name] = key.read(value)
        except ValueError:
            raise UsageError(f"case {case_id!r}: {name}: {key.what} expected, {value!r} found") from None
        given[name] = value
    for name, key in keys.items():
        if name not in values:
            if key.required:
                raise UsageError(f"case {case_id!r}: {name}: {key.what} is missing")
            values[name] = key.default
    return values, given
