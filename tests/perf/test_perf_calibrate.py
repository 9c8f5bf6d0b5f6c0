"""Calibration: recordings, replays, and how often gates are right."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from simulated_machine import CALM, Machine, Noise

from conformance.backend.registry import Spec
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Verdict
from conformance.perf.calibrate import (
    BASE,
    HEAD,
    SAME,
    SLOWDOWNS,
    Life,
    Recording,
    Replay,
    Slowed,
    calibrate,
    record_subjects,
    result_of,
)
from conformance.perf.measure import Subject
from conformance.perf.statistics import FEWEST
from conformance.perf.units import units


def simulated(noise: Noise, seconds: float = 40.0) -> Recording:
    """A recording on a simulated machine, whose slowed lives burn time of its own clock."""
    machine = Machine(1, noise)
    base, head = machine.subject(BASE), machine.subject(HEAD)
    lives: dict[float, list[Life]] = {}
    for share in (SAME, *SLOWDOWNS):
        slow = Subject(HEAD, lambda share=share: (1 + share) * head.run(), head.renew)  # type: ignore[misc]  # share is bound here
        found = record_subjects(base, slow, seconds, machine.clock, slowdowns=())
        lives[share] = found.lives[SAME]
    return Recording(lives, {s: s for s in SLOWDOWNS})


def test_slowed_really_works() -> None:
    """A slowed subject burns processor time, a fixed share of what it usually takes, and says how much that was."""
    slow = Slowed(Subject("a", lambda: 0.02), 0.5)
    burnt = time.thread_time()
    taken = [slow.run() for _ in range(5)]
    burnt = time.thread_time() - burnt
    assert 0.05 <= burnt <= 0.08
    assert all(t >= 0.03 for t in taken)
    assert slow.lost == pytest.approx([t / 0.02 - 1 for t in taken])


def test_slowed_by_what_is_usual() -> None:
    """One slow measurement among many does not make the next ones burn more."""
    times = iter([0.004] * 5 + [1.0] + [0.004] * 3)
    slow = Slowed(Subject("a", lambda: next(times)), 0.25)
    for _ in range(6):
        slow.run()
    burnt = time.thread_time()
    for _ in range(3):
        slow.run()
    assert time.thread_time() - burnt < 0.05


def test_a_recording() -> None:
    """A recording has as many lives of each kind, each with rounds of both sides; the slowed ones lost something."""
    machine = Machine(1, CALM)
    made = record_subjects(machine.subject(BASE), machine.subject(HEAD), 40.0, machine.clock)
    assert {len(x) for x in made.lives.values()} == {len(made.lives[SAME])}
    assert len(made.lives[SAME]) >= FEWEST
    for lives in made.lives.values():
        assert all(len(x.base) == len(x.head) > 3 for x in lives)
        assert all(x.cost > 3.9 * machine.opening for x in lives)
    assert made.lost.keys() == set(SLOWDOWNS)
    assert made.lost[0.20] > made.lost[0.03] > 0


def test_slow_lives_get_more_time_but_not_any() -> None:
    """A recording goes on up to three times as long to have lives enough, and then says that it has not."""
    machine = Machine(1, opening=3.0)
    patient = record_subjects(machine.subject(BASE), machine.subject(HEAD), 50.0, machine.clock)
    assert len(patient.lives[SAME]) == FEWEST
    machine = Machine(1, opening=30.0)
    with pytest.raises(UsageError, match="at least 8 processes expected"):
        record_subjects(machine.subject(BASE), machine.subject(HEAD), 50.0, machine.clock)


def test_a_replay_is_what_was_measured() -> None:
    """A replay has only whole lives that were recorded, in pairs as measured, and costs what they cost."""
    lives = [Life((1.0 + i, 2.0 + i), (3.0 + i, 4.0 + i), 10.0 + i) for i in range(5)]
    once = Replay(lives)
    for _ in lives:
        once.live()
    assert once.seconds[BASE] == [x for life in lives for x in life.base]
    assert (once.spent, once.lives, len(once)) == (60.0, [0, 2, 4, 6, 8], 10)
    drawn = Replay(lives, np.random.default_rng(1), swap=True)
    for _ in range(200):
        drawn.live()
    pairs = {(tuple(drawn.seconds[BASE][i : i + 2]), tuple(drawn.seconds[HEAD][i : i + 2])) for i in drawn.lives}
    assert pairs == {(x.base, x.head) for x in lives} | {(x.head, x.base) for x in lives}


def test_calibration_of_a_calm_machine() -> None:
    """Where noise is small gates raise no false alarm, and find 10 % in each trial."""
    found = calibrate(simulated(CALM), 1.02, 60.0, 60)
    assert found["regressed.0"] == 0
    assert found["regressed.10"] == 1
    assert 2 < found["detectable"] < 5
    result = result_of(units("smoke")[0], Spec("ggml"), found)
    assert (result.verdict, result.metrics) == (Verdict.PASS, found)
    json.dumps(result.to_json(), allow_nan=False)


def test_what_does_not_hold_is_said() -> None:
    """Where lives differ by a tenth nothing is found, and that fails with a reason for each; false alarms stay rare."""
    found = calibrate(simulated(Noise(luck=0.1)), 1.02, 30.0, 40)
    assert found["regressed.0"] <= 0.05
    result = result_of(units("smoke")[0], Spec("ggml"), found)
    assert result.verdict is Verdict.FAIL
    assert [s.partition(" found")[0] for s in result.detail.split("; ")][-2:] == ["5% slower", "10% slower"]
    assert found.get("detectable", 100.0) > 10
