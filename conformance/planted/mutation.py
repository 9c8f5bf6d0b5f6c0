"""The rate of mutants that the suite notices, and those that it does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from conformance.case.case import JSON
from conformance.perf.statistics import Rate
from conformance.suite.family import Level

from . import campaign
from .campaign import Hunt
from .difference import search
from .faults import Fault
from .mutants import Mutant

Status = Literal["noticed", "survived", "equivalent", "invalid"]
STATUSES: tuple[Status, ...] = get_args(Status)
TIME_LIMIT = 60.0
"""Seconds without an event after which a mutant counts as one that hangs."""
TOGETHER = 60
"""Mutants of an area that share a worker, and the expected values of its cases."""
EXAMPLES = 40
"""Trajectories that are drawn of each family to find one that differs by a survivor; beside them, every op's cases."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    status: Status
    by: str
    """`noticed`: the case and its verdict. `survived`: a case that differs by it, in its budget or at another seed.
    `equivalent`: that no case drawn at random differs. `invalid`: why it does not load."""
    family: str = ""
    """That noticed it."""
    detail: str = ""


def run(
    mutants: Sequence[Mutant], level: Level, seed: int, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Outcome]:
    """What becomes of each mutant, some at a time, area by area as `draw` has them.

    `seed` draws the cases that tell survivors from equivalents. UsageError if an adapter as it is dies.
    """
    for _, own in groupby(mutants, lambda m: m.area):
        area = list(own)
        for at in range(0, len(area), TOGETHER):
            yield from _some(area[at : at + TOGETHER], level, seed, progress)


def _some(mutants: Sequence[Mutant], level: Level, seed: int, progress: Callable[[str], None]) -> list[Outcome]:
    """First by `smoke`, which notices most; then by drawn cases, and those alone that differ by the rest of `level`."""
    names = {m.fault.name: m for m in mutants}

    def say(hunt: Hunt) -> None:
        if hunt.noticed:
            progress(f"{names[hunt.fault].id}: {hunt.verdict} {hunt.case}")

    def differs(fault: str, case: str) -> None:
        progress(f"{names[fault].id}: differs {case}")

    def hunt(faults: Sequence[Fault], level: Level) -> dict[str, Hunt]:
        return {h.fault: h for h in campaign.run(faults, level, say, TIME_LIMIT, once=True) if h.noticed}

    noticed = hunt([m.fault for m in mutants], "smoke")
    left = [m.fault for m in mutants if m.fault.name not in noticed]
    differ = search(left, seed, EXAMPLES, differs, TIME_LIMIT)
    if level != "smoke":
        noticed |= hunt([f for f in left if f.name in differ], level)
    return [_outcome(m, noticed.get(n), differ.get(n)) for n, m in names.items()]


def _outcome(mutant: Mutant, hunt: Hunt | None, case: str | None) -> Outcome:
    if hunt and hunt.detail.startswith(campaign.UNLOADABLE):
        return Outcome(mutant, "invalid", hunt.detail.removeprefix(campaign.UNLOADABLE))
    if hunt:
        return Outcome(mutant, "noticed", f"{hunt.case} {hunt.verdict}", hunt.family, hunt.detail)
    if case:
        return Outcome(mutant, "survived", case)
    return Outcome(mutant, "equivalent", "no case drawn at random differs by it")


def rate(outcomes: Iterable[Outcome]) -> Rate:
    """Of `outcomes` those noticed, and all that are neither equivalent nor invalid."""
    return Rate.of_mutants(o.status for o in outcomes)


def rates(outcomes: Sequence[Outcome]) -> Mapping[str, Rate]:
    """`rate` of each area."""
    areas = dict.fromkeys(o.mutant.area for o in outcomes)
    return {a: rate(o for o in outcomes if o.mutant.area == a) for a in areas}


def document(outcomes: Sequence[Outcome]) -> dict[str, JSON]:
    """As JSON: every mutant, the rate, its interval, and the same for each area."""
    whole = rate(outcomes)
    return {
        "mutants": [
            {"id": o.mutant.id, "file": o.mutant.fault.file, "area": o.mutant.area, "diff": o.mutant.diff,
             "status": o.status, "by": o.by, "family": o.family, "detail": o.detail}
            for o in outcomes
        ],
        "rate": whole.value,
        "interval": whole.interval,
        "areas": {a: {"rate": r.value, "interval": r.interval} for a, r in rates(outcomes).items()},
    }  # fmt: skip
