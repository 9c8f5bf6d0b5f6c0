"""The report's page in a real browser: each figure leads to its rows, and each row is the one of the run."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import parse_qs

import made_runs
import pytest
from browser import VIEWS, Driver, ask, case_view, cause_view, failed_view, go, results, turned

from conformance.judge.cause import Cause
from conformance.judge.verdict import FAILURES, Verdict
from conformance.report.matrix import PASSED, counts, matrix
from conformance.report.page import page
from conformance.report.page.tables import subject_of
from conformance.report.runs import Runs, command, read_runs
from conformance.run.session.select import case_ids

pytest_plugins = ("page_fixtures",)
NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)


def test_it_opens_without_a_network(at: Driver) -> None:
    """Opened from disk it shows the overview, fetches nothing and breaks no policy."""
    assert at.execute_script("return document.documentElement.dataset.ready") == "yes"
    assert at.execute_script("return document.querySelector('h2').textContent") == "Overview"
    assert at.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("view", [v for v in VIEWS if v != "support"])
def test_each_figure_leads_to_its_rows(at: Driver, view: str) -> None:
    """Every figure of a view that is a count is a link to as many rows as it says."""
    go(at, view)
    figures = ask(at, "return all('a.figure').map((a) => [a.textContent.trim(), a.getAttribute('href')])")
    counts = [f for f in figures if f[0].replace(",", "").isdigit() and not f[1].startswith("#units?document")]
    assert ask(at, "return wrongFigures(given[0])", counts) == []


def test_the_overview_counts_the_run(at: Driver, runs: Runs) -> None:
    """The table of backends is what the run's JSON says, counted here."""
    shown = ask(
        at,
        "return all('.overview [aria-label=Backends] tbody tr')"
        ".map((tr) => [tr.cells[0].textContent, ...[...tr.cells].slice(2).map(numeral)])",
    )
    want = []
    cases = {r.value.case for r in runs.results if not r.value.case.startswith(("perf/", "gate/"))}
    for backend in dict.fromkeys(r.value.backend for r in runs.results):
        own = [r.value for r in runs.results if r.value.backend == backend]
        cell = Counter(name for r in own for name in counts(r))
        unsupported = sum(r.verdict is Verdict.UNSUPPORTED for r in own)
        lacking = len(cases - {r.case for r in own})
        unlisted = [cell["failed"], 0, cell["waived"], unsupported, lacking]
        want.append([backend, *unlisted, cell["passed"], len(own)])
    assert sorted(shown) == sorted(want)
    failed = [row[1] for row in shown]
    assert failed == sorted(failed, reverse=True)


def test_the_matrix_is_the_matrix(at: Driver, runs: Runs) -> None:
    """Each cell of op × type × backend shows the counts that `report.matrix` has, and each count leads to its rows."""
    go(at, "support")
    shown = ask(at, "return cells()")
    found = matrix(runs.results)
    want: dict[tuple[str, str | None, str], Counter[str]] = {}
    for row in runs.results:
        _, op, kind = subject_of(row.value)
        for key in ((op, None), (op, kind or "(no name)")):
            want.setdefault((*key, row.value.backend), Counter()).update([*counts(row.value), "cases"])
    for (what, backend), cell in found.cells.items():  # the same as the other reports have
        if what.op:
            own = want[what.op, what.types, backend]
            assert own - Counter(cases=own["cases"]) == cell
    assert len(shown) > len(found.cells)
    links = []
    for c in shown:
        expected = want.get((c["op"], c["type"], c["backend"]))
        if expected is None:
            assert (c["word"], c["counts"]) == ("not run", [])
            continue
        assert c["word"] == _word(expected), c
        assert c["counts"] == [expected[k] for k in ("passed", "executed", "declared", "cases")], c
        links += [(str(n), href) for href, n in zip(c["links"][1:], c["counts"], strict=True)]
    assert ask(at, "return wrongFigures(given[0])", links[::37]) == []


def _word(cell: Counter[str]) -> str:
    if not cell["declared"]:
        return "unsupported"
    if not cell["passed"]:
        return "0 %"
    if cell["failed"]:
        return f"{cell['failed']} failed"
    return f"{cell['waived']} known" if cell["waived"] else "passed"


def test_a_row_is_the_row_of_the_run(at: Driver, runs: Runs) -> None:
    """What a case's view shows as JSON is the row of the run that it names, and its commands are the right ones."""
    rows = results(runs)
    own = [r for r in runs.results if r.document.record.causes]
    of_each_verdict = {r["verdict"]: i for i, r in enumerate(rows)}
    for i in (*of_each_verdict.values(), 0, 17):
        go(at, case_view(runs, i))
        assert json.loads(ask(at, "return document.querySelector('details pre').textContent")) == rows[i]
        assert f"results[{i}]" in ask(at, "return document.querySelector('main').innerText")
        assert command(own[i].value) in ask(at, "return all('.command code').map((c) => c.textContent)")


def test_it_begins_with_causes(at: Driver, runs: Runs) -> None:
    """The overview begins with each cause, in the order of the file.

    It has the verdict, architectures, cases and the smallest of them, the verdicts of the base, and the command that
    runs that case again; failures that it explains are not repeated below.
    """
    rows = ask(
        at,
        """return all('ol.causes > li')
          .map((li) => ['.badge', 'h4 a', '.figure', '.smallest', '.base-and-now', '.command code']
            .map((x) => li.querySelector(x).textContent).concat(li.innerText))""",
    )
    # a fault that several backends have is one card, of the first of them
    same: dict[tuple[str, str], list[tuple[Cause, str]]] = {}
    for c, proof in zip(runs.causes, runs.proofs(), strict=True):
        same.setdefault((c.value.id, c.value.text), []).append((c.value, command(proof.value)))
    assert len(same) == len(rows) > 2
    for row, each in zip(rows, same.values(), strict=True):
        v, first = each[0]
        assert row[0] == f"✗ {v.verdict}"
        assert row[1:4] == [v.sentence, str(sum(len(c.cases) for c, _ in each)), v.smallest]
        assert "base" in row[4]
        assert row[5] == first
        assert f"{v.rank['architectures']} architectures" in row[6]
    told = ask(at, "return all('.stories strong a').map((a) => new URLSearchParams(a.hash.slice(9)).get('cause'))")
    assert set(told) == {"none"}


def test_a_cause_shows_its_proof(at: Driver, runs: Runs) -> None:
    """The view of a cause has its sentence, verdict, conditions, places and cases.

    Also the drawing of the smallest, and the command that runs it again.
    """
    rows = results(runs)
    for i, (c, proof) in enumerate(zip(runs.causes, runs.proofs(), strict=True)):
        go(at, cause_view(runs, i))
        assert ask(at, "return document.querySelector('h2').textContent") == c.value.sentence
        text = " ".join(ask(at, "return document.querySelector('main').innerText").split())
        hit = f"{c.value.rank['architectures']} architectures"
        said = ("src[0].type = f16 src[1].ne[2] >1", "seen always", hit, "conformance.json, run ",
                f"on {c.value.backend}", str(c.value.verdict), str(c.value.folder))  # fmt: skip
        assert [s for s in said if s not in text] == []
        assert ask(at, "return all('svg.graph[role=img] .box').length") >= 2
        assert command(proof.value) in ask(at, "return all('.command code').map((c) => c.textContent)")
        listed = ask(at, "return all('main > div > ul.others a').map((a) => [a.textContent, a.hash])")
        assert [name for name, _ in listed] == list(c.value.cases)
        for name, href in listed:
            row = rows[int(parse_qs(href.partition("?")[2])["row"][0])]
            assert (row["case"], row["backend"], row["cause"]) == (name, c.value.backend, c.value.id)


def test_a_case_leads_to_its_cause(at: Driver, runs: Runs) -> None:
    """A result that a cause explains names it, in the list and in its own view; an unknown cause is said to be none."""
    rows = results(runs)
    i = next(i for i, r in enumerate(rows) if r["cause"])
    go(at, case_view(runs, i))
    (link,) = ask(at, "return all('main a').map((a) => a.hash).filter((x) => x.startsWith('#cause?'))")
    go(at, link[1:])
    assert rows[i]["case"] in ask(at, "return all('main a').map((a) => a.textContent)")
    go(at, f"results?cause={rows[i]['cause']}")
    assert ask(at, "return found()") == sum(r["cause"] == rows[i]["cause"] for r in rows)
    go(at, "cause?id=x&backend=y")
    assert ask(at, "return document.querySelector('h2').textContent") == "Cause not found"


def test_a_failure_shows_its_graph(at: Driver, runs: Runs) -> None:
    """The case of a failure is drawn, with the node that diverges marked by a sign as well as by colour."""
    go(at, failed_view(runs))
    assert ask(at, "return all('svg.graph[role=img] .box').length") >= 2
    (marked,) = ask(at, "return all('.culprit .head').map((e) => e.textContent)")
    assert marked.startswith("✗ ")


@pytest.mark.parametrize(
    ("text", "backend", "verdict"),
    [
        ("rope f32", "", ""),
        ("", "npu", "UNSUPPORTED"),
        ("mul_mat", "ggml", "PASS"),
        ("no emitter", "npu", ""),
        ("</script>", "", "CRASH"),
        ("nowhere", "", ""),
    ],
)
def test_filters_find_what_python_finds(at: Driver, runs: Runs, text: str, backend: str, verdict: str) -> None:
    """Words and choices leave exactly the rows of the run that fit."""
    go(at, "results")
    shown = ask(
        at,
        """choose(document.querySelector("#search"), given[0]);
        choose(chooser("backend"), given[1]);
        choose(chooser("verdict"), given[2]);
        return [found(), all(".rows tbody tr").length];""",
        *(text, backend, verdict),
    )
    keys = ("case", "backend", "verdict", "detail", "saved", "waived")
    want = [
        r
        for r in results(runs)
        if all(any(t in str(r[k] or "").lower() for k in keys) for t in text.lower().split())
        and backend in {"", r["backend"]}
        and verdict in {"", r["verdict"]}
    ]
    assert shown == [len(want), min(50, len(want))]
    assert want or text == "nowhere"


def test_rows_can_be_put_in_order(at: Driver, runs: Runs) -> None:
    """A heading orders all rows, not only those of the page; what has no figure stands last."""
    go(at, "results")
    head, *places = ask(
        at,
        r"""const button = all("thead button").find((b) => b.textContent === "error");
        button.click();
        button.click();
        const place = (e) => Number(e.textContent.match(/results\[(\d+)\]/)[1]);
        return [document.querySelector("[aria-sort=descending]").textContent, ...all(".rows .source").map(place)];""",
    )
    rows = results(runs)
    want = sorted((r["budget_used"] for r in rows if r["budget_used"] is not None), reverse=True)[:50]
    assert head == "error"
    assert [rows[i]["budget_used"] for i in places] == want


def test_a_filter_is_in_the_address_and_back_undoes_it(at: Driver, address: str) -> None:
    """Each choice is one step of Back; the letters of a search together are one.

    An address opened again has the same rows, words and choices; so has the matrix.
    """
    first = at.current_window_handle
    at.switch_to.new_window("tab")  # of a full history Chromium forgets first what a script did and no finger
    try:
        at.get(address)
        _filters_and_back(at, address)
    finally:
        at.close()
        at.switch_to.window(first)


def _filters_and_back(at: Driver, address: str) -> None:
    go(at, "results")
    steps = """const all_ = found();
        choose(chooser('verdict'), 'FAIL');
        const failed = found();
        for (const q of ['o', 'op', 'ops']) choose(document.getElementById('search'), q);
        return [all_, failed, found(), location.hash]"""
    everything, failed, both, hash_ = ask(at, steps)
    assert everything > failed > both > 0
    assert hash_ == "#results?verdict=FAIL&q=ops"
    for rows in (failed, everything):
        ask(at, "history.back()")
        assert turned(at, "document.querySelector('.found') && found()", rows) == rows
    at.get("about:blank")
    at.get(address + hash_)
    shown = "return [found(), document.getElementById('search').value, chooser('verdict').value]"
    assert ask(at, shown) == [both, "ops", "FAIL"]
    go(at, "support")
    ask(at, "choose(chooser('family'), 'random')")
    assert ask(at, "return location.hash") == "#support?family=random"
    ask(at, "history.back()")
    assert turned(at, "chooser('family').value", "") == ""


def test_nothing_of_a_run_becomes_markup(at: Driver) -> None:
    """An abort text with tags is shown letter for letter."""
    go(at, "results?verdict=CRASH&verdict=TIMEOUT&verdict=OVERCLAIM")
    assert "</script><b>&amp; <!-- not markup" in ask(at, "return document.querySelector('main').textContent")
    assert ask(at, "return all('main b, main script').length") == 0


def test_copy(at: Driver, runs: Runs) -> None:
    """The button beside a command puts it on the clipboard."""
    go(at, failed_view(runs))
    at.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    at.find_element("css selector", ".copy").click()
    ask(at, "while (document.querySelector('.copy').textContent !== 'Copied') await new Promise(requestAnimationFrame)")
    text = ask(at, "return navigator.clipboard.readText()")
    assert text == ask(at, "return document.querySelector('.command code').textContent")
    assert text.startswith("conform repro ")


def test_what_did_not_run_is_in_plain_sight(at: Driver, runs: Runs) -> None:
    """The first view names backends that are not here, with the reason, and cases that ran nowhere.

    The view of what did not run also has the number of cases that only other backends ran.
    """
    text = ask(at, "return document.querySelector('.overview').innerText")
    assert "openvino-gpu: not available: no device GPU on this machine" in text
    assert "its case is FAIL" in text
    ran = {(r.value.case, r.value.backend) for r in runs.results}
    cases = {case for case, _ in ran if not case.startswith(("perf/", "gate/"))}
    unlisted = [i for i in case_ids((), (), "smoke") if i not in cases]
    assert f"level smoke: {len(unlisted):,} of" in text
    lacking = [c for c in cases if (c, "npu") not in ran]
    assert lacking
    go(at, "notrun")
    assert f"npu: {len(lacking)} case" in ask(at, "return document.querySelector('main').innerText")


def test_tabs_without_data_are_hidden(browser: Driver, tmp_path: Path) -> None:
    """A report of a speed run alone has no tab without data, and shows no 0 % for it."""
    (tmp_path / "perf.json").write_text(json.dumps(made_runs.perf(1)), encoding="utf-8")
    html = page(read_runs([tmp_path]), now=NOW)
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    browser.get((tmp_path / "index.html").as_uri())
    tabs = ask(browser, "return all('#nav a').map((a) => a.textContent)")
    assert tabs == ["Overview", "Support", "Results", "Speed", "Not run", "Runs"]
    assert "0 %" not in ask(browser, "return document.querySelector('main').innerText")


def test_passed_is_said_of_passes_only(at: Driver) -> None:
    """The page's words for passed and failed verdicts are those of the suite."""
    data = ask(at, "return JSON.parse(document.getElementById('data').textContent)")
    assert set(data["failed"]) == {str(v) for v in FAILURES}
    assert set(data["passed"]) == {str(v) for v in PASSED}
