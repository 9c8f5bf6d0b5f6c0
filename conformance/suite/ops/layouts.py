"""Derive the layouts in which each op source is tested from its declaration and cases.

A source is tested in each layout of `LAYOUTS` in which its op can be built: the declaration rejects what ggml rejects.
`full` has every layout, also for in-place variants; `standard` has one case per class of the resulting strides, and
one with `dst=between` per op and types. Ids missing from the rows of the tables are in `layouts.json`, which
`ci/layouts.py` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.ggml.errors import ConformanceError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.tensor import Tensor, is_contiguous, nbytes, nelements
from conformance.ggml.types import F32

from . import KNOWN, built, size
from .bench import ALIGNMENT, DST, SOURCE, TABLES, Bench, OpId, parse

DENSE = "dense"
OFFSET = "offset"
GAPS = "gaps between rows"
HOLES = "gaps between matrices"
PERMUTED = "rows permuted"
STRIDED = "elements apart"

LAYOUTS: dict[str, str] = {
    "flat": DENSE,
    "off": OFFSET,
    "pad": GAPS,
    "rows": GAPS,
    "slab": HOLES,
    "part": HOLES,
    "p0213": PERMUTED,
    "p0321": PERMUTED,
    "p1023": STRIDED,
    "p2013": STRIDED,
    "pad.p1023": STRIDED,
}
"""Layout -> its class for a source with four dimensions; `class_of` classifies a tensor."""
CLASSES = tuple(dict.fromkeys(LAYOUTS.values()))

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""Op and source name -> why no case varies its layout."""


def class_of(t: Tensor) -> str:
    """Return the class of a tensor's strides; dimensions of one element are ignored."""
    if is_contiguous(t):
        return OFFSET if t.view_offs else DENSE
    size, block = t.type.type_size, t.type.blck_size
    if t.ne[0] > block and t.nb[0] != size:
        return STRIDED
    strides = [(t.nb[d], t.ne[d]) for d in (1, 2, 3) if t.ne[d] > 1]
    if strides != sorted(strides, key=lambda s: s[0]):
        return PERMUTED
    return GAPS if t.ne[1] > 1 and t.nb[1] != t.ne[0] // block * size else HOLES


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """A source to be tested in each layout."""

    op: str
    """The op, with its sub-op."""
    at: int
    inplace: bool

    @property
    def name(self) -> str:
        """Name of the source in ggml."""
        return DECLARATIONS[self.op.partition(".")[0]].src[self.at]


def sources() -> Iterator[Source]:
    """Yield every source of every op, and the first source of its in-place variant."""
    for table in TABLES:
        for op in table.ops:
            for i in range(len(DECLARATIONS[op.partition(".")[0]].src)):
                yield Source(op, i, inplace=False)
            if "inplace" in table.keys:
                yield Source(op, 0, inplace=True)


SMALL = 1 << 14
"""Maximum elements of a source in a base case."""
ENOUGH = 48
"""Elements of a source that reveal most bugs."""
_ODD = frozenset({"data", "special", "hint", "computed"})
"""Keys of cases that serve another purpose."""


@dataclass(slots=True)
class Survey:
    """Layouts covered by built cases, and the cases from which further ones are derived."""

    layouts: set[tuple[Source, str]] = field(default_factory=set)
    classes: set[tuple[Source, str]] = field(default_factory=set)
    bases: dict[Source, dict[int, tuple[Any, ...]]] = field(default_factory=dict)
    """Source -> number of dimensions -> the best such base case: its rank, then its id."""
    alone: dict[tuple[str, ...], tuple[Any, ...]] = field(default_factory=dict)
    """Op and types -> the best case with an output without padding: its rank, then its id."""
    between: set[tuple[str, ...]] = field(default_factory=set)
    """Ops and types with a case of `dst=between`."""

    def add(self, case_id: str) -> None:
        """Build a case and record the layouts that it covers."""
        op_id = parse(case_id, KNOWN)
        bench, outputs = built(op_id)
        inplace = bool(op_id.given.get("inplace"))
        plain = not bench.laid and not _ODD & op_id.given.keys()
        self._add_output(op_id, bench, outputs, plain=plain)
        for i in range(len(DECLARATIONS[op_id.op.partition(".")[0]].src)):
            for t in bench.sources(outputs, i):
                leaf = t.op == "NONE" and t.view_src is None
                if t not in bench.laid and not leaf:
                    continue
                source = Source(op_id.op, i, inplace=inplace and i == 0)
                self.layouts.add((source, bench.laid.get(t, "")))
                self.classes.add((source, class_of(t)))
                if leaf and plain and (i == 0 or not inplace) and nelements(t) <= SMALL:
                    n = sum(ne > 1 for ne in t.ne)
                    rank = _rank(op_id, t)
                    bases = self.bases.setdefault(source, {})
                    bases[n] = min(bases.get(n, (*rank, case_id)), (*rank, case_id))

    def _add_output(self, op_id: OpId, bench: Bench, outputs: Sequence[Tensor], *, plain: bool) -> None:
        kind = op_id.op, *(t.name for t in op_id.types)
        if op_id.given.get(DST):
            self.between.add(kind)
            return
        dst = bench.only_result(outputs)
        if plain and dst is not None and nbytes(dst) % ALIGNMENT == 0:
            rank = *_rank(op_id, dst), op_id.id
            self.alone[kind] = min(self.alone.get(kind, rank), rank)

    def between_lacking(self) -> Iterator[str]:
        """Yield an id with `dst=between` for each op and types that have none."""
        for kind, (*_, case_id) in self.alone.items():
            if kind not in self.between:
                yield f"{case_id.rpartition('@')[0]},{DST}=between"

    def accepted(self, source: Source) -> Iterator[tuple[str, str, str]]:
        """Yield each layout that ggml accepts for a source, with its stride class and an id."""
        for layout in LAYOUTS:
            for _, base in sorted(self.bases.get(source, {}).items(), reverse=True):
                body = f"{base[-1].rpartition('@')[0]},{SOURCE}{source.at}={layout}"
                try:
                    bench, outputs = built(parse(f"{body}@0", KNOWN))
                    bench.case(outputs).validate()
                except ConformanceError:
                    continue
                yield class_of(next(iter(bench.laid))), layout, body
                break


def _rank(op_id: OpId, t: Tensor) -> tuple[Any, ...]:
    odd = op_id.given.get("hide", "") in {"junk", "seen", "finite", "blind"}
    plain = all(type_ is F32 for type_ in op_id.types)
    return t.type.is_quantized, odd, not plain, nelements(t) < ENOUGH, nelements(t), len(op_id.given)


def small(case_id: str) -> bool:
    """Return True if a case is cheap to build."""
    return size(case_id) <= SMALL


def survey(case_ids: Iterable[str]) -> Survey:
    """Return a survey of the cases."""
    found = Survey()
    for case_id in case_ids:
        found.add(case_id)
    return found


def lacking(standard: Survey, full: Survey) -> tuple[list[str], list[str]]:
    """Return ids, without seed, that `standard` lacks, and those that `full` lacks too."""
    small: list[str] = []
    rest: list[str] = []
    for source in sources():
        if (source.op.partition(".")[0], source.name) in EXCEPTIONS:
            continue
        ways = list(standard.accepted(source))
        have = {c for s, c in standard.classes if s == source}
        for class_, layout, body in ways:
            if class_ not in have and class_ != DENSE and not source.inplace:
                have.add(class_)
                small.append(body)
            elif (source, layout) not in full.layouts:
                rest.append(body)
    return [*small, *standard.between_lacking()], rest
