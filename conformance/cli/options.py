"""What the commands share: options, files, and how an error of ours ends a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from conformance.backend import registry
from conformance.ggml.errors import ConformanceError
from conformance.ggml.text import printable
from conformance.process.memory import parse_size
from conformance.report.runfile import check_writable
from conformance.run.isolation.isolate import Isolation
from conformance.run.session import settings
from conformance.run.session.select import fresh_ids, lacking, new_seed
from conformance.run.session.settings import Settings
from conformance.run.session.shard import Shard, parse
from conformance.suite import FAMILIES
from conformance.suite.family import LEVELS, Level

from .output import end


class Group(click.Group):
    """Turns every error of ours into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  # click's own signature
        """Run the command; `fail` says what went wrong."""
        try:
            return super().invoke(ctx)
        except ConformanceError as e:
            fail(str(e))
        except OSError as e:
            _fail_at(e)

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as above
        """As click has it; a stdout that takes no more is one line for `--help`, too."""
        try:
            return super().main(*args, **kwargs)
        except OSError as e:
            _fail_at(e)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands, each with all of its first sentence."""
        listed = [(n, self.get_command(ctx, n)) for n in self.list_commands(ctx)]
        rows = [(n, c.get_short_help_str(limit=sys.maxsize)) for n, c in listed if c is not None and not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _fail_at(e: OSError) -> NoReturn:
    """End a command of which a file, or stdout, could not be read or written."""
    if e.filename is None:
        end(e)
    fail(f"{e.filename}: cannot be read or written: {e.strerror}")


def fail(message: str) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    click.echo(f"conform: {printable(' '.join(message.split()))}", err=True)
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


def _settings(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if not ctx.resilient_parsing:  # where a shell completes words, no file is read
        ctx.meta[SETTINGS] = settings.load(path)


def _backends(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Installed names for the shell; no adapter is imported for it."""
    return [n for n in registry.names() if n.startswith(begun)]


def _families(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    return [n for n in FAMILIES if n.startswith(begun)]


def cases_begun(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """For the shell: families as long as no `/` was typed, then ids of level smoke."""
    family, slash, _ = begun.partition("/")
    if not slash:
        return [f"{n}/" for n in FAMILIES if n.startswith(begun)]
    return [i for i in FAMILIES[family].ids("smoke") if i.startswith(begun)] if family in FAMILIES else []


SETTINGS = "conformance.settings"
config_option = click.option(
    "--config",
    type=ExistingFile,
    callback=_settings,
    is_eager=True,
    expose_value=False,
    metavar="FILE",
    help="Names of backends; default: conformance.toml, if it is here.",
)


def settings_here() -> Settings:
    """What `--config` of the running command gave."""
    return cast("Settings", click.get_current_context().meta[SETTINGS])


def level_given(level: Level) -> Level | None:
    """`level` where the user said it, None where it is the option's default."""
    source = click.get_current_context().get_parameter_source("level")
    return None if source is click.core.ParameterSource.DEFAULT else level


def backend_option(f: Callable[..., None]) -> Callable[..., None]:
    """--backend, and --config with the names that it may be."""
    named = click.option(
        "--backend",
        "backends",
        multiple=True,
        metavar="NAME[?KEY=VALUE]",
        shell_complete=_backends,
        help="Repeatable; default: every installed one that is available.",
    )
    return named(config_option(f))


waivers_option = click.option(
    "--waivers",
    "waivers_path",
    type=ExistingFile,
    metavar="FILE",
    help="Known failures of the one --backend, in place of what conformance.toml names.",
)
family_option = click.option(
    "--family", "families", multiple=True, metavar="NAME", shell_complete=_families, help="Repeatable; default: all."
)
case_option = click.option(
    "--case", "globs", multiple=True, metavar="GLOB", shell_complete=cases_begun, help="Case ids, repeatable."
)
level_option = click.option("--level", type=click.Choice(LEVELS), default="smoke", show_default=True)
stage_option = click.option(
    "--stage",
    metavar="STAGE",
    help="Check the values of this stage of each backend: translate (before anything is compiled) or run.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Every generated case with this seed instead of its own."
)
fresh_option = click.option(
    "--fresh",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Also N new cases of the chosen families, from a fresh seed (or --seed): kept where they fail, never gating.",
)


def _shard(_ctx: click.Context, _param: click.Parameter, text: str) -> Shard:
    return parse(text)


shard_option = click.option(
    "--shard",
    default="1/1",
    callback=_shard,
    metavar="I/N",
    help="Only the I-th of N shares of the chosen cases: a run on N machines that need not know of each other.",
)
save_option = click.option(
    "--save-failures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep failing cases in DIR.",
)


def isolation(f: Callable[..., None]) -> Callable[..., None]:
    """The options that say who runs in a process of its own: --isolate, --time-limit, --memory-limit."""

    @click.option(
        "--isolate/--no-isolate",
        "isolate",
        default=None,
        help="Run backends in processes of their own, or in this one; default: those that need it.",
    )
    @click.option(
        "--time-limit",
        type=click.FloatRange(min=0, min_open=True),
        default=Isolation().time_limit,
        show_default=True,
        metavar="SECONDS",
        help="What one request may take in such a process.",
    )
    @click.option(
        "--memory-limit", metavar="SIZE", help="What such a process may hold, as 4G; default: most of the machine's."
    )
    @wraps(f)
    def g(
        *args: Any,  # noqa: ANN401  # passes options through
        isolate: bool | None,
        time_limit: float,
        memory_limit: str | None,
        **kwargs: Any,  # noqa: ANN401  # as above
    ) -> None:
        limit = None if memory_limit is None else parse_size(memory_limit)
        f(*args, isolation=Isolation(isolate, time_limit, limit), **kwargs)

    return g


def fresh_cases(families: Sequence[str], globs: Sequence[str], level: Level, seed: int | None, n: int) -> list[str]:
    """What --fresh adds; says the seed it took, with which --seed makes the same cases."""
    if not n:
        return []
    chosen = new_seed() if seed is None else seed
    click.echo(f"--fresh {n}: seed {chosen}", err=True)
    return fresh_ids(families, globs, level, n, chosen)


def selection(f: Callable[..., None]) -> Callable[..., None]:
    """The options that choose cases: --family, --case, --level, --seed, --fresh."""

    @family_option
    @case_option
    @level_option
    @seed_option
    @fresh_option
    @wraps(f)
    def g(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # passes options through
        if not kwargs["families"] and not kwargs["globs"]:
            for name, why in lacking(()).items():
                click.echo(f"{name}: not run: {why}", err=True)
        f(*args, **kwargs)

    return g
