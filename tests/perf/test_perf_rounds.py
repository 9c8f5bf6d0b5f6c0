"""Rounds: who is measured when."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_machine import Machine, Noise

from conformance.ggml.errors import BackendError, UsageError
from conformance.perf.measure import LIFE, LIFE_ROUNDS, Rounds, Subject, order
from conformance.perf.statistics import life_values


def log(names: str) -> tuple[list[str], Rounds]:
    """Rounds of subjects by these names, and what happens: a letter for a measurement, a capital for a start."""
    said: list[str] = []

    def subject(name: str) -> Subject:
        def run() -> float:
            said.append(name)
            return 1.0

        return Subject(name, run, lambda: said.append(name.upper()))

    return said, Rounds([subject(n) for n in names], clock=lambda: float(len(said)))


def test_two_subjects_swap_each_round() -> None:
    """Two subjects are measured in swapped order each round, the warm-up included, which is forgotten."""
    said, rounds = log("ab")
    rounds.more(4)
    assert "".join(said) == "baabbaabba"
    assert rounds.seconds == {"a": [1.0] * 4, "b": [1.0] * 4}
    assert len(rounds) == 4


@given(n=st.integers(1, 9), couples=st.integers(1, 9))
def test_each_pair_is_balanced(n: int, couples: int) -> None:
    """After any couple of rounds, of any two subjects each was first equally often; each round has everyone once."""
    turns = [order(r, n) for r in range(2 * couples)]
    assert all(sorted(t) == list(range(n)) for t in turns)
    for a, b in combinations(range(n), 2):
        assert sum(t.index(a) < t.index(b) for t in turns) == couples


def test_neighbours_change() -> None:
    """With an odd number of subjects each has stood at each place equally often after as many couples."""
    for n in (3, 5, 7):
        places = [t.index(0) for t in (order(r, n) for r in range(2 * n))]
        assert sorted(places) == sorted([*range(n), *range(n)])


def test_a_life_starts_everyone_over() -> None:
    """The first life finds subjects started; each later one starts them, warms up, and has an even number of rounds."""
    said, rounds = log("ab")
    rounds.live()
    assert "A" not in said
    rounds.live()
    assert said.count("A") == said.count("B") == 1
    assert "".join(said[said.index("A") :]).startswith("ABbaabba")
    assert rounds.lives == [0, LIFE_ROUNDS]
    assert len(rounds) == 2 * LIFE_ROUNDS


def test_a_life_lasts_as_long_as_starting_took() -> None:
    """Rounds of a life last `LIFE`, and as long as starting took where that was longer; all of it is accounted for."""
    machine = Machine(opening=2.0)
    rounds = machine.rounds()
    rounds.live()
    assert LIFE <= rounds.spent < 1.5 * LIFE
    rounds.live()
    assert rounds.spent == pytest.approx(LIFE + 4.0 + 4.0, rel=0.05)
    assert rounds.spent == pytest.approx(machine.now)


def test_lives_without_a_start() -> None:
    """Where every measurement starts its subject over, two rounds are a life, and the warm-up comes once."""
    said, started = log("ab")
    rounds = Rounds([replace(x, renew=None) for x in started._subjects], clock=lambda: float(len(said)))
    for _ in range(3):
        rounds.live()
    assert rounds.lives == [0, 2, 4]
    assert (len(rounds), len(said)) == (6, 14)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none(seconds: float) -> None:
    """A time that is not above 0 s is refused by the subject's name, and its round is not kept."""
    times = iter([1.0, 1.0, seconds])
    rounds = Rounds([Subject("a", lambda: 1.0), Subject("b", lambda: next(times))])
    with pytest.raises(BackendError, match="b: a time above 0 s expected"):
        rounds.more(2)
    assert rounds.seconds == {"a": [1.0], "b": [1.0]}


@pytest.mark.parametrize("names", ["", "aa"])
def test_names_differ(names: str) -> None:
    """No subjects, or two of one name, are refused."""
    with pytest.raises(UsageError, match="subjects of different names expected"):
        log(names)


def test_following_oneself_favours_nobody() -> None:
    """Where whoever follows itself is 5 % faster, every life tells of equals that they are equal, however short."""
    rounds = Machine(noise=Noise(order=0.05), opening=0.0).rounds()
    for _ in range(9):
        rounds.live()
        rounds.more(2)
    logs = np.log(np.array(rounds.seconds["head"]) / np.array(rounds.seconds["base"]))
    assert life_values(logs, rounds.lives) == pytest.approx(np.zeros(9))
    assert life_values(logs[:2], [0]) == pytest.approx([0.0])
