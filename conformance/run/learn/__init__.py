"""Measure how a device rounds and write its profile (docs/precision.md).

Plain cases of the family `ops` run on the device: one node over contiguous leaves, with more cases for products. For
each key (`key_of`) the profile gets the known rounding whose reference is nearest to the device's results. The error
left is the residual; if float32 rounding does not explain it, the limit is `SAFETY` times as much, but never more than
upstream's own tests allow. A residual that looks like a bug is reported as a finding, and nothing is allowed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from conformance import __version__
from conformance.backend.interface import Backend
from conformance.backend.profile import Entry, Profile
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, ROUNDINGS, limit_of, op_of
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, ConformanceError
from conformance.ggml.tensor import nelements
from conformance.judge.budget import PEAK, budget_of
from conformance.judge.compare import Difference
from conformance.run.oracle import Oracle
from conformance.suite import ops

from .measure import WEIGHTS, Measured, blind, measure

SAFETY = 8.0
"""Limit of a profile, relative to the worst residual measured."""
_ALIKE = 1.5
"""A simpler rounding is chosen if its residual is at most this multiple of the smallest."""
_OUTLIER = 32.0
"""Multiple of the median residual of its key above which one case indicates a bug."""


_FLIPS = 100.0
"""Ratio of a rounding's error to a residual explained by a few values rounded the other way."""


def begin(backend: Backend, build: str = "") -> Profile:
    """Return an empty profile of `backend`; unmeasured keys are judged by upstream's limits.

    `build` identifies the libraries that compute (`builds.source.contents`).
    """
    info = backend.info()
    return Profile(__version__, info.device, info.description, info.versions, others=True, build=build)


def left(profile: Profile, keys: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the unmeasured `keys`, the first of each op before the second of any.

    However short the time, each op gets its share, and products with many types do not take all of it.
    """
    turns = Counter[str]()
    turn: dict[str, int] = {}
    for key in keys:
        turn[key] = turns[op_of(key)]
        turns[op_of(key)] += 1
    wanted = [key for key, ids in keys.items() if not profile.has(key, ids)]
    return {key: keys[key] for key in sorted(wanted, key=lambda k: turn[k])}


def learn(profile: Profile, backend: Backend, oracle: Oracle, key: str, ids: Sequence[str]) -> Profile:
    """Return `profile` with the entry for `key` from the plain cases `ids`, or as refused."""
    cases = [c for c in map(ops.build, ids) if all(backend.supports(c.steps[0].graph))]
    if not cases:
        return replace(profile, refused=(*profile.refused, key))
    return replace(profile, entries={**profile.entries, key: _entry(backend, oracle, key, cases)})


def _entry(backend: Backend, oracle: Oracle, key: str, cases: Sequence[Case]) -> Entry:
    measured: list[Measured] = []
    failed = ""
    for case in cases:
        try:
            measured.append(_measured(backend, oracle, case))
        except ConformanceError as e:
            failed = f"it did not run: {' '.join(str(e).split())}"
            if isinstance(e, BackendTimeoutError):  # the other cases would wait for the same kernel
                break
    if not measured:
        return Entry(finding=failed, cases=tuple(c.id for c in cases))
    name = _nearest(measured)
    distances = [m.distances[name] for m in measured]
    worst = max(d.nmse for d in distances)
    terms = max(m.terms for m in measured)
    entry = Entry(name, worst if math.isfinite(worst) else 0.0, terms=terms, cases=tuple(m.case.id for m in measured))
    finding = "" if _fits(measured, name) else _fault(measured, name, limit_of(op_of(key)))
    need = 0.0 if _fits(measured, name) else SAFETY * max(max(d.nmse, (d.element / PEAK) ** 2) for d in distances)
    if ROUNDINGS[name].mul_mat:  # another last bit of a scale flips values halfway between steps
        need = max(need, max(m.distances[EXACT.name].nmse for m in measured) / _FLIPS)
    entry = replace(entry, bound=0.0 if finding else min(need, limit_of(op_of(key))), finding=finding)
    return replace(entry, blind=blind(oracle, measured, key, entry))


def _measured(backend: Backend, oracle: Oracle, case: Case) -> Measured:
    """Measure a case, twice if the process dies: an earlier case may have corrupted its memory."""
    try:
        return measure(backend, oracle, case)
    except BackendCrashError:
        return measure(backend, oracle, case)


def _fits(measured: Sequence[Measured], name: str) -> bool:
    """Return True if float32 rounding explains the residual."""
    return all(budget_of(m.node, ROUNDINGS[name]).used(m.distances[name]) <= 1 for m in measured)


def _nearest(measured: Sequence[Measured]) -> str:
    """Return the simplest rounding that explains all, else one about as near as the nearest."""
    names = [n for n in ROUNDINGS if all(n in m.distances for m in measured)]
    for name in names:
        if _fits(measured, name):
            return name
    residual = {n: max(m.distances[n].nmse for m in measured) for n in names}
    least = min(residual.values())
    return next(n for n in names if residual[n] <= _ALIKE * least)


def worse(before: Profile, now: Profile, where: str) -> list[str]:
    """Return a message per key for which `now` is less exact than the profile `before`, at `where`."""
    sentences = []
    for key, new in now.entries.items():
        old = before.entries.get(key)
        if old is None or old.finding:
            continue
        allowed = max(old.bound, SAFETY * old.residual)
        if new.finding or (new.bound and new.residual > allowed):
            then = f"{old.rounding}, residual {old.residual:.2g}, {allowed:.2g} allowed"
            today = new.finding or f"{new.rounding}, residual {new.residual:.2g}"
            sentences.append(f"FAIL {key}: less exact than the profile {where}: then {then}; now {today}")
    return sentences


# -- errors other than rounding ---------------------------------------------------------------------------------------


def _fault(measured: Sequence[Measured], name: str, limit: float) -> str:
    """Return why the residual is not rounding; empty if nothing indicates that."""
    each = [(m, m.distances[name]) for m in measured]
    worst, d = max(each, key=lambda e: e[1].nmse)
    if d.special:
        return f"{worst.case.id}: {d.special} NaN or infinities out of place"
    kind = worst.node.type.dtype
    if kind is not None and kind.kind == "i":
        return f"{worst.case.id}: whole numbers differ, {d}"
    if d.nmse > limit:
        return f"{worst.case.id}: NMSE {d.nmse:.2g}, beyond {limit:.2g}, what upstream's own test allows"
    if worst.node.op not in WEIGHTS:
        return ""  # errors of a function or an angle vary with its arguments
    typical = median(d.nmse for _, d in each)
    if len(each) > 2 and d.nmse > _OUTLIER * typical and not _small(worst, d, name):
        return f"{worst.case.id}: NMSE {d.nmse:.2g}, where half of the cases have {typical:.2g} or less"
    return next(filter(None, (_uneven(m, d, name) for m, d in each)), "")


def _small(m: Measured, d: Difference, name: str) -> bool:
    """Return True if float32 rounding, or a few values rounded the other way, explain the error."""
    return d.nmse <= max(budget_of(m.node, ROUNDINGS[name]).nmse, m.distances[EXACT.name].nmse / _FLIPS)


def _uneven(m: Measured, d: Difference, name: str) -> str:
    """Return why a product's error is not rounding: in few elements, or a scale of all of them."""
    n, noise = nelements(m.node), math.sqrt(d.nmse)
    if _small(m, d, name) or n < PEAK * PEAK:
        return ""
    if d.element > PEAK * noise:
        return f"{m.case.id}: one element is off by {d.element / noise:.0f} times the others, {d}"
    if (m.scales[name] - 1) ** 2 > d.nmse / 4:
        return f"{m.case.id}: all values are about {m.scales[name]:.5f} times those expected"
    return ""
