"""Text is made at the edge: nothing that decides something reads it."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.causes import rank
from conformance.cli import main
from conformance.report.matrix import groups
from conformance.report.runs import read_runs

WRONG = ("ops/SUM-f32-ne=5x3,vne=p1023@1", "ops/GET_ROWS-f32+i32-a=33x7,n=12,va=p1023@1")
CASES = (*WRONG, "ops/ADD-f32+f32-a=33x7,b=33x7@1")
"""Two that the real ggml fails, and one that passes."""


def _hashed(*evidence: object) -> str:
    return sha256(repr(evidence).encode()).hexdigest()


def _told(folder: Path) -> dict[str, Any]:
    """Everything that a run with failures, a waiver, --against and causes decides."""
    folder.mkdir()
    waivers, run = folder / "w.toml", folder / "run.json"
    waivers.write_text(f'[[waiver]]\ncase = "{WRONG[0]}"\nverdict = "FAIL"\nnmse = 0.1\nreason = "r"\n'
                       'link = "https://example.org/1"\nexpiry = 2099-12-31\n')  # fmt: skip
    asked = [word for case in CASES for word in ("--case", case)]
    words = ["run", "--backend", "ggml", *asked, "--waivers", str(waivers), "--json", str(run)]
    codes = [CliRunner().invoke(main, [*words, *more]).exit_code for more in ((), ("--against", "cpu"))]
    codes.append(CliRunner().invoke(main, ["triage", str(run), "--no-confirm", "--json", str(run)]).exit_code)
    codes.append(CliRunner().invoke(main, ["report", str(run), "-o", str(folder / "page")]).exit_code)
    found = read_runs([run])
    rows = [(r.value.backend, r.value.case, str(r.value.verdict), r.value.waived, r.value.cause) for r in found.results]
    alike = Counter((str(g.verdict), len(g.rows)) for g in groups(r for r in found.results))
    causes = [(c.value.id, c.value.backend, c.value.cases) for c in found.causes]
    return {"codes": codes, "rows": rows, "groups": alike, "causes": causes,
            "totals": json.loads(run.read_text())["totals"]}  # fmt: skip


def test_a_renderer_that_prints_hashes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict, exit code, group, cause or count differs; only the texts do."""
    monkeypatch.setattr(rank, "_laid_out", lambda *_: ({}, 0))  # to count them takes a minute
    plain = _told(tmp_path / "plain")
    assert plain["codes"][0] == 1
    assert Counter(row[2] for row in plain["rows"] if row[0] == "ggml") == {"FAIL": 1, "XFAIL": 1, "PASS": 1}
    assert plain["causes"]
    monkeypatch.setattr("conformance.judge.text.explain", _hashed)
    hashed = _told(tmp_path / "hashed")
    assert hashed == plain
    (text,) = {r["detail"] for r in json.loads((tmp_path / "hashed" / "run.json").read_text())["results"]
               if r["case"] == WRONG[1] and r["backend"] == "ggml"}  # fmt: skip
    assert len(text) == 64
