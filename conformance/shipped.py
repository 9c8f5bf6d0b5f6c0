"""Files of the package; golden outputs are beside it in a checkout, all others inside it."""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from pathlib import Path

from conformance.ggml.errors import UsageError

AGAIN = "this installation lacks it; install ggml-conformance again, from a complete wheel or a checkout"
"""Advice for a missing file."""
PREFIX = "package:"
"""Prefix in settings for a path inside the package, as in `package:waivers/ggml.toml`."""


@cache
def path(*names: str) -> Path:
    """Return the path of a file or folder of the package; it need not exist."""
    return Path(str(files("conformance"))).joinpath(*names)


GOLDEN = "CONFORMANCE_GOLDEN"
"""Environment variable for another folder of golden outputs."""


def golden() -> Path:
    """Return the folder of golden outputs: `CONFORMANCE_GOLDEN`, or the package's own."""
    return Path(os.environ.get(GOLDEN) or own_golden())


@cache
def own_golden() -> Path:
    """Return the package's own golden outputs: inside a wheel, beside the package in a checkout."""
    inside = path("golden")
    return inside if inside.is_dir() else path().with_name("golden")


def located(text: str, folder: Path) -> Path:
    """Return the path of a file in settings: relative to `folder`, or `package:PATH`.

    Raises:
        UsageError: the package has no such file.
    """
    if not text.startswith(PREFIX):
        return folder / text
    file = path(text.removeprefix(PREFIX))
    if not file.is_file():
        raise UsageError(f"{text}: {file}: no such file; {AGAIN}")
    return file
