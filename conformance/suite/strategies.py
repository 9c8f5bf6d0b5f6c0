"""Hypothesis strategies for case ids, for property tests of an adapter."""

from __future__ import annotations

from hypothesis import strategies as st

from . import FAMILIES, alias, random_graphs
from .family import Level

SEEDS = st.integers(0, 10**9)


def case_ids(family: str, level: Level = "standard") -> st.SearchStrategy[str]:
    """Return ids of a family's level, also with other seeds; shrinks towards small cases.

    For `random` and `alias` every key is drawn separately.

    Raises:
        KeyError: unknown family.
    """
    if family == random_graphs.NAME:
        return _random()
    if family == alias.NAME:
        return _alias()
    ids = st.sampled_from(list(FAMILIES[family].ids(level)))
    if not FAMILIES[family].seeded:
        return ids
    return ids | st.builds(lambda i, seed: f"{i.rpartition('@')[0]}@{seed}", ids, SEEDS)


def _random() -> st.SearchStrategy[str]:
    low, high = random_graphs.NODES
    return st.builds(
        lambda nodes, steps, d, w, cache, rare, seed: (
            f"{random_graphs.NAME}/nodes={nodes},steps={steps},d={d},w={w},cache={cache},rare={rare}@{seed}"
        ),
        st.integers(low, high),
        st.integers(1, 4),
        st.sampled_from((32, 64)),
        st.sampled_from(random_graphs.WEIGHTS),
        st.sampled_from(random_graphs.CACHES),
        st.sampled_from((0, 1)),
        SEEDS,
    )


def _alias() -> st.SearchStrategy[str]:
    return st.builds(
        lambda what, tokens, order, seed: f"{alias.NAME}/differs={what},tokens={tokens},order={order}@{seed}",
        st.sampled_from(list(alias.DIFFERS)),
        st.integers(1, 8),
        st.sampled_from(("abab", "ab", "ba", "aab")),
        SEEDS,
    )
