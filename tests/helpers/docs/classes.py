"""What is done with a command that a document shows: by rules, and by commands.toml, which stands beside the test.

A command is in one class, by these rules in this order:

- *run*: whatever stands at a prompt of a document of `shell`.
- *other*: its program is not ours; `others` says why it is not run.
- *named*: inline code mentions it without what it requires (`conform build bisect`), prose by its name
  alone (`conform run`), or `named` says so.
- *parsed*: it needs what a test machine lacks; `parsed` says what, of a command or of a whole document.
- *run*: all else. `run` has those that are made shorter, with the reason.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import click
from documents import DOCUMENTS, ELISION, ROOT, Command, commands

from conformance.cli import main
from conformance.cli.options import PERF_COUNT, PERF_RUN
from conformance.cli.options import RUN as SUITE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = tomllib.loads((ROOT / "tests" / "docs" / "commands.toml").read_text(encoding="utf-8"))
STAND_INS: dict[str, str] = TABLE["stand_ins"]
OTHERS: dict[str, str] = TABLE["others"]
PARSED: dict[str, str] = TABLE["parsed"]
RUN: dict[str, dict[str, Any]] = {entry["command"]: entry for entry in TABLE["run"]}
NAMED: dict[str, str] = TABLE["named"]
SHELL: dict[str, str] = TABLE["shell"]
FOREIGN: dict[str, str] = TABLE["foreign"]
EXIT: dict[str, int] = TABLE.get("exit", {})
EVERY = tuple(c for document in DOCUMENTS for c in commands(document))
_PLACE = re.compile(rf"(?<![\w.@-])({'|'.join(sorted(map(re.escape, STAND_INS), key=len, reverse=True))})(?![\w.]*\w)")
_CAPITALS = re.compile(r"[A-Z][A-Z_]+(\.[a-z]+)?")


@cache
def class_of(c: Command) -> str:
    """`other`, `named`, `parsed` or `run`; an empty text where no rule and no table knows the program."""
    if c.document in SHELL and c.place == "console":
        return "run"
    if c.program not in {"conform", "pytest"} or any(word.startswith("tests") for word in c.words):
        return "other" if c.program in OTHERS else ""
    if c.place in {"prose", "table"} and (c.text in NAMED or _mentions(c)):
        return "named"
    if c.document in PARSED or c.text in PARSED:
        return "parsed"
    return "run"


def of_class(name: str) -> list[Command]:
    """The commands of a class."""
    return [c for c in EVERY if class_of(c) == name]


def filled(text: str) -> str:
    """The command with something that exists for each word in capitals.

    Raises:
        AssertionError: a word in capitals has no stand-in.
    """
    made = _PLACE.sub(lambda m: STAND_INS[m[0]], text)
    unknown = [w for w in shlex.split(made) if _CAPITALS.fullmatch(w) and w not in STAND_INS.values()]
    assert not unknown, f"{text}: what does {unknown[0]} stand for? `stand_ins` in commands.toml"
    return made


def parse(text: str) -> click.Context:
    """The context that the parser of a `conform` command makes of its words. Nothing runs.

    Raises:
        click.UsageError: the words are no such command's.
    """
    words = [word for word in shlex.split(text)[1:] if word != ELISION]
    command: click.Command = main
    context = click.Context(main, info_name="conform")
    while isinstance(command, click.Group):
        if not words:
            raise click.MissingParameter(ctx=context, param_type="command")
        found = command.get_command(context, words[0])
        if found is None:
            raise click.UsageError(f"no command {words[0]!r}")
        command, context = found, click.Context(found, parent=context, info_name=words.pop(0))
    return command.make_context(context.info_name, words, parent=context.parent)


def chosen(words: tuple[str, ...]) -> tuple[click.Command, tuple[str, ...]]:
    """The (sub)command that words begin with, and the rest of them.

    Raises:
        KeyError: there is none of the name.
    """
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-") and words[0] != ELISION:
        found = command.get_command(context, words[0])
        if found is None:
            raise KeyError(words[0])
        command, words = found, words[1:]
    return command, words


def options_in(words: tuple[str, ...]) -> Iterator[str]:
    """What looks like an option: `--level`, `-o`."""
    return (m[0] for word in words if (m := re.match(r"--?[a-z][a-z0-9-]*", word)))


def every_option() -> set[str]:
    """The options of every `conform` command and of `pytest conformance`."""
    found = {name for o in (*SUITE, *PERF_RUN, PERF_COUNT) for name in o.name.split("/")}
    commands: list[click.Command] = [main]
    while commands:
        command = commands.pop()
        found |= {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        if isinstance(command, click.Group):
            context = click.Context(command)
            names = command.list_commands(context)
            commands += filter(None, (command.get_command(context, name) for name in names))
    return found


def _mentions(c: Command) -> bool:
    """True if inline code names a command, and is no command to run."""
    if c.place == "prose" and set(c.words[1:]) <= {"conformance", "--pyargs"}:
        return True
    if c.program != "conform":
        return False
    try:
        if c.place == "prose" and not chosen(c.words[1:])[1]:
            return True
        parse(filled(c.text))
    except (click.MissingParameter, click.BadOptionUsage, KeyError):
        return True
    except click.UsageError:
        return False
    return False
