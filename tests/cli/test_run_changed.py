"""`conform run --changed`: what an edit impacts runs, what is left out is stated."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest
from builds_made import edited, pair
from click.testing import CliRunner, Result
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.builds.source import is_build
from conformance.cli import main
from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.files import find

pytestmark = needs_wheel
x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="edits an instruction of x86-64")


def run(*words: str) -> Result:
    """Run `conform run` on one process."""
    return CliRunner().invoke(main, ["run", "--jobs", "1", *words])


@x86_only
def test_an_edit_is_noticed_and_the_rest_left_out(tmp_path: Path) -> None:
    """An addition that became a subtraction: the cases of its function run, and one fails."""
    library = edited(tmp_path, "ggml_compute_forward_cumsum", "addss", 0x5C)
    ran = run(
        "-b", f"ggml?lib={library}", "--against", str(find()), "--changed", "--maxfail", "1", "--family", "ops",
        "--json", str(tmp_path / "run.json"),
    )  # fmt: skip
    assert ran.exit_code == 1, ran.output
    assert "ggml_compute_forward_cumsum" in ran.output
    assert "reach changed code" in ran.output
    assert "left out: " in ran.output
    rows = json.loads((tmp_path / "run.json").read_text())["results"]
    assert all("CUMSUM" in r["case"] for r in rows)
    assert any(r["verdict"] == "FAIL" for r in rows)


@x86_only
def test_a_build_may_be_a_folder_with_a_dot(tmp_path: Path) -> None:
    """`--against build.old`, as the manual writes it, is a build: its name is not taken for a file that is missing."""
    pair("ggml_compute_forward_cumsum", tmp_path / "build", tmp_path / "build.old")
    words = ("-b", f"ggml?lib={tmp_path / 'build'}", "--against", str(tmp_path / "build.old"), "--changed")
    ran = run(*words, "--maxfail", "1", "--case", "ops/CUMSUM-f32-ne=31x1@960")
    assert ran.exit_code == 1, ran.output
    assert "was PASS" in ran.output


def test_equal_builds_have_nothing_to_run(tmp_path: Path) -> None:
    """A copy elsewhere, with no backend opened: exit code 0, and a line that says so."""
    copy = shutil.copy(find(), tmp_path)
    ran = run("-b", "ggml", "--against", str(copy), "--changed")
    assert (ran.exit_code, ran.output.splitlines()[-1]) == (
        0,
        "no function, shader or kernel differs: nothing to run",
    ), ran.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-b", "ggml", "--changed"], "--changed: a build to compare with expected, as --against build.old"),
        (["-b", "cpu", "--against", "pypi:xllamacpp==0.2.2"], "one backend expected that takes a build"),
        (["-b", "ggml", "-b", "cpu", "--changed"], "one backend expected that takes a build"),
        (["-b", "ggml", "--changed", "--lf"], "--changed: cannot be combined with"),
    ],
)
def test_wrong_words_end_with_a_line(words: list[str], said: str) -> None:
    """Exit code 2, and what was expected."""
    ran = run(*words)
    assert (ran.exit_code, said in ran.output) == (2, True), ran.output


def test_a_build_that_dies_when_it_opens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says how it died, not that another backend was expected."""
    why = UnavailableError("could not be started: its process died (SIGABRT)")
    monkeypatch.setattr("conformance.testrun.choose", lambda *_: ([], {Spec("ggml"): why}))
    for option in ([], ["--changed"]):
        ran = run("-b", "ggml", "--against", "pypi:xllamacpp==0.2.2", *option)
        assert (ran.exit_code, str(why) in ran.output) == (2, True), ran.output


def test_what_names_a_build(tmp_path: Path) -> None:
    """Folders, packages, archives and libraries; a record and a backend are none."""
    names = {"x.whl": True, "libggml.so": True, "libggml.so.0": True, "run.json": False}
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert {name: is_build(str(tmp_path / name)) for name in names} == names
    assert [is_build(text) for text in (str(tmp_path), "npm:a@1", "ggml?ref=on", "cpu")] == [True, True, False, False]
