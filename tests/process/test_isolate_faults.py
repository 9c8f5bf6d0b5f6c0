"""Adapters that abort, hang, leak, close their wire or write on it: each costs one case, and the run goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from planted_adapter import planted_adapter

from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml.errors import UsageError
from conformance.ggml.ops.build import Builder
from conformance.ggml.types import F32
from conformance.judge.evidence import Fault
from conformance.judge.outcome import judge
from conformance.judge.verdict import Result, Verdict
from conformance.process import Deadline
from conformance.process.memory import parse_size, physical, resident
from conformance.report.runfile import record
from conformance.run.isolation.isolate import Isolation, pids, runs_here
from conformance.run.runner import Runner
from conformance.run.shrink import shrink

ADAPTER = '''
import os, time
import numpy as np
from conformance.backend.interface import DeviceInfo
from conformance.backend.kernel import KernelBackend, KernelSession

HELD = []

def wires():
    """The pipes that are no standard stream."""
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                yield fd
        except OSError:
            pass

def close_stdout(_):
    os.close(1)
    os.close(2)

def close_wire(_):
    for fd in wires():
        os.close(fd)

def garbage(_):
    for fd in wires():
        try:
            os.write(fd, b"{not a frame at all" * 10)
        except OSError:
            pass
    time.sleep(60)

def leak(n):
    for _ in range(int(n) // 16):
        HELD.append(np.ones(16 << 20, np.uint8))
        time.sleep(0.01)

def abort(_):
    os.write(2, b"evil.c:7: GGML_ASSERT(good) failed\\n")
    os.abort()

def damage(_):
    HELD.append(None)

def abort_later(_):
    if HELD:
        os.abort()

def abort_at_first(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.abort()

WHAT = {"damage": damage, "abort_later": abort_later, "spoil_and_damage": damage}
WHAT |= {"abort_at_first": abort_at_first, "spoil_or_abort": abort_at_first}
WHAT |= {"abort": abort, "hang": lambda s: time.sleep(float(s)), "leak": leak, "close_stdout": close_stdout,
        "close_wire": close_wire, "garbage": garbage}

class EvilSession(KernelSession):
    """Does what the name of the first node says, then computes; spoils results, or aborts when it is closed."""
    what = ""
    def compute(self, graph, inputs, outputs):
        self.what, _, rest = graph.nodes[0].name.partition(" ")
        if self.what in WHAT:
            WHAT[self.what](rest)
        found = super().compute(graph, inputs, outputs)
        return {t: ~data for t, data in found.items()} if self.what.startswith("spoil") else found
    def close(self):
        super().close()
        if self.what.endswith("abort_at_end"):
            os.abort()

def add(node, dst, src):
    dst[...] = src[0] + src[1]

def mul(node, dst, src):
    dst[...] = src[0] * src[1]

class Evil(KernelBackend):
    name = "evil"
    def __init__(self, fragile=""):
        super().__init__()
        self.fragile = bool(fragile)
    def kernels(self):
        return {"ADD": add, "MUL": mul}
    def info(self):
        return DeviceInfo("evil", "CPU", "sums and products")
    def supports_op(self, node):
        if node.name == "asked":
            WHAT["abort_later"]("")
        return super().supports_op(node)
    def open(self, case):
        return EvilSession(self.name, self.kernels(), case)
'''
SPEC = Spec("evil")


@pytest.fixture(autouse=True)
def evil(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The adapter, called `evil`."""
    with planted_adapter(tmp_path_factory.mktemp("evil"), monkeypatch, "evil", ADAPTER, "Evil"):
        yield


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """A runner whose workers may hold 600 MiB; where one hangs, two seconds are enough to know."""
    limit = 2.0 if "hang" in request.node.name else 120.0
    runner = Runner(isolation=Isolation(time_limit=limit, memory_limit=600 << 20))
    yield runner
    runner.close()


def case(name: str, seed: int = 0) -> Case:
    """`(a + b) * b`, its first node named."""
    b = Builder()
    x, y = b.new_tensor_2d(F32, 8, 3), b.new_tensor_2d(F32, 8, 3)
    first = b.add(x, y)
    first.name = name
    out = b.mul(first, y)
    rng = np.random.Generator(np.random.PCG64(seed))
    inputs = {t: rng.standard_normal((3, 8)).astype("<f4").reshape(-1).view(np.uint8) for t in (x, y)}
    return Case(f"evil/{name or 'good'}@{seed}", {}, [Step(b.build_forward_expand(out), inputs, (out,))])


def run(runner: Runner, *names: str) -> list[Result]:
    """Each case by itself, as a run does that goes through them."""
    return [runner.run(SPEC, [case(n, i)])[0] for i, n in enumerate(names)]


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        ("abort", Verdict.CRASH, "SIGABRT): evil.c:7: GGML_ASSERT(good) failed"),
        ("hang 60", Verdict.TIMEOUT, "no answer within 2 s"),
        ("leak 4096", Verdict.CRASH, "out of memory: it held"),
        ("close_stdout", Verdict.PASS, ""),
        ("close_wire", Verdict.CRASH, "its process died"),
        ("garbage", Verdict.CRASH, "something else wrote on its pipe"),
    ],
)
def test_a_fault_costs_one_case(runner: Runner, fault: str, verdict: Verdict, words: str) -> None:
    """The case has the verdict and the words of its fault, the cases before and after it pass."""
    if fault in {"close_wire", "garbage"} and not Path("/proc/self/fd").is_dir():
        pytest.skip("the planted adapter finds its pipes in /proc")
    before, found, after = run(runner, "", fault, "")
    assert (before.verdict, found.verdict, after.verdict) == (Verdict.PASS, verdict, Verdict.PASS)
    assert words in found.detail


@pytest.mark.parametrize(
    ("fault", "verdict"), [("abort_at_end", Verdict.CRASH), ("spoil_and_abort_at_end", Verdict.FAIL)]
)
def test_wrong_values_are_judged_even_if_the_process_dies_when_it_closes_the_case(
    runner: Runner, fault: str, verdict: Verdict
) -> None:
    """Damage has one verdict, whether or not it kills the process; right values are a crash."""
    found, after = run(runner, fault, "")
    assert (found.verdict, after.verdict) == (verdict, Verdict.PASS)
    assert "closing" in found.detail
    assert "its process died (SIGABRT)" in found.detail


def test_a_slow_leak_costs_the_case_that_goes_too_far(runner: Runner) -> None:
    """Memory that a worker gathers over many cases ends it once; its replacement begins with none."""
    found = run(runner, *["leak 128"] * 6, "")
    verdicts = [r.verdict for r in found]
    assert verdicts.count(Verdict.CRASH) == 1
    assert verdicts.count(Verdict.PASS) == 6
    assert "out of memory" in next(r.detail for r in found if r.verdict is Verdict.CRASH)


@pytest.mark.parametrize("later", ["abort_later", "asked"])
def test_a_fragile_process_that_an_earlier_case_damaged_is_no_crash_of_the_next(runner: Runner, later: str) -> None:
    """The case runs again in a new process, and is asked again if the process died when it was asked what it supports.

    One that dies there, too, or in any other backend, has a crash.
    """
    spec = Spec("evil", (("fragile", "1"),))
    names = ("damage", later, "damage", "abort")
    found = [runner.run(spec, [case(n, i)])[0] for i, n in enumerate(names)]
    assert [r.verdict for r in found] == [*[Verdict.PASS] * 3, Verdict.CRASH]
    note = "a process that earlier cases had used died (SIGABRT), a new one did not"
    assert [r.notes for r in found] == [(), (note,), (), ()]
    assert [r.verdict for r in run(runner, *names[:2])] == [Verdict.PASS, Verdict.CRASH]


@pytest.mark.parametrize(
    ("fault", "fragile", "verdict"),
    [
        ("spoil_or_abort", "1", Verdict.FAIL),
        ("spoil_or_abort", "", Verdict.CRASH),
        ("abort_at_first", "1", Verdict.CRASH),
    ],
)
def test_wrong_values_of_a_fragile_process_outweigh_a_death(
    runner: Runner, tmp_path: Path, fault: str, fragile: str, verdict: Verdict
) -> None:
    """Wrong values in a new process are a FAIL; right ones leave the crash as it is."""
    spec = Spec("evil", (("fragile", fragile),) if fragile else ())
    (found,) = runner.run(spec, [case(f"{fault} {tmp_path / 'died'}")])
    assert found.verdict is verdict
    assert "its process died (SIGABRT)" in found.detail


@pytest.mark.parametrize("fragile", ["1", ""])
def test_a_process_ends_with_a_case_that_failed(runner: Runner, fragile: str) -> None:
    """Damage of a case with wrong values reaches no later one."""
    spec = Spec("evil", (("fragile", fragile),) if fragile else ())
    names = ("spoil_and_damage", "abort_later")
    found = [runner.run(spec, [case(n, i)])[0] for i, n in enumerate(names)]
    assert [r.verdict for r in found] == [Verdict.FAIL, Verdict.PASS]
    assert not found[1].notes  # it died of nothing


def test_a_death_after_cases_that_passed_is_a_crash(runner: Runner) -> None:
    """A case that kills its process only at times would pass in a new one, too."""
    found = run(runner, "damage", "abort_later")
    assert [r.verdict for r in found] == [Verdict.PASS, Verdict.CRASH]
    assert found[1].where is not None
    assert found[1].where.fault is Fault.EARLIER


def test_candidates_of_a_search_share_a_process_although_they_fail(runner: Runner) -> None:
    """A search that tries hundreds of failing cases does not open a process for each."""
    with runner.quick(locates=False, checks_stale_state=False):
        run(runner, "spoil_and_damage")
        (pid,) = pids(runner.backend(SPEC))
        run(runner, "spoil_and_damage")
        assert pids(runner.backend(SPEC)) == [pid]


def test_crashes_in_a_row_leave_the_run_complete(runner: Runner) -> None:
    """Every case has its verdict, the record is whole, and neither memory nor descriptors grow with the crashes."""
    run(runner, *["abort"] * 3, "")
    before = resident(os.getpid()), _descriptors()
    found = run(runner, *["abort"] * 3, "")
    after = resident(os.getpid()), _descriptors()
    assert [r.verdict for r in found] == [Verdict.CRASH, Verdict.CRASH, Verdict.CRASH, Verdict.PASS]
    document = json.loads(json.dumps(record(found), allow_nan=False))
    assert len(document["results"]) == document["totals"]["executed"] == 4
    assert document["totals"]["CRASH"] == 3
    assert after[1] == before[1]
    if before[0] is not None and after[0] is not None:
        assert after[0] - before[0] < 20 << 20
    assert judge(found).exit_code == 1


def test_a_candidate_that_never_ends_does_not_outlast_the_budget(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shrinking ends with its budget, long before the limit of a request."""
    tried = case("hang 100")
    first, run = Result(tried.id, str(SPEC), Verdict.FAIL), runner.run
    results = iter([[first]])
    monkeypatch.setattr(runner, "run", lambda spec, cases: next(results, None) or run(spec, cases))
    runner.backend(SPEC)
    begun = time.monotonic()
    found = shrink(runner, SPEC, tried, deadline=Deadline.after(1.0))
    assert (found.tried, found.finished, found.result) == (1, False, first)
    assert time.monotonic() - begun < 60


def _descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def test_who_is_isolated() -> None:
    """All but the reference, whatever its options, and a scheduler, whose devices are."""
    assert not any(runs_here(s) for s in (SPEC, Spec("ggml"), Spec("openvino-stateless"), Spec("xdna2")))
    assert all(runs_here(s) for s in (Spec("cpu"), Spec("cpu", (("device", "CPU"),)), Spec("sched")))


@pytest.mark.parametrize(("text", "size"), [("4G", 4 << 30), ("512 MiB", 512 << 20), ("1.5k", 1536), ("1000", 1000)])
def test_sizes_are_read(text: str, size: int) -> None:
    """Units are powers of 1024."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "4X", "0", "0.0001"])
def test_no_size_is_refused(text: str) -> None:
    """What says no size is a usage error that shows it."""
    with pytest.raises(UsageError, match="a size like 4G"):
        parse_size(text)


def test_memory_is_told() -> None:
    """This process holds something, and less than the machine has."""
    held, whole = resident(os.getpid()), physical()
    if held is not None and whole is not None:
        assert 0 < held < whole
