"""Cases of a run on lanes, and on the backend to compare with at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from faulty_adapter import ADAPTER, CRASHES, HANGS, WRONG
from planted_adapter import planted_adapter

from conformance.backend.registry import Spec
from conformance.campaign.player import Player
from conformance.ggml.errors import ConformanceError
from conformance.judge.verdict import Request, Result, Verdict
from conformance.process import FOREVER, Deadline
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.testrun import Chosen, TestRun

CPU, FAULTY = Spec("cpu"), Spec("faulty")
RIGHT = tuple(f"ops/ADD-f32+f32-a={n}x5,b={n}x5@1" for n in range(10, 40))
GONE = Spec("ggml", (("lib", "/nowhere"),))


@pytest.fixture(autouse=True)
def _faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with planted_adapter(tmp_path, monkeypatch, "faulty", ADAPTER, "Faulty"):
        yield


def _run(spec: Spec, base: Spec, *ids: str, jobs: int) -> TestRun:
    run = TestRun(Chosen(jobs=jobs, workers=Workers(Isolation(time_limit=1.0))), bases={spec: base})
    run.ask(Request({str(spec): ids}), gating=False)
    return run


def _played(run: TestRun, spec: Spec, *ids: str, deadline: Deadline = FOREVER) -> list[Result]:
    with closing(Player(run, [spec], 2 * len(ids))) as player:
        try:
            return list(player.play(spec, ids, deadline=deadline, stop=lambda: False))
        finally:
            run.close()


def _verdicts(run: TestRun) -> tuple[dict[str, Verdict], dict[str, Verdict]]:
    assert run.against is not None
    before = {case: r.verdict for (_, case), r in run.against.before.items()}
    return {r.case: r.verdict for r in run.results}, before


@pytest.mark.parametrize("faulty", ["build", "base"])
def test_both_sides_of_each_case_are_known_on_any_number_of_lanes(faulty: str) -> None:
    """Where a case dies, hangs or is wrong on one side, the other one has its result, and each is given once."""
    spec, base = (FAULTY, CPU) if faulty == "build" else (CPU, FAULTY)
    ids = (CRASHES, *RIGHT, HANGS, WRONG)
    each = []
    for jobs in (1, 2):
        run = _run(spec, base, *ids, jobs=jobs)
        played = _played(run, spec, *ids)
        assert sorted(r.case for r in played) == sorted(ids)
        assert {r.backend for r in played} == {str(spec)}
        each.append(_verdicts(run))
    assert each[0] == each[1]
    assert each[0][faulty == "base"] == {
        **dict.fromkeys(RIGHT, Verdict.PASS),
        CRASHES: Verdict.CRASH,
        HANGS: Verdict.TIMEOUT,
        WRONG: Verdict.FAIL,
    }


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("gone", ["build", "base"])
def test_a_side_that_does_not_open_is_said(jobs: int, gone: str) -> None:
    """Nothing is judged without its base, and the error names what is missing."""
    spec, base = (GONE, CPU) if gone == "build" else (CPU, GONE)
    run = _run(spec, base, *RIGHT, jobs=jobs)
    with pytest.raises(ConformanceError, match="/nowhere"):
        _played(run, spec, *RIGHT)


def test_a_case_without_the_base_does_not_count_at_the_end() -> None:
    """A case that only one side ran before the deadline gets no result: its failure would look new."""
    run = _run(CPU, FAULTY, HANGS, *RIGHT, jobs=2)
    played = _played(run, CPU, HANGS, *RIGHT, deadline=Deadline.after(4.0))
    assert HANGS not in {r.case for r in played} or HANGS in _verdicts(run)[1]
    assert _verdicts(run)[0].keys() == _verdicts(run)[1].keys() == {r.case for r in played}
