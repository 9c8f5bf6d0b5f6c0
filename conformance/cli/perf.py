"""`conform perf`: time backends. A case is timed only once it has passed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import click
from click.core import ParameterSource

from conformance.backend.registry import Spec
from conformance.case.case import Case
from conformance.case.strict import read_text
from conformance.ggml.errors import ConformanceError, UsageError
from conformance.ggml.text import printable
from conformance.judge.evidence import Error
from conformance.judge.outcome import Why, judge
from conformance.judge.verdict import Missing, MissingCause, Request, Result, Verdict
from conformance.perf import gates as gating
from conformance.perf.bench import Bench, Row
from conformance.perf.calibrate import MARGIN, SLOWDOWNS, calibrate, record, result_of
from conformance.perf.count import check_callgrind
from conformance.perf.gates import BUDGET, COUNT_LIMIT, Gate, Judge
from conformance.perf.statistics import REGRESSED, UNDECIDED
from conformance.perf.units import FAMILY, MODEL_ROUNDS, ROUNDS, Unit, of_model, units, whole
from conformance.report import runfile
from conformance.report.progress import Progress, since
from conformance.report.runfile import write_json
from conformance.report.runs import read_runs
from conformance.run.isolation.isolate import Isolation, Workers
from conformance.run.live import LIVE
from conformance.run.runner import Runner
from conformance.run.session.environment import environment
from conformance.run.session.select import available, build, expect_backend, record_of
from conformance.suite import FAMILIES
from conformance.suite.family import Level

from . import options
from .cases import read_cases
from .options import ExistingFile, backend_option, isolation, json_option, smoke_option, specs_here
from .output import Group, leave, line, table

AA_BACKENDS = ("ggml", "openvino-stateful?threads=1")
AA_UNITS = ("op/MUL_MAT.q4_0@n=1", "prefill@n=32", "decode@past=512")
BOOKKEEPING = ("Const", "Input", "Output", "MemoryInput", "MemoryOutput", "Reshape")
"""Types of layers that compute nothing."""
COLUMNS = ("unit", "backend", "verdict", "rate", "95 % interval", "rounds", "compiles", "MiB", "why not timed")
COUNT_COLUMNS = ("unit", "backend", "verdict", "instructions", "D1 misses", "LL misses", "rate", "why not counted")
MODEL, CHECKED = "model", 8
"""Live family of model files; tokens of an answer that a backend must get right to be timed."""
SHORT = {"prompt": "-p", "decode": "-n"}
LATE = "not started (--budget)"
NOT_MEASURED = {MissingCause.INTERRUPTED: "interrupted", MissingCause.TIME_LIMIT: LATE}
"""Cause of a unit without a result -> its text."""
_MIB = 2**20


class _Perf(Group):
    """Group of commands on speed; the error for a removed command names its replacement."""

    RENAMED: ClassVar[dict[str, str]] = {
        "aa": "calibrate",
        "case": "run CASE",
        "compare": "run --against BACKEND",
        "units": "run --list",
    }

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; None if there is none."""
        if cmd_name in self.RENAMED:
            raise click.UsageError(f"conform perf {cmd_name} is gone: use conform perf {self.RENAMED[cmd_name]}", ctx)
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Perf)
def perf() -> None:
    """Time backends and judge their speed. A case is timed only once it has passed."""


@perf.command("run")
@click.argument("what", nargs=-1, metavar="[UNIT|CASE|FILE]…", shell_complete=options.complete_case)
@backend_option
@smoke_option
@options.ROUNDS.click()
@options.AGAINST.click(help="Backend or record to compare with; fail if slower.")
@click.option("--count", "counted", is_flag=True, help="Also count instructions and cache misses, and judge by them.")
@click.option("--list", "listing", is_flag=True, help="List work units and their cases, and exit.")
@click.option("--model", type=ExistingFile, metavar="FILE", help="Measure this GGUF model as llama-bench does.")
@click.option("-p", "prompt", type=click.IntRange(0, 1 << 17), metavar="N", default=512, show_default=True,
              help="Tokens of the prompt (pp); 0: none.")  # fmt: skip
@click.option("-n", "decode", type=click.IntRange(0, 1 << 17), metavar="N", default=128, show_default=True,
              help="Tokens that are decoded one by one (tg); 0: none.")  # fmt: skip
@options.BUDGET.click()
@json_option
@isolation
def perf_run(
    what: Sequence[str],
    backends: Sequence[str],
    level: Level,
    rounds: int | None,
    against: str | None,
    counted: bool,
    listing: bool,
    model: Path | None,
    prompt: int,
    decode: int,
    budget: float | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Measure work units, all steps of a case, or a model, on backends that take turns.

    UNIT is a glob over the units of the level (default: all), CASE an id, FILE a case file. ggml computes with one
    thread by default (`ggml?threads=2` changes it), OpenVINO with one per core.

    With --against BACKEND each unit takes up to 90 s. With --count instructions are compared instead of times, exactly:
    valgrind runs each backend once more, on a simulated processor.

    With --model the graphs that llama.cpp builds for FILE are timed, once `check-model` finds the backend right: a
    prompt of -p tokens, and -n tokens one by one, each on an empty cache.

    Exit codes as for `conform run`; 5 also if the machine was too noisy to decide.
    """
    sizes = _sizes(model, what, prompt, decode)
    chosen, cases = _units(level, what) if model is None else (_units_of(model, sizes), {})
    if listing:
        for u in chosen:
            click.echo("\t".join(map(printable, (u.name, f"{u.work} {u.of}", u.case_id))))
        return
    ends = time.monotonic() + (inf if budget is None else budget)
    specs, lacking = specs_here(backends, isolation)
    graphs: dict[Unit, Case] = {} if model is None else dict(zip(chosen, _graphs(model, sizes), strict=True))
    base = _Base.of(against, specs, isolation, counted=counted)
    answers: list[gating.Answer] = []
    left = [(u, s) for u in chosen for s in specs]
    cause = MissingCause.LOST
    with closing(Runner(isolation=isolation)) as runner:
        judge_ = Judge(Bench(runner, isolation, cases, graphs), BUDGET)
        enough = rounds or (MODEL_ROUNDS if model else ROUNDS[level])
        try:
            for unit, found in base.measure_all(judge_, chosen, specs, enough, ends):
                answers += found
                left = [(u, s) for u, s in left if u is not unit]
            cause = MissingCause.TIME_LIMIT
        except KeyboardInterrupt:
            cause = MissingCause.INTERRUPTED
        finally:
            why = NOT_MEASURED.get(cause, "the run ended before it")
            missing = [*(Missing(str(s), u.id, why, cause) for u, s in left), *_missing(answers)]
            results = [*(r.result for r in judge_.rows.values()), *_results(answers)]
            if json_path:
                _write(json_path, results, missing, lacking, specs, level, what)
    rows = list(judge_.rows.values())
    if counted:
        table([_counts(r) for r in rows], COUNT_COLUMNS, disable_numparse=True, maxcolwidths=[None] * 7 + [50])
    else:
        table([_cells(r) for r in rows], COLUMNS, disable_numparse=True, maxcolwidths=[None] * 8 + [50])
    for row in rows:
        if row.unit.name == "case" and (kernels := _kernels(row.result)):
            line(f"{row.backend}: {kernels}")
    _show(answers)
    for name, reason in lacking.items():
        line(f"{name}: not available: {reason}")
    leave(judge(results, missing))


def _sizes(model: Path | None, what: Sequence[str], prompt: int, decode: int) -> list[tuple[int, int]]:
    """Return prompt and tokens of each unit of a model; UsageError for a wrong combination."""
    source = click.get_current_context().get_parameter_source
    if model is None:
        given = [name for name in ("prompt", "decode") if source(name) is not ParameterSource.DEFAULT]
        if given:
            raise UsageError(
                f"perf run: {' and '.join(SHORT[name] for name in given)}: --model FILE expected beside it"
            )
        return []
    if what:
        raise UsageError(f"perf run --model {model}: no units or cases expected, {what[0]!r} found")
    sizes = [size for size in ((prompt, 0), (0, decode)) if any(size)]
    if not sizes:
        raise UsageError("perf run: -p 0 -n 0: at least one number above 0 expected")
    return sizes


def _units_of(model: Path, sizes: Sequence[tuple[int, int]]) -> list[Unit]:
    case_id = f"{MODEL}/{quote(model.as_posix(), safe='/:', errors='surrogateescape')}-decode={CHECKED}@0"
    return [of_model(case_id, model.stem, *size) for size in sizes]


def _graphs(model: Path, sizes: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """Let llama.cpp record what is timed of a model; UsageError if it cannot load it."""
    family = LIVE[MODEL]
    assert family.recorded is not None  # the family of models has it
    for prompt, decode in sizes:
        with Progress().of(since(f"llama.cpp runs {model.name}")):
            found = family.recorded(model, prompt, decode)
        yield found


@dataclass(frozen=True, slots=True)
class _Base:
    """The baseline of a comparison of times or counts."""

    name: str = ""
    spec: Spec | None = None
    then: Mapping[tuple[str, str], Result] | None = None
    """Case and backend -> result of an earlier record."""
    counted: bool = False
    """True to count and judge by counts."""

    @classmethod
    def of(cls, against: str | None, specs: Sequence[Spec], isolation: Isolation, *, counted: bool) -> _Base:
        """Read the record that --against names, or find the backend.

        UsageError for one of `specs` or another machine's record, UnavailableError if the backend, or the tool that
        counts, is not available.
        """
        if counted:
            check_callgrind()
        if against is None:
            return cls(counted=counted)
        if not Path(against).is_file():
            expect_backend("--against", against)
            (spec,), _ = specs_here([against], isolation)
            if spec in specs:
                raise UsageError(f"--against {against}: another backend expected")
            return cls(str(spec), spec, counted=counted)
        runs = read_runs([Path(against)])
        machine = str(environment()["machine"])
        if any(d.machine != machine for d in runs.documents):
            raise UsageError(
                f"--against {against}: a record of this machine ({machine}) expected, of another one found"
            )
        then = {(r.value.case, r.value.backend): r.value for r in runs.results}
        return cls(Path(against).name, None, then, counted)

    def measure_all(
        self, judge_: Judge, chosen: Sequence[Unit], specs: Sequence[Spec], rounds: int, ends: float
    ) -> Iterator[tuple[Unit, list[gating.Answer]]]:
        """Measure units, start none after `ends`, and print what each gave at once."""
        for unit in chosen:
            if time.monotonic() > ends:
                return
            line(f"{unit.name} …", err=True)
            yield unit, self.measure(judge_, unit, specs, rounds)
            for row in (r for r in judge_.rows.values() if r.unit is unit):
                line("  ".join(("", *_cells(row)[1:5])), err=True)

    def measure(self, judge_: Judge, unit: Unit, specs: Sequence[Spec], rounds: int) -> list[gating.Answer]:
        """Measure a unit on all backends, and compare its time or counts."""
        if self.counted:
            return self._count(judge_, unit, specs, rounds)
        gates = [
            Gate(
                f"{unit.name} on {s} as fast as {self.name}", "ratio", unit, s, MARGIN, against=self.spec or "baseline"
            )
            for s in specs
            if self.name and unit.timed
        ]
        if self.spec is not None and gates:
            return list(map(judge_.answer, gates))
        enough = rounds if self.then is None else max(rounds, ROUNDS["full"])
        judge_.rows.update({(unit, r.backend): r for r in judge_.bench.rows(unit, specs, lambda r: r.more(enough))})
        then = self.then or {}
        return [gating.judge_record(g, judge_.rows[unit, g.backend].result, then) for g in gates]

    def _count(self, judge_: Judge, unit: Unit, specs: Sequence[Spec], rounds: int) -> list[gating.Answer]:
        every = [*specs, *([self.spec] if self.spec is not None else [])]
        rows = {r.backend: r for r in judge_.bench.rows(unit, every, lambda r: r.more(rounds))}
        for row in rows.values():
            judge_.bench.count(row)
        judge_.rows.update({(unit, s): r for s, r in rows.items()})
        if not self.name or not unit.steps:
            return []
        answers: list[gating.Answer] = []
        for s in specs:
            gate = Gate(f"{unit.name} on {s} as few instructions as {self.name}", "ratio", unit, s, COUNT_LIMIT,
                        against="baseline")  # fmt: skip
            base = None if self.spec is None else rows[self.spec]
            then = (self.then or {}).get((unit.id, str(s))) if base is None else base.result
            grown = None
            if base is not None and (now := rows[s].counts) and base.counts:
                grown = now.grown(base.counts)
            answers.append(gating.judge_counts(gate, rows[s].result, then, grown))
        return answers


def _results(answers: Sequence[gating.Answer]) -> list[Result]:
    return [a for a in answers if isinstance(a, Result)]


def _missing(answers: Sequence[gating.Answer]) -> list[Missing]:
    return [a for a in answers if isinstance(a, Missing)]


def _units(level: Level, words: Sequence[str]) -> tuple[list[Unit], dict[str, Case]]:
    """Return the chosen units, and the cases of files by their ids."""
    cases: dict[str, Case] = {}
    found: dict[Unit, None] = {}
    for word in words or ["*"]:
        if Path(word).is_file() or word.endswith(".gguf"):
            own = read_cases(_existing(word))
            cases |= {c.id: c for c in own}
        elif word.partition("/")[0] in FAMILIES:
            own = [build(word)]
        else:
            found |= dict.fromkeys(units(level, [word]))
            continue
        for case in own:
            found |= dict.fromkeys(whole(case.id, len(case.steps)))
    return list(found), cases


def _existing(word: str) -> Path:
    if not Path(word).exists():
        raise UsageError(f"{word}: no such file; a unit, the id of a case, or a case file expected")
    return Path(word)


def _write(
    path: Path,
    results: Sequence[Result],
    missing: Sequence[Missing],
    lacking: Mapping[str, str],
    specs: Iterable[Spec],
    level: Level,
    globs: Sequence[str],
) -> None:
    """Write the record of a run of `perf`."""
    asked: dict[str, list[str]] = {}
    for backend, case in [*((r.backend, r.case) for r in results), *((m.backend, m.case) for m in missing)]:
        asked.setdefault(backend, []).append(case)
    made = runfile.record(results, dict(lacking), asked=Request(asked), missing=missing)
    selection = record_of(dict.fromkeys(specs, level), [FAMILY], globs, None)
    write_json(path, {**made, "selection": selection})


def _show(answers: Sequence[gating.Answer]) -> None:
    """Print the verdicts of gates, and how many there are of each."""
    if not answers:
        return
    words = [str(a.verdict) if isinstance(a, Result) else "undecided" for a in answers]
    rows = [
        (a.case.partition("/")[2], word, a.backend, a.detail if isinstance(a, Result) else a.reason)
        for a, word in zip(answers, words, strict=True)
    ]
    table(rows, ["gate", "verdict", "backend", "reason"], maxcolwidths=[28, None, None, 72])
    line(", ".join(f"{n} {word}" for word, n in Counter(words).items()))


def _cells(row: Row) -> Sequence[str]:
    """Format a row under `COLUMNS`; an unknown number is a dash, never a 0."""
    m = row.result.metrics
    of = f" {row.unit.of}/s"
    low, high = m.get("seconds.low"), m.get("seconds.high")
    held = [f"{m[k] / _MIB:.1f}" for k in ("memory.weights", "memory.peak") if k in m]
    return (
        row.unit.name,
        str(row.backend),
        str(row.result.verdict),
        "–" if row.rate is None else f"{row.rate:.4g}{of}",
        "–" if low is None or high is None else f"{row.unit.work / high:.4g} to {row.unit.work / low:.4g}",
        str(len(row.seconds)),
        f"{m['compiles']:g} (+{m.get('timed.compiles', 0):g})" if "compiles" in m else "–",
        ", at most ".join(held),
        "" if row.result.verdict is Verdict.PASS else row.result.detail,
    )


def _counts(row: Row) -> Sequence[str]:
    """Format a row under `COUNT_COLUMNS`, by token or step; an unknown number is a dash."""
    m, work = row.result.metrics, row.unit.work / row.unit.repeat
    told = [f"{m[k] / work:,.0f}" if k in m else "–" for k in ("instructions", "misses.d1", "misses.ll")]
    return (
        row.unit.name,
        str(row.backend),
        str(row.result.verdict),
        f"{told[0]}/{row.unit.of[:-1]}" if row.counts else "–",
        *told[1:],
        "–" if row.rate is None else f"{row.rate:.4g} {row.unit.of}/s",
        "" if row.result.verdict is Verdict.PASS else row.result.detail,
    )


def _kernels(result: Result) -> str:
    """List the kernels that the nodes of a case became, most frequent first."""
    found = {k.partition(".")[2]: n for k, n in result.metrics.items() if k.startswith("kernels.")}
    told = sorted(((n, k) for k, n in found.items() if k not in BOOKKEEPING), key=lambda x: (-x[0], x[1]))
    return ", ".join(f"{n:g} {k}" for n, k in told)


@perf.command()
@click.argument("path", type=ExistingFile, required=False, metavar="[FILE.toml]")
@click.option("--gate", "gate_globs", multiple=True, metavar="GLOB", help="Names of gates, repeatable; default: all.")
@options.AGAINST.click(help="Baseline backend of the gates that have one.", metavar="NAME")
@options.config_option
@options.BUDGET.click()
@json_option
@isolation
def gate(
    path: Path | None,
    gate_globs: Sequence[str],
    against: str | None,
    budget: float | None,
    json_path: Path | None,
    isolation: Isolation,
) -> None:
    """Measure and judge the gates of FILE (default: those of this package).

    Exit codes: 0 every gate passed, 1 one failed, 2 bad input, 3 no gate was run, 5 one is undecided because the
    machine is too noisy, or did not start in time: see docs/exit-codes.md.
    """
    where = path or gating.SHIPPED
    request = gating.loads(read_text(where), str(where))
    chosen = request.matching(gate_globs)
    base = None if against is None else specs_here([against], isolation)[0][0]
    specs = [s for g in chosen for s in (g.backend, g.against) if isinstance(s, Spec)]
    _, absent = available(list(dict.fromkeys(specs)), Workers(isolation))
    lacking = {s: str(why) for s, why in absent.items()}
    ends = time.monotonic() + (inf if budget is None else budget)
    answers: list[gating.Answer] = []
    with closing(Runner(isolation=isolation)) as runner:
        judge_ = Judge(Bench(runner, isolation), request.budget, lacking, base, warn=partial(line, err=True))
        for g in chosen:
            if time.monotonic() > ends:
                answers.append(Missing(str(g.backend), g.id, LATE, MissingCause.TIME_LIMIT))
                continue
            line(f"{g.name} …", err=True)
            answers.append(judge_.answer(g))
    results, missing = _results(answers), _missing(answers)
    if json_path:
        measured = [row.result for row in judge_.rows.values()]
        unavailable = {str(s): why for s, why in lacking.items()}
        _write(json_path, [*measured, *results], missing, unavailable, specs, request.level, gate_globs)
    _show(answers)
    outcome = judge(results, missing)
    leave(outcome.without(Why.UNEXECUTED) if missing else outcome)


@perf.command("calibrate")
@click.argument("what", nargs=-1, metavar="[UNIT]…")
@backend_option
@smoke_option
@click.option("--seconds", type=click.FloatRange(min=1), default=100.0, show_default=True,
              help="Measuring time per unit and backend.")  # fmt: skip
@click.option(
    "--limit", type=click.FloatRange(min=1), default=MARGIN, show_default=True, help="Time ratio that gates allow."
)
@options.BUDGET.click()
@json_option
def perf_calibrate(
    what: Sequence[str],
    backends: Sequence[str],
    level: Level,
    seconds: float,
    limit: float,
    budget: float | None,
    json_path: Path | None,
) -> None:
    """Measure how often gates are right on this machine, for slowdowns of 0 to 20 %.

    Without UNIT and --backend: six units, in about 15 minutes. Exit code 1: gates are not reliable here.
    """
    specs, lacking = specs_here(backends) if backends else _available(AA_BACKENDS)
    ends = time.monotonic() + (inf if budget is None else budget)
    results: list[Result] = []
    missing: list[Missing] = []
    with closing(Runner()) as runner:
        bench = Bench(runner)
        for unit in units(level, what or AA_UNITS):
            for spec in specs:
                name = f"calibrate/{unit.name}/{unit.model}@1"
                if time.monotonic() > ends:
                    missing.append(Missing(str(spec), name, LATE, MissingCause.TIME_LIMIT))
                    continue
                line(f"{unit.name} on {spec} …", err=True)
                try:
                    found = calibrate(record(bench, unit, spec, seconds), limit, BUDGET)
                    results.append(result_of(unit, spec, found))
                except ConformanceError as e:
                    results.append(Result(name, str(spec), Verdict.UNSUPPORTED, error=Error(str(e))))
    if json_path:
        _write(json_path, results, missing, lacking, specs, level, what)
    line(f"Gates that allow {limit:g} × the time, in at most {BUDGET:g} s each: how often they report a regression")
    slow = [f"{s:.0%} slower" for s in SLOWDOWNS]
    columns = [
        "unit",
        "backend",
        "lives",
        "A/A",
        *slow,
        "A/A undecided",
        "s per A/A",
        "found in 95 % from",
        "not reliable",
    ]
    table([(r.case.split("/", 1)[1], r.backend, *_calibrated(r)) for r in results], columns, disable_numparse=True)
    for name, why in lacking.items():
        line(f"{name}: not available: {why}")
    leave(judge(results, missing))


def _available(names: Sequence[str]) -> tuple[list[Spec], dict[str, str]]:
    specs, lacking = available(list(map(Spec.parse, names)))
    return specs, {str(s): str(why) for s, why in lacking.items()}


def _calibrated(result: Result) -> Iterable[str]:
    m = result.metrics
    if not m:
        return ["–"] * 8 + [result.detail]
    rates = [f"{100 * m[f'{REGRESSED}.{100 * s:g}']:.1f} %" for s in (0.0, *SLOWDOWNS)]
    found = f"{m['detectable']:.1f} %" if "detectable" in m else "–"
    return [
        f"{m['lives']:g}",
        *rates,
        f"{100 * m[f'{UNDECIDED}.0']:.1f} %",
        f"{m['seconds']:.0f}",
        found,
        result.detail,
    ]
