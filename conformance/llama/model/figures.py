"""Differences between two runs of a model, row by row of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from conformance.judge.verdict import counted

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Flip:
    """A row where the checked run prefers another token than the reference."""

    row: int
    expected: int
    """The reference's token."""
    found: int
    margin: float
    """The reference's logit of its token minus that of the other."""
    rounding: float
    """How much rounding may change that difference."""

    @property
    def near(self) -> bool:
        """True if rounding explains it."""
        return self.margin <= self.rounding


@dataclass(frozen=True, slots=True)
class Figures:
    """The logits of a run compared with the reference's, row by row."""

    kl: F64
    """KL divergence in nats; infinite if only one distribution has a NaN or infinity."""
    nmse: F64
    """NMSE of the logits."""
    margin: F64
    """The reference's largest logit minus its second largest."""
    agree: NDArray[np.bool_]
    """True if both prefer the same token."""

    @property
    def top1(self) -> float:
        """Share of rows where both prefer the same token."""
        return float(self.agree.mean())

    @property
    def kl_max(self) -> float:
        """Largest KL divergence."""
        return float(self.kl.max())

    @property
    def kl_mean(self) -> float:
        """Mean KL divergence."""
        return float(self.kl.mean())

    def sentence(self) -> str:
        """Return KL and agreement in words."""
        kl = f"KL {self.kl_max:.2g} at most, {self.kl_mean:.2g} on average"
        return f"logits of {counted(len(self.kl), 'token')}: {kl}, top 1 {self.top1:.1%}"


def measure(found: F32, reference: F32) -> Figures:
    """Compare logits `[rows, n_vocab]`."""
    top = np.partition(reference.astype(np.float64), -2, axis=1)
    return Figures(
        np.array([divergence(q, p) for q, p in zip(found, reference, strict=True)]),
        np.array([nmse(a, e) for a, e in zip(found, reference, strict=True)]),
        top[:, -1] - top[:, -2],
        np.array(found.argmax(1) == reference.argmax(1)),
    )


def divergence(found: F32, reference: F32) -> float:
    """Return a row's KL divergence in nats; infinite if a logit is finite in only one of them."""
    if not np.array_equal(np.isfinite(found), np.isfinite(reference)):
        return inf
    known = np.isfinite(reference)
    p, q = log_softmax(reference[known]), log_softmax(found[known])
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))


def log_softmax(logits: F32) -> F64:
    """Return the log probabilities of a row of logits."""
    x = logits.astype(np.float64)
    x -= x.max(initial=-inf)
    return np.asarray(x - np.log(np.exp(x).sum()))


def perplexity(logits: F32, tokens: Sequence[int]) -> float:
    """Return the perplexity of `tokens`: row i of `logits` predicts token i + 1."""
    rows = zip(logits, tokens[1:], strict=False)
    return float(np.exp(-np.mean([log_softmax(row)[token] for row, token in rows])))


def nmse(found: F32, reference: F32) -> float:
    """Return a row's error energy / reference energy; infinite if only one is finite."""
    if not np.array_equal(np.isfinite(found), np.isfinite(reference)):
        return inf
    known = np.isfinite(reference)
    a, e = found[known].astype(np.float64), reference[known].astype(np.float64)
    energy = float(np.sum(e * e))
    error = float(np.sum((a - e) ** 2))
    return error / energy if energy else (0.0 if not error else inf)


def flips(found: F32, reference: F32, rounding: float) -> list[Flip]:
    """Return rows where `found` prefers another token; `rounding` as for `Flip`."""
    out = []
    for row, (f, r) in enumerate(zip(found, reference, strict=True)):
        mine, theirs = int(f.argmax()), int(r.argmax())
        if mine != theirs:
            out.append(Flip(row, theirs, mine, float(r[theirs]) - float(r[mine]), rounding))
    return out


def apart(a: F32, b: F32) -> float:
    """Return the largest difference of two rows after removing their mean offset."""
    d = a.astype(np.float64) - b.astype(np.float64)
    d = d[np.isfinite(d)]
    return float(np.abs(d - d.mean()).max()) if d.size else 0.0


def number(x: float) -> float | None:
    """Return `x`, or None if it is NaN or infinite, which JSON cannot express."""
    return x if abs(x) < float("inf") else None
