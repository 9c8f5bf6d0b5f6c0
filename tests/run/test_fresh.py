"""Seeds of the user's own, and fresh cases: the same from the printed seed, saved if they fail, never gating."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cli import main
from conformance.judge.outcome import judge
from conformance.judge.verdict import Result, Totals, Verdict
from conformance.properties import case_ids
from conformance.run.session.select import build, fresh_ids, reseeded
from conformance.suite import FAMILIES

CRASHES = "ops/GLU.SWIGLU_OAI-f16-ne=33x4,form=split,limit=2.0@1"
"""ggml aborts."""
OFFERED = [f for f in FAMILIES if f in {"ops", "kv_growth", "alias", "random", "relations"}]


def test_a_seed_of_ones_own() -> None:
    """Every generated id gets it; a recording keeps its own."""
    assert reseeded("random/nodes=9@4", 77) == "random/nodes=9@77"
    assert reseeded("random/nodes=9@4", None) == "random/nodes=9@4"
    assert reseeded("captured/x@0", 77) == "captured/x@0"


def test_fresh_cases_are_no_listed_ones() -> None:
    """As many as asked for, each once, none of any level, the same again from the same seed, others from another."""
    found = fresh_ids(OFFERED, [], "smoke", 20, 5)
    assert len(set(found)) == 20
    assert found == fresh_ids(OFFERED, [], "smoke", 20, 5)
    assert set(found).isdisjoint(fresh_ids(OFFERED, [], "smoke", 20, 6))
    assert set(found).isdisjoint(i for f in OFFERED for i in FAMILIES[f].ids("full"))
    assert {i.partition("/")[0] for i in found} == set(OFFERED)


@settings(max_examples=25)
@given(st.data())
def test_strategies_give_ids_that_build(data: st.DataObject) -> None:
    """Whatever a family's strategy draws is a case, and a legal one."""
    family = data.draw(st.sampled_from(OFFERED))
    case = build(data.draw(case_ids(family, "smoke")))
    case.validate()


def test_the_property_test_of_the_guide_passes(tmp_path: Path) -> None:
    """The three lines of docs/adding-a-backend.md are a whole test, and ggml passes it.

    The seed draws neither of the two graphs that docs/suite.md names as over their budgets.
    """
    page = (Path(__file__).parents[2] / "docs" / "adding-a-backend.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    test = tmp_path / "test_my_npu.py"
    test.write_text(example.replace("my-npu", "ggml"), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=1", str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_fresh_failures_do_not_fail_a_run() -> None:
    """They are counted and named, and the exit code is that of the others."""
    results = [Result("random/a@1", "x", Verdict.FAIL, fresh=True), Result("random/b@1", "x", Verdict.PASS)]
    assert judge(results).exit_code == 0
    assert "1 FAIL" in str(Totals.of(results))
    assert "1 of fresh cases, saved" in str(Totals.of(results))
    assert judge([*results, Result("random/c@1", "x", Verdict.FAIL)]).exit_code == 1


def test_a_fresh_failure_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --save-failures it is kept in the default folder, listed, and the command succeeds."""
    monkeypatch.setattr("conformance.testrun.fresh_ids", lambda *_: [CRASHES])
    monkeypatch.chdir(tmp_path)
    args = ["run", "--backend", "ggml", "--case", "ops/CONT-f32-a=16*", "--fresh", "1", "--seed", "3"]
    found = CliRunner().invoke(main, args)
    if "no case of level" in found.output:
        args[4] = "ops/CONT*"
        found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    assert "seed 3" in found.output
    assert f"saved, does not fail the run: CRASH {CRASHES}" in found.output
    assert list((tmp_path / "failures").glob("*.gguf"))


def test_a_fresh_case_that_passes_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder is made with the first failure that is saved in it."""
    monkeypatch.chdir(tmp_path)
    args = ["run", "--backend", "cpu", "--case", "ops/ADD-f32+f32-*", "--only-fresh", "--fresh", "1", "--seed", "3"]
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    assert not (tmp_path / "failures").exists()
