"""An adapter that a test writes: found by its entry point, in this process and in workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.backend import registry
from conformance.installed import entries


@contextmanager
def planted_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, cls: str) -> Iterator[None]:
    """While this lasts, class `cls` of `source` is installed as backend `name`, from an empty `folder`."""
    (folder / f"{name}_adapter.py").write_text(source)
    with installed(folder, monkeypatch, name, f"{name}_adapter:{cls}"):
        yield


@contextmanager
def installed(
    folder: Path, patch: pytest.MonkeyPatch, name: str, entry: str, module: str | None = None
) -> Iterator[None]:
    """While this lasts, backend `name` is installed by an entry point in `folder`.

    Args:
        folder: where its distribution lies, and its module where `module` is None.
        patch: sets the path of this process and of workers.
        name: of the backend.
        entry: module and class, as in the entry point.
        module: the file of a module in another folder.
    """
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[conformance.backends]\n{name} = {entry}\n")
    beside = [] if module is None else [str(Path(module).parent)]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), *beside, os.environ.get("PYTHONPATH")))))
    patch.syspath_prepend(folder)
    _forget()
    yield
    _forget()


def _forget() -> None:
    entries.cache_clear()
    registry.adapter.cache_clear()
