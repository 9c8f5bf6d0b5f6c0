"""Wrong words on the command line: what is meant is named, at once, and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.cli import main

WRONG = ("ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1", "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--backend", "ggm"], "backend 'ggm' is not installed; did you mean ggml? known: cpu,"),
        (["run", "--backend", "ggml?devise=CPU"], "option 'devise' is unknown; did you mean device? its options: lib,"),
        (["run", "--backend", "sched?devices=ggm,cpu"], "backend 'ggm' is not installed; did you mean ggml?"),
        (["run", "--backend", "cpu", "--against", "old.json"], "--against old.json: no such file or folder; a run's"),
        (
            ["run", "--backend", "ggml", "--against", "build.old", "--changed"],
            "--against build.old: no such file or folder; a run's record (--json), or a backend such as 'ggml?lib=",
        ),
        (
            ["run", "--backend", "ggml", "--against", "old"],
            "--against old: no such file or folder, and backend 'old' is not installed;",
        ),
        (["perf", "run", "--backend", "cpu", "--against", "runs/old"], "--against runs/old: no such file or folder;"),
        (
            ["run", "--backend", "cpu", "--case", "ops/MULMAT*"],
            "no case of level smoke matches 'ops/MULMAT*'; did you mean ops/MUL_MAT? conform list cases",
        ),
        (["run", "--backend", "cpu", "--case", "op/MUL_MAT-f32*"], "did you mean ops/MUL_MAT?"),
        (["run", "--backend", "cpu", "--case", "MUL_MAT"], "did you mean ops/MUL_MAT?"),
        (["run", "--backend", "cpu", "--case", "ops/MUL_MAT-f99*"], "'ops/MUL_MAT-f99*'; conform list cases"),
        (["run", "--backend", "cpu", "--family", "gqa", "--case", "ops/*"], "matches 'ops/*'; conform list cases"),
        (["list", "casse"], "'casse' is not one of backends, families, cases, builds; did you mean cases?"),
        (["run", "--backend", "cpu", "--save-failures", "/proc/x"], "files cannot be created in /proc:"),
    ],
)
def test_a_wrong_word_is_one_line_before_anything_runs(words: list[str], said: str) -> None:
    """Exit code 2, and the nearest right word."""
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2, found.output
    assert said in found.output
    assert "total:" not in found.output


def test_list_takes_globs_as_run_does() -> None:
    """`list cases --case GLOB` lists what `run --case GLOB` runs."""
    named, given = (
        CliRunner().invoke(main, ["list", "cases", *words]).stdout for words in (["--case", "ops/TRI*"], ["ops/TRI*"])
    )
    assert named == given != ""


def test_several_failures_say_how_to_group_them(tmp_path: Path) -> None:
    """After two failures the run names `conform triage`, with the record and the backend that it needs."""
    path = tmp_path / "run.json"
    (tmp_path / "none.toml").write_text("")
    cases = [word for i in WRONG for word in ("--case", i)]
    settings = ["--config", str(tmp_path / "none.toml")]
    run = ["run", "--backend", "ggml?threads=1", *settings, *cases]
    assert (
        f"next: conform triage {path} --backend 'ggml?threads=1'"
        in CliRunner().invoke(main, [*run, "--json", str(path)]).output
    )
    assert "add --json RUN.json to this run" in CliRunner().invoke(main, run).output
    assert "next:" not in CliRunner().invoke(main, run[:-2]).output
