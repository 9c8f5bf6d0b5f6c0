"""A buffer need not have `memset_tensor`: a library without it is filled by `set_tensor`, in every mode."""

from __future__ import annotations

import os
from pathlib import Path

import faulty_ggml
import pytest
from commands import conform
from marks import needs_wheel

pytestmark = needs_wheel


@pytest.mark.parametrize("options", ["mode=sched", "mode=graph", "guard=on"])
def test_a_library_without_memset_tensor_passes(tmp_path: Path, options: str) -> None:
    """Its cases are PASS, and no CRASH of our own filling that is charged to the op."""
    info = tmp_path / "faulty_ggml-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-ggml\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[conformance.backends]\nfaulty-ggml = faulty_ggml:FaultyGgml\n")
    folders = [str(tmp_path), str(Path(faulty_ggml.__file__).parent)]
    done = conform(
        "run", "--backend", f"faulty-ggml?fault=no_memset&{options}", "--case", "ops/MUL-f32*", "--case", "ops/SUM-*",
        env={"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert "PASS" in done.stdout
    assert "CRASH" not in done.stdout
