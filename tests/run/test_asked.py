"""What a run was asked for is answered, pair by pair, or the run fails and lists it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import dying
import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Invoked
from hypothesis import given
from hypothesis import strategies as st
from run_files import document, written_to

from conformance.cli import main
from conformance.cli.reports import outcome_of
from conformance.judge.outcome import judge, lost_coverage
from conformance.judge.verdict import LISTED, MissingCause, Request, Result, Verdict
from conformance.report.compare import LOST, compare
from conformance.report.junit import ERRORS, junit
from conformance.report.markdown import INTERRUPTED, markdown
from conformance.report.page import page
from conformance.report.runs import read_runs

ROOT = Path(__file__).resolve().parents[2]
CASES = ("--case", dying.DEADLY, "--case", "ops/UPSCALE-*")


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`dying` is installed."""
    (tmp_path / "site").mkdir()
    with dying.installed(tmp_path / "site", monkeypatch):
        yield


def _conform(*args: str) -> Invoked:
    return CliRunner().invoke(main, list(args), catch_exceptions=False)


def _outside(*args: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:  # noqa: ANN401  # a file or a pipe
    command = [sys.executable, "-m", "conformance.cli", *args]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False, cwd=ROOT)


def _pairs(found: dict[str, Any]) -> tuple[int, int, int]:
    return sum(found["asked"].values()), len(found["results"]), len(found["missing"])


def test_each_pair_is_asked_for_as_often_as_it_stands() -> None:
    """A case asked for twice needs two results; a reason of a case comes before that of its backend."""
    asked = Request({"a": ["x", "x", "y"], "b": ["x"]})
    found = [Result("x", "a", Verdict.PASS)]
    missing = asked.missing(found, "why", {("a", "y"): "its own", ("b", ""): "of the backend"})
    assert [(m.backend, m.case, m.reason) for m in missing] == [
        ("a", "x", "why"), ("a", "y", "its own"), ("b", "x", "of the backend"),
    ]  # fmt: skip
    assert asked.to_json() == {"a": 3, "b": 1}


def test_a_terminal_shows_the_first_missing_pairs() -> None:
    """A count, the reason, and the first few."""
    missing = Request({"a": [f"c{k}" for k in range(500)]}).missing([], "gone")
    lines = judge([Result("x", "b", Verdict.PASS)], missing).lines()
    assert lines == ["no result for 500 cases on a: gone: c0, c1, c2 and 497 more"]


def test_only_what_is_lost_fails_by_itself() -> None:
    """A pair left out by the user's limit makes a run incomplete, unless something failed.

    A reason of its backend is a loss all the same.
    """
    asked = Request({"a": ["x", "y"], "b": ["x"]})
    found = [Result("x", "a", Verdict.PASS)]
    for cause in MissingCause:
        left = asked.missing(found, "why", {("b", ""): "died"}, cause)
        assert [(m.backend, m.cause) for m in left] == [("a", cause), ("b", MissingCause.LOST)]
        assert judge(found, left[:1]).exit_code == (1 if cause is MissingCause.LOST else 5)
        assert judge(found, left).exit_code == 1
        assert judge([*found, Result("y", "a", Verdict.FAIL)], left[:1]).exit_code == 1


@pytest.mark.usefixtures("adapter")
def test_sys_exit_in_an_adapter_ends_neither_the_run_nor_its_record(tmp_path: Path) -> None:
    """Each pair is told or listed as missing, the backends after it run, and the exit code is not 0."""
    out = tmp_path / "r.json"
    backends = ("--backend", "dying?how=exit", "--backend", "ggml")
    done = _conform("run", *backends, *CASES, "--json", str(out))
    assert done.exit_code == 1, done.output
    found = json.loads(out.read_text())
    asked, results, missing = _pairs(found)
    assert asked == results + missing
    assert found["asked"]["ggml"] == sum(r["backend"] == "ggml" and r["verdict"] == "PASS" for r in found["results"])


@pytest.mark.usefixtures("adapter")
def test_an_interrupted_run_lists_what_did_not_run(tmp_path: Path) -> None:
    """After Ctrl-C what ran is recorded, the rest is missing with that reason, and the run is incomplete."""
    out = tmp_path / "r.json"
    done = _outside("run", "--backend", "ggml", "--backend", "dying?how=interrupt", *CASES, "--json", str(out))
    assert done.returncode == 5, done.stderr
    found = json.loads(out.read_text())
    assert {(m["reason"], m["cause"]) for m in found["missing"]} == {("interrupted", "interrupted")}
    asked, results, missing = _pairs(found)
    assert results == found["asked"]["ggml"]
    assert asked == results + missing
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.usefixtures("adapter")
def test_what_a_killed_run_found_is_on_disk(tmp_path: Path) -> None:
    """A process that is gone leaves its results beside --json: a report of the folder has them and says so.

    The next start keeps them.
    """
    out = tmp_path / "r.json"
    words = ("run", *CASES, "--json", str(out))
    gone = _outside(*words, "--backend", "ggml", "--backend", "dying?how=gone")
    assert not out.exists(), gone.stderr
    left = tmp_path / "r.json.partial.jsonl"
    runs = read_runs([tmp_path])
    assert [(d.path, d.record.interrupted) for d in runs.documents] == [(left, True)]
    assert f"**{INTERRUPTED}**" in markdown(runs)
    assert {r.value.backend for r in runs.results} == {"ggml"}
    assert {m.value.backend for m in runs.missing} == {"dying?how=gone"}
    assert len(runs.missing) == len(runs.results)
    again = _conform(*words, "--backend", "ggml")
    assert again.exit_code == 0, again.stderr
    aside = tmp_path / "r.json.partial-1.jsonl"
    assert f"results are in {aside}" in again.stderr
    assert len(read_runs([aside]).results) == len(runs.results)
    assert not left.exists()


def test_the_first_failure_ends_a_run_that_was_told_so(tmp_path: Path) -> None:
    """-x lists what it left out as missing, with that reason; its exit code is that of the failure."""
    out = tmp_path / "r.json"
    fails = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
    done = _conform("run", "--backend", "ggml", "--case", fails, "--case", "ops/ADD1-*", "-x", "--json", str(out))
    assert done.exit_code == 1, done.output
    found = json.loads(out.read_text())
    if found["missing"]:  # the failing case may be the last of the selection
        assert {(m["reason"], m["cause"]) for m in found["missing"]} == {("stopped after 1 failure", "stopped")}
    asked, results, missing = _pairs(found)
    assert asked == results + missing


def test_a_named_backend_on_which_nothing_passed_is_not_green() -> None:
    """All UNSUPPORTED beside a backend that passes: a sentence, and exit code 3; unnamed, the sentence alone."""
    words = ("run", "--case", "ops/GET_ROWS-mxfp4+i32-a=32x2,n=1,va=rows@830")
    named = _conform(*words, "--backend", "xdna2", "--backend", "ggml")
    assert named.exit_code == 3, named.output
    assert "xdna2: no case passed (1 UNSUPPORTED)" in named.output
    alone = _conform(*words, "--backend", "ggml")
    assert alone.exit_code == 0, alone.output


def test_known_failures_alone_prove_nothing() -> None:
    """XFAIL is no PASS; where something failed or is missing, that is what is said."""
    asked = Request({"a": ["x", "y"]})
    waived = [Result("x", "a", Verdict.XFAIL), Result("y", "a", Verdict.XFAIL)]
    assert list(asked.unproven(waived)) == ["a"]
    assert not asked.unproven([*waived[:1], Result("y", "a", Verdict.PASS)])
    assert not asked.unproven([*waived[:1], Result("y", "a", Verdict.FAIL)])


def test_reports_say_what_is_missing(tmp_path: Path) -> None:
    """JUnit has an error for each, bounded; Markdown says it first; a newer run that has the result ends it."""
    rows = [{"backend": "b", "case": f"ops/ADD-{k}@1", "reason": "its worker died"} for k in range(ERRORS + 7)]
    older = {**document([("ops/ADD-0@2", "b", "PASS")]), "asked": {"b": len(rows) + 1}, "missing": rows}
    path = written_to(tmp_path / "older.json", older)
    runs = read_runs([path])
    tree = ET.fromstring(junit(runs))  # noqa: S314  # our own
    assert tree.get("errors") == str(ERRORS + 1)
    text = markdown(runs)
    assert text.splitlines()[0].endswith(f"{len(rows):,} cases without a result")
    assert text.index("without a result") < text.index("## Verdicts")
    newer = document([(str(r["case"]), "b", "PASS") for r in rows], written="2026-01-03T03:04:05Z")
    assert not read_runs([path, written_to(tmp_path / "newer.json", newer)]).missing


CASE = st.builds("{}/X-{}@1".format, st.sampled_from(["ops", "gqa"]), st.integers(0, 2 * LISTED))


@given(st.lists(st.tuples(st.sampled_from("ab"), CASE), unique=True, max_size=4 * LISTED), st.sets(CASE))
def test_many_missing_cases_of_a_family_are_one_entry(asked: list[tuple[str, str]], answered: set[str]) -> None:
    """Each case counts once; at most `LISTED` of a family are listed, others only counted."""
    request = Request({b: [i for of, i in asked if of == b] for b in "ab"})
    missing = request.missing([Result(i, b, Verdict.PASS) for b, i in asked if i in answered], "why")
    left = Counter((b, i.partition("/")[0]) for b, i in asked if i not in answered)
    assert {(m.backend, m.case.partition("/")[0]) for m in missing} == set(left)
    for (backend, family), n in left.items():
        own = [m for m in missing if m.backend == backend and m.case.startswith(family)]
        assert sum(m.count for m in own) == n
        assert (len(own) == n) if n <= LISTED else ([m.case for m in own] == [f"{family}/*"])


def test_every_report_counts_the_cases_of_an_entry(tmp_path: Path) -> None:
    """Markdown, JUnit, the page, the outcome and a comparison; a newer run takes off those that it ran."""
    ids = [f"ops/ADD-{k}@1" for k in range(1000)]
    missing = Request({"b": ids}).missing([], "time limit", cause=MissingCause.TIME_LIMIT)
    older = document([("ops/SUB@1", "b", "PASS")])
    older |= {"asked": {"b": 1001}, "missing": [m.to_json() for m in missing]}
    path = written_to(tmp_path / "older.json", older)
    runs = read_runs([path])
    assert (len(runs.missing), runs.lacking(), runs.unlisted()) == (1, 1000, [])
    assert "ops/*: 1000 cases" in junit(runs)
    assert "1,000 of `ops/*` on `b`" in markdown(runs)
    assert '"unlisted":[["b",1000,"time limit: ops/*"]]' in page(runs, now=datetime(2026, 2, 1, tzinfo=timezone.utc))
    assert outcome_of(runs).exit_code == 5
    assert "1,000 cases on b: time limit: ops/*" in outcome_of(runs).lines()[0]

    base = document([(i, "b", "PASS") for i in [*ids[:2], "gqa/x@1"]], written="2025-01-03T03:04:05Z")
    compared = compare(runs, read_runs([written_to(tmp_path / "base.json", base)]))
    assert {p.case: p.after.verdict for p in compared.pairs} == {
        ids[0]: LOST, ids[1]: LOST, "gqa/x@1": "not run", "ops/SUB@1": "PASS",
    }  # fmt: skip
    passed = {"b": [ids[0], "gqa/x@1"]}
    assert [row.case for row in lost_coverage(passed, [], [m.value for m in runs.missing])] == ["gqa/x@1"]

    newer = document([(i, "b", "PASS") for i in (*ids[:30], "ops/SUB@1")], written="2026-01-03T03:04:05Z")
    newer_path = written_to(tmp_path / "newer.json", newer)
    assert read_runs([path, newer_path]).lacking() == 970
    rest = document([(i, "b", "PASS") for i in ids], written="2026-01-04T03:04:05Z")
    assert read_runs([path, newer_path, written_to(tmp_path / "rest.json", rest)]).lacking() == 0


def test_a_witness_that_json_has_no_word_for_costs_no_run() -> None:
    """A NumPy number is a number, anything else is named by its type: never a TypeError when all has run."""
    odd: dict[Any, Any] = {"kernels": {"X": np.int64(3)}, 7: {np.float32(0.5)}, "o": object}
    r = Result("c", "b", Verdict.PASS, witness=odd)
    said = json.loads(json.dumps(r.to_json(), allow_nan=False))["witness"]
    assert said["kernels"] == {"X": 3}
    assert (said["7"], said["o"]) == ("(set)", "(type)")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110  # no file is meant
def test_a_full_stdout_is_one_line_and_costs_no_record(tmp_path: Path) -> None:
    """No traceback, exit code 74, and --json is written."""
    out = tmp_path / "r.json"
    with open("/dev/full", "w") as full:  # noqa: PTH123  # as above
        done = _outside("run", "--backend", "ggml", "--case", dying.DEADLY, "--json", str(out), stdout=full)
        helped = _outside("--help", stdout=full)
    for d in (done, helped):
        assert d.returncode == 74
        assert len(d.stderr.splitlines()) == 1, d.stderr
    assert json.loads(out.read_text())["missing"] == []


def test_nothing_stays_of_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full is one line that says where the results are; no .tmp stays."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    done = _conform("run", "--backend", "ggml", "--case", dying.DEADLY, "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["r.json.partial.jsonl"]
    assert "conform report" in done.output


def test_settings_in_force_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conformance.toml of the working directory stands in the output, absolute, and in the record."""
    (tmp_path / "w.toml").write_text(
        '[[waiver]]\ncase = "ops/GLU.SWIGLU_OAI-f16-*"\nverdict = "CRASH"\nreason = "r"\nlink = "https://x.y"\n'
        "expiry = 2999-01-01\n"
    )
    (tmp_path / "conformance.toml").write_text('[backend.mine]\nadapter = "ggml"\nwaivers = "w.toml"\n')
    monkeypatch.chdir(tmp_path)
    done = _conform("run", "--backend", "mine", "--case", dying.DEADLY, "--json", "r.json")
    assert f"settings: {tmp_path / 'conformance.toml'} (names: mine; waivers of mine: w.toml: 1 known failure)" in (
        done.output
    )
    said = json.loads((tmp_path / "r.json").read_text())["environment"]["settings"]
    assert said["waivers"] == {"mine": {"file": "w.toml", "known": 1}}
