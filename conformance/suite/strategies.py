"""Hypothesis strategies of every family, and the profiles under which they run."""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from . import FAMILIES, alias, random_graphs
from .family import Level

SEEDS = st.integers(0, 10**9)


def case_ids(family: str, level: Level = "standard") -> st.SearchStrategy[str]:
    """Ids of a family: those of a level and, where it has seeds, the same with others; shrinking goes to small ones.

    `random` and `alias` draw every key of their ids by itself.

    Raises:
        KeyError: there is no such family.
    """
    if family in _OWN:
        return _OWN[family]()
    known = FAMILIES[family]
    listed = st.sampled_from(list(known.ids(level)))
    if not known.seeded:
        return listed
    return listed | st.builds(lambda i, seed: f"{i.rpartition('@')[0]}@{seed}", listed, SEEDS)


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


_OWN: dict[str, Callable[[], st.SearchStrategy[str]]] = {random_graphs.NAME: _random, alias.NAME: _alias}


def register_profiles() -> None:
    """`local` searches on, with the example database; `ci`, loaded where CI is set, always takes the same examples.

    Both print what reproduces a failure.
    """
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("local", print_blob=True, deadline=None, suppress_health_check=slow)
    settings.register_profile(
        "ci", print_blob=True, deadline=None, derandomize=True, database=None, suppress_health_check=slow
    )
    settings.load_profile("ci" if os.environ.get("CI") else "local")
