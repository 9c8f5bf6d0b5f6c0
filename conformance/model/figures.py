"""How far two runs of a model are apart, row by row of their logits: what a reader of its text would notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Flip:
    """A row in which a voice would take another token than the reference."""

    row: int
    expected: int
    """The reference's token."""
    found: int
    margin: float
    """By how much the reference prefers its token to the other."""
    rounding: float
    """By how much rounding may move that difference."""

    @property
    def near(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.rounding


@dataclass(frozen=True, slots=True)
class Figures:
    """A voice's logits against the reference's."""

    kl: F64
    """Of each row, in nats: of the voice's distribution from the reference's; infinite where a logit is no number."""
    nmse: F64
    """Of each row's logits."""
    margin: F64
    """Of each row: the reference's first logit less its second."""
    agree: NDArray[np.bool_]
    """Whether both take the same token."""

    @property
    def top1(self) -> float:
        """The share of rows in which both take the same token."""
        return float(self.agree.mean())

    @property
    def kl_max(self) -> float:
        """The largest of all rows."""
        return float(self.kl.max())

    @property
    def kl_mean(self) -> float:
        """The mean of all rows."""
        return float(self.kl.mean())


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
    """Kullback-Leibler divergence of one row's distribution from the reference's, in nats; infinite where a logit of
    only one of them is no finite number.
    """
    if not np.array_equal(np.isfinite(found), np.isfinite(reference)):
        return inf
    known = np.isfinite(reference)
    p, q = _log_softmax(reference[known]), _log_softmax(found[known])
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))


def _log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(initial=-inf)
    return np.asarray(x - np.log(np.exp(x).sum()))


def perplexity(logits: F32, tokens: Sequence[int]) -> float:
    """How many tokens a row of `logits` is in doubt among, on average: row i is asked for token i + 1."""
    rows = zip(logits, tokens[1:], strict=False)
    return float(np.exp(-np.mean([_log_softmax(row)[token] for row, token in rows])))


def nmse(found: F32, reference: F32) -> float:
    """Energy of one row's error / energy of the reference; infinite where a logit of only one is no finite number."""
    if not np.array_equal(np.isfinite(found), np.isfinite(reference)):
        return inf
    known = np.isfinite(reference)
    a, e = found[known].astype(np.float64), reference[known].astype(np.float64)
    energy = float(np.sum(e * e))
    error = float(np.sum((a - e) ** 2))
    return error / energy if energy else (0.0 if not error else inf)


def flips(found: F32, reference: F32, rounding: float) -> list[Flip]:
    """The rows in which `found` prefers another token than `reference`; `rounding` as of a `Flip`."""
    out = []
    for row, (f, r) in enumerate(zip(found, reference, strict=True)):
        mine, theirs = int(f.argmax()), int(r.argmax())
        if mine != theirs:
            out.append(Flip(row, theirs, mine, float(r[theirs]) - float(r[mine]), rounding))
    return out


def apart(a: F32, b: F32) -> float:
    """The largest difference of two rows, whose common offset does not count: no token's probability depends on it."""
    d = a.astype(np.float64) - b.astype(np.float64)
    d = d[np.isfinite(d)]
    return float(np.abs(d - d.mean()).max()) if d.size else 0.0
