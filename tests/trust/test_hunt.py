"""The hunt: what fails without a fault counts for none, and what runs once is reached by every case."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge.verdict import Verdict
from conformance.suite import FAMILIES
from trust import faults, hunt, inject
from trust.faults import FOLDER, Fault, control, original, read
from trust.hunt import Trials, differences, draw, fewest, matrix
from trust.inject import Injector

FAULTS = {f.name: f for f in read([FOLDER])}
SORT, ROPE, ADD = (
    "ops/ARGSORT-f32-ne=64x4,order=DESC@1",
    "ops/ROPE-f32-ne=64x4x3,mode=NEOX@1",
    "ops/ADD-f32+f32-a=4x3,b=4x3@0",
)
ROWS = "backends/cpu/rows.py"
DEFINED = "class CpuBackend("
SORTS = replace(FAULTS["argsort-ascending"], families=("ops",))
ORDER = "order: NDArray[Any] = np.argsort("
DIES = replace(SORTS, name="dies", old=ORDER, new=f"import os; os.abort(); {ORDER}")
HANGS = replace(DIES, name="hangs", new=f"import time; time.sleep(600); {ORDER}")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cases of ops in place of those of a level, one batch for each."""
    monkeypatch.setattr(hunt, "batches", lambda _family, _level: [[ADD], [SORT, ROPE]])


def of_cpu(name: str, file: str, old: str, new: str) -> Fault:
    """A fault that `ops` shall notice."""
    return Fault(name, "says", "cpu", ("ops",), file, old, new)


@pytest.mark.usefixtures("only")
def test_a_crash_and_a_hang_are_noticed_and_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that takes its process down, or never answers, is noticed; those after it are hunted all the same."""
    monkeypatch.setattr(hunt, "TIME_LIMIT", 20.0)
    found = hunt.hunt(
        [DIES, HANGS, SORTS, of_cpu("none", ROWS, "Return the last of equals", "Return one of equals")], "smoke"
    )
    verdicts = [("dies", "CRASH"), ("hangs", "TIMEOUT"), (SORTS.name, "FAIL"), ("none", "")]
    assert [(h.fault, h.verdict) for h in found] == verdicts


@pytest.mark.usefixtures("only")
def test_what_fails_without_a_fault_counts_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that fails on the adapter as it is notices no fault; it is a false alarm, and others still count."""
    plain = original
    broken = {ROWS: SORTS.apply(original(ROWS))}
    for module in (faults, inject):
        monkeypatch.setattr(module, "original", lambda file: broken.get(file) or plain(file))
    harmless = of_cpu("harmless", ROWS, "Return the last of equals", "Return one of equals")
    dies = of_cpu("all-die", ROWS, "from __future__ import annotations", "from __future__ import annotations\n1 / 0")
    found = hunt.hunt([harmless], "smoke")
    assert [(h.fault, h.noticed, h.case) for h in found] == [("no-fault", True, SORT), ("harmless", False, "")]
    found = hunt.hunt([dies], "smoke")
    assert (found[0].fault, found[0].case) == ("all-die", ADD)
    assert found[0].detail.find(inject.UNLOADABLE) >= 0


ONCE = {
    "import": of_cpu("import", "backends/cpu/__init__.py", "TABLE: Table = {op: row", "TABLE: Table = {op: row[:]"),
    "class": of_cpu("class", "backends/cpu/__init__.py", '    name = "cpu"\n', '    name = "cpu"[:]\n'),
    "opening": of_cpu("opening", "backends/cpu/__init__.py", "        self._use(EXACT)", "        self._use( EXACT)"),
    "arithmetic": of_cpu(
        "arithmetic", "backends/cpu/__init__.py", "return self._arithmetic\n", "return  self._arithmetic\n"
    ),
}


def test_what_runs_once_is_reached_by_every_batch() -> None:
    """The second batch reaches code at import, in a class or constructor as the first does.

    So does a process that opens the backend again; a kernel's code is reached by cases of its op only.
    """
    every = [*ONCE.values(), SORTS, FAULTS["rope-backwards"]]
    with closing(Trials(every)) as trials:
        reached = [[f.name for f in trials.batch([i]).reached] for i in (ADD, SORT, ADD)]
        first = trials.fresh(trials.probe)
        assert trials.fresh(trials.probe) is not first
    assert reached == [[*ONCE], [*ONCE, SORTS.name], [*ONCE]]


@pytest.mark.usefixtures("only")
def test_a_fault_that_runs_once_is_noticed() -> None:
    """At import: a table without ADD's kernel. In what is asked of a backend once: an arithmetic that it has not."""
    table = replace(ONCE["import"], new='TABLE: Table = {op: topic.TABLE[{"ADD": "SUB"}.get(op, op)]')
    rounds = replace(ONCE["arithmetic"], new="return Arithmetic('none', activations={'f32': 'q8_0'})\n")
    found = hunt.hunt([table, rounds], "smoke")
    assert [(h.fault, h.noticed) for h in found] == [("import", True), ("arithmetic", True)]


@pytest.mark.usefixtures("only")
def test_a_fault_that_refuses_everything_is_noticed() -> None:
    """An adapter that refuses every node is no survivor, since a run without a PASS fails.

    One that refuses a single op is none of these.
    """
    file, old = "backends/cpu/__init__.py", "        return takes.refusal(node)"
    every = of_cpu("every", file, old, '        return "no"')
    one = of_cpu("one", file, old, '        return "no" if node.op == "ADD" else ""')
    found = [h for h in hunt.hunt([every, one], "smoke", once=True) if h.noticed]
    assert [(h.fault, h.verdict) for h in found] == [("every", hunt.NOTHING)]


@pytest.mark.usefixtures("only")
def test_a_fault_that_refuses_its_adapters_options_does_not_load() -> None:
    """What a constructor raises is the fault's, and ends no hunt of others."""
    refuses = f"from conformance.ggml.errors import UsageError\nraise UsageError('no')\n{DEFINED}"
    refusal = of_cpu("refusal", "backends/cpu/__init__.py", DEFINED, refuses)
    found = {h.fault: h for h in hunt.hunt([refusal, SORTS], "smoke", once=True)}
    assert inject.UNLOADABLE in found["refusal"].detail
    assert found[SORTS.name].verdict == "FAIL"


def test_a_relation_opens_a_copy_with_its_options() -> None:
    """Where a relation opens the backend once more with options of its own, the same plant is opened with them."""
    plain = control("openvino-stateless")
    with closing(Injector([plain])) as runner:
        case = runner.case(next(i for i in FAMILIES["relations"].ids("smoke") if "/warm-" in i))
        assert [(r.verdict, r.detail) for r in runner.run(plain.spec, [case])] == [(Verdict.PASS, "")]


def test_plants_have_names_of_their_own() -> None:
    """Two adapters that differ in options alone, under one name, would be opened as one."""
    with pytest.raises(ValueError, match="names of their own"):
        Injector([replace(SORTS, of=of) for of in ("xdna2", "xdna2?k=64")])


def test_a_fault_behind_a_scheduler_is_in_its_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a scheduler's device is noticed; the scheduler's own is in `test_faults`."""
    monkeypatch.setattr(hunt, "batches", lambda *_: [["weight_placement/shared-w=f32,d=2048@138"]])
    device = FAULTS["xdna2-write-forgotten"]
    assert device.of.startswith("sched")
    assert any(h.noticed for h in hunt.hunt([device], "smoke"))


def test_a_fault_differs_where_its_place_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers with a fault and without differ for a case of its op, and for no other."""
    roped, text = FAULTS["rope-backwards"], of_cpu("text", ROWS, "Return the last of equals", "Return one of equals")
    monkeypatch.setattr(hunt, "draw", lambda _: [ADD, SORT, ROPE])
    assert differences([roped, text], 1) == {roped.name: ROPE}


def test_drawn_cases_are_a_seeds_own() -> None:
    """The same for a seed, others for another; trajectories stand between the ops."""
    first, again, other = (draw(seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {i.partition("/")[0] for i in first[:200]} == {"ops", *hunt.DRAWN}


@pytest.mark.usefixtures("only")
def test_a_matrix_has_every_case_that_notices() -> None:
    """Each fault by cases of its own op alone."""
    roped = FAULTS["rope-backwards"]
    assert matrix([SORTS, roped], "smoke") == {SORTS.name: [SORT], roped.name: [ROPE]}


@given(st.dictionaries(st.integers(0, 9).map(str), st.lists(st.sampled_from("abcdef"), max_size=4), max_size=8))
def test_the_fewest_cases_notice_all_that_is_noticed(noticed: dict[str, Sequence[str]]) -> None:
    """Each fault that any case notices is noticed by one of them, and none of them is there for nothing."""
    few = fewest(noticed)
    assert all(set(few) & set(cases) for cases in noticed.values() if cases)
    assert len(few) == len(set(few)) <= sum(map(bool, noticed.values()))
    assert fewest(noticed, few) == []
