"""Causes of a run: unique ids, order, and the results that each explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256

from conformance.judge.cause import Cause
from conformance.judge.verdict import FAILURES, Result, Verdict


def unique_ids(causes: Sequence[Cause]) -> list[Cause]:
    """Return `causes` of one backend with unique ids: the second of an id gets the suffix `-2`.

    The order is that of their first case by name, which a longer search does not change.
    """
    turns: dict[int, int] = {}
    seen: Counter[str] = Counter()
    for i in sorted(range(len(causes)), key=lambda i: (min(causes[i].cases), str(causes[i].conditions))):
        seen[causes[i].id] += 1
        turns[i] = seen[causes[i].id]
    return [c if turns[i] == 1 else replace(c, id=f"{c.id}-{turns[i]}") for i, c in enumerate(causes)]


def digest(*words: str) -> str:
    """Return 8 hex digits of the SHA-256 of `words`, for ids."""
    return sha256("\n".join(words).encode()).hexdigest()[:8]


def in_order(causes: Sequence[Cause]) -> list[Cause]:
    """Sort causes by urgency: silent wrong numbers, verdict, share of architectures hit.

    The share is of the architectures that were checked, which differ between backends if time ran out.
    """
    silent = {Verdict.FAIL: 0, Verdict.CRASH: 1, Verdict.TIMEOUT: 2, Verdict.OVERCLAIM: 3}
    return sorted(
        causes,
        key=lambda c: (silent.get(c.verdict, 4), -_share_hit(c), -len(c.cases), c.id),
    )


def _share_hit(cause: Cause) -> float:
    return cause.rank.get("architectures", 0) / max(1, cause.rank.get("counted", 0))


def assigned(results: Iterable[Result], causes: Sequence[Cause]) -> list[Result]:
    """Return the results; each failure gets the id of the first cause that has its case."""
    ids: dict[tuple[str, str], str] = {}
    for cause in causes:
        for case in cause.cases:
            ids.setdefault((cause.backend, case), cause.id)
    return [replace(r, cause=ids.get((r.backend, r.case)) if r.verdict in FAILURES else None) for r in results]
