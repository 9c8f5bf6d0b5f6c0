"""`conform campaign`: a run over many workers, and for days."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import click

from conformance.backend import registry
from conformance.backend.registry import Spec
from conformance.builds.build import probe
from conformance.campaign.executor import Executor, Pool, device_of
from conformance.campaign.pool import Where, connect
from conformance.case.case import JSON
from conformance.causes.analyse import analyse
from conformance.causes.cause import Cause
from conformance.cli import options
from conformance.cli.options import chosen
from conformance.cli.output import cause_lines, fail, leave, line
from conformance.cli.run import color_option, sentence, table_of
from conformance.ggml.errors import ConformanceError, UnavailableError, UsageError
from conformance.ggml.text import printable
from conformance.judge.outcome import Outcome, Why
from conformance.judge.verdict import FAILURES, MissingCause, Request, Result, Totals, counted
from conformance.perf.history import History
from conformance.report.journal import Journal
from conformance.report.progress import Progress
from conformance.report.runfile import read_document
from conformance.report.runs import command
from conformance.run.session.select import LARGEST, fresh_ids, new_seed
from conformance.run.session.settings import lines_of, report
from conformance.suite.family import LEVELS
from conformance.testrun import Chosen, TestRun

ENDED = "the campaign ended before it"
ROUND = 2000
"""Fresh cases of each backend in one leg: the size of its files."""


@click.command()
@click.option("-o", "folder", type=options.Folder, metavar="DIR", default="campaign", show_default=True,
              help="Where everything goes; what was begun there with the same words goes on.")  # fmt: skip
@chosen(options.BACKEND, options.CONFIG, *options.SELECTION, options.ONLY_FRESH, options.WAIVERS, *options.LIMITS)
@click.option("--for", "seconds", type=options.duration, metavar="TIME",
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
    chosen = replace(chosen, elsewhere=True)
    for name, why in chosen.lacking.items():
        line(f"{name}: not available: {why}", err=True)
    devices = tuple(dict.fromkeys(filter(None, map(device_of, chosen.specs))))
    shared = frozenset[str]() if scheduler or slurm else _in_software(chosen.specs)
    where = Where(workers or os.cpu_count() or 1, scheduler, slurm, devices, shared)
    ends = inf if seconds is None else time.monotonic() + seconds
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"-o {folder}: cannot be made: {e.strerror}") from e
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system ends its jobs so
    try:
        with connect(where) as pool:
            outcome = _Campaign(folder, chosen, minutes, store or folder / "history.sqlite").run(pool, ends)
    finally:
        signal.signal(signal.SIGTERM, before)
    leave(outcome)


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


class _Campaign:
    """A folder of legs: one journal and one run file each; the first has the chosen cases, others fresh ones."""

    def __init__(self, folder: Path, chosen: Chosen, minutes: float | None, store: Path) -> None:
        self._folder, self._minutes, self._store = folder, minutes, store
        self._chosen = replace(chosen, save_failures=folder / "failures")
        self._known = set(self._causes(folder.glob("*.json")))
        self._stopped: BaseException | None = None

    def run(self, pool: Pool, ends: float) -> Outcome:
        """Run the legs, each with a run file at its end; fresh ones until `ends`, where that is a time."""
        chosen, outcome, executed, fresh = self._chosen, Outcome(), 0, 0
        if not chosen.only_fresh:
            it = self._leg("run", pool, {s: list(dict.fromkeys(ids)) for s, ids in chosen.ids.items()})
            outcome, executed = it.outcome(), Totals.of(it.results).executed
        seed, n = self._seed() if ends < inf else 0, 0
        while self._stopped is None and time.monotonic() < ends < inf:
            n += 1
            level = chosen.level or LEVELS[0]
            ids = fresh_ids(chosen.families, chosen.globs, level, ROUND, (seed + n) % LARGEST)
            it = self._leg(f"fresh-{n:04}", pool, dict.fromkeys(chosen.specs, ids), fresh=True, ends=ends)
            outcome += it.outcome()
            executed += Totals.of(it.results).executed
            fresh += len(it.results)
        if self._stopped is not None:
            text = f"what ran is in {self._folder}, and the same command goes on with it"
            if not isinstance(self._stopped, KeyboardInterrupt):
                line(text, err=True)
                fail(str(self._stopped))
            line(f"interrupted; {text}", err=True)
            return outcome
        if ends < inf:
            outcome += Outcome.of(Why.TIME_LIMIT, [f"time limit (--for): {counted(fresh, 'fresh result')}"])
        return outcome.without(Why.UNEXECUTED) if executed else outcome

    def _leg(
        self, name: str, pool: Pool, ids: Mapping[Spec, Sequence[str]], *, fresh: bool = False, ends: float = inf
    ) -> TestRun:
        """Run a leg to its end, or to a clean stop, which is in `_stopped` then."""
        path = self._folder / f"{name}.json"
        found = self._causes([path])
        with closing(Journal(self._folder / f"{name}.journal", {**self._request(), "leg": name})) as journal:
            it = TestRun(replace(self._chosen, json_path=path), journal=journal, recovers=False)
            it.ask(Request({str(s): own for s, own in ids.items()}), gating=not fresh)
            progress, say, began = Progress(), partial(line, err=True), time.monotonic()

            def show(result: Result) -> None:
                progress.clear()
                _show(result)

            clock = time.monotonic
            work = Executor(pool, it, ids, fresh=fresh, say=say, show=show, ends=ends, clock=clock)
            why, cause = ENDED, MissingCause.LOST
            try:
                with progress.of(lambda: f"{name}: {work}"):
                    work.run()
                if time.monotonic() > ends:
                    why, cause = "time limit (--for)", MissingCause.TIME_LIMIT
            except KeyboardInterrupt as e:
                self._stopped, why, cause = e, "interrupted", MissingCause.INTERRUPTED
            except ConformanceError as e:
                self._stopped, why = e, f"{ENDED}: {e}"
            if fresh and self._stopped is None:  # cases that the time left out were never handed to anybody
                ran = {(r.backend, r.case) for r in it.results}
                it.request = Request({
                    b: [i for i in own if (b, i) in ran or (b, "") in it.reasons] for b, own in it.request.cases.items()
                })  # fmt: skip
            it.about = {
                **_environment(work.environments.values()),
                "campaign": {
                    "leg": name, "tasks": work.tasks, "deaths": work.deaths, "seconds": time.monotonic() - began,
                    "busy": work.busy, "workers": sorted(work.environments),
                },
            }  # fmt: skip
            self._end(it, found, why, cause, ran=bool(work.tasks))
        return it

    def _end(
        self, it: TestRun, found: Mapping[tuple[str, str], Cause], why: str, cause: MissingCause, *, ran: bool
    ) -> None:
        """Write the run file of a leg; group its failures, unless an earlier start did."""
        group = self._minutes is not None and self._stopped is None and (ran or not found)
        if group:
            it.finish(why, cause)  # grouping takes its time
            self._group(it)
        else:
            failing = {(r.backend, r.case) for r in it.results if r.verdict in FAILURES}
            it.explain([c for c in found.values() if all((c.backend, i) in failing for i in c.cases)])
        it.finish(why, cause)
        path = it.chosen.json_path
        document = read_document(path) if path else None
        assert document is not None
        with closing(History(self._store, create=True)) as history:
            history.add(document.body)
        for text in lines_of(it.in_force):
            line(text)
        groups = {str(s): [r for r in it.results if r.backend == str(s)] for s in it.chosen.specs}
        click.echo(table_of({name: rows for name, rows in groups.items() if rows}, {}))
        for text in map(printable, report(it.waiver_problems[1])):
            line(text)
        line(f"{path}: {len(it.results):,} results")

    def _group(self, it: TestRun) -> None:
        """Find causes of a leg's failures, and say which no earlier leg had."""
        specs, seconds = {str(s): s for s in it.chosen.specs}, 60 * (self._minutes or 0)
        say = partial(line, err=True)
        it.explain(analyse(it.results, specs, isolation=it.chosen.isolation, seconds=seconds, progress=say))
        new = [c for c in it.causes or () if (c.id, c.backend) not in self._known]
        self._known |= {(c.id, c.backend) for c in new}
        if new and it.chosen.json_path:
            line(f"{it.chosen.json_path.stem}: {len(new)} causes that no leg had before:")
        for text in cause_lines(new):
            line(text)

    def _seed(self) -> int:
        """Seed of fresh cases; each start in this folder uses the same."""
        kept = self._folder / "seed"
        if self._chosen.seed is not None:
            seed = self._chosen.seed
        elif kept.is_file() and re.fullmatch("[0-9]{1,9}", text := kept.read_text(encoding="utf-8").strip(), re.ASCII):
            seed = int(text)
        else:
            seed = new_seed()
            kept.write_text(f"{seed}\n", encoding="utf-8")
        line(f"fresh cases: --seed {seed}", err=True)
        return seed

    def _request(self) -> dict[str, JSON]:
        """The words that must be the same where a campaign goes on."""
        s = self._chosen
        return {
            "backends": [str(b) for b in s.specs], "families": list(s.families), "cases": list(s.globs),
            "level": s.level, "seed": s.seed, "waivers": str(s.waivers_path or ""),
        }  # fmt: skip

    @staticmethod
    def _causes(paths: Iterable[Path]) -> dict[tuple[str, str], Cause]:
        """(id, backend) -> cause, of run files that an earlier start left."""
        found: dict[tuple[str, str], Cause] = {}
        for path in sorted(paths):
            document = read_document(path, named=False) if path.is_file() else None
            for row in document.body.get("causes", ()) if document else ():
                found[row["id"], row["backend"]] = Cause.from_json(row)
        return found


def _show(result: Result) -> None:
    if result.verdict in FAILURES:
        click.echo(sentence(result))
        if result.saved:
            line(f"  reproduce: {command(result)}")


def _environment(machines: Iterable[dict[str, JSON]]) -> dict[str, JSON]:
    """Where cases ran, for the head of a record: the workers' machine, or a name of all of them together."""
    each = {repr(sorted(e.items(), key=str)): e for e in machines if e}.values()
    if len(each) < 2:
        return {"environment": next(iter(each))} if each else {}
    names = "\n".join(sorted(str(e.get("machine")) for e in each))
    return {"environment": {"machine": hashlib.sha256(names.encode()).hexdigest()[:12]}}
