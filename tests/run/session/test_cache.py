"""A cache is limited by number and by bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conformance.case.case import Case, Step
from conformance.ggml.ops.build import Builder
from conformance.ggml.tensor import new_tensor
from conformance.ggml.types import F32
from conformance.run.session import cache
from conformance.run.session.cache import Cache
from conformance.suite import batch
from conformance.suite.batch import groups

B = Builder()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, cache.BYTES // 2)), max_size=60), st.integers(1, 5))
def test_the_latest_values_stay_within_the_bounds(added: list[tuple[int, int]], least: int) -> None:
    """After each trim what is left are the latest values, within the bounds but for the latest `least`."""
    it: Cache[int, int] = Cache()
    sizes: dict[int, int] = {}
    for key, nbytes in added:
        it.add(key, key, nbytes)
        sizes[key] = nbytes
        it.trim(least)
        left = [k for k in sizes if k in it]
        assert len(left) == len(it) >= min(least, len(sizes))
        assert left == list(sizes)[len(sizes) - len(left) :]
        assert len(left) <= least or sum(sizes[k] for k in left) <= cache.BYTES
        sizes = {k: sizes[k] for k in left}


def test_there_is_a_bound_of_the_number() -> None:
    """Values without bytes are evicted by their number, the oldest first."""
    it: Cache[int, int] = Cache()
    for k in range(cache.COUNT + 3):
        it.add(k, k, 0)
        it.trim()
    assert len(it) == cache.COUNT
    assert it.get(2) is None
    assert it[3] == 3


def _case(n: int, steps: int) -> Case:
    """Adds two leaves of `n` bytes each, in each step."""
    made = []
    for _ in range(steps):
        a, b = new_tensor(F32, n // 4, flags=1), new_tensor(F32, n // 4, flags=1)
        data = np.broadcast_to(np.uint8(0), (n,))
        out = B.add(a, b)
        made.append(Step(B.build_forward_expand(out), {a: data, b: data}, (out,)))
    return Case(f"a/{n}", {}, made)


@given(st.lists(st.tuples(st.sampled_from((64, 4096, batch.BYTES // 4, batch.BYTES)), st.sampled_from((1, 1, 1, 2)))))
def test_a_group_takes_no_case_beyond_its_bytes(shapes: list[tuple[int, int]]) -> None:
    """All cases in order; a trajectory alone; without its last case no group has more than `BYTES`."""
    cases = [_case(*s) for s in shapes]
    made = list(groups(iter(cases)))
    assert [c for g in made for c in g] == cases
    for g in made:
        assert len(g) == 1 or all(len(c.steps) == 1 for c in g)
        assert sum(c.nbytes for c in g[:-1]) <= batch.BYTES


def test_a_group_takes_its_cases_when_it_needs_them() -> None:
    """The first group of large cases is there before the rest is made."""
    made = 0

    def cases() -> object:
        nonlocal made
        for _ in range(10):
            made += 1
            yield _case(batch.BYTES, 1)

    next(groups(cases()))  # type: ignore[arg-type]  # a generator of cases
    assert made == 2
