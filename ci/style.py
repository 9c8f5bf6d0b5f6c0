"""Check the language of docs, help, docstrings and messages by a table of phrases.

`python ci/style.py` prints FILE:LINE, the sentence and what to write instead; exit code 1 if there is a finding.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import click

from conformance.cli import LINES
from conformance.cli import main as conform

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guides/*.md", "docs/measurements/*.md")
SOURCES = ("conformance/**/*.py", "backends/**/*.py", "ci/*.py", "pytest_ggml_conformance.py")
PRINTERS = {"echo", "line", "fail", "tell", "say", "noted", "of", "progress", "table", "Error", "append", "Family",
            "LiveFamily", "Scenario", "Relation"}  # fmt: skip
"""Functions and constructors that take text for the user, beside exceptions."""

RULES: tuple[tuple[str, str], ...] = (
    (r"^(What|Whom?|Whose) (?!.*\?$)", "name the subject"),
    (r"^Whether\b", "True if …, or Return True if …"),
    (r"^Of (?!course)", "start with the subject"),
    (r"^As (?!\w+ as )[^,]*$", "write a sentence with subject and verb"),
    (r"\b(holds?|held|holding) (\S+ ){0,8}against\b", "compare … with …"),
    (r"\b(tells?|told|telling) (\S+ ){1,4}?from\b", "separate, or distinguish"),
    (r"\b(tells?|told) (nothing|little|more)\b|\b(says?|said|saying) of\b", "report, show, or declare"),
    (r"\bby chance\b", "flaky"),
    (r"\bthe time was used\b|\bbudget used\b", "time limit; max error (% of tolerance)"),
    (r"\bnothing (is|was) proven\b|\bNot fine\b", "no cases ran; N failures"),
    (r"\b[Nn]othing (was |is )?(ran|executed|passed)\b|\bexecute[ds]? nothing\b", "no cases ran; no case passed"),
    (r"\bcounts? something else\b|\b(hits?|hit) (\w+ )?harder\b", "name the difference; larger errors"),
    (r"\b(has|have) it no(t| more)\b|\bis the (first|last) that has it\b", "does not have it; no longer has it"),
    (r"\bmend(s|ed|ing)? (it|its|the|this)\b", "fix"),
    (r"\bno budget allows\b", "bit-exact required"),
    (r"\bnot heard\b|\bcries? over\b", "skipped; false positive"),
    (r"\bwhom? (a|an|the|it) ", "which"),
    (r"\bnot \(UNSUPPORTED\)|\bby its reasons?\b", "N cases unsupported by …, by reason"),
    (r"\b(voices?|desks?|kin|keepers?|promises?)\b", "a noun of the field"),
    (r"\b(hand|hands|handed|handing) (it |them )?over\b", "pass, or write"),
    (r"\bprecision cards?\b|\b(a|the|its|no|whose) card (of|is|was|allows|says)\b", "precision profile"),
    (r"(?<![Tt]here )\b(is|are|was|were) none\b", "there is no …, or is not a …"),
    (r"(?<!is )(?<!are )\bno more[.,;]?$|\bhas it not\b|\btakes (it|them) not\b", "no longer"),
    (r"\banew\b", "again, or new"),
    (r"\bmakes? of (it|them|these|each|an?|the)\b", "computes, or returns"),
    (r"\btakes? (it|them|\S+ \S+) away\b", "removes"),
    (r"\bmakes no sense\b|\b(is|are|be) worth\b", "does not apply; name the quantity"),
    (r"\b(two|2|other) ways\b", "runs, or call sequences"),
    (r"\bstands? (twice|there|here)\b", "occurs, or is"),
    (r"\bnobody\b(?! else)|\bwhoever\b", "name who"),
    (r"\bin (the|its|their) words of\b", "as in …, or described by"),
)
"""Pattern in a sentence -> what to write instead."""
COMPILED = tuple((re.compile(p), instead) for p, instead in RULES)
_CODE = re.compile(r"`[^`]*`|(?<=\])\([^)]*\)")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")

SUMMARY = 90
"""Maximum characters of the first line of a docstring."""


class Text(NamedTuple):
    """Text with its place."""

    file: Path
    line: int
    kind: str
    text: str


def documents() -> Iterator[Text]:
    """Yield paragraphs, list items, headings and table cells of Markdown, without code."""
    for path in (p for pattern in DOCUMENTS for p in sorted(ROOT.glob(pattern))):
        block: list[str] = []
        begin, fenced = 0, False
        for n, row in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
            is_fence = row.lstrip().startswith(("```", "~~~"))
            if block and (fenced or is_fence or re.match(r"\s*($|[-*#|>]|\d+\.)", row)):
                yield Text(path, begin, "docs", " ".join(block))
                block = []
            if is_fence:
                fenced = not fenced
            elif row.lstrip().startswith(("|", "#")) and not fenced:
                yield from (Text(path, n, "docs", cell.strip("# ")) for cell in row.split("|"))
            elif row.strip() and not fenced:
                begin = begin if block else n
                block.append(re.sub(r"^\s*([-*>]+|\d+\.)\s+", "", row).strip())


def helps(command: click.Command = conform, name: str = "conform") -> Iterator[Text]:
    """Yield the help of a command, its options and its subcommands."""
    function = inspect.unwrap(cast("Callable[..., object]", command.callback or conform.callback))
    file, line = Path(inspect.getfile(function)), function.__code__.co_firstlineno
    texts = [command.help or "", command.epilog or "", *(getattr(p, "help", None) or "" for p in command.params)]
    texts += [*LINES.values()] if command is conform else []
    yield from (Text(file, line, f"help of {name}", part) for t in texts for part in t.split("\n\n"))
    if isinstance(command, click.Group):
        for sub in command.list_commands(context := click.Context(command)):
            if (found := command.get_command(context, sub)) is not None:
                yield from helps(found, f"{name} {sub}")


def sources() -> Iterator[Text]:
    """Yield docstrings, of attributes too, and literals passed to `PRINTERS` and exceptions."""
    for path in (p for pattern in SOURCES for p in sorted(ROOT.glob(pattern))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    first, *others = text.split("\n\n")
                    yield Text(path, node.lineno, "docstring", first)
                    yield from (Text(path, node.lineno, "paragraph", part) for part in others)
                case ast.Call(func=function) if _prints(function):
                    values = [*node.args, *(k.value for k in node.keywords)]
                    yield from (Text(path, line, "message", text) for v in values for line, text in _literals(v))


def _prints(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in PRINTERS or name.endswith(("Error", "BadParameter"))


def _literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the string literals in an expression; a placeholder of an f-string becomes `X`."""
    match node:
        case ast.JoinedStr(values=parts):
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in parts)
        case ast.Constant(value=str() as text):
            yield node.lineno, text
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _literals(child)


def summaries(texts: Iterable[Text]) -> Iterator[str]:
    """Yield FILE:LINE of each docstring, also of attributes, with a summary over `SUMMARY`."""
    for text in (t for t in texts if t.kind == "docstring"):
        if (length := len(text.text.lstrip().partition("\n")[0])) > SUMMARY:
            yield f"{text.file.relative_to(ROOT)}:{text.line}: summary of {length} characters, {SUMMARY} allowed"


def findings() -> list[str]:
    """Return FILE:LINE, the sentence and the suggestion for each match of a rule."""
    texts = [*documents(), *helps(), *sources()]
    found: dict[str, None] = dict.fromkeys(summaries(texts))
    for text in texts:
        for sentence in _SENTENCE.split(" ".join(_CODE.sub("`x`", text.text).split())):
            for pattern, instead in COMPILED:
                if pattern.search(sentence.strip("*_()")):
                    place = f"{text.file.relative_to(ROOT)}:{text.line}"
                    found[f"{place}: {text.kind}: {sentence!r}: write: {instead}"] = None
    return list(found)


if __name__ == "__main__":
    print("\n".join(result := findings()) or "no findings")
    sys.exit(bool(result))
