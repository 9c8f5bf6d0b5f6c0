"""Planted bugs: each scenario passes without them, and notices at least three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from marks import needs_wheel
from scenario_bugs import BUGS, LLAMA, NOTICED, model, noticed, played

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendCrashError
from conformance.judge.verdict import Verdict
from conformance.llama.live.scenario import Player, id_of
from conformance.llama.live.scenarios.table import SCENARIOS
from conformance.run.isolation.isolate import Isolation

LEAST = 3
"""Bugs that a scenario must notice."""
FAILS = {"state-snapshots-drafts": "lfm2", "causal-off": "llama", "lora-unfit-experts": "qwen3moe"}
"""Scenarios that fail on every model which they apply to, so no planted bug can show in them."""

DIES = ("split-cp", "split-shift")
"""Scenarios in which llama.cpp dies, with every model which they apply to."""


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    _without.cache_clear()
    model.cache_clear()


@cache
def _without(scenario: str, arch: str) -> Verdict:
    return played(scenario, arch).verdict


def test_each_scenario_has_bugs() -> None:
    """At least three bugs name each scenario, and no bug names what is no scenario."""
    count = Counter(scenario for bug in BUGS.values() for scenario in bug.scenarios.split())
    named = "`scenarios` of BUGS in tests/helpers/scenarios/scenario_bugs.py"
    assert set(count) <= set(SCENARIOS), f"{named}: scenarios expected (scenarios/table.py)"
    few = {scenario for scenario in SCENARIOS if count[scenario] < LEAST} ^ {*FAILS, *DIES}
    assert not few, f"{named}: name each in {LEAST} bugs or more, unless FAILS or DIES of this file does: {few}"
    assert all(len(bug.scenarios.split()) == len(set(bug.scenarios.split())) for bug in BUGS.values())


@needs_wheel
@pytest.mark.parametrize(("scenario", "arch"), FAILS.items())
def test_a_scenario_without_bugs_fails(scenario: str, arch: str) -> None:
    """Once it passes, bugs must be planted for it too."""
    assert played(scenario, arch).verdict in (Verdict.FAIL, Verdict.OVERCLAIM)


@needs_wheel
@pytest.mark.parametrize("scenario", DIES)
def test_a_scenario_without_bugs_dies(scenario: str) -> None:
    """In a process of its own. Once it passes, bugs must be planted for it too."""
    player = Player(Spec("ggml"), Isolation(), None)
    try:
        with pytest.raises(BackendCrashError):
            player.play(id_of(LLAMA, scenario))
    finally:
        player.close()


@needs_wheel
@pytest.mark.parametrize("what", BUGS)
def test_a_planted_bug_is_noticed(what: str) -> None:
    """Each scenario that a bug names passes without it and does not with it."""
    bug = BUGS[what]
    for scenario in bug.scenarios.split():
        assert _without(scenario, bug.arch) is Verdict.PASS, scenario
        assert noticed(bug, scenario).verdict in NOTICED, scenario
