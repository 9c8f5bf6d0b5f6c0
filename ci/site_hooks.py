"""Hooks of mkdocs: make README.md the first page; remove backslashes before `|` in tables.

README.md is in the root folder for GitHub, and mkdocs reads only docs/. So the build makes `index.md`, a copy with its
links relative to docs/. GitHub removes the backslash before a pipe in a table's code, but Python-Markdown does not.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_CELL = re.compile(r"<td.*?</td>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as `index.md`."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Remove the backslashes before pipes in table cells."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
