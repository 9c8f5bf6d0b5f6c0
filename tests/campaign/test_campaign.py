"""The coordinator of a campaign over simulated workers: each pair asked for is answered once, whatever dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
from campaign_pools import Faults, InlinePool, SimulatedPool

from conformance import __version__
from conformance.backend.registry import Spec
from conformance.campaign import campaign
from conformance.campaign.campaign import Campaign, device_of
from conformance.campaign.chunk import Chunk, execute
from conformance.judge.verdict import Result, Verdict
from conformance.run.isolation.isolate import Isolation
from conformance.suite import FAMILIES

BACKENDS = (Spec("cpu"), Spec("ggml"))
IDS = [f"ops/MADE-{k}@1" for k in range(300)]


def _run(
    pool: SimulatedPool, earlier: Sequence[Result] = (), ends: float = inf
) -> tuple[Campaign, Counter[tuple[str, str]], list[str]]:
    """A campaign over `pool`, how often each pair was handed on, and what it said."""
    kept: Counter[tuple[str, str]] = Counter()
    said: list[str] = []

    def keep(results: Sequence[Result]) -> list[Result]:
        kept.update((r.backend, r.case) for r in results)
        return list(results)

    work = Campaign(pool, dict.fromkeys(BACKENDS, IDS), isolation=Isolation(), topic="t", keep=keep, say=said.append,
                    clock=pool.clock, earlier=earlier, ends=ends)  # fmt: skip
    work.run()
    return work, kept, said


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_or_doubled_whatever_dies(seed: int) -> None:
    """Workers die by chance, the scheduler goes, messages get lost or come late: each pair has one PASS, kept once."""
    pool = SimulatedPool(seed, faults=Faults(kill=0.03, scheduler=0.003, message=0.01))
    work, kept, _ = _run(pool)
    assert set(kept.values()) == {1}
    assert len(kept) == len(IDS) * len(BACKENDS)
    assert {r.verdict for r in work.results.values()} == {Verdict.PASS}
    assert work.why == {}
    assert pool.kills
    assert work.deaths >= pool.kills


@pytest.mark.parametrize("seed", range(10))
def test_cases_that_kill_their_worker_are_found(seed: int) -> None:
    """A case whose worker always dies is a CRASH that says so; all others pass, whatever else dies by chance."""
    killers = frozenset({IDS[3], IDS[4], IDS[150], IDS[-1]})
    work, kept, _ = _run(SimulatedPool(seed, faults=Faults(kill=0.01, killers=killers)))
    assert set(kept.values()) == {1}
    assert {i for (_, i), r in work.results.items() if r.verdict is Verdict.CRASH} == killers
    crash = work.results["cpu", IDS[3]]
    assert "each of 3 workers that ran it alone died" in crash.detail
    assert Counter(r.verdict for r in work.results.values())[Verdict.CRASH] == len(killers) * len(BACKENDS)


def test_earlier_results_do_not_run_again() -> None:
    """What a journal has is neither handed out nor kept a second time."""
    earlier = [Result(i, "cpu", Verdict.FAIL) for i in IDS[:100]]
    work, kept, _ = _run(SimulatedPool(0), earlier=earlier)
    assert len(kept) == 2 * len(IDS) - 100
    assert work.results["cpu", IDS[0]].verdict is Verdict.FAIL


def test_a_worker_that_refuses_is_left_out() -> None:
    """One worker of three cannot run anything: the others do all of it."""
    work, kept, _ = _run(SimulatedPool(0, refuses={"b": "no such adapter"}))
    assert len(kept) == 2 * len(IDS)
    assert work.why == {}


def test_a_backend_that_nobody_can_run_is_missing_with_the_reason() -> None:
    """All workers refuse: no result, and the reason of one of them."""
    work, kept, _ = _run(SimulatedPool(0, names=("a",), refuses={"a": "no such adapter"}))
    assert not kept
    assert work.why == {("cpu", ""): "a: no such adapter", ("ggml", ""): "a: no such adapter"}


def test_without_workers_it_waits_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there: said at once, given up after a while, never an endless wait."""
    monkeypatch.setattr(campaign, "PATIENCE", 10.0)
    work, kept, said = _run(SimulatedPool(0, names=()))
    assert not kept
    assert set(work.why.values()) == {"there is no worker"}
    assert said == ["cpu: there is no worker", "ggml: there is no worker"]


def test_the_time_ends_handing_out() -> None:
    """After its end nothing is handed out; what has begun comes in."""
    work, kept, _ = _run(SimulatedPool(0), ends=3.0)
    assert 0 < len(kept) < 2 * len(IDS)
    assert set(kept) == set(work.results)


def test_a_device_is_a_resource_of_workers() -> None:
    """A backend on a device goes to workers that offer it; one on the CPU to any."""
    assert device_of(Spec.parse("ggml?device=Vulkan0")) == "Vulkan0"
    assert device_of(Spec.parse("ggml?device=CPU")) is None
    pool = SimulatedPool(0)
    said: list[str] = []
    work = Campaign(pool, {Spec.parse("ggml?device=Vulkan0"): IDS}, isolation=Isolation(), topic="t",
                    keep=list, say=said.append, clock=pool.clock)  # fmt: skip
    work.run()
    reason = "no worker offers the device Vulkan0: dask worker ADDRESS --resources 'Vulkan0=1'"
    assert said == [f"ggml?device=Vulkan0: {reason}"]
    assert work.why == {("ggml?device=Vulkan0", ""): reason}


def test_a_chunk_runs_real_cases() -> None:
    """A chunk's results are those of its cases, and the worker says where they ran."""
    ids = [i for i in FAMILIES["ops"].ids("smoke") if i.startswith("ops/ADD")][:3]
    work = Campaign(InlinePool(), {Spec("cpu"): ids}, isolation=Isolation(), topic="t", keep=list, say=print)
    work.run()
    assert Counter(r.verdict for r in work.results.values()) == {Verdict.PASS: 3}
    assert work.environments["here"]["packages"]["numpy"]


def test_a_chunk_without_time_hands_its_cases_back() -> None:
    """No case starts after a chunk's time; those without a result are its reply."""
    ids = FAMILIES["ops"].ids("smoke")[:3]
    reply = execute(Chunk(1, Spec("cpu"), ids, -1.0, Isolation()), lambda _: None)
    assert list(reply.left) == list(ids)
    assert reply.why == ""


def test_a_worker_of_another_version_is_refused() -> None:
    """Another version has other cases under the same ids: it runs nothing, and says both versions."""
    reply = execute(Chunk(1, Spec("cpu"), ["ops/X@1"], 1.0, Isolation(), version="0.0.1"), lambda _: None)
    assert reply.left == ["ops/X@1"]
    assert reply.why == f"ggml-conformance 0.0.1 expected, as where the campaign runs; this worker has {__version__}"
