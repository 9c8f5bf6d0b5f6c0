"""Golden outputs: all of them are computed again, and a changed one is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from conformance.case import casefile
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.judge.verdict import Verdict
from conformance.run import golden

MAX_BYTES = 25 * 2**20


def test_every_golden_value_is_computed_again() -> None:
    """The reference gives every stored value again, and the real ggml agrees with it within budget."""
    results = golden.verify()
    assert len(results) > 300
    assert {r.verdict for r in results} == {Verdict.PASS}, [r.sentence() for r in results if r.verdict != "PASS"][:5]


def test_golden_files_stay_small() -> None:
    """The pinned corpus takes at most 25 MiB of the repository."""
    assert sum(p.stat().st_size for p in golden.ROOT.rglob("*.gguf")) <= MAX_BYTES


def test_every_golden_value_says_where_it_comes_from() -> None:
    """Provenance names the reference, the ggml that agreed, and how near they were."""
    for case in casefile.read(golden.ROOT / golden.OPS):
        assert {"reference", "agreed", "nmse", "budget_used"} <= set(case.provenance)
        assert case.steps[0].expected


@pytest.mark.parametrize("what", ["value", "input"])
def test_a_changed_value_is_seen(tmp_path: Path, what: str) -> None:
    """One changed element of a stored value, or of what it was computed from, fails its case alone."""
    shutil.copytree(golden.ROOT, tmp_path / "golden", ignore=shutil.ignore_patterns("captured"))
    path = tmp_path / "golden" / golden.OPS
    cases = casefile.read(path)[:100]
    victim = next(c for c in cases if c.id.startswith("ops/RMS_NORM-f32"))
    step = victim.steps[0]
    data = step.expected if what == "value" else step.inputs
    tensor, bytes_ = next((t, b) for t, b in data.items() if t.type.name == "f32")
    changed = bytes_.copy()
    changed.view(np.float32)[-1] += 1
    data[tensor] = changed
    casefile.write(path, cases)
    failed = [r.case for r in golden.verify(tmp_path / "golden") if r.verdict is not Verdict.PASS]
    assert failed == [victim.id]


def test_no_golden_files_is_an_error(tmp_path: Path) -> None:
    """Verifying nothing is no success."""
    with pytest.raises(ConformanceError, match="no golden outputs"):
        golden.verify(tmp_path)


def test_where_nothing_can_be_written_nothing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`golden update` says where it writes, and refuses at once, in one line, an installation it cannot write to."""
    assert golden.writable(tmp_path) == tmp_path / golden.OPS
    monkeypatch.setattr(golden, "build", None)
    with pytest.raises(UsageError, match="cannot be written; golden outputs are made anew in a checkout"):
        golden.update(tmp_path / "nowhere")
