"""Documents with a value changed, or left out, at any of their places."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

from conformance.case.case import JSON

Place = tuple[str | int, ...]
LEFT_OUT: JSON = object()


def places(value: JSON, at: Place = ()) -> Iterator[Place]:
    """Each place below `value`, an outer one before those in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def changed(good: JSON, place: Place, value: JSON) -> JSON:
    """A copy of `good` with `value` at a place; `LEFT_OUT` takes away what is there."""
    found = target = copy.deepcopy(good)
    for key in place[:-1]:
        target = target[key]
    if value is LEFT_OUT:
        del target[place[-1]]
    else:
        target[place[-1]] = copy.deepcopy(value)
    return found


def drawn(
    good: JSON,
    changes: Sequence[tuple[int, int]],
    values: Sequence[JSON],
    among: Callable[[Place], bool] = lambda _: True,
) -> JSON:
    """`good` with one of `values`, or nothing (-1), at each of the places that hypothesis drew by number."""
    for at, n in changes:
        there = [p for p in places(good) if among(p)]
        if there:
            good = changed(good, there[at % len(there)], LEFT_OUT if n < 0 else values[n])
    return good
