"""The notation of case tables: a grid is one id per combination of the values on its axes.

`grid("ADD SUB", "f32 f16", a="13x5", b="- 1 13", layout=points("va=pad va=off,vb=rows"))` is 24 ids, the last of which
is `SUB-f16-a=13x5,b=13,va=off,vb=rows`.

- Words separated by spaces are the values of an axis, in the order of the ids; `-` omits the key.
- Keywords are the keys of the id, in its order: `from_` is `from`, and `**KEYS` inserts a dictionary of them.
- `points` lists texts of several keys that change together; such an axis has its own name.
- `shapes("64", "1 3", "4")` is `64x1x4 64x3x4`, and `operands("f32 f16", "i32")` is `f32+i32 f16+i32`.
- `grid("f32+f32", a="{k}x7", b="{k}x{n}").where(k="32 64", n="1 9")` fills in the values of further axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, combinations, pairwise, product

from .covering import cover

TRIES = 40
"""Completions that `Grid.pairs` tries per row."""
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Digits that encode a row, one for each part of the grid that has alternatives."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The values at one position of an id."""

    name: str
    """The key with these values; arbitrary for an axis of `points`."""
    parts: tuple[tuple[str, ...], ...]
    """Alternatives of each part of a value. An empty value omits the key."""
    glue: str = ""
    """Separator of the parts."""
    has_keys: bool = False
    """True if a value is a text like `va=off,vb=rows`."""

    @property
    def values(self) -> tuple[str, ...]:
        """All values; the last part changes fastest."""
        return tuple(self.glue.join(parts) for parts in product(*self.parts))

    def text(self, value: str) -> str:
        """Return a value as it stands in an id."""
        return value if self.has_keys or not value else f"{self.name}={value}"

    def by_digits(self) -> Iterator[tuple[str, str]]:
        """Yield each value with its digits in a row."""
        alternatives = (DIGITS[: len(words)] if len(words) > 1 else ("",) for words in self.parts)
        return zip(map("".join, product(*alternatives)), self.values, strict=True)

    def __str__(self) -> str:
        parts = (" ".join(word or "-" for word in words) for words in self.parts)
        return f"{self.name}: {f' {self.glue} '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Grid:
    """One id, without family and seed, per combination of values; the last axis changes fastest."""

    heads: tuple[Axis, ...]
    """The words before the keys, joined by `-`."""
    axes: tuple[Axis, ...]
    free: tuple[Axis, ...] = ()
    """Axes whose values replace `{name}` in the values of other axes."""
    triples: tuple[frozenset[str], ...] = ()
    """Groups of three axes of which a covering array has each combination, not only each pair."""

    def where(self, **axes: str) -> Grid:
        """Return the grid with further axes, whose values replace `{name}` in the ids."""
        return replace(self, free=tuple(_axis(name, values) for name, values in axes.items()))

    def triple(self, *names: str) -> Grid:
        """Return the grid, with each combination of the axes `names` in its covering array."""
        return replace(self, triples=(*self.triples, frozenset(names)))

    @property
    def digits(self) -> list[str]:
        """Name of the axis of each digit of a row."""
        return [a.name for a in (*self.heads, *self.axes, *self.free) for words in a.parts if len(words) > 1]

    @property
    def sizes(self) -> list[int]:
        """Number of alternatives of each part with several, in the order of a row's digits."""
        return [len(words) for words in self.parts if len(words) > 1]

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Alternatives of each part of each axis."""
        return tuple(chain.from_iterable(axis.parts for axis in (*self.heads, *self.axes, *self.free)))

    def __iter__(self) -> Iterator[str]:
        texts = ([axis.text(value) for value in axis.values] for axis in (*self.heads, *self.axes))
        return map(self._id, product(*texts, *(axis.values for axis in self.free)))

    def rows(self, rows: str) -> Iterator[str]:
        """Yield the id of each word in `rows`.

        A word has one of `DIGITS` for each part with several alternatives: the index of the alternative.
        """
        tables = [
            *({digits: axis.text(value) for digits, value in axis.by_digits()} for axis in (*self.heads, *self.axes)),
            *(dict(axis.by_digits()) for axis in self.free),
        ]
        ends = [*accumulate(len(next(iter(table))) for table in tables)]
        places = [slice(*place) for place in pairwise((0, *ends))]
        for row in rows.split():
            yield self._id([table[row[place]] for table, place in zip(tables, places, strict=True)])

    def pairs(self, name: str) -> Iterator[str]:
        """Yield ids in which each two values of two axes meet; the same for the same `name`."""
        rows = cover(self.sizes, list(combinations(range(len(self.sizes)), 2)), name, tries=TRIES)
        return self.rows(" ".join("".join(DIGITS[i] for i in row) for row in rows))

    def _id(self, texts: Sequence[str]) -> str:
        """Return the id of the texts of heads and axes, and the values of free axes."""
        n, end = len(self.heads), len(self.heads) + len(self.axes)
        text = "-".join(filter(None, (*texts[:n], ",".join(filter(None, texts[n:end])))))
        return text.format_map(dict(zip((a.name for a in self.free), texts[end:], strict=True))) if self.free else text

    def __str__(self) -> str:
        triples = (f"triple: {' '.join(sorted(names))}" for names in self.triples)
        return "; ".join((*map(str, (*self.heads, *self.axes, *self.free)), *triples))


Row = str | Grid
"""A row of a table: an id, or a grid of ids."""
Keys = dict[str, "str | int | Axis"]
"""Keywords of `grid`, to be shared with `**`."""


def grid(*heads: str | Axis, **axes: str | int | Axis) -> Grid:
    """Return every combination of the values of `heads`, joined by `-`, and of the keys `axes`.

    Raises:
        ValueError: an axis has no value, or there are more than two heads.
    """
    names = ("what", "types")[: len(heads)]
    return Grid(
        tuple(replace(_axis(name, head), has_keys=True) for name, head in zip(names, heads, strict=True)),
        tuple(_axis(name.rstrip("_"), values) for name, values in axes.items()),
    )


def points(*texts: str) -> Axis:
    """Return an axis of space-separated texts like `va=off,vb=rows`, whose keys change together."""
    return Axis("", (_words(" ".join(texts)),), has_keys=True)


def shapes(*parts: str) -> Axis:
    """Return all combinations of numbers from each part, joined by `x`."""
    return Axis("", tuple(map(_words, parts)), "x")


def operands(*parts: str) -> Axis:
    """Return all combinations of types from each part, one per operand, joined by `+`."""
    return Axis("", tuple(map(_words, parts)), "+")


def ids_of_rows(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the ids of rows, in order."""
    for row in rows:
        yield from (row,) if isinstance(row, str) else row


def _axis(name: str, values: str | int | Axis) -> Axis:
    axis = replace(values, name=name) if isinstance(values, Axis) else Axis(name, (_words(str(values)),))
    if not all(axis.parts):
        raise ValueError(f"{name}: at least one value expected")
    return axis


def _words(text: str) -> tuple[str, ...]:
    return tuple("" if word == "-" else word for word in text.split())
