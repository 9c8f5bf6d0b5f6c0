"""`pytest conformance`: selection, ids, outcomes, and that a run which proves nothing fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import dying
import pytest
from sessions_of_pytest import PYTEST, ROOT, session

from conformance.run.session.journal import Contents
from conformance.suite import FAMILIES

CASE = FAMILIES["ops"].ids("smoke")[0]


def test_ids_are_case_ids_and_the_record_is_written(tmp_path: Path) -> None:
    """A test's id holds its case's id and backend; `--json` holds what ran; totals stand per backend."""
    out = tmp_path / "r.json"
    run = session("-v", "--backend", "cpu", "--backend", "ggml", "--case", CASE, "--json", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"conformance/test_suite.py::test_case[{CASE}-cpu] PASSED" in run.stdout
    assert f"conformance/test_suite.py::test_case[{CASE}-ggml] PASSED" in run.stdout
    assert "ggml: 1 PASS" in run.stdout
    assert json.loads(out.read_text())["totals"]["PASS"] == 2


def test_an_unknown_backend_is_one_line() -> None:
    """A wrong name is a usage error that lists what is installed, before anything is collected."""
    run = session("--backend", "nope")
    assert run.returncode == 4
    assert "backend 'nope' is not installed; known: " in run.stderr
    assert "Traceback" not in run.stderr + run.stdout


def test_a_case_that_no_level_lists_runs_by_its_id() -> None:
    """Any valid id runs, at another seed too."""
    name, _, seed = CASE.rpartition("@")
    run = session("--backend", "ggml", "--case", f"{name}@{int(seed) + 41}")
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout


def test_a_glob_runs_where_it_matches() -> None:
    """A glob over several families collects all matches; one without a match is an error.

    So is an unknown family.
    """
    found = session("--backend", "cpu", "--case", "r*/*", "--collect-only", "-q")
    assert found.returncode == 0, found.stdout + found.stderr
    families = {line.partition("[")[2].partition("/")[0] for line in found.stdout.splitlines() if "test_case[" in line}
    assert families == {"random", "relations"}
    for words, says in (
        (("--case", "r*/*", "--case", "nowhere/*"), "no case of level smoke matches 'nowhere/*'"),
        (("--case", "relations/*", "--family", "random"), "no case of level smoke matches 'relations/*'"),
        (("--family", "nope"), "family 'nope' is unknown"),
    ):
        refused = session("--backend", "cpu", "--collect-only", "-q", *words)
        assert refused.returncode == 4, refused.stdout
        assert says in refused.stderr + refused.stdout


def test_a_family_runs_alone() -> None:
    """By `--family`, or by -k over the ids of tests; nothing else is collected with the first."""
    for words in (("--family", "alias"), ("-k", "alias/")):
        found = session("--backend", "cpu", "--collect-only", "-q", *words)
        ids = [line for line in found.stdout.splitlines() if "test_case[" in line]
        assert len(ids) == len(FAMILIES["alias"].ids("smoke"))
        assert all("[alias/" in i for i in ids)


def test_nothing_executed_fails() -> None:
    """Deselecting every case is no success."""
    run = session("--backend", "cpu", "--case", CASE, "-k", "no_such_case")
    assert run.returncode not in {0, 5}
    assert "no cases ran" in run.stdout


def test_no_available_backend_fails() -> None:
    """Where no chosen backend is available the run fails and says why each is not."""
    run = session("--backend", "ggml?lib=/nowhere.so", "--case", CASE)
    assert run.returncode not in {0, 5}
    assert "/nowhere.so" in run.stdout + run.stderr


FAILS = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"


def test_what_a_stop_leaves_out_is_missing(tmp_path: Path) -> None:
    """-x: each selected pair is told or missing with that reason; what -k deselects was not asked for."""
    out = tmp_path / "r.json"
    words = ("--backend", "ggml", "--backend", "cpu", "--case", FAILS, "-x", "--json", str(out))
    run = session(*words, "-k", "not cpu")
    assert run.returncode == 1, run.stdout
    assert json.loads(out.read_text())["asked"] == {"ggml": 1}
    first = session(*words)
    found = json.loads(out.read_text())
    assert first.returncode == 1, first.stdout
    assert {m["reason"] for m in found["missing"]} == {"stopped after 1 failure"}
    assert found["asked"] == {"ggml": 1, "cpu": 1}
    assert [m["backend"] for m in found["missing"]] == ["cpu"]


def test_a_named_backend_on_which_nothing_passed_fails_the_session() -> None:
    """All skipped beside a backend that passes is no success."""
    run = session("--backend", "xdna2", "--backend", "ggml", "--case", dying.DEADLY)
    assert run.returncode == 1, run.stdout
    assert "xdna2: no case passed (1 UNSUPPORTED)" in run.stdout


def _pytest(*args: str) -> None:
    """A session that does not come to its end, in a process of its own."""
    subprocess.run([*PYTEST, "conformance", *args], cwd=ROOT, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize("when", ["sessionfinish", "terminal_summary"])
def test_an_interrupt_as_pytest_ends_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C in whatever another plugin does at the end: the record is written."""
    (tmp_path / "ctrl_c.py").write_text(
        f"import pytest\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_{when}():\n    raise KeyboardInterrupt\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "r.json"
    _pytest("-p", "ctrl_c", "--backend", "ggml", "--case", CASE, "--json", str(out))
    assert json.loads(out.read_text())["totals"]["PASS"] == 1


def test_a_killed_adapter_leaves_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of pytest is gone in the middle: what ran lies beside --json."""
    out = tmp_path / "r.json"
    with dying.installed(tmp_path, monkeypatch):
        _pytest("--backend", "ggml", "--backend", "dying?how=gone", "--case", dying.DEADLY, "--json", str(out))
    assert not out.exists()
    found = Contents.parse((tmp_path / "r.json.partial.jsonl").read_bytes())
    assert [row["backend"] for _, row in found.results] == ["ggml"]
    assert [cut.backend for cut in found.innermost] == ["dying?how=gone"]
