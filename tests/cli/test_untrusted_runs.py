"""Every command that reads runs ends with an exit code of ours, whatever types a run file has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from changed_json import Place, drawn
from click.testing import CliRunner
from commands import NAMES, conform
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from run_files import cause, document, result, written_to

from conformance.case.case import JSON
from conformance.cli import main

SUM, ADD = "ops/SUM-f32-ne=5x3@1", "ops/ADD-f32+f32-a=24x5x2,inplace=mid@719"
ABSENT = "absent"
"""A backend that is not installed: `conform triage` reads all of its failures, and then has nothing to open."""
VALUES: list[JSON] = [
    None, True, False, -1, 0, 7, 2**40, 10**400, 1e308, -0.5, "", "/", "é", "x" * 300, "\x1b[2J", [], {}, [None], [[]],
    {"a": []}, {"kind": "node"}, {"step": 0, "node": "/"}, ["a", "b"],
]  # fmt: skip


def _where(**more: JSON) -> dict[str, JSON]:
    numbers = {"index": [0, 0, 0, 0], "expected": 1.0, "found": 2.0, "nmse": 0.5, "budget": 1e-7}
    return {"fault": "node", "step": 0, "node": 0, "op": "SUM", "name": "node_0", "numbers": numbers, **more}


def _run(backend: str = ABSENT) -> dict[str, JSON]:
    """A run with each part that commands read."""
    end = {"step": 0, "device": "d", "split": 1}
    rows = [
        result(SUM, backend, "FAIL", where=_where(), budget_used=2.0, nmse=0.5, cause="p"),
        result(SUM, backend, "FAIL", where={"fault": "handover", "source": end, "target": end}, cause="p"),
        result(ADD, backend, "CRASH", where={"fault": "node", "step": 0, "node": 0, "op": "ADD"}, cause="q"),
        result(ADD, backend, "CRASH", witness={"device": "d"}, cause="q"),
        result(SUM, "y", "PASS", budget_used=0.5),
    ]
    causes = [cause("p", [SUM], backend), cause("q", [ADD], backend)]
    missing = [{"backend": "y", "case": ADD, "reason": "killed"}]
    return {**document(rows), "asked": {backend: 2, "y": 2}, "missing": missing, "causes": causes}


def _is_read(place: Place) -> bool:
    return place[0] in {"results", "causes", "missing", "asked", "totals"}


CHANGES = st.lists(st.tuples(st.integers(0, 10**4), st.integers(-1, len(VALUES) - 1)), min_size=1, max_size=3)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES, st.sampled_from(["\\u escapes", "UTF-8"]))
@example([], "UTF-8")
def test_no_run_file_is_a_traceback(tmp_path: Path, changes: list[tuple[int, int]], form: str) -> None:
    """Fields left out and of other types: each command takes the file, or says in one line what is wrong with it."""
    path, made = tmp_path / "run.json", tmp_path / "made"
    made.unlink(missing_ok=True)
    run = drawn(_run(), changes, VALUES, _is_read)
    path.write_text(json.dumps(run, ensure_ascii=form != "UTF-8"), encoding="utf-8")
    for name, *words in (
        ("triage", "--budget", "0.01s", "--no-confirm", "--write-baseline", str(made)),
        ("report", "-o", str(tmp_path / "page")),
        ("report", "--trend", str(tmp_path)),
    ):
        done = CliRunner().invoke(main, [*NAMES[name], str(path), *words])
        assert done.exception is None or isinstance(done.exception, SystemExit), (name, done.exc_info)
        assert done.exit_code in range(6), (name, done.output)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"first_divergence": None}, "results[0]: `where` expected, `first_divergence` of an older version found"),
        ({"where": _where(node="/")}, "results[0].where.node"),
        ({"where": _where(fault="none of ours")}, "results[0].where.fault"),
        ({"where": _where(numbers={"index": ["x"]})}, "results[0].where.numbers.index[0]"),
        ({"where": _where(numbers={"card": "v1"})}, "results[0].where.numbers"),
        ({"where": _where(source={"step": -1})}, "results[0].where.source.step"),
        ({"where": _where(guess=1)}, "results[0].where"),
        ({"error": {"words": "no message"}}, "results[0].error"),
        ({"error": {"message": "x", "guess": 1}}, "results[0].error"),
        ({"notes": [1]}, "results[0].notes[0]"),
    ],
)
def test_a_wrong_type_is_named(tmp_path: Path, change: dict[str, JSON], field: str) -> None:
    """`conform triage` says which field is wrong, before anything runs."""
    run = document([result(SUM, "cpu", "FAIL", **change)])
    done = conform("triage", written_to(tmp_path / "run.json", run))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert field in line


def test_a_smallest_case_is_one_of_its_cause(tmp_path: Path) -> None:
    """`conform triage` names a cause whose smallest case is another's."""
    run = {**document([result(SUM, "x", "FAIL", cause="p")]), "causes": [cause("p", [SUM], "x", smallest=ADD)]}
    done = conform("triage", written_to(tmp_path / "run.json", run))
    assert done.returncode == 2
    assert "causes[0].smallest: the first of its cases expected" in done.stderr


def test_a_run_in_utf_8_is_read(tmp_path: Path) -> None:
    """Characters need no escapes."""
    path = tmp_path / "run.json"
    text = json.dumps(document([result(SUM, "cpu", "PASS", detail="größer")]), ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    done = conform("report", path, "-o", tmp_path / "page")
    assert (done.returncode, done.stderr) == (0, "")
