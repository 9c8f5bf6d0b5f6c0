"""JUnit XML: what CI systems read is what the run found."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import document, gate, result, unit, written_to

from conformance.ggml.text import printable
from conformance.judge.verdict import FAILURES, Verdict
from conformance.report.junit import TAGS, junit, plain
from conformance.report.runs import read_runs

ADD = "ops/ADD-f32+f32-a=3@1"

ATTRIBUTES = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, set()),
    "testsuite": (
        {"name", "tests", "failures", "errors", "time", "skipped", "timestamp"},
        {"name", "tests", "failures", "errors"},
    ),
    "properties": (set(), set()),
    "property": ({"name", "value"}, {"name", "value"}),
    "testcase": ({"name", "time", "classname"}, {"name"}),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "skipped": ({"type", "message"}, set()),
}
"""Element -> the attributes that junit-10.xsd of Jenkins' xunit-plugin allows (of those written here) and demands."""
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"failure", "error", "skipped"},
}


def _read(tmp_path: Path, *documents: object) -> ET.Element:
    """The report of documents, parsed and held against the XSD's rules."""
    paths = [written_to(tmp_path / f"{i}.json", d) for i, d in enumerate(documents)]
    text = junit(read_runs(paths))
    root = ET.fromstring(text)  # noqa: S314  # written above
    assert root.tag == "testsuites"
    for e in root.iter():
        allowed, demanded = ATTRIBUTES[e.tag]
        assert demanded <= e.attrib.keys() <= allowed
        assert {c.tag for c in e} <= CHILDREN.get(e.tag, set())
        if e.tag in {"testsuite", "testsuites"}:
            assert re.fullmatch(r"[0-9]+(\.[0-9]{0,3})?", e.attrib["time"])
    for suite in root:
        for word, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{word}"))
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    for total in ("tests", "failures", "errors"):
        assert int(root.attrib[total]) == sum(int(s.attrib[total]) for s in root)
    return root


def test_each_verdict(tmp_path: Path) -> None:
    """Failing verdicts, and only they, are failures or errors; what did not run is skipped, with its reason."""
    rows = [(f"ops/ADD-f32+f32-a={i}@1", "x", str(v)) for i, v in enumerate(Verdict)]
    root = _read(tmp_path, document(rows))
    cases = {c.attrib["name"]: c for c in root.iter("testcase")}
    for i, v in enumerate(Verdict):
        children = [c.tag for c in cases[rows[i][0]]]
        assert children == ([TAGS[v]] if TAGS[v] else [])
        assert (children in (["failure"], ["error"])) == (v in FAILURES)
        if v is Verdict.UNSUPPORTED:
            assert cases[rows[i][0]][0].attrib["message"] == "UNSUPPORTED: it is UNSUPPORTED"


def test_failure_says_what_and_how_again(tmp_path: Path) -> None:
    """The sentence and the command, which stays one command whatever the names hold."""
    rows = [
        result(ADD, "ggml?a=1", "FAIL", detail="NMSE 0.3", saved="f/a b.gguf"),
        result("x'; rm -rf /@1", "x", "CRASH"),
    ]
    root = _read(tmp_path, document(rows))
    failure, error = next(root.iter("failure")), next(root.iter("error"))
    assert failure.attrib == {"message": "NMSE 0.3", "type": "FAIL"}
    assert failure.text is not None
    assert f"FAIL {ADD} on ggml?a=1: NMSE 0.3\n" in failure.text
    assert "conform repro 'f/a b.gguf' --backend 'ggml?a=1'" in failure.text
    assert error.text is not None
    assert """--case 'x'"'"'; rm -rf /@1' --backend x""" in error.text
    assert next(root.iter("testcase")).attrib["classname"] == "ggml?a=1.ops.ADD"


def test_fresh_failure_is_saved(tmp_path: Path) -> None:
    """A new random case that fails does not fail the run, and is not hidden."""
    root = _read(tmp_path, document([result(ADD, "x", "FAIL", fresh=True)]))
    assert "saved" in next(root.iter("skipped")).attrib["message"]


def test_backend_that_is_not_here(tmp_path: Path) -> None:
    """A backend that was not available is a skipped test with the reason, not absent."""
    doc = document([(ADD, "x", "PASS")])
    doc["environment"]["unavailable"] = {"npu": "no such device"}
    root = _read(tmp_path, doc)
    (skipped,) = root.findall("testsuite[@name='npu']/testcase/skipped")
    assert skipped.attrib["message"] == "no such device"


def test_units_and_gates(tmp_path: Path) -> None:
    """They are tests like any other, under names of their own."""
    root = _read(
        tmp_path, document([unit("decode", "x", [1.0]), gate("a"), gate("b", "FAIL"), gate("c", "UNSUPPORTED")])
    )
    said = {c.attrib["name"]: [e.tag for e in c] for c in root.iter("testcase")}
    assert said == {"perf/decode/llama-tiny@1": [], "gate/a": [], "gate/b": ["failure"], "gate/c": ["skipped"]}


def test_machines_have_suites_of_their_own(tmp_path: Path) -> None:
    """The same case on machines of two kinds is two tests."""
    root = _read(tmp_path, document([(ADD, "x", "PASS")], machine="a"), document([(ADD, "x", "FAIL")], machine="b"))
    assert [s.attrib["name"] for s in root] == ["x on a", "x on b"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(["FAIL", "UNSUPPORTED", "CRASH"]))
def test_any_text(tmp_path: Path, case: str, detail: str, verdict: str) -> None:
    """Whatever an abort text or an id holds, the XML is read, and its detail is there in one line, as on a terminal."""
    case = case.encode("utf-8", "replace").decode()
    root = _read(tmp_path, document([result(case, "x", verdict, detail=detail)]))
    assert next(root.iter("testcase")).attrib["name"] == plain(case)
    if verdict == "FAIL" and detail:
        text = next(root.iter("failure")).text or ""
        assert plain(printable(" ".join(detail.split()))) in text


@pytest.mark.parametrize(
    ("raw", "read"), [("\x1b[31m", r"\x1b[31m"), ("\ufffe", r"\ufffe"), ("a\tb\u00e9", "a\tb\u00e9")]
)
def test_plain(raw: str, read: str) -> None:
    """What XML 1.0 cannot hold is written out; the rest is left alone."""
    assert plain(raw) == read
