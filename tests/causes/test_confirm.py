"""What comes again is told from what comes and goes, and a crash is charged to the case that poisons the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from poison_adapter import flaky, installed, poisoned

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.causes.confirm import DEADLY, FEW, SURE, TRIES, Seen, confirm, ran_before
from conformance.ggml.errors import UsageError
from conformance.judge.cause import ALWAYS
from conformance.judge.verdict import Result, Verdict
from conformance.process import Deadline
from conformance.run.runner import Runner
from conformance.suite import ops

Rule = Callable[[Sequence[str]], Verdict]
"""Ids of the cases that a process ran -> the verdict of the last."""
SPEC = Spec("simulated")
IDS = [str(n) for n in range(300)]


class Process:
    """Stands in for the runner with its fresh processes, which cost a second each."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.restart()

    def restart(self) -> None:
        """Start another process."""
        self._ran: list[str] = []

    def case(self, case_id: str) -> Case:
        """A case without steps; UsageError for an id that is no number."""
        if not case_id.isdecimal():
            raise UsageError(case_id)
        return Case(case_id, {}, [])

    def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        """The result of the only case."""
        self._ran.append(cases[0].id)
        result = Result(cases[0].id, str(spec), self._rule(self._ran))
        if result.verdict in DEADLY:
            self.restart()
        return [result]

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rule], Process]:
    """Makes processes follow a rule."""

    def use(rule: Rule) -> Process:
        monkeypatch.setattr("conformance.causes.confirm._Fresh", lambda **_: Process(rule))
        return Process(rule)

    return use


def ran(runner: Process | Runner, spec: Spec, ids: Sequence[str]) -> list[Result]:
    """Results of a run in one process, as long as that lives."""
    try:
        return [r for i in ids for r in runner.run(spec, [runner.case(i)])]
    finally:
        runner.close()


def made(case_id: str, verdict: Verdict = Verdict.FAIL, spec: Spec = SPEC, saved: str | None = None) -> Result:
    """A result that no run gave."""
    return Result(case_id, str(spec), verdict, saved=saved)


@pytest.mark.parametrize("verdict", [Verdict.CRASH, Verdict.FAIL])
def test_a_poison_is_named(simulate: Callable[[Rule], Process], verdict: Verdict) -> None:
    """Whatever case stumbles, 1 to 200 cases later, the one after which it does is named, and no other."""
    rng = random.Random(0)  # noqa: S311  # no secret
    for _ in range(50):
        poison, later = str(rng.randrange(90)), rng.randint(1, 200)

        def rule(ids: Sequence[str], poison: str = poison, later: int = later) -> Verdict:
            return verdict if poison in ids and len(ids) - ids.index(poison) > later else Verdict.PASS

        results = ran(simulate(rule), SPEC, IDS[: int(poison) + later + 1])
        assert confirm(SPEC, results) == {results[-1].case: Seen(f"after {poison}", 0, 2, poison)}


def test_a_poison_that_lasts_longer_the_second_time(simulate: Callable[[Rule], Process]) -> None:
    """A heap may be found damaged earlier in the run than in any try."""

    def rule(ids: Sequence[str]) -> Verdict:
        return Verdict.CRASH if "7" in ids and len(ids) - ids.index("7") > 100 else Verdict.PASS

    simulate(rule)
    results = [*(made(i, Verdict.PASS) for i in IDS[:30]), made("30", Verdict.CRASH)]
    assert confirm(SPEC, results)["30"].after == "7"


@pytest.mark.parametrize("most", [5, 50])
def test_what_counts_cases_has_no_poison(simulate: Callable[[Rule], Process], most: int) -> None:
    """Where a process dies at its n-th case, whatever that is, no case is blamed."""
    process = simulate(lambda ids: Verdict.CRASH if len(ids) >= most else Verdict.PASS)
    results = ran(process, SPEC, IDS[:most])
    assert confirm(SPEC, results) == {str(most - 1): Seen("0 of 10", 0, TRIES)}


def test_nothing_is_named_without_what_ran_before(simulate: Callable[[Rule], Process]) -> None:
    """What ran before may be given; without it a case that passes alone was seen 0 times."""
    simulate(lambda ids: Verdict.FAIL if "0" in ids else Verdict.PASS)
    results = [made("0", Verdict.PASS), made("1")]
    assert confirm(SPEC, results)["1"] == Seen("after 0", 0, 2, "0")
    assert confirm(SPEC, results[1:])["1"] == Seen("0 of 10", 0, TRIES)
    assert confirm(SPEC, results, {})["1"] == Seen("0 of 10", 0, TRIES)
    assert confirm(SPEC, results[1:], {"1": ["2", "0", "3"]})["1"] == Seen("after 0", 0, 2, "0")


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.CRASH])
def test_what_comes_and_goes_is_not_always(simulate: Callable[[Rule], Process], verdict: Verdict) -> None:
    """Of 200 runs of an adapter that fails with probability 0.3 no failure is `always`, and no case is blamed."""
    rng = random.Random(1)  # noqa: S311  # no secret
    simulate(lambda _: verdict if rng.random() < 0.3 else Verdict.PASS)
    for _ in range(200):
        results = [made(i, verdict if rng.random() < 0.3 else Verdict.PASS) for i in IDS[:20]]
        found = confirm(SPEC, results)
        assert found.keys() == {r.case for r in results if r.verdict is verdict}
        assert not any(s.after or s.words == ALWAYS for s in found.values())


def test_few_of_a_signature_get_all_tries(simulate: Callable[[Rule], Process]) -> None:
    """All but the first few of a signature get one try, which is never `always`, unless they pass in it."""
    simulate(lambda ids: Verdict.PASS if ids[-1] == "9" else Verdict.FAIL)
    found = confirm(SPEC, [made(i) for i in IDS[:10]])
    words = [ALWAYS] * FEW + ["1 of 1"] * (9 - FEW) + ["0 of 10"]
    assert [found[i].words for i in IDS[:10]] == words
    assert confirm(SPEC, [made("0")], runs=SURE - 1)["0"].words == "5 of 5"


def test_a_file_stands_in_for_an_id(simulate: Callable[[Rule], Process], tmp_path: Path) -> None:
    """A case that its id does not make comes from its file; without a file it is left out."""
    simulate(lambda _: Verdict.FAIL)
    path = tmp_path / "case.gguf"
    casefile.write(path, Runner().case(ops.ids("smoke")[0]))
    (case_id,) = casefile.index(path)
    assert list(confirm(SPEC, [made(case_id, saved=str(path)), made("made/up@0")])) == [case_id]


def test_time_is_bounded(simulate: Callable[[Rule], Process]) -> None:
    """When time is up, what got no try is left out, and what got a few is not `always`."""
    simulate(lambda _: Verdict.FAIL)
    clock = count()
    found = confirm(SPEC, [made(i) for i in IDS[:3]], deadline=Deadline.after(6, partial(next, clock)))
    assert list(found) == IDS[:1]
    assert 0 < found["0"].failed == found["0"].runs < SURE
    assert found["0"].words == f"{found['0'].runs} of {found['0'].runs}"


def test_no_poison_is_named_when_time_is_up(simulate: Callable[[Rule], Process]) -> None:
    """Wherever the search ends, a case that does harm no more than the others is not named."""
    results = ran(simulate(lambda ids: Verdict.CRASH if len(ids) >= 5 else Verdict.PASS), SPEC, IDS[:5])
    words = []
    for budget in range(300):
        clock = count()
        found = confirm(SPEC, results, deadline=Deadline.after(budget, partial(next, clock)))
        words += [s.words for s in found.values()]
    assert sorted(set(words)) == [f"0 of {n}" for n in (1, 10, *range(2, 10))]


def test_what_is_found_does_not_depend_on_the_number_of_jobs(simulate: Callable[[Rule], Process]) -> None:
    """Steady, poisoned and deadly failures are told apart alike, in the same order, one or several at a time."""

    def rule(ids: Sequence[str]) -> Verdict:
        n = int(ids[-1])
        if n % 7 == 3:
            return Verdict.CRASH
        return Verdict.FAIL if n % 11 == 5 or (n == 86 and "82" in ids) else Verdict.PASS

    simulate(rule)
    results = [made(i, rule(IDS[: int(i) + 1])) for i in IDS[:100]]
    one, several = (confirm(SPEC, results, jobs=n) for n in (1, 3))
    assert list(one.items()) == list(several.items())
    assert {s.words for s in one.values()} >= {ALWAYS, "after 82"}


def test_ran_before(simulate: Callable[[Rule], Process]) -> None:
    """A new process starts after a case that ended the one before, waived or not.

    A waived failure is no failure, nor is a pass in spite of a waiver.
    """
    verdicts = [Verdict.PASS, Verdict.CRASH, Verdict.PASS, Verdict.XFAIL, Verdict.FAIL, Verdict.XPASS, Verdict.TIMEOUT]
    results = [made(str(k), v) for k, v in enumerate(verdicts)]
    assert ran_before(results, 1) == ["0"]
    assert ran_before(results, 6) == ["2", "3", "4", "5"]
    results[3] = replace(results[3], waived=Verdict.CRASH)
    assert ran_before(results, 6) == ["4", "5"]
    simulate(lambda ids: verdicts[int(ids[-1])])
    assert list(confirm(SPEC, results)) == ["1", "4", "6"]
    assert confirm(Spec("another"), results) == {}


def test_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that dies after a poisoned case harms neither this process nor the next try.

    Another one fails each time.
    """
    with installed(tmp_path, monkeypatch):
        ids = list(ops.ids("smoke")[:4])
        spec = poisoned(ids[1], 1, "fault")
        assert confirm(spec, ran(Runner(), spec, ids)) == {ids[2]: Seen(f"after {ids[1]}", 0, 2, ids[1])}
        sure = flaky(1, 0, tmp_path / "draws")
        assert confirm(sure, ran(Runner(), sure, ids[:1]), runs=2) == {ids[0]: Seen("2 of 2", 2, 2)}
