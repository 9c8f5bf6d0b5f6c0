"""Check the language of docs, help texts, docstrings and messages against a table of phrases.

`python ci/style.py` prints FILE:LINE, the sentence and what to write instead; exit code 1 if there is a finding.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from conformance.cli import main as conform

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guides/*.md", "docs/measurements/*.md")
SOURCES = ("conformance/**/*.py", "backends/**/*.py", "ci/*.py", "pytest_ggml_conformance.py")
PRINTERS = {"echo", "line", "fail", "tell", "say", "noted", "of", "progress", "table", "Error", "append"}
"""Functions and constructors that take text for the user, beside exceptions."""
ANYWHERE, DOCSTRING = "", "docstring"

RULES: tuple[tuple[str, str, str], ...] = (
    # pattern, kind of text, what to write
    (r"^(What|Whom?|Whose) (?!.*\?$)", ANYWHERE, "name the subject"),
    (r"^Whether\b", ANYWHERE, "True if …, or Return True if …"),
    (r"^Of (?!course)", ANYWHERE, "start with the subject"),
    (r"^As (?!\w+ as )[^,]*$", ANYWHERE, "write a sentence with subject and verb"),
    (r"\b(hold|holds|held|holding) (\S+ ){1,8}?against\b|\bheld against\b", ANYWHERE, "compare … with …"),
    (r"\b(say|says|said|saying) of\b", ANYWHERE, "report, or declare"),
    (r"\b(tell|tells|told|telling) (\S+ ){1,4}?from\b", ANYWHERE, "separate, or distinguish"),
    (r"\b(tells?|told) (nothing|little|more)\b", ANYWHERE, "show"),
    (r"\bby chance\b", ANYWHERE, "flaky"),
    (r"\bthe time was used\b|\bbudget used\b", ANYWHERE, "time limit; max error (% of tolerance)"),
    (r"\bnothing (is|was) proven\b", ANYWHERE, "no cases ran"),
    (r"\bno budget allows\b", ANYWHERE, "bit-exact required"),
    (r"\bnot heard\b", ANYWHERE, "skipped"),
    (r"\bcries? over\b", ANYWHERE, "false positive"),
    (r"\bwhom? (a|an|the|it) ", ANYWHERE, "which"),
    (r"\bcases? not \(UNSUPPORTED\)", ANYWHERE, "cases unsupported by …"),
    (r"\b(voices?|desks?|kin|keepers?)\b", ANYWHERE, "a noun of the field"),
    (r"\b(hand|hands|handed|handing) (it |them )?over\b", ANYWHERE, "pass, or write"),
    (r"\bprecision cards?\b|\b(a|the|its|his|no|whose) card (of|is|was|allows|says)\b", ANYWHERE, "precision profile"),
    (r"(?<![Tt]here )\b(is|are|was|were) none\b", ANYWHERE, "there is no …, or is not a …"),
    (r"(?<!is )(?<!are )\bno more[.,;]?$|\bhas it not\b|\btakes (it|them) not\b", ANYWHERE, "no longer"),
    (r"\banew\b", ANYWHERE, "again, or new"),
    (r"\bmakes? of (it|them|these|each|an?|the)\b", ANYWHERE, "computes, or returns"),
    (r"\btakes? (it|them|\S+ \S+) away\b", ANYWHERE, "removes"),
    (r"\bmakes no sense\b", ANYWHERE, "does not apply"),
    (r"\bwhat it is worth\b|\bis worth (it|them)\b", ANYWHERE, "name the quantity"),
    (r"\b(two|2|other) ways\b", ANYWHERE, "runs, or call sequences"),
)
COMPILED = tuple((re.compile(p), kind, instead) for p, kind, instead in RULES)
_CODE = re.compile(r"`[^`]*`|(?<=\])\([^)]*\)")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")


class Text(NamedTuple):
    """Text with its place; `line` is that of its first line."""

    file: Path
    line: int
    kind: str
    text: str


def documents() -> Iterator[Text]:
    """Yield paragraphs, list items, headings and table cells of Markdown files, without code blocks."""
    for path in (p for pattern in DOCUMENTS for p in sorted(ROOT.glob(pattern))):
        block: list[str] = []
        begin, fenced = 0, False
        for n, row in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
            is_fence = row.lstrip().startswith(("```", "~~~"))
            starts = not row.strip() or is_fence or re.match(r"\s*([-*#|>]|\d+\.)", row) is not None
            if block and (starts or fenced):
                yield Text(path, begin, "docs", " ".join(block))
                block = []
            if is_fence:
                fenced = not fenced
            elif row.strip() and not fenced:
                begin = begin if block else n
                if row.lstrip().startswith(("|", "#")):
                    yield from (Text(path, n, "docs", cell.strip("# ")) for cell in row.split("|") if cell.strip())
                else:
                    block.append(re.sub(r"^\s*([-*#>]+|\d+\.)\s+", "", row).strip())


def helps(command: click.Command = conform, name: str = "conform") -> Iterator[Text]:
    """Yield the help of a command, its options and its subcommands."""
    file, line = _place(command)
    texts = [command.help or "", command.epilog or "", *(getattr(p, "help", None) or "" for p in command.params)]
    yield from (Text(file, line, f"help of {name}", part) for t in texts for part in t.split("\n\n"))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            yield Text(file, line, f"help of {name}", command.get_short_help_str(999))
            if (found := command.get_command(context, sub)) is not None:
                yield from helps(found, f"{name} {sub}")


def _place(command: click.Command) -> tuple[Path, int]:
    function = inspect.unwrap(command.callback) if command.callback else conform.callback
    assert function is not None
    return Path(inspect.getfile(function)), function.__code__.co_firstlineno


def sources() -> Iterator[Text]:
    """Yield docstrings, of attributes too, and string literals that are passed to `PRINTERS` and exceptions."""
    for path in (p for pattern in SOURCES for p in sorted(ROOT.glob(pattern))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield from (Text(path, node.lineno, DOCSTRING, part) for part in node.value.value.split("\n\n"))
            elif isinstance(node, ast.Call) and _prints(node.func):
                values = [*node.args, *(k.value for k in node.keywords)]
                yield from (Text(path, line, "message", text) for v in values for line, text in _literals(v))


def _prints(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in PRINTERS or name.endswith(("Error", "BadParameter"))


def _literals(node: ast.expr) -> Iterator[tuple[int, str]]:
    """Yield the string literals in an expression; a placeholder of an f-string becomes `X`."""
    if isinstance(node, ast.JoinedStr):
        parts = (str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        yield node.lineno, "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _literals(child)


def findings() -> list[str]:
    """Return FILE:LINE, the sentence and the suggestion for each match of a rule."""
    found: dict[str, None] = {}
    for text in (*documents(), *helps(), *sources()):
        for sentence in _SENTENCE.split(" ".join(_CODE.sub("`x`", text.text).split())):
            for pattern, kind, instead in COMPILED:
                if kind in ("", text.kind) and pattern.search(sentence.strip("*_()")):
                    place = f"{text.file.relative_to(ROOT)}:{text.line}"
                    found[f"{place}: {text.kind}: {sentence!r}: write: {instead}"] = None
    return list(found)


if __name__ == "__main__":
    result = findings()
    print("\n".join(result) or "no findings")
    sys.exit(bool(result))
