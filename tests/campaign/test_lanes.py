"""`conform run --jobs N`: the record does not depend on N, whatever dies on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from commands import conform, conform_here
from dying import DEADLY, HARMLESS, installed
from marks import needs_wheel

from conformance.campaign import lanes
from conformance.run.session.select import case_ids

GLOBS = ("ops/ADD*", "ops/MUL_MAT-*", "kv_growth/*")
WRONG = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
"""A case that ggml gets wrong."""


def _record(path: Path, *words: str, code: int) -> dict[str, Any]:
    ran = conform_here("run", "--json", path, "-q", *words)
    assert ran.exit_code == code, ran.output
    body: dict[str, Any] = json.loads(path.read_text("utf-8"))
    # a merged graph is one of its chunk's cases, and so is its witness
    rows = [{k: v for k, v in r.items() if k not in {"seconds", "witness"}} for r in body["results"]]
    return {"results": rows, **{k: body[k] for k in ("asked", "missing", "totals", "selection")}}


@needs_wheel
def test_results_do_not_depend_on_the_number_of_lanes(tmp_path: Path) -> None:
    """Verdicts, errors, places and their order are those of one process; failing cases are saved."""
    words = [w for b in ("cpu", "ggml") for w in ("--backend", b)]
    words += [w for g in (*GLOBS, WRONG) for w in ("--case", g)]
    each = []
    for n in (1, 2, 3):
        saved = tmp_path / f"saved-{n}"
        body = _record(tmp_path / f"{n}.json", *words, "--save-failures", str(saved), "--jobs", str(n), code=1)
        for row in body["results"]:
            row["saved"] = Path(row["saved"]).name if row.get("saved") else None
        assert {p.name for p in saved.glob("*.gguf")} == {r["saved"] for r in body["results"]} - {None}
        each.append(body)
    assert len(each[0]["results"]) == 2 * len(case_ids((), (*GLOBS, WRONG), "smoke"))
    assert each[0] == each[1] == each[2]


@needs_wheel
def test_a_backend_to_compare_with_runs_in_lanes(tmp_path: Path) -> None:
    """The record has the results of both backends, and the terminal says what is worse, as one process does."""
    words = ("--backend", "ggml", "--against", "cpu", "--case", WRONG, "--case", HARMLESS)
    one, two = (
        conform_here("run", "--json", tmp_path / f"{n}.json", "--quiet", "--jobs", n, *words) for n in ("1", "2")
    )
    assert (one.exit_code, one.stdout) == (two.exit_code, two.stdout)
    assert "against cpu: " in one.stdout
    bodies = [json.loads((tmp_path / f"{n}.json").read_text("utf-8")) for n in "12"]
    rows = [[(r["backend"], r["case"], r["verdict"]) for r in b["results"]] for b in bodies]
    assert rows[0] == rows[1]


@needs_wheel
def test_lanes_know_the_waivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case known to crash is XFAIL and is not located, as in one process, and gets its note once."""
    (tmp_path / "known.toml").write_text(
        '[[waiver]]\ncase = "ops/GET_ROWS-*"\nverdict = "CRASH"\nreason = "dies"\nlink = "https://example.org/1"\n'
        "expiry = 2099-01-01\n"
    )
    words = ("--case", DEADLY, "--case", HARMLESS, "--waivers", str(tmp_path / "known.toml"))
    with installed(tmp_path, monkeypatch):
        one, two = (
            _record(tmp_path / f"{n}.json", "--backend", "dying?how=abort", *words, "--jobs", n, code=0) for n in "12"
        )
    assert [r["where"]["fault"] for r in one["results"] if r["verdict"] == "XFAIL"] == ["unlocated"]
    assert one == two


@needs_wheel
def test_the_cases_of_a_lane_that_was_killed_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that ends its lane once passes; one that always does is a CRASH that says so, and the others pass."""
    words = ("--case", DEADLY, "--case", HARMLESS, "--jobs", "2")
    with installed(tmp_path, monkeypatch):
        backend = f"dying?how=killed once&mark={tmp_path / 'mark'}"
        body = _record(tmp_path / "once.json", "--backend", backend, *words, code=0)
        assert {r["verdict"] for r in body["results"]} == {"PASS"}
        body = _record(tmp_path / "gone.json", "--backend", "dying?how=gone", *words, code=1)
    crashed = [r for r in body["results"] if r["verdict"] == "CRASH"]
    assert [r["case"] for r in crashed] == [r["case"] for r in body["results"] if "GET_ROWS" in r["case"]]
    assert crashed[0]["error"]["message"].startswith("each of 3 workers that ran it alone died")
    assert {r["verdict"] for r in body["results"] if r not in crashed} == {"PASS"}


def test_nothing_is_left_of_lanes(tmp_path: Path) -> None:
    """A run that ends at its first failure or in time ends its lanes and their backends."""
    ran = conform("run", "--backend", "cpu", "--jobs", "2", "--budget", "2s", cwd=tmp_path)
    assert ran.returncode == 5, ran.stderr
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert left == []


def test_no_temporary_file_is_left_of_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is ended in the middle of a case leaves the model of a live family to the run, which removes it."""
    made: list[Path] = []

    def start(_service: str, *, env: dict[str, str], **_: object) -> SimpleNamespace:
        made.append(Path(env["TMPDIR"]) / "conformance-live-1")
        made[0].mkdir()
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(lanes, "Worker", start)
    started = lanes.Lanes(1)
    while not made:
        time.sleep(0.01)
    started.close()
    assert not made[0].parent.exists()


def test_lanes_and_workers_exclude_each_other(tmp_path: Path) -> None:
    """Cases run on this machine or on workers; the message names both options."""
    ran = conform("run", "--backend", "cpu", "--jobs", "2", "--workers", "tcp://here:1", cwd=tmp_path)
    assert (ran.returncode, "--workers: cannot be combined with --jobs" in ran.stderr) == (2, True)


def test_a_lane_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is printed and no case counts as run; the run does not wait for an answer."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(lanes, "Worker", refuse)
    monkeypatch.chdir(tmp_path)
    ran = conform_here("run", "--backend", "cpu", "--case", "ops/ADD-*", "--jobs", "2")
    assert ran.exit_code == 1, ran.output
    assert "OSError: no more processes" in ran.output
