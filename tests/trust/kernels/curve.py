"""The curve: the share of mutants that a run of `ops` has noticed after so much processor time, as numbers and as SVG.

Times are modelled, not measured: a case takes `CASE` seconds, and as long again per `SMALL` operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from conformance.ggml.arithmetic import EXACT
from conformance.run import cost
from conformance.suite.ops import build

from ..choose import SMALL  # noqa: TID252  # this package is `trust` in pytest and `tests.trust` as a command

CASE = 0.0055
"""Processor seconds of a small case on `ggml`, with the reference, on the machine of the record."""
SHOWN = (10.0, 60.0, 300.0)
"""Processor seconds at which shares are printed; the last ends the plot."""
WIDTH, HEIGHT, MARGIN = 640, 320, 48
_FONT = 'font-family="sans-serif" font-size="12"'
_COLOURS = ("#1f77b4", "#d62728", "#7f7f7f")


def places(order: Sequence[str]) -> dict[str, float]:
    """Return id -> processor seconds until a run in this order has its result."""
    seconds = (CASE * (1 + cost.total(build(i), EXACT) / SMALL) for i in order)
    return dict(zip(order, accumulate(seconds), strict=True))


def share(times: Sequence[float | None], seconds: float) -> float:
    """Return the share of mutants noticed until then; None is one that is not noticed."""
    return sum(t is not None and t <= seconds for t in times) / len(times)


def svg(curves: Mapping[str, Sequence[float | None]]) -> str:
    """Return a plot of the shares of all `curves`, by name, over the logarithm of seconds."""
    start, end = 1.0, SHOWN[-1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {_FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    for k in range(5):
        y = bottom - (bottom - MARGIN) * k / 4
        parts += [
            f'<path d="M{MARGIN} {y:.1f}H{right}" stroke="#ddd"/>',
            f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{25 * k} %</text>',
        ]

    def x(seconds: float) -> float:
        return MARGIN + (right - MARGIN) * math.log(max(seconds, start) / start) / math.log(end / start)

    parts += [f'<text x="{x(s):.1f}" y="{bottom + 18}" text-anchor="middle">{s:g} s</text>' for s in (start, *SHOWN)]
    for (name, times), colour in zip(curves.items(), _COLOURS, strict=False):
        steps = [(t, share(times, t)) for t in sorted(t for t in times if t is not None and t <= end)]
        path = f"M{MARGIN} {bottom}"
        for t, y in [*steps, (end, share(times, end))]:
            path += f"H{x(t):.1f}V{bottom - (bottom - MARGIN) * y:.1f}"
        last = bottom - (bottom - MARGIN) * share(times, end)
        at = last - 6 if colour == _COLOURS[0] else last + 16
        parts += [
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{right}" y="{at:.1f}" text-anchor="end" fill="{colour}">{name}</text>',
        ]
    caption = "mutants of ggml's kernels that are noticed, by processor time"
    parts += [f'<text x="{MARGIN}" y="{MARGIN - 20}" font-weight="bold">{caption}</text>', "</svg>"]
    return "\n".join(parts) + "\n"
