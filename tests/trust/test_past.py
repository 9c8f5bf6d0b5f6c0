"""Known bugs of old builds: the list, and what the command says and ends with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.builds.build import Build
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.cause import Cause
from conformance.judge.verdict import Verdict
from conformance.llama.release import prepare
from conformance.llama.release.causes import SharedCause
from conformance.report.compare import State
from trust.__main__ import main
from trust.past import backtest
from trust.past.backtest import Attempt, Fault

FAULT = {
    "link": "https://x.y/1", "package": "pypi:a", "bad": "1", "good": "2", "device": "CPU", "minutes": 5.0,
    "class": "types", "op": ["SQR"], "kind": ["wrong numbers"],
}  # fmt: skip


def _toml(row: Mapping[str, object]) -> str:
    return "[[fault]]\n" + "".join(f"{k} = {v!r}\n" for k, v in row.items()).replace("'", '"')


def test_a_fault_of_the_past_names_two_builds(tmp_path: Path) -> None:
    """A package is from PyPI or npm; a name that begins with @ is from npm."""
    path = tmp_path / "past.toml"
    path.write_text(_toml(FAULT))
    (fault,) = backtest.read(path)
    assert (fault.build(fault.bad), fault.build(fault.good)) == ("pypi:a==1", "pypi:a==2")
    assert replace(fault, package="npm:@a/b").build("3") == replace(fault, package="@a/b").build("3") == "npm:@a/b@3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**FAULT, "case": "ADD"}, "fault 1 case: is unknown"),
        ({**FAULT, "op": ["NO"]}, "fault 1 op: an op of ggml"),
        ({**FAULT, "class": "x"}, "fault 1 class: one of layouts, "),
        ({**FAULT, "known": "x"}, "fault 1 known: true or false expected, 'x' found"),
        ({**FAULT, "minutes": 0}, "fault 1 minutes: a number above 0 expected, 0 found"),
        ({**FAULT, "link": "x"}, "fault 1 link: an http"),
        ({**FAULT, "package": "../x y"}, "fault 1 package: pypi:NAME or npm:NAME expected"),
        ({k: v for k, v in FAULT.items() if k != "good"}, "fault 1 good: a version expected, nothing found"),
    ],
)
def test_a_wrong_file_of_faults_is_refused(row: Mapping[str, object], message: str, tmp_path: Path) -> None:
    """The message names the entry, the key and the error; a list of faults may not name cases."""
    path = tmp_path / "past.toml"
    path.write_text(_toml(row))
    with pytest.raises(UsageError, match=message):
        backtest.read(path)


TOML = _toml({**FAULT, "package": "a", "minutes": 1, "op": ["ADD"], "kind": ["crash"]})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{file}"], "run.json"),
        (["{toml}", "--link", "zzz"], "no fault matches --link zzz"),
        (["{toml}", "--budget", "0s"], "a time as 90s"),
    ],
)
def test_wrong_words_end_with_a_line(words: list[str], said: str, tmp_path: Path) -> None:
    """Exit code 2, and what was expected."""
    names = {"file": tmp_path / "run.json", "toml": tmp_path / "past.toml"}
    names["file"].write_text("{}")
    names["toml"].write_text(TOML)
    ran = CliRunner().invoke(main, ["backtest", *(w.format(**names) for w in words)])
    assert (ran.exit_code, said in ran.output) == (2, True), ran.output


def test_a_build_that_cannot_be_had_is_no_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a backtest says what could not be tested and why; nothing tried is exit code 3."""

    def absent(name: str, *_: object, **__: object) -> Build:
        raise UnavailableError(f"build {name}: not there")

    monkeypatch.setattr(prepare, "probe", absent)
    toml, out = tmp_path / "past.toml", tmp_path / "out.json"
    toml.write_text(TOML)
    ran = CliRunner().invoke(main, ["backtest", str(toml), "--json", str(out)])
    assert ran.exit_code == 3, ran.output
    (row,) = json.loads(out.read_text())
    assert (row["answer"], row["state"], row["causes"]) == ("not run", None, [])
    assert row["error"] == "build pypi:a==1: not there"


def test_a_backtest_counts_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known bugs apart from others, and by class; another finding is no success, and a build that is absent no try."""
    toml = tmp_path / "past.toml"
    more = TOML.replace("/1", "/2") + "known = true\n" + TOML.replace("/1", "/3").replace("types", "tails")
    toml.write_text(TOML + more + TOML.replace("/1", "/4"))
    new = SharedCause(Cause("SUB-1", "SUB", "x", Verdict.FAIL, "SUB", "", (), ("s",)), State.NEW)

    def attempt(faults: Sequence[Fault], _: object) -> list[Attempt]:
        one, two, three, four = faults
        return [Attempt(one, [new]), Attempt(two), Attempt(three, other=[new]), Attempt(four, error="absent")]

    monkeypatch.setattr(backtest, "attempt", attempt)
    ran = CliRunner().invoke(main, ["backtest", str(toml)])
    lines = [" ".join(text.split()) for text in ran.output.splitlines()]
    for said in (
        "not known before: 1 of 2 found", "known before: 0 of 1 found", "tails 0 of 1", "types 1 of 2",
        "1 with other findings only; 1 could not be tested", "https://x.y/3: other finding only: SUB-1, in 0 s",
        "missed: https://x.y/2", "could not be tested: https://x.y/4: absent",
    ):  # fmt: skip
        assert said in lines, ran.output
    assert ran.exit_code == 1


def test_a_fault_whose_build_ran_no_case_is_not_missed(tmp_path: Path) -> None:
    """It could not be tested, which is no miss, and the reason is named."""
    toml = tmp_path / "past.toml"
    toml.write_text(TOML)
    (fault,) = backtest.read(toml)
    release = SimpleNamespace(run=lambda: None, executed=lambda: False, why_not_executed=lambda: "9 cases: time limit")
    release_of: Any = lambda *_: release  # noqa: E731  # stands in for a release
    (attempt,) = backtest.attempt([fault], release_of)
    assert (attempt.answer, attempt.error) == (backtest.Answer.NOT_RUN, "no cases ran: 9 cases: time limit")
