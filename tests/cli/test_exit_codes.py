"""One exit code for one situation, whichever command meets it: docs/exit-codes.md."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from commands import NAMES, conform
from planted_adapter import planted_adapter
from run_files import cause, document, unit, written_to

from conformance.backend import registry
from conformance.causes import baseline as baseline_file
from conformance.cli import main
from conformance.judge.cause import Cause

ROOT = Path(__file__).resolve().parents[2]
RIGHT = ("ops/ADD-f32+f32-a=33x7@1", "cpu", "PASS")
EXPIRED = "w.toml: waiver 1: expired on 2026-01-01"


def _missing(*cases: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # a record's fields
    rows = [{"backend": "cpu", "case": i, "reason": "its worker died", **more} for i in cases]
    return {"asked": {"cpu": len(cases)}, "missing": rows}


SITUATIONS: dict[str, tuple[dict[str, Any], int, str]] = {
    "a backend that is not installed": (
        document([RIGHT, ("ops/ADD-f32+f32-a=33x7@2", "nothere", "FAIL")]), 1, "1 FAIL",
    ),
    "a case that cannot be rebuilt": (document([RIGHT, ("gone/x@1", "cpu", "CRASH")]), 1, "1 CRASH"),
    "XPASS": (document([RIGHT, ("ops/ADD-f32+f32-a=33x7@2", "cpu", "XPASS:FAIL")]), 1, "1 XPASS"),
    "missing pairs": (
        {**document([RIGHT]), **_missing("ops/SUB-a@1"), "asked": {"cpu": 2}}, 1, "no result for 1 case on cpu",
    ),
    "everything missing": (
        {**document([]), **_missing("ops/ADD-a@1", "ops/SUB-a@1")}, 1, "no result for 2 cases on cpu",
    ),
    "an expired waiver": ({**document([RIGHT]), "waivers": [EXPIRED]}, 1, EXPIRED),
    "only UNSUPPORTED": (document([("ops/ADD-f32+f32-a=33x7@1", "cpu", "UNSUPPORTED")]), 3, "no cases ran"),
    "no results": (document([]), 3, "no cases ran"),
}  # fmt: skip
"""What a run file holds -> the exit code of a command that judges it, and what it says."""


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_baseline_hides_no_situation(tmp_path: Path, situation: str) -> None:
    """A run without a new cause is not enough for success against a baseline.

    Missing results do not show that known causes are gone.
    """
    body, code, says = SITUATIONS[situation]
    run, known = written_to(tmp_path / "run.json", body), tmp_path / "known.toml"
    known.write_text("")
    if situation in {"no results", "only UNSUPPORTED"}:
        baseline_file.write(known, [Cause.from_json(cause("q4_K", ["a@1"], "cpu"))], "-o")
    if situation == "no results":
        code, says = 1, "no results, although"
    done = conform("triage", run, "--no-confirm", "--baseline", known)
    assert (done.returncode, says.removeprefix("1 ") in done.stdout) == (code, True), done.stdout + done.stderr


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_report_and_a_plain_triage_say_the_same(tmp_path: Path, situation: str) -> None:
    """Neither is green where the run was not."""
    body, code, says = SITUATIONS[situation]
    run = written_to(tmp_path / "run.json", body)
    for words in (("triage", run, "--no-confirm"), ("report", run, "-o", tmp_path / "page")):
        done = conform(str(words[0]), *words[1:])
        assert (done.returncode, says in done.stdout) == (code, True), done.stdout + done.stderr
    assert (tmp_path / "page" / "index.html").is_file()


def test_a_right_run_is_a_success(tmp_path: Path) -> None:
    """Against an empty baseline, by itself, and as a page; and as a page of speed alone."""
    run, known = written_to(tmp_path / "run.json", document([RIGHT])), tmp_path / "known.toml"
    known.write_text("")
    speed = written_to(tmp_path / "speed.json", document([unit("decode", "cpu", [1.0])]))
    for words in (
        ("triage", run, "--baseline", known), ("triage", run), ("report", run, "-o", tmp_path / "page"),
        ("report", speed, "-o", tmp_path / "page"),
    ):  # fmt: skip
        done = conform(str(words[0]), *words[1:])
        assert done.returncode == 0, done.stdout + done.stderr


def test_pairs_that_a_limit_left_out_are_incomplete(tmp_path: Path) -> None:
    """Their typed cause decides, not their words."""
    for why, code in (("interrupted", 5), ("time limit", 5), ("stopped", 5), ("lost", 1)):
        body = {**document([RIGHT]), **_missing("ops/SUB-a@1", cause=why), "asked": {"cpu": 2}}
        done = conform("report", written_to(tmp_path / "run.json", body), "-o", tmp_path / "page")
        assert (why, done.returncode) == (why, code), done.stdout + done.stderr
        assert "no result for 1 case on cpu: its worker died: ops/SUB-a@1" in done.stdout
    refused = {**document([RIGHT]), **_missing("ops/SUB-a@1", cause="nonsense")}
    assert conform("report", written_to(tmp_path / "run.json", refused), "-o", tmp_path / "page").returncode == 2


def test_a_backend_that_had_to_pass_something_must(tmp_path: Path) -> None:
    """A run that names its backends records that each has to pass a case: every command that reads it demands it."""
    run = tmp_path / "run.json"
    words = ("--case", "ops/GET_ROWS-q2_K+i32-a=256x2,n=1@41", "--backend", "xdna2", "--backend", "cpu", "--json", run)
    done = conform("run", *words)
    assert done.returncode == 3, done.stdout + done.stderr
    for command in (("triage", run), ("report", run, "-o", tmp_path / "page")):
        done = conform(str(command[0]), *command[1:])
        assert (done.returncode, "xdna2: no case passed (" in done.stdout) == (3, True), done.stdout


BROKEN = {
    "does not compile": ("class Planted(", "SyntaxError"),
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "wants a module that we lack": ("import conformance.nothing", "No module named 'conformance.nothing'"),
    "lacks its class": ("", "has no attribute 'Planted'"),
    "is no backend": ("class Planted: ...", "planted"),
    "cannot be made": (
        "from backends.cpu import CpuBackend\nclass Planted(CpuBackend):\n    def __init__(self): 1 / 0",
        "its constructor raised ZeroDivisionError",
    ),
}
"""Fault of an adapter on every machine -> its source, and a part of the error message."""
ABSENT = {
    "a package": ("import no_such_package", "No module named 'no_such_package'"),
    "a library": ("import ctypes; ctypes.CDLL('libnothing.so')", "libnothing.so"),
    "a device": (
        "from conformance.ggml.errors import UnavailableError\nraise UnavailableError('no such device')",
        "no such device",
    ),
}
"""Source of an adapter whose machine lacks something."""


def _planted(folder: Path, patch: pytest.MonkeyPatch, source: str) -> tuple[int, str]:
    """The exit code and output of a run of one case on all backends: `cpu` and an adapter of `source`."""
    patch.chdir(folder)  # where no settings define further names
    patch.setattr(registry, "names", lambda: ["cpu", "planted"])
    with planted_adapter(folder, patch, "planted", source, "Planted"):
        done = CliRunner().invoke(main, ["run", "--case", RIGHT[0]])
        told = CliRunner().invoke(main, ["doctor"])
    assert (told.exit_code, "backend planted:" in told.output) == (int(done.exit_code != 0), done.exit_code != 0)
    return done.exit_code, done.output


@pytest.mark.parametrize("how", BROKEN)
def test_an_adapter_that_is_broken_fails_a_run(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default run is not green without its cases, and names the error; `conform doctor` agrees."""
    source, says = BROKEN[how]
    code, output = _planted(tmp_path, monkeypatch, source)
    assert code == 1, output
    (line,) = (line for line in output.splitlines() if line.startswith("planted: the adapter is broken: "))
    assert says in line
    assert "1 PASS" in output


@pytest.mark.parametrize("what", ABSENT)
def test_an_adapter_that_lacks_something_fails_no_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine cannot run it: it is named, and the others count."""
    source, says = ABSENT[what]
    code, output = _planted(tmp_path, monkeypatch, source)
    assert code == 0, output
    assert "not available: " in output
    assert says in output
    assert "broken" not in output


def test_a_missing_shard_fails(tmp_path: Path) -> None:
    """The records of two of three shards say that the third is missing; with it there is nothing to say."""
    for n in (1, 2, 3):
        words = ("--backend", "cpu", "--case", "ops/SQR-*", "--shard", f"{n}/3", "--json", tmp_path / f"{n}.json")
        assert conform("run", *words).returncode == 0
    two = conform("report", tmp_path / "1.json", tmp_path / "2.json", "-o", tmp_path / "page")
    assert two.returncode == 1
    assert "cpu: shard 3 of 3 is missing" in two.stdout
    whole = conform("report", *(tmp_path / f"{n}.json" for n in (1, 2, 3)), "-o", tmp_path / "page")
    assert whole.returncode == 0, whole.stdout


def test_a_shard_is_missing_of_each_backend(tmp_path: Path) -> None:
    """The second shard of one backend does not stand for that of another."""
    shards = [
        {**document([("a@1", b, "PASS")]), "asked": {b: 1}, "shard": {"index": n, "of": 2, "whole": "w"}}
        for n, b in ((1, "x"), (2, "y"))
    ]
    paths = [written_to(tmp_path / f"{n}.json", body) for n, body in enumerate(shards)]
    done = conform("report", *paths, "-o", tmp_path / "page")
    assert done.returncode == 1
    assert "x: shard 2 of 2 is missing" in done.stdout
    assert "y: shard 1 of 2 is missing" in done.stdout
    huge = {**shards[0], "shard": {"index": 1, "of": 10**12, "whole": "w"}}
    assert conform("report", written_to(paths[0], huge), "-o", tmp_path / "page").returncode == 2


@pytest.mark.parametrize("now", ["UNSUPPORTED", "absent"])
def test_coverage_that_is_lost_fails(tmp_path: Path, now: str) -> None:
    """20 PASS before, 1 PASS and 19 that are refused or gone now: how many, of which backend, and the first ids."""
    ids = [f"ops/ADD-{n:02}@1" for n in range(20)]
    base = written_to(tmp_path / "base.json", document([(i, "cpu", "PASS") for i in ids]))
    rows = [(ids[0], "cpu", "PASS"), *((i, "cpu", now) for i in ids[1:] if now != "absent")]
    run = written_to(tmp_path / "run.json", document(rows, written="2026-01-03T03:04:05Z"))
    done = conform("report", run, "--against", base, "-o", tmp_path / "page")
    assert done.returncode == 1, done.stdout
    assert (
        f"coverage lost on cpu: 19 of 20 cases that passed (19 {now}): {', '.join(ids[1:4])} and 16 more" in done.stdout
    )
    assert conform("report", run, "-o", tmp_path / "page").returncode == 0
    assert conform("report", base, "--against", run, "-o", tmp_path / "page").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_incomplete(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, or the end that CI and batch systems send: exit code 5 and the reason; what ran is recorded."""
    out = tmp_path / "run.json"
    words = ("--backend", "cpu", "--family", "ops", "--level", "full", "--json", str(out))
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job hands on that it is ignored
    command = [sys.executable, "-m", "conformance.cli", *NAMES["run"], *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    signal.signal(signal.SIGINT, before)
    with child as popen:
        partial = tmp_path / "run.json.partial.jsonl"
        while popen.poll() is None and not (partial.is_file() and partial.read_bytes().count(b"\n") > 3):
            time.sleep(0.01)
        popen.send_signal(number)
        said, err = popen.communicate(timeout=120)
    assert popen.returncode == 5, said + err
    assert "on cpu: interrupted: ops/" in said
    again = conform("report", out, "-o", tmp_path / "page")
    assert (again.returncode, ": interrupted: " in again.stdout) == (5, True), again.stdout


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the stream")
def test_a_closed_stdout_is_not_written(tmp_path: Path) -> None:
    """Nothing runs without a stdout: exit code 74 and the reason."""
    words = [
        sys.executable,
        "-m",
        "conformance.cli",
        "run",
        "--backend",
        "cpu",
        "--case",
        "ops/ADD-f32+f32-a=1x1x1@325",
    ]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (74, "conform: cannot write to stdout: it is closed\n")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_in_any_command_is_incomplete(tmp_path: Path) -> None:
    """Click would end with 1, as failures do: `conform list cases` interrupted while it works ends with 5."""
    code = (
        "import conformance.testrun as c; from conformance.cli import main\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "c.case_ids = stop\n"
        "main(['list', 'cases'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (5, "interrupted\n"), done.stderr


def test_one_backend_named_twice_runs_once(tmp_path: Path) -> None:
    """The record asks for as many as it lists."""
    run = tmp_path / "run.json"
    done = conform("run", "--backend", "cpu", "--backend", "cpu", "--case", RIGHT[0], "--json", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"asked": {\n  "cpu": 1\n }' in run.read_text()


def _exits(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.exit", "SystemExit", "exit", "ctx.exit"}:
            yield node


ALLOWED = {"Exit.USAGE", "outcome.exit_code", "found.exit_code", "CLOSED", "UNWRITABLE", ""}
"""What a command may end with: the code of an outcome, of bad input, or of a stdout that cannot be written."""


def test_no_command_computes_an_exit_code() -> None:
    """Every command ends by `output.leave`, with an `Outcome`; `nightly`, which prints otherwise, with one as well."""
    ends = {
        (path.name, ", ".join(map(ast.unparse, call.args)))
        for path in (ROOT / "conformance").rglob("cli/*.py")
        for call in _exits(path)
    }
    assert {name for name, _ in ends} <= {"output.py", "nightly.py"}
    assert {code for _, code in ends} <= ALLOWED
