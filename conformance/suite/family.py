"""What a case family is, and the text of its case ids: `family/WHAT-key=value,key=value@seed`.

The text alone makes the case: every key and the seed may be changed at will. Tables list ids as `grid.py` says. Keys
are declared as they stand in an id, each with its default, which also says what may stand there:

| declared | value |
|---|---|
| `ne=SHAPE` | ggml's `ne`, such as `16x4x2`: `ne[0]` first, trailing ones left out; required |
| `b=SHAPE?` | the same, None if left out |
| `by=NUMBERS` | integers joined by `x`, none if left out |
| `n=4` | an int32 |
| `eps=1e-5` | a float |
| `hide=causal|bias`, `cast=|f32` | one of these words, the first by default |
| `va=` | text that its reader checks |
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
from conformance.ggml.errors import UsageError
from conformance.ggml.tensor import Dims

from .grid import Row, ids_of_rows

Level = Literal["smoke", "standard", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
Table = Mapping[Level, Sequence[Row]]
"""Level -> what it adds to the levels below it, without family and seed."""

MAX_ELEMENTS = 2**28


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of case. `ids("smoke")` is part of `ids("standard")`, which is part of `ids("full")`."""

    name: str
    summary: str
    ids: Callable[[Level], Sequence[str]]
    """Case ids `family/params@seed`, smallest first; the same on every machine."""
    build: Callable[[str], Case]
    """The case behind an id, the same bytes on every machine; `UsageError` for an id it does not know."""
    seeded: bool = True
    """Whether another seed makes another case; a recording has but one."""
    lacks: Callable[[], str] = str
    """Why it has no cases in this installation; empty where nothing is missing."""


def ids_of(
    table: Table, with_seed: Callable[[str], str], size: Callable[[str], int] = lambda _: 0
) -> Callable[[Level], Sequence[str]]:
    """`Family.ids` from a table; what a level adds is ordered by `size`.

    `with_seed` makes an id of one without family and seed; `size` gives what that is sorted by.
    """

    @cache
    def ids(level: Level) -> tuple[str, ...]:
        bodies: dict[str, None] = {}
        for each in LEVELS[: LEVELS.index(level) + 1]:
            bodies |= dict.fromkeys(sorted(ids_of_rows(table[each]), key=size))
        return tuple(map(with_seed, bodies))

    return ids


def with_seed(family: str, body: str, seed_of: str = "") -> str:
    """The id of a table's row. Its seed comes from its text (or `seed_of`), so rows added elsewhere change nothing."""
    return f"{family}/{body}@{zlib.crc32((seed_of or body).encode()) % 1000}"


def split_id(case_id: str, family: str, form: str) -> tuple[str, int]:
    """An id's text between family and seed, and its seed; UsageError, which shows `form`, if it is no such id."""
    head, _, seed = case_id.rpartition("@")
    name, _, body = head.partition("/")
    if name != family or not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        raise UsageError(f"case {case_id!r}: {family}/{form}@seed expected")
    return body, int(seed)


@dataclass(frozen=True, slots=True)
class Key:
    """One `key=value` of an id: how its text is read, and its value where the id leaves it out."""

    read: Callable[[str], Any]
    """`ValueError` for a text that may not stand there."""
    what: str
    default: Any = None
    required: bool = False

    @property
    def is_shape(self) -> bool:
        """Whether its value is a tensor's `ne`."""
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
    """One of some words, the first by default."""

    def read(text: str) -> str:
        if text not in legal:
            raise ValueError
        return text

    return Key(read, "one of " + ", ".join(w or "(nothing)" for w in dict.fromkeys(legal)), legal[0])


def text(default: str = "", what: str = "text") -> Key:
    """Text that its reader checks."""
    return Key(str, what, default)


def keys(declared: str) -> dict[str, Key]:
    """The keys of a declaration, separated by blanks."""
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


def read_keys(case_id: str, keys_text: str, keys: Mapping[str, Key]) -> tuple[dict[str, Any], dict[str, str]]:
    """Every key's value, and the texts of those given in `key=value,key=value`; UsageError says which is wrong."""
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


def without(body: str, keys: Container[str]) -> tuple[str, str]:
    """Split `WHAT-key=value,key=value` into the id without `keys`, and these: for ids that extend another family's."""
    what, dash, first = body.partition("=")[0].rpartition("-")  # an architecture's name may have dashes too
    items = body[len(what) + 1 :].split(",") if dash and first else []
    if not items:
        return body, ""
    own = [item for item in items if item.partition("=")[0] in keys]
    rest = ",".join(item for item in items if item not in own)
    return f"{what}-{rest}" if rest else what, ",".join(own)
