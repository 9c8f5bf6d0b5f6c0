"""`conform run --against`: only what is new since another backend or an earlier run fails."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import conform_here as conform
from marks import needs_wheel

WRONG = "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1"
"""Fails on `ggml`."""
RIGHT = "ops/GET_ROWS-i32+i32-a=33x7,n=12@833"
BOTH = ("--backend", "ggml", "--case", WRONG, "--case", RIGHT)


def _document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the record of a run of both cases."""
    path = tmp_path_factory.mktemp("ran") / "before.json"
    assert conform("run", *BOTH, "--json", str(path)).exit_code == 1
    return path.read_text()


@pytest.fixture
def record(ran: str, tmp_path: Path) -> Path:
    """A copy of the record, for a test to change."""
    path = tmp_path / "before.json"
    path.write_text(ran)
    return path


def _changed(record: Path, case: str, verdict: str) -> Path:
    """A record in which `case` had another verdict."""
    document = _document(record)
    for row in document["results"]:
        if row["case"] == case:
            row["verdict"] = verdict
    record.write_text(json.dumps(document))
    return record


@pytest.mark.parametrize(
    ("case", "before", "code", "says"),
    [
        (WRONG, "FAIL", 0, ": 1 still failing"),
        (WRONG, "PASS", 1, f"new: FAIL {WRONG} on ggml, was PASS"),
        (WRONG, "UNSUPPORTED", 1, "1 new failure: 1 FAIL"),
        (RIGHT, "FAIL", 0, f"fixed: PASS {RIGHT} on ggml, was FAIL"),
    ],
)
def test_only_what_is_new_since_a_record_fails(record: Path, case: str, before: str, code: int, says: str) -> None:
    """A failure that the record has does not; one that it lacks does, and what is fixed is said."""
    done = conform("run", *BOTH, "--against", str(_changed(record, case, before)))
    assert done.exit_code == code, done.output
    assert says in done.output


WAIVER = """[[waiver]]
case = "ops/GET_ROWS-f32+i32-a=33x7*"
verdict = "FAIL"
nmse = 1.8
reason = "rows of a transposed matrix"
link = "https://github.com/ggml-org/llama.cpp/issues"
expiry = 2099-12-31
"""


@needs_wheel
def test_a_waiver_holds_for_both_backends(tmp_path: Path) -> None:
    """A known failure that the other backend has, too, is no difference."""
    (tmp_path / "known.toml").write_text(WAIVER)
    done = conform("run", *BOTH, "--against", "ggml?threads=1", "--waivers", str(tmp_path / "known.toml"))
    assert done.exit_code == 0, done.output
    assert "1 PASS, 1 XFAIL" in done.output
    assert "against ggml?threads=1: 2 same" in done.output


def test_many_cases_that_differ_alike_are_counted(tmp_path: Path) -> None:
    """Twenty are listed, and the others are a number."""
    path = tmp_path / "before.json"
    words = ("run", "--backend", "ggml", "--case", "ops/ADD-*", "--json", str(path))
    assert conform(*words).exit_code == 0
    n = len(_document(path)["results"])
    path.write_text(path.read_text().replace('"verdict": "PASS"', '"verdict": "FAIL"'))
    done = conform(*words[:-2], "--against", str(path))
    assert done.output.count("fixed: PASS") == 20
    assert f"fixed: {n - 20} more; --json FILE has all" in done.output


def test_a_worse_failure_than_the_base_has_fails(record: Path) -> None:
    """A failure of the base excuses no error a hundred times as large, and the output says what got worse."""
    document = _document(record)
    for row in document["results"]:
        if row["case"] == WRONG:
            row["wrong"]["nmse"] /= 100
    record.write_text(json.dumps(document))
    done = conform("run", *BOTH, "--against", str(record))
    assert done.exit_code == 1, done.output
    assert f"worse: FAIL {WRONG} on ggml, was FAIL: NMSE" in done.output
    assert "worse on ggml: NMSE" in done.output


def test_a_comparison_in_which_nothing_passes_is_no_success(record: Path) -> None:
    """Each failure is known, and still exit code 3 says that nothing was shown to work."""
    done = conform("run", "--backend", "ggml", "--case", WRONG, "--against", str(record))
    assert done.exit_code == 3, done.output
    assert "ggml: no case passed (1 failed)" in done.output


def test_a_case_that_passed_and_is_refused_fails(record: Path) -> None:
    """Coverage that is lost is no success; a case that nobody asked for again is not lost."""
    record.write_text(record.read_text().replace('"ggml"', '"xdna2"'))
    done = conform("run", "--backend", "xdna2", "--case", RIGHT, "--against", str(record))
    assert done.exit_code == 1, done.output
    assert f"coverage lost on xdna2: 1 of 1 case that passed (1 UNSUPPORTED): {RIGHT}" in done.output


def test_a_second_backend_runs_the_same_cases(tmp_path: Path) -> None:
    """The record has the results of both, and a second start runs nothing again."""
    path, journal = tmp_path / "both.json", tmp_path / "both.journal"
    words = ("run", *BOTH, "--against", "cpu", "--json", str(path), "--journal", str(journal))
    done = conform(*words)
    assert done.exit_code == 0, done.output
    assert "against cpu: 1 still failing, 1 same" in done.output
    document = _document(path)
    assert Counter((r["backend"], r["case"]) for r in document["results"]) == Counter(
        (b, i) for b in ("ggml", "cpu") for i in (WRONG, RIGHT)
    )
    assert (document["asked"], document["missing"]) == ({"ggml": 2, "cpu": 2}, [])
    assert document["selection"]["against"] == "cpu"
    lines = journal.read_text()
    assert conform(*words).exit_code == 0
    assert journal.read_text() == lines


@pytest.mark.parametrize(
    ("against", "says"),
    [
        ("ggml", "--against ggml: another backend, or a run's record, expected"),
        ("nope", "backend 'nope' is not installed"),
    ],
)
def test_what_cannot_be_compared_with_is_one_line(against: str, says: str) -> None:
    """Exit code 2, and nothing runs."""
    done = conform("run", *BOTH, "--against", against)
    assert done.exit_code == 2
    assert says in done.output


STAND_IN = """
import os
import numpy as np
import backends.ggml.session as session

real = session.GgmlSession.compute


def compute(self, graph, inputs, outputs):
    values, last = dict(real(self, graph, inputs, outputs)), list(graph)[-1]
    if os.environ.get("SWITCH") == "on" or os.environ.get("SWITCH") is None and os.path.exists("always"):
        values[last] = np.zeros_like(values[last])
    return values


session.GgmlSession.compute = compute
"""
"""A library that a variable makes wrong; beside a file called `always` it is wrong without it, too."""


@needs_wheel
@pytest.mark.parametrize(
    ("value", "always", "code", "says"),
    [
        ("on", False, 1, f"new: FAIL {RIGHT} on ggml?env.SWITCH=on, was PASS"),
        ("off", False, 0, "against ggml: 1 same"),
        ("on", True, 3, ": 1 still failing"),
        ("off", True, 0, f"fixed: PASS {RIGHT} on ggml?env.SWITCH=off, was FAIL"),
    ],
)
def test_a_variable_of_a_backend_is_compared_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, always: bool, code: int, says: str
) -> None:
    """Each side has a process of its own, since a library reads its environment once."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    if always:
        (tmp_path / "always").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    done = conform("run", "--backend", f"ggml?env.SWITCH={value}", "--against", "ggml", "--case", RIGHT)
    assert done.exit_code == code, done.output
    assert says in done.output
