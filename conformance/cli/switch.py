"""`conform switch`: a backend with an environment variable and without it, both judged and compared."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import click

from conformance.cli import options
from conformance.cli.options import chosen
from conformance.cli.output import leave, line
from conformance.cli.run import run_live
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import Result, Verdict
from conformance.live import arch
from conformance.live.switch import COMPARED, EQUAL, STREAMS, id_of
from conformance.run.session.select import case_ids
from conformance.suite.family import LEVELS
from conformance.suite.zoo.model import runnable
from conformance.testrun import Chosen

FAMILIES = ("gqa", "multi_sequence", "kv_growth")
"""Default cases: attention over one sequence and over several."""
SAYS = "it changes nothing, to the bit, in any of them: nothing shows that the library reads it"
OFF = frozenset({"", "0", "off", "false", "no"})
"""Values by which a library is commonly told to leave a switch off."""


@click.command()
@click.argument("name", metavar="NAME=VALUE")
@chosen(options.BACKEND, options.CONFIG, *options.SELECTION[:3], options.JSON, *options.LIMITS)
@click.option("--arch", "archs", multiple=True, metavar="GLOB",
              help="Architectures that llama.cpp itself runs both ways on a ggml device, too; repeatable.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="A metadata key of these architectures, such as attention.head_count_kv=2; repeatable.")  # fmt: skip
def switch(name: str, chosen: Chosen, archs: Sequence[str], settings: Sequence[str]) -> None:
    """Run cases on a backend with the environment variable NAME=VALUE and without it; judge both, and compare them: the
    live family `switch`.

    By default attention: gqa, multi_sequence, kv_growth. Exit codes: 0 it is right, 1 a case fails with the variable, 3
    nothing could be compared, or nothing changed to the bit: see docs/exit-codes.md.
    """
    if not chosen.backends:
        raise UsageError("switch: --backend NAME expected")
    families, globs = chosen.families, chosen.globs
    inner = case_ids(families or (() if globs else FAMILIES), globs, chosen.level or LEVELS[0])
    inner += _whole_models(archs, settings)
    results, outcome = run_live(chosen, [id_of(name, i) for i in inner])
    variable, _, value = name.partition("=")
    hint = f"; {value or 'an empty value'} commonly leaves a switch off: try {variable}=1" if value in OFF else ""
    for text in chosen.backends:
        own = [r for r in results if r.backend == text]
        line(f"{text}: {coverage(own)}")
        compared = [r for r in own if r.metrics.get(COMPARED)]
        if compared and all(r.metrics[EQUAL] for r in compared):
            outcome += Outcome.of(Why.UNPROVEN, [f"{text}: {name}: {SAYS}{hint}"])
    if not any(r.metrics.get(COMPARED) and r.verdict is Verdict.PASS for r in results):
        outcome += Outcome.of(Why.UNPROVEN, [f"no case could be compared with and without {name}"])
    leave(outcome)


def _whole_models(globs: Sequence[str], settings: Sequence[str]) -> list[str]:
    """The ids of llama.cpp's runs of architectures."""
    archs = [a for a in runnable() if any(fnmatchcase(a, g) for g in globs)]
    if globs and not archs:
        raise UsageError(f"switch: no architecture fits {', '.join(globs)}; conform capture --list shows them")
    keys = "+".join(text.replace("=", ":", 1) for text in settings)
    return [arch.id_of(a, run, set=keys) for a in archs for run in arch.RUNS]


def coverage(results: Sequence[Result]) -> str:
    """How many cases were compared with and without the variable, and how many of them have several streams."""
    compared = [r for r in results if r.metrics.get(COMPARED)]
    streams = sum(bool(r.metrics.get(STREAMS)) for r in results)
    said = f"compared with and without it: {len(compared)} of {len(results)} cases"
    if streams:
        n = sum(bool(r.metrics.get(STREAMS)) for r in compared)
        said += f"; of {streams} with several streams (ne[3] > 1): {n or 'none'}"
    return said
