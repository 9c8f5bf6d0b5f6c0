"""Findings about a model's file: typed evidence, of which `filecheck` makes results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite

from conformance.case.case import JSON
from conformance.ggml.text import printable
from conformance.judge.evidence import Fault, Place

LONGEST = 60
"""Maximum characters of a value in a sentence."""


class FindingKind(str, Enum):
    """Kinds of findings, in the order of a report."""

    STORAGE = "storage"
    """The layout of the file: cut off, overlapping, an unknown type."""
    METADATA = "metadata"
    TOKENIZER = "tokenizer"
    MISSING = "missing"
    """A tensor that the other file has, or each other layer."""
    EXTRA = "extra"
    """A tensor that the other file lacks."""
    SHAPE = "shape"
    NOT_FINITE = "not finite"
    SWAPPED = "swapped"
    """A tensor with the values of another one."""
    VALUES = "values"
    """Values that the types of both files do not explain."""
    SCALE = "scale"
    """A scale that no quantiser writes, or values far above their neighbours'."""
    CONSTANT = "constant"
    """Equal values where the others differ."""
    LAYER = "layer"
    """A node that differs by more than quantising its weights costs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a tensor or a key, with its evidence."""

    kind: FindingKind
    where: str
    """The tensor, or the key."""
    wrong: bool = True
    """False if it is unusual but may be intended."""
    index: int | None = None
    """The first or worst block of the tensor, or entry of the array."""
    per: int = 0
    """Values per block; 0 for entries."""
    row: int | None = None
    """The row of that block."""
    count: int = 0
    """Number of blocks or entries concerned; 0 for all or one."""
    of: int = 0
    """Number of blocks or entries."""
    excess: float | None = None
    """How far the worst block is over the limit, as a factor."""
    expected: JSON = None
    found: JSON = None
    other: str = ""
    """The tensor or key whose values these are."""
    cosine: float | None = None
    """Cosine of the values with the expected ones."""
    gain: float | None = None
    """Factor on the expected values that fits best."""
    why: str = ""
    """The rule that is broken."""

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Sort key: wrong ones first, then by kind, then the largest excess."""
        return not self.wrong, list(FindingKind).index(self.kind), -(inf if self.excess is None else self.excess)

    def sentence(self) -> str:
        """Return the finding as one sentence."""
        parts = [self._place(), self.why]
        if self.other:
            parts.append(f"it has the values of {self.other}")
        if self.expected is not None:
            parts.append(f"{_short(self.expected)} expected, {_short(self.found)} found")
        elif self.found is not None:
            parts.append(f"{_short(self.found)} found")
        if self.cosine is not None and self.gain is not None:
            parts.append(f"cosine {self.cosine:.3f}, {self.gain:.3g} times the expected values")
        if self.excess is not None:
            parts.append(f"error {self.excess:.3g} times the limit" if self.excess < inf else "error beyond any limit")
        return printable(": ".join([f"{self.kind.value}: {parts[0]}", ", ".join(p for p in parts[1:] if p)]))

    def _place(self) -> str:
        if self.index is None:
            return self.where
        noun = "block" if self.per else "entry"
        at = f" (row {self.row}, {self.per} values)" if self.per else ""
        many = f", {self.count:,} of {self.of:,}" if self.of else ""
        return f"{self.where}, {noun} {self.index:,}{at}{many}"

    @property
    def place(self) -> Place:
        """Where it is: a weight or a key, without an op, or a node of the first step."""
        op, _, name = self.where.partition(" ") if self.kind is FindingKind.LAYER else ("NONE", "", self.where)
        return Place(Fault.NODE, op=op if name else "NONE", name=printable(name or self.where))

    @property
    def metrics(self) -> dict[str, float]:
        """Its numbers, as far as they are known and finite."""
        numbers = {"index": self.index, "row": self.row, "values_per_block": self.per or None, "cosine": self.cosine,
                   "gain": self.gain, "count": self.count or None, "of": self.of or None}  # fmt: skip
        return {k: float(n) for k, n in numbers.items() if n is not None and isfinite(n)}


def _short(value: JSON) -> str:
    text = "nothing" if value is None else repr(value) if isinstance(value, str) else f"{value:g}" if isinstance(
        value, float) else str(value)  # fmt: skip
    return printable(text, LONGEST)
