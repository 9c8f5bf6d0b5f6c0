"""Prints lines and tables with every text escaped, and ends commands on errors."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import click
from tabulate import tabulate

from conformance.ggml.errors import CaseFileError, ConformanceError
from conformance.ggml.text import printable

if TYPE_CHECKING:  # `--help` imports next to nothing
    from conformance.judge.cause import Cause
    from conformance.judge.outcome import Outcome

CLOSED = 141
"""Exit code if stdout was closed; shells use it for SIGPIPE."""
CELLS = 200
"""Maximum characters of a cause's cells."""
UNWRITABLE = 74
"""Exit code if stdout cannot be written: EX_IOERR of sysexits.h."""


class Group(click.Group):
    """Commands that end with one line: exit code 2 on a ConformanceError, incomplete on Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  # click's own signature
        """Run the command; errors end it through `fail`."""
        try:
            return super().invoke(ctx)
        except ConformanceError as e:
            fail_by(e)
        except OSError as e:
            _fail_at(e)
        except KeyboardInterrupt:  # click would end it with 1, as failures do
            from conformance.judge.outcome import Outcome, Why  # noqa: PLC0415  # `--help` imports next to nothing

            leave(Outcome.of(Why.INTERRUPTED, ["interrupted"]))

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as above
        """Run as click does; a write error on stdout is one line for `--help`, too."""
        try:
            return super().main(*args, **kwargs)
        except OSError as e:
            _fail_at(e)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command as click does; for an unknown name suggest similar ones."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as e:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx))
            raise click.UsageError(e.message + (f" Did you mean {' or '.join(near)}?" if near else ""), e.ctx) from None

    def summaries(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return each command with its first sentence, unshortened."""
        commands = [(n, self.get_command(ctx, n)) for n in self.list_commands(ctx)]
        return [(n, c.get_short_help_str(limit=sys.maxsize)) for n, c in commands if c is not None and not c.hidden]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands of the help."""
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))


def line(text: str, *, err: bool = False) -> None:
    """Print one line; control characters and line breaks are escaped."""
    click.echo(printable(text), err=err)


def cause_lines(causes: Iterable[Cause]) -> list[str]:
    """Format causes, most urgent first: description, smallest case, drivers if emulated."""
    lines = []
    for n, cause in enumerate(causes, 1):
        seen = f", {cause.seen}" if cause.seen else ""
        hurt = f"; {cause.hits}" if cause.hits else ""
        lines += [f"{n:3}. {cause.id} on {cause.backend}{seen}: {cause.sentence}{hurt}", f"     {cause.smallest}"]
        lines += [f"     {told}" for told in [cause.emulated] if told]
    return lines


def grid(rows: Iterable[Sequence[object]], headers: Sequence[str], **layout: Any) -> str:  # noqa: ANN401  # tabulate's
    """Format a table; cells are escaped, so that none can forge a row; None is an empty cell."""
    cells = [[x if x is None or isinstance(x, (int, float)) else printable(str(x)) for x in row] for row in rows]
    return tabulate(cells, headers, **layout)


def table(rows: Iterable[Sequence[object]], headers: Sequence[str], **layout: Any) -> None:  # noqa: ANN401  # as above
    """Print a `grid`."""
    click.echo(grid(rows, headers, **layout))


def leave(outcome: Outcome) -> NoReturn:
    """Print why a command failed, and exit with the code of its outcome."""
    for text in outcome.lines():
        line(text)
    sys.exit(outcome.exit_code)


def fail(*messages: str) -> NoReturn:
    """Print each message on a line of stderr and exit with code 2."""
    from conformance.judge.outcome import Exit  # noqa: PLC0415  # as above

    for message in messages:
        line(f"conform: {' '.join(message.split())}", err=True)
    sys.exit(Exit.USAGE)


def fail_by(error: ConformanceError) -> NoReturn:
    """End with a ConformanceError: a line for each of its messages."""
    fail(str(error), *map(str, error.others if isinstance(error, CaseFileError) else ()))


def silence() -> None:
    """Write nothing more to stdout, including buffered text."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end(error: OSError, record: str = "") -> NoReturn:
    """End a command whose stdout fails: silently if the reader is gone, else with a line."""
    silence()
    if isinstance(error, BrokenPipeError):
        sys.exit(CLOSED)
    with suppress(OSError):
        line(f"conform: cannot write to stdout: {error.strerror or error}{record}", err=True)
    sys.exit(UNWRITABLE)


def _fail_at(e: OSError) -> NoReturn:
    """End a command that could not read or write a file, or stdout."""
    if e.filename is None:
        end(e)
    fail(f"{e.filename}: cannot be read or written: {e.strerror}")
