"""A result of an earlier start is reused only for the same content."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import conform_here as conform
from ggml_ctypes import library_path
from marks import needs_wheel
from planted_adapter import planted_adapter

from conformance.run.session import identity

CASE = ("--case", "ops/ADD-f32+f32-a=1x1x1@325")
ADAPTER = """
from backends.ggml import GgmlBackend

class Own(GgmlBackend):
    delegates = ("ggml",)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A third-party adapter called `own`, in this folder."""
    with planted_adapter(tmp_path, monkeypatch, "own", ADAPTER, "Own"):
        yield tmp_path


def _run(backend: str, journal: Path) -> tuple[int, str]:
    identity.adapter.cache_clear()  # another start is another process
    done = conform("run", "--backend", backend, *CASE, "--journal", str(journal))
    return done.exit_code, done.output


@needs_wheel
def test_a_journal_answers_for_no_other_library(tmp_path: Path) -> None:
    """One byte more in the library, or in one beside it, and nothing is reused; the message names what changed."""
    source = Path(library_path())
    for path in source.parent.iterdir():
        if path.is_file() and ".so" in path.name:
            shutil.copy(path, tmp_path)
    library = tmp_path / source.name
    journal = tmp_path / "journal"
    assert _run(f"ggml?lib={library}", journal)[0] == 0
    code, output = _run(f"ggml?lib={library}", journal)
    assert code == 0
    assert "1 result of the run of " in output
    with library.open("ab") as f:
        f.write(b"x")
    code, output = _run(f"ggml?lib={library}", journal)
    assert code == 2, output
    assert f"the library of ggml?lib={library} changed since its run was started" in output


@needs_wheel
def test_a_journal_answers_for_no_other_adapter(own: Path) -> None:
    """An edit of an installed adapter, whose name and version stay, is another adapter."""
    journal = own / "journal"
    assert _run("own", journal)[0] == 0
    assert "reused" in _run("own", journal)[1]
    module = next(p for p in own.rglob("*.py") if "class Own" in p.read_text())
    module.write_text(module.read_text() + "\nCHANGED = True\n")
    code, output = _run("own", journal)
    assert code == 2, output
    assert "the adapter of own changed since its run was started" in output


@needs_wheel
def test_a_record_states_the_content_that_it_tested(own: Path) -> None:
    """Each backend has digests of suite, adapter, library, options and waivers."""
    path = own / "run.json"
    assert conform("run", "--backend", "own", *CASE, "--json", str(path)).exit_code == 0
    assert '"identity": {' in path.read_text()
    assert '"adapter": ""' not in path.read_text()
