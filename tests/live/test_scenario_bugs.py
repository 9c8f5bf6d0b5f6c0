"""Planted bugs: each verb passes without them, and notices at least three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from marks import needs_wheel
from verb_bugs import BUGS, NOTICED, model, noticed, played

from conformance.judge.verdict import Verdict
from conformance.live.scenarios.table import SCENARIOS

LEAST = 3
"""Bugs that a verb must notice."""


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    _without.cache_clear()
    model.cache_clear()


@cache
def _without(verb: str, arch: str) -> Verdict:
    return played(verb, arch).verdict


def test_each_verb_has_bugs() -> None:
    """At least three bugs name each verb, and no bug names what is no verb."""
    count = Counter(verb for bug in BUGS.values() for verb in bug.verbs.split())
    assert set(count) <= set(SCENARIOS)
    assert {verb: count[verb] for verb in SCENARIOS if count[verb] < LEAST} == {}
    assert all(len(bug.verbs.split()) == len(set(bug.verbs.split())) for bug in BUGS.values())


@needs_wheel
@pytest.mark.parametrize("what", BUGS)
def test_a_planted_bug_is_noticed(what: str) -> None:
    """Each verb that a bug names passes without it and does not with it."""
    bug = BUGS[what]
    for verb in bug.verbs.split():
        assert _without(verb, bug.arch) is Verdict.PASS, verb
        assert noticed(bug, verb).verdict in NOTICED, verb
