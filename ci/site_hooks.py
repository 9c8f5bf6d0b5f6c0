"""Hooks of mkdocs: make README.md the first page; remove backslashes before `|` in tables.

README.md and CONTRIBUTING.md are in the root folder for GitHub, and mkdocs reads only docs/. So the build makes copies
with their links relative to docs/. GitHub removes the backslash before a pipe in a table's code, but Python-Markdown
does not.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root folder."""
    for name, page in _PAGES.items():
        text = (Path(config.config_file_path).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Remove the backslashes before pipes in table cells."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
