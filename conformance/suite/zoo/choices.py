"""Choices of experts in two runs of a model: a flip at a near-tie told apart from a wrong number.

A router gives each expert a score, and the highest few are taken. Where two scores are closer than a device rounds, the
device may take the other expert, and from there on its values are others, rightly. So the CPU's run is played once more
with the experts that the device took: what remains is a difference of numbers, and is judged as any other. That the
device may take them is judged by the scores: they must be near the CPU's, and the margin within their difference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.tensor import Bytes, Tensor, nbytes, pack
from conformance.ggml.types import BF16, F16, F32

from .layout import EVAL_CALLBACK, TENSOR
from .library import Library

NEAR = 5e-4
"""NMSE of a token's scores up to which two runs agree: that of logits."""
_OPS = frozenset({"ARGSORT", "TOP_K"})
_COMPUTE = 16
"""`GGML_TENSOR_FLAG_COMPUTE`."""


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


class Watch:
    """Its `callback` goes into `llama_context_params.cb_eval`: it keeps what every choosing node chose.

    Args:
        library: whose tensors these are.
        forced: choices to put in place of a run's own, in order; None leaves them.
        values: also look at every node's value, for the first that is not finite.
    """

    def __init__(self, library: Library, forced: Sequence[Choice] | None = None, *, values: bool = False) -> None:
        self._library, self._c = library, library.c
        self._forced = forced
        self._values = values
        self._at: dict[int, Choice] = {}
        self._written: dict[int, bool] = {}
        self.batch = 0
        self.choices: list[Choice] = []
        self.spoilt = ""
        """The first node whose value is not finite, and whether what it reads was so already."""
        self.callback = EVAL_CALLBACK(self._called)

    def _called(self, pointer: int, ask: bool, _data: int | None) -> bool:  # C's signature
        try:
            raw = self._raw(pointer)
            op = self._library.ops[raw[10]]
            if ask:
                return self._asked(raw, op)
            if op in _OPS:
                self._chosen(pointer, raw, op)
            elif self._values and not self.spoilt:
                self._looked(pointer, raw, op)
        except Exception as e:  # noqa: BLE001  # nothing may leave a callback
            self.spoilt = self.spoilt or f"{type(e).__name__}: {e}"
        return True

    def _asked(self, raw: tuple[Any, ...], op: str) -> bool:
        of = self._at.get(raw[38])
        if of is not None and op == "VIEW":
            of.k = raw[2]
        return op in _OPS or (self._values and not self.spoilt and bool(raw[27] & _COMPUTE) and op != "NONE")

    def _chosen(self, pointer: int, raw: tuple[Any, ...], op: str) -> None:
        rows = self._numbers(pointer)
        scores = self._numbers(raw[28])
        if op == "ARGSORT" and not raw[11]:  # ascending
            scores = -scores
        chosen = rows.reshape(-1, rows.shape[-1]).astype(np.int32)
        choice = Choice(_name(raw), self.batch, int(chosen.shape[1]), scores.reshape(-1, scores.shape[-1]), chosen)
        self._at[pointer] = choice
        self.choices.append(choice)
        if self._forced is not None:
            other = self._forced[len(self.choices) - 1].chosen
            if other.shape == chosen.shape:
                data = np.ascontiguousarray(other)
                self._c.ggml_backend_tensor_set(pointer, data.ctypes.data, 0, data.nbytes)

    def _looked(self, pointer: int, raw: tuple[Any, ...], op: str) -> None:
        if _finite(self._numbers(pointer)):
            return
        held = [p for p in raw[28:38] if p and self._is_state(p, raw[38]) and not _finite(self._numbers(p))]
        why = f"it reads {_name(self._raw(held[0]))}, which held NaN before" if held else "what it reads had none"
        self.spoilt = f"batch {self.batch}: {op} {_name(raw)} is the first value with NaN; {why}"

    def _is_state(self, pointer: int, target: int | None) -> bool:
        """Whether a source is a leaf of floats, or a view of one: no buffer that a node may have written since."""
        raw = self._raw(pointer)
        root = raw[38] or pointer
        return (
            self._library.types[raw[0]] in _FLOATS
            and root != target
            and self._library.ops[self._raw(root)[10]] == "NONE"
        )

    @staticmethod
    def _raw(pointer: int) -> tuple[Any, ...]:
        return TENSOR.unpack(ctypes.string_at(pointer, TENSOR.size))

    def _numbers(self, pointer: int) -> NDArray[np.float64]:
        raw = self._raw(pointer)
        t = Tensor(self._library.types[raw[0]], raw[2:6], raw[6:10])
        data: Bytes = np.empty(nbytes(t), np.uint8)
        self._c.ggml_backend_tensor_get(pointer, data.ctypes.data, 0, data.nbytes)
        packed = pack(data, t, 0)
        if t.type is BF16:
            return (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(t.shape).astype(np.float64)
        if t.type.dtype is None:
            return np.zeros(t.shape)
        return packed.view(t.type.dtype).reshape(t.shape).astype(np.float64)


_FLOATS = (F32, F16, BF16)


def _finite(values: NDArray[np.float64]) -> bool:
    """Whether no value is NaN; masks hold -Inf rightly."""
    return not np.isnan(values).any()


def _name(raw: tuple[Any, ...]) -> str:
    return str(raw[41].split(b"\0", 1)[0].decode(errors="replace"))
