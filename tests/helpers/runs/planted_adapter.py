"""An adapter that a test writes: found by its entry point, in this process and in workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.backend import registry


@contextmanager
def planted_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, cls: str) -> Iterator[None]:
    """While this lasts, class `cls` of `source` is installed as backend `name`, from an empty `folder`."""
    (folder / f"{name}_adapter.py").write_text(source)
    info = folder / f"{name}_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-adapter\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[conformance.backends]\n{name} = {name}_adapter:{cls}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.syspath_prepend(folder)
    _forget()
    yield
    _forget()


def _forget() -> None:
    registry._installed.cache_clear()
    registry.adapter.cache_clear()
