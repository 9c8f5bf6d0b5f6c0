"""The engine of the declarations: an op of ggml is declared once, and what others need of it follows.

A declaration (`op`) names an op's sources and parameters, what ggml's constructor makes and asserts, and its typed
constructors. From it follow reading and packing `op_params` by name, the check of nodes from files, the `Builder`,
the texts of reports, the calls of snippets, what an audit varies and the row of the tolerance table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import itemgetter
from typing import Any

from conformance.ggml.tensor import FIELDS, Tensor, bits_f32, f32_bits

Vary = Callable[[Tensor, Any], Any]
"""Node and a parameter's value -> another value that changes the node's numbers but not its shape."""


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter: where it stands in `op_params`, and how its words are read and written."""

    name: str
    """ggml's name of the constructor's argument; empty for a gap."""
    read: Callable[..., Any]
    """`size` words -> the value."""
    write: Callable[[Any], tuple[int, ...]]
    size: int = 1
    each: tuple[str, ...] = ()
    """Names of the elements, where the constructor takes them one by one."""
    enum: type[IntEnum] | tuple[str, ...] | None = None
    ctype: str = ""
    """The C enum that the constructor takes."""
    bare: bool = False
    """Reports show the value without its name, and also where it is 0."""
    vary: Vary | None = None
    at: int = 0
    """Position of its first word."""

    def of(self, words: tuple[int, ...]) -> Any:  # noqa: ANN401  # float, int, bool, str, enum or tuple
        """The value that all 16 words hold."""
        return self.read(*words[self.at : self.at + self.size])

    def legal(self, words: tuple[int, ...]) -> bool:
        """Whether an enumeration's value is one of its members, a flag 0 or 1, a gap 0."""
        if not self.name:
            return not any(words[self.at : self.at + self.size])
        if self.enum is None:
            return self.read is not bool or words[self.at] in (0, 1)
        value = words[self.at]
        return 0 <= value < len(self.enum) if isinstance(self.enum, tuple) else value in list(self.enum)

    def text(self, words: tuple[int, ...]) -> str:
        """The value as reports show it."""
        value = self.of(words)
        if isinstance(value, float):
            return f"{value:.7g}"
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, IntEnum):
            return value.name.lower()
        return str(int(value) if isinstance(value, bool) else value)


def i32(name: str, vary: Vary | None = None) -> Field:
    """An int32."""
    return Field(name, int, lambda v: (int(v),), vary=vary)


def flag(name: str, vary: Vary | None = None) -> Field:
    """An int32 that is 0 or 1."""
    return Field(name, bool, lambda v: (int(v),), vary=vary)


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


_HALF = times(0.5)


def f32(name: str, vary: Vary | None = _HALF) -> Field:
    """A float32, stored by its bits."""
    return Field(name, bits_f32, lambda v: (f32_bits(v),), vary=vary)


def u64(name: str) -> Field:
    """A `size_t` in two words, the low one first."""

    def read(low: int, high: int) -> int:
        return (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32

    return Field(name, read, lambda v: (int32(v), int32(v >> 32)), 2)


def enum(
    name: str,
    members: type[IntEnum] | tuple[str, ...],
    ctype: str = "",
    *,
    bare: bool = False,
    vary: Vary | None = None,
) -> Field:
    """A member of `members`; of a tuple of names its position, read as the name."""

    def read(word: int) -> int | str:
        if isinstance(members, tuple):
            return members[word] if 0 <= word < len(members) else word
        return members(word) if word in list(members) else word

    def write(value: int | str) -> tuple[int]:
        if isinstance(members, tuple):
            return (members.index(value) if isinstance(value, str) else int(value),)
        return (int(members[value] if isinstance(value, str) else value),)

    return Field(name, read, write, enum=members, ctype=ctype, bare=bare, vary=vary)


def vec(name: str, elements: int | str, vary: Vary | None = None) -> Field:
    """Several int32: a tuple of so many for the constructor, or one argument for each of these names."""
    each = tuple(elements.split()) if isinstance(elements, str) else ()
    size = elements if isinstance(elements, int) else len(each)
    return Field(name, lambda *words: words, lambda v: tuple(map(int, v)), size, each, vary=vary)


GAP = i32("")
"""A word that stays 0."""


def placed(fields: tuple[Field, ...]) -> Iterator[Field]:
    """`fields` with their positions in `op_params`."""
    at = 0
    for f in fields:
        yield replace(f, at=at)
        at += f.size


def declare_fields(op: str, fields: tuple[Field, ...]) -> None:
    """Make `node.params` of `op` read `fields`, which are placed."""
    readers: dict[str, Callable[[tuple[int, ...]], Any]] = {}
    for f in fields:
        if f.name:
            readers[f.name] = f.of
        for i, name in enumerate(f.each):
            readers[name] = itemgetter(f.at + i)
    FIELDS[op] = readers


def int32(bits: int) -> int:
    """The low 32 bits as a signed int."""
    low = bits & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low
