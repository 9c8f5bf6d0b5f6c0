"""The tree's own rules, read from its imports: which room may use which, and no circles."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Sequence
from importlib import import_module

from import_graph import COMMAND, ROOT, draw, imports, modules, named, packages, shown

FLOORS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {""},
            {"ggml"},
            {"installed", "process", "shipped"},
            {"case", "builds"},
            {"backend", "suite", "judge"},
            {"run"},
            {"perf", "properties"},
            {"report"},
            {"causes", "api"},
            {"testrun"},
            {"campaign", "nightly"},
            {"plugin_perf"},
            {"cli"},
            {"plugin"},
            {"conftest", "test_suite", "test_perf"},
            {"llama"},
        ),
    )
)
"""Rooms of `conformance`: each imports itself and those of the floors below. All but `llama` are the core."""

LLAMA_FLOORS = tuple(map(frozenset, ({""}, {"captured", "zoo"}, {"live"}, {"model", "release"}, {"server"}, {"cli"})))
"""Rooms of `conformance.llama`, likewise."""

ADAPTER = ("conformance.ggml", "conformance.case", "conformance.backend")
"""What an adapter imports of ours."""

NEIGHBOURS = {
    "conformance.llama": 283,
    "backends.openvino": 76,
}
"""A part outside the core -> how many names of the core it imports, which a stranger has to know; it only falls."""

METHODS = 20
"""At most, of a class."""

RECORDS = {"conformance": {"report.runfile"}, "journal": {"run.session.journal"}}
"""Kind of record -> the modules of `conformance` that write it. What holds results should be one kind,
`report.runfile.Conformance`; a new kind needs a reason."""


def _room(name: str, depth: int = 1) -> str:
    return [*name.split("."), ""][depth]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports have an order."""
    graphlib.TopologicalSorter({name: imports(name) for name in modules()}).prepare()


def _upwards(package: str, floors: Sequence[frozenset[str]]) -> list[str]:
    """Imports between the rooms of a package that do not go to a floor below."""
    floor = {room: k for k, rooms in enumerate(floors) for room in rooms}
    depth = package.count(".") + 1
    return [
        f"{name} imports {other}"
        for name in modules()
        if f"{name}.".startswith(f"{package}.")
        for other in imports(name)
        if f"{other}.".startswith(f"{package}.")
        and (own := _room(name, depth)) != (used := _room(other, depth))
        and (own not in floor or used not in floor or floor[used] >= floor[own])
    ]


def test_rooms_use_the_floors_below() -> None:
    """No room of the framework, or of the tools beside it, imports one of its own floor or above."""
    assert _upwards("conformance", FLOORS) == []
    assert _upwards("conformance.llama", LLAMA_FLOORS) == []


def test_the_picture_of_the_house_is_drawn_from_its_imports() -> None:
    """The picture in docs/architecture.md shows the imports of the tree as it is."""
    assert shown() == draw(packages()), f"draw it again: {COMMAND}"


def test_the_core_imports_no_neighbour() -> None:
    """Adapters, and the tools that run llama.cpp, are found by entry point."""
    outside = ("backends.", "conformance.llama.")
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        if not f"{name}.".startswith(outside)
        for other in imports(name)
        if f"{other}.".startswith(outside)
    ]
    assert wrong == []


def test_the_neighbours_need_no_more_of_the_core() -> None:
    """The names of the core that each imports. Where the number fell, write the new one into `NEIGHBOURS`."""
    used: dict[str, set[str]] = {part: set() for part in NEIGHBOURS}
    for name in modules():
        part = _neighbour(name)
        if part in used:
            used[part] |= {n for n in named(name) if n.startswith("conformance.") and _neighbour(n) != part}
    assert {part: len(names) for part, names in used.items()} == NEIGHBOURS


def _neighbour(name: str) -> str:
    """Return the neighbour in which a module or name lies; empty for the core."""
    return next((part for part in NEIGHBOURS if f"{name}.".startswith(f"{part}.")), "")


def test_no_class_is_large() -> None:
    """A class that does too much is patched by its author only: one past `METHODS` is missing a noun."""
    large = {
        f"{name}.{node.name}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body) > METHODS
    }
    assert large == set()


def test_adapters_use_the_vocabulary_alone() -> None:
    """An adapter imports of ours what a stranger's adapter has: ggml's words, cases, the interface, and itself."""
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        if name.startswith("backends.")
        for other in imports(name)
        if not f"{other}.".startswith(tuple(f"{p}." for p in (*ADAPTER, f"backends.{_room(name)}")))
    ]
    assert wrong == []


def test_the_kinds_of_records_are_these() -> None:
    """Each kind of record is written by the modules that `RECORDS` names, and no other begins one."""
    found: dict[str, set[str]] = {}
    for name, text in ((name, path.read_text(encoding="utf-8")) for name, path in modules().items()):
        for node in ast.walk(ast.parse(text)) if "header(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "header":
                (kind,) = node.args
                word = getattr(import_module(name), kind.id) if isinstance(kind, ast.Name) else ast.literal_eval(kind)
                found.setdefault(word, set()).add(name.removeprefix("conformance."))
    assert found == RECORDS


def test_the_example_of_an_op_stands_in_the_code() -> None:
    """The modules that docs/adding-an-op.md names for its example are four, and contain the names beside them."""
    text = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `((?:conformance|backends)/\S+\.py)` \| (.*) \|$", text)
    assert len(rows) == 4
    for file, names in rows:
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([^`]+)`", names):
            defined = rf"(?m)^\s*(def )?{re.escape(name)}(\(| = |:|,)"
            assert re.search(defined, source), f"{file}: {name}"


def test_a_result_has_its_case_and_backend_from_the_start() -> None:
    """No `Result` is made with an empty case or backend, to be filled in later."""
    calls = [
        (name, node)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"Result", "Pair"}
    ]
    assert calls
    blank = [
        f"{name}:{call.lineno}"
        for name, call in calls
        for given in (*call.args[:2], *(k.value for k in call.keywords if k.arg in {"case", "backend"}))
        if isinstance(given, ast.Constant) and not given.value
    ]
    assert blank == []
