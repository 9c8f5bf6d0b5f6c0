"""Pytest entry point, loaded in every run wherever this project is installed.

It loads `conformance.plugin`, with its options, hooks and backends, only if the command line names the suite (`pytest
--pyargs conformance`, or a path inside the package). In other runs it adds no options (another plugin may define the
same ones), no summary and no exit code. So this module is outside `conformance` and imports nothing from it: another
project may have a folder or package of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SUITE = "conformance"
PLUGIN = "conformance.plugin"
"""The same name as in `conformance/conftest.py`, so that pytest loads it once."""
HOME = Path(__file__).resolve().parent / SUITE


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load the suite's plugin if the command line names the suite."""
    known = early_config.known_args_namespace
    if is_asked(known.file_or_dir, pyargs=known.pyargs, folder=early_config.invocation_params.dir):
        early_config.pluginmanager.import_plugin(PLUGIN)


def is_asked(words: Sequence[str], *, pyargs: bool, folder: Path) -> bool:
    """Return True if any of `words` names the suite.

    `words` are what pytest takes for files, folders or, with `pyargs`, modules; values of options that pytest does not
    know yet may be among them. Paths are relative to `folder`.
    """
    places = [w.partition("::")[0] for w in words]
    return any((pyargs and _is_ours(p)) or _is_within(folder / p) for p in places)


def _is_ours(module: str) -> bool:
    """Return True for a module of this package, not of another one of the same name."""
    if module.partition(".")[0] != SUITE:
        return False
    found = find_spec(SUITE)
    return found is not None and found.origin is not None and Path(found.origin).resolve().parent == HOME


def _is_within(path: Path) -> bool:
    try:
        return path.exists() and path.resolve().is_relative_to(HOME)
    except (OSError, ValueError):  # a word that cannot be a path
        return False
