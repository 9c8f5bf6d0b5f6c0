"""`conform`: the command line.

Exit codes: 0 fine, 1 conformance failures, 2 bad input or usage, 3 nothing executed or nothing passed, 4 a backend
in this process did not come back, 74 stdout cannot be written, 130 interrupted.
"""

from __future__ import annotations

import click

from conformance import __version__
from conformance.nightly.command import nightly

from .adding import new_adapter
from .audit import audit
from .capturing import capture, import_capture, make_model
from .golden import golden_group
from .history import history
from .layout import layout
from .listing import backends, cases, show
from .options import Group
from .perf import perf
from .perf_gates import aa, compare, gate
from .phases import phases
from .planted import planted
from .reporting import report
from .running import repro, run
from .shrinking import shrink
from .splits import splits
from .zoo import zoo_matrix


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="conform")
def main() -> None:
    """Conformance tests for LLM inference backends that execute ggml compute graphs."""


for _command in (
    audit,
    backends,
    cases,
    layout,
    show,
    run,
    repro,
    shrink,
    capture,
    make_model,
    new_adapter,
    nightly,
    import_capture,
    golden_group,
    history,
    perf,
    phases,
    planted,
    report,
    splits,
    zoo_matrix,
):
    main.add_command(_command)
for _command in (gate, compare, aa):
    perf.add_command(_command)
