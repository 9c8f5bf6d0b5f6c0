"""Check the tokenizer's tables of a model's file against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .finding import Finding, FindingKind
from .modelfile import ModelFile

PREFIX = "tokenizer.ggml."
N_TYPES = 6
"""llama.cpp's token types are 1 to this."""
SELDOM = 0.01
"""Maximum share of entries that break a rule which the others keep."""
NORMAL = 1


def check(file: ModelFile) -> Iterator[Finding]:
    """Yield what contradicts itself in the tables of tokens."""
    tokens = file.keys.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list):
        return
    n = len(tokens)
    for name in ("scores", "token_type"):
        table = file.keys.get(f"{PREFIX}{name}")
        if isinstance(table, np.ndarray) and len(table) != n:
            yield _found(name, "one entry per token", expected=n, found=len(table))
    for key, value in file.keys.items():
        if key.startswith(PREFIX) and key.endswith("_token_id") and isinstance(value, int) and not 0 <= value < n:
            yield _found(key[len(PREFIX) :], "the number of a token", expected=f"0 to {n - 1}", found=value)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.ne) > 1 and embedding.ne[1] != n:
        yield _found("tokens", "one per row of token_embd.weight", expected=embedding.ne[1], found=n)
    yield from _duplicates(tokens)
    yield from _types(file, n)
    yield from _scores(file, n)
    yield from _merges(file, tokens)


def _found(name: str, why: str, **evidence: object) -> Finding:
    return Finding(FindingKind.TOKENIZER, PREFIX + name, why=why, **evidence)  # type: ignore[arg-type]


def _duplicates(tokens: Sequence[str]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    again = [(i, first[t]) for i, t in enumerate(tokens) if first.setdefault(t, i) != i]
    if again:
        i, j = again[0]
        yield _found("tokens", f"the same text as entry {j}", index=i, count=len(again), of=len(tokens),
                     found=tokens[i], wrong=False)  # fmt: skip


def _types(file: ModelFile, n: int) -> Iterator[Finding]:
    kinds = file.keys.get(f"{PREFIX}token_type")
    if not isinstance(kinds, np.ndarray):
        return
    bad = np.flatnonzero((kinds < 1) | (kinds > N_TYPES))
    if len(bad):
        yield _found("token_type", "", index=int(bad[0]), count=len(bad), of=n, expected=f"1 to {N_TYPES}",
                     found=int(kinds[bad[0]]))  # fmt: skip


def _scores(file: ModelFile, n: int) -> Iterator[Finding]:
    scores, kinds = file.keys.get(f"{PREFIX}scores"), file.keys.get(f"{PREFIX}token_type")
    if not isinstance(scores, np.ndarray) or len(scores) != n:
        return
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        yield _found("scores", "finite numbers expected", index=int(bad[0]), count=len(bad), of=n,
                     found=str(scores[bad[0]]))  # fmt: skip
        return
    normal = np.flatnonzero(kinds == NORMAL) if isinstance(kinds, np.ndarray) and len(kinds) == n else np.arange(n)
    rises = np.flatnonzero(np.diff(scores[normal]) > 0)
    if 0 < len(rises) <= SELDOM * len(normal):
        i = int(normal[rises[0] + 1])
        yield _found("scores", "it is above the one before, the others fall", index=i, count=len(rises),
                     of=n, found=float(scores[i]), wrong=False)  # fmt: skip


def _merges(file: ModelFile, tokens: Sequence[str]) -> Iterator[Finding]:
    merges = file.keys.get(f"{PREFIX}merges")
    if not isinstance(merges, list):
        return
    known, unknown, broken = set(tokens), [], []
    for i, merge in enumerate(merges):
        left, space, right = (
            merge[:1] + merge[1:].partition(" ")[0],
            merge.find(" ", 1),
            merge[merge.find(" ", 1) + 1 :],
        )
        if space < 0:
            broken.append(i)
        elif not {left, right, left + right} <= known:
            unknown.append(i)
    if broken:
        yield _found("merges", "two texts expected", index=broken[0], count=len(broken), of=len(merges),
                     found=merges[broken[0]])  # fmt: skip
    if unknown:
        yield _found("merges", "a part or the result is no token", index=unknown[0], count=len(unknown),
                     of=len(merges), found=merges[unknown[0]], wrong=False)  # fmt: skip
