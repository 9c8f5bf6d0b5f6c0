"""Work units and their measuring: what is timed, that it is the same each time, and what stands there instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

from backends.cpu import CpuBackend
from conformance.backend import registry
from conformance.backend.kernel import KernelSession
from conformance.backend.measure import resident
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.cli import main
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.verdict import Verdict
from conformance.perf import units as table
from conformance.perf.bench import Bench, Row, document, outcome, spread
from conformance.perf.measure import Rounds
from conformance.perf.units import UNITS, Unit, units
from conformance.report.runs import read_runs
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite.family import LEVELS, Level
from conformance.suite.ops import Timed

ROOT = Path(__file__).resolve().parents[2]
TINY = "llama-l=1,embd=32,heads=2,kv=1,head=16,ff=32,vocab=32"
OP = table.op(Timed("RMS_NORM-f32-ne=64x4", 4, 3))
Values = Mapping[Tensor, Bytes]


class Planted(KernelSession):
    """A session that remembers what it was asked, and can be given a fault."""

    def __init__(self, backend: PlantedBackend, case: Case) -> None:
        super().__init__(backend.name, backend.kernels(), case)
        self.case, self.of = case, backend
        self.ran = 0
        self.spent = 0.0

    def compute(self, graph: Graph, inputs: Mapping[Tensor, Bytes], outputs: Sequence[Tensor]) -> Values:
        """As the reference, but for the fault."""
        fault, log = self.of.fault, type(self.of).log
        before = {t: self.read(t) for t in self.case.caches()}
        found = dict(super().compute(graph, inputs, outputs))
        self.ran += 1
        if fault == "recompiles" or self.ran <= len(self.case.steps):
            self._witness.compiles += 1
        else:
            self._witness.cache_hits += 1
        if fault == "wrong" or (fault == "drifts" and self.ran > len(self.case.steps)):
            found = {t: np.frombuffer((x.view(np.float32) + self.ran).tobytes(), np.uint8) for t, x in found.items()}
        if fault == "fails later" and self.ran > len(self.case.steps):
            raise BackendError("the device is gone")
        if fault == "raises later" and self.ran > len(self.case.steps):
            raise ZeroDivisionError
        log.append((self.of.fault, graph, before, found))
        return found

    def clock(self) -> float | None:
        """A quarter of a microsecond per step, or the time of day where it is to lie."""
        if self.of.fault == "lies":
            return time.time() * self.ran
        return self.ran * 2.5e-7 if self.of.fault == "own clock" else None


class PlantedBackend(CpuBackend):
    """The reference under another name, one fault at a time."""

    log: ClassVar[list[tuple[str, Graph, dict[Tensor, Bytes], Values]]] = []
    started: ClassVar[list[str]] = []

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.started.append(fault)

    def open(self, case: Case) -> Planted:
        """The planted session."""
        return Planted(self, case)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench to which the planted backend is known."""
    monkeypatch.setitem(registry._provided, "planted", PlantedBackend)
    registry.adapter.cache_clear()
    PlantedBackend.log.clear()
    PlantedBackend.started.clear()
    runner = Runner()
    yield Bench(runner)
    runner.close()
    registry.adapter.cache_clear()


def _spec(fault: str = "") -> Spec:
    return Spec("planted", (("fault", fault),))


def _rows(bench: Bench, unit: Unit, *faults: str, rounds: int = 3) -> list[Row]:
    return bench.rows(unit, [_spec(f) for f in faults], lambda r: r.more(rounds))


def _n_kv(step: Step) -> set[int]:
    return {n.src[1].ne[1] for n in step.graph if n.op == "FLASH_ATTN_EXT" and n.src[1] is not None}


@pytest.mark.parametrize("level", LEVELS)
def test_units_are_unique_and_their_cases_can_be_built(level: Level) -> None:
    """One name, one unit; its case has the steps that it times, and the tokens that it counts as work."""
    listed = units(level)
    assert (
        len({u.name for u in listed})
        == len(listed)
        == len({(u.case_id, u.first, u.fresh, u.opens, u.steps) for u in listed})
    )
    for u in listed:
        case = build(u.case_id)
        timed = case.steps[u.first :]
        assert u.model in u.case_id
        assert timed
        assert u.repeat in {u.work, 1}
        if u.of == "tokens":
            assert u.work == sum(len(s.note["tokens"]) for s in timed)
        if u.name.startswith("decode@"):
            past = int(u.name.partition("=")[2])
            assert [s.note["tokens"][0][1] for s in timed] == list(range(past, past + u.work))
            assert len({frozenset(_n_kv(s)) for s in timed}) == 1, "a decode that crosses a block"
        if u.name.startswith("cross@"):
            (step,) = timed
            at = int(u.name.partition("@")[2])
            assert (_n_kv(case.steps[u.first - 1]), _n_kv(step)) == ({at}, {at + 256})


def test_levels_grow_and_globs_choose() -> None:
    """`standard` is part of `full`; a glob that matches nothing says what there is."""
    assert set(UNITS["standard"]) <= set(UNITS["full"])
    assert {u.name for u in UNITS["smoke"]} <= {u.name for u in UNITS["standard"]}
    assert [u.name for u in units("smoke", ["mem*", "load"])] == ["load", "memory"]
    with pytest.raises(UsageError, match=r"no unit of level smoke matches 'prefil'; there are op/.*prefill@n=32"):
        units("smoke", ["prefil"])


@pytest.mark.parametrize("unit", [OP, table.prefill(TINY, 24), table.decode(TINY, 256)], ids=lambda u: u.name)
def test_every_measurement_does_the_same_work(bench: Bench, unit: Unit) -> None:
    """What is timed in round k starts from the caches of round 1 and gives its outputs."""
    (row,) = _rows(bench, unit, "", rounds=4)
    case = bench._runner.case(unit.case_id)
    per = len(case.steps) * unit.repeat
    runs = [x for x in PlantedBackend.log if x[0] == ""][-5 * per :]  # the warm-up and four rounds
    first = runs[:per]
    assert len(row.seconds) == len(row.elapsed) == 4
    for k in range(1, 5):
        for was, now in zip(first, runs[k * per : (k + 1) * per], strict=True):
            assert was[1] is now[1]
            for before, after in ((was[2], now[2]), (was[3], now[3])):
                assert before.keys() == after.keys()
                assert all(np.array_equal(before[t], after[t]) for t in before)
    for t, data in first[0][2].items():
        assert np.array_equal(data, case.persistent[t])
    assert row.counters["changed"] == 0


def test_outputs_that_change_are_counted(bench: Bench) -> None:
    """A backend that passes once and gives other numbers later is seen in `changed`."""
    (row,) = _rows(bench, OP, "drifts", rounds=3)
    assert row.result.verdict is Verdict.PASS
    assert row.counters["changed"] == 4


def test_backends_take_turns_in_changing_order(bench: Bench) -> None:
    """Each round has every backend once, and begins with another."""
    unit = replace(OP, repeat=1, work=1)
    _rows(bench, unit, "", "own clock", rounds=4)
    ran = [x[0] for x in PlantedBackend.log][-10:]
    assert ran == ["own clock", "", *["", "own clock", "own clock", ""] * 2]


def test_a_case_that_fails_is_not_timed(bench: Bench) -> None:
    """It stands in the document with its verdict and the reason, and its session is opened for no measurement."""
    wrong, right = _rows(bench, OP, "wrong", "")
    assert (wrong.result.verdict, right.result.verdict) == (Verdict.FAIL, Verdict.PASS)
    said = wrong.to_json()
    assert (said["seconds"], said["rate"], said["rounds"], said["counters"]) == ([], None, 0, {})
    assert said["verdict"] == "FAIL"
    assert said["reason"].startswith("FAIL: ")
    assert len(right.seconds) == 3
    assert outcome([wrong, right]).exit_code == 1
    assert PlantedBackend.started.count("wrong") == 2  # for the runner, which judged it, and whether it is right alone
    with pytest.raises(UsageError, match="FAIL"):
        bench.measured(OP, _spec("wrong"))


@pytest.mark.parametrize("fault", ["fails later", "raises later", "lies"])
def test_a_backend_that_fails_while_it_is_measured_costs_itself_only(bench: Bench, fault: str) -> None:
    """The reason stands there, the run fails, and the others have all their rounds."""
    broken, right = _rows(bench, OP, fault, "")
    assert broken.result.verdict is Verdict.PASS
    assert broken.seconds == []
    assert broken.broke
    assert "failed while it was measured" in broken.reason
    assert len(right.seconds) == 3
    assert outcome([broken, right]).exit_code == 1
    assert outcome([right]).exit_code == 0


def test_compiling_again_is_counted(bench: Bench) -> None:
    """Warm measurements of a backend that keeps what it compiled compile nothing; of one that does not, each step."""
    unit = table.decode(TINY, 0)
    kept, again = _rows(bench, unit, "", "recompiles", rounds=2)
    assert kept.counters["compiles"] == again.counters["compiles"] == unit.work
    assert (kept.counters["timed"]["compiles"], kept.counters["timed"]["hits"]) == (0, unit.work)
    assert (again.counters["timed"]["compiles"], again.counters["timed"]["hits"]) == (unit.work, 0)
    (more,) = _rows(bench, unit, "recompiles", rounds=4)
    assert more.counters == again.counters


def test_a_fresh_unit_starts_its_backend_each_time(bench: Bench) -> None:
    """The runner's, and one for the warm-up and each round; only what comes behind the untimed steps is counted."""
    unit = table.cross(TINY)
    (row,) = _rows(bench, unit, "", rounds=2)
    assert PlantedBackend.started.count("") == 1 + 3
    assert (row.counters["compiles"], row.counters["timed"]["compiles"]) == (2, 1)
    (load,) = _rows(bench, table.load(TINY), "", rounds=2)
    assert (load.counters["nodes"], len(load.seconds)) == (0, 2)
    (asked,) = _rows(bench, table.first_token(TINY, 8), "", rounds=2)
    assert asked.counters["timed"]["compiles"] == asked.counters["compiles"] == 1


def test_a_session_is_charged_by_its_own_clock(bench: Bench) -> None:
    """Where it has one its seconds are that clock's, and what passed outside stands beside."""
    (row,) = _rows(bench, OP, "own clock")
    assert row.seconds == pytest.approx([OP.repeat * 2.5e-7] * 3)
    assert all(e > s for e, s in zip(row.elapsed, row.seconds, strict=True))
    assert row.rate == pytest.approx(1 / 2.5e-7)
    (bare,) = _rows(bench, OP, "")
    assert bare.seconds == bare.elapsed


def test_what_travels_to_a_worker_is_not_charged() -> None:
    """The real ggml in its process is timed there: each measurement is less than what passed here, and not nothing."""
    runner = Runner()
    try:
        for unit in (OP, table.decode(TINY, 0), table.first_token(TINY, 8)):
            (row,) = Bench(runner).rows(unit, [Spec("ggml")], lambda r: r.more(2))
            assert row.reason == ""
            assert all(0 < s < e for s, e in zip(row.seconds, row.elapsed, strict=True))
    finally:
        runner.close()


def test_memory_is_of_the_backend_alone() -> None:
    """Weights are the case's bytes without its caches; the rise is of a process of its own; nothing is timed."""
    unit = table.memory(TINY)
    case = build(unit.case_id)
    weights = sum(d.nbytes for t, d in case.persistent.items() if t not in case.caches())
    runner = Runner()
    try:
        cpu, ggml = Bench(runner).rows(unit, [Spec("cpu"), Spec("ggml")], lambda _: pytest.fail("nothing to time"))
    finally:
        runner.close()
    assert cpu.memory["weights"] == weights
    assert ggml.memory["weights"] is not None
    assert weights <= ggml.memory["weights"] < weights + 64 * len(case.persistent)
    assert (cpu.memory["peak"] is None) == (resident() is None)
    assert (cpu.seconds, cpu.rate) == ([], None)
    assert "memory" in cpu.reason
    assert outcome([cpu, ggml]).exit_code == 0


PEAKS = """
import numpy as np
from conformance.backend.measure import Peak
with Peak() as outer:
    data = np.ones(64 << 20, np.uint8)
    del data
    with Peak() as inner:
        pass
print(outer.bytes, inner.bytes)
"""
"""For a process of its own: the memory of this one falls when the garbage of earlier tests goes."""


@pytest.mark.skipif(resident() is None, reason="the system does not tell what is resident")
def test_a_peak_outlives_one_inside_it() -> None:
    """What rose before an inner block began is not forgotten by the outer one."""
    done = subprocess.run([sys.executable, "-c", PEAKS], check=True, capture_output=True, text=True)
    outer, inner = map(int, done.stdout.split())
    assert outer > 0.9 * (64 << 20)
    assert inner < 32 << 20


def test_the_document_is_one_that_reports_read(bench: Bench, tmp_path: Path) -> None:
    """Rows of every kind: measured, failed, without a clock; the rate is work by the median round."""
    rows = [*_rows(bench, OP, "", "wrong"), *_rows(bench, table.memory(TINY), "")]
    path = tmp_path / "perf.json"
    path.write_text(json.dumps(document(rows, "smoke", {"npu": "no device"}), allow_nan=False), encoding="utf-8")
    (found,) = read_runs([path]).documents
    assert found.kind == "perf"
    assert [u["reason"] == "" for u in found.body["units"]] == [True, False, False]
    timed = found.body["units"][0]
    assert timed["rate"] == timed["work"] / sorted(timed["seconds"])[1]
    assert timed["counters"]["timed"]["hits"] == OP.repeat


def test_spread_is_the_middle_half() -> None:
    """Of nine rounds from 1 to 9: from 3 to 7, by 5. Too few rounds have none."""
    assert spread([9, 1, 8, 2, 7, 3, 6, 4, 5]) == pytest.approx(4 / 5)
    assert spread([1.0, 2.0, 3.0]) is None


def test_the_command_measures_and_says_what_it_did_not(tmp_path: Path) -> None:
    """A table, a document, and the exit codes of `conform run`: 0, 3 where nothing was executed, 2 for a wrong glob."""
    path = tmp_path / "perf.json"
    args = ["perf", "run", "--backend", "cpu", "--unit", "op/RMS*", "--rounds", "2", "--json", str(path)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert "op/RMS_NORM@n=64" in done.output
    (unit,) = json.loads(path.read_text())["units"]
    assert (unit["rounds"], len(unit["seconds"]), unit["verdict"]) == (2, 2, "PASS")
    none = CliRunner().invoke(main, ["perf", "run", "--backend", "xdna2", "--unit", "op/RMS*", "--json", str(path)])
    assert none.exit_code == 3
    (unit,) = json.loads(path.read_text())["units"]
    assert (unit["seconds"], unit["rate"]) == ([], None)
    assert unit["reason"].startswith("UNSUPPORTED: ")
    assert CliRunner().invoke(main, ["perf", "run", "--unit", "nope"]).exit_code == 2


def test_one_case_is_timed_with_its_kernels(tmp_path: Path) -> None:
    """On every backend, also with static models where it has that choice; kernels, and the peak of memory."""
    path = tmp_path / "perf.json"
    args = ["perf", "case", "ops/RMS_NORM-f32-ne=5x3,eps=0.1@1", "--rounds", "2", "--json", str(path)]
    done = CliRunner().invoke(main, [*args, "--backend", "ggml", "--backend", "openvino-stateless"])
    assert done.exit_code == 0, done.output
    timed = [u for u in json.loads(path.read_text())["units"] if u["seconds"]]
    assert [u["backend"] for u in timed] == ["ggml", "openvino-stateless", "openvino-stateless?dynamic=off"]
    assert "1 RMS" in done.output
    held = [u for u in json.loads(path.read_text())["units"] if not u["seconds"]]
    assert all(u["memory"]["peak"] > 0 for u in held)
    assert len(held) == 3
    refused = CliRunner().invoke(main, [*args, "--backend", "xdna2"])
    assert refused.exit_code == 3, refused.output
    assert "UNSUPPORTED" in refused.output


def _pytest(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "conformance", "-p", "no:cacheprovider", "--backend", "cpu", *args]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # where benchmarks are off
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120, check=False)


def test_pytest_hands_the_rounds_to_pytest_benchmark(tmp_path: Path) -> None:
    """With `--perf` there is a test per unit and backend and nothing else, and both documents have the same seconds."""
    ours, theirs = tmp_path / "perf.json", tmp_path / "benchmark.json"
    run = _pytest(
        "--perf", "--unit", "op/RMS*", "--unit", "memory", "--rounds", "2", "-v",
        "--json", str(ours), "--benchmark-json", str(theirs),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_suite.py::test_time[op/RMS_NORM@n=64-cpu] PASSED" in run.stdout
    assert "test_suite.py::test_memory[memory-cpu] PASSED" in run.stdout
    assert "2 passed" in run.stdout
    measured = json.loads(ours.read_text())["units"][0]
    (benchmark,) = json.loads(theirs.read_text())["benchmarks"]
    assert benchmark["stats"]["data"] == pytest.approx(measured["seconds"])
    assert benchmark["group"] == "op/RMS_NORM@n=64"
    assert benchmark["extra_info"]["counters"] == measured["counters"]
    run = _pytest("--collect-only", "-q", "--family", "gqa")
    assert "test_case[gqa/" in run.stdout
    assert "test_time" not in run.stdout


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["-q", "conformance/test_suite.py::test_time"], 1, "no tests ran"),
        (["--perf", "-n", "2"], 4, "run it without -n"),
        (["--perf", "--unit", "nope"], 4, "no unit of level smoke matches 'nope'"),
        (["--perf", "--rounds", "0"], 4, "0 is not in the range x>=1"),
        (["--perf", "--shard", "1/2"], 4, "choose them with --unit"),
    ],
)
def test_pytest_without_perf_and_with_what_does_not_go_with_it(options: list[str], code: int, said: str) -> None:
    """No test of time exists without `--perf`; a wrong option is one line."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--backend", "cpu", *options]
    command += [] if any(o.startswith("conformance") for o in options) else ["conformance"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert said in run.stdout + run.stderr
    assert run.returncode == code


def test_a_failing_row_fails_as_a_benchmark_does(bench: Bench) -> None:
    """The sentence of the verdict is raised inside the benchmark; what is unsupported is skipped with its reason."""
    from conformance.plugin import check  # noqa: PLC0415  # registers nothing, but is pytest's to import elsewhere
    from conformance.plugin_perf import Clock, replay  # noqa: PLC0415  # as above

    class Fixture:
        extra_info: ClassVar[dict[str, Any]] = {}

        def pedantic(self, target: Any, rounds: int) -> None:  # noqa: ANN401  # pytest-benchmark's
            for _ in range(rounds):
                target()

    wrong, broken, right = (r for f in ("wrong", "fails later", "") for r in _rows(bench, OP, f))
    fixture: Any = Fixture()
    with pytest.raises(AssertionError, match=r"FAIL ops/RMS_NORM.*Reproduce: conform run"):
        replay(wrong, Clock(), fixture, check)
    with pytest.raises(AssertionError, match="the device is gone"):
        replay(broken, Clock(), fixture, check)
    clock = Clock()
    replay(right, clock, fixture, check)
    assert clock.now == pytest.approx(sum(right.seconds))
    refused = replace(wrong, result=replace(wrong.result, verdict=Verdict.UNSUPPORTED))
    with pytest.raises(pytest.skip.Exception):
        replay(refused, Clock(), fixture, check)


def test_rounds_are_bought_by_whoever_measures(bench: Bench) -> None:
    """A buyer may look at what there is and ask for more; all backends have the same number."""

    def buy(rounds: Rounds) -> None:
        while len(rounds) < 5:
            rounds.more(2)

    rows = bench.rows(OP, [_spec(), _spec("own clock")], buy)
    assert [len(r.seconds) for r in rows] == [6, 6]
