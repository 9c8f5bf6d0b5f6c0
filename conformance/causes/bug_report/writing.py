"""Write the README and the draft issue in llama.cpp's template.

Text that others may have written (ids, names, messages) stands in code spans and fences that it cannot end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from conformance.backend.interface import DeviceInfo
from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.causes.cause import ALWAYS, Cause
from conformance.ggml.tensor import Tensor
from conformance.ggml.text import printable, shell
from conformance.judge.verdict import Result, Verdict
from conformance.report.markdown import code, inline
from conformance.run.session.environment import environment
from conformance.run.signature import by_damage, innermost

from .proof import Proof

HOW = {
    Verdict.FAIL: "the numbers are wrong, and nothing says so",
    Verdict.CRASH: "the process dies",
    Verdict.TIMEOUT: "it does not come back",
    Verdict.OVERCLAIM: "`supports_op` accepts it, then computing it fails",
}
LONGEST = 4000
"""Maximum characters of a message."""
NODES = 40
"""Maximum nodes listed in an issue."""
EMBEDDED = 20_000
"""Maximum characters of source embedded in an issue; a longer file is attached."""
DAMAGE = (
    "",
    "It damages memory, which ends a process by chance. Where the program ends well, glibc's checked heap may tell:",
    "",
    "```\nGLIBC_TUNABLES=glibc.malloc.check=3 LD_PRELOAD=libc_malloc_debug.so.0 ./program DEVICE LIB\n```",
)
"""README text for a crash without a message."""
WHAT = {
    "case.gguf": "the smallest case, with the result; `conform repro` runs it",
    "case.py": "a Python program that builds the case",
    "test_case.cpp": "a `test_case` for ggml's tests/test-backend-ops.cpp, which fails there",
    "program.cpp": "a program of one file against ggml's public API, which ends with 1 where it is wrong",
}


def readme(cause: Cause, result: Result, what: Proof, files: Sequence[str]) -> str:
    """Return the README: the files and the commands."""
    lines = [f"# {_said(cause.id)}", "", _said(cause.sentence), "", "| file | what |", "|---|---|"]
    lines += [f"| {name} | {WHAT[name]} |" for name in (*files,)]
    lines += ["| issue.md | the draft of an issue |", "", "Again, from this folder:", "", _repro(result.backend), ""]
    damage = what.program != "" and result.error is not None and by_damage(innermost(result.error))
    return "\n".join([*lines, *_built(what), *(DAMAGE if damage else ()), ""])


def _built(what: Proof) -> Iterator[str]:
    if what.why:
        yield from (_said(what.why), "")
    if what.test_case:
        yield from (
            "In tests/test-backend-ops.cpp of ggml or llama.cpp, put test_case.cpp before `make_test_cases_eval`, and",
            "the line at its end into that function. Build it, then:",
            "",
            _fenced("test-backend-ops test -b DEVICE"),
        )
    if what.program:
        yield from (
            "GGML is a checkout of ggml (of llama.cpp: its folder ggml), LIB the folder of its libraries:",
            "",
            _fenced(
                "c++ -std=c++17 program.cpp -I GGML/include -L LIB -Wl,-rpath,LIB -lggml -lggml-base -o program\n"
                "./program DEVICE LIB"
            ),
        )


def _repro(backend: str) -> str:
    return _fenced(shell(["conform", "repro", "case.gguf", "--backend", backend]))


def issue(cause: Cause, case: Case, result: Result, what: Proof, info: DeviceInfo | None, since: str) -> str:
    """Return the draft: the bug, the version, since when, the smallest proof and its reach."""
    where = environment()
    told = (
        ("Name and Version", _version(info, result)),
        ("Operating systems", _said(str(where["system"]))),
        ("GGML backends", _said(info.device if info else _device(result))),
        ("Hardware", _said(info.description if info and info.description else str(where["cpu"]))),
        ("Models", _hit(cause)),
        ("Problem description & steps to reproduce", "\n".join(_problem(cause, case, result, what))),
        ("First Bad Commit", _said(since) if since else "Not known."),
        ("Relevant log output", _fenced(result.detail[:LONGEST] or cause.message[:LONGEST] or "none")),
    )
    head = [
        "<!-- A draft. Check it, and say it in your own words before you send it: llama.cpp asks for that. -->",
        "",
        f"# Eval bug: {_title(cause)}",
        "",
    ]
    return "\n".join([*head, *(f"### {heading}\n\n{text}\n" for heading, text in told)])


def _title(cause: Cause) -> str:
    conditions = ", ".join(code(str(c), 80) for c in cause.conditions[:3])
    return f"{_said(cause.op) or 'a graph'}{f' with {conditions}' if conditions else ''}: {HOW.get(cause.verdict, '')}"


def _version(info: DeviceInfo | None, result: Result) -> str:
    if info is not None and info.versions:
        told = ((name, version) for name, version in info.versions.items() if name != "library")  # a local path
        return ", ".join(f"{_said(name)} {code(version, 80)}" for name, version in told)
    packages = environment()["packages"]
    own = packages.get("xllamacpp") if isinstance(packages, dict) else None
    known = Spec.parse(result.backend).name == "ggml" and not re.search("lib=", result.backend) and own
    return f"the ggml of the Python package xllamacpp {_said(str(own))}" if known else "Not known."


def _device(result: Result) -> str:
    said = (result.witness or {}).get("device")
    return str(said or dict(Spec.parse(result.backend).options).get("device") or "not known")


def _hit(cause: Cause) -> str:
    rank = cause.rank
    n, failed, passed = (rank.get(k, 0) for k in ("architectures", "failed", "passed"))
    models = f"llama.cpp: {cause.hits}." if n else "No model is known to be hit."
    cases = f" {failed} generated cases fail by it; {passed} nodes with these conditions are right." if failed else ""
    return models + cases


def _problem(cause: Cause, case: Case, result: Result, what: Proof) -> Iterator[str]:
    yield f"{_said(cause.sentence)}\n"
    yield f"What happens: {HOW.get(result.verdict, 'it fails')}."
    if cause.conditions:
        right = cause.rank.get("passed", 0)
        others = (
            f"{right} nodes that have it all are right, so values matter, too"
            if right
            else "none that has it all is right"
        )
        yield f"\nIt happens where all of this holds; {others}:\n"
        yield from (f"- {code(str(c), 200)}" for c in cause.conditions)
    if cause.seen and cause.seen != ALWAYS:
        yield f"\nSeen: {_said(cause.seen)}."
    yield f"\nThe smallest graph{'s' if len(case.steps) > 1 else ''}:\n"
    yield _fenced("\n".join(_nodes(case)))
    if what.why:
        yield f"\n{_said(what.why)}"
    yield from _proof(what)


def _proof(what: Proof) -> Iterator[str]:
    name = "test_case.cpp" if what.test_case else "program.cpp"
    text = what.test_case or what.program
    if what.test_case:
        yield "\nThis fails in tests/test-backend-ops.cpp:\n"
    elif what.program:
        yield (
            "\nThis program ends with 1 where the device is wrong; "
            "`./program DEVICE FOLDER` names the device and the folder of the libraries:\n"
        )
    if text:
        yield _fenced(text.rstrip(), "cpp") if len(text) <= EMBEDDED else f"(attached: {name})"


def _nodes(case: Case) -> Iterator[str]:
    lines = [
        f"step {k}: {n.name}: {n.op} {_shape(n)} of " + ", ".join(_shape(s) for s in n.src if s is not None)
        for k, step in enumerate(case.steps)
        for n in step.graph
    ]
    yield from lines[:NODES]
    if len(lines) > NODES:
        yield f"and {len(lines) - NODES} more"


def _shape(t: Tensor) -> str:
    return f"{t.type.name}{list(t.ne)}" + ("" if t.view_src is None else f" nb={list(t.nb)}")


def _said(text: str) -> str:
    """Return a line of prose without markup, mentions and links."""
    line = inline(printable(text, LONGEST), LONGEST)
    return line.replace("\\@", "@&#8203;").replace("\\#", "#&#8203;").replace("://", ":&#8203;//")


def _fenced(text: str, language: str = "") -> str:
    """Return a code block whose fence is longer than any run of backticks in it."""
    lines = [printable(line) for line in text.split("\n")]
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])
