"""What goes to the terminal: colours, and a stdout that is closed or full, which costs no result."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

import click

from conformance.judge.verdict import Result, Verdict

CLOSED = 141
"""Exit code where nobody reads stdout any more: as a shell has it for SIGPIPE."""
UNWRITABLE = 74
"""Exit code where stdout takes no more: EX_IOERR of sysexits.h."""
COLOURS: dict[Verdict, str] = {
    Verdict.PASS: "green", Verdict.UNSUPPORTED: "yellow", Verdict.XFAIL: "yellow", Verdict.FAIL: "red",
    Verdict.OVERCLAIM: "red", Verdict.CRASH: "red", Verdict.TIMEOUT: "red", Verdict.VACUOUS: "red",
    Verdict.XPASS: "red",
}  # fmt: skip
_FAULT = "conformance.stdout"


def _color(ctx: click.Context, _param: click.Parameter, when: str) -> None:
    auto = False if os.environ.get("NO_COLOR") else None  # None: where stdout is a terminal
    ctx.color = {"auto": auto, "yes": True, "no": False}[when]


color_option = click.option(
    "--color",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    callback=_color,
    expose_value=False,
    is_eager=True,
    help="Colour verdicts; auto: on a terminal, unless NO_COLOR is set.",
)


def say(text: str, **style: str | bool) -> None:
    """Print on stdout; where it takes no more, that is noted (`fault`) and the command goes on in silence."""
    ctx = click.get_current_context()
    if fault() is None:
        try:
            click.echo(click.style(text, **style) if style else text)  # type: ignore[arg-type]  # click's own words
        except OSError as e:
            ctx.meta[_FAULT] = e
            silence()


def fault() -> OSError | None:
    """Why stdout took no more; None where it does."""
    found = click.get_current_context().meta.get(_FAULT)
    return found if isinstance(found, OSError) else None


def sentence(r: Result) -> str:
    """`Result.sentence` with its verdict in colour."""
    word = str(r.verdict)
    return click.style(word, fg=COLOURS[r.verdict], bold=True) + r.sentence()[len(word) :]


def silence() -> None:
    """Let nothing more be written to stdout, not even what is buffered."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end(error: OSError, kept: str = "") -> NoReturn:
    """End a command whose stdout took no more: quietly where nobody reads it, else with one line."""
    silence()
    if isinstance(error, BrokenPipeError):
        sys.exit(CLOSED)
    with suppress(OSError):
        click.echo(f"conform: stdout cannot be written: {error.strerror or error}{kept}", err=True)
    sys.exit(UNWRITABLE)
