"""mkdocs' hooks: README.md is the first page of the site, and no backslash stands before a pipe in a table.

README.md stands at the root for the forge, and mkdocs reads docs/ alone. So a copy of it, made while the site is
built, is `index.md`, with its links into docs/ as they are from there. A forge takes the backslash before a pipe in a
table's code away, Python-Markdown does not.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_CELL = re.compile(r"<td.*?</td>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    text = (Path(config.config_file_path).parent / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Take the backslashes away."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
