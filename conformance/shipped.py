"""The package's own files. In a checkout golden outputs lie beside the package, all else is inside it."""

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
    """The folder of golden outputs: the one that `CONFORMANCE_GOLDEN` names, or that came along."""
    return Path(os.environ.get(GOLDEN) or own_golden())


@cache
def own_golden() -> Path:
    """The folder of golden outputs that came along: in a wheel inside the package, in a checkout beside it."""
    inside = path("golden")
    return inside if inside.is_dir() else path().with_name("golden")


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
