"""The nightly: a fixed list of `conform` commands, whose records are in one folder.

Each command is a process of its own. A finished step does not run again in its folder; an unfinished one goes on with
the journal of its run.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from math import inf
from pathlib import Path

from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.case.leftover import write_whole
from conformance.ggml.errors import UsageError
from conformance.judge.outcome import Exit, Outcome, Why
from conformance.judge.verdict import elapsed
from conformance.process import interrupt, spawn_command, words
from conformance.process.lock import lock
from conformance.process.memory import cores
from conformance.report.progress import Progress, since
from conformance.report.runfile import read_document
from conformance.run.session.identity import identity
from conformance.run.session.select import new_seed
from conformance.run.session.shard import Shard

STATE, LOCK, PAGE = "night.json", "night.lock", "page"
PATIENCE = 15.0
"""Seconds to wait for the processes of an earlier start."""
GRACE = 5.0
"""Seconds that a command has after SIGINT to write its results."""
_SHORT = 12
"""Digits of a digest in messages."""
_WHY = {Exit.OK: None, Exit.FAILURES: Why.FAILED, Exit.NOTHING: Why.UNEXECUTED, Exit.INCOMPLETE: Why.UNDECIDED}
_ENDED = (None, Why.FAILED, Why.UNEXECUTED)
"""Outcomes of steps that do not run again."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a nightly."""

    level: str = "standard"
    backends: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    shard: Shard = field(default_factory=Shard)
    budget: float = 0.0
    """Seconds for fresh cases."""
    against: str | None = None
    jobs: int = field(default_factory=cores)
    """Number of lanes of each part that runs cases."""
    limit: float = 6 * 3600.0
    """Seconds after which a part is ended."""

    def to_json(self, tested: Mapping[Spec, object] | None = None) -> dict[str, JSON]:
        """Encode what decides results as name -> value.

        `tested`, backend -> its waivers, adds short digests.
        """
        found = {**asdict(self), "backends": list(self.backends), "families": list(self.families)}
        del found["jobs"], found["limit"]
        found["shard"] = str(self.shard)
        for spec, waivers in (tested or {}).items():
            digests = identity(spec, waivers).to_json()
            found |= {f"{name} of {spec}": str(digest)[:_SHORT] for name, digest in digests.items()}
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a nightly."""

    name: str
    says: str
    """Description for people."""
    words: Sequence[str]
    """Arguments of `conform`."""
    shared: bool = False
    """True if each shard runs a share of its cases; other steps run in one of the shards."""
    last: bool = False
    """True if it reads the records of the others: it runs in each shard, and again after them."""
    limit: float = inf
    """Seconds after which it is ended; the next start continues it."""


def steps(folder: Path, options: Options, seed: int, trend: Path) -> list[Step]:
    """Return the steps, in order; the page shows trends of the records in `trend`."""
    tested = [word for b in options.backends for word in ("--backend", b)]
    chosen = [*tested, *(word for f in options.families for word in ("--family", f))]
    level, share = ["--level", options.level], ["--shard", str(options.shard)]
    fresh = ["--only-fresh", "--fresh", "30", "--seed", str(seed), "--budget", f"{options.budget:f}s"]
    against = ["--against", options.against] if options.against else []

    def run(name: str, *more: str) -> list[str]:
        kept = ["--save-failures", str(folder / "failures"), "--journal", str(folder / f"{name}.journal")]
        lanes = ["--jobs", str(options.jobs)]
        return ["run", *more, *lanes, *kept, "--json", str(folder / f"{name}.json")]

    found = [
        Step("conformance", "every listed case on every backend",
             run("conformance", *level, *chosen, *share, "--causes", "30"), shared=True),
        Step("seeded", "level smoke under the seed of this night, so that no answer can be known before",
             run("seeded", "--level", "smoke", *chosen, "--seed", str(seed))),
        Step("fresh", "new random cases for --budget; a failing one is saved and does not fail the run",
             run("fresh", *level, *chosen, *share, *fresh), shared=True),
        Step("golden", "golden outputs computed again, or the named backends judged by them",
             ["golden", "verify", *tested, "--json", str(folder / "golden.json")]),
        Step("audit", "answers of backends about weights in buffers, compared with runs",
             run("audit", "--family", "audit", "--level", "standard", *tested)),
        Step("perf", "speed of every work unit",
             ["perf", "run", *level, *tested, "--json", str(folder / "perf.json")]),
        Step("gates", "speed against its limits",
             ["perf", "gate", *against, "--json", str(folder / "gates.json")]),
    ]  # fmt: skip
    page = ["report", str(folder), *level, "--trend", str(trend), "-o", str(folder / PAGE)]
    return [replace(s, limit=options.limit) for s in (*found, Step("report", "the page", page, last=True))]


def share(every: Sequence[Step], shard: Shard) -> list[Step]:
    """Return the steps of a shard: those split by cases, and its share of the others."""
    whole = [s for s in every if not s.shared and not s.last]
    return [s for s in every if s not in whole or whole.index(s) % shard.of == shard.index - 1]


@dataclass(slots=True)
class Done:
    """How a step ended."""

    why: Why | None = Why.INTERRUPTED
    """Why it did not succeed; None if it did."""
    says: str = ""
    """Last line of the step's output."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return "fine" if self.why is None else str(self.why)


def today() -> str:
    """Return the date in UTC, YYYY-MM-DD."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


@dataclass(slots=True)
class Night:
    """The folder of a nightly, and the steps that have run; its files have the results."""

    folder: Path
    asked: dict[str, JSON]
    """Options and content, which must be the same at each start."""
    seed: int
    done: dict[str, Done] = field(default_factory=dict)
    exit_code: int | None = None
    """None if it has not ended yet, or was interrupted."""
    day: str = field(default_factory=today)
    """Date (UTC) of its first start."""

    @classmethod
    def begin(cls, folder: Path, asked: dict[str, JSON], seed: int | None, *, resumes: bool) -> Night:
        """Continue the nightly in `folder`, or start one.

        UsageError if it had other options or tested other builds, or unless it `resumes`, is of another day.
        """
        if not (folder / STATE).exists():
            return cls(folder, asked, new_seed() if seed is None else seed)
        night = cls.read(folder)
        if night.day != today() and not resumes:
            text = f"began on {night.day or 'an unknown day'}; continue it with --continue"
            raise UsageError(f"{folder}: the nightly in this folder {text}, or choose another folder with -o")
        now = {**asked, "seed": night.seed if seed is None else seed}
        was = {**night.asked, "seed": night.seed}
        for key, value in now.items():
            if was.get(key) != value:
                text = f"was started with {key} {was.get(key)!r}, this one with {value!r}"
                raise UsageError(f"{folder}: the nightly in this folder {text}; choose another folder with -o")
        return night

    @classmethod
    def read(cls, folder: Path) -> Night:
        """Return the nightly in `folder`; UsageError if its state cannot be read."""
        path = folder / STATE
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            done = {n: Done(**{**d, "why": d["why"] and Why(d["why"])}) for n, d in row["done"].items()}
            return cls(folder, dict(row["asked"]), int(row["seed"]), done, row["exit_code"], str(row["day"]))
        except OSError as e:
            raise UsageError(f"{path}: cannot be read: {e.strerror}") from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(f"{path}: is not the state of a nightly: {type(e).__name__} {e}") from e

    def save(self) -> None:
        """Replace the state; UsageError if it cannot be written."""
        row = {"asked": self.asked, "seed": self.seed, "exit_code": self.exit_code, "day": self.day,
               "done": {n: asdict(d) for n, d in self.done.items()}}  # fmt: skip
        try:
            write_whole(self.folder / STATE, f"{json.dumps(row, indent=1)}\n")
        except OSError as e:
            raise UsageError(f"{self.folder / STATE}: cannot be written: {e.strerror}") from e

    def run(self, chosen: Sequence[Step], tell: Callable[[str], None]) -> None:
        """Run the steps that no earlier start ended, even if some fail."""
        self.exit_code, moved = None, False
        for step in chosen:
            done = self.done.get(step.name, Done())
            if done.why in _ENDED and not (step.last and moved):
                tell(f"{step.name}: {done}, in an earlier start")
                continue
            tell(f"{step.name}: {step.says}")
            self.done[step.name] = Done(seconds=done.seconds)
            self.save()
            self.done[step.name] = now = self._step(step, done.seconds)
            self.save()
            tell(f"{step.name}: {now}: {now.says}")
            moved = True

    def _step(self, step: Step, before: float) -> Done:
        """Run a step and judge it.

        Python exits with 1 after a traceback and after failures, so only the step's file proves that it ran. The page
        repeats the exit code of the others, which has been counted already.
        """
        left = self.folder / (f"{PAGE}/index.html" if step.last else f"{step.name}.json")
        log = self.folder / f"{step.name}.log"
        began = time.monotonic()
        try:
            left.unlink(missing_ok=True)  # of a start that was killed
            with Progress().of(since(step.name)):
                code = run(step.words, log, step.limit)
        except subprocess.TimeoutExpired:
            text = f"ended after {elapsed(step.limit)} (--limit); the next start continues it"
            return Done(Why.TIME_LIMIT, text, before + time.monotonic() - began)
        except OSError as e:
            return Done(Why.BROKEN, f"{e.filename or 'no process'}: {e.strerror}", before)
        says = next((s for line in reversed(_tail(log)) if (s := line.strip())), "")
        seconds = before + time.monotonic() - began
        if code not in _WHY:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return Done(Why.BROKEN, f"{how}: {says}", seconds)
        if fault := _fault(left):
            return Done(Why.BROKEN, f"exit code {code}, {fault}: {says}", seconds)
        return Done(None if step.last else _WHY[Exit(code)], says, seconds)

    def outcome(self, chosen: Sequence[Step]) -> Outcome:
        """Return the reasons of all steps."""
        found = Outcome()
        for step in chosen:
            done = self.done.get(step.name, Done())
            if done.why is not None:
                found += Outcome.of(done.why, [f"{step.name}: {done}: {done.says}".removesuffix(": ")])
        return found


def run(arguments: Sequence[str], log: Path, limit: float = inf) -> int:
    """Run `conform` for at most `limit` seconds and append its output to `log`.

    Returns its exit code, or minus the signal that ended it. An exception meanwhile, such as Ctrl-C, ends the command
    and everything it started.

    Raises:
        subprocess.TimeoutExpired: the time is over.
    """
    with log.open("ab") as stream:
        command = [*words("conformance.cli"), *arguments]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        popen = spawn_command(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=env)
    try:
        popen.wait(None if limit == inf else limit)
    finally:
        interrupt(popen, GRACE)  # first as a user would, so that it can write down what it has
    return popen.returncode


def _fault(left: Path) -> str:
    """Return the fault of the file that a step left, or an empty text."""
    if not left.exists():
        return f"it did not write {left.name}"
    try:
        if left.suffix == ".json":
            read_document(left)
    except UsageError as e:
        return str(e)
    return ""


def _tail(log: Path) -> list[str]:
    with log.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - (1 << 14)))
        return f.read().decode(errors="replace").splitlines()


def unfinished(nights: Path, asked: dict[str, JSON], seed: int | None) -> Path | None:
    """Return the newest unfinished folder in `nights` with the same options."""
    for path in sorted(nights.glob(f"*/{STATE}"), reverse=True):
        with suppress(UsageError):
            night = Night.read(path.parent)
            if night.exit_code is None and night.asked == asked and seed in {None, night.seed}:
                return night.folder
    return None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock `folder` inside the block; UsageError if another nightly has it."""
    with (folder / LOCK).open("ab") as f:
        if not lock(f.fileno(), PATIENCE):
            raise UsageError(f"{folder}: another nightly is running there")
        yield
