"""Where the boxes of a drawn graph stand: layers by depth, neighbours near each other, parts side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Item = int
"""A box, by number; a negative one is a bend of an edge that crosses its layer."""

SWEEPS = 12
"""Passes over the layers that order and place boxes; more change nothing visible on decoder graphs."""


@dataclass(slots=True)
class Part:
    """A connected part of the graph, in units of one box's width and one layer's height."""

    layers: list[list[Item]]
    x: dict[Item, float] = field(default_factory=dict)
    chains: dict[tuple[Item, Item], list[Item]] = field(default_factory=dict)
    """Edge -> the boxes and bends it runs through, its ends included."""

    @property
    def width(self) -> float:
        """From the left edge of the leftmost box to the right edge of the rightmost."""
        return max(self.x.values(), default=0.0) + 1.0


def layout(count: int, edges: Sequence[tuple[Item, Item]]) -> list[Part]:
    """Parts of a graph of `count` boxes, numbered so that every edge goes from a smaller number to a larger.

    A box stands one below the lowest that leads to it; but one that nothing leads to, or a chain that starts with such
    a box (the views of a cache), right above the first that it leads to. `x` starts at 0 in every part.
    """
    below: dict[Item, list[Item]] = {i: [] for i in range(count)}
    above: dict[Item, list[Item]] = {i: [] for i in range(count)}
    for a, b in dict.fromkeys(edges):
        below[a].append(b)
        above[b].append(a)
    depth = [0] * count
    for i in range(count):
        depth[i] = max((depth[a] + 1 for a in above[i]), default=0)
    loose = [True] * count
    for i in range(count):
        loose[i] = not above[i] or (len(above[i]) == 1 and loose[above[i][0]])
    for i in reversed(range(count)):
        if loose[i] and below[i]:
            depth[i] = min(depth[b] for b in below[i]) - 1
    return [_part(members, depth, below) for members in _connected(count, below, above)]


def _connected(
    count: int, below: Mapping[Item, Sequence[Item]], above: Mapping[Item, Sequence[Item]]
) -> Iterable[list[Item]]:
    seen: set[Item] = set()
    for first in range(count):
        if first in seen:
            continue
        seen.add(first)
        members, todo = [first], [first]
        while todo:
            cur = todo.pop()
            for n in (*below[cur], *above[cur]):
                if n not in seen:
                    seen.add(n)
                    members.append(n)
                    todo.append(n)
        yield sorted(members)


def _part(members: Sequence[Item], depth: Sequence[int], below: Mapping[Item, Sequence[Item]]) -> Part:
    top = min(depth[i] for i in members)
    part = Part([[] for _ in range(max(depth[i] for i in members) - top + 1)])
    up: dict[Item, list[Item]] = {}
    down: dict[Item, list[Item]] = {}
    for i in members:
        part.layers[depth[i] - top].append(i)
    bend = 0
    for a in members:
        for b in below[a]:
            chain = [a]
            for level in range(depth[a] - top + 1, depth[b] - top):
                bend -= 1
                chain.append(bend)
                part.layers[level].append(bend)
            chain.append(b)
            part.chains[a, b] = chain
            for p, q in pairwise(chain):
                down.setdefault(p, []).append(q)
                up.setdefault(q, []).append(p)
    for sweep in range(SWEEPS):
        near, layers = (up, part.layers) if sweep % 2 == 0 else (down, part.layers[::-1])
        for layer in layers:
            _order(layer, near, part.x)
    for sweep in range(SWEEPS):
        near, layers = (up, part.layers) if sweep % 2 == 0 else (down, part.layers[::-1])
        for layer in layers:
            _place(layer, {i: [*up.get(i, ()), *down.get(i, ())] for i in layer} if sweep > 3 else near, part.x)
    left = min(part.x.values())
    part.x = {i: x - left for i, x in part.x.items()}
    return part


def _mean(item: Item, near: Mapping[Item, Sequence[Item]], x: Mapping[Item, float], default: float) -> float:
    places = [x[n] for n in near.get(item, ()) if n in x]
    return sum(places) / len(places) if places else default


def _order(layer: list[Item], near: Mapping[Item, Sequence[Item]], x: dict[Item, float]) -> None:
    """Sort a layer by where its neighbours stand, and number it."""
    wanted = {i: _mean(i, near, x, x.get(i, float(k))) for k, i in enumerate(layer)}
    layer.sort(key=wanted.__getitem__)
    at = 0.0
    start = sum(wanted.values()) / len(wanted) - sum(map(_width, layer)) / 2 if layer else 0.0
    for i in layer:
        x[i] = start + at
        at += _width(i)


def _place(layer: Sequence[Item], near: Mapping[Item, Sequence[Item]], x: dict[Item, float]) -> None:
    """Move a layer's boxes to where their neighbours are, in their order and without touching.

    Boxes that would touch move as one block, to the mean of what its boxes want (pool adjacent violators).
    """
    blocks: list[tuple[list[Item], float, float]] = []  # boxes, sum of wanted starts, width
    for i in layer:
        boxes, total, width = [i], _mean(i, near, x, x[i]), _width(i)
        while blocks and blocks[-1][1] / len(blocks[-1][0]) + blocks[-1][2] > total / len(boxes):
            before, before_total, before_width = blocks.pop()
            total = before_total + total - before_width * len(boxes)
            boxes = before + boxes
            width += before_width
        blocks.append((boxes, total, width))
    for boxes, total, _ in blocks:
        at = total / len(boxes)
        for i in boxes:
            x[i] = at
            at += _width(i)


def _width(item: Item) -> float:
    return 1.15 if item >= 0 else 0.3
