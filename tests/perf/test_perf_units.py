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
from marks import needs_wheel
from sessions_of_pytest import ROOT, session

from backends.cpu import CpuBackend
from conformance.backend import registry
from conformance.backend.kernel import KernelSession
from conformance.backend.measure import resident
from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case, Step
from conformance.cli import main
from conformance.ggml.errors import BackendError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import Bytes, Tensor
from conformance.judge.outcome import judge
from conformance.judge.verdict import Verdict
from conformance.perf import units as table
from conformance.perf.bench import Bench, Row
from conformance.perf.measure import Rounds
from conformance.perf.units import UNITS, Unit, units
from conformance.report.runs import read_runs
from conformance.run.runner import Runner
from conformance.run.session.select import build
from conformance.suite.family import LEVELS, Level
from conformance.suite.ops import Timed

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
    with pytest.raises(UsageError, match=r"no unit of level smoke matches 'prefil'; known: op/.*prefill@n=32"):
        units("smoke", ["prefil"])


@pytest.mark.parametrize("unit", [OP, table.prefill(TINY, 24), table.decode(TINY, 256)], ids=lambda u: u.name)
def test_every_measurement_does_the_same_work(bench: Bench, unit: Unit) -> None:
    """What is timed in round k starts from the caches of round 1 and gives its outputs."""
    (row,) = _rows(bench, unit, "", rounds=4)
    case = bench._runner.case(unit.case_id)
    per = len(case.steps) * unit.repeat
    runs = [x for x in PlantedBackend.log if x[0] == ""][-5 * per :]  # the warm-up and four rounds
    first = runs[:per]
    assert len(row.seconds) == 4
    for k in range(1, 5):
        for was, now in zip(first, runs[k * per : (k + 1) * per], strict=True):
            assert was[1] is now[1]
            for before, after in ((was[2], now[2]), (was[3], now[3])):
                assert before.keys() == after.keys()
                assert all(np.array_equal(before[t], after[t]) for t in before)
    for t, data in first[0][2].items():
        assert np.array_equal(data, case.persistent[t])
    assert row.result.metrics["changed"] == 0


def test_outputs_that_change_are_counted(bench: Bench) -> None:
    """A backend that passes once and gives other numbers later is seen in `changed`."""
    (row,) = _rows(bench, OP, "drifts", rounds=3)
    assert row.result.verdict is Verdict.PASS
    assert row.result.metrics["changed"] == 4


def test_backends_take_turns_in_changing_order(bench: Bench) -> None:
    """Each round has every backend once, and begins with another."""
    unit = replace(OP, repeat=1, work=1)
    _rows(bench, unit, "", "own clock", rounds=4)
    ran = [x[0] for x in PlantedBackend.log][-10:]
    assert ran == ["own clock", "", *["", "own clock", "own clock", ""] * 2]


def test_a_case_that_fails_is_not_timed(bench: Bench) -> None:
    """It has its verdict and where it fails, and its session is opened for no measurement."""
    wrong, right = _rows(bench, OP, "wrong", "")
    assert (wrong.result.verdict, right.result.verdict) == (Verdict.FAIL, Verdict.PASS)
    assert (wrong.result.case, wrong.result.metrics, wrong.seconds) == (OP.id, {}, [])
    assert wrong.result.where is not None
    assert len(right.seconds) == 3
    assert judge([wrong.result, right.result]).exit_code == 1
    assert PlantedBackend.started.count("wrong") == 2  # for the runner, which judged it, and whether it is right alone
    with pytest.raises(UsageError, match="FAIL"):
        bench.measured(OP, _spec("wrong"))


@pytest.mark.parametrize("fault", ["fails later", "raises later", "lies"])
def test_a_backend_that_fails_while_it_is_measured_costs_itself_only(bench: Bench, fault: str) -> None:
    """The reason stands there, the run fails, and the others have all their rounds."""
    broken, right = _rows(bench, OP, fault, "")
    assert (broken.result.verdict, broken.seconds) == (Verdict.OVERCLAIM, [])
    assert "failed while it was measured" in broken.result.detail
    assert len(right.seconds) == 3
    assert judge([broken.result, right.result]).exit_code == 1
    assert judge([right.result]).exit_code == 0


def test_compiling_again_is_counted(bench: Bench) -> None:
    """Warm measurements of a backend that keeps what it compiled compile nothing; of one that does not, each step."""
    unit = table.decode(TINY, 0)
    kept, again = (r.result.metrics for r in _rows(bench, unit, "", "recompiles", rounds=2))
    assert kept["compiles"] == again["compiles"] == unit.work
    assert (kept["timed.compiles"], kept["timed.hits"]) == (0, unit.work)
    assert (again["timed.compiles"], again["timed.hits"]) == (unit.work, 0)
    (more,) = _rows(bench, unit, "recompiles", rounds=4)
    timing = ("seconds", "elapsed", "rounds", "tokens_per_second")
    assert {k: v for k, v in more.result.metrics.items() if k not in timing} == {
        k: v for k, v in again.items() if k not in timing
    }


def test_a_fresh_unit_starts_its_backend_each_time(bench: Bench) -> None:
    """The runner's, and one for the warm-up and each round; only what comes behind the untimed steps is counted."""
    unit = table.cross(TINY)
    (row,) = _rows(bench, unit, "", rounds=2)
    assert PlantedBackend.started.count("") == 1 + 3
    assert (row.result.metrics["compiles"], row.result.metrics["timed.compiles"]) == (2, 1)
    (load,) = _rows(bench, table.load(TINY), "", rounds=2)
    assert (load.result.metrics["nodes"], len(load.seconds)) == (0, 2)
    (asked,) = _rows(bench, table.first_token(TINY, 8), "", rounds=2)
    assert asked.result.metrics["timed.compiles"] == asked.result.metrics["compiles"] == 1


def test_a_session_is_charged_by_its_own_clock(bench: Bench) -> None:
    """Where it has one its seconds are that clock's, and what passed outside stands beside."""
    (row,) = _rows(bench, OP, "own clock")
    assert row.seconds == pytest.approx([OP.repeat * 2.5e-7] * 3)
    assert row.result.metrics["elapsed"] > row.result.metrics["seconds"]
    assert row.rate == pytest.approx(1 / 2.5e-7)
    (bare,) = _rows(bench, OP, "")
    assert bare.result.metrics["seconds"] == bare.result.metrics["elapsed"]


def test_what_travels_to_a_worker_is_not_charged() -> None:
    """The real ggml in its process is timed there: each measurement is less than what passed here, and not nothing."""
    runner = Runner()
    try:
        for unit in (OP, table.decode(TINY, 0), table.first_token(TINY, 8)):
            (row,) = Bench(runner).rows(unit, [Spec("ggml")], lambda r: r.more(2))
            assert row.result.verdict is Verdict.PASS
            assert 0 < row.result.metrics["seconds"] < row.result.metrics["elapsed"]
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
    assert cpu.result.metrics["memory.weights"] == weights
    assert weights <= ggml.result.metrics["memory.weights"] < weights + 64 * len(case.persistent)
    assert ("memory.peak" in cpu.result.metrics) == (resident() is not None)
    assert (cpu.seconds, cpu.rate) == ([], None)
    assert judge([cpu.result, ggml.result]).exit_code == 0


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


def test_the_command_measures_and_says_what_it_did_not(tmp_path: Path) -> None:
    """A table, a record, and the exit codes of `conform run`: 0, 3 where no cases ran, 2 for a wrong glob."""
    path = tmp_path / "perf.json"
    args = ["perf", "run", "op/RMS*", "--backend", "cpu", "--rounds", "7", "--json", str(path)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert "op/RMS_NORM@n=64" in done.output
    (run,) = read_runs([path]).documents
    (unit,) = run.record.results
    m = unit.metrics
    assert (unit.case, m["rounds"]) == ("perf/op/RMS_NORM@n=64/RMS_NORM-f32-ne=2048x64@1", 7)
    assert m["seconds.low"] <= m["seconds"] <= m["seconds.high"]
    assert m["steps_per_second"] == pytest.approx(units("smoke", ["op/RMS*"])[0].work / m["seconds"])
    assert run.record.asked == {"cpu": 1}
    none = CliRunner().invoke(main, ["perf", "run", "op/RMS*", "--backend", "xdna2", "--json", str(path)])
    assert none.exit_code == 3
    (unit,) = read_runs([path]).documents[0].record.results
    assert (unit.verdict, unit.metrics) == (Verdict.UNSUPPORTED, {})
    assert CliRunner().invoke(main, ["perf", "run", "nope"]).exit_code == 2
    listed = CliRunner().invoke(main, ["perf", "run", "--list", "load"]).output
    assert listed.startswith("load\t1 cases\tkv_growth/")


def test_times_are_compared_with_a_backend_or_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower backend fails and is missing where that is undecided; another machine's record is refused."""
    monkeypatch.setattr("conformance.cli.perf.BUDGET", 0.01)  # too little for an interval
    path = tmp_path / "perf.json"
    args = ["perf", "run", "op/RMS*", "--backend", "cpu", "--json", str(path)]
    done = CliRunner().invoke(main, [*args, "--against", "ggml"])
    assert done.exit_code == 5, done.output
    assert "the machine is too noisy" in done.output
    (run,) = read_runs([path]).documents
    assert [(m.backend, str(m.cause)) for m in run.record.missing] == [("cpu", "undecided")]
    body = json.loads(path.read_text())
    (then,) = [r for r in body["results"] if r["backend"] == "cpu"]
    then["metrics"] |= {"seconds": 1e-9, "seconds.low": 1e-9, "seconds.high": 1e-9}
    base = tmp_path / "base.json"
    base.write_text(json.dumps(body))
    done = CliRunner().invoke(main, [*args, "--against", str(base)])
    assert done.exit_code == 1, done.output
    assert "1 FAIL" in done.output
    body["environment"]["machine"] = "0123456789ab"
    base.write_text(json.dumps(body))
    assert CliRunner().invoke(main, [*args, "--against", str(base)]).exit_code == 2
    assert CliRunner().invoke(main, [*args, "--against", "cpu"]).exit_code == 2


def test_one_case_is_timed_with_its_kernels(tmp_path: Path) -> None:
    """By its id or from a file: kernels, and the peak of memory."""
    name, file = "ops/RMS_NORM-f32-ne=5x3,eps=0.1@1", tmp_path / "c.gguf"
    case = build(name)
    case.id = "ops/own@1"
    casefile.write(file, [case])
    path = tmp_path / "perf.json"
    args = ["perf", "run", name, str(file), "--rounds", "2", "--json", str(path)]
    done = CliRunner().invoke(main, [*args, "--backend", "cpu"])
    assert done.exit_code == 0, done.output
    found = {r.case: r.metrics for r in read_runs([path]).documents[0].record.results}
    assert [c for c in found if found[c].get("seconds")] == [
        "perf/case/ops/RMS_NORM-f32-ne=5x3,eps=0.1@1",
        "perf/case/ops/own@1",
    ]
    assert found["perf/case-memory/ops/own@1"]["memory.peak"] > 0
    assert "cpu: 1 RMS_NORM" in done.output


@needs_wheel
def test_a_model_is_timed_as_llama_bench_does(tmp_path: Path) -> None:
    """Its prompt and its tokens each have a rate and an interval; a backend that is wrong on the model has neither."""
    model, written = tmp_path / "a model.gguf", tmp_path / "run.json"
    assert CliRunner().invoke(main, ["capture", "llama", "--model", "-o", str(model)]).exit_code == 0
    words = ["perf", "run", "--model", str(model), "-p", "24", "-n", "3", "--json", str(written)]
    done = CliRunner().invoke(main, [*words, "--backend", "ggml", "--backend", "xdna2"])
    assert done.exit_code == 0, done.output
    rows = {(r["case"], r["backend"]): r for r in json.loads(written.read_text())["results"]}
    for unit in ("pp24", "tg3"):
        timed, refused = (rows[f"perf/{unit}/a model@1", b] for b in ("ggml", "xdna2"))
        assert timed["verdict"] == "PASS"
        m = timed["metrics"]
        assert m["seconds.low"] <= m["seconds"] <= m["seconds.high"]
        assert round(m["tokens_per_second"] * m["seconds"]) == int(unit[2:])
        assert refused["verdict"] == "UNSUPPORTED"
        assert "tokens_per_second" not in refused["metrics"]
    nodes = {unit: rows[f"perf/{unit}/a model@1", "ggml"]["metrics"]["nodes"] for unit in ("pp24", "tg3")}
    assert nodes["tg3"] == 3 * nodes["pp24"], "a graph per token"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "3"], "-p: --model FILE expected"),
        (["--model", "run.json"], "this is a text file, not a model in GGUF"),
        (["--model", "run.json", "load"], "no units or cases expected, 'load' found"),
        (["--model", "run.json", "-p", "0", "-n", "0"], "at least one number above 0"),
        (["--model", "run.json", "-n", "-1"], "-1 is not in the range"),
        (["nothere.gguf"], "nothere.gguf: no such file"),
    ],
)
def test_wrong_words_about_a_model_are_one_message(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before any backend is measured."""
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text("{}")
    done = CliRunner().invoke(main, ["perf", "run", "--backend", "cpu", *words])
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize(("old", "new"), [("aa", "calibrate"), ("units", "run --list"), ("compare", "run --against")])
def test_a_command_of_earlier_versions_names_the_one_of_today(old: str, new: str) -> None:
    """One line on stderr, and exit code 2."""
    done = CliRunner().invoke(main, ["perf", old])
    assert done.exit_code == 2
    assert f"use conform perf {new}" in done.output


def test_pytest_hands_the_rounds_to_pytest_benchmark(tmp_path: Path) -> None:
    """With `--perf` there is a test per unit and backend and nothing else, and both records have the same seconds."""
    ours, theirs = tmp_path / "perf.json", tmp_path / "benchmark.json"
    command = [sys.executable, "-m", "pytest", "conformance", "-p", "no:cacheprovider", "--backend", "cpu", "-v"]
    command += ["--perf", "--unit", "op/RMS*", "--unit", "memory", "--rounds", "2"]
    command += ["--json", str(ours), "--benchmark-json", str(theirs)]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # where benchmarks are off
    run = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_suite.py::test_time[op/RMS_NORM@n=64-cpu] PASSED" in run.stdout
    assert "test_suite.py::test_memory[memory-cpu] PASSED" in run.stdout
    assert "2 passed" in run.stdout
    measured, memory = read_runs([ours]).documents[0].record.results
    (benchmark,) = json.loads(theirs.read_text())["benchmarks"]
    assert benchmark["stats"]["median"] == pytest.approx(measured.metrics["seconds"])
    assert benchmark["group"] == "op/RMS_NORM@n=64"
    assert benchmark["extra_info"]["compiles"] == measured.metrics["compiles"]
    assert memory.metrics["memory.weights"] > 0
    run = session("--backend", "cpu", "--collect-only", "-q", "--family", "gqa")
    assert "test_case[gqa/" in run.stdout
    assert "test_time" not in run.stdout


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--case", OP.case_id, "-k", "test_time"], 1, "1 deselected"),
        (["--perf", "-n", "2"], 4, "run it without -n"),
        (["--perf", "--unit", "nope"], 4, "no unit of level smoke matches 'nope'"),
        (["--perf", "--rounds", "0"], 4, "0 is not in the range x>=1"),
        (["--perf", "--shard", "1/2"], 4, "choose them with --unit"),
    ],
)
def test_pytest_without_perf_and_with_what_does_not_go_with_it(options: list[str], code: int, said: str) -> None:
    """No test of time exists without `--perf`; a wrong option is one line."""
    run = session("-p", "benchmark", "--backend", "cpu", *options)
    assert said in run.stdout + run.stderr
    assert run.returncode == code


@pytest.mark.parametrize("perf", [(), ("--perf",)])
def test_saving_benchmarks_of_nothing_changes_no_exit_code(perf: tuple[str, ...]) -> None:
    """`-k` that selects nothing ends with the same lines and exit code with `--benchmark-save`, not a traceback."""
    words = ("-p", "benchmark", "--backend", "cpu", *perf, "-k", "nothing_at_all")
    plain, saving = session(*words), session(*words, "--benchmark-save", "x")
    assert saving.returncode == plain.returncode != 0
    assert "no cases ran" in saving.stdout
    assert "Traceback" not in saving.stdout + saving.stderr


def test_units_appear_as_they_are_measured_and_end_with_the_budget() -> None:
    """`perf run` says what each unit gave at once; a unit that did not start in time makes the run incomplete."""
    done = CliRunner().invoke(main, ["perf", "run", "op/RMS*", "--backend", "cpu", "--rounds", "2"])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("op/RMS_NORM@n=64 …\n  cpu  PASS  ")
    late = CliRunner().invoke(main, ["perf", "run", "op/RMS*", "--backend", "cpu", "--budget", "0.000001s"])
    assert late.exit_code == 5, late.output


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
    with pytest.raises(AssertionError, match=r"FAIL perf/op/RMS_NORM.*Reproduce: conform perf run"):
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
