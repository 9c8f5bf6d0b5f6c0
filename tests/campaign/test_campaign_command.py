"""`conform run --workers`, with one worker that runs in this process: its record, its exit codes, how it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaign_pools import InlinePool
from click.testing import CliRunner, Result

from conformance.cli import main
from conformance.cli import run as command
from conformance.report.runfile import read_document
from conformance.run.session.select import case_ids

SMALL = ("--backend", "cpu", "--case", "ops/ADD-*")
WRONG = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
"""A case that ggml gets wrong."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> InlinePool:
    """The worker of each run of a test."""
    pool = InlinePool()
    monkeypatch.setattr(command, "connect", pool.connect)
    return pool


def _run(folder: Path, *words: str) -> Result:
    """Run with a record and a journal in `folder`."""
    files = ("--json", str(folder / "run.json"), "--journal", str(folder / "run.journal"))
    return CliRunner().invoke(main, ["run", "--workers", "tcp://here:1", *files, *words])


def _document(path: Path) -> Mapping[str, Any]:
    found = read_document(path)
    assert found is not None
    return found.body


def test_workers_give_what_a_run_gives(pool: InlinePool, tmp_path: Path) -> None:
    """The record of a run on workers is that of the same run without them."""
    ended = _run(tmp_path, *SMALL)
    assert (ended.exit_code, ended.stderr) == (0, "")
    body = _document(tmp_path / "run.json")
    alone = tmp_path / "alone.json"
    assert CliRunner().invoke(main, ["run", *SMALL, "--json", str(alone)]).exit_code == 0
    expected = _document(alone)
    assert [(r["case"], r["verdict"], r["nmse"]) for r in body["results"]] == [
        (r["case"], r["verdict"], r["nmse"]) for r in expected["results"]
    ]
    for key in ("asked", "missing", "totals", "selection"):
        assert body[key] == expected[key]
    assert body["environment"]["machine"] == expected["environment"]["machine"]
    assert pool.chunks


def test_an_interrupted_run_goes_on(pool: InlinePool, tmp_path: Path) -> None:
    """Ctrl-C: exit code 5, what ran is recorded, the rest is missing; the same words run the rest and no more."""
    ids = [i for c in ("ops/ADD*", "ops/MUL-*", "ops/SOFT_MAX*") for i in case_ids((), (c,), "smoke")]
    words = ("--backend", "cpu", *(w for i in ids for w in ("--case", i)))
    assert len(ids) > 32

    def interrupt() -> None:
        if pool.chunks:
            raise KeyboardInterrupt

    pool.before = interrupt
    assert _run(tmp_path, *words).exit_code == 5
    then = _document(tmp_path / "run.json")
    assert {(m["reason"], m["cause"]) for m in then["missing"]} == {("interrupted", "interrupted")}
    ran = [i for c in pool.chunks for i in c.cases]
    assert len(then["missing"]) + len(then["results"]) == len(ids)
    pool.before, pool.chunks = lambda: None, []
    assert _run(tmp_path, *words).exit_code == 0
    now = _document(tmp_path / "run.json")
    again = [i for c in pool.chunks for i in c.cases]
    assert sorted(r["case"] for r in now["results"]) == sorted(ids)
    assert {r["case"] for r in then["results"]}.isdisjoint(again)
    assert set(ran) | set(again) == set(ids)
    assert now["run"] == then["run"]


def test_fresh_cases_fill_the_budget(pool: InlinePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of fresh cases follow from one seed until the budget is used; none of them is missing."""
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        ticks = count()  # time passes by looks at the clock, so that a busy machine changes nothing
        monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))  # noqa: B023
        ended = _run(folder, *SMALL, "--budget", "1s", "--fresh", "16", "--seed", "5", "--only-fresh")
        assert ended.exit_code == 0, ended.output
        body = _document(folder / "run.json")
        assert body["missing"] == []
        assert len(body["results"]) == body["asked"]["cpu"] > 16
        assert all(r["fresh"] for r in body["results"])
        found.append([r["case"] for r in body["results"]])
    n = min(map(len, found))
    assert found[0][:n] == found[1][:n]
    assert pool.chunks


def test_a_budget_leaves_cases_out(pool: InlinePool, tmp_path: Path) -> None:
    """Without time nothing is handed out: each case is missing, with that reason."""
    ended = _run(tmp_path, *SMALL, "--budget", "0.000001s")
    assert (ended.exit_code, pool.chunks) == (5, [])
    assert {m["cause"] for m in _document(tmp_path / "run.json")["missing"]} == {"time limit"}


def test_a_failure_is_shown_and_saved(pool: InlinePool, tmp_path: Path) -> None:
    """What fails on a worker is printed and saved here, and `-x` stops handing out."""
    words = ("--backend", "ggml", "--case", WRONG, "--save-failures", str(tmp_path / "failures"), "-x")
    ended = _run(tmp_path, *words)
    assert ended.exit_code == 1
    assert f"FAIL {WRONG} on ggml" in ended.output
    result = _document(tmp_path / "run.json")["results"][0]
    assert Path(result["saved"]).parent == tmp_path / "failures"
    assert "as saved" in CliRunner().invoke(main, ["repro", result["saved"]]).output
    assert pool.chunks


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--backend", "nosuch"), "backend 'nosuch' is not installed"),
        (("--budget", "2"), "'--budget': '2': a time as 90s, 30m, 2h or 1.5d expected"),
        (("--stage", "run", *SMALL), "--workers: cannot be combined with"),
    ],
)
def test_wrong_words(pool: InlinePool, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    """Exit code 2 and one line; nothing runs."""
    ended = _run(tmp_path, *words)
    assert (ended.exit_code, says in ended.stderr, pool.chunks) == (2, True, [])


def test_workers_are_an_address_or_jobs_of_slurm() -> None:
    """Other text is refused before anything starts."""
    ended = CliRunner().invoke(main, ["run", "--workers", "2", *SMALL])
    assert ended.exit_code == 2
    assert "slurm:N or the address of a Dask scheduler expected" in ended.stderr
