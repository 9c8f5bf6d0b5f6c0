"""`conform`: the command line. Modules of commands are imported when they are called.

Exit codes, decided by `judge/outcome.py`: 0 success, 1 failures or missing results, 2 bad input or usage, 3 no cases
ran or none passed, 5 stopped by its own limit or Ctrl-C, 74 stdout cannot be written, 141 stdout is closed.
docs/exit-codes.md has the table.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem

from conformance.installed import Parts

from .output import Group

GROUP = "conformance.commands"
"""Entry points of commands, each a `click.Command` under the word after `conform`."""


def fault(_: str, command: object) -> str:
    """Return why `command` cannot be a command; "" if it can."""
    return "" if isinstance(command, click.Command) else f"a click.Command expected, {type(command).__name__} found"


LINES: dict[str, str] = {
    "build": "Compare builds of llama.cpp: test, bisect, state.",
    "capture": "Record the graphs that llama.cpp runs as a case file.",
    "check-model": "Check a model on backends; locate the first wrong layer, node and step.",
    "doctor": "Check the installation: packages and backends.",
    "golden": "Verify or update the golden outputs.",
    "list": "List backends, case ids or builds of llama.cpp.",
    "new-adapter": "Write the package of a new backend: a working file and its test.",
    "precision": "Measure or show the precision profile of a device.",
    "nightly": "Run the suite, the audit and the speed gates every night.",
    "perf": "Time backends and judge their speed.",
    "report": "Write a page and other reports from run files.",
    "repro": "Run saved cases again and compare with the saved results.",
    "run": "Run cases on backends; print failures and totals.",
    "show": "Print the graphs of a case, and how a scheduler splits them.",
    "shrink": "Minimise a failing case.",
    "triage": "Group the failures of a run into causes; write baselines, bug reports.",
}
"""Command of ours -> its line in `conform --help`, which imports none."""

COMMANDS: Parts[click.Command] = Parts(GROUP, "command", fault, LINES)
"""Every installed command by name, imported on use."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Test a backend": ("run", "repro", "list", "doctor"),
    "Test a build of llama.cpp": ("build", "check-model", "precision"),
    "From failures to bugs": ("triage", "shrink", "show"),
    "Every night": ("nightly", "report", "perf"),
    "Exchange graphs": ("capture",),
    "Trust the suite": ("golden",),
    "Write a backend": ("new-adapter",),
}  # fmt: skip
"""Heading in `conform --help` -> its commands, in their usual order of use."""
OTHERS = "Of other packages"
"""Heading of commands that other distributions have."""


RENAMED: dict[str, str] = {
    "audit": "run --family audit --level standard",
    "backends": "list backends",
    "baseline": "triage RUN.json --write-baseline FILE",
    "bisect": "build bisect RUN CAUSE BUILD…",
    "builds": "list builds BUILD",
    "campaign": "run --workers N",
    "card": "precision FILE",
    "cases": "list cases",
    "causes": "triage RUN.json",
    "findings": "report",
    "history": "report RUN --trend DIR",
    "import-capture": "capture CAPTURE.json",
    "layout": "run --family layout --backend ggml",
    "learn": "precision BACKEND",
    "make-model": "capture ARCH --model",
    "memory": "run --family memory",
    "phases": "run --family phases",
    "release": "build test NEW --against OLD",
    "splits": "show CASE --scheduler SPEC",
    "test-file": "list cases --format test-file",
    "switch": "run --backend 'NAME?env.VARIABLE=VALUE' --against NAME",
    "zoo": "run --family arch (or scenario, or projector)",
}
"""Name of a command of earlier versions -> the command line that replaces it."""


class Commands(Group):
    """The commands of `COMMANDS`, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's own signature
        """Return all names in alphabetical order."""
        return sorted(COMMANDS)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names from metadata, then options; no command is imported."""
        names = [CompletionItem(n, help=line(n)) for n in self.list_commands(ctx) if n.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name, UnavailableError for a broken one."""
        if cmd_name in RENAMED:
            raise click.UsageError(f"conform {cmd_name} is gone: use conform {RENAMED[cmd_name]}", ctx)
        return COMMANDS.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # as above
        """List the commands by task, from the tables: no module is imported for `--help`."""
        width = max(map(len, COMMANDS), default=0)
        for heading, names in {**GROUPS, OTHERS: COMMANDS.others()}.items():
            if found := [(n.ljust(width), line(n)) for n in names if n in COMMANDS]:
                with formatter.section(heading):
                    formatter.write_dl(found)


def line(name: str) -> str:
    """Return the line of a command in `conform --help`; one of another distribution names that."""
    entry = COMMANDS.entry(name)
    return LINES.get(name, "") if entry is None or entry.ours else f"Command of the package {entry.distribution}."


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ggml-conformance", prog_name="conform")
def main() -> None:
    """Conformance tests for LLM inference backends that execute ggml compute graphs.

    Exit codes: 0 success, 1 failures or missing results, 2 bad input or usage, 3 no cases ran or none
    passed, 5 stopped by its own limit or Ctrl-C: see docs/exit-codes.md.
    """
    unset = True if os.environ.get("FORCE_COLOR") else None  # None: on a terminal
    click.get_current_context().color = False if os.environ.get("NO_COLOR") else unset
