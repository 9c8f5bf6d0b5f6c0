"""Files that come with the package: in a wheel as in a checkout they lie inside it, never beside it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from conformance.ggml.errors import UsageError

AGAIN = "this installation lacks it; install ggml-conformance again, from a whole wheel or a checkout"
"""What to do about a part that is not there."""
PREFIX = "package:"
"""In settings: a path of the package, as `package:waivers/ggml.toml`."""


def path(*names: str) -> Path:
    """Where a file or folder of the package lies, whether it is there or not."""
    return Path(str(files("conformance"))).joinpath(*names)


def located(text: str, folder: Path) -> Path:
    """The file that settings in `folder` name: relative to it, or `package:PATH` of one that comes along.

    Raises:
        UsageError: nothing of that name comes along.
    """
    if not text.startswith(PREFIX):
        return folder / text
    found = path(text.removeprefix(PREFIX))
    if not found.is_file():
        raise UsageError(f"{text}: {found}: no such file; {AGAIN}")
    return found
