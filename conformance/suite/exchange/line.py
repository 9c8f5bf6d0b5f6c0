"""Parse and write lines of a test file: an op, its parameters and its sources as numbers.

    OP TYPE ne×4 N op_params… N {TYPE ne×4 nb×4}… NAME

OP is from `enum ggml_op` of one ggml version, as are the sub-ops in `op_params[0]` of UNARY and GLU; `Numbers` converts
them. A missing name is `-`. The format has no values, no view offsets and no shared bytes, and sources end at the first
absent one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.case.case import Case
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.library import Library
from conformance.ggml.tensor import VIEW_OPS, Dims, Tensor, nbytes, packed_nbytes
from conformance.ggml.types import TYPES, GGMLType

N_PARAMS = 16
MAX_SRC = 10
NAMELESS = "-"
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_TYPES = {t.id: t for t in TYPES.values()}


@dataclass(frozen=True, slots=True)
class Source:
    """A source as described by a line."""

    type: GGMLType
    ne: Dims
    nb: Dims


@dataclass(frozen=True, slots=True)
class Line:
    """One op; sub-ops are numbered as in our cases."""

    op: str
    type: GGMLType
    ne: Dims
    op_params: tuple[int, ...]
    sources: tuple[Source, ...]
    name: str = ""

    def unnamed(self) -> Line:
        """Return the line without its name, which does not distinguish lines upstream."""
        return replace(self, name="")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of ops and sub-ops in one version of ggml."""

    title: str
    ops: Mapping[str, int]
    sub_ops: Mapping[str, tuple[Sequence[str], Mapping[str, int]]]
    """Op -> the names that our `op_params[0]` counts, and name -> number."""

    @classmethod
    def of(cls, library: Library) -> Numbers:
        """Return the numbers of a library."""
        return cls(library.title, library.ops, library.sub_ops)

    def write(self, line: Line) -> str:
        """Return the text of a line; UsageError if this version lacks its op."""
        if line.op not in self.ops:
            raise UsageError(f"{self.title} has no op {line.op}, so a test file for it cannot name it")
        params = list(line.op_params)
        if line.op in self.sub_ops:
            known, ids = self.sub_ops[line.op]
            name = known[params[0]]
            if name not in ids:
                raise UsageError(f"{self.title} has no {line.op} {name}, so a test file for it cannot name it")
            params[0] = ids[name]
        words: list[object] = [self.ops[line.op], line.type.id, *line.ne, len(params), *params, len(line.sources)]
        for s in line.sources:
            words += [s.type.id, *s.ne, *s.nb]
        return " ".join(map(str, [*words, line.name or NAMELESS]))

    def read(self, text: str, where: str) -> Line:
        """Parse a line; UsageError names the place, the expected and the found text."""
        words = _Words(text, where)
        number = words.number("an op")
        op = next((n for n, i in self.ops.items() if i == number), None)
        if op is None:
            raise UsageError(f"{where}: a number of an op of {self.title} expected, {number} found")
        type_, ne = words.type(), words.dims("ne")
        params = [words.number("an op_param") for _ in range(words.count("op_params", N_PARAMS))]
        params += [0] * (N_PARAMS - len(params))
        if op in self.sub_ops:
            known, ids = self.sub_ops[op]
            name = next((n for n, i in ids.items() if i == params[0]), None)
            if name is None:
                raise UsageError(f"{where}: a number of a {op} of {self.title} expected, {params[0]} found")
            params[0] = list(known).index(name)
        sources = tuple(
            Source(words.type(), words.dims("ne"), words.dims("nb")) for _ in range(words.count("src", MAX_SRC))
        )
        return Line(op, type_, ne, tuple(params), sources, words.rest())


class _Words:
    """Reader for the words of a line."""

    def __init__(self, text: str, where: str) -> None:
        self._words, self._at, self._where = text.split(), 0, where

    def number(self, what: str) -> int:
        word = self._words[self._at] if self._at < len(self._words) else None
        if word is None or not _NUMBER.fullmatch(word):
            came = "the end of the line" if word is None else repr(word[:40])
            raise UsageError(f"{self._where}: word {self._at + 1}: {what}, a number, expected, {came} found")
        self._at += 1
        return int(word)

    def count(self, what: str, most: int) -> int:
        n = self.number(f"how many {what}")
        if not 0 <= n <= most:
            raise UsageError(f"{self._where}: word {self._at}: 0 to {most} {what} expected, {n} found")
        return n

    def type(self) -> GGMLType:
        n = self.number("a type")
        if n not in _TYPES:
            raise UsageError(f"{self._where}: word {self._at}: a number of `enum ggml_type` expected, {n} found")
        return _TYPES[n]

    def dims(self, what: str) -> Dims:
        found = tuple(self.number(what) for _ in range(4))
        if min(found) < 0:
            raise UsageError(f"{self._where}: word {self._at}: four {what} from 0 expected, {found} found")
        return found  # type: ignore[return-value]  # four numbers

    def rest(self) -> str:
        name = " ".join(self._words[self._at :])
        return "" if name == NAMELESS else name


def lines_of(case: Case) -> Iterator[Line]:
    """Yield a line per computing node, without repeats of op, parameters and sources."""
    seen: set[Line] = set()
    for step in case.steps:
        for node in step.graph:
            if node.op in VIEW_OPS or node.op == "NONE":
                continue
            line = line_of(node)
            if line.unnamed() not in seen:
                seen.add(line.unnamed())
                yield line


def line_of(node: Tensor) -> Line:
    """Return the line of one node."""
    sources: list[Source] = []
    for s in node.src:
        if s is None:
            break
        sources.append(Source(s.type, s.ne, s.nb))
    return Line(node.op, node.type, node.ne, node.op_params, tuple(sources), "_".join(node.name.split()))


def lost(node: Tensor) -> str:
    """Return the properties of a node that its line loses; empty if none."""
    present = [i for i, s in enumerate(node.src) if s is not None]
    gap = next((i for i, s in enumerate(node.src) if s is None), len(node.src))
    if any(i > gap for i in present):
        return f"src[{gap}] is absent, so the format ends there and loses src[{max(present)}]"
    return ""


def unwritten(node: Tensor) -> str:
    """Return why the program compares unwritten values or NaN for the line of a node, or "".

    Its generic op (`test_generic_op` of test-backend-ops.cpp) has a fresh result in place of a view, fills a source
    with gaps only up to its element count, and draws values from -1 to 1.
    """
    if node.op in VIEW_OPS:
        return ""
    if node.op == "SET_ROWS" and node.src[0] is not None and node.src[0].ne[1] < node.ne[1]:
        return "it also compares rows that no op wrote"
    if any(s is not None and nbytes(s) > packed_nbytes(s) for s in node.src):
        return "it fills only the beginning of a source with gaps"
    return "it draws values from -1 to 1, and half of them give NaN" if node.op in {"SQRT", "LOG"} else ""


def read_lines(text: str, numbers: Numbers, where: str) -> list[Line]:
    """Parse all lines of a file; UsageError as for `Numbers.read`, or for an empty file."""
    rows = [(i, row) for i, row in enumerate(text.splitlines(), 1) if row.strip()]
    if not rows:
        raise UsageError(f"{where}: lines of test-backend-ops' --test-file expected, none found")
    return [numbers.read(row, f"{where}: line {i}") for i, row in rows]
