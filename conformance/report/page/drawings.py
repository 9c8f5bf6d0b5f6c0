"""Lays out the graphs that the page draws, within limits of size and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from conformance.case import casefile
from conformance.case.case import JSON, Case
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import FAILURES, Result, Verdict
from conformance.report.graphview import draw
from conformance.report.matrix import OPS
from conformance.report.runs import Row, Runs
from conformance.run.session.select import build

from .tables import subject

BOXES = 12_000
"""Maximum boxes of all drawings together: about 3 MB."""
CASES = 400
"""Maximum number of drawn cases, each built from its id or read from its saved file."""
SECONDS = 6.0
"""Seconds after which no further case is built; some ids run llama.cpp for a second."""


def drawn_graphs(runs: Runs, *, boxes: int = BOXES, cases: int = CASES, seconds: float = SECONDS) -> dict[str, JSON]:
    """Return case id -> `step`, `width`, `height`, `boxes` and `edges` of its drawing.

    A box is `[node, x, y, kind, *lines, title]`, an edge the path of an SVG.

    The smallest case of each cause comes first; then failed cases in the order of the results, each at the step where
    it diverges; then one case of each op.

    A case is skipped if its graph exceeds the budget, or if it can be built neither from its id nor from its saved
    file. `node` is the index in the graph's nodes, None for a leaf; x and y are whole pixels, the middle of a box's
    upper edge.
    """
    drawings: dict[str, JSON] = {}
    left = boxes
    end = time.monotonic() + seconds
    for row in _wanted(runs):
        result = row.value
        if result.case in drawings:
            continue
        if len(drawings) >= cases or time.monotonic() > end:
            break
        case = _case(row)
        if case is None or not case.steps:
            continue
        step = _step(result, len(case.steps))
        if len(case.steps[step].graph) > left:
            continue
        drawn = _drawn(case, step)
        if len(drawn["boxes"]) <= left:
            left -= len(drawn["boxes"])
            drawings[result.case] = drawn
    return drawings


def _wanted(runs: Runs) -> Iterator[Row[Result]]:
    """Yield smallest cases of causes, failures, waived ones, then one case of each op."""
    results = runs.results
    yield from runs.proofs()
    yield from (r for r in results if r.value.verdict in FAILURES)
    yield from (r for r in results if r.value.verdict is Verdict.XFAIL)
    known: set[str] = set()
    for r in results:
        family, op, _ = subject(r.value.case)
        if family == OPS and op not in known:
            known.add(op)
            yield r


def _step(result: Result, count: int) -> int:
    """Return the step that diverges, or the first."""
    step = None if result.where is None else result.where.step
    return step if step is not None and 0 <= step < count else 0


def _case(row: Row[Result]) -> Case | None:
    """Build the case from its id, or read its saved file, which may be beside the run file."""
    result = row.value
    with suppress(ConformanceError):
        return build(result.case)
    if result.saved:
        for path in (Path(result.saved), row.document.path.parent / Path(result.saved).name):
            with suppress(ConformanceError, OSError):
                if path.is_file():
                    return casefile.read_one(path, None)
    return None


def _drawn(case: Case, step: int) -> dict[str, JSON]:
    graph = case.steps[step].graph
    number = {t: i for i, t in enumerate(graph.nodes)}
    drawing = draw(graph)
    return {
        "step": step,
        "width": round(drawing.width),
        "height": round(drawing.height),
        "boxes": [
            [number.get(b.tensor), round(b.x), round(b.y), b.kind, b.head, b.below, b.holds, b.title]
            for b in drawing.boxes
        ],
        "edges": drawing.edges,
    }
