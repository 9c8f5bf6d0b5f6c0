"""Order cases for a time limit: each op gets its share, cases with something new first."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from conformance.suite import by_default, ops, tbo

SMALL = (ops.NAME, tbo.NAME)
"""Families whose cases are one graph of a few nodes: ops, and the cases of upstream's tests."""
LARGE = {65_536: "more than the fewest workgroups that a device must offer", 1024: "more than one workgroup has"}
"""Sizes of a dimension above which kernels split it differently."""
_SHAPE = re.compile(r"=(?:[0-9]+(?:x[0-9]+)+|\[[0-9]+(?:,[0-9]+)+\])")
_SUBJECT = re.compile(r"[^-(]*")


def subject(case_id: str) -> str:
    """Return the op of a case, or the model of a trajectory."""
    return _SUBJECT.match(case_id)[0]  # type: ignore[index]  # an empty text at least


def of_ops(ids: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the cases of ops that begin with one of `names`, as MUL_MAT_ID_FUSION does."""
    begin = tuple(names)
    return [i for i in ids if subject(i).partition("/")[2].startswith(begin)]


def spread(ids: Sequence[str], before: Iterable[str] = ()) -> list[str]:
    """Interleave cases of all ops and families, so that each gets its share of the time.

    Within an op, cases with something new come first: a type, a stride or a parameter value that neither its earlier
    cases nor those of `before` have.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for i in ids:
        groups[subject(i)].append(i)
    known: dict[str, set[str]] = defaultdict(set)
    for i in before:
        known[subject(i)] |= _traits(i)
    turn = {i: n for s, own in groups.items() for n, i in enumerate(_new_first(own, known[s]))}
    return sorted(ids, key=lambda i: turn[i])


def families() -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the default families: of single ops, and the others."""
    return SMALL, [f.name for f in by_default() if f.name not in SMALL]


def small_first(ids: Sequence[str]) -> list[str]:
    """Return single ops, then the rest, each part in the order of `spread`.

    A trajectory costs as much as hundreds of ops.
    """
    small = [i for i in ids if i.partition("/")[0] in SMALL]
    return [*spread(small), *spread([i for i in ids if i.partition("/")[0] not in SMALL])]


def one_each(ids: Sequence[str], known: Iterable[str], of: Callable[[str], str] = subject) -> list[str]:
    """Return the first case of each group `of` ids of which `known` has none."""
    seen = set(map(of, known))
    return list({of(i): i for i in reversed(ids) if of(i) not in seen}.values())


def _new_first(ids: Sequence[str], known: set[str]) -> Iterator[str]:
    """Yield `ids`, the one with the most new traits first; ties keep their order.

    This is the greedy algorithm for set cover with lazy evaluation (Minoux 1978). `known` only grows, so the number in
    the heap is an upper bound of what a case still adds: the top is recounted, and yielded if its number is unchanged.
    """
    traits = [_traits(i) for i in ids]
    heap = [(-len(t - known), n) for n, t in enumerate(traits)]
    heapify(heap)
    while heap:
        before, n = heappop(heap)
        now = -len(traits[n] - known)
        if now > before:  # another has brought some of it meanwhile
            heappush(heap, (now, n))
            continue
        known |= traits[n]
        yield ids[n]


def _traits(case_id: str) -> set[str]:
    """Return the distinguishing properties of an op's case: types, parameters, rough shapes.

    Exact shapes are ignored, because nearly every case has a different one: `ops/MUL_MAT-q4_0+f32-a=64x8,b=64x3@5` has
    "q4_0+f32", "a=2 dimensions" and "b=2 dimensions".
    """
    rest = case_id.partition("@")[0][len(subject(case_id)) :]
    return set(re.split("[-,(]", _SHAPE.sub(_dimensions, rest)))


def _dimensions(shape: re.Match[str]) -> str:
    sizes = [int(n) for n in re.findall("[0-9]+", shape[0])]
    return f"={len(sizes)} dimensions {next((why for n, why in LARGE.items() if max(sizes) >= n), '')}"
