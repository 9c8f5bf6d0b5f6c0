"""Names and details of strangers on the terminal: no command prints a control character or a line that they forged."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.backend.registry import Spec
from conformance.case import casefile
from conformance.case.case import Case
from conformance.cli import main
from conformance.cli.run import _measured
from conformance.judge.evidence import Error
from conformance.judge.verdict import Result, Verdict
from conformance.perf.bench import Row
from conformance.perf.gates import Gate, not_run
from conformance.perf.units import units
from conformance.run.session.select import build
from conformance.suite import FAMILIES

EVIL = "x\x1b[2J\r\nFORGED\u202e\u2028"
"""Clears the screen, begins another line and turns the direction of text."""
CASE = FAMILIES["ops"].ids("smoke")[0]
Patch = Callable[[str, object], None]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Puts something in the place of a name of `conformance.cli`."""
    return lambda name, value: monkeypatch.setattr(f"conformance.cli.{name}", value)


def _conform(*words: str) -> str:
    """What a command prints; it must hold `EVIL`, and nothing of it unescaped."""
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    _check(result.output)
    return result.output


def _check(text: str) -> None:
    assert "FORGED" in text, text
    assert not [line for line in text.splitlines() if line.strip().startswith("FORGED")], text
    assert not {c for c in text if c != "\n" and unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp"}}, text


def _returns(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


def test_perf(patch: Patch) -> None:
    """Why a unit was not timed."""
    (unit, *_) = units("smoke", ())
    row = Row(unit, Spec("cpu"), Result(EVIL, "cpu", Verdict.FAIL, notes=(EVIL,)))
    patch("perf.Bench.rows", _returns([row]))
    _conform("perf", "run", "--backend", "cpu", unit.name)


def test_perf_gate(patch: Patch, tmp_path: Path) -> None:
    """The name of a gate, and its reason."""
    (unit, *_) = units("smoke", ())
    gate = Gate(EVIL, "ratio", unit, Spec("cpu"), 1.0, against="baseline")
    patch("perf.gating.loads", _returns(SimpleNamespace(budget=1.0, level="smoke", matching=_returns([gate]))))
    patch("perf.Judge.answer", _returns(not_run(gate, EVIL)))
    (tmp_path / "g.toml").touch()
    _conform("perf", "gate", str(tmp_path / "g.toml"))


def test_metrics() -> None:
    """Devices that a scheduler names, in the heads of a table."""
    found = Result("ops/x@1", "ggml", Verdict.PASS, metrics={f"share of {EVIL}": 1.0})
    _check("\n".join(_measured([replace(found, case="phases/x-pp=1@0", backend=EVIL)])))


def test_golden(patch: Patch) -> None:
    """The id and detail of a value that is no longer the same."""
    patch("checks.corpus.verify", _returns([Result(EVIL, EVIL, Verdict.FAIL, notes=(EVIL,))]))
    _conform("golden", "verify")


def test_backends(patch: Patch) -> None:
    """What an adapter says of itself."""
    info = SimpleNamespace(device=EVIL, description=EVIL, versions={EVIL: EVIL})
    patch("listing.select.probe", _returns(SimpleNamespace(info=info, buffer_types=[SimpleNamespace(name=EVIL)])))
    patch("listing.describe", _returns({}))
    _conform("list", "backends", "cpu")


def test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason for UNSUPPORTED in the line of its case and among the counted ones."""

    def refuse(_: object, spec: Spec, cases: Sequence[Case]) -> list[Result]:
        return [Result(c.id, str(spec), Verdict.UNSUPPORTED, error=Error(EVIL)) for c in cases]

    monkeypatch.setattr("conformance.testrun.Runner.run", refuse)
    text = _conform("run", "--backend", "cpu", "--case", CASE, "-v")
    assert "       1  x\\x1b[2J" in text


def test_case_files(tmp_path: Path) -> None:
    """The id of a case and the names of its tensors, wherever a file is shown, run, reproduced or refused."""
    case = build(CASE)
    case.id = f"ops/{EVIL}@1"
    casefile.write(tmp_path / "c.gguf", [case])
    plain = ("--backend", "cpu")
    for words in (["show"], ["run", *plain, "-v"], ["repro", *plain], ["show", "--step", "9"]):
        _conform(*words, str(tmp_path / "c.gguf"))


@pytest.mark.parametrize(
    "words", [["run", "--backend", EVIL], ["list", "cases", EVIL], ["show", EVIL], ["run", "--shard", EVIL]]
)
def test_errors(words: list[str]) -> None:
    """A wrong word of the command line comes back in one line."""
    _conform(*words)
