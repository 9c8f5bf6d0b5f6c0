"""The table of options, from which the commands and `pytest conformance` both derive theirs."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.shell_completion import CompletionItem

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.builds.isa import ISAS
from conformance.builds.source import downloaded
from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.process.memory import parse_size
from conformance.report.runfile import check_writable
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.live import family_names, family_or_none
from conformance.run.session import settings
from conformance.run.session.select import available, lacking, parse_specs
from conformance.run.session.settings import Settings
from conformance.run.session.shard import parse
from conformance.suite.family import LEVELS
from conformance.testrun import Chosen

from .output import line

if TYPE_CHECKING:
    import pytest

SETTINGS = "conformance.settings"
"""Key of the context's settings, which --config names."""
Command = Callable[..., None]
Complete = Callable[[click.Context, click.Parameter, str], list[str]]

File = click.Path(path_type=Path, dir_okay=False)
ExistingFile = click.Path(path_type=Path, exists=True, dir_okay=False)
Folder = click.Path(path_type=Path, file_okay=False)


class NewFolder(click.Path):
    """A folder in which files can be created; it is created when the first one is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401  # as click
        """Check that the nearest existing folder can be written, before anything runs."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        try:
            with tempfile.TemporaryFile(dir=nearest):
                return path
        except OSError as e:
            self.fail(f"files cannot be created in {nearest}: {e.strerror}", param, ctx)


ExistingFolder = click.Path(path_type=Path, exists=True, file_okay=False)


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str | float) -> float:
    """Convert `90s`, `30m`, `2h` or `1.5d` to seconds. click.BadParameter for other text."""
    if isinstance(text, float):
        return text
    found = _DURATION.fullmatch(text)
    if not found or not float(found[1]):
        raise click.BadParameter(f"{text!r}: a time as 90s, 30m, 2h or 1.5d expected")
    return float(found[1]) * _UNITS[found[2]]


def _record(text: str) -> Path:
    check_writable(Path(text))
    return Path(text)


def complete_backend(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Complete names of installed backends, without importing any adapter."""
    return [n for n in registry.names() if n.startswith(begun)]


def complete_family(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Complete names of families, without importing any."""
    return [n for n in family_names() if n.startswith(begun)]


def complete_build(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete packages that were downloaded before, then files."""
    return [*(CompletionItem(n) for n in downloaded() if n.startswith(begun)), CompletionItem(begun, type="file")]


def complete_case(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Complete families until a `/` is typed, then ids of level smoke."""
    family, slash, _ = begun.partition("/")
    if not slash:
        return [f"{n}/" for n in family_names() if n.startswith(begun)]
    known = family_or_none(family)
    return [] if known is None else [i for i in known.ids("smoke") if i.startswith(begun)]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of both command lines."""

    name: str
    """Name with its dashes; `--x/--no-x` for a flag that may be unset (None)."""
    dest: str
    """Parameter of the command, and pytest's `dest`."""
    help: str
    type: Any = click.STRING
    """A click type, or a function of the text."""
    metavar: str | None = None
    default: str | float | None = None
    repeatable: bool = False
    complete: Complete | None = None
    short: str = ""
    """Short name, for `conform` alone."""

    def click(self, **changes: Any) -> Callable[[Command], Command]:  # noqa: ANN401  # as click takes them
        """Make an option of a command."""
        words: dict[str, Any] = {
            "type": None if "/" in self.name else self.type, "metavar": self.metavar, "help": self.help,
            "default": self.default, "multiple": self.repeatable, "show_default": self.default is not None,
            "shell_complete": self.complete,
        }  # fmt: skip
        if self.type is click.BOOL and "/" not in self.name:
            words |= {"is_flag": True, "default": False, "show_default": False}
        names = filter(None, (self.short, self.name, self.dest))
        return click.option(*names, **{**words, **changes})

    def pytest(self, group: pytest.OptionGroup) -> None:
        """Add a pytest option with numbers or texts as values, which xdist sends to workers."""
        words: dict[str, Any] = {"type": partial(_simple, self.type), "metavar": self.metavar, "default": self.default}
        if "/" in self.name:
            words = {"action": argparse.BooleanOptionalAction}
        elif self.type is click.BOOL:
            words = {"action": "store_true"}
        elif self.repeatable:
            words |= {"action": "append", "default": []}
        shown = "" if self.default is None else f" [default: {self.default}]"
        group.addoption(self.name.partition("/")[0], dest=self.dest, help=f"{self.help}{shown}".replace("%", "%%"),
                        **words)  # fmt: skip

    def read(self, value: Any) -> Any:  # noqa: ANN401  # as pytest has it
        """Convert the value of a pytest option to the type that a command gets."""
        if value is None or "/" in self.name:
            return value
        kind = click.types.convert_type(self.type)
        return [kind.convert(v, None, None) for v in value] if self.repeatable else kind.convert(str(value), None, None)


def _simple(kind: object, text: str) -> str | float:
    try:
        value = click.types.convert_type(kind).convert(text, None, None)
    except (click.BadParameter, ConformanceError) as e:
        raise argparse.ArgumentTypeError(e.message if isinstance(e, click.BadParameter) else str(e)) from None
    return value if isinstance(value, (int, float)) else str(value)


BACKEND = Option("--backend", "backends", "Backend, repeatable; default: those marked in conform list.",
                 metavar="NAME[?KEY=VALUE]", repeatable=True, complete=complete_backend, short="-b")  # fmt: skip
CONFIG = Option("--config", "config_path", "File with backend names; default: conformance.toml, if it exists.",
                ExistingFile, "FILE")  # fmt: skip
WAIVERS = Option("--waivers", "waivers_path",
                 "Known failures of --backend; default: the file in conformance.toml.",
                 ExistingFile, "FILE")  # fmt: skip
STAGE = Option("--stage", "stage",
               "Stage of the backend whose values are checked: translate (before compiling) or run.",
               metavar="STAGE")  # fmt: skip
FAMILY = Option("--family", "families", "Case family, repeatable; default: the suite's own (conform list families).",
                metavar="NAME", repeatable=True, complete=complete_family)  # fmt: skip
CASE = Option("--case", "globs", "Case ids, repeatable.", metavar="GLOB", repeatable=True, complete=complete_case)
LEVEL = Option("--level", "level", "Number of cases; default: the backend's level in conformance.toml, or smoke.",
               click.Choice(LEVELS))  # fmt: skip
SEED = Option("--seed", "seed", "Seed of every generated case; default: the one in its id.",
              click.IntRange(min=0), "N")  # fmt: skip
FRESH = Option("--fresh", "fresh",
               "Also run N new cases of the chosen families, with a new seed or --seed; they never fail the run.",
               click.IntRange(min=0), "N", default=0)  # fmt: skip
SHARD = Option("--shard", "shard",
               "Run only the I-th of N shares of the chosen cases, one share per machine.",
               parse, "I/N", default="1/1")  # fmt: skip
BUDGET = Option("--budget", "budget", "Start nothing new after this time: 90s, 30m, 2h, 1.5d.", duration, "TIME")
JOBS = Option("--jobs", "jobs", "Run cases in N processes at a time on this machine; default: one per core.",
              click.IntRange(min=1), "N", short="-j")  # fmt: skip
SAVE = Option("--save-failures", "save_failures", "Save failing cases in DIR.", NewFolder(file_okay=False), "DIR")
TIME_LIMIT = Option("--time-limit", "time_limit", "Time limit of one request; five times as long if emulated.",
                    click.FloatRange(min=0, min_open=True), "SECONDS", default=Isolation().time_limit)  # fmt: skip
MEMORY_LIMIT = Option("--memory-limit", "memory_limit",
                      "Memory limit of a backend's process, as 4G; default: most of the machine's.",
                      parse_size, "SIZE")  # fmt: skip
JSON = Option("--json", "json_path", "Write every result to FILE.", _record, "FILE")
UNIT = Option("--unit", "unit_globs", "Work units to time, repeatable; default: all.", metavar="GLOB", repeatable=True)
ROUNDS = Option("--rounds", "rounds", "Repetitions per work unit, after the warm-up; default: the level's.",
                click.IntRange(min=1), "N")  # fmt: skip
PERF = Option("--perf", "perf", "Time backends; each case must pass first.", click.BOOL)
ISA = click.option("--isa", type=click.Choice(list(ISAS)), help="Emulate this processor; see docs/builds.md.")
PERF_COUNT = Option("--perf-count", "perf_count", "Also count instructions and cache misses.", click.BOOL)

AGAINST = Option("--against", "against",
                 "Backend, build or record to compare with: fail only for new failures.",
                 metavar="NAME|BUILD|FILE")  # fmt: skip
ONLY_FRESH = Option("--only-fresh", "only_fresh", "Run only the cases that --fresh adds.", click.BOOL)

SELECTION = (FAMILY, CASE, LEVEL, SEED, FRESH)
"""Options that select case ids."""
LIMITS = (TIME_LIMIT, MEMORY_LIMIT)
"""Options that set the limits of a worker."""
RUN = (BACKEND, CONFIG, WAIVERS, STAGE, *SELECTION, SHARD, JOBS, SAVE, *LIMITS, JSON)
"""Options shared by `conform run` and `pytest conformance`."""
PERF_RUN = (ROUNDS,)
"""Options shared by `conform perf run` and `pytest conformance --perf`."""


def add_to(group: pytest.OptionGroup) -> None:
    """Add the options to pytest."""
    for o in (*RUN, PERF, PERF_COUNT, UNIT, *PERF_RUN):
        o.pytest(group)


def _load(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    if not ctx.resilient_parsing:  # where a shell completes words, no file is read
        ctx.meta[SETTINGS] = settings.load(path)


config_option = CONFIG.click(callback=_load, is_eager=True, expose_value=False)
repeated_option = BACKEND.click(help="Backend of FILE that runs only with your permission, repeatable.")
"""--backend for a command whose file names the backends."""
smoke_option = LEVEL.click(help="Number of cases.", default=LEVELS[0], show_default=True)
"""--level for a command in which no backend has a level of its own."""
json_option = JSON.click()


def settings_here() -> Settings:
    """Return the settings of the running command's `--config`."""
    return cast("Settings", click.get_current_context().meta[SETTINGS])


def _installed(ctx: click.Context, _param: click.Parameter, texts: Sequence[str]) -> Sequence[str]:
    """Return the backends; UsageError if one is not installed."""
    if texts and not ctx.resilient_parsing:
        parse_specs(texts)
    return texts


def backend_option(f: Command) -> Command:
    """Add --backend, and --config, which defines names for it."""
    return BACKEND.click(callback=_installed)(config_option(f))


def specs_here(texts: Sequence[str], isolation: Isolation | None = None) -> tuple[list[Spec], dict[str, str]]:
    """Return the available backends of --backend (default: all), and unavailable -> reason.

    UnavailableError if a named backend is not available.
    """
    specs, absent = available(list(dict.fromkeys(parse_specs(texts))), Workers(isolation))
    reasons = {str(s): str(why) for s, why in absent.items()}
    if reasons and texts:
        raise UnavailableError(missing_backends(reasons))
    return specs, reasons


def missing_backends(reasons: Mapping[str, object]) -> str:
    """Return the error message for unavailable backends."""
    return "; ".join(f"{name}: not available: {why}" for name, why in reasons.items())


def together(name: str, make: Callable[..., object], *chosen: Option) -> Callable[[Command], Command]:
    """Combine options into one parameter `name`: `make` called with their values by `dest`."""

    def decorate(f: Command) -> Command:
        @wraps(f)
        def g(*args: Any, **values: Any) -> None:  # noqa: ANN401  # passes options through
            own = {o.dest: values.pop(o.dest) for o in chosen}
            f(*args, **values, **{name: make(**own)})

        for o in reversed(chosen):
            o.click()(g)
        return g

    return decorate


isolation = together("isolation", Isolation, *LIMITS)


def chosen(*table: Option) -> Callable[[Command], Command]:
    """Combine options into the parameter `chosen` of a command; --config gives it its settings."""

    def make(**values: Any) -> Chosen:  # noqa: ANN401  # as click gives them
        found = Chosen.of(click.get_current_context().meta.get(SETTINGS, Settings()), values)
        if FAMILY in table and not found.families and not found.globs:
            for name, why in lacking(()).items():
                line(f"{name}: not run: {why}", err=True)
        return found

    decorate = together("chosen", make, *(o for o in table if o is not CONFIG))
    return (lambda f: decorate(config_option(f))) if CONFIG in table else decorate


def say_seed(chosen: Chosen) -> None:
    """Print the seed of fresh cases, so that --seed can repeat them."""
    if chosen.fresh:
        line(f"--fresh {chosen.fresh}: seed {chosen.new.seed}", err=True)


def chosen_of(config: pytest.Config) -> Chosen:
    """Read the options of a pytest session."""
    values = {o.dest: o.read(config.getoption(o.dest)) for o in RUN}
    return Chosen.of(settings.load(values.pop(CONFIG.dest)), values)
