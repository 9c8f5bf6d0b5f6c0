"""`conform perf gate`, `compare` and `aa`: judging times, and how far the judgement can be trusted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.ggml.errors import ConformanceError, UnavailableError
from conformance.perf import gates as gating
from conformance.perf.bench import Bench, document
from conformance.perf.compare import BASE, HEAD, Pair, pair
from conformance.perf.gates import BASELINE, BUDGET, Answer, Gate, Judge, exit_code
from conformance.perf.statistics import FINE, REGRESSED, UNDECIDED
from conformance.perf.trust import (
    MARGIN,
    SAME,
    SLOWDOWNS,
    TRIALS,
    Tally,
    Trust,
    record,
    shortcomings,
    trust,
)
from conformance.perf.units import units
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation
from conformance.run.runner import Runner
from conformance.run.session.environment import header
from conformance.run.session.select import available, parse_specs
from conformance.suite.family import Level

from .options import ExistingFile, backend_option, config_option, isolation, json_option, level_option
from .perf import unit_option

COLUMNS = ("gate", "answer", "unit", "backend", "reason")
WIDTHS = (28, None, None, None, 72)
AA_BACKENDS = ("ggml", "openvino-stateful")
AA_UNITS = ("op/MUL_MAT.q4_0@n=1", "prefill@n=32", "decode@past=512")

Folder = click.Path(path_type=Path, exists=True, file_okay=False)
budget_option = click.option(
    "--budget", type=click.FloatRange(min=1), metavar="SECONDS", help=f"Of measuring per gate; default: {BUDGET:g}."
)


@click.command("gate")
@click.argument("path", type=ExistingFile, required=False, metavar="[FILE.toml]")
@click.option("--gate", "globs", multiple=True, metavar="GLOB", help="Gates, repeatable; default: all.")
@click.option("--base", type=Folder, metavar="VENV", help="What gates against the baseline are held against.")
@config_option
@budget_option
@json_option
@isolation
def gate(
    path: Path | None,
    globs: Sequence[str],
    base: Path | None,
    budget: float | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Measure what FILE demands (default: what comes along), and say of each gate: fine, regressed, undecided or
    not run.

    Exit codes: 0 no gate regressed, 1 one did or the case behind it failed, 2 bad input, 3 no gate was run.
    """
    asked = gating.load(path or gating.SHIPPED)
    chosen = asked.matching(globs)
    specs = [s for g in chosen for s in (g.backend, g.against) if isinstance(s, Spec)]
    _, lacking = available(list(dict.fromkeys(specs)), isolation)
    runner = Runner(isolation=isolation)
    builds: Pair | None = None
    answers: list[Answer] = []
    try:
        if base is not None and any(g.against == BASELINE for g in chosen):
            builds = pair(base, Path(sys.prefix), asked.level)
        judge = Judge(Bench(runner, isolation), budget or asked.budget, lacking, builds)
        for g in chosen:
            click.echo(f"{g.name} …", err=True)
            answers.append(judge.answer(g))
    finally:
        runner.close()
        if builds:
            builds.close()
    entries: list[JSON] = [a.to_json() for a in answers]
    if json_path:
        rows = list(judge.rows.values())
        unavailable = {str(s): why for s, why in lacking.items()}
        write_json(json_path, {**document(rows, asked.level, unavailable, entries), **_base(builds)})
    _show(answers)
    sys.exit(exit_code(answers))


@click.command("compare")
@click.argument("base", type=Folder, metavar="BASE_VENV")
@click.argument("head", type=Folder, metavar="HEAD_VENV")
@backend_option
@level_option
@unit_option
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), default=MARGIN, show_default=True, help="Head over base."
)
@budget_option
@click.option(
    "--isolate/--no-isolate",
    default=True,
    show_default=True,
    help="Start every backend in a process of its own each time, or in that of its build.",
)
@json_option
def compare(
    base: Path,
    head: Path,
    backends: Sequence[str],
    level: Level,
    globs: Sequence[str],
    limit: float,
    budget: float | None,
    isolate: bool,
    json_path: Path | None,
) -> None:
    """Measure two installed builds of this package in turns, and say of each unit whether head is slower than base.

    Each is a virtual environment in which ggml-conformance and its backends are installed. Exit codes as for `gate`.
    """
    specs, lacking = available(parse_specs(backends))
    if lacking and backends:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    listed = [u for u in units(level, globs) if u.timed]
    builds = pair(base, head, level, isolate=isolate)
    runner = Runner()
    answers = []
    try:
        for side, build in builds.builds.items():
            click.echo(f"{side}: ggml-conformance {build.about['version']}, Python {build.about['python']}")
        judge = Judge(Bench(runner), budget or BUDGET, lacking, builds)
        for unit in listed:
            for spec in specs:
                click.echo(f"{unit.name} on {spec} …", err=True)
                name = f"{unit.name} on {spec}"
                answers.append(judge.answer(Gate(name, "ratio", unit, spec, limit, against="baseline")))
    finally:
        builds.close()
        runner.close()
    if json_path:
        entries: list[JSON] = [a.to_json() for a in answers]
        unavailable = {str(s): why for s, why in lacking.items()}
        write_json(json_path, {**document([], level, unavailable, entries), **_base(builds)})
    _show(answers)
    sys.exit(exit_code(answers))


def _base(builds: Pair | None) -> dict[str, JSON]:
    """What the two builds are, and their seconds."""
    if builds is None:
        return {}
    measured: list[JSON] = [
        {"unit": unit.name, "backend": str(spec), BASE: seconds[BASE], HEAD: seconds[HEAD]}
        for (unit, spec), seconds in builds.seconds.items()
    ]
    about: dict[str, JSON] = {side: dict(build.about) for side, build in builds.builds.items()}
    return {"builds": {**about, "measured": measured}}


def _show(answers: Sequence[Answer]) -> None:
    rows = [(a.gate.name, a.answer, a.gate.unit.name, str(a.gate.backend), a.reason) for a in answers]
    click.echo(tabulate(rows, COLUMNS, maxcolwidths=list(WIDTHS)))
    said = [a.answer for a in answers]
    click.echo(", ".join(f"{said.count(x)} {x}" for x in (FINE, REGRESSED, UNDECIDED, gating.NOT_RUN)))


@click.command("aa")
@backend_option
@level_option
@unit_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=100.0,
    show_default=True,
    help="Of recording per unit and backend.",
)
@click.option("--trials", type=click.IntRange(min=1), default=TRIALS, show_default=True, help="Of A against A.")
@click.option("--limit", type=click.FloatRange(min=1), default=MARGIN, show_default=True, help="Of the gates tried.")
@budget_option
@json_option
def aa(
    backends: Sequence[str],
    level: Level,
    globs: Sequence[str],
    seconds: float,
    trials: int,
    limit: float,
    budget: float | None,
    json_path: Path | None,
) -> None:
    """Measure A against A and against itself slowed by 3, 5, 10 and 20 %, and print how often gates are right here.

    Without --backend and --unit: six units, in about 15 minutes. Exit code 1 where what is demanded of gates does not
    hold.
    """
    specs, lacking = available(parse_specs(backends or AA_BACKENDS))
    if lacking and backends:
        raise UnavailableError("; ".join(f"{s}: not available: {why}" for s, why in lacking.items()))
    runner = Runner()
    bench = Bench(runner)
    found: list[Trust] = []
    missed: dict[str, str] = {str(s): f"not available: {why}" for s, why in lacking.items()}
    try:
        for unit in units(level, globs or AA_UNITS):
            for spec in specs:
                click.echo(f"{unit.name} on {spec} …", err=True)
                try:
                    found.append(trust(record(bench, unit, spec, seconds), limit, budget or BUDGET, trials))
                except ConformanceError as e:
                    missed[f"{unit.name} on {spec}"] = str(e)
    finally:
        runner.close()
    if json_path:
        write_json(json_path, {**header("perf"), "units": [], "gates": [], "trust": [t.to_json() for t in found]})
    _show_trust(found, limit, budget or BUDGET)
    for name, why in missed.items():
        click.echo(f"not run: {name}: {why}")
    broken = [
        f"does not hold: {t.recording.unit} on {t.recording.backend}: {x}" for t in found for x in shortcomings(t)
    ]
    for line in broken:
        click.echo(line)
    sys.exit(1 if broken else 0 if found else 3)


def _show_trust(found: Sequence[Trust], limit: float, budget: float) -> None:
    slow = [f"{s:.0%} slower" for s in SLOWDOWNS]
    click.echo(
        f"Gates that allow {limit:g} × the time, in at most {budget:g} s of measuring: how often they say regressed"
    )
    columns = (
        "unit",
        "backend",
        "lives",
        "A/A",
        *slow,
        "A/A undecided",
        "s per A/A",
        "95 % found from",
        "as recorded, A/A",
    )
    click.echo(tabulate([_line(t) for t in found], columns, disable_numparse=True))
    click.echo("\nWhat the slowed ones really lost")
    lost = [(t.recording.unit, t.recording.backend, *(f"{x:.1%}" for x in t.recording.lost.values())) for t in found]
    click.echo(tabulate(lost, ("unit", "backend", *slow), disable_numparse=True))


def _line(t: Trust) -> Sequence[str]:
    i = t.once.interval
    return (
        t.recording.unit,
        t.recording.backend,
        str(len(t.recording.lives[SAME])),
        _percent(t.same.answers[REGRESSED], t.same),
        *(_percent(x.answers[REGRESSED], x) for x in t.slower.values()),
        _percent(t.same.answers[UNDECIDED], t.same),
        f"{sum(t.same.seconds) / len(t.same.seconds):.0f}",
        "–" if t.detectable is None else f"{t.detectable:.1%}",
        f"{t.once.answer}: {i.estimate:.3f} ({i.low:.3f} to {i.high:.3f})",
    )


def _percent(n: int, of: Tally) -> str:
    return f"{100 * n / of.trials:.1f} %"
