"""The entry point that pytest loads in every run, wherever this project is installed: it does next to nothing.

It loads `conformance.plugin`, with its options, hooks and backends, only where the command line names the suite
(`pytest --pyargs conformance`, or a path inside the package). Any other run has none of these: no option that another
plugin may have too, no summary, no exit status. So this module lies outside `conformance` and imports nothing of it:
somebody else's folder or package of that name stays theirs.
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
"""The name under which `conformance/conftest.py` asks for it too: pytest loads it once."""
HOME = Path(__file__).resolve().parent / SUITE


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load the suite's plugin, and so its options, where the command line names the suite."""
    known = early_config.known_args_namespace
    if is_asked(known.file_or_dir, pyargs=known.pyargs, folder=early_config.invocation_params.dir):
        early_config.pluginmanager.import_plugin(PLUGIN)


def is_asked(words: Sequence[str], *, pyargs: bool, folder: Path) -> bool:
    """Whether any of `words`, what pytest takes for files, folders or, with `pyargs`, modules, names the suite; values
    of options that pytest does not know yet may be among them. Paths begin at `folder`.
    """
    places = [w.partition("::")[0] for w in words]
    return any((pyargs and _is_ours(p)) or _is_within(folder / p) for p in places)


def _is_ours(module: str) -> bool:
    """Whether it is a module of this very package, and not of another of the same name."""
    if module.partition(".")[0] != SUITE:
        return False
    found = find_spec(SUITE)
    return found is not None and found.origin is not None and Path(found.origin).resolve().parent == HOME


def _is_within(path: Path) -> bool:
    try:
        return path.exists() and path.resolve().is_relative_to(HOME)
    except (OSError, ValueError):  # a word that cannot be a path
        return False
