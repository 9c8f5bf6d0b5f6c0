"""The report's page as a file: what stands in it, out of which rows, and that nothing in it can do harm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from html.parser import HTMLParser
from math import inf
from pathlib import Path
from typing import Any

import made_runs
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from run_files import written_to

from conformance.cli import main
from conformance.judge.verdict import FAILURES
from conformance.report.page import page, tables
from conformance.report.page.drawings import drawn_graphs
from conformance.report.page.tables import NOTHING, embedded, numbers, objects, words
from conformance.report.runs import Runs, read_runs
from conformance.report.trend import read_trend

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run files of every kind."""
    found = tmp_path_factory.mktemp("runs")
    made_runs.write(found, 1500, nights=3)
    return found


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """The same, read."""
    return read_runs([folder])


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._in] = self.texts.get(self._in, "") + data


def _read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    return reader


def _data(html: str) -> Any:  # noqa: ANN401  # JSON
    return json.loads(_read(html).texts["data"])


def _cell(table: Mapping[str, Any], column: str, i: int) -> Any:  # noqa: ANN401  # JSON
    c = table["columns"][column]
    if "numbers" in c:
        return c["numbers"][i]
    at = c["at"][i]
    return None if at == NOTHING else c.get("words", c.get("objects"))[at]


@given(st.lists(st.none() | st.text()))
def test_words_are_kept(values: list[str | None]) -> None:
    """A column of texts gives back each of them, and holds none twice."""
    column = words(values)
    assert [None if k == NOTHING else column["words"][k] for k in column["at"]] == values
    assert len(set(column["words"])) == len(column["words"])


@given(st.lists(st.none() | st.dictionaries(st.text(), st.integers() | st.booleans())))
def test_objects_are_kept(values: list[dict[str, Any] | None]) -> None:
    """A column of objects gives back each of them, with 1 and true told apart."""
    column = objects(values)
    back = [None if k == NOTHING else column["objects"][k] for k in column["at"]]
    assert json.dumps(back, sort_keys=True) == json.dumps(values, sort_keys=True)


@given(st.recursive(st.text() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
                    lambda s: st.lists(s) | st.dictionaries(st.text(), s)))  # fmt: skip
def test_embedded_is_json_without_markup(value: Any) -> None:  # noqa: ANN401
    """Whatever a run says, its JSON in the page is the same JSON, ASCII, without what could end a script element."""
    text = embedded(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert "<" not in text


def test_numbers_are_exact() -> None:
    """A figure is not rounded on its way into the page."""
    assert json.loads(embedded(numbers([0.1 + 0.2, None, 5e-324]))) == {"numbers": [0.1 + 0.2, None, 5e-324]}


def test_the_page_holds_every_row(runs: Runs) -> None:
    """Each result stands in the page once, with every field as in the run's JSON, and its place there."""
    table = _data(page(runs, now=NOW))["tables"]["results"]
    assert table["count"] == len(runs.results) + len(runs.missing)
    for i in range(table["count"]):
        document = runs.documents[_cell(table, "document", i)]
        row = document.body[_cell(table, "list", i)][_cell(table, "row", i)]
        if _cell(table, "list", i) == "missing":
            continue
        for key in ("case", "backend", "verdict", "budget_used", "nmse", "nmse_exact", "seconds", "steps", "witness",
                    "where", "error", "notes", "saved", "waived", "cause", "detail"):  # fmt: skip
            assert _cell(table, key, i) == row[key], key
        assert (_cell(table, "fresh", i) == "fresh") == row["fresh"]


@pytest.mark.parametrize(("name", "place"), [("causes", "causes"), ("units", "results")])
def test_every_row_says_where_it_stands(runs: Runs, name: str, place: str) -> None:
    """Rows of every other table name a place in a document, and what is shown there is what stands there."""
    data = _data(page(runs, now=NOW))
    table = data["tables"][name]
    assert table["count"]
    for i in range(table["count"]):
        document = runs.documents[_cell(table, "document", i)]
        assert data["documents"][_cell(table, "document", i)]["run"] == document.run
        assert _cell(table, "list", i) == place
        row = document.body[place][_cell(table, "row", i)]
        same = [key for key in row if key in table["columns"] and isinstance(row[key], (str, float, int))]
        assert same
        for key in same:
            assert _cell(table, key, i) == row[key], key


def test_markup_from_a_run_stays_text(runs: Runs) -> None:
    """A detail with `</script><b>` neither ends the data nor becomes an element."""
    html = page(runs, now=NOW)
    assert [t for t, _ in _read(html).tags].count("script") == 2
    assert "</script><b>" not in html
    assert any("</script><b>" in w for w in _data(html)["tables"]["results"]["columns"]["detail"]["words"])


def test_the_page_asks_for_nothing_else(runs: Runs) -> None:
    """No element fetches, and the policy lets only the page's own script and style run."""
    reader = _read(page(runs, now=NOW))
    for tag, attributes in reader.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "href"} & attributes.keys() - ({"href"} if tag == "a" else set())
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_ops_and_types() -> None:
    """Family, op and type of a case, for the rows of the matrix."""
    assert tables.subject("ops/GLU.SWIGLU-f16-ne=4@1") == ("ops", "GLU.SWIGLU", "f16")
    assert tables.subject("ops/CPY-f16+q5_K-a=256@2") == ("ops", "CPY", "f16+q5_K")
    assert tables.subject("gqa/gpt-oss-heads=4,run=p3@1") == ("gqa", "gqa", "gpt-oss")
    assert tables.subject("random/nodes=31@680") == ("random", "random", "")
    assert tables.subject("captured/llama-fa-1seq@0") == ("captured", "captured", "llama-fa-1seq")
    assert tables.subject("whatever") == ("whatever", "whatever", "")


def test_failures_are_drawn_first(runs: Runs) -> None:
    """The graphs in the page are those of failures, then one of each op; a small budget keeps failures."""
    failed = [c.value.smallest for c in runs.causes]
    failed += [r.value.case for r in runs.results if r.value.verdict in FAILURES and r.document.record.causes]
    drawn = drawn_graphs(runs, seconds=inf)
    assert set(failed) <= drawn.keys()
    few = drawn_graphs(runs, cases=3, seconds=inf)
    assert len(few) == 3
    assert set(few) <= set(failed)
    for d in drawn.values():
        assert all(0 <= x <= d["width"] and 0 <= y <= d["height"] for _, x, y, *_ in d["boxes"])


def test_a_graph_over_the_budget_is_left_out(runs: Runs) -> None:
    """No drawing goes over the budget of boxes."""
    assert sum(len(d["boxes"]) for d in drawn_graphs(runs, boxes=20, seconds=inf).values()) <= 20


def test_a_saved_case_is_drawn_from_its_file(tmp_path: Path) -> None:
    """A case that no id makes is drawn from the file that was kept of it, found beside the run's."""
    run = made_runs.conformance(40)
    (result,) = run["results"] = [next(r for r in run["results"] if r["case"].startswith("ops/"))]
    saved = CliRunner().invoke(main, ["run", "--case", result["case"], "--backend", "cpu"])
    assert saved.exit_code == 0, saved.output
    from conformance.case import casefile  # noqa: PLC0415  # beside its only use
    from conformance.run.session.select import build  # noqa: PLC0415  # as above

    casefile.write(tmp_path / "kept.gguf", [build(result["case"])])
    result |= {"case": "mine/shrunk", "verdict": "FAIL", "saved": "/elsewhere/kept.gguf", "cause": None}
    run["causes"] = []
    (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    assert list(drawn_graphs(read_runs([tmp_path / "run.json"]))) == ["mine/shrunk"]


def test_a_trend_adds_other_nights(folder: Path, tmp_path: Path) -> None:
    """Timings of a trend stand beside those of the files; a night that is in both is there once, from its file."""
    for night in range(1, 13):
        written_to(tmp_path / f"{night}.json", made_runs.perf(night, 1.0 if night < 8 else 1.25))
    trend = read_trend([tmp_path])
    alone = _data(page(read_runs([folder]), now=NOW))["tables"]["units"]
    data = _data(page(read_runs([folder]), now=NOW, trend=trend))
    table = data["tables"]["units"]
    documents = [data["documents"][_cell(table, "document", i)]["run"] for i in range(table["count"])]
    assert len(set(documents)) == 12
    assert table["count"] == alone["count"] + 9 * 8  # nine more nights of eight timed units
    assert {c["written"][:10] for c in data["changes"]} == {"2026-11-08"}


def test_the_command_writes_all_reports(folder: Path, tmp_path: Path) -> None:
    """`conform report` writes the page and the other reports, and says where; it exits as its runs did."""
    out = tmp_path / "new" / "folder"
    ran = CliRunner().invoke(main, ["report", str(folder), "--level", "smoke", "-o", str(out)])
    assert ran.exit_code == 1, "the runs have failures"
    for name in ("index.html", "summary.md", "junit.xml", "ops.csv"):
        assert (out / name).stat().st_size
        assert str(out / name) in ran.output
    planned = _data((out / "index.html").read_text(encoding="utf-8"))["planned"]
    assert len(planned["smoke"]) > 500


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    """A file of another kind, or a folder that is none, is one line and exit code 2."""
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    ran = CliRunner().invoke(main, ["report", str(tmp_path / "x.json"), "-o", str(tmp_path / "out")])
    assert ran.exit_code == 2
    assert "x.json" in ran.output
    made_runs.write(tmp_path, 20, nights=0)
    (tmp_path / "taken").write_text("", encoding="utf-8")
    ran = CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(tmp_path / "taken" / "out")])
    assert ran.exit_code == 2
