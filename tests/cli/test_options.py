"""The options: one table serves both command lines; `conform --help` imports next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from conformance.cli import COMMANDS, GROUPS, RENAMED, main, options
from conformance.cli.options import PERF, PERF_RUN, RUN, Option
from conformance.cli.perf import perf_run
from conformance.cli.run import run

RUN_ONLY = {
    "changed",
    "minutes",
    "test_files",
    "workers",
    "budget",
    "only_fresh",
    "against",
    "journal_path",
    "first",
    "maxfail",
    "last",
    "verbose",
    "files",
}
"""Options of `conform run` that pytest has by other names or not at all."""


@pytest.fixture
def parser() -> pytest.Parser:
    """Pytest's parser with the options of the suite and nothing else."""
    made = pytest.Parser(_ispytest=True)
    options.add_to(made.getgroup("conformance"))
    return made


def _click(o: Option) -> click.Option:
    command = run if o in RUN else perf_run
    return next(p for p in command.params if isinstance(p, click.Option) and o.name.partition("/")[0] in p.opts)


@pytest.mark.parametrize("o", [*RUN, *PERF_RUN], ids=lambda o: o.name)
def test_both_command_lines_declare_the_same(parser: pytest.Parser, o: Option) -> None:
    """Name, help, default, and whether it may be repeated are those of the table."""
    theirs = _click(o)
    group = parser.getgroup("conformance")
    ours = next(p for p in group.options if o.name.partition("/")[0] in p.names()).attrs()
    assert ours["help"].replace("%%", "%").startswith(str(theirs.help))
    assert (ours["dest"], ours.get("metavar")) == (theirs.name, None if "/" in o.name else theirs.metavar)
    assert (ours.get("default") == []) is theirs.multiple
    context = click.Context(run)
    default = theirs.type_cast_value(context, theirs.get_default(context))
    assert str(ours.get("default") or None) == str(default or None)


def test_conform_run_has_no_option_besides() -> None:
    """An option that is new on one command line must be put into the table, or into the list of exceptions."""
    shared = {o.dest for o in RUN} - {"config_path"}
    assert {p.name for p in run.params} == {*shared, *RUN_ONLY, "config_path"}
    assert PERF not in RUN
    assert sum(isinstance(p, click.Option) for p in run.params) <= 27


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "-1"], "-1 is not in the range x>=0"),
        (["--level", "huge"], "'huge' is not one of 'smoke'"),
        (["--shard", "3/2"], "I/N with 1 <= I <= N"),
        (["--json", "/no/such/folder/r.json"], "a file in an existing"),
        (["--memory-limit", "much"], "much"),
        (["--time-limit", "0"], "0.0 is not in the range x>0"),
        (["--waivers", "/no/such/file"], "does not exist"),
        (["--rounds", "0"], "0 is not in the range x>=1"),
    ],
)
def test_both_refuse_the_same_words(parser: pytest.Parser, words: list[str], said: str) -> None:
    """A wrong value is one line on either command line, exit code 2 or pytest's usage error."""
    command = ["perf", "run", *words] if "--rounds" in words else ["run", *words]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert said in result.output
    with pytest.raises(pytest.UsageError, match="argument --") as refused:
        parser.parse(words)
    assert said in " ".join(str(refused.value).split())


def test_values_of_pytest_are_simple(parser: pytest.Parser, tmp_path: Path) -> None:
    """pytest-xdist sends options to its workers: numbers and texts only."""
    found = parser.parse(["--json", str(tmp_path / "r.json"), "--memory-limit", "4G", "--shard", "1/2",
                          "--backend", "a", "--backend", "b", "--perf"])  # fmt: skip
    assert (found.json_path, found.memory_limit, found.shard) == (str(tmp_path / "r.json"), 4 << 30, "1/2")
    assert (found.backends, found.perf, found.level) == (["a", "b"], True, None)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_of_the_help_is_there(name: str) -> None:
    """Its module has it under that name, and its own help works."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
    assert f"  {name} " in CliRunner().invoke(main, ["--help"]).output


def test_help_imports_next_to_nothing() -> None:
    """`conform --help` loads neither NumPy nor a command; it is there at once."""
    code = (
        "import sys; from click.testing import CliRunner; from conformance.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ('numpy', 'openvino', 'backends', 'conformance')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(
        ["conformance", "conformance.cli", "conformance.cli.output", "conformance.ggml", "conformance.ggml.errors",
         "conformance.ggml.text", "conformance.installed"]
    )  # fmt: skip


def test_each_command_stands_under_one_heading() -> None:
    """None is left out of the help, or is there twice."""
    assert sorted(n for names in GROUPS.values() for n in names) == sorted(COMMANDS)


def test_an_unknown_command_is_one_line() -> None:
    """A command that is none is refused by name, and what it may have meant is said."""
    result = CliRunner().invoke(main, ["nope"])
    assert result.exit_code == 2
    assert "No such command 'nope'" in result.output
    assert "repro" in CliRunner().invoke(main, ["reprro"]).output


def test_an_old_command_names_the_new_one() -> None:
    """An old name is no command; its error gives a command line that exists."""
    assert not set(RENAMED) & set(COMMANDS)
    assert {new.split()[0] for new in RENAMED.values()} <= set(COMMANDS)
    for old, new in RENAMED.items():
        assert f"use conform {new}" in CliRunner().invoke(main, [old]).output


def test_a_backend_has_a_short_name() -> None:
    """`-b` is `--backend`."""
    result = CliRunner().invoke(main, ["run", "-b", "nope"])
    assert result.exit_code == 2
    assert "nope" in result.output


def test_times() -> None:
    """A time has a unit."""
    assert [options.duration(t) for t in ("90s", "30m", "2h", "1.5d")] == [90, 1800, 7200, 129600]
    for text in ("2", "h", "0h", "-1h", "1h30m", "٣h"):
        with pytest.raises(click.BadParameter, match="a time as 90s"):
            options.duration(text)
