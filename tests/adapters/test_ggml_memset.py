"""A buffer need not have `memset_tensor`: a library without it is filled by `set_tensor`, in every mode."""

from __future__ import annotations

from pathlib import Path

import faulty_ggml
import pytest
from commands import conform
from marks import needs_wheel
from planted_adapter import installed

pytestmark = needs_wheel


@pytest.mark.parametrize("options", ["mode=sched", "mode=graph", "guard=on"])
def test_a_library_without_memset_tensor_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    """Its cases are PASS, and no CRASH of our own filling that is charged to the op."""
    cases = ("--case", "ops/MUL-f32*", "--case", "ops/SUM-*")
    with installed(tmp_path, monkeypatch, "faulty-ggml", "faulty_ggml:FaultyGgml", faulty_ggml.__file__):
        done = conform("run", "--backend", f"faulty-ggml?fault=no_memset&{options}", *cases)
    assert done.returncode == 0, done
    assert "PASS" in done.stdout
    assert "CRASH" not in done.stdout
