"""What a library reads from the environment when it loads is the user's word first."""

from __future__ import annotations

import os

import pytest

from conformance.ggml.errors import UnavailableError
from conformance.ggml.lib.library import Library


@pytest.mark.parametrize("set_by_user", [None, "brilinear"])
def test_mesa_compiles_fast_unless_the_user_says_otherwise(
    set_by_user: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Its drivers on the CPU leave optimisation out; the setting stands before anything is loaded."""
    monkeypatch.setenv("GALLIVM_PERF", set_by_user or "")  # what the test leaves behind is undone
    if set_by_user is None:
        monkeypatch.delenv("GALLIVM_PERF")
    with pytest.raises(UnavailableError):
        Library(str(tmp_path))
    assert os.environ["GALLIVM_PERF"] == (set_by_user or "nopt")
