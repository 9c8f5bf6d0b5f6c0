"""Measure how a device rounds and write its profile (docs/precision.md).

Plain cases of the family `ops` run on the device: one node over contiguous leaves, with more cases for products. For
each key (`key_of`) the profile gets the known rounding whose reference is nearest to the device's results. The error
left is the residual; if float32 rounding does not explain it, the limit is `SAFETY` times as much, but never more than
upstream's own tests allow. A residual that looks like a bug is reported as a finding, and gets no allowance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import conformance
from conformance.backend.interface import Backend
from conformance.backend.profile import Entry, Profile, read
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, ROUNDINGS, key_of, limit_of, op_of
from conformance.ggml.errors import BackendCrashError, BackendTimeoutError, ConformanceError, UsageError
from conformance.ggml.ops.op import DECLARATIONS
from conformance.ggml.quants.blocks import BLOCK
from conformance.ggml.tensor import Bytes, Tensor, computes, is_contiguous, nelements
from conformance.ggml.types import GGMLType
from conformance.judge.budget import PEAK, budget_of, changes
from conformance.judge.compare import Difference, compare, values
from conformance.run.execute import execute
from conformance.run.oracle import Oracle
from conformance.suite import by_default, ops
from conformance.suite.family import Level, with_seed
from conformance.suite.grid import Grid, Keys, grid, ids_of_rows, operands, points, shapes

SAFETY = 8.0
"""Limit of a profile, relative to the worst residual measured."""
_SIMILAR = 1.5
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
    return Profile(conformance.__version__, info.device, info.description, info.versions, others=True, build=build)


def left(profile: Profile, keys: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the unmeasured `keys`: the first of each op, then the second of each, and so on.

    So even in a short time each op gets a share, and products with many types do not take all of it.
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
    """Return the simplest rounding that explains everything, else the simplest of the nearest."""
    names = [n for n in ROUNDINGS if all(n in m.distances for m in measured)]
    for name in names:
        if _fits(measured, name):
            return name
    residual = {n: max(m.distances[n].nmse for m in measured) for n in names}
    least = min(residual.values())
    return next(n for n in names if residual[n] <= _SIMILAR * least)


def worse(before: Profile, now: Profile, where: str) -> list[str]:
    """Return a message per key for which `now` is less exact than `before`, at `where`."""
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
        return f"{worst.case.id}: NMSE {d.nmse:.2g}, beyond {limit:.2g}, the limit of upstream's test"
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
    """Return why a product's error is not rounding: it is in few elements, or all are scaled."""
    n, noise = nelements(m.node), math.sqrt(d.nmse)
    if _small(m, d, name) or n < PEAK * PEAK:
        return ""
    if d.element > PEAK * noise:
        return f"{m.case.id}: one element is off by {d.element / noise:.0f} times the others, {d}"
    if (m.scales[name] - 1) ** 2 > d.nmse / 4:
        return f"{m.case.id}: all values are about {m.scales[name]:.5f} times those expected"
    return ""


# -- an interrupted measurement ----------------------------------------------------------------------------------------

_SAME = ("suite", "device", "description", "versions", "build")
"""Fields that identify what was measured; entries are not valid for any other value."""


def partial_path(path: Path) -> Path:
    """Return the path of the partial profile for `path`."""
    return path.with_name(f"{path.name}.partial")


def resume(path: Path, begun: Profile) -> Profile:
    """Return the partial profile at `path`, or `begun` if there is none.

    UsageError if the file is damaged, or has another device, driver, build or suite than `begun`.
    """
    if not path.exists():
        return begun
    try:
        profile = read(path)
    except UsageError as e:
        raise UsageError(f"{e}; remove it to start again") from None
    for name in _SAME:
        was, now = getattr(profile, name), getattr(begun, name)
        if was != now:
            raise UsageError(f"{path}: was begun with {name} {was}, but this is {now}; remove it to start again")
    return profile


# -- plain cases -------------------------------------------------------------------------------------------------------

_EACH = 3
"""Number of existing `ops` cases per key."""
_FOREIGN = ("data", "hide", "inplace", "special", "hint", "use")
"""Parameters of cases that test something other than rounding."""
_PERMUTED = points("- va=p0213 vb=p0213 va=p0213,vb=p0213")


def _products(weights: str) -> tuple[Grid, ...]:
    types = operands(weights, "f32")
    batch: Keys = {"a": "256x33x2", "b": shapes("256", "1 2 25", "4"), "layout": _PERMUTED}
    return (
        grid("MUL_MAT", types, a="256x33", b=shapes("256", "1 2 33")),
        grid("MUL_MAT", types, a="2048x33", b=shapes("2048", "1 2 33")),
        grid("MUL_MAT", types, **batch),
        grid("MUL_MAT", types, a="256x33", b=shapes("256", "1 2 33"), prec="F32"),
        grid("MUL_MAT", types, **batch, prec="F32"),
        grid("MUL_MAT_ID", types, as_="256x33x4", n_used=2, n_tokens="1 2 33"),
    )


def _attention(caches: str) -> Grid:
    return grid("FLASH_ATTN_EXT", caches, q=shapes("64", "1 3 33", "4"), k=shapes("64", "32 255", "2"), prec="- F32")


_ANGLES = grid(
    "ROPE ROPE_BACK", "f32 f16", ne="128x4x9", mode="NORMAL NEOX", positions=points("to=512 from=2000,to=9000")
)
"""The error of an angle is proportional to the position."""


def plain(level: Level, check: Callable[[], None] = lambda: None) -> dict[str, list[str]]:
    """Return plain cases for the kernels used at a level: key -> ids, smallest first.

    It takes seconds; `check` is called between cases, and may raise to end it.
    """
    used = _used(level, check)
    weights = dict.fromkeys(t for key in used if key.startswith("MUL_MAT") for t in _types(key)[:1])
    caches = dict.fromkeys("+".join(_types(key)[1:]) for key in used if key.startswith("FLASH_ATTN_EXT-"))
    grids = (*(each for t in weights for each in _products(t)), *map(_attention, caches), _ANGLES)
    found: dict[str, list[str]] = {}
    for case_id in (with_seed(ops.NAME, body) for body in ids_of_rows(grids)):
        check()
        if (node := _node(case_id)) is not None and (key := key_of(node)) in used:
            found.setdefault(key, []).append(case_id)
    offered: dict[str, list[str]] = {}
    for case_id in ops.by_size(ops.ids("standard")):
        check()
        node = _node(case_id)
        if node is not None and all(s is None or (s.op == "NONE" and is_contiguous(s)) for s in node.src):
            offered.setdefault(key_of(node), []).append(case_id)
    for key, each in offered.items():
        if key in used:
            found.setdefault(key, [each[i * (len(each) - 1) // max(1, _EACH - 1)] for i in range(_EACH)])
    return {key: list(dict.fromkeys(each)) for key, each in found.items()}


def _used(level: Level, check: Callable[[], None]) -> set[str]:
    """Return the keys of all computing nodes in the cases of a level."""
    used: set[str] = set()
    for family in by_default():
        for case_id in family.ids(level):
            check()
            with suppress(ConformanceError):  # this machine cannot build the case
                used.update(key_of(n) for s in family.build(case_id).steps for n in s.graph if computes(n))
    return used


def _types(key: str) -> list[str]:
    """Return the types in a key."""
    return key.partition("-")[2].partition("@")[0].split("+")


def _node(case_id: str) -> Tensor | None:
    """Return the only computing node of a case; None if it has several, or another purpose."""
    try:
        case = ops.build(case_id)
    except ConformanceError:  # the shape is not a multiple of the type's blocks
        return None
    if any(k in case.params for k in _FOREIGN):
        return None
    nodes = [n for n in case.steps[0].graph if computes(n)]
    return nodes[0] if len(nodes) == 1 and len(case.steps[0].outputs) == 1 else None


# -- a case in each rounding -------------------------------------------------------------------------------------------

WEIGHTS = {"MUL_MAT": 0, "MUL_MAT_ID": 0, "OUT_PROD": 0, "FLASH_ATTN_EXT": 1}
"""Matrix product -> index of the source with the weights, or K."""
_PLACES = 8
"""Positions at which a wrong scale is inserted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A plain case on the device."""

    case: Case
    node: Tensor
    distances: dict[str, Difference]
    """Name of a rounding -> the difference from the reference with that rounding."""
    scales: dict[str, float]
    """Name of a rounding -> the mean ratio of found to expected values."""

    @property
    def terms(self) -> int:
        """Number of terms in the sum of one element."""
        return max(1, DECLARATIONS[self.node.op].rounding.terms(self.node))


def measure(backend: Backend, oracle: Oracle, case: Case) -> Measured:
    """Run `case` and compare it with every rounding that changes it."""
    (output,) = case.steps[0].outputs
    node = next(n for n in case.steps[0].graph if computes(n))
    found = execute(backend, case).steps[0].outputs[output]
    distances: dict[str, Difference] = {}
    scales: dict[str, float] = {}
    for name, rounding in ROUNDINGS.items():
        if rounding is EXACT or changes(node, rounding):
            try:
                want = oracle.expect([case], rounding)[0].steps[0].outputs[output]
            except ConformanceError:
                if rounding is EXACT:
                    raise
                continue  # rows are not a multiple of its block size
            distances[name] = compare(output, want, found, unordered=node.op == "TOP_K")
            scales[name] = _scale(values(output, want), values(output, found))
    return Measured(case, node, distances, scales)


def _scale(want: NDArray[Any], found: NDArray[Any]) -> float:
    both = np.isfinite(want) & np.isfinite(found)
    energy = float(np.sum(np.square(want[both], dtype=np.float64)))
    return float(np.sum(want[both] * found[both], dtype=np.float64)) / energy if energy else 1.0


def blind(oracle: Oracle, measured: Sequence[Measured], key: str, entry: Entry) -> str:
    """Return how many doubled block scales, or weights, the entry's bound would hide.

    Each of `_PLACES` is doubled separately, in the case with the longest sum.
    """
    m = max(measured, key=lambda m: m.terms)
    place = WEIGHTS.get(m.node.op)
    weights = None if place is None else m.node.src[place]
    if weights is None or entry.finding:
        return ""
    profile = Profile("", "", "", {}, {key: entry}).arithmetic("blind")
    (output,) = m.case.steps[0].outputs
    right = oracle.expect([m.case], profile)[0].steps[0].outputs[output]
    budget = budget_of(m.node, profile)
    wrong = [oracle.expect([c], profile)[0].steps[0].outputs[output] for c in _planted(m.case, weights.root)]
    wrong = [w for w in wrong if not np.array_equal(w, right)]  # the others are never read
    unseen = sum(budget.used(compare(output, right, w)) <= 1 for w in wrong)
    what = "block scales" if weights.type.is_quantized else "weights"
    return f"{unseen} of {len(wrong)} {what}, doubled" if unseen else ""


def _planted(case: Case, weights: Tensor) -> Iterator[Case]:
    """Yield `case` with one scale or weight doubled, at each of `_PLACES` positions."""
    leaves = case.persistent if weights in case.persistent else case.steps[0].inputs
    n = leaves[weights].nbytes // weights.type.type_size
    for i in range(_PLACES):
        data = leaves[weights].copy()
        _double(weights.type, data.reshape(n, -1)[(2 * i + 1) * n // (2 * _PLACES)])
        if leaves is case.persistent:
            yield replace(case, persistent={**case.persistent, weights: data})
        else:
            step = case.steps[0]
            yield replace(case, steps=[replace(step, inputs={**step.inputs, weights: data})])


def _double(type_: GGMLType, block: Bytes) -> None:
    """Double the scale of a block, or an element; a block without its own scale is zeroed."""
    fields = BLOCK.get(type_)
    if fields is None:
        stored = block.view(type_.dtype or np.uint16)
        stored[:] = stored * 2 if type_.dtype is not None else stored + (1 << 7)  # the exponent of a BF16
    elif "d" in (fields.names or ()) and fields["d"] == np.dtype("<f2"):
        block.view(fields)["d"] *= 2
    else:
        block[:] = 0
