"""Mutants: faults that nobody chose. cosmic-ray's operators make them, at places of the code that a seed draws."""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins
import numpy as np

from conformance.ggml.errors import UsageError
from conformance.suite import FAMILIES

from .faults import ROOT, Fault


@dataclass(frozen=True, slots=True)
class Area:
    """A part of the code."""

    of: tuple[str, ...]
    """The adapters by whose answers its mutants are noticed, one after the other: code that none but some options reach
    needs these."""
    files: tuple[str, ...]
    """Patterns, relative to the root of the packages."""


AREAS: dict[str, Area] = {
    "cpu": Area(("cpu",), ("backends/cpu/**/*.py", "conformance/ggml/quants/*.py")),
    "openvino-stateless": Area(("openvino-stateless",), ("backends/openvino/*.py", "backends/openvino/emit/**/*.py")),
    "openvino-stateful": Area(("openvino-stateful",), ("backends/openvino/state/*.py",)),
    "npu": Area(("npu", "npu?path=llm"), ("backends/openvino/npu/*.py",)),
    "xdna2": Area(("xdna2", "xdna2?k=64+128+256+512+1024"), ("backends/xdna2.py",)),
    "ggml": Area(("ggml", "ggml?mode=sched", "ggml?guard=on"), ("backends/ggml/*.py",)),
    "lifting": Area(("openvino-stateless",), ("backends/openvino/translating/**/*.py",)),
    "scheduler": Area(("sched?devices=xdna2,cpu",), ("conformance/run/scheduler/*.py",)),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place."""

    id: str
    """`FILE:LINE:OPERATOR:N`: the N-th change that the operator makes of the file."""
    area: str
    fault: Fault
    diff: str


@dataclass(frozen=True, slots=True)
class _Change:
    file: str
    operator: str
    occurrence: int


def draw(n: int, seed: int, areas: Sequence[str] = (), globs: Sequence[str] = ()) -> list[Mutant]:
    """`n` mutants of `areas` (default: all), as many of each as can be: a place at random, then one of its changes.

    `globs`: only of files that one of them matches, by the path from the root of the packages. A change that leaves the
    program as it is (of an annotation, say) or is none in Python's grammar is not drawn. UsageError for an unknown area
    or where no file matches.
    """
    if unknown := [a for a in areas if a not in AREAS]:
        raise UsageError(f"area {unknown[0]!r} is unknown; known: {', '.join(AREAS)}")
    names = [a for a in AREAS if (not areas or a in areas) and files(a, globs)]
    if not names:
        raise UsageError(f"no file of {', '.join(areas or AREAS)} matches {', '.join(globs)}")
    shares = [n // len(names) + (i < n % len(names)) for i in range(len(names))]
    drawn: list[Mutant] = []
    for name, share in zip(names, shares, strict=True):
        rng = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
        drawn += itertools.islice(_mutants(name, files(name, globs), rng), share)
    return drawn


def files(area: str, globs: Sequence[str] = ()) -> list[str]:
    """The files of an area, from the root of the packages; those that one of `globs` matches, if there are any."""
    found = {p.relative_to(ROOT).as_posix() for pattern in AREAS[area].files for p in ROOT.glob(pattern)}
    return sorted(f for f in found if not globs or any(fnmatchcase(f, g) for g in globs))


def _mutants(area: str, paths: Sequence[str], rng: np.random.Generator) -> Iterator[Mutant]:
    places = [changes for p in paths for changes in _places(p, (ROOT / p).read_text("utf-8"))]
    for i in rng.permutation(len(places)):
        change = places[i][rng.integers(len(places[i]))]
        mutant = _mutant(area, change)
        if mutant is not None:
            yield mutant


def _places(file: str, source: str) -> list[list[_Change]]:
    """The changes that can be made of each place of a file, in the order of the file."""
    nodes = list(cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(source)))
    places: dict[tuple[int, int], list[_Change]] = {}
    for name in cosmic_ray.plugins.operator_names():
        operator = cosmic_ray.plugins.get_operator(name)
        if operator.arguments():
            continue
        made = operator()
        starts = (start for node in nodes for start, _ in made.mutation_positions(node))
        for k, start in enumerate(starts):
            places.setdefault(start, []).append(_Change(file, name, k))
    return [places[start] for start in sorted(places)]


def _mutant(area: str, change: _Change) -> Mutant | None:
    source = (ROOT / change.file).read_text(encoding="utf-8")
    operator = cosmic_ray.plugins.get_operator(change.operator)()
    mutated = cosmic_ray.mutating.mutate_code(source, operator, change.occurrence)
    if mutated is None or _program(mutated) in (None, _program(source)):
        return None
    old, new = _edit(source, mutated)
    diff = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=1, lineterm=""))
    short = change.operator.rpartition("/")[2]
    name = hashlib.sha256(f"{change.file} {change.operator} {change.occurrence}".encode()).hexdigest()[:8]
    fault = Fault(f"{area}-{name}", short, AREAS[area].of[0], tuple(FAMILIES), change.file, old, new)
    place = f"{change.file}:{fault.line(source)}:{short}:{change.occurrence}"
    return Mutant(place, area, fault, "\n".join(diff[2:]))


def _edit(source: str, mutated: str) -> tuple[str, str]:
    """The fewest whole lines of `source` that hold the difference and stand there once, and what replaces them."""
    a, b = source.splitlines(keepends=True), mutated.splitlines(keepends=True)
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    most = min(len(a), len(b)) - head
    tail = next((i for i in range(most) if a[-1 - i] != b[-1 - i]), most)
    while head + tail == len(a) or source.count("".join(a[head : len(a) - tail])) != 1:
        head, tail = max(0, head - 1), max(0, tail - 1)
    return "".join(a[head : len(a) - tail]), "".join(b[head : len(b) - tail])


class _Bare(ast.NodeTransformer):
    """A program without what does not run: annotations and texts that stand alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:  # ast's own name
        """A docstring becomes nothing."""
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:  # as above
        """An argument by name alone."""
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # as above
        """A name and its value."""
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # as above
        """A function without the type of its result."""
        node.returns = None
        return self.generic_visit(node)


def _program(source: str) -> str | None:
    """What `source` runs, as a text that is the same for equal programs; None if it is no Python."""
    try:
        return ast.dump(_Bare().visit(ast.parse(source)))
    except SyntaxError:
        return None
