"""The text of a result is for people alone: whatever it says, a run decides and groups as before."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import broken_add
import pytest
from click.testing import CliRunner
from planted_adapter import planted_adapter

from conformance.causes import rank
from conformance.cli import main
from conformance.judge import text
from conformance.report.matrix import groups
from conformance.report.runs import read_runs, refusals

CASES = ("ops/ADD-f32+f32-a=*", "ops/SUB-f32+f32-a=*", "ops/ADD-bf16+bf16-a=*")
WORSE = """

class Worse(Broken):
    def kernels(self):
        return {**super().kernels(), "SUB": _raise}

def _raise(node, dst, src):
    raise ValueError(f"no room for {node}")
"""


def _decided(path: Path) -> dict[str, Any]:
    """All that is decided of a run: exit codes, verdicts, groups, counts, ids of causes."""
    words = [word for case in CASES for word in ("--case", case)]
    ran = CliRunner().invoke(main, ["run", "--backend", "broken", *words, "--json", str(path)])
    grouped = path.with_suffix(".causes.json")
    found = CliRunner().invoke(main, ["triage", str(path), "--budget", "0.01s", "--no-confirm", "--json", str(grouped)])
    runs = read_runs([path])
    results = [r.value for r in runs.results]
    return {
        "exit codes": (ran.exit_code, found.exit_code),
        "verdicts": [(r.case, r.verdict, r.wrong_op) for r in results],
        "groups": [(g.verdict, g.reason, len(g.rows)) for g in groups(runs.results)],
        "refusals": refusals(results),
        "totals": json.loads(path.read_text(encoding="utf-8"))["totals"],
        "causes": [(c["id"], c["cases"]) for c in json.loads(grouped.read_text(encoding="utf-8"))["causes"]],
    }


def _hashes(explain: Callable[..., str]) -> Callable[..., str]:
    count = itertools.count()
    return lambda *args, **more: sha256(f"{next(count)} {explain(*args, **more)}".encode()).hexdigest()


def test_nothing_is_decided_by_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes, verdicts, groups and causes do not depend on the words of messages.

    Each text is replaced by its hash.
    """
    monkeypatch.setattr(rank, "_laid_out", lambda *_: ({}, 0))  # to count them takes a minute
    source = Path(broken_add.__file__).read_text(encoding="utf-8") + WORSE
    (tmp_path / "site").mkdir()
    with planted_adapter(tmp_path / "site", monkeypatch, "broken", source, "Worse"):
        plain = _decided(tmp_path / "plain.json")
        monkeypatch.setattr(text, "explain", _hashes(text.explain))
        hashed = _decided(tmp_path / "hashed.json")
    assert hashed == plain
    assert plain["exit codes"] == (1, 1)
    assert {v.value for _, v, _ in plain["verdicts"]} == {"PASS", "FAIL", "OVERCLAIM", "UNSUPPORTED"}
    assert {"ADD", "SUB"} <= {op for _, _, op in plain["verdicts"]}
    assert len(plain["causes"]) > 1
    details = Counter(r["detail"] for r in json.loads((tmp_path / "hashed.json").read_text())["results"])
    assert all(len(d) == 64 for d in details)
