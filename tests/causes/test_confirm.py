"""What comes again is told from what comes and goes, and a crash is charged to the case that poisons the process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from poison_adapter import flaky, installed, poisoned

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.causes.cause import ALWAYS
from conformance.causes.confirm import FEW, SURE, Seen, confirm, ran_before
from conformance.judge.verdict import Result, Verdict
from conformance.run.runner import Runner
from conformance.suite import ops

IDS = list(ops.ids("smoke"))
"""Right on the adapter, but for what a test makes it do."""


@pytest.fixture(autouse=True)
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter, here and in workers."""
    with installed(tmp_path, monkeypatch):
        yield


def ran(spec: Spec, ids: list[str]) -> list[Result]:
    """Results of a run in one process, as long as that lives."""
    runner = Runner()
    try:
        return [r for i in ids for r in runner.run(spec, [runner.case(i)])]
    finally:
        runner.close()


def made(spec: Spec, case_id: str, verdict: Verdict = Verdict.OVERCLAIM, saved: str | None = None) -> Result:
    """A result that no run gave."""
    return Result(case_id, str(spec), verdict, saved=saved, detail=f"{verdict} at every case")


@pytest.mark.parametrize(("at", "cases", "how"), [(3, 1, "abort"), (5, 30, "heap")])
def test_a_poison_is_named(at: int, cases: int, how: str) -> None:
    """The case after which a process dies some cases later is named, not the one that stumbles: that runs alone."""
    spec = poisoned(IDS[at], cases, how)
    results = ran(spec, IDS[: at + cases + 3])
    died = [r.case for r in results if r.verdict is Verdict.CRASH]
    assert len(died) == 1
    assert IDS.index(died[0]) in range(at + 1, at + cases + 1)
    assert confirm(spec, results) == {died[0]: Seen(f"after {IDS[at]}", 0, 3, IDS[at])}


def test_what_counts_cases_has_no_poison() -> None:
    """Where a process dies at its fifth case, whatever that is, no case is blamed."""
    spec = Spec("poison", (("most", "5"),))
    results = ran(spec, IDS[:5])
    assert results[-1].verdict is Verdict.CRASH
    assert confirm(spec, results, runs=3) == {IDS[4]: Seen("0 of 3", 0, 3)}


def test_what_comes_and_goes_is_not_always(tmp_path: Path) -> None:
    """A failure of probability 0.3 comes in some tries alone."""
    spec = flaky(0.3, 1, tmp_path / "draws")
    found = confirm(spec, [made(spec, IDS[0])])[IDS[0]]
    assert found.unsteady
    assert found.words == f"{found.failed} of 10"


def test_few_of_a_signature_get_all_tries(tmp_path: Path) -> None:
    """What fails in each of several tries is `always`; all but the first few of a signature get one, which never is."""
    spec = flaky(1, 0, tmp_path / "draws")
    found = confirm(spec, [made(spec, i) for i in IDS[: FEW + 2]], runs=SURE)
    assert list(found.values()) == [Seen(ALWAYS, SURE, SURE)] * FEW + [Seen("1 of 1", 1, 1)] * 2


def test_a_file_stands_in_for_an_id(tmp_path: Path) -> None:
    """A case that its id does not make comes from its file; without a file it is left out."""
    spec, runner = flaky(1, 0, tmp_path / "draws"), Runner()
    whole = runner.case(IDS[0])
    casefile.write(tmp_path / "case.gguf", Case("made/up@0", whole.persistent, whole.steps))
    results = [made(spec, "made/up@0", saved=str(tmp_path / "case.gguf")), made(spec, "made/other@0")]
    assert confirm(spec, results, runs=1) == {"made/up@0": Seen("1 of 1", 1, 1)}


def test_time_is_bounded(tmp_path: Path) -> None:
    """When time is up, what got no try is left out, and what got a few is not `always`."""
    spec, clock = flaky(1, 0, tmp_path / "draws"), count()
    found = confirm(spec, [made(spec, i) for i in IDS[:3]], time_budget=6, clock=lambda: float(next(clock)))
    assert list(found) == IDS[:1]
    assert found[IDS[0]].words == f"{found[IDS[0]].failed} of {found[IDS[0]].runs}"
    assert 0 < found[IDS[0]].runs < SURE


def test_ran_before() -> None:
    """A process starts anew after what ended the one before it, waived or not; passes of a waiver are no failures."""
    verdicts = [Verdict.PASS, Verdict.CRASH, Verdict.PASS, Verdict.XFAIL, Verdict.FAIL, Verdict.PASS, Verdict.TIMEOUT]
    results = [made(Spec("ggml"), str(k), v) for k, v in enumerate(verdicts)]
    assert ran_before(results, 1) == ["0"]
    assert ran_before(results, 6) == ["2", "3", "4", "5"]
    results[3].waived = "CRASH"
    assert ran_before(results, 6) == ["4", "5"]
    assert confirm(Spec("ggml"), [made(Spec("ggml"), IDS[0], Verdict.XPASS)]) == {}
