"""Declarations in installed C headers of ggml and llama.cpp, by name.

A library without debugging information tells neither parameters nor fields. Only headers that were installed with it
are read: those of a source tree can be newer than the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"(?:ggml[\w-]*|gguf|llama)\.h")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_FUNCTION = re.compile(r"\b(?:GGML|GGML_BACKEND|LLAMA)_API\b([^;{}]*?\b(\w+)\s*\([^;{}]*?\))[^;{}()]*[;,)]")
_BODY = re.compile(r"\b(struct|enum)\s+(\w+)\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*\w*\s*;")
_AROUND = re.compile(r" ?([^\w ]) ?")
_ABOVE = 2
"""Folders above the libraries that can have `include`, as in `lib/x86_64-linux-gnu`."""


def declarations(path: Path) -> dict[str, str]:
    """Return `ggml_abs()`, `struct ggml_tensor` and so on -> the text of the declaration.

    `path`: a build that `source.locate` found. Empty if no header lies beside it.
    """
    found: dict[str, str] = {}
    for file in _headers(path):
        text = _DIRECTIVE.sub("", _COMMENT.sub(" ", file.read_text(encoding="utf-8", errors="replace")))
        for m in _BODY.finditer(text):
            found[f"{m[1]} {m[2]}"] = _plain(m[3])
        for m in _FUNCTION.finditer(text):
            found[f"{m[2]}()"] = _plain(m[1])
    return found


def _headers(path: Path) -> Iterator[Path]:
    """Yield the headers of the nearest folder `include` that has ggml.h."""
    folder = path if path.is_dir() else path.parent
    for at in (folder, *list(folder.parents)[:_ABOVE]):
        include = at / "include"
        if (include / "ggml.h").is_file():
            yield from sorted(p for p in include.iterdir() if _NAME.fullmatch(p.name))
            return


def _plain(text: str) -> str:
    """Return a text without white space that C ignores."""
    return _AROUND.sub(r"\1", " ".join(text.split()))
