"""A leg: one journal, one run file. The first leg has the cases that were chosen, each later one fresh random cases."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.causes.cause import Cause, assigned
from conformance.ggml.errors import ConformanceError
from conformance.judge.outcome import Outcome, judge
from conformance.judge.verdict import FAILURES, Missing, MissingCause, Request, Result
from conformance.perf.history import History
from conformance.report.journal import Journal
from conformance.report.progress import Progress
from conformance.report.runfile import read_document, record, write_json
from conformance.run.isolation.isolate import Isolation
from conformance.run.session import failures
from conformance.run.session.select import build
from conformance.run.session.settings import Waiving

from .campaign import Campaign, Pool

ENDED = "the campaign ended before it"


@dataclass(frozen=True, slots=True)
class Leg:
    """What a leg runs, and where its files go."""

    name: str
    """`run`, `fresh-0001`, …"""
    folder: Path
    asked: Mapping[Spec, Sequence[str]]
    fresh: bool = False
    """Its cases are new: a failure is filed and fails nothing, and what the time leaves out was not asked."""

    @property
    def document(self) -> Path:
        """Its run file."""
        return self.folder / f"{self.name}.json"

    @property
    def journal(self) -> Path:
        """Its results as they came."""
        return self.folder / f"{self.name}.journal"


@dataclass(slots=True)
class Ended:
    """A leg that ended, by itself or not."""

    leg: Leg
    request: Request
    results: list[Result]
    missing: list[Missing]
    environments: list[dict[str, JSON]]
    """Of the workers' machines, each once."""
    figures: dict[str, JSON]
    run: str
    problems: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    """Of waivers."""
    causes: list[Cause] = field(default_factory=list)

    def outcome(self) -> Outcome:
        """The outcome of its cases; each backend of a leg of listed cases must pass one."""
        unproven = {} if self.leg.fresh else self.request.unproven(self.results, self.missing)
        return judge(self.results, self.missing, waivers=self.problems[0], unproven=unproven.values())

    def write(self, settings: JSON) -> None:
        """Write its run file; UsageError if it cannot be written."""
        document = record(
            self.results, None, self.problems[0], asked=self.request, missing=self.missing, settings=settings,
            gating=not self.leg.fresh,
        )  # fmt: skip
        kept = document["environment"]
        document["environment"] = {**kept, **self._environment(kept)}
        causes = {"causes": [c.to_json() for c in self.causes]} if self.causes else {}
        write_json(self.leg.document, {**document, **causes, "run": self.run, "campaign": self.figures})

    def take(self, causes: Iterable[Cause]) -> None:
        """The causes that an earlier start found of the same results."""
        here = {(r.backend, r.case): r for r in self.results}
        for cause in causes:
            own = [here.get((cause.backend, i)) for i in cause.cases]
            if all(r is not None and r.verdict in FAILURES for r in own):
                self.causes.append(cause)
        self.results = assigned(self.results, self.causes)

    def file(self, store: Path) -> None:
        """Import its run file into the history; UsageError if that is damaged."""
        document = read_document(self.leg.document)
        assert document is not None
        with closing(History(store, create=True)) as h:
            h.add(document.body)

    def _environment(self, here: Mapping[str, JSON]) -> dict[str, JSON]:
        """Where the cases ran: the workers' machine, or a name of all of them together."""
        if len(self.environments) < 2:
            return dict(next(iter(self.environments), {}))
        names = "\n".join(sorted(str(e.get("machine")) for e in self.environments))
        return {"machine": hashlib.sha256(names.encode()).hexdigest()[:12], "cores": here.get("cores")}


def run_leg(
    leg: Leg,
    pool: Pool,
    *,
    request: Mapping[str, JSON],
    topic: str,
    isolation: Isolation,
    waiving: Waiving,
    save: Path,
    show: Callable[[Result], None],
    say: Callable[[str], None],
    ends: float = inf,
) -> tuple[Ended, BaseException | None]:
    """Run a leg to its end, or to a clean stop; what stopped it beside what it has.

    Args:
        leg: the cases.
        pool: the workers.
        request: the user's words, which a journal of an earlier start must have too.
        topic: under which workers send results.
        isolation: limits of backends' processes.
        waiving: known failures.
        save: the folder for failing cases.
        show: takes each result that is new.
        say: takes sentences for people.
        ends: of `time.monotonic`; no chunk starts later.
    """
    journal = Journal(leg.journal, {**request, "leg": leg.name})
    with closing(journal):
        earlier = [r for s, ids in leg.asked.items() for i in ids if (r := journal.take(str(s), i)) is not None]
        progress = Progress()

        def keep(results: Sequence[Result]) -> list[Result]:
            done = [waiving.apply(Spec.parse(r.backend), replace(r, fresh=leg.fresh)) for r in results]
            done = [_saved(save, r, say) for r in done]
            journal.add(done)
            progress.clear()
            for r in done:
                show(r)
            return done

        work = Campaign(
            pool, leg.asked, isolation=isolation, topic=topic, keep=keep, say=say, earlier=earlier, ends=ends
        )
        began, stopped = time.monotonic(), None
        try:
            with progress.of(lambda: f"{leg.name}: {work}"):
                work.run()
        except (KeyboardInterrupt, ConformanceError) as e:
            stopped = e
        return _ended(leg, work, journal.run, waiving, stopped, time.monotonic() - began, ends), stopped


def _saved(folder: Path, result: Result, say: Callable[[str], None]) -> Result:
    if result.verdict not in FAILURES or result.waived:
        return result
    try:
        return replace(result, saved=failures.save(folder, build(result.case), result))
    except (ConformanceError, OSError) as e:
        say(f"{result.case}: could not be saved: {e}")
        return result


def _ended(
    leg: Leg, work: Campaign, run: str, waiving: Waiving, stopped: BaseException | None, seconds: float, ends: float
) -> Ended:
    in_order = {str(s): {i: work.results.get((str(s), i)) for i in ids} for s, ids in leg.asked.items()}
    results = [r for found in in_order.values() for r in found.values() if r is not None]
    asked = in_order
    if leg.fresh and stopped is None:  # cases that the time left out were never handed to anybody
        asked = {b: {i: r for i, r in found.items() if r or work.why.get((b, i)) or work.why.get((b, ""))}
                 for b, found in in_order.items()}  # fmt: skip
    request = Request(asked)
    why, cause = ENDED, MissingCause.LOST
    if isinstance(stopped, KeyboardInterrupt):
        why, cause = "interrupted", MissingCause.INTERRUPTED
    elif stopped is not None:
        why = f"{ENDED}: {stopped}"
    elif time.monotonic() > ends:
        why, cause = "time limit (--for)", MissingCause.TIME_LIMIT
    figures: dict[str, JSON] = {
        "leg": leg.name, "tasks": work.tasks, "deaths": work.deaths, "seconds": seconds, "busy": work.busy,
        "workers": sorted(work.environments),
    }  # fmt: skip
    return Ended(leg, request, results, request.missing(results, why, work.why, cause),
                 _once(work.environments.values()), figures, run, waiving.problems(results))  # fmt: skip


def _once(environments: Iterable[dict[str, JSON]]) -> list[dict[str, JSON]]:
    return list({repr(sorted(e.items(), key=str)): e for e in environments if e}.values())


def limited(isolation: Isolation) -> Isolation:
    """The same limits, with a process for each backend unless the user wants none: a worker outlives what it runs."""
    return isolation if isolation.isolate is not None else replace(isolation, isolate=True)
