"""Write the draft of an issue, under the headings of llama.cpp's bug template.

Untrusted text (ids, names, messages) is put into code spans and fences that it cannot end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from conformance.backend.interface import DeviceInfo
from conformance.case.case import Case
from conformance.causes.features import name_of
from conformance.causes.rule import Rule
from conformance.causes.wording import CUT, clause, telling, when
from conformance.ggml.tensor import Tensor
from conformance.ggml.text import printable
from conformance.judge.cause import ALWAYS, Cause
from conformance.judge.message import said
from conformance.judge.verdict import Result, Verdict, counted
from conformance.report.markdown import code, inline
from conformance.run.session.environment import environment

from .proof import Proof

HOW = {
    Verdict.FAIL: "silent wrong results",
    Verdict.CRASH: "crash",
    Verdict.TIMEOUT: "hang",
    Verdict.OVERCLAIM: "accepted by supports_op, then compute fails",
}
"""Verdict -> text of the title."""
MOST_LINES = 60
"""Maximum lines of a draft; a longer proof is attached."""
LONGEST = 1000
"""Maximum characters of a message or a line of prose."""
NODES = 8
"""Maximum nodes of the graph that a draft shows."""
TITLED = 2
"""Maximum number of conditions in a title."""
NAMED = 4
"""Maximum number of ops in a title."""
COMPILED = """Compile and run it (GGML: a checkout of ggml, LIB: the folder of its libraries):
```
c++ -std=c++17 program.cpp -I GGML/include -L LIB -Wl,-rpath,LIB -lggml -lggml-base -o program
./program DEVICE LIB
```"""


def title(cause: Cause, also: Sequence[Cause] = ()) -> str:
    """Return the title of a bug: `CONT: silent wrong results when src0 is transposed`."""
    each = dict.fromkeys(op for c in (cause, *also) for op in _ops(c))
    ops = ", ".join(list(each)[:NAMED]) + (f" and {len(each) - NAMED} more ops" if len(each) > NAMED else "")
    few = Rule(cause.conditions).but(set(cause.conditions) - set(telling(cause.conditions)[:TITLED])).conditions
    return _prose(f"{ops}: {HOW.get(cause.verdict, 'fails')}{when(few)}", 120)


def _ops(cause: Cause) -> Sequence[str]:
    return Rule(cause.conditions).ops or (cause.op or "a graph",)


def issue(
    cause: Cause, case: Case, result: Result, what: Proof, info: DeviceInfo | None, also: Sequence[Cause] = ()
) -> str:
    """Return the draft of an issue, at most `MOST_LINES` lines.

    `also`: other causes of the same bug.
    """
    where = environment()
    filled = (
        ("Name and Version", _version(info)),
        ("Operating systems", _prose(str(where["system"]))),
        ("GGML backends", _prose(info.device if info else result.backend)),
        ("Hardware", _prose(info.description if info and info.description else str(where["cpu"]))),
        ("Models", _hit(cause)),
    )
    head = [
        "<!-- A draft. Check it, and write it in your own words before you send it. -->",
        f"# {title(cause, also)}",
        "",
    ]
    head += [line for heading, text in filled for line in (f"### {heading}", text)]
    body = ["### Problem description & steps to reproduce", *_problem(cause, case, result, what, also)]
    bisect = code(f"conform build bisect RUN.json {cause.id} BUILD…", 200)
    tail = ["### First Bad Commit", f"Not known: {bisect} finds it."]
    name, text = ("test_case.cpp", what.test_case) if what.test_case else ("program.cpp", what.program)
    proof = _fenced(text.rstrip(), "cpp")
    if len(head) + len(body) + len(tail) + proof.count("\n") >= MOST_LINES:
        proof = f"(attached: {name})"
    return "\n".join([*head, *body, *([proof] if text else []), *tail, ""])


def _version(info: DeviceInfo | None) -> str:
    versions = info.versions if info is not None else {}
    found = [f"{_prose(name)} {code(v, 80)}" for name, v in versions.items() if name != "library"]  # a local path
    return ", ".join(found) or "Not known."


def _hit(cause: Cause) -> str:
    return f"llama.cpp: {cause.hits}." if cause.rank.get("architectures") else "Not known."


def _problem(cause: Cause, case: Case, result: Result, what: Proof, also: Sequence[Cause]) -> Iterator[str]:
    failed = sum(len(c.cases) for c in (cause, *also))
    fails = f"{counted(failed, 'generated case')} fail{'s' * (failed == 1)}"
    passed = sum(c.rank.get("passed", 0) for c in (cause, *also))
    if clauses := [(clause(c), cause.shown.get(c, "")) for c in telling(cause.conditions)]:
        others = f"{passed or 'no'} passing node{'s' * (passed > 1)} meet{'s' * (passed < 2)} them"
        yield f"{fails}. Conditions: {', '.join(f'{code(c, 120)}{near}' for c, near in clauses)} ({others})."
    elif cause.search == "cut":
        yield f"{fails}."
    else:
        yield f"{fails}; no condition separates failing from passing nodes."
    if cause.search == "cut":
        yield f"{CUT.capitalize()}."
    if also:
        yield from _table((cause, *also))
    else:
        yield from _numbers(result)
    if what.limit:
        yield _prose(what.limit)
    if cause.emulated:
        yield f"The device is {_prose(cause.emulated)}."
    times = cause.seen.partition(" of ")
    if cause.seen and cause.seen != ALWAYS and times[0] != times[2]:
        yield f"It does not fail every time: {_prose(cause.seen)}."
    which = (
        f"The smallest{f' of {_prose(_ops(cause)[0])}' if also else ''}"
        if cause.search == "complete"
        else "A failing (not minimised)"
    )
    yield f"\n{which} graph{'s' if len(case.steps) > 1 else ''}:"
    yield _fenced("\n".join(_nodes(case)))
    if what.test_case:
        yield "This `test_case` fails in tests/test-backend-ops.cpp:"
    elif what.program:
        yield f"{_prose(what.why)} program.cpp exits with 1 if the device is wrong. {COMPILED}"
    else:
        yield _prose(what.why)


def _table(causes: Sequence[Cause]) -> Iterator[str]:
    """Yield a row per op, with its message and its smallest case."""
    yield "\n| op | cases | error | smallest case |"
    yield "|---|---|---|---|"
    for c in causes:
        cells = (", ".join(_ops(c)), str(len(c.cases)), code(c.message, LONGEST), code(c.smallest, LONGEST))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _numbers(result: Result) -> Iterator[str]:
    """Yield the backend's message, or the worst wrong element."""
    where = result.where
    if result.error is not None:
        yield code(said(result.error), LONGEST)
    elif where is not None and (n := where.numbers) is not None:
        special = f", {n.special} NaN or Inf out of place" if n.special else ""
        yield (
            f"{_prose(where.op)} {code(where.tensor or '')}, element {list(n.index)}: expected `{n.expected:.9g}`, "
            f"got `{n.found:.9g}` (NMSE {n.nmse:.2g}{special})."
        )
    elif result.notes:
        yield code("; ".join(result.notes), LONGEST)


def _nodes(case: Case) -> Iterator[str]:
    lines = [
        f"{f'step {k}: ' if len(case.steps) > 1 else ''}{n.name}: {name_of(n)} {_shape(n)} of "
        + ", ".join(_shape(s) for s in n.src if s is not None)
        for k, step in enumerate(case.steps)
        for n in step.graph
    ]
    yield from lines[:NODES]
    if len(lines) > NODES:
        yield f"and {len(lines) - NODES} more"


def _shape(t: Tensor) -> str:
    return f"{t.type.name}{list(t.ne)}" + ("" if t.view_src is None else f" nb={list(t.nb)} offs={t.view_offs}")


def _prose(text: str, most: int = LONGEST) -> str:
    """Return a line of prose without markup, mentions and links."""
    line = inline(printable(text, most), most)
    return line.replace("\\@", "@&#8203;").replace("\\#", "#&#8203;").replace("://", ":&#8203;//")


def _fenced(text: str, language: str = "") -> str:
    """Return a code block whose fence is longer than any run of backticks in it."""
    lines = [printable(line) for line in text.split("\n")]
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])
