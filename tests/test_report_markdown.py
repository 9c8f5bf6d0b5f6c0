"""The Markdown summary: short whatever the run, and nothing is left out in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import document, gate, head, perf, planted, result, unit, written_to

from conformance.report.markdown import LIMIT, markdown
from conformance.report.runs import Runs, read_runs


def _runs(tmp_path: Path, *documents: Any) -> Runs:  # noqa: ANN401  # JSON
    return read_runs([written_to(tmp_path / f"{i}.json", d) for i, d in enumerate(documents)])


def test_it_says_what_happened(tmp_path: Path) -> None:
    """Verdicts, failures and their commands, gates, speed, planted bugs, and what did not run."""
    rows = [("ops/ADD-f32-a=1@1", "x", "PASS"), ("ops/ADD-f32-a=2@1", "x", "FAIL"), ("gqa/l@1", "y", "UNSUPPORTED")]
    doc = document([*rows, result("ops/MUL-f32-a=1@1", "x", "CRASH", fresh=True)])
    doc["environment"]["unavailable"] = {"npu": "no such device"}
    audit = {
        **head("audit"),
        "backends": {"x": [{"finding": "OVERCLAIM", "weight": "w", "buffer": "CPU", "detail": "no"}]},
    }
    text = markdown(
        _runs(
            tmp_path,
            doc,
            perf([unit("decode", "x", [1.0] * 7), unit("load", "y", [])], [gate("g", "regressed")]),
            planted({("f", "ops"): True, ("g", "ops"): False}),
            audit,
        )
    )
    assert "# Conformance: 1 failures, 3 cases executed on backends, 1 of 1 gates regressed" in text
    assert "| `x` | 1 | 1 | 0 | 1 | nothing checked |" in text
    assert "## Failures (1)" in text
    assert "  `conform run --case ops/ADD-f32-a=2@1 --backend x`" in text
    assert "## Fresh cases that failed (1): filed" in text
    assert "| **regressed** | 0.6 | 0.58 to 0.63 | 0.7 |" in text
    assert "| decode | `x` | 64 tokens/s | 7 |" in text
    assert "| load | `y` | – | 0 | its case did not pass |" in text
    assert "1 of 2 planted bugs noticed (50.0 %); 0 false alarms." in text
    assert "- not noticed: `g`" in text
    assert "**OVERCLAIM** `w` in `CPU`" in text
    assert "- `npu`: not available: no such device" in text
    assert "`y` takes 1 cases not" in text
    assert "| ADD | f32 | 1 of 2 |" in text


def test_not_run_unsupported_and_none_passed_are_three_words(tmp_path: Path) -> None:
    """A cell of the matrix that did not run, that is not supported, and of which nothing passed read differently."""
    rows = [
        ("ops/ADD-f32-a=1@1", "x", "FAIL"),
        ("ops/ADD-f32-a=1@1", "y", "UNSUPPORTED"),
        ("ops/MUL-f32-a=1@1", "z", "PASS"),
    ]
    text = markdown(_runs(tmp_path, document(rows)))
    assert "| ADD | f32 | 0 of 1 | unsupported | not run |" in text


def test_nothing_ran(tmp_path: Path) -> None:
    """A run without results does not look like one that passed."""
    assert "no cases ran" in markdown(_runs(tmp_path, document([])))


def test_it_stays_under_the_limit_and_counts_what_is_left_out(tmp_path: Path) -> None:
    """20,000 failures with long stories: under 1 MiB, and what is shown and what is left out add up to all."""
    rows = [result(f"ops/ADD-f32-a={i}@1", "x" if i % 3 else "y", "FAIL", detail="|<ä" * 200) for i in range(20_000)]
    bugs = {(f"fault-{i}", "ops"): False for i in range(3000)}
    text = markdown(_runs(tmp_path, document(rows), planted(bugs)), where="index.html")
    assert len(text.encode()) <= LIMIT < 1 << 20
    shown = len(re.findall(r"^- \*\*FAIL\*\*", text, re.MULTILINE))
    (left,) = re.findall(r"\*\*([\d,]+) more of 20,000 are left out here; all of them: index\.html\*\*", text)
    assert shown > 100
    assert shown + int(left.replace(",", "")) == 20_000
    assert text.count("- not noticed: ") > 100  # a section that comes later has its share


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.integers(1, 400), st.integers(1, 400))
def test_a_small_limit_holds(tmp_path: Path, text: str, backends: int, waivers: int) -> None:
    """However many backends, and whatever the names hold, the limit holds."""
    rows = [(f"ops/ADD-f32-a={text}@1", f"{text * 20}{i}", "UNSUPPORTED") for i in range(backends)]
    doc = {**document(rows), "waivers": [text * 50] * waivers}
    assert len(markdown(_runs(tmp_path, doc), limit=120_000).encode()) <= 120_000


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_stays_text(tmp_path: Path, text: str) -> None:
    """Nothing that a file holds becomes HTML, markup, a line or a cell of its own."""
    text = f"<img src=x>|{text}`\n## no | <b>\u2028[a](b)"
    made = markdown(_runs(tmp_path, document([result("ops/ADD-f32-a=1@1", "x", "FAIL", detail=text)])))
    (line,) = [x for x in made.split("\n") if x.startswith("- **FAIL**")]
    outside = re.sub(r"`[^`]*`", "", line.replace("\\`", ""))
    assert "<" not in outside
    assert not re.search(r"(?<!\\)[|#\[\]]", outside)
    assert len(made.splitlines()) == len(made.split("\n")) - 1
