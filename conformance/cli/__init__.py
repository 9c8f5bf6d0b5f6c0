"""`conform`: the command line.

Exit codes: 0 fine, 1 conformance failures, 2 bad input or usage, 3 nothing executed.
"""

from __future__ import annotations

import click

from conformance import __version__

from .capturing import import_capture
from .golden import golden_group
from .listing import backends, cases, show
from .options import Group
from .running import repro, run


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="conform")
def main() -> None:
    """Conformance tests for LLM inference backends that execute ggml compute graphs."""


for _command in (backends, cases, show, run, repro, import_capture, golden_group):
    main.add_command(_command)
