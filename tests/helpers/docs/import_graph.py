"""The imports between our modules, and the picture of docs/architecture.md.

Run as a script, it draws the picture again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TREES = ("conformance", "backends")
DOCUMENT = ROOT / "docs" / "architecture.md"
FENCE = '```text title="imports"\n'
COMMAND = "python tests/helpers/docs/import_graph.py"
PARTS = (("adapters", "backends/"), ("llama.cpp tools", "conformance/llama"), ("core", ""))
"""A part of the tree, and how its packages begin; the first that fits counts."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of ours."""
    return {_name(path): path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(name: str) -> set[str]:
    """Modules of ours that `name` imports, wherever in it."""
    return {m for m in _imported(name) if m in modules() and m != name}


def _imported(name: str) -> Iterator[str]:
    for found in named(name):
        yield found if found in modules() else found.rpartition(".")[0]


def named(name: str) -> Iterator[str]:
    """Modules and names in modules that `name` imports, in full."""
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            yield from (f"{source}.{alias.name}" for alias in node.names)


def packages() -> dict[str, set[str]]:
    """Package -> the packages that its modules import; `backends/x` and `conformance/llama` with their folder."""
    graph: dict[str, set[str]] = {}
    for name in modules():
        own = _package(name)
        if own:
            others = {_package(other) for other in imports(name)} - {own, ""}
            graph[own] = graph.get(own, set()) | others
    return graph


def _package(name: str) -> str:
    """Return the package of a module; empty for `conformance` itself and the modules that pytest collects."""
    tree, _, rest = name.partition(".")
    package = rest.partition(".")[0]
    if package.startswith(("test_", "conftest")):
        return ""
    outside = package and (tree == "backends" or package == "llama")
    return f"{tree}/{package}" if outside else package


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the imports that follow from others."""

    def reached(package: str) -> set[str]:
        return set().union(*({p} | reached(p) for p in graph[package]))

    return {package: used - set().union(*map(reached, used)) for package, used in graph.items()}


def draw(graph: Mapping[str, set[str]]) -> str:
    """Return the packages of each part, each above those that it imports, with arrows to these."""

    @cache
    def height(package: str) -> int:
        return 1 + max(map(height, graph[package]), default=0)

    direct = reduced(graph)
    lines: list[tuple[str, str]] = []
    for part, _ in PARTS:
        mine = [p for p in graph if _part(p) == part]
        lines.append((part, ""))
        mine.sort(key=lambda p: (-height(p), sorted(direct[p]), p))
        for used, group in groupby(mine, key=lambda p: sorted(direct[p])):
            lines.append((f"  {_joined(list(group))}", " ".join(used)))
    width = max(len(left) for left, right in lines if right)
    return "".join(f"{f'{left:{width}} -> {right}' if right else left}\n" for left, right in lines)


def _joined(names: Sequence[str]) -> str:
    """Return names in a line, with a folder that all share in front: `backends/{cpu,ggml}`."""
    folder = names[0].rpartition("/")[0]
    if len(names) == 1 or not folder:
        return " ".join(names)
    return f"{folder}/{{{','.join(name.removeprefix(f'{folder}/') for name in names)}}}"


def _part(package: str) -> str:
    return next(part for part, beginning in PARTS if package.startswith(beginning))


def shown() -> str:
    """Return the picture in the document."""
    return DOCUMENT.read_text(encoding="utf-8").partition(FENCE)[2].partition("```")[0]


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text.replace(FENCE + shown(), FENCE + draw(packages())), encoding="utf-8")
