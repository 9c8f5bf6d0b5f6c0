"""Compare the values of a tensor in two files, block by block.

Two healthy files differ by what their types cost. This cost is measured: the types' own quantisers store the values of
the finer file once more. If that file is quantised itself, its values lie on a grid that another quantiser may hit
exactly, so they are first moved by noise of one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, inf, sqrt

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.quants import from_float, to_float
from conformance.ggml.quants.write import WRITE
from conformance.ggml.types import TYPES, GGMLType

from .modelfile import ModelFile, StoredTensor

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

FACTOR = 16.0
"""Maximum error energy of 16 values, in multiples of what the types' own quantisers cost.

A quantiser that weighs values by importance gives up values without importance."""
RARE = 0.01
"""Share of differing units up to which two files of one type had one source."""
SURE = 4.0
"""Factor for these, and for errors that are `UNRELATED`."""
GROUP = 16
"""Values whose errors are added up: the smallest sub-block of a type."""
CHUNK = 1 << 20
"""Values that are read at a time."""
WORST = 128
"""Units that are stored once more at first; more only if some of them are wrong."""
MOST = 1 << 13
"""Maximum number of units that are stored once more."""
STEP_OVER = 32
"""Values over which noise has one amplitude."""
TYPICAL = 4.0
"""Maximum by which the tensor's typical error, in multiples of the cost, raises the factor."""
UNRELATED, UNKNOWN = 1.5, 3.0
"""Share of a group's energy above which an error is wrong in any type.

Negated values have 4, unrelated ones 2. The second is for types without a quantiser here or of fewer than `FEW_BITS`
bits, in which only whole blocks can be judged."""
FEW_BITS = 3.0
ALIKE = 0.3
"""Minimum cosine of a tensor with itself in any two types."""
LARGER = 4.0
"""Factor between the energies of a unit above which the smaller one counts as the source."""

_HALF_ULP = {TYPES["f32"]: (-24, -150), TYPES["f16"]: (-11, -25), TYPES["bf16"]: (-8, -134)}
"""Exponents of the relative and the absolute rounding error."""
_STORABLE = frozenset({*_HALF_ULP, *WRITE})


@dataclass(frozen=True, slots=True)
class Fit:
    """Values that belong to each other, compared."""

    cosine: float
    """1 for equal values, about 0 for unrelated ones."""
    gain: float
    """Factor on the expected values that fits best."""
    energy: float
    """Energy of the expected values."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor in two files."""

    n_units: int
    """Number of units: blocks of the coarser type, or runs of values of types without blocks."""
    unit: int
    """Values per unit."""
    wrong: NDArray[np.intp]
    """Units over the limit, worst first."""
    excess: F64
    """How far each of them is over the limit: a factor above 1."""
    share: float
    """Share of wrong units in an even sample."""
    typical: float
    """Median over this sample of the error energy, in multiples of what the types cost."""
    differing: int
    """Units that are not equal."""
    fit: Fit
    """Fit of the even sample."""

    @property
    def whole(self) -> bool:
        """True if not single blocks are wrong but most of the tensor."""
        return self.share > 0.5 or (self.differing > 0 and self.fit.cosine < ALIKE and self.fit.energy > 0)


def comparable(a: StoredTensor, b: StoredTensor) -> bool:
    """Return True if both have values that can be compared by their types' cost."""
    return all(t.type is not None and (t.type.is_quantized or t.type in _HALF_ULP) for t in (a, b))


def compare(a: ModelFile, x: StoredTensor, b: ModelFile, y: StoredTensor) -> Compared:
    """Compare two tensors of one shape that are `comparable`."""
    pair = _Pair(a, x, b, y)
    scores = np.concatenate([*pair.scores()])
    differing = int((scores > 0).sum())
    rare = x.type is y.type and differing <= max(1, RARE * pair.n)
    ratio, share = pair.errors(pair.even)
    typical = float(np.median(ratio.max(axis=1)))
    factor, floor = (SURE, 0.0) if rare else (FACTOR * min(max(1.0, typical), TYPICAL), pair.floor)
    limits = Limits(factor, floor, pair.most)
    over = _excess(ratio, share, limits)
    units, excess = _search(pair, scores, limits)
    return Compared(pair.n, pair.unit, units, excess, float((over > 1).mean()), typical, differing, pair.fit(pair.even))


@dataclass(frozen=True, slots=True)
class Limits:
    """When the error of a group is wrong."""

    factor: float
    """Above this multiple of the types' cost,"""
    floor: float
    """if it is also above this share of the energy;"""
    most: float
    """or above this share."""


def _search(pair: _Pair, scores: F32, limits: Limits) -> tuple[NDArray[np.intp], F64]:
    """Return the wrong units and their excess, worst first; look further while units are wrong."""
    order = np.argsort(-scores, kind="stable")[: min(MOST, int((scores > 0).sum()))]
    units, excess, at, n = [order[:0]], [np.zeros(0)], 0, WORST
    while at < len(order):
        found = _excess(*pair.errors(order[at : at + n]), limits)
        units.append(order[at : at + n][found > 1])
        excess.append(found[found > 1])
        if not (found > 1).any():
            break
        at, n = at + n, 2 * n
    every = np.concatenate(excess)
    worst = np.argsort(-every, kind="stable")
    return np.concatenate(units)[worst], every[worst]


def _excess(ratio: F64, share: F64, limits: Limits) -> F64:
    """Return how far the worst groups of units are over both limits, or over that of any type."""
    with np.errstate(all="ignore"):
        beyond = share / limits.floor if limits.floor else np.where(share > 0, inf, 0.0)
        over = np.maximum(np.minimum(ratio / limits.factor, beyond), np.minimum(ratio / SURE, share / limits.most))
    return np.asarray(over.max(axis=1, initial=0.0))


def fit(a: ModelFile, x: StoredTensor, b: ModelFile, y: StoredTensor) -> Fit:
    """Compare two tensors by an even sample."""
    pair = _Pair(a, x, b, y)
    return pair.fit(pair.even)


def storing(a: StoredTensor, b: StoredTensor, values: F32, *, every: bool) -> F64 | None:
    """Return the error energy that the types of both cost each `GROUP` of `values`.

    These are the values of `b`. Without `every` it is measured over an even sample of units, as a share of their
    energy. None without a quantiser for both types.
    """
    types_ = [t.type for t in (a, b) if t.type in _STORABLE]
    if len(types_) < 2:
        return None
    units = values.reshape(-1, _unit(a, b))
    step = max(1, CHUNK // units.shape[1])
    parts = [units[i : i + step] for i in range(0, len(units), step)] if every else [units[_even(len(units))]]
    costs = []
    for part in parts:
        one, two = (np.sqrt(cost(t, part, on_grid=types_[1].is_quantized)) for t in types_)
        costs.append((one + two) ** 2)
    if every:
        return np.concatenate(costs).reshape(-1)
    energy, all_ = _energy(parts[0]).sum(), _energy(units).reshape(-1)
    return np.asarray(all_ * (costs[0].sum() / energy)) if energy else np.zeros_like(all_)


def _unit(a: StoredTensor, b: StoredTensor) -> int:
    """Return the values per unit of both types."""
    sizes = [t.type.blck_size for t in (a, b) if t.type is not None]
    return max(*sizes, gcd(a.n_blocks * sizes[0], STEP_OVER))


def _even(n: int) -> NDArray[np.intp]:
    """Return an even sample of units."""
    return np.unique(np.linspace(0, n - 1, min(n, WORST)).astype(np.intp))


class _Pair:
    """Two tensors, read by units of both types."""

    def __init__(self, a: ModelFile, x: StoredTensor, b: ModelFile, y: StoredTensor) -> None:
        assert x.type is not None
        assert y.type is not None
        self.unit = _unit(x, y)
        self.n = x.n_blocks * x.type.blck_size // self.unit
        self._sides = ((a, x, x.type), (b, y, y.type))
        self._same = x.type is y.type
        self._source = 0 if _bits(x.type) > _bits(y.type) else 1
        bits = min(_bits(x.type), _bits(y.type))
        self._known = {x.type, y.type} <= _STORABLE
        self.floor = UNRELATED * 2.0 ** (2 - int(bits)) if self._known else UNKNOWN
        """Share of a group's energy below which no error is wrong."""
        self._by_group = self._known and bits >= FEW_BITS
        self.most = UNRELATED if self._by_group else UNKNOWN
        """Share above which each is."""
        self.even = _even(self.n)

    def _read(self, side: int, first: int, n: int) -> F32:
        """Return units, `[n, unit]`."""
        file, t, type_ = self._sides[side]
        per = self.unit // type_.blck_size
        return file.values(t, first * per, n * per).reshape(n, self.unit)

    def _equal(self, first: int, n: int) -> bool:
        if not self._same:
            return False
        per = self.unit // self._sides[0][2].blck_size
        a, b = (f.raw(t, first * per, n * per).view(np.uint8) for f, t, _ in self._sides)
        return bool(np.array_equal(a, b))

    def scores(self) -> Iterator[F32]:
        """Yield the largest error energy of a group per unit, divided by the unit's squared range."""
        step = max(1, CHUNK // self.unit)
        for first in range(0, self.n, step):
            n = min(step, self.n - first)
            if self._equal(first, n):
                yield np.zeros(n, np.float32)
                continue
            with np.errstate(all="ignore"):
                a, b = self._read(0, first, n), self._read(1, first, n)
                source = (a, b)[self._source]
                energy = _grouped((a - b) ** 2).max(axis=1)
                spread = source.max(axis=1) - source.min(axis=1) + np.abs(source).max(axis=1)
                score = np.where(energy > 0, energy / np.maximum(spread * spread, np.float32(1e-30)), energy)
            yield np.where(np.isnan(score), np.float32(inf), score).astype(np.float32)

    def _units(self, units: NDArray[np.intp]) -> tuple[F32, F32]:
        """Return `units` of both files."""
        a, b = (np.array([self._read(side, int(k), 1)[0] for k in units], np.float32) for side in (0, 1))
        return a.reshape(-1, self.unit), b.reshape(-1, self.unit)

    def errors(self, units: NDArray[np.intp]) -> tuple[F64, F64]:
        """Return the error energy of each group of `units`, `[n, groups]`.

        First in multiples of what both types cost, then as a share of the group's energy, or of the unit's mean one if
        that is larger.
        """
        a, b = self._units(units)
        source, other = (a, b) if self._source == 0 else (b, a)
        with np.errstate(all="ignore"):
            error = _grouped((a.astype(np.float64) - b) ** 2)
            error[np.isnan(error)] = inf
            error[_grouped(~(np.isnan(a) & np.isnan(b) | (a == b))) == 0] = 0
            mine, theirs = (_energy(x).sum(axis=1) for x in (source, other))
            large = (mine > LARGER * theirs) & (theirs > 0)
            source = np.where(large[:, None], other, source)
            on_grid = self._sides[self._source][2].is_quantized or bool(large.any())
            costs = [np.sqrt(cost(type_, source, on_grid=on_grid)) for _, _, type_ in self._sides]
            energy = _energy(source)
            allowed = (costs[0] + costs[1]) ** 2
            if not self._by_group:
                error, energy, allowed = (x.sum(axis=1, keepdims=True) for x in (error, energy, allowed))
            energy = np.maximum(energy, energy.mean(axis=1, keepdims=True))
            if not self._known:
                allowed = np.zeros_like(error)
            return np.where(error > 0, error / allowed, 0.0), np.where(error > 0, error / energy, 0.0)

    def fit(self, units: NDArray[np.intp]) -> Fit:
        """Return how well `units` of both fit."""
        with np.errstate(all="ignore"):
            a, b = (np.nan_to_num(side.astype(np.float64)) for side in self._units(units))
            dot, aa, bb = float(np.sum(a * b)), float(np.sum(a * a)), float(np.sum(b * b))
        return Fit(dot / sqrt(aa * bb) if aa and bb else 0.0, dot / bb if bb else 0.0, bb)


def cost(type_: GGMLType, x: F32, *, on_grid: bool) -> F64:
    """Return the error energy per group of storing units in `type_`; 0 without a quantiser.

    `on_grid`: `x` was read from blocks.
    """
    x = _finite(x)
    if type_ in _HALF_ULP:
        relative, absolute = _HALF_ULP[type_]
        return _grouped((np.abs(x.astype(np.float64)) * 2.0**relative + 2.0**absolute) ** 2)
    if type_ not in _STORABLE:
        return np.zeros_like(_grouped(x))
    error = _storing(type_, x)
    if on_grid:
        error = np.maximum(error, _storing(type_, x + _noise(type_, x)))
    return np.asarray(np.maximum(error, error.mean(axis=1, keepdims=True)))


def _storing(type_: GGMLType, x: F32) -> F64:
    return _grouped((to_float(type_, from_float(type_, x)).astype(np.float64) - x) ** 2)


def _energy(x: F32) -> F64:
    return _grouped(_finite(x).astype(np.float64) ** 2)


def _finite(x: F32) -> F32:
    return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _noise(type_: GGMLType, x: F32) -> F32:
    """Return noise of one step of a type whose levels span the range of `x`."""
    parts = x.reshape(len(x), -1, min(STEP_OVER, x.shape[1]))
    step = (parts.max(axis=2, keepdims=True) - parts.min(axis=2, keepdims=True)) / np.float32(2.0 ** int(_bits(type_)))
    random = np.random.Generator(np.random.PCG64(0)).random(parts.shape, np.float32) - np.float32(0.5)
    return np.asarray((random * step).reshape(x.shape), np.float32)


def _bits(type_: GGMLType) -> float:
    """Return the bits per value."""
    return 8 * type_.type_size / type_.blck_size


def _grouped(x: NDArray[np.generic]) -> F64:
    """Add up groups of values: `[n, unit]` to `[n, unit / GROUP]`."""
    out: F64 = np.add.reduce(x.reshape(len(x), -1, min(GROUP, x.shape[1])), axis=2, dtype=np.float64)
    return out
