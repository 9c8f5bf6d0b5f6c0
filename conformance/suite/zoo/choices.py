"""Choices of experts in two runs of a model: a flip at a near-tie told apart from a wrong number.

A router gives each expert a score, and the highest few are taken. Where two scores are closer than a device rounds, the
device may take the other expert, and from there on its values are others, rightly. So the CPU's run is played once more
with the experts that the device took: what remains is a difference of numbers, and is judged as any other. That the
device may take them is judged by the scores: they must be near the CPU's, and the margin within their difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEAR = 5e-4
"""NMSE of a token's scores up to which two runs agree: that of logits."""


@dataclass(slots=True)
class Choice:
    """One node that chooses, in one batch."""

    name: str
    batch: int
    k: int
    """How many of each row are used."""
    scores: NDArray[np.float64]
    """`[tokens, experts]`, the highest chosen first."""
    chosen: NDArray[np.int32]
    """`[tokens, k or more]`."""


@dataclass(frozen=True, slots=True)
class Flips:
    """What two runs chose differently."""

    notes: list[str] = field(default_factory=list)
    """Choices at a near-tie."""
    wrong: str = ""
    """The first that no rounding explains."""


def flips(found: Sequence[Choice], expected: Sequence[Choice]) -> Flips:
    """The rows where `found` has other experts.

    Args:
        found: a device's choices.
        expected: the CPU's own, each made after the device's earlier ones.
    """
    notes: list[str] = []
    if [(c.name, c.scores.shape) for c in found] != [(c.name, c.scores.shape) for c in expected]:
        return Flips(notes, "the two runs have other choices to make")
    for f, e in zip(found, expected, strict=True):
        k = min(f.k, e.k)
        for row in range(len(f.scores)):
            mine, right = (set(c.chosen[row, :k].tolist()) for c in (f, e))
            if mine == right:
                continue
            taken, left = sorted(mine - right), sorted(right - mine)
            where = f"expert {_listed(taken)} for {_listed(left)} at {f.name}, batch {f.batch}, token {row}"
            a, b = f.scores[row], e.scores[row]
            both = np.isfinite(a) & np.isfinite(b)
            margin = float(b[left].max() - b[taken].min())
            apart = float(np.abs(a - b)[both].max(initial=0.0))
            said = f"{where}: margin {margin:.2g}, scores differ by {apart:.2g}"
            energy = float(np.sum(b[both] ** 2))
            if not both[[*taken, *left]].all() or float(np.sum((a - b)[both] ** 2)) > NEAR * energy:
                return Flips(notes, f"{said}: its scores are wrong already")
            if margin > 2 * apart:
                return Flips(notes, f"{said}: no rounding of scores explains it, so the choice itself is wrong")
            notes.append(said)
    return Flips(notes)


def _listed(experts: Sequence[int]) -> str:
    return " and ".join(map(str, experts))


def save(path: Path, choices: Sequence[Choice]) -> None:
    """Write choices to a file."""
    arrays: dict[str, Any] = {}
    for i, c in enumerate(choices):
        arrays |= {f"s{i}": c.scores, f"c{i}": c.chosen, f"f{i}": np.array([c.batch, c.k])}
    names = np.array([c.name for c in choices], dtype=np.str_)
    np.savez(path, names=names, **arrays)


def load(path: Path) -> list[Choice]:
    """What `save` wrote."""
    with np.load(path) as file:
        facts = [file[f"f{i}"].tolist() for i in range(len(file["names"]))]
        return [
            Choice(str(name), facts[i][0], facts[i][1], file[f"s{i}"], file[f"c{i}"])
            for i, name in enumerate(file["names"])
        ]
