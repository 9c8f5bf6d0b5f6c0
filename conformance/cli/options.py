"""What the commands share: options, files, and how an error of ours ends a command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from conformance.cases.family import LEVELS
from conformance.cgraph.errors import ConformanceError
from conformance.report.record import check_writable


class Group(click.Group):
    """Turns every error of ours into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  # click's own signature
        """Run the command; `fail` says what went wrong."""
        try:
            return super().invoke(ctx)
        except ConformanceError as e:
            fail(str(e))
        except BrokenPipeError:
            sys.exit(141)


def fail(message: str) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    click.echo(f"conform: {' '.join(message.split())}", err=True)
    sys.exit(2)


File = click.Path(path_type=Path, dir_okay=False)
ExistingFile = click.Path(path_type=Path, exists=True, dir_okay=False)


def _writable(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        check_writable(path)
    return path


json_option = click.option(
    "--json", "json_path", type=File, callback=_writable, help="Write every result to FILE.", metavar="FILE"
)
backend_option = click.option(
    "--backend", "backends", multiple=True, metavar="NAME[?KEY=VALUE]", help="Repeatable; default: every available one."
)
family_option = click.option("--family", "families", multiple=True, metavar="NAME", help="Repeatable; default: all.")
case_option = click.option("--case", "globs", multiple=True, metavar="GLOB", help="Case ids, repeatable.")
level_option = click.option("--level", type=click.Choice(LEVELS), default="smoke", show_default=True)
stage_option = click.option(
    "--stage",
    metavar="STAGE",
    help="Check the values of this stage of each backend: translate (before anything is compiled) or run.",
)
save_option = click.option(
    "--save-failures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep failing cases in DIR.",
)


def selection(f: Callable[..., None]) -> Callable[..., None]:
    """The options that choose cases: --family, --case, --level."""

    @family_option
    @case_option
    @level_option
    @wraps(f)
    def g(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # passes options through
        f(*args, **kwargs)

    return g
