"""A graph for people: as a table like ggml's own dump, and as a drawing that needs nothing but a browser."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from tabulate import tabulate

from conformance.case.case import writes_in_place
from conformance.ggml.graph import Graph
from conformance.ggml.ops.op import params_text
from conformance.ggml.tensor import VIEW_OPS, Tensor, is_contiguous

from .graphlayout import Item, Part, layout

_FLAGS = ((1, "input"), (2, "output"), (4, "param"), (8, "loss"))
_COMPUTE = 16
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
"""Between a box's border and its words, at least."""
_HEAD_SIZE, _SIZE = 11, 10
"""Of letters, in pixels."""
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
# Widths of letters, in parts of their size, of the widest font that a browser takes for sans-serif (DejaVu Sans).
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
    """One row per tensor, leafs included, in the order and with the numbers of a case file's documents.

    `nb` is shown where the strides are not contiguous; `src` by number, with `view_offs` as `@bytes`; `flags` without
    COMPUTE, which every computed node has (one that is not says so); op_params by ggml's names of them.
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
    return f"{body}\n{len(tensors) - len(nodes)} leafs, {len(graph)} nodes: {ops}"


@dataclass(frozen=True, slots=True)
class Box:
    """One tensor of a drawing: where the middle of its upper edge is, in pixels, and its words."""

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
    """A drawing from the top down: a layer per depth, a colour per kind, a tooltip with everything on each box.

    No script, no outside reference, no font to load.
    """
    drawing = draw(graph)
    edges = [f'<path class="e" d="{path}"/>' for path in drawing.edges]
    return _page(max(drawing.width, 720), drawing.height, [*edges, *map(_box, drawing.boxes)])


def draw(graph: Graph) -> Drawing:
    """Lay a graph out.

    Leafs are drawn anew beside each of their readers, so that a mask or a table of positions does not tie the whole
    picture together; graphs without a connection stand side by side.
    """
    tensors = graph.tensors()
    number = {t: j for j, t in enumerate(tensors)}
    nodes = set(graph.nodes)
    kinds = _kinds(graph)
    shown: list[Tensor] = []
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
                ends.append(len(shown))
                shown.append(s)
        of[t] = len(shown)
        shown.append(t)
        edges += [(end, of[t]) for end in ends]
    parts = _arranged(layout(len(shown), edges))
    paths: list[str] = []
    boxes: list[Box] = []
    for part, left, top in parts:
        paths += [_edge([_point(part, i, k, left, top) for k, i in steps]) for steps in _runs(part)]
        for k, layer in enumerate(part.layers):
            for i in layer:
                if i >= 0:
                    t = shown[i]
                    x, y = _point(part, i, k, left, top)
                    boxes.append(Box(t, x, y, kinds[t], *_words(t, kinds[t]), _title(t, number, t in nodes)))
    width = max((left + part.width * _UNIT for part, left, _ in parts), default=0.0) + _MARGIN
    height = max((top + len(part.layers) * _LAYER_H for part, _, top in parts), default=0.0) + _MARGIN
    return Drawing(width, height, boxes, paths)


def _kinds(graph: Graph) -> dict[Tensor, str]:
    """Tensor -> key of `_KINDS`. A graph alone knows no persistent tensors: a leaf without FLAG_INPUT is a weight,
    unless a node writes into it or it is called a cache.
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
            kinds[t] = "weight" if t.name.endswith((".weight", ".bias")) or not t.flags & 1 else "input"
    return kinds


def _arranged(parts: list[Part]) -> list[tuple[Part, float, float]]:
    """Parts on shelves about as wide as the picture is high, with their left and top in pixels."""
    area = sum((p.width * _UNIT + _GAP) * (len(p.layers) * _LAYER_H + _GAP) for p in parts)
    shelf = max([1.4 * area**0.5, *(p.width * _UNIT for p in parts)])
    left, top, lowest = float(_MARGIN), 60.0, 60.0
    placed = []
    for part in parts:
        width = part.width * _UNIT
        if left > _MARGIN and left + width > shelf + _MARGIN:
            left, top = float(_MARGIN), lowest + _GAP
        placed.append((part, left, top))
        lowest = max(lowest, top + len(part.layers) * _LAYER_H)
        left += width + _GAP
    return placed


def _runs(part: Part) -> list[list[tuple[int, Item]]]:
    layer_of = {i: k for k, layer in enumerate(part.layers) for i in layer}
    return [[(layer_of[i], i) for i in chain] for chain in part.chains.values()]


def _point(part: Part, item: Item, layer: int, left: float, top: float) -> tuple[float, float]:
    """The middle of the upper edge of a box, or a bend."""
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
    """The three lines of a box: op and name, or name and kind, and what it holds."""
    op = kind in {"view", "compute", "writes in place"}
    head, below = (t.op, t.name) if op else (t.name or "(leaf)", kind)
    return elided(head, _HEAD_SIZE * _BOLD), elided(below, _SIZE), elided(f"{t.type} {_dims(t.ne)}", _SIZE)


def elided(text: str, size: float, room: float = BOX_WIDTH - 2 * _PADDING) -> str:
    """As much of a text as a box has room for in letters of a size, whatever the reader's font; the rest as `…`."""
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
        lines.append(f"{_view(t, number)}")
    lines += [line for line in (_flags(t, node), params_text(t)) if line]
    return "\n".join(lines)


def _sources(t: Tensor, number: dict[Tensor, int]) -> str:
    src = ",".join("–" if s is None else str(number[s]) for s in t.src or ((t.view_src,) if t.view_src else ()))
    return f"{src} @{t.view_offs}" if t.view_offs else src


def _source(s: Tensor | None, number: dict[Tensor, int]) -> str:
    return "–" if s is None else f"{number[s]} {_short(s.name, 24)}".rstrip()


def _view(t: Tensor, number: dict[Tensor, int]) -> str:
    return "" if t.view_src is None else f"view of {_source(t.view_src, number)} at byte {t.view_offs}"


def _flags(t: Tensor, node: bool) -> str:
    words = [word for bit, word in _FLAGS if t.flags & bit]
    if node and t.op not in VIEW_OPS and not t.flags & _COMPUTE:
        words.append("not computed")
    return " ".join(words)


def _dims(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _short(text: str, width: int = _NAME_WIDTH) -> str:
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _text(text: str) -> str:
    """Text of an XML document: escaped, and without characters that XML cannot hold."""
    return escape(text.translate(_NOT_XML))
