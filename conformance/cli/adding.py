"""`conform new-adapter`: the package of a backend, ready to install."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import click

from conformance.backend import registry
from conformance.ggml.errors import UsageError

from .templates import FILES

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@click.command("new-adapter")
@click.argument("name")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Default: NAME, here."
)
def new_adapter(name: str, output: Path | None) -> None:
    """Write a package with a backend called NAME: one file that works, to put your device into, and its test."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"new-adapter {name}: lower-case words and digits joined by - expected, as my-npu")
    if name in registry.names():
        raise UsageError(f"new-adapter {name}: a backend of that name is installed; take another name")
    folder = output or Path(name)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"new-adapter: {folder} is not empty; name another folder with -o")
    words = name.split("-")
    names = {
        "name": name,
        # two words, so that no name of a backend hides a module that others import
        "module": f"{name.replace('-', '_')}_backend",
        "cls": "".join(w.capitalize() for w in words),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in FILES.items():
            (folder / Template(path).substitute(names)).write_text(Template(text).substitute(names), encoding="utf-8")
    except OSError as e:
        raise UsageError(f"new-adapter: {folder}: {e.strerror}") from None
    click.echo(f"written: {folder}: {', '.join(Template(p).substitute(names) for p in FILES)}")
    click.echo(f"next: pip install -e {folder} && pytest {folder} && conform run --backend {name}")
