"""The Markdown summary: short whatever the run, and nothing is left out in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import cause, document, gate, result, unit, written_to

from conformance.report.compare import compare
from conformance.report.markdown import LIMIT, markdown
from conformance.report.runs import Runs, read_runs


def _runs(tmp_path: Path, *documents: Any) -> Runs:  # noqa: ANN401  # JSON
    return read_runs([written_to(tmp_path / f"{i}.json", d) for i, d in enumerate(documents)])


def test_it_says_what_happened(tmp_path: Path) -> None:
    """Verdicts, failures and their commands, gates, speed, and what did not run."""
    rows = [("ops/ADD-f32-a=1@1", "x", "PASS"), ("ops/ADD-f32-a=2@1", "x", "FAIL"), ("gqa/l@1", "y", "UNSUPPORTED")]
    doc = document([*rows, result("ops/MUL-f32-a=1@1", "x", "CRASH", fresh=True)])
    doc["environment"]["unavailable"] = {"npu": "no such device"}
    speed = document([unit("decode", "x", [1.0] * 7), gate("g", "FAIL")])
    text = markdown(_runs(tmp_path, doc, speed))
    assert "# Conformance: 2 failures, 5 cases executed" in text
    assert "| `x` | 2 | 1 | 0 | 2 | nothing checked |" in text
    assert "## Failures (2)" in text
    assert "  `conform run --case ops/ADD-f32-a=2@1 --backend x`" in text
    assert "## Fresh cases that failed (1): saved" in text
    assert "- **FAIL** `gate/g` on `x`: it is FAIL\n  `conform perf gate --gate g`" in text
    assert "| perf/decode/llama-tiny\\@1 | `x` | 64 tokens/s | 64 to 64 | 7 |" in text
    assert "- `npu`: not available: no such device" in text
    assert "1 case unsupported by `y`, by reason" in text
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


def test_only_refused_cases_are_no_run_without_failures(tmp_path: Path) -> None:
    """Where every case was refused, the headline and a comparison say that none ran."""
    runs = _runs(tmp_path, document([("ops/ADD-f32-a=1@1", "x", "UNSUPPORTED")]))
    text = markdown(runs, against=compare(runs, runs))
    assert text.startswith("# Conformance: no cases ran, 1 UNSUPPORTED\n")
    assert "No cases ran.\n" in text
    assert "failure" not in text.partition("## Verdicts")[0]
    assert "No pair differs" not in text


def test_it_stays_under_the_limit_and_counts_what_is_left_out(tmp_path: Path) -> None:
    """20,000 failures, each for a reason of its own: at most 50 kB, and shown and left out add up to all."""
    names = ["".join(chr(97 + int(d)) for d in str(i)) for i in range(20_000)]
    rows = [result(f"ops/ADD-f32-a={i}@1", "x", "OVERCLAIM", detail=f"{n}|<ä" * 9) for i, n in enumerate(names)]
    slow = [unit(f"decode-{i}", "x", [1.0]) for i in range(3000)]
    text = markdown(_runs(tmp_path, document([*rows, *slow])), where="index.html")
    assert len(text.encode()) <= LIMIT == 50_000
    shown = len(re.findall(r"^- \*\*OVERCLAIM\*\*", text, re.MULTILINE))
    (left,) = re.findall(r"\*\*([\d,]+) more of 20,000 are omitted here; complete: index\.html\*\*", text)
    assert shown > 50
    assert shown + int(left.replace(",", "")) == 20_000
    assert text.count("64 tokens/s") > 50  # a section that comes later has its share


def test_failures_alike_are_told_once(tmp_path: Path) -> None:
    """Failures of one reason are one entry with their number, ops, backends and the first few; crashes come after."""
    at = {"fault": "node"}
    rows = [
        result(f"ops/{op}-f32-a={i}@1", "x", "FAIL", where={**at, "step": i, "op": op, "tensor": f"f32[{i}, 1]"})
        for i in range(300) for op in ("MUL_MAT", "ADD")
    ]  # fmt: skip
    died = [result(f"ops/GLU-f32-a={i}@1", "y", "CRASH", detail=f"y: ops/GLU-f32-a={i}@1: ops.cpp:35 died at 0x{i:x}0")
            for i in range(40)]  # fmt: skip
    text = markdown(_runs(tmp_path, document([*died, *rows])))
    found = [line for line in text.splitlines() if line.startswith(("- **FAIL**", "- **CRASH**"))]
    assert len(found) == 3
    assert {line.partition("times: ")[2] for line in found[:2]} == {"MUL\\_MAT f32 diverges", "ADD f32 diverges"}
    assert found[0].startswith("- **FAIL** 300 times: ")
    assert found[2] == "- **CRASH** 40 times: …: …: ops.cpp:35 died at \\#"
    assert "  - of `GLU` 40; on `y` 40\n  - `ops/GLU-f32-a=0@1` on `y`\n    `conform run --case ops/GLU" in text
    assert "  - and 37 more like these" in text
    assert len(text) < 8000


def test_it_begins_with_causes(tmp_path: Path) -> None:
    """Causes come first, a line each in the order of the file; failures of a cause are not told again."""
    rows = [result(f"ops/ADD-f32-a={i}@1", "x", "FAIL", cause="p" if i < 5 else None) for i in range(6)]
    p = cause("p", [r["case"] for r in rows[:5]])
    q = cause("q", ["mine/small"], verdict="CRASH", sentence="a\nb | <c>", rank={})
    lines = markdown(_runs(tmp_path, {**document(rows), "causes": [p, q]})).split("\n")
    assert lines[0].startswith("# Conformance: 2 causes, 6 failures, ")
    first = lines.index("## Causes (2)")
    assert not any(line.startswith("## ") for line in lines[:first])
    assert lines[first + 2] == (
        r"- **FAIL** MUL\_MAT with src\[0\].type = p is wrong (5 cases on `x`, hits 7 architectures, first seen "
        "2026-01-02): `conform run --case ops/ADD-f32-a=0@1 --backend x`"
    )
    assert lines[first + 3] == (
        r"- **CRASH** a b \| &lt;c&gt; (1 cases on `x`, first seen 2026-01-02): "
        "`conform run --case mine/small --backend x`"
    )
    assert "## Failures that no cause explains (1)" in lines
    assert sum(line.startswith("- **FAIL**") for line in lines) == 2


def test_causes_of_any_length_leave_room(tmp_path: Path) -> None:
    """2,000 failures with long texts take at most 50 kB and say what is left out.

    Texts of 8 KiB, with 1,000 causes and without; how many are left out, and where they are.
    """
    rows, causes = [], []
    for i in range(2_000):
        name = "".join(chr(97 + int(d)) for d in str(i)) + "<|" * 4096
        explained = i % 2 == 0
        rows.append(result(f"ops/ADD-f32-a={i}@1", "x", "OVERCLAIM", detail=name, cause=str(i) if explained else None))
        if explained:
            causes.append(cause(str(i), [rows[-1]["case"]], sentence=name, verdict="OVERCLAIM"))
    text = markdown(_runs(tmp_path, {**document(rows), "causes": causes}), where="index.html")
    assert len(text.encode()) <= LIMIT
    for what in ("Causes", "Failures that no cause explains"):
        section = text.partition(f"## {what} (1,000)")[2].partition("\n## ")[0]
        shown = len(re.findall(r"^- \*\*OVERCLAIM\*\*", section, re.MULTILINE))
        (left,) = re.findall(r"\*\*([\d,]+) more of 1,000 are omitted here; complete: index\.html\*\*", section)
        assert shown > 3
        assert shown + int(left.replace(",", "")) == 1000


@pytest.mark.parametrize("text", ["&" * 900, "\U0001f600" * 900, "`|" * 900])
def test_fifty_kilobytes_whatever_happens(tmp_path: Path, text: str) -> None:
    """Names, reasons and environments as long as nobody has leave the summary under its limit."""
    documents = []
    for k in range(40):
        rows = [result(f"ops/ADD-f32-a={text}{i}@1", f"{text}{k}{i}", "CRASH", detail=text + "a" * i) for i in range(9)]
        made = {**document(rows, machine=text + str(k)), "waivers": [text] * 9}
        made["environment"] |= {"cpu": text, "commit": text, "branch": text, "ci": text, "unavailable": {text: text}}
        documents.append(made)
    assert len(markdown(_runs(tmp_path, *documents)).encode()) <= 50_000


def test_it_says_what_was_run(tmp_path: Path) -> None:
    """Commit, branch and CI job stand beside each run file, as text."""
    made = document([("ops/ADD-f32-a=1@1", "x", "PASS")])
    made["environment"] |= {"commit": "ab" * 20, "branch": "a`<b>", "ci": "https://ci/7"}
    assert ", commit `abababababab` of `a'<b>`, CI `https://ci/7`\n" in markdown(_runs(tmp_path, made))


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


def test_a_partial_count_of_architectures_names_how_many_were_checked(tmp_path: Path) -> None:
    """None of five checked architectures is not none of all."""
    row = result("ops/ADD-f32-a=1@1", "x", "FAIL", cause="p")
    p = cause("p", [row["case"]], rank={"architectures": 0, "counted": 5, "of": 89})
    assert "hits 0 of 5 checked architectures" in markdown(_runs(tmp_path, {**document([row]), "causes": [p]}))
