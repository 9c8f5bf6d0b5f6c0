"""`conform campaign`: a run over many workers, and for days."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

import click

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.builds.build import probe
from conformance.campaign.campaign import Pool, device_of
from conformance.campaign.leg import Ended, Leg, limited, run_leg
from conformance.campaign.pool import Where, connect
from conformance.case.case import JSON
from conformance.causes.analyse import analyse
from conformance.causes.cause import Cause, assigned
from conformance.cli import options
from conformance.cli.options import chosen
from conformance.cli.output import cause_lines, fail, leave, line
from conformance.cli.run import color_option, sentence, table_of
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import FAILURES, Result, Totals, counted
from conformance.report.runfile import read_document
from conformance.report.runs import command
from conformance.run.session.select import LARGEST, fresh_ids, new_seed, parse_specs
from conformance.run.session.settings import Waiving, in_force, lines_of, report, today
from conformance.suite.family import LEVELS
from conformance.testrun import Chosen

ROUND = 2000
"""Fresh cases of each backend in one leg: the size of its files."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `2h` or `1.5d`; UsageError for another text."""
    found = _DURATION.fullmatch(text)
    if not found or not float(found[1]):
        raise UsageError(f"--for {text!r}: a time as 90s, 30m, 2h or 1.5d expected")
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.option("-o", "folder", type=options.Folder, metavar="DIR", default="campaign", show_default=True,
              help="Where everything goes; what was begun there with the same words goes on.")  # fmt: skip
@chosen(options.BACKEND, options.CONFIG, *options.SELECTION, options.ONLY_FRESH, options.WAIVERS, *options.LIMITS)
@click.option("--for", "seconds", type=duration, metavar="TIME",
              help="Then fresh random cases until TIME since the start is over: 90s, 30m, 2h, 1.5d.")  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Workers to start; default: one for each core."
)
@click.option("--scheduler", default="", metavar="ADDRESS", help="A Dask scheduler that has workers; none is started.")
@click.option(
    "--slurm", is_flag=True, help="Start the workers as jobs of Slurm, by dask-jobqueue and its jobqueue.yaml."
)
@click.option("--causes", "minutes", type=click.FloatRange(min=0), metavar="MINUTES",
              help="Group failures by cause, here, for so long per backend and leg at most.")  # fmt: skip
@click.option("--store", type=options.File, metavar="FILE", help="The history; default: history.sqlite in DIR.")
@color_option
def campaign(
    folder: Path,
    chosen: Chosen,
    seconds: float | None,
    workers: int | None,
    scheduler: str,
    slurm: bool,
    minutes: float | None,
    store: Path | None,
) -> None:
    """Run cases on many workers; each pair of backend and case gets one result, whatever dies meanwhile.

    Ctrl-C keeps what there is, and the same command goes on with it. DIR takes a run file for each leg, its journal,
    failing cases and the history. With --for, fresh cases follow in legs, from a seed (--seed) that is printed. Exit
    codes: 0 fine, 1 failures or cases without a result, 2 bad input, 3 nothing executed, 5 stopped by --for or Ctrl-C:
    see docs/exit-codes.md.
    """
    if chosen.only_fresh and seconds is None:
        raise UsageError("--only-fresh: --for TIME expected with it, or nothing would run")
    if chosen.fresh:
        raise UsageError("--fresh: a campaign has fresh cases for a time; --for TIME expected")
    specs = _specs(chosen)
    devices = tuple(dict.fromkeys(filter(None, map(device_of, specs))))
    shared = frozenset[str]() if scheduler or slurm else _in_software(specs)
    where = Where(workers or os.cpu_count() or 1, scheduler, slurm, devices, shared)
    it = _Campaign(
        folder, specs, chosen, minutes, store or folder / "history.sqlite",
        inf if seconds is None else time.monotonic() + seconds, continuous=seconds is not None,
    )  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {folder}: cannot be made: {e.strerror}") from e
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system ends its jobs so
    try:
        with connect(where, it.topic) as pool:
            outcome = it.run(pool)
    finally:
        signal.signal(signal.SIGTERM, before)
    leave(outcome)


def _specs(chosen: Chosen) -> list[Spec]:
    """The backends: those named, which workers need to have, or all that are here."""
    if not chosen.backends:
        for name, why in chosen.lacking.items():
            line(f"{name}: not available: {why}", err=True)
        return chosen.specs
    specs = parse_specs(chosen.backends)
    for spec in specs:
        if not registry.is_taken(registry.resolve(spec).name):
            raise UsageError(f"--backend {spec}: is not installed; known: {', '.join(registry.names())}")
    return specs


def _in_software(specs: Sequence[Spec]) -> frozenset[str]:
    """Devices of builds of ggml for which the processor computes, by a driver such as llvmpipe."""
    found: set[str] = set()
    for spec in specs:
        device, build = device_of(spec), dict(registry.resolve(spec).options).get("lib")
        if device is None or build is None:
            continue
        try:
            devices = probe(build, registry.environment(spec)).devices
        except (UnavailableError, UsageError):  # a worker says so with each of its cases
            continue
        found |= {d.name for d in devices if d.name == device and d.software}
    return frozenset(found)


@dataclass(slots=True)
class _Campaign:
    folder: Path
    specs: Sequence[Spec]
    chosen: Chosen
    minutes: float | None
    store: Path
    ends: float
    continuous: bool
    topic: str = field(default_factory=lambda: f"conform-{uuid.uuid4().hex[:12]}")
    """New for each start: a task of an earlier one may still run."""

    def run(self, pool: Pool) -> Outcome:
        """Run the legs, and write each down at its end."""
        settings = self.chosen.settings
        waiving = Waiving(settings.waivers_of(list(self.specs), self.chosen.waivers_path), today())
        known, outcome, executed, fresh = set(self._causes()), Outcome(), 0, 0
        for leg in self._legs():
            ended, stopped = run_leg(
                leg, pool, request=self._request(), topic=self.topic, isolation=limited(self.chosen.isolation),
                waiving=waiving, save=self.folder / "failures", show=_show, say=partial(line, err=True),
                ends=self.ends if leg.fresh else inf,
            )  # fmt: skip
            found = self._causes(leg.document)
            if self.minutes is not None and stopped is None and (ended.figures["tasks"] or not found):
                ended.write(in_force(settings, waiving))  # grouping takes its time
                self._group(ended, known)
            else:
                ended.take(found.values())
            ended.write(in_force(settings, waiving))
            ended.file(self.store)
            _sum_up(ended, in_force(settings, waiving))
            outcome += ended.outcome()
            executed += Totals.of(ended.results).executed
            fresh += len(ended.results) if leg.fresh else 0
            if isinstance(stopped, KeyboardInterrupt):
                line(f"interrupted; what ran is in {self.folder}, and the same command goes on with it", err=True)
                return outcome
            if stopped is not None:
                line(f"what ran is in {self.folder}, and the same command goes on with it", err=True)
                fail(str(stopped))
        if self.continuous:
            outcome += Outcome.of(Why.TIME_LIMIT, [f"time limit (--for): {counted(fresh, 'fresh result')}"])
        return outcome.without(Why.UNEXECUTED) if executed else outcome

    def _legs(self) -> Iterator[Leg]:
        if not self.chosen.only_fresh:
            yield Leg("run", self.folder, self._listed())
        seed, n = self._seed(), 0
        while self.continuous and time.monotonic() < self.ends:
            n += 1
            ids = fresh_ids(
                self.chosen.families, self.chosen.globs, self.chosen.level or LEVELS[0], ROUND, (seed + n) % LARGEST
            )
            yield Leg(f"fresh-{n:04}", self.folder, dict.fromkeys(self.specs, ids), fresh=True)

    def _listed(self) -> dict[Spec, list[str]]:
        chosen = self.chosen
        levels = {s: chosen.settings.level(s, chosen.level) for s in self.specs}
        listed = {n: list(dict.fromkeys(chosen.at(n))) for n in set(levels.values())}
        return {s: listed[n] for s, n in levels.items()}

    def _seed(self) -> int:
        """Of fresh cases; the same at each start in this folder."""
        if not self.continuous:
            return 0
        kept = self.folder / "seed"
        if self.chosen.seed is not None:
            seed = self.chosen.seed
        elif kept.is_file() and re.fullmatch("[0-9]{1,9}", text := kept.read_text(encoding="utf-8").strip(), re.ASCII):
            seed = int(text)
        else:
            seed = new_seed()
            kept.write_text(f"{seed}\n", encoding="utf-8")
        line(f"fresh cases: --seed {seed}", err=True)
        return seed

    def _request(self) -> dict[str, JSON]:
        """The words that must be the same where a campaign goes on."""
        s = self.chosen
        return {
            "backends": [str(b) for b in self.specs], "families": list(s.families), "cases": list(s.globs),
            "level": s.level, "seed": s.seed, "waivers": str(s.waivers_path or ""),
        }  # fmt: skip

    def _causes(self, only: Path | None = None) -> dict[tuple[str, str], Cause]:
        """(id, backend) -> cause, of the run files that an earlier start left in the folder, or of one of them."""
        found: dict[tuple[str, str], Cause] = {}
        for path in [only] if only else sorted(self.folder.glob("*.json")):
            document = read_document(path, named=False) if path.is_file() else None
            for row in document.body.get("causes", ()) if document else ():
                found[row["id"], row["backend"]] = Cause.from_json(row)
        return found

    def _group(self, ended: Ended, known: set[tuple[str, str]]) -> None:
        """Find causes of a leg's failures, and say which no earlier leg had."""
        minutes, say = self.minutes or 0, partial(line, err=True)
        ended.causes = analyse(
            ended.results,
            {str(s): s for s in self.specs},
            isolation=self.chosen.isolation,
            seconds=60 * minutes,
            progress=say,
        )
        ended.results = assigned(ended.results, ended.causes)
        new = [c for c in ended.causes if (c.id, c.backend) not in known]
        known |= {(c.id, c.backend) for c in new}
        if new:
            line(f"{ended.leg.name}: {len(new)} causes that no leg had before:")
        for text in cause_lines(new):
            line(text)


def _show(result: Result) -> None:
    if result.verdict in FAILURES:
        click.echo(sentence(result))
        if result.saved:
            line(f"  reproduce: {command(result)}")


def _sum_up(ended: Ended, settings: dict[str, JSON] | None) -> None:
    groups: dict[str, list[Result]] = {}
    for r in ended.results:
        groups.setdefault(r.backend, []).append(r)
    for text in lines_of(settings):
        line(text)
    click.echo(table_of(groups, {}))
    for text in report(ended.problems[1]):
        click.echo("\n".join(map(str, text.split("\n"))))
    line(f"{ended.leg.document}: {len(ended.results):,} results")
