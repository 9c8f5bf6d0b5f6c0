"""Case families and the syntax of their case ids: `family/WHAT-key=value,key=value@seed`.

The text alone defines the case: any key and the seed may be changed. Tables list ids in the notation of `grid.py`. Keys
are declared as in an id, each with its default, which also defines its type:

| declared | value |
|---|---|
| `ne=SHAPE` | ggml's `ne`, such as `16x4x2`: `ne[0]` first, trailing ones omitted; required |
| `b=SHAPE?` | the same, None if omitted |
| `by=NUMBERS` | integers joined by `x`, empty if omitted |
| `n=4` | an int32 |
| `eps=1e-5` | a float |
| `hide=causal|bias`, `cast=|f32` | one of these words, the first by default |
| `va=` | text that the family checks |
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from conformance.case.case import Case
from conformance.ggml.errors import UsageError, unknown
from conformance.ggml.tensor import Dims

from .grid import Row, ids_of_rows

Level = Literal["smoke", "standard", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
Table = Mapping[Level, Sequence[Row]]
"""Level -> rows it adds to lower levels, without family and seed."""

MAX_ELEMENTS = 2**28


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of case; the ids of each level include those of the lower ones."""

    name: str
    summary: str
    ids: Callable[[Level], Sequence[str]]
    """Case ids `family/params@seed`, those of lower levels first; equal on every machine."""
    build: Callable[[str], Case]
    """Builds the case of an id, with equal bytes on every machine; `UsageError` if unknown."""
    seeded: bool = True
    """True if another seed gives another case; a recording has only one."""
    lacks: Callable[[], str] = str
    """Reason why the family has no cases in this installation; empty if nothing is missing."""


def fault(name: str, family: object) -> str:
    """Return why `family` cannot be installed as the family `name`; "" if it can."""
    if type(family) is not Family:
        return f"a Family expected, {type(family).__name__} found"
    return "" if family.name == name else f"its name is {family.name!r}, {name!r} expected"


def ids_of(
    table: Table, with_seed: Callable[[str], str], size: Callable[[str], int] = lambda _: 0
) -> Callable[[Level], Sequence[str]]:
    """Return `Family.ids` for a table; ids that a level adds are sorted by `size` of their row.

    `with_seed` adds family and seed to a row.
    """

    @cache
    def ids(level: Level) -> tuple[str, ...]:
        bodies: dict[str, None] = {}
        for each in LEVELS[: LEVELS.index(level) + 1]:
            bodies |= dict.fromkeys(sorted(ids_of_rows(table[each]), key=size))
        return tuple(map(with_seed, bodies))

    return ids


def with_seed(family: str, body: str, seed_of: str = "") -> str:
    """Return the id of a row; its seed is a hash of its text (or `seed_of`) only."""
    return f"{family}/{body}@{zlib.crc32((seed_of or body).encode()) % 1000}"


def split_id(case_id: str, family: str, form: str) -> tuple[str, int]:
    """Split an id into body and seed; UsageError, which quotes `form`, if it is invalid."""
    head, _, seed = case_id.rpartition("@")
    name, _, body = head.partition("/")
    if name != family or not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        raise UsageError(f"case {case_id!r}: {family}/{form}@seed expected")
    return body, int(seed)


@dataclass(frozen=True, slots=True)
class Key:
    """One `key=value` of an id: its parser and its default."""

    read: Callable[[str], Any]
    """Raises `ValueError` for invalid text."""
    what: str
    default: Any = None
    required: bool = False

    @property
    def is_shape(self) -> bool:
        """True if its value is a tensor's `ne`."""
        return self.read is _shape


def _shape(text: str) -> Dims:
    ne = tuple(int(n) for n in text.split("x"))
    if not 1 <= len(ne) <= 4 or min(ne) < 1 or math.prod(ne) > MAX_ELEMENTS:
        raise ValueError
    return (*ne, *(1,) * (4 - len(ne)))  # type: ignore[return-value]  # four by arithmetic


def _int32(text: str) -> int:
    n = int(text)
    if not -(2**31) <= n < 2**31:
        raise ValueError
    return n


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def word(*legal: str) -> Key:
    """Return a key with one of several words, the first by default."""

    def read(text: str) -> str:
        if text not in legal:
            raise ValueError
        return text

    return Key(read, "one of " + ", ".join(w or "(nothing)" for w in dict.fromkeys(legal)), legal[0])


def text(default: str = "", what: str = "text") -> Key:
    """Return a key whose text is checked by the family."""
    return Key(str, what, default)


def keys(declared: str) -> dict[str, Key]:
    """Parse a declaration of keys, separated by spaces."""
    return {name: _key(default) for name, _, default in (item.partition("=") for item in declared.split())}


def _key(default: str) -> Key:
    if default in {"SHAPE", "SHAPE?"}:
        return Key(_shape, f"a shape like 16x4x2 of at most {MAX_ELEMENTS} elements", required=default == "SHAPE")
    if default == "NUMBERS":
        return Key(_numbers, "integers like 0x2x1x3", ())
    if not default:
        return text()
    if "|" in default:
        return word(*default.split("|"))
    if re.fullmatch(r"-?[0-9]+", default):
        return Key(_int32, "a 32-bit integer", int(default))
    return Key(float, "a number", float(default))


def read_keys(
    case_id: str, keys_text: str, keys: Mapping[str, Key], *, what: str = "case"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse `key=value,key=value`: values of all keys, and given texts; UsageError if invalid."""
    given: dict[str, str] = {}
    values: dict[str, Any] = {}
    for item in keys_text.split(",") if keys_text else ():
        name, equals, value = item.partition("=")
        key = keys.get(name)
        if not equals:
            raise UsageError(f"{what} {case_id!r}: {item!r} found, key=value expected; keys: {', '.join(keys)}")
        if key is None:
            raise unknown(f"{what} {case_id!r}: key", name, keys)
        if name in given:
            raise UsageError(f"{what} {case_id!r}: {name} occurs twice")
        try:
            values[name] = key.read(value)
        except ValueError:
            raise UsageError(f"{what} {case_id!r}: {name}: {key.what} expected, {value!r} found") from None
        given[name] = value
    for name, key in keys.items():
        if name not in values:
            if key.required:
                raise UsageError(f"{what} {case_id!r}: {name}: {key.what} is missing")
            values[name] = key.default
    return values, given


def without(body: str, keys: Container[str]) -> tuple[str, str]:
    """Split off `keys` from `WHAT-key=value,…`, for ids that extend another family's."""
    what, dash, first = body.partition("=")[0].rpartition("-")  # architecture names may contain dashes
    items = body[len(what) + 1 :].split(",") if dash and first else []
    if not items:
        return body, ""
    own = [item for item in items if item.partition("=")[0] in keys]
    rest = ",".join(item for item in items if item not in own)
    return f"{what}-{rest}" if rest else what, ",".join(own)
