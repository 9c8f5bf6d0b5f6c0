"""The package's own files: in a wheel as in a checkout they lie inside it, never beside it."""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from pathlib import Path

from conformance.ggml.errors import UsageError

AGAIN = "this installation lacks it; install ggml-conformance again, from a whole wheel or a checkout"
"""What to do about a missing file."""
PREFIX = "package:"
"""In settings: a path of the package, as `package:waivers/ggml.toml`."""


@cache
def path(*names: str) -> Path:
    """The path of a file or folder of the package, whether it is there or not."""
    return Path(str(files("conformance"))).joinpath(*names)


GOLDEN = "CONFORMANCE_GOLDEN"
"""Environment variable: the folder of golden outputs, instead of the one that comes along."""


def golden() -> Path:
    """The folder of golden outputs."""
    return Path(os.environ.get(GOLDEN) or path("golden"))


def located(text: str, folder: Path) -> Path:
    """The file that settings in `folder` name: relative to it, or `package:PATH` of the package's own.

    Raises:
        UsageError: the package has no such file.
    """
    if not text.startswith(PREFIX):
        return folder / text
    file = path(text.removeprefix(PREFIX))
    if not file.is_file():
        raise UsageError(f"{text}: {file}: no such file; {AGAIN}")
    return file
