"""`--lf` and `--ff`: what failed when it last ran runs alone, or first; `conform run` and pytest alike."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sessions_of_pytest import session

from conformance.cli import last_failed, main
from conformance.judge.verdict import Result as Outcome
from conformance.judge.verdict import Verdict
from conformance.run.session.journal import whole

RIGHT = "ops/SUM-f32-ne=33x5x3x2@349"
WRONG = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
"""No level lists it."""
WORDS = ("--backend", "ggml", "--case", RIGHT, "--case", WRONG)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _run(*words: str) -> Result:
    return CliRunner().invoke(main, ["run", *words])


def _fails(*pairs: tuple[str, str]) -> None:
    last_failed.file().unlink(missing_ok=True)
    last_failed.write([Outcome(case, backend, Verdict.FAIL) for backend, case in pairs])


def test_only_what_failed_runs_again() -> None:
    """Without any other selection, too; the record says which cases were selected."""
    assert _run(*WORDS).exit_code == 1
    assert last_failed.read() == {"ggml": [WRONG]}
    for words in (WORDS, ("--backend", "ggml")):
        again = _run(*words, "--lf", "-v", "--json", "r.json")
        assert again.exit_code == 1, again.output
        document = json.loads(Path("r.json").read_text())
        assert [r["case"] for r in document["results"]] == [WRONG]
        assert document["selection"]["cases"] == [WRONG]
        assert document["missing"] == []


def test_what_failed_runs_first() -> None:
    """And then all the others."""
    ran = [line.split()[1] for line in _run(*WORDS, "-v").stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert ran == [RIGHT, WRONG]
    ran = [line.split()[1] for line in _run(*WORDS, "--ff", "-v").stdout.splitlines() if line[:4] in {"PASS", "FAIL"}]
    assert ran == [WRONG, RIGHT]


def test_what_passes_is_forgotten_and_what_did_not_run_is_not() -> None:
    """With nothing left there is no file, and all cases run."""
    _fails(("ggml", RIGHT), ("ggml", WRONG), ("cpu", RIGHT))
    assert _run("--backend", "ggml", "--case", RIGHT, "--lf").exit_code == 0
    assert last_failed.read() == {"ggml": [WRONG], "cpu": [RIGHT]}
    all_run = _run("--backend", "ggml", "--case", RIGHT, "--lf")
    assert "--lf: no known failures among these cases; running all of them" in all_run.stderr
    assert "total: 1 PASS" in all_run.stdout
    _fails(("ggml", RIGHT))
    assert _run("--backend", "ggml", "--case", RIGHT).exit_code == 0
    assert not last_failed.file().exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\n",
        "[]\n",
        '{"failed": [1]}\n',
        "{}\n5\n",
        f"{whole([])}{{}}\n",
        f"{whole([])}[",
        whole([])[:-9],
        whole([Outcome("x/y@1", "ggml", Verdict.FAIL)]),
    ],
)
def test_a_damaged_file_is_none(text: str) -> None:
    """And an id that no family knows is none: the run is as without the option."""
    last_failed.file().parent.mkdir(parents=True)
    last_failed.file().write_text(text)
    done = _run("--backend", "ggml", "--family", "tbo", "--case", "tbo/COUNT*", "--lf")
    assert (done.exit_code, "running all of them" in done.stderr) == (0, True), done.output


def test_pytest_runs_what_failed_again(tmp_path: Path) -> None:
    """Its own --lf, from its own cache, with workers, too; what it leaves out is not asked for."""
    words = ("-p", "cacheprovider", "-o", f"cache_dir={tmp_path / 'pytest'}", *WORDS)
    shared = ("-n", "1") if find_spec("xdist") else ()
    assert "1 failed, 1 passed" in session(*words, *shared).stdout
    for more in ((), shared):
        again = session(*words, "--lf", *more)
        assert "1 failed" in again.stdout, again.stdout
        assert not re.search(r"[0-9] passed", again.stdout)
        assert "no result for" not in again.stdout
    first = session(*words, "--ff", "-v")
    ran = [line for line in first.stdout.splitlines() if line.startswith("conformance/test_suite.py::test_case[")]
    assert ["GET_ROWS" in line for line in ran] == [True, False]
