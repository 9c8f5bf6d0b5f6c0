"""The rate of mutants that the suite notices, and those that it does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, get_args

from conformance.case.case import JSON
from conformance.perf.statistics import Rate
from conformance.suite.family import Level

from . import campaign
from .campaign import Hunt
from .difference import search
from .faults import Fault
from .mutants import AREAS, Mutant

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
    """On each adapter of the area those that none before it noticed."""
    names = {m.fault.name: m for m in mutants}
    noticed: dict[str, Hunt] = {}
    differ: dict[str, str] = {}
    for of in AREAS[mutants[0].area].of:
        left = [replace(m.fault, of=of) for n, m in names.items() if n not in noticed]
        _hunt(left, level, seed, noticed, differ, lambda fault, says: progress(f"{names[fault].id}: {says}"))
    return [_outcome(m, noticed.get(n), differ.get(n)) for n, m in names.items()]


def _hunt(
    faults: Sequence[Fault],
    level: Level,
    seed: int,
    noticed: dict[str, Hunt],
    differ: dict[str, str],
    progress: Callable[[str, str], None],
) -> None:
    """First by `smoke`, which notices most; then by drawn cases, and those alone that differ by the rest of `level`.

    What notices a fault goes into `noticed`, and a case that differs by it into `differ`.
    """

    def say(hunt: Hunt) -> None:
        if hunt.noticed:
            noticed[hunt.fault] = hunt
            progress(hunt.fault, f"{hunt.verdict} {hunt.case}")

    campaign.run(faults, "smoke", say, TIME_LIMIT, once=True)
    unknown = [f for f in faults if f.name not in noticed and f.name not in differ]
    differ |= search(unknown, seed, EXAMPLES, lambda fault, case: progress(fault, f"differs {case}"), TIME_LIMIT)
    if level != "smoke":
        left = [f for f in faults if f.name in differ and f.name not in noticed]
        campaign.run(left, level, say, TIME_LIMIT, once=True)


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
