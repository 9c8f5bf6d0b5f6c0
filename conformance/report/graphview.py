"""Renders a graph as a table, like ggml's own dump, and as an SVG drawing."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, pairwise

from tabulate import tabulate

from conformance.case.case import writes_in_place
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import params_text
from conformance.ggml.tensor import (
    FLAG_COMPUTE,
    FLAG_INPUT,
    FLAG_LOSS,
    FLAG_OUTPUT,
    FLAG_PARAM,
    VIEW_OPS,
    Tensor,
    is_contiguous,
)
from conformance.judge.verdict import counted

_FLAGS = ((FLAG_INPUT, "input"), (FLAG_OUTPUT, "output"), (FLAG_PARAM, "param"), (FLAG_LOSS, "loss"))
_NAME_WIDTH = 34

# Kind of box -> fill, border.
_KINDS = {
    "weight": ("#fff3d6", "#c9962c"),
    "cache": ("#ffe0dc", "#c8503c"),
    "input": ("#e2f4e2", "#4c9a4c"),
    "view": ("#f4f4f6", "#a0a0ac"),
    "compute": ("#e3edfb", "#3f72b8"),
    "writes in place": ("#f3e2fa", "#8a4fb0"),
}
BOX_WIDTH, BOX_HEIGHT = 184, 54
_PADDING = 7
"""Minimum space between a box's border and its text, in pixels."""
_HEAD_SIZE, _SIZE = 11, 10
"""Font sizes in pixels."""
_ARROW = 6
"""Length of an arrow's head."""
_LAYER_H, _GAP, _MARGIN = 92, 40, 20
_UNIT = BOX_WIDTH
_STYLE = """<style>
text{text-anchor:middle;fill:#222}
.h{font-weight:bold;font-size:11px}
.e{fill:none;stroke:#7a8090;stroke-width:1.1;marker-end:url(#arrow)}
</style>"""
_MARKER = (
    f'<marker id="arrow" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="{_ARROW}" markerHeight="{_ARROW}" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="#7a8090"/></marker>'
)
# Widths of letters relative to their size, in the widest font that browsers use for sans-serif (DejaVu Sans).
_WIDE = {
    **dict.fromkeys(" .,:;'|!iljI[]()`", 0.41),
    **dict.fromkeys('frt/\\-_"J', 0.50),
    **dict.fromkeys("mMwWQOG@%", 1.0),
    **dict.fromkeys("=+<>~#&^", 0.84),
    **dict.fromkeys("ABCDEFHKLNPRSTUVXYZ", 0.76),
    **dict.fromkeys("abcdeghknopqsuvxyz0123456789*?$", 0.64),
}
_BOLD = 1.13
_NOT_XML = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 65534, 65535, *range(55296, 57344)), "�")


def table(graph: Graph) -> str:
    """Format a row per tensor, in the order and with the numbers of a case file.

    `nb` is shown if the strides are not contiguous; `src` by number, with `view_offs` as `@bytes`; `flags` without
    COMPUTE, which every computed node has (its absence is shown); op_params with ggml's names.
    """
    tensors = graph.tensors()
    number = {t: j for j, t in enumerate(tensors)}
    nodes = set(graph.nodes)
    rows = [
        (
            number[t],
            _dims(t.ne),
            t.op if t in nodes else f"({t.op.lower()})",
            _short(t.name),
            t.type.name,
            "" if is_contiguous(t) else _dims(t.nb),
            _sources(t, number),
            _flags(t, t in nodes),
            params_text(t),
        )
        for t in tensors
    ]
    counts = Counter(n.op for n in graph)
    head = ("#", "ne", "op", "name", "type", "nb", "src", "flags", "op_params")
    body = tabulate(rows, head, disable_numparse=True, colalign=("right", *("left",) * 8))
    ops = ", ".join(f"{n} {op}" for op, n in sorted(counts.items(), key=lambda c: (-c[1], c[0])))
    leaves = len(tensors) - len(nodes)
    count = f"{leaves} leaves" if leaves != 1 else "1 leaf"
    return f"{body}\n{count}, {counted(len(graph), 'node')}: {ops}"


@dataclass(frozen=True, slots=True)
class Box:
    """One tensor of a drawing: the middle of its upper edge, in pixels, and its lines of text."""

    tensor: Tensor
    x: float
    y: float
    kind: str
    head: str
    below: str
    holds: str
    title: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph laid out: `edges` are SVG paths, to be drawn below the boxes."""

    width: float
    height: float
    boxes: list[Box]
    edges: list[str]


def svg(graph: Graph) -> str:
    """Draw a graph from the top down: a layer per depth, a colour per kind, tooltips.

    The SVG has no script, no outside reference and no font to load.
    """
    drawing = draw(graph)
    edges = [f'<path class="e" d="{path}"/>' for path in drawing.edges]
    return _page(max(drawing.width, 720), drawing.height, [*edges, *map(_box, drawing.boxes)])


def draw(graph: Graph) -> Drawing:
    """Lay a graph out.

    A leaf is drawn once per reader, so that a mask or the positions do not connect the whole picture; unconnected parts
    are placed side by side.
    """
    tensors = graph.tensors()
    number = {t: j for j, t in enumerate(tensors)}
    nodes = set(graph.nodes)
    kinds = _kinds(graph)
    items: list[Tensor] = []
    edges: list[tuple[Item, Item]] = []
    of: dict[Tensor, Item] = {}
    for t in tensors:
        if t not in nodes and t.view_src is None:
            continue
        sources = [s for s in dict.fromkeys((*t.src, None if t.src else t.view_src)) if s is not None and s is not t]
        ends = []
        for s in sources:
            if s in of:
                ends.append(of[s])
            else:
                ends.append(len(items))
                items.append(s)
        of[t] = len(items)
        items.append(t)
        edges += [(end, of[t]) for end in ends]
    parts = _arranged(layout(len(items), edges))
    paths: list[str] = []
    boxes: list[Box] = []
    for part, left, top in parts:
        layer_of = {i: k for k, layer in enumerate(part.layers) for i in layer}
        paths += [_edge([_point(part, i, layer_of[i], left, top) for i in chain]) for chain in part.chains.values()]
        for k, layer in enumerate(part.layers):
            for i in layer:
                if i >= 0:
                    t = items[i]
                    x, y = _point(part, i, k, left, top)
                    boxes.append(Box(t, x, y, kinds[t], *_words(t, kinds[t]), _title(t, number, t in nodes)))
    width = max((left + part.width * _UNIT for part, left, _ in parts), default=0.0) + _MARGIN
    height = max((top + len(part.layers) * _LAYER_H for part, _, top in parts), default=0.0) + _MARGIN
    return Drawing(width, height, boxes, paths)


def _kinds(graph: Graph) -> dict[Tensor, str]:
    """Return tensor -> key of `_KINDS`.

    A graph does not mark persistent tensors: a leaf without FLAG_INPUT is a weight, unless a node writes into it or its
    name contains "cache".
    """
    nodes = set(graph.nodes)
    written = {n.view_src for n in graph if writes_in_place(n)}
    kinds: dict[Tensor, str] = {}
    for t in graph.tensors():
        if t in nodes or t.view_src is not None:
            kinds[t] = "view" if t.op in VIEW_OPS else "writes in place" if writes_in_place(t) else "compute"
        elif t in written or t.name.startswith("cache_"):
            kinds[t] = "cache"
        else:
            kinds[t] = "weight" if t.name.endswith((".weight", ".bias")) or not t.flags & FLAG_INPUT else "input"
    return kinds


def _arranged(parts: list[Part]) -> list[tuple[Part, float, float]]:
    """Return the parts with left and top (pixels), on shelves of a nearly square picture."""
    area = sum((p.width * _UNIT + _GAP) * (len(p.layers) * _LAYER_H + _GAP) for p in parts)
    shelf = max([1.4 * area**0.5, *(p.width * _UNIT for p in parts)])
    left, top, lowest = float(_MARGIN), 60.0, 60.0
    places = []
    for part in parts:
        width = part.width * _UNIT
        if left > _MARGIN and left + width > shelf + _MARGIN:
            left, top = float(_MARGIN), lowest + _GAP
        places.append((part, left, top))
        lowest = max(lowest, top + len(part.layers) * _LAYER_H)
        left += width + _GAP
    return places


def _point(part: Part, item: Item, layer: int, left: float, top: float) -> tuple[float, float]:
    """Return the middle of a box's upper edge, or a bend."""
    x = left + part.x[item] * _UNIT + _UNIT / 2
    return (x if item >= 0 else x - _UNIT / 2 + 0.15 * _UNIT, top + layer * _LAYER_H)


def _edge(points: list[tuple[float, float]]) -> str:
    path = [f"M{points[0][0]:.0f} {points[0][1] + BOX_HEIGHT:.0f}"]
    y0 = points[0][1] + BOX_HEIGHT
    x0 = points[0][0]
    for k, (x, y) in enumerate(points[1:], 1):
        middle = (y0 + y) / 2
        path.append(f"C{x0:.0f} {middle:.0f} {x:.0f} {middle:.0f} {x:.0f} {y:.0f}")
        if k < len(points) - 1:
            path.append(f"V{y + BOX_HEIGHT:.0f}")
        x0, y0 = x, y + BOX_HEIGHT
    return "".join(path)


def _words(t: Tensor, kind: str) -> tuple[str, str, str]:
    """Return the three lines of a box: op and name, or name and kind, and type and shape."""
    op = kind in {"view", "compute", "writes in place"}
    head, below = (t.op, t.name) if op else (t.name or "(leaf)", kind)
    return elided(head, _HEAD_SIZE * _BOLD), elided(below, _SIZE), elided(f"{t.type} {_dims(t.ne)}", _SIZE)


def elided(text: str, size: float) -> str:
    """Shorten `text` to fit a box in a font size, whatever the reader's font."""
    room = BOX_WIDTH - 2 * _PADDING
    text = "".join(c if c.isprintable() else "\ufffd" for c in text[:1000])
    ends = list(accumulate(_WIDE.get(c, 1.0) * size for c in text))
    if not ends or ends[-1] <= room:
        return text
    return text[: bisect_right(ends, room - size)] + "…"


def _box(b: Box) -> str:
    fill, border = _KINDS[b.kind]
    left = b.x - BOX_WIDTH / 2
    lines = "".join(
        f'<text x="{b.x:.0f}" y="{b.y + y:.0f}"{more}>{_text(text)}</text>'
        for y, text, more in ((16, b.head, ' class="h"'), (31, b.below, ""), (45, b.holds, ""))
    )
    return (
        f"<g><title>{_text(b.title)}</title>"
        f'<rect x="{left:.0f}" y="{b.y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="{fill}" '
        f'stroke="{border}"/>{lines}</g>'
    )


def _page(width: float, height: float, drawn: list[str]) -> str:
    legend = [
        f'<rect x="{_MARGIN + 120 * k}" y="14" width="14" height="14" rx="3" fill="{fill}" stroke="{border}"/>'
        f'<text x="{_MARGIN + 20 + 120 * k}" y="25" style="text-anchor:start">{kind}</text>'
        for k, (kind, (fill, border)) in enumerate(_KINDS.items())
    ]
    size = f'width="{width:.0f}" height="{height:.0f}"'
    font = 'font-family="Helvetica,Arial,sans-serif" font-size="10"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}" {font}>'
    return "\n".join(
        (head, _STYLE, f"<defs>{_MARKER}</defs>", f'<rect {size} fill="#fff"/>', *legend, *drawn, "</svg>\n")
    )


def _title(t: Tensor, number: dict[Tensor, int], node: bool) -> str:
    lines = [f"#{number[t]} {t.op} {t.name}", f"{t.type} ne {_dims(t.ne)} nb {_dims(t.nb)}"]
    if t.src:
        lines.append("src " + ", ".join(_source(s, number) for s in t.src))
    if t.view_src is not None:
        lines.append(f"view of {_source(t.view_src, number)} at byte {t.view_offs}")
    lines += [line for line in (_flags(t, node), params_text(t)) if line]
    return "\n".join(lines)


def _sources(t: Tensor, number: dict[Tensor, int]) -> str:
    src = ",".join("–" if s is None else str(number[s]) for s in t.src or ((t.view_src,) if t.view_src else ()))
    return f"{src} @{t.view_offs}" if t.view_offs else src


def _source(s: Tensor | None, number: dict[Tensor, int]) -> str:
    return "–" if s is None else f"{number[s]} {_short(s.name, 24)}".rstrip()


def _flags(t: Tensor, node: bool) -> str:
    words = [word for bit, word in _FLAGS if t.flags & bit]
    if node and t.op not in VIEW_OPS and not t.flags & FLAG_COMPUTE:
        words.append("not computed")
    return " ".join(words)


def _dims(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _short(text: str, width: int = _NAME_WIDTH) -> str:
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _text(text: str) -> str:
    """Escape text for XML, without characters that XML cannot hold."""
    return escape(text.translate(_NOT_XML))


# The layout: layers by depth, neighbours near each other, connected parts side by side.

Item = int
"""The number of a box; negative for a bend of an edge that crosses a layer."""

SWEEPS = 12
"""Passes that order and place boxes; more make no visible difference."""


@dataclass(slots=True)
class Part:
    """A connected part of the graph, in units of one box's width and one layer's height."""

    layers: list[list[Item]]
    x: dict[Item, float] = field(default_factory=dict)
    chains: dict[tuple[Item, Item], list[Item]] = field(default_factory=dict)
    """Edge -> its boxes and bends, ends included."""

    @property
    def width(self) -> float:
        """From the left edge of the leftmost box to the right edge of the rightmost."""
        return max(self.x.values(), default=0.0) + 1.0


def layout(count: int, edges: Sequence[tuple[Item, Item]]) -> list[Part]:
    """Lay out `count` boxes, numbered so that every edge goes from a smaller to a larger number.

    A box is one layer below its lowest source. A box without sources, or a chain that starts with one (the views of a
    cache), is directly above its first reader. `x` starts at 0 in every connected part.
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
    visited: set[Item] = set()
    for first in range(count):
        if first in visited:
            continue
        visited.add(first)
        members = [first]
        for cur in members:  # grows on the way
            new = dict.fromkeys(n for n in (*below[cur], *above[cur]) if n not in visited)
            visited.update(new)
            members += new
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
            for layer in part.layers[depth[a] - top + 1 : depth[b] - top]:
                bend -= 1
                chain.append(bend)
                layer.append(bend)
            chain.append(b)
            part.chains[a, b] = chain
            for p, q in pairwise(chain):
                down.setdefault(p, []).append(q)
                up.setdefault(q, []).append(p)
    both = {i: [*up.get(i, ()), *down.get(i, ())] for layer in part.layers for i in layer}
    sweeps = [(up, part.layers), (down, part.layers[::-1])] * (SWEEPS // 2)
    for near, layers in sweeps:
        for layer in layers:
            _order(layer, near, part.x)
    for sweep, (near, layers) in enumerate(sweeps):
        for layer in layers:
            _place(layer, both if sweep > 3 else near, part.x)
    left = min(part.x.values())
    part.x = {i: x - left for i, x in part.x.items()}
    return part


def _mean(item: Item, near: Mapping[Item, Sequence[Item]], x: Mapping[Item, float], default: float) -> float:
    places = [x[n] for n in near.get(item, ()) if n in x]
    return sum(places) / len(places) if places else default


def _order(layer: list[Item], near: Mapping[Item, Sequence[Item]], x: dict[Item, float]) -> None:
    """Sort a layer by the positions of its neighbours."""
    targets = {i: _mean(i, near, x, x.get(i, float(k))) for k, i in enumerate(layer)}
    layer.sort(key=targets.__getitem__)
    at = 0.0
    start = sum(targets.values()) / len(targets) - sum(map(_width, layer)) / 2 if layer else 0.0
    for i in layer:
        x[i] = start + at
        at += _width(i)


def _place(layer: Sequence[Item], near: Mapping[Item, Sequence[Item]], x: dict[Item, float]) -> None:
    """Move a layer's boxes towards their neighbours, in order and without overlap.

    Boxes that would overlap move as one block, to the mean of their preferred positions (pool adjacent violators).
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
