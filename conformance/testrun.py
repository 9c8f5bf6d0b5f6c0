"""A run: which cases on which backends, what came of each pair, and its record.

`conform run`, `conform repro` and pytest hand cases out and show results in ways of their own. What was asked, what is
missing, waivers, the record and the outcome are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from conformance.backend.registry import Spec
from conformance.case.case import JSON, Case
from conformance.causes.cause import Cause, assigned
from conformance.ggml.text import printable
from conformance.judge.outcome import Outcome, Why, judge
from conformance.judge.verdict import FAILURES, Missing, MissingCause, Request, Result
from conformance.report.journal import Journal, Partial
from conformance.report.runfile import record, write_json
from conformance.run.isolation.isolate import DEFAULT, Isolation
from conformance.run.oracle import Oracle
from conformance.run.runner import Runner
from conformance.run.session import expected, writeahead
from conformance.run.session.precision import advice
from conformance.run.session.select import FOLDER, build, case_ids, choose, fresh_ids, new_seed, record_of, reseeded
from conformance.run.session.settings import Settings, Waiving, in_force, report, today
from conformance.run.session.shard import WHOLE, Shard
from conformance.suite.family import LEVELS, Level

ENDED = "the run ended before it"


@dataclass(frozen=True)
class Chosen:
    """What the user asked for on either command line: a field is the `dest` of an option (`cli.options`)."""

    backends: Sequence[str] = ()
    """Specs; all installed ones where none is named."""
    stage: str | None = None
    families: Sequence[str] = ()
    globs: Sequence[str] = ()
    level: Level | None = None
    seed: int | None = None
    """Of every generated case, instead of its own."""
    fresh: int = 0
    """Number of new cases."""
    fresh_seed: int | None = None
    """From which new cases are made; None: a new one, or `seed`."""
    only_fresh: bool = False
    shard: Shard = WHOLE
    cases: Sequence[Case] = ()
    """From files, for all backends."""
    files: Sequence[str] = ()
    """Paths of these files."""
    settings: Settings = field(default_factory=Settings)
    isolation: Isolation = DEFAULT
    json_path: Path | None = None
    """Where the record goes."""
    save_failures: Path | None = None
    """The folder for failing cases; fresh ones are always kept."""
    waivers_path: Path | None = None
    """Known failures of the one backend; None: those of the settings."""
    kept: bool | None = None
    """Whether expected values are kept on disk; None: by default."""
    exact: bool = False
    """Whether results say how far they are from values without declared rounding."""

    @classmethod
    def of(cls, settings: Settings, values: Mapping[str, Any]) -> Chosen:
        """From the values of options by their `dest`; those of limits make the isolation."""
        limits = {f.name for f in fields(Isolation)}
        own = {k: v for k, v in values.items() if k not in limits}
        isolation = Isolation(**{k: v for k, v in values.items() if k in limits})
        return cls(**own, settings=settings, isolation=isolation)

    @cached_property
    def specs(self) -> list[Spec]:
        """The backends that this machine has. UsageError for an unknown name, option or stage."""
        return self._chosen[0]

    @cached_property
    def lacking(self) -> dict[str, str]:
        """Backend -> why this machine lacks it."""
        return {str(spec): why for spec, why in self._chosen[1].items()}

    @cached_property
    def _chosen(self) -> tuple[list[Spec], dict[Spec, str]]:
        return choose(self.backends, self.stage, self.isolation)

    @cached_property
    def levels(self) -> dict[Spec, Level]:
        """The level of each backend."""
        return {spec: self.settings.level(spec, self.level) for spec in self.specs}

    @property
    def by_id(self) -> bool:
        """Whether ids of a level run, beside cases of files and fresh ones."""
        return (not self.files or bool(self.families or self.globs)) and not self.only_fresh

    @property
    def is_whole_level(self) -> bool:
        """Whether no option leaves out cases of a level."""
        return self.by_id and not self.families and not self.globs

    @cached_property
    def _ids(self) -> dict[Level, list[str]]:
        used = {self.level or LEVELS[0], *self.levels.values()} if self.by_id else set()
        return {n: self.at(n) for n in sorted(used, key=LEVELS.index)}

    def at(self, level: Level) -> list[str]:
        """The ids that a level lists, of all shards. UsageError as of `ids`."""
        return [reseeded(i, self.seed) for i in case_ids(self.families, self.globs, level)]

    @cached_property
    def fresh_cases(self) -> list[str]:
        """Ids of new cases, which no level lists, of this shard."""
        level = self.level or LEVELS[0]
        new = fresh_ids(self.families, self.globs, level, self.fresh, self.seed_of_fresh) if self.fresh else []
        return self.shard.share(new)

    @cached_property
    def seed_of_fresh(self) -> int:
        """The seed from which `fresh_cases` were made."""
        chosen = self.seed if self.fresh_seed is None else self.fresh_seed
        return new_seed() if chosen is None else chosen

    @cached_property
    def ids(self) -> dict[Spec, list[str]]:
        """Backend -> the ids of this shard, those of files apart. UsageError for an unknown family, or a glob that
        matches no case.
        """
        return {s: list(dict.fromkeys([*self.shard.share(self._ids.get(n, ())), *self.fresh_cases]))
                for s, n in self.levels.items()}  # fmt: skip

    def listed(self, spec: Spec) -> int:
        """The number of ids that the level of a backend lists, in all shards."""
        return len(self._ids.get(self.levels[spec], ()))

    @cached_property
    def own_cases(self) -> list[Case]:
        """The cases of files that are of this shard."""
        share = frozenset(self.shard.share(c.id for c in self.cases))
        return [c for c in self.cases if c.id in share]

    def to_json(self) -> dict[str, JSON]:
        """As the record of a run has it."""
        return record_of(self.levels, self.families, self.globs, self.seed, files=self.files, shard=str(self.shard))

    def extra(self) -> dict[str, JSON]:
        """What the record says of the selection, beside its results."""
        every = [*(c.id for c in self.cases), *(i for ids in self._ids.values() for i in ids)]
        shard = {} if self.shard == WHOLE else {"shard": self.shard.to_json(every)}
        return {"selection": self.to_json(), **shard}


class TestRun:
    """What was asked of each backend, what came of it, and the record of that."""

    __test__ = False  # no class of tests

    def __init__(
        self,
        chosen: Chosen,
        *,
        journal: Journal | None = None,
        waivers: Waiving | None = None,
        recovers: bool = True,
        on_hang: Callable[[], None] | None = None,
    ) -> None:
        """Open no backend yet.

        Args:
            chosen: what runs.
            journal: has what an earlier start gave, and takes each new result.
            waivers: known failures; None: those that were chosen.
            recovers: whether cases that an interrupted run left are looked for.
            on_hang: called before the process ends as a backend in it does not return; None: the record is written.
        """
        self.chosen, self._journal = chosen, journal
        settings = chosen.settings
        if waivers is None:
            waivers = Waiving(settings.waivers_of(chosen.specs, chosen.waivers_path), today())
        self.waiving, self.in_force = waivers, in_force(settings, waivers)
        save = chosen.save_failures or (Path(FOLDER) if chosen.fresh else None)
        self._folder = save or writeahead.default_folder()
        self.left = self.recovered() if recovers else []
        """Sentences about what an interrupted run left."""
        self._on_hang = on_hang
        self.runner = Runner(
            save_failures=save,
            isolation=chosen.isolation,
            write_ahead=self._folder,
            waiving=self.waiving,
            on_hang=self._hung,
            oracle=Oracle(exact=chosen.exact, kept=expected.here(chosen.kept)),
        )
        self.request = Request()
        self.results: list[Result] = []
        self.reasons: dict[tuple[str, str], str] = {}
        """Backend and case, or "" for all of its cases -> why there is no result."""
        self.missing: list[Missing] = []
        self.causes: list[Cause] | None = None
        """None: nobody looked for them."""
        self.waiver_problems: tuple[list[str], list[str]] = [], []
        self.faults: list[str] = []
        """What went wrong with the record."""
        self.gating = False
        """Whether a backend on which nothing passed fails the run."""
        self._partial: Partial | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a record or a journal was asked for."""
        return self.chosen.json_path is not None or self._journal is not None

    def ask(self, request: Request, *, gating: bool, writes: bool = True) -> None:
        """Know what must have a result, before anything runs. `writes`: whether this process writes the record."""
        self.request, self.gating = request, gating
        if self.chosen.json_path is not None and self._journal is None and writes:
            self._partial = Partial(self.chosen.json_path, request)
            if self._partial.left:
                self.left.append(self._partial.left)

    def keep(self, results: Sequence[Result]) -> None:
        """Write new results down at once."""
        for place in (self._journal, self._partial):
            if place is not None:
                place.add(results)

    def take(self, backend: Spec, case_id: str) -> Result | None:
        """The result that an earlier start gave, once."""
        return None if self._journal is None else self._journal.take(str(backend), case_id)

    def explain(self, causes: list[Cause]) -> None:
        """Take over the causes of its failures."""
        self.causes, self.results = causes, assigned(self.results, causes)

    def finish(self, why: str, cause: MissingCause, extra: Mapping[str, JSON] | None = None) -> None:
        """Find what is missing, and write the record.

        Args:
            why: why a pair has no result, where nothing more is known of it.
            cause: what `why` is.
            extra: of the document, instead of what a run's record holds.

        Raises:
            UsageError: the record cannot be written.
        """
        written = False
        try:
            self.missing = self.request.missing(self.results, why, self.reasons, cause)
            self.waiver_problems = self.waiving.problems(self.results)
            if (path := self.chosen.json_path) is not None:
                write_json(path, {**(self._record() if extra is None else extra), **self.chosen.extra()})
                written = True
        finally:
            if self._partial is not None and (message := self._partial.close(written=written)):
                self.faults.append(message)

    def _record(self) -> dict[str, JSON]:
        document = record(
            self.results, self.chosen.lacking, self.waiver_problems[0], asked=self.request, missing=self.missing,
            settings=self.in_force, gating=self.gating,
        )  # fmt: skip
        causes = {} if self.causes is None else {"causes": [c.to_json() for c in self.causes]}
        return {**document, **causes, **({} if self._journal is None else {"run": self._journal.run})}

    def unproven(self) -> dict[str, str]:
        """Backend -> a sentence, for each on which nothing passed."""
        return self.request.unproven(self.results, self.missing)

    def outcome(self) -> Outcome:
        """What decides the exit code."""
        unproven = self.unproven() if self.gating else {}
        found = judge(self.results, self.missing, waivers=self.waiver_problems[0], unproven=unproven.values())
        return found + Outcome.of(Why.BROKEN, self.faults)

    def notes(self) -> list[str]:
        """What a person should know beside totals and outcome: filed cases, undeclared precision, edits of waivers."""
        filed = (r for r in self.results if r.fresh and r.verdict in FAILURES)
        lines = [f"filed, no failure of this run: {r.verdict} {r.case} on {r.backend}: {r.saved}" for r in filed]
        lines += map(advice, self.runner.undeclared)
        lines += [text for block in report(self.waiver_problems[1]) for text in block.split("\n")]
        if not self.gating:
            lines += self.unproven().values()
        return [printable(text) for text in lines]

    def close(self) -> None:
        """Close every backend."""
        self.runner.close()

    def recovered(self) -> list[str]:
        """A sentence about each case that an interrupted process left, which is saved now."""
        return [it.sentence() for it in writeahead.recover(self._folder, build)]

    def _hung(self, spec: Spec, cases: Iterable[str], sentence: str) -> None:
        self.reasons |= {(str(spec), case): sentence for case in cases}
        if self._on_hang is None:
            self.finish(f"{ENDED}: {sentence}", MissingCause.LOST)
        else:
            self._on_hang()
