"""Writes JUnit XML, as Jenkins, GitLab and GitHub actions read it.

There is a suite per backend and kind of machine; the rules are those of Jenkins's XSD (xunit-plugin, junit-10.xsd). A
case that did not run is `skipped` with its reason, and counted.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from conformance.judge.verdict import FAILURES, Missing, Result, Verdict

from .matrix import operation
from .runfile import Document
from .runs import Row, Runs, command
from .scope import scopes_of

T = TypeVar("T")

TAGS: dict[Verdict, str | None] = {
    Verdict.PASS: None,
    **dict.fromkeys((Verdict.FAIL, Verdict.OVERCLAIM, Verdict.VACUOUS, Verdict.XPASS), "failure"),
    **dict.fromkeys((Verdict.CRASH, Verdict.TIMEOUT), "error"),
    **dict.fromkeys((Verdict.UNSUPPORTED, Verdict.XFAIL), "skipped"),
}
"""Verdict -> its element; None for a test that passed."""

COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}
"""Attribute -> the element that it counts."""
ERRORS = 1000
"""Cases without a result that a suite lists one by one."""

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, escaped or not (its rule [2], Char)."""


@dataclass(frozen=True, slots=True)
class Test:
    """One testcase."""

    classname: str
    name: str
    seconds: float
    tag: str | None = None
    type: str = ""
    message: str = ""
    """Message in one line."""
    text: str = ""


def junit(runs: Runs) -> str:
    """Return the whole document, declared as UTF-8."""
    root = ET.Element("testsuites")
    root.extend(
        [
            *_results(runs),
            *_missing(runs),
            *_unavailable(runs),
        ]
    )
    _count(root, "conformance")
    del root.attrib["skipped"]  # the XSD knows it of a suite only
    ET.indent(root, "")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def plain(text: str) -> str:
    r"""Escape characters that XML cannot contain: `\x1b`, `\ufffe`."""
    return _ILLEGAL.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def _suite_of(
    name: str, rows: Sequence[Row[T]], tests: Iterable[Test], more: Mapping[str, str] = MappingProxyType({})
) -> ET.Element:
    newest = max((r.document for r in rows), key=lambda d: d.written)
    return _suite(name, newest.written, tests, {**_properties(newest), **more})


def _results(runs: Runs) -> Iterator[ET.Element]:
    groups: dict[tuple[str, str], list[Row[Result]]] = {}
    for row in runs.results:
        groups.setdefault((row.value.backend, row.document.machine), []).append(row)
    covered: dict[str, list[str]] = {}
    for scope in scopes_of(runs):
        covered.setdefault(scope.backend, []).append(str(scope))
    machines = {machine for _, machine in groups}
    for (backend, machine), rows in groups.items():
        name = backend if len(machines) == 1 else f"{backend} on {machine}"
        more = {"scope": "\n".join(covered[backend])} if backend in covered else {}
        yield _suite_of(name, rows, [_test(r.value, name) for r in rows], more)


def _classname(suite: str, case_id: str) -> str:
    """Return a class name of backend, family and op; Jenkins shows a tree of its dotted parts."""
    what = operation(case_id)
    return ".".join(w.replace(".", "_") for w in (suite, what.family, what.op) if w)


def _test(r: Result, suite: str) -> Test:
    classname = _classname(suite, r.case)
    tag = TAGS[r.verdict]
    if tag is None:
        return Test(classname, r.case, r.seconds)
    if r.verdict not in FAILURES:
        return Test(classname, r.case, r.seconds, tag, str(r.verdict), f"{r.verdict}: {r.detail or 'no reason given'}")
    if r.fresh:  # its seed is new: it is saved, and fails no run
        return Test(classname, r.case, r.seconds, "skipped", "saved", f"fresh case, saved: {r.sentence()}")
    again = f"{r.sentence()}\nReproduce: {command(r)}\n"
    return Test(classname, r.case, r.seconds, tag, str(r.verdict), r.detail or str(r.verdict), again)


def _missing(runs: Runs) -> Iterator[ET.Element]:
    """Yield an error per pair without a result, at most `ERRORS` per backend, then a count."""
    groups: dict[str, list[Row[Missing]]] = {}
    for row in runs.missing:
        groups.setdefault(row.value.backend, []).append(row)
    for backend, rows in groups.items():
        tests = [_no_result(backend, _name(r.value), r.value.reason) for r in rows[:ERRORS]]
        if (more := len(rows) - ERRORS) > 0:
            tests.append(_no_result(backend, f"{more} more", f"{len(rows)} in all"))
        yield _suite_of(f"{backend}: requested, but without a result", rows, tests)


def _name(m: Missing) -> str:
    return m.case if m.count == 1 else f"{m.case}: {m.count} cases"


def _no_result(backend: str, case: str, why: str) -> Test:
    message = f"requested, but without a result: {why}"
    return Test(_classname(backend, case), case, 0.0, "error", "missing", message)


def _unavailable(runs: Runs) -> Iterator[ET.Element]:
    for name, why in runs.unavailable().items():
        yield _suite(name, runs.documents[-1].written, [Test(name, "available", 0.0, "skipped", "", why)])


def _properties(d: Document) -> dict[str, str]:
    env = d.environment
    facts = {"run": d.run, **{k: getattr(env, k) for k in ("machine", "system", "cpu", "cores", "python")}}
    return {k: str(v) for k, v in {**facts, **(env.packages or {})}.items() if v is not None}


def _suite(
    name: str, written: str, tests: Iterable[Test], properties: Mapping[str, str] = MappingProxyType({})
) -> ET.Element:
    suite = ET.Element("testsuite", timestamp=written.removesuffix("Z"))
    if properties:
        above = ET.SubElement(suite, "properties")
        for k, v in properties.items():
            ET.SubElement(above, "property", name=plain(k), value=plain(v))
    for t in tests:
        names = {"classname": plain(t.classname), "name": plain(t.name)}
        case = ET.SubElement(suite, "testcase", names, time=f"{t.seconds:.6f}")
        if t.tag is not None:
            said = ET.SubElement(case, t.tag, message=plain(" ".join(t.message.split())))
            said.text = plain(t.text)
            if t.type:
                said.set("type", t.type)
    _count(suite, name)
    return suite


def _count(suite: ET.Element, name: str) -> None:
    """Set name, counts and seconds (with the XSD's digits) from the tests below."""
    tests = list(suite.iter("testcase"))
    suite.set("name", plain(name))
    suite.set("tests", str(len(tests)))
    for word, tag in COUNTED.items():
        suite.set(word, str(sum(t.find(tag) is not None for t in tests)))
    suite.set("time", f"{sum(float(t.attrib['time']) for t in tests):.3f}")
