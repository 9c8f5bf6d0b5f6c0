"""The page of findings: it says what the run files say, and a person's words outlive it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.causes import findings
from conformance.causes.cause import Cause, Condition
from conformance.ggml.errors import UsageError
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.report.runfile import record
from conformance.report.runs import read_runs

CASES = ("ops/SUM-f32-ne=5x3,vne=p1023@1", "ops/SUM-f32-ne=7x3,vne=p1023@1")


def cause(name: str = "SUM-11111111", cases: tuple[str, ...] = CASES, verdict: Verdict = Verdict.FAIL) -> Cause:
    """A cause on the backend `npu`."""
    conditions = (Condition("op", "SUM"), Condition("src[0].layout", "transposed"))
    return Cause(name, f"{name} is wrong", "npu", verdict, "SUM", "", conditions, cases, "always", {"failed": 2})


def run_file(folder: Path, *causes: Cause) -> Path:
    """A run file with these causes, and a failing result of each case."""
    of = {i: c for c in causes for i in c.cases}
    results = [Result(i, "npu", c.verdict, notes=("off | by <b>one</b>",), cause=c.id) for i, c in of.items()]
    path = folder / "run.json"
    path.write_text(json.dumps({**record(results), "causes": [c.to_json() for c in causes]}))
    return path


def write(folder: Path, *causes: Cause) -> str:
    """The page of these causes, written over the one in `folder`."""
    page = folder / "page.md"
    assert findings.write(page, read_runs([run_file(folder, *causes)]), "-o") == len(causes)
    return page.read_text()


def test_a_page_says_what_fails_and_how_to_see_it(tmp_path: Path) -> None:
    """Each cause has its sentence, counts, command and what its smallest case says, without markup of the file."""
    text = write(tmp_path, cause())
    assert "SUM-11111111 is wrong" in text
    assert "2 of `ops` on `npu`" in text
    assert f"conform run --case {CASES[0]} --backend npu" in text
    assert "off \\| by &lt;b&gt;one" in text


def test_a_page_names_no_folder_of_a_machine(tmp_path: Path) -> None:
    """Where somebody built the source says nothing to others; which file and line it is does."""
    path = run_file(tmp_path, cause())
    path.write_text(path.read_text().replace("off |", "/home/someone/build/x9/ggml/src/ggml-backend.cpp:941: off |"))
    findings.write(tmp_path / "page.md", read_runs([path]), "-o")
    assert "…/ggml-backend.cpp:941: off" in (tmp_path / "page.md").read_text()


def test_what_several_backends_have_stands_once(tmp_path: Path) -> None:
    """A cause of one id has one row and one section, which names each backend and how many cases fail there."""
    one = cause()
    other = replace(cause(cases=CASES[:1]), backend="npu?threads=8")
    results = [Result(i, c.backend, c.verdict, notes=("off",), cause=c.id) for c in (one, other) for i in c.cases]
    path, out = tmp_path / "run.json", tmp_path / "page.md"
    path.write_text(json.dumps({**record(results), "causes": [c.to_json() for c in (one, other)]}))
    assert findings.write(out, read_runs([path]), "-o") == 1
    text = out.read_text()
    assert text.count("## 1. SUM-11111111") == 1
    assert "## 2." not in text
    assert "- fails: 2 of `ops` on `npu`\n- fails: 1 of `ops` on `npu?threads=8`" in text
    assert "2 backends" in text


def test_words_stay_with_their_cause(tmp_path: Path) -> None:
    """The title and each person's words stand where they stood, whatever the order of the causes."""
    first = write(tmp_path, cause())
    mark = "<!-- words: SUM-11111111 -->\n"
    edited = first.replace(mark, f"{mark}Reported: #7.\n\nTwo paragraphs.\n").replace("# Findings", "# Ours", 1)
    (tmp_path / "page.md").write_text(edited)
    again = write(tmp_path, cause("ADD-22222222", ("ops/ADD-f32+f32-a=4x4@1",), Verdict.CRASH), cause())
    assert again.startswith("# Ours\n")
    assert f"{mark}Reported: #7.\n\nTwo paragraphs.\n<!-- end -->" in again
    assert again == write(tmp_path, cause("ADD-22222222", ("ops/ADD-f32+f32-a=4x4@1",), Verdict.CRASH), cause())


def test_words_on_a_cause_that_is_gone_are_kept(tmp_path: Path) -> None:
    """They move to the end, and back when the cause returns; nothing that was not written is listed there."""
    mark = "<!-- words: SUM-11111111 -->\n"
    (tmp_path / "page.md").write_text(write(tmp_path, cause()).replace(mark, f"{mark}A word.\n"))
    gone = write(tmp_path, cause("ADD-22222222", ("ops/ADD-f32+f32-a=4x4@1",)))
    assert f"{findings.GONE}\n\nSUM-11111111:\n\n{mark}A word.\n<!-- end -->" in gone
    back = write(tmp_path, cause())
    assert findings.GONE not in back
    assert f"{mark}A word.\n<!-- end -->" in back


@pytest.mark.parametrize(
    "text",
    [
        "# A page of somebody\n",
        "<!-- words: page -->\n<!-- words: X -->\n<!-- end -->\n",
        "<!-- words: page -->\n<!-- end -->\n<!-- words: X -->\nlost\n",
        "<!-- words: page -->\n<!-- end -->\n<!-- words: page -->\n<!-- end -->\n",
    ],
    ids=["no page of ours", "no end", "no end at the end", "twice"],
)
def test_no_page_is_overwritten_that_holds_other_words(tmp_path: Path, text: str) -> None:
    """A page whose words cannot be told apart stays as it is, with an error that names it."""
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(UsageError, match=r"page\.md"):
        write(tmp_path, cause())
    assert page.read_text() == text


def test_failures_without_causes_make_no_page(tmp_path: Path) -> None:
    """It would say that nothing fails."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record([Result(CASES[0], "npu", Verdict.FAIL)])))
    with pytest.raises(UsageError, match="first: conform causes"):
        findings.write(tmp_path / "page.md", read_runs([path]), "-o")


def test_a_strangers_id_ends_no_mark(tmp_path: Path) -> None:
    """An id from a run file neither closes its comment nor begins a heading."""
    name = "X --> <b>\n# Mine\n<!-- words: page -->"
    text = write(tmp_path, cause(name))
    assert "\n# Mine" not in text
    assert text.count("<!-- words: page -->") == 1
    assert text == write(tmp_path, cause(name))


def test_who_is_hit_end_to_end(tmp_path: Path) -> None:
    """A cause names the architectures that fail with its message in llama.cpp itself."""
    told = replace(cause(verdict=Verdict.OVERCLAIM), message="no kernel for #")
    rows = [
        Result(f"arch/{a}-real=1@1", "npu", v, error=Error(f"ov::Exception: {why}") if why else None)
        for a, v, why in (
            ("gpt-oss", Verdict.OVERCLAIM, "no kernel for 7"), ("phi", Verdict.OVERCLAIM, "other"),
            ("olmo", Verdict.PASS, ""),
        )
    ]  # fmt: skip
    whole = tmp_path / "arch.json"
    whole.write_text(json.dumps(record(rows)))
    page = tmp_path / "page.md"
    findings.write(page, read_runs([run_file(tmp_path, told), whole]), "-o")
    text = page.read_text()
    assert "fails so, 1 architecture: gpt-oss\n" in text
    assert "olmo" not in text
