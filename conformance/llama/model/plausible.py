"""Check the file of a model by itself: layout, metadata and values that no healthy file has.

A symmetric type such as Q4_0 stores negative scales as well, and a factor on a whole tensor looks like another tensor:
only another file shows such damage.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from conformance.ggml.quants.blocks import as_blocks

from . import blocks, vocabulary
from .blocks import CHUNK, STEP_OVER
from .finding import Finding, FindingKind
from .graphs import Say
from .modelfile import ModelFile, StoredTensor

FAR = 32.0
"""Factor on the largest values of the tensor's blocks above which one is unusual."""
NEAR = 8.0
"""Factor on the other blocks of its row and column that it must exceed, too."""
LARGE = 99.9
"""Percentile of the blocks' largest values that counts as large."""
FEW = 0.01
"""Maximum share of constant blocks in a tensor for one to be unusual."""
GAP = 8.0
"""Maximum of median / least of the others' largest values; above it, zeros are chance."""
COARSE = 4
"""Bits per value below which equal values may be quantisation."""
_POSITIVE = frozenset({"q8_0", "q4_1", "q5_1", "q2_K", "q4_K", "q5_K", "tq1_0", "tq2_0", "q1_0", "q2_0"})
"""Types whose quantisers write no negative scale."""
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


def values(file: ModelFile, say: Say) -> Iterator[Finding]:
    """Yield findings about the values of each tensor."""
    for t in file.readable():
        say(f"{file.path.name}: {t.name}")
        yield from _values(file, t)


def header(file: ModelFile) -> Iterator[Finding]:
    """Yield findings about the layout, the metadata and the tokenizer."""
    yield from _storage(file)
    yield from _metadata(file)
    yield from vocabulary.check(file)
    yield from _gaps(file)


def _storage(file: ModelFile) -> Iterator[Finding]:
    given = file.keys.get("general.alignment", file.alignment)
    if given != file.alignment or isinstance(given, bool):
        yield Finding(FindingKind.STORAGE, "general.alignment", expected="a power of two", found=str(given))
    end, before, part = 0, "", 0
    for t in sorted(file.tensors.values(), key=lambda t: (t.part, t.offset)):
        end, part = end if t.part == part else 0, t.part
        if t.type is None:
            yield Finding(FindingKind.STORAGE, t.name, why="ggml has no such type; a fork or a newer version may",
                          found=t.type_id)  # fmt: skip
        elif t.ne[0] % t.type.blck_size:
            why = f"{t.type} has rows of whole blocks of {t.type.blck_size} values"
            yield Finding(FindingKind.STORAGE, t.name, why=why, found=t.ne[0])
        if t.offset < end:
            yield Finding(FindingKind.STORAGE, t.name, why=f"it overlaps {before}", expected=end, found=t.offset)
        end, before = max(end, t.offset + t.n_bytes), t.name
    if file.cut:
        first = file.tensors[file.cut[0]]
        yield Finding(FindingKind.STORAGE, first.name, why=f"{len(file.cut)} tensors end after the end of the file",
                      expected=first.offset + first.n_bytes, found=len(file.parts[first.part]))  # fmt: skip


def _metadata(file: ModelFile) -> Iterator[Finding]:
    layers = {int(m[1]) for name in file.tensors if (m := _LAYER.match(name))}
    count = file.number("block_count")
    if layers and count is not None and max(layers) >= count:
        yield Finding(FindingKind.METADATA, f"{file.arch}.block_count", why=f"there is blk.{max(layers)}", found=count)
    heads, kv = file.number("attention.head_count"), file.number("attention.head_count_kv")
    if heads and kv and heads % kv:
        key = f"{file.arch}.attention.head_count_kv"
        yield Finding(FindingKind.METADATA, key, why=f"a divisor of {heads} expected", found=kv)
    width = file.number("embedding_length")
    for name in ("output_norm.weight", "output.weight"):
        if width and name in file.tensors and file.tensors[name].ne[0] != width:
            yield Finding(FindingKind.SHAPE, name, why=f"ne[0] is {file.arch}.embedding_length", expected=width,
                          found=file.tensors[name].ne[0])  # fmt: skip
    for key, value in file.keys.items():
        if isinstance(value, float) and not np.isfinite(value):
            yield Finding(FindingKind.METADATA, key, why="a finite number expected", found=str(value))
        elif key.endswith("_epsilon") and isinstance(value, float) and not 0 <= value < 0.1:
            yield Finding(FindingKind.METADATA, key, wrong=False, why="an epsilon is small", found=value)


def _gaps(file: ModelFile) -> Iterator[Finding]:
    """Yield norms that one layer lacks and all others have."""
    having: dict[str, set[int]] = defaultdict(set)
    for name in file.tensors:
        if m := _LAYER.match(name):
            having[m[2]].add(int(m[1]))
    layers = set().union(*having.values())
    for name, found in having.items():
        if "norm" in name and len(layers) > 2 and len(missing := layers - found) == 1:
            yield Finding(
                FindingKind.MISSING, f"blk.{missing.pop()}.{name}", why="each other layer has one", wrong=False
            )


def _values(file: ModelFile, t: StoredTensor) -> Iterator[Finding]:
    assert t.type is not None
    if not blocks.comparable(t, t):
        return
    total = t.n_blocks * t.type.blck_size
    per = STEP_OVER if t.ne[0] % STEP_OVER == 0 else 1
    low, high = np.empty(total // per, np.float32), np.empty(total // per, np.float32)
    for first in range(0, total, CHUNK):
        n = min(CHUNK, total - first)
        x = file.values(t, first // t.type.blck_size, n // t.type.blck_size).reshape(-1, per)
        part = slice(first // per, (first + n) // per)
        low[part], high[part] = x.min(axis=1), x.max(axis=1)
    bad = np.flatnonzero(~np.isfinite(low + high))
    if len(bad):
        yield _found(FindingKind.NOT_FINITE, t, per, bad, "NaN or infinite")
        return
    yield from _signs(file, t)
    top = np.maximum(np.abs(low), np.abs(high))
    if not top.any():
        if len(t.ne) > 1 and t.ne[1] > 1:
            yield Finding(FindingKind.CONSTANT, t.name, why="every value is 0")
        return
    if per > 1 and len(t.ne) > 1 and t.ne[1] > 1:
        yield from _constant(t, per, low == high, top)
        yield from _far(t, per, top)


def _signs(file: ModelFile, t: StoredTensor) -> Iterator[Finding]:
    """Yield blocks with a negative scale of a type that has none."""
    assert t.type is not None
    if t.type.name not in _POSITIVE:
        return
    step, bad = CHUNK // t.type.blck_size, []
    for first in range(0, t.n_blocks, step):
        raw = file.raw(t, first, min(step, t.n_blocks - first))
        bad.append(np.flatnonzero(as_blocks(t.type, raw)["d"] < 0) + first)
    if len(found := np.concatenate(bad)):
        yield _found(FindingKind.SCALE, t, t.type.blck_size, found, "a negative scale, which no quantiser writes")


def _constant(t: StoredTensor, per: int, constant: NDArray[np.bool_], top: NDArray[np.float32]) -> Iterator[Finding]:
    """Yield few constant blocks in rows with other values, if none is nearly so."""
    assert t.type is not None
    if t.type.type_size * 8 < COARSE * t.type.blck_size or constant.all():
        return
    rows = constant.reshape(-1, t.ne[0] // per)
    bad = np.flatnonzero((rows & ~rows.all(axis=1, keepdims=True)).reshape(-1))
    others = top[~constant]
    if 0 < len(bad) <= max(1, FEW * len(constant)) and others.min() * GAP > np.median(others):
        why = "every value is 0" if not top[bad[0]] else "all values are equal"
        yield _found(FindingKind.CONSTANT, t, per, bad, why, wrong=False)


def _far(t: StoredTensor, per: int, top: NDArray[np.float32]) -> Iterator[Finding]:
    """Yield blocks with values far above those of the tensor, row and column."""
    found = np.flatnonzero(top > FAR * np.percentile(top, LARGE, method="lower"))
    grid, columns = top.reshape(-1, t.ne[0] // per), t.ne[0] // per
    bad = []
    for k in found[:1000]:
        i, j = divmod(int(k), columns)
        others = np.concatenate([np.delete(grid[i], j), np.delete(grid[:, j], i)])
        if top[k] > NEAR * others.max(initial=0.0):
            bad.append(int(k))
    if bad:
        yield _found(FindingKind.SCALE, t, per, np.array(bad), "values far above their neighbours'", wrong=False,
                     found=float(top[bad[0]]))  # fmt: skip


def _found(
    kind: FindingKind, t: StoredTensor, per: int, bad: NDArray[np.intp], why: str, **evidence: object
) -> Finding:
    """Make a finding of units of `per` values; its block is one of the type if it has any."""
    assert t.type is not None
    size = max(per, t.type.blck_size)
    first = int(bad[0]) * per
    of = t.n_blocks * t.type.blck_size // per
    return Finding(kind, t.name, index=first // size, per=size, row=first // t.ne[0], count=len(bad), of=of, why=why,
                   **evidence)  # type: ignore[arg-type]  # fmt: skip
