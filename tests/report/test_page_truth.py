"""The report's page tells the truth first: what failed or is missing stands above what passed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

import made_runs
import pytest
from browser import VIEWS, Driver, ask, cause_view, go, look
from click.testing import CliRunner
from run_files import cause, document, result, written_to

from conformance.cli import main
from conformance.ggml.errors import UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import FLAG_COMPUTE, Tensor, new_tensor
from conformance.ggml.types import F32
from conformance.report.graphview import BOX_HEIGHT, BOX_WIDTH, svg
from conformance.report.matrix import ORDER
from conformance.report.page import page
from conformance.report.runs import Runs, read_runs

pytest_plugins = ("page_fixtures",)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'\u202eevil"
A, B = "ops/ADD-f32+f32-a=3@1", "ops/MUL-f32+f32-a=3@1"
NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
Open = Callable[..., None]


@pytest.fixture
def opened(browser: Driver, tmp_path: Path) -> Open:
    """Open the page of some documents."""

    def show(*documents: Any, view: str = "overview") -> None:  # noqa: ANN401  # JSON
        paths = [written_to(tmp_path / f"{i}.json", d) for i, d in enumerate(documents)]
        html = page(read_runs(paths), now=NOW)
        (tmp_path / "index.html").write_text(html, encoding="utf-8")
        look(browser)
        browser.get("about:blank")
        browser.get(f"{(tmp_path / 'index.html').as_uri()}#{view}")

    return show


def _lost(*pairs: tuple[str, str], rows: Any = ((A, "x", "PASS"),), **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run that lost some of its pairs."""
    lost = [{"case": case, "backend": backend, "reason": "its worker ended"} for case, backend in pairs]
    return {**document(list(rows)), "missing": lost, **more}


def _headline(browser: Driver) -> tuple[str, str]:
    text, kind = ask(browser, "const e = document.querySelector('#headline'); return [e.innerText, e.className]")
    return text, kind.removeprefix("headline ")


def test_missing_is_a_count_of_each_view_and_a_list(opened: Open, browser: Driver) -> None:
    """Pairs without a result are red in the headline of every view, which leads to their rows with reasons."""
    opened(_lost((B, "x"), (A, "y"), (B, "y"), asked={"x": 2, "y": 2}))
    for view in ("overview", "results", "runs"):
        go(browser, view)
        text, kind = _headline(browser)
        assert kind == "bad"
        assert "3 missing" in text
    link = ask(browser, "return all('#headline a').find((a) => a.textContent === '3 missing').hash")
    go(browser, link[1:])
    assert ask(browser, "return found()") == 3
    assert "its worker ended" in ask(browser, "return document.querySelector('.rows').innerText")
    go(browser, "notrun")
    lines = ask(browser, "return all('.notrun li').map((e) => e.innerText)")
    assert lines[:2] == ["! missing 1 on x of 2 requested", "! missing 2 on y of 2 requested"]
    go(browser, "support")
    words = ask(browser, "return cells().map((c) => [c.op, c.type, c.backend, c.word])")
    assert ["MUL", None, "y", "1 missing"] in words
    go(browser, "results")
    for link in ask(browser, "return all('.rows a.row').map((a) => a.hash)"):
        go(browser, link[1:])
        assert ask(browser, "return document.querySelector('h2').textContent") in {A, B}


def test_cases_that_a_time_limit_stopped_did_not_fail(opened: Open, browser: Driver) -> None:
    """Where only a limit of the run left cases out the headline is neither green nor red, and says why."""
    made = _lost((B, "x"))
    made["missing"][0] |= {"cause": "time limit", "reason": "time limit (--budget)"}
    opened(made)
    text, kind = _headline(browser)
    assert (kind, "1 missing (time limit)" in text) == ("unsure", True)
    assert browser.title.startswith("? 1 missing (time limit): x")
    go(browser, "results")
    assert ask(browser, "return chooser('verdict').textContent") == "anymissingPASS"
    assert (
        ask(browser, "return all('.filters label').map((e) => e.textContent).filter((x) => /time limit/.test(x))") == []
    )


def test_what_is_missing_is_forgotten_only_with_a_newer_result(tmp_path: Path) -> None:
    """A pair that a newer run on the same kind of machine has a result of is not missing; an older result is none."""

    def left(lost: str, ran: str, machine: str = "m1") -> int:
        old = _lost((A, "x"), rows=[], written=lost)
        new = document([(A, "x", "PASS")], written=ran, machine=machine)
        return len(read_runs([written_to(tmp_path / "1.json", old), written_to(tmp_path / "2.json", new)]).missing)

    assert left("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z") == 0
    assert left("2026-01-03T00:00:00Z", "2026-01-02T00:00:00Z") == 1
    assert left("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "m2") == 1


def test_asked_for_and_not_named_is_missing_too(opened: Open, browser: Driver, tmp_path: Path) -> None:
    """A run that asked for more than it has results of, and names none of the others, is not green."""
    made = _lost(asked={"x": 1223, "y": 5})
    opened(made)
    text, kind = _headline(browser)
    assert kind == "bad"
    assert "1,227 missing" in text
    go(browser, "notrun")
    assert "1,222 on x of 1,223 requested" in ask(browser, "return document.querySelector('.notrun').innerText")
    assert "y has no result" in text
    assert [n for _, _, n in read_runs([written_to(tmp_path / "u.json", made)]).unlisted()] == [1222, 5]


@pytest.mark.parametrize(
    ("rows", "kind", "says"),
    [
        ([(A, "x", "PASS"), (B, "x", "XFAIL:CRASH")], "good", "1 of 2 cases passed"),
        ([], "bad", "no cases ran"),
        ([(A, "x", "UNSUPPORTED")], "bad", "no cases ran"),
        ([(A, "x", "PASS"), (A, "y", "UNSUPPORTED")], "bad", "no case passed on y"),
        ([(A, "x", "PASS"), (B, "x", "FAIL")], "bad", "1 failed"),
        ([(f"{A}{i}", "x", "UNSUPPORTED" if i else "PASS") for i in range(690)], "unsure", "x supports 1 of 690 cases"),
    ],
)
def test_the_headline_is_green_only_where_all_is_well(
    opened: Open, browser: Driver, rows: list[tuple[str, str, str]], kind: str, says: str
) -> None:
    """Green is said of runs in which each backend passed something and nothing failed, is missing or hardly ran."""
    opened({**document(rows), "asked": {}, "missing": []})
    text, found = _headline(browser)
    assert (found, says in text) == (kind, True), text


@pytest.mark.parametrize(
    ("rows", "why"), [([(A, "x", "UNSUPPORTED")], "1 case UNSUPPORTED"), ([], "The run files have no results")]
)
def test_where_no_case_ran_no_part_of_the_page_speaks_of_failures(
    opened: Open, browser: Driver, rows: list[tuple[str, str, str]], why: str
) -> None:
    """Neither "no failure" nor "every known case ran": the page says that none ran, and why."""
    opened({**document(rows), "asked": {}, "missing": []}, view="overview")
    text = " ".join(ask(browser, "return document.body.innerText").split())
    assert "no cases ran" in text
    assert why in text
    for wrong in ("no failure", "No failures", "Every known case ran", "complete"):
        assert wrong not in text


def test_the_scope_is_on_the_overview(opened: Open, browser: Driver) -> None:
    """The overview of a run without failures has the level, the ops and the next command, to copy."""
    selection: dict[str, Any] = {
        "levels": {"x": "smoke"},
        "families": [],
        "cases": [],
        "files": [],
        "seed": None,
        "shard": "1/1",
    }
    opened({**document([(A, "x", "PASS")]), "selection": selection})
    text = ask(browser, "return document.querySelector('.overview').innerText")
    assert "x: 1 of 123 ops passed a case at level smoke" in text
    assert "conform run --backend x --level standard" in text


def test_documents_of_before_still_open(opened: Open, browser: Driver) -> None:
    """A run file without asked, missing, commit or CI job is shown as it was, and says that they are not known."""
    opened(document([(A, "x", "PASS")]))
    assert _headline(browser)[1] == "good"
    origin = ask(browser, "return document.querySelector('#origin').innerText")
    assert "commit not recorded" in " ".join(origin.split())
    for view in VIEWS:
        go(browser, view)
        assert ask(browser, "return all('main h2').length") == 1


def test_odd_keys_of_a_stranger_are_refused(tmp_path: Path) -> None:
    """Odd pairs and counts are refused by name."""
    odds: tuple[Any, ...] = (None, 5, "x", [5, None, {}], {"x": "y", "z": True})
    for odd in odds:
        for name in ("asked", "missing"):
            with pytest.raises(UsageError, match=name):
                read_runs([written_to(tmp_path / "odd.json", {**document([(A, "x", "PASS")]), name: odd})])


def test_failures_come_first_everywhere(at: Driver) -> None:
    """Results, choices of a filter, the matrix and the table of backends begin with what failed; PASS comes last."""
    go(at, "results")
    words = [str(v) for v in ORDER]
    first = ask(at, "return all('.rows tbody .badge').map((e) => e.textContent.slice(2))")
    assert first[0] == "FAIL"
    assert first == sorted(first, key=words.index)
    chosen = ask(at, "return [...chooser('verdict').options].map((o) => o.value).slice(1)")
    assert chosen == [w for w in words if w in chosen]
    go(at, "support")
    looks = ask(at, "return all('.matrix tbody tr').map((tr) => Boolean(tr.querySelector('.bad, .zero, .lost')))")
    assert looks == sorted(looks, reverse=True)
    assert looks[0]
    assert not looks[-1]


def test_the_order_of_verdicts_is_one() -> None:
    """The page's order of verdicts is that of the other reports, and `missing` stands right before the known ones."""
    script = Path(page.__code__.co_filename).with_name("static").joinpath("data.js").read_text(encoding="utf-8")
    ranks = json.loads(script.partition("const RANKS = ")[2].partition(";")[0])
    assert [w for w in ranks if w in {str(v) for v in ORDER}] == [str(v) for v in ORDER]
    assert ranks.index("XPASS") < ranks.index("missing") < ranks.index("XFAIL")


def test_failures_alike_are_one_entry(opened: Open, browser: Driver) -> None:
    """Hundreds of failures of one reason are one entry of the overview, whose figure leads to all of them."""
    rows = [result(f"ops/ADD-f32-a={i}@1", "x", "FAIL", detail=f"step {i}: ADD node_{i} is off") for i in range(300)]
    rows += [result(f"ops/MUL-f32-a={i}@1", "x", "CRASH", detail="died") for i in range(3)]
    opened(document(rows))
    told = ask(browser, "return all('.stories strong a').map((a) => [a.textContent, a.getAttribute('href')])")
    assert [text for text, _ in told] == ["300", "3"]
    assert ask(browser, "return wrongFigures(given[0])", told) == []


def test_causes_of_several_runs(opened: Open, browser: Driver) -> None:
    """Results of one cause are adjacent, before those of the next and before passes.

    A cause fails since the earliest of its runs; architectures are by plan.
    """
    order = ("p", None, "q", "p", None, "q")
    cases = [f"zoo/arch-{i}-seqs=2,nodes=1@{i}" for i in range(6)]
    rows = [(c, result(cases[i], "x", "FAIL", cause=c)) for i, c in enumerate(order)]
    causes = [cause(c, [r["case"] for d, r in rows if d == c]) for c in ("q", "p")]
    of = [{**document([result(A, "x", "PASS"), *(r for _, r in rows)], written=w), "causes": causes}
          for w in ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z")]  # fmt: skip
    opened(of[1], of[0])
    since = ask(browser, "return all('.causes .facts').map((e) => e.querySelectorAll('dd')[1].innerText)")
    assert since == ["✗✗\nin all 2 runs, from 2026-01-01 00:00 UTC"] * 2
    (label,) = ask(browser, "return all('.overview .matrix').map((e) => e.closest('.scroll').ariaLabel)")
    assert label == "Causes by architecture"
    matrix = ask(browser, "return all('.overview .matrix tr').map((tr) => [...tr.cells].map((c) => c.innerText))")
    assert matrix[0] == ["architecture", "seqs=2,nodes=1"]
    assert ["arch-0", "p x"] in matrix
    assert len(matrix) == 5
    assert ask(browser, "return all('img, main script').length") == 0
    go(browser, "results")
    told = ask(browser, "return all('.rows tbody tr').map((tr) => tr.cells[2].innerText)")
    assert told == ["q", "q", "p", "p", "–", "–", "–"]


def test_a_cause_has_its_history(opened: Open, browser: Driver, tmp_path: Path) -> None:
    """Its failing and passing runs are signs in order, with the commits between which it began; `--trend` adds runs."""
    nights = []
    for day, verdict in enumerate(("FAIL", "PASS", "FAIL", "FAIL"), 1):
        more: dict[str, Any] = {"causes": [cause("p", [A])]} if verdict == "FAIL" else {}
        rows = [result(A, "x", verdict, **({"cause": "p"} if more else {}))]
        nights.append({**document(rows, written=f"2026-01-0{day}T02:30:00Z"), **more})
        nights[-1]["environment"] |= {"commit": f"{day}" * 40, "branch": "main"}
    wanted = [
        "✗✓✗✗",
        f"failed 2026-01-03 02:30 UTC at {'3' * 12} on main, passed 2026-01-02 02:30 UTC at {'2' * 12} on main",
    ]
    since = "return all('.causes .facts').map((e) => e.querySelectorAll('dd')[1].innerText)[0].split('\\n')"
    opened(*nights)
    assert ask(browser, since) == wanted
    assert ask(browser, "return document.querySelector('.history').ariaLabel").endswith(
        "failed, passed, failed, failed"
    )
    go(browser, cause_view(read_runs([tmp_path / "3.json"])))
    rows = ask(browser, "return all('[aria-label=History] tbody tr').map((r) => r.innerText.split(/\\s+/).slice(2, 5))")
    assert rows == [["✗", "failed", "1"], ["✗", "failed", "1"], ["✓", "passed", "0"], ["✗", "failed", "1"]]
    runs = CliRunner().invoke(main, ["report", str(tmp_path / "3.json"), "--trend", str(tmp_path), "-o", str(tmp_path)])
    assert runs.exit_code == 1, runs.output
    browser.get((tmp_path / "index.html").as_uri())
    assert ask(browser, since) == wanted
    opened(nights[-1])
    assert ask(browser, since) == ["first seen 2026-01-04 02:30 UTC, the only run here"]


@pytest.mark.parametrize("view", ["overview", "causes", "cause", "results"])
def test_no_text_of_a_cause_becomes_markup(opened: Open, browser: Driver, view: str) -> None:
    """Each text of a cause, its id and backend among them, is shown letter for letter, and its links work."""
    odd = cause(HOSTILE, [f"ops/{HOSTILE}"], HOSTILE, sentence=HOSTILE, op=HOSTILE, message=HOSTILE, seen=HOSTILE)
    odd |= {"conditions": [[HOSTILE, HOSTILE]], "folder": HOSTILE}
    opened({**document([result(f"ops/{HOSTILE}", HOSTILE, "FAIL", cause=HOSTILE)]), "causes": [odd]})
    if view == "cause":
        ask(browser, "await go(all('.causes a').find((a) => a.hash.startsWith('#cause?')).hash)")
        assert ask(browser, "return document.querySelector('.facts').textContent.split('<img').length") >= 5
    else:
        go(browser, view)
    assert ask(browser, "return all('main h2').length") == 1
    assert ask(browser, "return all('img, main script').length") == 0
    text = ask(browser, "return document.querySelector('main').textContent")
    assert "</script><img src=x" in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    "link", ["javascript:alert(1)", "data:text/html,x", f"https://x/{HOSTILE}", "//x", "https://[x"]
)
def test_what_an_environment_says_is_text(opened: Open, browser: Driver, link: str) -> None:
    """Commit, branch, settings and CI job are shown as they are; only a plain web address becomes a link."""
    made = _lost((f"ops/{HOSTILE}", HOSTILE))
    said = {"commit": HOSTILE, "branch": HOSTILE, "ci": link, "settings": {HOSTILE: HOSTILE}}
    made["environment"] |= {**said, "waivers": [HOSTILE], "cpu": HOSTILE}
    opened(made)
    for view in ("overview", "runs"):
        go(browser, view)
        assert ask(browser, "return all('img, main script, header script').length") == 0
        out = ask(browser, "return all('a').map((a) => a.getAttribute('href')).filter((x) => !x.startsWith('#'))")
        assert out == []
        text = ask(browser, "return document.body.innerText")
        assert "<img src=x" in text
        assert "\u202e" not in text
        assert "\\u202e" in text


def test_the_top_says_what_was_run(opened: Open, browser: Driver) -> None:
    """Commit, branch, CI job, run, machine and settings stand at the top of every view."""
    made = document([(A, "x", "PASS")])
    ci = "https://ci.example/jobs/7?x=1"
    made["environment"] |= {"commit": "ab" * 20, "branch": "main", "ci": ci}
    made["environment"] |= {"settings": {"precision": "default"}}
    opened(made, view="results")
    text = " ".join(ask(browser, "return document.querySelector('#origin').innerText").split())
    wanted = ("abababababab on main", ci, made["run"][:8], "m1", "precision default")
    for said in wanted:
        assert said in text
    assert ask(browser, "return document.querySelector('#origin a').getAttribute('href')") == ci


def test_no_label_leaves_its_box(at: Driver, runs: Runs) -> None:
    """Words in a drawn graph end inside their box, whatever the font; edges have heads."""
    views = _failed_views(runs)
    drawn = ask(
        at,
        """const seen = [];
        for (const i of given[0]) {
          await go(`#${i}`);
          await new Promise((r) => requestAnimationFrame(() => setTimeout(r)));
          for (const box of all('svg.graph .box')) {
            if (box.closest('.swatch')) continue;
            const r = box.querySelector('rect').getBBox();
            for (const t of box.querySelectorAll('text')) {
              const b = t.getBBox(), inside = b.x >= r.x && b.x + b.width <= r.x + r.width;
              seen.push(b.width === 0 || (inside && b.y >= r.y && b.y + b.height <= r.y + r.height));
            }
          }
        }
        const headless = all('.edge').filter((e) => !e.getAttribute('marker-end'));
        return [seen.length, seen.filter((fits) => !fits).length, headless.length]""",
        views,
    )  # fmt: skip
    assert drawn[0] > len(views) > 0
    assert drawn[1:] == [0, 0]
    script = Path(page.__code__.co_filename).with_name("static").joinpath("detail.js").read_text(encoding="utf-8")
    assert f"const BOX = {{ width: {BOX_WIDTH}, height: {BOX_HEIGHT}," in script


def _failed_views(runs: Runs) -> list[str]:
    """Views of a few failures of each family."""
    found: dict[str, str] = {}
    for r in runs.results:
        if r.value.where and r.value.where.numbers:
            place = f"row={r.place[8:-1]}&document={runs.documents.index(r.document)}"
            found.setdefault(r.value.case.partition("-")[0], f"case?run={r.document.run}&{place}")
    return list(found.values())[:25]


@pytest.mark.parametrize("letter", ["W", "m", "i", "\u6f22", "\U0001f600", "@"])
def test_a_drawing_by_itself_fits_too(browser: Driver, tmp_path: Path, letter: str) -> None:
    """In the file of `conform show -o`, which has no script, long names end inside their box; edges have heads."""
    a = new_tensor(F32, 4, name=letter * 60)
    node = Tensor(F32, a.ne, a.nb, "ADD", src=(a, a), flags=FLAG_COMPUTE, name=letter * 50)
    (tmp_path / "g.svg").write_text(svg(Graph([node])), encoding="utf-8")
    browser.get((tmp_path / "g.svg").as_uri())
    outside, heads, titles = ask(
        browser,
        """const outside = all('g').flatMap((g) => {
          const r = g.querySelector('rect').getBBox();
          const boxes = [...g.querySelectorAll('text')].map((t) => t.getBBox());
          return boxes.filter((b) => b.x < r.x || b.x + b.width > r.x + r.width);
        });
        const heads = all('path.e').map((e) => getComputedStyle(e).markerEnd);
        return [outside.length, heads, all('title').map((t) => t.textContent)]""",
    )  # fmt: skip
    assert outside == 0
    assert set(heads) == {'url("#arrow")'}
    assert any(letter * 60 in t for t in titles)


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_nothing_is_wider_than_its_place(opened: Open, browser: Driver, width: int) -> None:
    """Long names, ids and reasons are wrapped or cut: no text is wider than what it stands in, at any width."""
    name, case = f"ggml?lib=/{'long/' * 30}&device=X", f"ops/ADD-f32-{'a=1,' * 80}z=1@1"
    failed = result(case, name, "FAIL", detail="x" * 900, cause="c" * 90)
    rows = [failed, result(case, "y", "PASS"), (A, "y", "PASS")]
    odd = cause("c" * 90, [case], name, sentence="s" * 500, op="o" * 90, message="m" * 300, folder="f" * 300)
    opened(
        _lost((B, name), rows=rows, causes=[odd]),
        made_runs.perf(1),
    )
    look(browser, width=width)
    for view in (*VIEWS, f"cause?{urlencode({'id': 'c' * 90, 'backend': name})}"):
        go(browser, view)
        wide = ask(
            browser,
            """return all('.panel, .headline, .origin dd, .name, .badge, th, .story, li, h2:not(.unseen), dd')
              .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
              .filter((e) => getComputedStyle(e).display !== 'inline')
              .map((e) => e.outerHTML.slice(0, 90))""",
        )
        assert (view, wide) == (view, [])
        assert ask(browser, "return document.documentElement.scrollWidth <= innerWidth")


def test_axes_start_at_zero(at: Driver) -> None:
    """Every chart of speed starts at zero, says its unit, and has an interval where the run has rounds for one."""
    go(at, "speed")
    charts = ask(
        at,
        """return all('.panel').map((p) => [
          [...p.querySelectorAll('.axis.end')].map((e) => e.textContent), p.querySelector('figcaption').innerText,
          p.querySelectorAll('svg .interval').length, p.querySelectorAll('svg a').length])""",
    )
    assert charts
    for axis, caption, intervals, points in charts:
        assert axis[0] == "0", axis
        assert "per second, from zero" in caption
        assert intervals == points > 0


def test_a_point_stands_at_its_date(opened: Open, browser: Driver) -> None:
    """Runs of the 1st, 2nd and 11th of a month are 0.1 and 0.9 of the axis apart.

    The dates below it are those of its ends and of its middle.
    """
    opened(*(made_runs.perf(night) for night in (1, 2, 11)), view="speed")
    places, dates, ends = ask(
        browser,
        """const panel = document.querySelector('.panel');
        const x = (e) => Number(e.getAttribute('transform').match(/translate\\(([\\d.]+)/)[1]);
        const line = panel.querySelector('line.base');
        return [[...panel.querySelectorAll('a.c0 .mark')].map(x),
          [...panel.querySelectorAll('.date')].map((e) => e.textContent),
          ['x1', 'x2'].map((k) => Number(line.getAttribute(k)))]""",
    )
    begin, end = ends
    assert [(x - begin) / (end - begin) for x in places] == pytest.approx([0, 0.1, 1])
    assert dates == ["2026-11-01", "2026-11-06", "2026-11-11"]


@pytest.mark.parametrize(
    ("used", "shown"),
    [(0.0, "0 %"), (3e-7, "< 0.01 %"), (0.034, "3.4 %"), (0.99999, "99.9 %"), (1.0, "100 %"), (1.0001, "1.0001×"),
     (3.812, "3.81×"), (3.81e12, "> 1000×")],
)  # fmt: skip
def test_a_budget_is_a_figure_to_read(opened: Open, browser: Driver, used: float, shown: str) -> None:
    """A share of a budget is in per cent up to the whole, in times beyond it, and no power of ten."""
    opened(document([result(A, "x", "FAIL" if used > 1 else "PASS", budget_used=used)]), view="results")
    assert shown in ask(browser, "return document.querySelector('.rows tbody').innerText")


def test_builds_stand_beside_each_other(opened: Open, browser: Driver) -> None:
    """The newest first: a cause with its verdict in each build, a figure with its ratio to the build before."""
    documents = []
    for version, verdict, size in (("1", "FAIL", 100.0), ("2", "PASS", 117.0)):
        backend = f"ggml?lib=p=={version}"
        memory = result("memory/llama-real=1@1", backend, "PASS", metrics={"compute in CPU": size, "resident": size})
        build = {"name": f"p=={version}", "released": f"2026-0{version}-01"}
        more: dict[str, Any] = {"builds": {"build": build, "devices": [{"name": "CPU", "backend": backend}]}}
        more |= {"causes": [cause("ADD", [A], backend)]} if verdict == "FAIL" else {}
        documents.append({**document([(A, backend, verdict), memory]), **more})
    opened(*documents, view="")
    rows = ask(browser, "return all('.view.builds tr').map((r) => [...r.cells].map((c) => c.innerText))")
    text = [["|".join(cell.split("\n")) for cell in row] for row in rows]
    assert [row[1:] for row in text[1:3]] == [["✓ no failure|2 of 2 passed"], ["✗ 1 failed|1 of 2 passed, 1 cause"]]
    assert [row[1:] for row in text[3:5]] == [["2|2026-02-01", "1|2026-01-01"], ["✓ PASS", "✗ FAIL"]]
    assert [row[1:] for row in text[6:]] == [["117|✗ 1.17×", "100"], ["117", "100"]]


def test_the_title_says_build_device_and_verdict(opened: Open, browser: Driver) -> None:
    """Title and first line name verdict, build and device; a record without builds shows the installed wheel.

    Of several setups they name the devices, and of a base its build, whose failures do not count.
    """
    build = {"build": {"name": "p==2"}, "devices": [{"name": "Vulkan0", "backend": "b"}]}
    opened({**document([(A, "b", "PASS"), (B, "b", "FAIL")]), "builds": build})
    wanted = "✗ 1 failed: p==2 on Vulkan0"
    assert ask(browser, "return document.querySelector('h1').innerText") == wanted
    assert browser.title == f"{wanted} – Overview"
    made = document(
        [(A, "ggml", "PASS"), (A, "ggml?lib=new/lib&device=CUDA0&threads=2", "PASS"), (A, "mine?x=1", "PASS")]
    )
    made["environment"] |= {"packages": {"xllamacpp": "1.2"}}
    opened(made)
    told = "xllamacpp 1.2 on CPU; new/lib on CUDA0 threads=2; mine?x=1"
    assert browser.title == f"✓ No failures: {told} – Overview"
    devices = [{"name": f"CPU{k}", "backend": f"n{k}", "against": f"o{k}"} for k in ("", " threads=8", " guard=on")]
    builds = {"build": {"name": "p==2"}, "against": {"name": "p==1"}, "devices": devices}
    rows = [(A, d["backend"], "PASS") for d in devices] + [(A, d["against"], "FAIL") for d in devices]
    opened({**document(rows), "builds": builds})
    assert browser.title == "✓ No failures: p==2 on CPU against p==1 – Overview"
    opened(document([(A, f"ggml?lib=/{'long/' * 30}build/bin", "PASS")]))
    assert browser.title == "✓ No failures: build/bin on CPU – Overview"
    opened(document([(A, HOSTILE, "PASS")]))
    assert ask(browser, "return all('h1 img, head script').length") == 0
    assert "<img src=x" in browser.title


def test_a_cause_of_an_emulated_device_says_whose_fault_it_is(opened: Open, browser: Driver) -> None:
    """Its card names the driver, what another one made of the case, and who is at fault; others have no such row."""
    ran = [
        {"driver": "one 1.0", "verdict": "FAIL", "alike": True},
        {"driver": "two 2.0", "verdict": "FAIL", "alike": True},
    ]
    rows = "return Object.fromEntries(all('.causes dt').map((e) => [e.textContent, e.nextElementSibling.textContent]))"
    opened({**document([result(A, "x", "FAIL", cause="p")]), "causes": [cause("p", [A], drivers=ran)]})
    assert ask(browser, rows)["driver"] == "emulated by one 1.0, two 2.0: alike; at fault: library"
    opened({**document([result(A, "x", "FAIL", cause="p")]), "causes": [cause("p", [A])]})
    assert "driver" not in ask(browser, rows)


def test_an_untriaged_page_says_how_to_group(opened: Open, browser: Driver) -> None:
    """Failures without causes come with the command of triage, and each group with the command that reproduces it."""
    opened(document([result(A, "x?lib=/y", "FAIL")]))
    told = ask(browser, "return all('.command code').map((e) => e.textContent)")
    assert told[0] == "conform triage 0.json --json 0.json -o bugs --backend 'x?lib=/y'"
    opened(document([result(A, "x", "FAIL", saved="a b.gguf"), result(B, "x", "CRASH")]))
    told = ask(browser, "return all('.command code').map((e) => e.textContent)")
    assert told == [
        "conform triage 0.json --json 0.json -o bugs",
        "conform repro 'a b.gguf' --backend x",
        f"conform run --case {B} --backend x",
    ]
    assert ask(browser, "return all('.command button').length") == len(told)
    opened({**document([result(A, "x", "FAIL", cause="p")]), "causes": [cause("p", [A])]})
    assert "triage" not in ask(browser, "return document.querySelector('main').innerText")


def test_a_verdict_is_said_once(opened: Open, browser: Driver) -> None:
    """Beside its badge a sentence does not repeat the verdict; equal verdicts of base and now are one."""
    died = cause("p", [A], "x", sentence="ADD: CRASH: its process died (1 fail)", verdict="CRASH")
    opened({**document([result(A, "x", "CRASH", cause="p")]), "causes": [died]})
    assert (
        ask(browser, "return document.querySelector('ol.causes h4').innerText")
        == "✗ CRASH ADD: its process died (1 fail)"
    )


def test_ids_break_at_separators(opened: Open, browser: Driver) -> None:
    """The places where an id may break are behind its separators, and never in a number."""
    case = "ops/CLAMP-f32-ne=18x6,min=-1.5,max=3e-07,eps=1e+9,va=pad@861"
    opened(document([result(case, "x", "FAIL")]))
    parts = ask(browser, "return all('.stories a .ident').map((e) => [...e.childNodes].map((c) => c.textContent))[0]")
    assert [p for p in parts if p] == [
        "ops/", "CLAMP-", "f32-", "ne=18x6,", "min=-1.5,", "max=3e-07,", "eps=1e+9,", "va=pad@861",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [390, 1000, 1600])
def test_lines_end_at_separators(opened: Open, browser: Driver, width: int) -> None:
    """No line of any view ends inside a word or a number of an id, a backend, a path, a setup or a symbol."""
    case = "ops/MUL_MAT_ID-q4_K+f32-as=256x7x2,n_used=1,n_tokens=3,nr=[1,1],va=rows@706"
    lib = "ggml?lib=pypi:xllamacpp==0.2.1"
    setups = {
        "CPU": "",
        "CPU buffer=CPU_REPACK threads=8": "&buffer=CPU_REPACK&threads=8",
        "CPU+CPU": "&device=CPU+CPU",
    }
    devices = [{"name": name, "backend": f"{lib}2{x}", "against": f"{lib}4{x}"} for name, x in setups.items()]
    of = [d["backend"] for d in devices]
    symbol = {"kind": "function", "name": "ggml::cpu::repack::tensor_traits<block_q4_0, 4, 8>::forward_mul_mat"}
    changes = {"rows": [{**symbol, "cases": 3}, symbol]}
    builds = {"build": {"name": "pypi:xllamacpp==0.2.12"}, "against": {"name": "pypi:xllamacpp==0.2.14"}}
    id_ = "MUL_MAT_ID-ad2b6156"
    failed = [
        result(case, b, "FAIL", cause=id_, saved=f"failures/{case}.gguf", detail=f"{b}: {case} is 0.0187333245")
        for b in of
    ]
    rows = [*failed, result(case, devices[0]["against"], "PASS"), result(A, of[0], "CRASH", detail=case)]
    causes = [cause(id_, [case], b, op="MUL_MAT_ID", message="GGML_ASSERT(ggml_is_contiguous_1(src0))") for b in of]
    whole = _lost((B, of[1]), rows=rows, causes=causes, builds={**builds, "devices": devices, "changes": changes})
    opened(whole)
    look(browser, width=width, height=1200)
    for view in (*VIEWS, f"cause?{urlencode({'id': id_, 'backend': of[1]})}", "results?verdict=FAIL"):
        go(browser, view)
        ask(browser, "all('main details').forEach((e) => { e.open = true; })")
        assert (view, ask(browser, "return torn()")) == (view, [])


def test_a_phone_shows_cards(opened: Open, browser: Driver) -> None:
    """At 390 pixels no table of the overview, the comparison or the support scrolls sideways; cells have names."""
    opened(document([(A, b, v) for b, v in (("x", "PASS"), ("y" * 40, "FAIL"), ("z", "PASS"), ("w", "PASS"))]))
    look(browser, width=390)
    for view in ("overview", "support", "runs"):
        go(browser, view)
        wide = (
            "return all('.scroll').filter((e) => e.querySelector('table') && e.scrollWidth > e.clientWidth + 1).length"
        )
        assert (view, ask(browser, wide)) == (view, 0)
        assert ask(browser, "return all('.cards tbody td').some((e) => e.dataset.label)")


def test_the_support_repeats_no_column(opened: Open, browser: Driver) -> None:
    """A base has a column in the support and its picture only where it differs from its build."""
    devices = [{"name": name, "backend": f"n{name}", "against": f"o{name}"} for name in ("CPU", "GPU")]
    builds = {"build": {"name": "p==2"}, "against": {"name": "p==1"}, "devices": devices}
    cases = ("ops/ADD-f32-a=3@1", "ops/ADD-f16-a=3@1")
    rows = [(case, d[side], "PASS") for case in cases for d in devices for side in ("backend", "against")]
    rows[0] = (cases[0], "nCPU", "FAIL")
    opened({**document(rows), "builds": builds}, view="support")
    heads = ask(browser, "return all('.matrix thead th').slice(1).map((e) => e.textContent)")
    assert sorted(heads) == ["CPU", "GPU", "p==1 on CPU"]
    titles = ask(browser, "return all('.picture g title').map((e) => e.textContent)")
    assert [t for t in titles if " on o" in t] == ["ADD f32 on oCPU: passed"]
    assert len(titles) == 5


def test_the_support_is_a_picture(opened: Open, browser: Driver) -> None:
    """One square for each op, type and backend that ran, with a title; what is saved has its own colours."""
    ids = ("ops/ADD-f32-a=3@1", "ops/ADD-f16-a=3@1", "ops/MUL-f32-a=3@1")
    opened(
        document([(ids[0], "x", "PASS"), (ids[1], "x", "FAIL"), (ids[2], "x", "UNSUPPORTED"), (ids[0], "y", "PASS")]),
        view="support",
    )
    titles = ask(browser, "return all('.picture g title').map((e) => e.textContent)")
    assert sorted(titles) == [
        "ADD f16 on x: 0 %",
        "ADD f32 on x: passed",
        "ADD f32 on y: passed",
        "MUL f32 on x: unsupported",
    ]
    saved = ask(
        browser,
        """let blob; URL.createObjectURL = (b) => { blob = b; return '#'; };
        all('button').find((b) => b.textContent === 'Save as SVG').click(); return await blob.text();""",
    )
    root = ET.fromstring(saved)  # noqa: S314  # made by the page
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    rects = [e.get("fill") for e in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(set(rects)) >= 4
    assert all(fill and fill.startswith(("rgb", "#")) for fill in rects)
    assert "http" not in saved.replace("http://www.w3.org/2000/svg", "")
