"""`conform run --jobs 1`, `2` and `4` have the same results, with a backend that crashes, hangs and is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_adapter import ADAPTER, CRASHES, HANGS, RIGHT, WRONG
from planted_adapter import planted_adapter

LATER = "ops/SQR-f32-ne=18x6x3x2,vne=rows@705"
"""A case that hangs, after `WRONG` in every run."""
LIMIT = ("--time-limit", "1")


@pytest.fixture
def _faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with planted_adapter(tmp_path, monkeypatch, "faulty", ADAPTER, "Faulty"):
        yield


def _start(folder: Path, *words: str, backend: str = "faulty") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "conformance.cli", "run", "--backend", backend, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _cases(*globs: str) -> list[str]:
    return [w for g in globs for w in ("--case", g)]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Id, verdict and place of each result, in order; the text of a time-out has times."""
    keys = ("case", "backend", "verdict", "where")
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["results"]
    return [{k: r.get(k) for k in keys} for r in rows]


def _lines_until(run: subprocess.Popen[str], verdict: str) -> list[str]:
    assert run.stdout is not None
    seen: list[str] = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith(verdict):
            break
    return seen


@pytest.mark.usefixtures("_faulty")
def test_results_do_not_depend_on_the_number_of_jobs(tmp_path: Path) -> None:
    """Ids, verdicts and places are the same, in the same order, whatever dies or hangs on the way."""
    each: list[Sequence[dict[str, Any]]] = []
    for n in (1, 2, 4):
        record = tmp_path / f"{n}.json"
        words = [*_cases(CRASHES, HANGS, WRONG, RIGHT), *LIMIT, "--json", str(record), "--jobs", str(n)]
        run = _start(tmp_path, *words)
        output, _ = run.communicate()
        assert run.returncode == 1, output
        each.append(_rows(record))
    found = {r["case"].partition("-")[0]: r["verdict"] for r in each[0]}
    assert found == {"ops/GET_ROWS": "CRASH", "ops/SQR": "TIMEOUT", "ops/MUL": "FAIL", "ops/ADD": "PASS"}
    assert each[0] == each[1] == each[2]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for a child")
@pytest.mark.usefixtures("_faulty")
def test_a_run_that_was_interrupted_continues_with_another_number(tmp_path: Path) -> None:
    """Ctrl-C ends a run with 5; its journal, continued by another number of jobs, has the results of a whole run."""
    whole, later, journal = (str(tmp_path / name) for name in ("whole.json", "later.json", "journal"))
    words = [*_cases(CRASHES, WRONG, RIGHT), *LIMIT]
    _start(tmp_path, *words, "--json", whole, "--jobs", "1").communicate()
    run = _start(tmp_path, *words, "--journal", journal, "--jobs", "2")
    assert _lines_until(run, "FAIL")[-1].startswith("FAIL ops/MUL-")
    run.send_signal(signal.SIGINT)
    run.communicate()
    assert run.returncode in {1, 5}, "1 if the run was quicker than the signal"
    again = _start(tmp_path, *words, "--journal", journal, "--json", later, "--jobs", "4")
    assert "reused: " in again.communicate()[0]
    assert _rows(Path(later)) == _rows(Path(whole))


@pytest.mark.usefixtures("_faulty")
def test_a_failure_is_shown_while_the_next_case_of_its_chunk_runs(tmp_path: Path) -> None:
    """A wrong first case appears although the second case, of the same chunk, never ends."""
    run = _start(tmp_path, *_cases(WRONG, LATER), "--jobs", "2")
    try:
        assert _lines_until(run, "FAIL")[-1].startswith("FAIL ops/MUL-")
        assert run.poll() is None
    finally:
        run.send_signal(signal.SIGINT)
        assert run.communicate()[0]


@pytest.mark.parametrize(
    "words",
    [
        ("--case", "ops/NOTHING-*"),
        ("--family", "nothing"),
        ("--against", "nothing"),
        ("--waivers", "waivers.toml", "--case", RIGHT),
        ("--backend", "nothing"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("_faulty")
def test_arguments_are_checked_before_a_backend_opens(tmp_path: Path, words: Sequence[str]) -> None:
    """A wrong argument ends the run with 2, and no backend was opened, not even one named before it."""
    (tmp_path / "waivers.toml").write_text("[[waiver]]\nnothing = 1\n")
    mark = tmp_path / "opened"
    run = _start(tmp_path, *words, backend=f"faulty?mark={mark}")
    output, _ = run.communicate()
    assert (run.returncode, mark.exists()) == (2, False), output
    run = _start(tmp_path, "--case", RIGHT, "--jobs", "1", backend=f"faulty?mark={mark}")
    run.communicate()
    assert mark.exists()
    mark.unlink()
