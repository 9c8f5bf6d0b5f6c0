"""The commands that README.md and docs/ show, as they stand there, and what a document says that they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = tuple(
    path
    for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not (path := p.relative_to(ROOT).as_posix()).startswith("docs/measurements/findings/")
)
"""Every document, relative to the tree's root, but the records of what was found with older versions."""

Place = Literal["console", "sh", "indented", "table", "prose"]

PROGRAMS = ("conform", "pytest", "python", "pip", "mkdocs")
"""What makes inline code a command; a block's line is one whatever it begins with."""
ELISION = "…"
_FENCE = re.compile(r' *```(\w*)(?: title="([^"]*)")?')
_INLINE = re.compile(r"`([^`]+)`")
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: what stands between two `&&`."""

    document: str
    line: int
    place: Place
    text: str
    """As it stands there, without its comment; of `A|B` one side."""
    shown: tuple[str, ...] | None = field(default=None, compare=False)
    """The lines that a console block shows below it; None where the document shows no output."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words as a shell splits them, without variables set in front."""
        words = shlex.split(self.text)
        while words[1:] and _ASSIGNMENT.match(words[0]):
            words.pop(0)
        return tuple(words)

    @property
    def program(self) -> str:
        """The first word."""
        return self.words[0]

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.document}:{self.line}"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language and lines."""

    line: int
    language: str
    file: str
    """Its title: the file that it is; empty where it is none."""
    lines: tuple[str, ...]


def blocks(document: str) -> Iterator[Block]:
    """The fenced blocks of a document."""
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for n, line in enumerate(_lines(document), 1):
        if fence := _FENCE.match(line):
            if opened:
                yield Block(*opened, tuple(lines))
            opened, lines = (None, []) if opened else ((n, fence[1], fence[2] or ""), [])
        elif opened:
            lines.append(line)


def commands(document: str) -> list[Command]:
    """Every command of a document, in its order."""
    found: list[Command] = []
    fenced: set[int] = set()
    for block in blocks(document):
        fenced.update(range(block.line, block.line + len(block.lines) + 2))
        if block.language == "console":
            found += _console(document, block)
        elif block.language in {"sh", "bash"}:
            for n, line in enumerate(block.lines, block.line + 1):
                found += _split(document, n, "sh", line)
    free = {n: line for n, line in enumerate(_lines(document), 1) if n not in fenced}
    for n, line in free.items():
        if line.startswith("    ") and not free.get(n - 1, "").endswith("\\"):
            found += _split(document, n, "indented", _continued(free, n))
    for n, place, code in _inline(document):
        words = code.replace("\\|", "|").split()
        if words and words[0] in PROGRAMS and len(words) + (words[0] == "conform") > 1:
            found += _split(document, n, place, " ".join(words))
    return sorted(found, key=lambda c: c.line)


def mentioned_options(document: str) -> Iterator[tuple[int, str]]:
    """Line and option of inline code that begins with one: `--level smoke`."""
    return ((n, m[0]) for n, _, code in _inline(document) if (m := re.match(r"--[a-z][a-z0-9-]*", code)))


def _inline(document: str) -> Iterator[tuple[int, Place, str]]:
    """Line, place and text of each inline code, which may continue on the next line of its paragraph."""
    fenced = {n for b in blocks(document) for n in range(b.line, b.line + len(b.lines) + 2)}
    paragraph: list[str] = []
    for n, line in enumerate([*_lines(document), ""], 1):
        if n not in fenced and line.strip() and not line.startswith(("    ", "|", "#")):
            paragraph.append(line)
            continue
        text = "\n".join(paragraph)
        for m in _INLINE.finditer(text):
            yield n - len(paragraph) + text.count("\n", 0, m.start()), "prose", m[1]
        paragraph = []
        if n not in fenced and line.startswith(("|", "#")):
            yield from ((n, "table" if line.startswith("|") else "prose", code) for code in _INLINE.findall(line))


def _lines(document: str) -> list[str]:
    return (ROOT / document).read_text(encoding="utf-8").splitlines()


def _continued(lines: dict[int, str], n: int) -> str:
    """A line with those that it goes on in."""
    text = lines[n].strip()
    while text.endswith("\\"):
        n += 1
        text = f"{text[:-1]}{lines[n].strip()}"
    return text


def _console(document: str, block: Block) -> Iterator[Command]:
    """Lines behind a prompt, each with the output below it."""
    prompts = [k for k, line in enumerate(block.lines) if line.startswith("$ ")]
    for k, end in zip(prompts, [*prompts[1:], len(block.lines)], strict=True):
        *first, last = _split(document, block.line + 1 + k, "console", block.lines[k][2:])
        yield from first
        shown = block.lines[k + 1 : end]
        yield Command(last.document, last.line, last.place, last.text, shown or None)


def _split(document: str, line: int, place: Place, text: str) -> Iterator[Command]:
    """The commands of a line, without comments."""
    parts: list[list[str]] = [[]]
    for word in _shell_words(text):
        if word == "&&":
            parts.append([])
        else:
            parts[-1].append(word)
    for words in parts:
        if words:
            yield from (Command(document, line, place, said) for said in _variants(" ".join(words)))


def _shell_words(text: str) -> list[str]:
    """The words with their quotes, up to a comment."""
    words = _WORD.findall(text)
    comment = next((k for k, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:comment]


def _variants(text: str) -> list[str]:
    """What a command's text stands for: `[OPTION]` taken, each side of every `A|B`, and `MANY…` once."""
    text = re.sub(r"(?<!\S)\[([^\]]*)\]", r"\1", text)
    text = re.sub(rf"(?<=\S){ELISION}| {ELISION}$", "", text)
    sides = [word.split("|") if "'" not in word else [word] for word in text.split(" ")]
    return [" ".join(words) for words in product(*sides)]


def pattern(shown: tuple[str, ...]) -> re.Pattern[str]:
    """What an output must match as a whole to be what a document shows.

    A document may break a line where it has a blank, and `…` stands for any text. What depends on the machine stands
    for any such number: seconds (`0.21 s`), per cent of a budget (`2.82 %`) and a KL (`2.7e-07`), which are float32
    rounding and follow the width of the processor's vectors. For the same reason a value is compared to three decimals.
    """
    text = re.sub(r"\s+", " ", "\n".join(shown)).strip()
    made = re.escape(text).replace(re.escape(ELISION), ".*?").replace(r"\ ", r"\s+")
    made = re.sub(r"\d[\d,]*(?:\\\.\d+)?(\\s\+)?s\b", r"\\d[\\d,]*(?:\\.\\d+)?\1s", made)
    made = re.sub(r"\d+(?:\\\.\d+)?\\s\+%", r"\\d+(?:\\.\\d+)?\\s+%", made)
    made = re.sub(r"\d\\\.\de\\-\d\d\b", r"\\d\\.\\de-\\d\\d", made)
    made = re.sub(r"(\d\\\.\d{3})\d{3,}", r"\1\\d*", made)
    made = re.sub(r"(?:\\-){3,}", r"-+", made)
    return re.compile(made, re.DOTALL)
