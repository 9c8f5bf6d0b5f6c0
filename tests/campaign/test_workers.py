"""Real workers of Dask, which are killed; skipped if `distributed` is not installed."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance.backend.registry import Spec
from conformance.builds.build import Build, DeviceOf
from conformance.campaign import lanes, pool
from conformance.campaign.chunk import Chunk
from conformance.campaign.executor import Executor, TaskLost
from conformance.campaign.pool import connect
from conformance.ggml.errors import UnavailableError
from conformance.judge.verdict import Result
from conformance.process import words
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.settings import WaiverBook, today
from conformance.suite import FAMILIES
from conformance.testrun import Chosen, TestRun

pytestmark = pytest.mark.filterwarnings("default")  # what Dask warns of is its own
IDS = [i for i in FAMILIES["ops"].ids("smoke") if i.startswith(("ops/ADD", "ops/MUL", "ops/ROPE"))]
KILLS = 2


def _alike(r: Result) -> dict[str, object]:
    """What a result says, without how long it took."""
    return {k: v for k, v in r.to_json().items() if k not in {"seconds", "witness"}}


@contextmanager
def _cluster(workers: int) -> Iterator[str]:
    """Start a scheduler and workers on this machine, of which a nanny replaces a dead one; return the address."""
    import dask  # noqa: PLC0415  # an extra
    from distributed import LocalCluster  # noqa: PLC0415  # as above

    config = {"distributed.scheduler.allowed-failures": 0}
    with (
        dask.config.set(config),
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
    ):
        yield cluster.scheduler_address


def test_killed_workers_cost_nothing() -> None:
    """Workers are killed at random moments: each case has the one result that this process alone finds."""
    pytest.importorskip("distributed", reason="the extra [campaign] is not installed")
    draw, kills, kept = random.Random(7), 0, 0  # noqa: S311  # a test's own choice

    with _cluster(2) as address, connect(address) as workers:

        class Kept(TestRun):
            def keep(self, results: Sequence[Result]) -> None:
                nonlocal kills, kept
                kept += len(results)
                if kills < KILLS and kept >= len(IDS) * (kills + 1) // (KILLS + 2):
                    kills += 1
                    with suppress(ProcessLookupError):
                        alive = workers.client.run(os.getpid, on_error="ignore")
                        os.kill(draw.choice(list(alive.values())), signal.SIGKILL)

        run = Kept(Chosen(), waivers=WaiverBook({}, today()), recovers=False)
        work = Executor(workers, run, {Spec("cpu"): IDS})
        list(work.play())
    runner = Runner()
    try:
        expected = runner.run(Spec("cpu"), [runner.case(i) for i in IDS])
    finally:
        runner.close()
    assert kills == KILLS
    assert work.deaths
    assert kept == len(IDS)
    assert [_alike(r) for r in run.results] == [_alike(r) for r in expected]


@pytest.mark.parametrize("software", [True, False])
def test_a_device_is_one_lanes_unless_the_processor_computes_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, software: bool
) -> None:
    """One lane has a graphics card; each has a device that the processor emulates."""

    def inspect(text: str, _environment: Mapping[str, str | None], _isa: str) -> Build:
        if text == "gone":
            raise UnavailableError("gone: there is no such build")
        device = DeviceOf("Vulkan0", "GPU", "a card", software, ())
        return Build(text, tmp_path, "0.9", "", (device,), (), llama=False, left_out=())

    monkeypatch.setattr(lanes, "probe", inspect)
    specs = map(Spec.parse, ("ggml?lib=gone&device=CUDA0", "ggml?lib=here&device=Vulkan0", "ggml?device=CPU"))
    devices = sorted(sorted(own) for own in lanes.devices_of(list(specs), 2))
    assert devices == ([["CUDA0", "Vulkan0"], ["Vulkan0"]] if software else [["CUDA0"], ["Vulkan0"]])


class _Client:
    """As Dask's client, which goes over to a new scheduler at the old address by itself."""

    scheduler = "first"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def scheduler_info(self) -> dict[str, object]:
        return {"id": self.scheduler, "workers": {"w": {"nthreads": 1, "resources": {}, "name": "w"}}}

    def submit(self, *_: object, **__: object) -> Future[None]:
        return Future()

    def close(self, **_: object) -> None:
        pass


def test_another_scheduler_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that was started anew at the address has none of the tasks; the journal has their results."""
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=_Client))
    workers = pool.DaskPool("tcp://x", "tcp://x")
    assert set(workers.workers()) == {"w"}
    monkeypatch.setattr(_Client, "scheduler", "second")
    with pytest.raises(UnavailableError, match="with --journal the same command continues: another scheduler answers"):
        workers.workers()


def test_a_worker_that_dies_with_its_answer_costs_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task ended, and its answer cannot be fetched any more: it is lost, so that it is handed out again."""

    class Gone(Future[None]):
        status = "finished"

        def result(self, timeout: float | None = None) -> None:
            raise TimeoutError(timeout)

        def release(self) -> None:
            pass

    gone = Gone()
    scheduler = SimpleNamespace(KilledWorker=KeyError)
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=_Client, scheduler=scheduler))
    monkeypatch.setitem(sys.modules, "distributed.scheduler", scheduler)
    monkeypatch.setattr(_Client, "submit", lambda *_, **__: gone)
    workers = pool.DaskPool("tcp://x", "tcp://x")
    workers.start(Chunk(6, Spec("cpu"), ["ops/X@1"], Isolation()), None, ())
    gone.set_result(None)
    number, why = workers.ended.get(timeout=1)
    assert (number, type(why)) == (6, TaskLost)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "tls://127.0.0.1:9", "foo://x", "inproc://x", "ucx://x:1"])
def test_nobody_answers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address without a scheduler, or that Dask cannot use here, is one line that names it; the client is closed."""
    distributed = pytest.importorskip("distributed", reason="the extra [campaign] is not installed")
    monkeypatch.setattr(pool, "ANSWER", 1.0)
    expected = pytest.raises(UnavailableError, match=f"--workers {address}: a Dask scheduler expected")
    before = {id(o) for o in gc.get_objects()}
    with expected, connect(address):
        pass
    mine = [o for o in gc.get_objects() if id(o) not in before and isinstance(o, distributed.Client)]
    assert {c.status for c in mine} <= {"closed", "newly-created"}


def test_packages_that_are_absent_are_named(tmp_path: Path) -> None:
    """Without Dask, or dask-jobqueue for slurm:N: exit code 2 and one line with the command that installs it."""
    for absent, workers, install in (
        ("distributed", "tcp://here:1", "pip install 'ggml-conformance[campaign]'"),
        ("dask_jobqueue", "slurm:1", "pip install dask-jobqueue"),
    ):
        if absent == "dask_jobqueue":
            pytest.importorskip("distributed", reason="the extra [campaign] is not installed")
        (tmp_path / f"{absent}.py").write_text("raise ImportError('taken away')\n", encoding="utf-8")
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        ended = subprocess.run(
            [*words("conformance.cli"), "run", "--workers", workers, "--backend", "cpu", "--case", "ops/ADD-*"],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert ended.returncode == 2
        assert install in ended.stderr
        (tmp_path / f"{absent}.py").unlink()
