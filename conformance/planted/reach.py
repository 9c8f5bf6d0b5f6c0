"""Which faults a case reaches: an adapter as it is, with a mark before each statement that one of them changes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, cast

from conformance.backend.registry import Spec

from .faults import Fault

MARK = "_reached"
"""What a module calls with the name of a fault."""


class Probe:
    """The adapter `of`, that notes in `reached` the names of those `faults` whose places ran.

    `lasting` are those of them whose places run once for all cases after: in a module, a class or a cached function.
    """

    name, file = "reach", ""

    def __init__(self, of: str, faults: Sequence[Fault]) -> None:
        self.of = of
        base = Spec.parse(of)
        self.spec = Spec(f"{base.name}+{self.name}", base.options)
        self.reached: set[str] = set()
        self.lasting: set[str] = set()
        self.names: Mapping[str, object] = {MARK: self.reached.add}
        self._faults = faults

    def change(self, file: str, source: str) -> ast.Module | None:
        """The program with the marks of those faults that stand in `file`."""
        faults = [f for f in self._faults if f.file == file]
        if not faults:
            return None
        tree = ast.parse(source)
        each_time = _each_time(tree)
        marks: dict[ast.stmt, list[str]] = {}
        for f in faults:
            statement = _statement(tree, f.line(source))
            marks.setdefault(statement, []).append(f.name)
            if statement not in each_time:
                self.lasting.add(f.name)
        return cast("ast.Module", ast.fix_missing_locations(_Marks(marks).visit(tree)))


def _statement(tree: ast.Module, line: int) -> ast.stmt:
    """The innermost statement that holds `line`, or the first after it; decorators of a definition are part of it."""
    found: ast.stmt | None = None
    after: list[tuple[int, ast.stmt]] = []
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt):
            first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
            if first <= line <= (node.end_lineno or first):
                found = node
            elif first > line:
                after.append((first, node))
    return found or min(after, key=lambda entry: entry[0])[1]


def _each_time(tree: ast.Module) -> set[ast.AST]:
    """What runs whenever its function is called: the insides of functions that no decorator caches."""
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    cached = [f for f in functions if any("cache" in ast.unparse(d) for d in f.decorator_list)]
    inner = {n for f in functions for n in ast.walk(f) if n is not f}
    return inner - {n for f in cached for n in ast.walk(f)}


class _Marks(ast.NodeTransformer):
    def __init__(self, marks: Mapping[ast.stmt, Sequence[str]]) -> None:
        self._marks = marks

    def visit(self, node: ast.AST) -> Any:  # noqa: ANN401  # one node or several, as `ast` takes them
        """`node`, behind its marks."""
        self.generic_visit(node)
        names = self._marks.get(node, ()) if isinstance(node, ast.stmt) else ()
        return [*(ast.parse(f"{MARK}({name!r})").body[0] for name in names), node] if names else node
