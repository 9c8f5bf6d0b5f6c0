"""`conform perf`: how fast backends are, and whether that is within limits.

`run` measures; `gate`, `compare` and `aa` judge.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from inspect import signature
from pathlib import Path
from typing import NoReturn

import click

from conformance.backend.registry import Spec, adapter, resolve
from conformance.case.case import JSON
from conformance.case.strict import read_text
from conformance.ggml.errors import ConformanceError
from conformance.ggml.text import printable
from conformance.judge.outcome import Outcome, Why
from conformance.perf import gates as gating
from conformance.perf.bench import CASE_COLUMNS, COLUMNS, Bench, Row, case_cells, cells, document
from conformance.perf.bench import outcome as outcome_of_units
from conformance.perf.compare import BASE, HEAD, Pair
from conformance.perf.gates import BASELINE, BUDGET, Answer, Gate, Judge
from conformance.perf.measure import Rounds
from conformance.perf.statistics import FINE, REGRESSED, UNDECIDED
from conformance.perf.trust import MARGIN, SAME, SLOWDOWNS, TRIALS, Tally, Trust, record, shortcomings, trust
from conformance.perf.units import ROUNDS, units, whole
from conformance.report.runfile import write_json
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.runner import Runner
from conformance.run.session.environment import header
from conformance.run.session.select import available
from conformance.suite.family import Level

from . import options
from .options import (
    ExistingFile,
    ExistingFolder,
    backend_option,
    complete_case,
    isolation,
    json_option,
    smoke_option,
    specs_here,
)
from .output import Group, leave, line, table

FUSING = ("openvino-stateless", "openvino-stateful")
"""Backends of `perf case` where none is named: those that say which kernels ran."""
AA_BACKENDS = ("ggml", "openvino-stateful")
AA_UNITS = ("op/MUL_MAT.q4_0@n=1", "prefill@n=32", "decode@past=512")

unit_option = options.UNIT.click()
budget_option = click.option(
    "--budget", type=click.FloatRange(min=1), metavar="SECONDS", help=f"Of measuring per gate; default: {BUDGET:g}."
)


@click.group(cls=Group)
def perf() -> None:
    """How fast backends are. A case is timed only once it has passed."""


@perf.command("run")
@backend_option
@smoke_option
@unit_option
@options.ROUNDS.click()
@json_option
@isolation
def perf_run(
    backends: Sequence[str],
    level: Level,
    unit_globs: Sequence[str],
    rounds: int | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Measure work units on backends that take turns: each measures once per round, another begins each round.

    ggml computes with one thread unless told otherwise (`ggml?threads=2`), OpenVINO with as many as there are cores.
    Exit codes are `conform run`'s, of the cases behind the units; 1 also where one that passed failed when measured.
    """
    chosen = units(level, unit_globs)
    specs, lacking = specs_here(backends, isolation)
    rows: list[Row] = []
    interrupted = Outcome()

    def buy(r: Rounds) -> None:
        r.more(rounds or ROUNDS[level])

    bar = click.progressbar(chosen, label="units", file=sys.stderr, hidden=not sys.stderr.isatty())
    try:
        with closing(Runner(isolation=isolation)) as runner, bar:
            bench = Bench(runner, isolation)
            for unit in bar:
                rows += bench.rows(unit, specs, buy)
    except KeyboardInterrupt:
        interrupted = Outcome.of(Why.INTERRUPTED, ["interrupted; what was measured is recorded"])
    finally:
        if json_path:
            write_json(json_path, document(rows, level, lacking))
    table([cells(r) for r in rows], COLUMNS, disable_numparse=True, maxcolwidths=[None] * 10 + [50])
    for name, why in lacking.items():
        line(f"{name}: not available: {why}")
    leave(outcome_of_units(rows) + interrupted)


@perf.command("case")
@click.argument("case_id", metavar="CASE", shell_complete=complete_case)
@backend_option
@options.ROUNDS.click()
@json_option
@isolation
def perf_case(
    case_id: str, backends: Sequence[str], rounds: int | None, json_path: Path | None, isolation: Isolation
) -> None:
    """Time a case on backends: which kernels its nodes became, static against dynamic, the peak of memory.

    A backend with an option `dynamic` is measured with `dynamic=off`, too: one model for each graph, every size known.
    """
    specs, lacking = specs_here(backends or FUSING, isolation)
    specs = list(dict.fromkeys(v for s in specs for v in _variants(s)))
    with closing(Runner(isolation=isolation)) as runner:
        unit = whole(case_id, len(runner.case(case_id).steps))
        bench = Bench(runner, isolation)
        rows = bench.rows(unit, specs, lambda r: r.more(rounds or ROUNDS["smoke"]))
        held = bench.rows(whole(case_id, unit.work, timed=False), specs, lambda _: None)
    if json_path:
        write_json(json_path, document([*rows, *held], "smoke", lacking))
    first = next((r.rate for r in rows if r.rate), None)
    table([case_cells(r, h, first) for r, h in zip(rows, held, strict=True)], CASE_COLUMNS, disable_numparse=True,
          maxcolwidths=[40, *[None] * 6, 60])  # fmt: skip
    leave(outcome_of_units(rows))


def _variants(spec: Spec) -> list[Spec]:
    """A backend, and the same with static models where it has that choice."""
    whole_spec = resolve(spec)
    try:
        choice = "dynamic" in signature(adapter(spec.name)).parameters and "dynamic" not in dict(whole_spec.options)
    except ConformanceError:
        choice = False
    return [spec, Spec(spec.name, (*spec.options, ("dynamic", "off")))] if choice else [spec]


@perf.command("units")
@smoke_option
@unit_option
def perf_units(level: Level, unit_globs: Sequence[str]) -> None:
    """List the work units of a level, and the case behind each."""
    for u in units(level, unit_globs):
        click.echo("\t".join(map(printable, (u.name, f"{u.work} {u.of}", u.case_id))))


@perf.command()
@click.argument("path", type=ExistingFile, required=False, metavar="[FILE.toml]")
@click.option("--gate", "gate_globs", multiple=True, metavar="GLOB", help="Gates, repeatable; default: all.")
@click.option("--base", type=ExistingFolder, metavar="VENV", help="What gates against the baseline are held against.")
@options.config_option
@budget_option
@json_option
@isolation
def gate(
    path: Path | None,
    gate_globs: Sequence[str],
    base: Path | None,
    budget: float | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Measure what FILE demands (default: what comes along), and say of each gate: fine, regressed, undecided or
    not run.

    Exit codes: 0 no gate regressed, 1 one did or the case behind it failed, 2 bad input, 3 no gate was run, 5 one is
    undecided: see docs/exit-codes.md.
    """
    where = path or gating.SHIPPED
    request = gating.loads(read_text(where), str(where))
    chosen = request.matching(gate_globs)
    specs = [s for g in chosen for s in (g.backend, g.against) if isinstance(s, Spec)]
    _, lacking = available(list(dict.fromkeys(specs)), Workers(isolation))
    builds: Pair | None = None
    answers: list[Answer] = []
    with ExitStack() as stack:
        runner = stack.enter_context(closing(Runner(isolation=isolation)))
        if base is not None and any(g.against == BASELINE for g in chosen):
            builds = stack.enter_context(closing(Pair(base, Path(sys.prefix), request.level)))
        judge = Judge(Bench(runner, isolation), budget or request.budget, lacking, builds)
        for g in chosen:
            line(f"{g.name} …", err=True)
            answers.append(judge.answer(g))
    if json_path:
        unavailable = {str(s): why for s, why in lacking.items()}
        entries = [a.to_json() for a in answers]
        write_json(
            json_path, {**document(list(judge.rows.values()), request.level, unavailable, entries), **_base(builds)}
        )
    _show(answers)


@perf.command()
@click.argument("base", type=ExistingFolder, metavar="BASE_VENV")
@click.argument("head", type=ExistingFolder, metavar="HEAD_VENV")
@backend_option
@smoke_option
@unit_option
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), default=MARGIN, show_default=True, help="Head over base."
)
@budget_option
@json_option
def compare(
    base: Path,
    head: Path,
    backends: Sequence[str],
    level: Level,
    unit_globs: Sequence[str],
    limit: float,
    budget: float | None,
    json_path: Path | None,
) -> None:
    """Measure two installed builds of this package in turns, and say of each unit whether head is slower than base.

    Each is a virtual environment in which ggml-conformance and its backends are installed. Exit codes as for `gate`.
    """
    specs, lacking = specs_here(backends)
    timed = [u for u in units(level, unit_globs) if u.timed]
    answers = []
    with closing(Pair(base, head, level)) as builds, closing(Runner()) as runner:
        for side, build in builds.builds.items():
            line(f"{side}: ggml-conformance {build.about['version']}, Python {build.about['python']}")
        judge = Judge(Bench(runner), budget or BUDGET, {}, builds)
        for unit in timed:
            for spec in specs:
                name = f"{unit.name} on {spec}"
                line(f"{name} …", err=True)
                answers.append(judge.answer(Gate(name, "ratio", unit, spec, limit, against="baseline")))
    if json_path:
        write_json(json_path, {**document([], level, lacking, [a.to_json() for a in answers]), **_base(builds)})
    _show(answers)


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


def _show(answers: list[Answer]) -> NoReturn:
    rows = [(a.gate.name, a.answer, a.gate.unit.name, a.gate.backend, a.reason) for a in answers]
    table(rows, ["gate", "answer", "unit", "backend", "reason"], maxcolwidths=[28, None, None, None, 72])
    words = [a.answer for a in answers]
    line(", ".join(f"{words.count(x)} {x}" for x in (FINE, REGRESSED, UNDECIDED, gating.NOT_RUN)))
    leave(gating.outcome(answers))


@perf.command()
@backend_option
@smoke_option
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
    unit_globs: Sequence[str],
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
    specs, lacking = specs_here(backends) if backends else available(list(map(Spec.parse, AA_BACKENDS)))
    trusts: list[Trust] = []
    missed = {str(s): f"not available: {why}" for s, why in lacking.items()}
    with closing(Runner()) as runner:
        bench = Bench(runner)
        for unit in units(level, unit_globs or AA_UNITS):
            for spec in specs:
                line(f"{unit.name} on {spec} …", err=True)
                try:
                    trusts.append(trust(record(bench, unit, spec, seconds), limit, budget or BUDGET, trials))
                except ConformanceError as e:
                    missed[f"{unit.name} on {spec}"] = str(e)
    if json_path:
        write_json(json_path, {**header("perf"), "units": [], "gates": [], "trust": [t.to_json() for t in trusts]})
    _show_trust(trusts, limit, budget or BUDGET)
    for name, why in missed.items():
        line(f"not run: {name}: {why}")
    broken = [(t.recording, x) for t in trusts for x in shortcomings(t)]
    leave(
        Outcome.of(Why.FAILED, [f"does not hold: {r.unit} on {r.backend}: {why}" for r, why in broken])
        + Outcome.of(Why.UNEXECUTED, [] if trusts else ["nothing was measured"])
    )


def _show_trust(trusts: Sequence[Trust], limit: float, budget: float) -> None:
    slow = [f"{s:.0%} slower" for s in SLOWDOWNS]
    names = [(t, (t.recording.unit, t.recording.backend)) for t in trusts]
    line(f"Gates that allow {limit:g} × the time, in at most {budget:g} s of measuring: how often they say regressed")
    columns = ["lives", "A/A", *slow, "A/A undecided", "s per A/A", "95 % found from", "as recorded, A/A"]
    table([(*name, *_line(t)) for t, name in names], ["unit", "backend", *columns], disable_numparse=True)
    line("")
    line("What the slowed ones really lost")
    lost = [(*name, *(f"{x:.1%}" for x in t.recording.lost.values())) for t, name in names]
    table(lost, ["unit", "backend", *slow], disable_numparse=True)


def _line(t: Trust) -> Sequence[str]:
    i = t.once.interval
    return (
        str(len(t.recording.lives[SAME])),
        _percent(t.same.answers[REGRESSED], t.same),
        *(_percent(x.answers[REGRESSED], x) for x in t.slower.values()),
        _percent(t.same.answers[UNDECIDED], t.same),
        f"{t.same.seconds:.0f}",
        "–" if t.detectable is None else f"{t.detectable:.1%}",
        f"{t.once.answer}: {i.estimate:.3f} ({i.low:.3f} to {i.high:.3f})",
    )


def _percent(n: int, of: Tally) -> str:
    return f"{100 * n / of.trials:.1f} %"
