"""Parameters of ops: how each is read from `op_params`, written, shown, checked and varied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from conformance.ggml.errors import GraphError
from conformance.ggml.tensor import Tensor, bits_f32, f32_bits

Vary = Callable[[Tensor, Any], Any]
"""Function of a node and a value to another value, which changes numbers but no shape."""


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter: its position in `op_params`, and how its words are read and written."""

    name: str
    """ggml's name of the constructor's argument; empty for a gap, which is always 0."""
    read: Callable[..., Any]
    """Converts its words to the value."""
    write: Callable[[Any], tuple[int, ...]]
    size: int = 1
    each: tuple[str, ...] = ()
    """Names of the elements, if the constructor takes them one by one."""
    members: type[IntEnum] | tuple[str, ...] | None = None
    """Members of an enumeration."""
    always: bool = False
    """True if reports show it even if it is 0; names of an enumeration appear alone."""
    vary: Vary | None = None
    at: int = 0
    """Index of its first word."""

    def of(self, words: tuple[int, ...]) -> Any:  # noqa: ANN401  # float, int, bool, str, enum or tuple
        """Return the value from all 16 words."""
        return self.read(*words[self.at : self.at + self.size])

    def problem(self, words: tuple[int, ...]) -> str:
        """Describe a value that no constructor stores: an unknown enum member, flag or gap; or ""."""
        word = words[self.at]
        if not self.name:
            return f"op_params[{self.at}] must be 0, {word} found" if word else ""
        if self.read is bool and word not in (0, 1):
            return f"{self.name} must be 0 or 1, {word} found"
        if isinstance(self.members, tuple) and not 0 <= word < len(self.members):
            return f"{self.name}={word} is not one of the {len(self.members)} sub-ops"
        if isinstance(self.members, type) and word not in list(self.members):
            legal = ", ".join(f"{m.name}={m.value}" for m in self.members)
            return f"{self.name}={word} is not a {c_enum(self.members)} ({legal})"
        return ""

    def text(self, words: tuple[int, ...]) -> str:
        """Format the value for reports."""
        value = self.of(words)
        if isinstance(value, float):
            return f"{value:.7g}"
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, IntEnum):
            return value.name.lower()
        return str(int(value) if isinstance(value, bool) else value)


def c_enum(members: type[IntEnum]) -> str:
    """Return the name of an enumeration in `ggml.h`."""
    return f"ggml_{members.__name__.lower()}"


def times(factor: float) -> Vary:
    """Vary by multiplying."""
    return lambda _, value: value * factor


def plus(term: float) -> Vary:
    """Vary by adding."""
    return lambda _, value: value + term


def to(value: float) -> Vary:
    """Vary to one value."""
    return lambda *_: value


def swap(first: str, second: str) -> Vary:
    """Vary an enumeration: from `first` to `second`, from anything else to `first`."""
    return lambda _, value: second if first == (value.name if isinstance(value, IntEnum) else value) else first


def flip(_: Tensor, value: bool) -> bool:
    """Vary a flag."""
    return not value


HALF = times(0.5)


def i32(name: str, vary: Vary | None = None, *, always: bool = False) -> Field:
    """Declare an int32."""
    return Field(name, int, lambda v: (int(v),), always=always, vary=vary)


def low32(name: str) -> Field:
    """Declare the low 32 bits of a `size_t`."""
    return Field(name, int, lambda v: (int32(v),))


def i32s(names: str) -> Iterator[Field]:
    """Declare several int32 with these names."""
    return map(i32, names.split())


def flag(name: str, vary: Vary | None = None) -> Field:
    """Declare an int32 that is 0 or 1."""
    return Field(name, bool, lambda v: (int(v),), vary=vary)


def f32(name: str, vary: Vary | None = HALF) -> Field:
    """Declare a float32, stored as its bits."""
    return Field(name, bits_f32, lambda v: (f32_bits(v),), vary=vary)


def u64(name: str) -> Field:
    """Declare a `size_t` in two words, low word first."""

    def read(low: int, high: int) -> int:
        return (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32

    return Field(name, read, lambda v: (int32(v), int32(v >> 32)), 2)


def enum(
    name: str, members: type[IntEnum] | tuple[str, ...], vary: Vary | None = None, *, always: bool = False
) -> Field:
    """Declare a member of `members`; an index into a tuple of names is read as the name."""

    def read(word: int) -> int | str:
        if isinstance(members, tuple):
            return members[word] if 0 <= word < len(members) else word
        return members(word) if word in list(members) else word

    def write(value: int | str) -> tuple[int]:
        names = members if isinstance(members, tuple) else tuple(members.__members__)
        if isinstance(value, int):
            return (int(value),)
        if value not in names:
            raise GraphError(f"{name}: one of {', '.join(names)} expected, {value!r} found")
        return (members.index(value) if isinstance(members, tuple) else int(members[value]),)

    return Field(name, read, write, members=members, always=always, vary=vary)


def vec(name: str, elements: int | str, vary: Vary | None = None, *, always: bool = False) -> Field:
    """Declare several int32: a tuple argument of that length, or an argument for each name."""
    each = tuple(elements.split()) if isinstance(elements, str) else ()
    size = elements if isinstance(elements, int) else len(each)
    return Field(
        name, lambda *words: words, lambda v: (*map(int, v), *(0,) * (size - len(v))), size, each, None, always, vary
    )


GAP = i32("")
"""A word that is always 0."""


def int32(bits: int) -> int:
    """Return the low 32 bits as a signed int."""
    low = bits & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low
