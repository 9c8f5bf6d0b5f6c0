"""Run documents and journals that anybody may have written: one line that names file and field, never a traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from changed_json import drawn
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from run_files import cause, document, gate, result, unit

from conformance.case.case import JSON
from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.judge.verdict import Request
from conformance.perf.gates import judge_count, loads
from conformance.report.junit import junit
from conformance.report.markdown import markdown
from conformance.report.matrix import csv_ops
from conformance.report.page import page
from conformance.report.runs import read_runs
from conformance.report.trend import changes, read_trend
from conformance.run.session.environment import header
from conformance.run.session.journal import Continued

ADD = "ops/ADD-f32+f32-a=4,b=4@0"
DEEP: JSON = [[[[[[1]]]]]]
for _ in range(80):
    DEEP = [DEEP]
VALUES: list[JSON] = [None, True, -1, 10**400, 2**63, 1e308, -0.5, "", "x" * 300, "=1+1", "\x1b[2J", "\u202e", [], {},
                      [None], {"a": []}, [1e308] * 20, DEEP]  # fmt: skip


def documents() -> list[dict[str, JSON]]:
    """One valid document of each kind."""
    audit = {**header("audit"), "backends": {"cpu": [{"case": ADD, "finding": "overclaim", "name": "w", "ne": [1, 2]}]}}
    zoo = {**header("zoo"), "results": [{"arch": "llama", "device": "cpu", "verdict": "PASS", "cause": "p"}]}
    return [
        {
            **document([result(ADD, "x", "FAIL", detail="d", cause="p"), result(ADD, "y", "PASS")]),
            "causes": [cause("p", [ADD])],
        },
        document([unit("decode", "x", [0.1] * 8), gate("g", "FAIL")]),
        audit,
        zoo,
    ]


CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(-1, len(VALUES) - 1)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(st.integers(0, len(documents()) - 1), CHANGES))
def test_changed_documents_are_read_or_refused(tmp_path: Path, which: tuple[int, list[tuple[int, int]]]) -> None:
    """Fields left out, swapped, huge or deep: every report and the trend take them, or a line says what is wrong."""
    path = tmp_path / "run.json"
    document_, edits = which
    path.write_text(json.dumps(drawn(documents()[document_], edits, VALUES)), encoding="ascii")
    try:
        runs = read_runs([path])
    except UsageError as e:
        assert str(path) in str(e)  # noqa: PT017  # raised for some only
        return
    page(runs, now=datetime.now(timezone.utc), drawing=0.0)
    markdown(runs)
    junit(runs)
    csv_ops(runs.results)
    changes(read_trend([path]).series())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES)
def test_changed_journals_are_read_or_refused(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    """A second start goes on, or names the file, the line and the field."""
    options: dict[str, JSON] = {"cases": []}
    path = tmp_path / "journal"
    head = {**header("journal"), "options": options, "asked": [], "seed": 1}
    lines: JSON = [
        head,
        {"starts": 1, "backend": "x", "cases": [[ADD, 1]]},
        result(ADD, "x", "FAIL", witness={"a": 1}),
        result(ADD, "x", "PASS"),
    ]
    lines = drawn(lines, changes, VALUES, lambda place: len(place) > 1)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        journal = Continued(path, tmp_path, options)
        journal.begin(Request())
    except UsageError as e:
        assert str(path) in str(e)  # noqa: PT017  # as above
        return
    kept = journal.take("x", ADD)
    journal.end(written=False)
    if kept is not None:
        kept.sentence()
        json.dumps(kept.to_json(), allow_nan=False)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"case": NaN}', '{"case": 1e999}', "\xff", "9" * 5000, "null", '""'])
def test_torn_or_foreign_lines_are_one_line(tmp_path: Path, line: str) -> None:
    """No line of a journal is a traceback."""
    path = tmp_path / "journal"
    head = {**header("journal"), "options": {}, "asked": [], "seed": 1}
    path.write_text(f"{json.dumps(head)}\n{line}\n", encoding="latin-1")
    with pytest.raises(UsageError, match="line 2"):
        Continued(path, tmp_path, {})


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    """A cell that a spreadsheet would compute stands behind an apostrophe, and each row stays one line."""
    path = tmp_path / "run.json"
    rows = [result(ADD, name, "PASS") for name in ("=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "x\n=1")]
    path.write_text(json.dumps(document(rows)))
    text = csv_ops(read_runs([path]).results)
    assert len(text.splitlines()) == 1 + len(rows)
    assert not any(
        cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        for line in text.splitlines()
        for cell in line.strip('"').split('","')
    )


TOML_VALUES = ["true", "-1", "0", "nan", "inf", "-inf", "1e308", "1e999", "0x" + "f" * 6000, "9" * 6000, '""', '"x"',
               '"a\\nb"', '"\\u202e"', "[]", "{}", '["smoke"]', "{a = 1}", "1979-05-27", "[" * 90 + "]" * 90,
               "[" * 5000 + "]" * 5000, "{a = " * 400 + "1" + "}" * 400, '"compiles <= ' + "9" * 5000 + '"',
               '"no unit"', '"ggml?x=\\u0000"', "'"]  # fmt: skip
GATES: list[dict[str, str]] = [
    {"name": '"c"', "kind": '"counter"', "unit": '"load"', "backend": '"cpu"', "expect": '"compiles <= 2"'},
    {"name": '"r"', "kind": '"ratio"', "unit": '"load"', "backend": '"cpu"', "against": '"baseline"', "limit": "1.02"},
    {"name": '"a"', "kind": '"absolute"', "unit": '"load"', "backend": '"cpu"', "machine": '"0123456789ab"',
     "limit": "0.02", "why": '"w"'},
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(-2, len(TOML_VALUES) - 1)), min_size=1,
             max_size=3)
)  # fmt: skip
@example([(1, 0, 22), (1, 1, 0)])  # a name of thousands of digits, and a wrong kind
def test_changed_gates_are_read_or_refused(changes: list[tuple[int, int, int]]) -> None:
    """Keys left out (-1), given twice (-2) or of any value: gates that can be judged, or a line with the file."""
    tables = [{"level": '"smoke"', "budget": "90"}, *(dict(g) for g in GATES)]
    twice: list[tuple[int, str]] = []
    for table, key, value in changes:
        name = list(tables[table])[key % len(tables[table])] if tables[table] else "name"
        if value == -2:
            twice.append((table, name))
        elif value == -1:
            tables[table].pop(name, None)
        else:
            tables[table][name] = TOML_VALUES[value]
    lines = []
    for i, table_ in enumerate(tables):
        lines += ["[[gate]]"] if i else []
        lines += [f"{k} = {v}" for k, v in table_.items() for _ in range(1 + twice.count((i, k)))]
    try:
        gates = loads("\n".join(lines), "gates.toml")
    except UsageError as e:
        assert "gates.toml" in str(e)  # noqa: PT017  # raised for some only
        assert len(str(e)) < 2000  # noqa: PT017  # as above
        return
    for g in gates.gates:
        counters = {"compiles": 1.0}
        json.dumps(judge_count(replace(g, relation=g.relation or "<="), counters).to_json(), allow_nan=False)


@pytest.mark.parametrize("value", TOML_VALUES, ids=lambda v: ascii(v[:12]))
def test_a_wrong_limit_is_one_line(tmp_path: Path, value: str) -> None:
    """`conform perf gate FILE`: one line that names file, gate and key, and exit code 2."""
    path = tmp_path / "g.toml"
    table = {**GATES[2], "limit": value}
    path.write_text('level = "smoke"\n[[gate]]\n' + "".join(f"{k} = {v}\n" for k, v in table.items()))
    if value == "1e308":
        assert loads(path.read_text(), "g").gates[0].limit == 1e308
        return
    done = CliRunner().invoke(main, ["perf", "gate", str(path)])
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1), done.output
    assert "g.toml" in done.output
