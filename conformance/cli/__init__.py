"""`conform`: the command line. Modules of commands are imported when they are called.

Exit codes, decided by `judge/outcome.py`: 0 success, 1 failures or missing results, 2 bad input or usage, 3 no cases
ran or none passed, 5 stopped by its own limit or Ctrl-C, 74 stdout cannot be written, 141 stdout is closed.
docs/exit-codes.md has the table.
"""

from __future__ import annotations

import builtins
import importlib
import os
from typing import cast

import click

from .output import Group

COMMANDS: dict[str, tuple[str, str]] = {
    "build": (".build", "Compare builds of llama.cpp: test, bisect, state."),
    "capture": (".llama", "Record the graphs that llama.cpp runs as a case file."),
    "check-model": (".model", "Check a model on backends; locate the first wrong layer, node and step."),
    "doctor": (".doctor", "Check the installation: packages and backends."),
    "golden": (".checks", "Verify or update the golden outputs."),
    "list": (".listing", "List backends, case ids or builds of llama.cpp."),
    "new-adapter": (".adapter", "Write the package of a new backend: a working file and its test."),
    "precision": (".checks", "Measure or show the precision profile of a device."),
    "nightly": (".nightly", "Run the suite, the audit and the speed gates every night."),
    "perf": (".perf", "Time backends and judge their speed."),
    "report": (".reports", "Write a page and other reports from run files."),
    "repro": (".run", "Run saved cases again and compare with the saved results."),
    "run": (".run", "Run cases on backends; print failures and totals."),
    "show": (".bugs", "Print the graphs of a case, and how a scheduler splits them."),
    "shrink": (".bugs", "Minimise a failing case."),
    "triage": (".bugs", "Group the failures of a run into causes; write baselines, bug reports."),
}
"""Command -> its module, and its line in `conform --help`.

The module has the command under its own name (`_` for `-`)."""

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

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command from its module; None for an unknown name."""
        if cmd_name in RENAMED:
            raise click.UsageError(f"conform {cmd_name} is gone: use conform {RENAMED[cmd_name]}", ctx)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0], __package__)
        name = cmd_name.replace("-", "_")
        return cast("click.Command", getattr(module, f"{name}_" if name in vars(builtins) else name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # as above
        """List the commands by task, from the tables: no module is imported for `--help`."""
        width = max(map(len, COMMANDS))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ggml-conformance", prog_name="conform")
def main() -> None:
    """Conformance tests for LLM inference backends that execute ggml compute graphs.

    Exit codes: 0 success, 1 failures or missing results, 2 bad input or usage, 3 no cases ran or none
    passed, 5 stopped by its own limit or Ctrl-C: see docs/exit-codes.md.
    """
    unset = True if os.environ.get("FORCE_COLOR") else None  # None: on a terminal
    click.get_current_context().color = False if os.environ.get("NO_COLOR") else unset
