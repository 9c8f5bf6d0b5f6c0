"""Two runs held against each other: by what is told in Python, on the page, in the summary and on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Driver, ask, go
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from run_files import cause, document, result, written_to

from conformance.cli import main
from conformance.judge.verdict import FAILURES, Verdict
from conformance.report.compare import ABSENT, LOST, Comparison, Side, Sides, State, compare
from conformance.report.runs import Runs, read_runs

pytest_plugins = ("page_fixtures",)
A, B, C = "ops/ADD-f32+f32-a=3@1", "ops/MUL-f32+f32-a=3@1", "ops/SUB-f32+f32-a=3@1"
HOSTILE = "</script><img src=x onerror=alert(1)>\"'\u202eevil"


def _held(tmp_path: Path, after: dict[str, Any], before: dict[str, Any]) -> Comparison:
    runs, base = (read_runs([written_to(tmp_path / f"{n}.json", d)]) for n, d in (("run", after), ("base", before)))
    return compare(runs, base)


def _states(comparison: Comparison) -> dict[tuple[str, str], State]:
    return {(p.case, p.backend): p.state for p in comparison.pairs}


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        ("PASS", "FAIL", State.NEW), ("UNSUPPORTED", "CRASH", State.NEW), ("XFAIL", "FAIL", State.NEW),
        ("FAIL", "PASS", State.FIXED), ("XPASS", "PASS", State.FIXED),
        ("FAIL", "UNSUPPORTED", State.CHANGED), ("FAIL", "XFAIL", State.CHANGED),
        ("FAIL", "CRASH", State.WORSE), ("CRASH", "FAIL", State.CHANGED),
        ("PASS", "UNSUPPORTED", State.UNCOVERED), ("UNSUPPORTED", "PASS", State.CHANGED),
        ("FAIL", "FAIL", State.STILL), ("PASS", "PASS", State.SAME), ("UNSUPPORTED", "UNSUPPORTED", State.SAME),
    ],
)  # fmt: skip
def test_what_became_of_a_pair(tmp_path: Path, before: str, after: str, state: State) -> None:
    """A failure that is refused or waived now is no fix, and a refusal is no pass."""
    assert _states(_held(tmp_path, document([(A, "x", after)]), document([(A, "x", before)]))) == {(A, "x"): state}


@given(*[st.sampled_from([*map(str, Verdict), LOST, ABSENT])] * 2)
def test_new_and_fixed_are_opposites(before: str, after: str) -> None:
    """States of a comparison are mirrored if head and base are exchanged.

    New becomes fixed or a pass, what is in one only is gone; same pairs are the same both ways.
    """
    there = Sides(A, "x", Side(before), Side(after)).state
    back = Sides(A, "x", Side(after), Side(before)).state
    failing = {*map(str, FAILURES), LOST}
    if before == after == ABSENT:
        return
    assert (there is State.NEW) == (after in failing and before not in failing and before != ABSENT)
    assert (there is State.FIXED) == (before in failing and after == "PASS")
    assert (there is State.GONE) == (back is State.ADDED) or ABSENT in {before, after}
    assert (there is State.SAME) == (back is State.SAME)
    assert there is not State.FIXED or back is State.NEW


def test_a_lost_result_is_a_failure(tmp_path: Path) -> None:
    """A pair that was requested and has no result is new where the base has it, and fixed where it has one again."""
    lost = {**document([(B, "x", "PASS")]), "missing": [{"case": A, "backend": "x", "reason": "its worker ended"}]}
    whole = document([(A, "x", "PASS"), (B, "x", "PASS")])
    assert _states(_held(tmp_path, lost, whole))[A, "x"] is State.NEW
    assert _states(_held(tmp_path, whole, lost))[A, "x"] is State.FIXED


def test_pairs_of_one_run_only(tmp_path: Path) -> None:
    """What only one of the two has is neither new nor fixed."""
    found = _states(_held(tmp_path, document([(A, "x", "FAIL")]), document([(B, "x", "FAIL")])))
    assert found == {(A, "x"): State.ADDED, (B, "x"): State.GONE}


def test_a_machine_is_held_against_its_own_kind(tmp_path: Path) -> None:
    """Of a base of two kinds of machine each result meets that of its own kind; of a third kind, the newest."""
    olds = [
        written_to(tmp_path / f"{m}.json", document([(A, "x", verdict)], machine=m, written=f"2026-01-0{k}T00:00:00Z"))
        for k, (m, verdict) in enumerate((("m1", "FAIL"), ("m2", "PASS")), 1)
    ]
    base = read_runs(olds)
    for machine, state in (("m1", State.STILL), ("m2", State.NEW), ("m3", State.NEW)):
        runs = read_runs([written_to(tmp_path / "run.json", document([(A, "x", "FAIL")], machine=machine))])
        assert [p.state for p in compare(runs, base).pairs] == [state]


def test_another_cause_is_a_change(tmp_path: Path) -> None:
    """A case that fails by another cause than before is changed; a run without causes tells no difference."""
    after = {**document([result(A, "x", "FAIL", cause="p")]), "causes": [cause("p", [A])]}
    before = {**document([result(A, "x", "FAIL", cause="q")]), "causes": [cause("q", [A])]}
    assert _states(_held(tmp_path, after, before)) == {(A, "x"): State.CHANGED}
    assert _states(_held(tmp_path, after, document([(A, "x", "FAIL")]))) == {(A, "x"): State.STILL}


def test_a_cause_with_another_id_is_no_change(tmp_path: Path) -> None:
    """Where a search ended otherwise than that of the base, the case fails still; the page has the newer id alone."""
    written = [
        written_to(tmp_path / f"{name}.json", {**document([result(A, "x", "FAIL", cause=name)]), "causes": [c]})
        for name, c in (("later", cause("later", [A], conditions=[["op", "MUL_MAT"], ["src[0].type", "q4_K"]])),
                        ("older", cause("older", [A], conditions=[["op", "MUL_MAT"], ["src[0].type", "q4_K|q5_K"]])))
    ]  # fmt: skip
    run, base = map(str, written)
    done = CliRunner().invoke(main, ["report", run, "--against", base, "-o", str(tmp_path / "out")])
    assert "json: 1 still failing" in done.output, done.output
    summary = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "older" not in summary.replace("older.json", "")


def test_the_page_counts_what_python_counts(at: Driver, runs: Runs, base: Runs) -> None:
    """Each count of a comparison is that of its pairs, and each state that has one is shown.

    In the overview, the views by cause and by backend, and the list.
    """
    held = compare(runs, base)
    counts = held.counts()
    assert {State.NEW, State.FIXED, State.GONE, State.ADDED, State.SAME} <= set(counts)
    shown = "return all('.pair').map((e) => [e.querySelector('.badge').textContent.slice(2), numeral(e.firstChild)])"
    for view in ("overview", "comparison"):
        go(at, view)
        assert [pair for pair in ask(at, shown) if pair[0] in set(map(str, State))] == [
            [str(s), counts[s]] for s in State if counts[s]
        ]
    cells = "tbody tr').map((tr) => [...tr.cells].map(numeral))"
    rows = ask(at, f'return all(\'[aria-label="Differences by cause"] {cells}')
    told = [p for p in held.pairs if p.cause and p.state not in {State.SAME, State.ADDED}]
    assert sum(sum(row[1:]) for row in rows) == len(told) > 0
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)
    go(at, "compared?state=new")
    new = [p for p in held.pairs if p.state is State.NEW]
    listed = ask(at, "return all('.rows tbody tr').map((tr) => [...tr.cells].slice(1, 4).map((c) => c.textContent))")
    assert listed == [[p.case, p.backend, " → ".join(_badge(s.verdict) for s in (p.before, p.after))] for p in new][:50]
    assert ask(at, "return all('.rows tbody a[href^=\"#case\"]').length") == len(listed)
    go(at, "compared?state=same")
    assert "→" not in ask(at, "return document.querySelector('.rows tbody').textContent")


def _badge(word: str) -> str:
    return {"PASS": "✓ ", "UNSUPPORTED": "⊘ ", "XFAIL": "≈ "}.get(word, "✗ ") + word


def test_the_command(tmp_path: Path, browser: Driver) -> None:
    """`conform report --against` prints the counts; the summary lists causes.

    Texts of a hostile base are text on the page; a base that is no run file is one line.
    """
    bad = {**document([result(A, "x", "PASS"), result(B, "x", "FAIL", cause="q", detail=HOSTILE)]),
           "causes": [cause("q", [B], sentence=HOSTILE)]}  # fmt: skip
    before = written_to(tmp_path / "base<b>.json", bad)
    after = written_to(tmp_path / "run.json", document([(A, "x", "FAIL"), (B, "x", "PASS"), (C, HOSTILE, "FAIL")]))
    out = tmp_path / "out"
    ran = CliRunner().invoke(main, ["report", str(after), "--against", str(before), "-o", str(out)])
    assert "against base<b>.json: 1 new, 1 fixed, 1 added" in ran.output
    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert "## Compared with the base" in summary
    assert f"- 1 new: ADD: PASS, now FAIL, on `x`; `{A}`" in summary
    assert "- 1 fixed: &lt;/script&gt;" in summary
    browser.get(f"{(out / 'index.html').as_uri()}#comparison")
    assert HOSTILE.replace("\u202e", "\\u202e") in ask(browser, "return document.querySelector('main').textContent")
    assert ask(browser, "return all('main img, main script, main b').length") == 0
    refused = CliRunner().invoke(main, ["report", str(after), "--against", str(out / "summary.md"), "-o", str(out)])
    assert refused.exit_code == 2
    assert len(refused.output.strip().splitlines()) == 1


def test_both_builds_are_on_one_page(browser: Driver, tmp_path: Path) -> None:
    """A record of `build test` is its own base: each fault is one row, with its devices and both verdicts.

    Failures of the old build alone do not fail the report.
    """
    rows = [
        (A, "n", "FAIL"),
        (A, "n8", "FAIL"),
        (A, "o", "PASS"),
        (A, "o8", "PASS"),
        (B, "n", "PASS"),
        (B, "o", "CRASH"),
    ]
    devices = [
        {"name": name, "backend": n, "against": o} for name, n, o in (("CPU", "n", "o"), ("CPU threads=8", "n8", "o8"))
    ]
    builds = {"build": {"name": "new.whl"}, "against": {"name": "old.whl"}, "devices": devices}
    builds["causes"] = [{"id": "p", "state": "new", "at": "library", "note": "its words"}]
    results = [result(c, b, v, **({"cause": "p" if c == A else "q"} if v != "PASS" else {})) for c, b, v in rows]
    causes = [cause("p", [A], "n", state="new"), cause("p", [A], "n8", state="new"), cause("q", [B], "o")]
    path = written_to(tmp_path / "run.json", {**document(results), "causes": causes, "builds": builds})
    ran = CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / "out")])
    assert ran.exit_code == 1
    assert "against old.whl: 2 new, 1 fixed" in ran.output
    summary = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith("# Conformance: 2 causes")
    assert "on `CPU`, `CPU threads=8`" in summary
    browser.get((tmp_path / "out" / "index.html").as_uri())
    assert browser.title.startswith("✗ 2 failed (2 new): new.whl on CPU against old.whl")
    cells = ask(
        browser,
        "return all('[aria-label=Causes] li').map((li) => ['.where', '.figure', '.base-and-now']"
        ".map((x) => li.querySelector(x).innerText))",
    )
    assert cells == [
        ["CPU, CPU threads=8", "2", "base ✓ PASS 2 → now ✗ FAIL 2"],
        ["old.whl on CPU", "1", "base ✗ CRASH 1 → now ✓ PASS 1"],
    ]
    facts = ask(browser, "return all('.causes .facts')[0].innerText")
    assert "CPU, CPU threads=8, in the library" in facts
    assert "its words" in facts
    go(browser, "comparison")
    assert ask(browser, "return all('[aria-label=\"Differences by cause\"] tbody tr').length") == 2

    alone = document([r for r in results if r["backend"] in {"o", "n"} and r["case"] == B])
    path = written_to(tmp_path / "fixed.json", {**alone, "causes": causes[2:], "builds": builds})
    assert CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / "out")]).exit_code == 0


def test_what_changed_is_listed(browser: Driver, tmp_path: Path) -> None:
    """Changed code with its cases; what no case reaches and the interface are folded; hostile names stay text."""
    code = [
        {"kind": "function", "name": "ggml_rope", "cases": 9, "tested": 4, "failing": 2},
        {"kind": "shader", "name": HOSTILE, "is_shared": True},
        {"kind": "function", "name": "gguf_write", "is_new": True},
    ]
    changes = {"rows": code, "interface": {"exported symbols": ["+ggml_x", "-ggml_y"]}, "totals": {"function": 50}}
    names = {"build": {"name": "new.whl", "number": "b2"}, "against": {"name": "old.whl", "number": "b1"}}
    builds = {**names, "devices": [], "changes": changes}
    path = written_to(tmp_path / "run.json", {**document([result(A, "x", "PASS")]), "builds": builds})
    out = tmp_path / "out"
    assert CliRunner().invoke(main, ["report", str(path), "-o", str(out)]).exit_code == 0
    browser.get((out / "index.html").as_uri())
    assert ask(browser, "return all('.view h3')[0].innerText") == "What changed"
    rows = ask(browser, "return all('.changed tbody tr').map((r) => [...r.cells].map((c) => c.innerText))")
    assert rows[0] == ["ggml_rope", "function", "9", "4", "✗ 2"]
    assert rows[1][1:] == ["shader", "all cases"]
    folded = ask(browser, "return all('.view details').map((e) => [e.open, e.textContent])")
    assert [is_open for is_open, _ in folded] == [False, False]
    assert folded[0][1] == "1 change that no case reachesgguf_write"
    assert "+ggml_x; -ggml_y" in folded[1][1]
    assert "commits b1..b2" in ask(browser, "return document.querySelector('main').innerText")
    assert ask(browser, "return all('main img, main script, main b').length") == 0
    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert "What changed: new.whl against old.whl" in summary
    assert "functions: 1 changed, 1 new of 50" in summary
    assert "no case  gguf_write" in summary


def test_without_a_base(browser: Driver, tmp_path: Path) -> None:
    """A page without a base has no such view in its navigation, and the view says how to have one."""
    path = written_to(tmp_path / "run.json", document([(A, "x", "PASS")]))
    CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / "out")])
    browser.get(f"{(tmp_path / 'out' / 'index.html').as_uri()}#comparison")
    assert "--against BASE.json" in ask(browser, "return document.querySelector('.note').textContent")
    assert ask(browser, "return all('#nav a[href=\"#comparison\"]').length") == 0
