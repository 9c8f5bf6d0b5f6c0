"""A build against another: what is new, fixed and still there, and in what time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trust.past import backtest
from trust.past.sealed import Sealed

from conformance.backend.registry import Spec
from conformance.builds.build import Build, DeviceOf
from conformance.campaign.player import Player
from conformance.case.case import Case
from conformance.causes import analyse
from conformance.causes.cause import assigned
from conformance.cli.reports import outcome_of
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.cause import Cause, Condition
from conformance.judge.evidence import Error, Fault, Place
from conformance.judge.verdict import MissingCause, Result, Verdict
from conformance.judge.worse import Seen, worse
from conformance.llama.live import arch, audit, order, scenario
from conformance.llama.release import counts as counting
from conformance.llama.release.bisect import bisect, on
from conformance.llama.release.cases import Cases, Sweep
from conformance.llama.release.causes import NOT_AGAIN, OFTEN, RIGHT, Causes, SharedCause, fails, in_states
from conformance.llama.release.counts import Counting
from conformance.llama.release.profiles import Profiles
from conformance.llama.release.record import begin, causes_of, made, write, write_page
from conformance.llama.release.release import FIRST, Release, TargetResults, plan
from conformance.llama.release.target import KERNELS, Target, targets
from conformance.perf.bench import Bench, Row
from conformance.perf.count import Counts, Tool, callgrind
from conformance.perf.units import BY_ID, Unit
from conformance.report.compare import State
from conformance.report.markdown import INTERRUPTED, markdown
from conformance.report.runs import read_runs
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.select import case_ids
from conformance.run.session.spread import of_ops, spread
from conformance.testrun import Against, TestRun

NEW, OLD = Spec("ggml", (("lib", "/new"),)), Spec("ggml", (("lib", "/old"),))
CPU = Target("CPU", NEW, OLD)
REPACK = "CPU buffer=CPU_REPACK"
GUARD = "CPU guard=on threads=32"
VERDICTS = st.sampled_from([Verdict.PASS, Verdict.FAIL, Verdict.UNSUPPORTED, Verdict.CRASH])


def _build(name: str = "new", *devices: DeviceOf) -> Build:
    return Build(name, Path("/", name), "0.26.0", "", devices, (), llama=True, left_out=())


def _device(name: str, kind: str = "CPU", *buffers: str) -> DeviceOf:
    return DeviceOf(name, kind, "", software=False, buffer_types=buffers)


def _results(spec: Spec, verdicts: Mapping[str, Verdict]) -> list[Result]:
    return [Result(case, str(spec), v, notes=(v.value,)) for case, v in verdicts.items()]


@dataclass
class Fixed:
    """A search whose failures each have the cause of the op they name; `wrong` says what fails where, by itself."""

    wrong: Mapping[Spec, frozenset[str]] = field(default_factory=dict)
    again_of: list[tuple[Spec, str]] = field(default_factory=list)

    def find(self, results: Sequence[Result], _seconds: float) -> list[Cause]:
        """One cause for each op."""
        found: dict[str, list[str]] = {}
        for r in filter(fails, results):
            found.setdefault(r.case.partition("-")[0], []).append(r.case)
        return [
            Cause(op, f"{op} is wrong", results[0].backend, Verdict.FAIL, op.rpartition("/")[2], "", (), tuple(cases))
            for op, cases in found.items()
        ]

    def again(self, spec: Spec, case_id: str) -> Result:
        """As `wrong` says; `again_of` has the request."""
        self.again_of.append((spec, case_id))
        wrong = case_id in self.wrong.get(spec, frozenset())
        return Result(case_id, str(spec), Verdict.FAIL if wrong else Verdict.PASS)


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(VERDICTS, VERDICTS)))
def test_each_failure_is_new_or_fixed_or_still_there(verdicts: dict[str, tuple[Verdict, Verdict]]) -> None:
    """No failure of either build is lost, and none is in two states."""
    here = _results(NEW, {c: v[0] for c, v in verdicts.items()})
    there = _results(OLD, {c: v[1] for c, v in verdicts.items()})
    found = in_states(here, there)
    new, still, fixed = ({r.case for r in found[s] if fails(r)} for s in (State.NEW, State.STILL, State.FIXED))
    old = {r.case: r for r in there if fails(r)}
    failing = {r.case for r in here if fails(r)}
    worsened = {r.case for r in here if r.case in old and worse(Seen.of(old[r.case]), Seen.of(r))}
    assert new == failing - old.keys() | worsened
    assert fixed == old.keys() - failing
    assert still == (failing & old.keys()) - worsened
    assert set(TargetResults(here, there).dropped) == {
        c for c, v in verdicts.items() if v == (Verdict.UNSUPPORTED, Verdict.PASS)
    }


def _give(release: Release, here: Mapping[str, Verdict], there: Mapping[str, Verdict]) -> None:
    """Results of CPU, as if its sweep had run."""
    release.it.results = _results(NEW, here)
    release.it.against = Against({})
    release.it.against.before = {(str(NEW), r.case): r for r in _results(OLD, there)}


def _found(kind: Fixed, here: Mapping[str, Verdict], there: Mapping[str, Verdict]) -> dict[str, State]:
    causes = Causes(seconds=1.0)
    causes.add(CPU, kind, _results(NEW, here), _results(OLD, there), 1.0)
    return {f.cause.id: f.state for f in causes.all()}


def test_a_cause_that_the_base_has_too_is_not_new() -> None:
    """A new failure whose case fails on the base by itself is still there; not one that only has other cases there."""
    kind = Fixed({NEW: frozenset({"ADD-1", "MUL-1", "SUB-1"}), OLD: frozenset({"MUL-1", "SUB-2"})})
    here = {"ADD-1": Verdict.FAIL, "MUL-1": Verdict.FAIL, "SUB-1": Verdict.FAIL, "SUB-2": Verdict.FAIL}
    there = {"ADD-1": Verdict.PASS, "MUL-1": Verdict.PASS, "SUB-1": Verdict.PASS, "SUB-2": Verdict.FAIL}
    assert _found(kind, here, there) == {"ADD": State.NEW, "MUL": State.STILL, "SUB": State.NEW}


class Once(Fixed):
    """A search in which a case that runs alone fails every other time."""

    def again(self, spec: Spec, case_id: str) -> Result:
        """Fail at first."""
        told = Fixed.again(self, spec, case_id)
        return told if len(self.again_of) % 2 else replace(told, verdict=Verdict.PASS)


def test_what_fails_at_times_is_not_new_if_both_builds_have_it() -> None:
    """A flaky case can pass in the only run on the base."""
    kind = Once({NEW: frozenset({"SUB-1"}), OLD: frozenset({"SUB-2"})})
    here = {"SUB-1": Verdict.FAIL, "SUB-2": Verdict.FAIL}
    assert _found(kind, here, {"SUB-1": Verdict.PASS, "SUB-2": Verdict.FAIL}) == {"SUB": State.STILL}


@dataclass
class AtTimes(Fixed):
    """A search in which the build's case fails alone as `turns` says, over and over, and the base's never."""

    turns: Sequence[bool] = ()

    def again(self, spec: Spec, case_id: str) -> Result:
        """Fail if it is the turn."""
        n = sum(s == spec for s, _ in self.again_of)
        fails_now = spec == NEW and self.turns[n % len(self.turns)]
        return replace(Fixed.again(self, spec, case_id), verdict=Verdict.FAIL if fails_now else Verdict.PASS)


@given(st.lists(st.booleans(), min_size=1, max_size=OFTEN))
def test_what_fails_at_times_on_one_build_is_new_if_it_is_not_by_chance(turns: list[bool]) -> None:
    """A case that died once and passes mostly proves nothing, however often the base passes."""
    kind = AtTimes(turns=turns)
    found = _found(kind, {"ADD-1": Verdict.FAIL}, {"ADD-1": Verdict.PASS})
    mine = [turns[n % len(turns)] for n in range(OFTEN)]
    if all(mine[:RIGHT]):
        assert found == {"ADD": State.NEW}
        assert len(kind.again_of) == 2 * RIGHT
    else:  # the probability that failures spread at random are all among the runs of the build
        chance = prod((OFTEN - k) / (2 * OFTEN - k) for k in range(sum(mine)))
        assert found == {"ADD": State.NEW if any(mine[:RIGHT]) and chance <= 0.01 else State.CHANGED}


@given(st.integers(1, 30), st.integers(1, 30))
def test_many_new_cases_beside_a_few_fixed_ones_are_new(new: int, fixed: int) -> None:
    """Unless builds that fail equally often would differ so much once in a hundred times."""
    here, there = ({f"ADD-{name}{k}" for k in range(n)} for name, n in (("new", new), ("old", fixed)))
    ids = here | there
    kind = Fixed({NEW: frozenset(here), OLD: frozenset(there)})
    found = _found(kind, *({i: Verdict.FAIL if i in bad else Verdict.PASS for i in ids} for bad in (here, there)))
    chances = np.ones(1)  # of so many heads of fair coins
    for _ in range(new + fixed):
        chances = np.convolve(chances, [0.5, 0.5])
    rare = bool(chances[new:].sum() <= 0.01)
    assert found == {"ADD": State.NEW if rare else State.STILL}


def test_a_failure_of_both_builds_has_its_cause_on_both() -> None:
    """On each device, so that no report lists the base's failure as unexplained."""
    causes, kind = Causes(seconds=1.0), Fixed()
    other = Target("CPU threads=8", Spec("ggml", (("threads", "8"),)), Spec("cpu"))
    for t in (CPU, other):
        assert t.base is not None
        causes.add(t, kind, _results(t.build, {"ADD-1": Verdict.FAIL}), _results(t.base, {"ADD-1": Verdict.FAIL}), 1.0)
    (found,) = causes.all()
    assert found.state is State.STILL
    assert list(found.cases) == [str(s) for t in (CPU, other) for s in t.specs]


@dataclass
class Deaths(Fixed):
    """A search whose failures have the cause that their detail names."""

    def find(self, results: Sequence[Result], _seconds: float) -> list[Cause]:
        """One cause for each message."""
        rows = {r.detail: [x for x in results if x.detail == r.detail] for r in results if fails(r)}
        return [
            Cause(f"dies-{text}", text, r[0].backend, Verdict.CRASH, "", text, (), tuple(x.case for x in r))
            for text, r in rows.items()
        ]


def _deaths(cases: Mapping[str, str]) -> list[Result]:
    return [
        Result(c, "x", Verdict.CRASH, error=Error(why)) if why else Result(c, "x", Verdict.PASS)
        for c, why in cases.items()
    ]


@pytest.mark.parametrize("base_dies_of", ["another", "one"])
def test_a_base_that_fails_otherwise_has_not_the_cause(base_dies_of: str) -> None:
    """A case that dies on both builds, of different things, does not make a cause old; it is one of the cause's."""
    causes = Causes(seconds=1.0)
    kind = Deaths({NEW: frozenset({"a", "b"}), OLD: frozenset({"a"})})
    causes.add(CPU, kind, _deaths({"a": "one", "b": "one"}), _deaths({"a": base_dies_of, "b": ""}), 1.0)
    found = [(f.cause.message, f.state, f.cause.cases) for f in causes.all()]
    if base_dies_of == "another":  # the smallest case is one that the base passes
        assert found == [("one", State.NEW, ("b", "a"))]
    else:
        assert [(m, s) for m, s, _ in found] == [("one", State.NEW)]


def test_what_fails_otherwise_on_the_base_in_each_case_is_worse() -> None:
    """It is not new, since no case of it passed; the note says how it is worse."""

    @dataclass
    class Both(Deaths):
        def again(self, spec: Spec, case_id: str) -> Result:
            return _deaths({case_id: "one" if spec == NEW else "another"})[0]

    causes = Causes(seconds=1.0)
    causes.add(CPU, Both(), _deaths({"a": "one"}), _deaths({"a": "another"}), 1.0)
    (found,) = causes.all()
    assert found.state is State.WORSE
    assert found.note == "a fails on the base, too: CRASH with another message than before"


def test_what_does_not_come_again_is_neither_new_nor_fixed() -> None:
    """A failure that is right by itself on the side that had it proves nothing about the builds."""
    here, there = {"ADD-1": Verdict.FAIL, "SUB-1": Verdict.PASS}, {"ADD-1": Verdict.PASS, "SUB-1": Verdict.FAIL}
    assert _found(Fixed(), here, there) == {"ADD": State.CHANGED, "SUB": State.CHANGED}
    assert _found(Fixed({NEW: frozenset({"ADD-1"}), OLD: frozenset({"SUB-1"})}), here, there) == {
        "ADD": State.NEW, "SUB": State.FIXED,
    }  # fmt: skip


def test_what_is_late_is_confirmed_once() -> None:
    """A cause is called new only after a run on both sides, even when time is over.

    A fixed one costs no run then.
    """
    for seconds, runs in ((1.0, 2 * RIGHT), (0.0, 2)):
        kind, causes = Fixed({NEW: frozenset({"ADD-1"})}), Causes(seconds=seconds, clock=lambda: 0.0)
        causes.add(CPU, kind, _results(NEW, {"ADD-1": Verdict.FAIL}), _results(OLD, {"ADD-1": Verdict.PASS}), 1.0)
        assert [f.state for f in causes.all()] == [State.NEW]
        assert len(kind.again_of) == runs
    kind, causes = Fixed(), Causes(seconds=0.0, clock=lambda: 0.0)
    causes.add(CPU, kind, _results(NEW, {"ADD-1": Verdict.PASS}), _results(OLD, {"ADD-1": Verdict.FAIL}), 1.0)
    assert [(f.state, f.note) for f in causes.all()] == [(State.FIXED, "not run again (time limit)")]
    assert kind.again_of == []


@pytest.mark.parametrize(("late", "runs"), [(5.0, 0), (1.9, 1)])
def test_no_cause_is_confirmed_once_the_budget_is_used(late: float, runs: int) -> None:
    """It keeps its state with a note, and so does one whose run may have been cut short by the end."""
    ticks = iter([0.0, 0.0, 0.0, 0.0, late])
    kind, causes = Fixed(), Causes(seconds=1.0, grace=1.0, clock=lambda: next(ticks, 5.0))
    causes.add(CPU, kind, _results(NEW, {"ADD-1": Verdict.FAIL}), _results(OLD, {"ADD-1": Verdict.PASS}), 1.0)
    assert [(f.state, f.note) for f in causes.all()] == [(State.NEW, NOT_AGAIN)]
    assert len(kind.again_of) == runs


def test_one_fault_on_two_devices_is_one_cause() -> None:
    """What failed alike on the first device is not analysed again on the second."""
    kind, causes = Fixed({NEW: frozenset({"ADD-1"})}), Causes(seconds=1.0)
    other = Target("CPU threads=8", Spec("ggml", (("lib", "/new"), ("threads", "8"))), None)
    for target in (CPU, other):
        here = _results(target.build, {"ADD-1": Verdict.FAIL})
        causes.add(target, kind, here, _results(OLD, {"ADD-1": Verdict.PASS}), 1.0)
    (found,) = causes.all()
    assert found.cases == {str(NEW): ["ADD-1"], str(other.build): ["ADD-1"]}
    assert (found.state, found.devices) == (State.NEW, ["CPU", "CPU threads=8"])


@dataclass
class Timed(Fixed):
    """A search that notes the time of each."""

    seconds: list[float] = field(default_factory=list)

    def find(self, results: Sequence[Result], _seconds: float) -> list[Cause]:
        """Note the seconds, and search as `Fixed` does."""
        self.seconds.append(_seconds)
        return super().find(results, _seconds)


def test_time_goes_where_failures_are() -> None:
    """A device whose failures others have leaves the time to the first; many new failures get more than an old one."""
    kind, causes = Timed(), Causes(seconds=100.0, clock=lambda: 0.0)
    new = {f"ADD-{i}": Verdict.FAIL for i in range(29)}
    there = _results(OLD, {**dict.fromkeys(new, Verdict.PASS), "MUL-1": Verdict.FAIL})
    targets = [CPU, *(Target(f"CPU threads={n}", Spec("ggml", (("threads", n),)), None) for n in "89")]
    causes.add_all([(t, _results(t.build, {**new, "MUL-1": Verdict.FAIL}), there) for t in targets], kind)
    assert len(kind.seconds) == 2, "the failures of the others are known"
    assert kind.seconds[0] > 70


@dataclass
class Searched(Fixed):
    """A search that finds other causes on each device, as its cases are others."""

    rules: Mapping[str, Sequence[tuple[str, tuple[Condition, ...]]]] = field(default_factory=dict)
    """First case of a cause -> id and rule of each of the causes of that device."""

    def find(self, results: Sequence[Result], _seconds: float) -> list[Cause]:
        """One cause for each failure."""
        failed = list(filter(fails, results))
        rows = zip(self.rules[failed[0].case], failed, strict=True)
        return [Cause(i, i, r.backend, Verdict.FAIL, "ADD", "", rule, (r.case,)) for (i, rule), r in rows]


def test_alike_causes_of_two_devices_are_one() -> None:
    """Rules that differ in a size or a value belong to one cause; two causes of one search stay two."""

    def rule(key: str, value: str, size: str) -> tuple[Condition, ...]:
        return Condition("op", "ADD"), Condition(key, value), Condition("src[0].ne[0]", size)

    first = [("ADD-1", rule("src[0].type", "f16", "> 32")), ("ADD-2", rule("src[0].layout", "rows", "> 32"))]
    second = [("ADD-3", rule("src[0].type", "f16|bf16", "> 64")), ("ADD-4", rule("src[0].type", "f16", "> 1"))]
    kind = Searched({NEW: frozenset("abcd")}, rules={"a": first, "c": second})
    causes, other = Causes(seconds=1.0), Target("CPU threads=8", NEW, None)
    causes.add(CPU, kind, _results(NEW, dict.fromkeys("ab", Verdict.FAIL)), [], 1.0)
    causes.add(other, kind, _results(NEW, dict.fromkeys("cd", Verdict.FAIL)), [], 1.0)
    assert {f.cause.id: f.devices for f in causes.all()} == {
        "ADD-1": ["CPU", "CPU threads=8"], "ADD-2": ["CPU"], "ADD-4": ["CPU threads=8"],
    }  # fmt: skip


def test_a_fault_under_a_software_driver_may_be_the_drivers() -> None:
    """Wrong numbers there alone may be; what fails elsewhere too, or fails an assertion of ggml's own, is not."""
    gpu = Target("Vulkan0", NEW, OLD, software=True)
    wrong = Cause("ADD", "", "ggml", Verdict.FAIL, "ADD", "", (), ("ADD-1",))
    died = replace(
        wrong, verdict=Verdict.CRASH, message="its process died (SIGABRT)): ggml-vulkan.cpp:#: GGML_ASSERT(x)"
    )
    assert SharedCause(wrong, State.NEW, ["Vulkan0"]).at([CPU, gpu]) == "library or its software driver"
    assert SharedCause(wrong, State.NEW, ["Vulkan0", "CPU"]).at([CPU, gpu]) == "library"
    assert SharedCause(died, State.NEW, ["Vulkan0"]).at([CPU, gpu]) == "library"


def test_targets_are_the_devices_that_both_builds_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is tested with more threads, guards and its own kernels for weights; a device of one build has no base."""
    monkeypatch.chdir(tmp_path)  # a guide makes folders of these names in the checkout
    here = _build(
        "new", _device("CPU", "CPU", "CPU", "CPU_REPACK"), _device("BLAS", "ACCEL"), _device("Vulkan0", "GPU")
    )
    found = {t.name: t for t in targets(here, _build("old", _device("CPU", "CPU", "CPU")))}
    assert list(found) == ["CPU", "CPU threads=8", GUARD, REPACK, f"{REPACK} threads=8", "BLAS", "Vulkan0"]
    assert [n for n, t in found.items() if t.base] == ["CPU", "CPU threads=8", GUARD]
    assert str(found["BLAS"].build) == "ggml?lib=new&device=BLAS&mode=sched"
    assert [t.name for t in targets(here, None, ["cpu t"])] == ["CPU threads=8"]
    several = replace(here, devices=here.devices[:1], variants=("haswell", "zen4"), server=True, meta=True)
    runs = {t.name: " ".join(sorted(t.runs)) for t in targets(several, None)}
    assert runs == {
        "CPU": "models ops trajectories", "CPU threads=8": "ops", GUARD: "ops",
        REPACK: "ops trajectories", f"{REPACK} threads=8": "ops",
        "CPU+CPU": "models", "RPC0": "models ops trajectories", "CPU variant=haswell": "ops", "CPU variant=zen4": "ops",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"device Metal expected; it has CPU, .*Vulkan0"):
        targets(here, None, ["Metal"])


def test_every_case_of_a_level_is_planned_once() -> None:
    """What a lower level ran does not run again; whole models run once, where the build can."""
    work = plan([CPU], "standard", models=False)
    ids = [i for w in work for i in w.left]
    assert len(ids) == len(set(ids))
    assert [w.stage for w in work] == ["ops at smoke", "order", "functions", "trajectories at smoke", "audit",
                                       "ops at standard", "trajectories at standard"]  # fmt: skip
    kernels = replace(CPU, name="CPU threads=8", runs=KERNELS)
    assert [w.stage for w in plan([kernels], "smoke", models=False)] == ["ops at smoke"]
    with_models = plan([CPU], "smoke", models=True)
    assert [w.stage for w in with_models] == ["ops at smoke", "order", "functions", "memory", "trajectories at smoke",
                                              "audit", "arch"]  # fmt: skip


def test_the_scheduler_is_tested_at_the_level_asked_for() -> None:
    """All cases of `order` at level standard run early, and memory is also measured on `CPU+CPU`."""
    meta = replace(CPU, name="CPU+CPU", runs=frozenset({"models"}))
    work = {(w.target.name, w.stage): w.left for w in plan([CPU, meta], "standard", models=True)}
    assert work["CPU", "order"] == list(order.FAMILY.ids("standard"))
    assert "order/sched-refuse=RMS_NORM,host=1,side=1,lazy=last@1" in work["CPU", "order"]
    assert work["CPU+CPU", "memory"] == work["CPU", "memory"]
    assert list(work).index(("CPU", "order")) < list(work).index(("CPU", "ops at standard"))


def test_changed_code_comes_first() -> None:
    """Then a case of each other op, what takes a minute, and the rest; no case is planned twice, and none is lost."""
    other = Target("CPU threads=8", Spec("ggml", (("lib", "/new"), ("threads", "8"))), None, KERNELS)
    ids = case_ids(["ops"], ["ops/ROPE-*", "ops/MUL_MAT-*"], "standard")
    work = plan([CPU, other], "standard", models=False, changed={str(CPU.build): ids})
    assert [(w.target.name, w.stage) for w in work[:4]] == [
        ("CPU", "changed code"), ("CPU", "an op each"), ("CPU threads=8", "an op each"), ("CPU", "order"),
    ]  # fmt: skip
    assert work[0].left == ids[:FIRST]
    assert next(w.left for w in work if w.stage == "more of changed code") == ids[FIRST:]
    ops = [i.partition("-")[0] for i in work[1].left if i.startswith("ops/")]
    assert len(ops) == len(set(ops)) > 100
    assert "ops/ROPE" not in ops
    usual = plan([CPU, other], "standard", models=False)
    for target in (CPU, other):
        of = [[i for w in works for i in w.left if w.target is target] for works in (work, usual)]
        assert len(set(of[0])) == len(of[0])
        assert set(of[0]) == set(of[1])
    assert plan([CPU], "smoke", models=False, changed={}) == plan([CPU], "smoke", models=False)
    stages = {w.stage: w.left for w in plan([CPU], "smoke", models=True, changed={str(CPU.build): ids})}
    assert list(stages).index("scenario") < list(stages).index("more of changed code")


@given(st.lists(st.sampled_from(arch.FEW), min_size=1, unique=True), st.integers(1, 500))
def test_a_short_run_asks_every_scenario_and_every_kind_of_memory(archs: list[str], n: int) -> None:
    """In any part of the order no scenario has two cases more than another, and few models are loaded."""
    ids = scenario.in_turns(archs)
    assert sorted(ids) == sorted(i for a in archs for i in scenario.ids_of(a))
    counts = Counter(i.partition("do=")[2] for i in ids[:n])
    assert max(counts.values()) - min(counts[i.partition("do=")[2]] for i in scenario.ids_of(archs[0])) <= 1
    models = [i.partition("/")[2].partition("-real")[0] for i in ids]
    assert sum(a != b for a, b in pairwise(models)) < len(archs) ** 2
    assert set(models[: len(scenario.ids_of(archs[0]))]) == set(archs)


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 99)), unique=True))
def test_each_op_has_its_share_however_short_the_time(drawn: list[tuple[str, int]]) -> None:
    """Whatever part of the order runs, no op has two cases more than another that has any left."""
    ids = [f"ops/{op}-x={i}@1" for op, i in drawn]
    order = spread(ids)
    assert sorted(order) == sorted(ids)
    for n in range(len(order)):
        ran, left = (Counter(i.partition("-")[0] for i in part) for part in (order[:n], order[n:]))
        assert all(ran[op] >= max(ran.values(), default=0) - 1 for op in left)


def test_what_is_new_of_an_op_comes_early() -> None:
    """Cases with a new type, stride or parameter value come before more of the same.

    Values of other stages count; what brings more new ones comes first, else the order stays.
    """
    same = [f"ops/L2_NORM-f32-ne={n}x5,eps=1e-5@1" for n in range(30, 40)]
    new = "ops/L2_NORM-f32-ne=33x4,eps=10.0@1"
    more = "ops/L2_NORM-f32-ne=33x4,vne=slab,eps=0.1@1"
    wide = "ops/L2_NORM-f32-ne=3x65537,eps=1e-5@1"
    assert spread([*same, wide, new, more], before=["ops/L2_NORM-f32-ne=40x5,eps=1e-5@1"]) == [more, wide, new, *same]
    assert spread([new, *same], before=[new]) == [same[0], new, *same[1:]]
    tests = [f"tbo/TOPK_MOE(ne=[{n},8,1,1],bias={n % 2})@0" for n in (2, 4, 5)]
    assert spread([*tests, same[0]]) == [tests[0], same[0], tests[2], tests[1]]
    assert spread([*same, new], before=["ops/NORM-f32-ne=33x4,eps=10.0@1"])[:2] == [same[0], new]


def test_a_buffer_type_runs_the_ops_that_have_kernels_for_it() -> None:
    """Other ops have the kernels of the CPU, which runs all; trajectories run on both."""
    repack = replace(CPU, name=REPACK, kernels=frozenset({"MUL_MAT"}))
    of = {(w.target.name, w.stage): w.left for w in plan([CPU, repack], "smoke", models=False)}
    every, own = of["CPU", "ops at smoke"], of[REPACK, "ops at smoke"]
    assert own == [i for i in every if "/MUL_MAT" in i]
    assert {i.split("-")[0] for i in own} == {"ops/MUL_MAT", "ops/MUL_MAT_ID"}
    assert of["CPU", "trajectories at smoke"] == of[REPACK, "trajectories at smoke"] != []
    assert of_ops(["tbo/MUL_MAT_ID_FUSION(n=1)@0", "ops/MUL-f32@1"], {"MUL_MAT"}) == ["tbo/MUL_MAT_ID_FUSION(n=1)@0"]


class Hangs(Runner):
    """Each case of SQR hangs."""

    def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        """Nothing else is wrong."""
        return [
            Result(c.id, str(spec), Verdict.TIMEOUT if "/SQR-" in c.id else Verdict.PASS) for c in cases
        ]  # fmt: skip


def test_an_op_that_hangs_takes_no_more_time() -> None:
    """Its other cases do not run, and the record says which and why; other ops run all the same."""
    ids = [f"ops/{op}-f32-ne={n}x5@1" for n in range(10, 40) for op in ("SQR", "SQRT")]
    target, slow = Target("CPU", Spec("cpu"), None), set[str]()
    sweep = Sweep(target, "ops", spread(ids))
    release = Release(_build(), None, [target], [sweep], 1.0, Isolation(), Fixed())
    release.it.runner = Hangs()
    sweep.run(Player(release.it, (), 1), 60.0, slow)
    ran = Counter(r.verdict for r in release.results(target)[0])
    assert (ran[Verdict.PASS], sweep.left) == (30, [])
    assert ran[Verdict.TIMEOUT] + len(sweep.hung["ops/SQR"]) == 30
    assert ran[Verdict.TIMEOUT] <= 8
    assert release.not_run()[0].startswith("CPU: ops: ops/SQR, ")
    assert [m.case for m in release.missing()] == sweep.hung["ops/SQR"]
    release.it.results.clear()
    Sweep(replace(target, name="CPU threads=8"), "ops", spread(ids)).run(Player(release.it, (), 1), 60.0, slow)
    assert [r.verdict for r in release.it.results][:30] == [Verdict.PASS] * 30, "what hung before comes last"


def test_what_ran_before_an_interrupt_is_not_missing() -> None:
    """Ctrl-C in the middle of a stage leaves the cases that have no result, and ends with 5."""
    target, ids = Target("CPU", Spec("cpu"), None), [f"ops/SQR-f32-ne={n}x5@1" for n in range(10, 40)]

    class Interrupted(Runner):
        def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
            if any("=20x" in c.id for c in cases):
                raise KeyboardInterrupt
            return _results(spec, {c.id: Verdict.PASS for c in cases})

    release = Release(_build(), None, [target], [Sweep(target, "ops", list(ids))], 60.0, Isolation(), Fixed())
    release.it.runner = Interrupted()
    release.run()
    ran = [r.case for r in release.results(target)[0]]
    assert ran
    assert [*ran, *(m.case for m in release.missing())] == ids
    assert release.outcome().exit_code == 5


def test_a_base_on_which_an_op_hangs_takes_no_more_time() -> None:
    """The same where it hangs on the base alone."""
    ids = [f"ops/SQR-f32-ne={n}x5@1" for n in range(10, 40)]
    target = Target("CPU", Spec("cpu"), Spec("ggml"))
    sweep = Sweep(target, "ops", list(ids))
    release = Release(_build(), _build("old"), [target], [sweep], 1.0, Isolation(), Fixed())

    class Old(Hangs):
        def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
            return (
                super().run(spec, cases) if spec == target.base else _results(spec, {c.id: Verdict.PASS for c in cases})
            )

    release.it.runner = Old()
    sweep.run(Player(release.it, (), 1), 60.0, set())
    build, base = release.results(target)
    assert len(build) == len(base) <= 8
    assert len(sweep.hung["ops/SQR"]) + len(base) == len(ids)
    assert release.outcome().exit_code == 5, "cases that did not run"


class Ends(Runner):
    """The time of the run is over in the middle of the second group on `late`; the clock ticks as a backend opens."""

    def __init__(self, late: Spec | None = None) -> None:
        super().__init__()
        self.late, self.over, self.now = late, False, 0.0

    def run(self, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        """Its second half times out."""
        self.over |= spec == self.late and len(cases) > 1
        cut = len(cases) // 2 if self.over and spec == self.late else len(cases)
        return [Result(c.id, str(spec), Verdict.TIMEOUT if n >= cut else Verdict.PASS) for n, c in enumerate(cases)]

    def is_over(self) -> bool:
        """True from then on."""
        return self.over

    def batch_size(self, spec: Spec) -> int:  # noqa: ARG002
        """Return any size above that of the second group."""
        return 8

    def backend(self, spec: Spec) -> None:  # type: ignore[override]  # noqa: ARG002  # a sweep ignores the result
        """Opening takes 10 s."""
        self.now += 10


@pytest.mark.parametrize("late", [NEW, OLD], ids=["build", "base"])
def test_a_request_cut_off_by_the_end_of_the_time_is_no_timeout(late: Spec) -> None:
    """On the build, its case has no result; on the base, neither has it: it would look new."""
    ids = [f"ops/SQR-f32-ne={n}x5@1" for n in range(10, 40)]
    sweep, runner = Sweep(CPU, "ops", list(ids)), Ends(late)
    release = Release(_build(), _build("old"), [CPU], [sweep], 1.0, Isolation(), Fixed())
    release.it.runner, release.it.clock = runner, lambda: runner.now + (100 if runner.over else 0)
    sweep.run(Player(release.it, (), 1), 60.0, set())
    build, base = release.results(CPU)
    assert [r.case for r in build] == [r.case for r in base] == ids[:2]
    assert {r.verdict for r in (*build, *base)} == {Verdict.PASS}
    assert (sweep.left, sweep.hung) == (ids[2:], {})


def test_the_time_of_a_sweep_includes_the_start_of_its_backends() -> None:
    """No case runs once they have taken it."""
    runner, sweep = Ends(), Sweep(CPU, "ops", ["ops/SQR-f32-ne=10x5@1"])
    release = Release(_build(), _build("old"), [CPU], [sweep], 1.0, Isolation(), Fixed())
    release.it.runner, release.it.clock = runner, lambda: runner.now
    sweep.run(Player(release.it, (), 1), 20.0, set())
    assert (release.results(CPU), len(sweep.left)) == (([], []), 1)


def test_a_target_that_does_not_open_ends_alone() -> None:
    """The others run; its cases are lost with the reason, the outcome fails, and nothing waits for it again."""
    ids = ["ops/ADD-f32+f32-a=10x5x4x3,b=10x5x4x3@1", "ops/SQR-f32-ne=10x5@1"]
    dead, cpu = Target("GPU", Spec("ggml", (("lib", "/nowhere"),)), None), Target("CPU", Spec("cpu"), None)
    work = [Sweep(t, stage, [i]) for stage, i in zip(("ops", "more"), ids, strict=True) for t in (dead, cpu)]
    release = Release(_build(), None, [dead, cpu], work, 600.0, Isolation(), Cases(Isolation()))
    release.run()
    assert [r.case for r in release.results(cpu)[0]] == ids
    assert (release.results(dead)[0], [m.case for m in release.missing()]) == ([], ids)
    assert {(m.backend, m.cause) for m in release.missing()} == {(str(dead.build), MissingCause.LOST)}
    assert all("/nowhere" in m.reason for m in release.missing())
    (line,) = release.outcome().lines()
    assert line.startswith("GPU: not tested to the end: ")
    assert "/nowhere" in line
    assert release.outcome().exit_code == 1


def test_a_device_that_cannot_be_measured_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a measured profile no case is judged; other targets run."""
    monkeypatch.setattr(
        "conformance.llama.release.profiles.learn.plain", lambda *_: {}
    )  # to list its cases takes seconds
    gpu = Target(
        "GPU", Spec("ggml", (("lib", "/nowhere"), ("device", "X"), ("profile", str(tmp_path / "x.toml")))), None
    )
    cpu = Target("CPU", Spec("cpu"), None)
    work = [Sweep(t, "ops", ["ops/SQR-f32-ne=10x5@1"]) for t in (gpu, cpu)]
    profiles = Profiles(tmp_path, Isolation())
    release = Release(
        _build(), None, [gpu, cpu], work, 600.0, Isolation(), Cases(Isolation()), profiles=profiles, learning=0.3
    )
    release.run()
    assert [t.name for t in release.targets if release.results(t)[0]] == ["CPU"]
    assert "/nowhere" in release.stages.broken["GPU"]
    assert release.to_json()["devices"][0]["note"] == release.stages.broken["GPU"]
    assert release.outcome().exit_code == 1


def test_failures_of_a_backend_that_no_longer_opens_are_grouped_by_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are causes all the same, one for each op and message."""
    monkeypatch.setattr("conformance.causes.analyse.confirm", lambda *_, **__: {})  # two dozen processes
    spec = Spec("ggml", (("lib", "/nowhere"),))
    died = [Result(i, str(spec), Verdict.CRASH, error=Error("SIGABRT: x.cpp:7: no")) for i in (SQR, SQR + "2")]
    died += [Result("ops/ADD-f32+f32-a=10x5x4x3,b=10x5x4x3@1", str(spec), Verdict.FAIL)]
    found = {(c.op, c.verdict, c.cases) for c in Cases(Isolation()).find(died, 60.0)}
    assert found == {("SQR", Verdict.CRASH, (SQR, SQR + "2")), ("ADD", Verdict.FAIL, (died[2].case,))}
    where = Place(Fault.UNLOCATED, 0)
    (wrong,) = Cases(Isolation()).find([replace(died[2], where=where)], 0.0)
    assert wrong.sentence == "ADD: FAIL: wrong numbers: unlocated (1 case)"


def _clock(step: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def test_a_stage_is_shared_by_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target with a few ops leaves its time to one that runs all."""
    now, given = [0.0], dict[str, float]()

    def run(sweep: Sweep, _it: TestRun, seconds: float, _slow: set[str]) -> None:
        given[sweep.target.name] = seconds
        now[0] += seconds
        sweep.left.clear()

    monkeypatch.setattr(Sweep, "run", run)
    work = [Sweep(CPU, "ops", ["x"] * 300), Sweep(replace(CPU, name=REPACK), "ops", ["x"] * 100)]
    Release(_build(), None, [CPU], work, 100.0, Isolation(), Fixed(), clock=lambda: now[0]).run()
    assert given == pytest.approx({"CPU": 45.0, REPACK: 15.0})


def test_what_the_time_leaves_out_is_said() -> None:
    """A sweep ends with its time; the record has what did not run, and each result there is."""
    here, there = (
        Target("CPU", Spec("cpu"), Spec("ggml")),
        ["ops/ADD-f32+f32-a=10x5x4x3,b=10x5x4x3@1", "ops/SQR-f32-ne=10x5@1"],
    )
    sweep = Sweep(here, "ops", list(there))
    release = Release(_build(), None, [here], [sweep], 1.0, Isolation(), Fixed(), clock=_clock(0.4).__next__)
    release.run()
    assert [m.case for m in release.missing()] == sweep.left
    assert sweep.left
    sweep = Sweep(here, "ops", list(there))
    release = Release(_build(), None, [here], [sweep], 600.0, Isolation(), Cases(Isolation()))
    release.run()
    assert (release.to_json()["causes"], release.unproven(), release.missing()) == ([], [], [])
    (absent,) = release.not_run()
    assert "Vulkan" in absent, "what this machine has not is said"
    assert [len(rows) for rows in release.results(here)] == [len(there)] * 2


def test_architectures_without_a_model_are_named() -> None:
    """An architecture of the build that the suite does not know is printed; one that it knows is not."""
    build = replace(_build(), architectures=("llama", "clip", "one-of-next-year"))
    release = Release(build, None, [], [], 1.0, Isolation(), Fixed())
    assert [line for line in release.not_run() if "architectures" in line] == [
        "one-of-next-year: architectures of the build for which the suite has no model"
    ]


def test_the_outcome_of_a_release() -> None:
    """A new cause and a newly refused case fail it; left out cases make it incomplete.

    A device on which no case passed is named.
    """
    there = {"ADD-1": Verdict.PASS, "MUL-1": Verdict.PASS}

    def code(here: Mapping[str, Verdict], left: Sequence[str] = (), *, interrupted: bool = False) -> int:
        kind, causes = Fixed({NEW: frozenset(i for i, v in here.items() if v is Verdict.FAIL)}), Causes(seconds=1.0)
        sweep = Sweep(CPU, "ops", list(left))
        release = Release(_build(), _build("old"), [CPU], [sweep], 1.0, Isolation(), kind, interrupted=interrupted)
        _give(release, here, there)
        causes.add(CPU, kind, *release.results(CPU), 1.0)
        release.found = causes.all()
        return release.outcome().exit_code

    assert code(there) == 0
    assert code({**there, "MUL-1": Verdict.FAIL}) == code({**there, "MUL-1": Verdict.FAIL}, ["SUB-1"]) == 1
    assert code({**there, "MUL-1": Verdict.UNSUPPORTED}) == 1
    assert code(there, ["SUB-1"]) == code(there, interrupted=True) == code({}, ["SUB-1"]) == 5
    assert code({}) == code({"SUB-1": Verdict.UNSUPPORTED}) == 3


@pytest.mark.parametrize(
    ("here", "there", "left", "says"),
    [
        ({}, {}, ("SUB-1",), "no cases ran: 1 case: time limit (--budget)"),
        ({"A": Verdict.UNSUPPORTED}, {"A": Verdict.PASS}, (), "no cases ran: 1 case UNSUPPORTED"),
        ({}, {}, (), "no cases ran: none was planned"),
        ({"A": Verdict.PASS}, {"A": Verdict.UNSUPPORTED}, (), "no failures; no cases ran on old"),
        ({"A": Verdict.PASS}, {"A": Verdict.PASS}, (), "no failures in either build"),
        ({"A": Verdict.PASS}, {"A": Verdict.FAIL}, (), "1 failure, no cause was found"),
    ],
)
def test_no_failures_is_said_of_cases_that_ran(
    here: Mapping[str, Verdict], there: Mapping[str, Verdict], left: Sequence[str], says: str
) -> None:
    """Where no case ran, or a failure has no cause, no sentence says that there are no failures; no code is 0."""
    release = Release(_build(), _build("old"), [CPU], [Sweep(CPU, "ops", list(left))], 1.0, Isolation(), Fixed())
    _give(release, here, there)
    assert release.without_causes() == says
    assert (release.outcome().exit_code == 0) == ("no cases ran:" not in says)


def test_bisecting_a_case_that_every_build_refuses_says_so() -> None:
    """A case that did not run proves no build right."""
    builds = [_build(f"b{i}") for i in range(2)]
    found = bisect("ADD-1", NEW, builds, lambda spec, case: Result(case, str(spec), Verdict.UNSUPPORTED))
    assert (found.found, found.sentence()) == (False, "the case ran in none of the tested builds: b0, b1")


def test_a_report_of_a_cut_off_run_ends_like_the_run(tmp_path: Path) -> None:
    """With 5, although the old build has failures that the new one has no longer."""
    release = Release(_build(), _build("old"), [CPU], [Sweep(CPU, "ops", ["SUB-1"])], 1.0, Isolation(), Fixed())
    _give(release, {"ADD-1": Verdict.PASS}, {"ADD-1": Verdict.FAIL})
    path = made(tmp_path)
    write(release, [path])
    assert release.outcome().exit_code == 5
    assert outcome_of(read_runs([path])).exit_code == 5


def test_the_page_of_a_release_shows_each_cause_and_its_state(tmp_path: Path) -> None:
    """Its run file can be read again, has what did not run, and its causes say what they are of the two builds."""
    kind, causes = Fixed({NEW: frozenset({"ADD-1"})}), Causes(seconds=1.0)
    release = Release(_build(), _build("old"), [CPU], [Sweep(CPU, "ops", ["SUB-1"])], 1.0, Isolation(), Fixed())
    _give(release, {"ADD-1": Verdict.FAIL}, {"ADD-1": Verdict.PASS})
    causes.add(CPU, kind, *release.results(CPU), 1.0)
    release.found = causes.all()
    path = made(tmp_path / "page")
    write(release, [path])
    page, summary = write_page(path.parent, [path])
    assert (path.name, page.name) == ("run.json", "index.html")
    assert "new: ADD is wrong" in summary.read_text()
    (cause,) = causes_of(path)
    assert (cause.id, cause.smallest, cause.backend, cause.state) == ("ADD", "ADD-1", str(NEW), "new")
    assert "1 new: ADD is wrong" in summary.read_text(), "the state is told once"
    document = json.loads(path.read_text())
    assert [m["case"] for m in document["missing"]] == ["SUB-1"]
    assert document["builds"]["causes"][0]["state"] == "new"


def test_planned_cases_are_counted_in_the_record(tmp_path: Path) -> None:
    """Not listed: the record of a short run has a row per family; its level tells which cases they are."""
    ids = [f"ops/ADD-{k}@1" for k in range(20_000)]
    work = [Sweep(CPU, "ops at standard", ids), Sweep(CPU, "trajectories at standard", ["gqa/x@1"])]
    release = Release(_build(), None, [CPU], work, 1.0, Isolation(), Fixed())
    _give(release, {"ops/SUB@1": Verdict.PASS}, {})
    path = made(tmp_path)
    write(release, [path])
    (page, _) = write_page(tmp_path, [path])
    assert max(path.stat().st_size, page.stat().st_size) < 200_000
    runs = read_runs([path])
    assert [(m.value.case, m.value.count) for m in runs.missing] == [("ops/*", 20_000), ("gqa/x@1", 1)]
    record = runs.documents[0].record
    assert record.asked == {str(NEW): 20_002}
    assert record.selection is not None
    assert record.selection.levels == {str(NEW): "standard"}


def test_a_killed_release_leaves_its_results(tmp_path: Path) -> None:
    """Results are on disk at once, and a report of the folder has them and says that the run was killed.

    The next run keeps them under another name, and the record replaces its own.
    """
    ids = ["ops/ADD-f32+f32-a=10x5x4x3,b=10x5x4x3@1", "ops/SQR-f32-ne=10x5@1"]
    target = Target("CPU", Spec("cpu"), None)
    path = made(tmp_path)

    assert begin([path]) == []
    assert read_runs([tmp_path]).documents[0].record.interrupted, "a kill before the build was inspected"

    def begun() -> Release:
        return Release(_build(), None, [target], [Sweep(target, "ops", ids)], 1.0, Isolation(), Fixed(), path=path)

    killed = begun()
    assert [r.case for _, r in killed.it.play(target.build, ids[:1])] == ids[:1]
    runs = read_runs([tmp_path])
    assert [r.value.case for r in runs.results] == ids[:1]
    assert [(m.value.case, m.value.cause) for m in runs.missing] == [(ids[1], MissingCause.LOST)]
    assert f"**{INTERRUPTED}**" in markdown(runs)
    os.close(killed.it.journal._descriptor)  # type: ignore[arg-type]  # as the end of its process does
    assert "its 1 results are in" in begin([path])[0]
    again = begun()
    assert again.it.left == []
    write(again, [path])
    (document,) = read_runs([tmp_path]).documents
    assert (document.path, document.record.interrupted) == (path, None)
    (aside,) = tmp_path.glob("*.jsonl")
    assert [r.value.case for r in read_runs([aside]).results] == ids[:1]


@given(st.integers(2, 40), st.data())
def test_bisecting_finds_the_first_build_that_has_it(n: int, data: st.DataObject) -> None:
    """In as many runs as halving takes, wherever it begins."""
    first = data.draw(st.integers(0, n))
    builds = [_build(f"b{i}") for i in range(n)]
    spec = Spec("ggml", (("lib", "/x"), ("device", "Vulkan0")))
    kind = Fixed({on(spec, b): frozenset({"ADD-1"}) for b in builds[first:]})
    found = bisect("ADD-1", spec, builds, kind.again)
    assert len(kind.again_of) <= 2 + n.bit_length()
    expected = {0: "in every tested build, from b0 on", n: "in none of the tested builds: b0"}
    assert expected.get(first, f"b{first} is the first build with it") in found.sentence()


def test_bisecting_finds_where_a_fault_was_mended() -> None:
    """Where the newest build is right, the answer is the last that is not."""
    builds = [_build(f"b{i}") for i in range(6)]
    kind = Fixed({on(NEW, b): frozenset({"ADD-1"}) for b in builds[:3]})
    assert bisect("ADD-1", NEW, builds, kind.again).sentence() == "b2 is the last build with it, b3 no longer has it"


class Counted(Bench):
    """A bench that runs nothing: each build has a number of instructions, or cannot be counted (0)."""

    def __init__(self, instructions: Mapping[Spec, int]) -> None:
        self._instructions = instructions

    def result(self, unit: Unit, spec: Spec) -> Result:
        """Return PASS without running the case."""
        return Result(unit.case_id, str(spec), Verdict.PASS)

    def count(self, row: Row, tool: Tool = callgrind) -> None:  # noqa: ARG002  # as in a bench
        """Add the build's number, if it has one."""
        if n := self._instructions[row.backend]:
            row.counts = Counts(n, 0, 0)
            row.result = replace(row.result, metrics=row.counts.metrics())


UNIT = next(iter(BY_ID.values()))


@given(n=st.integers(2, 9), data=st.data())
def test_bisecting_finds_the_first_build_that_executes_more(n: int, data: st.DataObject) -> None:
    """Each build is compared with the first one; 0.1 % more is no difference, 2 % more is one."""
    first = data.draw(st.integers(1, n))
    builds = [_build(f"b{i}") for i in range(n)]
    more = {on(NEW, b): 1_020_000 if i >= first else 1_000_000 + 1000 * (i > 0) for i, b in enumerate(builds)}
    found = bisect(UNIT.id, NEW, builds, Counting(Counted(more), UNIT).run)
    wanted = f"b{first} is the first build with it" if first < n else "in none of the tested builds"
    assert wanted in found.sentence()


def test_a_first_build_that_cannot_be_counted() -> None:
    """There is nothing to compare with, and the message names the build."""
    builds = [_build("b0"), _build("b1")]
    nothing = Counting(Counted(dict.fromkeys((on(NEW, b) for b in builds), 0)), UNIT)
    with pytest.raises(UnavailableError, match=r"lib=/b0: .*nothing to compare with"):
        bisect(UNIT.id, NEW, builds, nothing.run)


@pytest.mark.parametrize(
    ("new", "verdict", "code"), [(1_000_900, Verdict.PASS, 3), (1_020_000, Verdict.FAIL, 1), (0, Verdict.PASS, 3)]
)
def test_a_build_that_executes_more_than_its_base_fails(
    new: int, verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result has counts, ratio and verdict, of the CPU alone; one not counted is no failure."""
    monkeypatch.setattr(counting, "Bench", lambda *_: Counted({OLD: 1_000_000, NEW: new}))
    on = [CPU, replace(CPU, name=REPACK)]
    release = Release(_build(), _build("old"), on, [], 60.0, Isolation(), Fixed(), units=[UNIT])
    release.run()
    base, build = release.counted.results
    assert (base.backend, base.verdict, base.metrics["instructions"]) == (str(OLD), Verdict.PASS, 1_000_000)
    assert (build.case, build.backend, build.verdict) == (UNIT.id, str(NEW), verdict)
    assert build.metrics.get("ratio.instructions") == (new / 1_000_000 if new else None)
    assert (release.outcome().exit_code, release.missing()) == (code, [])


def test_units_that_the_base_gets_wrong_too_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit's case that fails on both builds is not the build's fault."""

    class Wrong(Counted):
        def result(self, unit: Unit, spec: Spec) -> Result:
            """Return FAIL."""
            return replace(super().result(unit, spec), verdict=Verdict.FAIL)

    monkeypatch.setattr(counting, "Bench", lambda *_: Wrong({OLD: 0, NEW: 0}))
    release = Release(_build(), _build("old"), [CPU], [], 60.0, Isolation(), Fixed(), units=[UNIT])
    release.run()
    assert ([r.verdict for r in release.counted.results], release.counted.slower()) == ([Verdict.FAIL] * 2, [])


def test_units_after_their_share_of_the_time_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit begun is counted on both builds; the others are listed, and the run ends with 5."""
    monkeypatch.setattr(counting, "Bench", lambda *_: Counted({OLD: 7, NEW: 7}))
    units = list(BY_ID.values())[:3]
    clock = _clock(5.0).__next__
    release = Release(
        _build(), _build("old"), [CPU], [], 12.0, Isolation(), Fixed(), clock=clock, units=units
    )  # fmt: skip
    release.run()
    assert [r.case for r in release.counted.results] == [units[0].id] * 2
    assert [(m.case, m.cause) for m in release.missing()] == [(u.id, MissingCause.TIME_LIMIT) for u in units[1:]]
    assert release.outcome().exit_code == 5


SQR = "ops/SQR-f32-ne=10x5@1"


def test_a_fault_is_found_by_what_the_good_build_has_right() -> None:
    """The answer has the cause, and if it is gone; a missing build is reported, no miss.

    Faults of the same two builds share one run; a new cause of another op does not count.
    """
    sealed = Sealed.read({"op": ["SQR"], "kind": ["wrong numbers"]}, "x")
    fault = backtest.Fault("https://x.y/1", "pypi:a", "1", "2", "CPU", 5.0, "types", {}, sealed)
    kind = Fixed({NEW: frozenset({SQR})})
    pairs: list[tuple[str, str, str, float]] = []

    def prepare(bad: str, good: str, device: str, seconds: float) -> Release:
        pairs.append((bad, good, device, seconds))
        release = Release(_build(), _build("old"), [CPU], [], 1.0, Isolation(), kind)
        _give(release, {SQR: Verdict.FAIL}, {SQR: Verdict.PASS})
        return release

    kin = replace(fault, link="https://x.y/2", minutes=1.0)
    other = replace(fault, link="https://x.y/3", sealed=replace(fault.sealed, ops=("SQRT",)))
    attempts = list(backtest.attempt([fault, kin, other], prepare))
    row, again, missed = (a.to_json() for a in attempts)
    assert again == {**row, "link": kin.link, "minutes": 1.0}
    assert pairs == [("pypi:a==1", "pypi:a==2", "CPU", 300.0)]
    assert (row["answer"], row["state"], [c["id"] for c in row["causes"]]) == ("found", "fixed", ["ops/SQR"])
    assert (missed["answer"], missed["state"], missed["causes"]) == ("other finding only", None, [])
    assert ([c["id"] for c in missed["other"]], row["other"]) == (["ops/SQR"], [])
    assert "ops/SQR" in attempts[2].sentence()
    assert backtest.rates(attempts) == [("types", 2, 3)]
    kind.wrong = {NEW: frozenset({SQR}), OLD: frozenset({SQR})}
    (both,) = backtest.attempt([fault], prepare)
    assert (both.state, str(both.answer)) == (None, "missed"), "both builds have it"

    def absent(*_: object) -> Release:
        raise UsageError("pypi:a==1: no such version")

    (lost,) = backtest.attempt([fault], absent)
    assert "not run: pypi:a==1: no such version" in lost.sentence()
    assert (lost.state, backtest.rates([lost])) == (None, [])


@pytest.fixture
def unranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts the architectures that a cause hurts, which takes a minute the first time."""
    monkeypatch.setattr(analyse, "count_architectures", lambda causes, *_: list(causes))


@pytest.mark.usefixtures("unranked")
def test_an_error_in_a_case_of_one_node_is_that_nodes() -> None:
    """It need not run again to be found, and its cause names the op."""
    died = Result(
        "ops/SQR-f32-ne=10x5@1", "cpu", Verdict.CRASH, error=Error("its process died (SIGABRT): x.cpp:7: fatal error")
    )
    (cause,) = Cases(Isolation(), clock=_clock(1.0).__next__).find([died], 0.5)
    assert (cause.op, cause.verdict) == ("SQR", Verdict.CRASH)


@pytest.mark.usefixtures("unranked")
@pytest.mark.parametrize(
    ("case", "op"), [("ops/SQR-f32-ne=10x5@1", "SQR"), ("ops/RWKV_WKV7-f32-ne=32x2x5,v=off@85", "RWKV_WKV7")]
)
def test_wrong_numbers_of_one_node_are_that_nodes_however_late(case: str, op: str) -> None:
    """Once the time is over nothing runs again, and the cause names the op all the same, not one that copies."""
    wrong = Result(case, "cpu", Verdict.FAIL, notes=("wrong",))
    (cause,) = Cases(Isolation(), clock=_clock(1.0).__next__).find([wrong], 0.5)
    assert (cause.op, cause.verdict) == (op, Verdict.FAIL)


def test_whole_models_that_fail_alike_are_one_cause() -> None:
    """Errors are grouped by innermost message, wrong logits by where they begin.

    Scenarios are grouped by themselves; passes have no group.
    """

    def wrong(case: str, step: int, name: str = "") -> Result:
        return Result(case, str(NEW), Verdict.FAIL, where=Place(Fault.OUTPUT, step, name=name))

    rows = [
        wrong("arch/llama@1", 0),
        wrong("arch/qwen3@1", 0),
        wrong("arch/qwen3-seqs=2@1", 2),
        Result("arch/phi3@1", str(NEW), Verdict.CRASH, error=Error("SIGABRT: no kernel at 12")),
        Result("arch/gemma@1", str(NEW), Verdict.PASS),
        wrong("scenario/llama-do=batch-2@1", 1, "batch-2"),
        wrong("scenario/jamba-do=batch-2@1", 0, "batch-2"),
        wrong("scenario/jamba-do=sets@1", 0, "sets"),
    ]
    found = {c.message: c.cases for c in Cases(Isolation()).find(rows, 1.0)}
    assert {message: len(cases) for message, cases in found.items()} == {
        "wrong numbers from the first step on": 2, "wrong numbers from a later step on": 1,
        "SIGABRT: no kernel at #": 1, "wrong numbers in batch-2": 2, "wrong numbers in sets": 1,
    }  # fmt: skip


def test_an_audit_is_a_stage_of_a_release() -> None:
    """Its cases run as others do; on the reference each is right, and one can be asked for again by itself."""
    target, kind = Target("CPU", Spec("cpu"), None), Cases(Isolation())
    stage = Sweep(target, audit.NAME, audit.ids_of(audit.CASES[0])[:4])
    release = Release(_build(), None, [target], [stage], 1.0, Isolation(), kind)
    try:
        stage.run(Player(release.it, (), 1), 60.0, set())
    finally:
        release.it.close()
    rows = release.results(target)[0]
    assert {r.verdict for r in rows} <= {Verdict.PASS, Verdict.UNSUPPORTED}
    assert (stage.left, kind.find(rows, 1.0)) == ([], [])
    assert kind.again(target.build, rows[1].case).verdict is rows[1].verdict


def test_results_of_both_builds_may_ask_for_further_cases() -> None:
    """Such a case runs on both, too; without time it is left, and so it is missing."""
    first, second = "ops/SQR-f32-ne=10x5@1", "ops/SQRT-f32-ne=10x5@1"

    for passes, left in ((0.0, []), (99.0, [second])):
        now = [0.0]

        def then(build: Result, base: Result, again: Callable[[Result], Result]) -> list[str]:
            assert again(base).verdict is base.verdict
            now[0] += passes  # noqa: B023  # it runs in this round
            return [second] if build.case == first else []

        target = Target("CPU", Spec("cpu"), Spec("cpu", (("env.A", "1"),)))
        stage = Sweep(target, "memory", [first], then=then)
        release = Release(_build(), _build("old"), [target], [stage], 1.0, Isolation(), Cases(Isolation()))
        try:
            release.it.clock = lambda: now[0]  # noqa: B023  # as above
            stage.run(Player(release.it, (), 1), 60.0, set())
        finally:
            release.it.close()
        assert stage.left == left
        assert [r.case for r in release.results(target)[1]] == [first, second][: 2 - len(left)]


def test_a_wrong_size_says_both_numbers() -> None:
    """A group of live failures has the numbers of its first case, and is the same group with others."""
    rows = [Result(f"memory/{m}@1", "x", Verdict.FAIL, error=Error(f"{m}: {n} bytes, 5 expected", "context over"))
            for m, n in (("llama", 7), ("gemma3", 9))]  # fmt: skip
    (cause,) = Cases(Isolation()).find(rows, 1.0)
    assert (cause.message, cause.sentence) == ("context over", "memory: FAIL: llama: 7 bytes, 5 expected (2 cases)")


def test_live_cases_that_fail_alike_are_one_cause() -> None:
    """The same message, whatever the weight and its sizes, is one cause; another message is another."""
    words = ("its buffer cannot hold 7 of 64", "its buffer cannot hold 9 of 32", "takes a, not b")
    rows = [Result(f"audit/a@1#w{i}", "x", Verdict.OVERCLAIM, error=Error(said)) for i, said in enumerate(words)]
    rows += [Result("audit/a@1#w9", "x", Verdict.PASS)]
    one, other = Cases(Isolation()).find(rows, 1.0)
    assert (one.cases, one.verdict) == (("audit/a@1#w0", "audit/a@1#w1"), Verdict.OVERCLAIM)
    assert other.cases == ("audit/a@1#w2",)
    assert [r.cause for r in assigned(rows, [one, other])] == [one.id, one.id, other.id, None]
