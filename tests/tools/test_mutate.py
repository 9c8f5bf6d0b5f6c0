"""Mutants: a seed draws the same ones again, each changes what runs, and the rate counts what it says."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.perf.statistics import Rate
from conformance.planted import campaign, difference, mutation
from conformance.planted.campaign import Hunter, Reach, kind_of
from conformance.planted.faults import FOLDER, ROOT, Fault, control, load, read
from conformance.planted.matrix import fewest, matrix
from conformance.planted.mutants import AREAS, Mutant, draw, files
from conformance.planted.mutation import Outcome, Status
from conformance.planted.reach import Probe
from conformance.report.runs import mutant_rates, read_runs
from conformance.run.session.select import build

FAULTS = {f.name: f for f in read([FOLDER])}
SOFTENED = FAULTS["mask-off-by-one"]
ROPED = FAULTS["rope-backwards"]


def test_a_seed_draws_the_same_mutants() -> None:
    """As many as asked for, the same for a seed and others for another, of the area's own files."""
    first, again, other = draw(6, 1, ["xdna2"]), draw(6, 1, ["xdna2"]), draw(6, 2, ["xdna2"])
    assert first == again
    assert len({m.id for m in first}) == len(first) == 6
    assert {m.id for m in first} != {m.id for m in other}
    assert all(m.fault.file.startswith("backends/xdna2/") and m.fault.of == "xdna2" for m in first)


def test_a_mutant_is_another_program() -> None:
    """Its edit stands once in the source, and what it makes parses and differs by more than a text for readers."""
    for mutant in draw(4, 5, ["cpu"]):
        source = (ROOT / mutant.fault.file).read_text(encoding="utf-8")
        changed = mutant.fault.apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        assert int(mutant.id.split(":")[1]) == mutant.fault.line(source)


def test_a_path_bounds_the_files() -> None:
    """Every module of an adapter is of an area, folders within folders too; what no file matches is an error."""
    listed = [f for area in AREAS for f in files(area)]
    assert {p.relative_to(ROOT).as_posix() for p in ROOT.glob("backends/*/**/*.py")} <= set(listed)
    globs = ["backends/cpu/training/*"]
    found = files("cpu", globs)
    assert "backends/cpu/training/gradients.py" in found
    assert all(f.startswith("backends/cpu/training/") for f in found)
    assert {m.fault.file for m in draw(3, 1, (), globs)} <= set(found)
    with pytest.raises(UsageError, match="no file of cpu matches nothing"):
        draw(1, 1, ["cpu"], ["nothing/*"])


def test_every_area_has_files() -> None:
    """A pattern that matches nothing would leave a part of the code without mutants."""
    assert all(any(ROOT.glob(pattern)) for area in AREAS.values() for pattern in area.files)


def test_only_those_faults_are_reached_whose_place_runs() -> None:
    """A case of ROPE reaches a fault of ROPE's kernel and not one of attention's, and so does each of its kind."""
    probe = Probe("cpu", [SOFTENED, ROPED])
    runner = Hunter([SOFTENED, ROPED, probe])
    reach = Reach(runner, [probe])

    def reached(case_id: str) -> list[Fault]:
        return reach.of(kind_of(case_id), [SOFTENED, ROPED], lambda spec: runner.run(spec, [build(case_id)]))

    assert reached("ops/ROPE-f32-ne=64x4x3,mode=NEOX@1") == [ROPED]
    assert reached("ops/FLASH_ATTN_EXT-f32+f32-q=32x3x4,k=32x16x2,mask=16x3@1") == [SOFTENED]
    assert reach.of("ops/ROPE", [SOFTENED, ROPED], lambda _: None) == [ROPED]


def test_what_runs_once_lasts() -> None:
    """A place in a module, in a class and in a cached function is reached by each case after it."""
    lasting = {n for n, line in (("module", 1), ("class", 4), ("cached", 9), ("function", 7)) if _lasts(line)}
    assert lasting == {"module", "class", "cached"}


SOURCE = """x = 1

class A:
    y = 1

    def f(self):
        return 1

    @functools.cache
    def g(self):
        return 2
"""


def test_a_blank_line_belongs_to_what_follows() -> None:
    """A change that begins between two definitions marks the second, as the first line of a file takes no mark."""
    fault = Fault("f", "says", "cpu", ("ops",), "a.py", "\nclass A:", "class A:")
    probe = Probe("cpu", [fault])
    tree = probe.change("a.py", SOURCE)
    assert tree is not None
    assert [type(n) for n in tree.body] == [ast.Assign, ast.Expr, ast.ClassDef]


def _lasts(line: int) -> bool:
    text = SOURCE.splitlines()[line - 1]
    fault = Fault("f", "says", "cpu", ("ops",), "a.py", text, text + " ")
    probe = Probe("cpu", [fault])
    assert probe.change("a.py", SOURCE) is not None
    return "f" in probe.lasting


def test_once_is_enough() -> None:
    """A fault that one family noticed is not hunted by the others."""
    hunts = campaign.run([SOFTENED], "smoke", once=True)
    assert [(h.family, h.noticed) for h in hunts] == [("ops", True)]


def test_a_fault_that_refuses_everything_is_noticed() -> None:
    """A run in which nothing passes fails, so an adapter that takes nothing any more is no survivor; one that refuses a
    single op is none of these.
    """
    file = "backends/xdna2/__init__.py"
    all_ = Fault("all", "says", "xdna2", ("ops", "blocks"), file, 'if not holds), "")', 'if holds), "")')
    hunts = [h for h in campaign.run([all_], "smoke", once=True) if h.noticed]
    assert {(h.fault, h.verdict) for h in hunts} == {("all", campaign.NOTHING)}
    one = Fault("one", "says", "cpu", ("ops",), "backends/cpu/takes.py", "(FLOAT,))\n", "(ONLY_I32,))\n")
    assert not [h for h in campaign.run([one], "smoke", once=True) if h.noticed]


def test_a_fault_that_refuses_its_adapters_options_does_not_load() -> None:
    """What a constructor raises is the fault's, whatever it raises, and ends no hunt of others."""
    refuses = "from conformance.ggml.errors import UsageError\nraise UsageError('no')\nclass CpuBackend("
    refusal = Fault("refusal", "says", "cpu", ("ops",), "backends/cpu/__init__.py", "class CpuBackend(", refuses)
    hunts = {h.fault: h for h in campaign.run([refusal, ROPED], "smoke", once=True) if h.noticed}
    assert hunts["refusal"].detail.startswith(campaign.UNLOADABLE)
    assert hunts[ROPED.name].verdict == "FAIL"


def test_a_fault_differs_where_its_place_runs() -> None:
    """The answers of the adapter with a fault and without differ for a case of its op, and for no other."""
    plain, faulty = load(control("cpu", ())), load(ROPED)
    for case_id, differs in (("ops/ROPE-f32-ne=64x4x3,mode=NEOX@1", True), ("ops/ADD-f32+f32-a=4x3,b=4x3@0", False)):
        answers = [difference._answer(backend, build(case_id)) for backend in (plain, faulty)]
        assert (answers[0] != answers[1]) == differs, case_id


def test_drawn_cases_are_a_seeds_own() -> None:
    """The same for a seed, others for another; trajectories stand between the ops."""
    first, again, other = (difference.draw(seed, 2) for seed in (1, 1, 2))
    assert first == again != other
    assert {i.partition("/")[0] for i in first} == {"ops", *difference.DRAWN}


def test_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json` has each mutant with its diff and status, the rate of those that change something, and its interval; it
    is a run file, and reports count as the command does.
    """
    statuses: tuple[Status, ...] = ("noticed", "noticed", "survived", "equivalent", "invalid")

    def run(mutants: list[Mutant], *_: object) -> Iterator[Outcome]:
        yield from (Outcome(m, s, "why") for m, s in zip(mutants, statuses, strict=False))
        if len(mutants) > len(statuses):
            raise KeyboardInterrupt

    fault = Fault("m", "says", "cpu", ("ops",), "backends/cpu/rows.py", "a", "b")
    monkeypatch.setattr(
        "conformance.cli.checks.draw", lambda n, *_: [Mutant(f"id{i}", "cpu", fault, "-a\n+b") for i in range(n)]
    )
    monkeypatch.setattr(mutation, "run", run)
    path = tmp_path / "m.json"
    done = CliRunner().invoke(main, ["mutate", "--sample", "5", "--seed", "3", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "id2, differs by why" in done.output
    document = json.loads(path.read_text())
    more = CliRunner().invoke(main, ["mutate", "--sample", "9", "--json", str(path)])
    assert "interrupted; 5 of 9 mutants are recorded" in more.output
    assert json.loads(path.read_text())["mutants"] == document["mutants"]
    assert [m["status"] for m in document["mutants"]] == list(statuses)
    assert all({"id", "file", "area", "diff", "by"} <= m.keys() for m in document["mutants"])
    assert document["rate"] == pytest.approx(2 / 3)
    assert np.diff(document["interval"]) > 0
    assert document["seed"] == 3
    assert mutant_rates(m.value for m in read_runs([path]).mutants) == {"cpu": Rate(2, 3)}


def test_a_matrix_has_every_case_that_notices() -> None:
    """Of two faults at once, each by cases of its own op alone, and by more than the first."""
    found = matrix([SOFTENED, ROPED], "smoke")
    assert all(len(cases) > 1 for cases in found.values())
    assert {kind_of(i) for i in found[ROPED.name]} <= {"ops/ROPE", "ops/ROPE_BACK"}
    assert "ops/FLASH_ATTN_EXT" in {kind_of(i) for i in found[SOFTENED.name]}
    few = fewest(found)
    assert all(set(few) & set(cases) for cases in found.values())
    assert fewest(found, few) == []


@given(st.dictionaries(st.integers(0, 9).map(str), st.lists(st.sampled_from("abcdef"), max_size=4), max_size=8))
def test_the_fewest_cases_notice_all_that_is_noticed(noticed: dict[str, list[str]]) -> None:
    """Each fault that any case notices is noticed by one of them, and none of them is there for nothing."""
    few = fewest(noticed)
    assert all(set(few) & set(cases) for cases in noticed.values() if cases)
    assert len(few) == len(set(few)) <= sum(map(bool, noticed.values()))
