"""Mutants: a seed draws the same ones again, each changes what runs, and every module of an adapter has some."""

from __future__ import annotations

import ast

import pytest
from click.testing import CliRunner

from conformance.ggml.errors import UsageError
from trust import __main__ as command
from trust.faults import ROOT, Fault, original
from trust.hunt import Hunt
from trust.inject import UNLOADABLE
from trust.mutants import AREAS, draw, files


def test_a_seed_draws_the_same_mutants() -> None:
    """A seed draws as many mutants as requested from the area's own files.

    Another seed draws others. Each has its edit once in the source, and what it makes parses and differs.
    """
    first, again, other = draw(6, 1, ["xdna2"]), draw(6, 1, ["xdna2"]), draw(6, 2, ["xdna2"])
    assert first == again
    assert len({m.id for m in first}) == len(first) == 6
    assert {m.id for m in first} != {m.id for m in other}
    for mutant in first:
        fault = mutant.fault
        assert (fault.of, fault.file.startswith("backends/xdna2")) == ("xdna2", True)
        source = original(fault.file)
        assert ast.dump(ast.parse(fault.apply(source))) != ast.dump(ast.parse(source))
        assert int(mutant.id.split(":")[1]) == fault.line(source)


def test_a_path_bounds_the_files() -> None:
    """Every module of an adapter is of an area, folders within folders too; what no file matches is an error."""
    listed = [f for area in AREAS for f in files(area)]
    assert {p.relative_to(ROOT).as_posix() for p in ROOT.glob("backends/*/**/*.py")} <= set(listed)
    assert all(files(area) for area in AREAS)
    globs = ["backends/cpu/training/*"]
    found = files("cpu", globs)
    assert "backends/cpu/training/gradients.py" in found
    assert {m.fault.file for m in draw(2, 1, (), globs)} <= set(found)
    with pytest.raises(UsageError, match="no file of cpu matches nothing"):
        draw(1, 1, ["cpu"], ["nothing/*"])


def test_the_rate_counts_what_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five mutants two are noticed, one survives with its change printed, one is equivalent, one does not load."""

    def hunts(faults: list[Fault], _level: str, say: object, *, once: bool) -> None:
        assert once
        details = ["", "", f"opening: {UNLOADABLE}no"]
        for fault, detail in zip(faults, details, strict=False):
            say(Hunt(fault.name, "ops", True, "ops/X@1", "FAIL", detail))  # type: ignore[operator]  # a function

    monkeypatch.setattr(command, "hunt", hunts)
    monkeypatch.setattr(command, "differences", lambda faults, *_: {faults[0].name: "ops/Y@1"})
    done = CliRunner().invoke(command.main, ["mutants", "--sample", "5", "--area", "cpu", "--seed", "3"])
    assert done.exit_code == 0, done.output
    assert "differs by ops/Y@1" in done.output
    assert done.output.splitlines()[-1].split() == ["all", "66", "%", "(20", "to", "94)", "2", "1", "1", "1"]
