"""Compare the choices of experts in two runs of a model: tell a flip at a near-tie from a wrong number.

A router scores each expert and chooses the highest few. Where two scores are closer than a device rounds, it may choose
the other expert, and from there on its values rightly differ. So the CPU plays the run again with the device's
experts; what then differs is judged as any other number. The flip itself is judged by the scores: the device's must be
near the CPU's, and the margin within their difference.
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
    """One routing node in one batch."""

    name: str
    batch: int
    k: int
    """Experts of each row that are used."""
    scores: NDArray[np.float64]
    """`[tokens, experts]`, the highest chosen first."""
    chosen: NDArray[np.int32]
    """`[tokens, k or more]`."""


@dataclass(frozen=True, slots=True)
class Flips:
    """The differences between two runs."""

    notes: list[str] = field(default_factory=list)
    """Choices at a near-tie."""
    wrong: str = ""
    """The first that no rounding explains."""


def flips(device: Sequence[Choice], cpu: Sequence[Choice]) -> Flips:
    """The rows where the device chose other experts.

    Args:
        device: the device's choices.
        cpu: the CPU's own, each made after the device's earlier ones.
    """
    notes: list[str] = []
    if [(c.name, c.scores.shape) for c in device] != [(c.name, c.scores.shape) for c in cpu]:
        return Flips(notes, "the two runs have other choices to make")
    for d, c in zip(device, cpu, strict=True):
        k = min(d.k, c.k)
        for row in range(len(d.scores)):
            ours, theirs = (set(x.chosen[row, :k].tolist()) for x in (d, c))
            if ours == theirs:
                continue
            note, wrong = _judge(d, c, row, sorted(ours - theirs), sorted(theirs - ours))
            if wrong:
                return Flips(notes, f"{note}: {wrong}")
            notes.append(note)
    return Flips(notes)


def _judge(device: Choice, cpu: Choice, row: int, ours: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """One row's flip in words, and why no rounding explains it."""
    a, b = device.scores[row], cpu.scores[row]
    both = np.isfinite(a) & np.isfinite(b)
    margin = float(b[theirs].max() - b[ours].min())
    apart = float(np.abs(a - b)[both].max(initial=0.0))
    experts = f"expert {' and '.join(map(str, ours))} for {' and '.join(map(str, theirs))}"
    where = f"{experts} at {device.name}, batch {device.batch}, token {row}"
    note = f"{where}: margin {margin:.2g}, scores differ by {apart:.2g}"
    if not both[[*ours, *theirs]].all() or float(np.sum((a - b)[both] ** 2)) > NEAR * float(np.sum(b[both] ** 2)):
        return note, "its scores are wrong already"
    if margin > 2 * apart:
        return note, "no rounding of scores explains it, so the choice itself is wrong"
    return note, ""


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
