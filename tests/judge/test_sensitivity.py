"""The corpus can see: a wrong output of a kind that backends really give fails every case that can tell it apart."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import numpy as np
import pytest

from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, GGML_CPU
from conformance.ggml.tensor import Bytes, Tensor, pack
from conformance.judge.budget import Budget
from conformance.judge.compare import compare
from conformance.judge.judge import judge_step
from conformance.run.oracle import Oracle
from conformance.run.session.select import build
from conformance.suite import FAMILIES

IDS = FAMILIES["ops"].ids("standard")[::7]
"""Every seventh: all of them take a minute of processor time."""
BATCH = 256
ANOTHER = "the output of another step"
EQUAL = (
    ("ops/CLAMP-*,special=nan,min=0.75,max=0.75@*", ANOTHER),
    ("ops/COUNT_EQUAL-*", ANOTHER),
    ("ops/FLASH_ATTN_EXT-f16+f16-q=64x1x4,k=64x96x2,data=rising@*", "two rows swapped"),
)
"""Cases and faults that change no output: it does not depend on the data, or it is equal by chance."""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """One reference for all."""
    oracle = Oracle()
    yield oracle
    oracle.close()


def _seed_after(case_id: str) -> str:
    name, _, seed = case_id.rpartition("@")
    return f"{name}@{int(seed) + 1}"


def _budget(case: Case, t: Tensor, want: Bytes) -> Budget:
    (judged,) = judge_step(case, 0, {t: want}, {t: want}, GGML_CPU)
    return judged.budget


def _used(budget: Budget, t: Tensor, want: Bytes, got: Bytes) -> float:
    return budget.used(compare(t, want, got, unordered=t.op == "TOP_K"))


def _elements(t: Tensor, packed: Bytes) -> np.ndarray:
    """Packed bytes as an array of elements (blocks): shape `ne[::-1]` with the bytes of one element last."""
    blck = t.type.blck_size
    return packed.reshape(*t.shape[:-1], t.ne[0] // blck, t.type.type_size)


def _swapped(t: Tensor, packed: Bytes, axis: int) -> Bytes | None:
    """Two unequal slices along dimension `axis` exchanged, or None where all are equal; rows of TOP_K are sets."""
    a = _elements(t, packed)
    rows = np.sort(a.view(np.int32), axis=-2) if t.op == "TOP_K" else a
    np_axis = 3 - axis
    first = np.take(rows, 0, np_axis)
    for i in range(1, t.ne[axis]):
        other = np.take(rows, i, np_axis)
        if not np.array_equal(first, other):
            order = np.arange(t.ne[axis])
            order[[0, i]] = order[[i, 0]]
            return np.ascontiguousarray(np.take(a, order, np_axis)).reshape(-1)
    return None


_NAN = {"f32": (0, 0, 0xC0, 0x7F), "f16": (0, 0x7E), "bf16": (0xC0, 0x7F)}


def _faults(case: Case, t: Tensor, want: Bytes, other: Bytes) -> Iterator[tuple[str, Bytes]]:
    yield "zeros", np.zeros_like(want)
    yield ANOTHER, other
    for leaf, data in (*case.steps[0].inputs.items(), *case.persistent.items()):
        if leaf.type is t.type and data.nbytes == want.nbytes and not np.array_equal(data, want):
            yield f"a copy of {leaf}", pack(data, leaf, 0)
    for axis, what in ((1, "rows"), (2, "heads"), (3, "sequences")):
        swapped = _swapped(t, want, axis)
        if swapped is not None:
            yield f"two {what} swapped", swapped
    if t.type.name in _NAN:
        holed = want.copy()
        middle = want.nbytes // 2 // t.type.type_size * t.type.type_size
        holed[middle : middle + t.type.type_size] = _NAN[t.type.name]
        if not np.array_equal(holed, want):
            yield "one NaN", holed


def test_every_planted_output_is_seen(oracle: Oracle) -> None:
    """Zeros, another step's output, an input's copy, swapped rows or heads and one NaN fail every case at `standard`.

    Another step's output is the same case at the next seed: same shapes, other data. Of a case with regimes each must
    fail in one of them, since what is tiny or huge in one may leave nothing else to see there.
    """
    unseen: list[str] = []
    planted = 0
    for start in range(0, len(IDS), BATCH):
        ids = IDS[start : start + BATCH]
        cases = [build(i) for i in ids]
        others = [build(_seed_after(i)) for i in ids]
        right, stale = oracle.expect(cases, EXACT), oracle.expect(others, EXACT)
        for case, a, b in zip(cases, right, stale, strict=True):
            want = {**a.steps[0].outputs, **a.steps[0].caches}
            other = [*b.steps[0].outputs.values(), *b.steps[0].caches.values()]
            seen: set[str] = set()
            blind: dict[str, str] = {}
            for (t, value), elsewhere in zip(want.items(), other, strict=True):
                if not value.nbytes or (t in case.persistent and t not in case.steps[0].outputs):
                    continue
                budget = _budget(case, t, value)
                for what, wrong in _faults(case, t, value, elsewhere):
                    planted += 1
                    kind = what.partition(" of ")[0] if "data" in case.params else f"{t.name}: {what}"
                    if _used(budget, t, value, wrong) > 1:
                        seen.add(kind)
                    elif not any(what == w and fnmatchcase(case.id, c) for c, w in EQUAL):
                        blind[kind] = f"{case.id}: {what}"
            unseen += [sentence for kind, sentence in blind.items() if kind not in seen]
    assert planted > 3 * len(IDS)
    assert not unseen, f"{len(unseen)} of {planted}: " + "; ".join(unseen[:40])
