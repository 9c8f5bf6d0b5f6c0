"""A cgraph becomes a compiled model in one pass over the modules; some of them are private."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType

from backends.openvino import OpenVinoStateless
from conformance.suite.decoder import make

FOLDER = Path(sys.modules[OpenVinoStateless.__module__].__file__ or "").parent
TEMPLATE = "translating/template"
RETURNS = 5
"""Most returns to a module that was entered before; this number only falls."""


def test_a_new_program_takes_one_pass() -> None:
    """A step that is lifted enters few modules again, until its compiled model is there.

    Functions are taken in the order of their first call, without operators of symbols. `translating/template` is one
    module, and so is all that `emit` calls, since the emitter of each op goes through the same few modules.
    """
    case = make("kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=at254.d4@1")
    entered: dict[tuple[str, str], None] = {}
    emitting: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and emitting and emitting[-1] is frame:
            emitting.pop()
        if event == "call" and code.co_filename.startswith(str(FOLDER)) and not code.co_name.startswith(("<", "__")):
            module = "emission" if emitting else _module(Path(code.co_filename))
            entered.setdefault((module, code.co_name))
            if code.co_name == "emit":
                emitting.append(frame)

    with OpenVinoStateless().open(case) as session:
        for step in case.steps[:2]:
            session.compute(step.graph, step.inputs, step.outputs)
        step = case.steps[2]
        compiles = session.witness().compiles
        session._graphs.clear()  # type: ignore[attr-defined]  # plans of the case's graphs, made when it was opened
        sys.setprofile(note)
        try:
            session.compute(step.graph, step.inputs, step.outputs)
        finally:
            sys.setprofile(None)
        assert session.witness().compiles == compiles + 1
    functions = list(entered)
    functions = functions[: functions.index(("bind", "bind"))]  # the program exists, and runs
    assert {"template_of", "emit", "compile"} <= {name for _, name in functions}
    walk = [module for module, _ in groupby(module for module, _ in functions)]
    assert len(walk) - len(set(walk)) <= RETURNS, walk


def _module(path: Path) -> str:
    name = path.relative_to(FOLDER).with_suffix("").as_posix()
    return TEMPLATE if name.startswith(TEMPLATE) else name


def test_the_parts_of_a_template_are_private() -> None:
    """No module outside of `translating/template` imports one of its modules."""
    outside = [p for p in FOLDER.rglob("*.py") if TEMPLATE not in p.as_posix()]
    assert [f"{p.name}: {name}" for p in outside for name in _imports(p) if _private(name)] == []


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{a.name}" for a in node.names)


def _private(name: str) -> bool:
    """Return True if `name`, as imported, is of a module in `translating/template`."""
    parts = {p.stem for p in (FOLDER / TEMPLATE).glob("*.py")}
    _, found, rest = name.partition("template.")
    return bool(found) and rest.split(".")[0] in parts
