"""JUnit XML, as Jenkins, GitLab and the GitHub actions that show test reports read it.

A suite per backend and kind of machine, one for gates; the rules are those of the XSD that
Jenkins publishes (xunit-plugin, junit-10.xsd). What did not run is `skipped` with its reason, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeVar

from conformance.judge.verdict import FAILURES, Result, Verdict

from .matrix import operation
from .runfile import Document
from .runs import Fields, Row, Runs, command

T = TypeVar("T")

TAGS: dict[Verdict, str | None] = {
    Verdict.PASS: None,
    **dict.fromkeys((Verdict.FAIL, Verdict.OVERCLAIM, Verdict.VACUOUS, Verdict.XPASS), "failure"),
    **dict.fromkeys((Verdict.CRASH, Verdict.TIMEOUT), "error"),
    **dict.fromkeys((Verdict.UNSUPPORTED, Verdict.XFAIL), "skipped"),
}
"""Verdict -> its element; None for a test that passed."""
GATES: dict[str, str | None] = {"fine": None, "regressed": "failure", "undecided": "skipped", "not run": "skipped"}

COUNTED = {"failures": "failure", "errors": "error"}
"""Attribute -> the element that it counts."""
ERRORS = 1000
"""Cases without a result that a suite names one by one."""

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, escaped or not (its rule [2], Char)."""


@dataclass(frozen=True, slots=True)
class Test:
    """One testcase."""

    classname: str
    name: str
    seconds: float
    tag: str | None = None
    type: str = ""
    message: str = ""
    """In one line."""
    text: str = ""


@dataclass(slots=True)
class Suite:
    """One testsuite."""

    name: str
    written: str
    properties: dict[str, str] = field(default_factory=dict)
    tests: list[Test] = field(default_factory=list)


def junit(runs: Runs) -> str:
    """The whole document; UTF-8 by its declaration."""
    suites = [
        *_results(runs),
        *_missing(runs),
        *_unavailable(runs),
        *_grouped("performance gates", [(row, _gate(row.value)) for row in runs.gates]),
    ]
    totals = _counts("conformance", [t for s in suites for t in s.tests], COUNTED)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites{_attributes(totals)}>"]
    for s in suites:
        lines += _suite(s)
    lines.append("</testsuites>")
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    r"""`text` with what XML cannot hold written out: `\x1b`, `\ufffe`."""
    return _ILLEGAL.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def _suite_of(name: str, rows: Sequence[Row[T]], tests: list[Test]) -> Suite:
    newest = max((r.document for r in rows), key=lambda d: d.written)
    return Suite(name, newest.written, _properties(newest), tests)


def _results(runs: Runs) -> Iterator[Suite]:
    groups: dict[tuple[str, str], list[Row[Result]]] = {}
    for row in runs.results:
        groups.setdefault((row.value.backend, row.document.machine), []).append(row)
    machines = {machine for _, machine in groups}
    for (backend, machine), rows in groups.items():
        name = backend if len(machines) == 1 else f"{backend} on {machine}"
        yield _suite_of(name, rows, [_test(r.value, name) for r in rows])


def _classname(suite: str, case_id: str) -> str:
    """The dots of a class name make a tree in Jenkins: backend, family, op."""
    what = operation(case_id)
    return ".".join(w.replace(".", "_") for w in (suite, what.family, what.op) if w)


def _test(r: Result, suite: str) -> Test:
    classname = _classname(suite, r.case)
    tag = TAGS[r.verdict]
    if tag is None:
        return Test(classname, r.case, r.seconds)
    if r.verdict not in FAILURES:
        return Test(classname, r.case, r.seconds, tag, str(r.verdict), f"{r.verdict}: {r.detail or 'no reason given'}")
    if r.fresh:  # its seed is new: it is filed, and fails no run
        return Test(classname, r.case, r.seconds, "skipped", "filed", f"filed, a fresh case: {r.sentence()}")
    again = f"{r.sentence()}\nReproduce: {command(r)}\n"
    return Test(classname, r.case, r.seconds, tag, str(r.verdict), r.detail or str(r.verdict), again)


def _missing(runs: Runs) -> Iterator[Suite]:
    """An error for each pair that has no result, `ERRORS` at most of each backend, and one that counts the others."""
    groups: dict[str, list[Row[Fields]]] = {}
    for row in runs.missing:
        groups.setdefault(row.value["backend"], []).append(row)
    for backend, rows in groups.items():
        tests = [_no_result(backend, r.value["case"], r.value["reason"]) for r in rows[:ERRORS]]
        if (more := len(rows) - ERRORS) > 0:
            tests.append(_no_result(backend, f"{more} more", f"{len(rows)} in all"))
        yield _suite_of(f"{backend}: asked for, and without a result", rows, tests)


def _no_result(backend: str, case: str, why: str) -> Test:
    message = f"asked for, and without a result: {why}"
    return Test(_classname(backend, case), case, 0.0, "error", "missing", message)


def _unavailable(runs: Runs) -> Iterator[Suite]:
    for name, why in runs.unavailable().items():
        yield Suite(name, runs.documents[-1].written, {}, [Test(name, "available", 0.0, "skipped", "", why)])


def _gate(g: Fields) -> Test:
    tag = GATES[g["answer"]]
    message = f"{g['answer']}: {g.get('reason') or 'no reason given'}"
    name = f"{g['gate']}: {g['unit']} on {g['backend']}"
    return Test(f"gates.{g['kind']}", name, g.get("seconds") or 0.0, tag, g["answer"] if tag else "", message, message)


def _grouped(name: str, tests: Sequence[tuple[Row[Fields], Test]]) -> Iterator[Suite]:
    """A suite per kind of machine, which its name has only where there are several."""
    machines = dict.fromkeys(row.document.machine for row, _ in tests)
    for machine in machines:
        rows, here = zip(*((r, t) for r, t in tests if r.document.machine == machine), strict=True)
        yield _suite_of(name if len(machines) == 1 else f"{name} on {machine}", rows, list(here))


def _properties(d: Document) -> dict[str, str]:
    env = d.environment
    facts = {"run": d.run, **{k: getattr(env, k) for k in ("machine", "system", "cpu", "cores", "python")}}
    return {k: str(v) for k, v in {**facts, **(env.packages or {})}.items() if v is not None}


def _counts(name: str, tests: Sequence[Test], tags: Mapping[str, str]) -> dict[str, str]:
    counts = {word: str(sum(t.tag == tag for t in tests)) for word, tag in tags.items()}
    # the XSD takes no more digits of a suite
    return {"name": name, "tests": str(len(tests)), **counts, "time": f"{sum(t.seconds for t in tests):.3f}"}


def _suite(s: Suite) -> Iterator[str]:
    counts = _counts(s.name, s.tests, {**COUNTED, "skipped": "skipped"})
    yield f"<testsuite{_attributes({**counts, 'timestamp': s.written.removesuffix('Z')})}>"
    if s.properties:
        yield "<properties>"
        yield from (f"<property{_attributes({'name': k, 'value': v})}/>" for k, v in s.properties.items())
        yield "</properties>"
    for t in s.tests:
        own = _attributes({"classname": t.classname, "name": t.name, "time": f"{t.seconds:.6f}"})
        if t.tag is None:
            yield f"<testcase{own}/>"
            continue
        attributes = _attributes({"message": " ".join(t.message.split()), **({"type": t.type} if t.type else {})})
        text = escape(plain(t.text), quote=False)
        yield f"<testcase{own}><{t.tag}{attributes}>{text}</{t.tag}></testcase>"
    yield "</testsuite>"


def _attributes(values: Mapping[str, str]) -> str:
    return "".join(f' {k}="{_attribute(v)}"' for k, v in values.items())


def _attribute(text: str) -> str:
    # a parser turns line ends in an attribute into blanks; references keep them
    return re.sub("[\t\n\r]", lambda m: f"&#{ord(m[0])};", escape(plain(text)))
