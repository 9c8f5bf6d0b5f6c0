"""A run over simulated workers: each requested pair gets one result, whatever dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from campaign_pools import Faults, InlinePool, SimulatedPool

from conformance import __version__
from conformance.backend.registry import Spec
from conformance.campaign import executor
from conformance.campaign.chunk import Chunk, execute
from conformance.campaign.executor import Executor, Pool, device_of
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.run.session.settings import WaiverBook, today
from conformance.suite import FAMILIES
from conformance.testrun import Chosen, TestRun

BACKENDS = (Spec("cpu"), Spec("ggml"))
IDS = [f"ops/MADE-{k}@1" for k in range(300)]


class Run(TestRun):
    """Counts what is handed on, and has results of an earlier start."""

    __test__ = False

    def __init__(self, earlier: Sequence[Result] = ()) -> None:
        super().__init__(Chosen(), waivers=WaiverBook({}, today()), recovers=False)
        self.kept: Counter[tuple[str, str]] = Counter()
        self.said: list[str] = []
        self._earlier = {(r.backend, r.case): r for r in earlier}

    def keep(self, results: Sequence[Result]) -> None:
        """Count."""
        self.kept.update((r.backend, r.case) for r in results)

    def take(self, backend: Spec, case_id: str) -> Result | None:
        """Of the earlier start."""
        return self._earlier.get((str(backend), case_id))

    def over(self, pool: Pool, asked: dict[Spec, Sequence[str]], **words: Any) -> Executor:  # noqa: ANN401  # as of `Executor`
        """Run to the end."""
        work = Executor(pool, self, asked, tell=self.said.append, **words)
        list(work.play())
        return work


def _run(pool: SimulatedPool, earlier: Sequence[Result] = (), ends: float = inf) -> tuple[Executor, Run]:
    """A run over simulated workers."""
    run = Run(earlier)
    stop = lambda: pool.now > ends  # noqa: E731
    return run.over(pool, dict.fromkeys(BACKENDS, IDS), stop=stop, clock=pool.clock), run


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled_whatever_dies(seed: int) -> None:
    """Workers die by chance, replies get lost or come late: each pair has one PASS, kept once."""
    pool = SimulatedPool(seed, faults=Faults(kill=0.03, message=0.01))
    work, run = _run(pool)
    assert set(run.kept.values()) == {1}
    assert [(r.backend, r.case) for r in run.results] == [(str(b), i) for b in BACKENDS for i in IDS]
    assert {r.verdict for r in run.results} == {Verdict.PASS}
    assert run.reasons == {}
    assert work.deaths >= pool.kills


@pytest.mark.parametrize("seed", range(10))
def test_cases_that_kill_their_worker_are_found(seed: int) -> None:
    """A case whose worker always dies is a CRASH that says so; all others pass, whatever else dies by chance."""
    killers = frozenset({IDS[3], IDS[4], IDS[150], IDS[-1]})
    _, run = _run(SimulatedPool(seed, faults=Faults(kill=0.01, killers=killers)))
    assert set(run.kept.values()) == {1}
    crashed = [r for r in run.results if r.verdict is Verdict.CRASH]
    assert {r.case for r in crashed} == killers
    assert "each of 3 workers that ran it alone died" in crashed[0].detail
    assert len(crashed) == len(killers) * len(BACKENDS)
    assert len(run.results) == len(IDS) * len(BACKENDS)


def test_earlier_results_do_not_run_again() -> None:
    """What a journal has is neither handed out nor kept a second time."""
    earlier = [Result(i, "cpu", Verdict.FAIL) for i in IDS[:100]]
    _, run = _run(SimulatedPool(0), earlier=earlier)
    assert len(run.kept) == 2 * len(IDS) - 100
    assert run.results[0] == earlier[0]


def test_a_worker_that_refuses_is_left_out() -> None:
    """One worker of three cannot run anything: the others do all of it."""
    _, run = _run(SimulatedPool(0, refuses={"b": "no such adapter"}))
    assert len(run.kept) == 2 * len(IDS)
    assert run.reasons == {}


def test_a_backend_that_nobody_can_run_is_missing_with_the_reason() -> None:
    """All workers refuse: no result, and the reason of one of them."""
    _, run = _run(SimulatedPool(0, names=("a",), refuses={"a": "no such adapter"}))
    assert not run.kept
    assert run.reasons == {("cpu", ""): "a: no such adapter", ("ggml", ""): "a: no such adapter"}


def test_without_workers_it_waits_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there: said at once, given up after a while, never an endless wait."""
    monkeypatch.setattr(executor, "PATIENCE", 10.0)
    _, run = _run(SimulatedPool(0, names=()))
    assert not run.kept
    assert set(run.reasons.values()) == {"there is no worker"}
    assert run.said == ["cpu: there is no worker", "ggml: there is no worker"]


def test_the_time_ends_handing_out() -> None:
    """After its end nothing is handed out; what has begun comes in."""
    _, run = _run(SimulatedPool(0), ends=3.0)
    assert 0 < len(run.kept) < 2 * len(IDS)
    assert set(run.kept) == {(r.backend, r.case) for r in run.results}


def test_what_was_handed_out_is_taken_back_at_the_end() -> None:
    """A chunk that no worker finished in time would take the time of the next executor of the same workers."""
    pool = SimulatedPool(0)
    pool.seconds = 0.0
    _, run = _run(pool, ends=3.0)
    assert len(run.results) < len(IDS) * len(BACKENDS)
    assert not pool.running


def test_a_device_is_a_resource_of_workers() -> None:
    """A backend on a device goes to workers that offer it; one on the CPU to any."""
    assert device_of(Spec.parse("ggml?device=Vulkan0")) == "Vulkan0"
    assert device_of(Spec.parse("ggml?device=CPU")) is None
    run, pool = Run(), SimulatedPool(0)
    run.over(pool, {Spec.parse("ggml?device=Vulkan0"): IDS}, clock=pool.clock)
    reason = "no worker has the device Vulkan0: dask worker ADDRESS --resources 'Vulkan0=1'"
    assert run.said == [f"ggml?device=Vulkan0: {reason}"]
    assert run.reasons == {("ggml?device=Vulkan0", ""): reason}


def test_a_chunk_runs_real_cases() -> None:
    """A chunk's results are those of its cases, and the worker says where they ran."""
    ids = [i for i in FAMILIES["ops"].ids("smoke") if i.startswith("ops/ADD")][:3]
    run = Run()
    work = run.over(InlinePool(), {Spec("cpu"): ids})
    assert Counter(r.verdict for r in run.results) == {Verdict.PASS: 3}
    assert work.environments["here"]["packages"]["numpy"]


def test_a_chunk_without_time_hands_its_cases_back() -> None:
    """Of a chunk's time only its first group of cases starts; the others have no result."""
    ids = [*FAMILIES["kv_growth"].ids("smoke")[:1], *FAMILIES["ops"].ids("smoke")[:3]]
    reply = execute(Chunk(1, Spec("cpu"), ids, Isolation(), seconds=-1.0))
    assert [r["case"] for r in reply.rows] == ids[:1]
    assert reply.why == ""


def test_a_worker_of_another_version_is_refused() -> None:
    """Another version has other cases under the same ids: it runs nothing, and says both versions."""
    reply = execute(Chunk(1, Spec("cpu"), ["ops/X@1"], Isolation(), version="0.0.1"))
    assert reply.rows == []
    assert (
        reply.why == f"ggml-conformance 0.0.1 expected, the version that started the run; this worker has {__version__}"
    )
