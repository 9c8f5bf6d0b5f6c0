"""The nightly: runs the parts of a TOML file, each a command in a separate process.

They run one after the other, even if some fail; the folder of the nightly records how each ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from math import inf
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from conformance import shipped
from conformance.backend.registry import Spec
from conformance.case.case import JSON
from conformance.case.leftover import write_whole
from conformance.case.strict import expect, only, parse_toml, read_text
from conformance.ggml.errors import UsageError
from conformance.ggml.text import shell
from conformance.judge.outcome import Exit, Outcome, Why
from conformance.judge.verdict import MissingCause
from conformance.process import Tail, interrupt, spawn_command, words
from conformance.report.journal import lock
from conformance.report.progress import Progress, since
from conformance.run.session.identity import identity
from conformance.run.session.select import new_seed
from conformance.run.session.shard import Shard

STATE, LOCK = "night.json", "night.lock"
CONFORM = tuple(words("conformance.cli"))
HOUR = 3600.0
PATIENCE = 15.0
"""Seconds to wait for the processes of an earlier start."""
GRACE = 5.0
"""Seconds that a command has after SIGINT to write its results."""
LOW = 64 << 20
"""Free bytes of a disk below which a message names it."""
KEYS = ("name", "says", "command", "hours", "leaves", "shared", "last")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", re.ASCII)
_VALUE = re.compile(r"\{(\w+)\}")
_SHORT = 12
"""Digits of a digest in messages."""
_WHY = {Exit.FAILURES: Why.FAILED, Exit.NOTHING: Why.UNEXECUTED, Exit.INCOMPLETE: Why.UNDECIDED}
_ENDED = (None, Why.FAILED, Why.UNEXECUTED)
"""Outcomes of parts that do not run again."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part; `parts.toml` explains its fields."""

    name: str
    says: str
    command: Sequence[str]
    """A program and its arguments; `{name}` stands for values."""
    hours: float
    leaves: str
    shared: bool = False
    last: bool = False

    def words(self, values: Mapping[str, Sequence[object]]) -> list[str]:
        """Return the command with names replaced by `values`."""
        return list(self._words(values))

    def _words(self, values: Mapping[str, Sequence[object]]) -> Iterator[str]:
        for word in self.command:
            if name := _VALUE.fullmatch(word):
                if name[1] not in values:
                    raise UsageError(f"part {self.name}: {word}: one of {', '.join(values)} expected")
                yield from map(str, values[name[1]])
            else:
                yield word.replace("{folder}/", f"{values['folder'][0]}/")


def read_parts(path: Path) -> tuple[Part, ...]:
    """Return the parts of a TOML file; UsageError names the part and the key."""
    document = parse_toml(read_text(path), str(path))
    only(document, ("part",), str(path))
    tables = document.get("part", [])
    expect(isinstance(tables, list) and bool(tables), str(path), "[[part]] tables", tables)
    parts = tuple(_part(t, f"{path}: part {n}") for n, t in enumerate(tables, 1))
    for n, part in enumerate(parts, 1):
        others = {p.name for p in parts[: n - 1]}
        expect(part.name not in others, f"{path}: part {n} name", "another name than before", part.name)
    return parts


def _part(table: object, where: str) -> Part:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: a table expected")
    only(table, KEYS, where)
    for key in ("name", "says", "command", "hours"):
        expect(key in table, f"{where} {key}", "a value", None)
    name, given, hours = table["name"], table["command"], table["hours"]
    leaves = table.get("leaves", f"{name}.json")
    named = isinstance(name, str) and _NAME.fullmatch(name) is not None and f"{name}.json" != STATE
    expect(named, f"{where} name", "a name of letters, digits, _ and -", name)
    expect(isinstance(table["says"], str), f"{where} says", "a text", table["says"])
    listed = isinstance(given, list) and all(isinstance(word, str) for word in given)
    expect(bool(given) and (listed or isinstance(given, str)), f"{where} command", "a text or a list of texts", given)
    limited = type(hours) in (int, float) and 0 < hours < inf
    expect(limited, f"{where} hours", "a finite number over 0", hours)
    own = isinstance(leaves, str) and (not leaves or _is_inside(PurePath(leaves)))
    expect(own, f"{where} leaves", "a path inside the folder of the nightly", leaves)
    for key in ("shared", "last"):
        expect(isinstance(table.get(key, False), bool), f"{where} {key}", "true or false", table.get(key))
    command = tuple(given) if isinstance(given, list) else (*CONFORM, *given.split())
    return Part(**{**table, "leaves": leaves, "command": command, "hours": float(hours)})


def _is_inside(path: PurePath) -> bool:
    return not path.is_absolute() and ".." not in path.parts and str(path) not in {".", STATE, LOCK}


PARTS = read_parts(shipped.path("nightly", "parts.toml"))


@dataclass(slots=True)
class Done:
    """How a part ended."""

    why: Why | None = Why.INTERRUPTED
    """Why it did not succeed; None if it did."""
    says: str = ""
    """Last line of the part's output, or why it could not run."""
    seconds: float = 0.0
    command: str = ""

    @property
    def ended(self) -> bool:
        """True if the next start does not run the part again."""
        return self.why in _ENDED


def today() -> str:
    """Return the date in UTC, YYYY-MM-DD."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


@dataclass(slots=True)
class Night:
    """The folder of a nightly, and the parts that have run; its files have the results."""

    folder: Path
    asked: dict[str, JSON]
    """Options that must be the same at each start."""
    seed: int
    parts: dict[str, Done] = field(default_factory=dict)
    exit_code: int | None = None
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
            parts = {n: Done(**{**p, "why": p["why"] and Why(p["why"])}) for n, p in row["parts"].items()}
            return cls(folder, dict(row["asked"]), int(row["seed"]), parts, row["exit_code"], str(row.get("day", "")))
        except OSError as e:
            raise UsageError(f"{path}: cannot be read: {e.strerror}") from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(f"{path}: is not the state of a nightly: {type(e).__name__} {e}") from e

    def save(self) -> None:
        """Replace the state; UsageError if it cannot be written."""
        row = {"asked": self.asked, "seed": self.seed, "exit_code": self.exit_code, "day": self.day,
               "parts": {n: asdict(p) for n, p in self.parts.items()}}  # fmt: skip
        try:
            write_whole(self.folder / STATE, f"{json.dumps(row, indent=1)}\n")
        except OSError as e:
            raise UsageError(f"{self.folder / STATE}: cannot be written: {e.strerror}") from e

    def documents(self) -> list[Path]:
        """Return the run files of the parts so far."""
        named = [self.folder / f"{name}.json" for name in self.parts]
        return [p for p in named if p.is_file()]

    def run(
        self, parts: Sequence[Part], values: Mapping[str, Sequence[object]], tell: Callable[[str], None], held: int
    ) -> None:
        """Run the parts that no earlier start ended; `held` is the descriptor of the folder's lock."""
        self.exit_code, moved = None, False
        for part in parts:
            done = self.parts.get(part.name, Done())
            if done.ended and part.name in self.parts and not (part.last and moved):
                tell(f"{part.name}: {_word(done)}, in an earlier start")
                continue
            tell(f"{part.name}: {part.says}")
            self.parts[part.name] = Done(seconds=done.seconds)
            self.save()
            self.parts[part.name] = self._part(part, values, done.seconds, held)
            self.save()
            tell(f"{part.name}: {_word(self.parts[part.name])}: {self.parts[part.name].says}")
            moved = True

    def _part(self, part: Part, values: Mapping[str, Sequence[object]], before: float, held: int) -> Done:
        own = {"document": [self.folder / f"{part.name}.json"], "journal": [self.folder / f"{part.name}.journal"]}
        command = part.words({**values, **own, "documents": self.documents(), "folder": [self.folder]})
        if part.leaves:
            left = self.folder / part.leaves
            if not left.parent.resolve().is_relative_to(self.folder.resolve()):
                return Done(Why.BROKEN, f"{left}: a link leads out of the folder", before)
            try:
                left.unlink(missing_ok=True)  # of a start that was killed
            except OSError as e:
                return Done(Why.BROKEN, f"{left}: cannot be replaced: {e.strerror}", before)
        n = len(CONFORM)
        shown = shell(["conform", *command[n:]] if tuple(command[:n]) == CONFORM else command)
        try:
            with Progress().of(since(part.name)):
                ended = run(command, self.folder / f"{part.name}.log", part.hours * HOUR, held)
        except OSError as e:
            return Done(Why.BROKEN, f"no process could be started: {e.strerror}", before, shown)
        why, says = self._judge(part, ended)
        if why is Why.BROKEN and (free := shutil.disk_usage(self.folder).free) < LOW:
            says += f"; the disk of {self.folder} is full: {free >> 20} MiB are free"
        return Done(why, says, before + ended.seconds, shown)

    def _judge(self, part: Part, ended: Ended) -> tuple[Why | None, str]:
        """Return why a part did not succeed, and its last line.

        Python exits with 1 after a traceback and after failures, so only the part's file proves that it ran. The last
        part repeats the exit code of the others, which has been counted already.
        """
        if ended.timed_out:
            return Why.TIME_LIMIT, f"ended after {ended.seconds:.0f} s"
        path = self.folder / part.leaves
        if ended.code not in (0, *_WHY) or (ended.code == Exit.FAILURES and not part.leaves):
            how = f"signal {ended.code - 128}" if ended.code > 128 else f"exit code {ended.code}"
            return Why.BROKEN, f"{how}: {ended.last_line}"
        if not path.exists():
            return Why.BROKEN, f"exit code {ended.code}, it did not write {part.leaves}: {ended.last_line}"
        if part.last:
            return None, ended.last_line
        if fault := _fault(path):
            return Why.BROKEN, f"exit code {ended.code}, {fault}: {ended.last_line}"
        return _WHY.get(Exit(ended.code)), ended.last_line

    def outcome(self, parts: Sequence[Part]) -> Outcome:
        """Return the reasons of all parts."""
        found = Outcome()
        for part in parts:
            done = self.parts.get(part.name, Done())
            if done.why is not None:
                found += Outcome.of(done.why, [f"{part.name}: {done.why}: {done.says}".removesuffix(": ")])
        return found


def _word(done: Done) -> str:
    return "fine" if done.why is None else str(done.why)


def _fault(path: Path) -> str:
    """Return the fault of the run file that a part left, or an empty text."""
    try:
        read: JSON = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        return f"its run file cannot be read ({e})"
    missing = read.get("missing") if isinstance(read, dict) else None
    lost = [m for m in missing or () if not isinstance(m, dict) or m.get("cause") in {None, MissingCause.LOST.value}]
    n = sum(c if isinstance(m, dict) and isinstance(c := m.get("count"), int) else 1 for m in lost)
    return f"{n:,} requested cases have no result" if n else ""


def share(parts: Sequence[Part], shard: Shard) -> list[Part]:
    """Return the parts of a shard: those split by cases, and its share of the others."""
    whole = [p for p in parts if not p.shared and not p.last]
    return [p for p in parts if p not in whole or whole.index(p) % shard.of == shard.index - 1]


def content(parts: Sequence[Part], backends: Mapping[Spec, object]) -> dict[str, JSON]:
    """Return the short digests of what a nightly runs, by name; `backends` -> its waivers."""
    found = {"parts": hashlib.sha256(repr(parts).encode()).hexdigest()[:_SHORT]}
    for spec, known in backends.items():
        digests = identity(spec, known).to_json()
        found |= {f"{name} of {spec}": str(digest)[:_SHORT] for name, digest in digests.items()}
    return found


def unfinished(nights: Path, asked: dict[str, JSON], seed: int | None) -> Path | None:
    """Return the newest unfinished folder in `nights` with the same options."""
    for path in sorted(nights.glob(f"*/{STATE}"), reverse=True):
        with suppress(UsageError):
            night = Night.read(path.parent)
            if night.exit_code is None and night.asked == asked and seed in {None, night.seed}:
                return night.folder
    return None


def hold(folder: Path) -> int:
    """Lock `folder` for this process and its children; UsageError if another nightly has it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    if not lock(descriptor, PATIENCE):
        os.close(descriptor)
        raise UsageError(f"{folder}: another nightly is running there")
    return descriptor


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code of the command; 128 + the signal that ended it."""
    seconds: float
    timed_out: bool
    tail: str
    """The end of its output."""

    @property
    def last_line(self) -> str:
        """The last line that is not blank."""
        return next((line.strip() for line in reversed(self.tail.splitlines()) if line.strip()), "")


def run(command: Sequence[str], log: Path, limit: float, held: int) -> Ended:
    """Run `command` to its end, or for `limit` seconds; append its output to `log`.

    An exception meanwhile, such as Ctrl-C, ends the command and everything it started. The command and the process
    that guards it inherit the descriptor `held`, so the lock lasts as long as any of them.
    """
    began = time.monotonic()
    popen = spawn_command(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        pass_fds=(held,),
    )
    stream = cast("BinaryIO", popen.stdout)
    tail = Tail(stream, partial(_append, log))
    timed_out = False
    try:
        popen.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        interrupt(popen, GRACE)  # first as a user would, so that it can write down what it has
        tail.join(GRACE)
        stream.close()
    code = popen.returncode
    return Ended(code if code >= 0 else 128 - code, time.monotonic() - began, timed_out, tail.text)


def _append(log: Path, data: bytes) -> None:
    with suppress(OSError), log.open("ab") as f:  # a full disk does not stop the command
        f.write(data)
